# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: several processes compute one model, each with a part of every layer.

Two all-reduces per layer make whole rows out of parts: behind the output projection of attention and behind the down
projection of the mlp (or the experts). All ranks have the whole stream between them: norms, residuals and the embedding
are not divided. The head is divided by vocabulary, and its logits are gathered.

How the parts fit together:

1. `shard_plan` cuts the weights in place and returns a plan of the part: fewer heads, fewer features, the same modules,
   and `DecoderPlan.parallel`. Its modules are plain, so they can be quantised or packed like any other.
2. `wrap_outputs` puts `AllReduce` and `ShardedHead` around the modules that give parts; the model's own forward is
   right again then. Between 1 and 2 modules may be replaced (quantisation, a checkpoint that was sharded itself).
3. Whoever writes programs from the plan (`ipex_llm._emit`) takes the modules inside, which do not reduce, and appends
   ``plan.parallel.emit_all_reduce(builder, y)`` behind output and down projections and experts - before the residual is
   added, which every rank has - and ``emit_head_input`` and ``emit_head_output`` around the head. The native op
   ``all_reduce_`` does the sum, so that a program stays one call; a group without shared memory uses its backend,
   through the same instruction.
4. A biased projection has its bias on rank 0 only, so nobody needs to know about it.
5. A model that is sharded already is matched like any other; `parallel_plan` turns what is found into a plan as in 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ipex_llm._parallel._deepspeed import adopt_deepspeed
from ipex_llm._parallel._group import HeadShard, TensorParallel
from ipex_llm._parallel._modules import AllReduce, ShardedHead, ShardedModule
from ipex_llm._parallel._shard import PARALLEL, parallel_plan, shard_plan, wrap_outputs
from ipex_llm._parallel._split import split_features, split_heads

__all__ = [
    "AllReduce",
    "HeadShard",
    "ShardedHead",
    "ShardedModule",
    "TensorParallel",
    "adopt_deepspeed",
    "is_sharded",
    "parallel_plan",
    "shard_model",
    "shard_plan",
    "split_features",
    "split_heads",
    "wrap_outputs",
]

Tensor = torch.Tensor


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model has been divided among ranks."""
    return PARALLEL in model.__dict__


@torch.no_grad()
def shard_model(model: nn.Module, group: Any = None, *, head: bool = True) -> nn.Module:
    """Divide a model of transformers among the ranks of a group, in place, for inference.

    Each rank calls with the same model. Afterwards its forward and ``generate``, called by all ranks with the same
    input, give each rank what the whole model gives, and a rank has about its share of the weights. Sampling draws the
    same tokens if the generators of all ranks have the same seed.

    Args:
        model: A causal language model in eval mode, with floating point weights, on the CPU.
        group: A process group; None: the default one.
        head: Divide the head too, by vocabulary.

    Returns:
        The model.

    Raises:
        ValueError: There is no group; the structure of the model is not understood; it cannot be divided among so many
            ranks; or its own forward does not work on a part of the heads (the model is not usable then).
        RuntimeError: A rank is missing, or has another model.
    """
    from ipex_llm._match import match

    parallel = TensorParallel.of(group)
    if is_sharded(model):
        raise ValueError("shard_model: model must be a whole one, got one that is sharded already")
    plan = match(model)
    ids = torch.arange(3, 10).remainder(plan.vocab_size).unsqueeze(0)
    before = _logits(model, ids)
    _compare_ranks(parallel, before)
    part = shard_plan(plan, parallel, head=head)
    wrap_outputs(model, part)
    try:
        after = _logits(model, ids)
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        raise ValueError(
            f"shard_model: model must have a forward that works on some of its heads, got {type(model).__name__}:"
            f" {type(error).__name__}: {text}"
        ) from error
    off = float((after - before).norm() / before.norm().clamp_min(1e-30))
    limit = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1
    if not off < limit:
        raise ValueError(
            f"shard_model: model must have a forward that works on some of its heads, got {type(model).__name__}, whose"
            f" logits are off by {off:.1e}"
        )
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
        raise ValueError("shard_model: model must be the same on all ranks, got different ones")
