# SPDX-License-Identifier: Apache-2.0
"""``save_pretrained`` of models of transformers whose parameters are cast and whose state dict is not."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["name_saved_dtype", "undo_saved_dtype"]

_NAME = "save_pretrained"
_UPLOAD = "_upload_modified_files"


class SavePretrained:
    """Names the dtype of what is saved in the configuration, where transformers names that of the parameters.

    It would be loaded in that dtype otherwise, rounded. An object and no function: copies of a model have their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save the model; arguments and result are those of transformers."""
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
