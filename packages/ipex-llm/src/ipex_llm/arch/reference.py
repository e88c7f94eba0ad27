# SPDX-License-Identifier: Apache-2.0
"""Runs a plan in plain PyTorch: what each value of `ipex_llm.arch` means, and the proof that a plan fits a model.

No cache, no fusion, everything in float32; slow on purpose.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ipex_core  # noqa: F401  (registers the ops)
from ipex_llm.arch import (
    AttentionPlan,
    CellPlan,
    ConvPlan,
    DecayPlan,
    DecoderPlan,
    DeltaPlan,
    ExpertsPlan,
    HeadBlockPlan,
    KeyBiasPlan,
    LatentPlan,
    LayerMeansPlan,
    LayerPlan,
    LinearPlan,
    LruPlan,
    MeansPlan,
    MixerPlan,
    MlpPlan,
    NormPlan,
    PicturePlan,
    ScanPlan,
    SelectivePlan,
    ShiftPlan,
    SidePlan,
    TemperaturePlan,
    TokenBlockPlan,
    TokenRowsPlan,
    WkvPlan,
)
from ipex_llm.arch.formulas import (
    activate,
    activate_inner,
    add_convolved,
    add_message,
    add_ngrams,
    add_to_streams,
    apart_rows,
    bias_of,
    choice_bias,
    close_streams,
    combine_gate,
    connect,
    correct_streams,
    cut_gate,
    gains_of,
    mean_rows,
    ngram_rows,
    open_streams,
    per_head,
    position_rows,
    predict_streams,
    rotate,
    run_linear,
    run_norm,
    turned,
    weight_scale,
    window_rows,
)
from ipex_llm.arch.parts import SharedRowPlan


def _head_norm(plan: AttentionPlan, norm: NormPlan | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    return (
        run_norm(norm, x) if plan.norm_over == "head" else run_norm(norm, x.flatten(-2)).view_as(x)
    )


def query_factors(positions: Tensor, plan: TemperaturePlan) -> Tensor:
    """Return the factor on the queries of each position, float32."""
    units = (positions.float() + plan.shift) / plan.unit
    if plan.smooth:
        return 1.0 + plan.scale * torch.log(units.clamp_min(1.0))
    if plan.power:
        return torch.exp(plan.scale * torch.log1p(units))
    return 1.0 + plan.scale * torch.log1p(torch.floor(units))


_OPENINGS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
}


def attend(plan: AttentionPlan, qkv: Tensor) -> Tensor:
    """Return the input of the output projection, ``[T, heads * head_dim]``, for the rows ``[T, ...]`` of `plan.qkv`."""
    qkv = qkv.float()
    if plan.clip_qkv is not None:
        qkv = qkv.clamp(-plan.clip_qkv, plan.clip_qkv)
    if plan.shared is not None:
        return _attend_to_rows(plan, plan.shared, qkv)
    latent = plan.latent
    if latent is not None and latent.doubled:  # as if `qkv` gave queries and gates
        assert latent.query is not None
        low, rest = qkv.tensor_split([-latent.rank - latent.common], dim=-1)
        both = torch.cat([run_norm(latent.query_norm, low), low], dim=-1)
        parts = run_linear(latent.query, both).tensor_split([plan.heads * plan.head_dim], dim=-1)
        bare = dataclasses.replace(latent, query=None, query_norm=None, doubled=False)
        return attend(
            dataclasses.replace(plan, latent=bare), torch.cat([parts[0], rest, parts[1]], dim=-1)
        )
    if plan.gated:
        qkv, gates = qkv.split([qkv.shape[-1] - plan.gates, plan.gates], dim=-1)
        attended = attend(dataclasses.replace(plan, gated="", clip_qkv=None), qkv)
        gates = gates.unflatten(-1, (plan.heads, -1))
        if plan.gate_bias is not None:
            gates = gates + per_head(*plan.gate_bias).unsqueeze(-1)
        opened = _OPENINGS[plan.opening](gates)
        return (attended.unflatten(-1, (plan.heads, -1)) * opened).flatten(1)
    if latent is not None:
        query, key, value = _from_latent(plan, latent, qkv)
        return _weigh(plan, query, key, value)
    length, width = qkv.shape[0], plan.head_dim
    near = None
    if plan.near is not None:
        first, kv, last = qkv.tensor_split(
            [plan.heads * width, (plan.heads + 2 * plan.kv_heads) * width], dim=-1
        )
        near = last.unflatten(-1, (plan.heads, -1)) @ plan.near.rows.float().t()
        qkv = torch.cat([first, add_convolved(plan.convs, kv)], dim=-1)
    if plan.keys_as_values:
        qkv = torch.cat([qkv, qkv[:, plan.heads * width :]], dim=-1)
    heads = qkv.reshape(length, plan.heads + 2 * plan.kv_heads, width)
    query, key, value = heads.split([plan.heads, plan.kv_heads, plan.kv_heads], dim=1)
    bias = None if plan.key_bias is None else key_bias(plan.key_bias, value.flatten(1))
    value = run_norm(plan.value_norm, value)[..., : plan.value_dim]
    if not plan.norm_after_rope:
        query, key = _head_norm(plan, plan.query_norm, query), _head_norm(plan, plan.key_norm, key)
    if plan.rope is not None:
        query, key = rotate(plan.rope, query), rotate(plan.rope, key)
    if plan.norm_after_rope:
        query, key = _head_norm(plan, plan.query_norm, query), _head_norm(plan, plan.key_norm, key)
    if plan.temperature is not None:
        factors = query_factors(torch.arange(length, device=qkv.device), plan.temperature)
        query = query * factors.view(-1, 1, 1)
        near = None if near is None else near * factors.view(-1, 1, 1)
    if plan.query_factors is not None:
        query = query * plan.query_factors
    if near is not None:
        bias = near
    if plan.difference is None:
        return _weigh(plan, query, key, value, bias)
    own = plan.difference
    found = [
        _weigh(plan, query, key, half.repeat(1, 2, 1)).unflatten(-1, (plan.heads, -1))
        for half in value.chunk(2, dim=1)
    ]
    first, second = torch.cat(found, dim=-1).chunk(2, dim=1)
    return run_norm(own.norm, first - own.factor * second).flatten(1) * (1 - own.start)


def attend_apart(plan: AttentionPlan, *rows: Tensor) -> Tensor:
    """Return the input of the output projection for rows of queries, of keys and of values; see `apart_rows`."""
    assert plan.near is not None
    query, key, value, near, sinks, gates = apart_rows(plan, *rows)
    if plan.temperature is not None:
        places = torch.arange(len(query), device=query.device)
        factors = query_factors(places, plan.temperature).view(-1, 1, 1)
        query, near = query * factors, near * factors
    numbers, own = near @ plan.near.rows.float().t(), dataclasses.replace(plan, sinks=sinks)
    return _weigh(own, query, key, value, numbers) * torch.sigmoid(gates)


def _run_means(layer: LayerPlan, streams: Tensor, parallel: Any, loop: dict[str, Tensor]) -> Tensor:
    """Run a layer whose blocks read means; `streams` are the stream and norms of earlier ones."""
    plan, a = layer.streams, layer.attention
    assert isinstance(plan, LayerMeansPlan) and isinstance(a, AttentionPlan) and a.apart
    if plan.loop == "again":
        start = loop["start"]
        loop["before"] = torch.cat([streams[:1], streams[len(start) + 1 :]])
        streams = start
    elif plan.loop:
        loop["start"] = streams
    h, known = streams[:1], streams[1:]
    x = (h if plan.attention is None else mean_rows(plan.attention, streams)).expand(3, -1, -1)
    if plan.messages is not None:
        sent, gates = mean_rows(plan.messages.means, loop["before"]), plan.messages.gates
        x = torch.stack([add_message(g, *pair) for g, *pair in zip(gates, x, sent, strict=False)])
    norms = layer.input_norm, *(a.apart.norms or (layer.input_norm, layer.input_norm))
    parts = a.qkv, a.apart.key, a.apart.value
    rows = (run_linear(p, run_norm(n, one)) for p, n, one in zip(parts, norms, x, strict=True))
    y = run_linear(a.output, attend_apart(a, *rows))
    y = add_convolved(layer.convs[:1], y, layer.conv_scale).unsqueeze(0)
    streams = torch.cat([y, known, run_norm(plan.mlp.norm, h)] if plan.begins else [h + y, known])
    row = mean_rows(plan.mlp, streams)[0]
    row = row if plan.messages is None else add_message(gates[3], row, sent[3])
    row = run_norm(layer.mlp_norm, row)
    y = _feed_forward(layer, row, row, parallel).unsqueeze(0)
    return torch.cat([streams[:1] + y, streams[1:]])


def key_bias(plan: KeyBiasPlan, values: Tensor) -> Tensor:
    """Return what is added to the scores of keys ``[T, kv_heads]``, for values of all heads ``[T, ...]``."""
    rate: Tensor = getattr(plan.module, plan.rate).detach().float()
    return torch.exp(rate * functional.softplus(run_linear(plan.linear, values)))


def _from_latent(
    plan: AttentionPlan, latent: LatentPlan, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys ``[T, heads, head_dim]`` and values ``[T, heads, value_dim]``."""
    length, plain = rows.shape[0], plan.head_dim - latent.common
    width = rows.shape[-1] - latent.rank - latent.common
    query, low, common = rows.split([width, latent.rank, latent.common], dim=-1)
    if latent.query is not None:
        query = run_linear(latent.query, run_norm(latent.query_norm, query))
    query = query.view(length, plan.heads, plan.head_dim)
    common = run_norm(latent.common_norm, common).unsqueeze(1)
    if plan.rope is not None:
        query = torch.cat([query[..., :plain], rotate(plan.rope, query[..., plain:])], dim=-1)
        common = rotate(plan.rope, common)
    low = run_norm(latent.norm, low) * latent.factor
    both = run_linear(LinearPlan((latent.up,)), low)
    both = both.view(length, plan.heads, plain + latent.value_dim)
    common = common.expand(-1, plan.heads, -1)
    return query, torch.cat([both[..., :plain], common], dim=-1), both[..., plain:]


def _attend_to_rows(plan: AttentionPlan, shared: SharedRowPlan, rows: Tensor) -> Tensor:
    turn, back = plan.ropes
    width, windows, last = plan.head_dim, shared.windows, shared.output.get_parameter("weight")
    first = int(shared.query_norm.module.get_parameter("weight").numel())
    low, key, both = rows.tensor_split([first, first + width], dim=-1)
    query = run_linear(shared.query, run_norm(shared.query_norm, low)).unflatten(-1, (-1, width))
    query = turned(turn, run_norm(plan.query_norm, query))
    key = turned(turn, run_norm(plan.key_norm, key).unsqueeze(1))
    if windows is not None:
        key = torch.cat([key, window_rows(windows, turn, both, width)])
    y = turned(back, _weigh(plan, query, key, key).unflatten(-1, (-1, width)))
    blocks = last.float().unflatten(0, (shared.groups, -1))
    return torch.einsum("tgi,goi->tgo", y.reshape(len(y), shared.groups, -1), blocks).flatten(1)


def _weigh(
    plan: AttentionPlan, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return the values weighted by the scores of queries and keys ``[T, heads, ...]``, ``[T, heads * value_dim]``."""
    length = query.shape[0]
    groups = plan.heads // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * plan.scale
    if plan.softcap > 0:
        scores = plan.softcap * torch.tanh(scores / plan.softcap)
    if plan.near is not None and bias is not None:
        last = torch.arange(length, device=query.device)
        places = last - last.unsqueeze(1) + bias.shape[-1] - 1
        found = bias.transpose(0, 1).gather(
            -1, places.clamp(0, bias.shape[-1] - 1).expand_as(scores)
        )
        scores = scores + found.masked_fill((places < 0) | (places >= bias.shape[-1]), 0.0)
    elif bias is not None:
        scores = scores + bias.t().repeat_interleave(groups, dim=0).unsqueeze(1)
    rows = torch.arange(length, device=query.device)
    distance = rows.unsqueeze(1) - rows  # how far key k lies to the left of query q
    if plan.alibi_slopes is not None:
        scores = scores - plan.alibi_slopes.to(scores).view(-1, 1, 1) * distance
    hidden = distance < 0
    if plan.window >= 0:
        hidden = hidden | (distance > plan.window)
    if plan.windows is not None:
        ends = plan.windows[0] * torch.arange(1, len(key) - length + 1, device=query.device)
        hidden = torch.cat([hidden, ends > rows.unsqueeze(1) + 1], dim=1)
    scores = scores.masked_fill(hidden, -math.inf)
    if plan.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = plan.sinks.float().expand(length, -1).t().unsqueeze(-1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def picture_rows(plan: PicturePlan, both: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values ``[..., kv_heads, head_dim]`` for what `plan.key_value` gives."""
    keys, values = both.unflatten(-1, (-1, plan.head_dim)).split(plan.kv_heads, dim=-2)
    return run_norm(plan.key_norm, keys), values


def look(plan: PicturePlan, query: Tensor, both: Tensor, causal: bool = False) -> Tensor:
    """Return the input of `plan.output`, for rows of `plan.query` ``[T, ...]`` and of `plan.key_value` ``[S, ...]``.

    `causal`: row t sees the first t + 1, as in stock models that are given no mask and attend by "sdpa".
    """
    q = run_norm(plan.query_norm, query.float().unflatten(-1, (plan.heads, -1)))
    groups = plan.heads // plan.kv_heads
    k, v = (one.repeat_interleave(groups, dim=1) for one in picture_rows(plan, both.float()))
    scores = torch.einsum("qhd,khd->hqk", q, k) * plan.scale
    if causal:
        scores = scores + torch.full_like(scores[0], -math.inf).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def gates_of(plan: PicturePlan) -> tuple[float, float]:
    """Return the factors on both blocks of a layer that reads a picture."""
    first, second = (float(torch.tanh(per_head(plan.module, name))) for name in plan.gates)
    return first, second


def run_picture(plan: PicturePlan, h: Tensor, rows: Tensor, causal: bool = False) -> Tensor:
    """A layer that reads rows of a picture ``[S, width]``, on ``[T, hidden]`` behind the picture; see `look`."""
    first, second = gates_of(plan)
    query = run_linear(plan.query, run_norm(plan.norm, h))
    seen = look(plan, query, run_linear(plan.key_value, rows), causal)
    h = h + first * run_linear(plan.output, seen)
    return h + second * run_mlp(plan.mlp, run_norm(plan.mlp_norm, h))


def filter_of(plan: ConvPlan) -> tuple[Tensor, Tensor | None]:
    """Return the filter ``[W, D]`` and the bias ``[D]`` of a short convolution, float32."""
    weight: Any = plan.conv.weight
    bias: Any = plan.conv.bias
    taps = weight.detach().float().flatten(1).t().contiguous()
    return taps, None if bias is None else bias.detach().float()


def step_bias(plan: DeltaPlan) -> Tensor:
    """Return what is added to the steps of a gated delta net, float32 ``[H]``, or ``[H, K]`` for steps of each key."""
    bias = per_head(plan.module, "dt_bias")
    return bias.view(plan.heads, plan.key_dim) if plan.each else bias


def rates_of(module: nn.Module) -> Tensor:
    """Return the rates ``[N, E]`` at which the numbers of a state of Mamba decay, float32 and negative."""
    value: Any = module.A_log
    return -torch.exp(value.detach().float()).t().contiguous()


def step_limits(plan: ScanPlan) -> tuple[float, ...]:
    """Return the last arguments of ``ssd_scan``: the least and the largest step, nothing for a scan without limits."""
    if plan.limits is None:
        return ()
    return plan.limits[0], min(plan.limits[1], torch.finfo(torch.float32).max)


def _convolve(plan: ConvPlan, x: Tensor, activation: str, texts: tuple[Tensor, ...]) -> Tensor:
    weight, bias = filter_of(plan)
    state = x.new_zeros(1, plan.taps - 1, plan.channels)
    rows = x.contiguous(), state, weight, bias, activation
    found: Tensor = torch.ops.ipex.causal_conv1d_varlen(*rows, *texts)
    return found


def mix(plan: MixerPlan, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the input of the output projection of a block with a state, for the rows ``[T, ...]`` of `plan.input`.

    `dtype` is what the gates of an RG-LRU are rounded to: ``1 - exp(-2 * s)`` has few digits in 16 bits, as in models.
    """
    rows, count = rows.float(), rows.shape[0]
    texts = tuple(torch.tensor(n, dtype=torch.int32) for n in ([0, count], [count], [0]))
    if isinstance(plan, DecayPlan):
        *parts, gate = rows.split(plan.width, dim=-1)
        heads = (activate(plan.activation, t).unflatten(-1, (plan.heads, -1)) for t in parts)
        query, key, value = heads
        steps, none = rows.new_zeros(count, plan.heads), rows.new_zeros(plan.heads)
        y = torch.ops.ipex.ssd_scan(
            *(value, steps, -plan.rates.float(), key, query, none, none),
            rows.new_zeros(1, plan.heads, plan.head_dim, plan.head_dim),
            *(*texts, 1.0, 1.0),
        )
        return run_norm(plan.norm, y.flatten(1)) * torch.sigmoid(gate)
    if isinstance(plan, CellPlan):
        return _run_cells(plan, rows)
    if isinstance(plan, DeltaPlan):
        keys, values = plan.groups * plan.key_dim, plan.heads * plan.value_dim
        qkv, z, b, a = rows.split(plan.widths, dim=-1)
        if plan.up is not None:
            z, a = (run_linear(one, x) for one, x in zip(plan.up, (z, a), strict=True))
        if plan.each:
            a = a.unflatten(-1, (plan.heads, plan.key_dim))
        q, k, v = _convolve(plan, qkv, "silu", texts).split([keys, keys, values], dim=-1)
        q, k = (t.unflatten(-1, (plan.groups, plan.key_dim)) for t in (q, k))
        if plan.strength != 1.0:  # as factors on keys and values, which the state does not see
            root = plan.strength**0.5
            q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
            k, v = k * root, v * root
        y = torch.ops.ipex.gated_delta_rule(
            *(q, k, v.unflatten(-1, (plan.heads, plan.value_dim)), a, b),
            *(per_head(plan.module, "A"), step_bias(plan)),
            rows.new_zeros(1, plan.heads, plan.key_dim, plan.value_dim),
            *(*texts, plan.key_dim**-0.5, plan.strength == 1.0, plan.lowest),
        )
        return run_norm(plan.norm, y).flatten(1) * _OPENINGS[plan.opening](z)
    if isinstance(plan, ScanPlan):
        inner, states = plan.heads * plan.head_dim, plan.groups * plan.state_dim
        gate, xbc, dt = rows.split([inner, inner + 2 * states, plan.heads], dim=-1)
        x, b, c = _convolve(plan, xbc, "silu", texts).split([inner, states, states], dim=-1)
        y = torch.ops.ipex.ssd_scan(
            *(x.unflatten(-1, (plan.heads, plan.head_dim)), dt, per_head(plan.module, "A")),
            *(t.unflatten(-1, (plan.groups, plan.state_dim)) for t in (b, c)),
            *(per_head(plan.module, "D"), per_head(plan.module, "dt_bias")),
            rows.new_zeros(1, plan.heads, plan.state_dim, plan.head_dim),
            *(*texts, *step_limits(plan)),
        )
        y = y.flatten(1) * functional.silu(gate)
        if plan.norm is None:
            return y
        parts = y.unflatten(-1, (plan.norm_groups, -1))
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + plan.norm.eps)
        weight = plan.norm.weight
        return parts.flatten(1) if weight is None else parts.flatten(1) * weight.float()
    if isinstance(plan, SelectivePlan):
        return _select(plan, rows, texts)
    if isinstance(plan, LruPlan):
        return _run_lru(plan, rows, texts, dtype)
    if isinstance(plan, (ShiftPlan, WkvPlan)):
        return _shift(plan, rows, texts)
    b, c, x = rows.chunk(3, dim=-1)
    return c * _convolve(plan, b * x, "none", texts)


def _run_cells(plan: CellPlan, rows: Tensor) -> Tensor:
    *parts, opening, entry, kept = rows.split(plan.widths, dim=-1)
    q, k, v = (t.unflatten(-1, (plan.heads, -1)).transpose(0, 1) for t in parts)
    entry, kept = (plan.cap * torch.tanh(t.t() / plan.cap) for t in (entry, kept))
    faded = functional.logsigmoid(kept).cumsum(-1)
    weights = (faded.unsqueeze(-1) + (entry - faded).unsqueeze(1)).exp().tril()
    weights = weights * (q @ k.transpose(1, 2)) * plan.key_dim**-0.5
    y = weights @ v / weights.sum(-1, keepdim=True).abs().clamp_min(1.0)
    return run_norm(plan.norm, y.transpose(0, 1)).flatten(1) * torch.sigmoid(opening)


def fading(plan: WkvPlan) -> tuple[Tensor, Tensor]:
    """Return what is added to exponents for each token, and for the token itself, float32 ``[channels]``."""
    return -torch.exp(per_head(plan.module, plan.decay)), per_head(plan.module, plan.first)


def _shift(plan: ShiftPlan | WkvPlan, x: Tensor, texts: tuple[Tensor, ...]) -> Tensor:
    before = torch.cat([x.new_zeros(1, x.shape[-1]), x[:-1]])
    mixes = [before + per_head(plan.module, name) * (x - before) for name in plan.mixes]
    if isinstance(plan, ShiftPlan):
        inner = functional.relu(run_linear(plan.first, mixes[0])).square()
        return torch.sigmoid(run_linear(plan.gate, mixes[1])) * run_linear(plan.last, inner)
    parts = plan.key, plan.value, plan.gate
    key, value, gate = (run_linear(one, row) for one, row in zip(parts, mixes, strict=True))
    state = x.new_zeros(1, 3, plan.channels)
    y: Tensor = torch.ops.ipex.wkv_scan(value, key, *fading(plan), state, *texts)
    return torch.sigmoid(gate) * y


def rates_of_lru(plan: LruPlan) -> Tensor:
    """Return the greatest ``s`` of `LruPlan` for each channel, float32."""
    return 8.0 * functional.softplus(per_head(plan.module, plan.rate))


def _run_lru(plan: LruPlan, rows: Tensor, texts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    x, gate = rows.chunk(2, dim=-1)
    x = _convolve(plan, x, "none", texts).to(dtype)
    opened = []
    for names in (plan.decay, plan.entry):
        weight, bias = (getattr(plan.module, name).detach().to(dtype) for name in names)
        blocks = torch.einsum("thi,hio->tho", x.unflatten(-1, (len(weight), -1)), weight)
        opened.append(torch.sigmoid(blocks + bias).flatten(1))
    s = opened[0] * rates_of_lru(plan).to(dtype)
    decay, root = torch.exp(-s).float(), torch.sqrt(1 - torch.exp(-2.0 * s))
    root[0] = 1.0
    added = (x * opened[1] * root).float()
    states = [added[0]]
    for t in range(1, len(x)):
        states.append(decay[t] * states[-1] + added[t])
    return torch.stack(states) * activate(plan.activation, gate)


def _select(plan: SelectivePlan, rows: Tensor, texts: tuple[Tensor, ...]) -> Tensor:
    x, gate = rows.chunk(2, dim=-1)
    x = _convolve(plan, x, "silu", texts)
    low = run_linear(plan.middle, x)
    step, keys, queries = low.split([plan.rank, plan.state_dim, plan.state_dim], dim=-1)
    step_module: Any = plan.step.modules[0]
    y = torch.ops.ipex.selective_scan_varlen(
        *(x, functional.linear(run_norm(plan.step_norm, step), step_module.weight.float())),
        *(rates_of(plan.module), run_norm(plan.key_norm, keys), run_norm(plan.query_norm, queries)),
        *(per_head(plan.module, "D"), bias_of(step_module)),
        *(rows.new_zeros(1, plan.state_dim, plan.channels), *texts),
    )
    return y * functional.silu(gate)  # type: ignore[no-any-return]


def run_attention(plan: AttentionPlan | MixerPlan, x: Tensor) -> Tensor:
    """Attention, or a block with a state, of one sequence ``[T, hidden]``, causal."""
    if isinstance(plan, AttentionPlan):
        if plan.experts is not None:
            return _run_head_experts(plan, plan.experts, x)
        attended = run_norm(plan.output_norm, attend(plan, run_linear(plan.qkv, x)))
        return run_linear(plan.output, attended)
    return run_linear(plan.output, mix(plan, run_linear(plan.input, x)))


def _run_head_experts(plan: AttentionPlan, experts: ExpertsPlan, x: Tensor) -> Tensor:
    """Attention whose queries come from experts, and that gives what they read, of one sequence ``[T, hidden]``."""
    x, shape = x.float(), (plan.kv_heads, plan.head_dim)
    first, last = (part for part in (experts.gate_up, experts.down) if isinstance(part, Tensor))
    weights, ids = _route(experts, x)
    queries = torch.einsum("th,tknh->tkn", x, first.float()[ids.long()])
    queries = queries.unflatten(-1, shape).transpose(1, 2).flatten(1)
    attended = attend(plan, torch.cat([queries, run_linear(plan.qkv, x)], dim=-1))
    attended = attended.unflatten(-1, (plan.kv_heads, experts.top_k, plan.head_dim))
    attended = attended.transpose(1, 2).flatten(2)
    y = torch.einsum("tkn,tkhn,tk->th", attended, last.float()[ids.long()], weights)
    return y if experts.added is None else y + per_head(*experts.added)


def run_mlp(plan: MlpPlan, x: Tensor) -> Tensor:
    """A dense mlp on ``[T, hidden]``."""
    up = run_linear(plan.up, x)
    if plan.low is not None:
        up = up + run_linear(plan.low[1], run_linear(plan.low[0], x))
    if plan.fused:
        gate, up = up.chunk(2, dim=-1)
        up = combine_gate(plan.activation, gate, up, plan.swiglu)
    elif plan.gate is not None:
        gate = cut_gate(plan.cutoff, run_linear(plan.gate, x))
        up = combine_gate(plan.activation, gate, up, plan.swiglu)
    else:
        up = activate_inner(plan, up)
    return run_linear(plan.down, run_norm(plan.inner_norm, up))


def _route(plan: ExpertsPlan, x: Tensor) -> tuple[Tensor, Tensor]:
    bias = None if plan.router_bias is None else plan.router_bias.float()
    logits = functional.linear(x, plan.router_weight.float(), bias)
    if plan.scoring in ("logits", "softplus"):
        scores = torch.sigmoid(logits)
        if plan.scoring == "softplus":
            logits = scores = functional.softplus(logits).sqrt()
        bias = plan.correction_bias
        ids = (logits if bias is None else logits + bias.float()).topk(plan.top_k).indices
        ids = ids if plan.table is None else plan.table.long()
        weights = scores.gather(1, ids)
        total = weights.sum(-1, keepdim=True) if plan.renormalize else 1.0
        return weights / total * plan.routed_scale, ids
    weights, ids = torch.ops.ipex.moe_routing(
        logits,
        plan.top_k,
        plan.renormalize,
        plan.scoring,
        plan.groups,
        plan.top_groups,
        choice_bias(plan),
        weight_scale(plan),
        plan.jitter,
    )
    if plan.expert_scales is not None:
        weights = weights * plan.expert_scales.float()[ids.long()]
    return weights, ids


def _product(x: Tensor, part: Tensor | tuple[nn.Module, ...], expert: int, flip: bool) -> Tensor:
    if not isinstance(part, Tensor):
        return run_linear(LinearPlan((part[expert],)), x)
    weight = part[expert].float()
    return x @ weight if flip else functional.linear(x, weight)


def _expert(plan: ExpertsPlan, x: Tensor, expert: int) -> Tensor:
    own = -1 if plan.correction_bias is None else expert - len(plan.correction_bias)
    if plan.always is not None and own >= 0:
        names = ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (getattr(plan.always, name)[own].float() for name in names)
        return combine_gate(plan.activation, x @ gate.t(), x @ up.t()) @ down.t()
    if plan.up is not None:
        parts: Any = (plan.gate_up, plan.up, plan.down)
        gate, up, down = (t.float().view(plan.experts, -1, x.shape[-1])[expert] for t in parts)
        return combine_gate(plan.activation, x @ gate.t(), x @ up.t()) @ down
    if isinstance(plan.gate_up, Tensor):
        both = _product(x, plan.gate_up, expert, plan.transposed)
        if not plan.gated:
            if plan.gate_up_bias is not None:
                both = both + plan.gate_up_bias[expert].float()
            y = _product(activate(plan.activation, both), plan.down, expert, plan.transposed)
            return y if plan.down_bias is None else y + plan.down_bias[expert].float()
        if plan.gate_up_bias is not None:
            both = both + plan.gate_up_bias[expert].float()
        if plan.interleaved:
            gate, up = both[..., 0::2], both[..., 1::2]
        else:
            gate, up = both.chunk(2, dim=-1)
    else:
        # Gates of all experts, then the other projections of all.
        gate = _product(x, plan.gate_up, expert, False)
        up = _product(x, plan.gate_up, plan.experts + expert, False)
    numbers = plan.swiglu_alpha, plan.swiglu_limit, plan.swiglu_added
    known = numbers if plan.activation in ("swigluoai", "softcaps") else None
    inner = combine_gate(plan.activation, gate, up, known)
    y = _product(inner, plan.down, expert, plan.transposed)
    return y if plan.down_bias is None else y + plan.down_bias[expert].float()


def of_tokens(plan: Any, ids: Tensor) -> Any:
    """Return the plan of experts with the rows of some tokens as `ExpertsPlan.table`."""
    return plan if plan.table is None else dataclasses.replace(plan, table=plan.table[ids])


def run_experts(plan: ExpertsPlan, x: Tensor, h: Tensor | None = None) -> Tensor:
    """A mixture of experts on ``[T, hidden]``; `h` is the stream that experts with norms of their own read."""
    x, norms = x.float(), plan.norms
    if norms is None:
        y = run_routed(plan, x, x)
    else:
        assert h is not None
        routed = run_norm(norms.router, h) * norms.factors
        y = run_norm(norms.output, run_routed(plan, run_norm(norms.input, h), routed))
    if plan.shared is not None:
        shared = run_mlp(plan.shared, x)
        if norms is not None:
            shared = run_norm(norms.shared, shared)
        if plan.shared_gate is not None:
            shared = torch.sigmoid(run_linear(LinearPlan((plan.shared_gate,)), x)) * shared
        y = y + shared
    return y if plan.added is None else y + per_head(*plan.added)


def run_routed(plan: ExpertsPlan, x: Tensor, routed: Tensor) -> Tensor:
    """The experts alone on ``[T, hidden]``, chosen by what the router makes of `routed`."""
    weights, ids = _route(plan, routed.float())
    x = x.float()
    if plan.entry is not None:
        x = run_linear(plan.entry, x)
    y = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        rows, places = torch.where(ids == expert)
        scale = weights[rows, places].unsqueeze(-1)
        if expert >= plan.experts:
            y.index_add_(0, rows, x[rows] * scale)
        elif plan.scale_input:
            y.index_add_(0, rows, _expert(plan, x[rows] * scale, expert))
        else:
            y.index_add_(0, rows, _expert(plan, x[rows], expert) * scale)
    whole = getattr(plan.module, "sum_over_ranks", None)
    if whole is not None and isinstance(plan.down, Tensor):  # seen from outside of a sharded model
        y = whole(y)
    if plan.exit is not None:
        y = run_linear(plan.exit, y)
    return y


def _sum(parallel: Any, y: Tensor) -> Tensor:
    """Return the sum of the parts that the ranks of a sharded model have."""
    return y if parallel is None else parallel.all_reduce(y.contiguous())  # type: ignore[no-any-return]


def _feed_forward(plan: LayerPlan, x: Tensor, h: Tensor, parallel: Any) -> Tensor:
    assert plan.mlp is not None
    y = run_mlp(plan.mlp, x) if isinstance(plan.mlp, MlpPlan) else run_experts(plan.mlp, x, h)
    y = add_convolved(plan.convs[1:], _sum(parallel, y), plan.conv_scale)
    return run_norm(plan.post_mlp_norm, y) * plan.residual_scale


def _run_side(plan: SidePlan, h: Tensor, embedded: Tensor) -> Tensor:
    x = run_attention(plan.attention, run_norm(plan.norm, torch.cat([h, embedded], dim=-1)))
    return run_linear(plan.output, run_mlp(plan.mlp, run_norm(plan.mlp_norm, x)))


def rows_of_table(ids: Tensor, table: Tensor) -> Tensor:
    """Return the rows of tokens in a table; tokens behind its end have the first one (Gemma 3n)."""
    return ids.where(ids < table.shape[0], 0)


def _token_rows(plan: TokenRowsPlan, h: Tensor, ids: Tensor) -> Tensor:
    """Return what tokens bring for each layer, ``[T, layers, width]``."""
    table: Any = plan.table.weight
    rows = run_linear(plan.projection, h).unflatten(-1, (-1, plan.width))
    own = functional.embedding(rows_of_table(ids, table), table).float()
    own = own.view_as(rows) * plan.table_scale
    return (run_norm(plan.norm, rows) + own) * plan.scale


def with_shared_rows(plan: AttentionPlan, qkv: Tensor, rows: Mapping[int, Tensor]) -> Tensor:
    """Return the rows of an attention with the keys and values of the layer that it reads.

    Args:
        plan: The attention.
        qkv: What its own projections give.
        rows: The same of layers before, by their index.
    """
    if plan.source is None:
        return qkv
    other = rows[plan.source]
    width = (1 if plan.keys_as_values else 2) * plan.kv_heads * plan.head_dim
    return torch.cat([qkv.float(), other[:, other.shape[-1] - width :].float()], dim=-1)


def _run_layer(
    plan: LayerPlan,
    h: Tensor,
    parallel: Any,
    embedded: Tensor,
    index: int = 0,
    kept: dict[int, Tensor] | None = None,
    part: Tensor | None = None,
) -> Tensor:
    if plan.attention is None:
        return h + _feed_forward(plan, run_norm(plan.mlp_norm, h), h, parallel)
    read = h if plan.side is None else h + _run_side(plan.side, h, embedded)
    x = run_norm(plan.input_norm, read)
    if isinstance(plan.attention, AttentionPlan) and plan.attention.experts is None:
        rows = run_linear(plan.attention.qkv, x)
        kept = {} if kept is None else kept
        kept[index] = rows
        rows = with_shared_rows(plan.attention, rows, kept)
        attended = run_norm(plan.attention.output_norm, attend(plan.attention, rows))
        attention = run_linear(plan.attention.output, attended)
    else:
        attention = run_attention(plan.attention, x)
    attention = add_convolved(plan.convs[:1], _sum(parallel, attention))
    attention = run_norm(plan.post_attention_norm, attention) * plan.residual_scale
    if plan.rates is not None:
        x = run_norm(plan.mlp_norm, torch.lerp(x, attention, plan.rates[0]))
        return torch.lerp(x, _feed_forward(plan, x, h, parallel), plan.rates[1])
    if plan.beside is not None:
        attention = attention + run_attention(plan.beside, x)
    if plan.low is not None:
        low = run_linear(plan.low.second, run_linear(plan.low.first, x))
        attention = attention + x + run_norm(plan.low.norm, low)
    if plan.parallel:
        mlp_input = x if plan.mlp_norm is None else run_norm(plan.mlp_norm, h)
        return h + attention + _feed_forward(plan, mlp_input, h, parallel)
    first, second = gains_of(plan)
    h = (x * plan.residual_factors[0] if plan.residual_after_norm else h * first) + attention
    h = h if plan.low is None else h * plan.low.factor
    if plan.mlp is None:
        return h * plan.stream_scale
    x = run_norm(plan.mlp_norm, h)
    more = _feed_forward(plan, x, h, parallel)
    if index and kept is not None:  # what the layer before has left
        more = more + kept.pop(-index, torch.zeros(()))
    if plan.shortcut is not None and kept is not None:
        kept[-index - 1] = run_experts(plan.shortcut, x)
    h = (x * plan.residual_factors[1] if plan.residual_after_norm else h * second) + more
    if plan.token_block is not None:
        h = h + _token_block(plan.token_block, h, part)
    return h * plan.stream_scale


def _token_block(block: TokenBlockPlan, h: Tensor, part: Tensor | None) -> Tensor:
    assert part is not None
    x = activate(block.activation, run_linear(block.gate, h)) * part
    return run_norm(block.norm, run_linear(block.output, x))


def _run_streams(layer: LayerPlan, streams: Tensor, part: Tensor | None, **more: Any) -> Tensor:
    plan, block = layer.streams, layer.token_block
    assert plan is not None
    if isinstance(plan, LayerMeansPlan):
        return _run_means(layer, streams, more["parallel"], more["loop"])
    if isinstance(plan, tuple):
        parts: Any = {"mlp": None}, {"attention": None}
        for connection, left in zip(plan, parts, strict=True):
            row, factors = connect(connection, streams)
            bare = dataclasses.replace(layer, streams=None, **left)
            streams = add_to_streams(streams, factors, _run_layer(bare, row, **more) - row)
        return streams
    predicted = predict_streams(plan, streams.float())
    bare = dataclasses.replace(layer, token_block=None, streams=None)
    streams = correct_streams(plan, predicted, _run_layer(bare, predicted[0], **more))
    if block is not None:
        h = streams[0] if plan.scale is None else streams[0] * plan.scale.float()
        streams[1:] += _token_block(block, h, part)
    return streams


def _embed(plan: DecoderPlan, ids: Tensor) -> Tensor:
    table: Any = plan.embedding.weight
    h = functional.embedding(ids, table).float()
    if plan.embedding_projection is not None:
        h = run_linear(plan.embedding_projection, h)
    h = h * plan.embedding_scale
    if plan.position_embedding is not None:
        rows = position_rows(plan.position_embedding)
        h = h + rows[plan.position_offset : plan.position_offset + len(ids)].float()
    return run_norm(plan.embedding_norm, h)


@torch.no_grad()
def run_plan(plan: DecoderPlan, input_ids: Tensor) -> Tensor:
    """Return the logits of sequences, or the last hidden states if the plan has no head.

    Args:
        plan: The plan of a model.
        input_ids: int64 ``[B, T]``, no padding.

    Returns:
        float32 ``[B, T, vocab]``, or ``[B, T, hidden]``.

    Raises:
        ValueError: `input_ids` is not 2-D.
    """
    if input_ids.ndim != 2:
        raise ValueError(f"run_plan: input_ids must be [B, T], got {list(input_ids.shape)}")
    return torch.stack([_run_sequence(plan, ids) for ids in input_ids])


def _run_sequence(plan: DecoderPlan, ids: Tensor) -> Tensor:
    h = embedded = _embed(plan, ids)
    kept: dict[int, Tensor] = {}
    loop: dict[str, Tensor] = {}
    start: Tensor | None = None
    parts = None if plan.token_rows is None else _token_rows(plan.token_rows, h, ids)
    if plan.streams is not None:
        h = open_streams(plan.streams, h)
    for index, layer in enumerate(plan.layers):
        part = None if parts is None else parts[:, index]
        if layer.restart is not None:
            h = run_norm(layer.restart, h)
            start = h if start is None else start
            h = h + start
        more: Any = {"parallel": plan.parallel, "embedded": embedded, "index": index, "kept": kept}
        if isinstance(plan.streams, MeansPlan):
            more["loop"] = loop
        run = _run_layer if plan.streams is None else _run_streams
        if index in plan.tables:
            layer = dataclasses.replace(layer, mlp=of_tokens(layer.mlp, ids))
        if layer.ngrams is not None:
            h = add_ngrams(layer.ngrams, h, ngram_rows(layer.ngrams, ids))
        h = run(layer, h, part=part, **more)
    if plan.streams is not None:
        h = close_streams(plan.streams, h)
    h = run_norm(plan.final_norm, h)
    if plan.output_projection is not None:
        h = run_linear(plan.output_projection, h)
    if plan.head is None:
        return h
    if plan.head_block is not None:
        h = run_head_block(plan.head_block, h)
    logits = _head(plan, h) * plan.logit_scale
    logits = logits[:, : logits.shape[-1] - plan.dropped]
    if plan.logit_softcap > 0:
        logits = plan.logit_softcap * torch.tanh(logits / plan.logit_softcap)
    return logits


def run_head_block(plan: HeadBlockPlan, h: Tensor) -> Tensor:
    """The block before a head on ``[T, hidden]``."""
    return run_norm(plan.norm, activate(plan.activation, run_linear(plan.linear, h)))


def _head(plan: DecoderPlan, h: Tensor) -> Tensor:
    assert plan.head is not None
    parallel = plan.parallel
    shard = None if parallel is None else parallel.head
    if parallel is None or shard is None:
        return run_linear(plan.head, h)
    sizes, rank = shard.sizes, parallel.rank
    if shard.by == "vocabulary":
        return parallel.gather(run_linear(plan.head, h), sizes)
    part = h.narrow(-1, sum(sizes[:rank]), sizes[rank])
    return parallel.all_reduce(run_linear(plan.head, part))


@torch.no_grad()
def verify(model: nn.Module, plan: DecoderPlan, *, length: int = 40, seed: int = 0) -> float:
    """Compare a plan with the model's own forward on random tokens.

    Args:
        model: The model the plan was made from, in eval mode.
        plan: Its plan.
        length: Number of tokens; longer than a sliding window, to see it.
        seed: Of the tokens.

    Returns:
        The largest difference of logits (or last hidden states), relative to the largest of them.
    """
    generator = torch.Generator().manual_seed(seed)
    length = min(length, plan.max_positions)
    ids = torch.randint(0, plan.vocab_size, (1, length), generator=generator)
    device = next(plan.embedding.parameters()).device
    output = model(input_ids=ids.to(device), use_cache=False)
    expected = getattr(output, "logits", None)
    if expected is None:
        expected = output[0] if isinstance(output, tuple) else output.last_hidden_state
    expected = expected.float()
    difference = (run_plan(plan, ids.to(device)) - expected).abs().max() / expected.abs().max()
    return float(difference)
