# SPDX-License-Identifier: Apache-2.0
"""``save_pretrained`` of models of transformers with weight-only quantized layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ipex_core.errors import OpArgumentError
from ipex_core.optimization.records import SavePretrained
from ipex_quant.util.safetensors import CheckpointError, read_config, read_header, weight_files
from ipex_quant.weight_only.linear import WoqLinearModule

__all__ = ["UNREADABLE", "describe_saved"]

_NAME = "save_pretrained"
_UPLOAD = "_upload_modified_files"

#: The format of folders that only ``load_state_dict`` of a model with the same quantized layers can read.
UNREADABLE = "state_dict"


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
        try:
            result = SavePretrained(model)(save_directory, *args, **kwargs)
        finally:
            model.__dict__.pop(_UPLOAD, None)
        if main:
            _describe(model, Path(save_directory))
        return result


def describe_saved(model: nn.Module) -> None:
    """Let the models of transformers in a model say which of the layers that they save are quantized."""
    for module in model.modules():
        if hasattr(type(module), _NAME) and hasattr(getattr(module, "config", None), "to_dict"):
            module.__dict__[_NAME] = SaveQuantized(module)


def _describe(model: nn.Module, folder: Path) -> None:
    from ipex_quant.io.save import write_json

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
    from ipex_quant.int8.serialize import is_int8
    from ipex_quant.io.save import VERSION, about, ties
    from ipex_quant.weight_only.checkpoint import quantized_names

    unreadable = {"quant_method": "ipex", "format": UNREADABLE, "version": VERSION}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, WoqLinearModule)}
    try:
        saved: Any = {name for path in weight_files(folder) for name in read_header(path)}
        tied = ties(_NAME, model)
    except (CheckpointError, OpArgumentError):  # other files than safetensors, or quantized experts
        return unreadable
    if any(is_int8(module) for module in model.modules()):
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
