# SPDX-License-Identifier: Apache-2.0
"""Names of IPEX's ``optim._optimizer_utils`` that scripts use."""

from __future__ import annotations

from typing import Any

import torch

from ipex_core.optim import _functional
from ipex_core.optim._lamb import Lamb
from ipex_core.optim._lars import Lars

__all__ = [
    "IPEX_FUSED_OPTIMIZER_LIST_CPU",
    "IPEX_FUSED_OPTIMIZER_LIST_XPU",
    "OPTIMIZER_FUSED_STEP_MAPPING_CPU",
    "OPTIMIZER_FUSED_STEP_MAPPING_XPU",
    "optimizer_fusion",
]

#: Optimizer -> the function that does its step.
OPTIMIZER_FUSED_STEP_MAPPING_CPU = {
    torch.optim.SGD: _functional.sgd_step,
    torch.optim.Adagrad: _functional.adagrad_step,
    torch.optim.Adam: _functional.adam_step,
    torch.optim.AdamW: _functional.adamw_step,
    Lamb: _functional.lamb_step,
    Lars: _functional.lars_step,
}
OPTIMIZER_FUSED_STEP_MAPPING_XPU = dict(OPTIMIZER_FUSED_STEP_MAPPING_CPU)
IPEX_FUSED_OPTIMIZER_LIST_CPU = list(OPTIMIZER_FUSED_STEP_MAPPING_CPU)
IPEX_FUSED_OPTIMIZER_LIST_XPU = list(OPTIMIZER_FUSED_STEP_MAPPING_XPU)


def optimizer_fusion(
    optimizer: torch.optim.Optimizer, device_type: str = "cpu", user_explict_fuse: bool = True
) -> Any:
    """Let an optimizer use fused steps, in place, and return it.

    Args:
        optimizer: One whose class is in ``IPEX_FUSED_OPTIMIZER_LIST_CPU``; others stay as they are.
        device_type: ``"cpu"`` or ``"xpu"``.
        user_explict_fuse: Whether to warn about an optimizer that stays.
    """
    from ipex_core.optim.fused import adopt, record_of
    from ipex_core.optim.master_weights import Masters
    from ipex_core.optim.steps import step_of

    if device_type not in ("cpu", "xpu"):
        raise ValueError(
            f"optimizer_fusion: device_type must be 'cpu' or 'xpu', got {device_type!r}"
        )
    if step_of(optimizer) is not None:
        record = record_of(optimizer)
        adopt(optimizer, Masters() if record is None else record.masters, True)
    elif user_explict_fuse:
        import warnings

        warnings.warn(
            f"optimizer_fusion: {type(optimizer).__name__} has no fused step and stays as it is",
            stacklevel=2,
        )
    return optimizer
