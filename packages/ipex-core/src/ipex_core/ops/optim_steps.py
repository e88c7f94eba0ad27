# SPDX-License-Identifier: Apache-2.0
"""One step of SGD, Adagrad, Adam, LAMB and LARS for one parameter, and for lists of parameters."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.checks import acc, randn
from ipex_core.library.kernels import register, register_op
from ipex_core.library.spec import Arguments, BenchCase, OpSpec, Sample
from ipex_core.ops.optim import (
    check_numbers,
    check_param,
    check_states,
    check_step,
    param_samples,
    random_state,
    read_param,
    root,
    split,
    with_momentum,
    write_param,
)


def _sgd_fused_step(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    param2: Tensor | None,
    momentum: float,
    lr: float,
    weight_decay: float,
    dampening: float,
    nesterov: bool,
    first: bool = False,
    maximize: bool = False,
) -> None:
    """Update a parameter and its momentum in place, as `torch.optim.SGD` does.

    Args:
        param: float32, or bfloat16 with the upper halves of split numbers. Any shape; written to.
        grad: Like ``param``; the dtype of ``param2`` if there is one.
        momentum_buffer: float32, like ``param``; written to. None: no momentum.
        param2: The lower halves of a bfloat16 ``param``, or a bfloat16 or float16 copy of a float32 one; written to.
        momentum: Factor on the buffer.
        lr: Learning rate.
        weight_decay: Factor on the parameter that is added to the gradient.
        dampening: 1 minus the factor on the gradient that enters the buffer.
        nesterov: Add the momentum of this step to the gradient.
        first: The buffer has no history: it becomes the gradient.
        maximize: Go up and not down.

    Raises:
        RuntimeError: A dtype or a shape does not fit.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013; split numbers
    as in Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019.
    """
    w = read_param(param, param2)
    g = -acc(grad) if maximize else acc(grad)
    if weight_decay:
        g = g + w * weight_decay
    if momentum_buffer is not None:
        g = with_momentum(g, momentum_buffer, momentum, dampening, nesterov, first)
    write_param(param, param2, w - g * lr)


def _sgd_check(a: Arguments) -> None:
    check_param(a)
    check_states(a, "momentum_buffer")


def _sgd_samples(dtype: torch.dtype) -> Iterator[Sample]:
    def build(param: Tensor, grad: Tensor, param2: Tensor | None, seed: int) -> tuple[Any, ...]:
        buffer = random_state(param, seed, 0.1)
        return param, grad, buffer, param2, 0.9, 0.05, 1e-2, 0.1, seed % 2 == 0, seed % 3 == 0

    yield from param_samples(dtype, build)
    param, grad, _, param2, *_ = next(
        s for s in param_samples(dtype, build) if s.id.endswith("300x129")
    ).args
    yield Sample((param, grad, None, param2, 0.0, 0.1, 0.0, 0.0, False), id="no_momentum")
    yield Sample(
        (param, grad, None, param2, 0.0, 0.1, 1e-3, 0.0, False, False, True), id="maximize"
    )


def _sgd_stock(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    param2: Tensor | None,
    momentum: float,
    lr: float,
    weight_decay: float,
    dampening: float,
    nesterov: bool,
) -> None:
    """The loop of torch.optim.SGD; for reduced dtypes over a float32 master weight that is cast back."""
    d = grad.float().add(param.float(), alpha=weight_decay)
    momentum_buffer.mul_(momentum).add_(d, alpha=1 - dampening)
    if param.dtype == torch.float32:
        param.add_(momentum_buffer, alpha=-lr)
        if param2 is not None:
            param2.copy_(param)
    else:
        param.copy_(param.float().add_(momentum_buffer, alpha=-lr))


def _sgd_bench() -> Iterator[BenchCase]:
    def make(dtype: torch.dtype, n: int) -> tuple[Any, ...]:
        w, g = randn(n), randn(n, dtype=dtype, seed=1)
        rest = (0.9, 0.01, 1e-4, 0.0, False)
        if dtype == torch.float32:
            return w, g, torch.zeros(n), None, *rest
        if dtype == torch.bfloat16:
            top, low = split(w)
            return top, g, torch.zeros(n), low, *rest
        return w, g, torch.zeros(n), w.to(dtype), *rest

    for n in (1 << 16, 1 << 24):
        yield BenchCase(
            f"{n}",
            lambda dtype, n=n: make(dtype, n),
            lambda dtype, n=n: n * (18 if dtype == torch.bfloat16 else 20),
        )


SGD_SPEC = register_op(
    mutates=("param", "momentum_buffer", "param2"),
    reference=_sgd_fused_step,
    check=_sgd_check,
    samples=_sgd_samples,
    stock=_sgd_stock,
    backward=None,
    lift=False,
    bench=_sgd_bench,
    summary="SGD with momentum: one step for a parameter, float32, split or with a copy",
)


# --- Adagrad ----------------------------------------------------------------------------------------------------------


def _adagrad_fused_step(
    param: Tensor,
    grad: Tensor,
    state_sum: Tensor,
    param2: Tensor | None,
    step: float,
    lr: float,
    weight_decay: float,
    lr_decay: float,
    eps: float,
    maximize: bool = False,
) -> None:
    """Update a parameter and its sum of squares in place, as `torch.optim.Adagrad` does.

    Args:
        param: float32, or bfloat16 with the upper halves of split numbers. Any shape; written to.
        grad: Like ``param``; the dtype of ``param2`` if there is one.
        state_sum: float32, like ``param``; written to.
        param2: The lower halves of a bfloat16 ``param``, or a bfloat16 or float16 copy of a float32 one; written to.
        step: Number of this step, from 1 on.
        lr: Learning rate, divided by ``1 + (step - 1) * lr_decay``.
        weight_decay: Factor on the parameter that is added to the gradient.
        lr_decay: See ``lr``.
        eps: Added to the root of the sum.
        maximize: Go up and not down.

    Raises:
        RuntimeError: A dtype or a shape does not fit, ``step`` is below 1, or ``eps`` is negative.

    Source: Duchi et al., "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", 2011.
    """
    w = read_param(param, param2)
    g = -acc(grad) if maximize else acc(grad)
    if weight_decay:
        g = g + w * weight_decay
    total = state_sum + g * g
    state_sum.copy_(total)
    rate = lr / (1.0 + (step - 1.0) * lr_decay)
    write_param(param, param2, w - g / (root(total) + eps) * rate)


def _adagrad_check(a: Arguments) -> None:
    check_step(a)
    check_numbers(a)
    check_param(a)
    check_states(a, "state_sum")


def _adagrad_samples(dtype: torch.dtype) -> Iterator[Sample]:
    def build(param: Tensor, grad: Tensor, param2: Tensor | None, seed: int) -> tuple[Any, ...]:
        total = random_state(param, seed).square()
        rest = (float(1 + seed % 5), 0.1, 1e-2, 0.05, 1e-10, seed % 4 == 0)
        return param, grad, total, param2, *rest

    return param_samples(dtype, build)


ADAGRAD_SPEC = register_op(
    mutates=("param", "state_sum", "param2"),
    reference=_adagrad_fused_step,
    check=_adagrad_check,
    samples=_adagrad_samples,
    backward=None,
    lift=False,
    summary="Adagrad: one step for a parameter, float32, split or with a copy",
)


# --- Adam and AdamW ---------------------------------------------------------------------------------------------------


def _adam_fused_step(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    grad: Tensor,
    param2: Tensor | None,
    amsgrad: bool,
    step: float,
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
    eps: float,
    decoupled: bool = False,
    maximize: bool = False,
) -> None:
    """Update a parameter and its means in place, as `torch.optim.Adam` and `torch.optim.AdamW` do.

    Args:
        param: float32, or bfloat16 with the upper halves of split numbers. Any shape; written to.
        exp_avg: Mean of gradients, float32, like ``param``; written to.
        exp_avg_sq: Mean of their squares, likewise.
        max_exp_avg_sq: The largest of these means, likewise; needed with ``amsgrad``.
        grad: Like ``param``; the dtype of ``param2`` if there is one.
        param2: The lower halves of a bfloat16 ``param``, or a bfloat16 or float16 copy of a float32 one; written to.
        amsgrad: Divide by the root of the largest mean so far.
        step: Number of this step, from 1 on.
        beta1: Share of the former mean of gradients, from 0 to below 1.
        beta2: Share of the former mean of squares, likewise.
        lr: Learning rate.
        weight_decay: Factor on the parameter that is added to the gradient, or with ``decoupled`` taken off it.
        eps: Added to the root.
        decoupled: AdamW: the parameter is multiplied by ``1 - lr * weight_decay``.
        maximize: Go up and not down.

    Raises:
        RuntimeError: A dtype or a shape does not fit, ``step`` is below 1, a share is out of its range, ``eps`` is
            negative, or ``max_exp_avg_sq`` is missing.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014; Loshchilov and Hutter, "Decoupled Weight
    Decay Regularization", 2017; Reddi et al., "On the Convergence of Adam and Beyond", 2018.
    """
    w = read_param(param, param2)
    g = -acc(grad) if maximize else acc(grad)
    if weight_decay and not decoupled:
        g = g + w * weight_decay
    if decoupled:
        w = w * (1.0 - lr * weight_decay)
    m = exp_avg * beta1 + g * (1.0 - beta1)
    v = exp_avg_sq * beta2 + g * g * (1.0 - beta2)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    if amsgrad:
        assert max_exp_avg_sq is not None
        v = torch.maximum(max_exp_avg_sq, v)
        max_exp_avg_sq.copy_(v)
    # As a tensor: torch multiplies by the inverse of Python numbers.
    d = root(v) / torch.tensor(math.sqrt(1.0 - beta2**step), dtype=w.dtype) + eps
    write_param(param, param2, w - m / d * (lr / (1.0 - beta1**step)))


def _adam_check(a: Arguments) -> None:
    check_step(a)
    check_numbers(a, "beta1", "beta2")
    given = not a.amsgrad or a.max_exp_avg_sq is not None
    a.require(given, "max_exp_avg_sq", "be given with amsgrad", None)
    check_param(a)
    check_states(a, "exp_avg", "exp_avg_sq")
    if a.amsgrad:
        check_states(a, "max_exp_avg_sq")


def _adam_samples(dtype: torch.dtype) -> Iterator[Sample]:
    def build(param: Tensor, grad: Tensor, param2: Tensor | None, seed: int) -> tuple[Any, ...]:
        amsgrad = seed % 2 == 1
        means = random_state(param, seed, 0.1), random_state(param, seed + 1, 0.1).square()
        largest = random_state(param, seed + 2, 0.1).square() if amsgrad else None
        numbers = (float(1 + seed % 7), 0.9, 0.999, 1e-2, 1e-2, 1e-8)
        rest = (amsgrad, *numbers, seed % 3 == 0, seed % 5 == 0)
        return param, *means, largest, grad, param2, *rest

    return param_samples(dtype, build)


def _adam_stock(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    _: None,
    grad: Tensor,
    param2: Tensor | None,
    amsgrad: bool,
    step: float,
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
    eps: float,
    decoupled: bool = False,
) -> None:
    """The loop of torch.optim.Adam; for reduced dtypes over a float32 master weight that is cast back."""
    g = grad.float()
    exp_avg.lerp_(g, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denom = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**step)).add_(eps)
    w = param.float()
    w.mul_(1 - lr * weight_decay).addcdiv_(exp_avg, denom, value=-lr / (1 - beta1**step))
    if param.dtype != torch.float32:
        param.copy_(w)
    elif param2 is not None:
        param2.copy_(w)


def _adam_bench() -> Iterator[BenchCase]:
    def make(dtype: torch.dtype, n: int) -> tuple[Any, ...]:
        w, g = randn(n), randn(n, dtype=dtype, seed=1)
        param, param2 = (w, None) if dtype == torch.float32 else (w, w.to(dtype))
        if dtype == torch.bfloat16:
            param, param2 = split(w)
        rest = (False, 3.0, 0.9, 0.999, 1e-3, 1e-2, 1e-8, True)
        return param, torch.zeros(n), torch.zeros(n), None, g, param2, *rest

    for n in (1 << 16, 1 << 24):
        yield BenchCase(
            f"{n}",
            lambda dtype, n=n: make(dtype, n),
            lambda dtype, n=n: n * (26 if dtype == torch.bfloat16 else 28),
        )


ADAM_SPEC = register_op(
    mutates=("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "param2"),
    reference=_adam_fused_step,
    check=_adam_check,
    samples=_adam_samples,
    stock=_adam_stock,
    backward=None,
    lift=False,
    bench=_adam_bench,
    summary="Adam and AdamW: one step for a parameter, float32, split or with a copy",
)


# --- LAMB -------------------------------------------------------------------------------------------------------------


def _lamb_fused_step(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    param2: Tensor | None,
    step: int,
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
    eps: float,
) -> None:
    """Update a parameter and its means in place: Adam with a learning rate for each parameter.

    The direction is ``u = m' / (sqrt(v') + eps) + weight_decay * w`` with the corrected means of Adam, the rate
    ``lr * |w| / |u|`` (``lr`` if one of the norms is 0).

    Args:
        param: float32, or bfloat16 with the upper halves of split numbers. Any shape; written to.
        exp_avg: Mean of gradients, float32, like ``param``; written to.
        exp_avg_sq: Mean of their squares, likewise.
        grad: Like ``param``; the dtype of ``param2`` if there is one.
        param2: The lower halves of a bfloat16 ``param``, or a bfloat16 or float16 copy of a float32 one; written to.
        step: Number of this step, from 1 on.
        beta1: Share of the former mean of gradients.
        beta2: Share of the former mean of squares.
        lr: Learning rate.
        weight_decay: See above.
        eps: See above.

    Raises:
        RuntimeError: A dtype or a shape does not fit, ``step`` is below 1, a share is out of its range, or
            ``eps`` is negative.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019.
    """
    w = read_param(param, param2)
    g = acc(grad)
    m = exp_avg * beta1 + g * (1.0 - beta1)
    v = exp_avg_sq * beta2 + g * g * (1.0 - beta2)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    # Tensors: torch multiplies by the inverse of a Python number.
    corrections = torch.tensor([1.0 - beta1**step, 1.0 - beta2**step], dtype=w.dtype)
    correction1, correction2 = corrections.unbind()
    u = m / correction1 / (root(v / correction2) + eps) + w * weight_decay
    of_w, of_u = float(w.double().norm()), float(u.double().norm())
    ratio = of_w / of_u if of_w > 0 and of_u > 0 else 1.0
    write_param(param, param2, w - u * (lr * ratio))


def _lamb_check(a: Arguments) -> None:
    check_step(a)
    check_numbers(a, "beta1", "beta2")
    check_param(a)
    check_states(a, "exp_avg", "exp_avg_sq")


def _lamb_samples(dtype: torch.dtype) -> Iterator[Sample]:
    def build(param: Tensor, grad: Tensor, param2: Tensor | None, seed: int) -> tuple[Any, ...]:
        means = random_state(param, seed, 0.1), random_state(param, seed + 1, 0.1).square()
        return param, *means, grad, param2, 1 + seed % 7, 0.9, 0.999, 1e-2, 1e-2, 1e-6

    yield from param_samples(dtype, build)
    zeros = [torch.zeros(40) for _ in range(3)]
    if dtype == torch.float32:
        yield Sample((*zeros, torch.zeros(40), None, 1, 0.9, 0.999, 0.1, 0.0, 1e-6), id="zeros")


LAMB_SPEC = register_op(
    mutates=("param", "exp_avg", "exp_avg_sq", "param2"),
    reference=_lamb_fused_step,
    check=_lamb_check,
    samples=_lamb_samples,
    backward=None,
    lift=False,
    summary="LAMB: one step for a parameter, float32, split or with a copy",
)


# --- LARS -------------------------------------------------------------------------------------------------------------


def _lars_fused_step(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    param2: Tensor | None,
    momentum: float,
    lr: float,
    eeta: float,
    eps: float,
    weight_decay: float,
    dampening: float,
    nesterov: bool,
    first: bool = False,
) -> None:
    """Update a parameter and its momentum in place: SGD with a factor on the gradient for each parameter.

    The gradient with weight decay, ``g + weight_decay * w``, is multiplied by
    ``eeta * |w| / (|g| + weight_decay * |w| + eps)`` (1 if one of the norms is 0); then a step of SGD follows.

    Args:
        param: float32, or bfloat16 with the upper halves of split numbers. Any shape; written to.
        grad: Like ``param``; the dtype of ``param2`` if there is one.
        momentum_buffer: float32, like ``param``; written to. None: no momentum.
        param2: The lower halves of a bfloat16 ``param``, or a bfloat16 or float16 copy of a float32 one; written to.
        momentum: Factor on the buffer.
        lr: Learning rate.
        eeta: See above.
        eps: See above.
        weight_decay: See above.
        dampening: 1 minus the factor on the gradient that enters the buffer.
        nesterov: Add the momentum of this step to the gradient.
        first: The buffer has no history: it becomes the gradient.

    Raises:
        RuntimeError: A dtype or a shape does not fit, or ``eps`` is negative.

    Source: You et al., "Large Batch Training of Convolutional Networks", 2017.
    """
    w = read_param(param, param2)
    g = acc(grad)
    of_w, of_g = float(w.double().norm()), float(g.double().norm())
    if weight_decay:
        g = g + w * weight_decay
    if of_w > 0 and of_g > 0:
        g = g * (eeta * of_w / (of_g + weight_decay * of_w + eps))
    if momentum_buffer is not None:
        g = with_momentum(g, momentum_buffer, momentum, dampening, nesterov, first)
    write_param(param, param2, w - g * lr)


def _lars_check(a: Arguments) -> None:
    check_numbers(a)
    check_param(a)
    check_states(a, "momentum_buffer")


def _lars_samples(dtype: torch.dtype) -> Iterator[Sample]:
    def build(param: Tensor, grad: Tensor, param2: Tensor | None, seed: int) -> tuple[Any, ...]:
        buffer = random_state(param, seed, 0.1)
        momentum = buffer if seed % 4 else None
        rest = (0.9, 0.5, 1e-2, 1e-8, 1e-2, 0.1, seed % 2 == 0, seed % 3 == 0)
        return param, grad, momentum, param2, *rest

    return param_samples(dtype, build)


LARS_SPEC = register_op(
    mutates=("param", "momentum_buffer", "param2"),
    reference=_lars_fused_step,
    check=_lars_check,
    samples=_lars_samples,
    backward=None,
    lift=False,
    summary="LARS: one step for a parameter, float32, split or with a copy",
)


# --- lists of parameters ----------------------------------------------------------------------------------------------


#: Parameters of a list that is timed.
_MANY = 16


class _Listed:
    """The op for lists of parameters, made from the op for one."""

    def __init__(self, single: OpSpec) -> None:
        self.single = single
        self.name = single.name + "s"
        head, _, self.result = single.schema.rpartition(" -> ")
        self.arguments = head.strip("()").split(", ")
        tensors = [a for a in self.arguments if a.startswith("Tensor")]
        self.names = [a.split()[-1] + "s" for a in tensors]
        self.optional = ["? " in a for a in tensors]
        #: Tensors come first, then numbers.
        self.count = len(tensors)
        numbers = self.arguments[self.count :]
        self.numbers = [a.partition("=")[0].split()[-1] for a in numbers]

    def spec(self) -> OpSpec:
        single = self.single
        return dataclasses.replace(
            single,
            name=self.name,
            schema=self.schema(),
            reference=self.reference,
            check=self.check,
            samples=self.samples,
            stock=single.stock and self.stock,
            bench=single.bench and self.bench,
            summary=f"{single.name} for lists of parameters",
        )

    def schema(self) -> str:
        tensors, numbers = self.arguments[: self.count], self.arguments[self.count :]
        lists = [re.sub(r"(Tensor(?:\(\w!\))?)\?? (\w+)", r"\1[] \2s", a) for a in tensors]
        return f"({', '.join((*lists, *numbers))}) -> {self.result}"

    def rows(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of the op for one parameter, for each."""
        columns = [values or [None] * len(args[0]) for values in args[: self.count]]
        for tensors in zip(*columns, strict=True):
            yield (*tensors, *args[self.count :])

    def joined(self, several: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Return the arguments for several calls of the op for one, with the numbers of the first."""
        columns = zip(*(args[: self.count] for args in several), strict=True)
        lists = ([v for v in column if v is not None] for column in columns)
        return (*lists, *several[0][self.count :])

    def reference(self, *args: Any) -> None:
        for row in self.rows(args):
            self.single.reference(*row)

    def values(self, a: Arguments) -> tuple[Any, ...]:
        return tuple(vars(a)[name] for name in (*self.names, *self.numbers))

    def check(self, a: Arguments) -> None:
        values = self.values(a)
        expected = len(values[0])
        for label, tensors, may_lack in zip(self.names, values, self.optional, strict=False):
            enough = len(tensors) == expected or (may_lack and not tensors)
            a.require(enough, label, f"hold {expected} tensor(s)", len(tensors))
        for row in self.rows(values):
            self.single.check(self.single.bind(*row))

    def samples(self, dtype: torch.dtype) -> Iterator[Sample]:
        forms: dict[tuple[Any, ...], list[Sample]] = {}
        for sample in self.single.samples(dtype):
            args = sample.args[: self.count]
            form = (args[0].dtype, *(a is None for a in args))
            forms.setdefault(form, []).append(sample)
        for several in forms.values():
            for i in range(0, len(several), 3):
                part = several[i : i + 3]
                args = self.joined([s.args for s in part])
                yield Sample(args, id=f"{part[0].id}+{len(part) - 1}")
        numbers = next(iter(self.single.samples(dtype))).args[self.count :]
        yield Sample((*([] for _ in range(self.count)), *numbers), id="none")

    def stock(self, *args: Any) -> None:
        assert self.single.stock is not None
        for row in self.rows(args):
            self.single.stock(*row)

    def bench(self) -> Iterator[BenchCase]:
        assert self.single.bench is not None
        case = next(iter(self.single.bench()))
        yield BenchCase(
            f"{_MANY}x{case.id}",
            lambda dtype: self.joined([case.make(dtype) for _ in range(_MANY)]),
            lambda dtype: _MANY * case.bytes(dtype),
        )


#: Name of an op for one parameter -> the op for lists.
LISTED = {
    spec.name: _Listed(spec) for spec in (ADAGRAD_SPEC, ADAM_SPEC, LAMB_SPEC, LARS_SPEC, SGD_SPEC)
}
for _listed in LISTED.values():
    register(_listed.spec())
