# SPDX-License-Identifier: Apache-2.0
"""Record the interfaces of vLLM that the plug-in builds on: ``python tools/vllm_record.py [--write]``.

The unit tests make a stand-in of vLLM from the record, one for each minor version. Without ``--write`` the installed
vLLM is compared with its record, and the exit code is 1 where they differ.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

RECORD = (
    Path(__file__).resolve().parent.parent
    / "packages/ipex-llm/tests/integrations/vllm_interfaces.json"
)
_KERNELS = "vllm.model_executor.kernels.linear"
_BACKEND = "vllm.v1.attention.backend"
_QUANTIZED_EXPERTS = ("CPUExpertsInt4", "CPUExpertsInt8", "CPUExpertsMxfp4", "CPUExpertsFp8")

#: Module -> functions, and classes with the methods that the plug-in overrides or calls. "": only that it is there.
INTERFACES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.platforms.cpu": {
        "CpuPlatform": (
            *("import_kernels", "get_attn_backend_cls", "check_and_update_config"),
            *("get_device_communicator_cls", "register_triton_kernel_overrides"),
            *("opaque_attention_op", "use_custom_op_collectives"),
        )
    },
    _BACKEND: {
        "AttentionBackend": (
            *("get_name", "get_supported_kernel_block_sizes", "get_supported_head_sizes"),
            *("supports_head_size", "supported_kv_cache_layouts", "supports_non_causal"),
            *("supports_sliding_window", "supports_sink", "supports_attn_type", "get_impl_cls"),
            "get_builder_cls",
        ),
        "AttentionImpl": ("__init__", "forward", "do_kv_cache_update"),
        "AttentionMetadataBuilder": ("__init__", "build"),
        "MultipleOf": ("__init__",),
        "AttentionType": (),
    },
    "vllm.v1.kv_cache_interface": {"CrossAttentionSpec": (), "KVCacheLayout": ()},
    "vllm.model_executor.layers.utils": {"dispatch_cpu_unquantized_gemm": ()},
    "vllm.model_executor.layers.vocab_parallel_embedding": {
        "UnquantizedEmbeddingMethod": ("embedding",)
    },
    f"{_KERNELS}.mixed_precision.MPLinearKernel": {
        "MPLinearKernel": (
            *("__init__", "get_min_capability", "can_implement"),
            *("process_weights_after_loading", "apply_weights"),
        )
    },
    f"{_KERNELS}.scaled_mm.ScaledMMLinearKernel": {
        name: (
            *("__init__", "is_supported", "can_implement"),
            *("process_weights_after_loading", "apply_weights", "_get_layer_params"),
        )
        for name in ("Int8ScaledMMLinearKernel", "FP8ScaledMMLinearKernel")
    },
    f"{_KERNELS}.scaled_mm.BlockScaledMMLinearKernel": {
        "Fp8BlockScaledMMLinearKernel": (
            *("can_implement", "process_weights_after_loading"),
            *("apply_weights", "apply_block_scaled_mm", "_get_layer_params"),
        )
    },
    "vllm.model_executor.layers.fused_moe.oracle.unquantized": {
        "backend_to_kernel_cls": (),
        "UnquantizedMoeBackend": (),
    },
    "vllm.model_executor.layers.fused_moe.oracle.fp8": {
        "convert_to_fp8_moe_kernel_format": (),
        "Fp8MoeBackend": (),
    },
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe": {
        "CPUUnquantizedExperts": (
            *("__init__", "_supports_grouped_gemm", "process_weights_after_loading", "apply"),
        ),
        **{name: ("__init__", "apply") for name in _QUANTIZED_EXPERTS},
        "prepare_int4_moe_layer_for_cpu": (),
        "prepare_mxfp4_moe_layer_for_cpu": (),
    },
    "vllm.model_executor.layers.fused_moe.modular_kernel": {
        "FusedMoEExperts": ("is_supported_config",)
    },
    "vllm.distributed.device_communicators.cpu_communicator": {
        "CpuCommunicator": ("__init__", "all_reduce")
    },
    "vllm.model_executor.layers.fused_moe.router.cpu_router": {
        "_grouped_topk": (),
        "_softmax_topk": (),
    },
    "vllm.distributed.parallel_state": {"all_reduce": (), "get_tp_group": ()},
    "vllm.v1.worker.cpu_worker": {
        "CPUWorker": (
            "determine_available_memory",
            "load_model",
            "_should_warm_up_model",
            "get_kv_cache_spec",
        )
    },
    "vllm.utils.cpu_triton_utils": {"_compute_slot_mapping_kernel_impl": ()},
    "vllm._custom_ops": {"rotary_embedding": ()},
    "vllm.utils.cpu_resource_utils": {"get_allowed_cpu_list": (), "get_memory_affinity": ()},
    "vllm.v1.executor.ray_executor_v2": {
        "RayWorkerProc": ("get_node_and_physical_gpu_ids", "initialize_worker"),
        "RayExecutorV2": ("_init_executor",),
    },
    "vllm.distributed.device_communicators.shm_broadcast": {"MessageQueue": ("dequeue",)},
    "vllm.forward_context": {"get_forward_context": (), "is_forward_context_available": ()},
    "vllm.distributed.kv_transfer": {"has_kv_transfer_group": ()},
    "vllm.model_executor.layers.attention.attention": {"unified_attention_with_output": ()},
    "vllm.config": {"get_current_vllm_config_or_none": ()},
}


def parameters(function: Any) -> list[str]:
    """Return the parameters of a function as text: names, ``=`` for those with a default, stars."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    marks: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    return [
        marks.get(p.kind, "") + name + ("" if p.default is p.empty else "=")
        for name, p in inspect.signature(function).parameters.items()
    ]


def record() -> dict[str, Any]:
    """Return what the installed vLLM has of `INTERFACES`; None where something is missing."""
    found: dict[str, Any] = {}
    for module_name, names in INTERFACES.items():
        module = importlib.import_module(module_name)
        place = found[module_name] = {}
        for name, methods in names.items():
            thing = getattr(module, name, None)
            if thing is None:
                place[name] = None
            elif inspect.isclass(thing):
                place[name] = {
                    method: parameters(inspect.getattr_static(thing, method))
                    if hasattr(thing, method)
                    else None
                    for method in methods
                }
            else:
                place[name] = parameters(thing)
    return found


def main() -> int:
    """Compare or write, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the record of this version")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    minor = ".".join(importlib.metadata.version("vllm").split(".")[:2])
    table = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    found = record()
    if arguments.write:
        table[minor] = found
        RECORD.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")
        return 0
    old = table.get(minor)
    if old == found:
        print(f"vllm {minor}: as recorded")
        return 0
    for module, names in found.items():
        for name, value in names.items():
            was = (old or {}).get(module, {}).get(name, "nothing")
            if was != value:
                print(f"{module}.{name}: recorded {was}, found {value}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
