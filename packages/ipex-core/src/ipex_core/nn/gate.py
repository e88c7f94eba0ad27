# SPDX-License-Identifier: Apache-2.0
"""The two linear layers in front of a gate as one op: ``act(gate(x)) * up(x)``.

The weights are stored once, with their rows interleaved; each layer's parameter is a `PackedWeight` that shows its
rows. As in `ipex_core.nn.merged_linear`, a layer that changes runs on its own until both can be merged again.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from ipex_core.module_swap.state_dict import state_of, unpack_weight
from ipex_core.nn.call import call, stock_only
from ipex_core.nn.merged_linear import LinearGroup, in_inference, may_merge
from ipex_core.ops.linear.epilogue import GATES
from ipex_core.packing.dense import interleave_gate_up
from ipex_core.packing.parameter import PackedWeight, captured, pack

__all__ = ["GatedPair"]

Tensor = torch.Tensor
_lock = threading.Lock()


class GatedPair(LinearGroup):
    """The interleaved weight of two layers; kept by whoever calls them together."""

    def ready(self, x: Tensor, gate: nn.Module, up: nn.Module, activation: str = "silu") -> bool:
        """Return whether `forward` can run; merges the layers if that is what it needs."""
        if activation not in GATES[1:] or captured(self.kernel) or stock_only(x):
            return False
        if torch.compiler.is_compiling():
            return self.wide is not None
        members = (gate, up)
        return in_inference(x, members) and (self.fresh(members) or self.merge(gate, up))

    def forward(
        self, x: Tensor, activation: str = "silu", residual: Tensor | None = None
    ) -> Tensor:
        """Compute ``activation(gate(x)) * up(x) + residual``.

        Args:
            x: ``[..., in_features]``.
            activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
            residual: ``[..., out_features]`` in the dtype of the weights, or None.
        """
        assert self.wide is not None
        x = x.to(self.dtype)
        arguments = (
            *(x, self.wide, self.sizes[0], self.bias, residual),
            *("none", None, None, activation),
        )
        y: Tensor
        if torch.compiler.is_compiling():
            y = torch.ops.ipex.linear(*arguments)
        else:
            y = call(torch.ops.ipex.linear.default, *arguments)
        return y

    def __getstate__(self) -> dict[str, Any]:
        return GatedPair().__dict__

    @torch.no_grad()
    def merge(self, gate: nn.Module, up: nn.Module) -> bool:
        """Interleave the weights of the layers; return whether it was possible."""
        members = (gate, up)
        with _lock:
            if self.fresh(members):
                return True  # another thread was faster
            if not may_merge(members):
                return False
            weights = [member._parameters["weight"] for member in members]
            assert all(isinstance(weight, PackedWeight) for weight in weights)
            if weights[0].form != "ipex" or weights[0].shape != weights[1].shape:  # type: ignore[union-attr]
                return False
            self._merge(members)
            return True

    def _merge(self, members: tuple[nn.Module, nn.Module]) -> None:
        states = [state_of(member) for member in members]
        for member, state in zip(members, states, strict=True):
            assert state is not None
            unpack_weight(member, state)
        first, second = (member._parameters["weight"] for member in members)
        assert isinstance(first, nn.Parameter) and isinstance(second, nn.Parameter)
        rows = interleave_gate_up(first.detach(), second.detach())
        biases = [member._parameters["bias"] for member in members]
        self.wide = pack(rows, "ipex")
        self.dtype, self.kernel, self.sizes = first.dtype, True, [first.shape[0]] * 2
        self.biases = [(b, 0 if b is None else b._version) for b in biases]
        self.bias = None
        if biases != [None, None]:
            zeros = first.new_zeros(first.shape[0])
            self.bias = interleave_gate_up(
                *(zeros if b is None else b.detach().to(zeros.dtype) for b in biases)
            )
        for part, (member, state, weight) in enumerate(
            zip(members, states, (first, second), strict=True)
        ):
            assert state is not None
            wrapper: Any = PackedWeight(
                *(self.wide, "ipex", weight.shape, weight.dtype, weight.requires_grad),
                rows=rows.shape[0],
                gated=part,
            )
            member._parameters["weight"] = wrapper
            state.plain = weight
            weight.data = torch.empty(0, dtype=weight.dtype)
