# SPDX-License-Identifier: Apache-2.0
"""Normalizations and rotary position embeddings in ATen graphs."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch import fx

from ipex_core.fusion import LAYER_NORM, RMS_NORM, ROTATED, ROTATED_HALVES
from ipex_core.fusion.aten import (
    DEVICES,
    READER,
    VIEWING,
    Context,
    between,
    binary,
    describe,
    is_call,
    narrowed,
    part_of_last,
    same,
    shape_of,
    static,
    uncast,
    val,
)
from ipex_core.kernels.policy import prefer_ipex_norm, prefer_ipex_rotary
from ipex_core.library.spec import FLOATS
from ipex_core.util.symbolic import hints

aten = torch.ops.aten
ipex = torch.ops.ipex


@dataclasses.dataclass
class _Norm:
    root: fx.Node
    source: fx.Node
    interior: list[fx.Node]
    eps: float
    weight: fx.Node | None = None
    bias: fx.Node | None = None
    offset: float = 0.0


def fuse_norms(ctx: Context) -> None:
    """Replace norms by ``ipex::rms_norm`` and ``ipex::layer_norm``."""
    for node in ctx.nodes(aten.rsqrt.default, aten.sqrt.default, aten.pow.Tensor_Scalar):
        product = next(iter(node.users), node)
        for name, description in (("rms_norm", RMS_NORM), ("layer_norm", LAYER_NORM)):
            found = READER.find(description, product)
            if found is not None:
                match = _Norm(product, found["x"], list(found.passed[1:]), found["eps"])
                _replace(ctx, _affine(match, with_bias=name == "layer_norm"), name)
                break


def _replace(ctx: Context, match: _Norm, name: str) -> None:
    if name in ctx.disabled:
        return
    op = f"ipex::{name}"
    source = val(match.source)
    assert source is not None
    reason = None
    if source.device.type not in DEVICES or source.dtype not in FLOATS:
        reason = f"no kernel for {describe(match.source)} on {source.device.type}"
    elif not ctx.kernels(name):
        reason = f"no kernel package implements {name}"
    elif not ctx.always and not _preferred(source):
        reason = f"Inductor's own code is as fast at {describe(match.source)}"
    if reason is not None:
        ctx.reject(name, match.root, op, reason)
        return
    if name == "rms_norm":
        target: Any = ipex.rms_norm.default
        args: tuple[Any, ...] = (match.source, match.weight, match.eps, match.offset)
    else:
        target = ipex.layer_norm.default
        args = (match.source, match.weight, match.bias, match.eps)
    ctx.replace(name, match.root, match.interior, target, args, _text(match))


def _preferred(source: torch.Tensor) -> bool:
    *rows, columns = source.shape
    if not static((columns,)):
        return True
    # A number of rows that varies may become a large one.
    return prefer_ipex_norm(math.prod(rows) if static(rows) else None, columns, source.dtype)


def _text(match: _Norm) -> str:
    parts = ["no weight" if match.weight is None else "weight"]
    if match.offset:
        parts.append(f"offset {match.offset:g}")
    if match.bias is not None:
        parts.append("bias")
    return f"eps {match.eps:g}, " + ", ".join(parts)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _affine(match: _Norm, with_bias: bool) -> _Norm:
    """Follow the result of the normalization over weight, bias and the conversion back."""
    source = val(match.source)
    assert source is not None
    columns = source.shape[-1:]

    def vector(node: Any) -> fx.Node | None:
        value = val(node)
        fits = value is not None and same(value.shape, columns)
        fits = fits and value is not None and value.dtype in (source.dtype, torch.float32)
        return node if fits else None

    def narrow() -> None:
        cast = narrowed(match.root, source.dtype)
        if cast is not None:
            match.interior.append(match.root)
            match.root = cast

    narrow()
    user = _only_user(match.root)
    pair = binary(user, aten.mul.Tensor)
    if user is not None and pair is not None and pair[0] is not pair[1]:
        other = pair[1] if pair[0] is match.root else pair[0]
        weight, shift = other, 0.0
        part = READER.find(("shift", "x", "#by"), uncast(other))
        if part is not None and not with_bias:  # our layer norm has no offset
            weight, shift = part["x"], part["by"]
        weight = vector(uncast(weight))
        if weight is not None:
            match.interior += [match.root, *_steps(other, weight)]
            match.root, match.weight, match.offset = user, weight, shift
            user = _only_user(match.root)
    pair = binary(user, aten.add.Tensor)
    if with_bias and match.weight is not None and user is not None and pair is not None:
        other = pair[1] if pair[0] is match.root else pair[0]
        bias = vector(uncast(other))
        if bias is not None:
            match.interior += [match.root, *between(other, bias)]
            match.root, match.bias = user, bias
    narrow()
    # Constants of their own, a converted weight for instance, may well serve several norms.
    match.interior = [n for n in match.interior if not _is_shared_constant(n, match)]
    return match


def _steps(node: Any, weight: fx.Node) -> list[fx.Node]:
    steps = []
    while node is not weight:
        steps.append(node)
        node = next(a for a in node.args if isinstance(a, fx.Node))
    return steps


def _is_shared_constant(node: fx.Node, match: _Norm) -> bool:
    vectors = [v for v in (match.weight, match.bias) if v is not None]
    shape = shape_of(node)
    return any(same(shape, shape_of(v)) and v in node.all_input_nodes for v in vectors)


def fuse_add_norms(ctx: Context) -> None:
    """Take an addition into the norm that follows it: ``ipex::add_rms_norm``, ``ipex::add_layer_norm``."""
    for node in ctx.nodes(ipex.rms_norm.default, ipex.layer_norm.default):
        total = node.args[0]
        pair = binary(total, aten.add.Tensor)
        rms = node.target is ipex.rms_norm.default
        name = "add_rms_norm" if rms else "add_layer_norm"
        if pair is None or not isinstance(total, fx.Node):
            continue
        a, b = pair
        whole = val(total)
        if any(
            val(x) is None or val(x).dtype != whole.dtype or not same(shape_of(x), shape_of(total))  # type: ignore[union-attr]
            for x in (a, b)
        ):
            ctx.reject("add_norm", node, f"ipex::{name}", "the operands of the addition differ")
            continue
        if not ctx.kernels(name):
            ctx.reject("add_norm", node, f"ipex::{name}", f"no kernel package implements {name}")
            continue
        target = ipex.add_rms_norm.default if rms else ipex.add_layer_norm.default
        both = ctx.call(total, target, (a, b, *node.args[1:])) if _ready(total, node) else None
        if both is None:
            ctx.reject("add_norm", node, f"ipex::{name}", "the weight is computed after the sum")
            continue
        normed = ctx.call(total, operator.getitem, (both, 0))
        summed = ctx.call(total, operator.getitem, (both, 1))
        node.replace_all_uses_with(normed)
        total.replace_all_uses_with(summed)
        ctx.fused("add_norm", node, both, "addition and norm")
        ctx.drop([node, total])
        ctx.drop([summed])


def _ready(total: fx.Node, node: fx.Node) -> bool:
    """Return whether all inputs of a norm exist before the sum it works on is computed."""
    return all(other is total or other < total for other in node.all_input_nodes)


# --- rotary embeddings ------------------------------------------------------------------------------------------------


_OP = "ipex::rotary_embedding_functional"


@dataclasses.dataclass
class _Rotation:
    """A rotation of heads.

    They are ``[batch, heads, length, size]``, ``[batch, length, heads, size]`` or ``[tokens, heads, size]``.

    Attributes:
        root: The result.
        x: What is rotated.
        cos: The table without a dimension for heads; its last size is ``size`` or half of it.
        sin: Like ``cos``.
        interior: The nodes between ``x`` and the result.
        size: How many elements of a head are rotated.
        heads: The dimension of the heads.
    """

    root: fx.Node
    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    interior: list[fx.Node]
    size: int
    heads: int


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
        _rotary_replace(ctx, first, match)
    for match in waiting.values():
        ctx.reject("rotary", match.root, _OP, "no key is rotated with the same tables")


def _match(cat: fx.Node) -> _Rotation | None:
    root: fx.Node | None = cat
    found = READER.find(ROTATED_HALVES, cat)
    if found is None:
        product = _only_user(cat)
        root = None if product is None else _only_user(product)
        found = READER.find(ROTATED, root)
    shape = None if found is None else shape_of(found["x"])
    if root is None or found is None or shape is None or len(shape) not in (3, 4):
        return None
    cos, sin = (_table(found[name], len(shape)) for name in ("cos", "sin"))
    if cos is None or sin is None or cos[1] != sin[1]:
        return None
    passed = list(found.passed[1:])
    match = _Rotation(root, found["x"], cos[0], sin[0], passed, shape[-1], heads=cos[1])
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
        or len(shape) not in (3, 4)
        or not is_call(joined, aten.cat.default)
        or len(root.users) != 1
    ):
        return
    assert joined is not None
    parts, size = joined.args[0], shape[-1]
    dim = joined.args[1] if len(joined.args) > 1 else 0
    if (
        not isinstance(parts, (list, tuple))
        or len(parts) != 2
        or parts[0] is not root
        or dim not in (-1, len(shape) - 1)
    ):
        return
    rest: Any = parts[1]
    if part_of_last(part) != (whole, 0, match.size, part):
        return
    if part_of_last(rest) != (whole, match.size, size, rest):
        return
    inside = all(user in match.interior for user in part.users)
    match.interior += [root, rest, part] if inside else [root, rest]
    match.root, match.x = joined, whole


def _table(node: fx.Node, rank: int) -> tuple[fx.Node, int] | None:
    """Return a table before it was given a dimension for the heads, and that dimension."""
    if is_call(node, aten.unsqueeze.default):
        inner, dim = node.args[:2]
        assert isinstance(inner, fx.Node) and isinstance(dim, int)
        heads = dim % rank
        fits = len(shape_of(inner) or ()) == rank - 1 and heads in (1, rank - 2)
        return (inner, heads) if fits else None
    return (node, 1) if rank == 4 else None


def _partners(a: _Rotation, b: _Rotation) -> bool:
    left, right = (list(shape_of(match.x) or ()) for match in (a, b))
    if a.size != b.size or a.heads != b.heads or len(left) != len(right):
        return False
    del left[a.heads], right[a.heads]
    return same(left, right)


def _rotary_replace(ctx: Context, first: _Rotation, second: _Rotation) -> None:
    reason = _reason(ctx, first, second)
    early, late = sorted((first.root, second.root))
    inputs = [n for match in (first, second) for n in (match.x, match.cos, match.sin)]
    root = early if all(_views_before(n, early) for n in inputs) else late
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
    if root is early:
        for node in inputs:
            _move_before(node, early)
    swapped = first.heads == 1 and len(shape) == 4
    heads_last = [
        ctx.call(root, aten.permute.default, (m.x, [0, 2, 1, 3])) if swapped else m.x
        for m in (first, second)
    ]
    tables = (first.sin, first.cos)
    both = ctx.call(
        root,
        ipex.rotary_embedding_functional.default,
        (*heads_last, *tables, first.size, True),
    )
    parts = [ctx.call(root, operator.getitem, (both, index)) for index in (0, 1)]
    if swapped:
        parts = [ctx.call(root, aten.permute.default, (part, [0, 2, 1, 3])) for part in parts]
    for index, (match, back) in enumerate(zip((first, second), parts, strict=True)):
        match.root.replace_all_uses_with(back)
        ctx.fused("rotary", match.root, both, "query" if index == 0 else "key")
        ctx.drop([match.root, *match.interior])


def _views_before(node: fx.Node, place: fx.Node) -> bool:
    """Return whether a node is a view of what exists before another node."""
    if node < place:
        return True
    return node.target in VIEWING and all(_views_before(n, place) for n in node.all_input_nodes)


def _move_before(node: fx.Node, place: fx.Node) -> None:
    """Move views to a place before another node."""
    if not node < place:
        for other in node.all_input_nodes:
            _move_before(other, place)
        place.prepend(node)


def _reason(ctx: Context, first: _Rotation, second: _Rotation) -> str | None:
    query, key, cos, sin = (val(n) for n in (first.x, second.x, first.cos, first.sin))
    if query is None or key is None or cos is None or sin is None:
        return "shapes are unknown"
    if query.device.type not in DEVICES or query.dtype not in FLOATS or key.dtype != query.dtype:
        return f"query and key are {describe(first.x)} and {describe(second.x)}"
    size, lead = query.shape[-1], list(query.shape[:-1])
    del lead[first.heads]
    for table in (cos, sin):
        if table.dim() != len(lead) + 1 or table.shape[-1] not in (first.size, first.size // 2):
            return f"the tables are {describe(first.cos)}"
        rows = [*table.shape[:-1]]
        if not same(rows, lead) and not (len(lead) == 2 and same(rows, [1, lead[1]])):
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
    if not ctx.always and not prefer_ipex_rotary(math.prod(hints(lead))):
        return f"Inductor's own code is as fast at {describe(first.x)}"
    return None
