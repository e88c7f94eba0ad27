# SPDX-License-Identifier: Apache-2.0
"""What was measured, and what follows from it: ratios with confidence intervals, shares of limits, regressions."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .peers import NAMES

#: Of the JSON files; `docs/tools/bench.md` describes them. 1 had intervals from a bootstrap and no single times.
SCHEMA = 2

#: Side of the matrices whose product is the limit of arithmetic.
SIDE = 1024

#: Bytes of a weight. Four bits have a scale for each group in addition.
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.53}

#: Work that moves fewer bytes and has fewer operations is all overhead of calls: a share of a limit would say nothing.
#: As in `ipex_core.benchmark`, which is not imported: the processes of the engines have only what their engine has.
LEAST_BYTES = 1 << 20
LEAST_FLOPS = 10_000_000

#: A ratio may fall by this share without being a regression, however narrow the intervals are.
TOLERANCE = 0.05


def footprint(n_bytes: float) -> int:
    """Return how many bytes the limit of memory is measured with: as many as the work reads, within bounds."""
    return int(min(max(n_bytes, LEAST_BYTES), 1 << 30)) // 4096 * 4096


def task_bytes(dtype: str, facts: Mapping[str, float]) -> float:
    """Return the bytes that the work has to move at least."""
    return facts["weights"] * _BYTES[dtype] + facts["activations"] * 4


def limit_percent(
    limits: Mapping[str, float],
    seconds: float,
    precision: str,
    flops: float,
    facts: Mapping[str, float],
) -> tuple[float, str]:
    """Return the share of the limit that a time is, in percent, and which limit: ``"memory"`` or ``"compute"``.

    Work so small that the cost of calls is all of it has the limit ``"call"`` and no share, 0.

    Args:
        limits: Seconds of the calls of the limits' process, and ``"bytes"``, what its reading call read.
        seconds: The time of an engine.
        precision: In which it computes.
        flops: Arithmetic operations of the work.
        facts: ``"weights"`` and ``"activations"``, the numbers that must be read or written.
    """
    moved = task_bytes(precision, facts)
    if moved < LEAST_BYTES and flops < LEAST_FLOPS:
        return 0.0, "call"
    # Weights of four bits are multiplied as numbers of eight, at best.
    unit = {"int4": "int8", "float16": "bfloat16"}.get(precision, precision)
    least = {
        "memory": limits["read"] * moved / limits["bytes"],
        "compute": limits[unit] * flops / (2 * SIDE**3),
    }
    bound = max(least, key=lambda name: least[name])
    return 100 * least[bound] / seconds, bound


def interval(baseline: Sequence[float], candidate: Sequence[float]) -> tuple[float, float, float]:
    """Return how many times faster the candidate is: the median over rounds and its 95 % confidence interval.

    The interval comes from the sign test: from the k-th lowest ratio to the k-th highest, with the largest k for which
    the median of all possible rounds lies between them in 95 % of cases, however the ratios are distributed. That needs
    six rounds; with fewer it is the whole range, which holds the median in 94 % (five), 88 %, 75 % and 50 % (two).

    Args:
        baseline: Seconds of the baseline, one for each round.
        candidate: Seconds of the candidate in the same rounds.

    Example:
        >>> interval([2.0, 4.0, 6.0], [1.0, 2.0, 2.0])
        (2.0, 2.0, 3.0)
    """
    ratios = sorted(b / c for b, c in zip(baseline, candidate, strict=True))
    count, cut = len(ratios), 0
    # Of the 2^count ways in which the rounds lie around the median, those with `cut` of them or fewer below it.
    ways = below = 1
    while True:
        ways = ways * (count - cut) // (cut + 1)
        below += ways
        if 2 * below * 20 > 2**count:  # both ends; 5 % in integers, which hold any number of rounds
            break
        cut += 1
    return statistics.median(ratios), ratios[cut], ratios[-1 - cut]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """An engine at a case.

    Attributes:
        case: The workload and its shape; for language models also which part.
        engine: Name of the engine.
        precision: In which it computed.
        ms: Median milliseconds.
        ratio: Times as fast as stock eager: median over rounds, in which both ran.
        low: Lower end of its 95 % confidence interval.
        high: Upper end.
        rounds: Rounds.
        limit_percent: Share of what the machine can do, measured in the same rounds.
        limit: ``"memory"`` or ``"compute"``; ``"call"`` for work too small to have a share.
        peak_mb: Peak resident memory of its process.
        rss_mb: Resident memory at the end.
        exactness: Least cosine to the answer of float32; for training the largest relative difference of the losses.
        prepare_s: Seconds until it had given its first answer, with compilation.
        threads: Threads.
        note: What else to know.
        times: Milliseconds of each round.
        stock: Milliseconds of stock eager in the same rounds.
    """

    case: str
    engine: str
    precision: str
    ms: float
    ratio: float
    low: float
    high: float
    rounds: int
    limit_percent: float
    limit: str
    peak_mb: float
    rss_mb: float
    exactness: float
    prepare_s: float
    threads: int
    note: str = ""
    times: tuple[float, ...] = ()
    stock: tuple[float, ...] = ()

    @property
    def share(self) -> str:
        """The share of the limit in words."""
        return "call" if self.limit == "call" else f"{self.limit_percent:.0f}% {self.limit[:3]}"

    @property
    def key(self) -> tuple[str, str, int]:
        """What identifies the same measurement in another run. The precision does not: it may change for the worse."""
        return self.case, self.engine, self.threads


@dataclasses.dataclass(frozen=True, slots=True)
class Absent:
    """An engine without a number at a case, and why; an empty case stands for all."""

    engine: str
    case: str
    reason: str

    def covers(self, row: Row) -> bool:
        """Return whether the row is of this engine and case."""
        return self.engine == row.engine and row.case.startswith(self.case)


@dataclasses.dataclass(slots=True)
class Run:
    """A table.

    Attributes:
        kind: ``"ops"``, ``"models"``, ``"llm"`` or ``"train"``.
        dtype: What was asked for.
        machine: Where it was measured.
        versions: Of the engines.
        rows: The numbers.
        absent: Engines without one.
        command: What was called; of several parts a line each.
    """

    kind: str
    dtype: str
    machine: dict[str, Any]
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    rows: list[Row] = dataclasses.field(default_factory=list)
    absent: list[Absent] = dataclasses.field(default_factory=list)
    command: str = ""

    def to_json(self) -> str:
        """Return everything as JSON."""
        text = json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1) + "\n"
        # Lists of numbers on a line each.
        return re.sub(r"\[\n[\d.e,\s-]*\]", lambda found: " ".join(found[0].split()), text)

    def failed(self) -> list[Absent]:
        """Return where an engine of ours, or the baseline, failed."""
        ours = ("ipex_", "stock_eager")
        return [
            a for a in self.absent if a.engine.startswith(ours) and a.reason.startswith("failed")
        ]

    def with_part(self, part: Run) -> Run:
        """Return this run and a later part of it, whose numbers and failures replace those that were there before.

        Raises:
            ValueError: The part has another precision, or is of another machine.
        """
        for name, old, new in (
            ("dtype", self.dtype, part.dtype),
            *(
                (key, self.machine.get(key), part.machine.get(key))
                for key in ("cpu", "torch", "threads")
            ),
        ):
            if old != new:
                raise ValueError(f"parts of a table must have the same {name}, got {old} and {new}")
        failed = part.failed()
        kept = [row for row in self.rows if not any(one.covers(row) for one in failed)]
        rows = list({row.key: row for row in [*kept, *part.rows]}.values())
        absent = {(one.engine, one.case): one for one in [*self.absent, *part.absent]}.values()
        cases = list(dict.fromkeys(row.case for row in rows))
        commands = [*self.command.splitlines(), *part.command.splitlines()]
        return Run(
            kind=part.kind,
            dtype=part.dtype,
            machine=part.machine,
            versions={**self.versions, **part.versions},
            rows=sorted(rows, key=lambda row: (cases.index(row.case), NAMES.index(row.engine))),
            absent=[one for one in absent if not any(map(one.covers, rows))],
            command="\n".join(dict.fromkeys(commands)),
        )

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read a file that was written from `to_json`.

        Raises:
            ValueError: It is another file.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            for name in ("machine", "versions"):
                if not isinstance(data[name], dict):
                    raise ValueError(f"{name} is no object")
            return cls(
                kind=data["kind"],
                dtype=data["dtype"],
                machine=data["machine"],
                versions=data["versions"],
                rows=[_checked(Row(**_with_tuples(row))) for row in data["rows"]],
                absent=[_checked(Absent(**row)) for row in data["absent"]],
                command=data.get("command", ""),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} must be a result file of this command, got {error!r}"
            ) from None


_Entry = TypeVar("_Entry", Row, Absent)
#: The fields with a number for each round.
_EACH_ROUND = ("times", "stock")


def _with_tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, **{name: tuple(row[name]) for name in _EACH_ROUND if name in row}}


def _checked(entry: _Entry) -> _Entry:
    """Return an entry of a file, refused if it would be no use later."""
    if entry.engine not in NAMES:
        raise ValueError(f"unknown engine {entry.engine!r}; known: {', '.join(NAMES)}")
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        if field.type == "str":
            if not isinstance(value, str):
                raise ValueError(f"{field.name} is no text: {value!r}")
            continue
        numbers = value if field.name in _EACH_ROUND else (value,)
        if not all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers):
            raise ValueError(f"{field.name} is no number: {value!r}")
    return entry


def regressions(before: Iterable[Row], now: Run) -> list[str]:
    """Return what is worse than in an earlier run beyond the noise, of our own engines; other engines are not ours.

    A ratio is worse if the confidence intervals of then and now do not touch and the medians differ by more than
    `TOLERANCE`. An engine that had a number and now fails is worse, too.
    """
    found = []
    rows = {row.key: row for row in now.rows}
    for old in before:
        if not old.engine.startswith("ipex_"):
            continue
        row = rows.get(old.key)
        name = f"{old.case}, {old.engine}"
        if row is None:
            reasons = [one.reason for one in now.failed() if one.covers(old)]
            if reasons:
                found.append(f"{name}: {old.ratio:.2f}x -> {reasons[0]}")
        elif row.high < old.low and row.ratio < old.ratio * (1 - TOLERANCE):
            found.append(
                f"{name}: {old.ratio:.2f}x ({old.low:.2f}-{old.high:.2f}) ->"
                f" {row.ratio:.2f}x ({row.low:.2f}-{row.high:.2f})"
            )
    return found


def untold(before: Iterable[Row], now: Run) -> list[str]:
    """Return what of our engines had a number in an earlier run and has none now, although it did not fail, and why."""
    known = {row.key for row in now.rows}
    failed = now.failed()
    return [
        f"{old.case}, {old.engine}: {one.reason}"
        for old in before
        if old.engine.startswith("ipex_") and old.key not in known
        for one in now.absent
        if one.covers(old) and one not in failed
    ]
