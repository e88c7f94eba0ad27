# SPDX-License-Identifier: Apache-2.0
"""The choice of experts and of tokens on the kernels of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ipex_core.library.spec import FLOATS
from ipex_xpu_kernels._launch import kernel, launch_rows

Tensor = torch.Tensor


def _moe_routing(
    router_logits: Tensor,
    top_k: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    num_expert_group: int = 0,
    topk_group: int = 0,
    e_score_correction_bias: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    jitter: float = 0.0,
) -> tuple[Tensor, Tensor] | None:
    if router_logits.dtype not in FLOATS or scoring_func == "sparsemixer":
        return None
    tokens, experts = router_logits.shape
    groups = max(num_expert_group, 1)
    weights = router_logits.new_empty(tokens, top_k, dtype=torch.float32)
    ids = router_logits.new_empty(tokens, top_k, dtype=torch.int32)
    bias = e_score_correction_bias
    launch_rows(
        *(kernel("route", router_logits.dtype), router_logits, tokens, weights, ids),
        *(torch.empty_like(router_logits, dtype=torch.float32).contiguous(),),
        router_logits.new_empty(tokens, groups, dtype=torch.int64),
        *(router_logits, None if bias is None else bias.contiguous(), experts),
        *(*router_logits.stride(), top_k, groups, topk_group, scoring_func == "sigmoid"),
        *(renormalize, routed_scaling_factor),
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


def _sample_token(
    logits: Tensor,
    noise: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor | None:
    return _sample(logits, noise, None, temperature, top_k, top_p, min_p)


def _sample_token_seeded(logits: Tensor, seeds: Tensor) -> Tensor | None:
    return _sample(logits, None, seeds, 1.0, 0, 1.0, 0.0)


#: Name of an op -> what runs for tensors of the device; None: as it is defined.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "moe_routing": _moe_routing,
    "sample_token": _sample_token,
    "sample_token_seeded": _sample_token_seeded,
}
