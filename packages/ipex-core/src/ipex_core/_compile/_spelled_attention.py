# SPDX-License-Identifier: Apache-2.0
"""Recognition of attentions written as two matrix products around a softmax; `attention` replaces them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from ipex_core._compile._graph import (
    FLOATS,
    binary,
    is_call,
    narrowed,
    number,
    same,
    scaled,
    shape_of,
    uncast,
    val,
)

__all__ = ["VIEWS", "Match", "Scores", "spelled"]

aten = torch.ops.aten

VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_COPIES = (aten.expand.default, aten.clone.default, aten.alias.default)


@dataclasses.dataclass
class Match:
    """``safe``: rows that are masked as a whole give zeros."""

    root: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    scores: Scores
    interior: list[fx.Node]
    transpose: bool
    safe: bool


@dataclasses.dataclass
class Scores:
    """``product``, a view of ``bmm``, scaled, capped and masked, in this order."""

    product: fx.Node
    scale: float
    cap: float
    masks: list[tuple[str, Any, Any]]


def _unfold(node: Any, result: Any) -> tuple[fx.Node, list[fx.Node]] | None:
    """Return the 4-D operand behind one of ``bmm``, and the nodes passed; ``result`` is its 4-D result."""
    passed: list[fx.Node] = []
    whole, flat = shape_of(result), shape_of(node)
    if whole is None or flat is None or len(whole) != 4:
        return None
    while isinstance(node, fx.Node):
        shape = shape_of(node)
        if passed and shape is not None and not is_call(node, *_COPIES):
            rows = flat[1:]
            if same(shape, (*whole[:2], *rows)):
                return node, passed
            # One head that all heads of the query share.
            expanded = shape_of(passed[-1]) if is_call(passed[-1], aten.expand.default) else None
            if same(expanded, (*whole[:2], *rows)) and same(shape, (whole[0], 1, *rows)):
                return node, passed
        if not is_call(node, *VIEWS, *_COPIES):
            return None
        passed.append(node)
        node = node.args[0]
    return None


def spelled(second: fx.Node) -> Match | None:
    """Match from the second matrix product on upwards."""
    if len(second.users) != 1:
        return None
    root = next(iter(second.users))
    if not is_call(root, *VIEWS):
        return None
    left, right = _unfold_softmax(second.args[0], root), _unfold(second.args[1], root)
    if left is None or right is None:
        return None
    division, inside, tested = left
    pair = binary(division, aten.div.Tensor)
    if pair is None:
        return None
    exp, total = pair
    if not is_call(exp, aten.exp.default) or not is_call(total, aten.sum.dim_IntList):
        return None
    if total.args[0] is not exp or list(total.args[1]) not in ([-1], [3]) or not total.args[2]:
        return None
    difference = binary(exp.args[0], aten.sub.Tensor)
    if difference is None or not is_call(difference[1], aten.amax.default):
        return None
    scores, most = difference
    if tested is not None and tested is not scores:
        return None
    if most.args[0] is not scores or list(most.args[1]) not in ([-1], [3]) or not most.args[2]:
        return None
    inside += [second, *right[1], division, exp, total, exp.args[0], most]
    found = _scores(scores, inside)
    if found is None:
        return None
    first = found.product
    product = first.args[0]
    q, k = _unfold(product.args[0], first), _unfold(product.args[1], first)  # type: ignore[union-attr]
    if q is None or k is None:
        return None
    inside += [first, product, *q[1], *k[1]]  # type: ignore[list-item]
    query = _without_factor(q[0], found, inside)
    key, transpose = _without_factor(k[0], found, inside), True
    dims = list(key.args[1]) if is_call(key, aten.permute.default) else None  # type: ignore[arg-type]
    swapped = is_call(key, aten.transpose.int) and sorted(int(d) % 4 for d in key.args[1:])  # type: ignore[arg-type]
    if dims == [0, 1, 3, 2] or swapped == [2, 3]:
        inside.append(key)
        assert isinstance(key.args[0], fx.Node)
        key, transpose = _without_factor(key.args[0], found, inside), False
    match = Match(root, query, key, right[0], found, inside, transpose, tested is not None)
    if match.safe:
        _narrow(match)
    return match


def _without_factor(operand: fx.Node, scores: Scores, inside: list[fx.Node]) -> fx.Node:
    """Move a number that an operand is multiplied by into the scale."""
    part = scaled(operand)
    whole, inner = val(operand), val(part[0]) if part is not None else None
    if part is None or whole is None or inner is None or inner.dtype != whole.dtype:
        return operand
    if len(operand.users) != 1 or not 0.0 < part[1] < math.inf:
        return operand
    inside.append(operand)
    scores.scale *= part[1]
    return part[0]


def _narrow(match: Match) -> None:
    """Leave out the conversion to float32 and back around the stock op, which any kernel does inside."""
    given = [uncast(x) for x in (match.q, match.k, match.v)]
    wide, low = val(match.q), val(given[0])
    if wide is None or low is None or low.dtype == wide.dtype or low.dtype not in FLOATS:
        return
    narrow = narrowed(match.root, low.dtype)
    if narrow is not None and all(val(x).dtype == low.dtype for x in given):  # type: ignore[union-attr]
        match.interior.append(match.root)
        match.root, (match.q, match.k, match.v) = narrow, given


def _unfold_softmax(node: Any, result: Any) -> tuple[fx.Node, list[fx.Node], fx.Node | None] | None:
    """Step from the first operand of the second product to the division of its softmax.

    The third result are the scores whose fully masked rows become zeros, if that is so.
    """
    passed: list[fx.Node] = []
    while is_call(node, *VIEWS, *_COPIES, torch.ops.prims.convert_element_type.default):
        passed.append(node)
        node = node.args[0]
    guarded = _guarded(node)
    tested = None
    if guarded is not None:
        node, tested, steps = guarded
        passed += steps
    shape, whole = shape_of(node), shape_of(result)
    if shape is None or whole is None or len(shape) != 4 or not same(shape[:3], whole[:3]):
        return None
    return (node, passed, tested) if is_call(node, aten.div.Tensor) else None


def _guarded(node: Any) -> tuple[fx.Node, fx.Node, list[fx.Node]] | None:
    """Match ``where(all scores of the row are -inf, 0, softmax)``; return softmax, scores and the nodes passed."""
    if not is_call(node, aten.where.self):
        return None
    condition, zero, division = node.args
    if not (is_call(zero, aten.full.default) and zero.args[1] == 0) and number(zero) != 0.0:
        return None
    steps: list[fx.Node] = [node]
    for target, *rest in (
        (aten.logical_not.default,),
        (aten.any.dim, -1, True),
        (aten.logical_not.default,),
        (aten.eq.Scalar, -math.inf),
    ):
        if not is_call(condition, target) or list(condition.args[1:]) != rest:
            return None
        steps.append(condition)
        condition = condition.args[0]
    return division, condition, steps


def _scores(node: Any, inside: list[fx.Node]) -> Scores | None:
    """Step from the argument of the softmax to the first matrix product, over masks, a softcap and a scale."""
    masks: list[tuple[str, Any, Any]] = []
    scale: float | None = None
    cap = 0.0
    while isinstance(node, fx.Node):
        plain = _plain(node)
        while node is not plain:
            inside.append(node)
            node = node.args[0]
        if is_call(node, *VIEWS) and is_call(node.args[0], aten.bmm.default):
            return Scores(node, 1.0 if scale is None else scale, cap, masks)
        capped = _capped(node)
        part = scaled(node)
        pair = binary(node, aten.add.Tensor)
        if capped is not None and scale is None and not cap:
            inner, cap, passed = capped
            inside += passed
            node = inner
        elif part is not None:
            if scale is not None:
                return None
            inside.append(node)
            node, scale = part
        elif pair is not None and scale is None and not cap:
            a, b = pair
            a, b = (a, b) if _leads_to_product(a) else (b, a)
            inside.append(node)
            masks.append(("add", b, None))
            node = a
        elif is_call(node, aten.where.self) and scale is None and not cap:
            condition, a, b = node.args
            inside.append(node)
            if number(b) is not None:
                masks.append(("keep", condition, number(b)))
                node = a
            elif number(a) is not None:
                masks.append(("drop", condition, number(a)))
                node = b
            else:
                return None
        else:
            return None
    return None


def _capped(node: fx.Node) -> tuple[fx.Node, float, list[fx.Node]] | None:
    """Match ``tanh(x / cap) * cap``; return x, the cap and the nodes passed."""
    outer = scaled(node)
    if outer is None or not is_call(outer[0], aten.tanh.default) or outer[1] <= 0.0:
        return None
    inner = scaled(outer[0].args[0])
    if inner is None or not math.isclose(inner[1] * outer[1], 1.0, rel_tol=1e-6):
        return None
    return inner[0], outer[1], [node, outer[0], outer[0].args[0]]  # type: ignore[list-item]


def _plain(node: Any) -> Any:
    """Step over conversions and over views to another shape and back, which in-place ops on views leave behind."""
    while True:
        node, before = uncast(node), node
        if is_call(node, *VIEWS) and is_call(node.args[0], *VIEWS):
            inner = node.args[0].args[0]
            if same(shape_of(inner), shape_of(node)):
                node = inner
        if node is before:
            return node


def _leads_to_product(node: Any) -> bool:
    for _ in range(8):
        node = _plain(node)
        if is_call(node, *VIEWS) and is_call(node.args[0], aten.bmm.default):
            return True
        part = scaled(node)
        if part is not None:
            node = part[0]
        elif is_call(node, aten.tanh.default):
            node = node.args[0]
        elif is_call(node, aten.where.self):
            node = node.args[1] if number(node.args[2]) is not None else node.args[2]
        elif binary(node, aten.add.Tensor) is not None:
            return any(_leads_to_product(x) for x in node.args)
        else:
            return False
    return False
