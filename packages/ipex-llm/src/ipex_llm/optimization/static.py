# SPDX-License-Identifier: Apache-2.0
"""Static INT8 of a language model: calibrated scales in, a model that generates out."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import QConfig, QConfigMapping

from ipex_core.errors import OpArgumentError
from ipex_quant import convert, prepare
from ipex_quant.qconfig.static import QConfigSmoothQuant
from ipex_quant.qconfig.weight_only import QConfigWoq

__all__ = ["is_static", "quantize_static"]

logger = logging.getLogger("ipex.llm")


def is_static(config: Any) -> bool:
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


def quantize_static(
    model: nn.Module,
    config: Any,
    summary: str | os.PathLike[str] | None,
    checkpoint: Any,
    sample_inputs: Any,
) -> nn.Module:
    """Make a model INT8 in place, with the scales of a file; without a file leave it for calibration.

    Args:
        model: The model.
        config: See `is_static`; the one that the model was calibrated with.
        summary: File of ``save_qconf_summary`` of the calibrated model, or None.
        checkpoint: Weights for weight-only quantization; not used here, with a warning.
        sample_inputs: A tuple or dict of inputs, or None: those that transformers has for each model.

    Raises:
        OpArgumentError: The file is not one of this model, or there are no inputs to run it with.
    """
    if checkpoint is not None:
        warnings.warn(
            "optimize: low_precision_checkpoint is for weight-only quantization and is not used with a static"
            " quantization_config",
            stacklevel=3,
        )
    if summary is None:
        logger.info(
            "optimize: %s is left as it is, for calibration: ipex.quantization.prepare, some runs,"
            " save_qconf_summary(file), then optimize with qconfig_summary_file=file",
            type(model).__name__,
        )
        return model
    if not os.path.isfile(summary):
        raise OpArgumentError(
            f"optimize: qconfig_summary_file must be a file of save_qconf_summary, got {summary!r}, which is not there"
        )
    inputs = _dummy_inputs(model) if sample_inputs is None else sample_inputs
    named = dict(inputs) if isinstance(inputs, Mapping) else None
    with torch.no_grad():
        prepared = prepare(
            model,
            config,
            example_inputs=inputs if named is None else None,
            example_kwarg_inputs=named,
            inplace=True,
        )
        prepared.load_qconf_summary(qconf_summary=summary)
        quantized: nn.Module = convert(prepared, inplace=True)
    return quantized


def _dummy_inputs(model: nn.Module) -> Any:
    found = getattr(model, "dummy_inputs", None)
    if not found:
        raise OpArgumentError(
            f"optimize: sample_inputs must be given for {type(model).__name__}, which has no dummy_inputs"
        )
    return found
