# SPDX-License-Identifier: Apache-2.0
"""`optimize` for training: weights in 16 bits with float32 masters, fused steps, layouts of weights."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch import nn

from ipex_core.library.spec import CHANNELS_LAST
from ipex_core.module_swap.base import set_class
from ipex_core.module_swap.state_dict import record_of, update
from ipex_core.nn.training_linear import LEAST_ROWS, TrainingLinear, why_not
from ipex_core.optim.dtensor import is_spread, is_wrapped
from ipex_core.optim.fused import adopt, needs_closure
from ipex_core.optim.master_weights import Masters, StateHook, announce_gradients
from ipex_core.optim.steps import step_of
from ipex_core.optimization.passes.cast import cast_input, held_above
from ipex_core.optimization.records import Log, Options, name_saved_dtype

#: Layers whose weights are cast. They compute in the dtype of their weight, and get their input in it.
_CAST = (
    nn.Linear,
    nn.modules.conv._ConvNd,
    nn.MultiheadAttention,
)
#: Layers that stay float32, but whose input must be so, too: where autocast takes them, without it, and always.
_WIDE = (nn.RNNBase, nn.RNNCellBase)
_ALWAYS_WIDE = (nn.Bilinear, nn.PReLU)
#: Tables: no floating input.
_TABLES = (nn.Embedding, nn.EmbeddingBag)


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None, options: Options) -> None:
    """Prepare a model and its optimizer, if there is one, for training, in place."""
    log = Log(options)
    if options.channels_last:
        for path, module in model.named_modules():
            if isinstance(module, nn.modules.conv._ConvNd) and module.weight.dim() in CHANNELS_LAST:
                weight = module.weight
                layout = CHANNELS_LAST[weight.dim()]
                weight.data = weight.data.contiguous(memory_format=layout)
                log.add(path, module, "layout", True, "weight is channels-last")
    masters = Masters()
    dtype = options.reduced
    closes = optimizer is not None and needs_closure(optimizer)
    if dtype is not None:
        if closes:
            raise NotImplementedError(
                f"optimize: dtype must be None for {type(optimizer).__name__}, whose step calls the model, got {dtype}"
            )
        held = vars(optimizer) if optimizer is not None else {}
        if any(isinstance(value, torch.optim.Optimizer) for value in held.values()):
            raise NotImplementedError(
                f"optimize: dtype must be None for {type(optimizer).__name__}, which calls the step of an"
                f" optimizer inside it, got {dtype}"
            )
        if any(is_spread(p) for p in model.parameters()) or any(map(is_wrapped, model.modules())):
            raise NotImplementedError(
                f"optimize: dtype must be None for parameters that FSDP spread over processes, got {dtype}: give"
                " fully_shard a MixedPrecisionPolicy (FullyShardedDataParallel: a MixedPrecision), which casts them,"
                " and keeps them in float32"
            )
        split = optimizer is None or _splits(optimizer, options, dtype)
        groups: list[Any] = (
            optimizer.param_groups if optimizer else [{"params": model.parameters()}]
        )
        owned = {id(p) for group in groups for p in group["params"]}
        mine = {id(p) for p in model.parameters()}
        if not owned & mine:  # of a copy of the model, or of what is around it: it tells nothing
            owned = mine
        plan = _Plan(dtype, split, masters, owned, _reasons(model))
        for path, module in model.named_modules():
            reason = plan.cast(module)
            if reason is not None:
                text = _TEXT[split] if reason == "" else reason
                log.add(path, module, "master weights", reason == "", text.format(dtype=dtype))
        for module in model.modules():
            plan.keep_states(module)
        name_saved_dtype(model)
    if options.weights_prepack:
        for path, module in model.named_modules():
            _pack(path, module, masters, options.auto_kernel_selection, log)
    if optimizer is not None and not closes and (options.fuse_update_step or len(masters)):
        adopt(optimizer, masters, options.fuse_update_step, model)
    update(model, log=log)


_TEXT = {
    True: "weights are the upper halves of float32 numbers; the optimizer has the lower ones",
    False: "weights are {dtype} copies of float32 weights that the optimizer has",
}


def _splits(optimizer: torch.optim.Optimizer, options: Options, dtype: torch.dtype) -> bool:
    if not options.split_master_weight_for_bf16 or dtype != torch.bfloat16:
        return False
    if options.fuse_update_step and step_of(optimizer) is not None:
        return True
    if step_of(optimizer) is not None:
        warnings.warn(
            "optimize: split_master_weight_for_bf16 needs fuse_update_step: the optimizer keeps whole float32 weights",
            stacklevel=5,
        )
    return False


@dataclasses.dataclass
class _Plan:
    """What is cast, and to what."""

    dtype: torch.dtype
    split: bool
    masters: Masters
    owned: set[int]  # parameters that the optimizer has
    reasons: dict[nn.Module, str]  # of layers that stay

    def cast(self, module: nn.Module) -> str | None:
        """Cast the parameters of a layer; return None if it is not of that kind, "" or why it stays."""
        if not isinstance(module, (*_CAST, *_TABLES)):
            if isinstance(module, _WIDE):
                self._hook(module, widen_input)
            elif isinstance(module, _ALWAYS_WIDE):
                self._hook(module, cast_input)
            return None
        parameters = _own(module)
        reason = self._why_not(module, parameters)
        if reason is not None:
            if isinstance(module, _CAST):
                self._hook(module, widen_input)
            return reason
        for parameter in parameters:
            if parameter not in self.masters:
                self.masters.add(parameter, self.dtype, self.split)
        if isinstance(module, _CAST):
            self._hook(module, cast_input)
        if self.dtype == torch.float16:
            module.register_forward_pre_hook(announce_gradients)
        return ""

    def keep_states(self, module: nn.Module) -> None:
        """Let the state dict of a layer, or of whatever else holds its parameters, stay float32."""
        if not any(p in self.masters for p in module.parameters(recurse=False)):
            return
        register: Any = module  # untyped in torch
        register.register_state_dict_post_hook(StateHook(self.masters, False))
        register.register_load_state_dict_pre_hook(StateHook(self.masters, True))
        update(module, undo=_Undo(self.masters))

    def _hook(self, module: nn.Module, hook: Any) -> None:
        known = module._forward_pre_hooks
        for key in [key for key, other in known.items() if other in (cast_input, widen_input)]:
            del known[key]  # of a call before
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        update(module, undo=record_of(module).undo or _Undo(self.masters))

    def _why_not(self, module: nn.Module, parameters: list[nn.Parameter]) -> str | None:
        reason = self.reasons.get(module)
        if reason is None and not any(p in self.masters or id(p) in self.owned for p in parameters):
            return "stays float32: the optimizer does not have its parameters"
        return reason


def _reasons(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers that stay, whatever the optimizer has, and why."""
    layers: list[nn.Module] = [m for m in model.modules() if isinstance(m, (*_CAST, *_TABLES))]
    found = [(m, _stays(m)) for m in layers]
    reasons = {m: text for m, text in found if text is not None}
    others = [m for m in model.modules() if isinstance(m, (*_WIDE, *_ALWAYS_WIDE))]
    kept = {id(p) for m in (*others, *reasons) for p in _own(m)}
    # A module that holds the weight of a layer in it may compute with it, and its own parameters stay float32.
    kept |= held_above(model, (*_CAST, *_TABLES))
    more = True
    while more:
        sharing = [m for m in layers if m not in reasons and any(id(p) in kept for p in _own(m))]
        reasons |= dict.fromkeys(sharing, "stays float32: shares a parameter with what stays")
        kept |= {id(p) for m in sharing for p in _own(m)}
        more = bool(sharing)
    return reasons


def _own(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a layer computes with."""
    # The projection in an attention is no layer of its own: its forward is not called.
    return list(module.parameters(recurse=isinstance(module, nn.MultiheadAttention)))


def _stays(module: nn.Module) -> str | None:
    """Return why a layer is not cast, whatever the others are."""
    if isinstance(module, _TABLES) and (module.sparse or module.max_norm is not None):
        return "stays float32: sparse gradients, or a largest norm"
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        return "stays float32: mode max"
    attention = isinstance(module, nn.MultiheadAttention)
    if "parametrizations" in module._modules or not (attention or "weight" in module._parameters):
        return "stays float32: its weight is computed"
    if any(p.dtype != torch.float32 for p in _own(module)):
        return "stays: its parameters are not float32"
    return None


def widen_input(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of a layer that stays float32 behind others that do not; autocast needs none."""
    if torch.is_autocast_enabled("cpu"):
        return None
    return cast_input(module, args, kwargs)


def _pack(path: str, module: nn.Module, masters: Masters, measures: bool, log: Log) -> None:
    """Let a linear layer compute on a weight that is packed on the way, where that is a gain."""
    if isinstance(module, nn.modules.conv._ConvNd):
        log.add(path, module, "prepack", False, "convolutions stay in stock PyTorch", "stock")
    if not isinstance(module, nn.Linear):
        return
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        reason: str | None = "a forward of its own, or a weight that is computed"
    elif measures:
        reason = None
        text = "products are timed at their first use"
    else:
        reason = why_not(module.weight.dtype, module.out_features, module.in_features)
        text = f"weight is packed on the way for {LEAST_ROWS} rows or more, forward and backward"
    if reason is not None:
        log.add(path, module, "prepack", False, reason, "stock")
        return
    log.add(path, module, "prepack", True, text, "ipex::bmm")
    set_class(module, TrainingLinear)
    module.__dict__["_measures"] = measures
    update(module, undo=record_of(module).undo or _Undo(masters))


class _Undo:
    """Takes a layer back to float32 and to its class; called by `ipex.restore`."""

    def __init__(self, masters: Masters) -> None:
        self.masters = masters

    def __call__(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and parameter in self.masters:
                self.masters.remove(parameter)
        hooks: tuple[Any, ...] = (module._state_dict_hooks, module._load_state_dict_pre_hooks)
        for known in hooks:
            for key, hook in list(known.items()):
                if isinstance(getattr(hook, "hook", hook), StateHook):
                    del known[key]
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook in (cast_input, widen_input, announce_gradients):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        if type(module) is TrainingLinear:
            set_class(module, nn.Linear)
        module.__dict__.pop("_measures", None)
        update(module, undo=None)
