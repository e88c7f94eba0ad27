# SPDX-License-Identifier: Apache-2.0
"""Arguments of `ipex.optimize`: checks and defaults."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ipex_core.errors import IpexError, OpArgumentError
from ipex_core.library.spec import FLOATS

__all__ = ["ModeError", "ModelTypeError", "Options", "check_model", "parse"]

LEVELS = ("O0", "O1")
#: Knob -> its value at O1; at O0 all are off.
KNOBS = {
    "conv_bn_folding": True,
    "linear_bn_folding": True,
    "weights_prepack": True,
    "replace_dropout_with_identity": True,
    "optimize_lstm": True,
    "split_master_weight_for_bf16": True,
    "fuse_update_step": True,
    "auto_kernel_selection": False,
    "graph_mode": False,
    "concat_linear": False,
}


class ModeError(IpexError, AssertionError, ValueError):
    """A model in training mode was given without an optimizer, or one in inference mode with an optimizer."""


class ModelTypeError(IpexError, TypeError, AttributeError):
    """What was given is not a module."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked options; every knob has its final value."""

    dtype: torch.dtype | None
    level: str
    conv_bn_folding: bool
    linear_bn_folding: bool
    weights_prepack: bool
    replace_dropout_with_identity: bool
    optimize_lstm: bool
    split_master_weight_for_bf16: bool
    fuse_update_step: bool
    auto_kernel_selection: bool
    graph_mode: bool
    concat_linear: bool
    channels_last: bool

    @property
    def reduced(self) -> torch.dtype | None:
        """The dtype to cast to, or None."""
        return self.dtype if self.dtype in (torch.bfloat16, torch.float16) else None


def parse(level: Any, dtype: Any, knobs: dict[str, Any], channels_last: bool) -> Options:
    """Check the arguments and fill in the defaults of the level."""
    if level not in LEVELS:
        raise OpArgumentError(
            f"optimize: level must be one of {', '.join(map(repr, LEVELS))}, got {level!r}"
        )
    if dtype is not None:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"optimize: dtype must be a torch.dtype or None, got {dtype!r}")
        if dtype not in FLOATS:
            names = ", ".join(map(str, FLOATS))
            raise OpArgumentError(f"optimize: dtype must be one of {names} or None, got {dtype}")
    values = {}
    for name, default in KNOBS.items():
        value = knobs.get(name)
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"optimize: {name} must be True, False or None, got {value!r}")
        values[name] = (default and level == "O1") if value is None else value
    return Options(dtype=dtype, level=level, channels_last=channels_last, **values)


def check_model(model: Any, optimizer: Any) -> None:
    """Check the model, the optimizer and whether their modes fit together."""
    if not isinstance(model, nn.Module):
        raise ModelTypeError(
            f"optimize: model must be a torch.nn.Module, got {type(model).__name__}"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimize: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if model.training and optimizer is None:
        raise ModeError(
            "optimize: model must be in inference mode if there is no optimizer, got training mode:"
            " call model.eval() first, or pass optimizer="
        )
    if not model.training and optimizer is not None:
        raise ModeError(
            "optimize: model must be in training mode if there is an optimizer, got inference mode:"
            " call model.train() first, or leave optimizer out"
        )
