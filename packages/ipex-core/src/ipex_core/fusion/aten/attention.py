# SPDX-License-Identifier: Apache-2.0
"""Attention in ATen graphs: the stock op, and its decomposed form, from scores to values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ipex_core.fusion import (
    GUARDED_SOFTMAX,
    SHIFTED_BY_MAX,
    SOFTCAP,
    SOFTMAX,
)
from ipex_core.fusion.aten import (
    CASTS,
    READER,
    Context,
    arguments,
    binary,
    describe,
    is_call,
    items,
    narrowed,
    number,
    same,
    scaled,
    shape_of,
    uncast,
    val,
)
from ipex_core.kernels.policy import prefer_ipex_attention
from ipex_core.library.spec import FLOATS
from ipex_core.util.symbolic import hints

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
    capped = READER.find(SOFTCAP, node)
    if capped is not None and math.isclose(capped["factor"] * capped["cap"], 1.0, rel_tol=1e-6):
        if found.scale != 1.0 or found.cap or found.per_head is not None or capped["cap"] <= 0.0:
            return None
        found.cap = capped["cap"]
        inside += capped.passed
        return capped["x"]
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
    found = READER.find(SHIFTED_BY_MAX, node)
    if found is None:
        return node
    inside += found.passed
    return found["x"]


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


# --- two products around a softmax ------------------------------------------------------------------------------------


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
    softmax = READER.find(SOFTMAX, division)
    if softmax is None or tested not in (None, softmax["scores"]):
        return None
    scores = softmax["scores"]
    inside += [second, *softmax.passed]
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
    guarded = READER.find(GUARDED_SOFTMAX, node)
    tested = None
    if guarded is not None and not sink:
        node, tested = guarded["softmax"], guarded["scores"]
        passed += guarded.passed
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


# --- the stock op and the decomposed form -----------------------------------------------------------------------------
# ``softmax(q @ k.T * scale + mask) @ v`` as BERT, ViT, GPT-2, T5 and Llama write it in their eager form: the scale as a
# product or a quotient or not at all, a softcap, any number of added masks, ``where`` with a mask and a number, the
# softmax in float32, and what the stock op decomposes to where no kernel of torch takes it (one key head for all, as in
# Falcon). Heads that ``repeat_kv`` has copied are taken from where they were copied from.


ipex = torch.ops.ipex

_OP = "ipex::attention"


def fuse_attention(ctx: Context) -> None:
    """Replace attentions by ``ipex::attention``."""
    for node in ctx.nodes(aten._scaled_dot_product_flash_attention_for_cpu.default):
        _stock(ctx, node)
    for node in ctx.nodes(aten.bmm.default):
        match = spelled(node)
        if match is not None:
            _replace_spelled(ctx, match)


def _reason(ctx: Context, q: Any, k: Any, v: Any, mask: Any) -> str | None:
    """Return why the op cannot or should not compute an attention, or None."""
    values = [val(x) for x in (q, k, v)]
    query, key, value = values
    if query is None or key is None or value is None:
        return "shapes are unknown"
    if any(x is None or x.dim() != 4 or x.device.type != "cpu" for x in values):
        return f"query is {describe(q)}, not 4-D on the CPU"
    if query.dtype not in FLOATS or not query.dtype == key.dtype == value.dtype:
        return f"dtypes are {query.dtype}, {key.dtype}, {value.dtype}"
    if not same(key.shape, value.shape) or not same(query.shape[::3], key.shape[::3]):
        return f"query, key and value are {describe(q)}, {describe(k)}, {describe(v)}"
    heads, groups = query.shape[1], key.shape[1]
    if not isinstance(heads, int) or not isinstance(groups, int) or not groups or heads % groups:
        return "the numbers of heads do not fit"
    if mask is not None:
        given = val(mask)
        if given is None or given.dtype not in (torch.bool, torch.float32, query.dtype):
            return f"the mask is {describe(mask)}"
        full = (query.shape[0], heads, query.shape[2], key.shape[2])
        if not 2 <= given.dim() <= 4 or not _broadcasts(given.shape, full):
            return f"the mask {describe(mask)} does not broadcast to the scores"
    if not ctx.kernels("attention"):
        return "no kernel package implements attention"
    if not ctx.always and not prefer_ipex_attention(
        hints(query.shape), hints(key.shape), query.dtype
    ):
        return f"the stock op is as fast at {describe(q)}"
    return None


def _broadcasts(shape: Any, full: Any) -> bool:
    pairs = zip(reversed(shape), reversed(full), strict=False)
    return all(same((a,), (b,)) or same((a,), (1,)) for a, b in pairs)


def _stock(ctx: Context, node: fx.Node) -> None:
    names = ("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    q, k, v, mask = (given.get(name) for name in ("query", "key", "value", "attn_mask"))
    causal, scale = given.get("is_causal", False), given.get("scale")
    reason = None
    if given.get("dropout_p", 0.0) != 0.0:
        reason = "there is dropout"
    elif items(node, 1):
        reason = "the log-sum-exp is used"
    elif scale is not None and (not isinstance(scale, (int, float)) or not 0.0 < scale < math.inf):
        reason = f"the scale is {scale}"
    groups = None if reason else _grouped(k, v)
    if reason is None:
        k, v = groups or (k, v)
        reason = _reason(ctx, q, k, v, mask)
    results = items(node, 0)
    if reason is not None or len(results) != 1:
        ctx.reject("attention", node, _OP, reason or "the result is not used")
        return
    assert isinstance(k, fx.Node) and isinstance(q, fx.Node)
    text = "scaled_dot_product_attention" + (", shared heads" if groups else "")
    ctx.replace(
        "attention",
        results[0],
        [node],
        ipex.attention.default,
        (q, k, v, mask, float(scale or 0.0), bool(causal)),
        text,
    )


def _grouped(k: Any, v: Any) -> tuple[fx.Node, fx.Node] | None:
    """Return keys and values before ``repeat_kv`` copied their heads, if it did."""
    found = tuple(map(_before_repeat, (k, v)))
    if found[0] is None or found[1] is None or not same(shape_of(found[0]), shape_of(found[1])):
        return None
    return found[0], found[1]


def _before_repeat(node: Any) -> fx.Node | None:
    """Match ``x[:, :, None].expand(B, H, G, S, D).reshape(B, H * G, S, D)``; return x."""
    if not is_call(node, *VIEWS):
        return None
    wide = node.args[0]
    if is_call(wide, aten.clone.default):
        wide = wide.args[0]
    if not is_call(wide, aten.expand.default):
        return None
    apart = wide.args[0]
    if not is_call(apart, aten.unsqueeze.default) or apart.args[1] != 2:
        return None
    x = apart.args[0]
    shape, expanded, out = shape_of(x), shape_of(wide), shape_of(node)
    if shape is None or expanded is None or out is None or len(shape) != 4 or len(out) != 4:
        return None
    fits = same((*expanded[:2], *expanded[3:]), shape) and same(
        (out[0], *out[2:]), (shape[0], *shape[2:])
    )
    fits = fits and same((out[1],), (expanded[1] * expanded[2],))
    return x if fits and isinstance(x, fx.Node) else None


def _replace_spelled(ctx: Context, match: Match) -> None:
    groups = None
    if not match.transpose:
        groups = _grouped(match.k, match.v)
    query, root, scores = val(match.q), match.root, match.scores
    if query is None:
        return
    if not 0.0 < scores.scale < math.inf:
        ctx.reject("attention", root, _OP, f"the scale is {scores.scale}")
        return
    made: list[fx.Node] = []
    q, (key, value) = match.q, groups or (match.k, match.v)
    if match.transpose:
        key = ctx.call(root, aten.permute.default, (key, [0, 1, 3, 2]))
        made.append(key)
    if scores.per_head is not None:
        q = ctx.call(root, aten.mul.Tensor, (q, scores.per_head))
        made.append(q)
    value, cut = _padded(ctx, root, key, value, made)
    mask = sum_masks(ctx, root, scores, query.dtype, match.safe, made)
    reason = mask if isinstance(mask, str) else _reason(ctx, q, key, value, mask)
    if reason is not None:
        ctx.reject("attention", root, _OP, reason)
    else:
        options: dict[str, Any] = {"softcap": scores.cap} if scores.cap else {}
        if scores.sinks is not None:
            options["sinks"] = ctx.call(root, aten.reshape.default, (scores.sinks, [-1]))
            made.append(options["sinks"])
        given = {
            "mask": scores.masks,
            "shared heads": groups,
            "softcap": scores.cap,
            "scales of heads": scores.per_head,
            "sinks": scores.sinks,
            "smaller values": cut,
        }
        text = ", ".join(["matmul, softmax, matmul", *(k for k, v in given.items() if v)])
        ctx.replace(
            "attention",
            root,
            match.interior,
            ipex.attention.default,
            (q, key, value, mask, scores.scale),
            text,
            options,
            cut=cut,
        )
    ctx.drop([*match.operands, *made])


def _padded(
    ctx: Context, root: fx.Node, key: fx.Node, value: fx.Node, made: list[fx.Node]
) -> tuple[fx.Node, int | None]:
    """Give values the size of keys where they are a little smaller, as in latent attention (DeepSeek).

    Zeros cost some of the second product; the stock ops make the scores as a whole. Returns the size to cut to.
    """
    wanted, given = shape_of(key), shape_of(value)
    if wanted is None or given is None or len(wanted) != 4 or len(given) != 4:
        return value, None
    size, own = wanted[3], given[3]
    if not isinstance(size, int) or not isinstance(own, int) or not size // 2 <= own < size:
        return value, None
    made.append(ctx.call(root, aten.constant_pad_nd.default, (value, [0, size - own])))
    return made[-1], own


# --- what Inductor takes for attention --------------------------------------------------------------------------------


def guard_attention(ctx: Context) -> None:
    """Write what only looks like attention such that Inductor does not take it for attention.

    Its patterns compare ops, but not the numbers among their arguments: a softmax over queries or heads passes for one
    over keys, and keys that one permutation brings from ``[B, S, H, D]`` to ``[B, H, D, S]`` for keys of which only the
    last two dimensions are swapped (pytorch/pytorch 196468 and 195320).
    """
    for node in ctx.nodes(aten.div.Tensor):
        above: Any = node.args[0]
        below: Any = node.args[1]
        if not is_call(above, aten.exp.default) or not is_call(below, aten.sum.dim_IntList):
            continue
        given, rank = arguments(below), len(shape_of(above) or ())
        if (
            given["self"] is above
            and given["dim"]
            and [d % rank for d in given["dim"]] != [rank - 1]
        ):
            inverse = ctx.call(node, aten.reciprocal.default, (below,))
            node.replace_all_uses_with(ctx.call(node, aten.mul.Tensor, (above, inverse)))
            ctx.graph.erase_node(node)
    for product in ctx.nodes(*_PRODUCTS):
        keys: Any = product.args[-1]
        while is_call(keys, *VIEWS, *COPIES):
            keys = keys.args[0]
        if not is_call(keys, aten.permute.default) or len(keys.args[1]) < 3 or _swaps(keys):
            continue
        *first, last, middle = (int(d) % len(keys.args[1]) for d in keys.args[1])
        swapped = [*range(len(first)), len(first) + 1, len(first)]
        rows = ctx.call(keys, aten.permute.default, (keys.args[0], [*first, middle, last]))
        keys.replace_all_uses_with(ctx.call(keys, aten.permute.default, (rows, swapped)))
        ctx.graph.erase_node(keys)
