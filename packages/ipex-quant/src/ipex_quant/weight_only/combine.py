# SPDX-License-Identifier: Apache-2.0
"""Several quantized linear layers that read one input, as one packed weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ipex_core import woq
from ipex_core.library.spec import check
from ipex_quant.weight.tensor import QuantizedWeight, float_scales, movable
from ipex_quant.weight_only.linear import WoqLinearModule

__all__ = ["combine_linears"]

Tensor = torch.Tensor


def combine_linears(
    linears: Sequence[WoqLinearModule],
    order: Tensor | None = None,
    gate: bool = False,
    *,
    codes_order: str | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """Return the packed weight and the bias of layers put side by side, exactly as the single ones compute.

    Args:
        linears: The layers; all have a weight and the same ``in_features``.
        order: int64 ``[sum of out_features]``: output i of the result is output ``order[i]`` of the row of layers. None
            for their own order.
        gate: The two layers, or the halves of one, are a gate and an up projection: rows come in the order that ops
            with an argument ``gate`` take (`ipex_core.woq.interleave_gate_up`). Not together with ``order``.
        codes_order: Order of the codes in memory, ``"dot"`` or ``"vnni"``; None for the one that the modes of the
            layers need.

    Returns:
        ``(packed_weight, bias)`` for ``torch.ops.ipex.woq_linear`` with the modes of the layers, or None where they
        differ in format, groups, order of input features or modes, and so have no common packed form.

    Raises:
        OpArgumentError: An argument is not as described.

    Example:
        >>> import torch
        >>> from ipex_quant import combine_linears, quantize_linears, woq_qconfig
        >>> layers = torch.nn.ModuleList(torch.nn.Linear(64, 32) for _ in range(3))
        >>> _ = quantize_linears(layers, woq_qconfig(weight_dtype=2, group_size=32))
        >>> packed, bias = combine_linears(list(layers))
        >>> x = torch.randn(2, 64)
        >>> y = torch.ops.ipex.woq_linear(x, packed, 96, bias)
        >>> torch.allclose(y, torch.cat([layer(x) for layer in layers], dim=1), atol=1e-5)
        True
    """
    op = "combine_linears"
    check(len(linears) > 0, op, "linears", "not be empty", "none")
    check(order is None or not gate, op, "order", "be None with gate", "a tensor")
    if len({(m.in_features, m.modes, m.group_size) for m in linears}) != 1:
        return None
    parts = [m.quantized_weight() for m in linears]
    if len({p.format for p in parts}) != 1 or not _same_g_idx(parts):
        return None
    rows = sum(p.out_features for p in parts)
    alone = len(parts) == 1 and order is None and not gate
    codes = _cat([p.codes for p in parts])
    scales = parts[0].scales if alone else _scales(parts)
    zeros = _zeros(parts)
    bias = _bias(parts)
    if gate:
        check(rows % 2 == 0, op, "linears", "have an even number of outputs", rows)
        codes, scales = _interleave(codes, rows // 2), _interleave(scales, rows // 2)
        zeros = None if zeros is None else _interleave(zeros, rows // 2)
        bias = None if bias is None else _interleave(bias, rows // 2)
    elif order is not None:
        check(list(order.shape) == [rows], op, "order", f"have shape [{rows}]", list(order.shape))
        codes, scales = _take(codes, order), _take(scales, order)
        zeros = None if zeros is None else zeros[order]
        bias = None if bias is None else bias[order]
    first = parts[0]
    weight = QuantizedWeight(
        first.format,
        first.in_features,
        codes,
        scales,
        zeros,
        first.group_size,
        first.g_idx,
        bias,
        op,
    )
    needed = "vnni" if linears[0].modes[0] == "int8" else "dot"
    return weight.pack(codes_order or needed), bias


def _same_g_idx(parts: Sequence[QuantizedWeight]) -> bool:
    first = parts[0].g_idx
    if first is None:
        return all(p.g_idx is None for p in parts)
    return all(p.g_idx is not None and torch.equal(p.g_idx, first) for p in parts)


def _cat(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([movable(v) for v in values]).view(values[0].dtype)


def _take(values: Tensor, order: Tensor) -> Tensor:
    return movable(values)[order].view(values.dtype)


def _interleave(values: Tensor, rows: int) -> Tensor:
    raw = movable(values)
    return woq.interleave_gate_up(raw[:rows], raw[rows:]).view(values.dtype)


def _scales(parts: Sequence[QuantizedWeight]) -> Tensor:
    """Return a scale for each output feature and group."""
    rows = [_row_scales(p) for p in parts]
    if len({r.dtype for r in rows}) > 1:
        rows = [float_scales(r) for r in rows]
    return _cat(rows)


def _row_scales(part: QuantizedWeight) -> Tensor:
    if part.scales.shape[0] == part.out_features:
        return part.scales
    # One for each 128 x 128 weights; rows that move leave their block.
    return part.scales.repeat_interleave(128, dim=0)[: part.out_features]


def _zeros(parts: Sequence[QuantizedWeight]) -> Tensor | None:
    if all(p.zeros is None for p in parts):
        return None
    usual = 8 if parts[0].format == "int4" else 0
    shapes = [(p.out_features, p.groups) for p in parts]
    zeros = [
        torch.full(shape, usual, dtype=torch.int8) if p.zeros is None else p.zeros
        for p, shape in zip(parts, shapes, strict=True)
    ]
    if len({z.dtype for z in zeros}) > 1:
        zeros = [z.float() for z in zeros]
    return torch.cat(zeros)


def _bias(parts: Sequence[QuantizedWeight]) -> Tensor | None:
    biases = [p.bias for p in parts]
    if all(b is None for b in biases):
        return None
    filled = [
        torch.zeros(p.out_features) if b is None else b.detach()
        for p, b in zip(parts, biases, strict=True)
    ]
    dtypes = {b.dtype for b in biases if b is not None}
    common = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return torch.cat([b.to(common) for b in filled])
