# SPDX-License-Identifier: Apache-2.0
"""Functions that run in several processes which form a group; see `ipex_core.testing.run_ranks`."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["run_ranks"]


def run_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Run a function in new processes that form a group of the backend gloo, with one thread each.

    Args:
        function: Called as ``function(rank, ranks, *args)``; a function of a module, that returns what can be pickled
            and is no tensor.
        ranks: Number of processes.
        args: Further arguments.
        timeout: Of the group, in seconds; processes that still run 30 s later are killed.

    Returns:
        For each rank what the function returned; the text of the exception that it raised, as
        ``"ValueError: ..."``; or None for a process that ended without either.
    """
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        meeting = f"file://{directory}/meeting"
        workers = [
            context.Process(
                target=_work, args=(function, rank, ranks, meeting, timeout, results, args)
            )
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        found: dict[int, Any] = {}
        end = time.monotonic() + timeout + 30
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


def _work(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    meeting: str,
    timeout: float,
    results: Any,
    args: tuple[Any, ...],
) -> None:
    import torch

    from ipex_core.distributed import init_process_group

    torch.set_num_threads(1)
    try:
        wait = datetime.timedelta(seconds=timeout)
        init_process_group("gloo", meeting, wait, ranks, rank)
        result = function(rank, ranks, *args)
    except Exception as error:
        traceback.print_exc()
        result = f"{type(error).__name__}: {error}"
    results.put((rank, result))
    # Without the farewells of the backend, which wait for ranks that may be gone.
    os._exit(0)
