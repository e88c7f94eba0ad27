# SPDX-License-Identifier: Apache-2.0
"""What is saved of a model with quantized layers: tensors of each module, ``quantization_config``, ``save_pretrained``.

Folders of `ipex_quant.save`, checkpoints of GPTQ and what ``save_pretrained`` of transformers writes have these in
common.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check
from ipex_core.module_swap.base import original_class
from ipex_core.optimization.records import SavePretrained, quantization_of
from ipex_quant.util import on_describe
from ipex_quant.util.modules import is_whole, saved_parts
from ipex_quant.util.safetensors import (
    NAMES,
    CheckpointError,
    read_config,
    read_header,
    weight_files,
)
from ipex_quant.weight_only.checkpoint import quantized_names
from ipex_quant.weight_only.linear import WoqLinearModule

#: dtype and shape of tensors by name.
Kinds = dict[str, tuple[torch.dtype, tuple[int, ...]]]

#: Version of what ``quantization_config`` says.
VERSION = 1
#: What the quantized layers of a folder are: weight-only, or INT8.
FORMATS = ("woq", "int8")
_NAME = "save_pretrained"
_UPLOAD = "_upload_modified_files"

#: The format of folders that only ``load_state_dict`` of a model with the same quantized layers can read.
UNREADABLE = "state_dict"
#: What to do with such a folder.
UNREADABLE_HINT = (
    "which save_pretrained of a model with quantized experts or INT8 layers wrote: quantize the float model as before,"
    " then give the tensors of the folder to its load_state_dict"
)


def modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have tensors of their own, each once; quantized layers have nothing below them."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        if whole(module):
            inside.update(id(m) for m in module.modules())
        yield name, module


def whole(module: nn.Module) -> bool:
    """Return whether a module is written as a whole, in a form that is made for it."""
    return isinstance(module, WoqLinearModule) or is_whole(module)


def entries(op: str, name: str, module: nn.Module) -> dict[str, Tensor]:
    """Return what a module alone adds to a state dict."""
    prefix = f"{name}." if name else ""
    if is_whole(module):
        return {prefix + key: value for key, value in saved_parts(module)[1].items()}
    found: Any = {}
    for before in module._state_dict_pre_hooks.values():
        before(module, prefix, False)
    module._save_to_state_dict(found, prefix, False)
    for after in module._state_dict_hooks.values():
        after(module, found, prefix, {})
    for key, value in found.items():
        check(isinstance(value, Tensor), op, key, "be a tensor", type(value).__name__)
        check(value.dtype in NAMES, op, key, "have a dtype of safetensors", value.dtype)
        check(not value.is_meta, op, key, "have values", "a tensor on the meta device")
        other = key.endswith(".woq") and not isinstance(module, WoqLinearModule)
        check(not other, op, "model", "have no quantized layers but linear ones", name)
    return found  # type: ignore[no-any-return]


def markers(model: nn.Module) -> dict[str, Tensor]:
    """Return empty tensors by the names that the weights of quantized layers and experts have in the float model.

    In the files of a model of transformers they make a transformers that does not know quantized layers raise for
    wrong shapes. It would make the weights up otherwise.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    tied = bool(getattr(config, "tie_word_embeddings", False))
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if tied and get_head is not None else None
    found = {
        f"{name}.weight": torch.empty(0)
        for name, module in modules(model)
        if name and whole(module) and module is not head
    }
    for name, module in model.named_modules():
        replaced = getattr(type(module), "replaced_parameters", None)  # of quantized experts
        for key in replaced(module) if replaced is not None else ():
            found[f"{name}.{key}"] = torch.empty(0)
    return found


def without_markers(state: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return tensors of a file without the `markers` of quantized layers.

    Args:
        state: The tensors by name.
        names: Of the layers.
    """
    keys = {f"{name}.weight" for name in names}
    return {k: v for k, v in state.items() if v.numel() or k not in keys}


def identity(value: Tensor) -> tuple[Any, ...]:
    """Return what tells that two tensors are one."""
    return value.data_ptr(), value.dtype, tuple(value.shape), value.stride()


def ties(op: str, model: nn.Module) -> dict[str, str]:
    """Return which names of tensors that are not quantized share the tensor of another."""
    seen: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, module in modules(model):
        if whole(module):
            continue
        for key, value in entries(op, name, module).items():
            if value.numel() and (first := seen.setdefault(identity(value), key)) != key:
                tied[key] = first
    return tied


def about(
    model: nn.Module, layers: Mapping[str, WoqLinearModule], tied: Mapping[str, str]
) -> dict[str, Any]:
    """Return the ``quantization_config``."""
    first = {id(module): name for name, module in layers.items()}
    every = model.named_modules(remove_duplicate=False)
    shared = {n: first[id(m)] for n, m in every if id(m) in first and first[id(m)] != n}
    return {
        "quant_method": "ipex",
        "format": FORMATS[0],
        "version": VERSION,
        "layers": {
            name: {
                "lowp_mode": module.lowp_mode.name,
                "act_quant_mode": module.act_quant_mode.name,
                "cache_weight_for_large_batch": module.cache_weight_for_large_batch,
                "weight": str(module._float_dtype).removeprefix("torch."),
            }
            for name, module in layers.items()
        },
        "shared": shared,
        "tied": dict(tied),
        **_records(model),
    }


def _records(model: nn.Module) -> dict[str, Any]:
    """Return what ``ipex.explain`` shows of the quantization, for ``quantization_config``."""
    log = quantization_of(model)
    if log is None:
        return {}
    return {"records": [dataclasses.astuple(it) for it in log.records], "notes": log.notes}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, default=str)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def model_config(model: nn.Module) -> dict[str, Any]:
    """Return the configuration of a model of transformers, with the name of its class."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    kind = original_class(model)
    found = {**config.to_dict(), "architectures": [kind.__name__]}
    # Old releases of transformers write that they have chosen the attention; who reads that stays with eager.
    found.pop("_attn_implementation_autoset", None)
    return found


# --- save_pretrained ------------------------------------------------------------------------------------------------


class SaveQuantized:
    """Writes ``quantization_config`` into the ``config.json`` of what is saved.

    Without it transformers takes the folder for one of floats, finds no weights of that name, and makes them up.
    An object and no function: copies of a model have their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save the model; arguments and result are as in transformers."""
        model: Any = self.model
        main = args[0] if args else kwargs.get("is_main_process", True)
        upload = getattr(model, _UPLOAD, None)

        def described(*args: Any, **kwargs: Any) -> Any:
            _describe(model, Path(save_directory))
            assert upload is not None
            return upload(*args, **kwargs)

        if main and upload is not None:  # transformers uploads before it returns
            model.__dict__[_UPLOAD] = described
        # By the names that tensors have in the model: names of older checkpoints have no place for codes.
        if "save_original_format" in inspect.signature(type(model).save_pretrained).parameters:
            kwargs.setdefault("save_original_format", False)
        if (marked := markers(model)) and kwargs.get("state_dict") is None and len(args) < 2:
            kwargs["state_dict"] = {**marked, **model.state_dict()}
        try:
            result = SavePretrained(model)(save_directory, *args, **kwargs)
        finally:
            model.__dict__.pop(_UPLOAD, None)
        if main:
            _describe(model, Path(save_directory))
        return result


def describe_saved(model: nn.Module) -> None:
    """Let the models of transformers in a model say which of the layers that they save are quantized.

    From then on ``from_pretrained`` reads such folders in this process: it would make weights up otherwise.
    """
    found = False
    for module in model.modules():
        if hasattr(type(module), _NAME) and hasattr(getattr(module, "config", None), "to_dict"):
            module.__dict__[_NAME] = SaveQuantized(module)
            found = True
    for hook in on_describe if found else ():
        hook()


def _describe(model: nn.Module, folder: Path) -> None:
    if not (folder / "config.json").is_file():  # only an adapter was saved
        return
    config = read_config(folder)
    about = _about(model, folder)
    if about is None:
        config.pop("quantization_config", None)
    else:
        config["quantization_config"] = about
    write_json(folder / "config.json", config)


def _about(model: nn.Module, folder: Path) -> dict[str, Any] | None:
    """Return what `ipex_quant.load` has to know about the files of a folder, None if nothing is quantized."""
    unreadable = {"quant_method": "ipex", "format": UNREADABLE, "version": VERSION}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, WoqLinearModule)}
    try:
        saved: Any = {name for path in weight_files(folder) for name in read_header(path)}
        tied = ties(_NAME, model)
    except (CheckpointError, OpArgumentError):  # other files than safetensors, or quantized experts
        return unreadable
    if any(is_whole(module) for module in model.modules()):
        return unreadable
    if not layers:
        return None
    # Of several names of one tensor transformers keeps the one that it likes.
    tied = {
        (first if name in saved and first not in saved else name): (
            name if name in saved and first not in saved else first
        )
        for name, first in tied.items()
    }
    none: Any = dict.fromkeys(saved)
    if set(quantized_names(none)) != set(layers):
        return unreadable
    return about(model, layers, tied)
