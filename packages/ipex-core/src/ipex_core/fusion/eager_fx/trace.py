# SPDX-License-Identifier: Apache-2.0
"""Symbolic traces of forwards that leave the model as it is, and what must hold for a trace to stay true.

A trace runs the forward once with stand-ins for tensors. Whatever else the forward does would happen here and never
again, so ops on real tensors, random numbers and changes of the gradient mode end the trace, and attributes that the
forward writes are put back. What the forward only reads is remembered (`guards_of`) and compared at each call.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from ipex_core.module_swap.base import has_hooks
from ipex_core.module_swap.forward import Guard
from ipex_core.util.quiet import quiet
from ipex_core.util.symbolic import Tracer, names_in

__all__ = ["guards_of", "reason_against", "release", "trace", "untouched"]

_LIBRARY = ("torch.nn", "ipex_core.nn")
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_IN_PLACE_OPERATORS = (
    "iadd",
    "iand",
    "ifloordiv",
    "ilshift",
    "imatmul",
    "imod",
    "imul",
    "ior",
    "ipow",
    "irshift",
    "isub",
    "itruediv",
    "ixor",
)
_IN_PLACE = {*_IN_PLACE_OPERATORS, "setitem", "delitem", "__setitem__"}
#: Names in a forward that make it depend on more than its arguments and attributes, or on what a stand-in is not.
_TELLTALES = frozenset(
    {
        "Tensor",
        "get_autocast_dtype",
        "inference_mode",
        "is_autocast_cpu_enabled",
        "is_autocast_enabled",
        "is_grad_enabled",
        "is_inference_mode_enabled",
        "is_tensor",
        "random",
    }
)


def release(tracer: fx.Tracer) -> None:
    """Let go of the module: nodes and proxies of a trace are cycles and would keep it alive."""
    for name in (
        "root",
        "tensor_attrs",
        "submodule_paths",
        "module_stack",
        "scope",
        "root_module_name",
    ):
        tracer.__dict__.pop(name, None)


class _OnlyStandIns(TorchFunctionMode):
    """Refuses ops on anything but stand-ins; not ``strict``: only those that leave something behind."""

    def __init__(self, strict: bool) -> None:
        super().__init__()
        self.strict = strict

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name != "__get__" and not any(issubclass(kind, fx.Proxy) for kind in types):
            writes = name in ("_set_grad_enabled", "__setitem__", "__set__") or (
                name.startswith("__i") if name.endswith("__") else name.endswith("_")
            )
            if self.strict or writes or "out" in kwargs or _draws(name):
                raise RuntimeError(f"{name} does not depend on the inputs")
        return func(*args, **kwargs)


@functools.cache
def _draws(name: str) -> bool:
    """Return whether a function draws random numbers, which other threads would miss."""
    if name == "gumbel_softmax":
        return True
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, it).tags for it in overloads)


@contextlib.contextmanager
def untouched(root: nn.Module, strict: bool) -> Iterator[list[str]]:
    """Keep a trace from changing anything.

    Args:
        root: The module that is traced.
        strict: Refuse every op on real tensors, not only those that write.

    Yields:
        A list that at the end holds the names of the attributes that were changed, and changed back.
    """
    before = {module: _content(module) for module in root.modules()}
    changed: list[str] = []
    with quiet(), contextlib.ExitStack() as stack:
        for module, content in before.items():
            stack.callback(_put_back, module, content, changed)
        stack.enter_context(_OnlyStandIns(strict))
        yield changed


_Content = dict[str, tuple[Any, Any]]


def _content(module: nn.Module) -> _Content:
    """Return the attributes and, of containers, a shallow copy."""
    return {
        key: (value, value.copy() if isinstance(value, (dict, list, set)) else None)
        for key, value in module.__dict__.items()
    }


def _put_back(module: nn.Module, before: _Content, changed: list[str]) -> None:
    for key in [k for k in module.__dict__ if k not in before]:
        del module.__dict__[key]
        changed.append(key)
    for key, (value, copy) in before.items():
        if module.__dict__.get(key, before) is not value:
            module.__dict__[key] = value
            changed.append(key)
        if copy is None or _same(value, copy):
            continue
        value.clear()
        value.extend(copy) if isinstance(value, list) else value.update(copy)
        changed.append(key)


def _same(a: Any, b: Any) -> bool:
    """Return whether two containers hold the same objects."""
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(x is y and a[x] is b[y] for x, y in zip(a, b, strict=True))
    return isinstance(a, set) or all(x is y for x, y in zip(a, b, strict=True))


# --------------------------------------------------------------------------------------------------------------------
# The trace of one module


class _StandIn(fx.Proxy):
    """A proxy that records ``a += b`` as such; `torch.fx.Proxy` records an addition to a new tensor."""


def _record(function: Any) -> Any:
    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _name in _IN_PLACE_OPERATORS:
    setattr(_StandIn, f"__{_name}__", _record(getattr(operator, _name)))


class _Tracer(Tracer):
    """Traces with children as leaves and optional arguments at their defaults."""

    proxy_buffer_attributes = True
    stand_in = _StandIn

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names
        self.entered: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # An activation written as a module of its own (no parameters, no children) is looked into.
        plain = not m._parameters and not m._buffers and not m._modules and not has_hooks(m)
        library = type(m).__module__.startswith(_LIBRARY)
        if library or not plain or "." in module_qualified_name:
            return True
        self.entered.append(module_qualified_name)
        return False

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self._names]
        return root_fn, [self.root, *proxies]


def _required_arguments(module: nn.Module) -> list[str]:
    """Return the names of the arguments without default.

    Raises:
        RuntimeError: One of them can be given by keyword only.
    """
    names = []
    for parameter in inspect.signature(type(module).forward).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            raise RuntimeError(
                f"forward must not require keyword-only arguments, got {parameter.name!r}"
            )
        if parameter.default is parameter.empty:
            names.append(parameter.name)
    return names[1:]


def trace(module: nn.Module) -> tuple[fx.Graph, list[str], list[str]]:
    """Trace the forward of one module.

    Returns:
        The graph, the names of its arguments and the children that were looked into.

    Raises:
        Exception: Whatever the forward does with a stand-in for a tensor; RuntimeError if it changes the module or
            requires a keyword-only argument.
    """
    names = _required_arguments(module)
    tracer = _Tracer(names)
    try:
        with untouched(module, strict=True) as changed:
            graph = tracer.trace(module)
    finally:
        release(tracer)
    if changed:
        raise RuntimeError(
            f"forward must not change attributes of modules, got a change of {changed[0]!r}"
        )
    return graph, names, sorted(set(tracer.entered))


# --------------------------------------------------------------------------------------------------------------------
# What a rewritten forward relies on


def guards_of(module: nn.Module, entered: list[str], fused: list[str]) -> tuple[Guard, ...]:
    """Return the plain attributes that a forward may read; a trace holds their values as constants.

    Args:
        module: The module.
        entered: Children that the trace looked into.
        fused: Children whose call was fused away.
    """
    guards: list[Guard] = []
    for name in sorted(set(fused)):
        layer = module.get_submodule(name)
        if isinstance(layer, nn.GELU):
            guards.append((name, "approximate", "", layer.approximate))
    for child in ["", *entered]:
        owner = module.get_submodule(child)
        names = _names(type(owner)) - _OWN
        for name in sorted(names & owner.__dict__.keys()):
            found = _constants(owner.__dict__[name], names)
            guards += ((child, name, key, constant) for key, constant in found)
    return tuple(guards)


def _constants(value: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield a plain value under an empty key, or the plain attributes of a configuration that may be read."""
    if _plain(value):
        yield "", value
    elif hasattr(value, "__dict__") and not isinstance(
        value, (nn.Module, type, types.ModuleType, types.FunctionType)
    ):
        for key in sorted(names & vars(value).keys()):
            if _plain(vars(value)[key]):
                yield key, vars(value)[key]


#: Attributes every module has.
_OWN = frozenset(nn.Module().__dict__)


def _plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (
        isinstance(value, tuple) and all(isinstance(part, _PLAIN) for part in value)
    )


def _names(kind: type[nn.Module]) -> set[str]:
    """Return the names in the forward of a class, in its own methods and in functions next to it."""
    names: set[str] = set()
    forward = kind.forward
    todo: list[Any] = [forward]
    seen: set[Any] = set()
    while todo:
        function = inspect.unwrap(todo.pop())
        code = getattr(function, "__code__", None)
        if code is None or code in seen or len(seen) > 200:
            continue
        seen.add(code)
        found = names_in(code)
        names |= found
        for name in found:
            method = inspect.getattr_static(kind, name, None)
            for other in (
                getattr(method, "fget", method),
                getattr(function, "__globals__", {}).get(name),
            ):
                if isinstance(other, types.FunctionType) and not _of_torch(other):
                    todo.append(other)
    return names


def _of_torch(function: types.FunctionType) -> bool:
    return (function.__module__ or "").split(".")[0] == "torch"


def reason_against(module: nn.Module, graph: fx.Graph, entered: list[str]) -> str | None:
    """Return why a module whose trace succeeded must not be rewritten, or None."""
    for child in ["", *entered]:
        found = sorted(_names(type(module.get_submodule(child))) & _TELLTALES)
        if found:
            return f"the forward looks at {found[0]}"
    for node in graph.nodes:
        for written in _written(node, module):
            if not _private(written, module):
                return "the forward changes a tensor in place"
    return None


def _written(node: fx.Node, root: nn.Module) -> list[fx.Node]:
    """Return the nodes whose tensors a node may overwrite."""
    if node.op == "call_module":
        child = root.get_submodule(str(node.target))
        writes = any(
            getattr(m, "inplace", False) and not isinstance(m, nn.modules.dropout._DropoutNd)
            for m in child.modules()
        )
        return node.all_input_nodes if writes else []
    if node.op not in ("call_method", "call_function"):
        return []
    if isinstance(node.kwargs.get("out"), fx.Node):
        return node.all_input_nodes
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    # Functions such as relu take `inplace` as one of their flags.
    flagged = node.kwargs.get("inplace") or (
        getattr(node.target, "__module__", "") == "torch.nn.functional" and True in node.args
    )
    if not named and not flagged:
        return []
    first = [a for a in node.args[:1] if isinstance(a, fx.Node)]
    return first or node.all_input_nodes


#: Layers and functions whose result is a tensor of its own.
_FRESH_LAYERS = (
    nn.Linear,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.conv._ConvNd,
    nn.Embedding,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
)
_FRESH = {"add", "mul", "sub", "truediv", "matmul", "linear", "bmm", "softmax", "layer_norm"}


def _private(node: fx.Node, root: nn.Module) -> bool:
    """Return whether nothing but its single user can see the tensor of a node."""
    if len(node.users) != 1:
        return False
    if node.op == "call_module":
        if isinstance(root.get_submodule(str(node.target)), _FRESH_LAYERS):
            return True
    elif node.op not in ("call_function", "call_method"):
        return False
    elif getattr(node.target, "__name__", node.target) in _FRESH:
        return True
    inputs = node.all_input_nodes
    return bool(inputs) and all(_private(source, root) for source in inputs)
