# SPDX-License-Identifier: Apache-2.0
"""Whole models divided among the ranks of a group, and checked.

A quantized model becomes a rank's part by loading it, from a checkpoint that has been divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ipex_core.errors import OpArgumentError
from ipex_llm.arch import DecoderPlan
from ipex_llm.distributed.checkpoint import _ATTENTION_OUT, _value
from ipex_llm.distributed.cut import GRAINS, split_heads
from ipex_llm.distributed.group import TensorParallel
from ipex_llm.distributed.modules import AllReduce
from ipex_llm.distributed.shard import (
    PARALLEL,
    check_shards,
    is_sharded,
    set_numbers,
    shard_plan,
    wrap_outputs,
)
from ipex_quant.weight_only.replace import replace_linears_from_checkpoint

__all__ = ["divide", "divisible", "load_parts", "shard_model"]

Tensor = torch.Tensor


def divisible(model: nn.Module, parallel: TensorParallel, grains: Sequence[int]) -> DecoderPlan:
    """Return the plan of a model that can be divided among the ranks of a group; nothing is changed.

    Args:
        model: As for `divide`.
        parallel: The group.
        grains: As for `divide`.

    Raises:
        ValueError: It is divided already, its structure is not understood, or it cannot be divided among so many ranks.
    """
    from ipex_llm.arch.detect import MatchError, match

    if is_sharded(model):
        raise OpArgumentError(
            "optimize: model must be a whole one where tp_group is given, got one that is sharded already"
        )
    try:
        plan = match(model)
    except MatchError as error:
        raise OpArgumentError(
            f"optimize: model must have a structure that is understood where tp_group is given, got"
            f" {type(model).__name__}: {error.reason}"
        ) from error
    if parallel.ranks > 1:
        check_shards(plan, parallel, grains)
    return plan


@torch.no_grad()
def divide(
    model: nn.Module,
    parallel: TensorParallel,
    *,
    head: bool = True,
    grains: Sequence[int] = GRAINS,
    plan: DecoderPlan | None = None,
) -> DecoderPlan:
    """Divide a model of transformers among the ranks of a group, in place, for inference.

    Each rank calls with the same model. Afterwards its forward, called by all ranks with the same input, gives each
    rank what the whole model gives, and a rank has about its share of the weights.

    Args:
        model: A causal language model in eval mode, with floating point weights, on the CPU.
        parallel: The group.
        head: Divide the head too, by vocabulary.
        grains: Inner features of the mlp that stay together, as in `split_features`.
        plan: What `divisible` returned for the model; None to find it here.

    Returns:
        The plan of this rank's part.

    Raises:
        ValueError: The structure of the model is not understood; it cannot be divided among so many ranks; or its own
            forward does not work on a part of the heads (the model is not usable then).
        RuntimeError: A rank is missing.
    """
    plan = divisible(model, parallel, grains) if plan is None else plan
    if parallel.ranks == 1:
        return plan
    ids = torch.arange(3, 10).remainder(plan.vocab_size).unsqueeze(0)
    before = _logits(model, ids)
    _compare_ranks(parallel, before)
    part = shard_plan(plan, parallel, head=head, grains=grains)
    wrap_outputs(model, part)
    needed = "optimize: model must have a forward that works on some of its heads where tp_group is given, got"
    try:
        after = _logits(model, ids)
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        raise OpArgumentError(
            f"{needed} {type(model).__name__}: {type(error).__name__}: {text}"
        ) from error
    off = float((after - before).norm() / before.norm().clamp_min(1e-30))
    limit = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1
    if not off < limit:
        raise OpArgumentError(f"{needed} {type(model).__name__}, whose logits differ by {off:.1e}")
    return part


def shard_model(model: nn.Module, group: Any = None, *, head: bool = True) -> nn.Module:
    """Call `divide` with a process group (None: the default one) and return the model."""
    divide(model, TensorParallel.of(group), head=head)
    return model


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    output = model(input_ids=ids, use_cache=False)
    logits = getattr(output, "logits", None)
    if logits is None:
        logits = output[0] if isinstance(output, tuple) else output.last_hidden_state
    return logits.float()  # type: ignore[no-any-return]


def _compare_ranks(parallel: TensorParallel, logits: Tensor) -> None:
    """Raise if the ranks have different models."""
    total = parallel.all_reduce(logits.clone()) / parallel.ranks
    off = (total - logits).norm() / logits.norm().clamp_min(1e-30)
    # Summed again: either all ranks raise or none.
    worst = float(parallel.all_reduce(off.reshape(1).clone()))
    if not worst < 0.05 * parallel.ranks:
        raise OpArgumentError(
            "optimize: model must be the same on all ranks of tp_group, got logits that differ by"
            f" {worst / parallel.ranks:.1e}: load the same weights on each rank"
        )


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
