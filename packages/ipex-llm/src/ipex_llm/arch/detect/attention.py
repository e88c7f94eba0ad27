# SPDX-License-Identifier: Apache-2.0
"""Attention of a layer: found by the names of its projections, settled by its numbers.

What names and configuration leave open (the layout of a fused projection, how heads are rotated, the scale, ...) is
tried out: of the candidates that one is taken which gives what the layer gave.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ipex_llm.arch import (
    AttentionPlan,
    DifferencePlan,
    ExpertsPlan,
    KeyBiasPlan,
    LinearPlan,
    MlpPlan,
    NormPlan,
    PicturePlan,
    RopePlan,
    TemperaturePlan,
)
from ipex_llm.arch.detect.parts import (
    added_by,
    is_mixture,
    linear_plan,
    match_feed_forward,
    match_norm,
    match_ropes,
    norms_of,
    router_of,
    stacked_weights,
    top_k_of,
    with_factor,
)
from ipex_llm.arch.detect.trace import (
    LENGTH,
    Config,
    Trace,
    convolved,
    distance,
    is_norm,
    learned_factors,
    linears,
    match_near,
    same,
    settle,
    settled,
    tolerance,
)
from ipex_llm.arch.reference import (
    attend,
    look,
    query_factors,
    run_attention,
    run_picture,
    with_shared_rows,
)

Opening = Literal["sigmoid", "softplus"]

ATTENTION_NAMES = ("self_attn", "self_attention", "attention", "attn", "norm_attn_norm")
GATE = re.compile(r"^(g(ate)?|r)_proj$")  # beside the three (AFMoE, LFM3, Inkling)
PARTS = {"q": r"^w?q(uery)?(_|$)", "k": r"^w?k(ey)?(_|$)", "v": r"^w?v(alue)?(_|$)"}


def find_attention(layer: nn.Module) -> nn.Module | None:
    """Return the module of a layer that is its self attention."""
    for name in ATTENTION_NAMES:
        child = getattr(layer, name, None)
        if isinstance(child, nn.Module):
            # Some keep it one level deeper.
            return find_attention(child) or child
    for name in ("mixer", "temporal_block"):  # of any kind
        child = getattr(layer, name, None)
        if isinstance(child, nn.Module) and all(
            any(re.search(part, name) for name, _ in child.named_children())
            for part in PARTS.values()
        ):
            return child
    return None


def kind_of(config: Config, index: int) -> str | None:
    """Return the kind of a layer by the configuration, or None."""
    kinds = config.get("layer_types")
    return kinds[index] if kinds is not None and index < len(kinds) else None


def window_of(config: Config, attention: nn.Module, index: int) -> int:
    """Return how many keys to the left a layer sees, the own one not counted; -1: all."""
    kind, window = kind_of(config, index), config.get("sliding_window")
    if kind is not None:
        if kind not in ("sliding_attention", "hybrid_sliding"):
            return -1
    elif getattr(attention, "attention_type", None) in ("local", "global"):  # GPT-Neo
        window = config.get("window_size") if attention.attention_type == "local" else None
    elif hasattr(attention, "is_sliding"):
        if not attention.is_sliding:
            return -1
    elif config.get("use_sliding_window") is False or (
        config.get("use_sliding_window") and index < int(config.get("max_window_layers", default=0))
    ):
        return -1
    elif hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    return -1 if not window else int(window) - 1


def keys_of_indexer(indexer: Any) -> int:
    """Return up to how many keys an indexer chooses all, 0 if not known; MiniMax M3's and Qwen 4's choose blocks."""
    blocks = getattr(indexer, "topk_blocks", 0) * getattr(indexer, "block_size", 0)
    blocks = blocks or getattr(indexer, "token_budget", 0)
    most = getattr(indexer, "index_topk", blocks)
    return most * getattr(indexer, "compress_rate", 1) if isinstance(most, int) else 0


def own_linears(trace: Trace, attention: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return names and linear layers of an attention but for an indexer, which chooses keys (DeepSeek V3.2).

    Raises:
        MatchError: It is not known up to how many keys the indexer chooses all.
    """
    found = getattr(attention, "indexer", None)
    if not isinstance(found, nn.Module):
        return list(linears(attention, trace))
    if keys_of_indexer(found) < LENGTH:
        raise trace.error(attention, "has an indexer, which chooses the keys of each query")
    inside = set(found.modules())
    return [(name, m) for name, m in linears(attention, trace) if m not in inside]


def _projections(
    trace: Trace, attention: nn.Module
) -> tuple[list[tuple[str, nn.Module]], nn.Module]:
    """Return the layers that read what the attention reads, and the one behind it."""
    found = own_linears(trace, attention)
    if not found:
        raise trace.error(attention, "has no linear layers that ran")
    # The order of registration says nothing (Phi-3: the output first).
    source = trace.inputs.get(attention)
    if source is None or not any(same(trace.input(m), source) for _, m in found):
        source = trace.input(found[0][1])
    inner = [item for item in found if same(trace.input(item[1]), source)]
    outer = [item for item in found if not same(trace.input(item[1]), source)]
    given = [trace.output(m) for _, m in inner]
    outer = [  # what reads the values makes a bias of keys
        item for item in outer if not any(same(trace.input(item[1]), one) for one in given)
    ]
    gates = sum(bool(GATE.match(name)) for name, _ in inner)
    both = gates == 0 and len(inner) == 2  # the keys are the values, too
    if len(outer) != 1 or not (both or len(inner) in (1, 3, 3 + gates)):
        names = ", ".join(name for name, _ in found)
        raise trace.error(
            attention, f"has linear layers ({names}) that are not projections to q, k, v and out"
        )
    return inner, outer[0][1]


def _order_parts(
    trace: Trace, attention: nn.Module, inner: list[tuple[str, nn.Module]]
) -> list[nn.Module]:
    if len(inner) == 1:
        return [inner[0][1]]
    parts = []
    for part, pattern in PARTS.items():
        if part == "v" and len(inner) == 2:
            break
        matching = [m for name, m in inner if re.search(pattern, name.split(".")[-1])]
        if len(matching) != 1:
            names = ", ".join(name for name, _ in inner)
            raise trace.error(attention, f"has projections whose part is not clear: {names}")
        parts.append(matching[0])
    return [*parts, *(m for name, m in inner if GATE.match(name))]


def head_dim_of(config: Config, attention: nn.Module, width: int) -> int:
    """Return the features of a head of an attention that makes `width` of them."""
    for owner in (attention, *attention.children()):
        for name in (
            "head_dim",
            "head_size",
            "hidden_size_per_attention_head",
            "attention_head_size",
        ):
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0 and width % value == 0:
                return value
    value = config.get("head_dim", "kv_channels")
    if value and width % int(value) == 0:
        return int(value)
    heads = int(config.get("num_attention_heads", "n_head", "n_heads", "num_heads", default=1))
    return width // heads


def _layouts(heads: int, kv_heads: int, width: int) -> Iterator[Tensor | None]:
    """Yield orders of the rows of a fused projection, the likeliest first."""
    yield None
    total = heads + 2 * kv_heads
    group = heads // kv_heads
    index = torch.arange(total * width)
    if kv_heads > 1:
        # For each key head: its query heads, the key, the value.
        parts = index.view(kv_heads, group + 2, width)
        yield torch.cat(
            [parts[:, :group].flatten(), parts[:, -2].flatten(), parts[:, -1].flatten()]
        )
    if heads == kv_heads and heads % 4 == 0:
        # Four blocks of queries, values, keys (CodeGen).
        blocks = index.view(4, 3, -1)
        yield torch.cat([blocks[:, 0].flatten(), blocks[:, 2].flatten(), blocks[:, 1].flatten()])
        blocks = index.view(4, 3, -1)
        yield blocks.transpose(0, 1).flatten()


def _slopes(heads: int, most: float = 8.0) -> Tensor:
    """Return ALiBi's slopes: a geometric series, filled up with every other one of the next finer series."""
    power = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-most * (i + 1) / power) for i in range(power)]
    rest = [2.0 ** (-most * (2 * i + 1) / (2 * power)) for i in range(heads - power)]
    return torch.tensor(first + rest)


def scales_of(config: Config, attention: nn.Module, width: int, index: int) -> list[float]:
    """Return the factors on scores that an attention may have, the likeliest first."""
    found: list[float] = []
    for name in ("scaling", "softmax_scale", "inv_norm_factor", "norm_factor", "scale"):
        value = getattr(attention, name, None)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = float(value)
        if isinstance(value, (int, float)) and value > 0:
            found += [float(value), 1.0 / float(value)]
    value = config.get("query_pre_attn_scalar")
    if value:
        found.append(float(value) ** -0.5)
    found += [float(config.get("attention_multiplier", default=1.0)), width**-0.5]
    found.append(width**-0.5 / (index + 1))  # GPT-2's option
    return list(dict.fromkeys(found))


def _norms(
    trace: Trace, attention: nn.Module, head_dim: int, behind: nn.Module | None = None
) -> tuple[NormPlan | None, NormPlan | None, NormPlan | None, str]:
    """Return the norms of queries, keys and values, and what the former two go over; not `behind`."""
    found: dict[str, nn.Module] = {}
    for name, module in attention.named_modules():
        leaf = name.split(".")[-1]
        if not is_norm(module) or not trace.ran(module) or "." in name or module is behind:
            continue
        if leaf.startswith("qk"):
            found["q"] = found["k"] = module
        elif leaf.startswith(("q", "k", "v")):
            found[leaf[0]] = module
        else:
            raise trace.error(module, "is a norm within attention that is not one of q, k or v")
    if not found:
        return None, None, None, "head"
    query, key, value = (match_norm(trace, found[n]) if n in found else None for n in "qkv")
    if value is not None and trace.inputs[found["v"]].shape[-1] != head_dim:
        raise trace.error(found["v"], "is a norm of values that goes over more than one head")
    first = next(iter(found.values()))
    over = "head" if trace.inputs[first].shape[-1] == head_dim else "all"
    return query, key, value, over


def number_of(config: Config, attention: nn.Module, *names: str) -> float | None:
    for owner in (attention, config.raw, config.get("attn_config")):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
                return float(value)
    return None


def _gate_bias(attention: nn.Module, heads: int) -> tuple[nn.Module, str] | None:
    """Return the parameter of an attention that is added to the gates of a head (Beam), or None."""
    own = attention.named_parameters(recurse=False)
    names = [n for n, p in own if n.startswith("gate") and list(p.shape) == [heads]]
    return (attention, names[0]) if len(names) == 1 else None


def sinks_of(attention: nn.Module) -> Tensor | None:
    found = getattr(attention, "sinks", None)
    return found if isinstance(found, Tensor) else None


def _softcap(config: Config, attention: nn.Module) -> float:
    """Return the soft cap of scores, or -1."""
    if getattr(config.raw, "_attn_implementation", None) == "sdpa":
        return -1.0  # it has none: until 5.18 transformers left the cap out without a word, since then it refuses
    return number_of(config, attention, "attn_logit_softcapping") or -1.0


def match_attention(
    trace: Trace,
    config: Config,
    decoder: nn.Module,
    attention: nn.Module,
    index: int,
    hint: list[AttentionPlan],
    earlier: Mapping[int, AttentionPlan] | None = None,
) -> AttentionPlan:
    """Return the plan of the attention of layer `index`.

    Args:
        trace: The observed forward.
        config: Of the decoder.
        decoder: The module that has the layers.
        attention: The module.
        index: Of the layer.
        hint: Plans of layers before; their settings are tried first.
        earlier: Plans of all layers before that have keys and values of their own, by index.

    Raises:
        MatchError: Projections are not understood, or no candidate gives what the module gave.
    """
    inner, output = _projections(trace, attention)
    parts = _order_parts(trace, attention, inner)
    expected = trace.inputs[output]
    width = expected.shape[-1]
    norms = [m for m in attention.children() if is_norm(m) and trace.ran(m)]
    behind = next((m for m in norms if same(trace.outputs[m], expected)), None)
    if behind is not None:
        expected = trace.inputs[behind]
    difference = _difference(trace, attention, norms)
    behind = behind if difference is None else difference.norm.module
    found = _narrow_values(trace, config, attention, parts, width)
    head_dim = found.head_dim if found else head_dim_of(config, attention, width)
    heads = width // (found.value_dim if found else head_dim)
    if len(parts) == 1 and trace.output(parts[0]).shape[-1] == width:
        return _match_shared(trace, attention, parts[0], output, head_dim, earlier or {})
    given = [trace.output(part) for part in parts]
    near = match_near(trace, attention, given[3]) if len(parts) == 4 else None
    convs: tuple[nn.Module, ...] = ()
    if near is not None:
        first, last = (convolved(trace, attention, one) for one in given[1:3])
        convs = (*first[0], *last[0])
        given[1:3] = first[1], last[1]
        if len(convs) != 2:
            raise trace.error(attention, "has keys or values without a short convolution")
    qkv = torch.cat(given, dim=-1)
    # A gate may have a projection of its own, or be what the queries' gives beside each head (Qwen3-Next).
    beside = len(parts) == 4 and near is None
    gates = trace.output(parts[3]).shape[-1] if beside else 0
    if len(parts) == 3 and trace.output(parts[0]).shape[-1] == 2 * width and not found:
        gates = width
    gated = kind_of_gates(trace, attention, gates, heads, width)
    alone = len(parts) == 2  # no rows of values
    rows = qkv.shape[-1] if found is None else len(found.order)
    others = gates if near is None else given[3].shape[-1]
    rest, odd = divmod(rows - heads * head_dim - others, (1 if alone else 2) * head_dim)
    if odd or rest < 1 or heads % rest:
        raise trace.error(
            attention, f"{qkv.shape[-1]} rows of q, k and v do not make {heads} heads"
        )
    multiplier = getattr(attention, "key_multiplier", None)
    projection = linear_plan(*parts)
    if isinstance(multiplier, float) and len(parts) == 3 and not gated:
        keys = torch.ones(qkv.shape[-1])
        keys[width : width + rest * head_dim] = multiplier
        projection = with_factor(projection, keys)
        qkv = qkv * keys.to(qkv)
    shares = learned_factors(attention, "gate$", width) if gated == "features" else None
    if shares is not None:
        shares = torch.cat([shares.new_ones(qkv.shape[-1] - width), shares.square()])
        qkv, projection = qkv * shares, with_factor(projection, shares.cpu())
    if found is not None:
        qkv = qkv * found.factors.to(qkv)
        factors = found.factors[found.order]
        plain = bool((factors == 1.0).all())
        projection = dataclasses.replace(
            projection, order=found.order, factors=None if plain else factors
        )
    kind = kind_of(config, index)
    query_norm, key_norm, value_norm, over = _norms(trace, attention, head_dim, behind)
    if alone and (key_norm is None or value_norm is None):
        raise trace.error(attention, "has no projection to values, and no norms of keys and values")
    bias = None
    for _, module in own_linears(trace, attention):
        if len(parts) == 3 and same(trace.input(module), trace.output(parts[2])):
            rates = [n for n, p in attention.named_parameters(recurse=False) if p.numel() == rest]
            if len(rates) != 1:
                raise trace.error(module, "makes something of values that is not understood")
            bias = KeyBiasPlan(linear_plan(module), attention, rates[0])
    scales = learned_factors(attention, "qk", width)
    base = AttentionPlan(
        projection,
        linear_plan(output),
        heads,
        rest,
        head_dim,
        head_dim**-0.5,
        query_norm=query_norm,
        key_norm=key_norm,
        norm_over=over,  # type: ignore[arg-type]
        window=window_of(config, attention, index),
        softcap=_softcap(config, attention),
        sinks=sinks_of(attention),
        clip_qkv=number_of(config, attention, "clip_qkv"),
        gated=gated,
        gate_bias=_gate_bias(attention, heads) if gated else None,
        value_norm=value_norm,
        keys_as_values=alone,
        output_norm=None if behind is None or difference else match_norm(trace, behind),
        query_factors=None if scales is None else scales.square().cpu().view(heads, head_dim),
        value_dim=None if found is None else found.value_dim,
        key_bias=bias,
        difference=difference,
        near=near,
    )
    ropes: list[RopePlan | None] = [
        *match_ropes(trace, config, decoder, attention, kind, head_dim),
        None,
    ]
    plan = _settle(trace, config, attention, base, ropes, qkv, expected, index, hint)
    tuned = plan.rope is None and getattr(attention, "attn_temperature_tuning", False)
    if tuned and plan.temperature is None:
        raise trace.error(attention, "scales queries by position in an unknown way")
    return dataclasses.replace(plan, convs=convs)  # `qkv` has what they give


def _difference(
    trace: Trace, attention: nn.Module, norms: list[nn.Module]
) -> DifferencePlan | None:
    """Return how an attention takes one half of its heads from the other (DiffLlama), or None."""
    names = [n for n, _ in attention.named_parameters(recurse=False) if n.startswith("lambda")]
    start = getattr(attention, "lambda_init", None)
    if len(names) != 4 or len(norms) != 1 or not isinstance(start, float):
        return None
    first, second, third, fourth = names
    norm = match_norm(trace, norms[0])
    return DifferencePlan(attention, (first, second, third, fourth), start, norm)


@dataclasses.dataclass(frozen=True, slots=True)
class _NarrowValues:
    """Heads whose values are narrower than their keys.

    Attributes:
        head_dim: Width of keys.
        value_dim: Width of values.
        order: Rows of queries, of keys, of values as wide as keys, and of gates; rows of values come more than once.
        factors: float32, of the rows as they are.
    """

    head_dim: int
    value_dim: int
    order: Tensor
    factors: Tensor


def _narrow_values(
    trace: Trace, config: Config, attention: nn.Module, parts: list[nn.Module], width: int
) -> _NarrowValues | None:
    """Return the widths of heads if values are narrower than keys (MiMo V2), or None."""
    value_dim = getattr(attention, "v_head_dim", None) or config.get("v_head_dim")
    if not isinstance(value_dim, int) or len(parts) not in (3, 4) or width % value_dim:
        return None
    sizes = [trace.output(part).shape[-1] for part in parts]
    heads, kv = width // value_dim, sizes[2] // value_dim
    head_dim = sizes[0] // heads
    if not value_dim < head_dim < 2 * value_dim or sizes[:3] != [
        heads * head_dim,
        kv * head_dim,
        kv * value_dim,
    ]:
        return None
    first = sizes[0] + sizes[1]
    values = first + torch.arange(sizes[2]).view(kv, value_dim)
    values = torch.cat([values, values[:, : head_dim - value_dim]], dim=1)
    last = torch.arange(first + sizes[2], sum(sizes))
    factors = torch.ones(sum(sizes))
    factors[first : first + sizes[2]] = float(getattr(attention, "v_scale", 1.0))
    order = torch.cat([torch.arange(first), values.flatten(), last])
    return _NarrowValues(head_dim, value_dim, order, factors)


def kind_of_gates(
    trace: Trace, attention: nn.Module, gates: int, heads: int, width: int
) -> Literal["", "features", "heads"]:
    """Return what each of some gates multiplies.

    Raises:
        MatchError: There are as many as neither heads nor features.
    """
    if gates == 0:
        return ""
    if gates not in (heads, width):
        raise trace.error(attention, f"has {gates} gates for {heads} heads of {width // heads}")
    return "heads" if gates == heads else "features"


def _match_shared(
    trace: Trace,
    attention: nn.Module,
    part: nn.Module,
    output: nn.Module,
    head_dim: int,
    earlier: Mapping[int, AttentionPlan],
) -> AttentionPlan:
    """Return the plan of an attention that has queries alone and reads the keys and values of a layer before.

    Raises:
        MatchError: There is no layer whose keys and values give what the module gave.
    """
    expected = trace.input(output)
    query_norm = _norms(trace, attention, head_dim)[0]
    queries = trace.output(part)
    heads = queries.shape[-1] // head_dim
    rows: dict[int, Tensor] = {}

    def candidates() -> Iterator[AttentionPlan]:
        for index in sorted(earlier, reverse=True):
            old = earlier[index]
            plain = (
                old.latent is None
                and not old.gated
                and old.qkv.order is None
                and old.qkv.factors is None
                and len(old.qkv.modules) > 1
                and (old.norm_over, old.norm_after_rope) == ("head", False)
                and old.clip_qkv is None
                and old.temperature is None
                and (old.alibi_slopes is None and old.sinks is None and old.output_norm is None)
            )
            if not plain or old.head_dim != head_dim or heads % old.kv_heads:
                continue
            rows[index] = torch.cat([trace.output(m) for m in old.qkv.modules], dim=-1)
            yield dataclasses.replace(
                old,
                qkv=linear_plan(part),
                output=linear_plan(output),
                heads=heads,
                query_norm=query_norm,
                source=index,
            )

    def error(plan: AttentionPlan) -> float:
        return distance(attend(plan, with_shared_rows(plan, queries, rows)), expected)

    found = settle(candidates(), error, expected)
    plan, off = found
    if plan is None:
        raise trace.error(
            attention,
            f"has queries alone, and no layer before has its keys and values (off by {off:.1e})",
        )
    return plan


def _gates_last(plan: AttentionPlan) -> Tensor:
    """Return the order of rows in which the gate of each head of queries is behind all values."""
    width = plan.heads * plan.head_dim
    heads = torch.arange(2 * width).view(plan.heads, 2, plan.head_dim)
    rest = torch.arange(2 * width, 2 * width + 2 * plan.kv_heads * plan.head_dim)
    return torch.cat([heads[:, 0].flatten(), rest, heads[:, 1].flatten()])


def temperature_of(
    trace: Trace, config: Config, attention: nn.Module, rotated: bool
) -> TemperaturePlan | None:
    """Return the factor that layers with or without rotation have on queries.

    Raises:
        MatchError: The attention is given factors of tokens that are not known.
    """
    given = trace.factors.get(attention)
    if given is not None:
        plan = TemperaturePlan(0.1, 2048.0, 1.0, True)
        wanted = query_factors(torch.arange(len(given)), plan).to(given) - 1.0
        if distance(given - 1.0, wanted) > tolerance(given):
            raise trace.error(attention, "is given factors of tokens that are not known")
        return plan
    if rotated:
        rope = config.get("rope_parameters", default={})
        names = ("llama_4_scaling_beta", "original_max_position_embeddings")
        beta, most = (rope.get(name) if isinstance(rope, Mapping) else None for name in names)
        return TemperaturePlan(float(beta), float(most), 0.0) if beta and most else None
    names = ("log_scaling_alpha", "log_scaling_n_floor")
    scale, floor = (number_of(config, attention, name) for name in names)
    if scale and floor and not getattr(attention, "is_sliding", False):
        return TemperaturePlan(scale, floor, 1.0, smooth=True)
    if not getattr(attention, "attn_temperature_tuning", False):
        return None
    scale, floor = (number_of(config, attention, name) for name in ("attn_scale", "floor_scale"))
    return None if scale is None or floor is None else TemperaturePlan(scale, floor, 1.0)


def _settle(
    trace: Trace,
    config: Config,
    attention: nn.Module,
    base: AttentionPlan,
    ropes: list[RopePlan | None],
    qkv: Tensor,
    expected: Tensor,
    index: int,
    hint: list[AttentionPlan],
) -> AttentionPlan:
    """Return the candidate that gives what the module gave."""
    fused = len(base.qkv.modules) == 1
    layouts: list[Tensor | None] = [None]
    if base.gated and len(base.qkv.modules) == 3:
        layouts = [_gates_last(base)]
    elif fused:
        layouts = list(_layouts(base.heads, base.kv_heads, base.head_dim))
    scales = scales_of(config, attention, base.head_dim, index)
    after = [False, True] if base.query_norm is not None else [False]
    most = getattr(config.get("attn_config"), "alibi_bias_max", None) or 8.0
    slopes = _slopes(base.heads, float(most))
    temperatures = [temperature_of(trace, config, attention, rotated) for rotated in (False, True)]
    if base.value_dim is not None:
        layouts = [base.qkv.order]
        hint = [old for old in hint if old.qkv.order is not None]
    openings: tuple[Opening, ...] = ("sigmoid", "softplus") if base.gated else ("sigmoid",)

    def candidates() -> Iterator[AttentionPlan]:
        for old in hint:
            yield dataclasses.replace(
                base,
                qkv=base.qkv
                if base.value_dim is not None
                else dataclasses.replace(base.qkv, order=old.qkv.order),
                opening=old.opening,
                rope=old.rope,
                scale=old.scale,
                alibi_slopes=old.alibi_slopes,
                norm_after_rope=old.norm_after_rope,
                temperature=temperatures[old.rope is not None],
            )
        for opening, order, late, rope, scale in itertools.product(
            openings, layouts, after, ropes, scales
        ):
            plan = dataclasses.replace(
                base,
                qkv=dataclasses.replace(base.qkv, order=order),
                opening=opening,
                rope=rope,
                scale=scale,
                norm_after_rope=late,
                temperature=temperatures[rope is not None],  # shows at later positions only
            )
            yield plan
            if rope is None:
                yield dataclasses.replace(plan, alibi_slopes=slopes)
                yield dataclasses.replace(plan, alibi_slopes=slopes * scale)

    def error(plan: AttentionPlan) -> float:
        if plan.rope is not None and plan.rope not in ropes:
            return float("inf")  # of another kind of layer
        order: Any = plan.qkv.order
        rows = qkv if order is None else qkv[..., order.to(qkv.device)]
        return distance(attend(plan, rows), expected)

    plan = settled(trace, attention, candidates(), error, expected, sure=len(hint))
    return plan


def reads_picture(trace: Trace, layer: nn.Module) -> bool:
    """Return whether a layer attends to the rows of a picture."""
    block = getattr(layer, "cross_attn", None)
    return isinstance(block, nn.Module) and trace.ran(layer)


def match_picture(trace: Trace, config: Config, layer: nn.Module) -> PicturePlan:
    """Return the plan of a layer that reads a picture.

    Raises:
        MatchError: A part is not understood.
    """
    block = layer.get_submodule("cross_attn")
    found = dict(linears(block, trace))
    parts = [
        [m for name, m in found.items() if re.search(pattern, name)] for pattern in PARTS.values()
    ]
    others = [m for m in found.values() if not any(m in part for part in parts)]
    gates = [n for n, p in layer.named_parameters(recurse=False) if p.numel() == 1]
    if [*map(len, parts), len(others), len(gates)] != [1, 1, 1, 1, 2]:
        names = ", ".join((*found, *gates))
        raise trace.error(layer, f"has not the parts of a layer that reads a picture ({names})")
    (query,), (key,), (value,) = parts
    mlp, mlp_in, _ = match_feed_forward(trace, config, layer)
    norms = norms_of(trace, layer)
    first, second = (
        next((n for n in norms if same(trace.outputs[n], x)), None)
        for x in (trace.input(query), mlp_in)
    )
    if first is None or second is None or len(norms) != 2 or not isinstance(mlp, MlpPlan):
        raise trace.error(layer, "has not a norm before each of two dense blocks")
    width, rows = trace.output(query).shape[-1], trace.input(key)
    size = head_dim_of(config, block, width)
    query_norm, key_norm, _, _ = _norms(trace, block, size)
    base = PicturePlan(
        module=layer,
        norm=match_norm(trace, first),
        query=linear_plan(query),
        key_value=linear_plan(key, value),
        output=linear_plan(others[0]),
        heads=width // size,
        kv_heads=trace.output(key).shape[-1] // size,
        head_dim=size,
        scale=size**-0.5,
        query_norm=query_norm,
        key_norm=key_norm,
        mlp_norm=match_norm(trace, second),
        mlp=mlp,
        gates=(gates[0], gates[1]),
    )
    both = torch.cat([trace.output(key), trace.output(value)], dim=-1)
    expected = trace.input(others[0])

    def candidates() -> Iterator[tuple[PicturePlan, bool]]:
        for scale in scales_of(config, block, size, 0):
            yield from (
                (dataclasses.replace(base, scale=scale), causal) for causal in (True, False)
            )

    def error(one: tuple[PicturePlan, bool]) -> float:
        return distance(look(one[0], trace.output(query), both, one[1]), expected)

    plan, causal = settled(trace, block, candidates(), error, expected)
    h, wanted = trace.input(layer).float(), trace.output(layer)
    for order in (plan.gates, plan.gates[::-1]):
        own = dataclasses.replace(plan, gates=order)
        if distance(run_picture(own, h, rows.float(), causal), wanted) <= tolerance(wanted):
            return own
    raise trace.error(layer, "adds its blocks in a way that is not understood")


# --- projections that are experts: queries from them, and what they make of what these attend to (JetMoE) ------------


def has_head_experts(attention: nn.Module) -> bool:
    """Return whether the projections of an attention are experts."""
    block = getattr(attention, "experts", None)
    return isinstance(block, nn.Module) and is_mixture(block)


def match_head_experts(
    trace: Trace, config: Config, decoder: nn.Module, attention: nn.Module, index: int
) -> AttentionPlan:
    """Return the plan of the attention of layer `index`.

    Raises:
        MatchError: A part is not understood, or no candidate gives what the module gave.
    """
    block = attention.get_submodule("experts")
    x, expected = trace.input(attention), trace.output(attention)
    inside = set(block.modules())
    others = [m for _, m in linears(attention, trace) if m not in inside]
    if len(others) != 1 or not same(trace.input(others[0]), x):
        raise trace.error(attention, "has experts, and not one projection to keys and values")
    first, last = stacked_weights(block)
    hidden = x.shape[-1]
    if first is None or last is None or list(first.shape) != [*last.shape[:1], *last.shape[:0:-1]]:
        raise trace.error(block, "has no weights to queries, and from what these attend to")
    experts, width = first.shape[:2]
    head_dim = head_dim_of(config, attention, width)
    kv_heads, odd = divmod(width, head_dim)
    if odd or trace.output(others[0]).shape[-1] != 2 * width:
        raise trace.error(attention, f"has no key and value for each of {kv_heads} heads")
    router = router_of(trace, block, experts, hidden)
    outer = getattr(block, "router", router)
    top_k = top_k_of(trace, block, [router, outer, block, config.raw])
    mixture = ExpertsPlan(
        router=router,
        router_weight=router.weight,  # type: ignore[arg-type]
        router_bias=getattr(router, "bias", None),
        module=block,
        gate_up=first,
        down=last,
        transposed=False,
        interleaved=False,
        gate_up_bias=None,
        down_bias=None,
        experts=experts,
        top_k=top_k,
        intermediate_size=width,
        activation="none",
        scoring="softmax",
        renormalize=True,
        gated=False,
        added=added_by(block, hidden),
    )
    kind = kind_of(config, index)
    base = AttentionPlan(
        linear_plan(others[0]),
        LinearPlan(()),
        top_k * kv_heads,
        kv_heads,
        head_dim,
        head_dim**-0.5,
        window=window_of(config, attention, index),
        experts=mixture,
    )
    ropes = [*match_ropes(trace, config, decoder, attention, kind, head_dim), None]

    def candidates() -> Iterator[AttentionPlan]:
        scales = scales_of(config, attention, head_dim, index)
        for rope, scale, again in itertools.product(ropes, scales, (True, False)):
            own = dataclasses.replace(mixture, renormalize=again)
            yield dataclasses.replace(base, rope=rope, scale=scale, experts=own)

    def error(plan: AttentionPlan) -> float:
        return distance(run_attention(plan, x), expected)

    return settled(trace, attention, candidates(), error, expected)
