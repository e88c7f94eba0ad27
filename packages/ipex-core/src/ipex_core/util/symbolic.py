# SPDX-License-Identifier: Apache-2.0
"""Symbolic traces that change nothing outside of the traced module.

`torch.fx.Tracer.trace` replaces ``nn.Module.__call__``, ``nn.Module.__getattr__`` and functions of ``math`` for the
whole process while it runs: models of other threads raise, and two traces at the same time can leave them replaced.
This tracer hooks into the instances of the traced tree, and runs functions that need another ``math`` as copies.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

#: Looked up on the instance by ``nn.Module.__call__``; ``nn.Module.compile`` puts its result there.
_CALL = "_compiled_call_impl"
#: Functions that are looked through for the names they use; a forward reaches fewer.
_MOST_FUNCTIONS = 200
_CONTAINERS: tuple[Any, ...] = (list, tuple, type({}.values()))
_MISSING: Any = object()


class _Attribute(fx.Proxy):
    """A stand-in for a parameter or buffer, whose node is made when it is first used."""

    def __init__(self, tracer: Tracer, name: str) -> None:
        self.tracer = tracer
        self._name = name
        self._node: fx.Node | None = None

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        if self._node is None:
            self._node = self.tracer.create_proxy("get_attr", self._name, (), {}).node
        return self._node


def _refuse(thread: int, module: nn.Module, compiled: Any, *args: Any, **kwargs: Any) -> Any:
    """End the trace that calls a module outside of its tree; for other threads, call the module."""
    if threading.get_ident() != thread:
        return (compiled or module._call_impl)(*args, **kwargs)
    raise NameError(
        f"the {type(module).__name__} must be a submodule of the traced module: use nn.ModuleList for lists"
    )


#: Class -> its forward, and the methods that it calls, as a trace runs them.
Recordings = dict[type[nn.Module], tuple[Any, dict[str, Any]]]


class Tracer(fx.Tracer):
    """`torch.fx.Tracer` for modules, without its patches; models of other threads run as usual.

    The traced module itself must not be called by other threads meanwhile.

    Args:
        recordings: Filled by this trace; later ones, before anybody changes a function, need not do that work again.
    """

    #: The class of stand-ins.
    stand_in: type[fx.Proxy] = fx.Proxy

    def __init__(self, recordings: Recordings | None = None) -> None:
        super().__init__()
        self._recordings: Recordings = {} if recordings is None else recordings

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the stand-in for a node."""
        return self.stand_in(node, self)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace the forward of a module's class.

        Raises:
            TypeError: ``root`` is not a module, or there are ``concrete_args``.
            Exception: Whatever the forward does with a stand-in for a tensor.
        """
        if not isinstance(root, nn.Module) or concrete_args:
            raise TypeError(
                f"trace: expected a module and no concrete_args, got {type(root).__name__} and {concrete_args}"
            )
        self.root = root
        self.root_module_name = type(root).__name__
        self.submodule_paths = {module: name for name, module in root.named_modules()}
        self.graph = fx.Graph(tracer_cls=type(self))
        self.tensor_attrs = {
            value: f"{path}.{key}" if path else key
            for module, path in self.submodule_paths.items()
            for key, value in module.__dict__.items()
            if isinstance(value, (torch.Tensor, torch.ScriptObject))
        }
        function, methods = self._recording(type(root))
        function, args = self.create_args_for_root(function, True, None)
        installed: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for content, key, value in self._hooks():
                installed.append((content, key, content.get(key, _MISSING)))
                content[key] = value
            result = self._with_methods(root, methods, functools.partial(function, *args))
            annotation = inspect.get_annotations(inspect.unwrap(function)).get("return")
            self.create_node("output", "output", (self.create_arg(result),), {}, None, annotation)
        finally:
            for content, key, before in reversed(installed):
                if before is _MISSING:
                    content.pop(key, None)
                else:
                    content[key] = before
            self.submodule_paths = None
        return self.graph

    def _hooks(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Yield what must be in the ``__dict__`` of the modules: calls and stand-ins for their tensors.

        What is in there is found before what ``nn.Module.__getattr__`` would find.
        """
        kind: type[_Attribute] = type("_Attribute", (_Attribute, self.stand_in), {})
        tensors: list[tuple[str, torch.Tensor]] = list(self.root.named_parameters())
        if self.proxy_buffer_attributes:
            tensors += self.root.named_buffers()
        stand_ins = {id(tensor): kind(self, name) for name, tensor in reversed(tensors)}
        for module in self.submodule_paths or ():
            call = functools.partial(self._call, module, getattr(module, _CALL, None))
            yield module.__dict__, _CALL, call
            if isinstance(module, torch.jit.ScriptModule):  # its tensors are made at each access
                continue
            for tensors_of in (module._parameters, module._buffers):
                for key, tensor in tensors_of.items():
                    if id(tensor) in stand_ins:
                        yield module.__dict__, key, stand_ins[id(tensor)]

        for module in set(self._outside()):
            call = functools.partial(_refuse, threading.get_ident(), module, getattr(module, _CALL))
            yield module.__dict__, _CALL, call

    def _outside(self) -> Iterator[nn.Module]:
        """Yield modules that modules of the tree refer to but do not have as children."""
        inside = self.submodule_paths or {}
        for module in inside:
            for value in module.__dict__.values():
                many = value.values() if type(value) is dict else value
                for other in many if isinstance(many, _CONTAINERS) else (value,):
                    if isinstance(other, nn.Module) and other not in inside:
                        yield other

    def _call(self, module: nn.Module, compiled: Any, *args: Any, **kwargs: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if compiled is not None or type(module).__module__.startswith("torch._dynamo."):
                raise RuntimeError(
                    f"a compiled {type(module).__name__} cannot be traced: call torch.compile after ipex.optimize"
                )
            forward, methods = self._recording(type(module))
            if forward is not type(module).forward:
                methods = {**methods, "forward": forward}
            run = functools.partial(module._call_impl, *args, **kwargs)
            return self._with_methods(module, methods, run)

        return self.call_module(module, forward, args, kwargs)

    @staticmethod
    def _with_methods(module: nn.Module, methods: dict[str, Any], run: Callable[[], Any]) -> Any:
        mine = {
            name: types.MethodType(function, module)
            for name, function in methods.items()
            if name not in module.__dict__
        }
        module.__dict__.update(mine)
        try:
            return run()
        finally:
            for name in mine:
                module.__dict__.pop(name, None)

    def _recording(self, kind: type[nn.Module]) -> tuple[Any, dict[str, Any]]:
        """Return the forward of a class and the methods it calls, as copies if they need another ``math``.

        ``math.sqrt(x.size(-1))`` cannot take a stand-in: it is recorded, as are functions marked with `torch.fx.wrap`.
        """
        if kind not in self._recordings:
            self._recordings[kind] = _Recording(kind).result
        return self._recordings[kind]


class _Recording:
    """The functions that a forward reaches by their names, and copies of them with other globals."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self._kind = kind
        self._methods: dict[str, types.FunctionType] = {}
        forward: Any = kind.forward
        reached = self._reach(forward) if isinstance(forward, types.FunctionType) else []
        recorded = {
            (id(function.__globals__), name): value
            for function in reached
            for name in names_in(function.__code__)
            if (value := self._recorded(function.__globals__, name)) is not None
        }
        if not recorded:
            self.result: tuple[Any, dict[str, Any]] = forward, {}
            return
        copies: dict[Any, types.FunctionType] = {}
        scopes: dict[int, dict[str, Any]] = {}
        for function in reached:
            scope = scopes.setdefault(id(function.__globals__), dict(function.__globals__))
            copies[function] = _copy(function, scope)
        for function, copied in copies.items():
            scope = copied.__globals__
            for name in names_in(function.__code__):
                found = function.__globals__.get(name)
                if (id(function.__globals__), name) in recorded:
                    scope[name] = recorded[id(function.__globals__), name]
                elif isinstance(found, types.FunctionType) and found in copies:
                    scope[name] = copies[found]
            for cell in copied.__closure__ or ():
                found = _content(cell)
                if isinstance(found, types.FunctionType) and found in copies:
                    cell.cell_contents = copies[found]
        methods = {name: copies[function] for name, function in self._methods.items()}
        self.result = copies[forward], methods

    def _reach(self, forward: types.FunctionType) -> list[types.FunctionType]:
        todo, reached = [forward], dict[types.FunctionType, None]()
        own = {
            name: value
            for kind in reversed(self._kind.__mro__)
            for name, value in vars(kind).items()
        }
        while todo and len(reached) < _MOST_FUNCTIONS:
            function = todo.pop()
            if function in reached or (function.__module__ or "").split(".")[0] == "torch":
                continue
            reached[function] = None
            found = [_content(cell) for cell in function.__closure__ or ()]
            for name in names_in(function.__code__):
                found.append(function.__globals__.get(name))
                method = own.get(name)
                if isinstance(method, types.FunctionType) and not hasattr(nn.Module, name):
                    self._methods[name] = method
                    found.append(method)
            todo += [other for other in found if isinstance(other, types.FunctionType)]
        self._methods = {name: it for name, it in self._methods.items() if it in reached}
        return list(reached)

    @staticmethod
    def _recorded(scope: dict[str, Any], name: str) -> Any:
        """Return what takes the place of a global, or None if it can stay."""
        value = scope.get(name, getattr(builtins, name, None))
        if value is math:
            return _MATH
        if id(value) in _MATH_FUNCTIONS or (id(scope), name) in _marked_functions():
            return _leaf(value)
        return None


def _marked_functions() -> Any:
    """Return the functions marked with `torch.fx.wrap`, by the id of their globals and their name."""
    return getattr(fx._symbolic_trace, "_wrapped_fns_to_patch", {})


def _leaf(function: Any) -> Any:
    """Return a function that records its calls with stand-ins."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found: list[fx.Proxy] = []
        map_aggregate(
            (args, kwargs), lambda value: found.append(value) if isinstance(value, fx.Proxy) else 0
        )
        if not found:
            return function(*args, **kwargs)
        return found[0].tracer.create_proxy("call_function", function, args, kwargs)

    return call


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _copy(function: types.FunctionType, scope: dict[str, Any]) -> types.FunctionType:
    closure = function.__closure__
    if closure is not None:  # functions get new cells, which hold the copies
        contents = [_content(cell) for cell in closure]
        closure = tuple(
            types.CellType(content) if isinstance(content, types.FunctionType) else cell
            for cell, content in zip(closure, contents, strict=True)
        )
    copied = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, closure
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__annotations__ = function.__annotations__
    copied.__dict__.update(function.__dict__)
    return copied


def names_in(code: types.CodeType) -> set[str]:
    """Return the names that code uses: of globals and of attributes."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return names


_MATH_FUNCTIONS = {
    id(value) for name, value in vars(math).items() if name[0] != "_" and callable(value)
}
_MATH = types.ModuleType("math")
vars(_MATH).update(
    {
        name: _leaf(value) if id(value) in _MATH_FUNCTIONS else value
        for name, value in vars(math).items()
    }
)


def tracing() -> bool:
    """Return whether `torch.jit.trace` records."""
    return torch._C._get_tracing_state() is not None


def hints(shape: Sequence[Any]) -> list[int]:
    """Return sizes as plain ints without specializing the graph on symbolic ones."""
    return [s if isinstance(s, int) else int(s.node.hint or 1) for s in shape]
