# SPDX-License-Identifier: Apache-2.0
"""Several engines of one server, each a process of its own: where they run, how they start, end and start again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ipex_core.errors import MissingComponentError
from ipex_core.kernels import machine
from ipex_llm.entrypoints.openai.guard import within

try:
    import h11
except ImportError as _error:
    raise MissingComponentError("the server needs uvicorn: pip install 'ipex[serve]'") from _error

__all__ = [
    "EngineAbsent",
    "EngineGone",
    "EngineProcess",
    "Engines",
    "Place",
    "bound",
    "exchange",
    "places",
]

log = logging.getLogger("ipex")

#: What an engine process runs; its arguments follow.
COMMAND = (sys.executable, "-c", "from ipex_llm.entrypoints.cli import app; app()", "serve")
#: Seconds between two looks at an engine, that an answer may take, and looks without one until it counts as stuck.
_LOOK, _LONGEST, _PATIENCE = 2.0, 10.0, 3
#: Seconds before an engine that ended starts again: at first, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
#: Seconds that an engine gets to end.
_END = 10.0
_CHUNK = 64 << 10


# -- where engines run ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """CPUs of one engine.

    Attributes:
        cpus: Numbers of its hardware threads; none: any.
        threads: Threads that compute; None: as many as torch takes.
    """

    cpus: tuple[int, ...]
    threads: int | None


def places(
    count: int | None = None,
    each: int | None = None,
    cores: Sequence[tuple[int, tuple[int, ...]]] | None = None,
    quota: float | None = None,
) -> list[Place]:
    """Divide the cores that this process may use.

    Args:
        count: Number of engines; None: one for each NUMA node, or for each ``each`` cores.
        each: Cores of an engine, where ``count`` is None; no engine has cores of two nodes then.
        cores: (node, hardware threads) of each core, node by node; None: as the machine has them.
        quota: CPUs' worth of time of the control group, None without a limit; with ``cores`` None the quota of
            this process.

    Returns:
        A place for each engine. More engines than cores share the cores.
    """
    if cores is None:
        cores = machine.allowed_cores()
        quota = machine.cgroup_limits().cpus
    if not cores:  # the system does not tell
        return [Place((), None)] * (count or 1)
    usable = len(cores) if quota is None else max(1, min(len(cores), math.ceil(quota)))
    if count is None:
        groups = []
        for node in sorted({node for node, _ in cores}):
            own = [cpus for n, cpus in cores if n == node]
            parts = 1 if each is None else max(1, len(own) // each)
            groups += list(_divided(own, parts))
    elif count > len(cores):
        groups = [[cores[i % len(cores)][1]] for i in range(count)]
    else:
        groups = list(_divided([cpus for _, cpus in cores], count))
    share = usable / len(cores)
    return [
        Place(
            tuple(sorted(cpu for cpus in group for cpu in cpus)),
            max(1, math.floor(len(group) * share)),
        )
        for group in groups
    ]


def _divided(cores: Sequence[tuple[int, ...]], parts: int) -> Iterator[list[tuple[int, ...]]]:
    for part in range(parts):
        yield list(cores[len(cores) * part // parts : len(cores) * (part + 1) // parts])


# -- what an engine is asked ------------------------------------------------------------------------------------------


class EngineGone(Exception):
    """An engine ended, or does not answer, while it was asked."""


class EngineAbsent(EngineGone):
    """An engine does not listen: it has not seen the request."""


@dataclasses.dataclass
class Exchange:
    """An answer of an engine: its head, and its body as it comes."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: AsyncIterator[bytes]


@contextlib.asynccontextmanager
async def exchange(
    path: str,
    method: bytes,
    target: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
    body: bytes = b"",
) -> AsyncIterator[Exchange]:
    """Ask the server behind a Unix socket, over a connection of its own; leaving the block early cancels that.

    Args:
        path: The socket.
        method: Of the request.
        target: Path and query.
        headers: Besides what belongs to the connection.
        body: All of it.

    Raises:
        EngineGone: There is no (whole) answer. Also raised by the body.
        EngineAbsent: It does not listen.
    """
    connection = h11.Connection(h11.CLIENT)
    own = [
        (b"host", b"localhost"),
        (b"connection", b"close"),
        (b"content-length", b"%d" % len(body)),
    ]
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError as error:
        raise EngineAbsent from error

    async def event() -> Any:
        try:
            while True:
                found = connection.next_event()
                if found is not h11.NEED_DATA:
                    return found
                connection.receive_data(await reader.read(_CHUNK))
        except (OSError, h11.RemoteProtocolError) as error:
            raise EngineGone from error

    async def parts() -> AsyncIterator[bytes]:
        while True:
            found = await event()
            if isinstance(found, h11.EndOfMessage):
                return
            if not isinstance(found, h11.Data):
                raise EngineGone
            yield bytes(found.data)

    try:
        request = h11.Request(method=method, target=target, headers=[*own, *headers])
        for part in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(connection.send(part) or b"")
        with contextlib.suppress(OSError):  # there may be an answer nevertheless
            await writer.drain()
        head = await event()
        if not isinstance(head, h11.Response):
            raise EngineGone
        yield Exchange(head.status_code, list(head.headers), parts())
    finally:
        writer.close()


# -- their processes --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class EngineProcess:
    """One engine.

    Attributes:
        index: Its number.
        place: Where it runs.
        socket: Where it listens.
        up: Whether it takes requests.
        load: Requests that it has.
        served: Requests that it got.
        restarts: How often it was started again.
        process: What runs.
    """

    index: int
    place: Place
    socket: str
    up: bool = False
    load: int = 0
    served: int = 0
    restarts: int = 0
    process: subprocess.Popen[bytes] | None = None

    async def ask(
        self, target: bytes, body: bytes | None = None, seconds: float = _LONGEST
    ) -> tuple[int, bytes]:
        """Return status and body of an answer that comes soon.

        Args:
            target: Path.
            body: JSON that is sent, or None.
            seconds: Most that it may take.

        Raises:
            EngineGone: It does not come.
        """
        method = b"GET" if body is None else b"POST"
        headers = [] if body is None else [(b"content-type", b"application/json")]

        async def asked() -> tuple[int, bytes]:
            async with exchange(self.socket, method, target, headers, body or b"") as answer:
                return answer.status, b"".join([part async for part in answer.body])

        try:
            return await within(asked(), seconds)
        except asyncio.TimeoutError as error:
            raise EngineGone from error


class Engines:
    """Starts engines, and those that end or hang again; belongs to one event loop.

    Args:
        where: Their places.
        arguments: Of ``ipex llm serve`` for all of them.
        command: What runs, in front of the arguments.
        on_end: Called with an engine that has ended.

    Attributes:
        on_ready: Awaited with an engine that answers, before it gets requests.
    """

    def __init__(
        self,
        where: Sequence[Place],
        arguments: Sequence[str],
        command: Sequence[str] = COMMAND,
        on_end: Callable[[EngineProcess], None] = lambda engine: None,
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="ipex-")  # of this user only
        self._arguments = arguments
        self._command = command
        self._tasks: list[asyncio.Task[None]] = []
        self.on_end = on_end
        self.on_ready = _nothing
        self.stopping = False
        self.all = [
            EngineProcess(i, place, str(Path(self._folder, f"{i}.sock")))
            for i, place in enumerate(where)
        ]

    async def start(self, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Start all, and wait until they take requests.

        Args:
            given_up: Asked now and then whether to go on.

        Returns:
            Whether they do; False if one ended before, or it was given up.
        """
        for engine in self.all:
            self._start(engine)
        for engine in self.all:
            if not await self._ready(engine, given_up):
                await self.stop()
                return False
        self._tasks = [asyncio.create_task(self._keep(engine)) for engine in self.all]
        return True

    async def stop(self) -> None:
        """End all."""
        self.stopping = True
        for task in self._tasks:
            task.cancel()
        running = [
            e.process for e in self.all if e.process is not None and e.process.poll() is None
        ]
        for engine in self.all:
            engine.up = False
        for process in running:
            process.terminate()
        end = time.monotonic() + _END
        for process in running:
            while process.poll() is None and time.monotonic() < end:
                await asyncio.sleep(0.05)
            if process.poll() is None:
                process.kill()
            await asyncio.to_thread(process.wait)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, engine: EngineProcess) -> None:
        environment = dict(os.environ)
        threads = engine.place.threads
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(engine.socket)
        command = [*self._command, *self._arguments, "--uds", engine.socket]
        # It ends when its standard input does, so also if this process is killed. A session of its own: Ctrl+C in a
        # terminal must reach this process only, which lets requests finish.
        with bound(engine.place.cpus):
            engine.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, start_new_session=True
            )

    async def _ready(self, engine: EngineProcess, given_up: Callable[[], bool]) -> bool:
        process = engine.process
        assert process is not None
        while process.poll() is None and not given_up():
            with contextlib.suppress(EngineGone):
                status, _ = await engine.ask(b"/health")
                if status == 200:
                    await self.on_ready(engine)
                    engine.up = True
                    return True
            await asyncio.sleep(0.1)
        return False

    async def _keep(self, engine: EngineProcess) -> None:
        pause = _FIRST_PAUSE
        while True:
            begun = time.monotonic()
            if engine.up or await self._ready(engine, lambda: self.stopping):
                await self._watch(engine)
            engine.up = False
            process = engine.process
            assert process is not None
            if process.poll() is None:
                process.kill()
            status = await asyncio.to_thread(process.wait)
            self.on_end(engine)
            if time.monotonic() - begun > _LONGEST_PAUSE:
                pause = _FIRST_PAUSE
            log.error(
                "engine %d ended with status %d: it is started again in %g s",
                *(engine.index, status, pause),
            )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            engine.restarts += 1
            self._start(engine)

    async def _watch(self, engine: EngineProcess) -> None:
        """Come back when an engine has ended or does not answer any more."""
        process = engine.process
        assert process is not None
        silent = 0
        looked = time.monotonic()
        while process.poll() is None and silent < _PATIENCE:
            await asyncio.sleep(0.2)
            if time.monotonic() - looked < _LOOK:
                continue
            looked = time.monotonic()
            try:
                status, _ = await engine.ask(b"/health")
            except EngineGone:
                silent += 1
                continue
            silent = 0
            # It may have ended since it answered.
            engine.up = status == 200 and process.poll() is None
            if status != 200:  # its thread has ended
                log.error("engine %d takes no requests any more", engine.index)
                return


async def _nothing(engine: EngineProcess) -> None:
    pass


@contextlib.contextmanager
def bound(cpus: Sequence[int]) -> Iterator[None]:
    """Bind this thread, and so what it starts, within a block."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
