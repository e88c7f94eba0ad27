# SPDX-License-Identifier: Apache-2.0
"""Linear layers on packed weights of 4 or 8 bits on the kernels of the device; others run as the op is defined."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ipex_core.library.spec import FLOATS, Arguments
from ipex_core.ops.linear import apply_epilogue, weight_rows
from ipex_core.packing import woq
from ipex_core.packing.dense import HEADER_BYTES
from ipex_core.packing.quantize import CODEBOOKS, QWEIGHT_DTYPES
from ipex_core.packing.woq import check_woq_packed
from ipex_xpu_kernels._launch import DTYPES, is_gpu, launch

#: What the kernel calls the dtypes of scales and the kinds of zero points.
_SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e8m0fnu: 4}
_ZEROS = {"none": -1, "float32": 0, "int8": 3}
#: Output features that a work-group has, and the items of a GPU that share one.
_STRIP, _PARTS = 16, 16


@functools.cache
def _numbers(format: str, device: torch.device) -> Tensor | None:
    """Return the number of each code, float32 on the device; None for codes that are whole numbers."""
    if format in ("int4", "int8"):
        return None
    if format in CODEBOOKS:
        return torch.tensor(CODEBOOKS[format], dtype=torch.float32, device=device)
    codes = torch.arange(256, dtype=torch.uint8).view(QWEIGHT_DTYPES[format])
    return codes.float().to(device)


def supported(layout: woq.Layout) -> bool:
    """Return whether the kernels have this order of the codes and these scales."""
    return layout.order == "dot" and layout.scale_dtype in _SCALES


def product(rows: Tensor, packed: Tensor, layout: woq.Layout) -> Tensor:
    """Return ``rows @ weight.T`` in float32.

    Args:
        rows: ``[M, K]``, float32, bfloat16 or float16.
        packed: A packed quantized ``[N, K]`` weight.
        layout: Its layout, which is `supported`.

    Returns:
        ``[M, N]`` float32.
    """
    if layout.permuted:
        rows = rows[:, woq.permutation(packed, layout)]
    missing = layout.blocks * layout.block_k - layout.k
    rows = functional.pad(rows, (0, missing)) if missing else rows.contiguous()
    if rows.data_ptr() % 32:  # a part of another tensor, which a GPU does not read by words
        rows = rows.clone()
    y = rows.new_empty(rows.shape[0], layout.n, dtype=torch.float32)
    scale_bytes, zero_bytes, sum_bytes, _ = layout.parts
    table = _numbers(layout.format, rows.device)
    strips = packed[HEADER_BYTES + layout.permutation_bytes :]
    m = rows.shape[0]
    rows_each = 1 if m == 1 else 8
    kind = "woq_product" if table is None else "woq_table_product"
    nibbles = "true" if layout.block_k == 8 else "false"
    parts = _PARTS if is_gpu(rows) else 1
    launch(
        *(f"{kind}<{DTYPES[rows.dtype]},{nibbles},{rows_each}>", rows),
        *((-(-m // rows_each), -(-layout.n // _STRIP) * _STRIP * parts), (1, _STRIP * parts)),
        *((rows, strips, y) if table is None else (rows, strips, table, y)),
        *(m, layout.n, rows.stride(0), layout.blocks),
        layout.blocks if layout.groups == 1 else layout.group // layout.block_k,
        *(sum(layout.parts), scale_bytes, scale_bytes + zero_bytes + sum_bytes),
        *(_SCALES[layout.scale_dtype], layout.scale_columns, _ZEROS[layout.zeros]),
    )
    return y


def _woq_linear(a: Arguments) -> Tensor | None:
    n = weight_rows(a.out_features, a.gate)
    layout = check_woq_packed(a.op, "packed_weight", a.packed_weight, n, a.x.shape[-1])
    if layout is None or not supported(layout):
        return None
    if a.lowp_mode != "none" or a.x.dtype not in FLOATS:
        return None
    y = product(a.x.reshape(-1, layout.k), a.packed_weight, layout)
    y = y.view(*a.x.shape[:-1], n)
    y = apply_epilogue(
        *(y, a.out_features, a.bias, a.activation, a.mul, a.residual, a.residual2, a.gate)
    )
    return y.to(a.x.dtype)


#: Name of an op -> what runs for tensors of the device; None: as it is defined.
FUNCTIONS: dict[str, Callable[..., Any]] = {"woq_linear": _woq_linear}
