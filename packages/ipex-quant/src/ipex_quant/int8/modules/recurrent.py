# SPDX-License-Identifier: Apache-2.0
"""The recurrent layers of torch with int8 weights, as plain tensors and numbers, and back."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ipex_core.library.spec import dtype_name
from ipex_core.util import quiet
from ipex_quant.util.modules import recurrent_options

Tensor = torch.Tensor

#: Weights of a layer: with fewer, quantizing each step takes longer than reading them in float (measured with 1 and 2
#: threads: 0.5x to 0.7x of the speed of float at 33 thousand, 0.9x to 2.5x at half a million, 2x to 3.5x at 2 million).
_LEAST = 1 << 20


@functools.cache
def _module() -> Any:
    return importlib.import_module("torch.ao.nn.quantized.dynamic")


def why_no_form(layer: Any) -> str:
    """Return why torch cannot compute a recurrent layer or cell with int8 weights, or an empty string."""
    if getattr(layer, "proj_size", 0):
        return "no INT8 form with proj_size"
    dtype = next(layer.parameters()).dtype
    if dtype != torch.float32:
        return f"its INT8 form takes float32, the layer is {dtype_name(dtype)}"
    known = "fbgemm" in torch.backends.quantized.supported_engines
    return "" if known else f"this build of torch has no quantized {type(layer).__name__}"


def why_not(layer: nn.LSTM, packed: bool = False) -> str:
    """Return why an LSTM layer of a static configuration stays float, or an empty string.

    Args:
        layer: The layer.
        packed: Whether it is called with a `PackedSequence`.
    """
    reason = why_no_form(layer)
    if not reason and packed:
        return "its input is a PackedSequence, as in IPEX; a dynamic configuration quantizes it"
    if not reason and 4 * layer.hidden_size * (layer.hidden_size + layer.input_size) < _LEAST:
        return f"with hidden_size {layer.hidden_size} an LSTM is faster in float"
    return reason


def with_bias(layer: Any) -> Any:
    """Return a layer or cell with a bias, of zeros where it has none: torch's INT8 forms need one."""
    if layer.bias:
        return layer
    made = type(layer)(**{**recurrent_options(layer), "bias": True})
    own = dict(layer.named_parameters())
    with torch.no_grad():
        for name, value in made.named_parameters():
            if name in own:
                value.copy_(own[name])
            else:
                value.zero_()
    return made.train(layer.training)


def from_saved(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return the layer that `ipex_quant.util.modules.saved_parts` described."""
    options = {name: value for name, value in about.items() if name != "kind"}
    with quiet():  # torch's note to itself about the tensors it keeps weights in
        made = getattr(_module(), about["kind"])(**options)
        values: dict[str, Tensor | None] = {}
        for name in (*made.get_weight(), *made.get_bias()):
            if not name.startswith("weight"):
                bias = tensors.get(name)
                values[name] = None if bias is None else bias.clone()
                continue
            scale, zero = tensors[f"{name}_q"].tolist()
            codes = tensors[name]
            values[name] = torch._make_per_tensor_quantized_tensor(codes, scale, int(zero))
        if about["kind"].endswith("Cell"):
            parts = {
                k: {n: v for n, v in values.items() if n.startswith(k)} for k in ("weight", "bias")
            }
            made.set_weight_bias(parts)
        else:
            made.set_weight_bias(values)
    return made.eval()  # type: ignore[no-any-return]
