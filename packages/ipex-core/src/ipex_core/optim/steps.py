# SPDX-License-Identifier: Apache-2.0
"""The fused step of each optimizer that has one; states are as in the stock optimizers.

A step tells which op it takes for a parameter. `Calls` collects that, and hands parameters with the same numbers to one
call: with many small ones a step is mostly the way to its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ipex_core.module_swap.base import original_class
from ipex_core.optim import dtensor

#: What an optimizer keeps of a group of parameters, and of one of them.
Group = dict[str, Any]
State = dict[str, Any]
#: ``(group, state, param, grad, param2)``; see `ipex_core.ops.optim` for the forms of a parameter.
Step = Callable[[Group, State, Tensor, Tensor, "Tensor | None"], "Call | None"]
#: Name of the op, its tensors and its numbers; None: the step has been done.
Call = tuple[str, tuple["Tensor | None", ...], tuple[Any, ...]]


class Calls:
    """Steps of parameters that are to be done together."""

    def __init__(self) -> None:
        self._of: dict[Any, list[tuple[Tensor | None, ...]]] = {}

    def add(self, call: Call | None) -> None:
        """Take the step of a parameter."""
        if call is None:
            return
        name, tensors, numbers = call
        first = tensors[0]
        assert first is not None
        key = (name, numbers, first.is_cpu, tuple([t is None for t in tensors]))
        self._of.setdefault(key, []).append(tensors)

    def run(self) -> None:
        """Do them, and forget them."""
        calls, self._of = self._of, {}
        for (name, numbers, on_cpu, missing), rows in calls.items():
            if len(rows) == 1 or not on_cpu:  # other devices have the op for one
                for row in rows:
                    getattr(torch.ops.ipex, name)(*row, *numbers)
                continue
            columns = zip(*rows, strict=True)
            lists = [[] if m else list(c) for m, c in zip(missing, columns, strict=True)]
            getattr(torch.ops.ipex, name + "s")(*lists, *numbers)


def _zeros(param: Tensor) -> Tensor:
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def _count(state: State) -> float:
    """Count a step and return its number."""
    step = state.get("step")
    if step is None:
        step = state["step"] = torch.tensor(0.0)
    count = float(step) + 1.0
    if isinstance(step, Tensor):
        step.fill_(count)  # which takes half of the time of adding one
    else:
        state["step"] = step + 1
    return count


def _momentum(group: Group, state: State, param: Tensor) -> tuple[Any, bool]:
    """Return the buffer, or None without momentum, and whether it is new."""
    if not group["momentum"]:
        return None, False
    buffer = state.get("momentum_buffer")
    if buffer is None:
        buffer = state["momentum_buffer"] = _zeros(param)
        return buffer, True
    return buffer, False


def sgd(
    group: Group, state: State, param: Tensor, grad: Tensor, param2: Tensor | None
) -> Call | None:
    buffer, first = _momentum(group, state, param)
    return (
        "sgd_fused_step",
        (param, grad, buffer, param2),
        (
            group["momentum"],
            float(group["lr"]),
            group["weight_decay"],
            group["dampening"],
            group["nesterov"],
            first,
            group.get("maximize", False),
        ),
    )


def adagrad(
    group: Group, state: State, param: Tensor, grad: Tensor, param2: Tensor | None
) -> Call | None:
    return (
        "adagrad_fused_step",
        (param, grad, state["sum"], param2),
        (
            _count(state),
            float(group["lr"]),
            group["weight_decay"],
            group["lr_decay"],
            group["eps"],
            group.get("maximize", False),
        ),
    )


def adam(
    group: Group, state: State, param: Tensor, grad: Tensor, param2: Tensor | None
) -> Call | None:
    return _adam(
        group, state, param, grad, param2, bool(group.get("decoupled_weight_decay", False))
    )


def adamw(
    group: Group, state: State, param: Tensor, grad: Tensor, param2: Tensor | None
) -> Call | None:
    return _adam(group, state, param, grad, param2, True)


def _adam(
    group: Group, state: State, param: Tensor, grad: Tensor, param2: Tensor | None, decoupled: bool
) -> Call | None:
    for name in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())):
        if name not in state:
            state[name] = _zeros(param)
    if param.dtype == torch.float64:  # of an optimizer of ours: AdamW
        dtensor.adamw_step(param, grad, state["exp_avg"], state["exp_avg_sq"], _count(state), group)
        return None
    beta1, beta2 = group["betas"]
    return (
        "adam_fused_step",
        (param, state["exp_avg"], state["exp_avg_sq"], state.get("max_exp_avg_sq"), grad, param2),
        (
            group["amsgrad"],
            _count(state),
            float(beta1),
            float(beta2),
            float(group["lr"]),
            group["weight_decay"],
            group["eps"],
            decoupled,
            group.get("maximize", False),
        ),
    )


def lamb(
    group: Group, state: State, param: Tensor, grad: Tensor, param2: Tensor | None
) -> Call | None:
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in state:
            state[name] = _zeros(param)
    if dtensor.in_stock_operations(param):
        dtensor.lamb_step(param, grad, state["exp_avg"], state["exp_avg_sq"], _count(state), group)
        return None
    beta1, beta2 = group["betas"]
    return (
        "lamb_fused_step",
        (param, state["exp_avg"], state["exp_avg_sq"], grad, param2),
        (
            int(_count(state)),
            beta1,
            beta2,
            float(group["lr"]),
            group["weight_decay"],
            group["eps"],
        ),
    )


def lars(
    group: Group, state: State, param: Tensor, grad: Tensor, param2: Tensor | None
) -> Call | None:
    buffer, first = _momentum(group, state, param)
    if dtensor.in_stock_operations(param):
        dtensor.lars_step(param, grad, buffer, first, group)
        return None
    if group.get("lars_exclude", False):
        return (
            "sgd_fused_step",
            (param, grad, buffer, param2),
            (
                group["momentum"],
                float(group["lr"]),
                group["weight_decay"],
                0.0,
                False,
                first,
            ),
        )
    return (
        "lars_fused_step",
        (param, grad, buffer, param2),
        (
            group["momentum"],
            float(group["lr"]),
            group["eeta"],
            group["epsilon"],
            group["weight_decay"],
            0.0,
            False,
            first,
        ),
    )


def step_of(optimizer: torch.optim.Optimizer) -> Step | None:
    """Return the fused step of an optimizer's own class, or None.

    A class derived from a stock one may do its step in another way; one of ours names it, ``ipex_step``.
    """
    steps: dict[type[torch.optim.Optimizer], Step] = {
        torch.optim.SGD: sgd,
        torch.optim.Adagrad: adagrad,
        torch.optim.Adam: adam,
        torch.optim.AdamW: adamw,
    }
    kind = original_class(optimizer)
    return steps.get(kind) or getattr(kind, "ipex_step", None)
