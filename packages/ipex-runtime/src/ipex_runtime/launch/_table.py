# SPDX-License-Identifier: Apache-2.0
"""The live table of instances on a terminal: CPU share, memory, state."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ipex_runtime.launch._instance import Instance, how_it_ended
from ipex_runtime.topology.cpu_lists import format_cpu_list

if TYPE_CHECKING:
    import psutil

__all__ = ["Table"]

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
