# SPDX-License-Identifier: Apache-2.0
"""LARS: SGD with a learning rate for each layer, for training with large batches."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim.optimizer import ParamsT

from ipex_core.optim import steps
from ipex_core.optim.plain import PlainOptimizer, check_numbers

__all__ = ["Lars", "create_optimizer_lars"]

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


class Lars(PlainOptimizer):
    """LARS: SGD with a learning rate for each parameter, in proportion to its norm.

    Args:
        params: Parameters or groups of them. A group with ``lars_exclude=True`` is updated by plain SGD.
        lr: Learning rate.
        momentum: Factor on the momentum buffer.
        eeta: Trust coefficient: the gradient is multiplied by ``eeta * |w| / (|g| + weight_decay * |w| + epsilon)``.
        weight_decay: Factor on the parameter that is added to the gradient.
        epsilon: See above.

    Raises:
        ValueError: A number is negative.

    Source: You et al., "Large Batch Training of Convolutional Networks", 2017.
    """

    ipex_step = staticmethod(steps.lars)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0,
        eeta: float = 1e-3,
        weight_decay: float = 0,
        epsilon: float = 0.0,
    ) -> None:
        check_numbers(
            "Lars", lr=lr, momentum=momentum, eeta=eeta, weight_decay=weight_decay, epsilon=epsilon
        )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "eeta": eeta,
            "weight_decay": weight_decay,
            "epsilon": epsilon,
            "lars_exclude": False,
        }
        super().__init__(params, defaults)


def create_optimizer_lars(
    model: nn.Module,
    lr: float,
    momentum: float,
    weight_decay: float,
    bn_bias_separately: bool,
    epsilon: float,
) -> Lars:
    """Return a `Lars` for a model.

    Args:
        model: The model.
        lr: Learning rate.
        momentum: Factor on the momentum buffer.
        weight_decay: Factor on the parameter that is added to the gradient.
        bn_bias_separately: Put the parameters of norms and all biases in a group of their own, which is updated by
            plain SGD without weight decay.
        epsilon: See `Lars`.
    """
    if not bn_bias_separately:
        return Lars(model.parameters(), lr, momentum, weight_decay=weight_decay, epsilon=epsilon)
    plain: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (isinstance(module, _NORMS) or name == "bias"):
                plain[id(parameter)] = parameter
    others = [p for p in model.parameters() if id(p) not in plain]
    groups: list[dict[str, Any]] = [
        {"params": others},
        {"params": list(plain.values()), "weight_decay": 0.0, "lars_exclude": True},
    ]
    return Lars(
        [group for group in groups if group["params"]],
        lr,
        momentum,
        weight_decay=weight_decay,
        epsilon=epsilon,
    )
