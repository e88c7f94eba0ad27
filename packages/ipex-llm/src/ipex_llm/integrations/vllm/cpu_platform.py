# SPDX-License-Identifier: Apache-2.0
"""The platform: vLLM's own for CPUs, without its C++ extension and with the kernels of ipex in its place."""

from __future__ import annotations

import importlib
import inspect
import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.cpu import CpuPlatform

from ipex_core.library.spec import FLOATS
from ipex_llm.integrations.vllm import compiled, ranks, speculative_ops

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_log = logging.getLogger("ipex")

_ATTENTION = "ipex_llm.integrations.vllm.attention"

#: vLLM's own backend, whose one op of the extension is ours.
_LATENT_ATTENTION = "vllm.v1.attention.backends.mla.cpu_mla.CPUMLABackend"

#: The largest head of the attention ops.
MAX_HEAD_SIZE = 1024

#: ``--kv-cache-dtype`` of vLLM -> dtype of the cache; None for the dtype of the model.
CACHE_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class IpexPlatform(CpuPlatform):
    """A CPU whose kernels are ipex's. What is not defined here is vLLM's."""

    #: What ranks are counted by in a Ray cluster: see `ray_executor`.
    ray_device_key = "ipex_rank"

    _overridden = False

    @classmethod
    def import_kernels(cls) -> None:
        """Define the ops that vLLM's Python calls; the extension of the wheel of PyPI is for GPUs and not loaded."""
        from ipex_llm.integrations.vllm import extension_ops

        extension_ops.define()

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Return the path of the attention backend.

        Raises:
            ValueError: The head size, the dtype or the dtype of the cache is not one of the kernels.
            NotImplementedError: Sparse attention.
        """
        config = attn_selector_config
        asked = getattr(selected_backend, "name", "CPU_ATTN")
        if not asked.startswith("CPU_"):
            _log.warning("vLLM plug-in: attention backend %s is for GPUs: CPU_ATTN is used", asked)
        if config.use_sparse:
            raise NotImplementedError(
                "vLLM plug-in: attention must be over all keys, got a model with sparse attention, which this plug-in"
                " does not serve: use a model without it"
            )
        if config.use_mla:
            if config.kv_cache_dtype not in (None, "auto"):
                raise ValueError(
                    "vLLM plug-in: --kv-cache-dtype must be auto for latent attention (MLA), got"
                    f" {config.kv_cache_dtype}"
                )
            return _LATENT_ATTENTION
        if not 0 < config.head_size <= MAX_HEAD_SIZE:
            raise ValueError(
                f"vLLM plug-in: head_size must be between 1 and {MAX_HEAD_SIZE}, got {config.head_size}"
            )
        if config.dtype not in FLOATS:
            raise ValueError(
                f"vLLM plug-in: dtype must be float32, bfloat16 or float16, got {config.dtype}"
            )
        check_cache_dtype(config.kv_cache_dtype, config.dtype)
        return f"{_ATTENTION}.IpexAttentionBackend"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Do what vLLM's CPU platform does, with our worker in the place of its own."""
        model = vllm_config.model_config
        if model is not None and getattr(model, "use_mla", False):
            # Not the backend for AMX, whose ops vLLM's wheel has not.
            registry = importlib.import_module("vllm.v1.attention.backends.registry")
            vllm_config.attention_config.backend = registry.AttentionBackendEnum.CPU_MLA
        if model is not None and getattr(model, "has_inner_state", False):
            _check_states(vllm_config)
        compilation = vllm_config.compilation_config
        default = getattr(compilation.mode, "name", "") == "VLLM_COMPILE"
        super().check_and_update_config(vllm_config)
        if default and compilation.mode:
            compiled.choose(compilation)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker":
            parallel.worker_cls = "ipex_llm.integrations.vllm.worker.IpexWorker"
        if parallel.distributed_executor_backend == "ray":
            place = importlib.import_module("ipex_llm.integrations.vllm.ray_executor")
            parallel.distributed_executor_backend = place.IpexRayExecutor
        else:
            replicas = getattr(parallel, "data_parallel_size_local", 1) or 1
            ranks.bind(parallel.local_world_size * replicas)

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Return whether layers call attention as an op: where nothing is compiled, a plain call is cheaper."""
        config: Any = importlib.import_module("vllm.config").get_current_vllm_config_or_none()
        return config is None or bool(config.compilation_config.mode)

    @classmethod
    def use_custom_op_collectives(cls) -> bool:
        """Return True: sums over ranks are ops, since Dynamo cannot trace them."""
        return True

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Do it once in a process: for a second engine vLLM would search all modules again, and fail on some."""
        if not cls._overridden:
            _mend_slot_mapping()
            _mend_expand()
            super().register_triton_kernel_overrides()
            IpexPlatform._overridden = True

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Return the path of the communicator."""
        return "ipex_llm.integrations.vllm.worker.IpexCommunicator"


def _check_states(vllm_config: VllmConfig) -> None:
    """Refuse and turn off what vLLM's layers for CPUs would compute wrong, for models with recurrent layers."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    drafts = vllm_config.speculative_config
    delta, convolution = (
        hasattr(model.hf_text_config, name) for name in ("linear_num_value_heads", "conv_L_cache")
    )
    if drafts is not None and not delta:
        raise ValueError(
            "vLLM plug-in: speculative_config must be absent for models with Mamba-2 or short convolutions, whose"
            f" layers keep no states of drafts on CPUs, got {drafts.method}: start without --speculative-config"
        )
    if not cache.enable_prefix_caching:
        return
    why = None
    if drafts is not None:
        why = "vLLM copies the states of drafts with a kernel for GPUs"
    elif not delta and not convolution:
        why = "on CPUs the scan of Mamba-2 gives no states within a prompt"
    if why is not None:
        _log.warning("vLLM plug-in: prefix caching is off: %s", why)
        cache.enable_prefix_caching = False
        cache.mamba_cache_mode = "none"
        cache.mamba_block_size = model.max_model_len


def _mend_slot_mapping() -> None:
    """Give vLLM 0.32 a function in the place of its Triton kernel of slots: its own has another order of arguments."""
    own: Any = importlib.import_module("vllm.utils.cpu_triton_utils")
    function = getattr(own, "_compute_slot_mapping_kernel_impl", None)
    if function is None or list(inspect.signature(function).parameters)[6] == "slot_mapping":
        return

    def compute_slot_mapping(
        num_tokens: int,
        max_num_tokens: int,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        block_table: torch.Tensor,
        block_table_stride: int,
        slot_mapping: torch.Tensor,
        block_size: int,
        *rest: Any,
    ) -> None:
        torch.ops._C.compute_slot_mapping_kernel_impl(
            query_start_loc, positions, block_table, slot_mapping, block_size
        )

    own._compute_slot_mapping_kernel_impl = compute_slot_mapping


def _mend_expand() -> None:
    """Give vLLM our function for numbers of sequences: its own writes to an int64 copy of the result and drops it."""
    own: Any = importlib.import_module("vllm.utils.cpu_triton_utils")
    if not hasattr(own, "_expand_kernel_impl"):
        return

    def expand(
        output: torch.Tensor,
        given: torch.Tensor,
        counts: torch.Tensor,
        replace_from: int,
        replace_to: int,
        *rest: Any,
        **options: Any,
    ) -> None:
        del rest, options
        speculative_ops.expand(output, given, counts, replace_from, replace_to)

    own._expand_kernel_impl = expand


def check_cache_dtype(name: str | None, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a cache of keys and values.

    Args:
        name: vLLM's name, or None for ``"auto"``.
        dtype: The dtype of the model.

    Raises:
        ValueError: The attention ops have no such cache.
    """
    known = CACHE_DTYPES.get(name or "auto", "unknown")
    if known is None or known == dtype:
        return dtype
    if isinstance(known, torch.dtype) and known.itemsize == 1:
        return known
    names = ", ".join(n for n, d in CACHE_DTYPES.items() if d is None or d.itemsize == 1)
    raise ValueError(
        f"vLLM plug-in: --kv-cache-dtype must be {names} or the dtype of the model ({dtype}), got {name}"
    )
