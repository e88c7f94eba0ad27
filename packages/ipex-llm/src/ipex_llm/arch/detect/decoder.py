# SPDX-License-Identifier: Apache-2.0
"""The decoder of a model: embedding, layers, last norm and head, and what tokens bring into each layer (Gemma 4)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ipex_llm.arch import (
    AttentionPlan,
    DecoderPlan,
    HeadBlockPlan,
    LayerMeansPlan,
    LayerPlan,
    LinearPlan,
    MlpPlan,
    NormPlan,
    PicturePlan,
    StreamEnds,
    TokenRowsPlan,
    linear_modules,
)
from ipex_llm.arch.detect.attention import (
    keys_of_indexer,
    match_picture,
    reads_picture,
)
from ipex_llm.arch.detect.layer import (
    Layer,
    check_sizes,
    find_decoder,
    match_layer,
    of_size,
)
from ipex_llm.arch.detect.means import match_last_mean, unroll_means
from ipex_llm.arch.detect.mixer import match_shifted, shifted_blocks
from ipex_llm.arch.detect.parts import (
    activations_of,
    linear_plan,
    match_experts,
    match_norm,
    with_factor,
)
from ipex_llm.arch.detect.streams import (
    first_stream,
    halves_of,
    match_ends,
)
from ipex_llm.arch.detect.trace import (
    Config,
    MatchError,
    Trace,
    distance,
    is_linear,
    is_norm,
    learned_factors,
    linears,
    same,
    tolerance,
)
from ipex_llm.arch.formulas import activate, position_rows
from ipex_llm.arch.reference import rows_of_table


def _config(trace: Trace, decoder: nn.Module, layers: nn.ModuleList) -> Config:
    for owner in (decoder, *layers[0].modules(), trace.model):
        config = getattr(owner, "config", None)
        if config is not None:
            return Config(config)
    raise trace.error(decoder, "has no config")


def match_layers(
    trace: Trace,
) -> Iterator[tuple[nn.Module, Layer | PicturePlan | MatchError]]:
    """Yield each layer with its plan, or with the reason why it has none."""
    decoder, layers, _ = find_decoder(trace)
    config = _config(trace, decoder, layers)
    hint: list[AttentionPlan] = []
    earlier: dict[int, AttentionPlan] = {}
    every = [(layer, half) for layer in layers for half in halves_of(trace, layer)[0]]
    for index, (layer, half) in enumerate(every):
        try:
            with trace.reading(layer):
                if reads_picture(trace, layer):
                    yield layer, match_picture(trace, config, layer)
                    continue
                blocks = shifted_blocks(layer)
                if blocks is not None:
                    pair = match_shifted(trace, layer, blocks)
                    yield layer, Layer(pair.first, entry_norm=pair.entry)
                    yield layer, Layer(pair.second)
                    continue
                found = match_layer(trace, config, decoder, half, index, hint, earlier)
                if half is not layer:
                    found.plan = _whole_half(trace, config, layer, half, found.plan)
        except MatchError as error:
            yield layer, error
            continue
        attention = found.plan.cached
        if attention is not None:
            earlier[index] = attention
        if attention is None:
            pass
        elif attention.latent is attention.experts is None and not any(
            _alike(attention, old) for old in hint
        ):
            hint.append(attention)
        yield layer, found


def _whole_half(
    trace: Trace, config: Config, layer: nn.Module, half: nn.Module, plan: LayerPlan
) -> LayerPlan:
    """Return the plan of one of two layers in a module, the first with the experts that read what its mlp reads."""
    plan = dataclasses.replace(plan, module=layer)
    experts = halves_of(trace, layer)[1]
    assert experts is not None
    if not isinstance(plan.mlp, MlpPlan) or not same(
        trace.input(plan.mlp.up.modules[0]), trace.input(experts)
    ):
        return plan
    return dataclasses.replace(plan, shortcut=match_experts(trace, config, experts))


@dataclasses.dataclass(frozen=True, slots=True)
class MatchedLayer:
    """A decoder layer as `match_each` finds it."""

    name: str
    module: nn.Module
    plan: LayerPlan | MatchError
    results: int  # see `Trace.counts`
    config: object


def match_each(trace: Trace) -> Iterator[MatchedLayer]:
    """Yield each layer on its own; what is around them need not be understood.

    Raises:
        MatchError: There are no layers.
    """
    decoder, layers, _ = find_decoder(trace)
    config = _config(trace, decoder, layers)
    for module, found in dict(match_layers(trace)).items():
        plan: LayerPlan | MatchError
        if isinstance(found, MatchError):
            plan = found
        elif isinstance(found, PicturePlan):
            plan = trace.error(module, "reads a picture")
        elif found.last_norm is not None:
            plan = trace.error(module, "ends in a norm")
        elif _indexed(module):
            plan = trace.error(module, "has an indexer, which chooses the keys of each query")
        elif len(trace.runs(list(layers))) > len(layers):
            plan = trace.error(module, "is of a decoder that runs layers several times")
        elif halves_of(trace, module)[1] is not None:
            plan = trace.error(module, "runs two layers")
        elif found.plan.streams is not None:
            plan = trace.error(module, "reads several streams")
        elif found.plan.size is not None:
            plan = trace.error(module, "has factors on its residuals")
        elif found.plan.token_block is not None:
            plan = trace.error(module, "reads what the decoder made of the tokens")
        elif (
            isinstance(found.plan.attention, AttentionPlan)
            and found.plan.attention.source is not None
        ):
            plan = trace.error(module, "reads the keys and values of another layer")
        else:
            try:
                with trace.reading(module):
                    plan = _chain(config, [found])[0][0]
            except MatchError as error:
                plan = error
        yield MatchedLayer(
            trace.names[module], module, plan, trace.counts.get(module, 0), config.raw
        )


def _alike(a: AttentionPlan, b: AttentionPlan) -> bool:
    return (
        a.rope == b.rope
        and a.scale == b.scale
        and (a.qkv.order is None) == (b.qkv.order is None)
        and (a.alibi_slopes is None) == (b.alibi_slopes is None)
        and a.norm_after_rope == b.norm_after_rope
    )


def _chain(config: Config, layers: list[Layer]) -> tuple[tuple[LayerPlan, ...], NormPlan | None]:
    """Return the layers with norms at their ends moved to the next one, and the norm at the very end."""
    carried: NormPlan | None = None
    plans = []
    for layer in layers:
        plan = layer.plan
        if carried is not None:
            plan = dataclasses.replace(plan, input_norm=carried)
        carried = layer.last_norm
        factor = getattr(plan.module, "residual_scale", None) or config.get("residual_multiplier")
        if factor and abs(plan.residual_scale - factor) < 2e-2 * abs(factor):
            plan = dataclasses.replace(plan, residual_scale=float(factor))
        plans.append(plan)
    return tuple(plans), carried


@dataclasses.dataclass
class _Entry:
    """What lies between the tokens and the first layer."""

    scale: float = 1.0
    norm: NormPlan | None = None
    projection: LinearPlan | None = None
    positions: nn.Module | None = None
    offset: int = 0


def _outside(trace: Trace, decoder: nn.Module, layers: nn.ModuleList) -> list[nn.Module]:
    """Return the modules of a decoder that ran and are not in its layers."""
    inside = {id(m) for layer in layers for m in layer.modules()}
    return [m for m in decoder.modules() if id(m) not in inside and trace.ran(m)]


def _entry(
    trace: Trace,
    config: Config,
    decoder: nn.Module,
    layers: nn.ModuleList,
    table: nn.Module,
    h: Tensor,
) -> _Entry:
    entry = _Entry()
    others = _outside(trace, decoder, layers)
    given = trace.output(table).float()
    for module in others:
        reads = is_linear(module) and same(trace.inputs[module], trace.outputs[table])
        if reads and not same(trace.outputs[table], h):
            entry.projection = linear_plan(module)
            given = trace.output(module).float()
    if entry.projection is None:
        rows: Tensor = table.weight[trace.ids].float()  # type: ignore[index,operator,union-attr]
        given = rows.to(h.device)
    for module in others:
        weight = getattr(module, "weight", module._buffers.get("weights"))
        if module is table or is_linear(module) or not isinstance(weight, Tensor):
            continue
        if same(trace.inputs[module], trace.ids):  # another table of tokens
            continue
        if weight.ndim == 2 and weight.shape[-1] == h.shape[-1]:
            entry.positions = module
            entry.offset = _offset(trace, module, weight)
    target = h
    for module in others:
        if is_norm(module) and module is not table and same(trace.outputs[module], h):
            entry.norm = match_norm(trace, module)
            target = trace.input(module)
    positions = torch.zeros(())
    if entry.positions is not None:
        rows = position_rows(entry.positions)[entry.offset : entry.offset + len(trace.ids)]
        positions = rows.float()
    entry.scale = scale_of(
        trace, config, layers[0], given, target.float() - positions.to(h.device), h
    )
    return entry


def _offset(trace: Trace, module: nn.Module, weight: Tensor) -> int:
    seen = trace.output(module)
    for offset in range(min(8, len(weight) - len(seen) + 1)):
        if same(weight[offset : offset + len(seen)], seen):
            return offset
    raise trace.error(module, "is an embedding that is not one of positions from row 0 to 7 on")


def _last(
    trace: Trace,
    decoder: nn.Module,
    layers: nn.ModuleList,
    table: nn.Module,
    carried: NormPlan | None,
    x: Tensor,
) -> tuple[NormPlan | None, LinearPlan | None, Tensor]:
    """Return the norm behind the layers, which gave `x`, a projection behind that, and what comes out."""
    others = _outside(trace, decoder, layers)
    norm = carried
    for module in others:
        if is_norm(module) and same(trace.inputs[module], x):
            if carried is not None:
                raise trace.error(module, "is a second norm behind the last layer")
            norm, x = match_norm(trace, module), trace.output(module)
            break
    else:
        norm, x = _norm_of_both_ends(trace, others, norm, x)
    projection = None
    for module in others:
        if (
            is_linear(module)
            and same(trace.inputs[module], x)
            and not _is_head(trace, module, table)
        ):
            projection, x = linear_plan(module), trace.output(module)
            break
    return norm, projection, x


def _norm_of_both_ends(
    trace: Trace, others: list[nn.Module], norm: NormPlan | None, x: Tensor
) -> tuple[NormPlan | None, Tensor]:
    """Return the norm behind the layers that has run before them, too (nanochat), and what it gives of `x`."""
    if norm is not None:
        return norm, x
    read = [trace.input(m) for _, m in linears(trace.model, trace)]
    for module in others:
        if is_norm(module) and trace.inputs[module].shape[-1] == x.shape[-1]:
            y = module(x.unsqueeze(0))[0]
            if any(same(y, one) for one in read):
                return match_norm(trace, module), y
    return None, x


def _logits(trace: Trace) -> Tensor | None:
    """Return what the model gave if it has one number for each token of the vocabulary."""
    return trace.outputs.get(trace.model)


def _is_head(trace: Trace, module: nn.Module, table: nn.Module) -> bool:
    """Return whether a linear layer gives what the model gives, and that is not as wide as the token table."""
    logits = _logits(trace)
    width = trace.outputs[module].shape[-1]
    weight: Tensor = table.weight  # type: ignore[assignment]
    table_width = weight.shape[-1]
    return logits is not None and width == logits.shape[-1] and width != table_width


def _head_block(
    trace: Trace, last: list[nn.Module], x: Tensor
) -> tuple[HeadBlockPlan, Tensor] | None:
    """Return the block between the last hidden states and one of some layers, and what it gives; None without one."""
    for parent in trace.model.modules():
        parts = [m for m in parent.children() if trace.ran(m)]
        first = [m for m in parts if is_linear(m) and same(trace.inputs[m], x)]
        norms = [m for m in parts if is_norm(m)]
        if len(first) != 1 or len(norms) != 1 or trace.names[parent] == "":
            continue
        y = trace.output(norms[0])
        if not any(same(trace.inputs[m], y) for m in last):
            continue
        given = trace.output(first[0]).float()
        for name in activations_of(parent):
            if distance(activate(name, given), trace.inputs[norms[0]]) <= tolerance(x):
                norm = match_norm(trace, norms[0])
                return HeadBlockPlan(linear_plan(first[0]), name, norm), y
    return None


def _head(
    trace: Trace, config: Config, x: Tensor
) -> tuple[LinearPlan | None, HeadBlockPlan | None, float, float]:
    """Return the head, the block before it, the factor on its output and the soft cap."""
    logits = _logits(trace)
    if logits is None or same(logits, x):
        return None, None, 1.0, 0.0
    wide = logits.shape[-1]
    last = [
        m
        for _, m in linears(trace.model, trace)
        if trace.outputs[m].numel() == logits.numel()
        or same(trace.output(m)[:, :wide], logits)  # the rest is padding (Inkling)
    ]
    scalings = "logits_scaling", "logits_mup_width_multiplier"  # MiniCPM 3, Inkling
    before = 1.0 / float(config.get(*scalings, default=1.0))
    scaled = [
        m
        for m in last
        if getattr(m, "bias", None) is None
        and distance(x.float() * before, trace.inputs[m]) <= tolerance(x) / 4
    ]
    plain = [m for m in last if same(trace.inputs[m], x)]
    found = None if plain or scaled else _head_block(trace, last, x)
    block, x = (None, x) if found is None else found
    plain = plain or [m for m in last if same(trace.inputs[m], x)]
    if not plain and not scaled:
        raise MatchError("", "has no linear layer from the last hidden states to its output")
    module = (plain or scaled)[0]
    before = 1.0 if plain else before
    given = trace.output(module)[:, :wide]
    expected = logits.reshape(given.shape).float()
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    cap = float(config.get(*names, default=0.0))
    straight = cap * torch.atanh((expected / cap).double()) if cap else expected.double()
    factor = float((straight * given.double()).sum() / given.double().square().sum())
    known = [
        1.0,
        float(config.get("logit_scale", "lm_head_multiplier", default=1.0)),
        1.0 / float(config.get("logits_scaling", default=1.0)),
    ]
    factor = min(known, key=lambda value: abs(value - factor))
    result = given.float() * factor
    if cap:
        result = cap * torch.tanh(result / cap)
    if distance(result, expected) > tolerance(given):
        raise trace.error(
            module, "is followed by something that is neither a factor nor a soft cap"
        )
    plan, own = linear_plan(module), learned_factors(module, "scale$", given.shape[-1])
    if own is not None:
        plan = dataclasses.replace(with_factor(plan, own.cpu()), multiplied=True)
        products = nn.functional.linear(trace.input(module), module.get_parameter("weight"))
        if distance(products.float() * own, given) > tolerance(given):
            raise trace.error(module, "computes something else than products and factors")
    return plan, block, factor * before, cap


def _positions(config: Config, limit: int) -> int:
    """Return how many positions the plan holds for, if attention changes behind a limit (0: it does not)."""
    most = int(
        config.get(
            "max_position_embeddings",
            "n_positions",
            "max_seq_len",
            "seq_length",
            "model_max_length",
            default=2048,
        )
    )
    return min(most, limit or most)


def _chunk(config: Config) -> int:
    """Return how many positions the layers with chunked attention see at most, 0 without such layers."""
    kept = int(config.get("keep_window_size", default=0))  # beyond, Doge chooses keys
    if kept:
        return kept
    kinds = config.get("layer_types", default=["chunked_attention"])
    return int(config.get("attention_chunk_size", default=0)) * ("chunked_attention" in kinds)


def _indexed(part: nn.Module) -> int:
    """Return up to how many keys all indexers of a decoder or layer choose all, 0 without indexers."""
    found = (getattr(module, "indexer", None) for module in part.modules())
    return min((keys_of_indexer(one) for one in found if isinstance(one, nn.Module)), default=0)


def match_decoder(trace: Trace) -> DecoderPlan:
    """Return the plan of the decoder of a model whose forward was observed.

    Raises:
        MatchError: A part is not understood.
    """
    decoder, modules, table = find_decoder(trace)
    config = _config(trace, decoder, modules)
    found: list[Layer] = []
    for module, layer in match_layers(trace):
        if isinstance(layer, MatchError):
            raise layer
        if not isinstance(layer, PicturePlan):
            found.append(layer)
        elif found and found[-1].plan.picture is None and found[-1].last_norm is None:
            found[-1].plan = dataclasses.replace(found[-1].plan, picture=layer)
        else:
            raise trace.error(module, "reads a picture, and no layer before it reads the text")
    repeated = len(trace.runs(modules)) > len(modules)
    if repeated:
        plans = [layer.plan for layer in found]
        if isinstance(plans[-1].streams, LayerMeansPlan):
            found = [Layer(one) for one in unroll_means(trace, decoder, modules, plans)]
        else:
            found = _unrolled(trace, decoder, modules, found)
    for before, after in zip(modules, [] if repeated else list(modules)[1:], strict=False):
        if not same(trace.outputs[before], trace.inputs[after]):
            _halve(trace, found, before, trace.inputs[after], after)
    with trace.reading(decoder):
        return _whole(trace, config, decoder, modules, table, found)


def _unrolled(
    trace: Trace, decoder: nn.Module, modules: nn.ModuleList, found: list[Layer]
) -> list[Layer]:
    """Return a layer for each time that one ran (Dory's loops).

    Raises:
        MatchError: One reads neither what the layer before gave, nor the norm of that and of where loops began.
    """
    layers = {layer.plan.module: layer for layer in found}
    runs = trace.runs(modules)
    order = [module for module, _, _ in runs]
    again = next(m for i, m in enumerate(order) if m in order[:i])
    norms = [m for m in _outside(trace, decoder, modules) if is_norm(m)]
    if order[0] is again or len(norms) != 1 or len(found) != len(layers):
        raise trace.error(decoder, "runs layers several times, in a way that is not understood")
    norm, before = norms[0], runs[order.index(again) - 1][2]
    start = norm(before.unsqueeze(0))[0]
    result = [layers[order[0]]]
    for (_, _, given), (module, read, _) in itertools.pairwise(runs):
        layer = layers[module]
        if module is again:
            wanted = norm(given.unsqueeze(0))[0] + start
            plan = dataclasses.replace(layer.plan, restart=match_norm(trace, norm))
            layer = dataclasses.replace(layer, plan=plan)
        else:
            wanted = given
        if distance(read, wanted) > tolerance(read):
            raise trace.error(module, "does not read what the layer before gave")
        result.append(layer)
    return result


def _halve(
    trace: Trace, found: list[Layer], before: nn.Module, read: Tensor, after: nn.Module
) -> None:
    """Note that half of what a layer gives is read (RWKV, so that 16 bits suffice).

    Raises:
        MatchError: Something else is read.
    """
    if not same(trace.outputs[before] / 2, read):
        raise trace.error(after, "does not read what the layer before gave")
    layer = next(one for one in reversed(found) if one.plan.module is before)
    layer.plan = dataclasses.replace(layer.plan, stream_scale=layer.plan.stream_scale / 2)


def _whole(
    trace: Trace,
    config: Config,
    decoder: nn.Module,
    modules: nn.ModuleList,
    table: nn.Module,
    found: list[Layer],
) -> DecoderPlan:
    """Return the plan of a decoder whose layers have theirs."""
    last = trace.runs(modules)[-1][2]
    ends = [m for m in _outside(trace, decoder, modules) if is_norm(m)]
    if len(ends) == 1 and same(trace.inputs[ends[0]], last / 2):
        _halve(trace, found, modules[-1], trace.inputs[ends[0]], ends[0])
        last = last / 2
    check_sizes(trace, found)
    layers, carried = _chain(config, found)
    streams, others = layers[0].streams, _outside(trace, decoder, modules)
    h = first_stream(trace.inputs[modules[0]], streams)
    stream_ends: StreamEnds | None = None
    x = last
    if isinstance(streams, LayerMeansPlan):
        stream_ends, x = match_last_mean(trace, others, modules, layers)
    elif streams is not None:
        stream_ends, x = match_ends(trace, others, modules, streams)
        parts = [*linear_modules(stream_ends)]
        others = [m for m in others if m not in parts]
    entry = _entry(trace, config, decoder, modules, table, h)
    rows, layers = match_token_rows(trace, config, decoder, others, modules, table, layers, h)
    norm, projection, x = _last(trace, decoder, modules, table, carried, x)
    if norm is None and found[-1].size != 1.0:
        raise trace.error(decoder, "has factors on its residuals and no norm behind its layers")
    head, block, factor, cap = _head(trace, config, x)
    weight: Tensor = table.weight  # type: ignore[assignment]
    given = _logits(trace)
    logits = 0 if head is None or given is None else given.shape[-1]
    indexed = _indexed(decoder)
    limit = indexed or _chunk(config)
    return DecoderPlan(
        decoder=decoder,
        embedding=table,
        layers=layers,
        final_norm=of_size(norm, found[-1].size),
        head=head,
        hidden_size=h.shape[-1],
        dropped=0 if head is None else trace.output(head.modules[0]).shape[-1] - logits,
        vocab_size=weight.shape[0] if head is None else min(weight.shape[0], logits),
        max_positions=_positions(config, limit),
        attention_chunk=limit,
        indexed=indexed > 0,
        embedding_scale=entry.scale,
        embedding_norm=entry.norm or found[0].entry_norm,
        embedding_projection=entry.projection,
        output_projection=projection,
        position_embedding=entry.positions,
        position_offset=entry.offset,
        head_block=block,
        logit_scale=factor,
        logit_softcap=cap,
        token_rows=rows,
        streams=stream_ends,
    )


def match_token_rows(
    trace: Trace,
    config: Config,
    decoder: nn.Module,
    others: list[nn.Module],
    modules: nn.ModuleList,
    table: nn.Module,
    layers: tuple[LayerPlan, ...],
    h: Tensor,
) -> tuple[TokenRowsPlan | None, tuple[LayerPlan, ...]]:
    """Return what tokens bring for each layer, and the layers with the activations of the blocks that read it.

    Args:
        trace: The observed forward.
        config: Of the decoder.
        decoder: The module that has the layers.
        others: Its modules that ran and are not in its layers.
        modules: The layers.
        table: The embedding of the tokens.
        layers: The plans of the layers.
        h: What the first layer reads, or the first of its streams, ``[T, hidden]``.

    Raises:
        MatchError: It is not a table's rows and a projection of what the first layer reads.
    """
    blocks = [layer.token_block for layer in layers]
    if not any(blocks):
        return None, layers
    count = len(modules)
    width = trace.input(blocks[0].output.modules[0]).shape[-1] if blocks[0] else 0
    tables = [
        m
        for m in others
        if m is not table
        and isinstance(own := getattr(m, "weight", None), Tensor)
        and same(trace.inputs[m], rows_of_table(trace.ids, own))
        and trace.output(m).shape[-1] == count * width
    ]
    sources = [
        m
        for m in others
        if is_linear(m) and same(trace.inputs[m], h) and trace.output(m).shape[-1] == count * width
    ]
    norms = [
        m
        for m in others
        if is_norm(m)
        and trace.output(m).shape[-1] == width
        and trace.outputs[m].numel() == len(h) * count * width
    ]
    if not all(blocks) or [len(tables), len(sources), len(norms)] != [1, 1, 1]:
        raise trace.error(
            decoder, "gives its layers something that is not made of the tokens alone"
        )
    source, norm = sources[0], norms[0]
    given = trace.output(source).double().flatten()
    read = trace.input(norm).double().flatten()
    ratio = float((given * read).sum() / given.square().sum().clamp_min(1e-30))
    known = min((float(h.shape[-1]) ** -0.5, 1.0), key=lambda one: abs(one - ratio))
    weight: Tensor = tables[0].weight  # type: ignore[assignment]
    rows = weight[rows_of_table(trace.ids, weight)].float().view(-1, width)
    seen = trace.output(tables[0]).reshape(-1, width)
    scale = scale_of(trace, config, modules[0], rows, seen.float(), seen)
    total = trace.outputs[norm].float().view(-1, count, width) + trace.outputs[
        tables[0]
    ].float().view(-1, count, width)
    best: tuple[float, float, str] = float("inf"), 1.0, ""
    for factor in (2.0**-0.5, 1.0):
        for name in activations_of(modules[0]):
            off = 0.0
            for index, block in enumerate(blocks):
                assert block is not None
                gate = activate(name, trace.output(block.gate.modules[0]).float())
                wanted = trace.input(block.output.modules[0])
                off = max(off, distance(gate * total[:, index] * factor, wanted))
            best = min(best, (off, factor, name))
    off, factor, name = best
    if off > tolerance(h) or distance(given * known, read) > tolerance(h):
        raise trace.error(decoder, f"gives its layers something else (off by {off:.1e})")
    plan = TokenRowsPlan(
        tables[0],
        scale,
        with_factor(linear_plan(source), known),
        match_norm(trace, norm),
        width,
        factor,
    )
    found = tuple(
        dataclasses.replace(layer, token_block=dataclasses.replace(block, activation=name))
        for layer, block in zip(layers, blocks, strict=True)
        if block is not None
    )
    return plan, found


def scale_of(
    trace: Trace, config: Config, layer: nn.Module, x: Tensor, target: Tensor, like: Tensor
) -> float:
    """Return the factor between what the table gives and what the layers get.

    Raises:
        MatchError: It is no factor.
    """
    size = float(x.shape[-1]) ** 0.5
    ratio = float((x.double() * target.double()).sum() / x.double().square().sum().clamp_min(1e-30))
    # A factor that was rounded to the dtype of the model is the one that the model uses.
    exact = [1.0, size, float(config.get("embedding_multiplier", "scale_emb", default=1.0))]
    rounded = [float(torch.tensor(value).to(like.dtype)) for value in exact]
    # In models of float32, too (RecurrentGemma).
    rounded.append(float(torch.tensor(size).bfloat16()))
    candidates = [*exact, *rounded, ratio]
    errors = [distance(x * value, target) for value in candidates]
    best = min(range(len(errors)), key=errors.__getitem__)
    if errors[best] > tolerance(like) / 4:
        raise trace.error(layer, "reads something that is not made of token and position rows")
    return candidates[best]
