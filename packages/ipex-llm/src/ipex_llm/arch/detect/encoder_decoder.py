# SPDX-License-Identifier: Apache-2.0
"""From an encoder-decoder to the plan of its decoder.

The decoder reads seven tokens and five random rows in the place of the encoder's. Linear layers that read those rows
give keys and values of cross attention; the order in which the others ran, and what they read, says what they are.
Names play no part.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ipex_llm.arch import AttentionPlan, LinearPlan, NormPlan
from ipex_llm.arch.detect.attention import scales_of
from ipex_llm.arch.detect.parts import linear_plan, match_mlp, match_norm
from ipex_llm.arch.detect.trace import (
    LENGTH,
    Config,
    MatchError,
    Trace,
    distance,
    is_linear,
    is_norm,
    linears,
    same,
    tolerance,
)
from ipex_llm.arch.encoder_decoder import (
    CrossPlan,
    PairLayerPlan,
    PairPlan,
    PositionRows,
    RelativeBias,
)

__all__ = ["is_pair", "match_pair"]

#: Rows that stand for the encoder's.
ROWS = 5


def is_pair(model: nn.Module) -> bool:
    """Return whether a model says that it is an encoder and a decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


class PairTrace(Trace):
    """What each module of a decoder read and gave for a few tokens and random rows of an encoder.

    Attributes:
        rows: Those rows, ``[1, ROWS, width]``.
        masked: Whether hiding some of them changes what the model gives.
    """

    rows: Tensor

    def _check(self, config: Any) -> None:
        if not getattr(config, "is_encoder_decoder", False):
            raise MatchError("", "is not an encoder and a decoder")

    def _call(self) -> Any:
        config = Config(self.model.config)
        width = int(config.get("d_model", "hidden_size", default=0))
        first = next(p for p in self.model.parameters() if p.is_floating_point())
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(1, ROWS, width, generator=generator).to(first)
        return self.answer()

    def answer(self, mask: Tensor | None = None) -> Any:
        """Return what the model gives with a mask of the encoder's rows."""
        from transformers.modeling_outputs import BaseModelOutput

        given = {} if mask is None else {"attention_mask": mask}
        return self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self.rows),
            decoder_input_ids=self.ids.unsqueeze(0),
            use_cache=False,
            **given,
        )


def _reading(trace: PairTrace, module: nn.Module) -> list[nn.Module]:
    """Return the linear layers within a module that read the encoder's rows."""
    return [m for _, m in linears(module, trace) if same(trace.inputs[m], trace.rows)]


def _layers(trace: PairTrace) -> tuple[nn.Module, list[nn.Module]]:
    """Return the module that has the decoder layers, and these."""
    for name, owner in trace.model.named_modules():
        for _, layers in owner.named_children():
            if not isinstance(layers, nn.ModuleList) or not len(layers):
                continue
            if all(trace.ran(one) and len(_reading(trace, one)) == 2 for one in layers):
                return _decoder(trace, name), list(layers)
    raise MatchError("", "has no list of layers that read keys and values of an encoder")


def _decoder(trace: PairTrace, name: str) -> nn.Module:
    """Return the innermost module around the layers that has a token embedding."""
    path = name.split(".") if name else []
    while True:
        owner = trace.model.get_submodule(".".join(path))
        if _embedding(trace, owner) is not None:
            return owner
        if not path:
            raise MatchError(name, "has no token embedding around it")
        path.pop()


def _embedding(trace: PairTrace, owner: nn.Module) -> nn.Module | None:
    for module in owner.modules():
        weight = getattr(module, "weight", None)
        if not trace.ran(module) or not isinstance(weight, Tensor) or weight.ndim != 2:
            continue
        read = trace.inputs[module]
        if read.is_floating_point() or not same(read, trace.ids) or is_norm(module):
            continue
        if weight.shape[0] > int(trace.ids.max()) and distance(
            _unscaled(weight[trace.ids]), _unscaled(trace.output(module))
        ) < tolerance(weight):
            return module
    return None


def _unscaled(x: Tensor) -> Tensor:
    x = x.float()
    return x / x.abs().max().clamp_min(1e-30)


# -- Layers -----------------------------------------------------------------------------------------------------------


def _heads(config: Config, attention: nn.Module, width: int) -> list[int]:
    """Return how many heads an attention may have, the likeliest first."""
    found = []
    for name in ("num_heads", "n_heads", "num_attention_heads"):
        found.append(getattr(attention, name, None))
    for name in ("decoder_attention_heads", "num_attention_heads", "num_heads"):
        found.append(config.get(name))
    whole = [int(one) for one in found if isinstance(one, int) and one > 0 and width % one == 0]
    return list(dict.fromkeys(whole))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, heads: int, scale: float, mask: Tensor | None
) -> Tensor:
    """Return the weighted values of rows ``[T, width]``; ``mask`` is added to scores ``[heads, T, S]``."""
    q, k, v = (t.float().unflatten(-1, (heads, -1)) for t in (query, key, value))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if mask is not None:
        scores = scores + mask
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def _parent(trace: PairTrace, layer: nn.Module, module: nn.Module) -> nn.Module:
    """Return the module of a layer that has a linear layer as a direct part."""
    for owner in layer.modules():
        if any(child is module for child in owner.children()):
            return owner
    raise trace.error(layer, "has parts that are not its own")


def _bias(
    trace: PairTrace, config: Config, attention: nn.Module, heads: int
) -> RelativeBias | None:
    """Return the table of an attention that is looked up by distance, or None."""
    for module in attention.modules():
        weight = getattr(module, "weight", None)
        if is_linear(module) or not trace.ran(module) or not isinstance(weight, Tensor):
            continue
        read = trace.inputs[module]
        if read.is_floating_point() or weight.ndim != 2 or weight.shape[1] != heads:
            continue
        most = getattr(attention, "relative_attention_max_distance", None)
        most = config.get("relative_attention_max_distance") if most is None else most
        if isinstance(most, int) and weight.shape[0] >= 4 and most > weight.shape[0] // 2:
            return RelativeBias(module, most)
        raise trace.error(module, "is a table of distances whose buckets are not known")
    return None


def _causal(bias: RelativeBias | None) -> Tensor:
    """Return what is added to the scores of the traced tokens, ``[heads or 1, T, T]``."""
    far = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)
    hidden = torch.zeros(LENGTH, LENGTH).masked_fill(far < 0, -math.inf)
    if bias is None:
        return hidden.unsqueeze(0)
    return bias.values(LENGTH)[:, far.clamp_min(0)] + hidden


def _self_attention(
    trace: PairTrace,
    config: Config,
    owner: nn.Module,
    inner: list[nn.Module],
    output: nn.Module,
    former: RelativeBias | None,
) -> tuple[AttentionPlan, RelativeBias | None]:
    expected = trace.input(output)
    width = expected.shape[-1]
    nearest = math.inf
    for heads in _heads(config, owner, width):
        size = width // heads
        own = _bias(trace, config, owner, heads)
        biases = [own] if own is not None else [None] if former is None else [former, None]
        for parts, bias in itertools.product(itertools.permutations(inner), biases):
            if any(trace.output(part).shape[-1] != width for part in parts):
                raise trace.error(owner, "has projections of different width")
            query, key, value = (trace.output(part).cpu() for part in parts)
            for scale in (*scales_of(config, owner, size, 0), 1.0):
                found = _attend(query, key, value, heads, scale, _causal(bias))
                nearest = min(nearest, distance(found, expected.cpu()))
                if nearest <= tolerance(expected):
                    plan = AttentionPlan(
                        linear_plan(*parts), linear_plan(output), heads, heads, size, scale
                    )
                    return plan, bias
    raise trace.error(owner, f"computes something else (off by {nearest:.1e})")


def _cross_attention(
    trace: PairTrace,
    config: Config,
    owner: nn.Module,
    query: nn.Module,
    inner: list[nn.Module],
    output: nn.Module,
) -> CrossPlan:
    expected = trace.input(output)
    width = expected.shape[-1]
    nearest = math.inf
    if any(trace.output(part).shape[-1] != width for part in (query, *inner)):
        raise trace.error(owner, "has projections of different width")
    for heads in _heads(config, owner, width):
        size = width // heads
        for parts in itertools.permutations(inner):
            q, k, v = (trace.output(part).cpu() for part in (query, *parts))
            for scale in (*scales_of(config, owner, size, 0), 1.0):
                found = _attend(q, k, v, heads, scale, None)
                nearest = min(nearest, distance(found, expected.cpu()))
                if nearest <= tolerance(expected):
                    return CrossPlan(
                        linear_plan(query),
                        linear_plan(*parts),
                        linear_plan(output),
                        heads,
                        size,
                        scale,
                    )
    raise trace.error(owner, f"computes something else (off by {nearest:.1e})")


@dataclasses.dataclass
class _Parts:
    """Linear layers of a decoder layer by the block they belong to."""

    self_in: list[nn.Module]
    self_out: nn.Module
    query: nn.Module
    keys: list[nn.Module]
    cross_out: nn.Module
    mlp: list[nn.Module]


def _parts(trace: PairTrace, layer: nn.Module) -> _Parts:
    ran = {id(module): place for place, module in enumerate(trace.inputs)}
    every = sorted((m for _, m in linears(layer, trace)), key=lambda m: ran[id(m)])
    keys = _reading(trace, layer)
    rest = [m for m in every if not any(m is k for k in keys)]
    names = ", ".join(name for name, _ in linears(layer, trace))
    if not 8 <= len(rest) <= 9:
        raise trace.error(layer, f"has linear layers ({names}) that do not form two attentions")
    inner, source = rest[:3], trace.inputs[rest[0]]
    if not all(same(trace.inputs[m], source) for m in inner):
        raise trace.error(layer, f"has linear layers ({names}) that do not read one input")
    return _Parts(inner, rest[3], rest[4], keys, rest[5], rest[6:])


def _near(a: Tensor, b: Tensor) -> bool:
    # A sum that is rounded once or twice.
    return distance(a, b) <= (1e-5 if b.dtype == torch.float32 else 2e-2)


def _norms(
    trace: PairTrace, layer: nn.Module, parts: _Parts
) -> tuple[bool, tuple[NormPlan, NormPlan, NormPlan]]:
    """Return whether norms stand before the blocks, and the norm of each block."""
    norms = [m for m in layer.modules() if is_norm(m) and trace.ran(m)]
    sources = [parts.self_in[0], parts.query, parts.mlp[0]]
    given = [parts.self_out, parts.cross_out, parts.mlp[-1]]
    if len(norms) != 3:
        raise trace.error(layer, f"has {len(norms)} norms, not one for each block")
    for first in (True, False):
        stream, found = trace.input(layer), []
        for source, out in zip(sources, given, strict=True):
            read, added = trace.input(source), trace.output(out)
            if first:
                norm = next((n for n in norms if same(trace.outputs[n], read)), None)
                if norm is None or not _near(trace.input(norm), stream):
                    break
                stream = trace.input(norm).float() + added.float()
                stream = stream.to(read.dtype)
            else:
                total = trace.input(source).float() + added.float()
                total = total.to(read.dtype)
                norm = next((n for n in norms if _near(trace.input(n), total)), None)
                if norm is None or not _near(read, stream):
                    break
                stream = trace.output(norm)
            found.append(norm)
        if len(found) == 3 and len(set(map(id, found))) == 3:
            if not _near(trace.output(layer), stream):
                continue
            plans = tuple(match_norm(trace, n) for n in found)
            return first, plans  # type: ignore[return-value]
    raise trace.error(layer, "adds its blocks in a way that is not understood")


def _layer(
    trace: PairTrace, config: Config, layer: nn.Module, former: RelativeBias | None
) -> tuple[bool, PairLayerPlan]:
    parts = _parts(trace, layer)
    first, norms = _norms(trace, layer, parts)
    attention, bias = _self_attention(
        trace,
        config,
        _parent(trace, layer, parts.self_in[0]),
        parts.self_in,
        parts.self_out,
        former,
    )
    cross = _cross_attention(
        trace,
        config,
        _parent(trace, layer, parts.query),
        parts.query,
        parts.keys,
        parts.cross_out,
    )
    block = _parent(trace, layer, parts.mlp[0])
    mlp = match_mlp(trace, block, [(trace.names[m], m) for m in parts.mlp])
    return first, PairLayerPlan(layer, attention, norms[0], cross, norms[1], mlp, norms[2], bias)


# -- Around the layers ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Start:
    """What lies between tokens and the first layer."""

    scale: float
    norm: NormPlan | None
    positions: PositionRows | None


def _others(trace: PairTrace, owner: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    inside = {id(m) for layer in layers for m in layer.modules()}
    return [m for m in owner.modules() if id(m) not in inside and trace.ran(m)]


def _position_rows(
    trace: PairTrace, others: list[nn.Module], table: nn.Module, width: int
) -> Iterator[PositionRows]:
    for module in others:
        given = trace.outputs[module]
        if module is table or is_norm(module) or is_linear(module):
            continue
        if given.numel() != LENGTH * width or next(module.children(), None) is not None:
            continue
        for name, rows in itertools.chain(
            module.named_parameters(recurse=False), module.named_buffers(recurse=False)
        ):
            if rows.ndim != 2 or rows.shape[1] != width:
                continue
            for offset in range(min(8, len(rows) - LENGTH + 1)):
                if same(rows[offset : offset + LENGTH].to(given.dtype), given):
                    yield PositionRows(module, name, offset)


def _start(
    trace: PairTrace, config: Config, decoder: nn.Module, layers: list[nn.Module], table: nn.Module
) -> _Start:
    others = _others(trace, decoder, layers)
    target = trace.input(layers[0])
    norm = None
    for module in others:
        if is_norm(module) and same(trace.outputs[module], target):
            norm, target = match_norm(trace, module), trace.input(module)
            break
    width = target.shape[-1]
    weight: Tensor = table.weight  # type: ignore[assignment]
    rows = weight[trace.ids].float()
    scales = [1.0, float(width) ** 0.5, getattr(table, "embed_scale", None)]
    for positions in (*_position_rows(trace, others, table, width), None):
        added: Tensor | float = 0.0
        if positions is not None:
            added = positions.rows[positions.offset : positions.offset + LENGTH].float()
        for scale in scales:
            if scale is None:
                continue
            if distance(rows * float(scale) + added, target) <= tolerance(weight) / 4:
                return _Start(float(scale), norm, positions)
    raise trace.error(layers[0], "reads something that is not made of token and position rows")


def _end(
    trace: PairTrace, decoder: nn.Module, layers: list[nn.Module]
) -> tuple[NormPlan | None, Tensor]:
    x = trace.output(layers[-1])
    for module in _others(trace, decoder, layers):
        if is_norm(module) and same(trace.inputs[module], x):
            return match_norm(trace, module), trace.output(module)
    return None, x


def _head(trace: PairTrace, x: Tensor) -> tuple[LinearPlan, float, tuple[nn.Module, str] | None]:
    """Return the head, a factor on what it gives, and what is added to that."""
    logits = trace.outputs.get(trace.model)
    if logits is None:
        raise MatchError("", "gives no logits")
    for _, module in linears(trace.model, trace):
        given = trace.outputs[module]
        read = trace.input(module)
        if given.numel() != logits.numel() or read.shape != x.shape:
            continue
        scale = float((read.double() * x.double()).sum() / x.double().square().sum())
        if distance(x.double() * scale, read.double()) > tolerance(x) / 4:
            continue
        exact = min((1.0, x.shape[-1] ** -0.5, x.shape[-1] ** 0.5), key=lambda s: abs(s - scale))
        if abs(exact - scale) > 1e-2 * exact:
            continue
        rest = logits.reshape(given.shape).float() - given.float()
        if distance(given, logits.reshape(given.shape)) <= 1e-6 or not bool(rest.any()):
            bias = _logit_bias(trace, logits.shape[-1])
            return linear_plan(module), exact, bias
        bias = _logit_bias(trace, logits.shape[-1])
        if bias is not None:
            value = getattr(*bias).float().reshape(-1)
            if distance(given.float() + value, logits.reshape(given.shape)) <= tolerance(given):
                return linear_plan(module), exact, bias
    raise MatchError("", "has no linear layer from the last hidden states to its output")


def _logit_bias(trace: PairTrace, size: int) -> tuple[nn.Module, str] | None:
    """Return where the model itself keeps a buffer with a number for each logit, or None."""
    for name, buffer in trace.model.named_buffers(recurse=False):
        if buffer.is_floating_point() and buffer.numel() == size and size > 1:
            return trace.model, name
    return None


@torch.no_grad()
def match_pair(model: nn.Module) -> PairPlan:
    """Return the plan of the decoder of an encoder-decoder.

    Args:
        model: A sequence-to-sequence model of transformers in eval mode. Its decoder is run on seven tokens.

    Raises:
        MatchError: A part is not understood; the error names it.
    """
    trace = PairTrace(model)
    decoder, layers = _layers(trace)
    config = Config(getattr(decoder, "config", model.config))
    table = _embedding(trace, decoder)
    assert table is not None
    with trace.reading(decoder):
        found: list[tuple[bool, PairLayerPlan]] = []
        bias: RelativeBias | None = None
        for layer in layers:
            found.append(_layer(trace, config, layer, bias))
            bias = found[-1][1].bias
        for before, after in itertools.pairwise(layers):
            if not same(trace.outputs[before], trace.inputs[after]):
                raise trace.error(after, "does not read what the layer before gave")
        if len({first for first, _ in found}) != 1:
            raise trace.error(decoder, "has norms at different places in its layers")
        start = _start(trace, config, decoder, layers, table)
        norm, x = _end(trace, decoder, layers)
        head, scale, logit_bias = _head(trace, x)
        mask = torch.ones(1, ROWS, dtype=torch.int64, device=trace.ids.device)
        mask[:, -2:] = 0
        plain, hidden = trace.outputs[model], trace.answer(mask).logits
    weight: Tensor = table.weight  # type: ignore[assignment]
    return PairPlan(
        decoder,
        table,
        tuple(layer for _, layer in found),
        found[0][0],
        norm,
        head,
        weight.shape[0],
        not same(plain, hidden),
        start.scale,
        start.norm,
        start.positions,
        scale,
        logit_bias,
    )
