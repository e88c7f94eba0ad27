# SPDX-License-Identifier: Apache-2.0
"""Which linear layers a block has, and activations, norms, rotations and connections of a plan in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ipex_llm.arch import (
    AttentionPlan,
    ConnectionPlan,
    ExpertsPlan,
    GatedConnectionPlan,
    LayerPlan,
    LinearPlan,
    MeansPlan,
    MessageGatePlan,
    MixerPlan,
    MlpPlan,
    NgramsPlan,
    NormPlan,
    RopePlan,
    ShiftPlan,
    StreamEnds,
    StreamEndsPlan,
    StreamsPlan,
    WkvPlan,
)
from ipex_llm.arch.parts import WindowsPlan

#: Added to the scores of experts that all tokens go to.
ALWAYS = 1e4

#: Name of the taps ``[W, D]`` of a convolution that tokens add to, of the token itself first.
MOVING = "static_weight"

#: Activations by their names in a plan, in the order in which detection tries them.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
}


def activate(name: str, x: Tensor) -> Tensor:
    """Apply an activation by its name in a plan; ``"none"`` returns `x`.

    Raises:
        ValueError: The name is unknown.
    """
    if name == "none":
        return x
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"activate: name must be none or one of {known}, got {name!r}")
    return ACTIVATIONS[name](x)


def xielu_numbers(module: nn.Module) -> tuple[float, float, float, float]:
    """Return the factors of the activation xIELU for positive and other numbers, its slope at zero and its epsilon."""
    own: Any = module
    positive, negative = (functional.softplus(getattr(own, f"alpha_{n}").detach()) for n in "pn")
    return float(positive), float(own.beta + negative), float(own.beta), float(own.eps)


def activate_inner(plan: MlpPlan, x: Tensor) -> Tensor:
    """Apply the activation of a block without a gate."""
    if plan.learned is None:
        return activate(plan.activation, x)
    positive, negative, slope, eps = xielu_numbers(plan.learned)
    below = (torch.expm1(x.clamp(max=eps)) - x) * negative
    return torch.where(x > 0, positive * x * x, below) + slope * x


def position_rows(module: nn.Module) -> Tensor:
    """Return the rows of positions of a module: its weight, or a buffer that it fills itself (XGLM)."""
    weight: Any = module._parameters.get("weight")
    filled: Any = module._buffers.get("weights")
    rows: Tensor = filled if weight is None else weight.detach()
    return rows


def combine_gate(
    name: str, gate: Tensor, up: Tensor, swiglu: tuple[float, float, float] | None = None
) -> Tensor:
    """Return ``act(gate) * up``; with three numbers what ``"swigluoai"`` or ``"softcaps"`` makes of both."""
    if swiglu is not None and name == "softcaps":
        first, second, _ = swiglu
        opened = first * torch.tanh(gate / first) * torch.sigmoid(gate)
        return opened * (second * torch.tanh(up / second))
    if swiglu is not None:
        alpha, limit, added = swiglu
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + added)
    return activate(name, gate) * up


def cut_gate(cutoff: float | None, gate: Tensor) -> Tensor:
    """Return the gate of a block with what `MlpPlan.cutoff` leaves of it."""
    if cutoff is None:
        return gate
    gate = gate.float()
    level = gate.mean(-1, keepdim=True) + cutoff * gate.std(-1, keepdim=True, unbiased=False)
    return functional.relu(gate - level)


def run_norm(plan: NormPlan | None, x: Tensor) -> Tensor:
    """Apply a norm to ``[..., width]`` (or ``[..., heads, head_dim]``); None: return `x`."""
    if plan is None:
        return x
    x = x.float()
    if plan.kind == "clip":
        x = x if plan.weight is None else x * plan.weight.float()
        return x * (plan.eps / (x.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1.0)
    if plan.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + plan.eps)
    if plan.weight is not None:
        x = x * (plan.weight.float() + plan.offset)
    if plan.bias is not None:
        x = x + plan.bias.float()
    if plan.gate is not None:
        first, second = plan.gate
        x = x * torch.sigmoid(run_linear(second, functional.silu(run_linear(first, x))))
    return x * plan.factor


def run_linear(plan: LinearPlan, x: Tensor) -> Tensor:
    """Apply the modules of a linear layer to ``[..., in]`` and put the outputs in the expected order.

    Without modules it returns `x`.
    """
    if not plan.modules:
        return x
    first = next(plan.modules[0].parameters(), None)
    if first is not None and first.is_floating_point():
        x = x.to(first.dtype)
    y = torch.cat([module(x) for module in plan.modules], dim=-1).float()
    return in_order(plan, y)


def in_order(plan: LinearPlan, y: Tensor) -> Tensor:
    """Return what the modules of a linear layer gave side by side as the expected rows, ``[..., out]``."""
    y = y if plan.order is None else y[..., plan.order.to(y.device)]
    if plan.factors is not None and not plan.multiplied:
        y = y.float() * plan.factors.to(y.device)
    y = y if plan.gain is None else y.float() * per_head(*plan.gain)
    return y if plan.added is None else y.float() + per_head(*plan.added)


def taps_of(convs: tuple[nn.Module, ...], scale: float = 1.0) -> Tensor:
    """Return the filter ``[W, D]`` of short convolutions side by side that are added to what they read, float32."""
    found = []
    for conv in convs:
        moving, weight = conv._parameters.get(MOVING), conv._parameters.get("weight")
        own: Any = weight if moving is None else moving.flip(0).t()
        found.append(own.detach().float().flatten(1))
    taps = torch.cat(found).t().contiguous()
    taps[-1] += 1.0
    return taps * scale


def add_convolved(convs: tuple[nn.Module, ...], x: Tensor, scale: float = 1.0) -> Tensor:
    """Return rows of one text ``[T, D]`` with what short convolutions of its columns give added; without any, `x`."""
    if not convs:
        return x
    taps = taps_of(convs, scale)
    wide = functional.pad(x.float(), (0, 0, len(taps) - 1, 0))
    return (wide.unfold(0, len(taps), 1) * taps.t()).sum(-1)


def weight_scale(plan: ExpertsPlan) -> float:
    """Return the factor on the weights of experts."""
    return plan.routed_scale * (1.0 if plan.gain is None else float(per_head(*plan.gain)))


def choice_bias(plan: ExpertsPlan) -> Tensor | None:
    """Return what is added to the scores of experts for their choice alone, float32, or None."""
    bias = None if plan.correction_bias is None else plan.correction_bias.detach().float()
    if plan.always is None or bias is None:
        return bias
    return torch.cat([bias, bias.new_full((plan.experts - len(bias),), ALWAYS)])


def rotate(rope: RopePlan, x: Tensor) -> Tensor:
    """Rotate the first `rope.dim` elements of heads ``[T, heads, head_dim]``; row t is position t."""
    cos, sin = (t.to(x.device).unsqueeze(1) for t in rope.tables(x.shape[0]))
    turned, kept = x[..., : rope.dim], x[..., rope.dim :]
    if rope.half:
        first, second = turned.chunk(2, dim=-1)
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
    a, b = first * cos - second * sin, second * cos + first * sin
    turned = torch.cat([a, b], dim=-1) if rope.half else torch.stack([a, b], dim=-1).flatten(-2)
    return torch.cat([turned, kept], dim=-1)


def per_head(module: nn.Module, name: str) -> Tensor:
    """Return a parameter ``[H]`` of a recurrence, float32; ``A`` is computed from ``A_log``."""
    if name == "A":
        return -torch.exp(per_head(module, "A_log"))
    value: Tensor = getattr(module, name)
    return value.detach().float().flatten().contiguous()


def projections(plan: AttentionPlan | MixerPlan) -> tuple[LinearPlan, LinearPlan]:
    """Return the linear layers before and behind an attention, or a block with a state; see there for the latter."""
    return (plan.qkv if isinstance(plan, AttentionPlan) else plan.input), plan.output


def inner_linears(plan: AttentionPlan | MixerPlan | None) -> tuple[LinearPlan, ...]:
    """Return the linear layers of a block that mixes rows of tokens, where the first and the last are not all."""
    if isinstance(plan, AttentionPlan):
        return () if plan.shared is None else (plan.shared.query,)
    if isinstance(plan, WkvPlan):
        return plan.key, plan.value, plan.gate
    return (plan.first, plan.gate, plan.last) if isinstance(plan, ShiftPlan) else ()


def connect(plan: ConnectionPlan | GatedConnectionPlan, streams: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a block reads of streams ``[count, T, hidden]``, and factors ``[T, count]`` on what it gives.

    Without such a block there are no factors, ``[T, 0]``. With `ConnectionPlan.rounds` the matrix is behind them.
    """
    if isinstance(plan, GatedConnectionPlan):
        rows = run_norm(plan.norm, streams.transpose(0, 1))
        flat = rows.flatten(1)
        inner = functional.silu(plan.factor * run_linear(plan.first, flat))
        gates = run_linear(plan.second, inner)
        given = flat[:, :0] if plan.last is None else plan.factor * run_linear(plan.last, flat)
        row = (torch.sigmoid(gates).view_as(rows) * rows).mean(1)
        return row, 2.0 * torch.sigmoid(given)
    scale, base, sizes, added = plan.numbers
    flat = streams.float().transpose(0, 1).flatten(1)
    flat = functional.rms_norm(flat, flat.shape[-1:], eps=plan.norm_eps)
    weight: Tensor = getattr(plan.module, plan.weight)
    rows = functional.linear(flat, weight.float()) * scale + base
    first, last, matrix = (torch.sigmoid(rows) * sizes + added).tensor_split(
        [plan.count, 2 * plan.count], dim=-1
    )
    row = torch.einsum("ti,ith->th", first, streams.float())
    if plan.rounds:
        matrix = rows[:, 2 * plan.count :].unflatten(-1, (plan.count, -1)).softmax(-1) + plan.eps
        for dim in (-2, *(-1, -2) * (plan.rounds - 1)):
            matrix = matrix / (matrix.sum(dim, keepdim=True) + plan.eps)
    return row, torch.cat([last, matrix.flatten(1)], dim=-1)


def add_to_streams(streams: Tensor, factors: Tensor, y: Tensor) -> Tensor:
    """Return streams ``[count, T, hidden]`` with what a block gives added, times `factors` of `connect`."""
    factors, matrix = factors.tensor_split([len(streams)], dim=-1)
    if matrix.shape[-1]:
        streams = torch.einsum("tij,ith->jth", matrix.unflatten(-1, (len(streams), -1)), streams)
    return streams + factors.t().unsqueeze(-1) * y


def mean_rows(plan: MeansPlan, streams: Tensor) -> Tensor:
    """Return what blocks read, ``[rows, T, hidden]``, of a stream and norms of earlier ones ``[count, T, hidden]``."""
    normed = torch.cat([run_norm(plan.norm, streams[:1]), streams[1:].float()])
    weights = torch.einsum("qh,nth->qtn", plan.queries, normed).softmax(-1)
    return torch.einsum("qtn,nth->qth", weights, normed)


def _routed_streams(plan: StreamsPlan, x: Tensor) -> Tensor:
    return torch.tanh(run_linear(plan.router, run_norm(plan.norm, x)))


def predict_streams(plan: StreamsPlan, streams: Tensor) -> Tensor:
    """Return what a layer makes of its streams ``[count, T, hidden]`` before it reads the first."""
    factors = run_linear(plan.predict, _routed_streams(plan, streams[0]))
    factors = factors.unflatten(-1, (plan.count, plan.count))
    return streams + torch.einsum("tij,jth->ith", factors, streams)


def correct_streams(plan: StreamsPlan, predicted: Tensor, y: Tensor) -> Tensor:
    """Return the streams ``[count, T, hidden]`` that follow from what a layer made of the first."""
    factors = run_linear(plan.correct, _routed_streams(plan, y)) + 1.0
    return predicted + factors.t().unsqueeze(-1) * (y - predicted[0])


def as_long_as(first: Tensor, x: Tensor) -> Tensor:
    """Return `x` as long as the first stream is; see `StreamEndsPlan`."""
    own = x.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()
    return x * first.square().mean(-1, keepdim=True).sqrt() / own


def add_message(plan: MessageGatePlan, x: Tensor, message: Tensor) -> Tensor:
    """Return a row ``[T, hidden]`` with a message."""
    both = torch.cat([run_norm(plan.norm, x), run_norm(plan.norm, message)], dim=-1)
    forgets, opens = torch.tanh(run_linear(plan.gates, run_linear(plan.low, both))).chunk(2, dim=-1)
    return (1.0 - forgets) * x + opens * message


def convolve_apart(plan: AttentionPlan, key: Tensor, value: Tensor) -> Tensor:
    """Return keys and values behind their convolutions ``[T, 2 * kv_heads, head_dim]`` for what projections give."""
    size, heads = plan.kv_heads * plan.head_dim, 2 * plan.kv_heads
    rows = torch.cat([key[:, :size], value[:, :size]], dim=-1).float()
    mixed = add_convolved(plan.convs, rows, plan.conv_scale).unflatten(-1, (heads, -1))
    if plan.apart is None or not plan.apart.moving:
        return mixed
    more = torch.cat([key[:, size:], value[:, size:]], dim=-1).float()
    more = more.unflatten(-1, (heads, 1, -1)) * plan.conv_scale
    count = more.shape[-1]
    last = functional.pad(rows, (0, 0, count - 1, 0)).unfold(0, count, 1).flip(-1)
    return mixed + (last.unflatten(1, (heads, -1)) * more).sum(-1)


def apart_rows(
    plan: AttentionPlan, first: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values ``[T, heads, head_dim]``, rows of `near`, sinks ``[T, heads]`` and gates.

    Args:
        plan: An attention with keys and values apart.
        first: What `plan.qkv` gives, ``[T, ...]``.
        key: What the projection to keys gives.
        value: What the projection to values gives.
    """
    assert plan.near is not None
    width = plan.heads * plan.head_dim
    query, gates, near = first.float().tensor_split([width, 2 * width], dim=-1)
    near, sinks = near.tensor_split([-plan.heads], dim=-1)
    keys, values = convolve_apart(plan, key, value).chunk(2, dim=1)
    return (
        run_norm(plan.query_norm, query.unflatten(-1, (plan.heads, -1))),
        *(run_norm(plan.key_norm, keys), run_norm(plan.value_norm, values)),
        *(run_norm(plan.near.norm, near.unflatten(-1, (plan.heads, -1))), sinks, gates),
    )


def ngram_rows(plan: NgramsPlan, ids: Tensor) -> Tensor:
    """Return the rows of the tokens ``[T]`` of a text, or of windows ``[T, context + 1]`` that end in a token each."""
    if ids.ndim == 1:
        ids = functional.pad(ids, (plan.context, 0), value=plan.empty).unfold(
            0, plan.context + 1, 1
        )
    rows: Tensor = plan.table(ids, None)[:, -1]
    return rows


def add_ngrams(plan: NgramsPlan, streams: Tensor, rows: Tensor) -> Tensor:
    """Return streams ``[count, T, hidden]`` with what the rows of n-grams of the tokens bring added."""
    s = streams.float().transpose(0, 1)
    key = run_norm(plan.key_norm, run_linear(plan.key, rows).view_as(s))
    gate = (key * run_norm(plan.query_norm, s)).sum(-1, keepdim=True) * s.shape[-1] ** -0.5
    gate = torch.sigmoid(gate.sign() * gate.abs().clamp_min(1e-6).sqrt())
    value = gate * run_linear(plan.value, rows).unsqueeze(1)
    taps = plan.taps
    before = functional.pad(run_norm(plan.conv_norm, value).flatten(1).t(), (len(taps) - 1, 0))
    mixed = functional.conv1d(before, taps.t().unsqueeze(1), groups=len(before))
    return (s + value + functional.silu(mixed.t()).view_as(s)).transpose(0, 1)


def turned(rope: RopePlan, x: Tensor) -> Tensor:
    """Rotate the last `rope.dim` elements of heads ``[T, heads, head_dim]``; row t is position t."""
    return torch.cat([x[..., : -rope.dim], rotate(rope, x[..., -rope.dim :])], dim=-1)


def window_rows(plan: WindowsPlan, rope: RopePlan, both: Tensor, width: int) -> Tensor:
    """Return the rows of windows ``[count, 1, width]`` of values and gates ``[T, ...]`` of tokens."""
    count, bias = len(both) // plan.rate, plan.biases(width)
    values, gates = both[: count * plan.rate].unflatten(0, (count, plan.rate)).chunk(2, dim=-1)
    if len(bias) > plan.rate:
        (before, values), (first, gates) = values.chunk(2, dim=-1), gates.chunk(2, dim=-1)
        first = functional.pad(first[:-1], (0, 0, 0, 0, 1, 0), value=-torch.inf)
        values = torch.cat([before.roll(1, 0), values], dim=1)
        gates = torch.cat([first, gates], dim=1)
    rows = run_norm(plan.norm, (values * (gates + bias).softmax(1)).sum(1))
    places = rows.new_zeros(max(count * plan.rate, 1), 1, width)
    places[:: plan.rate][:count, 0] = rows
    return turned(rope, places)[:: plan.rate][:count]


def open_streams(plan: StreamEnds, h: Tensor) -> Tensor:
    """Return the streams ``[count, T, hidden]`` of the first layer."""
    h = h.float()
    if isinstance(plan, MeansPlan):
        return h.unsqueeze(0)
    if not isinstance(plan, StreamEndsPlan):
        return torch.stack([h] * plan.count)
    return torch.stack([h, *(as_long_as(h, run_linear(one, h)) for one in plan.first)])


def close_streams(plan: StreamEnds, streams: Tensor) -> Tensor:
    """Return what follows behind the last layer."""
    if isinstance(plan, MeansPlan):
        return mean_rows(plan, streams)[0]
    if not isinstance(plan, StreamEndsPlan):
        return connect(plan, streams)[0]
    h = streams[0].float()
    ends = zip(plan.last, streams[1:], strict=True)
    return torch.stack([h, *(as_long_as(h, run_linear(one, s)) for one, s in ends)]).mean(0)


def bias_of(module: Any) -> Tensor:
    """Return the bias of a linear layer, float32; zeros without one."""
    if module.bias is None:
        return torch.zeros(module.out_features)
    return module.bias.detach().float()  # type: ignore[no-any-return]


def gains_of(plan: LayerPlan) -> tuple[Tensor, Tensor]:
    """Return the factors on the residual of each block: numbers, or ``[hidden]``."""
    if plan.gains is None:
        return torch.ones(()), torch.ones(())
    first, second = (per_head(plan.module, name) for name in plan.gains)
    return first, second
