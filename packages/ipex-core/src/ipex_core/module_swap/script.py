# SPDX-License-Identifier: Apache-2.0
"""How optimized layers become part of a program of ``torch.jit.script``.

``torch.jit.script`` compiles the forward of a layer and copies its attributes. What a program needs of a packed weight
is put among the attributes of a layer when scripting starts, as something that computes the tensor only when the
compiler reads it: the layer itself neither changes nor holds a weight twice.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from typing import Any

import torch
from torch import nn

from ipex_core.packing.parameter import PackedWeight

#: Attributes of a program: the packed weight that our op takes, and otherwise the plain form of a packed weight.
_PACKED, _WEIGHT = "_script_packed", "_script_weight"
_IGNORED = "__jit_ignored_attributes__"
#: What scripting leaves in the ``__dict__`` of a layer.
FORGOTTEN = (_PACKED, _WEIGHT, _IGNORED)


@functools.cache
def _attribute() -> Any:
    # Made late: without TorchScript (PYTORCH_JIT=0) `torch.jit.Attribute` is a function.
    base: Any = torch.jit.Attribute

    class OfModule(base):  # type: ignore[misc]
        """A tensor of a layer that is computed when the compiler asks for it."""

        __slots__ = ()

        @property
        def value(self) -> torch.Tensor:
            module, name = self[0]
            weight = module()._parameters["weight"]
            tensor: torch.Tensor = weight.plain() if name == _WEIGHT else module()._packed
            return tensor

    return OfModule


def prepare(module: nn.Module) -> None:
    """Put what a program needs of a layer among its attributes."""
    for name in FORGOTTEN:
        module.__dict__.pop(name, None)
    ignored = ["_packed", "_lowered"]
    weight = module._parameters.get("weight")
    if isinstance(weight, PackedWeight):
        own = bool(module.__dict__.get("_kernel")) and module.__dict__.get("_packed") is not None
        name = _PACKED if own else _WEIGHT
        module.__dict__[name] = _attribute()((weakref.ref(module), name), torch.Tensor)
        ignored.append("weight")
    module.__dict__[_IGNORED] = ignored


def refuse_hook(name: str) -> Any:
    """What ``torch.jit.script`` calls for a layer with a hook that casts its input; ``name`` is its class."""
    raise TypeError(
        f"torch.jit.script: layers must not have a hook, got {name}, whose input a hook of ipex.optimize casts:"
        " use torch.jit.trace, or optimize without dtype"
    )


def stock_forward(kind: type[nn.Module]) -> Any:
    """Return the forward of a class under the name ``_stock``, as the compiler wants it for a second method."""
    forward: Any = kind.forward
    copy = types.FunctionType(
        forward.__code__, forward.__globals__, "_stock", forward.__defaults__, forward.__closure__
    )
    copy.__annotations__, copy.__kwdefaults__ = forward.__annotations__, forward.__kwdefaults__
    return copy


class MethodOfClass:
    """What ``torch.jit.script`` sees of a forward that sits on an instance: the one of the class.

    A mixin. The compiler reads the source of functions and methods only, and takes a `ScriptMethodStub` as it is.
    """

    _module: Any

    @property
    def __class__(self) -> Any:
        """Its class; for the function of the compiler that looks for a stub, the class of stubs."""
        compiler = torch.jit._recursive
        if sys._getframe(1).f_code is compiler.make_stub_from_method.__code__:
            return compiler.ScriptMethodStub
        return type(self)

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError(f"the class of a forward must not be changed, got {value!r}")

    def _stub(self) -> Any:
        module = self._module()
        method = types.MethodType(type(module).forward, module)
        return torch.jit._recursive.make_stub(method, "forward")

    @property
    def resolution_callback(self) -> Any:
        """How names in the source are found."""
        return self._stub().resolution_callback

    @property
    def def_(self) -> Any:
        """The syntax tree."""
        return self._stub().def_

    @property
    def original_method(self) -> Any:
        """The forward of the class."""
        return self._stub().original_method
