# SPDX-License-Identifier: Apache-2.0
"""What tokens bring into a decoder: factors on embeddings, and rows for each layer (Gemma 4)."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ipex_llm.arch import LayerPlan, TokenRowsPlan
from ipex_llm.arch.detect.parts import activations_of, linear_plan, match_norm, with_factor
from ipex_llm.arch.detect.trace import Config, Trace, distance, is_linear, is_norm, same, tolerance
from ipex_llm.arch.reference import activate, rows_of_table

Tensor = torch.Tensor


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
