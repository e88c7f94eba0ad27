# SPDX-License-Identifier: Apache-2.0
"""One layer of a decoder: where the layers are, which norm stands where and how the blocks are added, by what
flowed between them.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from ipex_llm.arch import (
    AttentionPlan,
    ExpertsPlan,
    LayerPlan,
    MixerPlan,
    MlpPlan,
    NormPlan,
    SidePlan,
    TokenBlockPlan,
    linear_modules,
)
from ipex_llm.arch.detect.attention import (
    find_attention,
    has_head_experts,
    match_attention,
    match_head_experts,
)
from ipex_llm.arch.detect.latent import is_latent, is_shared, match_latent, match_shared
from ipex_llm.arch.detect.means import layer_with_means, means_of
from ipex_llm.arch.detect.mixer import find_mixer, match_mixer
from ipex_llm.arch.detect.parts import (
    is_mixture,
    linear_plan,
    match_experts,
    match_feed_forward,
    match_mlp,
    match_norm,
    norms_of,
    with_factor,
)
from ipex_llm.arch.detect.streams import (
    connections_of,
    layer_with_connections,
    layer_with_streams,
    match_streams,
)
from ipex_llm.arch.detect.trace import (
    Config,
    MatchError,
    Trace,
    convolved,
    distance,
    is_linear,
    is_norm,
    learned_factors,
    same,
    tolerance,
)
from ipex_llm.arch.formulas import in_order, projections


def _holders(trace: Trace) -> list[tuple[str, nn.Module, nn.ModuleList]]:
    """Return (name, owner, layers) of the stacks of layers that ran."""
    found = []
    for name, owner in trace.model.named_modules():
        for child, layers in owner.named_children():
            if not isinstance(layers, nn.ModuleList) or not len(layers):
                continue
            blocks = (_block(layer) for layer in layers)
            if any(b and trace.ran(m) for b, m in zip(blocks, layers, strict=True)):
                found.append((f"{name}.{child}".lstrip("."), owner, layers))
    return found


def _block(layer: nn.Module) -> nn.Module | None:
    """Return the block of a layer that mixes tokens, or the block of the layer in it."""
    side = side_parts(layer)
    return find_attention(layer) or find_mixer(layer if side is None else side[2])


def _embedding(trace: Trace, owner: nn.Module) -> nn.Module | None:
    for _, module in owner.named_modules():
        weight = getattr(module, "weight", None)
        if not trace.ran(module) or not isinstance(weight, Tensor) or weight.ndim != 2:
            continue
        read = trace.inputs[module]
        # The token table reads the tokens; the position table reads other integers.
        if not read.is_floating_point() and same(read, trace.ids):
            return module
    return None


def find_decoder(trace: Trace) -> tuple[nn.Module, nn.ModuleList, nn.Module]:
    """Return the module that has embedding and layers, the layers and the embedding.

    Raises:
        MatchError: There is no such module, or more than one.
    """
    holders = _holders(trace)
    if not holders:
        raise MatchError("", "has no list of layers with self attention that ran")
    if len(holders) > 1:
        names = ", ".join(name for name, _, _ in holders)
        raise MatchError("", f"has more than one list of layers: {names}")
    name, owner, layers = holders[0]
    path = name.split(".")[:-1]
    while True:
        embedding = _embedding(trace, owner)
        if embedding is not None:
            return owner, layers, embedding
        if not path:
            raise MatchError(name, "has no token embedding around it")
        path.pop()
        owner = trace.model.get_submodule(".".join(path))


@dataclasses.dataclass
class Layer:
    """The plan of a layer, and the norm of the sum at its end if it has one (post-norm decoders)."""

    plan: LayerPlan
    last_norm: NormPlan | None = None
    entry_norm: NormPlan | None = None  # of what the layer reads, and adds to
    size: float = 1.0  # behind the layer; see `LayerPlan.size`


@dataclasses.dataclass
class _Flow:
    """Norms of a layer and the tensors between its parts."""

    trace: Trace
    norms: list[nn.Module]
    h: Tensor  # what the layer reads
    y: Tensor  # what it gives
    attention: Tensor  # what its attention gives, after a norm of that
    mlp: Tensor  # what its mlp gives, after a norm of that
    mlp_in: Tensor
    input_norm: nn.Module | None = None
    mlp_norm: nn.Module | None = None

    def giving(self, x: Tensor) -> nn.Module | None:
        """Return the norm that gave `x`."""
        return next((n for n in self.norms if same(self.trace.outputs[n], x)), None)

    def reading(self, x: Tensor) -> nn.Module | None:
        """Return the norm that read `x`."""
        return next((n for n in self.norms if same(self.trace.inputs[n], x)), None)

    def plan(self, norm: nn.Module | None) -> NormPlan | None:
        return None if norm is None else match_norm(self.trace, norm)


def _factor(total: Tensor, residual: Tensor, added: Tensor) -> float | None:
    """Return s of ``total = residual + s * added``, or None if no s fits."""
    rest = (total.float() - residual.float()).double()
    part = added.double()
    scale = float((rest * part).sum() / part.square().sum().clamp_min(1e-30))
    limit = 1e-4 if total.dtype == torch.float32 else 2e-2
    if abs(scale) < 1e-3 or distance(residual.double() + scale * part, total.double()) > limit:
        return None
    close = 1e-4 if total.dtype == torch.float32 else 2e-2
    return 1.0 if abs(scale - 1.0) < close else scale


def _factors(total: Tensor, residual: Tensor, added: Tensor) -> tuple[float, float] | None:
    """Return r and s of ``total = r * residual + s * added``, or None if none fit."""
    scale = _factor(total, residual, added)
    if scale is not None:
        return 1.0, scale
    parts = torch.stack([residual.double().flatten(), added.double().flatten()])
    wanted = total.double().flatten()
    if bool(torch.linalg.matrix_rank(parts) < 2):
        return None
    first = float(torch.linalg.solve(parts @ parts.t(), parts @ wanted)[0])
    scale = None if abs(first) < 1e-3 else _factor(total, first * residual.double(), added)
    return None if scale is None else (first, scale)


def _snapped(layer: nn.Module, factor: float) -> float:
    """Return the number of a layer that is nearest to a factor that was found, or the factor if none is near."""
    numbers = [1.0, *(float(v) for v in vars(layer).values() if isinstance(v, (int, float)))]
    nearest = min(numbers, key=lambda one: abs(one - factor))
    return nearest if abs(nearest - factor) < 1e-2 * abs(factor) else factor


def _plain_sum(total: Tensor, residual: Tensor, added: Tensor) -> float | None:
    """Return 1 if ``total = residual + added``, or None."""
    off = distance(residual.double() + added.double(), total.double())
    return 1.0 if off <= tolerance(total) else None


def match_layer(
    trace: Trace,
    config: Config,
    decoder: nn.Module,
    layer: nn.Module,
    index: int,
    hint: list[AttentionPlan],
    earlier: dict[int, AttentionPlan],
) -> Layer:
    """Return the plan of one layer; `earlier` are the attentions of the layers before, by index.

    Raises:
        MatchError: A part is not understood.
    """
    if not trace.ran(layer):
        children = ", ".join(name for name, _ in layer.named_children())
        raise trace.error(layer, f"does not run on text alone (its parts: {children})")
    means = means_of(trace, layer)
    if means:
        return Layer(layer_with_means(trace, config, layer, index, means))
    side = side_parts(layer)
    if side is not None:
        return _with_side(trace, config, decoder, layer, index, hint, *side)
    module, mixer = find_attention(layer), find_mixer(layer)
    module = None if module is mixer else module
    children = ", ".join(name for name, _ in layer.named_children())
    blocks = [child for child in layer.children() if not is_norm(child)]
    if module is None and mixer is None and len(blocks) == 1:
        block = blocks[0]
        mlp: MlpPlan | ExpertsPlan
        if is_mixture(block):
            mlp = match_experts(trace, config, block)
            ends = trace.input(block), trace.output(block)
        else:
            mlp = match_mlp(trace, block)
            ends = trace.input(mlp.up.modules[0]), trace.output(mlp.down.modules[0])
        return _single(trace, LayerPlan(layer, None, mlp, None, None), *ends)
    if module is None and mixer is None:
        raise trace.error(layer, f"has no self attention among its parts ({children})")
    beside: MixerPlan | None = None
    if module is not None and mixer is not None:
        beside = match_mixer(trace, config, mixer)
    attention: AttentionPlan | MixerPlan
    if module is None:
        assert mixer is not None
        module, attention = mixer, match_mixer(trace, config, mixer)
    elif is_latent(module):
        attention = match_latent(trace, config, decoder, module, index)
    elif is_shared(module):
        attention = match_shared(trace, config, decoder, module, index)
    elif has_head_experts(module):
        attention = match_head_experts(trace, config, decoder, module, index)
    else:
        attention = match_attention(trace, config, decoder, module, index, hint, earlier)
    first, last = projections(attention)
    attention_in = trace.input(first.modules[0])
    attention_out = trace.output(last.modules[0] if last.modules else module)
    if beside is not None:
        assert mixer is not None and isinstance(attention, AttentionPlan)
        attention, beside = _scaled(trace, config, layer, attention, beside, trace.input(mixer))
        attention_in = trace.input(mixer)
        first_out, second_out = (
            in_order(one.output, trace.output(one.output.modules[0]).float())
            for one in (attention, beside)
        )
        attention_out = first_out + second_out
    if len(blocks) == 1:
        plan = LayerPlan(layer, attention, None, None, None)
        return _single(trace, plan, attention_in, attention_out)
    mlp, mlp_in, mlp_out = match_feed_forward(trace, config, layer)
    first_conv, attention_out = convolved(trace, layer, attention_out)
    last_conv, mlp_out = convolved(trace, layer, mlp_out)
    norms = norms_of(trace, layer)
    streams, connections = match_streams(trace, config, layer), connections_of(trace, layer)
    flow = _Flow(
        trace, norms, trace.input(layer), trace.output(layer), attention_out, mlp_out, mlp_in
    )
    if streams is not None or connections:  # what is read is seen in front of the norm only
        before = flow.giving(attention_in)
        row = attention_in if connections else flow.h
        flow.h = row if before is None else trace.input(before)
    flow.mlp_norm = flow.giving(mlp_in)
    before = flow.giving(attention_in)
    # A norm may give what it reads (nanochat).
    if before is not None and same(trace.inputs[before], flow.h):
        flow.input_norm = before
    elif not same(attention_in, flow.h):
        raise trace.error(module, "reads neither the layer's input nor a norm of it")
    after_attention, after_mlp = flow.reading(attention_out), flow.reading(mlp_out)
    if after_attention is not None:
        flow.attention = trace.output(after_attention)
    if after_mlp is not None:
        flow.mlp = trace.output(after_mlp)
    plan = LayerPlan(
        layer,
        attention,
        mlp,
        flow.plan(flow.input_norm),
        None,
        post_attention_norm=flow.plan(after_attention),
        post_mlp_norm=flow.plan(after_mlp),
        beside=beside,
        convs=(*first_conv, *last_conv),
    )
    if len(plan.convs) != len(getattr(attention, "convs", ())):
        raise trace.error(layer, "has short convolutions behind some of its parts alone")
    if streams is not None:
        around = flow.input_norm, flow.mlp_norm
        attended, more = (attention_in, flow.attention), _token_block(flow, plan)
        return Layer(layer_with_streams(trace, plan, streams, around, attended, flow.mlp, more))
    if connections:
        rows = flow.h, mlp_in if flow.mlp_norm is None else trace.input(flow.mlp_norm)
        given = flow.attention, flow.mlp
        return Layer(layer_with_connections(trace, plan, connections, flow.mlp_norm, rows, given))
    # Factors of a new model are one, and show only as parameters.
    found = (
        _with_gains(flow, plan)
        or _with_rates(flow, plan)
        or _parallel(flow, plan)
        or _sequential(flow, plan)
    )
    found = found or _with_more(flow, plan) or _with_added(flow, plan, module)
    found = found or _with_sizes(flow, plan)
    if found is None or (
        beside is not None and (found.plan.residual_scale != 1.0 or found.plan.residual_after_norm)
    ):
        raise trace.error(layer, "adds its blocks in a way that is not understood")
    used = [flow.input_norm, flow.mlp_norm, after_attention, after_mlp]
    if found.plan.token_block is not None:
        used.append(found.plan.token_block.norm.module)
    if isinstance(mlp, ExpertsPlan) and mlp.norms is not None:
        used += [one.module for one in (mlp.norms.input, mlp.norms.output, mlp.norms.shared)]
    spare = [n for n in norms if not any(n is u for u in used)]
    if spare and found.last_norm is None:
        raise trace.error(spare[0], "is a norm at a place that is not understood")
    return found


def _token_block(flow: _Flow, plan: LayerPlan) -> TokenBlockPlan | None:
    """Return the block of a layer that brings something else in behind the mlp, without its activation, or None."""
    trace, own = flow.trace, {id(m) for m in linear_modules(plan)}
    parts = [m for m in plan.module.children() if is_linear(m) and trace.ran(m)]
    parts = [m for m in parts if id(m) not in own]
    ends = [(m, norm) for m in parts if (norm := flow.reading(trace.output(m))) is not None]
    if len(parts) != 2 or len(ends) != 1:
        return None
    last, norm = ends[0]
    first = parts[0] if last is parts[1] else parts[1]
    return TokenBlockPlan(linear_plan(first), linear_plan(last), match_norm(trace, norm), "")


def _with_more(flow: _Flow, plan: LayerPlan) -> Layer | None:
    """Return the plan of a layer with a block behind the mlp, or with a number that multiplies all, or None."""
    numbers = [
        float(value.detach())
        for value in (*plan.module._buffers.values(), *plan.module._parameters.values())
        if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
    ]
    if len(numbers) > 1 or 0.0 in numbers or plan.beside is not None:
        return None
    block = _token_block(flow, plan)
    for number in (1.0, *numbers):
        y = flow.y.float() / number
        if block is not None:
            y = y - flow.trace.outputs[block.norm.module].float()
            read = flow.trace.inputs[block.gate.modules[0]]
            if distance(y, read) > tolerance(flow.y):
                continue
        found = _sequential(dataclasses.replace(flow, y=y.to(flow.y.dtype)), plan)
        if found is None or found.plan.residual_after_norm or found.plan.residual_scale != 1.0:
            continue
        return Layer(dataclasses.replace(found.plan, stream_scale=number, token_block=block))
    return None


def _with_added(flow: _Flow, plan: LayerPlan, module: nn.Module) -> Layer | None:
    """Return the plan of a layer that adds a parameter of its attention to what that gives, or None."""
    a = plan.attention
    if not isinstance(a, AttentionPlan) or plan.post_attention_norm is not None:
        return None
    for name, value in module.named_parameters(recurse=False):
        if value.shape != flow.h.shape[-1:]:
            continue
        output = dataclasses.replace(a.output, added=(module, name))
        own = dataclasses.replace(plan, attention=dataclasses.replace(a, output=output))
        found = _sequential(dataclasses.replace(flow, attention=flow.attention + value), own)
        if found is not None:
            return found
    return None


def _with_gains(flow: _Flow, plan: LayerPlan) -> Layer | None:
    """Return the plan of a layer that multiplies its residuals with two parameters, or None."""
    own = plan.module.named_parameters(recurse=False)
    found = {name: value for name, value in own if value.shape == flow.h.shape[-1:]}
    if len(found) != 2 or flow.mlp_norm is None:
        return None
    (first, before), (second, behind) = found.items()
    middle = flow.trace.input(flow.mlp_norm)
    fits = _plain_sum(middle, flow.h * before, flow.attention) and _plain_sum(
        flow.y, middle * behind, flow.mlp
    )
    if fits is None:
        return None
    norm = flow.plan(flow.mlp_norm)
    return Layer(dataclasses.replace(plan, mlp_norm=norm, gains=(first, second)))


def _with_rates(flow: _Flow, plan: LayerPlan) -> Layer | None:
    """Return the plan of a layer whose residuals move towards what blocks give by learned shares, or None."""
    width = flow.h.shape[-1]
    first, second = (learned_factors(plan.module, f"_{n}$", width) for n in (1, 2))
    if first is None or second is None or plan.beside is not None:
        return None
    if flow.input_norm is None or flow.mlp_norm is None:
        return None
    first, second = first.abs(), second.abs()
    middle, x = flow.trace.input(flow.mlp_norm), flow.trace.output(flow.input_norm)
    steps = (middle, x, flow.attention, first), (flow.y, flow.mlp_in, flow.mlp, second)
    if any(
        distance(torch.lerp(h.float(), y.float(), rate), total) > tolerance(total)
        for total, h, y, rate in steps
    ):
        return None
    return Layer(
        dataclasses.replace(
            plan,
            mlp_norm=flow.plan(flow.mlp_norm),
            residual_after_norm=True,
            rates=(first.cpu(), second.cpu()),
        )
    )


def of_size(norm: NormPlan | None, size: float) -> NormPlan | None:
    """Return the norm that gives of a stream what `norm` gives of the stream divided by a number."""
    return None if norm is None else dataclasses.replace(norm, eps=norm.eps * size * size)


def _with_sizes(flow: _Flow, plan: LayerPlan) -> Layer | None:
    """Return the plan of a layer whose residuals and blocks have factors, or None.

    Where ``h' = r * h + s * y``, the stream ``h' / s`` is the stream ``h * r / s`` plus `y`.
    """
    if flow.input_norm is None or flow.mlp_norm is None:
        return None
    middle = flow.trace.input(flow.mlp_norm)
    first, last = (
        _factors(middle, flow.h, flow.attention),
        _factors(flow.y, middle, flow.mlp),
    )
    if first is None or last is None:
        return None
    before, between = _root(first[0] / first[1]), _root(last[0] / last[1])
    if abs(between * first[1] - 1.0) > _close(flow.y) or plan.beside is not None:
        return None
    found = dataclasses.replace(
        plan,
        input_norm=of_size(plan.input_norm, before),
        mlp_norm=of_size(flow.plan(flow.mlp_norm), between),
        size=before,
    )
    return Layer(found, size=_root(1.0 / last[1]))


def _close(x: Tensor) -> float:
    """Return how far a factor may be off that was found, by the dtype of what it was found in."""
    return 1e-3 if x.dtype == torch.float32 else 2e-2


def _root(size: float) -> float:
    """Return the root of a whole number that is nearest to a size, or the size if none is near."""
    whole = round(size * size)
    return whole**0.5 if abs(size * size - whole) < 2e-2 * whole else size


def check_sizes(trace: Trace, found: list[Layer]) -> None:
    """Raise MatchError if the layers do not go on with the size of the stream of the layer before."""
    size = 1.0
    for layer in found:
        if abs((layer.plan.size or 1.0) - size) > _close(trace.outputs[layer.plan.module]) * size:
            raise trace.error(layer.plan.module, "has factors on its residual that are not known")
        size = layer.size


def side_parts(layer: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module] | None:
    """Return the parts of a layer with another one at its side: that one, the layer behind its output, the own block.

    None: it is no such layer (Zamba 2).
    """
    parts = list(layer.children())
    aside = [m for m in parts if find_attention(m) is not None]
    own = [m for m in parts if find_mixer(m) is not None]
    last = [m for m in parts if is_linear(m)]
    if [len(aside), len(own), len(last), len(parts)] != [1, 1, 1, 3]:
        return None
    return aside[0], last[0], own[0]


def _with_side(
    trace: Trace,
    config: Config,
    decoder: nn.Module,
    layer: nn.Module,
    index: int,
    hint: list[AttentionPlan],
    aside: nn.Module,
    last: nn.Module,
    own: nn.Module,
) -> Layer:
    """Return the plan of a layer whose parts `side_parts` gave.

    Raises:
        MatchError: A part is not understood.
    """
    h, embedded = trace.input(layer), trace.input(find_decoder(trace)[1][0])
    module = find_attention(aside)
    assert module is not None
    attention = match_attention(trace, config, decoder, module, index, hint)
    mlp, mlp_in, mlp_out = match_feed_forward(trace, config, aside)
    norms = norms_of(trace, aside)
    flow = _Flow(trace, norms, h, trace.output(layer), h, h, mlp_in)
    before, between = flow.giving(trace.input(attention.qkv.modules[0])), flow.giving(mlp_in)
    attended = trace.output(attention.output.modules[0])
    known = (
        before is not None
        and between is not None
        and len(norms) == 2
        and isinstance(mlp, MlpPlan)
        and same(trace.input(before), torch.cat([h, embedded], dim=-1))
        and same(trace.input(between), attended)
        and same(trace.input(last), mlp_out)
        and same(trace.input(own), h)
    )
    if not known:
        raise trace.error(aside, "reads or gives something that is not understood")
    assert before is not None and between is not None and isinstance(mlp, MlpPlan)
    block = find_mixer(own)
    assert block is not None
    mixer = match_mixer(trace, config, block)
    inner = norms_of(trace, own)
    total = h.float() + trace.output(last).float()
    given = in_order(mixer.output, trace.output(mixer.output.modules[0]).float())
    fits = (
        len(inner) == 1
        and distance(trace.input(inner[0]).float(), total) <= tolerance(h)
        and same(trace.output(inner[0]), trace.input(block))
        and _plain_sum(trace.output(layer), h, given) is not None
    )
    if not fits:
        raise trace.error(own, "adds its block in a way that is not understood")
    side = SidePlan(
        match_norm(trace, before), attention, match_norm(trace, between), mlp, linear_plan(last)
    )
    plan = LayerPlan(layer, mixer, None, match_norm(trace, inner[0]), None, side=side)
    return Layer(plan)


def _scaled(
    trace: Trace,
    config: Config,
    layer: nn.Module,
    attention: AttentionPlan,
    beside: MixerPlan,
    x: Tensor,
) -> tuple[AttentionPlan, MixerPlan]:
    """Return both blocks of a layer with the factors around them.

    Args:
        trace: The observed forward.
        config: Of the decoder.
        layer: The layer.
        attention: Its attention.
        beside: The block beside it.
        x: What both read, before a factor on what attention reads.
    """
    names = ("attention_in_multiplier", "attention_out_multiplier", "ssm_out_multiplier")
    first, last, other = (float(config.get(name, default=1.0)) for name in names)
    read = trace.input(attention.qkv.modules[0])
    biased = any(getattr(m, "bias", None) is not None for m in attention.qkv.modules)
    if distance(x.float() * first, read.float()) > tolerance(x) or (first != 1.0 and biased):
        raise trace.error(layer, "has blocks side by side that read different rows")
    qkv = with_factor(attention.qkv, first)
    attention = dataclasses.replace(attention, qkv=qkv, output=with_factor(attention.output, last))
    return attention, dataclasses.replace(beside, output=with_factor(beside.output, other))


def _single(trace: Trace, plan: LayerPlan, read: Tensor, given: Tensor) -> Layer:
    """Return the plan of a layer with one block, with the norms around it.

    Args:
        trace: The observed forward.
        plan: The block.
        read: What the block read.
        given: What it gave.
    """
    layer = plan.module
    norms = norms_of(trace, layer)
    flow = _Flow(trace, norms, trace.input(layer), trace.output(layer), given, given, read)
    before, behind = flow.giving(read), flow.reading(given)
    if not same(read, flow.h) and (before is None or not same(trace.inputs[before], flow.h)):
        raise trace.error(
            layer, "has a block that reads neither the layer's input nor a norm of it"
        )
    scale = _factor(flow.y, flow.h, given if behind is None else trace.output(behind))
    if scale is None or len(norms) > (before is not None) + (behind is not None):
        raise trace.error(layer, "adds its block in a way that is not understood")
    if plan.mlp is None:
        plan = dataclasses.replace(
            plan, input_norm=flow.plan(before), post_attention_norm=flow.plan(behind)
        )
    else:
        plan = dataclasses.replace(
            plan, mlp_norm=flow.plan(before), post_mlp_norm=flow.plan(behind)
        )
    return Layer(dataclasses.replace(plan, residual_scale=scale))


def _parallel(flow: _Flow, plan: LayerPlan) -> Layer | None:
    if flow.mlp_norm is None:
        if not same(flow.mlp_in, flow.h) or flow.input_norm is not None:
            return None
    elif not same(flow.trace.inputs[flow.mlp_norm], flow.h):
        return None
    scale = _factor(flow.y, flow.h, flow.attention.float() + flow.mlp.float())
    if scale is None:
        return None
    own = None if flow.mlp_norm is flow.input_norm else flow.plan(flow.mlp_norm)
    return Layer(dataclasses.replace(plan, mlp_norm=own, parallel=True, residual_scale=scale))


def _sequential(flow: _Flow, plan: LayerPlan) -> Layer | None:
    norm = flow.mlp_norm
    middle = flow.mlp_in if norm is None else flow.trace.input(norm)
    plan = dataclasses.replace(plan, mlp_norm=flow.plan(norm))
    fit = _factor if plan.beside is None else _plain_sum
    scale = fit(middle, flow.h, flow.attention)
    if scale is not None:
        last = fit(flow.y, middle, flow.mlp)
        if last is not None and abs(last - scale) < 1e-2:
            return Layer(dataclasses.replace(plan, residual_scale=scale))
    # The residual is what the norm gave.
    start = flow.h if flow.input_norm is None else flow.trace.output(flow.input_norm)
    before = _factors(middle, start, flow.attention)
    last_norm = flow.giving(flow.y)
    total = flow.y if last_norm is None else flow.trace.input(last_norm)
    behind = _factors(total, flow.mlp_in, flow.mlp)
    if before is None or behind is None or norm is None or abs(behind[1] - before[1]) > 1e-2:
        return None
    if (flow.input_norm is None) != (last_norm is not None):
        return None  # a chain that has both, or neither
    kept = _snapped(plan.module, before[0]), _snapped(plan.module, behind[0])
    scale = _snapped(plan.module, before[1])
    plan = dataclasses.replace(plan, residual_scale=scale, residual_after_norm=True)
    return Layer(dataclasses.replace(plan, residual_factors=kept), flow.plan(last_norm))
