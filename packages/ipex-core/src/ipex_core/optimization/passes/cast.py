# SPDX-License-Identifier: Apache-2.0
"""Cast of the parameters to bfloat16 or float16, and of the buffers without which the model then does not run.

All floating parameters are cast, as ``model.to(dtype)`` would do, except batch norms, weights that a module
around the layer holds too, since it may compute with them, and those that a model of transformers asks to keep. Stock
layers with cast weights convert their input, so the model takes float32 inputs with or without autocast. The originals
are remembered exactly.

Buffers stay float32, since rotary frequencies and position tables need their precision. Where a forward multiplies
matrices of which one comes from a buffer (the decays of MiniMax), torch refuses the two dtypes. Such a model is found
by running it: on ``sample_input``, or on the token ids that transformers has for each of its models. Nothing is run
where no buffer could be the cause.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_map_only

from ipex_core import nn as inn
from ipex_core.library.spec import FLOATS, dtype_name
from ipex_core.module_swap.script import refuse_hook
from ipex_core.module_swap.state_dict import attach, realize, revert, swap_class
from ipex_core.optimization.passes import Context, Pass, run_on, swap_reason
from ipex_core.optimization.records import Log

log = logging.getLogger("ipex")

#: Exact class -> optimized class, for layers that compute with their own weights.
LEAVES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: inn.OptimizedLinear,
    nn.Conv1d: inn.OptimizedConv1d,
    nn.Conv2d: inn.OptimizedConv2d,
    nn.Conv3d: inn.OptimizedConv3d,
    nn.ConvTranspose1d: inn.OptimizedConvTranspose1d,
    nn.ConvTranspose2d: inn.OptimizedConvTranspose2d,
    nn.ConvTranspose3d: inn.OptimizedConvTranspose3d,
    nn.LayerNorm: inn.OptimizedLayerNorm,
    nn.RMSNorm: inn.OptimizedRMSNorm,
    nn.GroupNorm: inn.OptimizedGroupNorm,
    nn.EmbeddingBag: inn.OptimizedEmbeddingBag,
    nn.LSTM: inn.OptimizedLSTM,
    nn.GRU: inn.OptimizedGRU,
    nn.RNN: inn.OptimizedRNN,
    nn.MultiheadAttention: inn.OptimizedMultiheadAttention,
    nn.PReLU: inn.OptimizedPReLU,
}
_KEPT = (nn.modules.batchnorm._NormBase,)


#: Layers that compute with their own weights and have no optimized class.
_HOOKED = (nn.RNNCellBase, nn.Bilinear)


def cast_input(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of a layer with a forward of its own: give the inputs the dtype of the parameters."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    if dtype is None:
        return None

    def fit(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    changed: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
        torch.Tensor, fit, (args, kwargs)
    )
    return changed


_HELD_ABOVE = "kept in float32: a module above holds the weight as a parameter of its own"


def held_above(model: nn.Module, layers: tuple[type[nn.Module], ...]) -> set[int]:
    """Return the ids of weights of such layers that a module around the layer holds, too, and may compute with."""
    held: set[int] = set()
    for module in model.modules():
        if not module._modules:
            continue
        own = {id(p) for p in module._parameters.values() if p is not None}
        if own:
            below = (m for m in module.modules() if m is not module and isinstance(m, layers))
            held |= own & {id(m._parameters.get("weight")) for m in below}
    return held


def _hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(cast_input, with_kwargs=True)
    module.__dict__["__prepare_scriptable__"] = functools.partial(
        refuse_hook, type(module).__name__
    )


def wide_names(model: nn.Module) -> re.Pattern[str] | None:
    """Return what matches the names of tensors that a model of transformers keeps in float32, or None.

    Its class says so in ``_keep_in_fp32_modules_strict``, and ``from_pretrained`` goes by it.
    """
    names: set[str] = set()
    for module in model.modules():
        found = getattr(module, "_keep_in_fp32_modules_strict", None)
        if isinstance(found, (set, frozenset, list, tuple)):
            names.update(name for name in found if isinstance(name, str) and name)
    if not names:
        return None
    return re.compile("|".join(".*".join(map(re.escape, n.split("*"))) for n in sorted(names)))


def _all_match(context: Context, module: nn.Module, wide: re.Pattern[str]) -> bool:
    """Return whether a pattern matches each floating parameter of a module, by one of its names."""
    return all(
        any(
            wide.search(f"{path}.{name}")
            for owner in context.owners[id(parameter)]
            for name, other in owner._parameters.items()
            if other is parameter
            for path in context.paths[id(owner)]
        )
        for parameter in module._parameters.values()
        if parameter is not None and parameter.is_floating_point()
    )


def _computes_weight(module: nn.Module) -> bool:
    if "parametrizations" in module._modules:
        return True
    return (
        isinstance(module, tuple(LEAVES))
        and "weight" in module.__dict__
        and "weight" not in module._parameters
    )


class Cast(Pass):
    """Cast parameters."""

    name = "cast"
    knob = "reduced"

    def apply(self, context: Context) -> None:
        """Plan the cast of each module."""
        dtype = context.options.reduced
        assert dtype is not None
        name = dtype_name(dtype)
        held = held_above(context.model, tuple(LEAVES))
        kept: set[int] = set()
        casts: set[int] = set()  # modules that need no hook
        # A hook keeps subclasses of the encoder layer, which stay what they are, from the op that knows no casts.
        encoders = {
            id(module.self_attn)
            for _, module in context.modules()
            if isinstance(module, nn.TransformerEncoderLayer)
            and type(module) is not nn.TransformerEncoderLayer
        }
        for path, module in context.modules(scripts=True):
            if isinstance(module, torch.jit.ScriptModule) and any(
                p.is_floating_point() for p in module.parameters()
            ):
                raise NotImplementedError(
                    f"optimize: {path} is a ScriptModule, whose parameters cannot be cast:"
                    " optimize the model before this part is scripted, or leave dtype out"
                )
        wide = wide_names(context.model)
        others: dict[torch.dtype, int] = {}  # floating dtypes that are not cast -> layers
        for path, module in context.modules():
            if _computes_weight(module):
                kept |= {id(m) for m in module.modules()}
                text = "kept in float32: a hook or a parametrization computes its weight"
                context.log.add(path, module, self.name, False, text)
                if isinstance(module, tuple(LEAVES)):
                    _hook(module)
            if id(module) in kept:
                continue
            parameters = [p for p in module._parameters.values() if p is not None]
            if not any(p.is_floating_point() for p in parameters):
                continue
            if held and any(id(p) in held for p in parameters):
                reason: str | None = _HELD_ABOVE
            else:
                reason = self._reason(context, module, wide)
            if reason is not None:
                if isinstance(module, tuple(LEAVES)) and reason == _HELD_ABOVE:
                    _hook(module)
                wrong = {p.dtype for p in parameters if p.is_floating_point()} - {*FLOATS}
                others.update((d, others.get(d, 0) + 1) for d in wrong)
                context.log.add(path, module, self.name, False, reason)
                continue
            new = LEAVES.get(type(module))
            text = f"parameters cast to {name}"
            if new is not None and swap_reason(module) is None:
                swap_class(module, new)
                if isinstance(module, nn.MultiheadAttention) and id(module) not in encoders:
                    casts.add(id(module.out_proj))  # its weight is taken, it is not called
            elif type(module) in LEAVES.values() or id(module) in casts:
                pass  # an earlier pass has exchanged the class, or it is not called
            elif isinstance(module, (*LEAVES, *_HOOKED)):
                _hook(module)
                text += ", input cast by a hook"
            attach(module).dtype = dtype
            context.log.add(path, module, self.name, True, text)
        for other, count in others.items():
            log.warning(
                "optimize: %d layers keep their parameters in %s: only float32, bfloat16 and float16 are cast to %s;"
                " call model.float() before optimize",
                *(count, other, name),
            )

    def _reason(
        self, context: Context, module: nn.Module, wide: re.Pattern[str] | None
    ) -> str | None:
        if wide is not None and _all_match(context, module, wide):
            return "kept in float32: the class of the model asks for it"
        for owner in (
            o for p in module._parameters.values() if p is not None for o in context.owners[id(p)]
        ):
            if isinstance(owner, _KEPT):
                return (
                    "kept in float32: running statistics need it"
                    if owner is module
                    else ("shares a parameter with a module that is kept in float32")
                )
            if id(owner) in context.old:
                return "shares a parameter with a module that is already optimized"
        for parameter in module._parameters.values():
            if parameter is None or not parameter.is_floating_point():
                continue
            if isinstance(parameter, UninitializedParameter):
                return "parameters are not initialized yet"
            if parameter.dtype not in FLOATS:
                return f"a parameter has dtype {parameter.dtype}"
        return None

    def undo(self, model: nn.Module, log: Log) -> None:
        """Remove the input hooks."""
        for module in model.modules():
            for key, hook in list(module._forward_pre_hooks.items()):
                if hook is cast_input:
                    module.__dict__.pop("__prepare_scriptable__", None)
                    del module._forward_pre_hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)


# --- buffers --------------------------------------------------------------------------------------------------------

#: What angles are computed from; rounding it turns them by more the farther a token is.
_ROTARY = "inv_freq"


class Buffers(Pass):
    """Cast buffers, if the model does not run otherwise."""

    name = "buffers"
    knob = "reduced"

    def apply(self, context: Context) -> None:
        """Run the model, and cast buffers if it raises."""
        found = list(_candidates(context))
        inputs = _inputs(context) if found else None
        if inputs is None or _runs(context.model, inputs) is not False:
            return
        beside = [one for one in found if any(p.is_floating_point() for p in one[1].parameters())]
        for chosen in (beside, found):
            if chosen and self._cast(context, chosen, inputs):
                return

    def _cast(
        self, context: Context, chosen: list[tuple[str, nn.Module, str]], inputs: Any
    ) -> bool:
        """Cast buffers; put them back and return False if the model does not run with them either."""
        dtype = context.options.reduced
        assert dtype is not None
        modules = {id(module): (path, module) for path, module, _ in chosen}
        for _, module, name in chosen:
            attach(module).buffers[name] = dtype
        for _, module in modules.values():
            realize(module)
        if _runs(context.model, inputs):
            for path, module in modules.values():
                names = ", ".join(name for _, other, name in chosen if other is module)
                text = (
                    f"buffers cast to {dtype_name(dtype)}, without which the model raises: {names}"
                )
                context.log.add(path, module, self.name, True, text)
            return True
        for _, module in modules.values():
            revert(module)
            attach(module).buffers.clear()
            realize(module)
        return False


def _candidates(context: Context) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, module and name of the buffers that may be cast."""
    wide = wide_names(context.model)
    for path, module in context.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            continue
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.dtype != torch.float32 or _ROTARY in name:
                continue
            if wide is None or not wide.search(f"{path}.{name}"):
                yield path, module, name


def _inputs(context: Context) -> Any:
    """Return arguments for the model, or None if there are none."""
    if torch._guards.detect_fake_mode() is not None:
        return None
    if context.sample is not None:
        return context.sample
    if getattr(context.model, "main_input_name", None) != "input_ids":
        return None
    inputs = getattr(context.model, "dummy_inputs", None)
    return inputs if isinstance(inputs, dict) else None


def _runs(model: nn.Module, inputs: Any) -> bool | None:
    """Return whether a model runs; None if these are not its inputs, or something else than dtypes is wrong."""
    try:
        run_on(model, inputs)
    except RuntimeError as error:
        return False if "type" in str(error) else None
    except Exception:  # whatever a model raises for inputs that are not its own
        return None
    return True
