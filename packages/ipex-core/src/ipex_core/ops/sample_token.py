# SPDX-License-Identifier: Apache-2.0
"""Choice of the next token: which may come, sampling from the logits of the vocabulary, and the largest logit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ipex_core.library.checks import (
    acc,
    check_device,
    check_dtype_in,
    check_not_expanded,
    check_tensor,
    dtype_name,
    randn,
    row_samples,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample, check

_OP = "sample_token"


def _sample_token(
    logits: Tensor,
    noise: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """Draw a token from ``softmax(logits / temperature)``, limited to likely tokens, by inverting its sum.

    The limits apply in this order. Tokens of equal logits are kept or dropped together, so that the result does not
    depend on how a sort breaks ties; the most likely token is always kept.

    - ``top_k``: tokens whose logit is at least the ``top_k``-th largest.
    - ``top_p``: tokens before which, in falling order, lies less than ``top_p`` of the probability that ``top_k``
      left.
    - ``min_p``: tokens at least ``min_p`` times as likely as the most likely one.

    The token is the first at which the sum of the remaining probabilities, in the order of the vocabulary, exceeds
    ``noise`` times their total. The op has no state: equal noise gives equal tokens.

    Args:
        logits: ``[..., V]``, float32, bfloat16 or float16; -infinity excludes a token.
        noise: ``[...]`` float32 uniform random numbers in ``[0, 1)``, one per row.
        temperature: Between 1e-6 and 1e6.
        top_k: 0 for no limit.
        top_p: Between 0 and 1; 1 for no limit.
        min_p: Between 0 and 1; 0 for no limit.

    Returns:
        int64 ``[...]``: the index of the token of each row.

    Raises:
        RuntimeError: An argument does not fit, or a row has no finite maximum or a NaN.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020 (top-p); Nguyen et al., "Turning Up
    the Heat: Min-p Sampling", 2024.
    """
    wrong = noise[~((noise >= 0) & (noise < 1))]
    for value in wrong[:1].tolist():
        check(False, _OP, "noise", "be in [0, 1)", f"{value:g}")
    scores = acc(logits) / temperature
    if scores.numel() == 0:
        return torch.zeros(noise.shape, dtype=torch.int64, device=logits.device)
    _check_rows(_OP, scores)
    largest = scores.amax(-1, keepdim=True)

    def keep(condition: Tensor) -> Tensor:
        return torch.where(condition, scores, -torch.inf)

    if 0 < top_k < scores.shape[-1]:
        scores = keep(scores >= scores.topk(top_k).values[..., -1:])
    if top_p < 1.0:
        ordered = scores.sort(-1, descending=True).values
        probability = ordered.softmax(-1)
        before = probability.cumsum(-1) - probability
        kept = before < top_p
        kept[..., 0] = True
        scores = keep(scores >= torch.where(kept, ordered, torch.inf).amin(-1, keepdim=True))
    if min_p > 0.0:
        scores = keep((scores - largest).exp() >= min_p)
    probability = scores.softmax(-1)
    total = probability.cumsum(-1)
    target = noise.unsqueeze(-1).to(total.dtype) * total[..., -1:]
    # Rounding may leave no sum above the target: then it is the last token that is possible.
    exceeds = (total > target) & (probability > 0)
    first = exceeds.to(torch.uint8).argmax(-1)
    places = torch.arange(scores.shape[-1], device=scores.device)
    last = torch.where(probability > 0, places, 0).amax(-1)
    return torch.where(exceeds.any(-1), first, last)


def _check_rows(op: str, logits: Tensor) -> None:
    for row, value in enumerate(logits.amax(-1).isfinite().flatten().tolist()):
        wanted = "have a finite maximum and no NaN in each row"
        check(value, op, "logits", wanted, f"NaN or infinity in row {row}")


def _check(a: Arguments) -> None:
    check_tensor(_OP, "logits", a.logits)
    columns = a.logits.shape[-1]
    wanted = "have between 1 and 2^31 - 1 columns"
    a.require(0 < columns < 2**31, "logits", wanted, list(a.logits.shape))
    check_device(_OP, "noise", a.noise, a.logits, "logits")
    dtype = dtype_name(a.noise.dtype)
    a.require(a.noise.dtype == torch.float32, "noise", "have dtype float32", dtype)
    wanted = "have the shape of logits without its last dimension"
    a.require(a.noise.shape == a.logits.shape[:-1], "noise", wanted, list(a.noise.shape))
    # As floats of C++ are written, so that kernels say the same.
    wanted, got = "be in [1e-06, 1e+06]", f"{a.temperature:g}"
    a.require(1e-6 <= a.temperature <= 1e6, "temperature", wanted, got)
    a.require(a.top_k >= 0, "top_k", "be at least 0")
    a.require(0 <= a.top_p <= 1, "top_p", "be in [0, 1]", f"{a.top_p:g}")
    a.require(0 <= a.min_p <= 1, "min_p", "be in [0, 1]", f"{a.min_p:g}")


def _noise(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for rows, columns in ((1, 1), (3, 7), (5, 100), (2, 513), (3, 5000)):
        logits = randn(rows, columns, dtype=dtype, seed=91, scale=3.0)
        noise = _noise(rows, seed=columns)
        name = f"{rows}x{columns}"
        yield Sample((logits, noise), id=name)
        yield Sample((logits, noise, 0.7, 5), id=f"{name}-k5")
        yield Sample((logits, noise, 1.3, 0, 0.8), id=f"{name}-p0.8")
        yield Sample((logits, noise, 1.0, 50, 0.9, 0.02), id=f"{name}-all")
    yield Sample((logits * 0.01, noise, 1.0, 0, 0.95), id="flat-p0.95")
    yield Sample((logits, noise, 0.8, 0, 1.0, 0.1), id="min_p")
    yield Sample((logits, noise, 0.8, 2000, 0.999), id="large-k")
    batch = randn(2, 3, 2000, dtype=dtype, seed=92)[..., ::2]
    batch[0, 1, 20:] = -torch.inf
    yield Sample((batch, _noise(2, 3, seed=1), 1.0, 40), id="3d-masked")
    yield Sample((batch, _noise(2, 3, seed=2), 1.0, 0, 0.0), id="p0")
    yield Sample((torch.zeros(1, 600, dtype=dtype), torch.tensor([0.5])), id="equal")
    yield Sample((batch[:0], _noise(0, 3, seed=2)), id="no_rows")


def _stock(
    logits: Tensor,
    noise: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """The chain of transformers' logits warpers, followed by its draw."""
    scores = logits.float() / temperature
    if top_k:
        least = torch.topk(scores, min(top_k, scores.shape[-1]))[0][..., -1, None]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if top_p < 1.0:
        ordered, indices = torch.sort(scores, descending=False)
        remove = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        remove[..., -1:] = False
        scores = scores.masked_fill(remove.scatter(1, indices, remove), -torch.inf)
    if min_p > 0.0:
        probability = scores.softmax(-1)
        least = min_p * probability.amax(-1, keepdim=True)
        scores = scores.masked_fill(probability < least, -torch.inf)
    return torch.multinomial(scores.softmax(-1), 1).squeeze(-1)


def _bench() -> Iterator[BenchCase]:
    for rows in (1, 16):
        for name, options in (
            ("all", (1.0,)),
            ("k50", (0.7, 50)),
            ("p0.9", (0.7, 0, 0.9)),
            ("k50-p0.9", (0.7, 50, 0.9)),
        ):
            yield BenchCase(
                f"{rows}x128256-{name}",
                lambda dtype, r=rows, o=options: (
                    randn(r, 128256, dtype=dtype, scale=3.0),
                    _noise(r, seed=3),
                    *o,
                ),
                lambda dtype, r=rows: r * 128256 * dtype.itemsize,
            )


register_op(
    reference=_sample_token,
    check=_check,
    fake=lambda a: a.logits.new_empty(a.logits.shape[:-1], dtype=torch.int64),
    samples=_samples,
    stock=_stock,
    backward=None,
    bench=_bench,
    summary="Draw a token from logits with temperature, top-k, top-p and min-p",
)


# --- with seeds in the place of random numbers ------------------------------------------------------------------------


#: Odd constants of SplitMix64 as int64.
_GAMMA, _FIRST, _SECOND = (
    x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def uniform(seeds: Tensor) -> Tensor:
    """Return a number in [0, 1) for each seed, float32; equal seeds give equal numbers.

    Args:
        seeds: int64 of any shape.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014 (SplitMix64).
    """

    def shift(x: Tensor, bits: int) -> Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    x = seeds + _GAMMA
    x = (x ^ shift(x, 30)) * _FIRST
    x = (x ^ shift(x, 27)) * _SECOND
    x = x ^ shift(x, 31)
    # 24 bits are exact in float32, so that the result stays below 1.
    return shift(x, 40).float() * 2.0**-24


def _sample_token_seeded(logits: Tensor, seeds: Tensor) -> Tensor:
    """Draw a token from ``softmax(logits)`` with a random number that is made from a seed; see `sample_token`.

    Args:
        logits: ``[..., V]``, float32, bfloat16 or float16; -infinity excludes a token.
        seeds: ``[...]`` int64, one per row. Equal seeds and logits give equal tokens.

    Returns:
        int64 ``[...]``: the index of the token of each row.

    Raises:
        RuntimeError: An argument does not fit, or a row has no finite maximum or a NaN.
    """
    if logits.numel():
        _check_rows("sample_token_seeded", logits)
    return _sample_token(logits, uniform(seeds))


def _seeded_check(a: Arguments) -> None:
    check_tensor(a.op, "logits", a.logits)
    check_device(a.op, "seeds", a.seeds, a.logits, "logits")
    dtype = dtype_name(a.seeds.dtype)
    a.require(a.seeds.dtype == torch.int64, "seeds", "have dtype int64", dtype)
    wanted = "have the shape of logits without its last dimension"
    a.require(a.seeds.shape == a.logits.shape[:-1], "seeds", wanted, list(a.seeds.shape))
    columns = a.logits.shape[-1]
    wanted = "have between 1 and 2^31 - 1 columns"
    a.require(0 < columns < 2**31, "logits", wanted, list(a.logits.shape))


def _seeded_samples(dtype: torch.dtype) -> Iterator[Sample]:
    numbers = torch.tensor([0, 1, 2**31 - 1, -1, -(2**63)])
    for rows, columns in ((1, 1), (5, 100), (2, 513), (3, 5000)):
        logits = randn(rows, columns, dtype=dtype, seed=91, scale=3.0)
        yield Sample((logits, numbers[:rows] + columns), id=f"{rows}x{columns}")
    batch = randn(2, 3, 2000, dtype=dtype, seed=92)[..., ::2]
    batch[0, 1, 20:] = -torch.inf
    seeds = torch.arange(12).view(2, 6)[:, ::2]
    yield Sample((batch, seeds), id="3d-masked")
    yield Sample((batch[:0], seeds[:0]), id="no_rows")


register_op(
    reference=_sample_token_seeded,
    check=_seeded_check,
    fake=lambda a: a.logits.new_empty(a.logits.shape[:-1], dtype=torch.int64),
    samples=_seeded_samples,
    stock=lambda logits, seeds: torch.multinomial(logits.softmax(-1), 1).squeeze(-1),
    backward=None,
    summary="Draw a token from logits, with a random number for each seed",
)


# --- the largest ------------------------------------------------------------------------------------------------------


def _argmax(x: Tensor) -> Tensor:
    """Return the index of the largest element of each row: the token of greedy decoding.

    The first of several; the first NaN counts as the largest, as in PyTorch.

    Args:
        x: ``[..., C]`` with ``C > 0``, float32, bfloat16 or float16.

    Returns:
        int64 ``[...]``.
    """
    return x.argmax(-1)


def _argmax_check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    wanted = "have a last dimension that is not empty"
    a.require(a.x.shape[-1] > 0, "x", wanted, list(a.x.shape))


def _argmax_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, x in row_samples(dtype):
        if x.shape[-1] > 0:
            yield Sample((x,), id=name)
    x = randn(3, 40000, dtype=dtype, seed=93)
    x[1, 39999] = torch.nan
    x[2, 20000] = x[2, 30000] = 9.0
    yield Sample((x,), id="several_pieces")
    yield Sample((torch.full((2, 3000), -torch.inf, dtype=dtype),), id="minus_infinity")
    yield Sample((torch.tensor([[-0.0, 0.0], [0.0, -0.0]], dtype=dtype),), id="zeros")


def _argmax_bench() -> Iterator[BenchCase]:
    for rows in (1, 16):
        yield BenchCase(
            f"{rows}x128256",
            lambda dtype, r=rows: (randn(r, 128256, dtype=dtype),),
            lambda dtype, r=rows: r * 128256 * dtype.itemsize,
        )


register_op(
    reference=_argmax,
    check=_argmax_check,
    fake=lambda a: a.x.new_empty(a.x.shape[:-1], dtype=torch.int64),
    samples=_argmax_samples,
    stock=lambda x: x.argmax(-1),
    backward=None,
    bench=_argmax_bench,
    summary="Index of the largest element of each row",
)


# --- which may come ---------------------------------------------------------------------------------------------------


def _apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Add minus infinity to the logits of tokens whose bit is 0, in place.

    What is not finite stays so.

    Args:
        logits: ``[..., V]``, float32, bfloat16 or float16; overwritten.
        bitmask: ``[..., (V + 31) // 32]`` int32: bit ``i % 32`` of word ``i // 32`` belongs to token i.

    Raises:
        RuntimeError: An argument does not fit.
    """
    bits = bitmask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=bitmask.device)
    kept = (bits & 1).flatten(-2)[..., : logits.shape[-1]].bool()
    logits.add_(torch.where(kept, 0.0, -torch.inf).to(logits.dtype))


def _bitmask_check(a: Arguments) -> None:
    check_tensor(a.op, "logits", a.logits)
    check_not_expanded(a.op, "logits", a.logits)
    check_device(a.op, "bitmask", a.bitmask, a.logits, "logits")
    check_dtype_in(a.op, "bitmask", a.bitmask, torch.int32)
    *rows, columns = a.logits.shape
    wanted = "have the shape of logits with 32 of its columns in each word"
    fits = list(a.bitmask.shape) == [*rows, (columns + 31) // 32]
    a.require(fits, "bitmask", wanted, list(a.bitmask.shape))


def _bitmask_samples(dtype: torch.dtype) -> Iterator[Sample]:
    def words(*shape: int) -> Tensor:
        numbers = torch.Generator().manual_seed(95)
        return torch.randint(-(2**31), 2**31, shape, generator=numbers, dtype=torch.int32)

    for rows, columns in ((1, 1), (3, 31), (2, 32), (2, 100), (3, 5001)):
        x = randn(rows, columns, dtype=dtype, seed=94)
        yield Sample((x, words(rows, (columns + 31) // 32)), id=f"{rows}x{columns}")
    x = randn(2, 3, 200, dtype=dtype, seed=96)[..., ::2]
    x[0, 0, 40:] = torch.nan
    x[1, 1, :3] = torch.tensor([torch.inf, -torch.inf, -0.0])
    yield Sample((x, words(2, 3, 8)[..., ::2]), id="3d-strided")
    yield Sample((x[:0], words(0, 3, 4)), id="no_rows")


register_op(
    mutates=("logits",),
    reference=_apply_token_bitmask,
    check=_bitmask_check,
    samples=_bitmask_samples,
    backward=None,
    bench=lambda: iter(
        [
            BenchCase(
                "8x128256",
                lambda dtype: (
                    randn(8, 128256, dtype=dtype),
                    torch.full((8, 4008), 0x5555, dtype=torch.int32),
                ),
                lambda dtype: 2 * 8 * 128256 * dtype.itemsize,
            )
        ]
    ),
    summary="Keep the tokens whose bit is set",
)
