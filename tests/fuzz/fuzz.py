#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Feed changed inputs to everything that reads input from elsewhere.

    python tests/fuzz/fuzz.py                        all targets, 1000 inputs each
    python tests/fuzz/fuzz.py gguf op --count 20000 --seed 7
    python tests/fuzz/fuzz.py gguf --seed 7 --only 123   one input again, in this process

The inputs of the corpus come first, as they are. They run in a process of their own, which is started again after a
crash. An exception that the documentation does not name, the end of the process, and a minute for one input
are findings: they are printed with what repeats them, and the input is written to ``reports/fuzz/``. What a finding
was about is mended, and its input goes into the corpus.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPORTS = HERE.parent.parent / "reports" / "fuzz"
SECONDS = 60  # a machine may do other things
MEMORY = 16 << 30  # of the address space of a process
MOST_FINDINGS = 20


def inputs_of(name: str) -> list[bytes]:
    """Return the seeds of a target: files of the corpus and what it makes itself."""
    from targets import CORPUS, TARGETS

    files = sorted(path for path in (CORPUS / name).glob("*") if path.is_file())
    return [*(path.read_bytes() for path in files), *TARGETS[name].seeds()]


def input_at(name: str, seeds: list[bytes], seed: int, number: int) -> bytes:
    """Return an input: the seeds as they are, then changed ones."""
    from targets import TARGETS

    if number < len(seeds):
        return seeds[number]
    rng = random.Random(f"{name} {seed} {number}")
    return TARGETS[name].change(rng, rng.choice(seeds))


def too_slow(*_: Any) -> None:
    raise TimeoutError(f"{SECONDS} seconds for one input")


def work(names: list[str], seed: int, start: int, count: int) -> None:
    """Run inputs in this process, those of the first target from a number on; writes JSON before and after each."""
    import torch
    from targets import TARGETS

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, too_slow)
    answer = sys.stdout
    sys.stdout = sys.stderr
    for name in names:
        seeds = inputs_of(name)
        for number in range(start if name == names[0] else 0, count + len(seeds)):
            print(json.dumps({"target": name, "begins": number}), file=answer, flush=True)
            data = input_at(name, seeds, seed, number)
            with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
                signal.alarm(SECONDS)
                # Python handles the alarm when native code returns; what never returns ends the process instead.
                faulthandler.dump_traceback_later(1.5 * SECONDS, exit=True)
                try:
                    TARGETS[name].run(data, Path(folder))
                except BaseException as error:
                    text = "".join(traceback.format_exception(error)[-12:])
                    print(json.dumps({"failed": text}), file=answer, flush=True)
                finally:
                    signal.alarm(0)
                    faulthandler.cancel_dump_traceback_later()
    print(json.dumps({"done": True}), file=answer, flush=True)


def run(names: list[str], seed: int, count: int) -> list[tuple[str, int, str]]:
    """Run targets and return their findings: target, number of the input, what happened."""
    found: list[tuple[str, int, str]] = []
    left, start, done = list(names), 0, False
    while not done and len(found) < MOST_FINDINGS:
        options = ["--worker", str(start), "--seed", str(seed), "--count", str(count)]
        command = [sys.executable, str(Path(__file__).resolve()), *left, *options]
        try:
            ended = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=120 + len(left) * count * SECONDS / 10,
            )
            output, problem, code = ended.stdout, ended.stderr, ended.returncode
        except subprocess.TimeoutExpired as error:
            output, problem, code = (error.stdout or b"").decode(), "does not end", -9
        name, number = left[0], start
        for line in output.splitlines():
            row = json.loads(line)
            name, number = row.get("target", name), row.get("begins", number)
            done = done or "done" in row
            if "failed" in row:
                found.append((name, number, row["failed"]))
        if not done:
            found.append((name, number, f"the process ended with {code}: {problem[-2000:]}"))
            left, start = left[left.index(name) :], number + 1
    return found


def main() -> int:
    """Run the command line; returns the number of findings, at most 1."""
    sys.path.insert(0, str(HERE))
    from targets import TARGETS

    parser = argparse.ArgumentParser(description="Feed changed inputs to all readers.")
    parser.add_argument("targets", nargs="*", default=list(TARGETS), metavar="target")
    parser.add_argument("--count", type=int, default=1000, help="changed inputs of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run one input in this process")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = sorted(set(args.targets) - set(TARGETS))
    if unknown:
        parser.error(f"unknown target {unknown[0]}; there are {', '.join(TARGETS)}")
    if args.worker is not None:
        work(args.targets, args.seed, args.worker, args.count)
        return 0
    if args.only is not None:
        (name,) = args.targets
        data = input_at(name, inputs_of(name), args.seed, args.only)
        print(data[:2000])
        with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
            TARGETS[name].run(data, Path(folder))
        return 0
    names = []
    for name in args.targets:
        missing = [it for it in TARGETS[name].needs if importlib.util.find_spec(it) is None]
        if missing:
            print(f"{name}: left out, {', '.join(missing)} is not installed")
        else:
            names.append(name)
    found = run(names, args.seed, args.count) if names else []
    for name, number, text in found:
        REPORTS.mkdir(parents=True, exist_ok=True)
        data = input_at(name, inputs_of(name), args.seed, number)
        (REPORTS / f"{name}-{args.seed}-{number}").write_bytes(data)
        print(f"-- {name} --seed {args.seed} --only {number}\n{text}")
    print(f"{len(found)} findings in {args.count} changed inputs of each of {', '.join(names)}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
