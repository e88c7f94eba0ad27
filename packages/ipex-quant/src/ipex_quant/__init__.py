# SPDX-License-Identifier: Apache-2.0
"""Quantization: INT8 layers, weight-only configurations, quantized layers and checkpoint readers.

Names are imported from the module they live in when they are first used.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from ipex_quant._version import __version__
from ipex_quant.util import on_describe


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


def _register_transformers() -> None:
    with contextlib.suppress(ImportError, RuntimeError):  # another library has the name
        importlib.import_module("ipex_quant.io.transformers").register()


on_describe.append(_register_transformers)

if TYPE_CHECKING:  # for type checkers and editors; at run time see __getattr__
    from ipex_quant import fp8 as fp8
    from ipex_quant.formats.gguf import read_gguf as read_gguf
    from ipex_quant.int8.api import convert as convert
    from ipex_quant.int8.api import prepare as prepare
    from ipex_quant.int8.modules.conv import Int8Conv as Int8Conv
    from ipex_quant.int8.modules.linear import DynamicInt8Linear as DynamicInt8Linear
    from ipex_quant.int8.modules.linear import Int8Linear as Int8Linear
    from ipex_quant.int8.modules.matmul import Int8MatMul as Int8MatMul
    from ipex_quant.int8.modules.matmul import MatMul as MatMul
    from ipex_quant.io import load as load
    from ipex_quant.io import save as save
    from ipex_quant.kv_cache import KVCacheScales as KVCacheScales
    from ipex_quant.kv_cache import calibrate_kv_cache as calibrate_kv_cache
    from ipex_quant.kv_cache import read_kv_cache_scales as read_kv_cache_scales
    from ipex_quant.qconfig.static import QConfigSmoothQuant as QConfigSmoothQuant
    from ipex_quant.qconfig.static import default_dynamic_qconfig as default_dynamic_qconfig
    from ipex_quant.qconfig.static import (
        default_dynamic_qconfig_mapping as default_dynamic_qconfig_mapping,
    )
    from ipex_quant.qconfig.static import default_static_qconfig as default_static_qconfig
    from ipex_quant.qconfig.static import (
        default_static_qconfig_mapping as default_static_qconfig_mapping,
    )
    from ipex_quant.qconfig.static import (
        get_smooth_quant_qconfig_mapping as get_smooth_quant_qconfig_mapping,
    )
    from ipex_quant.qconfig.weight_only import QConfigWoq as QConfigWoq
    from ipex_quant.qconfig.weight_only import WoqActQuantMode as WoqActQuantMode
    from ipex_quant.qconfig.weight_only import WoqLowpMode as WoqLowpMode
    from ipex_quant.qconfig.weight_only import WoqQConfigMapping as WoqQConfigMapping
    from ipex_quant.qconfig.weight_only import WoqWeightDtype as WoqWeightDtype
    from ipex_quant.qconfig.weight_only import WoqWeightQScheme as WoqWeightQScheme
    from ipex_quant.qconfig.weight_only import (
        get_weight_only_quant_qconfig_mapping as get_weight_only_quant_qconfig_mapping,
    )
    from ipex_quant.qconfig.weight_only import woq_qconfig as woq_qconfig
    from ipex_quant.tuning import autotune as autotune
    from ipex_quant.weight.primitives import dequantize_per_block as dequantize_per_block
    from ipex_quant.weight.primitives import dequantize_per_channel as dequantize_per_channel
    from ipex_quant.weight.primitives import quantize_per_block as quantize_per_block
    from ipex_quant.weight.primitives import quantize_per_channel as quantize_per_channel
    from ipex_quant.weight.tensor import QuantizedWeight as QuantizedWeight
    from ipex_quant.weight_only.awq import awq as awq
    from ipex_quant.weight_only.checkpoint import linear_from as linear_from
    from ipex_quant.weight_only.checkpoint import quantized_names as quantized_names
    from ipex_quant.weight_only.checkpoint import read_checkpoint as read_checkpoint
    from ipex_quant.weight_only.checkpoint import read_linear as read_linear
    from ipex_quant.weight_only.convert import combine_linears as combine_linears
    from ipex_quant.weight_only.convert import quantize_linears as quantize_linears
    from ipex_quant.weight_only.gptq import gptq as gptq
    from ipex_quant.weight_only.linear import QuantDtype as QuantDtype
    from ipex_quant.weight_only.linear import QuantMethod as QuantMethod
    from ipex_quant.weight_only.linear import WeightOnlyQuantizedLinear as WeightOnlyQuantizedLinear
    from ipex_quant.weight_only.linear import WoqWeightFormat as WoqWeightFormat
    from ipex_quant.weight_only.torchao import save_torchao as save_torchao

#: Module -> public names that it has.
_MODULES = {
    "formats.gguf": "read_gguf",
    "int8.api": "convert prepare",
    "int8.modules.conv": "Int8Conv",
    "int8.modules.linear": "DynamicInt8Linear Int8Linear",
    "int8.modules.matmul": "Int8MatMul MatMul",
    "io": "load save",
    "kv_cache": "calibrate_kv_cache KVCacheScales read_kv_cache_scales",
    "qconfig.static": (
        "default_dynamic_qconfig default_dynamic_qconfig_mapping default_static_qconfig "
        "default_static_qconfig_mapping get_smooth_quant_qconfig_mapping QConfigSmoothQuant"
    ),
    "qconfig.weight_only": (
        "get_weight_only_quant_qconfig_mapping QConfigWoq woq_qconfig WoqActQuantMode "
        "WoqLowpMode WoqQConfigMapping WoqWeightDtype WoqWeightQScheme"
    ),
    "tuning": "autotune",
    "weight.primitives": (
        "dequantize_per_block dequantize_per_channel quantize_per_block quantize_per_channel"
    ),
    "weight.tensor": "QuantizedWeight",
    "weight_only.awq": "awq",
    "weight_only.checkpoint": "linear_from quantized_names read_checkpoint read_linear",
    "weight_only.convert": "combine_linears quantize_linears",
    "weight_only.gptq": "gptq",
    "weight_only.linear": "QuantDtype QuantMethod WeightOnlyQuantizedLinear WoqWeightFormat",
    "weight_only.torchao": "save_torchao",
}
#: Public name -> module that has it.
_LAZY = {name: f"ipex_quant.{at}" for at, names in _MODULES.items() for name in names.split()}

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
