# SPDX-License-Identifier: Apache-2.0
"""Models that DeepSpeed has divided: its modules, known by their names and attributes, become ours.

``LinearAllreduce`` has ``weight`` [out, part of in], ``bias`` or None and ``mp_group``, and adds the bias to the sum.
``LmHeadLinearAllreduce`` is one that also takes its part of the input itself. ``LinearLayer`` has ``weight`` [part of
out, in] and ``bias``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ipex_llm.distributed.group import HeadShard, TensorParallel
from ipex_llm.distributed.modules import AllReduce, ShardedHead, ShardedModule, replace_child
from ipex_llm.distributed.shard import PARALLEL

__all__ = ["adopt_deepspeed"]

_SUMS = ("LinearAllreduce", "LmHeadLinearAllreduce")
_PARTS = ("LinearLayer",)


def _known(module: nn.Module, names: tuple[str, ...]) -> bool:
    if isinstance(module, ShardedModule):
        return False
    weight = getattr(module, "weight", None)
    is_weight = isinstance(weight, torch.Tensor) and weight.dim() == 2
    return is_weight and any(kind.__name__ in names for kind in type(module).__mro__)


def adopt_deepspeed(model: nn.Module) -> bool:
    """Replace DeepSpeed's modules in a model by plain linear layers and `AllReduce`, in place.

    Weights are shared with the modules they come from. The bias of a sum stays on rank 0 only. Collective if there are
    such modules.

    Args:
        model: A model, as ``deepspeed.init_inference`` returns it (its ``module``).

    Returns:
        Whether there were such modules.

    Raises:
        ValueError: There are some, but no process group is started.
    """
    sums = [module for module in model.modules() if _known(module, _SUMS)]
    if not sums:
        return False
    parallel = TensorParallel.of(getattr(sums[0], "mp_group", None))
    head = next((module for module in sums if type(module).__name__ == _SUMS[1]), None)
    if head is not None:
        sizes: list[Any] = [None] * parallel.ranks
        dist.all_gather_object(sizes, int(_weight(head).shape[1]), group=parallel.group)
        parallel = dataclasses.replace(parallel, head=HeadShard("input", tuple(sizes)))
    for module in [m for m in model.modules() if _known(m, _PARTS)]:
        replace_child(model, module, _linear(module, True, model.training))
    for module in sums:
        linear = _linear(module, parallel.rank == 0, model.training)
        if module is head:
            assert parallel.head is not None
            replace_child(model, module, ShardedHead(linear, parallel, parallel.head))
        else:
            replace_child(model, module, AllReduce(linear, parallel))
    model.__dict__[PARALLEL] = parallel
    return True


def _weight(module: nn.Module) -> torch.Tensor:
    weight: Any = module.weight
    return weight  # type: ignore[no-any-return]


def _linear(module: nn.Module, with_bias: bool, training: bool) -> nn.Linear:
    weight = _weight(module).detach()
    bias: Any = getattr(module, "bias", None)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None and with_bias:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    # Not the mode of DeepSpeed's module: it makes those in training mode, whatever the model is in.
    return linear.train(training)
