# SPDX-License-Identifier: Apache-2.0
"""A model that becomes a rank's part by loading it: from a quantized checkpoint that has been divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ipex_core.errors import OpArgumentError
from ipex_llm.distributed.checkpoint import _ATTENTION_OUT, _value
from ipex_llm.distributed.group import TensorParallel
from ipex_llm.distributed.modules import AllReduce
from ipex_llm.distributed.shard import PARALLEL, set_numbers
from ipex_llm.distributed.split import split_heads
from ipex_quant.weight_only.replace import replace_linears_from_checkpoint

__all__ = ["load_parts"]

Tensor = torch.Tensor


def load_parts(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    scheme: Mapping[str, Any] | None,
    config: Any,
    parallel: TensorParallel,
) -> None:
    """Load a rank's part of a quantized checkpoint into a whole model, in place, and make its forward right.

    Args:
        model: The model; on the meta device, or with any weights.
        tensors: What ``load_low_precision_checkpoint(path, rank, world_size)`` returns for this rank; or the whole
            checkpoint, which is divided then.
        scheme: Its quantization config.
        config: How to compute, or None.
        parallel: The group.

    Raises:
        ValueError: The model cannot be divided among so many ranks, or the checkpoint does not fit.
    """
    if parallel.ranks == 1:
        replace_linears_from_checkpoint(model, tensors, scheme, config)
        return
    raw = model.config
    heads = _value(raw, "num_attention_heads", "n_head")
    kv_heads = _value(raw, "num_key_value_heads") or heads
    if not isinstance(heads, int):
        raise OpArgumentError("optimize: model must have config.num_attention_heads, got none")
    part = split_heads(heads, kv_heads, parallel.rank, parallel.ranks)
    done = replace_linears_from_checkpoint(model, tensors, scheme, config, parts=True)
    if not done.sums:
        raise OpArgumentError(
            "optimize: low_precision_checkpoint must be the part of this rank where tp_group is given"
            f" (load_low_precision_checkpoint(path, {parallel.rank}, {parallel.ranks})), got a whole one"
        )
    for name in done.sums:
        parent, _, last = name.rpartition(".")
        owner, module = model.get_submodule(parent), model.get_submodule(name)
        if last in _ATTENTION_OUT:
            width: Any = module.in_features
            if width % part.heads:
                raise OpArgumentError(
                    f"optimize: low_precision_checkpoint must have {part.heads} heads of {heads} for rank"
                    f" {parallel.rank} of {parallel.ranks}, got {width} input features of {name}"
                )
            fused = hasattr(owner, "qkv_proj")
            set_numbers(owner, heads, kv_heads, width // part.heads, part, fused)
        setattr(owner, last, AllReduce(module, parallel))
    model.__dict__[PARALLEL] = parallel
