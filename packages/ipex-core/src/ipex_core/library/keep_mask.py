# SPDX-License-Identifier: Apache-2.0
"""Which elements dropout keeps: a function of seed, stream, row and column, so that no mask need be stored.

Kernels compute the same bits; ``ipex/keep_mask.h`` is this file in C++.
"""

from __future__ import annotations

import torch

from ipex_core.library.checks import check_device, check_dtype_in
from ipex_core.library.spec import check

__all__ = ["check_drop", "drop"]

Tensor = torch.Tensor

_LOW = 0xFFFFFFFF


def _signed(value: int) -> int:
    """Return the int64 number of the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


_GOLD = _signed(0x9E3779B97F4A7C15)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return 64-bit numbers shifted to the right with zeros from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    """Return 64 mixed bits: the finisher of SplitMix64 (Steele, Lea and Flood, 2014)."""
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _keep(rows: int, columns: int, p: float, seed: Tensor, stream: int) -> Tensor:
    """Return ``[rows, columns]``: which elements stay."""
    device = seed.device
    key = _mix(seed.reshape(()) + _signed((_as_unsigned(_GOLD) * (stream + 1)) % (1 << 64)))
    row = torch.arange(1, rows + 1, device=device)
    keys = _mix(key + row * _GOLD)[:, None]
    # Two rounds of the 32-bit hash with the least bias of Wellons' "hash prospector" (2018).
    x = torch.arange(columns, device=device)[None] ^ (keys & _LOW)
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D + _shifted(keys, 32)) & _LOW
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW
    x = x ^ (x >> 16)
    return x >= int(p * (1 << 32))


def _as_unsigned(value: int) -> int:
    return value % (1 << 64)


def drop(x: Tensor, p: float, seed: Tensor, stream: int) -> Tensor:
    """Return ``x`` with dropped elements 0 and the others divided by ``1 - p``."""
    if p == 0.0 or x.numel() == 0:
        return x
    keep = _keep(x.numel() // x.shape[-1], x.shape[-1], p, seed, stream).view(x.shape)
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros((), dtype=x.dtype, device=x.device))


def check_drop(op: str, p: float, seed: Tensor, stream: int, x: Tensor, of: str = "x") -> None:
    """Check the arguments of ops with dropout."""
    check(0.0 <= p < 1.0, op, "p", "be in [0, 1)", f"{p:g}")
    check_device(op, "seed", seed, x, of)
    check_dtype_in(op, "seed", seed, torch.int64)
    check(seed.numel() == 1, op, "seed", "have one element", seed.numel())
    check(0 <= stream < 1 << 31, op, "stream", "be in [0, 2^31)", stream)
