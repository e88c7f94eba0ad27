# SPDX-License-Identifier: Apache-2.0
"""The processes of ``ipex llm serve --tensor-parallel``, each with its part of the weights and of the cores."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["divided", "main"]

log = logging.getLogger("ipex")

#: What a further rank runs; what it is told follows.
_COMMAND = (sys.executable, "-c", "from ipex_llm.entrypoints.cli.ranks import main; main()")
#: Seconds that a rank waits for another one within a step.
_STEP = 60


@contextlib.contextmanager
def divided(ranks: int, threads: int | None, **load: Any) -> Iterator[Any]:
    """Start the other ranks of an engine, and load the model with them; they end with the block.

    This process is rank 0. If another one ends before, this one ends, too.

    Args:
        ranks: Number of processes.
        threads: Of each; None: as many as its part of the cores.
        **load: Arguments of `load_model`.

    Yields:
        The model, for an `Engine` that is made at once.

    Raises:
        RuntimeError: A rank has ended while the model was loaded.
    """
    import torch

    from ipex_llm.entrypoints.openai.engines import bound, places

    # Cores of one node stay together where that can be.
    where = places(ranks)
    if threads is not None:
        where = [dataclasses.replace(place, threads=threads) for place in where]
    processes: list[subprocess.Popen[bytes]] = []
    ended = threading.Event()
    with tempfile.TemporaryDirectory(prefix="ipex-") as folder:
        file = f"file://{Path(folder, 'meeting')}"
        try:
            for rank, place in enumerate(where[1:], 1):
                told = json.dumps(
                    {"rank": rank, "ranks": ranks, "file": file, "load": load}, default=str
                )
                environment = dict(os.environ)
                if place.threads is not None:
                    environment["OMP_NUM_THREADS"] = str(place.threads)
                with bound(place.cpus):
                    processes.append(
                        subprocess.Popen(
                            [*_COMMAND, told],
                            env=environment,
                            stdin=subprocess.PIPE,
                            start_new_session=True,
                        )
                    )
            if where[0].threads is not None:
                torch.set_num_threads(where[0].threads)
            watch = threading.Thread(target=_watch, args=(processes, ended), daemon=True)
            watch.start()
            # The engine's thread, and what it starts, has what this thread has.
            with bound(where[0].cpus):
                yield _load(0, ranks, file, load)
        finally:
            ended.set()
            for process in processes:
                process.kill()
                process.wait()


def _watch(processes: Sequence[subprocess.Popen[bytes]], ended: threading.Event) -> None:
    while not ended.wait(0.2):
        for rank, process in enumerate(processes, 1):
            if process.poll() is not None:
                log.error("rank %d ended with status %d: the server ends", rank, process.returncode)
                os.kill(os.getpid(), signal.SIGTERM)
                # What waits for that rank, in a step or while weights are loaded, may not end itself.
                time.sleep(_STEP + 30)
                os._exit(1)


def _load(rank: int, ranks: int, file: str, load: dict[str, Any]) -> Any:
    import torch

    from ipex_core import distributed
    from ipex_llm.entrypoints.cli.common import load_model

    distributed.init_process_group("gloo", file, world_size=ranks, rank=rank)
    step = datetime.timedelta(seconds=_STEP)
    group = torch.distributed.new_group(list(range(ranks)), timeout=step)
    folder = Path(load["folder"])
    return load_model(**{**load, "folder": folder}, tp_group=group)


def main() -> None:
    """Run a rank but the first; standard input ends with the process that started it."""
    from ipex_llm.engine import follow
    from ipex_llm.entrypoints.cli.common import errors
    from ipex_llm.entrypoints.cli.parallel import end_with_parent

    told = json.loads(sys.argv[1])
    end_with_parent()
    with errors():
        follow(_load(told["rank"], told["ranks"], told["file"], told["load"]))
