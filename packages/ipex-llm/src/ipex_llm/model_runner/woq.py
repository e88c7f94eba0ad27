# SPDX-License-Identifier: Apache-2.0
"""Quantized layers in plans: packed side by side, given back to their modules when somebody asks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ipex_core.module_swap.base import restore_class, swap
from ipex_core.woq import deinterleave_gate_up
from ipex_llm.arch import LinearPlan
from ipex_llm.records import record_of, update
from ipex_quant import combine_linears
from ipex_quant.weight.tensor import QuantizedWeight, unpack
from ipex_quant.weight_only.linear import WoqLinearModule


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one module in a combined weight."""

    packed: Tensor
    index: int
    start: int
    rows: int
    half: int  # rows of the gate, or 0
    fused: bool
    order: Tensor | None

    def weight(self) -> QuantizedWeight:
        whole = unpack(self.packed)
        zeros = whole.zeros
        return QuantizedWeight(
            whole.format,
            whole.in_features,
            self._rows(whole.codes),
            self._rows(whole.scales),
            None if zeros is None else self._rows(zeros),
            whole.group_size,
            whole.g_idx,
        )

    def _rows(self, values: Tensor) -> Tensor:
        raw = values.view(torch.uint8) if values.dtype.itemsize == 1 else values
        if self.half:
            pair = deinterleave_gate_up(raw, self.half)
            raw = torch.cat(pair) if self.fused else pair[self.index]
        if self.order is not None:
            given = torch.empty_like(raw)
            given[self.order] = raw
            raw = given
        return raw[self.start : self.start + self.rows].contiguous().view(values.dtype)


class _Borrowed(WoqLinearModule):
    """A quantized layer whose weight is a part of another; it makes its own where it needs one."""

    def quantized_weight(self) -> QuantizedWeight:
        part: _Part = record_of(self).part
        weight = part.weight()
        weight.bias = self.bias
        return weight

    def fused(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with _Own(self):
            return super().fused(x, *args, **kwargs)

    @property
    def weight(self) -> Tensor | None:
        with _Own(self):
            return super().weight

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with _Own(self):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def set_weight(self, weight: QuantizedWeight, later: bool = False) -> None:
        give_back(self, keep=False)
        self.set_weight(weight, later)

    def __reduce_ex__(self, protocol: Any) -> Any:
        give_back(self)  # it has its own class again
        return self.__reduce_ex__(protocol)


class _Own:
    """While it is entered, a layer has its own weight."""

    def __init__(self, module: WoqLinearModule) -> None:
        self.module = module

    def __enter__(self) -> None:
        order = "vnni" if self.module.modes[0] == "int8" else "dot"
        self.module._buffers["packed_weight"] = self.module.quantized_weight().pack(order)

    def __exit__(self, *_: Any) -> None:
        self.module._buffers["packed_weight"] = None


def combine(
    plans: list[LinearPlan], fused: bool
) -> tuple[Tensor, Tensor | None, dict[str, str], list[tuple[WoqLinearModule, Tensor]]] | None:
    """Pack the layers of plans as one weight; see `WeightStore.linear`.

    Returns:
        The packed weight, the bias, the modes, and the modules that lent it their weights; or None if they have no
        common form.
    """
    modules: list[Any] = [module for plan in plans for module in plan.modules]
    gated = fused or len(plans) == 2
    order = plans[0].order
    if gated and any(plan.order is not None for plan in plans):
        return None
    lowp, act = modules[0].modes
    modes = {"lowp_mode": lowp, "act_quant_mode": act}
    if len(modules) == 1 and not gated and order is None:
        bias = modules[0].bias
        packed = modules[0].packed()
        return packed, None if bias is None else bias.detach(), modes, []
    found = combine_linears(modules, order, gated)
    if found is None:
        return None
    packed, bias = found
    half = 0
    if gated:
        half = sum(m.out_features for m in modules) // 2
    lent = []
    for index, plan in enumerate(plans):
        start = 0
        for module in plan.modules:
            assert isinstance(module, WoqLinearModule)
            rows = module.out_features
            part = _Part(packed, index, start, rows, half, fused, plan.order)
            _lend(module, part)
            lent.append((module, packed))
            start += rows
    return packed, bias, modes, lent


def lend(
    modules: tuple[WoqLinearModule, ...], packed: Tensor, gated: bool
) -> list[tuple[WoqLinearModule, Tensor]]:
    """Make a packed weight, gate and up or a single one, the weight of its modules; return what `taken` checks."""
    for index, module in enumerate(modules):
        rows = module.out_features
        _lend(module, _Part(packed, index, 0, rows, rows if gated else 0, False, None))
    return [(module, packed) for module in modules]


def _lend(module: WoqLinearModule, part: _Part) -> None:
    update(module, part=part)
    swap(module, _Borrowed)
    module._later = None
    module._buffers["packed_weight"] = None


def taken(module: WoqLinearModule, packed: Tensor) -> bool:
    """Return whether a module's weight still is a part of ``packed``."""
    part = record_of(module).part
    return isinstance(part, _Part) and part.packed is packed


def give_back(module: WoqLinearModule, keep: bool = True) -> None:
    """Let a module have its own weight again."""
    if not isinstance(module, _Borrowed):
        return
    weight = module.quantized_weight() if keep else None
    restore_class(module)
    update(module, part=None)
    if weight is not None:
        order = "vnni" if module.modes[0] == "int8" else "dot"
        module._buffers["packed_weight"] = weight.pack(order)
