# SPDX-License-Identifier: Apache-2.0
"""What `ipex.optimize` was asked for, what it did to a model, and what saved files say about it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ipex_core.module_swap.state_dict import class_of, record_of


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked options. Knobs, all but the first three, have their values at O1 for defaults; at O0 all are off."""

    dtype: torch.dtype | None
    level: str
    channels_last: bool
    conv_bn_folding: bool = True
    linear_bn_folding: bool = True
    weights_prepack: bool = True
    replace_dropout_with_identity: bool = True
    optimize_lstm: bool = True
    split_master_weight_for_bf16: bool = True
    fuse_update_step: bool = True
    auto_kernel_selection: bool = False
    graph_mode: bool = False
    concat_linear: bool = False

    @property
    def reduced(self) -> torch.dtype | None:
        """The dtype to cast to, or None."""
        return self.dtype if self.dtype in (torch.bfloat16, torch.float16) else None


@dataclasses.dataclass(frozen=True)
class Record:
    """One decision: what a pass did to a module, or why it did nothing.

    Attributes:
        module: Path of the module, ``""`` for the model itself.
        kind: Name of the original class.
        step: Name of the pass.
        done: Whether something was changed.
        text: What was done, or why not.
        kernel: The op that runs now, empty if this pass does not choose one.
    """

    module: str
    kind: str
    step: str
    done: bool
    text: str
    kernel: str = ""


@dataclasses.dataclass
class Log:
    """All records of a model, its options, and what passes need for undoing."""

    options: Options
    records: list[Record] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    undo: dict[str, Any] = dataclasses.field(default_factory=dict)

    def add(
        self, path: str, module: nn.Module | str, step: str, done: bool, text: str, kernel: str = ""
    ) -> None:
        """Append a record."""
        kind = module if isinstance(module, str) else class_name(module)
        self.records.append(Record(path, kind, step, done, text, kernel))


@dataclasses.dataclass
class Quantization:
    """What was quantized in a model; `optimize` and `restore` leave it alone."""

    records: list[Record] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def class_name(module: nn.Module) -> str:
    """Return the name of the class a module had before it was optimized."""
    return class_of(module).__name__


def log_of(model: nn.Module) -> Log | None:
    """Return the log of an optimized model, or None."""
    log: Log | None = record_of(model).log
    return log


def quantization_of(model: nn.Module) -> Quantization | None:
    """Return what was quantized in a model, or None."""
    found: Quantization | None = record_of(model).quantization
    return found


# --- saved models -----------------------------------------------------------------------------------------------------


_NAME = "save_pretrained"
_UPLOAD = "_upload_modified_files"


class SavePretrained:
    """Names the dtype of what is saved in the configuration, where transformers names the dtype of the parameters.

    It would be loaded in that dtype otherwise, rounded. An object and no function: copies of a model have their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save the model; arguments and result are as in transformers."""
        model: Any = self.model
        main = args[0] if args else kwargs.get("is_main_process", True)
        upload = getattr(model, _UPLOAD, None)

        def corrected(*args: Any, **kwargs: Any) -> Any:
            self._name_dtype(save_directory)
            assert upload is not None
            return upload(*args, **kwargs)

        if main and upload is not None:  # transformers uploads before it returns
            model.__dict__[_UPLOAD] = corrected
        try:
            result = type(model).save_pretrained(model, save_directory, *args, **kwargs)
        finally:
            if model.__dict__.get(_UPLOAD) is corrected:
                del model.__dict__[_UPLOAD]
        if main:
            self._name_dtype(save_directory)
        return result

    def _name_dtype(self, save_directory: Any) -> None:
        """Write the configuration once more, with the dtype of the state dict."""
        model: Any = self.model
        values = model.state_dict().values()
        saved = next((v.dtype for v in values if v.is_floating_point()), None)
        name = str(saved).removeprefix("torch.")
        # "torch_dtype" before transformers 4.56; configurations of other libraries have neither.
        field = next((f for f in ("dtype", "torch_dtype") if hasattr(model.config, f)), None)
        if field is None or saved is None or saved == model.dtype:
            return
        if getattr(model.config, field) not in (saved, name):
            setattr(model.config, field, name)
            model.config.save_pretrained(save_directory)


def name_saved_dtype(model: nn.Module) -> None:
    """Let the models of transformers in a model save the dtype of their state dict."""
    for module in model.modules():
        if hasattr(type(module), _NAME) and hasattr(module, "config"):
            module.__dict__.setdefault(_NAME, SavePretrained(module))


def undo_saved_dtype(model: nn.Module) -> None:
    """Undo `name_saved_dtype`."""
    for module in model.modules():
        if isinstance(module.__dict__.get(_NAME), SavePretrained):
            del module.__dict__[_NAME]
