# SPDX-License-Identifier: Apache-2.0
"""Linear layer in training whose products run on our kernels where that is a gain."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._jit_internal import is_scripting
from torch.nn import functional

from ipex_core.nn.call import stock_only
from ipex_core.nn.training_products import (
    STOCK,
    Choice,
    choose,
    input_gradient,
    measure,
    product,
    weight_gradient,
)

__all__ = ["TrainingLinear"]

Tensor = torch.Tensor


class TrainingLinear(nn.Linear):
    """`torch.nn.Linear` that packs its weight on the way; see `ipex_core.nn.training_products`.

    The same object as the layer it stands for: only ``__class__`` changes. Calls that our kernels do not take, and
    programs recorded by ``torch.compile``, ``torch.jit`` and ``torch.func``, have the stock op.
    """

    #: Whether to time the products at their first use instead of looking them up.
    _ipex_measure = False

    def forward(self, input: Tensor) -> Tensor:
        """Compute ``input @ weight.T + bias``."""
        if is_scripting():
            return functional.linear(input, self.weight, self.bias)
        choice = self._choice(input)
        if choice is STOCK or choice == STOCK:
            return functional.linear(input, self.weight, self.bias)
        y: Tensor = _apply(input, self.weight, self.bias, choice)
        return y

    @torch.jit.unused
    def _choice(self, x: Tensor) -> Choice:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return STOCK
        weight, bias = self.weight, self.bias
        if not (type(x) is Tensor and type(weight) in (Tensor, nn.Parameter)) or stock_only(x):
            return STOCK
        dtype, (n, k), count = weight.dtype, weight.shape, x.numel()
        if count == 0 or k == 0:
            return STOCK
        # First what is most often the answer: all the rest takes as long as some small products.
        choice = None if self._ipex_measure else choose(dtype, count // k, n, k)
        if choice is STOCK:
            return STOCK
        plain = (
            x.dtype is dtype
            and (bias is None or bias.dtype is dtype)
            and x.device.type == "cpu"
            and weight.device.type == "cpu"
            and x.shape[-1] == k
        )
        if not plain:
            return STOCK
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is not dtype:
            return STOCK  # autocast computes in another dtype than that of the weight
        return measure(dtype, count // k, n, k) if choice is None else choice


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, choice: Choice) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.choice = choice
        return product(x, weight, bias, choice.forward)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (grad,) = gradients
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        # With gradients of gradients all of it is recorded, which takes ops that have a derivative.
        choice: Choice = STOCK if torch.is_grad_enabled() else ctx.choice
        return (
            input_gradient(grad, weight, choice.input) if need_x else None,
            weight_gradient(grad, x, choice.weight) if need_weight else None,
            grad.reshape(-1, grad.shape[-1]).sum(0) if need_bias else None,
            None,
        )


_apply: Any = _Linear.apply  # untyped in torch
