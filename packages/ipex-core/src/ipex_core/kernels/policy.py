# SPDX-License-Identifier: Apache-2.0
"""Every choice of a kernel: which ops have one, thresholds where it is better, and timing where none can tell."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch

from ipex_core.kernels import measured

# A plain global and no functools.cache: Dynamo traces through this module and warns about caches.
_native_ops: frozenset[str] | None = None
#: Whether the kernels use AVX-512.
_wide_vectors = True


def has_kernel(op: str) -> bool:
    """Return whether a kernel package implements ``torch.ops.ipex.<op>`` for CPU tensors."""
    find_kernels()
    return _native_ops is not None and op in _native_ops


def find_kernels() -> None:
    """Look for the kernel package once. Call it before a compilation: Dynamo cannot follow the search."""
    global _native_ops, _wide_vectors
    if _native_ops is not None:
        return
    from ipex_core.kernels import providers

    provider = providers.provider_for("cpu")
    _native_ops = frozenset(provider.ops) if provider is not None else frozenset()
    if provider is not None:
        _wide_vectors = provider.level().startswith(("avx512", "amx"))


def onednn_supports(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has packed kernels for this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


# --- thresholds -------------------------------------------------------------------------------------------------------


def prefer_ipex_attention(query: Sequence[int], key: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether `torch.ops.ipex.attention` is expected to be at least as fast as the stock op.

    The kernel gains by working on many query rows at once. A row or two per head do not pay for that, and the stock
    op reads the keys and values just as fast. Grouped heads count as rows: the heads of a group share keys and
    values, which the stock op does not use. In 16 bit, where the stock op converts everything to float32 on most
    CPUs, few rows are enough; in float32 both do the same work and the gain is smaller (measured on AVX2 and
    AVX-512, 1 thread).

    Args:
        query: sizes ``[batch, heads, query length, head size]``.
        key: sizes of the key (and value) likewise.
        dtype: the element type of all three.
    """
    side = measured.side("attention", dtype, (*query, key[1], key[2]))
    if side is not None:
        return side == "ipex"
    if dtype == torch.float32:
        return query[2] >= 128
    if query[1] != key[1]:
        return query[1] * query[2] >= 4 * key[1]
    return query[2] >= 8


def prefer_ipex_norm(rows: int | None, columns: int, dtype: torch.dtype) -> bool:
    """Whether our norms are expected to be at least as fast as the code Inductor generates.

    Calling an op costs some 4 us more than Inductor's own code, so small norms stay with that. Measured on Zen 4, each
    as a compiled function with any number of rows, on one thread in processor time, times faster than Inductor:

    | rows | 2 | 8 | 32 | 64 | 128 | 512 |
    |---|---|---|---|---|---|---|
    | layer norm of 768, float32 | 0.90 | 0.89 | 0.97 | 1.00 | 1.14 | 1.47 |
    | layer norm of 768, bfloat16 | 0.87 | 0.91 | 0.96 | 1.04 | 1.18 | 1.57 |
    | RMS norm of 2048, float32 | 0.90 | 0.92 | 0.99 | | 1.16 | |
    | RMS norm of 2048, bfloat16 | 0.86 | 0.94 | 1.06 | | 1.39 | |

    Short rows stay with it, too. 163840 numbers on one thread of a Xeon with AVX512-VNNI, as above:

    | columns | 32 | 64 | 96 | 128 | 192 | 768 |
    |---|---|---|---|---|---|---|
    | layer norm, float32 | 0.81 | 0.92 | 0.96 | 0.95 | 1.01 | 1.11 |
    | layer norm, bfloat16 | 0.75 | 0.85 | 0.88 | 0.90 | | |
    | RMS norm, float32 | 0.96 | 0.88 | 0.99 | 0.97 | | |
    | RMS norm, bfloat16 | 0.92 | 0.93 | 0.94 | 0.93 | | |

    Args:
        rows: how many rows, None for a number that varies and may become large.
        columns: length of a row.
        dtype: its element type.
    """
    return columns > 128 and (rows is None or rows * columns >= 49152)


def prefer_ipex_rotary(tokens: int) -> bool:
    """Whether our rotary embedding is expected to be at least as fast as the code Inductor generates.

    It is but for a few tokens, where calling it costs up to 3.5 us more. Measured on Zen 4, bfloat16, 32 and 8 heads
    of 64, as a compiled function, on one thread in processor time, times faster: 1 token 0.93, 4 tokens 0.95, 8 0.99,
    16 1.05, 32 1.16, 128 1.65. On 2 threads 128 tokens took 37 us instead of 100, 2048 tokens 480 instead of 2120.

    Args:
        tokens: How many there are in all sequences.
    """
    return tokens >= 8


def prefer_merged_linears(rows: int) -> bool:
    """Whether one call for linear layers that read the same tensor is expected to be at least as fast as one for each.

    With few rows calls and the time to wake threads count, which become one. With many the results lie in one another's
    way. Measured on Zen 4, bfloat16, on one thread in processor time beside other work, times faster: three layers of
    768 x 768 with 1, 8, 32, 64 rows 1.10, 1.07, 1.03, 1.05. With more rows, and with layers of 2048 x (2048, 256, 256)
    from 32 rows on, no gain was found: 0.81 to 1.05, once 1.60, where runs differ by more than that.

    Args:
        rows: rows of the input.
    """
    return rows <= 32


def prefer_merged_bags(bags: int) -> bool:
    """Whether one call for the embedding bags of several tables is expected to be at least as fast as one for each.

    Few bags cost less than the calls do. For many, the stock op sums the rows of one table faster than ours. Measured
    on Zen 4, 26 tables of rows of 64 float32 numbers, one row to a bag, on one thread in processor time beside other
    work, times faster: 32 bags 2.36, 128 bags 1.71, 256 bags 1.42, 512 bags 1.21 in pairs but 0.98 in medians, 2048
    bags 0.75.

    Args:
        bags: bags of one table.
    """
    return bags <= 256


def prefer_ipex_bag(bags: int, lookups: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether our mean of the rows of bags is as fast as the stock op; it is unless the measurements say otherwise.

    Args:
        bags: How many.
        lookups: Of all bags.
        columns: Size of a row.
        dtype: Of the table.
    """
    return measured.side("embedding_bag:mean", dtype, (bags, lookups, columns)) in (None, "ipex")


def prefer_ipex_bmm(a: Sequence[int], b: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether our batch of products is as fast as the stock op.

    Where no shape nearby was measured, it is, but for float32 below AVX-512. There, on Zen 4 with AVX2 alone and one
    thread, in turns, times faster: up to four rows 1.1 to 1.4; more rows 0.46 to 0.98 in 17 of 21 shapes, 0.99 to 1.03
    in two with a depth of 49 and 128, 1.3 to 1.6 in two of 27 x 27.

    Args:
        a: sizes ``[B, M, K]``.
        b: sizes ``[B, K, N]``.
        dtype: Of both.
    """
    chosen = measured.side("bmm", dtype, (*a, b[2]))
    if chosen is not None:
        return chosen == "ipex"
    return _wide_vectors or dtype != torch.float32 or a[1] <= 4


@dataclasses.dataclass(frozen=True)
class LinearChoice:
    """A format (``"mkldnn"``, ``"ipex"`` or None for the stock op) and why."""

    form: str | None
    reason: str


#: Rows up to which the own kernel is preferred to oneDNN on a packed weight in float32; in 16 bits it always is.
#: Measured as times stock, own (oneDNN): Zen 4, 1 and 2 threads, bfloat16, K and N from 384 to 5632: 1 row 2.7-2.9
#: (1.4-2.0), 32 rows 1.3-1.5 (1.2-1.4), 128 rows 1.10-1.16 (1.05-1.13), 512 to 4096 rows 1.03-1.16 (1.02-1.18), float32
#: the same or better. Xeon with AMX, 8 threads: 1 to 32 rows 1.4-2.7 (1.2-2.5), 128 rows 1.4-2.9 (1.3-2.7), encoders
#: with 4096 rows 1.0-1.3 times oneDNN. Xeon with AVX512-VNNI, 1 thread: bfloat16, which has no instructions there,
#: 2048 and 4096 rows 3.7-4.1 times oneDNN; float32: 1 row 0.8-1.0 (0.8 for 384 x 384), 16 to 64 rows 1.1-1.9, 128
#: rows 1.05-1.27, 512 rows 0.97-1.05.
SMALL_ROWS = 1024
#: Weights below which the overhead of a packed call decides and the stock op is chosen. Measured on Zen 4: the oneDNN
#: op costs 13 us a call; stock float32 (MKL) 3 us, so that packing pays from about 384 x 384 on; stock bfloat16 goes
#: through oneDNN itself except for the smallest weights.
MIN_WEIGHTS = {torch.float32: 131072, torch.bfloat16: 6144, torch.float16: 6144}


def choose_linear(dtype: torch.dtype, n: int, k: int, m: int | None) -> LinearChoice:
    """Choose the format of a linear weight from a table.

    Args:
        dtype: dtype of the weight in use.
        n: out_features.
        k: in_features.
        m: Rows of the input, or None if unknown.
    """
    own = has_kernel("linear")  # packing itself has a reference in the same format
    side = None if m is None else measured.side("linear", dtype, (m, n, k))
    if side == "stock" or (side == "onednn" and onednn_supports(dtype)):
        form = None if side == "stock" else "mkldnn"
        return LinearChoice(form, f"{m} rows: {side} was the fastest at the nearest measured shape")
    if side == "ipex" and own:
        return LinearChoice("ipex", f"{m} rows: own kernel")
    least = MIN_WEIGHTS[dtype]
    if n * k < least:
        return LinearChoice(None, f"the weight has fewer than {least} elements")
    # With unknown rows too: at many rows it is not slower than stock anywhere, at few it is far ahead of oneDNN.
    if own and (m is None or m <= SMALL_ROWS or dtype != torch.float32):
        return LinearChoice(
            "ipex", "own kernel, for any number of rows" if m is None else f"{m} rows: own kernel"
        )
    if onednn_supports(dtype):
        rows = "any number of rows" if m is None else f"{m} rows"
        return LinearChoice("mkldnn", f"{rows}: oneDNN on a prepacked weight")
    return LinearChoice(
        None, f"oneDNN has no {str(dtype).removeprefix('torch.')} kernel on this CPU"
    )


# --- timing ---------------------------------------------------------------------------------------------------------


def numbers(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normally distributed numbers to time kernels on.

    They come from a generator of their own: what a program draws must not depend on whether something was timed.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(size, generator=generator, device="cpu").to(dtype)


#: Numbers in float32 that take the place of all else in a core's caches.
_CACHED = 1 << 22


def fastest(
    runs: dict[str, Callable[[], torch.Tensor]],
    seconds: float = 0.2,
    default: str = "stock",
    cold: bool = False,
) -> tuple[str, str]:
    """Time candidates in turns; return the fastest (the default unless beaten by 2 %) and their times as text.

    The least time of each counts: what else runs on the machine only adds to it. With one thread its processor time
    is taken, which other processes hardly touch. What is ``cold`` finds no data of its last run in the caches, as a
    layer does that is one of many.
    """
    other = torch.zeros(_CACHED if cold else 1)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in runs}
    deadline = time.perf_counter() + seconds
    for turn in range(30):
        for name, run in runs.items():  # taken in turns, so that noise meets all alike
            other.sum()
            start = clock()
            run()
            times[name].append(clock() - start)
        if turn >= 4 and time.perf_counter() > deadline:
            break
    least = {name: min(values) * 1e6 for name, values in times.items()}
    best = min(least, key=lambda name: least[name])
    if least[best] > 0.98 * least[default]:
        best = default
    return best, ", ".join(f"{name} {value:.0f} us" for name, value in least.items())
