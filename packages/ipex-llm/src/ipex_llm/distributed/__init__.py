# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: several processes compute one model, each with a part of every layer.

Two all-reduces per layer make whole rows out of parts: behind the output projection of attention and behind the down
projection of the mlp (or the experts). All ranks have the whole stream between them: norms, residuals and the embedding
are not divided. The head is divided by vocabulary, and its logits are gathered.

How the parts fit together:

1. `shard_plan` cuts the weights in place and returns a plan of the part: fewer heads, fewer features, the same modules,
   and `DecoderPlan.parallel`. Its modules are plain, so they can be quantized or packed like any other.
2. `wrap_outputs` puts `AllReduce` and `ShardedHead` around the modules that give parts; the model's own forward is
   right again then. Between 1 and 2 modules may be replaced (quantization, a checkpoint that was sharded itself).
3. `ipex_llm.model_runner.program` takes the modules inside, which do not reduce, and appends
   ``plan.parallel.emit_all_reduce(builder, y)`` behind output and down projections and experts - before the residual is
   added, which every rank has - and ``emit_head_input`` and ``emit_head_output`` around the head. The native op
   ``all_reduce_`` does the sum, so that a program stays one call; a group without shared memory uses its backend,
   through the same instruction.
4. A biased projection has its bias on rank 0 only, so nothing else has to handle it.
5. A model that is sharded already is matched like any other; `parallel_plan` turns what is found into a plan as in 1.
   `adopt` makes such a model of one that DeepSpeed or transformers have divided, `load_parts` of one that takes its
   weights from a quantized checkpoint.
"""

from __future__ import annotations

from ipex_llm.distributed.cut import split_features, split_heads
from ipex_llm.distributed.divide import (
    adopt,
    adopt_deepspeed,
    adopt_transformers,
    divide,
    divisible,
    load_parts,
    shard_model,
)
from ipex_llm.distributed.group import (
    AllReduce,
    HeadShard,
    ShardedHead,
    ShardedModule,
    TensorParallel,
    uncovered,
)
from ipex_llm.distributed.shard import (
    parallel_plan,
    shard_head,
    shard_plan,
    wrap_head,
    wrap_outputs,
)
from ipex_llm.records import is_sharded

__all__ = [
    "AllReduce",
    "HeadShard",
    "ShardedHead",
    "ShardedModule",
    "TensorParallel",
    "adopt",
    "adopt_deepspeed",
    "adopt_transformers",
    "divide",
    "divisible",
    "is_sharded",
    "load_parts",
    "parallel_plan",
    "shard_head",
    "shard_model",
    "shard_plan",
    "split_features",
    "split_heads",
    "uncovered",
    "wrap_head",
    "wrap_outputs",
]
