# SPDX-License-Identifier: Apache-2.0
"""Quantized models from the folders that `ipex_quant.io.save` writes."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check
from ipex_quant.int8.serialize import rebuild, restore_records
from ipex_quant.io.save import is_saved
from ipex_quant.qconfig.weight_only import (
    QConfigWoq,
    WoqActQuantMode,
    WoqLowpMode,
    WoqWeightDtype,
    woq_qconfig,
)
from ipex_quant.util.modules import replace_module
from ipex_quant.util.safetensors import DAMAGE, CheckpointError, mapped, read_config, weight_files
from ipex_quant.weight_only.build import building, check_fits
from ipex_quant.weight_only.checkpoint import quantized_names
from ipex_quant.weight_only.replace import (
    assign,
    finish_meta,
    load_rest,
    replace_linears_from_checkpoint,
)
from ipex_quant.weight_only.saving import UNREADABLE, VERSION, without_markers

__all__ = ["load", "no_init"]

Tensor = torch.Tensor
#: Called as ``progress(done, total, name)`` after each layer.
Progress = Callable[[int, int, str], None]


def load(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Read a model that `save` wrote.

    Args:
        folder: The folder.
        model: A float model of the same structure, with any weights or on the meta device; it is changed in place.
            None for models of transformers, whose class ``config.json`` names.
        progress: Called with the number of quantized layers done, of all, and the name of the last one.
        trust_remote_code: Run the Python code that ``config.json`` names (``auto_map``) as the model's class or
            configuration. There is no prompt: without it such a folder is an error.

    Returns:
        The model, in evaluation mode, with the tensors and dtypes that were saved.

    Raises:
        TypeError: ``model`` is not a module.
        CheckpointError: A file is missing, cut off or damaged.
        OpArgumentError: The folder is of another kind or version, or does not fit the model.
    """
    op = "load"
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"{op}: model must be a torch.nn.Module or None, got {type(model).__name__}"
        )
    place = Path(folder)
    config = read_config(place)
    what = "be a folder that ipex.quantization.save wrote"
    given = config.get("quantization_config")
    if isinstance(given, dict) and given.get("format") == UNREADABLE:
        got = f"{place}, which save_pretrained of a model wrote that only load_state_dict can read"
        check(False, op, "folder", what, got)
    check(is_saved(config), op, "folder", what, f"{place} without its quantization_config")
    about = config["quantization_config"]
    method = about.get("quant_method")
    check(method == "ipex", op, f"quant_method of {place}", "be 'ipex'", method)
    version = about.get("version")
    check(version == VERSION, op, f"version of {place}", f"be {VERSION}", version)
    try:
        return _load(op, place, config, model, progress, trust_remote_code)
    except (OpArgumentError, CheckpointError):
        raise
    except DAMAGE as error:
        # Numbers and names of config.json lead everywhere: what has been changed shows only there.
        what = "be as ipex.quantization.save wrote it and fit the model"
        got = f"{type(error).__name__}: {error}"
        raise OpArgumentError(f"{op}: {place} must {what}, got {got}") from error


def _load(
    op: str,
    place: Path,
    config: Mapping[str, Any],
    model: nn.Module | None,
    progress: Progress | None,
    trust_remote_code: bool,
) -> nn.Module:
    about = config["quantization_config"]
    layers = _layers(op, about)
    state: dict[str, Tensor] = {}
    for path in weight_files(place):
        state |= mapped(path)
    int8_modules = about.get("int8", {}).get("modules", {})
    state = without_markers(state, (*layers, *int8_modules))
    if model is None:
        model = _make(op, place, config, trust_remote_code)
    int8: tuple[str, ...] = ()
    if "int8" in about:
        int8 = rebuild(op, model, about["int8"], state, progress)
    names = set(quantized_names(state)) if layers or not int8 else set()
    strangers = sorted(names ^ set(layers))
    check(not strangers, op, "folder", "have the layers of its config.json", strangers[:3])
    shared, tied = about.get("shared", {}), about.get("tied", {})
    if layers or not int8:
        done = replace_linears_from_checkpoint(
            model, state, about, layers, exact=True, progress=progress
        )
        loaded, unused = done.loaded, done.unused
    else:
        loaded, unused = load_rest(model, state, exact=True)
    check(not unused, op, "model", f"have a place for all tensors of {place}", unused[:3])
    for name, value in about["layers"].items():
        layer: Any = model.get_submodule(name)
        dtype = getattr(torch, str(value.get("weight", "float32")), None)
        what = "be the name of a dtype"
        check(isinstance(dtype, torch.dtype), op, f"weight of {name}", what, value["weight"])
        layer._float_dtype = dtype
    for name, first in shared.items():
        replace_module(model, name, model.get_submodule(first))
    _tie(model, tied)
    finish_meta(model)
    inner = {f"{name}.{part}" for name in (*layers, *shared) for part in ("bias", "weight")}
    known = {*loaded, *tied, *inner}
    absent = [name for name, _ in model.named_parameters() if name not in known]
    check(not absent, op, "folder", "have all weights of the model", f"no {', '.join(absent[:3])}")
    restore_records(op, model, about)
    return model.eval()


def _layers(op: str, about: Mapping[str, Any]) -> dict[str, QConfigWoq]:
    """Return how each layer computes."""
    found = {}
    rows = about.get("layers")
    check(isinstance(rows, dict), op, "layers", "be in quantization_config", rows)
    assert isinstance(rows, dict)
    for name, row in rows.items():
        values: dict[str, Any] = {}
        for key, kind in (("lowp_mode", WoqLowpMode), ("act_quant_mode", WoqActQuantMode)):
            listed = kind.__members__
            what = f"be one of {', '.join(listed)}"
            check(row.get(key) in listed, op, f"{key} of {name}", what, row.get(key))
            values[key] = kind[row[key]]
        cache = bool(row.get("cache_weight_for_large_batch", False))
        # Of the weight's dtype nothing is needed but that it has all modes.
        found[name] = woq_qconfig(
            weight_dtype=WoqWeightDtype.INT4, cache_weight_for_large_batch=cache, **values
        )
    return found


def _tie(model: nn.Module, tied: Mapping[str, str]) -> None:
    for name, first in tied.items():
        parent, _, last = first.rpartition(".")
        source = model.get_submodule(parent)
        owner, _, key = name.rpartition(".")
        target = model.get_submodule(owner)
        for kind in ("_parameters", "_buffers"):
            if last in getattr(source, kind) and key in getattr(target, kind):
                getattr(target, kind)[key] = getattr(source, kind)[last]
                break
        else:
            assign(model, name, model.state_dict()[first].clone())


def _make(op: str, folder: Path, config: Mapping[str, Any], trusted: bool) -> nn.Module:
    """Return a model of transformers with weights of any value."""
    names = config.get("architectures") or []
    known = bool(names) and "model_type" in config
    check(
        known, op, "model", f"be given, since {folder} does not name a model of transformers", None
    )
    transformers = importlib.import_module("transformers")
    kind: Any = getattr(transformers, str(names[0]), None)
    if kind is None and trusted:
        kind = _own_class(folder, config, str(names[0]))
    # The name comes from a file: a class of models, and nothing else that transformers has.
    known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    why = f"transformers has no {names[0]}" + (" that is a model" if kind is not None else "")
    check(known, op, "model", f"be given, since {why}", None)
    try:
        # Explicit: without a value transformers asks on standard input, and a "y" there runs code of the folder.
        settings: Any = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trusted
        )
    except (ImportError, OSError, ValueError) as error:
        what = "have a configuration that transformers reads"
        hint = "; trust_remote_code=True runs its code" if config.get("auto_map") else ""
        raise OpArgumentError(f"{op}: {folder} must {what}, got {error}{hint}") from error
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    with no_init():
        check_fits(folder, config, lambda: kind(settings), quantized=True)
    # Not on the meta device: buffers that no file has (of rotary embeddings) must be computed. Without initialization
    # the weights that are replaced are never touched, so they take no memory.
    with no_init(), building(folder):
        model: Any = kind(settings).eval()
    model.tie_weights()
    if (folder / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model  # type: ignore[no-any-return]


def _own_class(folder: Path, config: Mapping[str, Any], name: str) -> Any:
    """Return the class of models that a trusted folder brings as Python code, or None."""
    places = config.get("auto_map")
    for key, place in places.items() if isinstance(places, dict) else ():
        if key.startswith("AutoModel") and str(place).rpartition(".")[2] == name:
            module = importlib.import_module("transformers.dynamic_module_utils")
            return module.get_class_from_dynamic_module(place, folder, local_files_only=True)
    return None


def no_init() -> contextlib.AbstractContextManager[Any]:
    """Return the context of transformers in which new models have weights of any value."""
    try:
        module = importlib.import_module("transformers.initialization")  # 5.x
    except ImportError:
        module = importlib.import_module("transformers.modeling_utils")
    return module.no_init_weights()  # type: ignore[no-any-return]
