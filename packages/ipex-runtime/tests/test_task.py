# SPDX-License-Identifier: Apache-2.0
"""Tasks: results, errors, cancellation, time-outs, forks and the end of the interpreter."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from ipex_runtime import CPUPool, Task, team
from ipex_runtime.cpupool import process_cpus

POOL = CPUPool([process_cpus()[0]])
MODEL = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()).eval()
X = torch.linspace(-1, 1, 48).view(3, 16)
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")


def test_models():
    with torch.no_grad():
        expected = MODEL(X)
        traced = torch.jit.freeze(torch.jit.trace(MODEL, X))
        compiled = torch.compile(MODEL, backend="eager")
        for model in (MODEL, traced, compiled):
            with Task(model, POOL) as task:
                torch.testing.assert_close(task(X).get(60), expected)
                torch.testing.assert_close(task.run_sync(X), expected)


def test_the_thread_is_pinned():
    def where():
        return os.sched_getaffinity(0), torch.get_num_threads()

    before = torch.get_num_threads()
    with Task(where, POOL) as task:
        assert task.run_sync() == ({POOL.core_ids[0]}, 1)
    assert torch.get_num_threads() == before


def test_without_the_native_library(monkeypatch):
    monkeypatch.setattr(team, "library", lambda: None)
    with Task(lambda: os.sched_getaffinity(0), POOL) as task:
        assert task.run_sync() == {POOL.core_ids[0]}


def test_state_of_the_caller():
    variable = contextvars.ContextVar("variable", default=0)

    def state():
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            variable.get(),
        )

    with Task(state, POOL) as task:
        assert task.run_sync() == state()
        with torch.no_grad():
            assert task.run_sync() == state()
        with torch.inference_mode():
            assert task.run_sync() == state()
            with torch.enable_grad():
                assert task.run_sync() == state()
        with torch.autocast("cpu", torch.float16):
            assert task.run_sync() == state()
        token = variable.set(7)
        assert task.run_sync()[-1] == 7
        variable.reset(token)
        assert task.run_sync() == state()


def test_training_in_a_task():
    layer = torch.nn.Linear(4, 1)

    def step(x):
        loss = layer(x).sum()
        loss.backward()
        return layer.weight.grad.clone()

    with Task(step, POOL) as task:
        assert torch.equal(task.run_sync(torch.ones(2, 4)), torch.full((1, 4), 2.0))


def test_errors_arrive_and_the_task_goes_on():
    def work(x):
        if x < 0:
            raise KeyError("negative")
        if x == 0:
            raise SystemExit(3)
        return x

    with Task(work, POOL) as task:
        futures = [task(x) for x in (1, -1, 0, 2)]
        assert futures[0].get(60) == 1
        with pytest.raises(KeyError, match="negative"):
            futures[1].get(60)
        with pytest.raises(SystemExit):
            futures[2].get(60)
        assert isinstance(futures[1].exception(), KeyError)
        assert futures[3].get(60) == 2


def test_time_out_and_cancellation():
    go = threading.Event()
    with Task(lambda: go.wait(60), POOL) as task:
        running = task()
        waiting = task()
        with pytest.raises(TimeoutError, match=r"no result after 0\.01 s; the call goes on"):
            running.get(0.01)
        assert waiting.cancel()
        go.set()
        assert running.get(60)
        assert not running.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            waiting.get(60)


def test_a_time_out_of_the_call_itself():
    def work():
        raise TimeoutError("of its own")

    with Task(work, POOL) as task, pytest.raises(TimeoutError, match="of its own"):
        task().get(60)


def test_ten_thousand_calls():
    with Task(lambda i: i, POOL) as task:
        futures = [task(i) for i in range(10_000)]
        assert [f.get(60) for f in futures] == list(range(10_000))


def test_calls_from_many_threads():
    with Task(lambda i: i * i, POOL) as task:
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda i: task(i).get(60), range(200)))
    assert found == [i * i for i in range(200)]


def test_futures_are_those_of_python():
    async def main(task):
        return await asyncio.wrap_future(task(21))

    with Task(lambda x: 2 * x, POOL) as task:
        assert asyncio.run(main(task)) == 42
        done, _ = concurrent.futures.wait([task(1), task(2)], timeout=60)
        assert len(done) == 2


def test_waiting_for_itself():
    def inner():
        return task(outer=False).get()

    def work(outer=True):
        return inner() if outer else 1

    with Task(work, POOL) as task, pytest.raises(RuntimeError, match="of its own task"):
        task().get(60)


def test_closing():
    task = Task(lambda x: x, POOL)
    futures = [task(i) for i in range(10)]
    task.close()
    assert all(f.done() for f in futures)
    task.close()
    with pytest.raises(RuntimeError, match="is closed"):
        task(1)
    unused = Task(MODEL, POOL)
    unused.close()
    with pytest.raises(RuntimeError, match="is closed"):
        unused(X)


def test_a_forgotten_task_ends_its_thread_after_the_last_call():
    task = Task(lambda x: x, POOL)
    future = task(3)
    thread = task._worker.thread
    del task
    assert future.get(60) == 3
    del future
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_arguments_and_results_are_let_go():
    with Task(lambda x: x + 1, POOL) as task:
        x = torch.ones(3)
        gone = weakref.ref(x)
        assert task(x).get(60).sum() == 6
        del x
        deadline = time.monotonic() + 30
        while gone() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert gone() is None


def test_idle_threads_sleep():
    with Task(MODEL, CPUPool()) as task:
        task(X).get(60)
        time.sleep(0.3)  # OpenMP spins for a moment after its last loop
        begin = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - begin < 0.25  # a spinning thread would have used 0.5


def test_bad_arguments():
    with pytest.raises(TypeError, match="module must be callable, got int"):
        Task(3, POOL)
    with pytest.raises(TypeError, match="cpu_pool must be a CPUPool, got list"):
        Task(MODEL, [0])


# --- processes --------------------------------------------------------------------------------------------------------


def run(code: str, **kwargs) -> subprocess.CompletedProcess[str]:
    head = (
        "import os, signal, sys, threading, time, torch\n"
        "from ipex_runtime import CPUPool, MultiStreamModule, Task\n"
        "pool = CPUPool([CPUPool().core_ids[0]])\n"
    )
    return subprocess.run(
        [sys.executable, "-c", head + code], capture_output=True, text=True, timeout=100, **kwargs
    )


@needs_fork
def test_a_forked_process_starts_anew():
    result = run(
        "go = threading.Event()\n"
        "task = Task(lambda x: go.wait(50) and x if x == 0 else x, pool)\n"
        "old = task(0)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try:\n"
        "        old.get()\n"
        "    except RuntimeError as error:\n"
        "        assert 'before this process was forked' in str(error)\n"
        "    code = 0 if task(5).get(30) == 5 else 1\n"
        "    os._exit(code)\n"
        "_, status = os.waitpid(pid, 0)\n"
        "go.set()\n"
        "old.get(30)\n"
        "sys.exit(os.waitstatus_to_exitcode(status))\n"
    )
    assert result.returncode == 0, result.stderr


def test_the_end_of_the_interpreter_does_not_wait_for_what_is_queued():
    result = run(
        "task = Task(time.sleep, pool)\n"
        "futures = [task(0.2) for _ in range(10_000)]\n"
        "print('end')\n"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "end\n"
    assert "queued call(s) are not run" in result.stderr


def test_the_end_of_the_interpreter_stops_what_runs_for_ever():
    result = run(
        "import ipex_runtime.task as w\n"
        "w.EXIT_SECONDS = 1.0\n"
        "def for_ever():\n"
        "    while True:\n"
        "        torch.ones(1000).sum()\n"
        "a, b = Task(for_ever, pool), Task(time.sleep, pool)\n"
        "a(); b(60)\n"
        "time.sleep(0.2)\n"
        "sys.exit(3)\n"
    )
    assert result.returncode == 3, result.stderr
    assert "2 call(s) still ran after 1 s and were stopped" in result.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_keyboard_interrupt():
    result = run(
        "task = Task(time.sleep, pool)\n"
        "threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        "    task(2).get()\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    assert (result.returncode, result.stdout) == (0, "interrupted\n"), result.stderr
