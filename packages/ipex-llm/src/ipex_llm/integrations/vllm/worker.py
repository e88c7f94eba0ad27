# SPDX-License-Identifier: Apache-2.0
"""What runs in each process of a server: the size of its cache, and sums over the ranks of one machine."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.v1.worker.cpu_worker import CPUWorker

from ipex_core import distributed
from ipex_core.util import return_free_memory
from ipex_llm.integrations.vllm import whole_step
from ipex_llm.kv_cache import available_memory, format_bytes

__all__ = ["IpexCommunicator", "IpexWorker", "cache_bytes", "weight_bytes"]

_log = logging.getLogger("ipex")

#: Of the memory that is free once the model is loaded, the part for the cache, as in ipex's own engine.
_SHARE = 0.5
#: How many times the batch of longest sequences the cache holds: the rest serves prompts that begin alike.
_TIMES = 2
_LEAST = 64 << 20


def cache_bytes(free: int, ranks: int, batch: int) -> int:
    """Return the size of the cache of one rank.

    Args:
        free: Bytes that are free: the smaller of the machine's and the control group's.
        ranks: Processes of this server on this machine, which share them.
        batch: Bytes that the largest batch of the longest sequences needs; 0 if it is not known.
    """
    most = int(free * _SHARE / ranks)
    return min(most, max(_TIMES * batch, _LEAST)) if batch else most


def _first_stage() -> bool:
    """Return whether this rank has the first layers."""
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    return bool(state.get_pp_group().is_first_rank)


def _forget_absent_nodes(parallel: Any) -> None:
    """Let a replica use all memory nodes where it was assigned some that are not there.

    vLLM gives each data-parallel replica a NUMA node of its own, also on machines with fewer nodes than replicas, and
    then finds none.
    """
    resources: Any = importlib.import_module("vllm.utils.cpu_resource_utils")
    assigned = getattr(parallel, "assigned_physical_gpu_ids", None)
    if assigned is not None and not set(assigned) & set(resources.get_memory_affinity()):
        parallel.assigned_physical_gpu_ids = None


def weight_bytes(folder: Path, itemsize: int | None) -> int:
    """Return the bytes that the weights of a checkpoint take once they are loaded; 0 if they are not known.

    Args:
        folder: Of the checkpoint, with files of safetensors.
        itemsize: Bytes of an element of float weights; None: as in the files.
    """
    index = folder / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else ()
        # Some checkpoints have the same weights again in a file of another form.
        files = [folder / name for name in names] or [
            *(sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors")))
        ]
        total = 0
        for path in files:
            with open(path, "rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            for name, tensor in header.items():
                if name != "__metadata__":
                    wide = tensor["dtype"] in _FLOATS and itemsize is not None
                    begin, end = tensor["data_offsets"]
                    total += (
                        (end - begin) * itemsize // _FLOATS[tensor["dtype"]]
                        if wide
                        else end - begin
                    )
        return total
    except (OSError, ValueError, KeyError, TypeError):  # vLLM says what is wrong with them
        return 0


#: Dtypes of safetensors that are loaded in the dtype of the model, and their bytes.
_FLOATS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


def _check_memory(model: Any, parallel: Any) -> None:
    """Refuse weights that do not fit, before they are read."""
    quantized = getattr(model, "quantization", None) is not None
    smaller = quantized and getattr(model.hf_config, "quantization_config", None) is None
    free, folder = available_memory(), Path(str(model.model))
    if free is None or smaller or not folder.is_dir():
        return
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    need = weight_bytes(folder, model.dtype.itemsize) // ranks
    if need > free:
        raise MemoryError(
            f"vLLM plug-in: the weights of a rank must fit the free memory of {format_bytes(free)}, got"
            f" {format_bytes(need)}: free memory, take weights of fewer bits or --dtype bfloat16, or more ranks on more"
            " machines"
        )


class IpexWorker(CPUWorker):
    """A worker that plans with the memory that is free, not with a share of the whole machine."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        cache = vllm_config.cache_config
        default = type(cache).__dataclass_fields__["gpu_memory_utilization"].default
        default = getattr(default, "default", default)  # a Field of pydantic in some versions
        known = available_memory() is not None and cache.kv_cache_memory_bytes is None
        self.planned_here = known and cache.gpu_memory_utilization == default
        if self.planned_here:
            # vLLM 0.32 stops at the start where its own default is not free.
            cache.gpu_memory_utilization = 0.01
        _forget_absent_nodes(vllm_config.parallel_config)
        whole_step.register()
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model, and make the tensors that a later stage of a pipeline receives.

        vLLM makes them in a first run, which its CPU backend leaves out where nothing is compiled: the first request
        would fail.

        Raises:
            MemoryError: The weights of this rank are larger than the memory that is free. Without this the system would
                kill the process while it reads them.
        """
        _check_memory(self.model_config, self.parallel_config)
        result = super().load_model(*args, **kwargs)
        return_free_memory()
        runner = self.model_runner
        later = self.parallel_config.pipeline_parallel_size > 1 and not _first_stage()
        if later and getattr(runner, "intermediate_tensors", True) is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )
        return result

    def determine_available_memory(self) -> int:
        """Return the bytes for the cache of keys and values, once the model is loaded.

        What the user has set, ``kv_cache_memory_bytes`` or another ``gpu_memory_utilization`` than vLLM's default, is
        left to vLLM.
        """
        free = available_memory()
        if free is None or not self.planned_here:
            return int(super().determine_available_memory())
        if self._should_warm_up_model():
            self.model_runner.warming_up_model()
            free = available_memory() or free
        parallel = self.parallel_config
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        here = max(1, ranks // (getattr(parallel, "nnodes", 1) or 1))
        here *= getattr(parallel, "data_parallel_size_local", 1) or 1
        longest = sum(
            spec.max_memory_usage_bytes(self.vllm_config)
            for spec in self.get_kv_cache_spec().values()
        )
        batch = longest * self.vllm_config.scheduler_config.max_num_seqs
        size = cache_bytes(free, here, batch)
        _log.info(
            "vLLM plug-in: %s for keys and values, of %s that are free",
            format_bytes(size),
            format_bytes(free),
        )
        return size


class IpexCommunicator(CpuCommunicator):
    """vLLM's communicator of the CPU, with another sum; groups over several machines use their backend (gloo)."""

    def all_reduce(self, input_: torch.Tensor) -> Any:
        """Return the sum over the group."""
        total = input_.clone()  # vLLM's op of this must not return its argument
        distributed.all_reduce(total, group=self.device_group)
        return total
