# SPDX-License-Identifier: Apache-2.0
"""The parent's side of an engine's process."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from .task import Task

__all__ = ["EngineError", "Worker"]


class EngineError(Exception):
    """The process ended, did not answer in time, or answered with an error; the text is for the table."""


class Worker:
    """A process that runs an engine; use it in a ``with`` statement, which ends it.

    Args:
        task: What to run.
        engine: Which engine.
        python: The interpreter; another one than ours has the engine's own environment.
        timeout: Seconds to wait for an answer.
    """

    def __init__(self, task: Task, engine: str, python: str = "", timeout: float = 600) -> None:
        self.engine = engine
        self.timeout = timeout
        count = str(task.threads)
        env = {
            **os.environ,
            "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": count,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if python and python != sys.executable:
            # What we import must not be found by another environment: it may hold the original of our alias.
            for name in ("PYTHONPATH", "PYTHONHOME"):
                env.pop(name, None)
        self._errors = tempfile.TemporaryFile(  # noqa: SIM115  (lives as long as the process)
            "w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(
            [
                python or sys.executable,
                str(Path(__file__).with_name("worker.py")),
                task.folder,
                engine,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env=env,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a command and return the answer.

        Raises:
            EngineError: There was none.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=self.timeout)
        except (OSError, ValueError):
            line = None
        except queue.Empty:
            raise EngineError(f"no answer within {self.timeout:.0f} s") from None
        if line is None:
            raise EngineError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        code = self._process.wait(timeout=10)
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return f"its process ended with {how}" + (f": {lines[-1][:200]}" if lines else "")

    def log(self) -> str:
        """Return what the process has written to standard error so far."""
        self._errors.seek(0)
        return self._errors.read()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            try:
                self._process.stdin.close()
                self._process.wait(timeout=5)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        elif self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._reader.join(timeout=5)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
