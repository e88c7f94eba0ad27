# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers that take activations of any floating dtype."""

# The stock forward answers in what it was given, and its list of weights may have gaps in training.
# mypy: disable-error-code="no-any-return,arg-type"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting

from ipex_core.module_swap.base import OptimizedModule, is_stand_in, record_call
from ipex_core.nn.torchscript import lstm as script_lstm
from ipex_core.nn.torchscript import recurrent as script_recurrent


class _Recurrent(OptimizedModule):
    def _fit(self, x: Any) -> Any:
        weight = next(iter(self._parameters.values()))
        if isinstance(x, torch.Tensor):
            return self._cast(x, weight)
        if isinstance(x, nn.utils.rnn.PackedSequence):
            return x._replace(data=self._cast(x.data, weight))
        if isinstance(x, tuple):
            return tuple(self._fit(part) for part in x)
        return x

    def _run(self, input: Any, hx: Any) -> Any:
        """Run the stock recurrence in the dtype of the weights."""
        if is_stand_in(input):
            return record_call(self, input, hx)
        return super().forward(self._fit(input), self._fit(hx))


class OptimizedLSTM(_Recurrent, nn.LSTM):
    """`torch.nn.LSTM`; without gradients the stock op takes oneDNN's fused path."""

    def forward(  # type: ignore[override]
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run the stock recurrence in the dtype of the weights."""
        if is_scripting():
            return script_lstm(
                input,
                hx,
                self._flat_weights,
                self.bias,
                self.num_layers,
                self.dropout,
                self.training,
                self.bidirectional,
                self.batch_first,
            )
        else:
            return self._run(input, hx)


class _OneState(_Recurrent):
    """Layers that pass on one tensor."""

    if TYPE_CHECKING:  # annotations would be read by `torch.jit.script`
        mode: Any
        bias: Any
        num_layers: Any
        dropout: Any
        bidirectional: Any
        batch_first: Any
        _flat_weights: Any

    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the stock recurrence in the dtype of the weights."""
        if is_scripting():
            return script_recurrent(
                self.mode,
                input,
                hx,
                self._flat_weights,
                self.bias,
                self.num_layers,
                self.dropout,
                self.training,
                self.bidirectional,
                self.batch_first,
            )
        else:
            return self._run(input, hx)


class OptimizedGRU(_OneState, nn.GRU):  # type: ignore[misc]
    """`torch.nn.GRU`."""


class OptimizedRNN(_OneState, nn.RNN):  # type: ignore[misc]
    """`torch.nn.RNN`."""
