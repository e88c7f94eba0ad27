# SPDX-License-Identifier: Apache-2.0
"""Packed weights of a plan, and the way back to the parameters they were made from.

A layer's projections that read the same input are packed as one weight, once. Each parameter that went into it is
replaced by a `PlannedWeight`: a parameter of the same shape and dtype that holds no memory of its own and unpacks its
part when somebody computes with it or saves it. So ``state_dict()``, ``parameters()`` and the model's own forward stay
what they were.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core import nn as inn
from ipex_core.module_swap.base import OptimizedModule, call, derive, has_hooks
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
from ipex_core.packing.parameter import KEEPS_CLASS, PackedWeight, hollow
from ipex_core.program.builtins import plain_linear
from ipex_core.woq import deinterleave_gate_up, interleave_gate_up
from ipex_llm.arch import DecoderPlan, LinearPlan, NormPlan
from ipex_llm.arch.formulas import per_head
from ipex_llm.arch.seeded import seeded
from ipex_llm.model_runner import woq as _woq
from ipex_llm.records import hooks_of, recorded
from ipex_quant.weight_only.linear import WoqLinearModule

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
        factors: What the rows of the result are multiplied with, float32, or None.
    """

    op: str
    weight: Tensor
    features: int
    bias: Tensor | None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    factors: Tensor | None = None


def version_of(parameter: Tensor) -> int:
    """Return how often a parameter was written to; -1 where that is not counted, under ``torch.inference_mode``."""
    return -1 if parameter.is_inference() else parameter._version


def call_linear(linear: Linear, x: Tensor) -> Tensor:
    """Compute a packed linear layer outside of a program."""
    # Of a device, an instruction and no op.
    op = plain_linear if linear.op == "plain_linear" else getattr(torch.ops.ipex, linear.op)
    result: Tensor = op(x, linear.weight, linear.features, linear.bias, **linear.options)
    return result


class Surroundings:
    """The parts of a module and what is done around their forwards, to notice when that changes.

    Args:
        module: Its forward is replaced by programs.
        itself: Whether programs also replace the call of the module.
    """

    def __init__(self, module: nn.Module, itself: bool = False) -> None:
        inner = list(module.modules())
        self._children = module._modules
        # Their dicts, as this is asked in each step.
        self._parts = [
            (one, one.__dict__, one._modules, one._forward_hooks, one._forward_pre_hooks)
            for one in (inner if itself else inner[1:])
        ]
        self._known = self._now()

    def _now(self) -> list[Any]:
        now: list[Any] = list(self._children.values())
        for one, own, children, after, before in self._parts:
            if children:
                now += children.values()
            if after or before:
                now += hooks_of(one)
            if "forward" in own:
                now.append(own["forward"])
        return now

    def changed(self) -> bool:
        """Return whether a part was exchanged, or hooks were added or removed."""
        return self._now() != self._known


class WeightStore:
    """All packed weights of a plan.

    Args:
        dtype: dtype of the packed weights.
        shared: Owners, by id, of parameters that several modules have. The weight of a head that embeddings have too
            is exchanged in all of them; other shared parameters are packed and kept.
    """

    #: Where the weights are.
    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype, shared: Mapping[int, Owners] | None = None) -> None:
        self.dtype = dtype
        self.shared = shared or {}
        self._entries: list[tuple[nn.Module, str, PlannedWeight]] = []
        #: Parameters and buffers by the dict of their module, as this is asked in each step; see `watch`.
        self._plain: list[tuple[dict[str, Any], str, Any, int]] = []
        #: Quantized layers and what their weight is a part of.
        self._lent: list[tuple[Any, Tensor]] = []
        self._memo: dict[tuple[int, ...], Linear] = {}
        self._norms: dict[int, tuple[Tensor | None, Tensor | None]] = {}

    # ---------------------------------------------------------------------------------------------------- linear

    def linear(self, plan: LinearPlan, partner: LinearPlan | None = None) -> Linear:
        """Pack a linear layer, or with ``partner`` (the factor of this gate) the two interleaved.

        Raises:
            UnsupportedPlan: A module has hooks, or its weight is no plain floating matrix.
        """
        plans = [plan] if partner is None else [plan, partner]
        modules = [module for one in plans for module in one.modules]
        key = (partner is not None, *map(id, modules))
        if key not in self._memo and partner is None:
            self._share(key, plan)
        if key not in self._memo:
            made = self._any(plans, False)
            bias = made.bias if plan.added is None else self._with_added(made.bias, *plan.added)
            self._memo[key] = dataclasses.replace(
                made, bias=bias, factors=self._factors(made, plan)
            )
        return self._memo[key]

    def _with_added(self, bias: Tensor | None, module: nn.Module, name: str) -> Tensor:
        """Return a bias with a parameter of another module added to it."""
        added = getattr(module, name).detach().to(self.dtype)
        self.watch(module, name)
        return added if bias is None else bias + added

    def _factors(self, made: Linear, plan: LinearPlan) -> Tensor | None:
        """Return what the rows of a layer are multiplied with."""
        if plan.gain is None:
            return plan.factors
        self.watch(*plan.gain)
        own = torch.ones(made.features) if plan.factors is None else plan.factors
        return own * per_head(*plan.gain).cpu()

    def _share(self, key: tuple[int, ...], plan: LinearPlan) -> None:
        """Let modules that share all their parameters have one packed weight (the shared layers of Zamba 2)."""
        weights = [module._parameters.get("weight") for module in plan.modules]
        owners = (len(self.shared.get(id(weight), ())) for weight in weights)
        if min(owners) < 2 or plan.order is not None or plan.factors is not None or plan.gain:
            return
        parameters = [
            (module, name, value)
            for module in plan.modules
            for name, value in module._parameters.items()
        ]
        own = -1, *(id(value) for _, _, value in parameters)
        if own in self._memo:
            for module, name, _ in parameters:
                self.watch(module, name)
        else:
            self._memo[own] = self._any([plan], False)
        self._memo[key] = self._memo[own]

    def plain(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return a linear layer of a weight that is no parameter, ``[N, K]``."""
        packed = torch.ops.ipex.pack_linear_weight(weight)
        return Linear("linear", packed, weight.shape[0], bias)

    def fused_gate(self, plan: LinearPlan) -> Linear:
        """Pack one module that holds gate rows and then up rows, interleaved."""
        key = (True, *map(id, plan.modules))
        if key not in self._memo:
            self._memo[key] = self._any([plan], True)
        return self._memo[key]

    def _any(self, plans: list[LinearPlan], fused: bool) -> Linear:
        modules = [module for plan in plans for module in plan.modules]
        if not any(isinstance(module, WoqLinearModule) for module in modules):
            return self._pack(plans, fused)
        if not all(isinstance(module, WoqLinearModule) for module in modules):
            raise UnsupportedPlan(MIXED)
        found = _woq.combine(plans, fused)
        if found is None:
            raise UnsupportedPlan(DIFFERENT)
        packed, bias, modes, lent = found
        self._lent += lent
        order = plans[0].order
        features = sum(_features(module) for module in modules) if order is None else len(order)
        features = features // 2 if fused or len(plans) == 2 else features
        if not lent:
            self.watch(modules[0], "packed_weight", written=False)
        for module in modules:
            self.watch(module, "bias")
        if bias is not None and bias.dtype not in (torch.float32, self.dtype):
            bias = bias.to(self.dtype)
        return Linear("woq_linear", packed, features, bias, dict(modes))

    @torch.no_grad()
    def _pack(self, plans: list[LinearPlan], fused: bool) -> Linear:
        modules = [module for plan in plans for module in plan.modules]
        check_packable(modules, multiplied=plans[0].multiplied)
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
            self.watch(only, "weight", written=False)
            bias = self._bias(plans, fused)
            return Linear("linear", weight.packed, weight.shape[0], bias)
        for module in modules:
            _unpack(module)
        parts = [self._rows(plan) for plan in plans]
        wide = self._paired(parts, fused) if gated else parts[0]
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
                    self.watch(module, "bias")
                parts.append(
                    torch.zeros(rows, device=self.device) if bias is None else bias.detach()
                )
            whole = torch.cat([part.to(self.dtype) for part in parts])
            found.append(whole if plan.order is None else whole[plan.order])
        if not some:
            return None
        if fused or len(plans) == 2:
            return self._paired(found, fused).contiguous()
        return found[0]

    def _paired(self, parts: list[Tensor], fused: bool) -> Tensor:
        """Return the rows of a gate and of its factor as one weight: two parts, or one that has both."""
        return _interleaved(parts, fused)

    # ------------------------------------------------------------------------------------------------- the way back

    def _replace(
        self, module: nn.Module, name: str, packed: Tensor, recover: Callable[[], Tensor]
    ) -> None:
        parameter = module._parameters[name]
        assert isinstance(parameter, nn.Parameter)
        owners = self.shared.get(id(parameter), [(module, name)])
        wrapper: Any = PlannedWeight.of(parameter, packed, recover)
        if parameter.dtype != self.dtype or not _exchangeable(module, owners, wrapper):
            self.watch(module, name)
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
        result = value.detach()
        if result.dtype not in (torch.float32, self.dtype):
            result = result.to(self.dtype)
        # Where the result was computed from it, writes to it count.
        same = result.dtype == value.dtype and parameter is value
        self.watch(module, name, written=not same)
        return result

    def norm(self, plan: NormPlan) -> tuple[Tensor | None, Tensor | None]:
        """Return weight and bias of a norm."""
        key = id(plan.module)
        if key not in self._norms:
            weight, bias = (
                self.constant(plan.module, name, getattr(plan, name)) for name in ("weight", "bias")
            )
            # Programs read the numbers of other norms as they are.
            added = plan.offset and (
                plan.kind == "layer" or (weight is not None and weight.ndim == 2)
            )
            if added or plan.parts != (plan.module,):
                for part in plan.parts:
                    self.watch(part, "weight")
                    self.watch(part, "bias")
            self._norms[key] = weight, bias
        return self._norms[key]

    def watch(self, module: nn.Module, name: str, written: bool = True) -> None:
        """Let `fresh` notice that a parameter or buffer, which may be None, is another one.

        Args:
            module: The module.
            name: Name of the parameter or buffer.
            written: Also notice that its numbers changed, as a program's constants were computed from them.
        """
        table: dict[str, Any] = module._buffers if name in module._buffers else module._parameters
        value = table.get(name)
        version = version_of(value) if written and value is not None else -1
        self._plain.append((table, name, value, version))

    def watch_buffers(self, module: nn.Module, rotations: bool = True) -> None:
        """Let `fresh` notice changes of buffers, as detection may have read their numbers.

        Args:
            module: All modules in it have their buffers watched.
            rotations: Whether frequencies of rotations are watched; some models exchange them in their own forward.
        """
        for part in module.modules():
            if isinstance(part, WoqLinearModule):
                continue  # its weight is watched where it is packed
            for name in part._buffers:
                if rotations or not name.endswith("inv_freq"):
                    self.watch(part, name)

    def fresh(self) -> bool:
        """Return whether all parameters and buffers are still those that the programs were made from."""
        for module, name, wrapper in self._entries:
            if module._parameters.get(name) is not wrapper:
                return False
        for table, name, value, version in self._plain:
            found = table.get(name)
            if found is not value or (version >= 0 and found._version != version):
                return False
        return all(_woq.taken(module, packed) for module, packed in self._lent)

    def undo(self) -> None:
        """Put the original parameters back, unpacked."""
        for module, name, wrapper in self._entries:
            if module._parameters.get(name) is wrapper:
                put_back(module, name, wrapper)
        for module, _ in self._lent:
            _woq.give_back(module)
        self._lent.clear()
        self._entries.clear()
        self._plain.clear()
        self._memo.clear()


def device_of(plan: DecoderPlan) -> torch.device:
    """Return where the weights of a plan are."""
    weight = plan.embedding._parameters.get("weight")
    if weight is None or isinstance(weight, PackedWeight):
        return torch.device("cpu")
    return weight.device


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
        check_packable(modules, self.device.type, plans[0].multiplied)
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
        return Linear("plain_linear", wide, features, self._bias(plans, fused))

    def watch(self, module: nn.Module, name: str, written: bool = True) -> None:
        super().watch(module, name, written)
        parameter = module._parameters.get(name)
        if parameter is not None:
            self._places.append((parameter, parameter.data_ptr()))

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


def check_packable(
    modules: Iterable[nn.Module], device: str = "cpu", multiplied: bool = False
) -> None:
    """Raise if a module has hooks, or its weight is no plain floating matrix on a device.

    Raises:
        UnsupportedPlan: The text says what it has.
    """
    for module in modules:
        reason = _not_packable(module, device, multiplied)
        if reason is not None:
            raise UnsupportedPlan(f"{class_name(module)}: {reason}")


def _not_packable(module: nn.Module, device: str, multiplied: bool) -> str | None:
    weight = module._parameters.get("weight")
    if weight is None:
        return "it has no parameter weight"
    if weight.dim() != 2 or not weight.is_floating_point():
        return f"its weight is {weight.dim()}-D of dtype {weight.dtype}"
    if weight.device.type != device:
        return f"its weight is on {weight.device}"
    kind: Any = type(module)
    if not (multiplied or isinstance(module, OptimizedModule) or _is_plain(kind)):
        return "its class computes something else than a linear layer"
    hooks = module._forward_pre_hooks
    # That of ipex_core.optimize casts the input, which programs have in the right dtype.
    if has_hooks(module) and not (list(hooks.values()) == [cast_input] and _only_hooks(module)):
        return "it has hooks"
    return None


@functools.cache
def _is_plain(kind: type[nn.Module]) -> bool:
    """Return whether a class of linear layers computes nothing else, told by a small one (not BitNet's online form)."""
    if not issubclass(kind, nn.Linear) or kind.forward is nn.Linear.forward:
        return True
    try:
        with seeded(0), torch.no_grad():
            small, x = kind(24, 8), torch.randn(3, 24)
            want = nn.functional.linear(x, small.weight, small.bias)
            return torch.allclose(small(x), want, rtol=1e-4, atol=1e-5)
    except Exception:  # it takes other arguments
        return False


def _only_hooks(module: nn.Module) -> bool:
    """Return whether a module has no hooks but those that see the input."""
    others = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    return "forward" not in module.__dict__ and not any(others)


def _unpack(module: nn.Module) -> None:
    """Give a module that ipex_core.optimize packed on its own its plain weight back."""
    state = state_of(module)
    if state is not None and isinstance(module._parameters.get("weight"), PackedWeight):
        unpack_weight(module, state)


# -- Parameters that are parts of packed weights, and how their values come back --------------------------------------


class PlannedWeight(PackedWeight):
    """A parameter that is a part of a packed weight; ``recover`` gives its values.

    One that is all of a packed weight (``whole``) can be the weight of an embedding too: its rows are read as they lie.
    """

    recover: Callable[[], Tensor]
    former: nn.Parameter
    whole: bool
    #: The modules that have this object as a parameter, and its name there.
    owners: Sequence[tuple[weakref.ref[nn.Module], str]] = ()

    @staticmethod
    def of(former: nn.Parameter, packed: Tensor, recover: Callable[[], Tensor]) -> PlannedWeight:
        """Make one that stands for ``former``, which still has its values."""
        return PlannedWeight._make(former, packed, recover, former.shape, former.requires_grad)

    @staticmethod
    def _make(
        former: nn.Parameter,
        packed: Tensor,
        recover: Callable[[], Tensor],
        shape: torch.Size,
        requires_grad: bool,
    ) -> PlannedWeight:
        self: PlannedWeight = hollow(
            PlannedWeight, shape, former.dtype, requires_grad, former.device
        )
        self.packed, self.form, self.start, self.rows = packed, "plan", 0, None
        self.gated = None
        self.recover, self.former = recover, former
        self.whole = isinstance(recover, Part) and recover.whole and former.dtype == recover.dtype
        return self

    @property
    def data(self) -> Tensor:
        """The weight without gradient. With what is assigned, the parameter is a plain one again."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        found = [(owner(), name) for owner, name in self.owners]
        owners = [(o, n) for o, n in found if o is not None and o._parameters.get(n) is self]
        if not owners:
            raise RuntimeError(
                f"PlannedWeight.data of shape {tuple(self.shape)}: a copy of a packed weight cannot be changed:"
                " assign to the weight of the model itself"
            )
        self.former.data = value
        for owner, name in owners:
            owner._parameters[name] = self.former

    def look_up(self, ids: Tensor) -> Tensor:
        """Return rows ``[*ids.shape, columns]`` of a whole weight."""
        rows, columns = self.shape
        op = torch.ops.ipex.packed_embedding
        found: Tensor = op(self.packed, ids, rows, columns, self.dtype)
        return found

    def _plain(self) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():  # as in the base class
            return self.recover()

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return ``x @ weight.T + bias``, which a model's own forward asks for, without unpacking."""
        part = self.recover
        if not isinstance(part, Part) or part.plan.transposed or x.dtype is not part.dtype:
            return None
        return part.product(x, bias)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op on the unpacked weight; detaching keeps it packed, an embedding reads rows of it."""
        first = args[0] if args else None
        if func in KEEPS_CLASS and isinstance(first, PlannedWeight):
            # Of its own shape: the parameter that it stands for is empty.
            return PlannedWeight._make(
                first.former, first.packed, first.recover, first.shape, False
            )
        if func is _EMBEDDING and isinstance(first, PlannedWeight) and first.whole:
            return first.look_up(args[1])
        return super().__torch_dispatch__(func, types, args, kwargs)


_EMBEDDING = torch.ops.aten.embedding.default
_LINEAR = torch.ops.ipex.linear.default


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Gives the values of one module's weight back from a packed one."""

    packed: Tensor
    shape: list[int]
    dtype: torch.dtype
    plan: LinearPlan
    index: int
    start: int
    rows: int
    features: int
    gated: bool
    fused: bool

    @property
    def whole(self) -> bool:
        """Whether the packed weight is this one and nothing else."""
        plan = self.plan
        return not (
            self.gated or plan.order is not None or plan.transposed or self.rows != self.shape[0]
        )

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``; the parts of one packed weight that get the same ``x`` compute it once."""
        if self.whole:
            y: Tensor = call(_LINEAR, x, self.packed, self.rows, bias)
            return y
        y = self._mine(self._wide(x), x.dim() - 1)
        return y.contiguous() if bias is None else y + bias

    def _wide(self, x: Tensor) -> Tensor:
        total = 2 * self.features if self.gated else self.shape[0]
        if (
            self.rows == total or x.is_inference()
        ):  # the only part; or the writes to x are not counted
            wide: Tensor = call(_LINEAR, x, self.packed, self.shape[0])
            return wide
        record = recorded(x)
        known, record.wide = record.wide, None
        if known is not None and known[0] is self.packed and known[1] == x._version:
            wide, left = known[2:]
        else:
            wide, left = call(_LINEAR, x, self.packed, self.shape[0]), total
        if left > self.rows:  # another part is going to ask
            record.wide = self.packed, x._version, wide, left - self.rows
        return wide

    def _mine(self, wide: Tensor, dim: int = 0) -> Tensor:
        """Return the rows (of a product, ``dim``: the columns) of this part."""
        if self.gated:
            pair = deinterleave_gate_up(wide, self.features, dim)
            wide = torch.cat(pair, dim) if self.fused else pair[self.index]
        if self.plan.order is not None:
            wide = torch.empty_like(wide).index_copy_(dim, self.plan.order, wide)
        return wide.narrow(dim, self.start, self.rows)

    def __call__(self) -> Tensor:
        wide: Tensor = torch.ops.ipex.unpack_linear_weight(self.packed, *self.shape, self.dtype)
        mine = self._mine(wide)
        return (mine.t() if self.plan.transposed else mine).clone(
            memory_format=torch.contiguous_format
        )


class TiedEmbedding(OptimizedModule):
    """Put in front of the class of an embedding that has the packed weight of the head."""
