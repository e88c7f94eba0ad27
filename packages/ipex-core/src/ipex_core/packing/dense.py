# SPDX-License-Identifier: Apache-2.0
"""The packed format of dense linear weights, described in plain PyTorch.

A packed weight is a 1-D ``uint8`` tensor: a 64-byte header, then panels of 32 output features. Inside a panel the
weights lie in the order in which a kernel needs them: ``[K][32]`` for float32 and float16, ``[K/2][32][2]`` for
bfloat16 (pairs along K, the operand order of the dot-product and tile instructions). N is padded to a multiple of 32
and, for bfloat16, K to a multiple of 2, with zeros. The format is the same at every ISA level, so packed weights are
portable.
"""

from __future__ import annotations

import struct

import torch

from ipex_core.library.checks import read_once
from ipex_core.library.spec import check, dtype_name

HEADER_BYTES = 64
PANEL = 32
_MAGIC = 0x57585049  # "IPXW", little endian
_VERSION = 1
#: Format ids, part of the binary format.
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: A float32 weight that was transformed for a convolution by minimal filtering; no other op takes it.
WINOGRAD = 32
_HEADER = struct.Struct("<IIIIqq")  # magic, version, format, panel width, N, K


def _inner(dtype: torch.dtype) -> int:
    """Return how many neighbors along K lie side by side."""
    return 2 if dtype == torch.bfloat16 else 1


def packed_bytes(out_features: int, in_features: int, dtype: torch.dtype) -> int:
    """Return the size of a packed weight in bytes."""
    inner = _inner(dtype)
    columns = -(-out_features // PANEL) * PANEL
    rows = -(-in_features // inner) * inner
    return HEADER_BYTES + columns * rows * dtype.itemsize


def header(layout: int, n: int, k: int) -> torch.Tensor:
    """Return the header of a packed ``[n, k]`` weight of this format."""
    fields = _HEADER.pack(_MAGIC, _VERSION, layout, PANEL, n, k)
    head = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    head[: len(fields)] = torch.tensor(list(fields), dtype=torch.uint8)
    return head


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Pack a ``[N, K]`` weight."""
    n, k = weight.shape
    inner = _inner(weight.dtype)
    columns, rows = -(-n // PANEL) * PANEL, -(-k // inner) * inner
    padded = weight.new_zeros(columns, rows)
    padded[:n, :k] = weight
    panels = padded.view(columns // PANEL, PANEL, rows // inner, inner).transpose(1, 2)
    head = header(FORMATS[weight.dtype], n, k).to(weight.device)
    return torch.cat([head, panels.contiguous().view(-1).view(torch.uint8)])


def unpack(
    packed: torch.Tensor, out_features: int, in_features: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the ``[N, K]`` weight of a packed tensor, exactly as it was."""
    inner = _inner(dtype)
    columns = -(-out_features // PANEL) * PANEL
    rows = -(-in_features // inner) * inner
    # A copy puts the payload on an address that is aligned for the dtype.
    panels = packed[HEADER_BYTES:].clone().view(dtype)
    panels = panels.view(columns // PANEL, rows // inner, PANEL, inner).transpose(1, 2)
    return panels.reshape(columns, rows)[:out_features, :in_features].contiguous()


def interleave_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Put the rows of two weights (or two biases) of one shape into the order that gated ops expect.

    Args:
        gate: ``[N, K]`` or ``[N]``.
        up: Likewise.

    Returns:
        ``[2 * N', ...]`` with N' = N rounded up to a multiple of 32: 32 rows of ``gate``, 32 rows of ``up`` and so on;
        rows of zeros fill the last blocks.

    Example:
        >>> interleave_gate_up(torch.zeros(40), torch.ones(40)).view(4, 32).sum(1)
        tensor([ 0., 32.,  0.,  8.])
    """
    fits = gate.shape == up.shape
    check(fits, "interleave_gate_up", "up", f"have shape {list(gate.shape)}", list(up.shape))
    check(gate.dim() >= 1, "interleave_gate_up", "gate", "have at least 1 dimension(s)", "0-D")
    n = gate.shape[0]
    blocks = -(-n // PANEL)
    both = gate.new_zeros(2, blocks * PANEL, *gate.shape[1:])
    both[0, :n] = gate
    both[1, :n] = up
    parted = both.view(2, blocks, PANEL, *gate.shape[1:])
    return parted.transpose(0, 1).reshape(2 * blocks * PANEL, *gate.shape[1:])


def deinterleave_gate_up(
    weight: torch.Tensor, n: int, dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate and up, ``n`` rows each: the inverse of `interleave_gate_up` along ``dim``.

    Example:
        >>> both = interleave_gate_up(torch.zeros(40), torch.ones(40))
        >>> [part.shape[0] for part in deinterleave_gate_up(both, 40)]
        [40, 40]
    """
    at = dim % weight.dim()
    parted = weight.unflatten(at, (-1, 2, PANEL))
    gate, up = (parted.select(at + 1, i).flatten(at, at + 1).narrow(at, 0, n) for i in (0, 1))
    return gate, up


def read_header(packed: torch.Tensor) -> tuple[int, int, int] | None:
    """Return ``(format id, N, K)`` of a packed tensor, or None if it is not one."""
    return read_once(packed, _read_header)


def _read_header(packed: torch.Tensor) -> tuple[int, int, int] | None:
    if packed.dim() != 1 or packed.dtype != torch.uint8 or packed.numel() < HEADER_BYTES:
        return None
    magic, version, layout, panel, n, k = _HEADER.unpack(bytes(packed[: _HEADER.size].tolist()))
    if magic != _MAGIC or version != _VERSION or panel != PANEL:
        return None
    return layout, n, k


def check_packed(
    op: str,
    name: str,
    packed: torch.Tensor,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
) -> None:
    """Check that a tensor has the dtype and size of a packed ``[out_features, in_features]`` weight."""
    kind = dtype_name(dtype)
    what = f"a {kind} weight of shape [{out_features}, {in_features}] packed by pack_linear_weight"
    check_bytes(op, name, packed, packed_bytes(out_features, in_features, dtype), what)


def check_bytes(op: str, name: str, packed: torch.Tensor, size: int, what: str) -> None:
    """Check that a tensor has the dtype and size of something packed."""
    bytes_in_a_row = packed.dtype == torch.uint8 and packed.dim() == 1 and packed.is_contiguous()
    fits = bytes_in_a_row and packed.shape[0] == size
    check(fits, op, name, f"be {what} ({size} bytes)", bytes_text(packed))


def bytes_text(packed: torch.Tensor) -> str:
    """Return what a message says of a tensor that is not the packed weight it should be: ``"uint8 [64]"``."""
    text = f"{dtype_name(packed.dtype)} {list(packed.shape)}"
    return text if packed.is_contiguous() else f"{text} that is not contiguous"


def header_text(packed: torch.Tensor) -> str:
    """Return what a message says of the header of a tensor; the native kernels say the same."""
    found = read_header(packed)
    if found is None:
        return "a tensor without the header of a packed weight"
    layout, n, k = found
    names = {layout: dtype_name(dtype) for dtype, layout in FORMATS.items()} | {
        WINOGRAD: "transformed"
    }
    return f"the header of a {names.get(layout, 'quantized')} weight of shape [{n}, {k}]"


def check_header(
    op: str,
    name: str,
    packed: torch.Tensor,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
) -> None:
    """Check that a packed tensor holds the weight it should; equal sizes do not make equal formats.

    Only the data tell, so tensors without data (fake tensors during a trace) pass.
    """
    if type(packed) is not torch.Tensor or packed.is_meta:
        return
    found = read_header(packed)
    check(
        found == (FORMATS[dtype], out_features, in_features),
        op,
        name,
        f"be a {dtype_name(dtype)} weight of shape [{out_features}, {in_features}]"
        " packed by pack_linear_weight",
        header_text(packed),
    )
