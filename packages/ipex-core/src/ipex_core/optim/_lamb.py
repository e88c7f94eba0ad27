# SPDX-License-Identifier: Apache-2.0
"""LAMB: Adam with a learning rate for each layer, for training with large batches."""

from __future__ import annotations

from torch.optim.optimizer import ParamsT

from ipex_core.optim import steps
from ipex_core.optim.plain import PlainOptimizer, check_numbers

__all__ = ["Lamb"]


class Lamb(PlainOptimizer):
    """LAMB: Adam with a learning rate for each parameter, in proportion to its norm.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: Shares of the former means of gradients and of their squares.
        eps: Added to the root of the mean of squares.
        weight_decay: Factor on the parameter in its direction.
        fused: Accepted; there is one form, a fused op for each parameter.

    Raises:
        ValueError: A number is negative, or a beta outside of [0, 1).

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019.
    """

    ipex_step = staticmethod(steps.lamb)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        fused: bool = False,
    ) -> None:
        check_numbers("Lamb", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "fused": fused,
        }
        super().__init__(params, defaults)
