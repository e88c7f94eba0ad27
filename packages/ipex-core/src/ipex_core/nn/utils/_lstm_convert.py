# SPDX-License-Identifier: Apache-2.0
"""IPEX's LSTM layer and the function that puts it into a model.

The stock op runs oneDNN's fused recurrence for inference and takes every variant: several layers, dropout, two
directions, sequences of different lengths. So the layer adds only what the stock one refuses: input in another floating
dtype than the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ipex_core.module_swap.base import set_class

__all__ = ["_LSTM", "replace_lstm_with_ipex_lstm"]


class _LSTM(nn.LSTM):
    """`torch.nn.LSTM` that takes input of any floating dtype; the same parameters and state dict."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Run over ``input``, a tensor or a `PackedSequence`, from the state ``hx``; see `torch.nn.LSTM`."""
        dtype = self.all_weights[0][0].dtype
        if torch.is_autocast_enabled("cpu"):
            return super().forward(input, hx)
        if isinstance(input, PackedSequence):
            input = input._replace(data=input.data.to(dtype))
        else:
            input = input.to(dtype)
        if hx is not None:
            hx = tuple(state.to(dtype) for state in hx)
        return super().forward(input, hx)


def replace_lstm_with_ipex_lstm(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Make every plain `torch.nn.LSTM` of ``model`` an `_LSTM`, in place.

    Args:
        model: Changed in place; subclasses of `torch.nn.LSTM` stay as they are.
        optimizer: For IPEX's signature: the parameters stay the same objects, so an optimizer needs no change.
    """
    for module in model.modules():
        if type(module) is nn.LSTM:
            set_class(module, _LSTM)
