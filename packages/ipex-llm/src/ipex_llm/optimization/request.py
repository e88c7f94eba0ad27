# SPDX-License-Identifier: Apache-2.0
"""The arguments of `ipex.llm.optimize`, checked: the first of its steps."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import QConfig, QConfigMapping

from ipex_core.errors import MissingComponentError, OpArgumentError
from ipex_core.library.spec import FLOATS
from ipex_core.ops.kv_cache import QUANTIZED
from ipex_core.optimization import check_model
from ipex_llm.distributed.group import TensorParallel
from ipex_llm.kv_cache import CACHE_DTYPES
from ipex_quant.kv_cache import KVCacheScales, read_kv_cache_scales
from ipex_quant.qconfig.static import QConfigSmoothQuant
from ipex_quant.qconfig.weight_only import QConfigWoq


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What was asked for.

    Attributes:
        dtype: dtype to cast to, or None.
        device: ``cpu`` or ``xpu``.
        depth: The most that becomes one call: 3 the decoder stack, 2 a decoder layer, 1 neither.
        shallow: Why it is less than 3, or an empty text.
        quantization_config: Of weights, or of activations and weights, or None.
        static: Whether it is of activations and weights.
        summary: File with the scales for static quantization; None: the model is returned as it is, to be calibrated.
        sample_inputs: Inputs for static quantization, or None.
        checkpoint: Quantized weights and their configuration, or None.
        kv: dtype of cached keys and values, None for the dtype of the model.
        kv_scales: Their scales, or None.
        kv_scales_given: Whether the scales were given, and not found in a checkpoint.
        parallel: The group to divide the model among, or None.
    """

    dtype: torch.dtype | None
    device: torch.device
    depth: int
    shallow: str
    quantization_config: Any
    static: bool
    summary: str | os.PathLike[str] | None
    sample_inputs: Any
    checkpoint: tuple[Mapping[str, torch.Tensor], Any] | None
    kv: torch.dtype | None
    kv_scales: KVCacheScales | None
    kv_scales_given: bool
    parallel: TensorParallel | None

    @property
    def weight_config(self) -> Any:
        """The configuration by which weights are quantized here, or None."""
        used = self.static or self.checkpoint is not None
        return None if used else self.quantization_config


def checked(
    model: Any,
    optimizer: Any,
    dtype: Any,
    inplace: Any,
    device: Any,
    quantization_config: Any,
    qconfig_summary_file: Any,
    low_precision_checkpoint: Any,
    sample_inputs: Any,
    deployment_mode: Any,
    cache_weight_for_large_batch: Any,
    kv_cache_dtype: Any,
    kv_cache_scales: Any,
    tp_group: Any,
    depth: Any,
) -> Request:
    """Check the arguments of `ipex.llm.optimize`, which tells what they are and what is raised."""
    check_model(model, None)
    flags = {"inplace": inplace, "deployment_mode": deployment_mode}
    flags["cache_weight_for_large_batch"] = cache_weight_for_large_batch
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"optimize: {name} must be True or False, got {flag!r}")
    _check_arguments(optimizer, dtype, device)
    static = _is_static(quantization_config)
    if qconfig_summary_file is not None and not static:
        raise OpArgumentError(
            "optimize: qconfig_summary_file must come with a static quantization_config, such as"
            " ipex.quantization.get_smooth_quant_qconfig_mapping(), got"
            f" {type(quantization_config).__name__}"
        )
    place = torch.device(device)
    if place.type == "xpu":
        _check_xpu()
    kv = _kv_dtype(kv_cache_dtype)
    scales = _kv_scales(kv_cache_scales, kv)
    if type(depth) is not int or depth not in (1, 2, 3):
        raise OpArgumentError(f"optimize: depth must be 1, 2 or 3, got {depth!r}")
    shallow = "" if depth == 3 else f"depth is {depth}"
    if place.type == "xpu" and (depth < 3 or tp_group is not None):
        depth, shallow = 1, shallow or "on xpu, a divided model has no program"
    elif static and qconfig_summary_file is None:
        depth, shallow = 1, "the model is left as it is, to be calibrated"
    elif not deployment_mode:
        depth, shallow = 1, shallow or "deployment_mode is False"
    parallel = None if tp_group is None else TensorParallel.of(tp_group)
    checkpoint = None
    if static:
        _check_static(model, qconfig_summary_file, sample_inputs, low_precision_checkpoint)
        if parallel is not None:
            raise NotImplementedError(
                "optimize: tp_group must be None for static INT8, got a group"
            )
    elif low_precision_checkpoint is not None:
        checkpoint = _checkpoint(low_precision_checkpoint)
        if kv in (torch.float8_e5m2, torch.float8_e4m3fn) and scales is None:
            scales = read_kv_cache_scales(*checkpoint)
    return Request(
        dtype=dtype,
        device=place,
        depth=depth,
        shallow=shallow,
        quantization_config=quantization_config,
        static=static,
        summary=qconfig_summary_file,
        sample_inputs=sample_inputs,
        checkpoint=checkpoint,
        kv=kv,
        kv_scales=scales,
        kv_scales_given=kv_cache_scales is not None,
        parallel=parallel,
    )


def _check_arguments(optimizer: Any, dtype: Any, device: Any) -> None:
    if optimizer is not None:
        raise OpArgumentError(
            f"optimize: optimizer must be None, got {type(optimizer).__name__}: ipex.llm.optimize is for inference;"
            " train with ipex.optimize"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"optimize: dtype must be a torch.dtype or None, got {dtype!r}")
    if dtype is not None and dtype not in FLOATS:
        names = ", ".join(map(str, FLOATS))
        raise OpArgumentError(f"optimize: dtype must be one of {names} or None, got {dtype}")
    try:
        kind = torch.device(device).type if isinstance(device, (str, torch.device)) else device
    except RuntimeError:  # not the name of a device
        kind = None
    if kind not in ("cpu", "xpu"):
        raise RuntimeError(f"optimize: device must be 'cpu' or 'xpu', got {device!r}")


def _check_xpu() -> None:
    if not torch.xpu.is_available():
        raise MissingComponentError(
            "optimize: device 'xpu' needs a device: pip install 'ipex[xpu]', and IPEX_XPU_DEVICE=cpu for the CPU as one"
        )


def _is_static(config: Any) -> bool:
    """Return whether a configuration is for activations and weights: a ``QConfigMapping`` or one without WOQ."""
    if isinstance(config, QConfigMapping):
        found: list[Any] = [
            config.global_qconfig,
            *config.module_name_qconfigs.values(),
            *config.module_name_regex_qconfigs.values(),
            *config.object_type_qconfigs.values(),
        ]
        found = [one for one in found if one is not None]
        return bool(found) and not any(isinstance(one, QConfigWoq) for one in found)
    return isinstance(config, (QConfig, QConfigSmoothQuant))


def _check_static(model: nn.Module, summary: Any, inputs: Any, checkpoint: Any) -> None:
    if checkpoint is not None:
        warnings.warn(
            "optimize: low_precision_checkpoint is for weight-only quantization and is not used with a static"
            " quantization_config",
            stacklevel=5,
        )
    if summary is None:
        return
    if not os.path.isfile(summary):
        raise OpArgumentError(
            f"optimize: qconfig_summary_file must be a file of save_qconf_summary, got {summary!r}, which is not there"
        )
    if inputs is None and not getattr(model, "dummy_inputs", None):
        raise OpArgumentError(
            f"optimize: sample_inputs must be given for {type(model).__name__}, which has no dummy_inputs"
        )


def _checkpoint(value: Any) -> tuple[Mapping[str, torch.Tensor], Any]:
    """Return the tensors and the configuration of a checkpoint."""
    if isinstance(value, Mapping):
        warnings.warn(
            "optimize: low_precision_checkpoint has no quant_config: it is taken as GPTQ with 4 bits; pass"
            " (state_dict, quant_config)",
            stacklevel=5,
        )
        value = (value, None)
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not isinstance(value[0], Mapping):
        raise OpArgumentError(
            f"optimize: low_precision_checkpoint must be (state_dict, quant_config), got {_kinds(value)}"
        )
    return value[0], value[1]


def _kinds(value: Any) -> str:
    kind = type(value).__name__
    if not isinstance(value, (tuple, list)):
        return kind
    return f"{kind} of {', '.join(type(one).__name__ for one in value[:3]) or 'nothing'}"


def _kv_dtype(value: Any) -> torch.dtype | None:
    """Return the dtype that ``kv_cache_dtype`` names, None for the model's own."""
    if isinstance(value, str):
        if value not in CACHE_DTYPES:
            names = ", ".join(map(repr, CACHE_DTYPES))
            raise OpArgumentError(f"optimize: kv_cache_dtype must be one of {names}, got {value!r}")
        return CACHE_DTYPES[value]
    if value not in (None, *QUANTIZED):
        names = ", ".join(map(str, QUANTIZED))
        raise OpArgumentError(
            f"optimize: kv_cache_dtype must be None or one of {names}, got {value!r}"
        )
    return value  # type: ignore[no-any-return]


def _kv_scales(value: Any, kv: torch.dtype | None) -> KVCacheScales | None:
    """Return the scales that ``kv_cache_scales`` gives or names."""
    if value is None:
        return None
    if kv is None:
        raise OpArgumentError(
            "optimize: kv_cache_dtype must be 'int8', 'fp8_e4m3' or 'fp8_e5m2' with kv_cache_scales, got None"
        )
    if isinstance(value, (str, os.PathLike)):
        return KVCacheScales.load(value)
    if not isinstance(value, KVCacheScales):
        raise OpArgumentError(
            f"optimize: kv_cache_scales must be KVCacheScales or a path, got {type(value).__name__}"
        )
    return value
