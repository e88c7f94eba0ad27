# SPDX-License-Identifier: Apache-2.0
"""The process of one engine: ``python worker.py FOLDER ENGINE``.

It reads commands and writes answers, a JSON line each.

It is started by its path, so that it also runs where this project is not installed. What libraries print goes to
standard error: standard output is for answers.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ALIAS = "_bench"


def package() -> str:
    """Make the folder of this file a package under a name of its own; return the name."""
    here = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        ALIAS, here / "__init__.py", submodule_search_locations=[str(here)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[ALIAS] = module
    spec.loader.exec_module(module)
    # Its own folder is the first of the path of a script; `task` and others are no top-level modules.
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != here]
    return ALIAS


def memory_mb() -> dict[str, float]:
    """Return the peak and the present resident memory of this process in MB, where the system tells."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
    return {"peak_mb": int(sizes["VmHWM"]) / 1e3, "rss_mb": int(sizes["VmRSS"]) / 1e3}


def measure(calls: dict[str, Any], seconds: float) -> dict[str, float]:
    """Return the median time of each call in a turn of about that many seconds."""
    clock = time.perf_counter
    found = {}
    for name, call in calls.items():
        begin = clock()
        call()
        first = clock() - begin
        times = []
        # Others had the caches since the last turn: a short first call only warms up.
        if first > seconds:
            times.append(first)
        while not times or (sum(times) < seconds and len(times) < 10_000):
            begin = clock()
            call()
            times.append(clock() - begin)
        found[name] = sorted(times)[len(times) // 2]
    return found


def prepare(task: Any, engine: str) -> tuple[Any, dict[str, Any]]:
    """Prepare the engine, compare its answer, and return it with what the parent wants to know."""
    import numpy

    loaded = importlib.import_module(f"{ALIAS}.peers").load(engine)
    table = importlib.import_module(f"{ALIAS}.task")
    if task.kind not in loaded.kinds:
        raise table.UnsupportedError(f"no adapter for {task.kind}")
    missing = loaded.missing()
    if missing:
        return None, {"missing": missing}
    version = loaded.version()
    begin = time.perf_counter()
    prepared = loaded.prepare(task)
    got = numpy.asarray(prepared.answer(), dtype=numpy.float64)
    seconds = time.perf_counter() - begin
    wanted = numpy.asarray(task.wanted(), dtype=numpy.float64)
    fact: dict[str, Any] = {
        "version": version,
        "precision": prepared.precision,
        "note": prepared.note,
        "prepare_s": seconds,
    }
    if got.shape != wanted.shape:
        return None, {**fact, "error": f"the answer has the shape {got.shape}, not {wanted.shape}"}
    if task.kind == "train":
        error = float(numpy.abs(got / wanted - 1).max())
        limit = table.MOST_LOSS_ERROR.get(prepared.precision, 0.03)
        fact["exactness"], right = error, error <= limit
        text = f"losses differ from float32 by {error:.2%}, more than {limit:.1%}"
        return (prepared, fact) if right else (None, {**fact, "error": f"wrong answer: {text}"})
    decoded = task.kind == "llm"
    limit = (table.LEAST_DECODED if decoded else table.LEAST_COSINE)[prepared.precision]
    rows = (-1, got.shape[-1]) if decoded else (got.shape[0], -1)  # of each token, or of each input
    fact["exactness"], wrong = compare(got.reshape(rows), wanted.reshape(rows), limit)
    if not wrong and prepared.whole is not None:
        again = numpy.asarray(prepared.whole(), dtype=numpy.float64)
        _, wrong = compare(got[:, -1], again, table.LEAST_WHOLE)
        wrong = wrong and f"decoded and as a prompt, a text has two answers: {wrong}"
    return (None, {**fact, "error": f"wrong answer: {wrong}"}) if wrong else (prepared, fact)


def compare(got: Any, exact: Any, limit: float) -> tuple[float, str]:
    """Return the least cosine of the rows of two matrices, and what is wrong with it or with their length."""
    import numpy

    norms = numpy.linalg.norm(got, axis=1) * numpy.linalg.norm(exact, axis=1)
    cosine = float(((got * exact).sum(1) / norms).min())
    # The length too: a cosine does not see a wrong scale.
    length = float(numpy.linalg.norm(got) / numpy.linalg.norm(exact))
    right = cosine >= limit and abs(length - 1) <= 2 * (1 - limit) ** 0.5
    text = f"cosine {cosine:.5f}, below {limit}, or length {length:.3f} times"
    return cosine, "" if right else text


def main() -> None:
    """Answer commands until the input ends."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    package()
    task = importlib.import_module(f"{ALIAS}.task").Task.read(sys.argv[1])
    engine, calls = sys.argv[2], {}
    _end_with_parent()
    _threads(task.threads)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {}
            if request["do"] == "make":
                importlib.import_module(f"{ALIAS}.torch_work").make(task)
            elif request["do"] == "limits":
                calls = importlib.import_module(f"{ALIAS}.torch_work").limit_calls(request["bytes"])
            elif request["do"] == "prepare":
                prepared, answer = prepare(task, engine)
                if prepared is not None:
                    calls = prepared.calls
                    for call in [*calls.values(), *calls.values()]:
                        call()
            else:
                answer["times"] = measure(calls, request["seconds"])
            answer.update(memory_mb())
        except Exception as error:
            unsupported = type(error).__name__ == "UnsupportedError"
            if not unsupported:
                traceback.print_exc()
            text = str(error).strip().splitlines() or [""]
            reason = text[0] if unsupported else f"{type(error).__name__}: {text[0]}"
            answer = {"unsupported" if unsupported else "error": reason[:300]}
        print(json.dumps({**answer, "id": request["id"]}), file=channel, flush=True)


def _end_with_parent() -> None:
    """Let the system end this process when its parent is gone, also in the middle of a call; Linux only."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _threads(count: int) -> None:
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(count)


if __name__ == "__main__":
    main()
