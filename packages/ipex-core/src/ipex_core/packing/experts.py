# SPDX-License-Identifier: Apache-2.0
"""The packed weights of a mixture of experts, described in plain PyTorch.

The weights of E experts are a ``uint8`` tensor ``[E, bytes]``: row e is the packed weight of expert e, in exactly the
form of a single linear layer's (see `ipex_core.packing.dense`), header included.

The two halves of a gated layer, ``[2 I, H]`` with the gate's rows first, are interleaved in blocks of 32 rows before
packing: gate rows 0..31, up rows 0..31, gate rows 32..63, and so on, I padded to a multiple of 32 with zero rows. Two
neighboring panels then give the gate and the up value of the same 32 features.
"""

from __future__ import annotations

import torch

from ipex_core.packing import dense
from ipex_core.packing.dense import PANEL


def padded(intermediate_size: int) -> int:
    """Return the number of features, rounded up to whole panels."""
    return -(-intermediate_size // PANEL) * PANEL


def interleave(weight: torch.Tensor) -> torch.Tensor:
    """Turn ``[E, 2 I, H]``, gate rows first, into blocks of gate and up rows in turn."""
    experts, rows, columns = weight.shape
    size = padded(rows // 2)
    halves = weight.new_zeros(experts, 2, size, columns)
    halves[:, :, : rows // 2] = weight.view(experts, 2, rows // 2, columns)
    blocks = halves.view(experts, 2, size // PANEL, PANEL, columns).transpose(1, 2)
    return blocks.reshape(experts, 2 * size, columns)


def deinterleave(weight: torch.Tensor, intermediate_size: int) -> torch.Tensor:
    """Undo `interleave`."""
    experts, rows, columns = weight.shape
    blocks = weight.view(experts, rows // (2 * PANEL), 2, PANEL, columns).transpose(1, 2)
    halves = blocks.reshape(experts, 2, rows // 2, columns)[:, :, :intermediate_size]
    return halves.reshape(experts, 2 * intermediate_size, columns)


def packed_shape(
    experts: int, out_features: int, in_features: int, dtype: torch.dtype, gated: bool
) -> tuple[int, int]:
    """Return the shape of the packed form of ``[E, out_features, in_features]``."""
    rows = 2 * padded(out_features // 2) if gated else out_features
    return experts, dense.packed_bytes(rows, in_features, dtype)


def pack(weight: torch.Tensor, gated: bool) -> torch.Tensor:
    """Pack ``[E, N, K]``."""
    rows = interleave(weight) if gated else weight
    return torch.stack([dense.pack(one) for one in rows])


def unpack(
    packed: torch.Tensor, out_features: int, in_features: int, dtype: torch.dtype, gated: bool
) -> torch.Tensor:
    """Return the ``[E, N, K]`` weight of a packed one, exactly as it was."""
    rows = 2 * padded(out_features // 2) if gated else out_features
    plain = torch.stack([dense.unpack(one, rows, in_features, dtype) for one in packed])
    return deinterleave(plain, out_features // 2) if gated else plain
