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

from ipex_core.fusion.aten.attention_decomposed import Match, spelled
from ipex_core.fusion.aten.attention_scores import VIEWS, sum_masks
from ipex_core.fusion.aten.graph import Context
from ipex_core.fusion.aten.nodes import FLOATS, describe, is_call, items, same, shape_of, val
from ipex_core.kernels.policy import prefer_ipex_attention
from ipex_core.util.symbolic import hints

__all__ = ["fuse_attention"]

aten = torch.ops.aten
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
