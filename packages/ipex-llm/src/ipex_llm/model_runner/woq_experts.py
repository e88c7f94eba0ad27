# SPDX-License-Identifier: Apache-2.0
"""Stacked experts with quantized weights.

A module that has the weights of all experts as two 3-D parameters gets two packed tensors for them, in the form that
``fused_experts`` takes, and computes with that op. Where two parts of a module have one parameter each, each gets a
packed tensor. Its attributes with the names of the parameters stay: weights that
are dequantized, one expert at a time where that is all somebody asks for, when they are computed with. As with
quantized linear layers, they are no parameters, and a state dict has codes and scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.library.spec import FLOATS, check
from ipex_core.module_swap.base import swap
from ipex_core.packing.parameter import PackedWeight, hollow
from ipex_core.woq import interleave_gate_up
from ipex_llm.arch import ExpertsPlan
from ipex_llm.model_runner.woq import _Part
from ipex_llm.records import record_of, update
from ipex_quant import QConfigWoq, QuantizedWeight
from ipex_quant.weight.tensor import absent_keys, packable_group, saved_tensors, saved_weight
from ipex_quant.weight_only.build import quantized

#: In front of the name of a parameter in state dicts: transformers rewrites entries with the names of parameters.
SAVED = "woq_"
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai", "relu2")


def as_rows(weight: Tensor, transposed: bool, interleaved: bool) -> Tensor:
    """Return ``[E, N, K]`` weights, the rows of gates first, of a stacked parameter."""
    rows = weight.transpose(1, 2) if transposed else weight
    return torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1) if interleaved else rows


def from_rows(rows: Tensor, transposed: bool, interleaved: bool) -> Tensor:
    """Undo `as_rows`."""
    if interleaved:
        rows = torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)
    return (rows.transpose(1, 2) if transposed else rows).contiguous()


@dataclasses.dataclass(frozen=True, slots=True)
class _Stack:
    """How one parameter lay, and the buffer that has its weights now."""

    buffer: str
    shape: tuple[int, ...]
    gated: bool
    transposed: bool
    interleaved: bool

    def weight(self, row: Tensor) -> QuantizedWeight:
        """Return codes and scales of one expert, ``[N, K]``, the rows of the gate first."""
        n = self.shape[2 if self.transposed else 1]
        return _Part(row, 0, 0, n, n // 2 if self.gated else 0, True, None).weight()

    def plain(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return dequantized weights as the parameter had them."""
        values = torch.stack([self.weight(row).dequantize(dtype) for row in rows])
        return from_rows(values, self.transposed, self.interleaved)

    def pack(self, weights: Iterable[QuantizedWeight]) -> Tensor:
        """Pack the weights of all experts, which come as `weight` gives them."""
        packed: Tensor = torch.ops.ipex.pack_moe_stack([self._pack(one) for one in weights])
        return packed

    def _pack(self, weight: QuantizedWeight) -> Tensor:
        if self.gated:
            zeros = weight.zeros
            weight = dataclasses.replace(
                weight,
                codes=_interleave(weight.codes),
                scales=_interleave(weight.scales),
                zeros=None if zeros is None else _interleave(zeros),
            )
        return weight.pack("dot")


def _interleave(values: Tensor) -> Tensor:
    raw = values.view(torch.uint8) if values.dtype.itemsize == 1 else values
    return interleave_gate_up(*raw.chunk(2)).view(values.dtype)


class _StackedWeight(PackedWeight):
    """Stands for a stacked parameter; it is dequantized when somebody computes with it."""

    stack: _Stack

    @staticmethod
    def of(packed: Tensor, stack: _Stack, dtype: torch.dtype) -> _StackedWeight:
        self: _StackedWeight = hollow(_StackedWeight, torch.Size(stack.shape), dtype)
        self.packed, self.form, self.start, self.rows = packed, "experts", 0, None
        self.gated, self.stack = None, stack
        return self

    def _plain(self) -> Tensor:
        with torch.no_grad():
            return self.stack.plain(self.packed, self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op on the dequantized weight; choosing one expert dequantizes that one."""
        first = args[0] if args else None
        if isinstance(first, _StackedWeight):
            if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
                return _StackedWeight.of(first.packed, first.stack, first.dtype)
            if func is torch.ops.aten.select.int and args[1] == 0:
                row = first.packed[args[2]].unsqueeze(0)
                return first.stack.plain(row, first.dtype)[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclasses.dataclass(slots=True)
class _State:
    """What a module with quantized experts knows."""

    stacks: dict[str, _Stack]  # by the name of the parameter: gates and ups, downs
    plan: ExpertsPlan  # without modules and weights
    biases: tuple[str | None, str | None]
    qconfig: QConfigWoq
    dtype: torch.dtype  # of the last rows, in which weights are shown

    @property
    def lowp(self) -> str:
        name = self.qconfig.lowp_mode.name.lower()
        # Products with int8 activations have no grouped form: products in the rows' own dtype are more exact.
        return "none" if name == "int8" else name


class _Experts(nn.Module):
    """In front of the class of a module with stacked experts, by `subclass`."""

    def __getattr__(self, name: str) -> Any:
        state = record_of(self).experts
        if state is not None and name in state.stacks:
            stack = state.stacks[name]
            rows = self._buffers[stack.buffer]
            assert rows is not None
            return _StackedWeight.of(rows, stack, state.dtype)
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the experts of each row; see the original class."""
        given = [*args, *kwargs.values()]
        if self._has_op(given):
            return self._fused(*given)
        x = given[0] if given else None
        if isinstance(x, Tensor) and x.is_floating_point():
            record_of(self).experts.dtype = x.dtype
        return super().forward(*args, **kwargs)

    def _has_op(self, given: list[Any]) -> bool:
        """Return whether these are rows, ids and weights of a routing, in this order."""
        state: _State = record_of(self).experts
        if (
            len(given) != 3
            or len(state.stacks) != 2
            or not all(isinstance(value, Tensor) for value in given)
        ):
            return False
        x, ids, weights = given
        return (
            x.dtype in FLOATS
            and ids.dtype in (torch.int32, torch.int64)
            and ids.dim() == 2
            and weights.shape == ids.shape
            and x.numel() == ids.shape[0] * x.shape[-1]
            and state.plan.activation in _ACTIVATIONS
            and not state.plan.scale_input
            and not (state.plan.zeros or state.plan.apart)
            and not getattr(self, "_is_expert_parallel", False)
            and not (torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad))
        )

    def _fused(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        state: _State = record_of(self).experts
        plan = state.plan
        first, second = (self._buffers[stack.buffer] for stack in state.stacks.values())
        biases = (None if n is None else self._parameters[n] for n in state.biases)
        bias: Tensor | None
        bias, down_bias = biases
        if bias is not None and plan.interleaved:
            bias = torch.cat([bias[:, 0::2], bias[:, 1::2]], dim=1)
        assert first is not None and second is not None
        y: Tensor = torch.ops.ipex.fused_experts(
            *(x.reshape(-1, x.shape[-1]), first, second, weights.float(), ids),
            *(plan.intermediate_size, plan.activation, bias, down_bias),
            swiglu_alpha=plan.swiglu_alpha,
            swiglu_limit=plan.swiglu_limit,
            lowp_mode=state.lowp,
        )
        return y.view(x.shape)

    def replaced_parameters(self) -> tuple[str, ...]:
        """Return the names of the parameters that codes stand for in a state dict."""
        return tuple(record_of(self).experts.stacks)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, stack in record_of(self).experts.stacks.items():
            rows: Any = self._buffers[stack.buffer]
            inner = f"{prefix}{SAVED}{name}."
            parts = [saved_tensors(stack.weight(row), inner) for row in rows]
            for key in parts[0]:
                whole = torch.stack([part[key] for part in parts])
                destination[key] = whole[0] if key.endswith(".woq") else whole

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        rest = dict(state_dict)
        for name, stack in record_of(self).experts.stacks.items():
            inner = f"{prefix}{SAVED}{name}."
            found = {key: rest.pop(key) for key in list(rest) if key.startswith(inner)}
            dense = rest.pop(prefix + name, None)
            try:
                if dense is not None and dense.numel():  # empty ones mark files of quantized models
                    self._buffers[stack.buffer] = self._quantize(prefix + name, dense, stack)
                elif not absent_keys(found, inner):
                    self._buffers[stack.buffer] = _loaded(found, inner, stack)
                elif strict:
                    missing_keys += absent_keys(found, inner)
            except (ValueError, RuntimeError) as error:
                error_msgs.append(str(error))
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _quantize(self, name: str, weight: Tensor, stack: _Stack) -> Tensor:
        shape = list(stack.shape)
        check(list(weight.shape) == shape, name, "weight", f"have shape {shape}", weight.shape)
        return stack.pack(_quantized(name, weight, stack, record_of(self).experts.qconfig))


def _loaded(found: dict[str, Tensor], prefix: str, stack: _Stack) -> Tensor:
    count = stack.shape[0]
    whole = {key: value for key, value in found.items() if not key.endswith(".woq")}
    for key, value in whole.items():
        check(value.shape[:1] == (count,), key, "value", f"have {count} experts", value.shape)
    about = {prefix + "woq": found[prefix + "woq"]}
    each = [{**about, **{k: v[e] for k, v in whole.items()}} for e in range(count)]
    return stack.pack([saved_weight(one, prefix) for one in each])


def _quantized(
    name: str, weight: Tensor, stack: _Stack, qconfig: QConfigWoq
) -> Iterator[QuantizedWeight]:
    for expert in range(weight.shape[0]):  # one at a time: little is in memory twice
        rows = as_rows(weight[expert : expert + 1], stack.transposed, stack.interleaved)[0]
        yield quantized(name, rows.contiguous(), qconfig, None, None, torch.float32)


def _names(plan: ExpertsPlan, *values: Any) -> list[str | None]:
    names = {id(p): n for n, p in plan.module._parameters.items() if p is not None}
    return [names.get(id(value)) for value in values]


def _owners(plan: ExpertsPlan) -> list[tuple[nn.Module, str]]:
    """Return modules and names of the weights: both of the module of the experts, or one of each of two parts of it."""
    first, last = _names(plan, plan.gate_up, plan.down)
    if first is not None and last is not None:
        return [(plan.module, first), (plan.module, last)]
    found = [(m, n, id(p)) for m in plan.module.children() for n, p in m._parameters.items()]
    kept = [(m, n, i) for m, n, i in found if i in (id(plan.gate_up), id(plan.down))]
    ordered = [i for _, _, i in kept] == [id(plan.gate_up), id(plan.down)]
    return [(m, n) for m, n, _ in kept] if ordered else []


def reason_against(plan: ExpertsPlan) -> str | None:
    """Return why stacked experts cannot be quantized, or None."""
    if isinstance(plan.gate_up, tuple):
        return "they are separate modules"
    if plan.up is not None:
        return "they lie behind each other in three matrices"
    if plan.always is not None:
        return "all tokens go to some of them, which have weights of their own"
    if not _owners(plan):
        return "their weights are no parameters of their module"
    return None


def check_group(plan: ExpertsPlan, name: str, qconfig: QConfigWoq) -> None:
    """Check that the groups of a configuration fit stacked experts."""
    assert isinstance(plan.gate_up, Tensor)
    hidden = plan.gate_up.shape[1 if plan.transposed else 2]
    for k in (hidden, plan.intermediate_size):
        group = qconfig.group_size
        fits = packable_group(k if group == -1 else group, k) is not None
        check(fits, "optimize", "qconfig.group_size", f"be -1 or at least 16 for {name}", group)


@torch.no_grad()
def quantize(plan: ExpertsPlan, name: str, qconfig: QConfigWoq) -> None:
    """Quantize the stacked experts of a plan, whose `reason_against` is None, and free their weights.

    Args:
        plan: Of the block.
        name: Of the module with the experts, for messages.
        qconfig: The configuration.

    Raises:
        OpArgumentError: A weight is not finite.
    """
    stacks: dict[nn.Module, dict[str, _Stack]] = {}
    made: list[Tensor] = []
    owners = _owners(plan)
    forms = (plan.paired, plan.interleaved), (False, False)
    for (module, key), (gated, interleaved) in zip(owners, forms, strict=True):
        parameter = module._parameters[key]
        assert parameter is not None
        dtype, shape = parameter.dtype, tuple(parameter.shape)
        stack = _Stack(f"{key}_packed", shape, gated, plan.transposed, interleaved)
        made.append(stack.pack(_quantized(f"{name}.{key}", parameter.detach(), stack, qconfig)))
        stacks.setdefault(module, {})[key] = stack
    for (module, key), rows in zip(owners, made, strict=True):
        parameter = module._parameters.pop(key)
        assert parameter is not None
        parameter.data = parameter.new_empty(0)  # plans still know it
        module.register_buffer(stacks[module][key].buffer, rows, persistent=False)
    biases = _names(plan, plan.gate_up_bias, plan.down_bias)
    rule: Any = {"router": None, "router_weight": None, "module": None, "gate_up": None}
    rule |= {"down": None, "gate_up_bias": None, "down_bias": None, "router_bias": None}
    rule |= {"correction_bias": None, "shared": None, "shared_gate": None, "entry": None}
    rule |= {"exit": None, "expert_scales": None, "norms": None, "added": None, "always": None}
    bare = dataclasses.replace(plan, **rule)
    for module, own in stacks.items():
        update(module, experts=_State(own, bare, (biases[0], biases[1]), qconfig, dtype))
        swap(module, _Experts)


@dataclasses.dataclass(frozen=True, slots=True)
class Stacks:
    """Packed weights, gates and ups first, with the module and the name of the buffer of each, and their mode."""

    packed: list[tuple[nn.Module, str, Tensor]]
    lowp: str


def packed(module: nn.Module) -> Stacks | None:
    """Return the packed weights of quantized experts, or None."""
    found: Any = []
    for owner, name in owners(module):
        state: _State = record_of(owner).experts
        buffer = state.stacks[name].buffer
        found.append((owner, buffer, owner._buffers[buffer]))
    return Stacks(found, state.lowp) if found else None


def weights(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights of a module that are quantized experts, gates and ups first."""
    state = record_of(module).experts
    return tuple(state.stacks) if isinstance(state, _State) else ()


def owners(module: nn.Module) -> tuple[tuple[nn.Module, str], ...]:
    """Return modules and names of the weights that are quantized experts, of a module or of two parts of it."""
    parts = (module,) if weights(module) else tuple(module.children())
    found = tuple((part, name) for part in parts for name in weights(part))
    return found if len(found) == 2 else ()
