# SPDX-License-Identifier: Apache-2.0
"""Steps of stock optimizers by torch's fused ops, one call for each group of parameters.

With many small parameters most of a step is the way to the kernels: torch checks and sorts its lists again each time,
and counts steps by a slow path. What is common is passed on here as it is; anything else is left to torch's step.

The fused ops take numbers in the order of memory, whatever the strides say (torch 2.13: a state from a checkpoint, or
from before a model became channels-last, would then be applied to other weights). So what differs gets the layout of
the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

_dense = torch.ops.aten.is_non_overlapping_and_dense.default
#: What the fused op of a group gets: a list for each of its arguments that is one.
_Lists = list[list[Tensor]]


def stock_step(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    """Do a step of ``kind`` with torch's fused ops if all of it is common, else nothing.

    Common is: dense parameters on the CPU, of one dtype in each group, float32 or float64, with states of a step
    before; no scale of gradients, and nothing asked for that the fused ops cannot do.

    Returns:
        Whether the step is done.
    """
    run = _STEPS.get(kind)
    if run is None or getattr(optimizer, "grad_scale", None) is not None:
        return False
    if getattr(optimizer, "found_inf", None) is not None:
        return False
    found = []
    for group in optimizer.param_groups:
        lists = _lists(optimizer.state, group, kind)
        if lists is None:
            return False
        found.append((group, lists))
    for group, lists in found:
        if lists[0]:
            run(group, lists)
    return True


def _lists(states: Any, group: dict[str, Any], kind: type[Optimizer]) -> _Lists | None:
    """Return the parameters of a group that have gradients, these, and their states by name; None if one is unusual."""
    fused, foreach = group.get("fused"), group.get("foreach")
    if (fused is not None and not fused) or foreach:
        return None
    if group.get("differentiable") or group.get("capturable"):
        return None
    names = _states(group, kind)
    params: list[Tensor] = []
    grads: list[Tensor] = []
    others: _Lists = [[] for _ in names]
    pairs = list(zip(names, (other.append for other in others), strict=True))
    dtype = None
    for p in group["params"]:
        grad = p.grad
        if grad is None:
            continue
        if dtype is None:
            dtype = p.dtype
            if dtype not in (torch.float32, torch.float64):
                return None
        # Another class may be a part of a tensor that several processes have.
        plain = type(p) is nn.Parameter or type(p) is Tensor
        if not plain or p.dtype is not dtype or not p.is_cpu or type(grad) is not Tensor:
            return None
        if grad.dtype is not dtype or grad.layout is not torch.strided:
            return None
        contiguous = p.is_contiguous()
        if not contiguous and not _dense(p):
            return None
        if not (grad.is_contiguous() if contiguous else grad.stride() == p.stride()):
            grad = _like(p, grad)
        params.append(p)
        grads.append(grad)
        if pairs:
            state = states.get(p)
            if not state:
                return None
            for name, append in pairs:
                value = state.get(name)
                if value is None:
                    return None
                if name != "step" and not (
                    value.is_contiguous() if contiguous else value.stride() == p.stride()
                ):
                    if value.shape != p.shape:
                        return None
                    value = state[name] = _like(p, value)
                append(value)
    return [params, grads, *others]


def _like(p: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(p).copy_(value)


def laid_out_alike(p: Tensor, state: dict[str, Any]) -> bool:
    """Return whether a parameter, its gradient and its states have their numbers in one order, without gaps."""
    others = [v for name, v in state.items() if name != "step" and isinstance(v, Tensor)]
    if p.grad is not None:
        others.append(p.grad)
    if p.is_contiguous():
        return all(v.is_contiguous() for v in others)
    return _dense(p) and all(v.stride() == p.stride() for v in others)


def _states(group: dict[str, Any], kind: type[Optimizer]) -> tuple[str, ...]:
    if kind is SGD:
        return ("momentum_buffer",) if group["momentum"] else ()
    if kind is Adagrad:
        return ("sum", "step")
    largest = ("max_exp_avg_sq",) if group["amsgrad"] else ()
    return ("exp_avg", "exp_avg_sq", *largest, "step")


def _count(steps: list[Tensor]) -> None:
    one = torch.ones((), device="cpu")
    torch._foreach_add_(steps, [one] * len(steps))  # a number takes four times as long


def _sgd(group: dict[str, Any], lists: _Lists) -> None:
    params, grads, *buffers = lists
    torch._fused_sgd_(
        params,
        grads,
        buffers[0] if buffers else [],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=float(group["lr"]),
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
    )


def _adagrad(group: dict[str, Any], lists: _Lists) -> None:
    _count(lists[-1])
    torch._fused_adagrad_(
        *lists,
        lr=float(group["lr"]),
        lr_decay=group["lr_decay"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _adam(group: dict[str, Any], lists: _Lists) -> None:
    params, grads, averages, squares, *largest, steps = lists
    _count(steps)
    decoupled = group.get("decoupled_weight_decay", False)
    function: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    beta1, beta2 = group["betas"]
    function(
        params,
        grads,
        averages,
        squares,
        largest[0] if largest else [],
        steps,
        amsgrad=group["amsgrad"],
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


_STEPS: dict[type[Optimizer], Callable[[dict[str, Any], _Lists], None]] = {
    SGD: _sgd,
    Adagrad: _adagrad,
    Adam: _adam,
    AdamW: _adam,
}
