# SPDX-License-Identifier: Apache-2.0
"""One quantized weight, whatever it was made or read from.

In a state dict it is plain tensors, which every file format can hold:

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

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core import woq
from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check
from ipex_core.packing.parameter import PackedWeight, hollow
from ipex_core.packing.quantize import CODEBOOKS, FORMATS, QWEIGHT_DTYPES, unpack_nibbles

#: Groups that the packed format can have.
_SMALLEST, _LARGEST = 16, 256
_BLOCK = 128
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclasses.dataclass(slots=True)
class QuantizedWeight:
    """Codes, scales and zero points of a ``[N, K]`` linear weight.

    A weight is ``scale * (code - zero)`` (int8, int4; without zero points the zero of int4 is 8, of int8 0),
    ``scale * table[code]`` (nf4, fp4) or ``scale * code`` (fp8).

    Attributes:
        format: ``"int8"``, ``"int4"``, ``"nf4"``, ``"fp4"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``.
        in_features: K.
        codes: As `pack_woq_weight` takes them: ``[N, K]``, or ``[N, ceil(K / 2)]`` bytes with the even column in the
            low nibble.
        scales: ``[N, G]``; float32, bfloat16, float16 or float8_e8m0fnu. For fp8 with a group of 128 also one for each
            block of 128 x 128.
        zeros: ``[N, G]``, int8 or float32, or None.
        group_size: Input features that share a scale, or -1 for all.
        g_idx: int32 ``[K]``, the group of each input feature, or None where they follow each other.
        bias: ``[N]`` or None.
        name: The module it belongs to, for messages.
    """

    format: str
    in_features: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group_size: int = -1
    g_idx: Tensor | None = None
    bias: Tensor | None = None
    name: str = ""

    def __post_init__(self) -> None:
        op = self.name or "QuantizedWeight"
        check(self.format in FORMATS, op, "format", f"be one of {', '.join(FORMATS)}", self.format)
        check(self.codes.dim() == 2, op, "codes", "be 2-D", list(self.codes.shape))
        wanted = QWEIGHT_DTYPES[self.format]
        check(self.codes.dtype == wanted, op, "codes", f"have dtype {wanted}", self.codes.dtype)
        k = self.in_features
        check(k > 0, op, "in_features", "be positive", k)
        columns = -(-k // 2) if self.nibbles else k
        shape = list(self.codes.shape)
        check(shape[1] == columns, op, "codes", f"have shape [N, {columns}]", shape)
        expected = [[shape[0], self.groups]]
        if self.format.startswith("fp8") and self.group_size == _BLOCK:
            expected.append([-(-shape[0] // _BLOCK), self.groups])
        text = " or ".join(map(str, expected))
        got = list(self.scales.shape)
        check(got in expected, op, "scales", f"have shape {text}", got)
        text = "have dtype float32, bfloat16, float16 or float8_e8m0fnu"
        check(self.scales.dtype in _SCALES, op, "scales", text, self.scales.dtype)
        check(_finite(self.scales), op, "scales", "be finite", "NaN or infinity")
        if self.zeros is not None:
            zeros = list(self.zeros.shape)
            check(zeros == expected[0], op, "zeros", f"have shape {expected[0]}", zeros)
            known = self.zeros.dtype in (torch.int8, torch.float32)
            check(known, op, "zeros", "have dtype int8 or float32", self.zeros.dtype)
            check(_finite(self.zeros), op, "zeros", "be finite", "NaN or infinity")
        if self.g_idx is not None:
            check(is_integer(self.g_idx), op, "g_idx", "have integers", self.g_idx.dtype)
            check(list(self.g_idx.shape) == [k], op, "g_idx", f"have shape [{k}]", self.g_idx.shape)
            last = self.scales.shape[1] - 1
            lowest, highest = (0, 0) if self.g_idx.is_meta else map(int, self.g_idx.aminmax())
            known = 0 <= lowest <= highest <= last
            check(known, op, "g_idx", f"be in 0..{last}", f"{lowest}..{highest}")
        if self.bias is not None:
            n = shape[0]
            check(list(self.bias.shape) == [n], op, "bias", f"have shape [{n}]", self.bias.shape)

    @property
    def out_features(self) -> int:
        """N."""
        return self.codes.shape[0]

    @property
    def groups(self) -> int:
        """Scales of an output feature; with ``g_idx`` as many as there are."""
        if self.g_idx is not None:
            return self.scales.shape[1]
        return -(-self.in_features // self._group)

    @property
    def nibbles(self) -> bool:
        """Whether a code has 4 bits."""
        return QWEIGHT_DTYPES[self.format] == torch.uint8

    @property
    def _group(self) -> int:
        k = self.in_features
        return k if self.group_size == -1 else min(self.group_size, k)

    def even(self) -> QuantizedWeight:
        """Return the weight with smaller groups, where that makes them all alike and in order; else itself.

        The input features that a rank has of a weight may begin and end within a group.
        """
        if self.g_idx is None or not self.g_idx.numel():
            return self
        steps = self.g_idx[1:] != self.g_idx[:-1]
        starts = (steps.nonzero().flatten() + 1).tolist()
        part = packable_group(math.gcd(*starts, 256), 257) if starts else -1
        if part is None:
            return self
        columns = self.g_idx[:: self.in_features if part == -1 else part].long()
        zeros = None if self.zeros is None else self.zeros[:, columns]
        scales = _columns(self.scales, columns)
        return dataclasses.replace(self, scales=scales, zeros=zeros, group_size=part, g_idx=None)

    def not_packable(self) -> str | None:
        """Return why the packed format cannot hold this weight, or None."""
        if packable_group(self._group, self.in_features) is None:
            if self._group < _SMALLEST:
                return f"groups of {self.group_size} features are smaller than {_SMALLEST}"
            return (
                f"groups of {self.group_size} features cannot be divided into groups of a multiple of 8,"
                f" {_SMALLEST} or more"
            )
        if self.g_idx is not None:
            wanted = torch.arange(self.in_features) // self._group
            counts = self.g_idx.sort().values.long()
            if self.scales.shape[1] * self._group < self.in_features or not bool(
                torch.equal(counts, wanted)
            ):
                return "the groups of g_idx have different numbers of features"
        return None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the ``[N, K]`` float weight, computed in float32."""
        k = self.in_features
        if self.nibbles:
            codes = unpack_nibbles(self.codes, k)
            if self.format in CODEBOOKS:
                values = torch.tensor(CODEBOOKS[self.format])[codes.int()]
            else:
                values = codes.float() - (8 if self.zeros is None else 0)
        else:
            values = self.codes.float()
        if self.g_idx is not None:
            group = self.g_idx.long()
        else:
            group = torch.arange(k) // self._group
        if self.zeros is not None:
            values -= self.zeros.float()[:, group]
        scales = float_scales(self.scales)
        if scales.shape[0] != self.out_features:
            scales = scales.repeat_interleave(_BLOCK, dim=0)[: self.out_features]
        return values.mul_(scales[:, group]).to(dtype)

    def pack(self, order: str = "dot") -> Tensor:
        """Return the weight packed for ``torch.ops.ipex.woq_linear``.

        Args:
            order: ``"dot"``, or ``"vnni"`` for ``lowp_mode="int8"``.

        Raises:
            OpArgumentError: It cannot be packed (see `not_packable`), or not in this order.
        """
        op = self.name or "pack"
        reason = self.not_packable()
        if reason is not None:
            raise OpArgumentError(
                f"{op}: weight must fit the packed format, got one that does not: {reason}; quantize it with other"
                " groups, or dequantize it for a torch.nn.Linear"
            )
        scales, zeros, size = self._packable_groups()
        g_idx = self.g_idx
        if g_idx is not None and size not in (self._group, -1):
            g_idx = _split_groups(g_idx, size)
        if order == "vnni":
            floats = self.format.startswith("fp8")
            wanted = "be NONE, FP16 or BF16 for fp8 weights"
            check(not floats, op, "lowp_mode", wanted, "INT8")
            zeros = _as_int8(op, zeros)
        packed: Tensor = torch.ops.ipex.pack_woq_weight(
            self.codes,
            _bytes(scales),
            zeros,
            self.format,
            self.in_features,
            size,
            g_idx if size != -1 else None,
            order,
        )
        return packed

    def _packable_groups(self) -> tuple[Tensor, Tensor | None, int]:
        """Return scales, zeros and the size of groups that the packed format has."""
        scales, zeros = self.scales, self.zeros
        if scales.shape[0] != self.out_features:  # a scale for each block of 128 x 128
            return scales, zeros, self.group_size
        if self.group_size == -1 or self._group >= self.in_features:
            return scales, zeros, -1
        part = packable_group(self._group, self.in_features)
        assert part is not None
        if part != self._group:  # larger groups are several that have one scale
            times, count = self._group // part, -(-self.in_features // part)
            scales = _repeat(scales, times, count)
            zeros = None if zeros is None else _repeat(zeros, times, count)
        return scales, zeros, part


def _finite(values: Tensor) -> bool:
    """Return whether there is no NaN and no infinity; of exponents, 255 is NaN."""
    if values.is_meta or values.dtype == torch.int8:
        return True
    if values.dtype == torch.float8_e8m0fnu:
        return not bool((values.view(torch.uint8) == 255).any())
    return bool(values.isfinite().all())


def _as_int8(op: str, zeros: Tensor | None) -> Tensor | None:
    if zeros is None or zeros.dtype == torch.int8:
        return zeros
    whole = zeros.round().clamp(-128, 127).to(torch.int8)
    integers = bool(torch.equal(whole.to(zeros.dtype), zeros))
    check(integers, op, "zeros", "be integers from -128 to 127 for lowp_mode INT8", "others")
    return whole


def is_integer(values: Tensor) -> bool:
    """Return whether a tensor has integers, which truth values are not."""
    return values.dtype in _INTEGERS


def movable(values: Tensor) -> Tensor:
    """Return numbers as torch can index and copy them, which it cannot do with all 8-bit floats: as their bytes."""
    return values.view(torch.uint8) if values.dtype.itemsize == 1 else values


def _columns(values: Tensor, index: Tensor) -> Tensor:
    return movable(values)[:, index].view(values.dtype)


def _repeat(values: Tensor, times: int, count: int) -> Tensor:
    wide = movable(values).repeat_interleave(times, dim=1)[:, :count]
    return wide.contiguous().view(values.dtype)


def _split_groups(g_idx: Tensor, part: int) -> Tensor:
    """Return ``g_idx`` for groups cut into parts, the features of a group in the order they come in."""
    order = torch.argsort(g_idx, stable=True)
    place = torch.arange(g_idx.numel(), dtype=torch.int32)
    split = torch.empty_like(g_idx)
    # Groups are of one size, a multiple of the part's, so places in sorted order tell the part.
    split[order] = place // part
    return split


def _bytes(scales: Tensor) -> Tensor:
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales


def float_scales(scales: Tensor) -> Tensor:
    """Return scales as float32; bytes are exponents (e8m0)."""
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.float()


def packable_group(group: int, in_features: int) -> int | None:
    """Return the largest group of the packed format that divides ``group``, or None."""
    if group >= in_features:
        return in_features
    for part in range(min(group, _LARGEST) // 8 * 8, _SMALLEST - 1, -8):
        if group % part == 0:
            return part
    return None


def unpack(packed: Tensor) -> QuantizedWeight:
    """Return the quantized weight that a packed one holds."""
    layout = woq.describe(packed)
    codes, scales, zeros, g_idx = woq.unpack(packed)
    group = -1 if layout.group == layout.k else layout.group
    return QuantizedWeight(layout.format, layout.k, codes, scales, zeros, group, g_idx)


# --- the float weight of a layer --------------------------------------------------------------------------------------


class _FloatWeight(PackedWeight):
    """Has shape and dtype of the float weight, and is dequantized when somebody computes with it."""

    layer: ShowsFloatWeight

    @staticmethod
    def __new__(cls, layer: ShowsFloatWeight) -> _FloatWeight:  # type: ignore[override]
        """Show the weight of a layer."""
        self: _FloatWeight = hollow(cls, layer.weight_shape(), layer.float_dtype)
        self.layer, self.form = layer, "int8"
        return self

    def _plain(self) -> Tensor:
        return self.layer.dequantize()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _KEEP and type(args[0]) is _FloatWeight:
            return _FloatWeight(args[0].layer)
        return super().__torch_dispatch__(func, types, args, kwargs)


_KEEP = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class ShowsFloatWeight(nn.Module):
    """A module whose buffer ``weight`` has codes, and whose attribute ``weight`` is the float weight.

    Models cast activations to its dtype, as CLIP does with images.
    """

    #: The dtype that ``weight`` shows; it follows casts of the model.
    float_dtype: torch.dtype = torch.float32

    @property
    def weight(self) -> Tensor:
        """The float weight; its values are computed when they are read."""
        # Graphs leave out what is not computed with, and cannot make the proxy.
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return self.dequantize()
        return _FloatWeight(self)

    def weight_shape(self) -> torch.Size:
        """Return the shape of the float weight."""
        raise NotImplementedError

    def dequantize(self) -> Tensor:
        """Return the float weight that the codes stand for."""
        raise NotImplementedError


# --- in a state dict --------------------------------------------------------------------------------------------------


_VERSION = 1
_NEEDED = ("qweight", "scales", "woq")
_OPTIONAL = ("zeros", "g_idx", "bias")


def saved_tensors(weight: QuantizedWeight, prefix: str) -> dict[str, Tensor]:
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


def absent_keys(state_dict: Mapping[str, Tensor], prefix: str) -> list[str]:
    """Return the keys that are needed and not there."""
    return [prefix + key for key in _NEEDED if prefix + key not in state_dict]


def unknown_keys(state_dict: Mapping[str, Tensor], prefix: str) -> list[str]:
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


def saved_weight(state_dict: Mapping[str, Tensor], prefix: str) -> QuantizedWeight:
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
