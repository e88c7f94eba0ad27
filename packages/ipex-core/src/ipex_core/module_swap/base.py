# SPDX-License-Identifier: Apache-2.0
"""A mixin in front of an object's own class, and the way back.

The object stays the same: ``isinstance`` tests, names, hooks and references stay valid. This is the only place, with
`swap_class` for optimized layers, where the class of an object changes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx, nn
from torch._jit_internal import is_scripting
from torch.autograd import forward_ad

from ipex_core.module_swap.script import FORGOTTEN, prepare
from ipex_core.module_swap.state_dict import (
    KEY,
    pack_weight,
    set_runtime,
    state_of,
    unpack_weight,
)
from ipex_core.packing.parameter import PackedWeight
from ipex_core.util.symbolic import tracing

#: By their bases, a mixin and a class of the user: the classes that `derive` made.
_classes: dict[tuple[type, ...], type] = {}


def derive(kind: type, mixin: type, content: Callable[[], Mapping[str, Any]] | None = None) -> Any:
    """Return ``kind`` with ``mixin`` in front, once for each pair; its objects can be copied and pickled.

    It has the name, module and docstring of ``kind``, since transformers looks at names. A forward of the mixin gets
    the signature of the forward of ``kind``.

    Args:
        kind: The class of the user.
        mixin: What comes first.
        content: Returns further attributes of the class.
    """
    known = _classes.get((mixin, kind))
    if known is not None:
        return known
    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    if "__reduce_ex__" not in mixin.__dict__:

        def reduced(self: Any, protocol: Any) -> Any:
            # The derived class has the name of its original, so pickle would find the original by that name.
            return rebuild, (kind, mixin), self.__getstate__()

        members["__reduce_ex__"] = reduced
    if "forward" in mixin.__dict__ and issubclass(kind, nn.Module):
        forward = mixin.__dict__["forward"]

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

        functools.update_wrapper(wrapped, kind.forward)
        members["forward"] = wrapped
    if content is not None:
        members.update(content())
    # Of two threads the first decides: `original_class` knows one class of each pair.
    return _classes.setdefault((mixin, kind), type(kind.__name__, (mixin, kind), members))


def rebuild(kind: type, mixin: type) -> Any:
    """Return an empty object of a derived class, for pickling."""
    new = derive(kind, mixin)
    return new.__new__(new)


def original_class(value: Any) -> Any:
    """Return the class that an object had before `swap`, or has."""
    kind = type(value)
    for base in kind.__mro__:  # others may derive from a derived class
        bases = base.__bases__
        if _classes.get(bases) is base:
            return bases[1]
    return kind


def swap(value: Any, mixin: type, content: Callable[[], Mapping[str, Any]] | None = None) -> None:
    """Put ``mixin`` in front of the original class of an object, in the place of another one."""
    value.__class__ = derive(original_class(value), mixin, content)


def restore_class(value: Any) -> None:
    """Give an object the class that it had before `swap`."""
    value.__class__ = original_class(value)


def set_class(value: Any, kind: type) -> None:
    """Give an object a class of ours that derives from its own, or its own again."""
    value.__class__ = kind


@contextlib.contextmanager
def as_original(*values: Any) -> Iterator[None]:
    """Give objects their original classes within a ``with`` block."""
    former = [type(value) for value in values]
    for value in values:
        restore_class(value)
    try:
        yield
    finally:
        for value, kind in zip(values, former, strict=True):
            value.__class__ = kind


# --- optimized layers -------------------------------------------------------------------------------------------------


below_autograd: Any = torch._C._AutoDispatchBelowAutograd


def call(op: Any, *args: Any) -> Any:
    """Call an op; where gradients are off, below autograd.

    The autograd kernel of an op is Python and costs some 3 us even when it has nothing to do, as much as a small kernel
    itself. Under ``torch.inference_mode`` torch leaves it out; this does the same under ``torch.no_grad``.
    """
    if torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and torch._C._get_tracing_state() is None
    ):
        return op(*args)
    with below_autograd():
        return op(*args)


def stock_only(x: torch.Tensor) -> bool:
    """Return whether only the stock ops can take a tensor: nested tensors, and all under `transformed`.

    True for a stand-in of torch.fx, too.
    """
    return x.is_nested is not False or transformed()


def transformed() -> bool:
    """Return whether ``torch.func`` transforms or forward differentiation follow each operation."""
    if torch.compiler.is_compiling():
        return False
    return _transforms() or forward_ad._current_level >= 0


_transforms: Any = torch._C._are_functorch_transforms_active


def check_recorded(name: str) -> None:
    """Raise for a transform of ``torch.func`` around what only an ordinary backward pass can differentiate."""
    if not torch.compiler.is_compiling() and _transforms():
        raise NotImplementedError(
            f"{name}: torch.func cannot differentiate it: use backward(), or torch.nn.EmbeddingBag"
        )


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling the module does more than the forward of its class."""
    return bool(
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


class OptimizedModule(nn.Module):
    """Mixin of all optimized layers: copying, pickling, moving."""

    if TYPE_CHECKING:  # annotations would be read by `torch.jit.script`
        __constants__: ClassVar[list[str]]
        _script_packed: torch.Tensor
        _script_weight: torch.Tensor
    _packed: torch.Tensor | None = None
    _dtype: torch.dtype | None = None
    _kernel: bool = False

    def _cast(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Bring an activation to the dtype of a reduced weight; float32 weights take any activation."""
        if weight is None:
            return x
        # TorchScript's own autocast may compute in float32 what was of this dtype when it was recorded.
        if is_scripting():
            return x.to(weight.dtype) if x.is_floating_point() else x
        else:
            if x.dtype is weight.dtype and (weight.dtype is torch.float32 or not tracing()):
                return x
            return x.to(weight.dtype) if is_stand_in(x) or x.is_floating_point() else x

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let ``torch.jit.script`` take what decides about the forward as constants."""
        super().__init_subclass__(**kwargs)
        stock: Any = getattr(cls, "__constants__", ())
        cls.__constants__ = list(dict.fromkeys((*stock, "_dtype", "_kernel")))

    def __prepare_scriptable__(self) -> OptimizedModule:
        """Get ready for ``torch.jit.script``, which calls this and compiles what it returns."""
        prepare(self)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight":  # the packed form belongs to another weight now
            self.__dict__["_packed"] = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with a plain weight: packed forms belong to one machine."""
        content: dict[str, Any] = dict(super().__getstate__())  # type: ignore[no-untyped-call]
        weight = self._parameters.get("weight")
        for name in ("_lowered", *FORGOTTEN):
            content.pop(name, None)
        if isinstance(weight, PackedWeight):
            if weight.former is None:  # others, which may be tied, turn into parameters themselves
                parameters = dict(content["_parameters"])
                parameters["weight"] = nn.Parameter(weight.plain(), weight.requires_grad)
                content["_parameters"] = parameters
            content["_packed"] = None
            state = copy.copy(content[KEY].state)
            state.plain = None
            content[KEY] = dataclasses.replace(content[KEY], state=state)
        return content

    def __setstate__(self, content: dict[str, Any]) -> None:
        """Take the state over and pack for this machine."""
        super().__setstate__(content)  # type: ignore[no-untyped-call]
        state = state_of(self)
        if state is not None:
            set_runtime(self, state)
            pack_weight(self, state)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        state = state_of(self)
        if state is None or not isinstance(self._parameters.get("weight"), PackedWeight):
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        unpack_weight(self, state)
        try:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            pack_weight(self, state)


def is_stand_in(x: Any) -> bool:
    """Return whether the call is recorded by `torch.fx.symbolic_trace`."""
    return isinstance(x, fx.Proxy)


def record_call(module: nn.Module, x: Any, *args: Any) -> Any:
    """Record the call of a layer in a trace of torch.fx, as it records calls of the stock layers."""
    path = x.tracer.path_of_module(module)
    if path:
        return x.tracer.create_proxy("call_module", path, (x, *args), {})
    # The layer is all there is: what it computes is recorded.
    state = state_of(module)
    kind: Any = type(module) if state is None else state.original_class
    if state is not None and state.dtype is not None and not isinstance(module, nn.EmbeddingBag):
        x = x.to(state.dtype)
    return kind.forward(module, x, *args)


def needs_grad(layer: nn.Module, x: torch.Tensor) -> bool:
    """Return whether a derivative by the input, the weight or the bias of a layer is asked for."""
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    return (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    )


def usable_parameters(layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight and bias of a layer as stock ops take them: plain, and of one dtype."""
    weight, bias = layer.weight, layer.bias
    if isinstance(weight, PackedWeight):
        weight = weight.usable()
    if bias is not None and bias.dtype is not weight.dtype:
        bias = bias.to(weight.dtype)
    return weight, bias


def computed_by(function: Any, known: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]) -> str:
    """Return which of some functions of one element another one computes, told by its values; empty for none.

    Where there is no graph to read: modules and functions of any library, which may be written in any way.
    """
    x = torch.linspace(-2.0, 2.0, 129) ** 7  # far enough to see bounds, as of "gelu_10"
    try:
        with torch.no_grad():
            y = function(x.clone())
    except Exception:  # no function of one tensor
        return ""
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return ""
    fits = (name for name, of in known.items() if torch.allclose(y, of(x), rtol=1e-5, atol=1e-6))
    return next(fits, "")
