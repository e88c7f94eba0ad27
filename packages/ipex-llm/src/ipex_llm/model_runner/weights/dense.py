# SPDX-License-Identifier: Apache-2.0
"""Packed weights of a plan, and the way back to the parameters they were made from.

A layer's projections that read the same input are packed as one weight, once. Each parameter that went into it is
replaced by a `PlannedWeight`: a parameter of the same shape and dtype that holds no memory of its own and unpacks its
part when somebody computes with it or saves it. So ``state_dict()``, ``parameters()`` and the model's own forward stay
what they were.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ipex_core import nn as inn
from ipex_core.module_swap.base import has_hooks
from ipex_core.module_swap.derive import derive
from ipex_core.module_swap.state_dict import (
    SavedTensor,
    attach,
    put_back,
    realize,
    state_of,
    swap_class,
    unpack_weight,
)
from ipex_core.optimization.passes.cast import cast_input
from ipex_core.optimization.records import class_name
from ipex_core.packing.parameter import PackedWeight
from ipex_core.woq import interleave_gate_up
from ipex_llm.arch.types import LinearPlan
from ipex_llm.model_runner.planned import Part, PlannedWeight, TiedEmbedding
from ipex_llm.model_runner.weights import woq as _woq

__all__ = [
    "Linear",
    "Owners",
    "PlannedWeight",
    "UnsupportedPlan",
    "WeightStore",
    "call_linear",
    "check_packable",
    "version_of",
]

Tensor = torch.Tensor
#: Modules that have a parameter, and the name it has there.
Owners = Sequence[tuple[nn.Module, str]]


MIXED = "some layers with one input are quantized, others are not"
DIFFERENT = "quantized layers with one input have different formats"


class UnsupportedPlan(Exception):
    """A plan holds something that no program can run; the text says what."""


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer as a program calls it.

    Attributes:
        op: ``"linear"`` or ``"woq_linear"``.
        weight: Packed.
        features: Rows of the result; of a gated pair the rows of one of the two.
        bias: One number per row of the packed weight, or None.
        options: Further arguments of the op.
    """

    op: str
    weight: Tensor
    features: int
    bias: Tensor | None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def version_of(parameter: Tensor) -> int:
    """Return how often a parameter was written to; -1 where that is not counted, under ``torch.inference_mode``."""
    return -1 if parameter.is_inference() else parameter._version


def call_linear(linear: Linear, x: Tensor) -> Tensor:
    """Compute a packed linear layer outside of a program."""
    op = getattr(torch.ops.ipex, linear.op)
    result: Tensor = op(x, linear.weight, linear.features, linear.bias, **linear.options)
    return result


class WeightStore:
    """All packed weights of a plan.

    Args:
        dtype: dtype of the packed weights.
        shared: Owners, by id, of parameters that several modules have. The weight of a head that embeddings have too
            is exchanged in all of them; other shared parameters are packed and kept.
    """

    def __init__(self, dtype: torch.dtype, shared: Mapping[int, Owners] | None = None) -> None:
        self.dtype = dtype
        self.shared = shared or {}
        self._entries: list[tuple[nn.Module, str, PlannedWeight]] = []
        self._plain: list[tuple[nn.Module, str, Any, int]] = []
        #: Quantized layers and what their weight is a part of.
        self._lent: list[tuple[Any, Tensor]] = []
        #: Quantized weights that are used as they are: module, name of the buffer, what it was.
        self._own: list[tuple[nn.Module, str, Tensor]] = []
        self._memo: dict[tuple[int, ...], Linear] = {}

    # ---------------------------------------------------------------------------------------------------- linear

    def linear(self, plan: LinearPlan, partner: LinearPlan | None = None) -> Linear:
        """Pack a linear layer, or with ``partner`` (the factor of this gate) the two interleaved.

        Raises:
            UnsupportedPlan: A module has hooks, or its weight is no plain floating matrix.
        """
        plans = [plan] if partner is None else [plan, partner]
        modules = [module for one in plans for module in one.modules]
        key = (partner is not None, *map(id, modules))
        if key not in self._memo:
            self._memo[key] = self._any(plans, False)
        return self._memo[key]

    def fused_gate(self, plan: LinearPlan) -> Linear:
        """Pack one module that holds gate rows and then up rows, interleaved."""
        key = (True, *map(id, plan.modules))
        if key not in self._memo:
            self._memo[key] = self._any([plan], True)
        return self._memo[key]

    def _any(self, plans: list[LinearPlan], fused: bool) -> Linear:
        modules = [module for plan in plans for module in plan.modules]
        if not any(_woq.is_quantized(module) for module in modules):
            return self._pack(plans, fused)
        if not all(_woq.is_quantized(module) for module in modules):
            raise UnsupportedPlan(MIXED)
        found = _woq.combine(plans, fused)
        if found is None:
            raise UnsupportedPlan(DIFFERENT)
        packed, bias, modes, lent = found
        self._lent += lent
        features = sum(_features(module) for module in modules)
        features = features // 2 if fused or len(plans) == 2 else features
        if not lent:
            self._own.append((modules[0], "packed_weight", packed))
        if bias is not None and bias.dtype not in (torch.float32, self.dtype):
            bias = bias.to(self.dtype)
        return Linear("woq_linear", packed, features, bias, dict(modes))

    @torch.no_grad()
    def _pack(self, plans: list[LinearPlan], fused: bool) -> Linear:
        modules = [module for plan in plans for module in plan.modules]
        check_packable(modules)
        gated = fused or len(plans) == 2
        only = modules[0]
        kept = only.__dict__.get("_packed")
        weight = only._parameters.get("weight")
        if (
            len(modules) == 1
            and not gated
            and plans[0].order is None
            and not plans[0].transposed
            and isinstance(weight, PackedWeight)
            and weight.form == "ipex"
            and weight.rows is None
            and kept is weight.packed
            and weight.dtype == self.dtype
        ):  # packed by ipex_core.optimize already
            self._plain.append((only, "weight", weight, 0))
            bias = self._bias(plans, fused)
            return Linear("linear", weight.packed, weight.shape[0], bias)
        for module in modules:
            _unpack(module)
        parts = [self._rows(plan) for plan in plans]
        wide = _interleaved(parts, fused) if gated else parts[0]
        features = wide.shape[0]
        if gated:
            features = parts[0].shape[0] // 2 if fused else parts[0].shape[0]
        bias = self._bias(plans, fused)
        packed: Tensor = torch.ops.ipex.pack_linear_weight(wide.to(self.dtype).contiguous())
        shape = list(wide.shape)
        del parts, wide
        for index, plan in enumerate(plans):
            start = 0
            for module in plan.modules:
                parameter = module._parameters["weight"]
                assert isinstance(parameter, nn.Parameter)
                rows = parameter.shape[1] if plan.transposed else parameter.shape[0]
                part = Part(
                    packed, shape, self.dtype, plan, index, start, rows, features, gated, fused
                )
                self._replace(module, "weight", packed, part)
                start += rows
        return Linear("linear", packed, features, bias)

    def _rows(self, plan: LinearPlan) -> Tensor:
        weights = []
        for module in plan.modules:
            weight = module._parameters["weight"]
            assert weight is not None
            value = weight.detach()
            weights.append(value.t() if plan.transposed else value)
        wide = weights[0] if len(weights) == 1 else torch.cat(weights)
        return wide if plan.order is None else wide[plan.order]

    def _bias(self, plans: list[LinearPlan], fused: bool) -> Tensor | None:
        """Return the biases side by side, as the packed rows lie; zeros for a module that has none."""
        found = []
        some = False
        for plan in plans:
            parts = []
            for module in plan.modules:
                bias = module._parameters.get("bias")
                some = some or bias is not None
                rows = _out_features(module, plan.transposed)
                if bias is not None:
                    self._plain.append((module, "bias", bias, version_of(bias)))
                parts.append(torch.zeros(rows) if bias is None else bias.detach())
            whole = torch.cat([part.to(self.dtype) for part in parts])
            found.append(whole if plan.order is None else whole[plan.order])
        if not some:
            return None
        if fused or len(plans) == 2:
            return _interleaved(found, fused).contiguous()
        return found[0]

    # ------------------------------------------------------------------------------------------------- the way back

    def _replace(
        self, module: nn.Module, name: str, packed: Tensor, recover: Callable[[], Tensor]
    ) -> None:
        parameter = module._parameters[name]
        assert isinstance(parameter, nn.Parameter)
        owners = self.shared.get(id(parameter), [(module, name)])
        wrapper: Any = PlannedWeight.of(parameter, packed, recover)
        if parameter.dtype != self.dtype or not _exchangeable(module, owners, wrapper):
            self._plain.append((module, name, parameter, version_of(parameter)))
            return
        # Owners share what is remembered of the original, too.
        states = [(state_of(owner), key) for owner, key in owners]
        known = [
            state.saved[key] for state, key in states if state is not None and key in state.saved
        ]
        originals: dict[int, SavedTensor] = {id(parameter): known[0]} if known else {}
        for owner, _ in owners:
            if state_of(owner) is None:
                attach(owner)
                if type(owner) is nn.Linear:
                    swap_class(owner, inn.OptimizedLinear)
                realize(owner, originals)
            if owner is not module and not isinstance(owner, TiedEmbedding):
                swap_class(owner, derive(type(owner), TiedEmbedding))
        wrapper.owners = [(weakref.ref(owner), key) for owner, key in owners]
        for owner, key in owners:
            owner._parameters[key] = wrapper
            owner.__dict__["_packed"] = None
            self._entries.append((owner, key, wrapper))
        parameter.data = torch.empty(0, dtype=parameter.dtype)

    def constant(self, module: nn.Module, name: str, value: Tensor | None) -> Tensor | None:
        """Return a small parameter that programs read as it is, or None if the module has no such parameter."""
        if value is None:
            return None
        parameter = module._parameters.get(name)
        if parameter is not None and parameter is value:
            self._plain.append((module, name, parameter, -1))
        value = value.detach()
        return value if value.dtype in (torch.float32, self.dtype) else value.to(self.dtype)

    def fresh(self) -> bool:
        """Return whether all parameters are still those that the programs were made from."""
        for module, name, wrapper in self._entries:
            if module._parameters.get(name) is not wrapper:
                return False
        for module, name, parameter, version in self._plain:
            found = module._parameters.get(name)
            if found is not parameter or (version > 0 and found._version != version):
                return False
        if not all(_woq.taken(module, packed) for module, packed in self._lent):
            return False
        return all(module._buffers.get(name) is packed for module, name, packed in self._own)

    def undo(self) -> None:
        """Put the original parameters back, unpacked."""
        for module, name, wrapper in self._entries:
            if module._parameters.get(name) is wrapper:
                put_back(module, name, wrapper)
        for module, _ in self._lent:
            _woq.give_back(module)
        self._lent.clear()
        self._own.clear()
        self._entries.clear()
        self._plain.clear()
        self._memo.clear()


def _exchangeable(module: nn.Module, owners: Owners, weight: PlannedWeight) -> bool:
    """Return whether all owners of a parameter can have a packed weight in its place."""
    others = [owner for owner, _ in owners if owner is not module]
    if not others:
        return True
    # An embedding with a largest norm writes to its weight.
    return weight.whole and all(
        isinstance(owner, nn.Embedding) and owner.max_norm is None for owner in others
    )


def _interleaved(parts: list[Tensor], fused: bool) -> Tensor:
    gate, up = parts[0].chunk(2) if fused else parts
    if gate.shape != up.shape:
        raise UnsupportedPlan("gate and up have different shapes")
    return interleave_gate_up(gate, up)


def _out_features(module: nn.Module, transposed: bool) -> int:
    weight = module._parameters["weight"]
    assert weight is not None
    return int(weight.shape[1] if transposed else weight.shape[0])


def _features(module: Any) -> int:
    return int(module.out_features)


def check_packable(modules: Iterable[nn.Module]) -> None:
    """Raise if a module has hooks, or its weight is no plain floating matrix.

    Raises:
        UnsupportedPlan: The text says what it has.
    """
    for module in modules:
        reason = _not_packable(module)
        if reason is not None:
            raise UnsupportedPlan(f"{class_name(module)}: {reason}")


def _not_packable(module: nn.Module) -> str | None:
    weight = module._parameters.get("weight")
    if weight is None:
        return "it has no parameter weight"
    if weight.dim() != 2 or not weight.is_floating_point():
        return f"its weight is {weight.dim()}-D of dtype {weight.dtype}"
    if weight.device.type != "cpu":
        return f"its weight is on {weight.device}"
    hooks = module._forward_pre_hooks
    # That of ipex_core.optimize casts the input, which programs have in the right dtype.
    if has_hooks(module) and not (list(hooks.values()) == [cast_input] and _only_hooks(module)):
        return "it has hooks"
    return None


def _only_hooks(module: nn.Module) -> bool:
    """Return whether a module has no hooks but those that see the input."""
    others = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    return "forward" not in module.__dict__ and not any(others)


def _unpack(module: nn.Module) -> None:
    """Give a module that ipex_core.optimize packed on its own its plain weight back."""
    state = state_of(module)
    if state is not None and isinstance(module._parameters.get("weight"), PackedWeight):
        unpack_weight(module, state)
