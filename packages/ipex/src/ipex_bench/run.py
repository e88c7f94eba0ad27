# SPDX-License-Identifier: Apache-2.0
"""Running all engines on all cases: answers first, then times in turns."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import peers, shapes
from .process import EngineError, Worker
from .result import Absent, Row, Run, footprint, interval, limit_percent, task_bytes
from .task import Task

Times = dict[str, list[dict[str, float]]]
About = dict[str, dict[str, Any]]
_LIMITS = "limits"

#: Engines that are prepared side by side: much of it is a compiler or an export on one core.
_AT_ONCE = 2

#: The part of the time that is left in which engines may prepare.
_PREPARING = 0.7

#: Seconds in which no engine can be imported: with less it is not begun.
_SHORTEST = 2.0

_TIME_UP = "not measured: the time was up"


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        kind: The kind of tasks.
        names: The workloads.
        engines: The engines; the baseline is always among them.
        dtype: The precision asked for.
        rest: The element type of what is not quantized.
        size: ``"tiny"``, ``"small"`` or ``"full"``.
        threads: Threads of each engine.
        seconds: Time of the rounds of a case, without preparation.
        turn: Seconds of an engine's turn in a round, for each call.
        rounds: Rounds to run even if the time is up.
        timeout: Seconds that an engine may take to prepare.
        turn_timeout: Seconds that a turn may take; the baseline's may take ``timeout``, if that is more.
        pythons: Interpreters of engines that have an environment of their own.
        until: Time of `time.monotonic` after which nothing new is begun.
    """

    kind: str
    names: Sequence[str]
    engines: Sequence[str]
    dtype: str
    rest: str
    size: str
    threads: int
    seconds: float
    turn: float
    rounds: int
    timeout: float
    turn_timeout: float
    pythons: dict[str, str]
    until: float = math.inf

    def share(self, cases: int) -> Plan:
        """Return the plan of the first of so many cases that have the time that is left."""
        now = time.monotonic()
        return dataclasses.replace(self, until=now + (self.until - now) / cases)

    def to_prepare(self, engines: int = 1) -> float:
        """Return the seconds that an engine may take to prepare from now on; the rounds need a part of what is left.

        Args:
            engines: How many have yet to be ready, this one included. They share the time.
        """
        left = _PREPARING * (self.until - time.monotonic())
        return min(self.timeout, left * min(_AT_ONCE, engines) / engines)


def run(
    plan: Plan,
    found: Run,
    say: Callable[[str], None] = print,
    keep: Callable[[Run], None] = lambda found: None,
) -> None:
    """Measure; see `Plan`.

    Args:
        plan: What to measure.
        found: Gets the results.
        say: Called with a line about each step.
        keep: Called with the results so far after each case.
    """
    for engine in plan.engines:
        peer = peers.load(engine)
        reason = "" if plan.kind in peer.kinds else f"no adapter for {plan.kind}"
        if not reason and engine not in plan.pythons:
            reason = peer.missing()  # without the start of a process
        if reason:
            found.absent.append(Absent(engine, "", reason))
    cases = [
        (name, label, shape)
        for name in plan.names
        for label, shape in shapes.cases(plan.kind, name, plan.size)
    ]
    for index, (name, label, shape) in enumerate(cases):
        never = {one.engine for one in found.absent if not one.case}
        engines = [e for e in plan.engines if e not in never]
        if time.monotonic() >= plan.until:
            found.absent += [Absent(e, label, _TIME_UP) for e in engines]
            continue
        with tempfile.TemporaryDirectory(prefix="ipex-bench-") as folder:
            task = Task(
                kind=plan.kind,
                name=name,
                case=label,
                shape=shape,
                dtype=plan.dtype,
                threads=plan.threads,
                folder=folder,
                rest=plan.rest,
            )
            task.write()
            _case(plan.share(len(cases) - index), task, engines, found, say)
        keep(found)


def _case(
    plan: Plan, task: Task, engines: list[str], found: Run, say: Callable[[str], None]
) -> None:
    """Measure a case."""
    say(f"{task.case}: the answer in float32")
    with Worker(task, _LIMITS, timeout=plan.timeout) as limits:
        answer = _asked(limits, do="make")
        reason = "failed: "
        if "error" not in answer:
            facts = json.loads((task.path / "facts.json").read_text(encoding="utf-8"))
            answer = _asked(limits, do="limits", bytes=_read(task, facts))
            reason = "failed: the limits of the machine: "
        if "error" in answer:
            found.absent += [Absent(e, task.case, f"{reason}{answer['error']}") for e in engines]
            return
        # All at once where memory allows: then each round has every engine. Else in groups, each with the baseline.
        waiting = [e for e in engines if e != peers.BASELINE]
        # Those that are slow to get ready last: they have the time that the others leave.
        waiting.sort(key=lambda e: peers.load(e).compiles)
        more = True
        while more:
            with _Group(plan, task, found, say) as group:
                more = group.prepare(waiting) and group.measure(limits, facts) and bool(waiting)


class _Group(contextlib.ExitStack):
    """The engines that take turns in the same rounds of a case; their processes end with it.

    Attributes:
        workers: The processes, by engine.
        about: What each engine that is ready has said about itself.
    """

    def __init__(self, plan: Plan, task: Task, found: Run, say: Callable[[str], None]) -> None:
        super().__init__()
        self.plan, self.task, self.found, self.say = plan, task, found, say
        self.workers: dict[str, Worker] = {}
        self.about: About = {}
        self._running: dict[concurrent.futures.Future[dict[str, Any]], str] = {}
        # Left last: its threads end when the processes have ended.
        self._pool = self.enter_context(concurrent.futures.ThreadPoolExecutor(_AT_ONCE))

    def prepare(self, waiting: list[str]) -> bool:
        """Prepare the baseline and as many of the waiting engines as fit the memory; return whether the first is ready.

        Args:
            waiting: Engines; those that were begun are taken from the list.
        """
        self._begin(peers.BASELINE, max(self.plan.to_prepare(), _SHORTEST))
        while self._running:
            done = concurrent.futures.wait(self._running, return_when="FIRST_COMPLETED").done
            for future in done:
                self._end(self._running.pop(future), future.result())
            if peers.BASELINE not in self.about:
                return False
            while waiting and len(self._running) < _AT_ONCE and self._another_fits():
                seconds = self.plan.to_prepare(len(self._running) + len(waiting))
                if seconds < _SHORTEST:
                    self.found.absent += [Absent(e, self.task.case, _TIME_UP) for e in waiting]
                    waiting.clear()
                    break
                self._begin(waiting.pop(0), seconds)
        return peers.BASELINE in self.about

    def _begin(self, engine: str, seconds: float) -> None:
        self.say(f"{self.task.case}: preparing {', '.join([*self._running.values(), engine])}")
        try:
            # In this thread, which lives as long as the run: a process ends with the thread that has started it.
            worker = Worker(self.task, engine, self.plan.pythons.get(engine, ""), seconds)
        except OSError as error:  # the interpreter
            self._end(engine, {"error": str(error)})
            return
        self.workers[engine] = self.enter_context(worker)
        self._running[self._pool.submit(_asked, worker, do="prepare")] = engine

    def _end(self, engine: str, answer: dict[str, Any]) -> None:
        """Take over the answer of an engine; one that is not ready is told among the absent, and its process ends."""
        if "missing" in answer:  # whatever the case
            absent = Absent(engine, "", answer["missing"])
        elif "unsupported" in answer:
            absent = Absent(engine, self.task.case, answer["unsupported"])
        elif "error" in answer:
            absent = Absent(engine, self.task.case, f"failed: {answer['error']}")
        else:
            self.about[engine] = answer
            return
        self.found.absent.append(absent)
        if engine in self.workers:  # not if it could not be started
            self.workers.pop(engine).close()

    def _another_fits(self) -> bool:
        """Return whether the free memory holds those on their way and another of the size of the largest so far."""
        if len(self.about) + len(self._running) < 2:
            return True  # without an engine beside the baseline nothing is compared
        try:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        except OSError:
            return True
        free = next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("MemAvailable"))
        largest = max(fact.get("peak_mb", 0) for fact in self.about.values())
        return bool(free > 1.5 * (len(self._running) + 1) * largest)

    def measure(self, limits: Worker, facts: dict[str, float]) -> bool:
        """Let all engines take turns and add what that gave to the results; return whether they got to the end."""
        task, found = self.task, self.found
        # In the order of the columns, not in the order of completion.
        about = {name: self.about[name] for name in peers.NAMES if name in self.about}
        self.say(f"{task.case}: timing {', '.join(about)}")
        workers = {_LIMITS: limits, **{name: self.workers[name] for name in about}}
        try:
            times = _rounds(self.plan, workers, about)
        except EngineError as error:
            found.absent += [Absent(e, task.case, f"failed: {error}") for e in about]
            return False
        for engine, fact in about.items():
            found.versions.setdefault(engine, fact["version"])
        known = {row.key for row in found.rows}
        found.rows += [row for row in _rows(task, facts, times, about) if row.key not in known]
        disturbed = _disturbed(task, facts, about, found)
        found.absent += [one for one in disturbed if one not in found.absent]
        for engine, fact in about.items():
            if "failed" in fact:
                found.absent.append(Absent(engine, task.case, f"failed: {fact['failed']}"))
        return True


def _read(task: Task, facts: dict[str, float]) -> int:
    """Return how many bytes the limit of memory is measured with."""
    return footprint(task_bytes(task.dtype, facts))


def _disturbed(task: Task, facts: dict[str, float], about: About, found: Run) -> Iterator[Absent]:
    """Yield the parts of a case that have no number although nothing failed."""
    have = {(row.engine, row.case) for row in found.rows}
    for part, _ in _parts(task, facts):
        case = f"{task.case} {part}".strip()
        for engine, fact in about.items():
            if (engine, case) not in have and "failed" not in fact:
                yield Absent(engine, case, "too disturbed to tell: repeat it on an idle machine")


def _asked(worker: Worker, timeout: float | None = None, **request: Any) -> dict[str, Any]:
    """Return the answer of a process; a missing answer counts as one, too."""
    try:
        return worker.ask(timeout=timeout, **request)
    except EngineError as error:
        return {"error": str(error)}


def _rounds(plan: Plan, workers: dict[str, Worker], about: About) -> Times:
    """Let all engines take turns; one that fails or is too slow leaves the rounds, and its process is ended."""
    times: Times = {name: [] for name in workers}
    order = list(workers)
    begin = time.monotonic()
    done = 0
    while done < 2 or (
        time.monotonic() < plan.until
        and (done < plan.rounds or time.monotonic() - begin < plan.seconds)
    ):
        for name in list(order):
            needed = name in {_LIMITS, peers.BASELINE}
            limit = max(plan.timeout, plan.turn_timeout) if needed else plan.turn_timeout
            answer = _asked(workers[name], limit, do="time", seconds=plan.turn)
            if "error" in answer:
                if needed:
                    raise EngineError(f"{name}: {answer['error']}")
                order.remove(name)
                times.pop(name)
                workers[name].close(at_once=True)  # it must not take time or memory from the others
                about[name]["failed"] = answer["error"]
                continue
            times[name].append(answer["times"])
            if name in about:
                about[name].update(
                    {key: answer[key] for key in ("peak_mb", "rss_mb") if key in answer}
                )
        order.reverse()
        done += 1
    return times


def _rows(
    task: Task,
    facts: dict[str, float],
    times: Times,
    about: About,
) -> Iterator[Row]:
    limits = {
        call: statistics.median(one[call] for one in times[_LIMITS]) for call in times[_LIMITS][0]
    }
    limits["bytes"] = _read(task, facts)
    for part, flops in _parts(task, facts):
        for engine, fact in about.items():
            if engine not in times:
                continue
            both = zip(
                _seconds(task, times[peers.BASELINE], part),
                _seconds(task, times[engine], part),
                strict=True,
            )
            # Decoding is a difference: a disturbed round can make it negative. Such a round says nothing.
            pairs = [(a, b) for a, b in both if a > 0 and b > 0]
            if len(pairs) < 2:
                continue
            stock, mine = zip(*pairs, strict=True)
            ratio, low, high = interval(stock, mine)
            middle = statistics.median(mine)
            share, bound = limit_percent(limits, middle, fact["precision"], flops, facts)
            yield Row(
                case=f"{task.case} {part}".strip(),
                engine=engine,
                precision=fact["precision"],
                ms=round(middle * 1e3, 4),
                ratio=round(ratio, 4),
                low=round(low, 4),
                high=round(high, 4),
                rounds=len(mine),
                limit_percent=round(share, 1),
                limit=bound,
                peak_mb=round(fact.get("peak_mb", 0)),
                rss_mb=round(fact.get("rss_mb", 0)),
                exactness=round(fact["exactness"], 6),
                prepare_s=round(fact["prepare_s"], 2),
                threads=task.threads,
                note=fact["note"],
                times=tuple(round(seconds * 1e3, 6) for seconds in mine),
                stock=tuple(round(seconds * 1e3, 6) for seconds in stock),
            )


def _parts(task: Task, facts: dict[str, float]) -> list[tuple[str, float]]:
    """Return the parts that a task is timed in, with their arithmetic operations."""
    if task.kind != "llm":
        return [("", facts["flops"])]
    return [("prefill", facts["flops"]), ("decode", 2 * facts["weights"] * task.shape["batch"])]


def _seconds(task: Task, times: list[dict[str, float]], part: str) -> list[float]:
    """Return the time of a part in each round."""
    if part == "decode":
        # Both generate; what the first token took is not decoding.
        more = task.shape["new"] - 1
        return [(one["all"] - one["first"]) / more for one in times]
    return [one["first" if part else "call"] for one in times]
