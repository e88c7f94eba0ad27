# SPDX-License-Identifier: Apache-2.0
"""From a model to a plan.

A few tokens are run through the model once, and what each module reads and gives is kept. Names and configuration say
what a part could be; the observed numbers say what it is. A plan is thereby true for those tokens in each of its
parts; `ipex_llm.arch.reference.verify` compares the whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ipex_llm.arch import DecoderPlan, ExpertsPlan
from ipex_llm.arch.detect.decoder import MatchedLayer, match_decoder, match_layers
from ipex_llm.arch.detect.decoder import match_each as _match_each
from ipex_llm.arch.detect.mlp import is_mixture, match_experts
from ipex_llm.arch.detect.trace import Config, MatchError, Trace

__all__ = ["MatchError", "MatchedLayer", "find_mixtures", "match", "match_each", "why_not"]


@torch.no_grad()
def match(model: nn.Module) -> DecoderPlan:
    """Return the plan of the decoder in a model.

    Args:
        model: A causal language model of transformers, or a module that wraps one or is its decoder, in eval mode.
            It is run once, on seven tokens.

    Returns:
        The plan. It names modules of `model`, and holds as long as they stay.

    Raises:
        MatchError: A part is not understood; the error names it.
    """
    return match_decoder(Trace(model))


@torch.no_grad()
def match_each(model: nn.Module) -> list[MatchedLayer]:
    """Return the decoder layers of a model, each with its plan or the reason why it has none.

    Args:
        model: As for `match`; what is around the layers need not be understood.

    Raises:
        MatchError: The model does not run on tokens alone, or has no layers with attention.
    """
    return list(_match_each(Trace(model)))


@torch.no_grad()
def why_not(model: nn.Module) -> tuple[MatchError, ...]:
    """Return all reasons why a model has no plan: one for each layer that is not understood, or for the model.

    Args:
        model: As for `match`.

    Returns:
        Nothing if `match` works.
    """
    try:
        trace = Trace(model)
        found = [result for _, result in match_layers(trace)]
        errors = tuple(result for result in found if isinstance(result, MatchError))
        if not errors:
            match_decoder(trace)
    except MatchError as error:
        return (error,)
    return errors


@torch.no_grad()
def find_mixtures(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertsPlan | MatchError]]:
    """Yield the mixtures of experts of any model: name, block, and plan or the reason why there is no plan.

    Args:
        model: As for `match`; the rest of it need not be understood.
    """
    blocks = {name: module for name, module in model.named_modules() if is_mixture(module)}
    if not blocks:
        return
    try:
        trace = Trace(model)
    except MatchError as error:
        yield from ((name, block, error) for name, block in blocks.items())
        return
    for name, block in blocks.items():
        if not trace.ran(block):
            yield name, block, trace.error(block, "does not run on text alone")
            continue
        try:
            yield name, block, match_experts(trace, Config(_config(model, block)), block)
        except MatchError as error:
            yield name, block, error


def _config(model: nn.Module, block: nn.Module) -> object:
    """Return the configuration of a block: its own, or the one of the innermost module around it that has one."""
    found: object = getattr(model, "config", None)
    for module in model.modules():
        if any(part is block for part in module.modules()):
            found = getattr(module, "config", found)
    return found
