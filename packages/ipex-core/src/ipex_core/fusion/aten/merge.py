# SPDX-License-Identifier: Apache-2.0
"""Several calls that become one: linear layers that read the same tensor, and embedding bags of several tables.

Both run behind the patterns that see single layers, so a layer that something has moved into, such as the two of a
gated MLP or one with an activation, is not one of these any more.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ipex_core.fusion.aten import (
    VIEWING,
    Context,
    arguments,
    is_call,
    items,
    same,
    shape_of,
    val,
)
from ipex_core.kernels.policy import prefer_merged_bags, prefer_merged_linears
from ipex_core.library.spec import FLOATS
from ipex_core.util.symbolic import hints

aten = torch.ops.aten
ipex = torch.ops.ipex

# ---- linear layers


def merge_linears(ctx: Context) -> None:
    """Give layers that read the same tensor, such as query, key and value, one packed weight and one call."""
    groups: dict[tuple[fx.Node, bool], list[fx.Node]] = {}
    for node in ctx.nodes(ipex.linear.default):
        if node in ctx.weights and len(node.args) == 4 and isinstance(node.args[0], fx.Node):
            groups.setdefault((node.args[0], node.args[3] is None), []).append(node)
    for layers in groups.values():
        if len(layers) > 1:
            _merge(ctx, layers)


def _merge(ctx: Context, layers: list[fx.Node]) -> None:
    first = layers[0]
    reason = _against_merging(ctx, layers)
    if reason is not None:
        ctx.reject("merged", first, "ipex::linear", reason)
        return
    x = first.args[0]
    weights, biases = zip(*(ctx.weights[layer] for layer in layers), strict=True)
    for constant in (*weights, *(b for b in biases if b is not None)):
        _hoist(constant, first)
    rows = ctx.call(first, aten.cat.default, (list(weights),))
    packed = ctx.call(first, ipex.pack_linear_weight.default, (rows,))
    made = [packed, rows]
    bias = None
    if biases[0] is not None:
        bias = ctx.call(first, aten.cat.default, (list(biases),))
        made.append(bias)
    sizes = [val(layer).shape[-1] for layer in layers]  # type: ignore[union-attr]
    wide = ctx.call(first, ipex.linear.default, (x, packed, sum(sizes), bias))
    last, begin = len(shape_of(wide) or ()) - 1, 0
    parts = []
    for size in sizes:
        parts.append(ctx.call(first, aten.slice.Tensor, (wide, last, begin, begin + size)))
        begin += size
    # Rows of the results are further apart now: are the views of them still views?
    values = [_viewed(ctx, layer, part) for layer, part in zip(layers, parts, strict=True)]
    if None in values:
        ctx.drop([*parts, wide, *made])
        ctx.reject("merged", first, "ipex::linear", "a view needs the rows of one result together")
        return
    for changed in values:
        for node, value in (changed or {}).items():
            node.meta["val"] = value
    unused = [layer.args[1] for layer in layers]
    ctx.fused("merged", first, wide, f"{len(layers)} layers of one input")
    for layer, part in zip(layers, parts, strict=True):
        layer.replace_all_uses_with(part)
    ctx.drop([*layers, *(node for node in unused if isinstance(node, fx.Node))])


def _against_merging(ctx: Context, layers: list[fx.Node]) -> str | None:
    inputs = shape_of(layers[0].args[0])
    values = [val(layer) for layer in layers]
    if inputs is None or any(value is None for value in values):
        return "shapes are unknown"
    biases = [ctx.weights[layer][1] for layer in layers]
    if any(bias is not None and not ctx.is_constant(bias) for bias in biases):
        return "a bias is not frozen"
    kinds = {val(bias).dtype for bias in biases if bias is not None}  # type: ignore[union-attr]
    if len(kinds) > 1:
        return "the biases differ in dtype"
    rows = math.prod(hints(inputs[:-1]))
    if not ctx.always and not prefer_merged_linears(rows):
        return f"layers of {rows} rows may be as fast one by one"
    return None


def _hoist(node: fx.Node, before: fx.Node) -> None:
    """Move a constant, with what it is made of, in front of a node."""
    if node.op == "call_function" and before < node:
        for part in node.all_input_nodes:
            _hoist(part, before)
        before.prepend(node)


def _viewed(ctx: Context, node: fx.Node, part: fx.Node) -> dict[fx.Node, Any] | None:
    """Return the values of all views of a node when it lies like ``part``; None where one cannot be made."""
    found: dict[fx.Node, Any] = {node: part.meta["val"]}
    pending = [node]
    with ctx.fake_mode():
        while pending:
            at = pending.pop()
            for user in at.users:
                if user.target not in VIEWING:
                    continue
                args = fx.node.map_arg(user.args, lambda n: found.get(n, n.meta.get("val")))
                try:
                    found[user] = user.target(*args)
                except (RuntimeError, ValueError):
                    return None
                pending.append(user)
    del found[node]
    return found


# ---- embedding bags

_BAG = (aten._embedding_bag_forward_only.default, aten._embedding_bag.default)
_MODES = ("sum", "mean")


def merge_bags(ctx: Context) -> None:
    """Look all tables up in one call whose embedding bags have one shape."""
    groups: dict[Any, list[fx.Node]] = {}
    for node in ctx.nodes(*_BAG):
        given = arguments(node)
        reason = _against_bag(ctx, node, given)
        if reason is not None:
            ctx.reject("bags", node, "ipex::merged_embeddingbag_forward", reason)
            continue
        weight, indices, offsets = (val(given[n]) for n in ("weight", "indices", "offsets"))
        assert weight is not None and indices is not None and offsets is not None
        # Symbolic sizes cannot be keys; those with one name are equal.
        key = (
            weight.dtype,
            str(weight.shape[1]),
            indices.dtype,
            str(offsets.shape[0]),
            given["mode"],
            given["include_last_offset"],
        )
        groups.setdefault(key, []).append(node)
    for (*_, mode, last), bags in groups.items():
        if len(bags) > 1:
            _merge_bags(ctx, bags, _MODES[mode], bool(last))


def _against_bag(ctx: Context, node: fx.Node, given: dict[str, Any]) -> str | None:
    values = [val(given[name]) for name in ("weight", "indices", "offsets")]
    if any(value is None for value in values):
        return "shapes are unknown"
    weight, indices, offsets = values
    assert weight is not None and indices is not None and offsets is not None
    if weight.device.type != "cpu" or weight.dtype not in FLOATS:
        return f"the table is {weight.dtype} on {weight.device}"
    if indices.dtype != offsets.dtype or indices.dim() != 1:
        return "indices and offsets differ in dtype"
    if given["mode"] not in (0, 1):
        return "neither sums nor means"
    if given["per_sample_weights"] is not None:
        return "there is a factor for each index"
    if given.get("padding_idx", -1) != -1:
        return "a row is padding"
    if any(items(node, index) for index in (1, 2, 3)):
        return "more than the bags is used"
    bags = hints(offsets.shape)[0]
    if not ctx.always and not prefer_merged_bags(bags):
        return f"{bags} bags may be as fast one table after the other"
    if not ctx.kernels("merged_embeddingbag_forward"):
        return "no kernel package implements merged_embeddingbag_forward"
    return None


def _merge_bags(ctx: Context, bags: list[fx.Node], mode: str, last: bool) -> None:
    from torch._inductor.virtualized import V

    op = "ipex::merged_embeddingbag_forward"
    results = [item for bag in bags for item in items(bag, 0)]
    end = max(bags)
    if len(results) != len(bags):
        ctx.reject("bags", end, op, "a result is not used")
        return
    if any(user < end for result in results for user in result.users):
        ctx.reject("bags", end, op, "a result is used before the last table is looked up")
        return
    given = [arguments(bag) for bag in bags]
    weights, indices, offsets = ([g[n] for g in given] for n in ("weight", "indices", "offsets"))
    text = f"{len(bags)} tables in one call"
    joined = _joined(results)
    if joined is not None and ctx.kernels("merged_embeddingbag_cat_forward"):
        cat, dense = joined
        target = ipex.merged_embeddingbag_cat_forward.default
        # Behind the tables: the dense features may be made after them.
        args = (weights, indices, offsets, dense, mode, last)
        interior = [*results, *bags]
        if ctx.replace("bags", cat, interior, target, args, f"{text}, with dense features"):
            return
    if V.aot_compilation:
        ctx.reject("bags", end, op, "a file of torch cannot hold its empty list of factors")
        return
    target = ipex.merged_embeddingbag_forward.default
    merged = ctx.call(end, target, (weights, indices, offsets, [], mode, last))
    ctx.fused("bags", end, merged, text)
    for index, result in enumerate(results):
        part = ctx.call(end, aten.select.int, (merged, 0, index))
        result.replace_all_uses_with(part)
    ctx.drop([*results, *bags])


def _joined(results: list[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """Match ``cat([dense, *bags], 1)``; return it and the dense features."""
    user = next(iter(results[0].users), None)
    if not is_call(user, aten.cat.default) or any(list(r.users) != [user] for r in results):
        return None
    assert user is not None
    parts = user.args[0]
    dim = user.args[1] if len(user.args) > 1 else 0
    assert isinstance(parts, (list, tuple))
    if dim not in (1, -1) or list(parts[1:]) != results or not isinstance(parts[0], fx.Node):
        return None
    dense, bag = val(parts[0]), val(results[0])
    if dense is None or bag is None or dense.dtype != bag.dtype:
        return None
    return (user, parts[0]) if same(dense.shape, bag.shape) else None
