# SPDX-License-Identifier: Apache-2.0
"""Fused functions that rewritten forwards call.

Each takes the kernel where one exists for the operands at hand and otherwise computes the same with stock ops, so a
rewritten forward is valid for every input its original was valid for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ipex_core.kernels import measured
from ipex_core.kernels.policy import has_kernel, prefer_ipex_attention, prefer_ipex_bmm
from ipex_core.library.spec import FLOATS
from ipex_core.module_swap.base import call, has_hooks, stock_only
from ipex_core.nn.ipex_api import roi_align_helper as _roi_align_helper
from ipex_core.nn.ipex_api.detection import (
    batch_score_nms,
    box_head_nms,
    locations_to_boxes,
    nms,
    parallel_scale_back_batch,
    rpn_nms,
)
from ipex_core.nn.ipex_api.interaction import InteractionFunc, interaction
from ipex_core.nn.ipex_api.kv_cache import indirect_access_kv_cache_attention
from ipex_core.nn.ipex_api.lora import (
    bgmv_expand,
    bgmv_expand_slice,
    bgmv_shrink,
    sgmv_expand,
    sgmv_expand_slice,
    sgmv_shrink,
)
from ipex_core.nn.ipex_api.state_space import (
    causal_conv1d_fn,
    causal_conv1d_update,
    selective_scan_fn,
    selective_state_update,
)
from ipex_core.nn.linear import finish, is_fusable
from ipex_core.nn.torchscript import function
from ipex_core.ops.linear import activate
from ipex_core.packing.parameter import exporting
from ipex_core.util.symbolic import hints, tracing

__all__ = [
    "KERNEL_DTYPES",
    "InteractionFunc",
    "_roi_align_helper",
    "act_mul",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "batch_score_nms",
    "bgmv_expand",
    "bgmv_expand_slice",
    "bgmv_shrink",
    "bmm",
    "box_head_nms",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "gelu",
    "indirect_access_kv_cache_attention",
    "interaction",
    "layer_norm",
    "linear",
    "locations_to_boxes",
    "nms",
    "parallel_scale_back_batch",
    "rms_norm",
    "rpn_nms",
    "selective_scan_fn",
    "selective_state_update",
    "sgmv_expand",
    "sgmv_expand_slice",
    "sgmv_shrink",
]

#: dtypes that the ipex kernels take.
KERNEL_DTYPES = FLOATS


def _native(op: str, *tensors: Tensor | None) -> bool:
    first = tensors[0]
    assert first is not None
    if first.dtype not in FLOATS or first.device.type != "cpu" or not has_kernel(op):
        return False
    if stock_only(first):
        return False
    return all(t is None or t.dtype is first.dtype or t.dtype is torch.float32 for t in tensors[1:])


def linear(
    module: nn.Module,
    x: Tensor,
    post: str = "none",
    residual: Tensor | None = None,
    mul: Tensor | None = None,
    residual2: Tensor | None = None,
) -> Tensor:
    """Run a linear layer with what follows it: ``activation(module(x)) * mul + residual + residual2``."""
    if not has_hooks(module) and is_fusable(module):
        return module.fused(x, post, residual, mul, residual2)
    return finish(module(x), post, residual, mul, residual2)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Multiply the matrices of a batch, with the signature of the stock function."""
    fits = a.dim() == 3 and b.dim() == 3
    if fits and measured.stays_stock("bmm", a, b.shape[2]):
        return torch.bmm(a, b)
    fits = fits and a.dtype is b.dtype and a.shape[::2] == b.shape[:2]
    fits = fits and not torch.is_grad_enabled() and _native("bmm", a)
    if fits and prefer_ipex_bmm(a.shape, b.shape, a.dtype):
        return call(torch.ops.ipex.bmm.default, a, b)
    return torch.bmm(a, b)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Apply GELU."""
    if _native("gelu", x):
        return call(torch.ops.ipex.gelu.default, x, approximate)
    return F.gelu(x, approximate=approximate)


def act_mul(gate: Tensor, up: Tensor, post: str) -> Tensor:
    """Compute ``activation(gate) * up``."""
    # Not in a trace: at other shapes one of them might have to be broadcast.
    if not tracing() and gate.shape == up.shape and gate.dtype is up.dtype:
        y: Tensor
        if post == "silu" and _native("silu_mul", gate, up):
            y = call(torch.ops.ipex.silu_mul.default, gate, up)
            return y
        if post in ("gelu", "gelu_tanh") and _native("gelu_mul", gate, up):
            y = call(
                torch.ops.ipex.gelu_mul.default, gate, up, "tanh" if post == "gelu_tanh" else "none"
            )
            return y
    return activate(gate, post) * up


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalize over the last dimension."""
    if _native("layer_norm", x, weight, bias):
        return call(torch.ops.ipex.layer_norm.default, x, weight, bias, eps)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """Normalize over the last dimension by the root mean square, in float32."""
    if _native("rms_norm", x, weight):
        return call(torch.ops.ipex.rms_norm.default, x, weight, eps, offset)
    wide = x.float()
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    if weight is None:
        return y
    return (weight if offset == 0.0 else weight + offset) * y


def _addable(op: str, x: Tensor, residual: Tensor, *rest: Tensor | None) -> bool:
    same = x.dtype is residual.dtype and (tracing() or x.shape == residual.shape)
    return same and _native(op, x, *rest)


def add_layer_norm(x: Tensor, residual: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the layer norm of ``x + residual``, and the sum."""
    assert isinstance(norm, nn.LayerNorm)
    weight, bias = norm.weight, norm.bias
    plain = has_hooks(norm) or len(norm.normalized_shape) != 1
    if not plain and _addable("add_layer_norm", x, residual, weight, bias):
        op = function("add_layer_norm") if tracing() else torch.ops.ipex.add_layer_norm.default
        y, total = call(op, x, residual, weight, bias, norm.eps)
        return y, total
    total = x + residual
    return norm(total), total


def add_rms_norm(x: Tensor, residual: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of ``x + residual``, and the sum."""
    assert isinstance(norm, nn.RMSNorm)
    weight = norm.weight
    plain = has_hooks(norm) or len(norm.normalized_shape) != 1
    if not plain and _addable("add_rms_norm", x, residual, weight):
        eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
        op = function("add_rms_norm") if tracing() else torch.ops.ipex.add_rms_norm.default
        y, total = call(op, x, residual, weight, eps)
        return y, total
    total = x + residual
    return norm(total), total


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention with the signature of the stock function."""
    y: Tensor
    if tracing() and not dropout_p and _native("attention", query):
        sdpa = function("sdpa")
        y = call(sdpa, query, key, value, attn_mask, is_causal, scale, enable_gqa)
        return y
    if _stays_stock(
        query, key
    ):  # first: a step of decoding takes as long as looking at all the rest
        if scale is None and not enable_gqa:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal
            )
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attention_supported(query, key, value, attn_mask, dropout_p, is_causal):
        y = call(
            torch.ops.ipex.attention.default,
            query,
            key,
            value,
            attn_mask,
            0.0 if scale is None else scale,
            is_causal,
        )
        return y
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


_preferred: dict[Any, bool] = {}


def _stays_stock(query: Tensor, key: Tensor) -> bool:
    """Return whether plain tensors have shapes at which the stock op is faster, as a call before has found out."""
    if type(query) is not Tensor or type(key) is not Tensor or torch.compiler.is_compiling():
        return False
    if query.is_nested or key.is_nested:
        return False
    shapes = (query.shape, key.shape, query.dtype, torch.get_num_threads())
    known = _preferred.get(shapes)
    if measured.is_forced("attention"):
        return False
    if known is None:
        if query.dim() != 4 or key.dim() != 4 or exporting() or tracing():
            return False
        if len(_preferred) >= 4096:  # a cache that grows has other shapes at each step
            _preferred.clear()
        known = _preferred[shapes] = prefer_ipex_attention(query.shape, key.shape, query.dtype)
    return not known


def attention_supported(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> bool:
    """Return whether the native attention computes this call and is the better choice."""
    if dropout_p or query.dim() != 4 or key.dim() != 4 or not _native("attention", query):
        return False
    if key.shape != value.shape or query.dtype is not key.dtype or key.dtype is not value.dtype:
        return False
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        return False
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        return False
    if mask is not None and (
        is_causal or mask.dtype not in (torch.bool, torch.float32, query.dtype)
    ):
        return False
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        return False  # the stock op has a fused backward
    return _attention_preferred(query, key)


def _attention_preferred(query: Any, key: Any) -> bool:
    """Return whether the kernel is faster than the stock op at these shapes."""
    if exporting():
        # Comparing symbolic sizes would limit the program to those on this side.
        return prefer_ipex_attention(hints(query.shape), hints(key.shape), query.dtype)
    return prefer_ipex_attention(query.shape, key.shape, query.dtype)
