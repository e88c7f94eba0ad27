# SPDX-License-Identifier: Apache-2.0
"""Static INT8 of a language model: calibrated scales in, a model that generates out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ipex_llm.optimization.request import Request
from ipex_quant import convert, prepare

__all__ = ["quantize_static"]


def quantize_static(model: nn.Module, request: Request) -> nn.Module:
    """Make a model INT8 in place, with the scales of the file that the request names.

    Raises:
        OpArgumentError: The file is not one of this model.
    """
    inputs: Any = request.sample_inputs
    if inputs is None:
        inputs = model.dummy_inputs
    named = dict(inputs) if isinstance(inputs, Mapping) else None
    with torch.no_grad():
        prepared = prepare(
            model,
            request.quantization_config,
            example_inputs=inputs if named is None else None,
            example_kwarg_inputs=named,
            inplace=True,
        )
        prepared.load_qconf_summary(qconf_summary=request.summary)
        quantized: nn.Module = convert(prepared, inplace=True)
    return quantized
