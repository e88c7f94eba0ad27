# SPDX-License-Identifier: Apache-2.0
"""Weights of a plan on a device, and which plans have programs there."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ipex_core.packing.parameter import PackedWeight
from ipex_llm.arch import DecoderPlan, LinearPlan
from ipex_llm.model_runner.dense import (
    Linear,
    Owners,
    WeightStore,
    check_packable,
)

Tensor = torch.Tensor


def device_of(plan: DecoderPlan) -> torch.device:
    """Return where the weights of a plan are."""
    weight = plan.embedding._parameters.get("weight")
    if weight is None or isinstance(weight, PackedWeight):
        return torch.device("cpu")
    return weight.device


def reason_on_device(plan: DecoderPlan) -> str | None:
    """Return why a plan has no programs on a device, None if it has some."""
    if plan.has_states:
        return "on xpu, layers that keep a state have no program"
    if any(attention.latent is not None for attention in plan.attentions):
        return "on xpu, attention with latents has no program"
    if any(attention.experts is not None for attention in plan.attentions):
        return "on xpu, attention with experts has no program"
    if plan.pictures:
        return "on xpu, layers that read pictures have no program"
    if plan.parallel is not None:
        return "on xpu, a divided model has no program"
    return None


class DeviceStore(WeightStore):
    """Weights of a plan on a device, whose products read them as they lie.

    Layers that read the same input are one weight there, too. The parameters of their modules become views of it, so
    that no memory is held twice and the model's own forward stays what it was. Where their rows have another order, the
    weight is a copy.

    Args:
        dtype: As of `WeightStore`.
        device: Where the weights are.
        shared: As of `WeightStore`.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        shared: Mapping[int, Owners] | None = None,
    ) -> None:
        super().__init__(dtype, shared)
        self.device = device
        #: Parameters and the addresses of their numbers, which a new value changes.
        self._places: list[tuple[Tensor, int]] = []

    def plain(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return a linear layer of a weight that is no parameter."""
        return Linear("plain_linear", weight, weight.shape[0], bias)

    @torch.no_grad()
    def _pack(self, plans: list[LinearPlan], fused: bool) -> Linear:
        modules = [module for plan in plans for module in plan.modules]
        check_packable(modules, self.device.type)
        gated = fused or len(plans) == 2
        parts = [self._rows(plan) for plan in plans]
        wide = self._paired(parts, fused) if gated else parts[0]
        features = wide.shape[0] // 2 if gated else wide.shape[0]
        wide = wide.to(self.dtype)
        plain = all(plan.order is None and not plan.transposed for plan in plans)
        start = 0
        for module in modules:
            parameter = module._parameters["weight"]
            assert parameter is not None
            if len(modules) > 1 and plain and parameter.dtype == self.dtype:
                rows = parameter.shape[0]
                parameter.data = wide[start : start + rows]
                start += rows
            self.watch(module, "weight")
            self._places.append((parameter, parameter.data_ptr()))
        return Linear("plain_linear", wide, features, self._bias(plans, fused))

    def _paired(self, parts: list[Tensor], fused: bool) -> Tensor:
        return parts[0] if fused else torch.cat(parts)

    def fresh(self) -> bool:
        """Return whether all parameters are still those that the programs were made from."""
        same = all(parameter.data_ptr() == place for parameter, place in self._places)
        return same and super().fresh()

    def undo(self) -> None:
        """Give quantized modules their weights back; the others have never lost them."""
        self._places.clear()
        super().undo()
