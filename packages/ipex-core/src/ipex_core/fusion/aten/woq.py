# SPDX-License-Identifier: Apache-2.0
"""Linear layers on constant int8 and int4 weights, in the spellings of torch and torchao, become ``ipex::woq_linear``.

* ``aten::_weight_int8pack_mm`` and ``aten::_weight_int4pack_mm_for_cpu``.
* ``(x @ q.T.to(dtype)) * scale``, as torchao's ``Int8Tensor`` computes with one scale per output feature.
* ``x @ (q.to(dtype) * scale).T``, with one scale per output feature or per group of input features.

The weight is packed by an op in the graph, as `linear` does it. Without a constant weight nothing is replaced.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, fx

from ipex_core.fusion.aten import (
    CASTS,
    DEVICES,
    Context,
    binary,
    describe,
    is_call,
    same,
    shape_of,
    static,
    val,
)
from ipex_core.fusion.aten.linear import VIEWS, unflattened
from ipex_core.library.spec import FLOATS

aten = torch.ops.aten
ipex = torch.ops.ipex

_OP = "ipex::woq_linear"
_SWAPS = (aten.permute.default, aten.t.default, aten.transpose.int)
#: Dtypes that hold every int8, beside the floating ones.
_INTEGERS = (torch.int16, torch.int32, torch.int64)
#: Rows of the unit matrix that are multiplied at once to read packed codes.
_CHUNK = 256

_library = torch.library.Library("ipex_core", "FRAGMENT")
_library.define("pack_int8_rows(Tensor codes, Tensor scales) -> Tensor")
_library.define("pack_int4_rows(Tensor packed, Tensor scales_and_zeros, int group) -> Tensor")


def _pack_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """Pack ``[N, K]`` codes with ``[N, G]`` scales."""
    n, k = codes.shape
    scales = scales.reshape(n, -1).contiguous()
    group = k // scales.shape[1]
    packed: Tensor = ipex.pack_woq_weight(codes.contiguous(), scales, None, "int8", k, group)
    return packed


def _pack_int4(packed: Tensor, scales_and_zeros: Tensor, group: int) -> Tensor:
    """Pack what ``aten::_convert_weight_to_int4pack_for_cpu`` has packed, with its scales and zeros ``[G, N, 2]``.

    The order of the codes depends on the CPU. A product of the unit matrix with scales of 1 and zeros of 0 gives the
    codes less 8 in every order.
    """
    k = scales_and_zeros.shape[0] * group
    plain = torch.zeros_like(scales_and_zeros)
    plain[..., 0] = 1
    unit = torch.eye(k, dtype=plain.dtype)
    multiply = aten._weight_int4pack_mm_for_cpu
    columns = [multiply(unit[i : i + _CHUNK], packed, group, plain) for i in range(0, k, _CHUNK)]
    codes = (torch.cat(columns).t() + 8).to(torch.uint8)
    scales, added = (scales_and_zeros[..., i].t().float().contiguous() for i in (0, 1))
    # A group of equal numbers may have the scale 0 and be all zero point: here one step of the size of that.
    equal = scales == 0
    codes = torch.where(equal.repeat_interleave(group, 1), 9, codes)
    zeros = torch.where(equal, 8.0, 8 - added / scales)
    scales = torch.where(equal, added, scales)
    nibbles = codes[:, ::2] | (codes[:, 1::2] << 4)
    result: Tensor = ipex.pack_woq_weight(nibbles, scales, zeros, "int4", k, group)
    return result


def _fake_packed(codes: Tensor, *rest: Any) -> Tensor:
    return codes.new_empty(64 + codes.numel(), dtype=torch.uint8)  # the length is not read


_library.impl("pack_int8_rows", _pack_int8, "CompositeExplicitAutograd")
_library.impl("pack_int4_rows", _pack_int4, "CompositeExplicitAutograd")
torch.library.register_fake("ipex_core::pack_int8_rows", _fake_packed, lib=_library)
torch.library.register_fake("ipex_core::pack_int4_rows", _fake_packed, lib=_library)


@dataclasses.dataclass
class _Match:
    root: fx.Node
    interior: list[fx.Node]
    x: fx.Node
    codes: fx.Node
    scales: fx.Node
    bias: Any
    text: str
    group: int = 0


def fuse_woq(ctx: Context) -> None:
    """Replace products with constant quantized weights by ``ipex::woq_linear``."""
    for node in ctx.nodes(aten._weight_int8pack_mm.default):
        x, codes, scales = node.args
        _replace(ctx, _Match(node, [], x, codes, scales, None, "_weight_int8pack_mm"))  # type: ignore[arg-type]
    for node in ctx.nodes(aten._weight_int4pack_mm_for_cpu.default):
        x, codes, group, scales = node.args
        text = "_weight_int4pack_mm_for_cpu"
        _replace(ctx, _Match(node, [], x, codes, scales, None, text, group))  # type: ignore[arg-type]
    for node in ctx.nodes(aten.mm.default, aten.addmm.default):
        match = _scaled_product(node) or _scaled_weight(node)
        if match is not None:
            _replace(ctx, match)


def _operands(node: fx.Node) -> tuple[Any, Any, Any] | None:
    if node.target is aten.mm.default:
        return (None, *node.args)  # type: ignore[return-value]
    return None if node.kwargs else node.args  # type: ignore[return-value]


def _is_codes(node: Any) -> bool:
    value = val(node)
    return value is not None and value.dtype == torch.int8 and value.dim() == 2


def _is_cast(node: Any, *exact: torch.dtype) -> bool:
    """Return whether a node converts to a floating dtype, or to one of ``exact``."""
    value = val(node)
    return is_call(node, *CASTS) and value is not None and value.dtype in (*FLOATS, *exact)


def _swapped(node: Any) -> Any:
    """Return what a 2-D tensor is the transpose of, or None."""
    if not is_call(node, *_SWAPS) or (
        node.target is aten.permute.default and node.args[1] != [1, 0]
    ):
        return None
    return node.args[0]


def _scaled_product(node: fx.Node) -> _Match | None:
    """Match ``(x @ q.T.to(dtype)) * scale``."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    pair = binary(user, aten.mul.Tensor)
    if node.target is not aten.mm.default or user is None or pair is None:
        return None
    x, weight = node.args
    steps = 0
    while _is_cast(weight, *_INTEGERS) or _swapped(weight) is not None:
        steps += _swapped(weight) is not None
        weight = weight.args[0]  # type: ignore[union-attr]
    scales = pair[1] if pair[0] is node else pair[0]
    whole = shape_of(node)
    if not _is_codes(weight) or steps != 1 or whole is None or not isinstance(scales, fx.Node):
        return None
    if not same(shape_of(scales), whole[1:]) and not same(shape_of(scales), (1, *whole[1:])):
        return None
    return _Match(user, [node], x, weight, scales, None, "product with int8 codes, scale")  # type: ignore[arg-type]


def _scaled_weight(node: fx.Node) -> _Match | None:
    """Match ``x @ (q.to(dtype) * scale).T``, also with the columns of ``q`` in groups."""
    found = _operands(node)
    weight = _swapped(found[2]) if found is not None else None
    if found is None or weight is None:
        return None
    bias, x, _ = found
    while _is_cast(weight):
        weight = weight.args[0]
    rows = shape_of(weight)
    if is_call(weight, *VIEWS):
        weight = weight.args[0]
    pair = binary(weight, aten.mul.Tensor)
    grouped = shape_of(weight)
    if pair is None or rows is None or grouped is None or len(rows) != 2 or not static(grouped):
        return None
    for codes, scales in (pair, pair[::-1]):
        if not same(shape_of(codes), grouped):
            continue
        while _is_cast(codes, *_INTEGERS) or is_call(codes, *VIEWS):
            codes = codes.args[0]
        if not _is_codes(codes) or not same(shape_of(codes), rows):
            continue
        if same(shape_of(scales), (*grouped[:-1], 1)) and rows[1] % grouped[-1] == 0:
            text = "dequantized int8 weight" + (" in groups" if len(grouped) > 2 else "")
            return _Match(node, [], x, codes, scales, bias, text)
    return None


def _reason(ctx: Context, match: _Match) -> str | None:
    x, codes, scales, out = (val(n) for n in (match.x, match.codes, match.scales, match.root))
    if x is None or codes is None or scales is None or out is None:
        return "shapes are unknown"
    if not ctx.is_constant(match.codes) or not ctx.is_constant(match.scales):
        return "the weight is not frozen"
    if x.device.type not in DEVICES or x.dtype not in FLOATS or out.dtype != x.dtype:
        return f"input and result are {describe(match.x)} and {describe(match.root)}"
    if not static(codes.shape) or not static(scales.shape) or scales.dtype not in FLOATS:
        return f"codes and scales are {describe(match.codes)} and {describe(match.scales)}"
    k = x.shape[-1]
    group = match.group or codes.shape[1] * codes.shape[0] // max(scales.numel(), 1)
    if match.group and not same((k,), (scales.shape[0] * match.group,)):
        return f"groups of {match.group} do not fill the weight"
    if not same((k,), (group,)) and (group % 8 or not 16 <= group <= 256):
        return f"there is no kernel for groups of {group}"
    if match.bias is not None:
        bias = val(match.bias)
        if bias is None or not same(bias.shape, out.shape[-1:]):
            return f"the bias is {describe(match.bias)}"
        if bias.dtype not in (x.dtype, torch.float32):
            return f"the bias is {describe(match.bias)}"
    return None if ctx.kernels("woq_linear") else "no kernel package implements woq_linear"


def _replace(ctx: Context, match: _Match) -> None:
    reason = _reason(ctx, match)
    if reason is not None:
        ctx.reject("woq", match.root, _OP, reason)
        return
    if match.group:
        target = torch.ops.ipex_core.pack_int4_rows.default
        packed = ctx.call(match.root, target, (match.codes, match.scales, match.group))
    else:
        target = torch.ops.ipex_core.pack_int8_rows.default
        packed = ctx.call(match.root, target, (match.codes, match.scales))
    n = val(match.root).shape[-1]  # type: ignore[union-attr]
    root, interior, source = unflattened(match.root, match.x)
    args = (source, packed, n, match.bias)
    interior += match.interior
    if ctx.replace("woq", root, interior, ipex.woq_linear.default, args, match.text) is None:
        ctx.drop([packed])
