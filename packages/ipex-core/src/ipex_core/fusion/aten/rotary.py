# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of queries and keys as Hugging Face models write it.

``x * cos + cat(-x[..., half:], x[..., :half]) * sin`` for a query and a key ``[B, H, S, D]`` with the same tables
``[B or 1, 1, S, D]``. Models that rotate the first elements of a head only (GPT-NeoX, Phi) cut them off before and put
the rest behind them afterwards; the op does both.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from ipex_core.fusion.aten import (
    DEVICES,
    Context,
    binary,
    describe,
    is_call,
    same,
    shape_of,
    val,
)
from ipex_core.kernels.policy import prefer_ipex_rotary
from ipex_core.library.spec import FLOATS
from ipex_core.util.symbolic import hints

__all__ = ["fuse_rotary"]

aten = torch.ops.aten
ipex = torch.ops.ipex

_OP = "ipex::rotary_embedding_functional"


@dataclasses.dataclass
class _Rotation:
    root: fx.Node
    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    interior: list[fx.Node]
    size: int


def fuse_rotary(ctx: Context) -> None:
    """Replace pairs of rotations by ``ipex::rotary_embedding_functional``."""
    waiting: dict[tuple[fx.Node, fx.Node], _Rotation] = {}
    for node in ctx.nodes(aten.cat.default):
        match = _match(node)
        if match is None:
            continue
        first = waiting.pop((match.cos, match.sin), None)
        if first is None or not _partners(first, match):
            waiting[match.cos, match.sin] = match
            continue
        _replace(ctx, first, match)
    for match in waiting.values():
        ctx.reject("rotary", match.root, _OP, "no key is rotated with the same tables")


def _match(cat: fx.Node) -> _Rotation | None:
    parts = cat.args[0]
    dim = cat.args[1] if len(cat.args) > 1 else 0
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or len(cat.users) != 1:
        return None
    high, low = parts
    if not is_call(high, aten.neg.default) or not is_call(low, aten.slice.Tensor):
        return None
    assert isinstance(high, fx.Node) and isinstance(low, fx.Node)
    upper, x = high.args[0], low.args[0]
    shape = shape_of(x)
    if not is_call(upper, aten.slice.Tensor) or shape is None or len(shape) != 4:
        return None
    assert isinstance(upper, fx.Node)
    size = shape[3]
    if upper.args[0] is not x or not isinstance(size, int) or size % 2 or dim not in (-1, 3):
        return None
    half = size // 2
    halves = [_range(low, size), _range(upper, size)]
    if halves != [(0, half), (half, size)]:
        return None
    product = next(iter(cat.users))
    pair = binary(product, aten.mul.Tensor)
    if pair is None or len(product.users) != 1:
        return None
    sin = pair[1] if pair[0] is cat else pair[0]
    root = next(iter(product.users))
    total = binary(root, aten.add.Tensor)
    if total is None:
        return None
    straight = total[1] if total[0] is product else total[0]
    pair = binary(straight, aten.mul.Tensor)
    if pair is None or x not in pair:
        return None
    cos = pair[1] if pair[0] is x else pair[0]
    if not all(isinstance(n, fx.Node) for n in (sin, cos)):
        return None
    cos, sin = _table(cos), _table(sin)
    match = _Rotation(root, x, cos, sin, [cat, high, low, upper, product, straight], size)  # type: ignore[arg-type]
    _widen(match)
    return match


def _widen(match: _Rotation) -> None:
    """Extend the rotation of the first elements of heads to the copy of the others behind them, if that is all."""
    root, part = match.root, match.x
    whole: Any = part.args[0] if is_call(part, aten.slice.Tensor) else None
    joined = next(iter(root.users), None)
    shape = shape_of(whole)
    if (
        shape is None
        or len(shape) != 4
        or not is_call(joined, aten.cat.default)
        or len(root.users) != 1
    ):
        return
    assert joined is not None
    parts, size = joined.args[0], shape[3]
    dim = joined.args[1] if len(joined.args) > 1 else 0
    if (
        not isinstance(parts, (list, tuple))
        or len(parts) != 2
        or parts[0] is not root
        or dim not in (-1, 3)
    ):
        return
    rest: Any = parts[1]
    if (
        not is_call(rest, aten.slice.Tensor)
        or rest.args[0] is not whole
        or not isinstance(size, int)
    ):
        return
    if _range(part, size) != (0, match.size) or _range(rest, size) != (match.size, size):
        return
    match.interior += [root, rest] + ([part] if _only_for(part, match.interior) else [])
    match.root, match.x = joined, whole


def _only_for(node: fx.Node, users: list[fx.Node]) -> bool:
    return all(user in users for user in node.users)


def _table(node: fx.Node) -> fx.Node:
    """Return a table ``[B, S, D]`` before it was given a dimension for the heads."""
    if is_call(node, aten.unsqueeze.default) and node.args[1] == 1:
        inner = node.args[0]
        assert isinstance(inner, fx.Node)
        return inner
    return node


def _range(node: fx.Node, size: int) -> tuple[int, int] | None:
    dim, start, end, *step = (*node.args[1:], None, None, None)[:4]
    if dim not in (-1, 3) or step[0] not in (None, 1):
        return None
    start, end = start or 0, size if end is None else end
    if not isinstance(start, int) or not isinstance(end, int):
        return None
    return start, min(end, size)


def _partners(a: _Rotation, b: _Rotation) -> bool:
    left, right = shape_of(a.x), shape_of(b.x)
    assert left is not None and right is not None
    return a.size == b.size and same((left[0], *left[2:]), (right[0], *right[2:]))


def _replace(ctx: Context, first: _Rotation, second: _Rotation) -> None:
    reason = _reason(ctx, first, second)
    early, late = sorted((first.root, second.root))
    inputs = [n for match in (first, second) for n in (match.x, match.cos, match.sin)]
    root = early if all(n < early for n in inputs) else late
    for match in (first, second):
        blocker = ctx.outside_user(match.interior, match.root)
        if reason is None and blocker is not None:
            reason = f"{blocker.name} inside the pattern has another user"
    if reason is None and root is late and any(user < late for user in early.users):
        reason = "one of the results is needed before the other can be computed"
    if reason is not None:
        ctx.reject("rotary", first.root, _OP, reason)
        return
    shape = shape_of(first.x)
    assert shape is not None
    heads_last = [
        ctx.call(root, aten.permute.default, (m.x, [0, 2, 1, 3])) for m in (first, second)
    ]
    tables = (first.sin, first.cos)
    both = ctx.call(
        root,
        ipex.rotary_embedding_functional.default,
        (*heads_last, *tables, first.size, True),
    )
    parts = [ctx.call(root, operator.getitem, (both, index)) for index in (0, 1)]
    backs = [ctx.call(root, aten.permute.default, (part, [0, 2, 1, 3])) for part in parts]
    for index, (match, back) in enumerate(zip((first, second), backs, strict=True)):
        match.root.replace_all_uses_with(back)
        ctx.fused("rotary", match.root, both, "query" if index == 0 else "key")
        ctx.drop([match.root, *match.interior])


def _reason(ctx: Context, first: _Rotation, second: _Rotation) -> str | None:
    query, key, cos, sin = (val(n) for n in (first.x, second.x, first.cos, first.sin))
    if query is None or key is None or cos is None or sin is None:
        return "shapes are unknown"
    if query.device.type not in DEVICES or query.dtype not in FLOATS or key.dtype != query.dtype:
        return f"query and key are {describe(first.x)} and {describe(second.x)}"
    batch, _, length, size = query.shape
    for table in (cos, sin):
        if table.dim() != 3 or not same(table.shape[1:], (length, first.size)):
            return f"the tables are {describe(first.cos)}"
        if not same(table.shape[:1], (1,)) and not same(table.shape[:1], (batch,)):
            return f"the tables are {describe(first.cos)}"
        if table.dtype not in (query.dtype, torch.float32):
            return f"the tables are {describe(first.cos)}"
    if not same(cos.shape, sin.shape):
        return "the tables differ in shape"
    expected = val(first.root)
    if expected is None or expected.dtype != query.dtype:
        return f"the result is {describe(first.root)}, the query {describe(first.x)}"
    if size > 1024:
        return "heads are larger than 1024"
    if not ctx.kernels("rotary_embedding_functional"):
        return "no kernel package implements rotary_embedding_functional"
    if not ctx.always and not prefer_ipex_rotary(hints(query.shape), query.dtype):
        return f"Inductor's own code is as fast at {describe(first.x)}"
    return None
