# SPDX-License-Identifier: Apache-2.0
"""The packed format of int8 weights for integer products, described in plain PyTorch.

A packed weight is a 1-D ``uint8`` tensor: the 64-byte header of `ipex_core.packing.dense`, the sum of each output
feature's weights (int32, padded to a multiple of 32 features), then panels of 32 output features, ``[K/4][32][4]``:
four neighbors along K lie side by side, the operand order of the 8-bit dot-product and tile instructions. N and K are
padded with zeros. The format is the same at every ISA level.
"""

from __future__ import annotations

import torch

from ipex_core.library.spec import check
from ipex_core.packing import dense
from ipex_core.packing.dense import HEADER_BYTES, PANEL, check_bytes

FORMAT = 16
#: Larger K could leave the range of int32 sums.
MAX_DEPTH = 65536


def _padded(out_features: int, in_features: int) -> tuple[int, int]:
    return -(-out_features // PANEL) * PANEL, -(-in_features // 4) * 4


def packed_bytes(out_features: int, in_features: int) -> int:
    """Return the size of a packed weight in bytes."""
    columns, rows = _padded(out_features, in_features)
    return HEADER_BYTES + 4 * columns + columns * rows


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Pack an int8 ``[N, K]`` weight."""
    n, k = weight.shape
    columns, rows = _padded(n, k)
    padded = weight.new_zeros(columns, rows, dtype=torch.int8)
    padded[:n, :k] = weight
    panels = padded.view(columns // PANEL, PANEL, rows // 4, 4).transpose(1, 2)
    sums = padded.sum(1, dtype=torch.int32)
    parts = (sums, panels.contiguous().view(-1))
    head = dense.header(FORMAT, n, k).to(weight.device)
    return torch.cat([head, *(part.view(torch.uint8) for part in parts)])


def unpack(packed: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """Return the int8 ``[N, K]`` weight of a packed tensor, exactly as it was."""
    columns, rows = _padded(out_features, in_features)
    panels = packed[HEADER_BYTES + 4 * columns :].view(torch.int8)
    panels = panels.view(columns // PANEL, rows // 4, PANEL, 4).transpose(1, 2)
    return panels.reshape(columns, rows)[:out_features, :in_features].contiguous()


def check_packed(
    op: str, name: str, packed: torch.Tensor, out_features: int, in_features: int
) -> None:
    """Check that a tensor has the dtype and size of a packed ``[out_features, in_features]`` weight."""
    what = f"a weight of shape [{out_features}, {in_features}] packed by pack_int8_weight"
    check_bytes(op, name, packed, packed_bytes(out_features, in_features), what)


def check_header(
    op: str, name: str, packed: torch.Tensor, out_features: int, in_features: int
) -> None:
    """Check that a packed tensor holds the weight it should; tensors without data pass."""
    if type(packed) is not torch.Tensor or packed.is_meta:
        return
    fits = dense.read_header(packed) == (FORMAT, out_features, in_features)
    text = f"be a weight of shape [{out_features}, {in_features}] packed by pack_int8_weight"
    check(fits, op, name, text, dense.header_text(packed))
