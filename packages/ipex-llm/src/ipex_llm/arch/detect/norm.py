# SPDX-License-Identifier: Apache-2.0
"""Tells norms apart by what they do to random numbers."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from ipex_llm.arch.detect.trace import Trace, distance
from ipex_llm.arch.reference import run_norm
from ipex_llm.arch.types import NormPlan

__all__ = ["match_norm"]

_EPS = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps", "norm_eps")


def _eps(module: nn.Module) -> list[float]:
    """Return the candidates for the epsilon of a norm."""
    for owner in module.modules():
        for name in _EPS:
            value = getattr(owner, name, None)
            if isinstance(value, float):
                return [value]
    return [1e-5, 1e-6, 1e-8, 1e-12]


@torch.no_grad()
def match_norm(trace: Trace, module: nn.Module) -> NormPlan:
    """Return the plan of a norm.

    Raises:
        MatchError: The module is neither an RMS nor a layer norm.
    """
    seen = trace.inputs[module]
    best, nearest = None, float("inf")
    tolerance = 1e-4 if seen.dtype == torch.float32 else 2e-2
    for eps in _eps(module):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(seen.shape, generator=generator) + 0.3
        # Half of the rows are so small that epsilon matters.
        x[..., ::2, :] *= max(eps, 1e-12) ** 0.5 * 2
        x = x.to(seen)
        y = module(x)
        for kind, offset in itertools.product(("rms", "layer"), (0.0, 1.0)):
            plan = NormPlan(kind, module, eps, offset)  # type: ignore[arg-type]
            weight = plan.weight
            if offset and weight is None:
                continue
            if weight is not None and weight.shape[-1] != x.shape[-1]:
                continue
            error = distance(_apply(plan, x), y)
            if error < nearest:
                best, nearest = plan, error
    if best is None or nearest > tolerance:
        raise trace.error(module, f"{type(module).__name__} is neither an RMS nor a layer norm")
    return best


def _apply(plan: NormPlan, x: torch.Tensor) -> torch.Tensor:
    weight = plan.weight
    if weight is not None and weight.ndim == 2 and x.shape[-2] != weight.shape[0]:
        # [B, heads, T, head_dim]
        return run_norm(plan, x.transpose(-3, -2)).transpose(-3, -2)
    return run_norm(plan, x)
