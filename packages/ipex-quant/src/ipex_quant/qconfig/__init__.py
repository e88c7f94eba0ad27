# SPDX-License-Identifier: Apache-2.0
"""Configurations of quantization: weight-only (`woq_qconfig`) and static or dynamic INT8 (`default_static_qconfig`)."""

from __future__ import annotations

from ipex_quant.qconfig.static import (
    AutoAlpha,
    QConfigSmoothQuant,
    default_dynamic_qconfig,
    default_dynamic_qconfig_mapping,
    default_static_qconfig,
    default_static_qconfig_mapping,
    get_smooth_quant_qconfig_mapping,
)
from ipex_quant.qconfig.weight_only import (
    WOQ_ACT_QUANT_MODE_TO_STR,
    WOQ_DTYPE_TO_STR,
    WOQ_LOWP_MODE_TO_STR,
    WOQ_QSCHEME_TO_STR,
    QConfigWoq,
    WoqActQuantMode,
    WoqLowpMode,
    WoqQConfigMapping,
    WoqWeightDtype,
    WoqWeightQScheme,
    get_weight_only_quant_qconfig_mapping,
    woq_qconfig,
)

__all__ = [
    "WOQ_ACT_QUANT_MODE_TO_STR",
    "WOQ_DTYPE_TO_STR",
    "WOQ_LOWP_MODE_TO_STR",
    "WOQ_QSCHEME_TO_STR",
    "AutoAlpha",
    "QConfigSmoothQuant",
    "QConfigWoq",
    "WoqActQuantMode",
    "WoqLowpMode",
    "WoqQConfigMapping",
    "WoqWeightDtype",
    "WoqWeightQScheme",
    "default_dynamic_qconfig",
    "default_dynamic_qconfig_mapping",
    "default_static_qconfig",
    "default_static_qconfig_mapping",
    "get_smooth_quant_qconfig_mapping",
    "get_weight_only_quant_qconfig_mapping",
    "woq_qconfig",
]
