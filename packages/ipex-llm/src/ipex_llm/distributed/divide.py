# SPDX-License-Identifier: Apache-2.0
"""Whole models divided among the ranks of a group, by us or by others, and checked.

Others are DeepSpeed and transformers. Modules of DeepSpeed are known by their names and attributes.
``LinearAllreduce`` has ``weight`` [out, part of in], ``bias`` or None and ``mp_group``, and adds the bias to the sum.
``LmHeadLinearAllreduce`` is one that also takes its part of the input itself. ``LinearLayer`` has ``weight``
[part of out, in] and ``bias``.

With a ``tp_plan`` of transformers, distributed parameters become plain ones with our modules. A layer by output
features has parameters with the placement ``Shard(0)``, one by input features ``Shard(1)``; the collectives around
them are in a ``forward`` that the module itself has. The head gathers what it gives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ipex_core.errors import OpArgumentError
from ipex_llm.arch import DecoderPlan
from ipex_llm.distributed.checkpoint import _ATTENTION_OUT, _value
from ipex_llm.distributed.cut import GRAINS, split_heads
from ipex_llm.distributed.group import (
    AllReduce,
    HeadShard,
    ShardedHead,
    ShardedModule,
    TensorParallel,
    replace_child,
)
from ipex_llm.distributed.shard import (
    check_shards,
    set_numbers,
    shard_plan,
    wrap_outputs,
)
from ipex_llm.records import is_sharded, update
from ipex_quant.weight_only.replace import replace_linears_from_checkpoint


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
    update(model, parallel=parallel)


# -- Models that others have divided become ours ----------------------------------------------------------------------


def adopt(model: nn.Module) -> bool:
    """Make a model that DeepSpeed or transformers have divided one of ours, in place.

    Args:
        model: A model.

    Returns:
        Whether it was divided by one of them.

    Raises:
        ValueError: It is divided in a way that is not understood, or its process group is not started.
    """
    return adopt_deepspeed(model) or adopt_transformers(model)


# ------------------------------------------------------------------------------------------------------------ DeepSpeed

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
    update(model, parallel=parallel)
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


# --------------------------------------------------------------------------------------------------------- transformers

_ADVICE = "load it whole and pass tp_group, which divides it"


def _distributed(module: nn.Module) -> dict[str, Any]:
    """Return the parameters of a module that are parts of distributed ones."""
    found = module._parameters.items()
    return {name: value for name, value in found if hasattr(value, "device_mesh")}


@torch.no_grad()
def adopt_transformers(model: nn.Module) -> bool:
    """Replace the distributed parameters of a model by the part that this rank has, in place.

    Collective if there are any.

    Args:
        model: A model, as ``from_pretrained(..., tp_plan="auto")`` returns it.

    Returns:
        Whether it was one.

    Raises:
        ValueError: A module is divided in a way that is not known here (embeddings, experts, more than one
            dimension of ranks), or the version of transformers divides by other means.
    """
    modules = {
        module: found
        for module in model.modules()
        if not isinstance(module, ShardedModule) and (found := _distributed(module))
    }
    if not modules:
        if any(hasattr(module, "_hf_tp_plan") for module in model.modules()):
            raise OpArgumentError(
                "optimize: model must be whole or have distributed parameters, got one that an older transformers"
                f" has divided: {_ADVICE}"
            )
        return False
    names = {module: name for name, module in model.named_modules()}
    kinds = {module: _kind(module, found, names[module]) for module, found in modules.items()}
    mesh = next(iter(next(iter(modules.values())).values())).device_mesh
    parallel = TensorParallel.of(mesh.get_group())
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    if head is not None and kinds.get(head) == "rows":
        sizes: list[Any] = [None] * parallel.ranks
        own = int(modules[head]["weight"].to_local().shape[0])
        dist.all_gather_object(sizes, own, group=parallel.group)
        parallel = dataclasses.replace(parallel, head=HeadShard("vocabulary", tuple(sizes)))
    for module, kind in kinds.items():
        _localize(module, kind, parallel)
        if kind == "columns":
            replace_child(model, module, AllReduce(module, parallel))
        elif module is head and kind == "rows":
            assert parallel.head is not None
            replace_child(model, module, ShardedHead(module, parallel, parallel.head))
    for module in model.modules():  # those that only had gradients summed
        module.__dict__.pop("forward", None)
    update(model, parallel=parallel)
    return True


def _kind(module: nn.Module, found: dict[str, Any], name: str) -> str:
    """Return what a module has of its weight: ``"rows"``, ``"columns"`` or ``"all"``."""
    placements = {key: value.placements for key, value in found.items()}
    if all(len(p) == 1 and p[0].is_replicate() for p in placements.values()):
        return "all"
    weight = placements.get("weight", ())
    if len(weight) == 1 and isinstance(module, nn.Linear) and type(weight[0]).__name__ == "Shard":
        return "rows" if weight[0].dim % 2 == 0 else "columns"
    raise OpArgumentError(
        "optimize: model must be divided in linear layers by one dimension, got"
        f" {name} ({type(module).__name__}) with {placements}: {_ADVICE}"
    )


def _localize(module: nn.Module, kind: str, parallel: TensorParallel) -> None:
    """Give a module plain parameters and its own forward."""
    for name, value in _distributed(module).items():
        module._parameters[name] = nn.Parameter(value.to_local().contiguous(), requires_grad=False)
    module.__dict__.pop("forward", None)
    if kind == "columns" and parallel.rank and module._parameters.get("bias") is not None:
        module._parameters["bias"] = None
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
