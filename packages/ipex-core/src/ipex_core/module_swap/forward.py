# SPDX-License-Identifier: Apache-2.0
"""A rewritten forward that sits on an instance and leaves its class alone."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from ipex_core.kernels.policy import find_kernels
from ipex_core.module_swap.base import has_hooks
from ipex_core.module_swap.script import MethodOfClass

#: What must not have changed: ``(child or "", attribute, attribute of that or "", value)``.
Guard = tuple[str, str, str, Any]

_MISSING: Any = object()


def _import_names(namespace: Mapping[str, Any]) -> dict[str, str] | None:
    """Return ``name -> "module:attribute"`` for a namespace, or None if a value cannot be imported again."""
    names = {}
    for name, value in namespace.items():
        if isinstance(value, types.ModuleType):
            names[name] = f"{value.__name__}:"
            continue
        module, attribute = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if module is None or attribute is None:
            return None
        names[name] = f"{module}:{attribute}"
        try:
            if resolve(names[name]) is not value:
                return None
        except (ImportError, AttributeError):
            return None
    return names


def generate(graph: fx.Graph) -> tuple[str, dict[str, str] | None]:
    """Return the code of a graph, and the names that it imports, or None if one of these cannot be imported."""
    for node in graph.nodes:
        # Annotations would be a part of the code, and not all have an importable name.
        node.type = None
    code = graph.python_code("self")
    # torch.fx offers more names than the code uses.
    words = set(re.findall(r"\w+", code.src))
    return code.src, _import_names({k: v for k, v in code.globals.items() if k in words})


def resolve(name: str) -> Any:
    module, _, attributes = name.partition(":")
    value: Any = importlib.import_module(module)
    for attribute in filter(None, attributes.split(".")):
        value = getattr(value, attribute)
    return value


class InstanceForward:
    """Base of forwards that sit on an instance, each of which has a code object of its own.

    Dynamo files what it has compiled under the code object, and gives up at the ninth graph there. One ``__call__`` for
    all models would let them use up that number together.

    Args:
        module: The module that the forward belongs to.
    """

    def __new__(cls, *args: Any) -> Any:
        call: Any = cls.__call__
        own = types.FunctionType(
            call.__code__.replace(co_name="forward"), call.__globals__, call.__name__
        )
        kind = type(cls.__name__, (cls,), {"__call__": own, "__module__": cls.__module__})
        return object.__new__(kind)

    def __init__(self, module: nn.Module) -> None:
        # Weak: a strong reference would make a cycle that keeps the weights alive until the garbage collector runs.
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the forward of the class."""
        raise NotImplementedError

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the original forward, which callers such as ``generate`` look up."""
        signature = inspect.signature(self._original())
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    @property
    def __code__(self) -> types.CodeType:
        """The code of the original forward; ``torch.export`` reads names and lines from it."""
        code: types.CodeType = self._original().__code__
        return code

    def _original(self) -> Any:
        module: Any = self._module()
        return type(module).forward


class GeneratedForward(InstanceForward):
    """Base of forwards that run generated code.

    Args:
        module: The module.
        source: Code of a function ``forward`` of the module and its arguments.
        names: For each global name of the code where it comes from, as ``"module:attribute"``.
    """

    def __init__(self, module: nn.Module, source: str, names: dict[str, str]) -> None:
        super().__init__(module)
        self.source = source
        self.names = names
        namespace = {name: resolve(path) for name, path in names.items()}
        exec(compile(source, "<ipex generated forward>", "exec"), namespace)  # noqa: S102  (code that torch.fx made)
        self._function: Callable[..., Any] = namespace["forward"]

    def _rest(self) -> tuple[Any, ...]:
        """Return the arguments that a subclass takes besides."""
        return ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        kind, arguments = self.__reduce__()
        return kind(*copy.deepcopy(arguments, memo))

    def __reduce__(self) -> Any:
        kind = type(self).__bases__[0]  # each instance has a class of its own
        return kind, (self._module(), self.source, self.names, *self._rest())


class FusedForward(MethodOfClass, GeneratedForward):
    """Runs generated code in place of a module's forward; installed as ``module.__dict__["forward"]``.

    With ``arguments=None`` the code takes whatever the original forward takes. Otherwise it takes the named arguments
    only, and the original forward runs instead whenever the generated code would not be equivalent: optional arguments
    are given, an argument is no tensor, the module is in training mode, a child whose call was fused away was replaced
    or got a hook, or an attribute that the forward reads was changed.
    """

    def __init__(
        self,
        module: nn.Module,
        source: str,
        names: dict[str, str],
        arguments: tuple[str, ...] | None,
        children: tuple[tuple[str, nn.Module], ...],
        guards: tuple[Guard, ...],
    ) -> None:
        super().__init__(module, source, names)
        find_kernels()
        self.arguments = arguments
        self.children = children
        self.guards = guards
        self._off = False

    def _rest(self) -> tuple[Any, ...]:
        return self.arguments, self.children, self.guards

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        if self.arguments is None:
            if self._off or module.training:
                return type(module).forward(module, *args, **kwargs)
            try:
                return self._function(module, *args, **kwargs)
            except RuntimeError as error:
                # The parts of a merged layer are views, which not every reshaping accepts.
                if "view size is not compatible" not in str(error):
                    raise
                self._off = True
                return type(module).forward(module, *args, **kwargs)
        if kwargs and len(args) + len(kwargs) == len(self.arguments):
            rest = self.arguments[len(args) :]
            if all(name in kwargs for name in rest):
                args, kwargs = (*args, *(kwargs[name] for name in rest)), {}
        if (
            kwargs
            or len(args) != len(self.arguments)
            or module.training
            or not all(isinstance(value, torch.Tensor) for value in args)
            or self._changed(module)
        ):
            return type(module).forward(module, *args, **kwargs)
        return self._function(module, *args)

    def _changed(self, module: nn.Module) -> bool:
        for name, child in self.children:
            if module._modules.get(name) is not child or has_hooks(child):
                return True
        for name, attribute, key, value in self.guards:
            owner: Any = module._modules[name] if name else module
            owner = getattr(owner, attribute, _MISSING)
            now = getattr(owner, key, _MISSING) if key else owner
            if now is not value and now != value:
                return True
        return False
