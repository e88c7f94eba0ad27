# SPDX-License-Identifier: Apache-2.0
"""The optimizers of IPEX's module ``cpu.tpp.optim``, with its arguments, on the fused steps of this package."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ipex_core.optim import steps
from ipex_core.optim._lamb import Lamb as _Lamb
from ipex_core.optim.fused import record_of
from ipex_core.optim.plain import PlainOptimizer, check_numbers
from ipex_core.optim.steps import Call, Group, State, Step

__all__ = ["SGD", "AdamW", "DistLamb", "Lamb", "clip_grad_norm_"]

#: So late a step that the correction of the means for their start at zero is 1 in float32.
_LATE = float(1 << 24)


def _step(
    rule: Step, group: Group, state: State, param: Tensor, grad: Tensor, param2: Tensor | None
) -> Call | None:
    """Return a step of ``rule``, with the means corrected for their start at zero if the group wants that."""
    if group["correct_bias"]:
        return rule(group, state, param, grad, param2)
    count = float(steps._count(state))
    late = {**state, "step": torch.tensor(_LATE)}
    call = rule(group, late, param, grad, param2)
    state.update(late, step=torch.tensor(count))
    return call


class SGD(torch.optim.SGD):
    """`torch.optim.SGD` with the arguments that IPEX's class had.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        momentum: Factor on the momentum buffer.
        dampening: Share of the gradient that the buffer does not get.
        weight_decay: Factor on the parameter that is added to the gradient.
        nesterov: Nesterov's momentum.
    """

    ipex_step = staticmethod(steps.sgd)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


class AdamW(PlainOptimizer):
    """AdamW; the decay is applied before the step, as in `torch.optim.AdamW`.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: Shares of the former means of gradients and of their squares.
        eps: Added to the root of the mean of squares.
        weight_decay: Times the learning rate: share of a parameter that is taken away in a step.
        correct_bias: Correct the means for their start at zero; BERT's original code did not.

    Raises:
        ValueError: A number is negative, or a beta outside of [0, 1).

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2017.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
    ) -> None:
        check_numbers("AdamW", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "correct_bias": correct_bias})

    @staticmethod
    def ipex_step(
        group: Group, state: State, param: Tensor, grad: Tensor, param2: Tensor | None
    ) -> Call | None:
        """Return the call of one parameter's step."""
        group = {**group, "amsgrad": False}
        return _step(steps.adamw, group, state, param, grad, param2)


class Lamb(_Lamb):
    """LAMB with the arguments that IPEX's tpp class had.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: Shares of the former means of gradients and of their squares.
        eps: Added to the root of the mean of squares.
        weight_decay: Factor on the parameter in its direction.
        adam: Do steps of AdamW, without the norms.
        correct_bias: Correct the means for their start at zero.

    Raises:
        ValueError: A number is negative, or a beta outside of [0, 1).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adam: bool = False,
        correct_bias: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)
        self.defaults.update(adam=adam, correct_bias=correct_bias)
        for group in self.param_groups:
            group.setdefault("adam", adam)
            group.setdefault("correct_bias", correct_bias)

    @staticmethod
    def ipex_step(
        group: Group, state: State, param: Tensor, grad: Tensor, param2: Tensor | None
    ) -> Call | None:
        """Return the call of one parameter's step."""
        if group["adam"]:
            return AdamW.ipex_step(group, state, param, grad, param2)
        return _step(steps.lamb, group, state, param, grad, param2)


class DistLamb(Lamb):
    """LAMB for data-parallel training: gradients are averaged over all ranks of `torch.distributed`.

    Gradients may be collected over several batches with `acc_and_zero_grad` and merged with `merge_acc_grad`. The norms
    also count for groups without weight decay, where IPEX did steps of AdamW: give these a group with ``adam=True``.

    Args:
        params: Parameters or groups of them, the same on each rank.
        lr: Learning rate.
        betas: Shares of the former means of gradients and of their squares.
        eps: Added to the root of the mean of squares.
        weight_decay: Factor on the parameter in its direction.
        adam: Do steps of AdamW, without the norms.
        bias_correction: Correct the means for their start at zero.
        block_size: Accepted; it described a layout of IPEX.
        perform_allreduce: Average gradients in `step`; otherwise call `sync_grads`, or use DistributedDataParallel.
        fused_param_norm: Accepted; norms are always part of the step.

    Raises:
        ValueError: A number is negative, or a beta outside of [0, 1).

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        bias_correction: bool = True,
        block_size: int = 1024,
        perform_allreduce: bool = False,
        fused_param_norm: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, adam, bias_correction)
        self.perform_allreduce = perform_allreduce
        self._collected: dict[Tensor, Tensor] = {}
        self._batches = 0

    def _parameters(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale the gradients down to a norm; return the norm before."""
        return clip_grad_norm_(self._parameters(), max_norm, norm_type)

    @torch.no_grad()
    def sync_params(self) -> None:
        """Give all ranks the parameters of rank 0."""
        if _ranks() == 1:
            return
        masters: Any = record.masters if (record := record_of(self)) is not None else ()
        for p in self._parameters():
            if p in masters:
                torch.distributed.broadcast(value := masters.value(p), 0)
                masters.write(p, value)
            else:
                torch.distributed.broadcast(p.data, 0)

    @torch.no_grad()
    def sync_grads(self) -> None:
        """Average the gradients over all ranks. A parameter without gradient on a rank counts as zero there."""
        ranks = _ranks()
        if ranks == 1:
            return
        for p in self._parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p, dtype=_of_gradient(p))
            torch.distributed.all_reduce(p.grad)
            p.grad.div_(ranks)

    @torch.no_grad()
    def acc_and_zero_grad(self) -> None:
        """Add the gradients to those collected before, in float32, and forget them."""
        for p in self._parameters():
            if p.grad is None:
                continue
            if p in self._collected:
                self._collected[p] += p.grad
            else:
                self._collected[p] = p.grad.float().clone()
            p.grad = None
        self._batches += 1

    @torch.no_grad()
    def merge_acc_grad(self, avg: bool = True) -> None:
        """Make the collected gradients the gradients; with ``avg`` their mean over the batches."""
        for p, total in self._collected.items():
            if p.grad is not None:
                total += p.grad
            batches = self._batches + (p.grad is not None)
            p.grad = (total / batches if avg else total).to(_of_gradient(p))
        self._collected, self._batches = {}, 0

    def before_step(self) -> None:
        """Merge collected gradients, and average over ranks."""
        if self._collected:
            self.merge_acc_grad()
        if self.perform_allreduce:
            self.sync_grads()


def _of_gradient(parameter: Any) -> torch.dtype:
    dtype: torch.dtype = parameter.grad_dtype or parameter.dtype
    return dtype


def _ranks() -> int:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Any],
    max_norm: float,
    norm_type: float = 2,
    grad_list: bool = False,
) -> Tensor:
    """Scale gradients down so that their common norm is at most ``max_norm``.

    Args:
        parameters: A parameter or several, of any mixture of dtypes; with ``grad_list`` the gradients themselves.
        max_norm: Largest norm.
        norm_type: Exponent of the norm, also infinity.
        grad_list: Whether ``parameters`` are gradients.

    Returns:
        The norm before, float32.

    Raises:
        ValueError: ``max_norm`` is negative.
    """
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm must not be negative, got {max_norm}")
    several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = several if grad_list else [p.grad for p in several if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    kind = math.inf if norm_type == math.inf else float(norm_type)
    norms = [torch.linalg.vector_norm(g, kind, dtype=torch.float32) for g in grads]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), kind)
    factor = float(max_norm / (total + 1e-6))
    if not factor >= 1.0:  # NaN goes on into the gradients
        for g in grads:
            g.mul_(factor)
    return total
