# SPDX-License-Identifier: Apache-2.0
"""What a prepared model knows: the plan, the observers, the scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping

from ipex_quant.int8.boundary import Scale
from ipex_quant.int8.dataflow import Flow
from ipex_quant.int8.observe import (
    BlockWatch,
    Group,
    Reader,
    Watch,
    best_of_block,
    blocks_to_watch,
    channel_observer,
)
from ipex_quant.int8.plan import Layer, Plan, fusable_activations, make_plan

#: What `prepare` gives a model, which keeps its state in the two functions.
_ATTRIBUTES = ("q_config", "save_qconf_summary", "load_qconf_summary")


@dataclasses.dataclass
class Prepared:
    """Kept by a prepared model.

    Attributes:
        qconfigs: The configuration of each layer that has one.
        flow: The recorded run; None without static layers.
        plan: What becomes INT8 with static scales.
        watches: The observer of each value.
        dynamic: Paths of modules that become dynamic INT8.
        tables: Paths of embedding bags that become 8-bit.
        activations: For dynamic linear layers the path and name of the activation fused into them.
        bn_folding: Whether batch norms are folded into INT8 layers.
        loaded: Scale and channel scales of layers from a file.
        blocks: What the blocks are called with whose layers get one alpha.
        named: Functions of products of activations that the configuration names.
        weight_only: The mapping, if it says of which layers the weights alone are quantized.
    """

    qconfigs: dict[str, Any]
    flow: Flow | None
    plan: Plan
    watches: dict[int, Watch] = dataclasses.field(default_factory=dict)
    dynamic: list[str] = dataclasses.field(default_factory=list)
    tables: list[str] = dataclasses.field(default_factory=list)
    activations: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    bn_folding: bool = True
    loaded: dict[str, tuple[Scale, Tensor | None]] = dataclasses.field(default_factory=dict)
    blocks: dict[str, BlockWatch] = dataclasses.field(default_factory=dict)
    named: frozenset[str] = frozenset()
    weight_only: QConfigMapping | None = None


@dataclasses.dataclass(eq=False)
class StateMethod:
    """A function of a prepared model, such as ``model.save_qconf_summary``, which is copied and pickled with it."""

    function: Callable[[Any, Any], None]
    model: nn.Module
    state: Prepared

    def __call__(self, qconf_summary: Any) -> None:
        """Call the function with the model and the path of a file."""
        self.function(self.model, qconf_summary)


def keep(model: nn.Module, configure: Any, state: Prepared, save: Any, load: Any) -> None:
    """Make a model a prepared one: give it its configuration, and the functions that write and read the scales."""
    functions = (StateMethod(function, model, state) for function in (save, load))
    # Past `torch.nn.Module.__setattr__`, which would make a configuration that is a module a part of the model.
    model.__dict__.update(zip(_ATTRIBUTES, (configure, *functions), strict=True))


def forget(model: nn.Module) -> None:
    """Take from a model what `keep` gave it."""
    for name in _ATTRIBUTES:
        model.__dict__.pop(name, None)


def state_of(model: Any) -> Prepared | None:
    """Return the state of a prepared model."""
    method = getattr(model, "__dict__", {}).get("save_qconf_summary")
    return method.state if isinstance(method, StateMethod) else None


def attach(model: nn.Module, state: Prepared) -> None:
    """Make the observers of the plan and put them into the model."""
    for value, (path, position) in state.plan.watches.items():
        watch = Watch(path, position, None)
        renew(state, value, watch)
        state.watches[value] = watch
    _put(model, state)
    for name in blocks_to_watch(model, list(state.plan.layers.values())):
        state.blocks[name] = BlockWatch()
    _watch_blocks(model, state)


def _put(model: nn.Module, state: Prepared) -> None:
    """Observe each value where it is seen first, and what layers read instead of it on other paths."""
    for watch in state.watches.values():
        watch.put(model)
    for layer in state.plan.layers.values():
        watch = state.watches[layer.source]
        if (watch.name, watch.position) != (layer.path, 0):
            model.get_submodule(layer.path).register_forward_pre_hook(
                Reader(layer.path, watch), with_kwargs=True
            )


def _watch_blocks(model: nn.Module, state: Prepared) -> None:
    for name, block in state.blocks.items():
        model.get_submodule(name).register_forward_pre_hook(block, with_kwargs=True)


def renew(state: Prepared, value: int, watch: Watch) -> None:
    """Give a watch observers that have seen nothing."""
    layers = state.plan.layers.values()
    readers = [layer for layer in layers if layer.source == value]
    smooth = [layer for layer in readers if layer.smooth]
    plain = [layer.qconfig for layer in readers if not layer.smooth]
    plain += [it.qconfig for it in state.plan.products.values() if value in it.sources]
    if not readers and not plain:
        # A value that is only added gets the observer of the layer that adds it.
        plain = [layer.qconfig for layer in layers if not layer.smooth]
    watch.observer = plain[0].activation() if plain else None
    if smooth:
        watch.channels = (smooth[0].qconfig.act_ic_observer or channel_observer)()
        watch.keep = any(it.qconfig.alpha_of(it.path) == "auto" for it in smooth)
    watch.runs, watch.rows, watch.scale = 0, None, None


def detach(model: nn.Module) -> None:
    """Take all observers out of a model."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, (Watch, Reader, BlockWatch)):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        for key, after in list(module._forward_hooks.items()):
            if isinstance(after, Watch):
                del module._forward_hooks[key]


def replan(model: nn.Module, state: Prepared) -> Plan:
    """Plan again without the layers that calibration did not reach. No observer may be attached."""
    ready = {value for value, watch in state.watches.items() if watch.ready}
    missing = {
        path
        for path, layer in state.plan.layers.items()
        if path not in state.loaded and layer.source not in ready
    }
    missing |= {
        path for path, it in state.plan.products.items() if not ready.issuperset(it.sources)
    }
    sums = [value for value in state.watches if value not in ready]
    if not missing and not sums:
        return state.plan
    return _plan_without(model, state, dict.fromkeys(missing, "no calibration data came to it"))


def _plan_without(model: nn.Module, state: Prepared, missing: Mapping[str, str]) -> Plan:
    """Return a plan without some layers, each with the reason, in which only values with a scale are codes."""
    assert state.flow is not None
    ready = {value for value, watch in state.watches.items() if watch.ready}
    known = state.plan.layers.keys() | state.plan.products.keys()
    wanted: Callable[[str, nn.Module], Any] = lambda path, _: (  # noqa: E731
        state.qconfigs.get(path) if path in known and path not in missing else None
    )
    plan = make_plan(model, state.flow, wanted, state.bn_folding, state.named)
    plan.left = {**state.plan.left, **missing}
    for layer in plan.layers.values():
        layer.codes = layer.codes and layer.result in ready
    for product in plan.products.values():
        product.codes = product.codes and product.result in ready
    plan.pools = [place for place in plan.pools if place.value in ready]
    coded = {layer.result for layer in plan.layers.values() if layer.codes}
    for layer in plan.layers.values():
        layer.residual_codes = layer.residual_codes and layer.residual_value in coded
        layer.residual_free = layer.residual_free and layer.residual_codes
    return plan


def leave_out(
    model: nn.Module, floats: Mapping[str, str], dynamic: Collection[str] = (), why: str = ""
) -> None:
    """Take layers out of the plan of a calibrated model; the scales of all others stay as they are.

    Args:
        model: The prepared model.
        floats: Paths of layers that stay float, and why.
        dynamic: Paths of linear layers whose activations get the scale of each row instead.
        why: Reason of the dynamic ones, for messages.
    """
    state = state_of(model)
    assert state is not None
    detach(model)
    state.dynamic = [path for path in state.dynamic if path not in floats]
    if state.flow is not None:
        changed = [path for path in dynamic if path in state.plan.layers]
        missing = {**floats, **dict.fromkeys(changed, why)}
        plan = _plan_without(model, state, missing)
        state.dynamic = [*state.dynamic, *changed]
        state.activations.update(fusable_activations(model, state.flow, changed))
        for path in changed:
            del plan.left[path]
        state.plan = plan
        state.watches = {v: watch for v, watch in state.watches.items() if v in plan.watches}
        for value, watch in state.watches.items():
            watch.name, watch.position = plan.watches[value]
        _put(model, state)
        _watch_blocks(model, state)
    state.activations = {k: v for k, v in state.activations.items() if k in state.dynamic}


def scales_of_layers(
    model: nn.Module, state: Prepared, plan: Plan
) -> dict[str, tuple[Scale, Tensor | None]]:
    """Return for each layer the scale of its input and what its channels are multiplied by first."""
    found: dict[str, tuple[Scale, Tensor | None]] = {}
    groups: dict[Any, list[Layer]] = {}
    for path, layer in plan.layers.items():
        watch = state.watches[layer.source]
        if path in state.loaded and not watch.runs:
            found[path] = state.loaded[path]
        elif not layer.smooth:
            found[path] = (watch.get_scale(), None)
        else:
            alone = "" if layer.qconfig.share_weight_observers else path
            groups.setdefault((layer.source, alone), []).append(layer)
    sharing = [Group.of(model, layers, state.watches[v]) for (v, _), layers in groups.items()]
    alphas = _alphas_of_blocks(model, state, sharing)
    for group in sharing:
        alpha = alphas.get(group.layers[0].path)
        factor, scale = group.scales(alpha)
        found.update((layer.path, (scale, factor)) for layer in group.layers)
    return found


def _alphas_of_blocks(
    model: nn.Module, state: Prepared, groups: Collection[Group]
) -> dict[str, float]:
    """Return the alpha of layers that get the alpha of their block. The blocks are run without observing."""
    watches: list[Any] = [*state.watches.values(), *state.blocks.values()]
    before = [watch.enabled for watch in watches]
    for watch in watches:
        watch.enabled = False
    try:
        alphas: dict[str, float] = {}
        for name, block in state.blocks.items():
            alphas.update(best_of_block(model, name, block, list(groups)))
        return alphas
    finally:
        for watch, enabled in zip(watches, before, strict=True):
            watch.enabled = enabled
