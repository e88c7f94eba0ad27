# SPDX-License-Identifier: Apache-2.0
"""From a model to a plan.

A few tokens are run through the model once, and what each module reads and gives is kept. Names and configuration say
what a part could be; the observed numbers say what it is. A plan is thereby true for those tokens in each of its
parts; `ipex_llm._reference.verify` compares the whole.
"""

from __future__ import annotations

import torch
from torch import nn

from ipex_llm._match._decoder import match_decoder, match_layers
from ipex_llm._match._trace import MatchError, Trace
from ipex_llm._plan import DecoderPlan

__all__ = ["MatchError", "match", "why_not"]


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
