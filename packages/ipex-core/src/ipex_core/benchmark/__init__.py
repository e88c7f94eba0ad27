# SPDX-License-Identifier: Apache-2.0
"""Measuring: paired timings, and every op against stock torch and against the limit of the machine.

Times on a shared machine drift by more than most differences worth knowing. So nothing here compares two numbers that
were taken one after the other: all candidates run once per round, in alternating order, and what is reported is the
median over rounds of the ratio *within* a round, with its 10th and 90th percentile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ipex_core.library.kernels import specs
from ipex_core.library.spec import BenchCase, OpSpec, dtype_name

__all__ = ["Ratio", "Result", "busy", "machine", "paired", "quantile", "ratio", "run_bench"]

#: Below these sizes a call is all overhead, and "% of the limit" would say nothing.
_LEAST_BYTES = 1 << 20
_LEAST_FLOPS = 10_000_000


def quantile(values: Sequence[float], q: float) -> float:
    """Return the ``q`` quantile (0 to 1) of the values, interpolated linearly."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster: the median over the rounds, and the 10th and 90th percentile."""

    median: float
    low: float
    high: float


def ratio(baseline: Sequence[float], candidate: Sequence[float]) -> Ratio:
    """Return the ratio of paired timings; above 1 the candidate is faster than the baseline.

    Example:
        >>> ratio([2.0, 4.0, 6.0], [1.0, 2.0, 2.0])
        Ratio(median=2.0, low=2.0, high=2.8)
    """
    ratios = [b / c for b, c in zip(baseline, candidate, strict=True)]
    return Ratio(
        statistics.median(ratios),
        round(quantile(ratios, 0.1), 4),
        round(quantile(ratios, 0.9), 4),
    )


def paired(
    functions: Mapping[str, Callable[[], object]],
    *,
    seconds: float = 0.5,
    min_rounds: int = 5,
    max_rounds: int = 500,
    warmup: int = 2,
    on_round: Callable[[int, float], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time functions against each other: each round calls every one once, beginning with another one.

    The order rotates: turned around, the first and the last would find their own data in the caches, those between not.

    Args:
        functions: name -> function without arguments.
        seconds: when to stop, counted over all functions together.
        min_rounds: rounds to run even if the time is up.
        max_rounds: rounds after which to stop even if there is time left.
        warmup: untimed calls of each function before.
        on_round: called after each round with the number of rounds and the seconds so far.
        clock: what tells the time; `time.thread_time` for one thread on a machine with other work.

    Returns:
        name -> seconds per call, one number per round.
    """
    names = list(functions)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        for _ in range(warmup):
            functions[name]()
    collecting = gc.isenabled()
    gc.disable()  # a collection in one candidate's window would be charged to it
    try:
        start = clock()
        for done in range(1, max_rounds + 1):
            for name in names:
                function = functions[name]
                begin = clock()
                function()
                times[name].append(clock() - begin)
            names.append(names.pop(0))
            elapsed = clock() - start
            if on_round is not None:
                on_round(done, elapsed)
            if elapsed > seconds and done >= min_rounds:
                break
    finally:
        if collecting:
            gc.enable()
    return times


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One op at one shape. Times are medians in microseconds, rates are from the median of ours.

    Attributes:
        limit: ``"memory"`` or ``"compute"``, whichever allows less here, or ``"call"`` for a case so small that the
            cost of a call is all of it.
        limit_percent: time that the limit allows / our time; None for ``"call"``.
    """

    op: str
    case: str
    dtype: str
    threads: int
    level: str
    stock_us: float
    ipex_us: float
    stock_best_us: float
    ipex_best_us: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int
    gb_per_s: float
    gflop_per_s: float
    limit: str
    limit_percent: float | None

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        """What identifies the same measurement in another run."""
        return self.op, self.case, self.dtype, self.threads, self.level

    @property
    def slower(self) -> bool:
        """Whether the op is slower than stock beyond the noise of the run."""
        return self.ratio < 0.95 and self.ratio_high < 1.0


def run_bench(
    names: Iterable[str] = (),
    *,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
    cases: str = "",
    seconds: float = 0.5,
) -> Iterator[Result]:
    """Measure ops at the shapes of their specs, against the stock op and the limit measured in the same rounds.

    Args:
        names: ops to measure; all that have shapes and a stock counterpart if empty.
        dtypes: element types; those an op does not accept are skipped.
        cases: only shapes whose id contains this text.
        seconds: time for each measurement.

    Yields:
        A `Result` per op, shape and dtype.

    Raises:
        UnknownOpError: for a name that is no op.
    """
    for spec, case, dtype in chosen(names, dtypes=dtypes, cases=cases):
        yield measure(spec, case, dtype, seconds=seconds)


def chosen(
    names: Iterable[str], *, dtypes: Sequence[torch.dtype], cases: str = "", smallest: bool = False
) -> Iterator[tuple[OpSpec, BenchCase, torch.dtype]]:
    """Yield what `run_bench` measures with the same arguments; of each op only the ``smallest`` shape if asked to."""
    for spec in select(names):
        for dtype in dtypes:
            if dtype not in spec.dtypes or spec.bench is None:
                continue
            found = [case for case in spec.bench() if cases in case.id]
            if smallest and found:
                found = [min(found, key=lambda case: (case.bytes(dtype), case.flops))]
            for case in found:
                yield spec, case, dtype


def select(names: Iterable[str]) -> list[OpSpec]:
    """Return the specs of these ops, or of all that can be measured."""
    from ipex_core.errors import UnknownOpError

    known = specs()
    wanted = list(names)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UnknownOpError(
            f"bench: unknown op {unknown[0]!r} (known: {', '.join(sorted(known))})"
        )
    chosen = [known[name] for name in wanted] if wanted else list(known.values())
    return [spec for spec in chosen if spec.bench is not None and spec.stock is not None]


def measure(spec: OpSpec, case: BenchCase, dtype: torch.dtype, *, seconds: float = 0.5) -> Result:
    """Measure one op at one shape; see `run_bench`."""
    n_bytes = case.bytes(dtype)
    copies = -(-_uncached_bytes() // n_bytes) if case.rotate and n_bytes >= _LEAST_BYTES else 1
    assert spec.stock is not None
    arguments = case.make(dtype)
    stock_arguments = spec.stock_args(*arguments) if spec.stock_args else arguments
    functions: dict[str, Callable[[], object]] = {
        "stock": _in_turn(spec.stock, _copies(stock_arguments, copies)),
        "ipex": _in_turn(spec.op, _copies(arguments, copies)),
    }
    memory_bound = n_bytes >= _LEAST_BYTES
    compute_bound = case.flops >= _LEAST_FLOPS
    if memory_bound or compute_bound:
        functions |= _memory_limits(max(n_bytes, _LEAST_BYTES), copies)
    if compute_bound:
        functions["matmul"], matmul_flops = _compute_limit(case.unit or dtype)
    with torch.inference_mode():
        times = paired(functions, seconds=seconds, min_rounds=7)
    ours = statistics.median(times["ipex"])
    compared = ratio(times["stock"], times["ipex"])

    limits: dict[str, float] = {}
    if memory_bound or compute_bound:
        fastest = min(statistics.median(times[name]) for name in ("copy", "read") if name in times)
        limits["memory"] = fastest * n_bytes / max(n_bytes, _LEAST_BYTES)
    if compute_bound:
        limits["compute"] = statistics.median(times["matmul"]) * case.flops / matmul_flops
    limit = max(limits, key=lambda name: limits[name]) if limits else "call"
    return Result(
        op=spec.name,
        case=case.id,
        dtype=dtype_name(dtype),
        threads=torch.get_num_threads(),
        level=active_level(),
        stock_us=round(statistics.median(times["stock"]) * 1e6, 2),
        ipex_us=round(ours * 1e6, 2),
        stock_best_us=round(min(times["stock"]) * 1e6, 2),
        ipex_best_us=round(min(times["ipex"]) * 1e6, 2),
        ratio=round(compared.median, 3),
        ratio_low=round(compared.low, 3),
        ratio_high=round(compared.high, 3),
        rounds=len(times["ipex"]),
        gb_per_s=round(n_bytes / ours / 1e9, 2),
        gflop_per_s=round(case.flops / ours / 1e9, 2),
        limit=limit,
        limit_percent=round(100 * limits[limit] / ours, 1) if limits else None,
    )


def _in_turn(
    function: Callable[..., object], arguments: Sequence[tuple[Any, ...]]
) -> Callable[[], object]:
    """Return a function whose calls take the next arguments each, around and around."""
    if len(arguments) == 1:
        only = arguments[0]
        return lambda: function(*only)
    turn = itertools.cycle(arguments)
    return lambda: function(*next(turn))


def _copies(arguments: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    """Return the arguments ``count`` times, each with large tensors of its own."""

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.nbytes < _LEAST_BYTES // 4:
            return value
        if value.dtype != torch.uint8 or value.dim() > 2 or not value.is_contiguous():
            return value.clone()
        # Packed weights lie on huge pages, and so do their copies.
        memory = on_huge_pages(value.nbytes).view(torch.uint8)[: value.nbytes]
        return memory.view(value.shape).copy_(value)

    return [arguments, *(tuple(map(copy, arguments)) for _ in range(count - 1))]


def _uncached_bytes() -> int:
    """Return how many bytes no cache holds: twice the last level, at least 128 MiB."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        last_level = int(size.removesuffix("K")) << 10
    except (OSError, ValueError):
        last_level = 0
    return max(2 * last_level, 128 << 20)


def _memory_limits(n_bytes: int, copies: int) -> dict[str, Callable[[], object]]:
    """Return functions that move ``n_bytes`` and do nothing else.

    They have the footprint of the op under test, so a shape that fits a cache is compared with the rate of that cache.
    A copy is the limit of an op that writes as much as it reads, a read the limit of a product with a large weight.
    """
    whole = on_huge_pages(n_bytes * copies)[: n_bytes // 4 * copies]
    read = _in_turn(torch.sum, [(part,) for part in whole.view(copies, -1)])
    if copies > 1:
        return {"read": read}
    half = torch.zeros(n_bytes // 8)
    target = torch.empty_like(half)
    return {"copy": lambda: target.copy_(half), "read": read}


def on_huge_pages(n_bytes: int) -> torch.Tensor:
    """Return random numbers on huge pages, where the system has them: a limit must not depend on page walks."""
    memory = mmap.mmap(-1, -(-n_bytes // 4096) * 4096)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).uniform_()


_FACTORS: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}


def _compute_limit(dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    """Return a large matrix product in this dtype and its arithmetic operations."""
    size = 768
    if dtype not in _FACTORS:
        _FACTORS[dtype] = (
            torch.ones(size, size, dtype=dtype),
            torch.ones(size, size, dtype=dtype),
        )
    a, b = _FACTORS[dtype]
    product = torch._int_mm if dtype == torch.int8 else torch.mm
    return lambda: product(a, b), 2 * size**3


def active_level() -> str:
    """Return the ISA level of the active CPU kernels, or ``"reference"`` if there are none."""
    from ipex_core.kernels.providers import cpu_level

    return cpu_level() or "reference"


def busy(seconds: float = 0.5) -> float | None:
    """Return the share of the machine's CPU time that other processes take right now; None where it is unknown.

    The caller sleeps meanwhile, so all of it is others'. With more than a tenth, timings of several threads mean
    little: at the end of each parallel region all threads wait for the one that was held up.
    """

    def times() -> tuple[int, int]:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        numbers = [int(field) for field in fields]
        return sum(numbers), numbers[3] + numbers[4]  # all, idle and waiting for input

    try:
        total, idle = times()
        time.sleep(seconds)
        total_then, idle_then = times()
    except (OSError, ValueError, IndexError):
        return None
    passed = total_then - total
    return None if passed <= 0 else round(1 - (idle_then - idle) / passed, 3)


def machine() -> dict[str, Any]:
    """Return what a reader of results must know about where they come from; all values can go into JSON."""
    from ipex_core._version import __version__
    from ipex_core.kernels.machine import cpu_info

    cpu = cpu_info()
    allocator = {
        k: v for k, v in os.environ.items() if k.startswith("MALLOC_") or k == "LD_PRELOAD"
    }
    return {
        "cpu": getattr(cpu, "model", platform.processor()),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "level": active_level(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ipex_core": __version__,
        "allocator": allocator,
        "busy": busy(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
