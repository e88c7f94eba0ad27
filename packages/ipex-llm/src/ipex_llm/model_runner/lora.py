# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters in programs: what they add to linear layers, for each row from the adapter of its request.

A program without adapters computes activations, residuals and factors inside its linear layers. In the program with
adapters these layers stand alone: the adapter's product is added to their result, and the rest comes behind it. Layers
that no adapter has stay as they are.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; Chen et al., "Punica: Multi-Tenant LoRA
Serving", 2023.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ipex_core.program import Register
from ipex_core.program.builtins import POINTWISE
from ipex_llm.arch import LinearPlan

if TYPE_CHECKING:
    from ipex_llm.model_runner.dense import Linear

__all__ = ["Adapter", "LoraSites", "PackedLinear", "features_of"]

#: Rows of gate and up that alternate in a packed pair.
_PANEL = 32


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The factors of one adapter.

    Attributes:
        factors: By the id of a linear layer: float ``[r, in_features]`` and ``[out_features, r]``, the second one
            multiplied with the scale of the adapter.
    """

    factors: Mapping[int, tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True, slots=True)
class PackedLinear:
    """A packed weight with the linear layers in it.

    Attributes:
        linear: As programs call it.
        plans: The layers; of a gated pair the gate and the other factor, or one with the rows of both.
        gated: Whether rows of a gate and of its factor alternate.
    """

    linear: Linear
    plans: tuple[LinearPlan, ...]
    gated: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Columns of a result that have factors of their own: ``[adapters, rank, in]`` and ``[adapters, size, rank]``."""

    down: Tensor
    up: Tensor
    half: int  # 1: the factor of a gate
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Site:
    parts: tuple[_Part, ...]
    gated: bool


def features_of(module: Any, transposed: bool = False) -> tuple[int, int]:
    """Return the input and output features of a linear layer."""
    if hasattr(module, "in_features"):
        return int(module.in_features), int(module.out_features)
    rows, columns = module._parameters["weight"].shape
    return (int(rows), int(columns)) if transposed else (int(columns), int(rows))


class LoraSites:
    """What a set of adapters adds to the packed weights of a decoder.

    Args:
        linears: Packed weights that adapters may have.
        adapters: The adapters by their number; None for a number that is free.
        dtype: dtype of the rows.
    """

    def __init__(
        self,
        linears: Iterable[PackedLinear],
        adapters: Sequence[Adapter | None],
        dtype: torch.dtype,
    ) -> None:
        self._adapters = adapters
        self._dtype = dtype
        self._sites: dict[int, _Site] = {}
        for packed in linears:
            parts = self._gated(packed) if packed.gated else self._plain(packed)
            if parts:
                self._sites[id(packed.linear)] = _Site(tuple(parts), packed.gated)

    def site(self, linear: Linear) -> _Site | None:
        """Return what is added to a packed weight, or None."""
        return self._sites.get(id(linear))

    def _plain(self, packed: PackedLinear) -> list[_Part]:
        (plan,) = packed.plans
        if plan.order is not None:
            return self._ordered(plan)
        parts = []
        offset = 0
        for module in plan.modules:
            rows = features_of(module, plan.transposed)[1]
            found = self._stacked([module], plan.transposed)
            if found is not None:
                parts.append(_Part(*found, 0, offset))
            offset += rows
        return parts

    def _ordered(self, plan: LinearPlan) -> list[_Part]:
        """Return the factors of a fused layer whose rows are in another order."""
        assert plan.order is not None
        found = self._stacked(plan.modules, plan.transposed)
        return (
            [] if found is None else [_Part(found[0], found[1][:, plan.order].contiguous(), 0, 0)]
        )

    def _gated(self, packed: PackedLinear) -> list[_Part]:
        if len(packed.plans) == 1:  # one layer, gate rows and then the others
            plan = packed.plans[0]
            found = self._stacked(plan.modules, plan.transposed)
            if found is None:
                return []
            halves = found[1].chunk(2, 1)
            return [_Part(found[0], up.contiguous(), half, 0) for half, up in enumerate(halves)]
        parts = []
        for half, plan in enumerate(packed.plans):
            found = self._stacked(plan.modules, plan.transposed)
            if found is not None:
                parts.append(_Part(*found, half, 0))
        return parts

    def _stacked(
        self, modules: Sequence[nn.Module], transposed: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Return the factors of all adapters for layers side by side, None if no adapter has one of them."""
        found = [a.factors for a in self._adapters if a is not None]
        ranks = [f[id(m)][0].shape[0] for f in found for m in modules if id(m) in f]
        if not ranks:
            return None
        sizes = [features_of(module, transposed) for module in modules]
        rank, count = max(ranks), len(self._adapters)
        down = torch.zeros(count, rank * len(modules), sizes[0][0], dtype=self._dtype)
        up = torch.zeros(count, sum(n for _, n in sizes), rank * len(modules), dtype=self._dtype)
        for number, adapter in enumerate(self._adapters):
            offset = 0
            for place, (module, (_, rows)) in enumerate(zip(modules, sizes, strict=True)):
                factors = None if adapter is None else adapter.factors.get(id(module))
                if factors is not None:
                    first, r = place * rank, factors[0].shape[0]
                    down[number, first : first + r] = factors[0]
                    up[number, offset : offset + rows, first : first + r] = factors[1]
                offset += rows
        return down, up


def write_linear(
    writer: Any,
    weight: Linear,
    site: _Site,
    x: Register,
    *,
    gate: str | None = None,
    activation: str = "none",
    mul: Register | None = None,
    residual: Register | None = None,
) -> Register:
    """Write a linear layer with adapters and what follows it; see the op ``linear`` for the arguments."""
    b = writer.b
    width = weight.features
    bias = None if weight.bias is None else b.constant(weight.bias)
    padded = -(-width // _PANEL) * _PANEL
    features = 2 * padded if site.gated else width
    y: Register = b.call(weight.op, x, b.constant(weight.weight), features, bias, **weight.options)
    if site.gated:
        blocks = b.call("reshape", y, [0, padded // _PANEL, 2, _PANEL])
        halves = []
        for half in (0, 1):
            part = b.call("contiguous", b.call("select", blocks, 2, half))
            halves.append(b.call("narrow", b.call("reshape", part, [0, padded]), 1, 0, width))
    else:
        halves = [y]
    for part in site.parts:
        _add(writer, part, halves[part.half], x)
    if site.gated:
        op = "silu_mul" if gate == "silu" else "gelu_mul"
        more = {"approximate": "tanh"} if gate == "gelu_tanh" else {}
        y = b.call(op, *(b.call("contiguous", half) for half in halves), **more)
    if activation != "none":
        code = [POINTWISE.index(activation), 0, -1, -1]
        y = b.call("pointwise", [y], code, [], writer.e.store.dtype)
    if mul is not None:
        y = b.call("mul", y, mul)
    return y if residual is None else b.call("add", y, residual)


def _add(writer: Any, part: _Part, out: Register, x: Register) -> None:
    """Write the product of the factors of each row's adapter, added to columns of ``out``."""
    b, rank = writer.b, part.down.shape[1]
    inner = b.call("narrow", x, 1, 0, rank)
    inner = b.call("empty_like", b.call("cast", inner, torch.float32))
    b.call("bgmv_shrink", inner, x, b.constant(part.down), writer.adapters, 1.0)
    b.call(
        "bgmv_expand_slice",
        *(out, inner, b.constant(part.up), writer.adapters),
        *(part.offset, part.up.shape[1], True),
    )
