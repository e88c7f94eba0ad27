# SPDX-License-Identifier: Apache-2.0
"""Recognition of attentions written as two matrix products around a softmax; `attention` replaces them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from ipex_core.fusion.aten.attention_scores import COPIES, VIEWS, Scores, find_scores
from ipex_core.fusion.aten.nodes import (
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

__all__ = ["Match", "spelled"]

aten = torch.ops.aten


@dataclasses.dataclass
class Match:
    """``operands``: what lies in front of the products, where others may use it, too.

    ``safe``: rows that are masked as a whole give zeros.
    """

    root: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    scores: Scores
    interior: list[fx.Node]
    operands: list[fx.Node]
    transpose: bool
    safe: bool


@dataclasses.dataclass
class _Operand:
    """What stands behind an operand of ``bmm``: ``node * factor``, 4-D, with its last dimensions swapped or not."""

    node: fx.Node
    factor: float
    swapped: bool
    passed: list[fx.Node]


def _unfold(node: Any, whole: tuple[Any, ...]) -> _Operand | None:
    """Return the 4-D operand behind one of ``bmm``; ``whole`` is the shape of its 4-D result."""
    flat = shape_of(node)
    if flat is None or len(whole) != 4:
        return None
    passed: list[fx.Node] = []
    rows, factor, swapped = flat[1:], 1.0, False
    while isinstance(node, fx.Node):
        shape = shape_of(node)
        if passed and shape is not None and not is_call(node, *COPIES):
            expanded = shape_of(passed[-1]) if is_call(passed[-1], aten.expand.default) else None
            # Or one head that all heads of the query share.
            if same(shape, (*whole[:2], *rows)) or (
                same(expanded, (*whole[:2], *rows)) and same(shape, (whole[0], 1, *rows))
            ):
                return _Operand(node, factor, swapped, passed)
        part = scaled(node) if same(shape, (flat[0], *rows)) else None
        if part is not None and 0.0 < part[1] < math.inf and _same_dtype(node, part[0]):
            factor *= part[1]
            node, above = part[0], node
        elif _swaps(node) and same(shape, (flat[0], *rows)):
            rows, swapped = rows[::-1], not swapped
            node, above = node.args[0], node
        elif is_call(node, *VIEWS, *COPIES):
            node, above = node.args[0], node
        else:
            return None
        passed.append(above)
    return None


def _same_dtype(left: Any, right: Any) -> bool:
    a, b = val(left), val(right)
    return a is not None and b is not None and a.dtype == b.dtype


def _swaps(node: Any) -> bool:
    """Whether an op swaps the last two dimensions."""
    shape = shape_of(node)
    if shape is None:
        return False
    dims = list(range(len(shape)))
    dims[-2:] = dims[:-3:-1]
    if is_call(node, aten.permute.default):
        return [int(d) % len(shape) for d in node.args[1]] == dims
    if is_call(node, aten.transpose.int):
        return sorted(int(d) % len(shape) for d in node.args[1:]) == sorted(dims[-2:])
    return False


def spelled(second: fx.Node) -> Match | None:
    """Match from the second matrix product on upwards."""
    if len(second.users) != 1:
        return None
    root = next(iter(second.users))
    shape = shape_of(root)
    if not is_call(root, *VIEWS) or shape is None or len(shape) != 4:
        return None
    left, right = _unfold_softmax(second.args[0], shape[:3]), _unfold(second.args[1], shape)
    if left is None or right is None or right.swapped or right.factor != 1.0:
        return None
    division, inside, tested, sink = left
    softmax = _softmax(division)
    if softmax is None:
        return None
    scores, nodes = softmax
    if tested is not None and tested is not scores:
        return None
    inside += [second, *nodes]
    keys = shape_of(second.args[0])
    assert keys is not None
    found = find_scores(scores, (*shape[:3], keys[-1]), sink, inside)
    if found is None or found.product is None:
        return None
    first, other = found.product.args[-2:]
    q, k = _unfold(first, found.whole), _unfold(other, found.whole)
    if q is None or k is None or q.swapped:
        return None
    inside.append(found.product)
    operands = [*right.passed, *q.passed, *k.passed]
    query, key, transpose = _query_and_key(q, k, found, operands)
    value = val(right.node)
    low = [uncast(x) for x in (query, key)]
    if value is not None and all(_same_dtype(x, right.node) for x in low):
        # Scores in float32 of what is narrower, which any kernel does inside (CodeGen).
        operands += [x for x in (query, key) if x not in low]
        query, key = low
    safe = tested is not None
    match = Match(root, query, key, right.node, found, inside, operands, transpose, safe)
    if match.safe:
        _narrow(match)
    return match


def _softmax(division: Any) -> tuple[fx.Node, list[fx.Node]] | None:
    """Return what a division is the softmax of, over the last of four dimensions, and the nodes it is spelled with."""
    pair = binary(division, aten.div.Tensor)
    if pair is None or not is_call(pair[0], aten.exp.default):
        return None
    exp, total = pair
    difference = binary(exp.args[0], aten.sub.Tensor)
    if difference is None:
        return None
    scores, most = difference
    if not _reduces(total, aten.sum.dim_IntList, exp) or not _reduces(
        most, aten.amax.default, scores
    ):
        return None
    return scores, [division, exp, total, exp.args[0], most]


def _reduces(node: Any, op: Any, operand: Any) -> bool:
    """Return whether a node reduces an operand over the last of four dimensions, which stays as one of size 1."""
    if not is_call(node, op) or node.args[0] is not operand:
        return False
    return list(node.args[1]) in ([-1], [3]) and bool(node.args[2])


def _query_and_key(
    q: _Operand, k: _Operand, found: Scores, operands: list[fx.Node]
) -> tuple[fx.Node, fx.Node, bool]:
    """Return query and key without factors, which go into the scale, and whether the key is to be transposed."""
    found.scale *= q.factor * k.factor
    query = _without_factor(q.node, found, operands)
    key, transpose = k.node, not k.swapped
    if transpose:
        key = _without_factor(key, found, operands)
        if _swaps(key):
            operands.append(key)
            assert isinstance(key.args[0], fx.Node)
            key, transpose = key.args[0], False
    if not transpose:
        key = _without_factor(key, found, operands)
    return query, key, transpose


def _without_factor(operand: fx.Node, scores: Scores, passed: list[fx.Node]) -> fx.Node:
    """Move a number that an operand is multiplied by into the scale."""
    part = scaled(operand)
    whole, inner = val(operand), val(part[0]) if part is not None else None
    if part is None or whole is None or inner is None or inner.dtype != whole.dtype:
        return operand
    if len(operand.users) != 1 or not 0.0 < part[1] < math.inf:
        return operand
    passed.append(operand)
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


def _unfold_softmax(
    node: Any, rows: tuple[Any, ...]
) -> tuple[fx.Node, list[fx.Node], fx.Node | None, bool] | None:
    """Step from the first operand of the second product to the division of its softmax.

    The third result are the scores whose fully masked rows become zeros, if that is so; the fourth tells whether a
    last column is left out.
    """
    passed: list[fx.Node] = []

    def over_copies(node: Any) -> Any:
        while is_call(node, *VIEWS, *COPIES, torch.ops.prims.convert_element_type.default):
            passed.append(node)
            node = node.args[0]
        return node

    node = over_copies(node)
    sink = _without_last(node)
    if sink:
        passed.append(node)
        node = over_copies(node.args[0])
    guarded = _guarded(node)
    tested = None
    if guarded is not None and not sink:
        node, tested, steps = guarded
        passed += steps
    shape = shape_of(node)
    if shape is None or len(shape) != 4 or not same(shape[:3], rows):
        return None
    return (node, passed, tested, sink) if is_call(node, aten.div.Tensor) else None


def _without_last(node: Any) -> bool:
    """Whether an op takes all of the last dimension but one."""
    if not is_call(node, aten.slice.Tensor) or len(node.args) != 4 or node.kwargs:
        return False
    shape, given = shape_of(node), shape_of(node.args[0])
    if shape is None or given is None or len(shape) != 4 or node.args[1] not in (3, -1):
        return False
    return node.args[2] in (0, None) and same((shape[-1] + 1,), given[-1:])


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
