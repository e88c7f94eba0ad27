# SPDX-License-Identifier: Apache-2.0
"""`optimize` for training: weights in 16 bits with float32 masters, fused steps, layouts of weights."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ipex_core._optimize._arguments import Options
from ipex_core._optimize._cast import cast_input
from ipex_core._optimize._masters import Masters, StateHook, announce_gradients
from ipex_core._optimize._records import KEY, Log
from ipex_core._optimize._train_step import adopt, needs_closure
from ipex_core.nn._products import LEAST_ROWS, why_not
from ipex_core.nn.training_linear import TrainingLinear
from ipex_core.optim._spread import is_spread
from ipex_core.optim._steps import step_of

__all__ = ["train"]

#: Layers whose weights are cast. They compute in the dtype of their weight, and get their input in it.
_CAST = (
    nn.Linear,
    nn.modules.conv._ConvNd,
)
#: Tables: no floating input.
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None, options: Options) -> None:
    """Prepare a model and its optimizer, if there is one, for training, in place."""
    log = Log(options)
    if options.channels_last:
        for path, module in model.named_modules():
            if isinstance(module, nn.modules.conv._ConvNd) and module.weight.dim() in _FORMATS:
                weight = module.weight
                layout = _FORMATS[weight.dim()]
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
        if any(is_spread(p) for p in model.parameters()):
            raise NotImplementedError(
                f"optimize: dtype must be None for parameters that fully_shard spread over processes, got {dtype}: give"
                " fully_shard a MixedPrecisionPolicy, which casts them, and keeps them in float32"
            )
        split = optimizer is None or _splits(optimizer, options, dtype)
        groups: list[Any] = (
            optimizer.param_groups if optimizer else [{"params": model.parameters()}]
        )
        owned = {id(p) for group in groups for p in group["params"]}
        for path, module in model.named_modules():
            reason = _cast(module, dtype, split, masters, owned)
            if reason is not None:
                text = _TEXT[split] if reason == "" else reason
                log.add(path, module, "master weights", reason == "", text.format(dtype=dtype))
    if options.weights_prepack:
        for path, module in model.named_modules():
            _pack(path, module, masters, options.auto_kernel_selection, log)
    if optimizer is not None and not closes and (options.fuse_update_step or len(masters)):
        adopt(optimizer, masters, options.fuse_update_step)
    model.__dict__[KEY] = log


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


def _cast(
    module: nn.Module, dtype: torch.dtype, split: bool, masters: Masters, owned: set[int]
) -> str | None:
    """Cast the parameters of a layer; return None if it is not of that kind, "" or why it stays."""
    if not isinstance(module, (*_CAST, *_TABLES)):
        return None
    if isinstance(module, _TABLES) and (module.sparse or module.max_norm is not None):
        return "stays float32: sparse gradients, or a largest norm"
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        return "stays float32: mode max"
    if "parametrizations" in module._modules or "weight" not in module._parameters:
        return "stays float32: its weight is computed"
    parameters = [p for p in module._parameters.values() if p is not None]
    if any(p.dtype != torch.float32 for p in parameters if p not in masters):
        return "stays: its parameters are not float32"
    if not any(id(p) in owned for p in parameters):
        return "stays float32: the optimizer does not have its parameters"
    for parameter in parameters:
        if parameter not in masters:
            masters.add(parameter, dtype, split)
    if isinstance(module, _CAST):
        module.register_forward_pre_hook(cast_input, with_kwargs=True)
    if dtype == torch.float16:
        module.register_forward_pre_hook(announce_gradients)
    register: Any = module  # untyped in torch
    register.register_state_dict_post_hook(StateHook(masters, False))
    register.register_load_state_dict_pre_hook(StateHook(masters, True))
    module.__dict__["_ipex_undo"] = _Undo(masters)
    return ""


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
    module.__class__ = TrainingLinear
    module.__dict__["_ipex_measure"] = measures
    module.__dict__.setdefault("_ipex_undo", _Undo(masters))


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
            if hook is cast_input or hook is announce_gradients:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        if type(module) is TrainingLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
        for key in ("_ipex_undo", "_ipex_measure"):
            module.__dict__.pop(key, None)
