# SPDX-License-Identifier: Apache-2.0
"""Linear layers in training, and their products with packed operands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn import functional

from ipex_core.kernels import providers
from ipex_core.kernels.policy import fastest, has_kernel, numbers
from ipex_core.library.checks import dtype_name
from ipex_core.module_swap.base import below_autograd, stock_only
from ipex_core.module_swap.state_dict import FORMER


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which of the three products run on our kernel."""

    forward: bool
    input: bool
    weight: bool


STOCK = Choice(False, False, False)

#: Rows from which packing on the way pays. Measured on Zen 4 (AVX512-BF16), 2 threads, torch 2.13, 64 to 4096 rows,
#: 256 x 256 to 3072 x 768 weights, as times stock: bfloat16, forward 1.02-1.60; gradient of the input 1.01-1.26, but
#: 0.90-0.99 for 256 x 256 from 256 rows on; gradient of the weight 1.05-1.40 from 1024 rows and 512 x 512 on, else
#: 0.79-1.07. float32 from 512 x 512 on: forward 1.08-1.59, gradient of the input 1.06-1.49, of the weight 1.01-1.42
#: from 3072 x 768 on, else 0.99-1.10.
LEAST_ROWS = 64
#: Weights from which it pays. In float32 smaller ones gain as well (1.1), but then small networks would no longer give
#: the bits of stock PyTorch.
LEAST_WEIGHTS = {torch.bfloat16: 65536, torch.float32: 524288}


def why_not(dtype: torch.dtype, n: int, k: int) -> str | None:
    """Return why products with an ``[n, k]`` weight stay in stock PyTorch, whatever the rows; None if they do not."""
    if not has_kernel("bmm"):
        return "no kernel package is installed"
    if dtype not in LEAST_WEIGHTS:
        return f"products in {dtype_name(dtype)} stay in stock PyTorch"
    if n * k < LEAST_WEIGHTS[dtype]:
        return f"the weight has fewer than {LEAST_WEIGHTS[dtype]} elements"
    level = providers.cpu_level()
    if level not in _LEVELS:
        return f"no gain was measured for {dtype_name(dtype)} at ISA level {level}; auto_kernel_selection=True measures"
    return None


#: Where the table holds. At avx512_vnni, on a Xeon without AVX512-BF16, float32 was 0.82-0.98 times stock forward and
#: 0.41-1.01 for the gradient of the input: what stock reaches there is what its library has for that CPU.
_LEVELS: Container[str] = ("avx512_bf16",)


def choose(dtype: torch.dtype, rows: int, n: int, k: int) -> Choice:
    """Choose from the table of what was measured.

    Args:
        dtype: Of the weight and the input.
        rows: Of the input.
        n: out_features.
        k: in_features.
    """
    if rows < LEAST_ROWS or why_not(dtype, n, k) is not None:
        return STOCK
    if dtype == torch.float32:
        return Choice(True, True, n * k >= 1048576)
    large = n * k >= 262144
    return Choice(True, large or rows < 256, large and rows >= 1024)


def measure(dtype: torch.dtype, rows: int, n: int, k: int) -> Choice:
    """Choose by timing, once per process for each weight and about the same number of rows."""
    if not has_kernel("bmm") or dtype not in LEAST_WEIGHTS or rows < 2:
        return STOCK
    return _measure(dtype, 1 << (rows.bit_length() - 1), n, k)


@functools.cache
@torch.no_grad()
def _measure(dtype: torch.dtype, rows: int, n: int, k: int) -> Choice:
    x, grad, weight = (numbers(*size, dtype=dtype) for size in ((rows, k), (rows, n), (n, k)))
    bias = torch.zeros(n, dtype=dtype)
    return Choice(
        _gains(lambda ours: product(x, weight, bias, ours)),
        _gains(lambda ours: input_gradient(grad, weight, ours)),
        _gains(lambda ours: weight_gradient(grad, x, ours)),
    )


def _gains(run: Callable[[bool], Tensor]) -> bool:
    return fastest({"stock": lambda: run(False), "ipex": lambda: run(True)})[0] == "ipex"


def product(x: Tensor, weight: Tensor, bias: Tensor | None, ours: bool) -> Tensor:
    """Compute ``x @ weight.T + bias``, below autograd.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]`` in the dtype of ``x``.
        bias: ``[N]`` in the dtype of ``x``, or None.
        ours: Whether on our kernel.
    """
    if not ours:
        return functional.linear(x, weight, bias)
    rows = x.reshape(1, -1, x.shape[-1])
    n = weight.shape[0]
    add = None if bias is None else bias.expand(1, rows.shape[1], n)
    return _bmm(rows, weight.t().unsqueeze(0), add).view(*x.shape[:-1], n)


def input_gradient(grad: Tensor, weight: Tensor, ours: bool) -> Tensor:
    """Compute ``grad @ weight``, ``[..., K]`` for ``grad`` ``[..., N]``; below autograd if ``ours``."""
    if not ours:
        return grad @ weight
    rows = grad.reshape(1, -1, grad.shape[-1])
    return _bmm(rows, weight.unsqueeze(0), None).view(*grad.shape[:-1], weight.shape[1])


def weight_gradient(grad: Tensor, x: Tensor, ours: bool) -> Tensor:
    """Compute ``grad.T @ x``, ``[N, K]``, over all rows; below autograd if ``ours``."""
    rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    if not ours:
        return rows.t() @ inputs
    return _bmm(rows.t().unsqueeze(0), inputs.unsqueeze(0), None)[0]


def _bmm(a: Tensor, b: Tensor, add: Tensor | None) -> Tensor:
    with below_autograd():
        y: Tensor = torch.ops.ipex.bmm.default(a, b, add)
    return y


# --- the layer --------------------------------------------------------------------------------------------------------


class TrainingLinear(nn.Linear):
    """`torch.nn.Linear` that packs its weight on the way; see `ipex_core.nn.training_linear`.

    The same object as the layer it stands for: only ``__class__`` changes. Calls that our kernels do not take, and
    programs recorded by ``torch.compile``, ``torch.jit`` and ``torch.func``, have the stock op.
    """

    #: Whether to time the products at their first use instead of looking them up.
    _measures = False

    def __setstate__(self, content: dict[str, Any]) -> None:
        """Take the state over. Goes in 0.3: in pickles of 0.1 `_measures` has another name."""
        super().__setstate__(content)  # type: ignore[no-untyped-call]
        self._measures = self.__dict__.pop(f"{FORMER}measure", self._measures)

    def forward(self, input: Tensor) -> Tensor:
        """Compute ``input @ weight.T + bias``."""
        if is_scripting():
            return functional.linear(input, self.weight, self.bias)
        choice = self._choice(input)
        if choice is STOCK or choice == STOCK:
            return functional.linear(input, self.weight, self.bias)
        return _apply(input, self.weight, self.bias, choice)

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
        choice = None if self._measures else choose(dtype, count // k, n, k)
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
            return STOCK  # autocast computes in another dtype than the weight has
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
