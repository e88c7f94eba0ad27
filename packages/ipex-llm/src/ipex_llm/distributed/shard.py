# SPDX-License-Identifier: Apache-2.0
"""Divides a model among the ranks of a group: by its plan, in place."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ipex_core.errors import OpArgumentError
from ipex_llm.arch import (
    AttentionPlan,
    DecoderPlan,
    ExpertsPlan,
    LayerPlan,
    LinearPlan,
    MlpPlan,
    NormPlan,
)
from ipex_llm.distributed.checkpoint import split_range
from ipex_llm.distributed.cut import (
    GRAINS,
    HeadRange,
    cut_columns,
    cut_experts,
    cut_rows,
    features_in,
    features_out,
    split_features,
    split_heads,
)
from ipex_llm.distributed.group import (
    AllReduce,
    HeadShard,
    ShardedHead,
    TensorParallel,
    inner,
    replace_child,
)
from ipex_llm.records import record_of, update

T = TypeVar("T")

# Numbers that attention modules keep for the shapes they make.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
_GROUPS = ("num_key_value_groups", "n_rep", "num_kv_groups")
_WIDTHS = ("embed_dim", "hidden_size", "split_size", "all_head_size", "inner_dim", "d_model")
_KV_WIDTHS = ("kv_dim",)
_INNER = ("intermediate_size", "intermediate_dim", "expert_dim", "moe_intermediate_size", "ffn_dim")


def shard_plan(
    plan: DecoderPlan,
    parallel: TensorParallel,
    *,
    head: bool = True,
    grains: Sequence[int] = GRAINS,
) -> DecoderPlan:
    """Cut this rank's part out of the weights that a plan names, in place, and return the plan of the part.

    Projections to q, k and v and into the mlp keep some output features, those out of them the input features that
    belong to these, and a bias on rank 0 only; the head keeps some logits. Everything else stays whole. The modules
    give parts of sums now: `wrap_outputs` makes the forward of the model right again.

    Args:
        plan: The plan of the whole model.
        parallel: The group.
        head: Divide the head.
        grains: Inner features of the mlp that stay together, as in `split_features`.

    Returns:
        The plan with this rank's heads, features and modules, and with `parallel`.

    Raises:
        ValueError: The model cannot be divided among so many ranks, or has a part that cannot be divided. What can be
            checked is checked before anything is changed.
    """
    if parallel.ranks == 1:
        return plan
    check_shards(plan, parallel, grains)
    layers = tuple(_shard_layer(layer, parallel, grains) for layer in plan.layers)
    plan = dataclasses.replace(plan, layers=layers, parallel=parallel)
    return shard_head(plan) if head else plan


def shard_head(plan: DecoderPlan) -> DecoderPlan:
    """Cut this rank's part out of the head of a plan whose layers are parts, in place; see `shard_plan`."""
    own, parallel = plan.head, plan.parallel
    if own is None or parallel is None:
        return plan
    module = own.modules[0]
    edges = _head_edges(own, parallel)
    first, last = edges[parallel.rank]
    # A tied weight stays whole for the embedding; the part is a view of it then.
    tied = module._parameters["weight"] is plan.embedding._parameters.get("weight")
    own = cut_rows(own, torch.arange(first, last), view=tied)
    sizes = tuple(b - a for a, b in edges)
    parallel = dataclasses.replace(parallel, head=HeadShard("vocabulary", sizes))
    return dataclasses.replace(plan, head=own, parallel=parallel)


def check_shards(plan: DecoderPlan, parallel: TensorParallel, grains: Sequence[int]) -> None:
    """Raise if a plan cannot be divided among the ranks of a group; nothing is changed.

    Raises:
        ValueError: The text says which part cannot be divided.
    """
    for layer in plan.layers:
        _check(layer, parallel, grains)
    if plan.indexed:
        raise OpArgumentError(
            "optimize: model must have no indexers to be divided, got attention with keys that an indexer chooses"
        )
    if plan.head_block is not None:
        raise OpArgumentError(
            "optimize: model must have no block before its head to be divided, got one"
        )
    if plan.head is not None:
        _head_edges(plan.head, parallel)


def shard_numbers(
    layer: LayerPlan, parallel: TensorParallel, grains: Sequence[int]
) -> tuple[int, int, int]:
    """Return the query heads, key/value heads and inner features that this rank has of a whole layer."""
    a = _attention(layer)
    part = split_heads(a.heads, a.kv_heads, parallel.rank, parallel.ranks)
    size = inner_size(layer)
    first, last = split_features(size, parallel.rank, parallel.ranks, "the mlp", grains)
    return part.heads, part.kv_heads, last - first


def inner_size(layer: LayerPlan) -> int:
    """Return the inner features of the mlp of a layer."""
    mlp = layer.mlp
    if mlp is None:
        return 0
    if isinstance(mlp, ExpertsPlan):
        return mlp.intermediate_size
    module: Any = mlp.down.modules[0]
    if module._parameters.get("weight") is None and hasattr(module, "in_features"):  # quantized
        return int(module.in_features)
    return features_in(mlp.down)


def head_sizes(head: LinearPlan, parallel: TensorParallel) -> list[int]:
    """Return how many logits of a whole head each rank computes."""
    return [last - first for first, last in _head_edges(head, parallel)]


def _head_edges(head: LinearPlan, parallel: TensorParallel) -> list[tuple[int, int]]:
    """Return the first row of a head of each rank, and the one after its last."""
    total = features_out(head.modules[0], head.transposed)
    if total < parallel.ranks:
        raise OpArgumentError(
            f"optimize: tp_group must have at most as many ranks as the vocabulary has tokens = {total},"
            f" got {parallel.ranks}"
        )
    grain = 32 if total % 32 == 0 and total // 32 >= parallel.ranks else 1
    ranges = (split_range(total // grain, rank, parallel.ranks) for rank in range(parallel.ranks))
    return [(first * grain, last * grain) for first, last in ranges]


def _attention(layer: LayerPlan) -> AttentionPlan:
    if not isinstance(layer.attention, AttentionPlan):
        what = "without it" if layer.attention is None else "that keeps a state"
        raise OpArgumentError(
            f"optimize: model must have attention in each layer to be divided, got a layer {what}"
        )
    if layer.beside is not None:
        raise OpArgumentError(
            "optimize: model must have attention alone to be divided, got a block with a state beside it"
        )
    if layer.mlp is None:
        raise OpArgumentError(
            "optimize: model must have an mlp in each layer to be divided, got a layer without it"
        )
    return layer.attention


def _check(layer: LayerPlan, parallel: TensorParallel, grains: Sequence[int]) -> None:
    a = _attention(layer)
    if a.gated:
        raise OpArgumentError(
            "optimize: model must have attention without gates to be divided, got gated attention"
        )
    if layer.token_block is not None or layer.streams is not None or a.source is not None:
        raise OpArgumentError(
            "optimize: model must have layers that read the stream alone to be divided, got one that reads the tokens,"
            " or the keys and values of another layer"
        )
    if isinstance(layer.mlp, ExpertsPlan) and layer.mlp.up is not None:
        raise OpArgumentError(
            "optimize: model must have stacked or separate experts to be divided, got ones that lie behind each other"
        )
    if layer.picture is not None:
        raise OpArgumentError(
            "optimize: model must have layers that read text alone to be divided, got one that reads a picture"
        )
    if a.experts is not None:
        raise OpArgumentError(
            "optimize: model must have projections that are linear layers to be divided, got experts in their places"
        )
    if a.key_bias is not None or layer.gains is not None:
        raise OpArgumentError(
            "optimize: model must have scores of queries and keys alone to be divided, got a bias made of all values"
        )
    if layer.convs:
        raise OpArgumentError(
            "optimize: model must have projections that give keys and values to be divided, got short convolutions of"
            " them"
        )
    if a.difference is not None:
        raise OpArgumentError(
            "optimize: model must have heads that attend alone to be divided, got a difference of heads"
        )
    if a.output.added is not None:
        raise OpArgumentError(
            "optimize: model must add biases of projections alone to be divided, got a parameter that a layer adds"
        )
    if a.value_dim is not None:
        raise OpArgumentError(
            "optimize: model must have keys and values of one width to be divided, got narrower values"
        )
    if a.keys_as_values or a.shared is not None:
        raise OpArgumentError(
            "optimize: model must have projections to values to be divided, got attention whose values are its keys"
        )
    if a.latent is not None:
        raise OpArgumentError(
            "optimize: model must have projections to keys and values to be divided, got latent attention"
        )
    if isinstance(layer.mlp, ExpertsPlan) and (not layer.mlp.gated or layer.mlp.entry is not None):
        raise OpArgumentError(
            "optimize: model must have experts with gates to be divided, got experts without gates or in fewer features"
        )
    if isinstance(layer.mlp, ExpertsPlan) and layer.mlp.norms is not None:
        raise OpArgumentError(
            "optimize: model must have experts without norms of their own to be divided, got experts with norms around"
            " them, which need the sums of all ranks"
        )
    if a.output_norm is not None or (isinstance(layer.mlp, MlpPlan) and layer.mlp.inner_norm):
        raise OpArgumentError(
            "optimize: model must have output projections that read what their block gives to be divided, got a norm"
            " between, which needs the features of all ranks"
        )
    split_heads(a.heads, a.kv_heads, parallel.rank, parallel.ranks)
    for norm in (a.query_norm, a.key_norm):
        if norm is not None and a.norm_over == "all":
            raise OpArgumentError(
                "optimize: model must have norms of q and k for each head, got one over all heads, which need the"
                " heads of all ranks"
            )
        if norm is not None and norm.weight is not None and norm.weight.dim() == 2:
            weight = norm.module._parameters.get("weight")
            if weight is None or weight.dim() != 2:
                raise OpArgumentError(
                    "optimize: model must keep the weights of norms of q and k in one parameter, got one module for"
                    " each head"
                )
    sizes = [inner_size(layer)]
    if isinstance(layer.mlp, ExpertsPlan) and layer.mlp.shared is not None:
        sizes.append(features_in(layer.mlp.shared.down))
    for size in sizes:
        split_features(size, parallel.rank, parallel.ranks, "the mlp", grains)
    linears = [a.qkv, a.output]
    if isinstance(layer.mlp, MlpPlan):
        linears += [layer.mlp.up, layer.mlp.down]
    for linear in linears:
        for module in linear.modules:
            features_out(module, linear.transposed)  # has a weight that can be cut


def _shard_layer(layer: LayerPlan, parallel: TensorParallel, grains: Sequence[int]) -> LayerPlan:
    attention = _attention(layer)
    part = split_heads(attention.heads, attention.kv_heads, parallel.rank, parallel.ranks)
    _set_numbers(layer.module, attention, part)
    mlp = layer.mlp
    assert mlp is not None
    if isinstance(mlp, MlpPlan):
        cut: MlpPlan | ExpertsPlan = _shard_mlp(mlp, parallel, grains)
    else:
        cut = _shard_experts(mlp, parallel, grains)
    return dataclasses.replace(
        layer, attention=_shard_attention(attention, part, parallel.rank), mlp=cut
    )


def _shard_attention(plan: AttentionPlan, part: HeadRange, rank: int) -> AttentionPlan:
    width = plan.head_dim
    key, value = plan.heads * width, (plan.heads + plan.kv_heads) * width
    keep = torch.cat(
        [
            torch.arange(part.query * width, part.query_end * width),
            *(torch.arange(at + part.kv * width, at + part.kv_end * width) for at in (key, value)),
        ]
    )
    qkv = cut_rows(plan.qkv, keep)
    cut_columns(plan.output, part.query * width, part.query_end * width, bias=rank == 0)
    _cut_norm(plan.query_norm, part.query, part.query_end)
    if plan.key_norm is not None and plan.key_norm is not plan.query_norm:
        _cut_norm(plan.key_norm, part.kv, part.kv_end)
    slopes, sinks = plan.alibi_slopes, plan.sinks
    if isinstance(sinks, nn.Parameter):
        # The module keeps its parameter; only what it holds gets shorter.
        sinks.data = sinks.detach()[part.query : part.query_end].clone()
    return dataclasses.replace(
        plan,
        qkv=qkv,
        heads=part.heads,
        kv_heads=part.kv_heads,
        alibi_slopes=None if slopes is None else slopes[part.query : part.query_end],
    )


def _cut_norm(norm: NormPlan | None, first: int, last: int) -> None:
    if norm is None:
        return
    for name in ("weight", "bias"):
        parameter = norm.module._parameters.get(name)
        if parameter is not None and parameter.dim() == 2:
            parameter.data = parameter.detach()[first:last].clone()


def _shard_mlp(plan: MlpPlan, parallel: TensorParallel, grains: Sequence[int]) -> MlpPlan:
    size = features_in(plan.down)
    first, last = split_features(size, parallel.rank, parallel.ranks, "the mlp", grains)
    inside = torch.arange(first, last)
    up = cut_rows(plan.up, torch.cat([inside, size + inside]) if plan.fused else inside)
    gate = None if plan.gate is None else cut_rows(plan.gate, inside)
    cut_columns(plan.down, first, last, bias=parallel.rank == 0)
    return dataclasses.replace(plan, gate=gate, up=up)


def _shard_experts(
    plan: ExpertsPlan, parallel: TensorParallel, grains: Sequence[int]
) -> ExpertsPlan:
    size, rank = plan.intermediate_size, parallel.rank
    first, last = split_features(size, rank, parallel.ranks, "the mlp", grains)
    if isinstance(plan.gate_up, tuple):
        inside = torch.arange(first, last)
        assert isinstance(plan.down, tuple)
        for module in plan.gate_up:
            cut_rows(LinearPlan((module,)), inside)
        for module in plan.down:
            cut_columns(LinearPlan((module,)), first, last, bias=rank == 0)
        cut = dataclasses.replace(plan, intermediate_size=last - first)
    else:
        cut = cut_experts(plan, first, last, bias=rank == 0)
        _replace_numbers(plan.module, _INNER, size, last - first)
    if plan.shared is None:
        return cut
    return dataclasses.replace(cut, shared=_shard_mlp(plan.shared, parallel, grains))


def _set_numbers(layer: nn.Module, plan: AttentionPlan, part: HeadRange) -> None:
    """Tell the modules around the attention of a layer how many heads they have."""
    output = plan.output.modules[0]
    for module in layer.modules():
        around = any(child is output for child in module.modules())
        if around and module is not layer and module is not output:
            fused = len(plan.qkv.modules) == 1
            set_numbers(module, plan.heads, plan.kv_heads, plan.head_dim, part, fused)


def set_numbers(
    module: nn.Module, heads: int, kv_heads: int, head_dim: int, part: HeadRange, fused: bool
) -> None:
    """Tell a module of an attention how many heads it has.

    Args:
        module: The module.
        heads: Query heads of the whole model.
        kv_heads: Its key/value heads.
        head_dim: Width of a head.
        part: What is left of them.
        fused: Queries, keys and values come from one projection.
    """
    config = module.__dict__.get("config")
    if fused and config is not None:
        # Who splits rows itself may count heads by the configuration, which belongs to all modules (Phi-3).
        module.__dict__["config"] = own = copy.copy(config)
        _replace_numbers(own, _KV_HEADS, kv_heads, part.kv_heads)
        _replace_numbers(own, _HEADS, heads, part.heads)
    _replace_numbers(module, _GROUPS, heads // kv_heads, part.heads // part.kv_heads)
    _replace_numbers(module, _KV_HEADS, kv_heads, part.kv_heads)
    _replace_numbers(module, _HEADS, heads, part.heads)
    _replace_numbers(module, _KV_WIDTHS, kv_heads * head_dim, part.kv_heads * head_dim)
    _replace_numbers(module, _WIDTHS, heads * head_dim, part.heads * head_dim)
    if part.kv_heads < kv_heads and _caches_count_by_configuration():
        hook = functools.partial(_shrink_cache, kv_heads=part.kv_heads)
        module.register_forward_pre_hook(hook, with_kwargs=True)


@functools.cache
def _caches_count_by_configuration() -> bool:
    """Return whether transformers, before 4.56, allocates static caches for all heads of a configuration."""
    import transformers

    return tuple(map(int, transformers.__version__.split(".")[:2])) < (4, 56)


def _shrink_cache(module: nn.Module, args: Any, kwargs: dict[str, Any], *, kv_heads: int) -> None:
    """Before an attention runs: leave the heads of this rank in its layer of a static cache, which is empty then."""
    layer: Any = getattr(module, "layer_idx", math.inf)
    for cache in kwargs.values():
        for name in ("key_cache", "value_cache"):
            layers: Any = getattr(cache, name, ())
            whole = layers[layer] if layer < len(layers) else None
            if isinstance(whole, Tensor) and whole.dim() == 4 and whole.shape[1] > kv_heads:
                layers[layer] = whole[:, :kv_heads].clone()


def _replace_numbers(module: Any, names: Sequence[str], old: int, new: int) -> None:
    for name in names:
        if module.__dict__.get(name) == old:
            module.__dict__[name] = new


# ----------------------------------------------------------------------------------------------------- whole results


def wrap_outputs(model: nn.Module, plan: DecoderPlan) -> None:
    """Put modules around those that give parts, so that the forward of the model is right.

    Args:
        model: The model.
        plan: A plan of `shard_plan`, whose modules may have been replaced in between (quantized).
    """
    parallel = plan.parallel
    if parallel is None:
        return
    done: set[int] = set()

    def sum_of(module: nn.Module) -> None:
        if id(module) not in done:
            done.add(id(module))
            replace_child(model, module, AllReduce(module, parallel))

    for layer in plan.layers:
        assert layer.attention is not None and layer.mlp is not None
        sum_of(layer.attention.output.modules[0])
        mlp: MlpPlan | None = layer.mlp if isinstance(layer.mlp, MlpPlan) else layer.mlp.shared
        if mlp is not None:
            sum_of(mlp.down.modules[0])
        if isinstance(layer.mlp, ExpertsPlan):
            for module in (
                layer.mlp.down if isinstance(layer.mlp.down, tuple) else (layer.mlp.module,)
            ):
                sum_of(module)
    wrap_head(model, plan)


def wrap_head(model: nn.Module, plan: DecoderPlan) -> None:
    """Do the part of `wrap_outputs` that is about the head."""
    parallel = plan.parallel
    if parallel is None:
        return
    if plan.head is not None and parallel.head is not None:
        own = plan.head.modules[0]
        replace_child(model, own, ShardedHead(own, parallel, parallel.head))
    update(model, parallel=parallel)


def parallel_plan(model: nn.Module, plan: DecoderPlan) -> DecoderPlan:
    """Return the plan of a model that is sharded already as `shard_plan` would: with modules that give parts.

    Args:
        model: A model that `wrap_outputs` was called for, or a copy of one.
        plan: What `ipex_llm.arch.detect.match` finds in it.

    Returns:
        The plan; as it came if the model is not sharded.
    """
    parallel = record_of(model).parallel
    if parallel is None:
        return plan
    return dataclasses.replace(_mapped(plan, inner), parallel=parallel)


def _mapped(value: T, function: Callable[[nn.Module], nn.Module]) -> T:
    """Return a plan with other modules."""
    if isinstance(value, nn.Module):
        return function(value)  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(_mapped(one, function) for one in value)  # type: ignore[return-value]
    if isinstance(value, TensorParallel) or not dataclasses.is_dataclass(value):
        return value
    changes = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name)
        new = _mapped(old, function)
        if new is not old:
            changes[field.name] = new
    return dataclasses.replace(value, **changes) if changes else value  # type: ignore[type-var]
