# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding as the references compute it, and the checks the rotary ops share.

Kernels repeat these checks with the same text (``rotary_glue.h``).
"""

from __future__ import annotations

import math

import torch

from ipex_core.library.checks import (
    acc,
    check_device,
    check_dtype,
    check_dtype_in,
    check_like,
    check_tensor,
)
from ipex_core.library.spec import check

__all__ = [
    "MAX_ROTARY_DIM",
    "check_heads",
    "check_position_ids",
    "check_rotary_dim",
    "check_tables",
    "rotate",
    "table_rows",
]

Tensor = torch.Tensor

MAX_ROTARY_DIM = 1024
_INDEX = (torch.int32, torch.int64)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, half_split: bool) -> Tensor:
    """Rotate the first ``rotary_dim`` elements of the last dimension of ``x``.

    Args:
        x: ``[..., heads, head_dim]``.
        cos: ``[..., rotary_dim]`` or ``[..., rotary_dim / 2]``, without the dimension of heads.
        sin: Like ``cos``.
        rotary_dim: How many elements are rotated; the others are copied.
        half_split: Element ``i`` pairs with ``i + rotary_dim / 2``, else ``2 i`` with ``2 i + 1``.
    """

    def spread(table: Tensor) -> Tensor:
        table = acc(table).unsqueeze(-2)
        if table.shape[-1] == rotary_dim:
            return table
        return torch.cat([table, table], -1) if half_split else table.repeat_interleave(2, -1)

    y = acc(x[..., :rotary_dim])
    if half_split:
        one, two = y.chunk(2, -1)
        turned = torch.cat([-two, one], -1)
    else:
        turned = torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2)
    y = y * spread(cos) + turned * spread(sin)
    return torch.cat([y.to(x.dtype), x[..., rotary_dim:]], -1)


def table_rows(op: str, table: Tensor, query: Tensor, position_ids: Tensor | None) -> Tensor:
    """Return the row of ``table`` for each token, shaped ``[tokens, C]`` or ``[batch, positions, C]``.

    Reads the position ids, so references call it and fakes do not.
    """
    flat = table.reshape(-1, table.shape[-1])
    lead = query.shape[:-2]
    if position_ids is None:
        rows = flat if flat.shape[0] == lead.numel() else flat[: lead[-1]]
    else:
        for position in position_ids.flatten().tolist():
            check(
                0 <= position < flat.shape[0],
                op,
                "position_ids",
                f"hold rows of sin and cos in [0, {flat.shape[0]})",
                position,
            )
        rows = flat[position_ids.flatten().long()]
    if rows.shape[0] == lead.numel():
        return rows.reshape(*lead, rows.shape[-1])
    return rows.expand(*lead, -1)


def check_rotary_dim(op: str, name: str, rotary_dim: int, head_dim: int) -> None:
    """Check that a part of a head is rotated that consists of pairs."""
    most = min(head_dim, MAX_ROTARY_DIM)
    check(
        2 <= rotary_dim <= most and rotary_dim % 2 == 0,
        op,
        name,
        f"be an even number between 2 and {most}",
        rotary_dim,
    )


def check_heads(op: str, query: Tensor, key: Tensor) -> None:
    """Check query and key: 3-D or 4-D, alike but for the number of heads."""
    check_tensor(op, "query", query)
    check(
        query.dim() in (3, 4),
        op,
        "query",
        "be 3-D [tokens, heads, head_dim] or 4-D [batch, positions, heads, head_dim]",
        f"{query.dim()}-D",
    )
    check_device(op, "key", key, query, "query")
    check_dtype(op, "key", key, query, "query")
    check(
        key.dim() == query.dim()
        and key.shape[:-2] == query.shape[:-2]
        and key.shape[-1] == query.shape[-1],
        op,
        "key",
        f"have the shape of query but for the number of heads = {list(query.shape)}",
        list(key.shape),
    )


def check_tables(op: str, sin: Tensor, cos: Tensor, query: Tensor, rotary_dim: int) -> None:
    """Check the tables of sines and cosines."""
    check_device(op, "sin", sin, query, "query")
    check_dtype(op, "sin", sin, query, "query", or_float32=True)
    check(
        sin.dim() >= 2 and sin.shape[-1] in (rotary_dim, rotary_dim // 2),
        op,
        "sin",
        f"have at least 2 dimensions, the last of size {rotary_dim} or {rotary_dim // 2}",
        list(sin.shape),
    )
    check_like(op, "cos", cos, sin, "sin")


def check_position_ids(op: str, query: Tensor, sin: Tensor, position_ids: Tensor | None) -> None:
    """Check that there is a row of the tables for each token."""
    lead = query.shape[:-2]
    # torch.Size.numel() would turn symbolic sizes into numbers.
    tokens, positions = math.prod(lead), lead[-1]
    if position_ids is None:
        rows = math.prod(sin.shape[:-1])
        check(
            rows == tokens or rows >= positions,
            op,
            "sin",
            f"have a row for each of {tokens} tokens or {positions} positions",
            f"{rows} rows",
        )
        return
    check_device(op, "position_ids", position_ids, query, "query")
    check_dtype_in(op, "position_ids", position_ids, *_INDEX)
    check(
        position_ids.numel() in (tokens, positions),
        op,
        "position_ids",
        f"have an entry for each of {tokens} tokens or {positions} positions",
        list(position_ids.shape),
    )
