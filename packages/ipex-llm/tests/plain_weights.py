# SPDX-License-Identifier: Apache-2.0
"""Stock models with the weights that the codes and scales of a quantized one stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import ipex_quant
from ipex_llm.model_runner import woq_experts


@torch.no_grad()
def with_plain_weights(model: Any, fast: nn.Module) -> Any:
    """Give a stock model the dequantized weights of `fast`, and return it.

    Args:
        model: Of the same class, float32; its linear layers and experts get new values.
        fast: Quantized by `optimize`.

    Raises:
        AssertionError: Nothing of `fast` is quantized.
    """
    count = 0
    for place, module in fast.named_modules():
        old: Any = model.get_submodule(place)
        for weight in woq_experts.weights(module):
            getattr(old, weight).copy_(getattr(module, weight).plain())
            count += 1
        if isinstance(module, ipex_quant.WeightOnlyQuantizedLinear):
            count += 1
            values = module.dequantize()
            # Not in place: a tied embedding keeps its values.
            old.weight = nn.Parameter(values if isinstance(old, nn.Linear) else values.t())
    assert count >= 4
    return model
