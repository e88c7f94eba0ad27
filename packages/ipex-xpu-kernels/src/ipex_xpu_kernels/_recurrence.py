# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers over texts that lie back to back, on the kernels of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ipex_core.library.spec import FLOATS
from ipex_xpu_kernels._launch import dense, kernel, launch_columns

Tensor = torch.Tensor


def _either(x: Tensor, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return ``x`` as the kernels take it: in the dtype of the rows, or else in float32."""
    return (x, None) if x.dtype == like.dtype else (None, x)


def _texts(*numbers: Tensor) -> list[Tensor]:
    return [one.contiguous() for one in numbers]


def _result(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _conv(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    query_starts: Tensor,
    lengths: Tensor,
    slots: Tensor,
) -> Tensor | None:
    if x.dtype not in FLOATS:
        return None
    x, y, texts = dense(x), _result(x), lengths.shape[0]
    width, columns = weight.shape
    places = _texts(query_starts, lengths, slots)
    launch_columns(
        *(kernel("text_convolution", x.dtype), x, x.shape[0], columns, y, x, conv_state),
        *(weight.float().contiguous(), None if bias is None else bias.float().contiguous()),
        *(*places, texts, columns, width, x.stride(0), activation == "silu"),
    )
    history = conv_state, x, *places, columns, width - 1, x.stride(0)
    launch_columns(kernel("text_history", x.dtype), x, texts, columns, *history)
    return y


def _delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    slots: Tensor,
    scale: float,
    normalize: bool = True,
    lowest: float = 0.0,
) -> Tensor | None:
    if v.dtype not in FLOATS:
        return None
    q, k, v = dense(q), dense(k), dense(v)
    a = dense(a) if a.dim() == 3 else a
    y, (_, heads, keys, values) = _result(v), state.shape
    launch_columns(
        *(kernel("delta_rule", v.dtype), v, lengths.shape[0] * heads, values, y, q, k, v),
        *(*_either(a, v), *_either(b, v), A.contiguous(), dt_bias.contiguous(), state),
        *(*_texts(query_starts, lengths, slots), heads, heads // q.shape[1], keys, values),
        *(n for one in (q, k, v, a, b) for n in one.stride()[:2]),
        *(float(scale), normalize, float(lowest), a.dim() == 3),
    )
    return y


def _ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    slots: Tensor,
    dt_min: float = 0.0,
    dt_max: float = 1e30,
) -> Tensor | None:
    if x.dtype not in FLOATS:
        return None
    x, B, C = dense(x), dense(B), dense(C)
    y, (_, heads, states, size) = _result(x), state.shape
    most = torch.finfo(torch.float32).max
    launch_columns(
        *(kernel("ssd_scan", x.dtype), x, lengths.shape[0] * heads, size, y, x, *_either(dt, x)),
        *(A.contiguous(), B, C, D.contiguous(), dt_bias.contiguous(), state),
        *(*_texts(query_starts, lengths, slots), heads, heads // B.shape[1], states, size),
        *(n for one in (x, dt, B, C) for n in one.stride()[:2]),
        *(float(min(dt_min, most)), float(min(dt_max, most))),
    )
    return y


def _selective(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    slots: Tensor,
) -> Tensor | None:
    if x.dtype not in FLOATS:
        return None
    x, dt, B, C = dense(x), dense(dt), dense(B), dense(C)
    y, (_, states, size) = _result(x), state.shape
    launch_columns(
        *(kernel("selective_scan", x.dtype), x, lengths.shape[0], size, y, x, *_either(dt, x)),
        *(A.contiguous(), B, C, D.contiguous(), dt_bias.contiguous(), state),
        *(*_texts(query_starts, lengths, slots), states, size),
        *(one.stride(0) for one in (x, dt, B, C)),
    )
    return y


def _wkv(
    x: Tensor,
    k: Tensor,
    decay: Tensor,
    first: Tensor,
    state: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    slots: Tensor,
) -> Tensor | None:
    if x.dtype not in FLOATS:
        return None
    x, k = dense(x), dense(k)
    y, size = _result(x), x.shape[1]
    launch_columns(
        *(kernel("wkv_scan", x.dtype), x, lengths.shape[0], size, y, x, *_either(k, x)),
        *(decay.contiguous(), first.contiguous(), state),
        *(*_texts(query_starts, lengths, slots), size, x.stride(0), k.stride(0)),
    )
    return y


#: Name of an op -> what runs for tensors of the device; None: as it is defined.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_varlen": _conv,
    "gated_delta_rule": _delta,
    "selective_scan_varlen": _selective,
    "ssd_scan": _ssd,
    "wkv_scan": _wkv,
}
