# SPDX-License-Identifier: Apache-2.0
"""The thread that owns the engine: it takes requests from the HTTP server's event loop and gives it their tokens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import queue
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from ipex_llm.engine import Engine, PoolingParams, SamplingParams, StepOutput
from ipex_llm.engine.encoder import EncoderEngine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "Seconds from the arrival of a request to its first token.",
    "vllm:inter_token_latency_seconds": "Seconds between two tokens of a request.",
    "vllm:e2e_request_latency_seconds": "Seconds from the arrival of a request to its end.",
}


class _Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def _escaped(text: str) -> str:
    """Return the value of a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Metrics:
    """What ``/metrics`` shows besides the numbers of the engine. Can be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._histograms = {name: _Histogram(_SECONDS) for name in _HISTOGRAMS}
        self._responses: dict[tuple[str, int], int] = {}

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        with self._lock:
            self._histograms[name].add(value)

    def response(self, path: str, status: int) -> None:
        """Count a response."""
        with self._lock:
            self._responses[path, status] = self._responses.get((path, status), 0) + 1

    def responses(self, name: str) -> list[str]:
        """Return the lines that tell of responses.

        Args:
            name: Of the metric.
        """
        full = f"ipex_llm_{name}"
        lines = [f"# HELP {full} Responses by path and status.", f"# TYPE {full} counter"]
        with self._lock:
            for (path, status), count in sorted(self._responses.items()):
                lines.append(f'{full}{{path="{path}",status="{status}"}} {count}')
        return lines

    def text(
        self,
        model: str,
        gauges: Mapping[str, tuple[str, float]],
        counters: Mapping[str, tuple[str, float]],
    ) -> str:
        """Return everything as text. Names with a colon are vLLM's and have its label, too.

        Args:
            model: Its name.
            gauges: name -> (help, value); a name may have labels behind it, ``name{label="value"}``.
            counters: Likewise.
        """
        lines: list[str] = []
        label = f'model_name="{_escaped(model)}"'

        def head(name: str, kind: str, text: str) -> str:
            full = name if ":" in name else f"ipex_llm_{name}"
            if f"# TYPE {full} {kind}" not in lines:
                lines.append(f"# HELP {full} {text}")
                lines.append(f"# TYPE {full} {kind}")
            return full

        for kind, values in (("gauge", gauges), ("counter", counters)):
            for labeled, (text, value) in values.items():
                name, _, extra = labeled.partition("{")
                found = [label] * (":" in name) + [extra[:-1]] * bool(extra)
                labels = f"{{{','.join(found)}}}" if found else ""
                lines.append(f"{head(name, kind, text)}{labels} {value:.10g}")
        lines += self.responses("http_responses_total")
        with self._lock:
            for name, histogram in self._histograms.items():
                full = head(name, "histogram", _HISTOGRAMS[name])
                count = 0
                for bound, more in zip(histogram.bounds, histogram.counts, strict=False):
                    count += more
                    lines.append(f'{full}_bucket{{{label},le="{bound:g}"}} {count}')
                count += histogram.counts[-1]
                lines.append(f'{full}_bucket{{{label},le="+Inf"}} {count}')
                lines.append(f"{full}_sum{{{label}}} {histogram.total:g}")
                lines.append(f"{full}_count{{{label}}} {count}")
        return "\n".join(lines) + "\n"


# -- The thread that owns the engine ----------------------------------------------------------------------------------


log = logging.getLogger("ipex")

#: Threads that make tokens of prompts: a long prompt must not stop short ones, and must not take all cores either.
TOKENIZERS = 2


class QueueFull(Exception):
    """There are as many requests as the server takes."""


_STOPPED = "the server must be running, got a shutdown: send the request again after its next start"


class RequestError(Exception):
    """One request failed inside the engine; the others go on."""


class StoppedError(Exception):
    """The server is shutting down."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """What a thread of the tokenizer made.

    Attributes:
        tokens: The prompt.
        changes: Fields of the parameters that are known only now.
        text: What the chat template made of messages, else empty.
    """

    tokens: Sequence[int]
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Accepted:
    """The engine took a request."""

    prompt: Prompt


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """The engine did not take a request, or failed while it ran.

    Attributes:
        error: What happened; ValueError, TypeError and MemoryError are mistakes of the request.
    """

    error: BaseException

    @property
    def of_the_request(self) -> bool:
        """Whether the request is to blame."""
        return isinstance(self.error, (ValueError, TypeError, MemoryError))


Event = Accepted | Failed | StepOutput
Value = TypeVar("Value")


@dataclasses.dataclass(slots=True)
class Ticket:
    """A request from outside: where its events go."""

    id: str
    params: SamplingParams | PoolingParams
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event]
    arrived: float
    last: float | None = None
    first: float | None = None
    queued: float | None = None
    running: bool = False  # the engine has it

    def send(self, event: Event) -> None:
        """Hand an event over to the event loop of the server."""
        # A closed loop raises: no task waits any more.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class Worker:
    """Runs the engine in a thread of its own. Prompts are tokenized in others, so that no stream waits for that.

    Args:
        engine: The engine; no other thread may use it.
        max_queue: Most requests that wait beside those that can run; more raise `QueueFull`.
    """

    def __init__(self, engine: Engine | EncoderEngine, max_queue: int = 64) -> None:
        self.engine = engine
        self.metrics = Metrics()
        self.limit = max_queue + engine.max_num_seqs
        self.errors = 0
        self.rejected = 0
        self._tickets: dict[str, Ticket] = {}
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._commands: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ipex-llm-engine", daemon=True)
        # No more prompts wait here than there are tickets.
        self._pool = ThreadPoolExecutor(TOKENIZERS, "ipex-llm-tokenizer")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs and takes requests."""
        lost = getattr(self.engine, "lost", False)
        return self._thread.is_alive() and not self._stopping and not lost

    @property
    def unfinished(self) -> int:
        """Requests that are here."""
        return len(self._tickets)

    def submit(
        self,
        requests: Sequence[
            tuple[Callable[[], Prompt], Sequence[SamplingParams] | Sequence[PoolingParams]]
        ],
    ) -> list[Ticket]:
        """Queue requests, all or none; called from an event loop.

        Args:
            requests: For each prompt a function that makes it, which a thread of the tokenizer calls, and the
                parameters of its choices.

        Returns:
            A ticket for each choice.

        Raises:
            QueueFull: There is no room for all of them.
            StoppedError: The server is shutting down.
        """
        loop = asyncio.get_running_loop()
        count = sum(len(params) for _, params in requests)
        with self._lock:
            if not self.alive:
                raise StoppedError(_STOPPED)
            if len(self._tickets) + count > self.limit:
                self.rejected += 1
                raise QueueFull(
                    f"the queue is full: at most {self.limit} requests may wait or run, got {count} and"
                    f" {len(self._tickets)} before: wait, then send the request again"
                )
            now = time.monotonic()
            groups = [
                [Ticket(f"q{next(self._ids)}", p, loop, asyncio.Queue(), now) for p in params]
                for _, params in requests
            ]
            tickets = [ticket for group in groups for ticket in group]
            self._tickets |= {ticket.id: ticket for ticket in tickets}
            # Within the lock: the pool must not have been stopped.
            for (make, _), group in zip(requests, groups, strict=True):
                self._pool.submit(self._tokenize, make, group)
        return tickets

    async def apart(self, work: Callable[[], Value]) -> Value:
        """Run something in a thread of the tokenizer.

        Raises:
            StoppedError: The server is shutting down.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except RuntimeError as error:
            if self.alive:
                raise
            raise StoppedError(_STOPPED) from error

    async def call(self, work: Callable[[], Value]) -> Value:
        """Run something in the thread of the engine, between two steps.

        Raises:
            StoppedError: The server is shutting down.
        """
        result: Future[Value] = Future()
        with self._lock:
            if not self.alive:
                raise StoppedError(_STOPPED)
            self._commands.put(("call", (work, result)))
        return await asyncio.wrap_future(result)

    def cancel(self, ticket: Ticket) -> None:
        """End a request, which may have ended already. Its place is free at once."""
        with self._lock:
            found = self._tickets.pop(ticket.id, None)
        if found is not None:
            self._commands.put(("cancel", ticket.id))

    def stop(self, timeout: float = 10.0) -> None:
        """Fail what is still here, and end the thread."""
        with self._lock:
            self._stopping = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._commands.put(("stop", None))
        self._thread.join(timeout)

    # -- in the threads of the tokenizer -------------------------------------------------------------------------

    def _tokenize(self, make: Callable[[], Prompt], tickets: Sequence[Ticket]) -> None:
        waiting = [ticket for ticket in tickets if ticket.id in self._tickets]
        if not waiting:
            return  # the client has gone meanwhile
        try:
            prompt = make()
        except BaseException as error:  # a panic of a tokenizer written in Rust is no Exception
            failed = Failed(error)
            if not failed.of_the_request:
                log.error("a prompt could not be tokenized", exc_info=error)
            for ticket in waiting:
                self._end(ticket, failed)
            return
        for ticket in waiting:
            ticket.params = dataclasses.replace(ticket.params, **prompt.changes)
            self._commands.put(("add", (ticket, prompt)))

    # -- in the thread of the engine -----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            # Without work it sleeps until a command comes; with work it takes what is there and goes on.
            if not self._obey(block=not self.engine.has_work):
                break
            if not self.engine.has_work:
                continue
            try:
                outputs = self.engine.step()
            except Exception as error:
                self.errors += 1
                log.exception("the engine failed")
                self._fail_all(error)
                continue
            now = time.monotonic()
            for output in outputs:
                self._deliver(output, now)
        self._fail_all(StoppedError(_STOPPED))

    def _obey(self, block: bool) -> bool:
        """Carry out all commands that are there; return False at the end."""
        while True:
            try:
                command, value = self._commands.get(block)
            except queue.Empty:
                return True
            block = False
            if command == "stop":
                self._refuse_calls()
                return False
            if command == "cancel":
                self.engine.cancel(value)
            elif command == "call":
                _answer(*value)
            else:
                self._add(*value)

    def _refuse_calls(self) -> None:
        """Fail the calls that came before the end but are behind it."""
        with contextlib.suppress(queue.Empty):
            while True:
                command, value = self._commands.get(False)
                if command == "call":
                    value[1].set_exception(StoppedError(_STOPPED))

    def _add(self, ticket: Ticket, prompt: Prompt) -> None:
        if ticket.id not in self._tickets:
            return  # cancelled before it came here
        try:
            self.engine.add_request(prompt.tokens, ticket.params, request_id=ticket.id)
        except Exception as error:
            self._end(ticket, Failed(error))
            return
        ticket.running = True
        ticket.send(Accepted(prompt))

    def _deliver(self, output: StepOutput, now: float) -> None:
        ticket = self._tickets.get(output.request_id)
        if ticket is None:
            return
        if output.tokens or output.vector is not None:
            if ticket.last is None:
                ticket.first, ticket.queued = now, output.queued
                self.metrics.observe("vllm:time_to_first_token_seconds", now - ticket.arrived)
            else:
                self.metrics.observe("vllm:inter_token_latency_seconds", now - ticket.last)
            ticket.last = now
        if output.error is not None:
            kind = ValueError if output.refused else RequestError
            self._end(ticket, Failed(kind(output.error)))
        elif output.finished:
            self.metrics.observe("vllm:e2e_request_latency_seconds", now - ticket.arrived)
            self._end(ticket, output)
        else:
            ticket.send(output)

    def _end(self, ticket: Ticket, event: Event) -> None:
        with self._lock:
            self._tickets.pop(ticket.id, None)
        ticket.send(event)

    def _fail_all(self, error: Exception) -> None:
        # What happened inside a batch cannot be blamed on one of its requests, whatever its type.
        stopped = isinstance(error, StoppedError)
        failure = error if stopped else RuntimeError(str(error))
        with self._lock:
            # Prompts that are being tokenized have no part in a failure of the engine.
            tickets = [ticket for ticket in self._tickets.values() if stopped or ticket.running]
        for ticket in tickets:
            self.engine.cancel(ticket.id)
            self._end(ticket, Failed(failure))


def _answer(work: Callable[[], Value], result: Future[Value]) -> None:
    """Do the work of a call, unless nothing waits for it any more."""
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(work())
    except Exception as error:
        result.set_exception(error)
