# SPDX-License-Identifier: Apache-2.0
"""One process that the launcher runs: what to run, on which CPUs and NUMA nodes, and what became of it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import shlex
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from ipex_runtime.memory import set_memory_policy
from ipex_runtime.topology.types import format_cpu_list


@contextlib.contextmanager
def bound(
    cpus: Sequence[int], nodes: Sequence[int], complain: Callable[[str], None]
) -> Iterator[None]:
    """Bind the calling thread, and so what it starts, for the time of the context.

    Args:
        cpus: Numbers of CPUs; empty: as it is.
        nodes: Numbers of the NUMA nodes that memory comes from; empty: as it is.
        complain: Gets a message where the system refuses the memory policy, as containers do; the CPUs hold anyway.

    Raises:
        OSError: The CPUs are refused.
    """
    before = os.sched_getaffinity(0)
    memory = False
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
        if nodes:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                memory = set_memory_policy("bind", nodes)
            for warning in caught:
                complain(str(warning.message))
        yield
    finally:
        if memory:
            set_memory_policy("default")
        if cpus:
            os.sched_setaffinity(0, before)


# --- instances --------------------------------------------------------------------------------------------------------


#: Of prctl: the signal that a process gets when the thread that started it ends.
PR_SET_PDEATHSIG = 1

#: Signal -> what often sends it.
ADVICE: dict[int, str] = {
    signal.SIGKILL: ": memory may have run out (see dmesg)",
    signal.SIGSEGV: ": a crash in native code (python -X faulthandler shows where)",
}


@dataclasses.dataclass(eq=False)
class Instance:
    """One process.

    Attributes:
        index: Its number.
        label: Its name in messages, for instance ``"instance 0"``.
        command: Program and arguments.
        environment: All environment variables.
        cpus: CPUs to bind it to; empty: the CPUs of the launcher.
        nodes: NUMA nodes for its memory; empty: any.
        log: File that its output is written to, too.
        process: The process, once it was started.
    """

    index: int
    label: str
    command: list[str]
    environment: Mapping[str, str]
    cpus: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    log: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    ended: float = 0.0
    log_file: BinaryIO | None = None

    def start(self, pipe: bool, complain: Callable[[str], None]) -> None:
        """Start the process in a session of its own, so that signals reach it and what it starts, once.

        Args:
            pipe: Connect its output, both kinds, to a pipe; otherwise it writes where the launcher writes.
            complain: Gets warnings.

        Raises:
            OSError: The program cannot be started, or the log cannot be written.
        """
        if self.log is not None:
            self.log_file = self.log.open("wb")
        with bound(self.cpus, self.nodes, complain):
            self.process = subprocess.Popen(
                self.command,
                env=dict(self.environment),
                stdout=subprocess.PIPE if pipe else None,
                stderr=subprocess.STDOUT if pipe else None,
                start_new_session=True,
                preexec_fn=_end_with_launcher(os.getpid()),  # noqa: PLW1509  (none with threads)
            )
        self.started = time.monotonic()

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return None if self.process is None else self.process.returncode

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self.process is not None and self.process.returncode is None

    def poll(self) -> bool:
        """Look whether it has ended; returns True the first time."""
        if not self.running or self.process is None or self.process.poll() is None:
            return False
        self.ended = time.monotonic()
        return True

    def send(self, number: int) -> None:
        """Send a signal to the process and all that it started; nothing happens if it has ended."""
        if self.process is not None and self.process.returncode is None:
            # Not reaped yet, so the number cannot belong to another process by now.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def end_leftovers(self) -> None:
        """Ask what a failed process has left running to end."""
        if self.process is not None:
            # The number of a group is not given to a new process while the group has members.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGTERM)

    def written(self, base: Mapping[str, str]) -> str:
        """Return the command as a line for a shell, with the variables that ``base`` has not."""
        changed = [
            f"{k}={shlex.quote(v)}" for k, v in sorted(self.environment.items()) if base.get(k) != v
        ]
        removed = [word for k in sorted(base) if k not in self.environment for word in ("-u", k)]
        env = ["env", *removed, *changed] if changed or removed else []
        return " ".join([*env, shlex.join(self.command)])

    def place(self) -> str:
        """Return where it runs, for people."""
        text = f"CPUs {format_cpu_list(self.cpus)}" if self.cpus else "CPUs not bound"
        return f"{text}, memory of NUMA nodes {format_cpu_list(self.nodes)}" if self.nodes else text


def _end_with_launcher(launcher: int) -> Callable[[], None] | None:
    """Return what a new process does so that it gets SIGTERM if the launcher is killed and cannot send it.

    None in a process with several threads, where Python code must not run between fork and exec.
    """
    try:
        if len(os.listdir("/proc/self/task")) > 1:
            return None
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None

    def prepare() -> None:
        # Between fork and exec: nothing but two system calls.
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != launcher:
            os._exit(1)  # it was killed before

    return prepare


def exit_code(returncode: int) -> int:
    """Return what a shell reports: 128 + n for a process that signal n ended."""
    return returncode if returncode >= 0 else 128 - returncode


def how_it_ended(returncode: int) -> str:
    """Return how a process ended, for people."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    advice = ADVICE.get(-returncode, "")
    return f"was killed by {name}{advice}"
