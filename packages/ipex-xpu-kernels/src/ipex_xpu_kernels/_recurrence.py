# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers over texts that lie back to back, on the kernels of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.spec import FLOATS, Arguments
from ipex_xpu_kernels._launch import dense, kernel, launch_columns


def _either(x: Tensor, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return ``x`` as the kernels take it: in the dtype of the rows, or else in float32."""
    return (x, None) if x.dtype == like.dtype else (None, x)


def _texts(a: Arguments) -> list[Tensor]:
    return [one.contiguous() for one in (a.query_starts, a.lengths, a.slots)]


def _scan(name: str, x: Tensor, texts: int, columns: int, *arguments: object) -> Tensor:
    """Start a kernel with an item for each column of each text, or of each head of it; return its result."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch_columns(kernel(name, x.dtype), x, texts, columns, y, x, *arguments)
    return y


def _conv(a: Arguments) -> Tensor | None:
    if a.x.dtype not in FLOATS:
        return None
    x, texts, places = dense(a.x), a.lengths.shape[0], _texts(a)
    width, columns = a.weight.shape
    y = _scan(
        *("text_convolution", x, x.shape[0], columns, a.conv_state, a.weight.float().contiguous()),
        *(None if a.bias is None else a.bias.float().contiguous(), *places),
        *(texts, columns, width, x.stride(0), a.activation == "silu"),
    )
    history = a.conv_state, x, *places, columns, width - 1, x.stride(0)
    launch_columns(kernel("text_history", x.dtype), x, texts, columns, *history)
    return y


def _delta(a: Arguments) -> Tensor | None:
    if a.v.dtype not in FLOATS:
        return None
    q, k, v = dense(a.q), dense(a.k), dense(a.v)
    each = a.a.dim() == 3
    step = dense(a.a) if each else a.a
    _, heads, keys, values = a.state.shape
    return _scan(
        *("delta_rule", v, a.lengths.shape[0] * heads, values, q, k, *_either(step, v)),
        *(*_either(a.b, v), a.A.contiguous(), a.dt_bias.contiguous(), a.state, *_texts(a)),
        *(heads, heads // q.shape[1], keys, values),
        *(n for one in (q, k, v, step, a.b) for n in one.stride()[:2]),
        *(float(a.scale), a.normalize, float(a.lowest), each),
    )


def _ssd(a: Arguments) -> Tensor | None:
    if a.x.dtype not in FLOATS:
        return None
    x, B, C = dense(a.x), dense(a.B), dense(a.C)
    (_, heads, states, size), most = a.state.shape, torch.finfo(torch.float32).max
    return _scan(
        *("ssd_scan", x, a.lengths.shape[0] * heads, size, *_either(a.dt, x), a.A.contiguous()),
        *(B, C, a.D.contiguous(), a.dt_bias.contiguous(), a.state, *_texts(a)),
        *(heads, heads // B.shape[1], states, size),
        *(n for one in (x, a.dt, B, C) for n in one.stride()[:2]),
        *(float(min(a.dt_min, most)), float(min(a.dt_max, most))),
    )


def _selective(a: Arguments) -> Tensor | None:
    if a.x.dtype not in FLOATS:
        return None
    x, dt, B, C = dense(a.x), dense(a.dt), dense(a.B), dense(a.C)
    _, states, size = a.state.shape
    return _scan(
        *("selective_scan", x, a.lengths.shape[0], size, *_either(dt, x), a.A.contiguous(), B, C),
        *(a.D.contiguous(), a.dt_bias.contiguous(), a.state, *_texts(a), states, size),
        *(one.stride(0) for one in (x, dt, B, C)),
    )


def _wkv(a: Arguments) -> Tensor | None:
    if a.x.dtype not in FLOATS:
        return None
    x, k = dense(a.x), dense(a.k)
    return _scan(
        *("wkv_scan", x, a.lengths.shape[0], x.shape[1], *_either(k, x), a.decay.contiguous()),
        *(a.first.contiguous(), a.state, *_texts(a), x.shape[1], x.stride(0), k.stride(0)),
    )


#: Name of an op -> what runs for tensors of the device; None: as it is defined.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_varlen": _conv,
    "gated_delta_rule": _delta,
    "selective_scan_varlen": _selective,
    "ssd_scan": _ssd,
    "wkv_scan": _wkv,
}
