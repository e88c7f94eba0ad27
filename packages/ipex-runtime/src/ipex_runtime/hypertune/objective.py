# SPDX-License-Identifier: Apache-2.0
"""Runs a script with one configuration of the launcher and reads the numbers that it prints."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ipex_runtime.hypertune._yaml import ConfigurationError
from ipex_runtime.hypertune.conf import DEFAULTS, parse_objective

__all__ = ["MultiObjective", "TrialError"]

TOKEN = "@hypertune"
ALLOCATORS = {"tc": "tcmalloc", "je": "jemalloc", "pt": "default"}

#: Seconds that a trial has between SIGTERM and SIGKILL, and the launcher after that.
STOP_SECONDS = 3


class TrialError(RuntimeError):
    """A trial has no result: its status is ``"crashed"``, ``"timed out"`` or ``"no objective"``.

    Attributes:
        status: What happened, in a word.
        output: What the script printed.
    """

    def __init__(self, status: str, message: str, output: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.output = output


class MultiObjective:
    """Evaluates configurations.

    Args:
        program: The script.
        program_args: Its arguments.
        tune_launcher: Whether configurations have options of the launcher.
        timeout: Seconds that one run may take; None: any.

    Attributes:
        objectives: Those of the last run, with ``name``, ``higher_is_better`` and ``target_val``.
    """

    def __init__(
        self,
        program: str,
        program_args: Sequence[str],
        tune_launcher: bool,
        timeout: float | None = None,
    ) -> None:
        self.program = program
        self.program_args = list(program_args)
        self.tune_launcher = tune_launcher
        self.timeout = timeout
        self.objectives: list[dict[str, Any]] = []

    def evaluate(self, cfg: Mapping[str, Any]) -> list[float]:
        """Run the script and return its objectives, in the order in which it prints them.

        With several instances a number that should be high is the sum of theirs (throughput), another one the mean
        (latency).

        Raises:
            TrialError: The script failed, took too long, or printed no number.
        """
        with tempfile.TemporaryDirectory(prefix="hypertune_") as folder:
            command = [sys.executable, "-m", "ipex_runtime.launch", "--log-dir", folder]
            command += ["--stop-timeout", str(STOP_SECONDS), "--table", "never"]
            if self.tune_launcher:
                command += self.decode_launcer_cfg(cfg)
            code, printed = self._run([*command, self.program, *self.program_args])
            logs = sorted(Path(folder).glob("*_instance_*.log"))
            # One file for each instance: their lines cannot mix.
            texts = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
        if code is None:
            message = f"it must end within {self.timeout:g} s, got no end: raise trial_timeout"
            raise TrialError("timed out", message, printed)
        if code != 0:
            message = f"it must end with exit code 0, got exit code {code}: see what it printed"
            raise TrialError("crashed", message, printed)
        return self._combine(texts, printed)

    def _run(self, command: Sequence[str]) -> tuple[int | None, str]:
        with tempfile.TemporaryFile() as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)  # also when the user interrupts the search
            file.seek(0)
            return code, file.read().decode(errors="replace")

    def decode_launcer_cfg(self, cfg: Mapping[str, Any]) -> list[str]:
        """Return the options of the launcher for a configuration. (The spelling is the one old callers know.)"""
        values = DEFAULTS | dict(cfg)
        options = []
        for name in ("ncores_per_instance", "ninstances"):
            if values[name] != -1:
                options += ["--" + name.replace("_", "-"), str(values[name])]
        if not values["use_all_nodes"]:
            options += ["--nodes-list", _first_node()]
        if values["use_logical_cores"]:
            options.append("--use-logical-cores")
        if values["disable_numactl"]:
            options += ["--multi-task-manager", "taskset"]
        if values["disable_iomp"]:
            options += ["--omp-runtime", "default"]
        return [*options, "--memory-allocator", ALLOCATORS[values["malloc"]]]

    def extract_usr_objectives(self, output: str) -> list[float]:
        """Return the numbers that follow ``@hypertune`` lines in the output of one instance."""
        return [value for _, value in self._read(output)]

    def _read(self, output: str) -> list[tuple[dict[str, Any], float]]:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        found: dict[str, tuple[dict[str, Any], float]] = {}
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            _, token, text = line.partition(TOKEN)
            if not token:
                continue
            try:
                objective = parse_objective(text, "the output of the script")
                found[objective["name"]] = (objective, float(following))
            except ConfigurationError as error:
                raise TrialError("no objective", str(error), output) from error
            except ValueError as error:
                message = f"the line after {line!r} must be a number, got {following[:80]!r}"
                raise TrialError("no objective", message, output) from error
        return list(found.values())

    def _combine(self, texts: Sequence[str], printed: str) -> list[float]:
        read = [self._read(text) for text in texts]
        objectives = [objective for objective, _ in read[0]] if read else []
        if not objectives:
            message = f"it must print a line with {TOKEN} and then a line with the number, got no such line"
            raise TrialError("no objective", message, printed)
        names = [o["name"] for o in objectives]
        for one in read:
            others = [o["name"] for o, _ in one]
            if others != names:
                message = f"its instances must print the same objectives, got {names} and {others}"
                raise TrialError("no objective", message, printed)
        if any(math.isnan(value) for one in read for _, value in one):
            raise TrialError("no objective", "an objective must be a number, got nan", printed)
        self.objectives = objectives
        sums = [sum(values) for values in zip(*([v for _, v in one] for one in read), strict=True)]
        return [
            total if objective["higher_is_better"] else total / len(read)
            for objective, total in zip(objectives, sums, strict=True)
        ]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        # The launcher passes it on to the instances and waits for them.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2 * STOP_SECONDS)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _first_node() -> str:
    from ipex_runtime.launch.cpu_info import CPUPoolList

    return str(min(c.node for c in CPUPoolList().pool_all))
