# SPDX-License-Identifier: Apache-2.0
"""Layout of the packed format of quantised weights: header and sizes. `ipex_core.packing.woq` describes the format."""

from __future__ import annotations

import dataclasses
import struct

import torch

from ipex_core.library.spec import dtype_name
from ipex_core.packing.dense import HEADER_BYTES, PANEL
from ipex_core.packing.quantize import FORMATS, QWEIGHT_DTYPES

__all__ = [
    "BLOCK",
    "ORDERS",
    "SCALE_DTYPES",
    "STRIP",
    "ZEROS",
    "ZERO_DTYPES",
    "Layout",
    "header",
    "is_nibble",
    "layout_of",
    "read_layout",
    "round_up",
    "stored_scale_dtype",
]

Tensor = torch.Tensor

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
    """Return the layout of a packed quantised weight, or None if the tensor is not one."""
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
