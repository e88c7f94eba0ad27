# SPDX-License-Identifier: Apache-2.0
"""Linear layers of vLLM's models with the packed weights of ipex: float ones, and quantized ones by vLLM's tables.

Every weight is packed once, when vLLM has loaded it, and the plain one is freed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as plain_linear

from ipex_core.library.spec import FLOATS
from ipex_core.util import return_free_memory

_UTILS = "vllm.model_executor.layers.utils"
_EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"


# --- float weights ----------------------------------------------------------------------------------------------------


def replace_unquantized() -> tuple[str, ...]:
    """Replace vLLM's choice of a float kernel on the CPU, which has no registry, and its embedding of packed weights.

    Returns:
        The names of what was replaced.
    """
    utils: Any = importlib.import_module(_UTILS)
    method = importlib.import_module(_EMBEDDING).UnquantizedEmbeddingMethod
    if utils.dispatch_cpu_unquantized_gemm is not dispatch:
        utils.dispatch_cpu_unquantized_gemm = dispatch
    if not getattr(method.embedding, "_ipex", False):
        method.embedding = _with_packed_rows(method.embedding)
    return "dispatch_cpu_unquantized_gemm", "UnquantizedEmbeddingMethod.embedding"


def dispatch(layer: Any, remove_weight: bool) -> None:
    """Give a layer its function ``cpu_linear(x, weight, bias)``: on the packed weight, where ipex can pack it.

    Args:
        layer: A layer with the loaded ``weight``, ``[out_features, in_features]``.
        remove_weight: Whether nothing else reads the weight. False for embeddings, whose rows are looked up.
    """
    weight = layer.weight
    if weight.is_meta or weight.ndim != 2 or weight.dtype not in FLOATS or not weight.numel():
        layer.cpu_linear = plain_linear
        return
    if remove_weight or _head(layer):
        layer.cpu_linear = _pack(layer)
    else:  # a table of embeddings, or rows that something else reads
        layer.cpu_linear = plain_linear


def _head(layer: Any) -> bool:
    """Return whether a table of the vocabulary is a layer too and nothing reads its plain weight.

    A language-model head that shares the weight of the embedding may be the layer of the embedding itself.
    """
    config = importlib.import_module("vllm.config").get_current_vllm_config_or_none()
    if config is None or config.lora_config is not None or config.speculative_config is not None:
        return False
    model = config.model_config
    if getattr(model, "head_dtype", layer.weight.dtype) != layer.weight.dtype:
        return False
    tied = getattr(model.hf_text_config, "tie_word_embeddings", False)
    return type(layer).__name__ == "ParallelLMHead" or bool(tied)


def _pack(layer: Any) -> Callable[..., Tensor]:
    """Pack the weight of a layer, free the plain one, and return the linear function."""
    weight = layer.weight
    shape, dtype = weight.shape, weight.dtype
    # Layers that share a weight share the packed one.
    packed = getattr(weight, "ipex_packed", None)
    if packed is None:
        packed = torch.ops.ipex.pack_linear_weight(weight.detach())
        weight.ipex_packed = packed
    layer.ipex_rows = packed, shape[0], shape[1], dtype
    layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)
    return_free_memory()  # of the layers before
    features = shape[0]

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        del weight
        result: Tensor = torch.ops.ipex.linear(x, packed, features, bias)
        return result

    return run


def _with_packed_rows(embedding: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return vLLM's look-up of embeddings, which takes rows of the packed weight where there is no plain one."""

    @functools.wraps(embedding)
    def look_up(self: Any, layer: Any, input_: Tensor) -> Tensor:
        rows = getattr(layer, "ipex_rows", None)
        if rows is None:
            return embedding(self, layer, input_)
        packed, count, size, dtype = rows
        result: Tensor = torch.ops.ipex.packed_embedding(packed, input_, count, size, dtype)
        return result

    look_up._ipex = True  # type: ignore[attr-defined]
    return look_up


# --- quantized weights ------------------------------------------------------------------------------------------------


_KERNELS = "vllm.model_executor.kernels.linear"


def register_quantized() -> tuple[str, ...]:
    """Put our kernels at the front of vLLM's tables of linear kernels for the CPU; calling it again does nothing.

    At the front, since vLLM takes the first that says it can, and its own say so without their extension.

    Returns:
        The names of the tables.
    """
    from ipex_llm.integrations.vllm import quantized

    tables = importlib.import_module(_KERNELS)
    cpu = importlib.import_module("vllm.platforms").PlatformEnum.CPU
    done = []
    for name, kernels in quantized.TABLES.items():
        table = getattr(tables, name, None)
        if table is None:
            continue
        row = table.setdefault(cpu, [])
        row[:0] = [kernel for kernel in kernels if kernel not in row]
        done.append(name)
    return tuple(done)
