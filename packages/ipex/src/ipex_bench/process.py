# SPDX-License-Identifier: Apache-2.0
"""The parent's side of an engine's process."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from .task import Task

#: Characters of the longest answer.
_LONGEST = 1 << 16


class EngineError(Exception):
    """The process ended, did not answer in time, or answered with an error; the text is for the table."""


class Worker:
    """A process that runs an engine; use it in a ``with`` statement, which ends it and all that it has started.

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
            # Of its own: a process that is ended while it compiles leaves a library behind that is cut off.
            "TORCHINDUCTOR_CACHE_DIR": str(task.path / f"inductor-{engine}"),
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
            errors="replace",
            env=env,
            # A session of its own: compilers that it starts end with it, and Ctrl-C reaches us alone.
            start_new_session=True,
        )
        self._asked = 0
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        # In pieces: what is not our worker may print without end and without lines.
        while line := self._process.stdout.readline(_LONGEST):
            with contextlib.suppress(ValueError, RecursionError):
                answer = json.loads(line)
                # The interpreter, or a script around it, may print beside the answers.
                if isinstance(answer, dict) and answer.get("id") == self._asked:
                    self._answers.put(answer)
        self._answers.put(None)

    def ask(self, *, timeout: float | None = None, **request: Any) -> dict[str, Any]:
        """Send a command and return the answer.

        Args:
            timeout: Seconds to wait for it, if not the timeout of the process.
            request: The command. One without an answer ends the process.

        Raises:
            EngineError: There was none.
        """
        assert self._process.stdin is not None
        seconds = self.timeout if timeout is None else timeout
        self._asked += 1
        try:
            self._process.stdin.write(json.dumps({**request, "id": self._asked}) + "\n")
            self._process.stdin.flush()
            answer = self._answers.get(timeout=seconds)
        except (OSError, ValueError):
            answer = None
        except queue.Empty:
            self.close(at_once=True)
            raise EngineError(f"no answer within {seconds:g} s") from None
        if answer is None:
            raise EngineError(self._last_words())
        return answer

    def _last_words(self) -> str:
        if self._errors.closed:
            return "its process was ended"
        try:
            code = self._process.wait(timeout=5)
            lines = [line.strip() for line in self.log().splitlines() if line.strip()]
        except subprocess.TimeoutExpired:  # it only closed its output
            return "its process stopped answering"
        finally:
            self.close(at_once=True)
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return f"its process ended with {how}" + (f": {lines[-1][:200]}" if lines else "")

    def log(self) -> str:
        """Return what the process has written to standard error so far."""
        self._errors.seek(0)
        return self._errors.read()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(at_once=kind is not None)

    def close(self, at_once: bool = False) -> None:
        """End the process and what it has started; ``at_once``: without a chance to end by itself."""
        if self._errors.closed:
            return
        assert self._process.stdin is not None
        # What has not been written yet goes to a process that may be gone.
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if not at_once:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()
        self._reader.join(timeout=5)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
