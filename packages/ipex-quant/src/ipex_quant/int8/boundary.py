# SPDX-License-Identifier: Apache-2.0
"""What passes between modules that `prepare` saw next to each other, and is not the tensor that others expect there.

A layer hands out codes, or a result that has the activation behind it in it already. The modules that were seen to read
it know what it is. Any other reader, on a path that was not recorded, finds a stand-in for a tensor: codes turn into
the numbers that they mean, and what cannot be had any more is an error that names the layer. Making one takes less than
half a microsecond; in traced and compiled graphs nothing is left of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ipex_core.errors import OpArgumentError

#: Functions that move elements, whatever they are.
MOVES = frozenset(
    {"flatten", "view", "reshape", "permute", "transpose", "contiguous", "squeeze", "unsqueeze"}
)
#: What a forward may ask about a tensor without caring what is in it.
SIZES = frozenset({"size", "dim", "numel", "is_contiguous", "ndimension", "__len__"})
FIELDS = frozenset({"shape", "ndim", "device", "is_cuda", "requires_grad", "layout"})
#: Operators, which Python looks up in the class.
_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul"),
    *("iadd", "isub", "imul", "itruediv", "eq", "ne", "lt", "le", "gt", "ge", "neg", "abs"),
    *("invert", "getitem", "setitem", "iter", "contains", "bool", "float", "int", "index"),
    *("array", "format", "reduce_ex", "deepcopy"),
)


@dataclasses.dataclass(frozen=True)
class Scale:
    """Scale and zero point of uint8 codes: a value is ``(code - zero) * scale``."""

    scale: float = 0.0
    zero: int = 0

    def __bool__(self) -> bool:
        """Return whether there is one."""
        return self.scale != 0.0


class Wired:
    """Stands for a tensor: whatever is done with it is done with what ``read`` returns."""

    _OWN: frozenset[str] = frozenset()
    sized = True

    def read(self) -> Tensor:
        """Return the tensor, or raise what there is to say."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with tensors."""
        name = getattr(func, "__name__", "")
        if name in MOVES and args and type(args[0]) is Codes:
            return getattr(args[0], name)(*args[1:], **(kwargs or {}))
        return func(*tree_map(plain, tuple(args)), **tree_map(plain, dict(kwargs or {})))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self._OWN:  # Dynamo asks before there are any
            raise AttributeError(name)
        return getattr(self.read(), name)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return repr(self.read())


def _operator(name: str) -> Callable[..., Any]:
    def call(self: Wired, *args: Any) -> Any:
        value = self.read()
        result = getattr(value, name)(*(plain(arg) for arg in args))
        return self if result is value else result  # changed in place

    return call


for _name in _OPERATORS:
    setattr(Wired, f"__{_name}__", _operator(f"__{_name}__"))


class Codes(Wired):
    """The uint8 codes of a result.

    Once someone has read the numbers, these count: they may have been changed in place.

    Args:
        codes: uint8.
        scale: What they mean.
        dtype: That of the tensor that this stands for.

    Attributes:
        base: What this is another shape or order of, made by the function that ``_move`` names.
    """

    _OWN = frozenset({"codes", "scale", "dtype"})
    base: Codes | None = None
    seen = False  # whether others share the memory of the codes
    _move: Any = None
    _float: Tensor | None = None
    _gone = ""

    def __init__(self, codes: Tensor, scale: Scale, dtype: torch.dtype) -> None:
        self.codes, self.scale, self.dtype = codes, scale, dtype

    def read(self) -> Tensor:
        """Return the numbers."""
        if self._float is None:
            if self.base is not None:
                name, args, kwargs = self._move
                self._float = getattr(self.base.read(), name)(*args, **kwargs)
            elif self._gone:
                raise OpArgumentError(
                    f"{self._gone}: its operand must not be read again on a path that was not recorded, got a"
                    " read after it was overwritten; leave this layer float with set_module_name(name, None)"
                )
            else:
                low = (self.codes.float() - self.scale.zero) * self.scale.scale
                self._float = low.to(self.dtype)
        return self._float

    def get(self, scale: Scale) -> Tensor:
        """Return the codes, if they still count and are of this scale, or the numbers."""
        origin = self
        while origin._float is None and origin.base is not None:
            origin = origin.base
        same = scale is self.scale or scale == self.scale
        if same and origin._float is None and not origin._gone:
            return self.codes
        return self.read()

    def overwrite(self, by: str) -> bool:
        """Return whether a layer may overwrite the codes: no other layer reads them."""
        if self.seen or self._float is not None or self._gone:
            return False
        self._gone = by
        return True

    def like(self, codes: Tensor) -> Codes:
        """Return other codes with the same meaning."""
        return Codes(codes, self.scale, self.dtype)

    def unflatten(self, dim: int, sizes: Any) -> Codes:
        """Split a dimension."""
        return _moved(self, "unflatten", (dim, sizes), {})


def _moved(self: Codes, name: str, args: Any, kwargs: Any) -> Codes:
    # Codes may lie in another order than the tensor that they stand for.
    name = "reshape" if name == "view" else name
    result = Codes(getattr(self.codes, name)(*args, **kwargs), self.scale, self.dtype)
    self.seen = result.seen = True
    result.base, result._move = self, (name, args, kwargs)
    return result


def _move(name: str) -> Callable[..., Any]:
    def move(self: Codes, *args: Any, **kwargs: Any) -> Codes:
        return _moved(self, name, args, kwargs)

    return move


class Early(Wired):
    """What a layer gives before the modules that it stands for too have been called; or its input, before a sum.

    Args:
        value: What these pass on.
        steps: Their paths, in order.
        layer: Path of the layer.
        sized: Whether ``value`` has the shape of the tensor that this stands for.
    """

    _OWN = frozenset({"value", "steps", "layer", "sized"})

    def __init__(self, value: Any, steps: tuple[str, ...], layer: str, sized: bool = True) -> None:
        self.value, self.steps, self.layer, self.sized = value, steps, layer, sized

    def read(self) -> Tensor:
        """Raise an error: this result was never computed."""
        steps = " and ".join(self.steps)
        raise OpArgumentError(
            f"{self.layer}: this layer computes {steps} too, so only {steps} can read its output, got a read on a path"
            f" that prepare did not record. Exclude the layer: qconfig_mapping.set_module_name({self.layer!r}, None)"
        )


class Scaled(Wired):
    """The output of a norm with the channel scales of SmoothQuant in it."""

    _OWN = frozenset({"value", "factor", "norm"})
    _float: Tensor | None = None

    def __init__(self, value: Tensor, factor: Tensor, norm: str) -> None:
        self.value, self.factor, self.norm = value, factor, norm

    def read(self) -> Tensor:
        """Return the output without them."""
        if self._float is None:
            self._float = self.value / self.factor.to(self.value.dtype)
        return self._float

    def get(self, norm: str) -> Tensor | None:
        """Return the output with them for the layers of this norm, or None if it was read before, or changed."""
        return self.value if norm == self.norm and self._float is None else None


def _stored(kind: Any, name: str) -> Any:
    """Return the tensor that sizes can be asked of."""
    value = kind.codes if type(kind) is Codes else kind.value
    return getattr(value if kind.sized else kind.read(), name)


def _asked(name: str) -> Callable[..., Any]:
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _stored(self, name)(*args, **kwargs)

    return ask


def _field(name: str) -> property:
    return property(lambda self: _stored(self, name))


for _kind in (Codes, Early, Scaled):
    for _name in SIZES:
        setattr(_kind, _name, _asked(_name))
    for _name in FIELDS:
        setattr(_kind, _name, _field(_name))
for _name in MOVES:
    setattr(Codes, _name, _move(_name))


def plain(value: Any) -> Any:
    """Return the tensor that something stands for; anything else as it is."""
    return value.read() if isinstance(value, Wired) else value


def take(value: Any, step: str) -> Any:
    """Return what an `Early` passes on at one of its steps, or None if the value does not belong to this step."""
    if type(value) is not Early or value.steps[0] != step:
        return None
    rest = value.steps[1:]
    return Early(value.value, rest, value.layer) if rest else value.value


class Fused(nn.Identity):
    """Stands where a layer computes a module too: passes its results on.

    Args:
        step: Path of this module.
        layer: Path of the layer.
        original: What to compute for other inputs, which come on paths that were not recorded; or None.
    """

    original: nn.Module | None

    def __init__(self, step: str, layer: str, original: nn.Module | None = None) -> None:
        super().__init__()
        self.step, self.layer = step, layer
        self.__dict__["original"] = original  # no part of the model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the layer; the module that stood here may have another name for its argument."""
        (x,) = (*args, *kwargs.values())
        result = take(x, self.step)
        if result is not None:
            return result
        if self.original is None:
            plain(x)  # says who made it, if that is known
            raise OpArgumentError(
                f"{self.step}: this module is fused into {self.layer}, so its input must be the output of {self.layer},"
                " got a tensor that took a path that prepare did not record."
                f" Exclude the layer: qconfig_mapping.set_module_name({self.layer!r}, None)"
            )
        return self.original(plain(x))

    def extra_repr(self) -> str:
        """Return which layer computes it."""
        return f"in {self.layer}"


_GEOMETRY = (
    *("kernel_size", "stride", "padding", "dilation", "groups", "in_channels", "out_channels"),
    *("in_features", "out_features"),
)


class Start(nn.Identity):
    """Replaces a layer that moved to the place of the sum that it computes too: passes its input on.

    Args:
        layer: Path of this module: the path of the layer.
        steps: Paths of the modules up to the sum.
        stood: The layer that stood here; a forward may read its geometry.
    """

    def __init__(self, layer: str, steps: tuple[str, ...], stood: nn.Module) -> None:
        super().__init__()
        self.layer, self.steps = layer, steps
        for name in _GEOMETRY:
            if hasattr(stood, name):
                setattr(self, name, getattr(stood, name))

    def forward(self, input: Any) -> Any:
        """Return the input, for the sum."""
        return Early(input, self.steps, self.layer, sized=False)

    def extra_repr(self) -> str:
        """Return where it is computed."""
        return f"in {self.steps[-1]}"
