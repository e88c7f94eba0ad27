# SPDX-License-Identifier: Apache-2.0
"""An engine whose model is divided among processes of one host: rank 0 has the scheduler, the others compute along."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch

from ipex_llm.engine.limits import runner_of


class LeadRunner:
    """The runner of rank 0: what it computes the other ranks compute, too.

    Args:
        runner: Of a divided model.
        others: Connections to the other ranks.

    Attributes:
        lost: Whether a rank has failed or ended: nothing can be computed any more.
    """

    def __init__(self, runner: Any, others: list[Connection]) -> None:
        self._runner = runner
        self._others = others
        self._caches: list[Any] = []
        self.lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def _tell(self, *message: Any) -> None:
        if self.lost:
            raise RuntimeError(
                "Engine: all ranks must run, got one that has ended: start them again"
            )
        try:
            for other in self._others:
                other.send(message)
        except OSError as error:
            self.lost = True
            raise RuntimeError(f"Engine: all ranks must run, got {error}") from error

    def new_cache(self, *arguments: Any) -> Any:
        """Make a cache on all ranks; see `Runner.new_cache`."""
        self._tell("cache", arguments)
        self._caches.append(self._runner.new_cache(*arguments))
        return self._caches[-1]

    def forward(self, cache: Any, *tensors: Any, **options: Any) -> Any:
        """Compute a step on all ranks; see `Runner.forward`."""
        place = next(i for i, own in enumerate(self._caches) if own is cache)
        # As arrays: tensors are pickled through files or shared memory.
        arrays = [None if t is None else t.numpy() for t in tensors]
        self._tell("forward", place, arrays, options)
        try:
            return self._runner.forward(cache, *tensors, **options)
        except BaseException:
            self.lost = True  # the ranks do not wait for each other at the same place any more
            raise


def lead(runner: Any) -> Any:
    """Return the runner for the engine of rank 0, as it is if the model is not divided; see `follow`.

    Raises:
        RuntimeError: It is called on another rank.
    """
    parallel = getattr(runner.plan, "parallel", None)
    if parallel is None or parallel.ranks == 1:
        return runner
    if parallel.rank:
        raise RuntimeError(
            f"Engine: an engine must be made on rank 0, got rank {parallel.rank}: call follow(model) there"
        )
    with tempfile.TemporaryDirectory(prefix="ipex-") as folder:
        address, key = str(Path(folder, "ranks")), secrets.token_bytes(32)
        with Listener(address, "AF_UNIX", backlog=parallel.ranks, authkey=key) as listener:
            torch.distributed.broadcast_object_list(
                [address, key], _first(parallel), parallel.group
            )
            others = [listener.accept() for _ in range(parallel.ranks - 1)]
    return LeadRunner(runner, others)  # type: ignore[arg-type]


def follow(model: Any) -> None:
    """Compute what the engine of rank 0 computes, until that process or its engine ends.

    To be called on all ranks but 0, with the same model, while rank 0 makes its `Engine`. All ranks must be processes
    of one host.

    Args:
        model: A model that ``ipex.llm.optimize(model, tp_group=...)`` has divided.

    Raises:
        TypeError: It is not.
    """
    runner = runner_of(model)
    parallel = getattr(runner.plan, "parallel", None)
    if parallel is None or parallel.ranks == 1:
        raise TypeError("follow: model must be divided by tp_group, got a whole one")
    found: list[Any] = [None, None]
    torch.distributed.broadcast_object_list(found, _first(parallel), parallel.group)
    caches: list[Any] = []
    with Client(found[0], "AF_UNIX", authkey=found[1]) as first:
        with contextlib.suppress(EOFError, ConnectionResetError), torch.inference_mode():
            while True:
                kind, *rest = first.recv()
                if kind == "cache":
                    caches.append(runner.new_cache(*rest[0]))
                    continue
                place, arrays, options = rest
                tensors = [None if a is None else torch.from_numpy(a) for a in arrays]
                runner.forward(caches[place], *tensors, **options)


def _first(parallel: Any) -> int:
    """Return the number of rank 0 among all processes."""
    return torch.distributed.get_global_rank(parallel.group, 0)
