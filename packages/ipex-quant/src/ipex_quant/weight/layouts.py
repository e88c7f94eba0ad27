# SPDX-License-Identifier: Apache-2.0
"""How other quantizers lay out the codes of a weight in 32-bit words, read into one form."""

from __future__ import annotations

import math
from enum import IntEnum

import torch
from torch import Tensor

from ipex_core.library.spec import check
from ipex_core.packing.quantize import pack_nibbles
from ipex_quant.weight.tensor import QuantizedWeight, is_integer

BITS = (2, 3, 4, 8)
#: Columns turned into rows at a time.
_COLUMNS = 64
#: Nibble i of a word of AWQ holds this one of its eight columns.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class WoqWeightFormat(IntEnum):
    """How the codes of a weight are laid out."""

    PLAIN_FORMAT = (
        0  #: ``[N, K]`` bytes, or ``[N, K / 2]`` bytes with the even column in the low nibble.
    )
    GPTQ_FORMAT = 1
    AWQ_FORMAT = 2


class QuantMethod(IntEnum):
    """The quantizer whose layout a weight is in."""

    GPTQ_GEMM = 0
    AWQ_GEMM = 1


class QuantDtype(IntEnum):
    """What a weight from another quantizer is stored as."""

    INT4 = 0


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Return ``[count, C]`` codes from ``[W, C]`` int32 words, each column a stream of bits from low to high."""
    period = math.lcm(32, bits)
    per_period, codes_per_period = period // 32, period // bits
    periods = -(-words.shape[0] // per_period)
    missing = periods * per_period - words.shape[0]
    if missing:
        words = torch.nn.functional.pad(words, (0, 0, 0, missing))
    view = words.view(periods, per_period, -1)
    codes = torch.empty(periods, codes_per_period, words.shape[1], dtype=torch.uint8)
    mask = (1 << bits) - 1
    for i in range(codes_per_period):
        word, shift = divmod(i * bits, 32)
        value = view[:, word] >> shift
        if shift + bits > 32:
            # The shift copied the sign; what belongs there comes from the next word.
            value = (value & ((1 << (32 - shift)) - 1)) | (view[:, word + 1] << (32 - shift))
        codes[:, i] = (value & mask).to(torch.uint8)
    return codes.view(-1, words.shape[1])[:count]


def codes_by_rows(words: Tensor, bits: int, count: int) -> Tensor:
    """Return ``[C, count]`` codes from ``[W, C]`` words: `unpack_words`, transposed in pieces that fit a cache."""
    result = torch.empty(words.shape[1], count, dtype=torch.uint8)
    for start in range(0, words.shape[1], _COLUMNS):
        part = words[:, start : start + _COLUMNS].contiguous()
        result[start : start + _COLUMNS] = unpack_words(part, bits, count).t()
    return result


def awq_by_rows(words: Tensor, columns: int) -> Tensor:
    """Return ``[columns, R]`` codes from ``[R, C]`` words: `unpack_awq`, transposed."""
    result = torch.empty(words.shape[1] * 8, words.shape[0], dtype=torch.uint8)
    step = _COLUMNS // 8
    for start in range(0, words.shape[1], step):
        part = unpack_awq(words[:, start : start + step].contiguous())
        result[start * 8 : (start + step) * 8] = part.t()
    return result[:columns]


def unpack_awq(words: Tensor) -> Tensor:
    """Return ``[R, 8 C]`` 4-bit codes from ``[R, C]`` int32 words in AWQ's order."""
    codes = torch.empty(*words.shape, 8, dtype=torch.uint8)
    for nibble, column in enumerate(AWQ_ORDER):
        codes[..., column] = ((words >> (4 * nibble)) & 15).to(torch.uint8)
    return codes.view(words.shape[0], -1)


def unsigned_weight(
    codes: Tensor,
    zeros: Tensor | None,
    scales: Tensor,
    bits: int,
    group_size: int,
    g_idx: Tensor | None = None,
    bias: Tensor | None = None,
    name: str = "",
) -> QuantizedWeight:
    """Return the weight ``scale * (code - zero)`` for unsigned codes.

    Args:
        codes: uint8 ``[N, K]``.
        zeros: ``[N, G]`` integers, or None where all are ``2 ** (bits - 1)``.
        scales: ``[N, G]``.
        bits: 2, 3, 4 or 8. Codes of fewer than 4 bits are stored as 4-bit ones.
        group_size: Input features that share a scale, or -1.
        g_idx: ``[K]``, or None.
        bias: ``[N]``, or None.
        name: For messages.
    """
    stored = (codes ^ 0x80).view(torch.int8) if bits == 8 else pack_nibbles(codes)
    return stored_weight(stored, codes.shape[1], zeros, scales, bits, group_size, g_idx, bias, name)


def stored_weight(
    stored: Tensor,
    k: int,
    zeros: Tensor | None,
    scales: Tensor,
    bits: int,
    group_size: int,
    g_idx: Tensor | None = None,
    bias: Tensor | None = None,
    name: str = "",
) -> QuantizedWeight:
    """Return the weight of `unsigned_weight` for codes as a `QuantizedWeight` has them.

    Args:
        stored: ``[N, ceil(K / 2)]`` bytes with the even column in the low nibble, or for 8 bits int8 ``[N, K]``, which
            is the unsigned code less 128.
        k: Number of input features.
        zeros: As there, and so are all others.
        scales: See there.
        bits: See there.
        group_size: See there.
        g_idx: See there.
        bias: See there.
        name: See there.
    """
    middle = 1 << (bits - 1)
    if zeros is not None and bool((zeros == middle).all()):
        zeros = None
    if bits in (2, 3) and zeros is None:  # the usual zero of a 4-bit code is another
        zeros = torch.full(scales.shape, middle)
    form = "int8" if bits == 8 else "int4"
    if bits == 8:
        zeros = None if zeros is None else zeros.int() - 128
    if zeros is not None:
        small = bool((zeros.int() <= 127).all())
        zeros = zeros.to(torch.int8 if small else torch.float32)
    if g_idx is not None:
        g_idx = _g_idx(g_idx, k, group_size, scales.shape[1], name)
    weight = QuantizedWeight(
        form, k, stored, scales.contiguous(), zeros, group_size, g_idx, bias, name
    )
    return weight.even() if weight.not_packable() else weight


def _g_idx(g_idx: Tensor, k: int, group_size: int, groups: int, name: str) -> Tensor | None:
    """Return the groups of the features, None where they just follow each other."""
    key = _key(name, "g_idx")
    check(list(g_idx.shape) == [k], key, "g_idx", f"have shape [{k}]", list(g_idx.shape))
    check(is_integer(g_idx), key, "g_idx", "have integers", g_idx.dtype)
    known = g_idx.numel() == 0 or (int(g_idx.min()) >= 0 and int(g_idx.max()) < groups)
    check(known, key, "g_idx", f"be in 0..{groups - 1}", f"{g_idx.min()}..{g_idx.max()}")
    g_idx = g_idx.to(torch.int32)
    group = k if group_size == -1 else group_size
    if groups == -(-k // group) and torch.equal(g_idx, torch.arange(k, dtype=torch.int32) // group):
        return None
    return g_idx


def _key(name: str, suffix: str) -> str:
    return f"{name}.{suffix}" if name else suffix


def _check_words(words: Tensor, name: str, suffix: str, shape: list[int]) -> None:
    key = _key(name, suffix)
    check(words.dtype == torch.int32, key, suffix, "have dtype int32", words.dtype)
    check(list(words.shape) == shape, key, suffix, f"have shape {shape}", list(words.shape))


def _groups(k: int, group_size: int, scales: Tensor, g_idx: Tensor | None, name: str) -> int:
    groups = scales.shape[0]
    expected = 1 if group_size == -1 else -(-k // group_size)
    fits = groups == expected
    if not fits and g_idx is not None and groups > expected and g_idx.numel():
        # Part of the input features of a weight with g_idx uses scales of all groups, some more than others.
        counts = torch.bincount(g_idx.long().clamp(0, groups - 1), minlength=groups)
        fits = int(counts.max()) <= group_size and bool((counts != counts[0]).any())
    text = f"have {expected} groups of {group_size} for {k} input features"
    check(fits, _key(name, "scales"), "scales", text, groups)
    return groups


def gptq_weight(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None,
    g_idx: Tensor | None = None,
    *,
    bits: int = 4,
    group_size: int = -1,
    symmetric: bool = False,
    offset: bool = True,
    in_features: int | None = None,
    bias: Tensor | None = None,
    name: str = "",
) -> QuantizedWeight:
    """Read a weight in GPTQ's layout.

    Args:
        qweight: int32 ``[ceil(K * bits / 32), N]``.
        scales: ``[G, N]``.
        qzeros: int32 ``[G, ceil(N * bits / 32)]``, or None where all zero points are ``2 ** (bits - 1)``.
        g_idx: The group of each input feature, ``[K]``, or None.
        bits: 2, 3, 4 or 8.
        group_size: Input features that share a scale, or -1.
        symmetric: The zero points are all ``2 ** (bits - 1)``; those stored say by themselves whether they have an
            offset.
        offset: The first version of the format, which stores zero points less one.
        in_features: K, where it does not follow from ``qweight``.
        bias: ``[N]``, or None.
        name: The module's name, for messages.

    Raises:
        OpArgumentError: A tensor does not fit the others; the message names its key.
    """
    check(bits in BITS, _key(name, "qweight"), "bits", "be one of 2, 3, 4, 8", bits)
    two = qweight.dim() == 2 and scales.dim() == 2
    key = _key(name, "qweight")
    check(two, key, "qweight and scales", "be 2-D", [list(qweight.shape), list(scales.shape)])
    k = qweight.shape[0] * 32 // bits if in_features is None else in_features
    n = scales.shape[1]
    _check_words(qweight, name, "qweight", [-(-k * bits // 32), n])
    groups = _groups(k, group_size, scales, g_idx, name)
    zeros: Tensor | None = None
    if qzeros is not None:
        _check_words(qzeros, name, "qzeros", [groups, -(-n * bits // 32)])
        zeros = unpack_words(qzeros.t().contiguous(), bits, n)
        middle = 1 << (bits - 1)
        if symmetric and bool((zeros == middle).all()):
            offset = False
        if offset:
            # A zero point of 0 is stored as -1, that is as the largest code.
            zeros = (zeros + 1) & ((1 << bits) - 1)
    codes = codes_by_rows(qweight, bits, k)
    scales = scales.t()
    return unsigned_weight(codes, zeros, scales, bits, group_size, g_idx, bias, name)


def awq_weight(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None,
    g_idx: Tensor | None = None,
    *,
    group_size: int = -1,
    bias: Tensor | None = None,
    name: str = "",
) -> QuantizedWeight:
    """Read a 4-bit weight in AWQ's layout.

    Args:
        qweight: int32 ``[K, N / 8]``.
        scales: ``[G, N]``.
        qzeros: int32 ``[G, N / 8]``, or None where all zero points are 8.
        g_idx: The group of each input feature, ``[K]``, where they do not just follow each other, or None.
        group_size: Input features that share a scale, or -1.
        bias: ``[N]``, or None.
        name: The module's name, for messages.

    Raises:
        OpArgumentError: A tensor does not fit the others; the message names its key.
    """
    two = qweight.dim() == 2 and scales.dim() == 2
    key = _key(name, "qweight")
    check(two, key, "qweight and scales", "be 2-D", [list(qweight.shape), list(scales.shape)])
    k, n = qweight.shape[0], scales.shape[1]
    _check_words(qweight, name, "qweight", [k, -(-n // 8)])
    groups = _groups(k, group_size, scales, g_idx, name)
    zeros: Tensor | None = None
    if qzeros is not None:
        _check_words(qzeros, name, "qzeros", [groups, -(-n // 8)])
        zeros = unpack_awq(qzeros)[:, :n].t().contiguous()
    codes = awq_by_rows(qweight, n)
    return unsigned_weight(codes, zeros, scales.t(), 4, group_size, g_idx, bias, name)
