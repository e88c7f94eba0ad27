# SPDX-License-Identifier: Apache-2.0
"""IPEX's module path for functions that exchange layers of a model."""

from __future__ import annotations

from torch import nn

__all__ = ["replace_dropout_with_identity"]


def replace_dropout_with_identity(model: nn.Module) -> None:
    """Put `torch.nn.Identity` in the place of each `torch.nn.Dropout` below ``model``, in place.

    Parts in training mode stay as they are. `ipex_core.optimize` does this so that it can be undone.

    Args:
        model: Changed in place.
    """
    if model.training:
        return
    for name, child in model.named_children():
        if isinstance(child, nn.Dropout):
            setattr(model, name, nn.Identity().eval())
        else:
            replace_dropout_with_identity(child)
