# SPDX-License-Identifier: Apache-2.0
"""Quantisation: INT8 layers, weight-only configurations, quantised layers and checkpoint readers.

Names are imported from the module they live in when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from ipex_quant._version import __version__

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
