# SPDX-License-Identifier: Apache-2.0
"""vLLM's ranks on the machines of a Ray cluster without GPUs.

Ray counts accelerators that it knows. Ranks on CPUs are counted by a resource that the machines are started with:
``ray start --resources='{"ipex_rank": 2}'`` lets a machine have two.
"""

from __future__ import annotations

import functools
import importlib
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.executor import ray_executor_v2

from ipex_llm.integrations.vllm import ranks

#: Seconds between two looks whether all ranks run, while an answer is awaited.
_LOOKS = 1.0


class IpexRayWorker(ray_executor_v2.RayWorkerProc):
    """A rank in a process of Ray."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """Return the machine's id in Ray, and the memory node of this rank: vLLM means memory nodes by devices here."""
        import ray

        resources: Any = importlib.import_module("vllm.utils.cpu_resource_utils")
        return ray.get_runtime_context().get_node_id(), resources.get_memory_affinity()[:1]

    def initialize_worker(
        self,
        local_rank: int,
        env_vars: dict[str, str],
        distributed_init_method: str,
        driver_env_vars: dict[str, str] | None = None,
        assigned_physical_gpu_ids: list[int] | None = None,
    ) -> None:
        """Bind this process to its cores, and start the rank."""
        # One entry for each rank of this machine.
        count = len(assigned_physical_gpu_ids or [0])
        if os.environ.get(ranks.VARIABLE, "auto") == "auto":
            found = ranks.cores_of_this_machine(count)
            if found:
                os.sched_setaffinity(0, found[local_rank])
                # Ray sets OMP_NUM_THREADS=1 for what asks for no CPU of it.
                torch.set_num_threads(len(found[local_rank]))
        # The variables of the driver are of its machine.
        kept = {k: v for k, v in (driver_env_vars or {}).items() if k != ranks.VARIABLE}
        super().initialize_worker(
            local_rank,
            env_vars,
            distributed_init_method,
            kept,
            sorted(set(assigned_physical_gpu_ids or ())),
        )


class IpexRayExecutor(ray_executor_v2.RayExecutorV2):
    """vLLM's executor with ranks of `IpexRayWorker`."""

    uses_ray = True

    def _init_executor(self) -> None:
        # vLLM names the class of its ranks in its module alone.
        stock = ray_executor_v2.RayWorkerProc
        ray_executor_v2.RayWorkerProc = IpexRayWorker
        try:
            super()._init_executor()
        finally:
            ray_executor_v2.RayWorkerProc = stock
        for queue in self.response_mqs:
            # vLLM ends the wait for a rank of this machine when a rank has ended, and no other.
            if queue._is_remote_reader:
                queue.dequeue = functools.partial(dequeue, weakref.ref(self), queue.dequeue)


def dequeue(
    executor: Callable[[], Any],
    wait: Callable[..., Any],
    timeout: float | None = None,
    indefinite: bool = False,
) -> Any:
    """Return the next answer of a rank on another machine.

    Args:
        executor: Gives the executor, or None when it is gone.
        wait: Waits ``timeout`` seconds, then raises a TimeoutError.
        timeout: Seconds, None for no end.
        indefinite: Of no meaning here.

    Raises:
        RuntimeError: A rank has ended.
        TimeoutError: There is no answer in this time.
    """
    del indefinite
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = _LOOKS if end is None else min(_LOOKS, max(0.0, end - time.monotonic()))
        try:
            return wait(timeout=left)
        except TimeoutError:
            owner = executor()
            if owner is None or owner.is_failed:
                raise RuntimeError(
                    "vLLM plug-in: all ranks of a model must run, got one that has ended: see its log,"
                    " then start vLLM again"
                ) from None
            if end is not None and time.monotonic() >= end:
                raise
