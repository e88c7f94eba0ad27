# SPDX-License-Identifier: Apache-2.0
"""The live table of instances on a terminal: CPU share, memory, state."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from ipex_runtime.launch._instance import Instance, exit_code, how_it_ended
from ipex_runtime.topology.types import format_cpu_list

if TYPE_CHECKING:
    import psutil

__all__ = [
    "Instance",
    "Table",
    "run",
]

#: More rows than this do not stay readable; the rest is summed up.
MOST_ROWS = 16


class Table:
    """Draws the state of instances on stderr, in place.

    Args:
        instances: The instances.
        stream: Where to draw; default: ``sys.stderr``.
        interval: Seconds between two drawings.
    """

    def __init__(
        self, instances: Sequence[Instance], stream: Any = None, interval: float = 1.0
    ) -> None:
        self.interval = interval
        self._instances = instances
        self._stream = sys.stderr if stream is None else stream
        self._drawn = 0
        self._next = 0.0
        self._known: dict[int, psutil.Process] = {}
        self._usage: dict[Instance, tuple[float, int]] = {}

    def draw(self) -> None:
        """Draw the table if it is time to or if it was erased."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self.interval
            self._measure()
        elif self._drawn:
            return
        lines = self.lines()
        width = shutil.get_terminal_size().columns - 1
        self.erase()
        self._stream.write("".join(line[:width] + "\n" for line in lines))
        self._stream.flush()
        self._drawn = len(lines)

    def erase(self) -> None:
        """Remove the table, so that other lines can be written."""
        if self._drawn:
            self._stream.write(f"\x1b[{self._drawn}A\x1b[J")
            self._stream.flush()
            self._drawn = 0

    def finish(self) -> None:
        """Draw the table a last time and leave it there."""
        self._next = 0.0
        self.erase()
        self.draw()
        self._drawn = 0

    def lines(self) -> list[str]:
        """Return the lines of the table."""
        rows = [("instance", "pid", "CPUs", "CPU %", "memory", "state")]
        for instance in self._instances[:MOST_ROWS]:
            share, memory = self._usage.get(instance, (0.0, 0))
            pid = str(instance.process.pid) if instance.process else "-"
            rows.append(
                (
                    instance.label,
                    pid,
                    format_cpu_list(instance.cpus) or "-",
                    f"{share:.0f}" if instance.running else "-",
                    _size(memory) if instance.running else "-",
                    self._state(instance),
                )
            )
        widths = [min(24, max(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
        lines = [
            "  ".join(t[:w].ljust(w) for t, w in zip(r[:-1], widths, strict=False)) for r in rows
        ]
        lines = [f"{line}  {row[-1]}" for line, row in zip(lines, rows, strict=True)]
        rest = self._instances[MOST_ROWS:]
        if rest:
            running = sum(i.running for i in rest)
            failed = sum(bool(i.returncode) for i in rest)
            lines.append(f"and {len(rest)} more: {running} running, {failed} failed")
        return lines

    @staticmethod
    def _state(instance: Instance) -> str:
        if instance.process is None:
            return "not started"
        end = time.monotonic() if instance.running else instance.ended
        seconds = f"{end - instance.started:.0f} s"
        if instance.running:
            return f"running, {seconds}"
        code = instance.returncode or 0
        return f"{'done' if code == 0 else how_it_ended(code)}, {seconds}"

    def _measure(self) -> None:
        import psutil

        for instance in self._instances:
            if instance.process is None or not instance.running:
                continue
            share, memory = 0.0, 0
            for process in self._family(instance.process.pid):
                # They may end at any time.
                try:
                    share += process.cpu_percent()
                    memory += process.memory_info().rss
                except psutil.Error:
                    self._known.pop(process.pid, None)
            self._usage[instance] = (share, memory)

    def _family(self, pid: int) -> list[psutil.Process]:
        import psutil

        try:
            # The same object as last time: the CPU share is that since its last call.
            first = self._known.setdefault(pid, psutil.Process(pid))
            found = [first, *first.children(recursive=True)]
        except psutil.Error:
            return []
        return [self._known.setdefault(process.pid, process) for process in found]


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


# --- supervision ------------------------------------------------------------------------------------------------------


FORWARDED: tuple[int, ...] = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
#: Requests to end; not SIGINT, since an interactive program may go on after it.
ENDING: tuple[int, ...] = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

#: Time without output after which the pipe of an ended instance is closed; what it started may hold the other end.
DRAIN_SECONDS = 0.3
#: So many SIGINT within so many seconds mean: end at once.
IMPATIENT = (3, 3.0)


def run(
    instances: Sequence[Instance],
    *,
    stop_timeout: float = 30.0,
    table: bool = False,
    combined: BinaryIO | None = None,
    prefixed: bool = False,
    complain: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> int:
    """Run all instances at the same time and return when all have ended.

    Args:
        instances: What to run; those with a log are connected by a pipe.
        stop_timeout: Seconds between a request to end and SIGKILL.
        table: Show a live table on stderr.
        combined: File for the output of all, with the number of the instance in front of each line.
        prefixed: The number is in front of the lines on stdout, too.
        complain: Gets messages.

    Returns:
        0 if all succeeded, otherwise the exit code of the first that failed (128 + n if signal n ended it).

    Raises:
        OSError: A program cannot be started; those that were started have been ended.
    """
    supervisor = _Supervisor(instances, stop_timeout, combined, prefixed, complain)
    supervisor.pipes = table or prefixed or combined is not None
    if table:
        supervisor.table = Table(instances)
    try:
        with _handlers(supervisor.on_signal):
            supervisor.start()
            supervisor.wait()
    finally:
        supervisor.close()
    return supervisor.result()


@contextlib.contextmanager
def _handlers(handler: Callable[[int, Any], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set them
        return
    before: dict[int, Any] = {}
    for number in (*FORWARDED, signal.SIGTSTP):
        # What is ignored (nohup) stays ignored, here and in the instances.
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class _Supervisor:
    def __init__(
        self,
        instances: Sequence[Instance],
        stop_timeout: float,
        combined: BinaryIO | None,
        prefixed: bool,
        complain: Callable[[str], None],
    ) -> None:
        self.instances = instances
        self.table: Table | None = None
        self.pipes = False
        self._stop_timeout = stop_timeout
        self._combined = combined
        self._prefixed = prefixed
        self._complain_to = complain
        self._complained: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._open: dict[IO[bytes], Instance] = {}
        self._partial: dict[Instance, bytes] = {}
        self._quiet_since: dict[IO[bytes], float] = {}
        self._pidfds: dict[int, Instance] = {}
        # A signal handler runs inside the wait and does not end it; what it set is seen after this time.
        self._longest_wait = 0.5
        self._deadline: float | None = None
        self._asked: list[int] = []
        self._interrupts: list[float] = []
        self._failed: Instance | None = None

    # -- start and end -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for instance in self.instances:
            if self._deadline is not None or self._asked:
                return  # a signal arrived or one has failed: the others are not started
            instance.start(self.pipes or instance.log is not None, self._complain)
            process = instance.process
            assert process is not None
            if process.stdout is not None:
                os.set_blocking(process.stdout.fileno(), False)
                self._open[process.stdout] = instance
                self._selector.register(process.stdout, selectors.EVENT_READ)
            self._watch(process, instance)

    def _watch(self, process: subprocess.Popen[bytes], instance: Instance) -> None:
        # The descriptor becomes readable when the process ends; without it (old kernels) the loop polls.
        try:
            descriptor = os.pidfd_open(process.pid)
        except OSError:
            self._longest_wait = 0.05
            return
        self._pidfds[descriptor] = instance
        self._selector.register(descriptor, selectors.EVENT_READ)

    def close(self) -> None:
        """End what still runs; on every way out."""
        for instance in self.instances:
            instance.send(signal.SIGKILL)
            if instance.process is not None:
                instance.process.wait()
        for pipe in list(self._open):
            self._read(pipe)
            self._close_pipe(pipe)
        for descriptor in self._pidfds:
            os.close(descriptor)
        self._selector.close()
        for instance in self.instances:
            if instance.log_file is not None:
                instance.log_file.close()
        if self.table is not None:
            self.table.finish()

    def result(self) -> int:
        if self._failed is not None:
            return exit_code(self._failed.returncode or 0)
        return next((exit_code(i.returncode) for i in self.instances if i.returncode), 0)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        while any(instance.running for instance in self.instances) or self._open:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj in self._open:
                    self._read(key.fileobj)  # type: ignore[arg-type]
            for instance in self.instances:
                if instance.poll():
                    self._ended(instance)
            self._close_quiet_pipes()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._kill()
            if self.table is not None:
                self.table.draw()

    def _patience(self) -> float:
        """Return how long nothing can happen that the selector does not see."""
        limits = [self._longest_wait]
        if self.table is not None:
            limits.append(self.table.interval)
        if self._open and not all(i.running for i in self._open.values()):
            limits.append(DRAIN_SECONDS / 3)
        if self._deadline is not None:
            limits.append(max(0.0, self._deadline - time.monotonic()))
        return min(limits)

    def _ended(self, instance: Instance) -> None:
        for descriptor in [fd for fd, i in self._pidfds.items() if i is instance]:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            del self._pidfds[descriptor]
        code = instance.returncode or 0
        if code == 0:
            return
        instance.end_leftovers()
        if -code in self._asked:
            self._complain(f"{instance.label} was ended by {signal.Signals(-code).name}, as asked")
        elif self._deadline is None and self._failed is None:
            self._failed = instance
            others = sum(i.running for i in self.instances)
            stopping = f"; stopping {others} other{'s' * (others > 1)}" if others else ""
            self._complain(f"{instance.label} {how_it_ended(code)}{stopping}")
            self._stop(signal.SIGTERM)
        elif code != -signal.SIGTERM:
            self._complain(f"{instance.label} {how_it_ended(code)}")

    def _stop(self, number: int) -> None:
        for instance in self.instances:
            instance.send(number)
        if self._deadline is None:
            self._deadline = time.monotonic() + self._stop_timeout

    def _kill(self) -> None:
        self._deadline = float("inf")
        late = [i for i in self.instances if i.running]
        if late:
            names = ", ".join(i.label for i in late)
            self._complain(f"{names} did not end within {self._stop_timeout:g} s and gets SIGKILL")
        for instance in late:
            self._asked.append(signal.SIGKILL)
            instance.send(signal.SIGKILL)

    def on_signal(self, number: int, frame: Any) -> None:
        if number == signal.SIGTSTP:
            self._pause()
            return
        self._asked.append(number)
        if number == signal.SIGINT:
            count, seconds = IMPATIENT
            self._interrupts = [*self._interrupts, time.monotonic()][-count:]
            if (
                len(self._interrupts) == count
                and self._interrupts[-1] - self._interrupts[0] < seconds
            ):
                number = signal.SIGKILL
                self._asked.append(number)
        if number in ENDING:
            self._stop(number)
        else:
            for instance in self.instances:
                instance.send(number)

    def _pause(self) -> None:
        # Ctrl-Z reaches the launcher only, since the instances have sessions of their own.
        for instance in self.instances:
            instance.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for instance in self.instances:
            instance.send(signal.SIGCONT)

    def _complain(self, text: str) -> None:
        if text not in self._complained:  # the same for each instance
            self._complained.add(text)
            if self.table is not None:
                self.table.erase()
            self._complain_to(text)

    # -- output --------------------------------------------------------------------------------------------------------

    def _read(self, pipe: IO[bytes]) -> None:
        instance = self._open[pipe]
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._close_pipe(pipe)
            return
        self._quiet_since.pop(pipe, None)
        self._write(instance, data)

    def _write(self, instance: Instance, data: bytes) -> None:
        if instance.log_file is not None:
            instance.log_file.write(data)
            instance.log_file.flush()
        if self.table is not None:
            self.table.erase()
        if not (self._prefixed or self._combined or self.table):
            _to_stdout(data)  # as it comes: progress bars
            return
        lines = (self._partial.pop(instance, b"") + data).splitlines(keepends=True)
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            self._partial[instance] = lines.pop()
        self._write_lines(instance, lines)

    def _write_lines(self, instance: Instance, lines: Sequence[bytes]) -> None:
        plain = b"".join(lines)
        marked = b"".join(b"[%d] %s" % (instance.index, line) for line in lines)
        _to_stdout(marked if self._prefixed else plain)
        if self._combined is not None:
            self._combined.write(marked)
            self._combined.flush()

    def _close_quiet_pipes(self) -> None:
        now = time.monotonic()
        for pipe, instance in list(self._open.items()):
            if not instance.running:
                self._read(pipe)
                if (
                    pipe in self._open
                    and now - self._quiet_since.setdefault(pipe, now) > DRAIN_SECONDS
                ):
                    self._close_pipe(pipe)

    def _close_pipe(self, pipe: IO[bytes]) -> None:
        instance = self._open.pop(pipe, None)
        if instance is None:
            return
        self._selector.unregister(pipe)
        pipe.close()
        rest = self._partial.pop(instance, b"")
        if rest:
            self._write_lines(instance, [rest + b"\n"])


def _to_stdout(data: bytes) -> None:
    # A reader that has gone (| head) must not end the instances before their logs are written.
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        stream = getattr(sys.stdout, "buffer", None)
        if stream is None:
            sys.stdout.write(data.decode(errors="replace"))
        else:
            stream.write(data)
        sys.stdout.flush()
