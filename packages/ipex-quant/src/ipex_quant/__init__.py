# SPDX-License-Identifier: Apache-2.0
"""Quantisation: INT8 layers, weight-only configurations, quantised layers and checkpoint readers.

Names are imported from the module they live in when they are first used.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from ipex_quant._version import __version__


def _check_siblings() -> None:
    # Names are imported late: without this, a missing package would be told by whatever name is used first.
    wanted = {"ipex_core": "ipex-core"}
    missing = [n for n in wanted if n not in sys.modules and importlib.util.find_spec(n) is None]
    if missing:
        names = " ".join(wanted[name] for name in missing)
        raise ModuleNotFoundError(
            f"ipex-quant {__version__} needs packages that are not installed: pip install {names}",
            name=missing[0],
        )


_check_siblings()

if TYPE_CHECKING:  # for type checkers and editors; at run time see __getattr__
    from ipex_quant import fp8 as fp8
    from ipex_quant._autotune import autotune as autotune
    from ipex_quant._awq import awq as awq
    from ipex_quant._combine import combine_linears as combine_linears
    from ipex_quant._gguf import read_gguf as read_gguf
    from ipex_quant._gptq import gptq as gptq
    from ipex_quant._int8_products import Int8MatMul as Int8MatMul
    from ipex_quant._int8_products import MatMul as MatMul
    from ipex_quant._model import quantize_linears as quantize_linears
    from ipex_quant._weight import QuantizedWeight as QuantizedWeight
    from ipex_quant.checkpoint import linear_from as linear_from
    from ipex_quant.checkpoint import quantized_names as quantized_names
    from ipex_quant.checkpoint import read_checkpoint as read_checkpoint
    from ipex_quant.checkpoint import read_linear as read_linear
    from ipex_quant.int8_layers import DynamicInt8Linear as DynamicInt8Linear
    from ipex_quant.int8_layers import Int8Conv as Int8Conv
    from ipex_quant.int8_layers import Int8Linear as Int8Linear
    from ipex_quant.kv_cache import KVCacheScales as KVCacheScales
    from ipex_quant.kv_cache import calibrate_kv_cache as calibrate_kv_cache
    from ipex_quant.kv_cache import read_kv_cache_scales as read_kv_cache_scales
    from ipex_quant.linear import QuantDtype as QuantDtype
    from ipex_quant.linear import QuantMethod as QuantMethod
    from ipex_quant.linear import WeightOnlyQuantizedLinear as WeightOnlyQuantizedLinear
    from ipex_quant.linear import WoqWeightFormat as WoqWeightFormat
    from ipex_quant.loading import load as load
    from ipex_quant.prepare_convert import convert as convert
    from ipex_quant.prepare_convert import prepare as prepare
    from ipex_quant.qconfig import QConfigWoq as QConfigWoq
    from ipex_quant.qconfig import WoqActQuantMode as WoqActQuantMode
    from ipex_quant.qconfig import WoqLowpMode as WoqLowpMode
    from ipex_quant.qconfig import WoqQConfigMapping as WoqQConfigMapping
    from ipex_quant.qconfig import WoqWeightDtype as WoqWeightDtype
    from ipex_quant.qconfig import WoqWeightQScheme as WoqWeightQScheme
    from ipex_quant.qconfig import (
        get_weight_only_quant_qconfig_mapping as get_weight_only_quant_qconfig_mapping,
    )
    from ipex_quant.qconfig import woq_qconfig as woq_qconfig
    from ipex_quant.quantize import dequantize_per_block as dequantize_per_block
    from ipex_quant.quantize import dequantize_per_channel as dequantize_per_channel
    from ipex_quant.quantize import quantize_per_block as quantize_per_block
    from ipex_quant.quantize import quantize_per_channel as quantize_per_channel
    from ipex_quant.saving import save as save
    from ipex_quant.static_qconfig import QConfigSmoothQuant as QConfigSmoothQuant
    from ipex_quant.static_qconfig import default_dynamic_qconfig as default_dynamic_qconfig
    from ipex_quant.static_qconfig import (
        default_dynamic_qconfig_mapping as default_dynamic_qconfig_mapping,
    )
    from ipex_quant.static_qconfig import default_static_qconfig as default_static_qconfig
    from ipex_quant.static_qconfig import (
        default_static_qconfig_mapping as default_static_qconfig_mapping,
    )
    from ipex_quant.static_qconfig import (
        get_smooth_quant_qconfig_mapping as get_smooth_quant_qconfig_mapping,
    )

#: Public name -> module that has it.
_LAZY: dict[str, str] = {
    "autotune": "ipex_quant._autotune",
    "awq": "ipex_quant._awq",
    "calibrate_kv_cache": "ipex_quant.kv_cache",
    "combine_linears": "ipex_quant._combine",
    "convert": "ipex_quant.prepare_convert",
    "default_dynamic_qconfig": "ipex_quant.static_qconfig",
    "default_dynamic_qconfig_mapping": "ipex_quant.static_qconfig",
    "default_static_qconfig": "ipex_quant.static_qconfig",
    "default_static_qconfig_mapping": "ipex_quant.static_qconfig",
    "dequantize_per_block": "ipex_quant.quantize",
    "dequantize_per_channel": "ipex_quant.quantize",
    "DynamicInt8Linear": "ipex_quant.int8_layers",
    "get_smooth_quant_qconfig_mapping": "ipex_quant.static_qconfig",
    "get_weight_only_quant_qconfig_mapping": "ipex_quant.qconfig",
    "gptq": "ipex_quant._gptq",
    "Int8Conv": "ipex_quant.int8_layers",
    "Int8Linear": "ipex_quant.int8_layers",
    "KVCacheScales": "ipex_quant.kv_cache",
    "Int8MatMul": "ipex_quant._int8_products",
    "linear_from": "ipex_quant.checkpoint",
    "load": "ipex_quant.loading",
    "MatMul": "ipex_quant._int8_products",
    "prepare": "ipex_quant.prepare_convert",
    "QConfigSmoothQuant": "ipex_quant.static_qconfig",
    "QConfigWoq": "ipex_quant.qconfig",
    "QuantDtype": "ipex_quant.linear",
    "quantize_linears": "ipex_quant._model",
    "quantize_per_block": "ipex_quant.quantize",
    "quantize_per_channel": "ipex_quant.quantize",
    "quantized_names": "ipex_quant.checkpoint",
    "QuantizedWeight": "ipex_quant._weight",
    "QuantMethod": "ipex_quant.linear",
    "read_checkpoint": "ipex_quant.checkpoint",
    "read_gguf": "ipex_quant._gguf",
    "read_kv_cache_scales": "ipex_quant.kv_cache",
    "read_linear": "ipex_quant.checkpoint",
    "save": "ipex_quant.saving",
    "WeightOnlyQuantizedLinear": "ipex_quant.linear",
    "woq_qconfig": "ipex_quant.qconfig",
    "WoqActQuantMode": "ipex_quant.qconfig",
    "WoqLowpMode": "ipex_quant.qconfig",
    "WoqQConfigMapping": "ipex_quant.qconfig",
    "WoqWeightDtype": "ipex_quant.qconfig",
    "WoqWeightFormat": "ipex_quant.linear",
    "WoqWeightQScheme": "ipex_quant.qconfig",
}

__all__ = ["__version__", *_LAZY]  # noqa: PLE0604  (the keys are strings)


def __getattr__(name: str) -> Any:
    if name == "fp8":  # a module with names of its own
        return importlib.import_module("ipex_quant.fp8")
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ipex_quant' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
