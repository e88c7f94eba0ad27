# SPDX-License-Identifier: Apache-2.0
"""Experts with quantized weights on the kernels of products with packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ipex_core.library.kernels import specs
from ipex_core.library.spec import FLOATS, Arguments
from ipex_core.ops.fused_experts import ACTIVATIONS
from ipex_core.ops.moe import check_quantized_expert, has_data, is_quantized
from ipex_xpu_kernels._launch import kernel, launch_columns
from ipex_xpu_kernels._woq import product, supported


def fused_experts(a: Arguments) -> Tensor | None:
    """Compute ``torch.ops.ipex.fused_experts`` for quantized weights; None for others and what kernels do not take."""
    x: Tensor = a.hidden_states
    if x.dtype not in FLOATS or a.lowp_mode != "none" or not has_data(a.w13):
        return None
    if a.w13.device != x.device or not is_quantized(a.w13):
        return None
    from ipex_xpu_kernels import _device

    if _device.native().host_is_faster(x.device.index):
        return None
    specs()[a.op].check(a)
    hidden = x.shape[1]
    ids = a.topk_ids.cpu()
    pair = a.activation != "relu2"  # which has no gate

    def expert(rows: Tensor, prefix: str, index: int, size: int) -> Tensor | None:
        first, second = getattr(a, f"{prefix}w13"), getattr(a, f"{prefix}w2")
        layouts = [
            check_quantized_expert(a.op, f"{prefix}{name}", packed, index, n, k, gated)
            for name, packed, n, k, gated in (
                ("w13", first, (1 + pair) * size, hidden, pair),
                ("w2", second, hidden, size, False),
            )
        ]
        if not all(supported(layout) for layout in layouts):
            return None
        both = product(rows, first[index], layouts[0])
        middle = x.new_empty(rows.shape[0], size)
        bias = None if prefix or a.w13_bias is None else a.w13_bias[index].float().contiguous()
        only = (
            None if bias is None else ids.new_zeros(rows.shape[0], dtype=torch.int32).to(x.device)
        )
        launch_columns(
            *(kernel("expert_gate", x.dtype), x, rows.shape[0], size, middle, both, both.shape[1]),
            *(bias, only, size, ACTIVATIONS.index(a.activation), a.swiglu_alpha, a.swiglu_limit),
        )
        out = product(middle, second[index], layouts[1])
        return out if prefix or a.w2_bias is None else out + a.w2_bias[index].float()

    y = torch.zeros_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    for index in range(a.w13.shape[0]):
        token, place = (t.to(x.device) for t in torch.where(ids == index + a.experts_start_id))
        if token.numel() == 0:
            continue
        out = expert(x[token], "", index, a.intermediate_size)
        if out is None:
            return None
        y.index_add_(0, token, out * a.topk_weights[token, place].float().unsqueeze(1))
    if a.shared_w13 is not None and x.shape[0]:
        out = expert(x, "shared_", 0, a.shared_intermediate_size)
        if out is None:
            return None
        y += out if a.shared_weights is None else out * a.shared_weights.float().unsqueeze(1)
    return y.to(x.dtype)
