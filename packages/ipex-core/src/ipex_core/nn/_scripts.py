# SPDX-License-Identifier: Apache-2.0
"""Fused operations as TorchScript functions, for programs in which no Python runs.

A trace knows one shape. Whether an op can take an operand as it is depends on the shapes of each call, so the tests are
part of the program: these functions are recorded whole, with their branches.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["function", "tracing"]

# Compiled by TorchScript, which reads annotations of the old kind only and no docstrings worth having.
_SOURCE = """
def linear(x, weight, n: int, bias: Optional[Tensor], post: str, mul: Optional[Tensor],
           residual: Optional[Tensor], residual2: Optional[Tensor]):
    # activation(x @ weight.T + bias) * mul + residual + residual2
    shape = x.size()
    shape[-1] = n
    fits = True
    if mul is not None:
        fits = fits and mul.dtype == x.dtype and mul.size() == shape
    if residual is not None:
        fits = fits and residual.dtype == x.dtype and residual.size() == shape
    if residual2 is not None:
        fits = fits and residual2.dtype == x.dtype and residual2.size() == shape
    if fits:
        return torch.ops.ipex.linear(x, weight, n, bias, residual, post, mul, residual2)
    y = torch.ops.ipex.linear(x, weight, n, bias, None, post)
    if mul is not None:
        y = y * mul
    if residual is not None:
        y = y + residual
    if residual2 is not None:
        y = y + residual2
    return y

def linear_add(x, weight, n: int, bias: Optional[Tensor], post: str, residual):
    shape = x.size()
    shape[-1] = n
    if residual.dtype == x.dtype and residual.size() == shape:
        return torch.ops.ipex.linear(x, weight, n, bias, residual, post)
    return torch.ops.ipex.linear(x, weight, n, bias, None, post) + residual

def linear_mul(x, weight, n: int, bias: Optional[Tensor], post: str, factor):
    shape = x.size()
    shape[-1] = n
    if factor.dtype == x.dtype and factor.size() == shape:
        return torch.ops.ipex.linear(x, weight, n, bias, None, post, factor)
    return torch.ops.ipex.linear(x, weight, n, bias, None, post) * factor

def add_layer_norm(x, residual, weight: Optional[Tensor], bias: Optional[Tensor], eps: float):
    if x.dtype == residual.dtype and x.size() == residual.size():
        return torch.ops.ipex.add_layer_norm(x, residual, weight, bias, eps)
    y = x + residual
    return torch.layer_norm(y, [y.size(-1)], weight, bias, eps), y

def add_rms_norm(x, residual, weight: Optional[Tensor], eps: float):
    if x.dtype == residual.dtype and x.size() == residual.size():
        return torch.ops.ipex.add_rms_norm(x, residual, weight, eps)
    y = x + residual
    return torch.ops.ipex.rms_norm(y, weight, eps), y

def conv_add(x, other, w, b: Optional[Tensor], padding: List[int], stride: List[int],
             dilation: List[int], groups: int, relu: bool):
    h = (x.size(2) + 2 * padding[0] - dilation[0] * (w.size(2) - 1) - 1) // stride[0] + 1
    l = (x.size(3) + 2 * padding[1] - dilation[1] * (w.size(3) - 1) - 1) // stride[1] + 1
    if other.dtype == x.dtype and other.size() == [x.size(0), w.size(0), h, l]:
        post: Optional[str] = None
        if relu:
            post = "relu"
        return torch.ops.mkldnn._convolution_pointwise(
            x, other, w, b, padding, stride, dilation, groups, "add", 1.0, post, [], "")
    y = torch.ops.mkldnn._convolution_pointwise(
        x, w, b, padding, stride, dilation, groups, "none", [], "")
    y = y + other
    if relu:
        y = torch.relu(y)
    return y

def attention(q, k, v, mask: Optional[Tensor], factor: float, divide: bool):
    # The scores times or divided by a number, plus a mask, through softmax, times the values.
    fits = q.dim() == 4 and k.dim() == 4 and k.size() == v.size()
    fits = fits and q.dtype == k.dtype and q.dtype == v.dtype
    fits = fits and q.size(0) == k.size(0) and q.size(1) == k.size(1) and q.size(3) == k.size(3)
    if mask is not None:
        fits = fits and (mask.dtype == q.dtype or mask.dtype == torch.float32) and mask.dim() <= 4
        if fits:
            for i in range(mask.dim()):
                full = q.size(2) if i == 1 else k.size(2)
                if i == 2:
                    full = q.size(1)
                if i == 3:
                    full = q.size(0)
                fits = fits and (mask.size(-1 - i) == 1 or mask.size(-1 - i) == full)
    if fits:
        return torch.ops.ipex.attention(q, k, v, mask, 1.0 / factor if divide else factor)
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / factor if divide else scores * factor
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, -1), v)

def sdpa(q, k, v, mask: Optional[Tensor], causal: bool, scale: Optional[float], gqa: bool):
    fits = q.dim() == 4 and k.dim() == 4 and k.size() == v.size()
    fits = fits and q.dtype == k.dtype and q.dtype == v.dtype
    fits = fits and q.size(0) == k.size(0) and q.size(3) == k.size(3)
    if fits:
        fits = q.size(1) == k.size(1) or (gqa and k.size(1) > 0 and q.size(1) % k.size(1) == 0)
    if mask is not None:
        fits = fits and not causal and mask.dim() >= 2 and mask.dim() <= 4
        fits = fits and (mask.dtype == q.dtype or mask.dtype == torch.bool)
    if fits:
        s = 0.0
        if scale is not None:
            s = scale
        return torch.ops.ipex.attention(q, k, v, mask, s, causal)
    return torch.ops.aten.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=gqa)
"""


def tracing() -> bool:
    """Return whether `torch.jit.trace` records."""
    return torch._C._get_tracing_state() is not None


@functools.cache
def _compiled() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls TorchScript deprecated
        return torch.jit.CompilationUnit(_SOURCE)


def function(name: str) -> Callable[..., Any]:
    """Return a compiled function by its name; calls of it are recorded as they are."""
    found: Callable[..., Any] = getattr(_compiled(), name)
    return found
