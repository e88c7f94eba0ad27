# SPDX-License-Identifier: Apache-2.0
"""Weights that bitsandbytes has quantized, read into `QuantizedWeight`.

4 bits: ``weight`` is one stream of codes over all rows, the first in the high nibble; ``weight.absmax`` has a scale for
each block of it, as floats, or as indices of ``weight.nested_quant_map`` in blocks of their own; ``weight.quant_map``
are the 16 values, and ``weight.quant_state.bitsandbytes__nf4`` (or ``fp4``) is JSON in bytes. 8 bits: int8 ``weight``
and ``SCB``, the largest magnitude of each row.

The values of bitsandbytes' FP4 are 1 / 12 of 0, 1 / 16, 8, 12, 4, 6, 2, 3 and their negatives. e2m1 lacks one of
them, so such a weight becomes fp8_e4m3, which has them all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.spec import FLOATS, check
from ipex_core.packing.quantize import NF4_VALUES, pack_nibbles
from ipex_quant.weight.tensor import QuantizedWeight

_STATES = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
#: What belongs to a layer besides its weight and bias.
PARTS = (
    *("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    *(*_STATES.values(), "SCB", "weight_format"),
)
#: The largest float32.
_LARGEST = torch.finfo(torch.float32).max
#: Values of FP4 times 12.
_FP4 = (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)


def _need(parts: Mapping[str, Tensor | None], name: str, part: str) -> Tensor:
    value = parts.get(part)
    check(value is not None, "read_linear", "state_dict", f"have {name}.{part}", "none")
    assert value is not None
    return value


def bnb_weight(parts: Mapping[str, Tensor | None], name: str) -> QuantizedWeight:
    """Return the weight of a layer from its tensors, by their names within the layer.

    Raises:
        OpArgumentError: A tensor is missing or does not fit the others; the message names its key.
    """
    weight, bias = _need(parts, name, "weight"), parts.get("bias")
    largest = parts.get("SCB")
    if largest is not None:
        fits = weight.dtype == torch.int8 and weight.dim() == 2
        text = "be int8 [N, K]"
        check(fits, f"{name}.weight", "weight", text, f"{weight.dtype} {list(weight.shape)}")
        shape = list(largest.shape)
        fits = shape == [weight.shape[0]]
        check(fits, f"{name}.SCB", "SCB", f"have shape [{weight.shape[0]}]", shape)
        scales = (_floats(largest, f"{name}.SCB") / 127).unsqueeze(1)
        return QuantizedWeight("int8", weight.shape[1], weight, scales, None, -1, None, bias, name)
    kind = next((kind for kind, part in _STATES.items() if parts.get(part) is not None), None)
    check(kind is not None, "read_linear", "state_dict", f"have {name}.{_STATES['nf4']}", "none")
    assert kind is not None
    return _four_bits(parts, kind, name, weight, bias)


def _state(parts: Mapping[str, Tensor | None], kind: str, name: str) -> dict[str, Any]:
    data = _need(parts, name, _STATES[kind])
    key = f"{name}.{_STATES[kind]}"
    try:
        found = json.loads(bytes(data.to(torch.uint8).flatten().tolist()).decode())
    except (ValueError, RecursionError) as error:
        found = str(error)
    check(isinstance(found, dict), key, "quant_state", "be a JSON object", found)
    shape, size = found.get("shape"), found.get("blocksize")
    known = (
        isinstance(shape, list) and len(shape) == 2 and all(type(s) is int and s > 0 for s in shape)
    )
    check(known, key, "shape", "be two positive numbers", shape)
    check(type(size) is int and size > 0, key, "blocksize", "be positive", size)
    got = found.get("quant_type", kind)
    check(got == kind, key, "quant_type", f"be {kind}", got)
    return found  # type: ignore[no-any-return]


def _absmax(parts: Mapping[str, Tensor | None], state: Mapping[str, Any], name: str) -> Tensor:
    """Return the float scale of each block."""
    absmax = _need(parts, name, "weight.absmax").flatten()
    key = f"{name}.weight.absmax"
    if absmax.is_floating_point():
        return _floats(absmax, key)
    check(absmax.dtype == torch.uint8, key, "absmax", "be floats or uint8", absmax.dtype)
    outer = _floats(_need(parts, name, "weight.nested_absmax"), f"{name}.weight.nested_absmax")
    table = _floats(
        _need(parts, name, "weight.nested_quant_map"), f"{name}.weight.nested_quant_map"
    )
    size, offset = state.get("nested_blocksize", 256), state.get("nested_offset", 0.0)
    check(type(size) is int and size > 0, key, "nested_blocksize", "be positive", size)
    known = type(offset) in (int, float) and abs(offset) < _LARGEST
    check(known, key, "nested_offset", "be a finite number", offset)
    fits = table.numel() == 256
    check(fits, f"{name}.weight.nested_quant_map", "it", "have 256 values", table.numel())
    count = -(-absmax.numel() // size)
    fits = outer.numel() == count
    check(fits, f"{name}.weight.nested_absmax", "it", f"have {count} values", outer.numel())
    # By index: a size from a file may be any number.
    spread = outer[torch.arange(absmax.numel()) // min(size, absmax.numel())]
    return table[absmax.int()] * spread + float(offset)


def _floats(values: Tensor, key: str) -> Tensor:
    """Return scales, or numbers that they are made of, as float32."""
    fits = values.dtype in FLOATS
    what = "have dtype float32, bfloat16 or float16"
    check(fits, key, key.rpartition(".")[2], what, values.dtype)
    check(
        bool(values.isfinite().all()), key, key.rpartition(".")[2], "be finite", "NaN or infinity"
    )
    return values.flatten().float()


def _four_bits(
    parts: Mapping[str, Tensor | None], kind: str, name: str, weight: Tensor, bias: Tensor | None
) -> QuantizedWeight:
    state = _state(parts, kind, name)
    (n, k), size = state["shape"], state["blocksize"]
    key = f"{name}.weight"
    stored = weight.contiguous().view(torch.uint8).flatten()
    fits = stored.numel() == -(-n * k // 2)
    check(fits, key, "weight", f"have {-(-n * k // 2)} bytes", stored.numel())
    codes = torch.stack((stored >> 4, stored & 15), dim=-1).flatten()[: n * k].view(n, k)
    blocks = _absmax(parts, state, name)
    count = -(-n * k // size)
    check(
        blocks.numel() == count, f"{key}.absmax", "absmax", f"have {count} values", blocks.numel()
    )
    # A block goes on in the next row unless it divides K; groups that are parts of blocks do not.
    group = math.gcd(size, k)
    starts = torch.arange(n).unsqueeze(1) * k + torch.arange(k // group) * group
    scales = blocks[starts // size]
    expected = torch.tensor(NF4_VALUES) if kind == "nf4" else torch.tensor(_FP4) / 12
    table = parts.get("weight.quant_map")
    if table is not None:
        table = _floats(table, f"{key}.quant_map")
        usual = list(table.shape) == [16] and torch.allclose(table, expected, atol=1e-4)
        check(usual, f"{key}.quant_map", "quant_map", f"be the values of {kind}", table.tolist())
    if group == k:
        group = -1
    if kind == "nf4":
        return QuantizedWeight("nf4", k, pack_nibbles(codes), scales, None, group, None, bias, name)
    values = torch.tensor(_FP4).to(torch.float8_e4m3fn).view(torch.uint8)[codes.int()]
    values = values.view(torch.float8_e4m3fn)
    return QuantizedWeight("fp8_e4m3", k, values, scales / 12, None, group, None, bias, name)
