# SPDX-License-Identifier: Apache-2.0
"""Training and inference with 8-bit floating-point operands and delayed scaling, as ``ipex.quantization.fp8``.

The names and modules are as in IPEX. The 8-bit numbers are exact on any CPU; products are computed in the dtype of
the activations, which holds each of them.
"""

from __future__ import annotations

from ipex_quant.fp8.base import Fp8BaseModule, prepare_backward
from ipex_quant.fp8.fp8 import (
    amax_and_scale_update,
    default_amax_and_scale_update,
    fp8_autocast,
    get_default_fp8_recipe,
    get_fp8_device_type,
    get_fp8_dtype,
    get_fp8_recipe,
    is_fp8_calibration,
    is_fp8_enabled,
    update_amax_history,
)
from ipex_quant.fp8.linear import FP8Linear
from ipex_quant.fp8.recipe import DelayedScaling, Format
from ipex_quant.fp8.tensors import Float8Format, FP8BwdTensors, FP8FwdTensors, FP8TensorMeta
from ipex_quant.fp8.util import (
    cast_from_fp8,
    cast_if_needed,
    cast_to_fp8,
    convert,
    convert_rec,
    prepare_fp8,
)

__all__ = [
    "DelayedScaling",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "FP8Linear",
    "FP8TensorMeta",
    "Float8Format",
    "Format",
    "Fp8BaseModule",
    "amax_and_scale_update",
    "cast_from_fp8",
    "cast_if_needed",
    "cast_to_fp8",
    "convert",
    "convert_rec",
    "default_amax_and_scale_update",
    "fp8_autocast",
    "get_default_fp8_recipe",
    "get_fp8_device_type",
    "get_fp8_dtype",
    "get_fp8_recipe",
    "is_fp8_calibration",
    "is_fp8_enabled",
    "prepare_backward",
    "prepare_fp8",
    "update_amax_history",
]
