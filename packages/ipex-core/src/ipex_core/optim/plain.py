# SPDX-License-Identifier: Apache-2.0
"""What the optimizers of this package share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ipex_core.optim.dtensor import in_stock_operations
from ipex_core.optim.steps import Calls, step_of


def check_numbers(name: str, betas: Any = (0.0, 0.0), **values: Any) -> None:
    """Raise for hyperparameters that are no numbers (TypeError), negative, or betas outside of [0, 1) (ValueError)."""
    for key, value in values.items():
        if not isinstance(value, (int, float, torch.Tensor)):
            raise TypeError(f"{name}: {key} must be a number, got {value!r}")
        if not value >= 0.0:
            raise ValueError(f"{name}: {key} must not be negative, got {value}")
    if len(betas) != 2:
        raise ValueError(f"{name}: betas must be two numbers, got {betas}")
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{name}: betas[{index}] must be in [0, 1), got {beta}")


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return the loss that the closure of a step computes, with gradients; None without closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class PlainOptimizer(torch.optim.Optimizer):
    """An optimizer whose step is `plain_step`."""

    def before_step(self) -> None:
        """Do what has to be done before each step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Do one step; with ``closure``, which computes the loss, after calling it."""
        loss = loss_of(closure)
        self.before_step()
        plain_step(self)
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state; states of 16-bit parameters stay float32."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved, own, strict=True):
            if param.dtype not in (torch.bfloat16, torch.float16):
                continue
            for key, value in state_dict["state"].get(number, {}).items():  # torch has cast them
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    self.state[param][key] = value.to(param.device, torch.float32)


def below_autograd() -> Any:
    """Return a context in which our ops do not ask whether a derivative is wanted: half of what a small step takes."""
    return torch._C._AutoDispatchBelowAutograd()


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Run the step of an optimizer for each of its parameters; those in 16 bits through a float32 copy."""
    step = step_of(optimizer)
    assert step is not None
    calls = Calls()
    written: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.is_sparse:
                raise RuntimeError(
                    f"{type(optimizer).__name__}: gradients must be dense, got a sparse one"
                )
            state = optimizer.state[param]
            if in_stock_operations(param):
                step(group, state, param, grad, None)
                continue
            written.append(param)
            if param.dtype == torch.float32:
                calls.add(step(group, state, param, grad, None))
            else:
                # At once: float32 copies of all parameters would take twice their memory.
                wide, alone = param.float(), Calls()
                alone.add(step(group, state, wide, grad.float(), None))
                with below_autograd():
                    alone.run()
                    param.copy_(wide)
    with below_autograd():
        calls.run()
    increment_version(written)


def second(param: torch.Tensor, param2: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``param2``, or None for an empty tensor that stands for none."""
    return None if param2 is None or (param2.numel() == 0 and param.numel() != 0) else param2
