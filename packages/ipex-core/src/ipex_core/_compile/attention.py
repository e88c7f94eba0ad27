# SPDX-License-Identifier: Apache-2.0
"""Attention: the stock op, and its spellings as two matrix products around a softmax.

``softmax(q @ k.T * scale + mask) @ v`` as BERT, ViT, GPT-2, T5 and Llama write it in their eager form: the scale as a
product or a quotient or not at all, a softcap, any number of added masks, ``where`` with a mask and a number, the
softmax in float32, and what the stock op decomposes to where no kernel of torch takes it (one key head for all, as in
Falcon). Heads that ``repeat_kv`` has copied are taken from where they were copied from.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ipex_core._choice import prefer_ipex_attention
from ipex_core._compile._graph import (
    CASTS,
    FLOATS,
    Context,
    describe,
    hints,
    is_call,
    items,
    same,
    shape_of,
    val,
)
from ipex_core._compile._spelled_attention import VIEWS, Match, spelled

__all__ = ["fuse_attention"]

aten = torch.ops.aten
ipex = torch.ops.ipex

_OP = "ipex::attention"
#: What hides a score that it is added to: so much that nothing is left of the score.
_HIDES = -1e30


def fuse_attention(ctx: Context) -> None:
    """Replace attentions by ``ipex::attention``."""
    for node in ctx.nodes(aten._scaled_dot_product_flash_attention_for_cpu.default):
        _stock(ctx, node)
    for node in ctx.nodes(aten.bmm.default):
        match = spelled(node)
        if match is not None:
            _replace_spelled(ctx, match)


def _reason(ctx: Context, q: Any, k: Any, v: Any, mask: Any, scores: Any = None) -> str | None:
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
    query, root = val(match.q), match.root
    if query is None:
        return
    scores = match.scores
    if not 0.0 < scores.scale < math.inf:
        ctx.reject("attention", root, _OP, f"the scale is {scores.scale}")
        return
    made: list[fx.Node] = []
    key, value = groups or (match.k, match.v)
    if match.transpose:
        key = ctx.call(root, aten.permute.default, (key, [0, 1, 3, 2]))
        made.append(key)
    mask = _mask(ctx, match, query.dtype, made)
    reason = mask if isinstance(mask, str) else _reason(ctx, match.q, key, value, mask)
    if reason is not None:
        ctx.reject("attention", root, _OP, reason)
    else:
        args = (match.q, key, value, mask, scores.scale)
        text = "matmul, softmax, matmul" + (", mask" if scores.masks else "")
        text += (", shared heads" if groups else "") + (", softcap" if scores.cap else "")
        kwargs = {"softcap": scores.cap} if scores.cap else {}
        ctx.replace("attention", root, match.interior, ipex.attention.default, args, text, kwargs)
    ctx.drop(made)


def _mask(
    ctx: Context, match: Match, dtype: torch.dtype, made: list[fx.Node]
) -> fx.Node | str | None:
    """Return all masks as one that is added to the scores, or why that cannot be.

    ``where(mask, scores, -1e4)`` becomes an addition of 0 and `_HIDES`: the scores vanish beside it, also in a row that
    has no others.
    """
    total: fx.Node | None = None
    for kind, mask, fill in reversed(match.scores.masks):
        if val(mask) is None:
            return f"{mask} is no mask"
        if kind == "add":
            new = mask if total is None else ctx.call(match.root, aten.add.Tensor, (total, mask))
        elif fill > -1e4:
            return f"the scores do not vanish beside {fill:g}"
        else:
            # float16 does not hold the number.
            held = {"dtype": torch.float32 if dtype == torch.float16 else dtype}
            low = max(min(fill, _HIDES), torch.finfo(held["dtype"]).min)
            if match.safe and fill == -math.inf:
                low = fill
            hidden = ctx.call(match.root, aten.full.default, ([], low), held)
            if total is None:
                seen = ctx.call(match.root, aten.full.default, ([], 0.0), held)
            else:
                seen = ctx.call(match.root, CASTS[0], (total, held["dtype"]))
            pair = (seen, hidden) if kind == "keep" else (hidden, seen)
            new = ctx.call(match.root, aten.where.self, (mask, *pair))
            made += [hidden, seen]
        if new is not mask:
            made.append(new)
        total = new
    return total
