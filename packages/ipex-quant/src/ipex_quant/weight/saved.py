# SPDX-License-Identifier: Apache-2.0
"""What a quantized layer is in a state dict: plain tensors, which every file format can hold.

=========  ==================================================================================================
key        tensor
=========  ==================================================================================================
qweight    codes: int8 ``[N, K]``, uint8 ``[N, ceil(K / 2)]`` (even column in the low nibble) or an 8-bit float
scales     ``[N, G]``; powers of two as bytes (uint8)
zeros      ``[N, G]`` int8 or float32, if there are zero points
g_idx      int32 ``[K]``, if the input features are not grouped in their order
woq        int64 ``[4]``: version of this table (1), id of the format, K, group size or -1
bias       ``[N]``, if there is one
=========  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ipex_core.library.spec import check
from ipex_core.packing.quantize import FORMATS
from ipex_quant.weight.tensor import QuantizedWeight

__all__ = ["absent", "tensors", "unexpected", "weight"]

Tensor = torch.Tensor

_VERSION = 1
_NEEDED = ("qweight", "scales", "woq")
_OPTIONAL = ("zeros", "g_idx", "bias")


def tensors(weight: QuantizedWeight, prefix: str) -> dict[str, Tensor]:
    """Return the entries of a weight, without its bias."""
    scales = weight.scales
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    about = [_VERSION, FORMATS[weight.format], weight.in_features, weight.group_size]
    found = {"qweight": weight.codes, "scales": scales, "woq": torch.tensor(about)}
    if weight.zeros is not None:
        found["zeros"] = weight.zeros
    if weight.g_idx is not None:
        found["g_idx"] = weight.g_idx
    return {prefix + key: value for key, value in found.items()}


def absent(state_dict: Mapping[str, Tensor], prefix: str) -> list[str]:
    """Return the keys that are needed and not there."""
    return [prefix + key for key in _NEEDED if prefix + key not in state_dict]


def unexpected(state_dict: Mapping[str, Tensor], prefix: str) -> list[str]:
    """Return the keys that belong to this layer and that it does not know."""
    known = {prefix + key for key in (*_NEEDED, *_OPTIONAL)}
    value = state_dict.get(f"{prefix}weight")
    if value is not None and not value.numel():  # says in files that the layer is quantized
        known.add(f"{prefix}weight")
    return [
        key
        for key in state_dict
        if key.startswith(prefix) and "." not in key[len(prefix) :] and key not in known
    ]


def weight(state_dict: Mapping[str, Tensor], prefix: str) -> QuantizedWeight:
    """Return the weight that the entries describe, with its bias.

    Raises:
        OpArgumentError: They do not fit together.
    """
    name = prefix.removesuffix(".")
    about = state_dict[prefix + "woq"]
    key = prefix + "woq"
    plain = about.dtype == torch.int64 and list(about.shape) == [4]
    check(plain, key, "woq", "be int64 of shape [4]", f"{about.dtype} {list(about.shape)}")
    version, number, k, group = about.tolist()
    check(version == _VERSION, key, "version", f"be {_VERSION}", version)
    names = {value: form for form, value in FORMATS.items()}
    check(number in names, key, "format", f"be one of {sorted(names)}", number)
    scales = state_dict[prefix + "scales"]
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    parts = (state_dict.get(prefix + part) for part in ("zeros", "g_idx", "bias"))
    zeros, g_idx, bias = parts
    return QuantizedWeight(
        names[number],
        k,
        state_dict[prefix + "qweight"],
        scales,
        zeros,
        group,
        g_idx,
        bias,
        name,
    )
