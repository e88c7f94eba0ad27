# SPDX-License-Identifier: Apache-2.0
"""Fused operations as TorchScript functions, for programs in which no Python runs.

A trace knows one shape. Whether an op can take an operand as it is depends on the shapes of each call, so the tests are
part of the program: these functions are recorded whole, with their branches. TorchScript compiles them from this file,
so they are written in what it understands, and their names are those that a saved program has.
"""

# TorchScript knows the ops and has lists of sizes; mypy sees ops as Any and sizes as tuples.
# mypy: disable-error-code="no-any-return,index,comparison-overlap"
# ruff: noqa: PLR1714

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ipex_core.util import quiet


def linear(
    x: Tensor,
    weight: Tensor,
    n: int,
    bias: Tensor | None,
    post: str,
    mul: Tensor | None,
    residual: Tensor | None,
    residual2: Tensor | None,
) -> Tensor:
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


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    if weight is not None and weight.dtype != torch.float32:
        x, residual = x.to(weight.dtype), residual.to(weight.dtype)
    if x.dtype == residual.dtype and x.size() == residual.size():
        return torch.ops.ipex.add_layer_norm(x, residual, weight, bias, eps)
    y = x + residual
    return torch.layer_norm(y, [y.size(-1)], weight, bias, eps), y


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    if weight is not None and weight.dtype != torch.float32:
        x, residual = x.to(weight.dtype), residual.to(weight.dtype)
    if x.dtype == residual.dtype and x.size() == residual.size():
        return torch.ops.ipex.add_rms_norm(x, residual, weight, eps)
    y = x + residual
    return torch.ops.ipex.rms_norm(y, weight, eps), y


def conv_add(
    x: Tensor,
    other: Tensor,
    w: Tensor,
    b: Tensor | None,
    padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    relu: bool,
) -> Tensor:
    # A convolution of images, plus a tensor, perhaps through relu.
    size = [x.size(0), w.size(0)]
    for i in range(len(stride)):
        reach = dilation[i] * (w.size(i + 2) - 1) + 1
        size.append((x.size(i + 2) + 2 * padding[i] - reach) // stride[i] + 1)
    # The operand of torch 2.11 fails where the result has one position.
    if other.dtype == x.dtype and other.size() == size and size[-1] * size[-2] > 1:
        # torch fuses without groups and where the images or the weight are seen to lie channels-last. What it does
        # instead knows no relu in 16 bit.
        last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        last = last or (w.size(1) > 1 and w.size(2) * w.size(3) > 1)
        fused = relu and groups == 1 and (last or x.dtype == torch.float32)
        post = "relu" if fused else None
        y = torch.ops.mkldnn._convolution_pointwise(
            x, other, w, b, padding, stride, dilation, groups, "add", 1.0, post, [], ""
        )
        return y.relu_() if relu and not fused else y
    y = torch.ops.mkldnn._convolution_pointwise(
        x, w, b, padding, stride, dilation, groups, "none", [], ""
    )
    y = y + other
    if relu:
        y = torch.relu(y)
    return y


def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
    fits = x.dtype == torch.float32 or x.dtype == torch.bfloat16 or x.dtype == torch.float16
    if weight is not None:
        fits = fits and (weight.dtype == x.dtype or weight.dtype == torch.float32)
    if fits:
        e = 1.1920928955078125e-07 if x.dtype == torch.float32 else 0.0078125
        if x.dtype == torch.float16:
            e = 0.0009765625
        if eps is not None:
            e = eps
        return torch.ops.ipex.rms_norm(x, weight, e, 0.0)
    return torch.rms_norm(x, shape, weight, eps)


def scale_and_shift(
    mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    # Of a batch norm in inference. In double: a folded weight is then as near to the unfolded arithmetic as float32
    # allows.
    scale = torch.rsqrt(variance.double() + eps)
    if weight is not None:
        scale = scale * weight.double()
    shift = -mean.double() * scale
    if bias is not None:
        shift = shift + bias.double()
    return scale.float(), shift.float()


def unfolded(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    # A batch norm whose scale and shift the linear layer before it has applied to the last dimension.
    assert mean is not None
    assert variance is not None
    if x.dim() == 2:
        return x
    scale, shift = scale_and_shift(mean, variance, weight, bias, eps)
    plain = ((x.float() - shift) / scale).to(x.dtype)
    return torch.batch_norm(plain, weight, bias, mean, variance, False, 0.0, eps, True)


def zero_state(
    x: Tensor, layers: int, bidirectional: bool, batch_first: bool, width: int
) -> Tensor:
    # What a recurrence over a batch begins with.
    batch = x.size(0) if batch_first else x.size(1)
    count = layers * 2 if bidirectional else layers
    return torch.zeros([count, batch, width], dtype=x.dtype, device=x.device)


def lstm(
    x: Tensor,
    hx: tuple[Tensor, Tensor] | None,
    weights: list[Tensor],
    bias: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    # In the dtype of the weights, of one sequence or of a batch.
    x = x.to(weights[0].dtype)
    single = x.dim() == 2
    if single:
        x = x.unsqueeze(0 if batch_first else 1)
    if hx is None:
        width = weights[1].size(1)  # of what is passed on, which a projection makes smaller
        h = zero_state(x, layers, bidirectional, batch_first, width)
        c = zero_state(x, layers, bidirectional, batch_first, weights[1].size(0) // 4)
    else:
        h, c = hx[0].to(x.dtype), hx[1].to(x.dtype)
        if single:
            h, c = h.unsqueeze(1), c.unsqueeze(1)
    y, h, c = torch.lstm(
        x, [h, c], weights, bias, layers, dropout, training, bidirectional, batch_first
    )
    if single:
        y = y.squeeze(0 if batch_first else 1)
        h, c = h.squeeze(1), c.squeeze(1)
    return y, (h, c)


def recurrent(
    mode: str,
    x: Tensor,
    hx: Tensor | None,
    weights: list[Tensor],
    bias: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    x = x.to(weights[0].dtype)
    single = x.dim() == 2
    if single:
        x = x.unsqueeze(0 if batch_first else 1)
    if hx is None:
        h = zero_state(x, layers, bidirectional, batch_first, weights[1].size(1))
    else:
        h = hx.to(x.dtype)
        if single:
            h = h.unsqueeze(1)
    if mode == "GRU":
        y, h = torch.gru(x, h, weights, bias, layers, dropout, training, bidirectional, batch_first)
    elif mode == "RNN_TANH":
        y, h = torch.rnn_tanh(
            x, h, weights, bias, layers, dropout, training, bidirectional, batch_first
        )
    else:
        y, h = torch.rnn_relu(
            x, h, weights, bias, layers, dropout, training, bidirectional, batch_first
        )
    if single:
        y, h = y.squeeze(0 if batch_first else 1), h.squeeze(1)
    return y, h


def add_in_place(y: Tensor, other: Tensor) -> Tensor:
    # The sum, in the memory of y where it fits there.
    fits = y.dtype == other.dtype and other.dim() <= y.dim()
    if fits:
        for i in range(other.dim()):
            n = other.size(-1 - i)
            fits = fits and (n == 1 or n == y.size(-1 - i))
    if fits:
        return y.add_(other)
    return y + other


def scale_in_place(y: Tensor, factor: float, divide: bool) -> Tensor:
    if y.is_floating_point():
        return y.div_(factor) if divide else y.mul_(factor)
    return y / factor if divide else y * factor


def softmax(x: Tensor, mask: Tensor | None, factor: float, divide: bool) -> Tensor:
    # Over the last dimension of the scores, times or divided by a number, plus a mask.
    fits = x.dim() > 0
    fits = fits and (
        x.dtype == torch.float32 or x.dtype == torch.bfloat16 or x.dtype == torch.float16
    )
    if mask is not None:
        fits = fits and mask.dtype == x.dtype and mask.dim() <= x.dim()
        if fits:
            for i in range(mask.dim()):
                n = mask.size(-1 - i)
                fits = fits and (n == 1 or n == x.size(-1 - i))
    if fits:
        return torch.ops.ipex.softmax(x, mask, 1.0 / factor if divide else factor)
    y = x / factor if divide else x * factor
    if mask is not None:
        y = y + mask
    return torch.softmax(y, -1)


def fill(mask: Tensor, like: Tensor, value: float) -> Tensor:
    # A mask to be added in the place of one that fills.
    zero = torch.zeros(mask.size(), dtype=like.dtype, device=like.device)
    return zero.masked_fill(mask, value)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    factor: float,
    divide: bool,
    widened: bool,
) -> Tensor:
    # The scores times or divided by a number, plus a mask, through softmax, times the values. Under autocast the scores
    # are widened to float32, and the softmax has the dtype of the values again.
    fits = q.dim() == 4 and k.dim() == 4 and k.size() == v.size() and q.dtype != torch.float64
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
    if widened and (scores.dtype == torch.bfloat16 or scores.dtype == torch.float16):
        scores = scores.to(torch.float32)
    scores = scores / factor if divide else scores * factor
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, -1)
    return torch.matmul(weights.to(v.dtype) if widened else weights, v)


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> Tensor:
    fits = q.dim() == 4 and k.dim() == 4 and k.size() == v.size() and q.dtype != torch.float64
    fits = fits and q.dtype == k.dtype and q.dtype == v.dtype
    fits = fits and q.size(0) == k.size(0) and q.size(3) == k.size(3)
    if fits:
        fits = q.size(1) == k.size(1) or (gqa and k.size(1) > 0 and q.size(1) % k.size(1) == 0)
    if mask is not None:
        fits = fits and not causal and mask.dim() >= 2 and mask.dim() <= 4
        fits = fits and (mask.dtype == q.dtype or mask.dtype == torch.bool)
    if fits:  # as `prefer_ipex_attention` says
        rows = q.size(2)
        if q.dtype == torch.float32:
            fits = rows >= 128
        elif q.size(1) == k.size(1):
            fits = rows >= 8
        else:
            fits = q.size(1) * rows >= 4 * k.size(1)
    if fits:
        s = 0.0
        if scale is not None:
            s = scale
        return torch.ops.ipex.attention(q, k, v, mask, s, causal)
    return torch.ops.aten.scaled_dot_product_attention(
        q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=gqa
    )


@functools.cache
def function(name: str) -> Callable[..., Any]:
    """Return a compiled function by its name; calls of it are recorded as they are."""
    with quiet():  # torch calls TorchScript deprecated
        found: Callable[..., Any] = torch.jit.script(globals()[name])
    return found
