# SPDX-License-Identifier: Apache-2.0
"""The scales of a prepared model as JSON, in the form that IPEX wrote."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check
from ipex_core.util import write_whole
from ipex_quant.int8.boundary import Scale
from ipex_quant.int8.modules import output_rows
from ipex_quant.int8.modules.matmul import Interaction, MatMul, Product
from ipex_quant.int8.plan import Layer, float_layer
from ipex_quant.int8.state import Prepared, renew, scales_of_layers, state_of
from ipex_quant.util.safetensors import DAMAGE

log = logging.getLogger("ipex")
#: Kinds of entries of products of activations.
_KINDS: dict[type[nn.Module], str] = {MatMul: "torch.matmul", Interaction: "interaction"}


def save_summary(model: nn.Module, qconf_summary: Any) -> None:
    """Write the scales of a calibrated model as JSON.

    Args:
        model: The prepared model.
        qconf_summary: Path of the file; it is replaced only when everything is written.

    Raises:
        OpArgumentError: There is no path, or no calibration was done.
    """
    op = "save_qconf_summary"
    path = _path(op, qconf_summary)
    state = _state(op, model)
    seen = bool(state.loaded) or any(watch.ready for watch in state.watches.values())
    check(seen or not state.watches, op, "model", "be calibrated", "no data")
    write_whole(path, json.dumps(_summary(model, state), indent=4))


def load_summary(model: nn.Module, qconf_summary: Any) -> None:
    """Read scales that `save_summary` wrote; calibrating again replaces them.

    Args:
        model: The prepared model.
        qconf_summary: Path of the file.

    Raises:
        OpArgumentError: The file is not one of such a model; the text names the difference. Nothing has changed then.
    """
    op = "load_qconf_summary"
    path = _path(op, qconf_summary)
    state = _state(op, model)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise OpArgumentError(f"{op}: qconf_summary must be JSON, got {path}: {error}") from error
    loaded, results = _read(op, model, state, data)
    state.loaded = loaded
    for value, watch in state.watches.items():
        renew(state, value, watch)
    for name, layer in state.plan.layers.items():
        if name in loaded and not layer.smooth:
            state.watches[layer.source].scale = loaded[name][0]
    for value, scale in results.items():
        state.watches[value].scale = scale


def _path(op: str, path: Any) -> Path:
    check(isinstance(path, (str, os.PathLike)), op, "qconf_summary", "be a path", path)
    return Path(path)


def _state(op: str, model: nn.Module) -> Prepared:
    state = state_of(model)
    if state is None:
        raise OpArgumentError(
            f"{op}: model must be a result of prepare, got a {type(model).__name__} that is not prepared"
        )
    return state


def _parent(path: str) -> str:
    return path.rpartition(".")[0] or " "  # IPEX's name of the model itself


def _by_parent(state: Prepared) -> dict[str, list[Layer]]:
    assert state.flow is not None
    calls = state.flow.calls
    groups: dict[str, list[Layer]] = {}
    for layer in sorted(state.plan.layers.values(), key=lambda it: calls[it.path][0].index):
        groups.setdefault(_parent(layer.path), []).append(layer)
    return groups


def _summary(model: nn.Module, state: Prepared) -> dict[str, Any]:
    if state.flow is None:
        return {}
    scales = scales_of_layers(model, state, _reached(state))
    summary: dict[str, Any] = {}
    for parent, layers in _by_parent(state).items():
        ops: dict[str, Any] = {}
        for layer in layers:
            if layer.path in scales:
                ops[str(len(ops))] = _entry(model, state, layer, *scales[layer.path])
        summary[parent] = {"q_op_infos": ops, "nonq_op_infos": {}, "layer_output_infos": []}
    for path, product in state.plan.products.items():
        watches = [state.watches[value] for value in product.sources]
        if all(watch.ready for watch in watches):
            empty: dict[str, Any] = {
                "q_op_infos": {},
                "nonq_op_infos": {},
                "layer_output_infos": [],
            }
            ops = summary.setdefault(_parent(path), empty)["q_op_infos"]
            ops[str(len(ops))] = _product_entry(model, product, watches)
    return summary


def _product_entry(model: nn.Module, product: Product, watches: list[Any]) -> dict[str, Any]:
    dtype = str(torch.quint8)
    infos = []
    for value, watch in zip(product.sources, watches, strict=True):
        scale = watch.get_scale()
        info = {"id": value, "inf_dtype": dtype, "force_dtype": dtype}
        infos.append({**info, "scale": [scale.scale], "zero_point": [scale.zero]})
    return {
        "op_type": _KINDS[type(model.get_submodule(product.path))],
        "op_type_is_module": False,
        "fqn": product.path,
        "input_tensor_infos": infos,
        "weight_tensor_infos": [],
        "output_tensor_infos": [],
        "activation_observer": _describe(watches[0].observer),
        "weight_observer": {},
    }


def _reached(state: Prepared) -> Any:
    layers = {
        path: layer
        for path, layer in state.plan.layers.items()
        if path in state.loaded or state.watches[layer.source].ready
    }
    return dataclasses.replace(state.plan, layers=layers)


def _entry(
    model: nn.Module, state: Prepared, layer: Layer, scale: Scale, factor: Tensor | None
) -> dict[str, Any]:
    module: Any = model.get_submodule(layer.path)
    watch = state.watches[layer.source]
    weight: Any = layer.qconfig.weight()
    rows = output_rows(float_layer(model, layer)).float()
    weight(rows if factor is None else rows / factor)
    weight_scale, weight_zero = weight.calculate_qparams()
    dtype = str(torch.quint8)
    entry: dict[str, Any] = {
        "op_type": str(type(module)),
        "op_type_is_module": True,
        "fqn": layer.path,
        "input_tensor_infos": [
            {
                "id": layer.source,
                "orig_dtype": str(module.weight.dtype),
                "inf_dtype": dtype,
                "force_dtype": dtype,
                "scale": [scale.scale],
                "zero_point": [scale.zero],
            }
        ],
        "weight_tensor_infos": [
            {
                "orig_dtype": str(module.weight.dtype),
                "inf_dtype": str(torch.qint8),
                "scale": weight_scale.tolist(),
                "zero_point": weight_zero.tolist(),
            }
        ],
        "output_tensor_infos": [
            {
                "id": layer.result,
                "orig_dtype": str(module.weight.dtype),
                "inf_dtype": dtype if layer.codes else str(module.weight.dtype),
                "scale": [],
                "zero_point": [],
            }
        ],
        "activation_observer": _describe(watch.observer or watch.channels),
        "weight_observer": _describe(weight),
    }
    if layer.codes and state.watches[layer.result].ready:
        result = state.watches[layer.result].get_scale()
        entry["output_tensor_infos"][0].update(scale=[result.scale], zero_point=[result.zero])
    if factor is not None:
        entry["share_weight_observers"] = layer.qconfig.share_weight_observers
        entry["input_tensor_infos"][0]["smooth_quant_scaling_factor"] = factor.tolist()
    return entry


def _describe(observer: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": type(observer).__name__}
    for name in ("dtype", "qscheme", "reduce_range", "quant_min", "quant_max", "bins", "ch_axis"):
        value = getattr(observer, name, None)
        if value is not None:
            fields[name] = value if isinstance(value, (bool, int, float)) else str(value)
    return fields


def _read(
    op: str, model: nn.Module, state: Prepared, data: Any
) -> tuple[dict[str, tuple[Scale, Tensor | None]], dict[int, Scale]]:
    """Return the scales of each layer's input, of results that are codes, and of factors of products."""
    loaded: dict[str, tuple[Scale, Tensor | None]] = {}
    results: dict[int, Scale] = {}
    for name, info in _entries_of(op, model, state, _entries(op, data)).items():
        product = state.plan.products.get(name)
        if product is not None:
            kind = _KINDS[type(model.get_submodule(name))]
            results.update(_product_scales(op, product, kind, info))
            continue
        layer = state.plan.layers[name]
        scale, factor, result = _layer_scales(op, layer, model.get_submodule(name), name, info)
        loaded[name] = scale, factor
        if result is not None:
            results[layer.result] = result
    return loaded, results


def _entries(op: str, data: Any) -> dict[str, Any]:
    """Return the entries of a file by the names of their modules."""
    found = {}
    try:
        for group in data.values():
            for index, info in group["q_op_infos"].items():
                # Files of IPEX also have functions, which follow from their operands here.
                if info["fqn"] or info.get("op_type_is_module", True):
                    found[str(info["fqn"])] = _of_op(info, index)
    except DAMAGE as error:
        what = "have q_op_infos with fqn for each module"
        raise OpArgumentError(f"{op}: qconf_summary must {what}, got {error!r}") from error
    return found


def _entries_of(
    op: str, model: nn.Module, state: Prepared, entries: dict[str, Any]
) -> dict[str, Any]:
    """Return the entries of what the plan makes INT8; a file of another model raises."""
    wanted = {*state.plan.layers, *state.plan.products}
    modules = {name for name, _ in model.named_modules()}

    def counts(name: str, info: Any) -> bool:
        if name in wanted:
            return name not in state.plan.layers or not _is_float(info)
        # A layer that the model lacks; others are activations, pooling and layers that stay float here.
        return name not in modules and bool(info.get("weight_tensor_infos"))

    found = {name: info for name, info in entries.items() if counts(name, info)}
    extra, missing = sorted(found.keys() - wanted), sorted(wanted - found.keys())
    differences = [f"only in the file: {', '.join(extra)}"] if extra else []
    differences += [f"only in the model: {', '.join(missing)}"] if missing and extra else []
    check(not extra, op, "qconf_summary", "be of this model", "; ".join(differences))
    some = bool(found) or not wanted
    check(some, op, "qconf_summary", "have layers of this model", "none")
    if missing:
        log.warning("%s: no scales in the file, these stay float: %s", op, ", ".join(missing))
    return found


def _layer_scales(
    op: str, layer: Layer, module: Any, name: str, info: Any
) -> tuple[Scale, Tensor | None, Scale | None]:
    """Return the scales of the input, of its channels under SmoothQuant, and of a result in codes."""
    same = info.get("op_type") == str(type(module))
    check(same, op, f"op_type of {name}", f"be {type(module)}", info.get("op_type"))
    coded = None
    try:
        channels = len(info["weight_tensor_infos"][0]["scale"])
        source, result = info["input_tensor_infos"][0], info["output_tensor_infos"][0]
        scale = _scale(source)
        factor = source.get("smooth_quant_scaling_factor")
        factor = None if factor is None else torch.tensor(factor)
        # (IPEX also gives scales of results in float, which an activation follows.)
        if layer.codes and result.get("scale") and "int8" in str(result.get("inf_dtype")):
            coded = _scale(result)
    except DAMAGE as error:
        raise OpArgumentError(
            f"{op}: the entry of {name} must have scales, got {error!r}"
        ) from error
    rows, columns = output_rows(module).shape[:2]
    what = f"the number of weight scales of {name}"
    check(channels in (1, rows), op, what, f"be 1 or {rows}", channels)
    what = f"smooth_quant_scaling_factor of {name}"
    expected = "be given" if layer.smooth else "not be there"
    check((factor is not None) == layer.smooth, op, what, expected, factor is not None)
    fits = factor is None or list(factor.shape) == [columns]
    check(fits, op, what, f"have {columns} numbers", "other")
    return scale, factor, coded


def _product_scales(op: str, product: Product, kind: str, info: Any) -> dict[int, Scale]:
    name = product.path
    check(info.get("op_type") == kind, op, f"op_type of {name}", f"be {kind}", info.get("op_type"))
    try:
        infos = info["input_tensor_infos"]
        return {value: _scale(it) for value, it in zip(product.sources, infos, strict=True)}
    except DAMAGE as error:
        raise OpArgumentError(
            f"{op}: the entry of {name} must have a scale of each input, got {error!r}"
        ) from error


def _of_op(info: Any, index: str) -> Any:
    """Return an entry with lists only: IPEX writes SmoothQuant's scales of a value once for each op that reads it."""
    inputs = [
        {
            key: value.get(f"{index}_0", next(iter(value.values()), []))
            if isinstance(value, dict)
            else value
            for key, value in source.items()
        }
        for source in info["input_tensor_infos"]
    ]
    return {**info, "input_tensor_infos": inputs}


def _is_float(info: Any) -> bool:
    """Return whether the file keeps a layer in float: IPEX's recipe did so, or somebody who edited the file."""
    given: dict[str, Any] = next(iter(info["input_tensor_infos"]), {})
    return not {"torch.float32", "torch.bfloat16"}.isdisjoint(
        str(given.get(key)) for key in ("inf_dtype", "force_dtype")
    )


def _scale(info: Any) -> Scale:
    """Return the scale of an entry; signed codes are IPEX's qint8."""
    scale, zero = float(info["scale"][0]), int(info["zero_point"][0])
    if not 0.0 < scale < 3e38:
        raise ValueError(f"scale must be above 0 and below 3e38, got {scale}")
    zero += 128 if info.get("inf_dtype") == "torch.qint8" else 0
    if not 0 <= zero <= 255:
        raise ValueError(f"zero point must be a code of 8 bits, got {zero}")
    return Scale(scale, zero)
