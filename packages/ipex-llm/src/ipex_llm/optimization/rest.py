# SPDX-License-Identifier: Apache-2.0
"""`ipex.optimize` for what a language model has besides its programs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

import ipex_core
from ipex_core.optimization.passes.prepack import PACKED_LATER
from ipex_llm.arch.layers import Found, planned_modules
from ipex_llm.arch.types import DecoderPlan

__all__ = ["optimize_rest"]


def optimize_rest(
    model: nn.Module,
    dtype: torch.dtype | None,
    layers: Sequence[Found],
    plan: DecoderPlan | None = None,
) -> None:
    """Optimize a model but for packing the linear layers that plans pack side by side."""
    modules: list[nn.Module] = [] if plan is None else [*plan.linear_modules()]
    modules += planned_modules(layers)
    for module in modules:
        module.__dict__[PACKED_LATER] = True
    try:
        ipex_core.optimize(model, dtype=dtype, inplace=True)
    finally:
        for module in modules:
            module.__dict__.pop(PACKED_LATER, None)
