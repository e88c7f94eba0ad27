# SPDX-License-Identifier: Apache-2.0
"""Functions that run in several processes which form a group; see `ipex_core.testing.run_ranks`."""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["run_ranks"]

#: How long processes may take to be ready to form a group.
_START = datetime.timedelta(seconds=60)


def run_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Run a function in new processes that form a group of the backend gloo, with one thread each.

    Args:
        function: Called as ``function(rank, ranks, *args)``; a function at the top of a module, that returns what can
            be pickled and is no tensor.
        ranks: Number of processes.
        args: Further arguments.
        timeout: Of the group, in seconds, once all processes have been started (for which a minute is given);
            processes that still run 30 s after both are killed.

    Returns:
        For each rank what the function returned; the text of the exception that it raised, as
        ``"ValueError: ..."``; or None for a process that ended without either.
    """
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        workers = [
            context.Process(
                target=_work,
                args=(_address(function), rank, ranks, directory, timeout, results, args),
            )
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        found: dict[int, Any] = {}
        end = time.monotonic() + _START.total_seconds() + timeout + 30
        while True:
            running = any(worker.is_alive() for worker in workers)
            while not results.empty():
                rank, result = results.get()
                found[rank] = result
            if not running or time.monotonic() > end:
                break
            time.sleep(0.02)
        for worker in workers:
            worker.kill()
            worker.join()
    return [found.get(rank) for rank in range(ranks)]


def _address(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return module, file and name of a function: test runners give modules names that cannot be imported."""
    return function.__module__, function.__code__.co_filename, function.__name__


def _find(module: str, path: str, name: str) -> Callable[..., Any]:
    """Return the function of an address: from its module where that can be imported, else from its file."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        spec = importlib.util.spec_from_file_location("ipex_ranks", path)
        assert spec is not None and spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    function: Callable[..., Any] = getattr(found, name)
    return function


def _work(
    address: tuple[str, str, str],
    rank: int,
    ranks: int,
    directory: str,
    timeout: float,
    results: Any,
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    from ipex_core.distributed import init_process_group

    torch.set_num_threads(1)
    try:
        function = _find(*address)
        # Imports take seconds on a busy machine, more than some groups wait.
        ready = dist.FileStore(f"{directory}/ready", ranks)  # type: ignore[attr-defined]
        ready.set(str(rank), "")
        ready.wait([str(other) for other in range(ranks)], _START)
        wait = datetime.timedelta(seconds=timeout)
        init_process_group("gloo", f"file://{directory}/meeting", wait, ranks, rank)
        # One that returns at once, or leaves the group, is not to be gone while others still connect to it.
        dist.barrier()
        result = function(rank, ranks, *args)
    except Exception as error:
        traceback.print_exc()
        result = f"{type(error).__name__}: {error}"
    results.put((rank, result))
    # Without the farewells of the backend, which wait for ranks that may be gone.
    os._exit(0)
