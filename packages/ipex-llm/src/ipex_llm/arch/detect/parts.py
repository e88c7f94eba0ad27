# SPDX-License-Identifier: Apache-2.0
"""Norms and rotary embeddings of a layer, told apart by random numbers, the configuration and the model's buffers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ipex_core.nn.rope import ROPE_KINDS, rope_frequencies
from ipex_llm.arch import NormPlan, RopePlan
from ipex_llm.arch.detect.trace import LENGTH, Config, Trace, distance
from ipex_llm.arch.reference import run_norm

__all__ = ["match_norm", "match_ropes"]

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


# -- Rotary embeddings of a layer, from the configuration and the buffers of the model --------------------------------


def _parameters(config: Config, kind: str | None) -> list[dict[str, Any]]:
    """Return the sets of parameters that a layer of a kind may use, the likeliest first."""
    value = config.get("rope_parameters")
    if isinstance(value, Mapping) and value:
        if "rope_theta" in value or "rope_type" in value:
            return [dict(value)]
        sets = [dict(v) for k, v in value.items() if isinstance(v, Mapping) and k == kind]
        others = [dict(v) for k, v in value.items() if isinstance(v, Mapping) and k != kind]
        return [*sets, *others]
    scaling = dict(config.get("rope_scaling") or {})
    if "rope_type" not in scaling and "type" in scaling:
        scaling["rope_type"] = scaling["type"]
    scaling["rope_theta"] = config.get("rope_theta", "rotary_emb_base", default=10000.0)
    found = [scaling]
    local = config.get("rope_local_base_freq")
    if local is not None:  # of the layers with a sliding window (Gemma 3)
        plain = {"rope_type": "default", "rope_theta": local}
        found = [plain, scaling] if kind == "sliding_attention" else [scaling, plain]
    return found


def _frequencies(owner: nn.Module, kind: str | None, deep: bool) -> list[torch.Tensor]:
    modules = owner.modules() if deep else [owner, *owner.children()]
    found = []
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and not name.startswith("original"):
                # Kinds of layers have buffers of their own: "<kind>_inv_freq".
                prefix = name.removesuffix("inv_freq").rstrip("_")
                if not prefix or prefix == kind:
                    found.append(buffer)
        value = getattr(module, "inv_freq", None)
        if isinstance(value, torch.Tensor) and not any(value is f for f in found):
            found.append(value)
    return found


def _dimension(
    config: Config, attention: nn.Module, parameters: Mapping[str, Any], head_dim: int
) -> int:
    for name in ("rotary_ndims", "rotary_dim"):
        value = getattr(attention, name, None)
        if isinstance(value, int) and value > 0:
            return value
    if config.get("rotary_dim"):
        return int(config.get("rotary_dim"))
    share = parameters.get("partial_rotary_factor") or config.get(
        "partial_rotary_factor", "rotary_pct", "rotary_percentage", "rope_pct", default=1.0
    )
    return int(head_dim * float(share))


def match_ropes(
    trace: Trace,
    config: Config,
    decoder: nn.Module,
    attention: nn.Module,
    kind: str | None,
    head_dim: int,
) -> list[RopePlan]:
    """Return the rotary embeddings that a layer may use, the likeliest first; none if the model has no rotation.

    Which one it is, halves or pairs, and whether the layer rotates at all is found by the numbers of the layer.

    Raises:
        MatchError: The model's own frequencies differ from its configuration.
    """
    own = _frequencies(attention, kind, deep=True)
    shared = own or _frequencies(decoder, kind, deep=False)
    if not shared:
        shared = _frequencies(trace.model, kind, deep=True)
    # A table of the attention's own, from transformers 5.24 on of a module in the decoder.
    owners = (attention, *attention.children(), *decoder.children())
    sinusoidal = any(isinstance(getattr(m, "embed_positions", None), torch.Tensor) for m in owners)
    if not shared and not sinusoidal:
        return []
    trained = int(
        config.get("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
        or config.get("model_max_length", default=2048)
    )
    plans: list[RopePlan] = []
    for parameters in _parameters(config, kind):
        name = str(parameters.get("rope_type") or "default")
        if name not in ROPE_KINDS:
            raise trace.error(attention, f"has rotary embeddings of the unknown kind {name!r}")
        base = float(parameters.get("rope_theta") or 10000.0)
        dim = _dimension(config, attention, parameters, head_dim)
        if dim < 2 or dim % 2:  # MiMo-V2-Flash has a third of the head
            raise trace.error(attention, f"rotates {dim} features of a head, not an even number")
        scaling = {k: v for k, v in parameters.items() if k not in ("rope_theta", "rope_type")}
        original = config.get("original_max_position_embeddings")
        if name != "default" and original is not None:
            scaling.setdefault("original_max_position_embeddings", original)
        if name == "yarn":
            scaling.setdefault("original_max_position_embeddings", trained)
        plans.append(RopePlan(name, dim, base, scaling or None, True, trained))
    if shared:
        plans = _agree(trace, attention, plans, shared)
    return [variant for plan in plans for variant in (plan, dataclasses.replace(plan, half=False))]


def _agree(
    trace: Trace, attention: nn.Module, plans: list[RopePlan], buffers: list[torch.Tensor]
) -> list[RopePlan]:
    """Return the plans whose frequencies the model has, or a plain one made from the model's."""
    fitting = []
    for plan in plans:
        expected, _ = rope_frequencies(
            plan.kind,
            plan.dim,
            plan.base,
            plan.scaling,
            positions=LENGTH,
            max_position_embeddings=plan.max_position_embeddings,
        )
        if any(_equal(buffer, expected) for buffer in buffers):
            fitting.append(plan)
    if fitting:
        return fitting
    for buffer in buffers:
        values = buffer.detach().double().cpu()
        if values.ndim == 1 and len(values) > 1 and float(values[0]) == 1.0:
            dim = 2 * len(values)
            base = math.exp(-math.log(float(values[1])) * dim / 2)
            plan = RopePlan("default", dim, base, None, True, plans[0].max_position_embeddings)
            expected, _ = rope_frequencies("default", dim, base)
            if _equal(buffer, expected):
                return [plan]
    raise trace.error(attention, "has rotary frequencies that its configuration does not explain")


def _equal(buffer: torch.Tensor, expected: torch.Tensor) -> bool:
    values = buffer.detach().double().cpu()
    # Buffers may have been cast together with the model.
    exact = buffer.dtype in (torch.float32, torch.float64)
    rtol, atol = (1e-4, 0.0) if exact else (1e-2, 6e-8)  # float16 has steps of 6e-8 near zero
    return values.shape == expected.shape and torch.allclose(values, expected, rtol=rtol, atol=atol)
