# SPDX-License-Identifier: Apache-2.0
"""From the argument of a softmax inwards to the matrix product that makes the scores of an attention."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ipex_core.fusion.aten.graph import Context
from ipex_core.fusion.aten.nodes import (
    CASTS,
    binary,
    is_call,
    number,
    same,
    scaled,
    shape_of,
    uncast,
    val,
)

__all__ = ["COPIES", "VIEWS", "Mask", "Scores", "find_scores", "sum_masks"]

aten = torch.ops.aten

VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
COPIES = (aten.expand.default, aten.clone.default, aten.alias.default)
_PRODUCTS = (aten.bmm.default, aten.baddbmm.default)
#: What may stand between a product and the softmax.
_BETWEEN = (
    *VIEWS,
    *CASTS,
    aten.clone.default,
    aten.alias.default,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.add.Tensor,
    aten.where.self,
    aten.tanh.default,
)
#: What hides a score that it is added to: so much that nothing is left of the score.
_HIDES = -1e30


@dataclasses.dataclass
class Mask:
    """``kind``: ``"add"``, or ``"keep"`` and ``"drop"`` for ``where`` with ``fill`` in the place of what is hidden.

    ``factor`` is what the masked scores are multiplied by afterwards; ``level`` a node of the shape that the scores
    have there: ``[B, H, Sq, Sk]``, ``[B * H, Sq, Sk]``, or ``[B / W, W, H, Sq, Sk]`` of W windows.
    """

    kind: str
    value: Any
    fill: float
    factor: float
    level: fx.Node


@dataclasses.dataclass
class Scores:
    """``product``, ``bmm`` or ``baddbmm``, scaled, capped and masked, in this order.

    ``per_head`` is a tensor that the product is multiplied by and that is the same for all keys; ``sinks`` are scores
    ``[1, H, 1, 1]`` without a value.
    """

    whole: tuple[Any, ...]
    product: fx.Node | None = None
    scale: float = 1.0
    cap: float = 0.0
    masks: list[Mask] = dataclasses.field(default_factory=list)
    per_head: fx.Node | None = None
    sinks: fx.Node | None = None


def find_scores(
    node: Any, whole: tuple[Any, ...], sink: bool, inside: list[fx.Node]
) -> Scores | None:
    """Step from the argument of a softmax to the first matrix product, over masks, a softcap and scales.

    Args:
        node: The argument.
        whole: The shape ``[B, H, Sq, Sk]`` of the scores.
        sink: Whether there is one column more, which has no value.
        inside: Receives the nodes passed.
    """
    found = Scores(whole)
    node = _over_shift(node, inside)
    if sink:
        node = _over_sinks(node, found, inside)
    while isinstance(node, fx.Node):
        if not _is_level(shape_of(node), whole):
            return None
        if is_call(node, *_PRODUCTS):
            return found if _end(node, found) else None
        step = _step(node, found, inside)
        if step is None:
            return None
        inside.append(node)
        node = step
    return None


def _is_level(shape: tuple[Any, ...] | None, whole: tuple[Any, ...]) -> bool:
    """Whether the scores are seen in a shape that differs in how the batch and the heads are written only."""
    if shape is None or len(shape) not in (3, 4, 5):
        return False
    return same(shape[-2:], whole[-2:]) if len(shape) == 3 else same(shape[-3:], whole[-3:])


def _step(node: fx.Node, found: Scores, inside: list[fx.Node]) -> Any:
    """Return what one op between the product and the softmax is applied to, or None."""
    if uncast(node) is not node or is_call(node, *VIEWS):
        return node.args[0]
    capped = _capped(node)
    if capped is not None:
        if found.scale != 1.0 or found.cap or found.per_head is not None:
            return None
        inner, found.cap, passed = capped
        inside += passed
        return inner
    part = scaled(node)
    if part is not None:
        found.scale *= part[1]
        return part[0]
    pair = binary(node, aten.mul.Tensor)
    if pair is not None:
        inner, factor = pair if _leads_to_product(pair[0]) else pair[::-1]
        if found.per_head is not None or not _same_for_all_keys(node, inner, factor):
            return None
        found.per_head = factor
        return inner
    if found.cap or found.per_head is not None:
        return None  # masks below a cap or a factor of each head
    pair = binary(node, aten.add.Tensor)
    if pair is not None:
        inner, value = pair if _leads_to_product(pair[0]) else pair[::-1]
        found.masks.append(Mask("add", value, 0.0, found.scale, node))
        return inner
    if is_call(node, aten.where.self):
        condition, a, b = node.args
        for kind, inner, fill in (("keep", a, number(b)), ("drop", b, number(a))):
            if fill is not None:
                found.masks.append(Mask(kind, condition, fill * found.scale, found.scale, node))
                return inner
    return None


def _end(product: fx.Node, found: Scores) -> bool:
    found.product = product
    if is_call(product, aten.baddbmm.default):
        beta, alpha = (product.kwargs.get(name, 1) for name in ("beta", "alpha"))
        if not isinstance(beta, (int, float)) or not isinstance(alpha, (int, float)):
            return False
        if beta:
            if found.cap or found.per_head is not None:
                return False
            factor = found.scale * beta
            found.masks.append(Mask("add", product.args[0], 0.0, factor, product))
        found.scale *= alpha
    # Scores that are hidden have to stay so, and finite numbers finite.
    return all(0.0 < mask.factor <= 1.0 for mask in found.masks)


def _same_for_all_keys(node: fx.Node, inner: Any, factor: Any) -> bool:
    """Whether a factor of the scores can be one of the queries."""
    shape, whole = shape_of(factor), shape_of(node)
    if shape is None or whole is None or len(whole) != 4 or not 1 <= len(shape) <= 4:
        return False
    if not _leads_to_product(inner) or not same(shape_of(inner), whole):
        return False
    left, right = val(factor), val(inner)
    if left is None or right is None or left.dtype != right.dtype:
        return False
    return same(shape[-1:], (1,))


def _over_shift(node: Any, inside: list[fx.Node]) -> Any:
    """Step over ``x - max(x)`` of each row, which a softmax does itself."""
    while uncast(node) is not node:
        inside.append(node)
        node = node.args[0]
    pair = binary(node, aten.sub.Tensor)
    if pair is None:
        return node
    x, most = pair
    passed = [node, most]
    if is_call(most, operator.getitem) and most.args[1] == 0:
        most = most.args[0]
        passed.append(most)
        if not is_call(most, aten.max.dim):
            return node
    elif not is_call(most, aten.amax.default):
        return node
    dims = most.args[1] if isinstance(most.args[1], list) else [most.args[1]]
    if most.args[0] is not x or dims not in ([-1], [3]) or list(most.args[2:]) != [True]:
        return node
    inside += passed
    return x


def _over_sinks(node: Any, found: Scores, inside: list[fx.Node]) -> Any:
    """Step from the scores with a column of sinks to those without."""
    if not is_call(node, aten.cat.default) or len(node.args) < 2 or node.args[1] not in (-1, 3):
        return None
    parts = node.args[0]
    if len(parts) != 2 or not same(shape_of(parts[1]), (*found.whole[:3], 1)):
        return None
    heads, column = found.whole[1], parts[1]
    while column is not None and not any(
        same(shape_of(column), shape) for shape in ((1, heads, 1, 1), (heads, 1, 1))
    ):
        known = is_call(column, *COPIES, *VIEWS) or uncast(column) is not column
        column = column.args[0] if known else None
    found.sinks = column
    inside.append(node)
    return parts[0] if column is not None else None


def _capped(node: fx.Node) -> tuple[fx.Node, float, list[fx.Node]] | None:
    """Match ``tanh(x / cap) * cap``; return x, the cap and the nodes passed."""
    outer = scaled(node)
    if outer is None or not is_call(outer[0], aten.tanh.default) or outer[1] <= 0.0:
        return None
    divided: Any = outer[0].args[0]
    inner = scaled(divided)
    if inner is None or not math.isclose(inner[1] * outer[1], 1.0, rel_tol=1e-6):
        return None
    return inner[0], outer[1], [node, outer[0], divided]


def _leads_to_product(node: Any, depth: int = 12) -> bool:
    if is_call(node, *_PRODUCTS):
        return True
    if not depth or not is_call(node, *_BETWEEN):
        return False
    args = node.args[1:] if is_call(node, aten.where.self) else node.args
    return any(_leads_to_product(arg, depth - 1) for arg in args)


def sum_masks(
    ctx: Context, root: fx.Node, scores: Scores, dtype: torch.dtype, safe: bool, made: list[fx.Node]
) -> fx.Node | str | None:
    """Return all masks as one that is added to the scores, or why that cannot be.

    ``where(mask, scores, -1e4)`` becomes an addition of 0 and `_HIDES`: the scores vanish beside it, also in a row that
    has no others.

    Args:
        ctx: The graph.
        root: The node in front of which the mask is made.
        scores: The scores.
        dtype: The dtype of the query.
        safe: Whether rows that are hidden as a whole give zeros.
        made: Receives the new nodes.
    """

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made.append(ctx.call(root, target, args, kwargs))
        return made[-1]

    total: fx.Node | None = None
    for mask in reversed(scores.masks):
        if val(mask.value) is None:
            return f"{mask.value} is no mask"
        value = _spread(call, mask, scores.whole)
        if value is None:
            return f"the mask {mask.value} is not one of batches and heads"
        if mask.kind == "add":
            if mask.factor != 1.0:
                value = call(aten.mul.Tensor, value, mask.factor)
            total = value if total is None else call(aten.add.Tensor, total, value)
            continue
        if mask.fill > -1e4:
            return f"the scores do not vanish beside {mask.fill:g}"
        # float16 does not hold the number.
        held = torch.float32 if dtype == torch.float16 else dtype
        low = max(min(mask.fill, _HIDES), torch.finfo(held).min)
        if safe and mask.fill == -math.inf:
            low = mask.fill
        hidden = call(aten.full.default, [], low, dtype=held)
        if total is None:
            seen = call(aten.full.default, [], 0.0, dtype=held)
        else:
            seen = call(CASTS[0], total, held)
        pair = (seen, hidden) if mask.kind == "keep" else (hidden, seen)
        total = call(aten.where.self, value, *pair)
    return total


def _spread(call: Callable[..., fx.Node], mask: Mask, whole: tuple[Any, ...]) -> fx.Node | None:
    """Return a mask of scores of another shape as one of scores ``[B, H, Sq, Sk]``."""
    shape, level = shape_of(mask.value), shape_of(mask.level)
    value: fx.Node = mask.value
    if shape is None or level is None:
        return None
    given: tuple[Any, ...] = shape
    if len(level) == 4 or len(shape) <= 2:
        return value

    def sizes(first: int) -> list[Any]:
        return [
            given[i] if isinstance(given[i], int) else call(aten.sym_size.int, value, i)
            for i in range(first, len(given))
        ]

    if len(level) == 3:
        if same(shape[:1], (1,)):
            return call(aten.unsqueeze.default, value, 0)
        if not isinstance(whole[1], int) or not same(shape[:1], level[:1]):
            return None
        return call(aten.reshape.default, value, [-1, whole[1], *sizes(1)])
    if len(shape) == 3:
        return value
    if len(shape) == 4:
        value, given = call(aten.unsqueeze.default, value, 0), (1, *shape)
    groups = level[0] if isinstance(level[0], int) else _written(mask.level)
    if not isinstance(groups, (int, fx.Node)) or not isinstance(level[1], int):
        return None
    value = call(aten.expand.default, value, [groups, level[1], -1, -1, -1])
    return call(aten.reshape.default, value, [-1, *sizes(2)])


def _written(level: Any) -> Any:
    """Return the first size that the graph writes for scores of windows, if it does."""
    while isinstance(level, fx.Node) and not is_call(level, *VIEWS):
        level = level.args[0]
    sizes: Any = level.args[1] if isinstance(level, fx.Node) else (-1,)
    return sizes[0] if sizes[0] != -1 else None
