# SPDX-License-Identifier: Apache-2.0
"""What becomes INT8: layers with what is fused into them, and the values that need a scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from ipex_core.module_swap.base import has_hooks
from ipex_core.ops.linear import ACTIVATIONS
from ipex_quant.int8.dataflow import CONVS, Event, Flow, activation_of
from ipex_quant.int8.modules.matmul import Interaction, MatMul, Product, why_float
from ipex_quant.int8.modules.pool import role_of_pool
from ipex_quant.int8.ops import ACTIVATIONS as CONV_ACTIVATIONS
from ipex_quant.qconfig.static import QConfigSmoothQuant

#: Activations that an integer product can be followed by, in the same kernel.
_FUSED: dict[type[nn.Module], frozenset[str]] = {
    nn.Linear: frozenset(ACTIVATIONS) - {"none"},
    **dict.fromkeys(CONVS, frozenset(CONV_ACTIVATIONS) - {"none"}),
}


#: In place of the position of an argument: what a module returns.
RESULT = -1


@dataclasses.dataclass
class Layer:
    """One product on integers.

    Attributes:
        path: Path of the float layer.
        kind: ``"linear"`` or ``"conv"``.
        qconfig: Its configuration.
        source: Value that it reads.
        result: Value that comes out after everything fused.
        place: Path of the module that the integer layer will stand for: the layer, or the sum fused into it.
        fused: Paths of the modules that it computes too.
        activation: The fused activation, or ``"none"``.
        norm: Path of the batch norm folded into it, or an empty string.
        residual: Which argument of the sum is the other operand, or None.
        residual_value: The value of that operand.
        residual_codes: Whether the other operand comes as codes.
        residual_free: Whether these codes may be overwritten.
        codes: Whether the result is codes.
        contiguous: Whether a forward views the result in a way that channels-last order does not allow.
    """

    path: str
    kind: str
    qconfig: Any
    source: int
    result: int
    place: str
    fused: list[str] = dataclasses.field(default_factory=list)
    activation: str = "none"
    norm: str = ""
    residual: int | None = None
    residual_value: int = -1
    residual_codes: bool = False
    residual_free: bool = False
    codes: bool = False
    contiguous: bool = False

    @property
    def before(self) -> tuple[str, ...]:
        """What is called between the layer and the place where it computes, and that place."""
        if self.place == self.path:
            return ()
        return tuple(self.fused[: self.fused.index(self.place) + 1])

    @property
    def after(self) -> tuple[str, ...]:
        """What is called after that place and is computed already."""
        return tuple(self.fused[len(self.before) :])

    @property
    def smooth(self) -> bool:
        """Whether outliers of its input move into its weight."""
        return isinstance(self.qconfig, QConfigSmoothQuant)


_NO_LAYER = Layer("", "", None, -1, -1, "")


@dataclasses.dataclass(frozen=True)
class Pool:
    """A pooling module that gets codes: its path, the value whose scale they have, and how many channels there are."""

    path: str
    value: int
    channels: int


@dataclasses.dataclass
class Plan:
    """The layers, and where each value that needs a scale can be seen.

    Attributes:
        layers: By path.
        watches: For each value the path of a module and the position of the argument that it is, or `RESULT`.
        norms: For each value the norm that alone makes it for layers with one smoothing, if there is one.
        pools: Pooling layers that get codes.
        left: What stays float, by path, and why.
        products: Products of activations, by path.
    """

    layers: dict[str, Layer]
    watches: dict[int, tuple[str, int]]
    norms: dict[int, str]
    left: dict[str, str]
    pools: list[Pool] = dataclasses.field(default_factory=list)
    products: dict[str, Product] = dataclasses.field(default_factory=dict)


def make_plan(
    model: nn.Module,
    flow: Flow,
    qconfig_for: Callable[[str, nn.Module], Any],
    bn_folding: bool = True,
    named: frozenset[str] = frozenset(),
) -> Plan:
    """Decide what to quantize from one recorded run, and which functions of products are among it."""
    modules = dict(model.named_modules())
    plan = Plan({}, {}, {}, {})
    for path, module in modules.items():
        if type(module) in _FUSED:
            _add_layer(plan, flow, path, module, qconfig_for(path, module))
        elif type(module) in (Interaction, MatMul):
            always = ("interaction" if isinstance(module, Interaction) else "matmul") in named
            _add_product(plan, flow, path, qconfig_for(path, module), always)
    for layer in sorted(plan.layers.values(), key=lambda it: -flow.calls[it.path][0].index):
        _fuse(plan, flow, modules, layer, bn_folding)
    readers = {layer.path: layer for layer in plan.layers.values()}
    sums = {layer.place: layer for layer in plan.layers.values() if layer.residual is not None}
    for layer in plan.layers.values():
        once = len(flow.calls[layer.path]) == 1 and not has_hooks(modules[layer.path])
        layer.codes = once and _takes_codes(flow, modules, readers, sums, layer.result)
    for product in plan.products.values():
        product.codes = isinstance(modules[product.path], Interaction) and _takes_codes(
            flow, modules, readers, sums, product.result
        )
    coded = {layer.result for layer in plan.layers.values() if layer.codes}
    for layer in sums.values():
        layer.residual_codes = root(flow, layer.residual_value) in coded
        layer.residual_free = layer.residual_value in coded and _read_last(plan, flow, layer)
    _find_views(plan, flow)
    plan.pools = pools_with_codes(plan, flow, modules)
    _find_watches(plan, flow)
    _find_norms(plan, flow, modules)
    return plan


def _read_last(plan: Plan, flow: Flow, layer: Layer) -> bool:
    """Return whether a sum is the last reader of its residual, and the residual has no views."""

    def when(path: str) -> int:
        """Return the time of a call; a layer computes where the sum fused into it stands."""
        place = plan.layers[path].place if path in plan.layers else path
        return flow.calls[place][0].index

    readers = flow.consumers[layer.residual_value]
    if layer.source == layer.residual_value or any(
        it.role == "same_codes" or it.moves for it in readers
    ):
        return False
    return all(it.path == layer.place or when(it.path) < when(layer.path) for it in readers)


#: What gives its result in an order of its own, whatever the order of its input.
_OWN_ORDER = frozenset({"linear", "norm", "mean", "product"})


def _find_views(plan: Plan, flow: Flow) -> None:
    """Mark the convolutions whose results reach a view that channels-last order does not allow."""
    made = {layer.result: layer for layer in plan.layers.values() if layer.kind == "conv"}
    made |= {v: it for it in made.values() for call in flow.calls[it.path] for v in call.outputs}
    pending = [
        it.inputs[0] for it in flow.events if it.name in ("view", "view_as") and _is_lost(it)
    ]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        event = flow.producers.get(value)
        if value in made:
            made[value].contiguous = True
        elif event is not None and value not in seen and event.role not in _OWN_ORDER:
            pending += event.inputs
        seen.add(value)


def _is_lost(event: Event) -> bool:
    """Return whether images allow a view when contiguous that they do not allow in channels-last order."""
    if event.role != "function" or len(event.shapes[0]) < 3 or len(event.shape) == 0:
        return False
    (batch, channels, *sizes), (first, *rest) = event.shapes[0], event.shape
    if batch == 1 and first != 1:
        return True
    more = 2 if first == batch else 1
    images = torch.empty((more * batch, *sizes, channels), device="meta").movedim(-1, 1)
    try:
        images.view(more * first, *rest)
    except RuntimeError:
        return True
    return False


def pools_with_codes(plan: Plan, flow: Flow, modules: dict[str, nn.Module]) -> list[Pool]:
    """Return the pooling modules that read codes."""
    coded = {layer.result for layer in plan.layers.values() if layer.codes}
    found = []
    for event in flow.events:
        if event.role in ("same_codes", "mean") and role_of_pool(modules[event.path]):
            value = root(flow, event.inputs[0])
            if value in coded:
                dims = 3 if isinstance(modules[event.path], nn.AvgPool2d) else 2
                channels = event.shape[-dims] if len(event.shape) >= dims else 0
                found.append(Pool(event.path, value, channels))
    return found


def fusable_activations(
    model: nn.Module, flow: Flow, paths: list[str]
) -> dict[str, tuple[str, str]]:
    """Return for linear layers the path and name of the activation that alone reads them."""
    modules = dict(model.named_modules())
    found = {}
    for path in paths:
        events = flow.calls.get(path, [])
        if type(modules[path]) is not nn.Linear or len(events) != 1 or has_hooks(modules[path]):
            continue
        event = flow.only_consumer(events[0].outputs[0])
        if event is None or event.role != "activation" or _hooked(modules, event):
            continue
        name = activation_of(modules[event.path])
        if name in _FUSED[nn.Linear]:
            found[path] = (event.path, name)
    return found


def _add_layer(plan: Plan, flow: Flow, path: str, module: Any, qconfig: Any) -> None:
    events = flow.calls.get(path, [])
    if qconfig is None:
        plan.left[path] = "the configuration leaves it out"
    elif not events:
        plan.left[path] = "the example inputs do not reach it"
    elif not path:
        plan.left[path] = "it is the model itself; put it into a container"
    elif has_hooks(module):
        plan.left[path] = "it has hooks"
    elif getattr(module, "transposed", False) and set(module.dilation) != {1}:
        plan.left[path] = "its dilation"
    elif getattr(module, "padding_mode", "zeros") != "zeros":
        plan.left[path] = f"padding_mode {module.padding_mode!r}"
    elif getattr(module, "padding", None) == "same" and any(
        d * (k - 1) % 2 for d, k in zip(module.dilation, module.kernel_size, strict=True)
    ):
        plan.left[path] = "its padding 'same' is uneven"
    elif any(not event.simple or len(event.inputs) != 1 for event in events):
        plan.left[path] = "it is called with other arguments"
    else:
        event = events[0]
        layer = Layer(path, event.role, qconfig, event.inputs[0], event.outputs[0], path)
        if not layer.smooth:  # the channels of another shape are others
            layer.source = root(flow, layer.source)
        plan.layers[path] = layer


def _add_product(plan: Plan, flow: Flow, path: str, qconfig: Any, always: bool) -> None:
    events = flow.calls.get(path, [])
    reason = ""
    if qconfig is None:
        reason = "the configuration leaves it out"
    elif not events:
        reason = "the example inputs do not reach it"
    elif not path:
        reason = "it is the model itself; put it into a container"
    elif len(events) != 1:
        reason = "it is called more than once"
    else:
        reason = why_float(events[0].shapes, always)
    if reason:
        plan.left[path] = reason
    else:
        plan.products[path] = Product(path, qconfig, events[0].inputs, events[0].outputs[0])


def root(flow: Flow, value: int) -> int:
    """Follow a value back through pooling and reshaping, which do not change codes."""
    event = flow.producers.get(value)
    while event is not None and (
        event.moves or (event.role == "same_codes" and len(flow.calls[event.path]) == 1)
    ):
        value = event.inputs[0]
        event = flow.producers.get(value)
    return value


def _fuse(
    plan: Plan, flow: Flow, modules: dict[str, nn.Module], layer: Layer, bn_folding: bool
) -> None:
    """Take in the batch norm, the activation and the sum that follow."""
    module = modules[layer.path]
    if len(flow.calls[layer.path]) != 1:
        return
    allowed = _FUSED[type(module)]
    taken = {path for other in plan.layers.values() for path in other.fused}
    event = flow.only_consumer(layer.result)
    if bn_folding and event is not None and can_fold(modules, layer.path, event):
        layer.norm = event.path
        layer.fused.append(event.path)
        layer.result = event.outputs[0]
        event = flow.only_consumer(layer.result)
    if layer.kind == "linear" and event is not None:
        event = _fuse_activation(flow, modules, layer, event, allowed)
    if event is not None and event.role == "add" and event.path not in taken and event.simple:
        other = [value for value in event.inputs if value != layer.result]
        adds = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
        adds &= not _sizes_asked(flow, layer)
        # The kernels add no operand of another size; a parameter has no batch.
        adds &= event.shapes[0] == event.shapes[1] and not any(map(flow.constant, other))
        if len(event.inputs) == 2 and len(other) == 1 and adds and not _hooked(modules, event):
            layer.residual = 1 - event.inputs.index(layer.result)
            layer.residual_value = other[0]
            layer.place = event.path
            layer.fused.append(event.path)
            layer.result = event.outputs[0]
            event = flow.only_consumer(layer.result)
            allowed = frozenset({"relu"})
    if layer.kind == "conv" and event is not None:
        _fuse_activation(flow, modules, layer, event, allowed)


def _sizes_asked(flow: Flow, layer: Layer) -> bool:
    """Return whether a forward reads the size of what only exists as part of a sum."""
    made = {layer.result, flow.calls[layer.path][0].outputs[0]}
    made |= {flow.calls[path][0].outputs[0] for path in layer.fused}
    return bool(made & flow.asked)


def _fuse_activation(
    flow: Flow, modules: dict[str, nn.Module], layer: Layer, event: Event, allowed: frozenset[str]
) -> Event | None:
    """Fuse an activation if there is one; return who reads the result."""
    if event.role != "activation" or _hooked(modules, event):
        return event
    name = activation_of(modules[event.path])
    if name not in allowed:
        return event
    layer.activation = name
    layer.fused.append(event.path)
    layer.result = event.outputs[0]
    return flow.only_consumer(layer.result)


def can_fold(modules: dict[str, nn.Module], path: str, event: Event) -> bool:
    """Return whether the batch norm of a call can be folded into a convolution or linear layer."""
    layer: Any = modules[path]
    norm: Any = modules[event.path]
    if event.role != "batch_norm" or norm.training or has_hooks(norm):
        return False
    conv = hasattr(layer, "out_channels")
    usable = norm.running_mean is not None
    usable = usable and norm.num_features == (layer.out_channels if conv else layer.out_features)
    # A linear layer's channels are the last dimension, the channels of the norm the second.
    usable = usable and (conv or isinstance(norm, nn.BatchNorm1d))
    # torch folds into transposed convolutions without groups only.
    return usable and (not getattr(layer, "transposed", False) or layer.groups == 1)


def float_layer(model: nn.Module, layer: Layer) -> Any:
    """Return the float layer with its batch norm in it, if it has one."""
    module: Any = model.get_submodule(layer.path)
    if not layer.norm:
        return module
    norm: Any = model.get_submodule(layer.norm)
    with torch.no_grad():
        if layer.kind == "conv":
            return fuse_conv_bn_eval(module, norm, transpose=module.transposed)
        return fuse_linear_bn_eval(module, norm)


def _hooked(modules: dict[str, nn.Module], event: Event) -> bool:
    return has_hooks(modules[event.path])


def _takes_codes(
    flow: Flow,
    modules: dict[str, nn.Module],
    readers: dict[str, Layer],
    sums: dict[str, Layer],
    value: int,
) -> bool:
    """Return whether everyone who reads a value is a quantized layer."""
    events = flow.consumers.get(value, [])
    if value in flow.results or not events:
        return False
    for event in events:
        if event.moves:
            if not _takes_codes(flow, modules, readers, sums, event.outputs[0]):
                return False
            continue
        if event.role == "function" or len(flow.calls[event.path]) != 1 or _hooked(modules, event):
            return False
        if event.path in sums:
            layer = sums[event.path]
            if layer.kind != "conv" or layer.residual_value != value:
                return False
        elif event.path in readers:
            if readers[event.path].smooth:
                return False
        elif event.role == "mean":
            continue
        elif event.role != "same_codes" or not _takes_codes(
            flow, modules, readers, sums, event.outputs[0]
        ):
            return False
    return True


def _find_watches(plan: Plan, flow: Flow) -> None:
    """Choose for each value the first call that shows it.

    For one that is handed out as codes that is where it is made, since other paths may lead to other readers.
    """
    for layer in plan.layers.values():
        if layer.codes:
            plan.watches[layer.result] = (layer.fused[-1] if layer.fused else layer.path, RESULT)
    for product in plan.products.values():
        if product.codes:
            plan.watches[product.result] = (product.path, RESULT)
    for layer in plan.layers.values():
        place = (layer.path, 0)
        if not layer.smooth and len(flow.calls[layer.path]) == 1:
            place = _first_reader(plan, flow, layer.source) or place
        plan.watches.setdefault(layer.source, place)
    for layer in plan.layers.values():
        if layer.residual is not None and layer.residual_codes:
            value = root(flow, layer.residual_value)
            plan.watches.setdefault(value, (layer.place, layer.residual))
    for product in plan.products.values():
        for position, value in enumerate(product.sources):
            plan.watches.setdefault(value, (product.path, position))
    for pool in plan.pools:
        place = _first_reader(plan, flow, pool.value) or (pool.path, 0)
        plan.watches.setdefault(pool.value, place)


def _first_reader(plan: Plan, flow: Flow, value: int) -> tuple[str, int] | None:
    """Return a module that reads all of a value; after pooling its range may be smaller."""
    readers = flow.consumers.get(value, [])
    for event in readers:
        if event.path in plan.layers and plan.layers[event.path].smooth:
            return event.path, 0
    for event in readers:
        if event.role == "function":
            found = _first_reader(plan, flow, event.outputs[0]) if event.moves else None
            if found is not None and not plan.layers.get(found[0], _NO_LAYER).smooth:
                return found
        elif len(flow.calls[event.path]) == 1 and (
            event.path in plan.layers or event.role in ("same_codes", "mean")
        ):
            return event.path, 0
    return None


def _find_norms(plan: Plan, flow: Flow, modules: dict[str, nn.Module]) -> None:
    for value in plan.watches:
        event = flow.producers.get(value)
        if event is None or event.role != "norm" or len(flow.calls[event.path]) != 1:
            continue
        readers = flow.consumers[value]
        smooth = all(e.path in plan.layers and plan.layers[e.path].smooth for e in readers)
        norm: Any = modules[event.path]
        one_dim = norm.weight is not None and norm.weight.dim() == 1
        if smooth and one_dim and value not in flow.results and not has_hooks(norm):
            plan.norms[value] = event.path
