# SPDX-License-Identifier: Apache-2.0
"""Packed weights: the formats, and the parameter that stands for a packed weight.

A module with a packed weight stores the weight once, packed. Its ``weight`` parameter is a `PackedWeight`: it has the
shape and dtype of the weight and unpacks itself when somebody computes with it, so that user code, other libraries and
``next(model.parameters()).dtype`` keep working.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ipex_core.packing.dense import deinterleave_gate_up
from ipex_core.packing.woq import dequantize, read_layout

#: Rows for which oneDNN lays out a linear weight. Measured: a hint of 1 costs up to 10 % at large M, no hint costs a
#: look-up per call; 128 is within 2 % of the best at every M from 1 to 4096.
_ROWS_HINT = 128


#: Whether programs of ``torch.export`` may call our kernels on packed weights: set by `ipex_core.exporter`.
_exporting_kernels = False


def captured(kernel: bool = False) -> bool:
    """Return whether the call is recorded by ``torch.jit.trace`` or ``torch.export`` and needs a plain weight.

    Their programs run elsewhere, perhaps without Python and without our ops. Those of ``ipex.export`` have the ops.

    Args:
        kernel: Whether the packed weight is one for an op of ours.
    """
    if torch._C._get_tracing_state() is not None:
        return True
    return exporting() and not (kernel and _exporting_kernels)


def exporting() -> bool:
    """Return whether ``torch.export`` records.

    Before torch 2.13 Dynamo takes ``torch.compiler.is_exporting()`` for true in all it records, and layers would be
    compiled on their plain weights; the flag behind it holds there, too.
    """
    return torch.compiler._is_exporting_flag


@contextlib.contextmanager
def exporting_kernels() -> Iterator[None]:
    """Let ``torch.export`` record our kernels on packed weights, one export at a time."""
    global _exporting_kernels
    with _export_lock:
        _exporting_kernels = True
        try:
            yield
        finally:
            _exporting_kernels = False


_export_lock = threading.Lock()


def pack(
    weight: Tensor,
    form: str,
    conv: tuple[Any, ...] | None = None,
    input_size: list[int] | None = None,
) -> Tensor:
    """Pack a plain weight.

    Args:
        weight: Plain weight of a linear or convolution layer.
        form: ``"mkldnn"`` or ``"ipex"``.
        conv: ``(padding, stride, dilation, groups)`` of a convolution, else None.
        input_size: Size of the input to lay out a convolution weight for.
    """
    packed: Tensor
    if form == "ipex":
        packed = torch.ops.ipex.pack_linear_weight(weight.contiguous())
    elif conv is not None:
        packed = torch.ops.mkldnn._reorder_convolution_weight(
            weight.contiguous(), *conv, input_size
        )
    else:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
    return packed


def unpack(packed: Tensor, form: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the plain weight, bit for bit; a quantized weight (``"woq"``) is dequantized."""
    plain: Tensor
    if form == "ipex":
        plain = torch.ops.ipex.unpack_linear_weight(packed, shape[0], shape[1], dtype)
    elif form == "woq":
        layout = read_layout(packed)
        assert layout is not None
        plain = dequantize(packed, layout).to(dtype)
    else:
        plain = packed.to_dense().reshape(shape)
    return plain


def in_layout(value: Tensor, name: str) -> Tensor:
    """Return a tensor in a memory format; the same one if it is in that already.

    Args:
        value: 3-D for ``"channels_last_1d"``, 4-D for ``"channels_last"``, 5-D for ``"channels_last_3d"``.
        name: The memory format. torch has no name for the first: ``[N, C, W]`` lies in memory as ``[N, W, C]``.
    """
    if name == "channels_last_1d":
        return value.transpose(1, 2).contiguous().transpose(1, 2)
    return value.contiguous(memory_format=getattr(torch, name))


def hollow(
    cls: type[torch.Tensor],
    shape: torch.Size,
    dtype: torch.dtype,
    requires_grad: bool = False,
    device: torch.device | str = "cpu",
) -> Any:
    """Make a tensor of a subclass that computes its values itself: all elements share the memory of one NaN.

    Without any memory ``torch.jit.save`` would crash: it writes the parameters of a trace from where they should lie,
    unchecked. A program that was saved so has NaN in the place of a weight that it does not use.
    """
    with _disable_current_modes():
        nothing = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
        return torch.Tensor._make_subclass(cls, nothing, requires_grad)


_CONSTANT = (
    "the weight of an optimized module is packed and cannot be changed in place;"
    " use load_state_dict(), or ipex.restore(model) first"
)


class PackedWeight(torch.Tensor):
    """A parameter whose values are stored packed. Reading unpacks a copy; writing in place is an error."""

    packed: Tensor
    form: str
    start: int
    rows: int | None
    gated: int | None
    #: The parameter whose place this one has taken, where its maker and not the module's state remembers it.
    former: torch.nn.Parameter | None = None
    _is_param = True

    @staticmethod
    def __new__(
        cls,
        packed: Tensor,
        form: str,
        shape: torch.Size,
        dtype: torch.dtype,
        requires_grad: bool = False,
        start: int = 0,
        rows: int | None = None,
        gated: int | None = None,
    ) -> PackedWeight:
        """Wrap a packed tensor (see `pack`), or a part of a packed tensor with ``rows`` rows.

        The part is the rows from ``start`` on, or, with ``gated``, the gate (0) or the other factor (1) of interleaved
        rows (see `ipex_core.woq.interleave_gate_up`).
        """
        self: PackedWeight = hollow(cls, shape, dtype, requires_grad)
        self.packed = packed
        self.form = form
        self.start = start
        self.rows = rows
        self.gated = gated
        return self

    def plain(self) -> Tensor:
        """Return the unpacked weight, a new tensor without gradient; a constant to ``torch.jit.trace``."""
        interpreter: Any = torch._C
        tracing = interpreter._get_tracing_state()
        if tracing is None:
            return self._plain()
        interpreter._set_tracing_state(None)
        try:
            return self._plain()
        finally:
            interpreter._set_tracing_state(tracing)

    def _plain(self) -> Tensor:
        # In inference mode an ordinary tensor, too: the result of a view of this one may be no inference tensor.
        with torch.inference_mode(False), torch.no_grad():
            if self.rows is None:
                return unpack(self.packed, self.form, self.shape, self.dtype)
            wide = torch.Size((self.rows, *self.shape[1:]))
            plain = unpack(self.packed, self.form, wide, self.dtype)
            if self.gated is not None:
                return deinterleave_gate_up(plain, self.shape[0])[self.gated].contiguous()
            return plain[self.start : self.start + self.shape[0]].clone()

    def usable(self) -> Tensor:
        """Return the unpacked weight; its gradient flows to the packed one."""
        if self.requires_grad and torch.is_grad_enabled() and not captured():
            return self.clone()
        return self.plain()

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return ``x @ weight.T + bias`` without unpacking, or None where a subclass does not know how.

        Args:
            x: ``[..., columns]`` in the dtype of the weight; nothing needs a gradient.
            bias: ``[rows]``, or None.
        """
        return None

    @property
    def data(self) -> Tensor:
        """The weight without gradient; it cannot be assigned."""
        return self.detach()

    @data.setter
    def data(self, _: Tensor) -> None:
        raise RuntimeError(f"PackedWeight.data of shape {tuple(self.shape)}: {_CONSTANT}")

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array."""
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
            )
        return self.plain().numpy()

    def stride(self, dim: Any = None) -> Any:
        """Return the strides of what reading gives."""
        return torch.empty(self.shape, device="meta").stride(dim)

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """Return whether what reading gives has this layout."""
        return torch.empty(self.shape, device="meta").is_contiguous(memory_format=memory_format)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.plain().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedWeight(shape={list(self.shape)}, dtype={self.dtype}, format={self.form!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy outside its module is an ordinary parameter; modules unpack before they are copied.
        if id(self) not in memo:
            memo[id(self)] = torch.nn.Parameter(self.plain(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.nn.Parameter(self.plain(), self.requires_grad).__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op on the unpacked weight; detaching keeps it packed."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in KEEPS_CLASS and isinstance(first, PackedWeight):
            return PackedWeight(
                first.packed,
                first.form,
                first.shape,
                first.dtype,
                start=first.start,
                rows=first.rows,
                gated=first.gated,
            )
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if (
                isinstance(value, PackedWeight)
                and argument.alias_info is not None
                and argument.alias_info.is_write
            ):
                raise RuntimeError(f"{func}: {_CONSTANT}")
        return func(
            *tree_map_only(PackedWeight, PackedWeight.plain, args),
            **tree_map_only(PackedWeight, PackedWeight.plain, kwargs),
        )


KEEPS_CLASS = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
