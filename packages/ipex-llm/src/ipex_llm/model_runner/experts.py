# SPDX-License-Identifier: Apache-2.0
"""Packed experts of a plan: stacked weights or one module for each, in floating point or quantized."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ipex_llm.arch import ExpertsPlan
from ipex_llm.model_runner import woq, woq_experts
from ipex_llm.model_runner.dense import (
    UnsupportedPlan,
    WeightStore,
    _unpack,
    check_packable,
)
from ipex_quant import combine_linears
from ipex_quant.weight_only.linear import WoqLinearModule

_MIXED = "some experts are quantized, others are not"
_DIFFERENT = "quantized experts have different formats"
_ELSEWHERE = "the weights of the experts are no parameters of their module"

Modules = tuple[nn.Module, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Experts:
    """Packed experts as a program calls them; see ``fused_experts``."""

    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    lowp: str = "none"


@torch.no_grad()
def pack_experts(store: WeightStore, plan: ExpertsPlan) -> Experts:
    """Pack the experts of a layer.

    Raises:
        UnsupportedPlan: They lie in memory in a way that is not known here.
    """
    gate_up, down = plan.gate_up, plan.down
    if isinstance(gate_up, tuple) and isinstance(down, tuple):
        modules = [*gate_up, *down]
        quantized = [isinstance(module, WoqLinearModule) for module in modules]
        if not any(quantized):
            return _pack_listed(store, plan.experts, gate_up, down)
        if not all(quantized):
            raise UnsupportedPlan(_MIXED)
        return _join_quantized(store, plan.experts, gate_up, down)
    stacks = woq_experts.packed(plan.module)
    if plan.up is not None:
        return _pack_flat(store, plan, plan.up)
    if stacks is not None:
        for owner, name, _ in stacks.packed:
            store.watch(owner, name, written=False)
        w13, w2 = (packed for _, _, packed in stacks.packed)
        w13 = w13[: plan.experts]  # those behind give what they read
        return Experts(w13, w2, *_stacked_biases(store, plan), stacks.lowp)
    return _pack_stacked(store, plan)


def check_experts(plan: ExpertsPlan, form: Callable[[nn.Module], object]) -> None:
    """Raise if the experts of a layer cannot be packed.

    Args:
        plan: Of the experts.
        form: Returns how the weight of a module will be quantized, None for floats.

    Raises:
        UnsupportedPlan: They are of different kinds, or lie in memory in a way that is not known here.
    """
    gate_up, down = plan.gate_up, plan.down
    if not isinstance(gate_up, tuple) or not isinstance(down, tuple):
        owners = _owners(plan)
        known = form(plan.module) is not None or woq_experts.owners(plan.module)
        if not known and not {id(gate_up), id(down)} <= owners.keys():
            raise UnsupportedPlan(_ELSEWHERE)
        return
    forms = [{form(module) for module in part} for part in (gate_up, down)]
    if forms == [{None}, {None}]:
        check_packable((*gate_up, *down))
    elif None in forms[0] or None in forms[1]:
        raise UnsupportedPlan(_MIXED)
    elif any(len(found) > 1 for found in forms):
        raise UnsupportedPlan(_DIFFERENT)


def _owners(plan: ExpertsPlan) -> dict[int, tuple[nn.Module, str]]:
    """Return who has a parameter, by its id: the module of the experts, or one for each weight."""
    return {
        id(parameter): (module, name)
        for module in plan.module.modules()
        for name, parameter in module._parameters.items()
    }


def _stacked_biases(store: WeightStore, plan: ExpertsPlan) -> tuple[Tensor | None, Tensor | None]:
    bias, down = plan.gate_up_bias, plan.down_bias
    names = {id(p): n for n, p in plan.module._parameters.items() if p is not None}
    for value in (bias, down):
        if isinstance(value, nn.Parameter) and id(value) in names:
            store.watch(plan.module, names[id(value)])
    if bias is not None:
        bias = bias.detach()
        if plan.interleaved:
            bias = torch.cat([bias[:, 0::2], bias[:, 1::2]], dim=1)
        bias = bias.contiguous()
    return bias, None if down is None else down.detach()


def _pack_flat(store: WeightStore, plan: ExpertsPlan, up: Tensor) -> Experts:
    """Pack experts that lie behind each other in three matrices ``[E * I, hidden]``."""
    parts: Any = (plan.gate_up, up, plan.down)
    owners = _owners(plan)
    gates, ups, downs = (
        part.detach().to(store.dtype).unflatten(0, (plan.experts, -1)) for part in parts
    )
    made = []
    rows = torch.cat([gates, ups], dim=1), downs.transpose(1, 2).contiguous()
    for one, names, gated in zip(rows, (parts[:2], parts[2:]), (True, False), strict=True):
        packed = torch.ops.ipex.pack_moe_weight(one, gated)
        shape = (one.shape[1], one.shape[2])
        for index, part in enumerate(names):
            recover = _FlatPart(packed, shape, store.dtype, gated, index)
            store._replace(*owners[id(part)], packed, recover)
        made.append(packed)
    return Experts(made[0], made[1], None, None)


@dataclasses.dataclass(frozen=True, slots=True)
class _Packed:
    """The packed weights of experts."""

    packed: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    gated: bool

    def rows(self) -> Tensor:
        """Return them as ``[E, *shape]``."""
        rows: Tensor = torch.ops.ipex.unpack_moe_weight(
            self.packed, *self.shape, self.dtype, self.gated
        )
        return rows


@dataclasses.dataclass(frozen=True, slots=True)
class _FlatPart(_Packed):
    """Gives one of three matrices with the weights of all experts back."""

    index: int

    def __call__(self) -> Tensor:
        rows = self.rows()
        rows = rows.chunk(2, dim=1)[self.index] if self.gated else rows.transpose(1, 2)
        return rows.flatten(0, 1).contiguous()


def _pack_stacked(store: WeightStore, plan: ExpertsPlan) -> Experts:
    gate_up, down = plan.gate_up, plan.down
    owners = _owners(plan)
    if id(gate_up) not in owners or id(down) not in owners:
        raise UnsupportedPlan(_ELSEWHERE)
    made: list[Tensor] = []
    for gated, parameter in ((plan.paired, gate_up), (False, down)):
        assert isinstance(parameter, Tensor)
        form = (plan.transposed, parameter is gate_up and plan.interleaved)
        rest = parameter.detach()[plan.experts :].clone()  # of experts that give what they read
        rows = woq_experts.as_rows(parameter.detach()[: plan.experts], *form)
        packed = torch.ops.ipex.pack_moe_weight(rows.to(store.dtype).contiguous(), gated)
        shape = (rows.shape[1], rows.shape[2])
        del rows
        part = _StackPart(packed, shape, store.dtype, gated, form, rest)
        store._replace(*owners[id(parameter)], packed, part)
        made.append(packed)
    if plan.always is not None:
        made = _with_always(store, plan.always, made)
    return Experts(made[0], made[1], *_stacked_biases(store, plan))


def _with_always(store: WeightStore, module: nn.Module, made: list[Tensor]) -> list[Tensor]:
    """Return packed experts with those behind them that all tokens go to."""
    gate, up, down = (module._parameters[f"{name}_proj"] for name in ("gate", "up", "down"))
    assert gate is not None and up is not None and down is not None
    found = []
    for first, own, names in (
        (made[0], torch.cat([gate.detach(), up.detach()], dim=1), ("gate_proj", "up_proj")),
        (made[1], down.detach(), ("down_proj",)),
    ):
        gated, shape = len(names) == 2, (own.shape[1], own.shape[2])
        packed = torch.ops.ipex.pack_moe_weight(own.to(store.dtype).contiguous(), gated)
        found.append(torch.cat([first, packed]))
        for index, name in enumerate(names):
            part = _AlwaysPart(packed, shape, store.dtype, gated, index)
            store._replace(module, name, packed, part)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _AlwaysPart(_Packed):
    """Gives one of three stacked weights of experts that all tokens go to back."""

    index: int

    def __call__(self) -> Tensor:
        return self.rows().chunk(2 if self.gated else 1, dim=1)[self.index].contiguous()


@dataclasses.dataclass(frozen=True, slots=True)
class _StackPart(_Packed):
    """Gives the stacked weights of experts back."""

    form: tuple[bool, bool]
    rest: Tensor  # weights of further experts, as the parameter has them

    def __call__(self) -> Tensor:
        whole = woq_experts.from_rows(self.rows(), *self.form)
        return torch.cat([whole, self.rest.to(self.dtype)]) if len(self.rest) else whole


# -------------------------------------------------------------------------------------------------- separate modules


def _pack_listed(store: WeightStore, count: int, gate_up: Modules, down: Modules) -> Experts:
    check_packable((*gate_up, *down), store.device.type)
    for module in (*gate_up, *down):
        _unpack(module)
    made: list[Tensor] = []
    for parts in ((gate_up[:count], gate_up[count:]), (down,)):
        gated = len(parts) == 2
        rows = torch.stack(
            [torch.cat([_value(m) for m in one]) for one in zip(*parts, strict=True)]
        )
        packed = torch.ops.ipex.pack_moe_weight(rows.to(store.dtype).contiguous(), gated)
        shape = (rows.shape[1], rows.shape[2])
        del rows
        for index, modules in enumerate(parts):
            for expert, module in enumerate(modules):
                part = _ListPart(packed, shape, store.dtype, gated, expert, index)
                store._replace(module, "weight", packed, part)
        made.append(packed)
    biases = _list_biases(store, count, gate_up, down)
    return Experts(made[0], made[1], *biases)


def _value(module: nn.Module) -> Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.detach()


@dataclasses.dataclass(frozen=True, slots=True)
class _ListPart:
    """Gives the weight of one module of one expert back."""

    packed: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    gated: bool
    expert: int
    index: int

    def __call__(self) -> Tensor:
        one = self.packed[self.expert : self.expert + 1]
        rows: Tensor = torch.ops.ipex.unpack_moe_weight(one, *self.shape, self.dtype, self.gated)[0]
        return (rows.chunk(2)[self.index] if self.gated else rows).clone()


def _list_biases(
    store: WeightStore, count: int, gate_up: Modules, down: Modules
) -> tuple[Tensor | None, Tensor | None]:
    found: list[Tensor | None] = []
    for parts in ((gate_up[:count], gate_up[count:]), (down,)):
        modules: list[Any] = [module for one in parts for module in one]
        if all(module.bias is None for module in modules):
            found.append(None)
            continue
        for module in modules:
            if module.bias is not None:
                store.watch(module, "bias")
        rows = [
            torch.zeros(m.out_features, device=store.device)
            if m.bias is None
            else m.bias.detach().float()
            for m in modules
        ]
        sides = [torch.stack(rows[at : at + count]) for at in range(0, len(rows), count)]
        found.append(torch.cat(sides, dim=1).contiguous())
    return found[0], found[1]


def _join_quantized(store: WeightStore, count: int, gate_up: Any, down: Any) -> Experts:
    """Put the packed weights of quantized modules together; the modules keep none of their own."""
    made: list[Tensor] = []
    biases = _list_biases(store, count, gate_up, down)
    for parts in ((gate_up[:count], gate_up[count:]), (down,)):
        gated = len(parts) == 2
        rows = []
        for one in zip(*parts, strict=True):
            combined = combine_linears(one, gate=gated, codes_order="dot")
            if combined is None:
                raise UnsupportedPlan(_DIFFERENT)
            rows.append(combined[0])
        if len({row.shape for row in rows}) != 1:
            raise UnsupportedPlan(_DIFFERENT)
        packed: Tensor = torch.ops.ipex.pack_moe_stack(rows)
        del rows
        made.append(packed)
        for expert, one in enumerate(zip(*parts, strict=True)):
            store._lent += woq.lend(one, packed[expert], gated)
    modes = {module.modes[0] for module in (*gate_up, *down)}
    # Their products with int8 activations have no grouped form: products in the rows' own dtype are more exact.
    lowp = modes.pop() if len(modes) == 1 else "none"
    return Experts(made[0], made[1], *biases, "none" if lowp == "int8" else lowp)
