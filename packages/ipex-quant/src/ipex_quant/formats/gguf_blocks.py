# SPDX-License-Identifier: Apache-2.0
"""The block types of GGUF files: bytes of rows into `QuantizedWeight`.

A row of K weights is K / 32 or K / 256 blocks. With d and m float16 numbers of a block, a weight is

==========  =======  =========================================================  =====================
type        bytes    weight                                                     becomes
==========  =======  =========================================================  =====================
Q4_0        18 / 32  ``d * (code - 8)``                                         int4, groups of 32
Q4_1        20 / 32  ``d * code + m``                                           int4, groups of 32
Q5_0        22 / 32  ``d * (code - 16)``                                        int8, groups of 32
Q5_1        24 / 32  ``d * code + m``                                           int8, groups of 32
Q8_0        34 / 32  ``d * code``                                               int8, groups of 32
Q4_K        144/256  ``d * scale * code - m * minimum``, 6 bits each per 32     int4, groups of 32
Q5_K        176/256  the same with codes of 5 bits                              int8, groups of 32
Q6_K        210/256  ``d * scale * (code - 32)``, int8 scales per 16            int8, groups of 16
==========  =======  =========================================================  =====================

Codes, and scales without a minimum, stay exactly as they are. A minimum becomes a float32 zero point, so that those
weights agree to the rounding of float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from ipex_core.library.spec import check
from ipex_core.packing.quantize import pack_nibbles
from ipex_quant.weight.tensor import QuantizedWeight

__all__ = ["BLOCKS", "FLOATS", "Block", "blocks_weight", "type_name"]

Tensor = torch.Tensor
#: Unsigned codes ``[R, K]``, scales ``[R, G]``, and what is subtracted: zero points of all, or minima ``[R, G]``.
Parts = tuple[Tensor, Tensor, int | Tensor]

#: Bytes of blocks that are decoded at a time.
_PART = 4 << 20

#: Ids of types that are plain numbers.
FLOATS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
#: Other types that exist, for messages.
_OTHERS = {
    **{10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32"},
    **{27: "I64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A block type.

    Attributes:
        name: As llama.cpp calls it.
        weights: Weights of a block.
        size: Bytes of a block.
        group: Weights that share a scale.
        bits: Bits of a code.
        decode: Takes ``[R, B, size]`` bytes of R rows of B blocks.
    """

    name: str
    weights: int
    size: int
    group: int
    bits: int
    decode: Callable[[Tensor], Parts]


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return float16 ``[R, B]`` of the two bytes at a place of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _rows(values: Tensor) -> Tensor:
    return values.reshape(values.shape[0], -1)


def _nibbles(data: Tensor) -> Tensor:
    """Return ``[..., 2 n]`` codes: the low nibbles of n bytes, then the high ones."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _bits(data: Tensor) -> Tensor:
    """Return ``[..., 8 n]`` bits, the lowest of the first byte first."""
    return ((data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


def _q4_0(b: Tensor) -> Parts:
    return _rows(_nibbles(b[..., 2:])), _half(b, 0), 8


def _q4_1(b: Tensor) -> Parts:
    return _rows(_nibbles(b[..., 4:])), _half(b, 0), -_half(b, 2).float()


def _q5_0(b: Tensor) -> Parts:
    return _rows(_nibbles(b[..., 6:]) | (_bits(b[..., 2:6]) << 4)), _half(b, 0), 16


def _q5_1(b: Tensor) -> Parts:
    codes = _nibbles(b[..., 8:]) | (_bits(b[..., 4:8]) << 4)
    return _rows(codes), _half(b, 0), -_half(b, 2).float()


def _q8_0(b: Tensor) -> Parts:
    return _rows(b[..., 2:] ^ 0x80), _half(b, 0), 128


def _scales_k(b: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima of the eight groups of a block, ``[R, 8 B]``: 6 bits each in 12 bytes."""
    d, m = _half(b, 0).float().unsqueeze(-1), _half(b, 2).float().unsqueeze(-1)
    low, middle, high = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=-1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), dim=-1)
    return _rows(d * scales), _rows(m * minima)


def _q4_k(b: Tensor) -> Parts:
    scales, minima = _scales_k(b)
    # 32 bytes are two groups: their low nibbles one, the high ones the next.
    return _rows(_nibbles(b[..., 16:].unflatten(-1, (4, 32)))), scales, minima


def _q5_k(b: Tensor) -> Parts:
    scales, minima = _scales_k(b)
    codes = _nibbles(b[..., 48:].unflatten(-1, (4, 32)))  # [R, B, 4, 64]
    # Bit g of byte i is the fifth of weight i of group g.
    fifth = (b[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).view(8, 1)) & 1
    return _rows(codes | (fifth.reshape(codes.shape) << 4)), scales, minima


def _q6_k(b: Tensor) -> Parts:
    low = _nibbles(b[..., :128].unflatten(-1, (2, 64)))  # [R, B, 2, 128]
    high = b[..., 128:192].unflatten(-1, (2, 1, 32))
    pairs = (high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)) & 3
    codes = low | (pairs.reshape(low.shape) << 4)
    scales = b[..., 192:208].contiguous().view(torch.int8).float()
    return _rows(codes), _rows(scales * _half(b, 208).float().unsqueeze(-1)), 32


#: Id of a type -> the type.
BLOCKS = {
    2: Block("Q4_0", 32, 18, 32, 4, _q4_0),
    3: Block("Q4_1", 32, 20, 32, 4, _q4_1),
    6: Block("Q5_0", 32, 22, 32, 5, _q5_0),
    7: Block("Q5_1", 32, 24, 32, 5, _q5_1),
    8: Block("Q8_0", 32, 34, 32, 8, _q8_0),
    12: Block("Q4_K", 256, 144, 32, 4, _q4_k),
    13: Block("Q5_K", 256, 176, 32, 5, _q5_k),
    14: Block("Q6_K", 256, 210, 16, 6, _q6_k),
}


def type_name(number: int) -> str:
    """Return what a type is called, for messages."""
    if number in FLOATS:
        return str(FLOATS[number]).removeprefix("torch.")
    return BLOCKS[number].name if number in BLOCKS else _OTHERS.get(number, f"type {number}")


def blocks_weight(
    data: Tensor, number: int, bias: Tensor | None = None, name: str = ""
) -> QuantizedWeight:
    """Read the rows of a weight.

    Args:
        data: uint8 ``[N, bytes of a row]``.
        number: Id of the type, a key of `BLOCKS`.
        bias: ``[N]``, or None.
        name: The module's name, for messages.

    Raises:
        OpArgumentError: The type is not supported, or rows are no whole number of blocks.
    """
    key = f"{name}.gguf_blocks"
    known = ", ".join(block.name for block in BLOCKS.values())
    check(number in BLOCKS, key, "type", f"be one of {known}", type_name(number))
    block = BLOCKS[number]
    fits = data.dtype == torch.uint8 and data.dim() == 2 and data.shape[1] % block.size == 0
    what = f"be uint8 [N, a multiple of {block.size}] for {block.name}"
    check(fits, key, "gguf_blocks", what, f"{data.dtype} {list(data.shape)}")
    step = max(1, _PART // max(1, data.shape[1]))
    pieces = [_decode(part, block) for part in data.split(step)] or [_decode(data, block)]
    codes, scales = (torch.cat([piece[i] for piece in pieces]) for i in (0, 1))  # type: ignore[misc]
    points = [piece[2] for piece in pieces if piece[2] is not None]
    zeros = torch.cat(points) if points else None
    k = data.shape[1] // block.size * block.weights
    form = "int4" if block.bits == 4 else "int8"
    return QuantizedWeight(form, k, codes, scales, zeros, block.group, None, bias, name)


def _decode(data: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return stored codes, scales and float zero points of some rows."""
    rows = data.shape[0]
    codes, scales, offset = block.decode(data.unflatten(1, (-1, block.size)))
    zeros: Tensor | None = None
    if isinstance(offset, Tensor):
        scales, zeros = _with_zeros(codes, scales, offset, block.group)
        offset = 0
    if block.bits == 4:
        stored = pack_nibbles(codes)
    else:  # those of 8 bits wrap around into their sign
        stored = (codes - offset).view(torch.int8)
    return stored.view(rows, -1), scales.view(rows, -1), zeros


def _with_zeros(codes: Tensor, scales: Tensor, minima: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return scales and zero points for ``scale * code - minimum``; codes of groups that are constant change."""
    scales = scales.float()
    constant = scales == 0
    if bool(
        constant.any()
    ):  # one value, -minimum: code 0 with zero point 1 and the minimum as scale
        codes.unflatten(1, (-1, group)).masked_fill_(constant.unsqueeze(-1), 0)
        scales = torch.where(constant, minima, scales)
    return scales, torch.where(constant, 1.0, minima / torch.where(constant, 1.0, scales))
