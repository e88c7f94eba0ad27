# SPDX-License-Identifier: Apache-2.0
"""The packed format of quantized linear weights, described in plain PyTorch.

A packed weight is a 1-D ``uint8`` tensor: the 64-byte header that dense weights have too, a permutation of the input
features if the weight has one, then *strips* of 16 output features. A strip is contiguous: its scales, zero points
and sums, each ``[G][16]``, then its weights in blocks of 64 bytes, which hold 16 columns x 8 codes of 4 bits or
16 columns x 4 codes of 8 bits. Each part is padded to 64 bytes, N to 32 and K to a whole block, with zeros.

Within a block the codes lie in one of two orders. ``dot`` serves float activations: a 16-bit lane belongs to a column
and a parity of k, and holds the codes of k = parity, parity + 2, ... from its low bits up. ``vnni`` serves int8
activations: a byte holds k and k + 4 of a column (4-bit codes), or one k. There int8 codes are stored with 128 added,
and the sums over each group of (code - zero) lie beside the scales.
"""

from __future__ import annotations

import dataclasses
import struct

import torch
from torch import Tensor

from ipex_core.library.checks import read_once
from ipex_core.library.spec import check, dtype_name
from ipex_core.packing import dense
from ipex_core.packing.dense import HEADER_BYTES, PANEL
from ipex_core.packing.quantize import (
    CODEBOOKS,
    FORMATS,
    QWEIGHT_DTYPES,
    expand_groups,
    pack_nibbles,
    quantize,
    unpack_nibbles,
)

__all__ = [
    "BLOCK",
    "FORMATS",
    "Layout",
    "ORDERS",
    "QWEIGHT_DTYPES",
    "SCALE_DTYPES",
    "STRIP",
    "ZEROS",
    "ZERO_DTYPES",
    "check_woq_packed",
    "dequantize",
    "dequantize_codes",
    "header",
    "is_nibble",
    "layout_of",
    "pack",
    "permutation",
    "quantize",
    "read_layout",
    "round_up",
    "stored_scale_dtype",
    "unpack",
]

#: k of the low and of the high nibble (None for byte formats) of the four bytes of a column.
_NIBBLE_K = {
    "dot": ((0, 4, 1, 5), (2, 6, 3, 7)),
    "vnni": ((0, 1, 2, 3), (4, 5, 6, 7)),
}
_BYTE_K = {"dot": (0, 2, 1, 3), "vnni": (0, 1, 2, 3)}


def codes_of(qweight: Tensor, format: str, in_features: int) -> Tensor:
    """Return one byte per weight, ``[N, K]``."""
    if is_nibble(format):
        return unpack_nibbles(qweight, in_features)
    return qweight.contiguous().view(torch.uint8)


def integer_values(codes: Tensor, layout: Layout, zeros: Tensor | None) -> Tensor:
    """Return the integers that order ``vnni`` computes with, int32 ``[N, K]``."""
    if layout.format in CODEBOOKS:
        factor = 127 if layout.format == "nf4" else 2
        table = torch.round(torch.tensor(CODEBOOKS[layout.format]) * factor).int()
        return table.to(codes.device)[codes.int()]
    values = codes.view(torch.int8).int() if layout.format == "int8" else codes.int()
    if zeros is not None:
        return values - expand_groups(zeros.int(), layout.k, layout.group)
    return values - (8 if layout.format == "int4" else 0)


def _in_strips(values: Tensor, layout: Layout) -> Tensor:
    """Return ``[N, G]`` values as padded bytes of each strip, ``[S, bytes]``."""
    padded = values.new_zeros(layout.strips * STRIP, values.shape[1])
    padded[: layout.n] = values
    strips = padded.view(layout.strips, STRIP, -1).transpose(1, 2).reshape(-1)
    return _padded_rows(strips.view(torch.uint8).view(layout.strips, -1))


def _padded_rows(rows: Tensor) -> Tensor:
    return torch.nn.functional.pad(rows, (0, round_up(rows.shape[1], BLOCK) - rows.shape[1]))


def _blocks(codes: Tensor, layout: Layout) -> Tensor:
    """Return the weight blocks of each strip, ``[S, bytes]``, for codes in packed order of K."""
    if layout.format == "int8" and layout.order == "vnni":
        codes = codes ^ 0x80
    padded = codes.new_zeros(layout.strips * STRIP, layout.blocks * layout.block_k)
    padded[: layout.n, : layout.k] = codes
    view = padded.view(layout.strips, STRIP, layout.blocks, layout.block_k).transpose(1, 2)
    if is_nibble(layout.format):
        low, high = _NIBBLE_K[layout.order]
        view = view[..., list(low)] | (view[..., list(high)] << 4)
    else:
        view = view[..., list(_BYTE_K[layout.order])]
    return view.reshape(layout.strips, -1)


def pack(
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    layout: Layout,
    g_idx: Tensor | None = None,
) -> Tensor:
    """Pack codes, scales and zero points; ``layout`` says what they are."""
    codes = codes_of(qweight, layout.format, layout.k)
    least = {"fp8_e4m3": 0x7F, "fp8_e5m2": 0x7C}.get(layout.format)
    if least is not None and bool(((codes & 0x7F) >= least).any()):
        layout = dataclasses.replace(layout, special=True)
    parts = [header(layout)]
    if g_idx is not None:
        order = torch.argsort(g_idx, stable=True)
        codes = codes[:, order]
        parts.append(_padded_rows(order.int().view(1, -1).view(torch.uint8)).view(-1))
    scales = scales.contiguous().view(layout.scale_dtype)
    raw = scales.view(torch.uint8) if layout.scale_dtype.itemsize == 1 else scales
    if layout.block_scales:
        rows = (torch.arange(layout.strips) // (128 // STRIP)).clamp(max=scales.shape[0] - 1)
        columns = [_padded_rows(raw[rows].view(-1).view(torch.uint8).view(layout.strips, -1))]
    else:
        columns = [_in_strips(raw, layout)]
    if zeros is not None:
        columns.append(_in_strips(zeros, layout))
    if layout.order == "vnni":
        values = integer_values(codes, layout, zeros).int()
        tail = layout.groups * layout.group - layout.k
        grouped = torch.nn.functional.pad(values, (0, tail)).view(layout.n, layout.groups, -1)
        columns.append(_in_strips(grouped.sum(-1, dtype=torch.int32), layout))
    columns.append(_blocks(codes, layout))
    parts.append(torch.cat(columns, dim=1).view(-1))
    return torch.cat([part.to(qweight.device) for part in parts])


def _split(packed: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes in packed order of K, scales, zeros (empty without) and the permutation (empty without)."""
    start = HEADER_BYTES + layout.permutation_bytes
    permutation = _places(packed, layout)
    strips = packed[start:].view(layout.strips, -1)
    scale_part, zero_part, sum_part, _ = layout.parts
    count = layout.groups * layout.scale_columns * layout.scale_dtype.itemsize
    scales = strips[:, :count].reshape(-1).view(layout.scale_dtype)
    if layout.block_scales:
        scales = scales.view(layout.strips, -1)[:: 128 // STRIP].contiguous()
    else:
        scales = _out_of_strips(scales, layout)
    zeros = packed.new_empty(0, dtype=torch.int8)
    if layout.zeros != "none":
        dtype = ZERO_DTYPES[layout.zeros]
        raw = strips[:, scale_part : scale_part + layout.groups * STRIP * dtype.itemsize]
        zeros = _out_of_strips(raw.reshape(-1).view(dtype), layout)
    first = scale_part + zero_part + sum_part
    words = strips[:, first:].reshape(layout.strips, layout.blocks, STRIP, 4)
    if is_nibble(layout.format):
        low, high = _NIBBLE_K[layout.order]
        block = words.new_empty(*words.shape[:-1], 8)
        block[..., list(low)] = words & 15
        block[..., list(high)] = words >> 4
    else:
        block = torch.empty_like(words)
        block[..., list(_BYTE_K[layout.order])] = words
    codes = block.transpose(1, 2).reshape(layout.strips * STRIP, -1)[: layout.n, : layout.k]
    if layout.format == "int8" and layout.order == "vnni":
        codes = codes ^ 0x80
    return _plain(codes), scales, zeros, permutation


def _places(packed: Tensor, layout: Layout) -> Tensor:
    """Return the input feature at each packed place of K, int32; empty without a permutation."""
    numbers = packed[HEADER_BYTES : HEADER_BYTES + 4 * layout.k * layout.permuted]
    # A copy puts the numbers on an address that is aligned for them.
    return numbers.clone().view(torch.int32)


def _out_of_strips(values: Tensor, layout: Layout) -> Tensor:
    view = values.view(layout.strips, layout.groups, STRIP)
    if view.dtype.itemsize == 1:  # torch cannot move every 8-bit float
        view = view.view(torch.uint8)
    moved = view.transpose(1, 2).reshape(-1, layout.groups)[: layout.n]
    return _plain(moved).view(values.dtype)


def _plain(x: Tensor) -> Tensor:
    """Return a copy with the strides of a new tensor; ``contiguous`` keeps odd ones of dimensions of size 1."""
    return x.new_empty(x.shape).copy_(x)


def unpack(packed: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(qweight, scales, zeros, g_idx)`` as they were packed; absent ones are empty."""
    codes, scales, zeros, permutation = _split(packed, layout)
    g_idx = permutation
    if layout.permuted:
        g_idx = torch.empty_like(permutation)
        place = torch.arange(layout.k, dtype=torch.int32, device=packed.device)
        g_idx[permutation.long()] = place // layout.group
        codes = _unpermuted(codes, permutation)
    if is_nibble(layout.format):
        return pack_nibbles(codes), scales, zeros, g_idx
    return codes.view(QWEIGHT_DTYPES[layout.format]), scales, zeros, g_idx


def _unpermuted(values: Tensor, permutation: Tensor) -> Tensor:
    result = torch.empty_like(values)
    result[:, permutation.long()] = values
    return result


def dequantize_codes(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    layout: Layout,
    dtype: torch.dtype,
    rounded: bool = False,
) -> Tensor:
    """Return scale * value for codes ``[N, K]`` in packed order of K, computed in ``dtype``.

    ``rounded``: with the values of nf4 as multiples of 1 / 127, as products of integers use them.
    """
    if layout.format in CODEBOOKS:
        table = torch.tensor(CODEBOOKS[layout.format], dtype=torch.float32, device=codes.device)
        values = table[codes.int()].to(dtype)
        if rounded and layout.format == "nf4":
            values = torch.round(values * 127) / 127
    elif layout.format == "int8":
        values = codes.view(torch.int8).to(dtype)
    elif layout.format == "int4":
        values = codes.to(dtype) - (8 if zeros is None else 0)
    else:
        values = codes.view(QWEIGHT_DTYPES[layout.format]).float().to(dtype)
    if zeros is not None:
        values = values - expand_groups(zeros.to(dtype), layout.k, layout.group)
    wide = scales.float().to(dtype)
    if layout.block_scales:
        wide = wide.repeat_interleave(128, dim=0)[: layout.n]
    return values * expand_groups(wide, layout.k, layout.group)


def permutation(packed: Tensor, layout: Layout) -> Tensor:
    """Return the input feature at each packed place of K, int64 ``[K]``."""
    if not layout.permuted:
        return torch.arange(layout.k, device=packed.device)
    return _places(packed, layout).long()


def dequantize(
    packed: Tensor, layout: Layout, dtype: torch.dtype = torch.float32, rounded: bool = False
) -> Tensor:
    """Return the ``[N, K]`` float weight of a packed one, in the order of the input features."""
    codes, scales, zeros, places = _split(packed, layout)
    some = zeros if zeros.numel() else None
    weight = dequantize_codes(codes, scales, some, layout, dtype, rounded)
    return _unpermuted(weight, places) if layout.permuted else weight


def check_woq_packed(
    op: str, name: str, packed: Tensor, out_features: int, in_features: int
) -> Layout | None:
    """Check that a tensor holds a packed quantized ``[out_features, in_features]`` weight; return its layout.

    Only the data tell, so of tensors without data (fake tensors during a trace) just dtype and shape are checked.
    """
    expected = f"be a weight of shape [{out_features}, {in_features}] packed by pack_woq_weight"
    fits = packed.dtype == torch.uint8 and packed.dim() == 1
    check(fits, op, name, expected, f"{dtype_name(packed.dtype)} {list(packed.shape)}")
    if type(packed) is not torch.Tensor or packed.is_meta:
        return None
    layout = read_layout(packed)
    fits = layout is not None and (layout.n, layout.k) == (out_features, in_features)
    check(fits, op, name, expected, dense.header_text(packed if layout else packed[:0]))
    return layout


# --- layout: header and sizes -----------------------------------------------------------------------------------------


STRIP = 16
BLOCK = 64
ORDERS = {"dot": 0, "vnni": 1}
SCALE_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e8m0fnu: 3}
#: Kinds of zero points by their id, and what they are stored as.
ZEROS = {"none": 0, "int8": 1, "float32": 2}
ZERO_DTYPES = {"int8": torch.int8, "float32": torch.float32}
_FLAG_PERMUTED = 1
_FLAG_SPECIAL = 2
_MAGIC = 0x57585049  # "IPXW", little endian
_VERSION = 1
# magic, version, format, panel width, N, K, group, scale type, zero kind, order, flags, scale columns
_HEADER = struct.Struct("<IIIIqqiBBBBB23x")


def is_nibble(format: str) -> bool:
    """Return whether the codes of a format have 4 bits."""
    return QWEIGHT_DTYPES[format] == torch.uint8


def round_up(value: int, to: int) -> int:
    """Return the next multiple of ``to``."""
    return -(-value // to) * to


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """What the header says, and the sizes that follow from it.

    Attributes:
        format: A key of `FORMATS`.
        n: Output features.
        k: Input features.
        group: Elements of K that share a scale; K if there is one per output feature.
        scale_dtype: A key of `SCALE_DTYPES`.
        zeros: A key of `ZEROS`.
        order: A key of `ORDERS`.
        permuted: Whether the input features are reordered (``g_idx``).
        block_scales: Whether 128 x 128 weights share a scale.
        special: Whether an fp8 weight has codes for NaN or infinity.
    """

    format: str
    n: int
    k: int
    group: int
    scale_dtype: torch.dtype = torch.float32
    zeros: str = "none"
    order: str = "dot"
    permuted: bool = False
    block_scales: bool = False
    special: bool = False

    @property
    def groups(self) -> int:
        return -(-self.k // self.group)

    @property
    def block_k(self) -> int:
        return 8 if is_nibble(self.format) else 4

    @property
    def blocks(self) -> int:
        return -(-self.k // self.block_k)

    @property
    def strips(self) -> int:
        return round_up(self.n, PANEL) // STRIP

    @property
    def scale_columns(self) -> int:
        return 1 if self.block_scales else STRIP

    @property
    def permutation_bytes(self) -> int:
        return round_up(4 * self.k, BLOCK) if self.permuted else 0

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Bytes of the scales, zero points, sums and weights of a strip."""
        zero_bytes = 0
        if self.zeros != "none":
            zero_bytes = self.groups * STRIP * ZERO_DTYPES[self.zeros].itemsize
        return (
            round_up(self.groups * self.scale_columns * self.scale_dtype.itemsize, BLOCK),
            round_up(zero_bytes, BLOCK),
            self.groups * STRIP * 4 if self.order == "vnni" else 0,
            self.blocks * BLOCK,
        )

    @property
    def bytes(self) -> int:
        return HEADER_BYTES + self.permutation_bytes + self.strips * sum(self.parts)

    @property
    def scale_shape(self) -> list[int]:
        return [-(-self.n // 128) if self.block_scales else self.n, self.groups]

    @property
    def qweight_shape(self) -> list[int]:
        return [self.n, -(-self.k // 2) if is_nibble(self.format) else self.k]


def stored_scale_dtype(scales: Tensor) -> torch.dtype:
    """Return the dtype of scales in the format: bytes are powers of two."""
    return torch.float8_e8m0fnu if scales.dtype == torch.uint8 else scales.dtype


def layout_of(
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    format: str,
    in_features: int,
    group_size: int,
    g_idx: Tensor | None,
    order: str,
) -> Layout:
    """Return the layout of a weight with these parts."""
    group = in_features if group_size == -1 else min(group_size, in_features)
    return Layout(
        format,
        qweight.shape[0],
        in_features,
        group,
        stored_scale_dtype(scales),
        "none" if zeros is None else dtype_name(zeros.dtype),
        order,
        g_idx is not None,
        scales.shape[0] != qweight.shape[0],
    )


def header(layout: Layout) -> Tensor:
    """Return the 64 bytes that start a packed tensor."""
    raw = _HEADER.pack(
        _MAGIC,
        _VERSION,
        FORMATS[layout.format],
        PANEL,
        layout.n,
        layout.k,
        layout.group,
        SCALE_DTYPES[layout.scale_dtype],
        ZEROS[layout.zeros],
        ORDERS[layout.order],
        (_FLAG_PERMUTED if layout.permuted else 0) | (_FLAG_SPECIAL if layout.special else 0),
        layout.scale_columns,
    )
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def read_layout(packed: Tensor) -> Layout | None:
    """Return the layout of a packed quantized weight, or None if the tensor is not one."""
    return read_once(packed, _read_layout)


def _read_layout(packed: Tensor) -> Layout | None:
    if packed.dim() != 1 or packed.dtype != torch.uint8 or not packed.is_contiguous():
        return None
    if packed.numel() < HEADER_BYTES:
        return None
    (magic, version, format, panel, n, k, group, scale, zeros, order, flags, columns) = (
        _HEADER.unpack(bytes(packed[:HEADER_BYTES].tolist()))
    )
    if (magic, version, panel) != (_MAGIC, _VERSION, PANEL) or n <= 0 or not 0 < group <= k:
        return None
    names: list[dict[int, str]] = [
        {number: name for name, number in table.items()} for table in (FORMATS, ZEROS, ORDERS)
    ]
    scales = {number: dtype for dtype, number in SCALE_DTYPES.items()}
    if format not in names[0] or zeros not in names[1] or order not in names[2]:
        return None
    if scale not in scales or columns not in (1, STRIP):
        return None
    layout = Layout(
        names[0][format],
        n,
        k,
        group,
        scales[scale],
        names[1][zeros],
        names[2][order],
        bool(flags & _FLAG_PERMUTED),
        columns == 1,
        bool(flags & _FLAG_SPECIAL),
    )
    return layout if layout.bytes == packed.numel() else None
