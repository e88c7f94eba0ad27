# SPDX-License-Identifier: Apache-2.0
"""The blocks of BERT in training: each is one node of autograd's graph and keeps no more than its gradient needs.

All work on rows of tokens, ``[tokens, hidden]``. Dropout follows from a seed (see `ipex_core.ops.softmax`),
so no mask is kept; sums for the gradients of biases come from the same pass as the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ipex_core.models.fast_bert.tokens import Tokens
from ipex_core.nn.training_linear import Choice, choose, input_gradient, product, weight_gradient

__all__ = ["LinearDropoutAddNorm", "LinearGelu", "SelfAttention"]

Tensor = torch.Tensor
_ops = torch.ops.ipex


def _gradients(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, first: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the input and the weight of a linear layer, arguments ``first`` and the next."""
    choice = _choice(x, weight)
    need_x, need_weight = ctx.needs_input_grad[first : first + 2]
    dx = input_gradient(grad, weight, choice.input) if need_x else None
    dweight = weight_gradient(grad, x, choice.weight) if need_weight else None
    return dx, dweight


def _choice(x: Tensor, weight: Tensor) -> Choice:
    return choose(weight.dtype, x.shape[0], *weight.shape)


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return product(x, weight, bias, _choice(x, weight).forward)


class LinearGelu(torch.autograd.Function):
    """``gelu(x weight^T + bias)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
        h = _linear(x, weight, bias)
        ctx.save_for_backward(x, weight, h)
        ctx.approximate = approximate
        y: Tensor = _ops.gelu(h, approximate)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, h = ctx.saved_tensors
        dh, dbias = _ops.gelu_backward(grad, h, ctx.approximate)
        return *_gradients(ctx, dh, x, weight, 0), dbias.to(weight.dtype), None


class LinearDropoutAddNorm(torch.autograd.Function):
    """``layer_norm(dropout(x weight^T + bias) + residual)``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor,
        gamma: Tensor,
        beta: Tensor,
        p: float,
        seed: Tensor,
        stream: int,
        eps: float,
    ) -> Tensor:
        h = _linear(x, weight, bias)
        y, total = _ops.dropout_add_layer_norm(h, residual, gamma, beta, p, seed, stream, eps)
        ctx.save_for_backward(x, weight, total, gamma, seed)
        ctx.rest = p, stream, eps
        result: Tensor = y
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, total, gamma, seed = ctx.saved_tensors
        p, stream, eps = ctx.rest
        dresidual, dh, columns = _ops.dropout_add_layer_norm_backward(
            grad, total, gamma, p, seed, stream, eps
        )
        dgamma, dbeta, dbias = columns.unbind()
        return (
            *_gradients(ctx, dh, x, weight, 0),
            dbias.to(weight.dtype),
            dresidual,
            dgamma.to(gamma.dtype),
            dbeta.to(gamma.dtype),
            *(None,) * 4,
        )


class SelfAttention(torch.autograd.Function):
    """Self-attention, with the projections of query, key and value, without the output projection."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        tokens: Tokens,
        heads: int,
        p: float,
        seed: Tensor,
        stream: int,
    ) -> Tensor:
        hidden = weight.shape[0] // 3
        size = hidden // heads
        scale = size**-0.5
        qkv = _linear(x, weight, bias)
        outputs, kept = [], []
        for number, group in enumerate(tokens.groups):
            count, length = group.count, group.length
            part = group.take(qkv).view(count, length, 3, heads, size)
            parts = part.permute(2, 0, 3, 1, 4).reshape(3, count * heads, length, size)
            query, key, value = parts
            scores = torch.bmm(query, key.transpose(1, 2)).view(count, heads, length, length)
            probs = _ops.softmax(scores, group.mask, scale)
            dropped = _ops.dropout(probs, p, seed, stream + number) if p else probs
            out = torch.bmm(dropped.view(-1, length, length), value)
            out = out.view(count, heads, length, size).transpose(1, 2)
            outputs.append(out.reshape(count * length, hidden))
            kept += [parts, probs]
        ctx.save_for_backward(x, weight, seed, *kept)
        ctx.rest = tokens, heads, p, stream
        return tokens.gather(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, seed, *kept = ctx.saved_tensors
        tokens, heads, p, stream = ctx.rest
        hidden = weight.shape[0] // 3
        size = hidden // heads
        gradients = []
        for number, group in enumerate(tokens.groups):
            count, length = group.count, group.length
            parts, probs = kept[2 * number : 2 * number + 2]
            query, key, value = parts
            dout = group.take_gradient(grad).view(count, length, heads, size).transpose(1, 2)
            dout = dout.reshape(count * heads, length, size)
            ddropped = torch.bmm(dout, value.transpose(1, 2)).view(probs.shape)
            dscores, dropped = _ops.softmax_dropout_backward(
                ddropped, probs, size**-0.5, p, seed, stream + number
            )
            dscores = dscores.view(-1, length, length)
            dparts = torch.empty_like(parts)
            torch.bmm(dscores, key, out=dparts[0])
            torch.bmm(dscores.transpose(1, 2), query, out=dparts[1])
            torch.bmm(dropped.view(-1, length, length).transpose(1, 2), dout, out=dparts[2])
            dpart = dparts.view(3, count, heads, length, size).permute(1, 3, 0, 2, 4)
            gradients.append(dpart.reshape(count * length, 3 * hidden))
        dqkv = tokens.gather(gradients)
        dbias = dqkv.sum(0) if ctx.needs_input_grad[2] else None
        return *_gradients(ctx, dqkv, x, weight, 0), dbias, *(None,) * 5
