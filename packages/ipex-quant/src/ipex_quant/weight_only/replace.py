# SPDX-License-Identifier: Apache-2.0
"""A quantized checkpoint put into a model, layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.library.spec import check
from ipex_quant.formats.schemes import method_of
from ipex_quant.qconfig import WoqWeightDtype
from ipex_quant.qconfig.weight_only import QConfigWoq
from ipex_quant.util.modules import replace_module
from ipex_quant.weight.tensor import QuantizedWeight
from ipex_quant.weight_only.build import as_qconfig, dtype_of
from ipex_quant.weight_only.checkpoint import linear_from, quantized_names, read_linear
from ipex_quant.weight_only.saving import describe_saved

_OP = "replace_linears_from_checkpoint"
_FOUR_BITS = (WoqWeightDtype.INT4, WoqWeightDtype.NF4, WoqWeightDtype.FP4, WoqWeightDtype.MXFP4)


@dataclasses.dataclass(frozen=True, slots=True)
class Replaced:
    """What `replace_linears_from_checkpoint` has done.

    Attributes:
        layers: Names of the layers that are quantized now.
        dense: Those of them that had to become ordinary linear layers; the log says why.
        loaded: Names of the other tensors that were loaded.
        unused: Keys of the checkpoint that the model has no place for.
        sums: Names of layers that have some of their input features only, with ``parts``.
    """

    layers: tuple[str, ...]
    dense: tuple[str, ...]
    loaded: tuple[str, ...]
    unused: tuple[str, ...]
    sums: tuple[str, ...] = ()


def replace_linears_from_checkpoint(
    model: nn.Module,
    state_dict: Mapping[str, Tensor],
    quant_config: Mapping[str, Any] | None = None,
    qconfig: Any = None,
    *,
    take: bool = False,
    parts: bool = False,
    exact: bool = False,
    later: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Replaced:
    """Replace the linear layers of a model by layers of a quantized checkpoint, in place, and load its other tensors.

    The model may be on the meta device, have other weights, or have layers of another library that hold the same
    tensors (then ``state_dict`` is ``model.state_dict()``). One layer at a time is unpacked.

    Args:
        model: The model.
        state_dict: All tensors of the checkpoint. Names may have or lack the prefix of the base model.
        quant_config: The ``quantization_config`` of its ``config.json``; None for GPTQ with 4 bits.
        qconfig: A `QConfigWoq`, or a mapping with one as global, which says how to compute; its bit width, and its
            group size if it has one, must equal the checkpoint's. None: in the dtype of the input. A dictionary
            has one for each layer of the checkpoint, of which only the modes matter.
        take: Remove from ``state_dict`` what has been read, so that its memory is freed.
        parts: Accept layers with fewer features than the model's: the layers of one rank.
        exact: The other tensors replace the model's and keep their dtype, instead of being copied. What a model
            on the meta device lacks then is left to the caller (`finish_meta`).
        later: Pack weights when they are needed; until then they are the tensors of the checkpoint.
        progress: Called with the number of layers done, of all, and the name of the last one.

    Returns:
        What was done.

    Raises:
        OpArgumentError: A name, a shape, a bit width or a group size does not fit the model or the configuration; or
            weights of the model are still missing.
    """
    single = qconfig is None or not isinstance(qconfig, dict)
    config = None if qconfig is None or not single else as_qconfig(_OP, qconfig)
    places = places_of(model, state_dict, quant_config)
    dtype = _float_dtype(model)
    consumed: set[str] = set()
    dense: list[str] = []
    sums: list[str] = []
    for done, (name, place) in enumerate(places.items(), 1):
        weight = read_linear(state_dict, name, quant_config)
        if _check_shape(model.get_submodule(place), weight, place, parts):
            sums.append(place)
        if not single:
            config = qconfig[name]
        elif config is not None:
            _check_config(config, weight)
        layer = linear_from(weight, config, dtype, later)
        if type(layer) is nn.Linear:
            dense.append(place)
        layer.train(model.training)
        replace_module(model, place, layer)
        start = f"{name}."
        inner = ((key, key[len(start) :]) for key in state_dict if key.startswith(start))
        # bitsandbytes hangs its tensors on the weight.
        keys = [key for key, part in inner if "." not in part or part.startswith("weight.")]
        consumed.update(keys)
        if take:
            assert isinstance(state_dict, MutableMapping)
            for key in keys:
                del state_dict[key]
        if progress is not None:
            progress(done, len(places), place)
    rest = {key: value for key, value in state_dict.items() if key not in consumed}
    if parts:
        sums += _make_room(model, rest)
    loaded, unused = load_rest(model, rest, exact)
    if not exact:
        finish_meta(model)
    describe_saved(model)
    return Replaced(tuple(places.values()), tuple(dense), loaded, unused, tuple(sums))


def _renamed(model: nn.Module, name: str) -> list[str]:
    """Return what a name in the checkpoint may be in the model."""
    prefix = str(getattr(model, "base_model_prefix", "") or "model")
    found = [name, f"{prefix}.{name}"]
    if name.startswith(f"{prefix}."):
        found.append(name.removeprefix(f"{prefix}."))
    return found


def places_of(
    model: nn.Module, state_dict: Mapping[str, Tensor], quant_config: Mapping[str, Any] | None
) -> dict[str, str]:
    """Return the quantized layers of a checkpoint, and the module of a model that each belongs to.

    Raises:
        OpArgumentError: There are no quantized layers, or some that the model has no module for.
    """
    method = method_of(_OP, quant_config)
    names = quantized_names(state_dict)
    check(bool(names), _OP, "state_dict", f"have quantized layers for method {method}", "none")
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    places: dict[str, str] = {}
    strangers: list[str] = []
    for name in names:
        place = next((n for n in _renamed(model, name) if n in known), None)
        if place is None:
            strangers.append(name)
        else:
            places[name] = place
    more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
    text = "have quantized layers of this model only"
    check(not strangers, _OP, "state_dict", text, f"{strangers[0] if strangers else ''}{more}")
    return places


def _float_dtype(model: nn.Module) -> torch.dtype:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.float32


def _check_shape(module: nn.Module, weight: QuantizedWeight, place: str, parts: bool) -> bool:
    """Check the shape of a layer; return whether it has some of its input features only."""
    wanted: list[Any] = [getattr(module, name, None) for name in ("out_features", "in_features")]
    if None in wanted:
        return False
    got = [weight.out_features, weight.in_features]
    if parts:
        most = all(0 < a <= b for a, b in zip(got, wanted, strict=True))
        check(most, _OP, place, f"have a part of shape {wanted}, as the model says", got)
        return bool(got[1] < wanted[1])
    check(got == wanted, _OP, place, f"have shape {wanted}, as the model says", got)
    return False


def _make_room(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Give linear layers that are not quantized the shape of their part; return those with fewer input features."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = []
    for key, value in state.items():
        names = [n.rpartition(".")[0] for n in _renamed(model, key) if n.endswith(".weight")]
        name = next((n for n in names if isinstance(modules.get(n), nn.Linear)), None)
        layer: Any = None if name is None else modules[name]
        if layer is None or value.dim() != 2 or value.shape == layer.weight.shape:
            continue
        wanted, got = list(layer.weight.shape), list(value.shape)
        most = all(0 < a <= b for a, b in zip(got, wanted, strict=True))
        check(most, _OP, key, f"have a part of shape {wanted}, as the model says", got)
        assert name is not None
        if got[1] < wanted[1]:
            found.append(name)
            if key.removesuffix("weight") + "bias" not in state:  # another rank brings it
                layer.bias = None
        layer.weight = nn.Parameter(layer.weight.new_empty(got), requires_grad=False)
        if layer.bias is not None and got[0] < wanted[0]:
            layer.bias = nn.Parameter(layer.bias.new_empty(got[0]), requires_grad=False)
        layer.out_features, layer.in_features = got
    return found


def _check_config(config: QConfigWoq, weight: QuantizedWeight) -> None:
    key = f"qconfig for {weight.name}"
    four = dtype_of(weight) in _FOUR_BITS
    kinds = [d.name for d in WoqWeightDtype if (d in _FOUR_BITS) == four]
    what = f"have a weight_dtype of {', '.join(kinds)}, as the checkpoint has"
    fits = four == (config.weight_dtype in _FOUR_BITS)
    check(fits, _OP, key, what, config.weight_dtype.name)
    group = config.group_size
    size = weight.group_size
    check(
        group in (-1, size)
        or weight.g_idx is not None
        or (size == -1 and group >= weight.in_features),
        _OP,
        key,
        f"have group_size -1 or {size}, as the checkpoint has",
        group,
    )


@torch.no_grad()
def load_rest(
    model: nn.Module, state: Mapping[str, Tensor], exact: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Load what is not quantized; return the names in the model and the keys without a place there."""
    places: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    places.update(model.named_buffers(remove_duplicate=False))
    loaded, unused = [], []
    for key, value in state.items():
        name = next((n for n in _renamed(model, key) if n in places), None)
        if name is None:
            unused.append(key)
            continue
        target = places[name]
        shape = list(target.shape)
        check(list(value.shape) == shape, _OP, key, f"have shape {shape}", list(value.shape))
        if exact:
            assign(model, name, value.clone())
        elif target.is_meta:
            assign(model, name, value.to(target.dtype))
        else:
            target.copy_(value)
        loaded.append(name)
    return tuple(loaded), tuple(unused)


def assign(model: nn.Module, name: str, value: Tensor) -> None:
    """Put a tensor in the place of a parameter or buffer."""
    parent, _, last = name.rpartition(".")
    module = model.get_submodule(parent)
    if last in module._parameters:
        module._parameters[last] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[last] = value


def finish_meta(model: nn.Module) -> None:
    """Fill what a model made on the meta device still lacks: tied weights and computed buffers."""
    if not _on_meta(model):
        return
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or not any(b.is_meta for b in module._buffers.values() if b is not None):
            continue
        try:
            fresh = type(module)(config)
        except Exception:  # not every module is made from its config alone
            continue
        for name, buffer in module._buffers.items():
            made = fresh._buffers.get(name)
            if buffer is not None and buffer.is_meta and made is not None:
                module._buffers[name] = made.to(buffer.dtype)
    left = _on_meta(model)
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    text = "have all weights of the model"
    check(not left, _OP, "state_dict", text, f"no {', '.join(left[:3])}{more}")


def _on_meta(model: nn.Module) -> list[str]:
    every = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in every if tensor.is_meta]
