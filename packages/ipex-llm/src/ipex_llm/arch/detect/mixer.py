# SPDX-License-Identifier: Apache-2.0
"""Blocks of a layer that keep a state in the place of keys and values: short convolutions, gated delta nets, Mamba.

As for attention, names say what the parts could be, and numbers say what they are.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ipex_llm.arch import (
    CellPlan,
    ConvPlan,
    DecayPlan,
    DeltaPlan,
    LayerPlan,
    LinearPlan,
    LruPlan,
    MixerPlan,
    NormPlan,
    ScanPlan,
    SelectivePlan,
    ShiftPlan,
    WkvPlan,
)
from ipex_llm.arch.detect.parts import (
    activations_of,
    eps_of,
    linear_plan,
    match_norm,
    norms_of,
    with_factor,
)
from ipex_llm.arch.detect.trace import (
    Config,
    Trace,
    convolution,
    distance,
    is_norm,
    linears,
    same,
    settle,
    settled,
    tolerance,
)
from ipex_llm.arch.formulas import in_order
from ipex_llm.arch.reference import mix, run_attention

#: Activations that programs apply to rows.
_POINTWISE = ("silu", "gelu", "gelu_tanh", "relu")
_MAMBA_1 = ("in_proj", "x_proj", "dt_proj", "out_proj")
_PARTS = tuple(
    re.compile(rf"(^|_)({name})(_proj)?$") for name in ("qkv", "q", "k", "v", "z|g", "b", "a")
)
#: Projections of a gated delta net with a step for each key; gates and steps may be of low rank (Kimi Linear).
_EACH = tuple(
    re.compile(rf"(^|\.)({name})_proj$") for name in ("q", "k", "v", "g|g_a", "b", "f|f_a")
)


def _rates(module: nn.Module) -> Tensor | None:
    """Return the fixed rates of the heads of a block that has a norm, ``[H]``, or None."""
    own = (*module._parameters.values(), *module._buffers.values())
    found = [t for t in own if t is not None and t.ndim == 3 and t.shape[1:] == (1, 1)]
    norms = sum(is_norm(m) for m in module.children())
    return found[0].detach().flatten() if [len(found), norms] == [1, 1] else None


def _has_cells(module: nn.Module) -> bool:
    """Return whether a block has a linear layer for the gates of an mLSTM that forget, or for all gates (xLSTM)."""
    return any(name in ("fgate_preact", "ifgate_preact") for name, _ in module.named_children())


def find_mixer(layer: nn.Module) -> nn.Module | None:
    """Return the block of a layer with a short convolution, fixed rates of its heads, or the gates of an mLSTM."""
    found = [
        one
        for one in layer.children()
        if convolution(one) is not None or _rates(one) is not None or _has_cells(one)
    ]
    return found[0] if len(found) == 1 else None


def match_mixer(trace: Trace, config: Config, module: nn.Module) -> MixerPlan:
    """Return the plan of a block with a state.

    Raises:
        MatchError: Its parts are not understood, or no candidate gives what the module gave.
    """
    parts = list(linears(module, trace))
    names = ", ".join(name for name, _ in parts) or "none"
    source = trace.input(module)
    own: Any = module
    if getattr(own, "A_log", torch.zeros(1)).ndim == 2:
        return _selective(trace, own, dict(parts), source)
    scale = float(getattr(own, "ssm_in_multiplier", 1.0))
    source = source if scale == 1.0 else source * scale
    inner = [(name, m) for name, m in parts if same(trace.input(m), source)]
    owner = _decays(own)
    ups = {} if owner is None else _ups(trace, inner, parts)
    later = [m for _, m in parts if not same(trace.input(m), source)]
    outer = [m for m in later if m not in ups.values()]
    if len(outer) != 1 or not inner:
        raise trace.error(module, f"has linear layers ({names}) that are not in and out")
    expected = trace.input(outer[0])
    biased = any(getattr(m, "bias", None) is not None for _, m in inner)
    if scale != 1.0 and biased:
        raise trace.error(module, "scales the input of a projection with a bias")
    rows = getattr(own, "mup_vector", None)  # of what the projection gives
    rates, blocks = _rates(module), _blocks(module)
    if _has_cells(module):
        candidates: Iterator[MixerPlan] = _cells(trace, module, inner, outer[0])
    elif blocks is not None:
        candidates = _lrus(own, *blocks, inner, outer[0])
    elif rates is not None:
        candidates = _fixed(trace, module, rates, inner, outer[0], expected)
    elif owner is not None:
        candidates = _deltas_of_keys(own, owner, inner, ups, outer[0], expected)
    elif any(isinstance(getattr(own, name, None), nn.Parameter) for name in ("A_log", "dt_bias")):
        candidates = _recurrences(config, own, inner, outer[0], expected.shape[-1])
    else:
        candidates = _convolutions(own, inner, outer[0])

    def error(plan: Any) -> float:
        given = torch.cat([trace.output(m) for m in plan.input.modules], dim=-1)
        return distance(mix(plan, in_order(plan.input, given), given.dtype), expected)

    if isinstance(rows, Tensor):
        factors = rows.detach().float().flatten()
        candidates = (
            dataclasses.replace(plan, input=with_factor(plan.input, factors)) for plan in candidates
        )
    plan, off = settle(candidates, error, expected)
    if plan is None:
        name = type(module).__name__
        if off == float("inf"):
            known = "a short convolution, a gated delta net, Mamba-2, an RG-LRU, lightning attention or an mLSTM"
            raise trace.error(module, f"{name} has not the parts of {known}")
        raise trace.error(module, f"{name} computes something else (off by {off:.1e})")
    return dataclasses.replace(plan, input=with_factor(plan.input, scale))


def _blocks(module: nn.Module) -> tuple[nn.Module, list[str]] | None:
    """Return the part of a block that has two weights ``[blocks, width, width]``, and their names; or None."""
    for one in module.modules():
        shapes = [(name, p.shape) for name, p in one.named_parameters(recurse=False)]
        found = [name for name, shape in shapes if len(shape) == 3 and shape[1] == shape[2]]
        if len(found) == 2:
            return one, found
    return None


def _lrus(
    module: Any,
    owner: nn.Module,
    names: list[str],
    inner: list[tuple[str, nn.Module]],
    output: nn.Module,
) -> Iterator[MixerPlan]:
    """Yield recurrences of single channels; `names` of the weights of their gates, in `owner`."""
    conv = convolution(module)
    own = dict(owner.named_parameters(recurse=False))
    rates = [name for name, p in own.items() if p.ndim == 1]
    pairs = [(name, name.removesuffix("weight") + "bias") for name in names]
    known = all(list(own[a].shape[:2]) == list(getattr(own.get(b), "shape", ())) for a, b in pairs)
    if conv is None or len(rates) != 1 or not known or len(inner) != 2:
        return
    widths = [getattr(m, "out_features", 0) for _, m in inner]
    sizes = own[rates[0]].numel(), own[pairs[0][1]].numel(), own[pairs[1][1]].numel()
    if {*widths, *sizes} != {conv.in_channels}:
        return
    both = [m for _, m in inner]
    for first, gates in itertools.product((both, both[::-1]), (pairs, pairs[::-1])):
        for name in activations_of(module):
            if name in _POINTWISE:
                parts = linear_plan(*first), linear_plan(output), conv, owner
                yield LruPlan(*parts, rates[0], gates[0], gates[1], name)


def _convolutions(
    module: nn.Module, inner: list[tuple[str, nn.Module]], output: nn.Module
) -> Iterator[MixerPlan]:
    conv = convolution(module)
    assert conv is not None
    channels = conv.in_channels
    modules = tuple(m for _, m in inner)
    widths = [getattr(m, "out_features", 0) for m in modules]
    if sum(widths) == 3 * channels:
        yield ConvPlan(linear_plan(*modules), linear_plan(output), conv)


def _fixed(
    trace: Trace,
    module: nn.Module,
    rates: Tensor,
    inner: list[tuple[str, nn.Module]],
    output: nn.Module,
    expected: Tensor,
) -> Iterator[MixerPlan]:
    """Yield linear attentions whose heads forget at fixed rates; a fused projection goes by heads or by parts."""
    heads, width = len(rates), expected.shape[-1]
    size = width // heads
    sizes = {int(getattr(m, "out_features", 0)): m for _, m in inner}
    norm = next(m for m in module.children() if is_norm(m))
    if sorted(sizes) != [width, 3 * width] or width % heads or not trace.ran(norm):
        return
    rows = torch.arange(3 * width).view(heads, 3, size).transpose(0, 1).flatten()
    for order in (torch.cat([rows, torch.arange(3 * width, 4 * width)]), None):
        linear = linear_plan(sizes[3 * width], sizes[width], order=order)
        for name in activations_of(module):
            if name in _POINTWISE:
                yield DecayPlan(
                    *(linear, linear_plan(output), rates, match_norm(trace, norm)),
                    *(heads, size, name),
                )


def _cells(
    trace: Trace, module: Any, inner: list[tuple[str, nn.Module]], output: nn.Module
) -> Iterator[CellPlan]:
    """Yield the mLSTM of a block whose linear layers stand in the order of their rows."""
    norms = [m for m in module.children() if is_norm(m)]
    heads, cap = int(module.config.num_heads), float(module.config.gate_soft_cap or 0.0)
    widths = [int(getattr(m, "out_features", 0)) for _, m in inner]
    values = trace.input(output).shape[-1]
    keys = (sum(widths) - 2 * (values + heads)) // 2
    if not 0 < cap <= 30:  # beyond, float32 does not have the exponentials of gates
        raise trace.error(module, f"must have a gate_soft_cap above 0 and at most 30, got {cap}")
    if len(norms) != 1 or values % heads or keys % heads:
        return
    order = torch.arange(values).view(heads, -1)
    for eps in eps_of(norms[0]):
        yield CellPlan(
            *(linear_plan(*(m for _, m in inner)), linear_plan(output)),
            NormPlan("layer", norms[0], eps, order=order),
            *(heads, keys // heads, values // heads),
            cap,
        )


def _recurrences(
    config: Config, module: Any, inner: list[tuple[str, nn.Module]], output: nn.Module, width: int
) -> Iterator[MixerPlan]:
    conv = convolution(module)
    parameters = [getattr(module, name, None) for name in ("A_log", "dt_bias")]
    vectors = all(isinstance(p, nn.Parameter) and p.ndim == 1 for p in parameters)
    heads = len(parameters[0]) if vectors else 0  # type: ignore[arg-type]
    if conv is None or not heads or width % heads or (conv.in_channels - width) % 2:
        return
    norms = [m for m in module.children() if is_norm(m)]
    if len(norms) > 1:
        return
    norm = None
    if norms:
        eps = _number(norms[0], "variance_epsilon", "eps", "epsilon")
        if eps is None:
            return
        norm = NormPlan("rms", norms[0], float(eps))
    shared = (conv.in_channels - width) // 2  # features of all keys
    numbers = ("n_groups", "num_k_heads", "ngroups")
    known = [getattr(module, name, None) for name in numbers]
    known += [config.get("linear_num_key_heads"), config.get("mamba_n_groups", "n_groups"), 1]
    groups = [g for g in dict.fromkeys(known) if g and heads % g == 0 and shared % g == 0]
    size = width // heads
    if isinstance(getattr(module, "D", None), nn.Parameter):
        if len(inner) != 1:
            return
        limits = _limits(module)
        for group, own in itertools.product(groups, dict.fromkeys((groups[0], 1))):
            if width % own == 0:
                yield ScanPlan(
                    *(linear_plan(inner[0][1]), linear_plan(output), conv, module, norm, own),
                    *(group, heads, size, shared // group, limits),
                )
        return
    if norm is None:
        return
    strength = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0
    for group in groups:
        for linear in _layouts(inner, group, heads, shared // group, size):
            plan = DeltaPlan(
                *(linear, linear_plan(output), conv, module, norm),
                *(group, heads, shared // group, size, strength),
            )
            yield from (plan, dataclasses.replace(plan, opening="sigmoid"))


def _decays(module: nn.Module) -> Any:
    """Return the module of a block that has a rate for each head and a bias for each key of it, or None."""
    for one in module.modules():
        rates, bias = (getattr(one, name, None) for name in ("A_log", "dt_bias"))
        if isinstance(rates, nn.Parameter) and isinstance(bias, nn.Parameter):
            heads, keys = rates.numel(), bias.numel()
            return one if keys > heads and keys % heads == 0 and heads == max(rates.shape) else None
    return None


def _ups(
    trace: Trace, inner: list[tuple[str, nn.Module]], parts: list[tuple[str, nn.Module]]
) -> dict[nn.Module, nn.Module]:
    """Return the linear layers that read what those at the beginning of a block give, by the latter."""
    return {
        first: m
        for _, first in inner
        for _, m in parts
        if m is not first and same(trace.input(m), trace.output(first))
    }


def _deltas_of_keys(
    module: Any,
    owner: Any,
    inner: list[tuple[str, nn.Module]],
    ups: dict[nn.Module, nn.Module],
    output: nn.Module,
    expected: Tensor,
) -> Iterator[MixerPlan]:
    """Yield gated delta nets whose keys have steps of their own.

    Args:
        module: The block.
        owner: Its part that has the rates.
        inner: Linear layers that read what the block reads.
        ups: Linear layers behind some of these.
        output: The last linear layer.
        expected: What that reads.
    """
    conv = convolution(module)
    norms = [m for m in module.children() if is_norm(m)]
    named = [[m for name, m in inner if part.search(name)] for part in _EACH]
    if conv is None or len(norms) != 1 or len(inner) != 6 or any(len(one) != 1 for one in named):
        return
    parts, width = [one[0] for one in named], expected.shape[-1]
    eps = _number(norms[0], "variance_epsilon", "eps", "epsilon")
    heads, keys = owner.A_log.numel(), owner.dt_bias.numel()
    groups, odd = divmod(conv.in_channels - width, 2 * (keys // heads))
    low = [m for m in (parts[3], parts[5]) if m in ups]
    ranks = {int(getattr(m, "out_features", 0)) for m in low}
    plain = not low or (len(low) == 2 and len(ranks) == 1)
    if eps is None or width % heads or odd or groups < 1 or heads % groups or not plain:
        return
    up = (linear_plan(ups[low[0]]), linear_plan(ups[low[1]])) if low else None
    bounds = [getattr(owner, name, None) for name in ("lower_bound", "gate_lower_bound")]
    for lowest in (0.0, *(float(one) for one in bounds if isinstance(one, float) and one < 0)):
        for opening in ("sigmoid", "silu"):
            yield DeltaPlan(
                *(linear_plan(*parts), linear_plan(output), conv, owner),
                NormPlan("rms", norms[0], eps),
                *(groups, heads, keys // heads, width // heads),
                each=True,
                opening=opening,
                lowest=lowest,
                up=up,
                rank=min(ranks, default=0),
            )


def _selective(trace: Trace, module: Any, parts: dict[str, nn.Module], source: Tensor) -> MixerPlan:
    """Return the plan of a block of Mamba, whose channels have rates of their own."""
    first, middle, last = (parts.get(name) for name in ("in_proj", "x_proj", "out_proj"))
    step, conv = getattr(module, "dt_proj", None), convolution(module)
    rates, skip = module.A_log, getattr(module, "D", None)
    name = type(module).__name__
    whole = first is not None and middle is not None and last is not None and conv is not None
    if not whole or not isinstance(step, nn.Module) or set(parts) - {*_MAMBA_1}:
        raise trace.error(module, f"{name} has linear layers ({', '.join(parts)}) unlike Mamba's")
    assert first is not None and middle is not None and last is not None and conv is not None
    channels, size = rates.shape
    rank = trace.output(middle).shape[-1] - 2 * size
    fits = (
        rank > 0
        and conv.in_channels == channels == getattr(step, "out_features", 0)
        and isinstance(skip, nn.Parameter)
        and list(skip.shape) == [channels]
        and trace.output(first).shape[-1] == 2 * channels
        and same(trace.input(first), source)
    )
    if not fits:
        raise trace.error(module, f"{name} has parameters of other shapes than Mamba's")
    norms = {
        part: match_norm(trace, norm)
        for part in ("dt", "b", "c")
        for norm in [getattr(module, f"{part}_layernorm", None)]
        if isinstance(norm, nn.Module)
    }
    plan = SelectivePlan(
        *(linear_plan(first), linear_plan(last), conv, module),
        *(linear_plan(middle), linear_plan(step), rank, size),
        *(norms.get(part) for part in ("dt", "b", "c")),
    )
    off = distance(mix(plan, trace.output(first)), trace.input(last))
    if off > tolerance(trace.input(last)):
        raise trace.error(module, f"{name} computes something else (off by {off:.1e})")
    return plan


def _limits(module: Any) -> tuple[float, float] | None:
    """Return the least and the largest step; None without limits."""
    least, most = getattr(module, "time_step_limit", None) or (0.0, float("inf"))
    return None if (least, most) == (0.0, float("inf")) else (float(least), float(most))


def _number(module: nn.Module, *names: str) -> float | None:
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, float)), None)


def _layouts(
    inner: list[tuple[str, nn.Module]], groups: int, heads: int, width: int, size: int
) -> Iterator[LinearPlan]:
    """Yield projections to q, k, v, z, b and a: six or four modules, or two whose rows go by groups or by parts."""
    if len(inner) in (4, 6):
        named = [[m for name, m in inner if part.search(name)] for part in _PARTS]
        named = named[:1] + named[4:] if len(inner) == 4 else named[1:]
        if all(len(one) == 1 for one in named):
            yield linear_plan(*(one[0] for one in named))
        return
    first, gates = 2 * (groups * width + heads * size), 2 * heads
    modules = sorted((m for _, m in inner), key=lambda m: -int(getattr(m, "out_features", 0)))
    if [getattr(m, "out_features", 0) for m in modules] != [first, gates]:
        return
    each = heads // groups
    rows = torch.arange(first).view(groups, -1)
    parts = rows.split([width, width, each * size, each * size], dim=1)
    pairs = first + torch.arange(gates).view(groups, 2, each)
    order = torch.cat([*(p.flatten() for p in parts), pairs[:, 0].flatten(), pairs[:, 1].flatten()])
    yield linear_plan(*modules, order=order)
    yield linear_plan(*modules)


# --- layers with two blocks that also read the row of the token before (RWKV); each is a layer of a plan --------------

_FIRST = {"key", "value", "receptance", "output"}
_SECOND = {"key", "value", "receptance"}


def shifted_blocks(layer: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Return the two blocks of a layer that are made of a token and the one before, or None."""
    blocks = []
    for wanted in (_FIRST, _SECOND):
        named = [
            one
            for one in layer.children()
            if {n for n, m in one.named_children() if isinstance(m, nn.Linear)} == wanted
        ]
        blocks += named
    return (blocks[0], blocks[1]) if len(blocks) == 2 else None


@dataclasses.dataclass(frozen=True, slots=True)
class Shifted:
    """The plans of both blocks, and the norm that gives what the first one reads and adds to, or None."""

    first: LayerPlan
    second: LayerPlan
    entry: NormPlan | None


def match_shifted(trace: Trace, layer: nn.Module, blocks: tuple[nn.Module, nn.Module]) -> Shifted:
    """Return the plans of the blocks of a layer.

    Raises:
        MatchError: A part is not understood, or no candidate gives what a block gave.
    """
    norms = norms_of(trace, layer)
    before = [
        next((n for n in norms if same(trace.outputs[n], trace.inputs[b])), None) for b in blocks
    ]
    first, second = before
    if first is None or second is None:
        raise trace.error(layer, "has blocks that read something else than norms")
    h = trace.input(first)
    entry = next((n for n in norms if n is not first and same(trace.outputs[n], h)), None)
    start = h if entry is None else trace.input(entry)
    middle, (one, other) = trace.input(second).float(), (trace.output(b).float() for b in blocks)
    sums = ((h.float() + one, middle), (middle + other, trace.output(layer).float()))
    fits = same(start, trace.input(layer)) and len(norms) == 2 + (entry is not None)
    if not fits or any(distance(a, b) > tolerance(h) for a, b in sums):
        raise trace.error(layer, "adds its blocks in a way that is not understood")
    first_plan = _settled(trace, blocks[0], _means(trace, blocks[0]))
    second_plan = _settled(trace, blocks[1], _dense(blocks[1]))
    one_layer, other_layer = (
        LayerPlan(layer, plan, None, match_norm(trace, norm), None)
        for plan, norm in ((first_plan, first), (second_plan, second))
    )
    last = None if entry is None else match_norm(trace, entry)
    return Shifted(one_layer, other_layer, last)


def _settled(trace: Trace, block: nn.Module, candidates: Iterator[MixerPlan]) -> MixerPlan:
    """Return the candidate that gives what a block gave."""
    x, expected = trace.input(block), trace.output(block)

    def error(plan: MixerPlan) -> float:
        return distance(run_attention(plan, x), expected)

    return settled(trace, block, candidates, error, expected)


def _mixes(block: nn.Module, *names: str) -> tuple[str, ...]:
    """Return the names of the parameters that mix rows for linear layers, by the names of these."""
    own = [n for n, p in block.named_parameters(recurse=False) if p.ndim == 3]
    found = [[n for n in own if n.endswith(f"_{name}")] for name in names]
    return tuple(one[0] for one in found) if all(len(one) == 1 for one in found) else ()


def _means(trace: Trace, block: nn.Module) -> Iterator[WkvPlan]:
    mixes = _mixes(block, "key", "value", "receptance")
    vectors = [n for n, p in block.named_parameters(recurse=False) if p.ndim == 1]
    parts = dict(linears(block, trace))
    if not mixes or len(vectors) != 2:
        return
    key, value, gate, output = (
        linear_plan(parts[n]) for n in ("key", "value", "receptance", "output")
    )
    channels = trace.output(parts["key"]).shape[-1]
    for decay, first in (vectors, vectors[::-1]):
        yield WkvPlan(
            *(LinearPlan(()), output, block, mixes, key, value, gate),
            *(channels, decay, first),
        )


def _dense(block: nn.Module) -> Iterator[ShiftPlan]:
    mixes = _mixes(block, "key", "receptance")
    if mixes:
        names = "key", "receptance", "value"
        parts = (linear_plan(block.get_submodule(name)) for name in names)
        yield ShiftPlan(LinearPlan(()), LinearPlan(()), block, mixes, *parts)
