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
from ipex_core.util.quiet import quiet

__all__ = [
    "KINDS",
    "from_saved",
    "is_recurrent",
    "saved",
    "why_no_form",
    "why_not",
    "with_bias",
]

Tensor = torch.Tensor

#: Classes of ``torch.ao.nn.quantized.dynamic``.
KINDS = ("GRU", "GRUCell", "LSTM", "LSTMCell", "RNNCell")
#: Weights of a layer: with fewer, quantizing each step takes longer than reading them in float (measured with 1 and 2
#: threads: 0.5x to 0.7x of the speed of float at 33 thousand, 0.9x to 2.5x at half a million, 2x to 3.5x at 2 million).
_LEAST = 1 << 20
_LAYER = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout")
_CELL = ("input_size", "hidden_size", "bias")


@functools.cache
def _module() -> Any:
    return importlib.import_module("torch.ao.nn.quantized.dynamic")


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module is one of these layers."""
    kind = type(module)
    # Importing the classes to compare with costs much more than a name.
    return kind.__name__ in KINDS and kind.__module__.startswith("torch.ao.nn.quantized.dynamic")


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


def _options(module: Any) -> dict[str, Any]:
    """Return the arguments of the constructor of a layer or cell."""
    names = _CELL if type(module).__name__.endswith("Cell") else (*_LAYER, "bidirectional")
    options = {name: getattr(module, name) for name in names}
    if hasattr(module, "nonlinearity"):
        options["nonlinearity"] = module.nonlinearity
    return options


def with_bias(layer: Any) -> Any:
    """Return a layer or cell with a bias, of zeros where it has none: torch's INT8 forms need one."""
    if layer.bias:
        return layer
    made = type(layer)(**{**_options(layer), "bias": True})
    own = dict(layer.named_parameters())
    with torch.no_grad():
        for name, value in made.named_parameters():
            if name in own:
                value.copy_(own[name])
            else:
                value.zero_()
    return made.train(layer.training)


def saved(module: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the numbers and the tensors of a layer; a weight is its codes and, as ``_q``, scale and zero point."""
    about = {"kind": type(module).__name__, **_options(module)}
    tensors: dict[str, Tensor] = {}
    for name, weight in module.get_weight().items():
        tensors[name] = weight.int_repr()
        step = (weight.q_scale(), weight.q_zero_point())
        tensors[f"{name}_q"] = torch.tensor(step, dtype=torch.float64)
    for name, bias in module.get_bias().items():
        if bias is not None:
            tensors[name] = bias.detach()
    return about, tensors


def from_saved(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return the layer that `saved` described."""
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
