# SPDX-License-Identifier: Apache-2.0
"""Linear layers on 8-bit integers on the kernel of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ipex_core.library.spec import FLOATS, Arguments
from ipex_core.ops.int8_linear import check_values, result_dtype
from ipex_core.ops.linear import apply_epilogue, weight_rows
from ipex_core.ops.quantize import check_one, choose
from ipex_core.packing import int8
from ipex_core.packing.dense import HEADER_BYTES, PANEL
from ipex_xpu_kernels._launch import DTYPES, launch, launch_columns

_CODES = {torch.int8: "signedchar", torch.uint8: "unsignedchar"}
_ROWS = 8  # of a work-group


def product(
    x: Tensor, packed: Tensor, n: int, scale: Tensor, zero: Tensor | None, weight_scale: Tensor
) -> Tensor:
    """Return ``(x - zero) @ weight.T * scale * weight_scale`` in float32, of exact sums.

    Args:
        x: ``[M, K]`` codes, int8 or uint8.
        packed: A packed int8 ``[n, K]`` weight.
        n: Its rows.
        scale: float32, one or M elements.
        zero: int32, as many, or None for 0.
        weight_scale: float32, one or n elements.

    Returns:
        ``[M, n]`` float32.
    """
    m, k = x.shape
    words = -(-k // 4)
    x = functional.pad(x, (0, 4 * words - k)) if k % 4 else x.contiguous()
    if x.data_ptr() % 4:  # a part of another tensor
        x = x.clone()
    y = x.new_empty(m, n, dtype=torch.float32)
    columns = -(-n // PANEL) * PANEL
    sums = packed[HEADER_BYTES:]
    launch(
        *(f"int8_product<{_CODES[x.dtype]}>", x, (-(-m // _ROWS), columns), (1, PANEL)),
        *(x, sums, sums[4 * columns :], y, scale.contiguous()),
        *(None if zero is None else zero.contiguous(), weight_scale.contiguous()),
        *(m, n, words, int(scale.numel() > 1), int(weight_scale.numel() > 1)),
    )
    return y


def codes(x: Tensor, scale: Tensor, zero: Tensor | None, symmetric: bool) -> Tensor:
    """Return the codes of `ipex_core.ops.quantize.codes`, for one scale or one for each row of ``x``."""
    x = x.contiguous()
    columns = x.shape[-1] if x.dim() else 1
    dtype = torch.int8 if symmetric else torch.uint8
    y = torch.empty_like(x, dtype=dtype)
    launch_columns(
        *(
            f"int8_codes<{DTYPES[x.dtype]},{_CODES[dtype]}>",
            x,
            x.numel() // max(columns, 1),
            columns,
        ),
        *(x, y, scale.contiguous(), None if zero is None else zero.contiguous()),
        *(columns, int(scale.numel() > 1)),
    )
    return y


def _quantize_per_tensor(a: Arguments) -> tuple[Tensor, Tensor, Tensor] | None:
    if a.scale is None or a.x.dtype not in FLOATS:
        return None
    check_one(a.scale, a.zero)
    new_zero = torch.zeros((), dtype=torch.int32, device=a.x.device) if a.zero is None else a.zero
    found = codes(a.x, a.scale, a.zero, a.symmetric)
    return found, a.scale.float().clone().reshape(()), new_zero.clone().reshape(())


def _int8_linear(a: Arguments) -> Tensor:
    x: Tensor = a.x
    n = weight_rows(a.out_features, a.gate)
    int8.check_header(a.op, "packed_weight", a.packed_weight, n, x.shape[-1])
    scale, zero = a.x_scale, a.x_zero
    check_values(x, scale, zero)
    q = x
    if x.dtype not in _CODES:
        if scale is None:
            scale, zero = choose(x, a.symmetric, -1 if a.act_quant == "per_token" else None)
        q = codes(x, scale, zero, a.symmetric)
    y = product(q.reshape(-1, x.shape[-1]), a.packed_weight, n, scale, zero, a.weight_scale)
    y = y.view(*x.shape[:-1], n)
    y = apply_epilogue(
        *(y, a.out_features, a.bias, a.activation, a.mul, a.residual, a.residual2, a.gate)
    )
    dtype = result_dtype(x, a.dtype)
    if dtype not in _CODES:
        return y.to(dtype)
    step = torch.tensor(a.output_scale, dtype=torch.float32, device=x.device)
    shift = torch.tensor(a.output_zero, dtype=torch.int32, device=x.device)
    return codes(y, step, shift, dtype == torch.int8)


#: Name of an op -> what runs for tensors of the device; None: as it is defined.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int8_linear": _int8_linear,
    "quantize_per_tensor": _quantize_per_tensor,
}
