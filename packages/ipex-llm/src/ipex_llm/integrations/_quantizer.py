# SPDX-License-Identifier: Apache-2.0
"""Folders of `ipex_quant.save` in ``from_pretrained`` of transformers, and quantisation while loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

__all__ = ["IpexConfig", "IpexQuantizer", "register"]

NAME = "ipex"


class IpexConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How `from_pretrained` quantises a float model, or what a folder of ``ipex.quantization.save`` says about itself.

    Args:
        weight_dtype: ``"int8"``, ``"int4"``, ``"nf4"``, ``"fp4"``, ``"mxfp4"`` or ``"fp8"``.
        group_size: Weights that share a scale; -1: a row of the weight.
        lowp_mode: ``"NONE"``, ``"FP16"``, ``"BF16"`` or ``"INT8"``: what products are computed in.
        modules_to_not_convert: Linear layers that stay as they are: names, ends of names, names of modules around
            them, or patterns; None: the output layer.
        **saved: The content of a folder's ``quantization_config``.

    Raises:
        ValueError: An argument is none of these.

    Example:
        >>> from ipex_llm.integrations import IpexConfig, register_transformers
        >>> register_transformers()
        >>> config = IpexConfig("int4", group_size=64)
        >>> AutoModelForCausalLM.from_pretrained(name, quantization_config=config)  # doctest: +SKIP
    """

    def __init__(
        self,
        weight_dtype: str = "int4",
        group_size: int = 128,
        lowp_mode: str = "BF16",
        modules_to_not_convert: list[str] | None = None,
        **saved: Any,
    ) -> None:
        from ipex_quant import WoqLowpMode, WoqWeightDtype

        self.quant_method: Any = NAME
        for name, value, kind in (
            ("weight_dtype", weight_dtype, WoqWeightDtype),
            ("lowp_mode", lowp_mode, WoqLowpMode),
        ):
            if str(value).upper() not in kind.__members__:
                allowed = ", ".join(kind.__members__)
                raise ValueError(f"IpexConfig: {name} must be one of {allowed}, got {value!r}")
        saved.pop("quant_method", None)
        self.saved = saved
        self.weight_dtype = weight_dtype
        self.group_size = group_size
        self.lowp_mode = lowp_mode
        self.modules_to_not_convert = modules_to_not_convert

    def to_dict(self) -> dict[str, Any]:
        """Return what goes into a ``config.json``."""
        if self.saved:
            return {"quant_method": NAME, **self.saved}
        keys = ("quant_method", "weight_dtype", "group_size", "lowp_mode", "modules_to_not_convert")
        return {key: getattr(self, key) for key in keys}


class _Place(nn.Module):
    """Where a quantised layer will be: without tensors, so that transformers has none to load or to make up."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.in_features = getattr(layer, "in_features", None)
        self.out_features = getattr(layer, "out_features", None)


class IpexQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loads what `ipex_quant.save` wrote, or quantises the linear layers of a float model after loading."""

    requires_calibration = False

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Check that the model is for the CPU.

        Raises:
            ValueError: It is for another device.
        """
        devices = kwargs.get("device_map")
        used = set(devices.values()) if isinstance(devices, dict) else {devices}
        other = {d for d in used if d not in {None, "auto"} and torch.device(d).type != "cpu"}
        if other:
            raise ValueError(f"from_pretrained: device_map must be the CPU for ipex, got {devices}")

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self.pre_quantized:
            return model
        from ipex_quant._model import replace_module

        self._folder = _folder(model, kwargs.get("checkpoint_files"))
        settings: Any = self.quantization_config
        about = settings.saved
        tied = bool(getattr(model.config, "tie_word_embeddings", False))
        head = model.get_output_embeddings() if tied else None
        for name in (*about.get("layers", {}), *about.get("shared", {})):
            layer = model.get_submodule(name)
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
            from ipex_quant import load

            return load(self._folder, model)
        from ipex_quant import WoqLowpMode, WoqWeightDtype, quantize_linears, woq_qconfig

        settings: Any = self.quantization_config
        qconfig = woq_qconfig(
            weight_dtype=WoqWeightDtype[settings.weight_dtype.upper()],
            group_size=settings.group_size,
            lowp_mode=WoqLowpMode[settings.lowp_mode.upper()],
        )
        skip = settings.modules_to_not_convert
        if skip is None:
            head = model.get_output_embeddings()
            skip = [name for name, module in model.named_modules() if module is head]
        quantize_linears(model, qconfig, skip, progress=False)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Return False: ``ipex.quantization.save`` writes such models."""
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
    known = auto.AUTO_QUANTIZER_MAPPING.get(NAME)
    if known is IpexQuantizer:
        return
    if known is not None:
        raise RuntimeError(
            f"register_transformers: the quantizer {NAME!r} must be ours, got {known.__module__}"
        )
    auto.register_quantization_config(NAME)(IpexConfig)
    auto.register_quantizer(NAME)(IpexQuantizer)
