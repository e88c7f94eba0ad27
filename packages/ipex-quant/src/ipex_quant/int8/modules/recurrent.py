# SPDX-License-Identifier: Apache-2.0
"""The recurrent layers of torch with int8 weights, as plain tensors and numbers, and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import dynamic
from torch.ao.quantization import default_dynamic_qconfig as stock_dynamic_qconfig
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only

from ipex_core.library.spec import dtype_name
from ipex_core.module_swap.base import set_class
from ipex_core.util import quiet
from ipex_quant.int8.modules import check_codes, check_floats
from ipex_quant.util.modules import recurrent_options

#: Weights of a layer: with fewer, quantizing each step takes longer than reading them in float (measured with 1 and 2
#: threads: 0.5x to 0.7x of the speed of float at 33 thousand, 0.9x to 2.5x at half a million, 2x to 3.5x at 2 million).
_LEAST = 1 << 20


class _TakesMore(nn.Module):
    """Takes what the float layer takes and torch's INT8 form does not: bfloat16, and input without a batch.

    Results have the dtype of the input.
    """

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Return what the layer of torch returns."""
        module: Any = self
        cell = type(module).__name__.endswith("Cell")
        packed = isinstance(input, PackedSequence)
        given = input.data if packed else input
        single = not packed and given.dim() == (1 if cell else 2)
        states = 0 if cell else 1  # where states have their batch
        batch = 0 if cell or module.batch_first else 1

        def enter(x: Any, dim: int) -> Any:
            x = x.to(torch.float32) if given.is_floating_point() else x
            return x.unsqueeze(dim) if single else x

        def leave(x: Any, dim: int) -> Any:
            return (x.squeeze(dim) if single else x).to(given.dtype)

        hx = tree_map_only(Tensor, lambda x: enter(x, states), hx)
        result = super().forward(enter(input, batch), hx)
        if cell:
            return tree_map_only(Tensor, lambda x: leave(x, 0), result)
        output, hidden = result
        return leave(output, batch), tree_map_only(Tensor, lambda x: leave(x, 1), hidden)

    def __prepare_scriptable__(self) -> Any:
        """Return what ``torch.jit.script`` can compile: the layer of torch."""
        plain: Any = copy.copy(self)
        set_class(plain, getattr(dynamic, type(self).__name__))
        return plain


class LSTM(_TakesMore, dynamic.LSTM):
    """`torch.nn.LSTM` with int8 weights."""


class GRU(_TakesMore, dynamic.GRU):
    """`torch.nn.GRU` with int8 weights."""


class LSTMCell(_TakesMore, dynamic.LSTMCell):
    """`torch.nn.LSTMCell` with int8 weights."""


class GRUCell(_TakesMore, dynamic.GRUCell):
    """`torch.nn.GRUCell` with int8 weights."""


class RNNCell(_TakesMore, dynamic.RNNCell):
    """`torch.nn.RNNCell` with int8 weights."""


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (LSTM, GRU, LSTMCell, GRUCell, RNNCell)}


def from_float(layer: Any) -> nn.Module:
    """Return the INT8 form of a recurrent layer or cell."""
    layer = with_bias(layer)
    layer.qconfig = stock_dynamic_qconfig
    kind = type(layer).__name__
    with quiet():  # torch's note to itself about the tensors it keeps weights in
        made: nn.Module = getattr(dynamic, kind).from_float(layer)
    set_class(made, _KINDS[kind])  # torch makes the classes that it knows
    return made


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
    _check_sizes(options, tensors)
    with quiet():  # torch's note to itself about the tensors it keeps weights in
        made = _KINDS[about["kind"]](**options)
        values: dict[str, Tensor | None] = {}
        shapes = {name: list(weight.shape) for name, weight in made.get_weight().items()}
        biases = {name: value for name, value in made.get_bias().items() if value is not None}
        for name in (*shapes, *made.get_bias()):
            if not name.startswith("weight"):
                bias = tensors.get(name) if name in biases else None
                if bias is not None:
                    check_floats(name, bias, list(biases[name].shape))
                values[name] = None if bias is None else bias.float()
                continue
            codes, step = tensors[name], tensors[f"{name}_q"]
            check_codes(name, codes)
            if list(codes.shape) != shapes[name]:
                raise ValueError(f"{name} must have shape {shapes[name]}, got {list(codes.shape)}")
            known = step.dtype == torch.float64 and list(step.shape) == [2]
            if not known or not bool(step.isfinite().all()) or abs(float(step[1])) > 128:
                raise ValueError(f"{name}_q must be a scale and a zero point, got {step.tolist()}")
            scale, zero = step.tolist()
            values[name] = torch._make_per_tensor_quantized_tensor(codes, scale, int(zero))
        if about["kind"].endswith("Cell"):
            parts = {
                k: {n: v for n, v in values.items() if n.startswith(k)} for k in ("weight", "bias")
            }
            made.set_weight_bias(parts)
        else:
            made.set_weight_bias(values)
    return made.eval()  # type: ignore[no-any-return]


def _check_sizes(options: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Check that a file has the weights of the layer that it describes, before that is made.

    Raises:
        ValueError: It has others.
    """
    weights = [k for k in tensors if k.startswith("weight") and not k.endswith("_q")]
    first = next((tensors[k] for k in ("weight_ih_l0", "weight_ih") if k in tensors), None)
    fits = first is not None and first.dim() == 2
    for name, most in (
        ("input_size", first.shape[1] if first is not None and fits else 0),
        ("hidden_size", first.shape[0] if first is not None and fits else 0),
        ("num_layers", len(weights) // 2),
    ):
        value = options.get(name, 1)
        if type(value) is not int or not 0 < value <= most:
            raise ValueError(f"{name} must be a number of 1 to {most}, got {value}")
    for name in ("bias", "batch_first", "bidirectional"):
        if type(options.get(name, False)) is not bool:
            raise ValueError(f"{name} must be true or false, got {options[name]}")
