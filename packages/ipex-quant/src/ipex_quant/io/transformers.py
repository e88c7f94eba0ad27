# SPDX-License-Identifier: Apache-2.0
"""Folders of `ipex_quant.save` in ``from_pretrained`` of transformers, and quantization while loading."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ipex_quant.io import load
from ipex_quant.weight_only.convert import quantize_linears
from ipex_quant.weight_only.saving import UNREADABLE, UNREADABLE_HINT

NAME = "ipex"
log = logging.getLogger("ipex")

auto: Any = importlib.import_module("transformers.quantizers.auto")
HfQuantizer: Any = importlib.import_module("transformers.quantizers.base").HfQuantizer
QuantizationConfigMixin: Any = importlib.import_module(
    "transformers.utils.quantization_config"
).QuantizationConfigMixin


class IpexConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How `from_pretrained` quantizes a float model, or what a folder of ``ipex.quantization.save`` says about itself.

    Args:
        weight_dtype: ``"int8"``, ``"int4"``, ``"nf4"``, ``"fp4"``, ``"mxfp4"`` or ``"fp8"``.
        group_size: Weights that share a scale; -1: a row of the weight; None: 32 for ``"mxfp4"``, else 128.
        lowp_mode: ``"NONE"``, ``"FP16"``, ``"BF16"`` or ``"INT8"``: what products are computed in.
        modules_to_not_convert: Linear layers that stay as they are: names, ends of names, names of modules around
            them or their ends, or patterns; None: the output layer.
        **saved: The content of a folder's ``quantization_config``.

    Raises:
        TypeError: An argument is not known, or ``modules_to_not_convert`` is a single text.
        ValueError: A value is not one of these.

    Example:
        >>> from ipex_llm.integrations import IpexConfig, register_transformers
        >>> register_transformers()
        >>> config = IpexConfig("int4", group_size=64)
        >>> AutoModelForCausalLM.from_pretrained(name, quantization_config=config)  # doctest: +SKIP
    """

    def __init__(
        self,
        weight_dtype: str = "int4",
        group_size: int | None = None,
        lowp_mode: str = "BF16",
        modules_to_not_convert: list[str] | None = None,
        **saved: Any,
    ) -> None:
        from ipex_quant.qconfig.weight_only import WoqLowpMode, WoqWeightDtype
        from ipex_quant.util.modules import patterns_of

        self.quant_method: Any = NAME
        for name, value, kind in (
            ("weight_dtype", weight_dtype, WoqWeightDtype),
            ("lowp_mode", lowp_mode, WoqLowpMode),
        ):
            if str(value).upper() not in kind.__members__:
                allowed = ", ".join(kind.__members__)
                raise ValueError(f"IpexConfig: {name} must be one of {allowed}, got {value!r}")
        if modules_to_not_convert is not None:
            patterns_of("IpexConfig", modules_to_not_convert, "modules_to_not_convert")
        saved.pop("quant_method", None)
        if saved.get("format") == UNREADABLE:
            raise ValueError(
                f"from_pretrained: the folder must be one that can be loaded, got one {UNREADABLE_HINT}"
            )
        if saved and "layers" not in saved:
            raise TypeError(f"IpexConfig: arguments must be known, got {', '.join(sorted(saved))}")
        self.saved = saved
        self.weight_dtype = weight_dtype
        if group_size is None:
            group_size = 32 if str(weight_dtype).upper() == "MXFP4" else 128
        self.group_size = group_size
        self.lowp_mode = lowp_mode
        self.modules_to_not_convert = modules_to_not_convert
        self.qconfig()  # raises before anything is loaded

    def qconfig(self) -> Any:
        """Return how linear layers are quantized, as `ipex_quant.quantize_linears` takes it.

        Raises:
            ValueError: The values do not fit together.
        """
        from ipex_quant.qconfig.weight_only import WoqLowpMode, WoqWeightDtype, woq_qconfig

        return woq_qconfig(
            weight_dtype=WoqWeightDtype[self.weight_dtype.upper()],
            group_size=self.group_size,
            lowp_mode=WoqLowpMode[self.lowp_mode.upper()],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what goes into a ``config.json``."""
        if self.saved:
            return {"quant_method": NAME, **self.saved}
        keys = ("quant_method", "weight_dtype", "group_size", "lowp_mode", "modules_to_not_convert")
        return {key: getattr(self, key) for key in keys}


class _Place(nn.Module):
    """Where a quantized layer will be: without tensors, so that transformers has none to load or to make up."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.in_features = getattr(layer, "in_features", None)
        self.out_features = getattr(layer, "out_features", None)
        # Blocks that initialize the layers inside them look for these; only parameters are loaded, not other tensors.
        for name in ("weight", "bias"):
            value = getattr(layer, name, None)
            if value is not None:
                value = torch.empty(0, dtype=value.dtype)
                value.__dict__["_is_hf_initialized"] = True
            self.__dict__[name] = value


class IpexQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loads what `ipex_quant.save` wrote, or quantizes the linear layers of a float model after loading."""

    requires_calibration = False

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Check that the model is for the CPU.

        Raises:
            ValueError: It is for another device.
        """
        devices = kwargs.get("device_map")
        used = set(devices.values()) if isinstance(devices, dict) else {devices}
        # Also numbers of accelerators and "disk", which are no devices of torch.
        if not all(d in {None, "auto"} or str(d).partition(":")[0] == "cpu" for d in used):
            raise ValueError(f"from_pretrained: device_map must be the CPU for ipex, got {devices}")

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self.pre_quantized:
            return model
        from ipex_quant.util.modules import replace_module

        self._folder = _folder(model, kwargs.get("checkpoint_files"))
        settings: Any = self.quantization_config
        about = settings.saved
        tied = bool(getattr(model.config, "tie_word_embeddings", False))
        head = model.get_output_embeddings() if tied else None
        for name in (*about.get("layers", {}), *about.get("shared", {})):
            try:
                layer = model.get_submodule(name)
            except AttributeError:
                saved = ", ".join(model.config.architectures or ["the class that was saved"])
                raise ValueError(
                    f"from_pretrained: the model must be {saved} for {self._folder}, got {type(model).__name__}, which"
                    f" has no {name}"
                ) from None
            if layer is not head:
                replace_module(model, name, _Place(layer))
        # Our own loader reads the codes; transformers need not name them.
        patterns = [rf"^{name.replace('.', '[.]')}[.]" for name in about.get("layers", {})]
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            *patterns,
        }
        return model

    def update_unexpected_keys(self, model: Any, unexpected_keys: list[str], *_: Any) -> list[str]:
        """Return the keys of a checkpoint that nothing reads (transformers 4)."""
        del model
        settings: Any = self.quantization_config
        layers = settings.saved.get("layers", {})
        return [key for key in unexpected_keys if key.rpartition(".")[0] not in layers]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        del kwargs
        if self.pre_quantized:
            return load(self._folder, model)
        settings: Any = self.quantization_config
        skip = settings.modules_to_not_convert
        if skip is None:
            head = model.get_output_embeddings()
            skip = [name for name, module in model.named_modules() if module is head]
        quantize_linears(model, settings.qconfig(), skip, progress=False)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Return False, and tell in the log who writes such models."""
        log.warning("save_pretrained: ipex.quantization.save(model, folder) writes this model")
        return False

    @property
    def is_trainable(self) -> bool:
        """False: the weights are codes."""
        return False


def _folder(model: Any, files: Any) -> Path:
    """Return the folder that is being loaded."""
    if files:
        return Path(files[0]).parent
    name = model.config._name_or_path
    if Path(name).is_dir():
        return Path(name)
    from transformers.utils.hub import cached_file

    return Path(str(cached_file(name, "config.json", local_files_only=True))).parent


def register() -> None:
    """Register the configuration and the quantizer with transformers.

    Raises:
        RuntimeError: Something else has the name.
    """
    known: Any = auto.AUTO_QUANTIZER_MAPPING.get(NAME)
    if known is IpexQuantizer:
        return
    if known is not None:
        raise RuntimeError(
            f"register_transformers: the quantizer {NAME!r} must be ours, got {known.__module__}"
        )
    auto.register_quantization_config(NAME)(IpexConfig)
    auto.register_quantizer(NAME)(IpexQuantizer)
