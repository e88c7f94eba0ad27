# SPDX-License-Identifier: Apache-2.0
"""Scales of the operands of a module, and the numbers by which operands are called."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["FP8BwdTensors", "FP8FwdTensors", "FP8TensorMeta", "Float8Format"]


class FP8FwdTensors(IntEnum):
    """Columns of the scales of forward products."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5


class FP8BwdTensors(IntEnum):
    """Columns of the scales of backward products."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3


class Float8Format(IntEnum):
    """8-bit formats; the numbers are torch's scalar types."""

    kFloat8_E4M3 = 24
    kFloat8_E5M2 = 23


class FP8TensorMeta:
    """Scales of several tensors.

    Attributes:
        scale: ``[tensors]`` float32, by which a tensor is multiplied before it is rounded.
        scale_inv: ``[tensors]``, the inverse.
        amax_history: ``[amax_history_len, tensors]``, largest magnitudes; row 0 is the current step.
        recorded: Whether a magnitude was ever entered.
    """

    def __init__(self, tensors: int = 0, history: int = 1) -> None:
        self.scale: Tensor = torch.ones(tensors)
        self.scale_inv: Tensor = torch.ones(tensors)
        self.amax_history: Tensor = torch.zeros(history, tensors)
        self.recorded = False

    def record(self, index: int, largest: Tensor) -> None:
        """Enter a magnitude into the current step."""
        row = self.amax_history[0]
        row[index] = torch.maximum(row[index], largest)

    def resize(self, history: int) -> None:
        """Remember so many steps, the current one and those last recorded."""
        old = self.amax_history
        if old.shape[0] == history:
            return
        new = old.new_zeros(history, old.shape[1])
        new[:1] = old[:1]
        # Behind row 0 the oldest step comes first (see `update_amax_history`).
        kept = min(history, old.shape[0]) - 1
        if kept:
            new[-kept:] = old[-kept:]
        self.amax_history = new
