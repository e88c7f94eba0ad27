# SPDX-License-Identifier: Apache-2.0
"""The choice of experts and of tokens on the kernels of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.spec import FLOATS, Arguments
from ipex_xpu_kernels._launch import kernel, launch_rows


def _moe_routing(a: Arguments) -> tuple[Tensor, Tensor] | None:
    if a.router_logits.dtype not in FLOATS or a.scoring_func == "sparsemixer":
        return None
    tokens, experts = a.router_logits.shape
    groups = max(a.num_expert_group, 1)
    weights = a.router_logits.new_empty(tokens, a.top_k, dtype=torch.float32)
    ids = a.router_logits.new_empty(tokens, a.top_k, dtype=torch.int32)
    bias = a.e_score_correction_bias
    launch_rows(
        *(kernel("route", a.router_logits.dtype), a.router_logits, tokens, weights, ids),
        *(torch.empty_like(a.router_logits, dtype=torch.float32).contiguous(),),
        a.router_logits.new_empty(tokens, groups, dtype=torch.int64),
        *(a.router_logits, None if bias is None else bias.contiguous(), experts),
        *(*a.router_logits.stride(), a.top_k, groups, a.topk_group, a.scoring_func == "sigmoid"),
        *(a.renormalize, a.routed_scaling_factor),
    )
    return weights, ids


def _sample(
    logits: Tensor,
    noise: Tensor | None,
    seeds: Tensor | None,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> Tensor | None:
    if logits.dtype not in FLOATS:
        return None
    columns = logits.shape[-1]
    rows = logits.reshape(-1, columns).contiguous()
    tokens = logits.new_empty(logits.shape[:-1], dtype=torch.int64)
    wrong = logits.new_empty(rows.shape[0], dtype=torch.bool)
    launch_rows(
        *(kernel("sample", logits.dtype), logits, rows.shape[0], tokens, wrong, rows),
        *(x if x is None else x.contiguous() for x in (noise, seeds)),
        *(columns, float(temperature), min(top_k, columns), float(top_p), float(min_p)),
    )
    # The definition finds out what is wrong, and raises.
    return None if wrong.cpu().any() else tokens


def _sample_token(a: Arguments) -> Tensor | None:
    return _sample(a.logits, a.noise, None, a.temperature, a.top_k, a.top_p, a.min_p)


def _sample_token_seeded(a: Arguments) -> Tensor | None:
    return _sample(a.logits, None, a.seeds, 1.0, 0, 1.0, 0.0)


#: Name of an op -> what runs for tensors of the device; None: as it is defined.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "moe_routing": _moe_routing,
    "sample_token": _sample_token,
    "sample_token_seeded": _sample_token_seeded,
}
