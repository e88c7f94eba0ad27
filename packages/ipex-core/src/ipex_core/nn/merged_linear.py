# SPDX-License-Identifier: Apache-2.0
"""Several linear layers with the same input as one wide layer.

The wide weight is stored once: each member's parameter is a `PackedWeight` that shows its rows of it. When a member
changes (a state dict was loaded, a hook was added, the model was copied), the members run one by one until they can be
merged again.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.module_swap.base import call, has_hooks, stock_only
from ipex_core.module_swap.state_dict import state_of, unpack_weight
from ipex_core.nn.linear import OptimizedLinear
from ipex_core.ops.linear import GATES
from ipex_core.packing import onednn
from ipex_core.packing.dense import interleave_gate_up
from ipex_core.packing.parameter import PackedWeight, captured, pack

#: Attribute of the first member of a group, which holds the group.
_MERGED = "_merged"
_lock = threading.Lock()


class LinearGroup:
    """The wide weight of a group; kept by its first member."""

    def __init__(self) -> None:
        self.wide: Tensor | None = None
        self.bias: Tensor | None = None
        self.sizes: list[int] = []
        self.dtype = torch.float32
        self.kernel = False
        self.biases: list[tuple[Tensor | None, int]] = []

    def __getstate__(self) -> dict[str, Any]:
        # Packed weights belong to one machine; a copy merges again at its first call.
        return LinearGroup().__dict__

    def fresh(self, members: tuple[nn.Module, ...]) -> bool:
        """Return whether the merged weight is still used by all members."""
        if self.wide is None:
            return False
        for member in members:
            weight = member._parameters.get("weight")
            if (
                not isinstance(weight, PackedWeight)
                or weight.packed is not self.wide
                or has_hooks(member)
            ):
                return False
        return all(
            member._parameters.get("bias", self) is bias
            and (bias is None or bias._version == version)
            for member, (bias, version) in zip(members, self.biases, strict=True)
        )

    def run(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute all members on one input."""
        assert self.wide is not None
        x = x.to(self.dtype)
        width = sum(self.sizes)
        if self.kernel:
            y = call(torch.ops.ipex.linear.default, x, self.wide, width, self.bias, None, "none")
        elif torch.compiler.is_compiling():
            y = torch.ops.ipex_core.packed_linear(x, self.wide, self.bias, width, "none", None)
        else:
            y = onednn.linear(x, self.wide, self.bias)
        return y.split(self.sizes, -1)


def linears(x: Tensor, *members: nn.Module) -> tuple[Tensor, ...]:
    """Run linear layers on the same input, as one layer where that is possible."""
    group = members[0].__dict__.get(_MERGED)
    if isinstance(group, LinearGroup) and not captured(group.kernel) and not stock_only(x):
        if torch.compiler.is_compiling():
            if group.wide is not None:
                return group.run(x)
        elif in_inference(x, members) and (group.fresh(members) or merge(members)):
            return group.run(x)
    return tuple(member(x) for member in members)


def in_inference(x: Tensor, members: tuple[nn.Module, ...]) -> bool:
    """Return whether members may run merged: without gradients, in the dtype of their weights."""
    if x.dim() < 2 or x.numel() == 0:
        return False
    if torch.is_autocast_enabled("cpu") and x.dtype is torch.float32:
        return False
    if not torch.is_grad_enabled():
        return True
    return not x.requires_grad and not any(
        p is not None and p.requires_grad for m in members for p in m._parameters.values()
    )


def may_merge(members: tuple[nn.Module, ...]) -> bool:
    """Return whether all members are packed alike and none has hooks."""
    forms: set[tuple[Any, ...]] = set()
    for member in members:
        state = state_of(member)
        weight = member._parameters.get("weight")
        if type(member) is not OptimizedLinear or has_hooks(member) or state is None:
            return False
        if not isinstance(weight, PackedWeight) or "bias" not in member._parameters:
            return False
        forms.add((member.in_features, weight.dtype, weight.form, state.packing))
    return len(members) > 1 and len(forms) == 1 and len(set(map(id, members))) == len(members)


def merge(members: tuple[nn.Module, ...]) -> bool:
    """Pack the weights of the members side by side; return whether it was possible."""
    with _lock:
        group = members[0].__dict__.get(_MERGED)
        if isinstance(group, LinearGroup) and group.fresh(members):
            return True  # another thread was faster
        return may_merge(members) and _merge(members)


@torch.no_grad()
def _merge(members: tuple[nn.Module, ...]) -> bool:
    group = members[0].__dict__.setdefault(_MERGED, LinearGroup())
    form = members[0]._parameters["weight"].form  # type: ignore[union-attr]
    for member in members:
        state = state_of(member)
        assert state is not None
        unpack_weight(member, state)
    weights = [member._parameters["weight"] for member in members]
    biases = [member._parameters["bias"] for member in members]
    plain = [w for w in weights if w is not None]
    group.wide = pack(torch.cat([w.detach() for w in plain]), form)
    group.dtype, group.sizes = plain[0].dtype, [w.shape[0] for w in plain]
    group.kernel = form == "ipex"
    group.biases = [(b, 0 if b is None else b._version) for b in biases]
    group.bias = None
    if any(b is not None for b in biases):
        group.bias = torch.cat(
            [
                w.new_zeros(w.shape[0]) if b is None else b.detach()
                for w, b in zip(plain, biases, strict=True)
            ]
        )
    start = 0
    for member, weight in zip(members, plain, strict=True):
        state = state_of(member)
        assert state is not None and isinstance(weight, nn.Parameter)
        wrapper: Any = PackedWeight(
            group.wide,
            form,
            weight.shape,
            weight.dtype,
            weight.requires_grad,
            start,
            sum(group.sizes),
        )
        member._parameters["weight"] = wrapper
        state.plain = weight
        start += weight.shape[0]
        weight.data = torch.empty(0, dtype=weight.dtype)
    return True


# --- a linear layer and its gate --------------------------------------------------------------------------------------
# The weights are stored once, with their rows interleaved; each layer's parameter is a `PackedWeight` that shows its
# rows. As in `ipex_core.nn.merged_linear`, a layer that changes runs on its own until both can be merged again.


_gate_lock = threading.Lock()


class GatedPair(LinearGroup):
    """The interleaved weight of two layers; kept by the module that calls them together."""

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
        with _gate_lock:
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
