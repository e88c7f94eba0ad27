# SPDX-License-Identifier: Apache-2.0
"""The choice of experts in ATen graphs: the largest probabilities of each row."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ipex_core.fusion import SHARES, SOFTMAX
from ipex_core.fusion.aten import (
    CASTS,
    DEVICES,
    READER,
    Context,
    arguments,
    between,
    describe,
    is_call,
    items,
    shape_of,
    uncast,
    val,
)
from ipex_core.library.spec import FLOATS

aten = torch.ops.aten
ipex = torch.ops.ipex
prims = torch.ops.prims

_OP = "ipex::moe_routing"
#: Numbers of experts, and of those that are chosen: the op looks through a row once for each, which torch does not.
_MOST, _MOST_CHOSEN = 512, 32


def fuse_routing(ctx: Context) -> None:
    """Replace ``softmax(logits).topk(k)``, also divided by its sum, and the softmax of ``logits.topk(k)``.

    Of equal probabilities the op takes the expert in front, where torch may take any.
    """
    for node in ctx.nodes(aten.topk.default):
        given = arguments(node)
        rows = len(shape_of(node.args[0]) or ()) == 2 and given["dim"] in (-1, 1)
        values, indices = items(node, 0), items(node, 1)
        k = given["k"]
        if not rows or not given["largest"] or len(values) != 1 or not isinstance(k, int) or k < 1:
            continue
        softmax = READER.find(SOFTMAX, node.args[0])
        if softmax is not None:
            logits, probabilities, before = softmax["scores"], node.args[0], softmax.passed
            root, behind = _after(values[0], SHARES)
        else:
            logits, before = node.args[0], ()
            root, behind = _after(values[0], SOFTMAX)
            probabilities = root
            if not behind:
                continue  # other numbers than the experts of tokens
        logits = uncast(logits)
        inside = {*before, node, *values, *behind, *indices}
        reason = _reason(ctx, logits, probabilities, k)
        inner = inside - {root, *indices}
        blocker = next((n.name for n in inner if not inside.issuperset(n.users)), None)
        if reason is None and blocker is not None:
            reason = f"{blocker} inside the pattern has another user"
        if reason is not None:
            ctx.reject("routing", node, _OP, reason)
            continue
        call = ctx.call(node, ipex.moe_routing.default, (logits, k, bool(behind)))
        root.replace_all_uses_with(ctx.call(node, operator.getitem, (call, 0)))
        inside |= _give(ctx, node, ctx.call(node, operator.getitem, (call, 1)), indices)
        ctx.fused("routing", node, call, f"{k} of {describe(logits)}")
        ctx.drop(inside)


def _after(values: fx.Node, description: Any) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """Return the quotient that fits a description of the values, and what is between; or the values and nothing.

    Nothing else may read the values.
    """
    reached = [values]
    for _ in range(4):
        reached = [user for node in reached for user in node.users]
        for node in reached:
            found = READER.find(description, node) if is_call(node, aten.div.Tensor) else None
            if found is None or uncast(found["scores"]) is not values:
                continue
            passed = (*found.passed, *between(found["scores"], values))
            if set(passed).issuperset(values.users):
                return node, passed
    return values, ()


def _reason(ctx: Context, logits: Any, probabilities: Any, k: int) -> str | None:
    """Return why the op cannot do it, or None."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    given, computed = val(logits), val(probabilities)
    if given is None or given.device.type not in DEVICES or given.dtype not in FLOATS:
        return f"no kernel for {describe(logits)}"
    if not statically_known_true(given.shape[1] <= _MOST) or k > _MOST_CHOSEN:
        return f"{k} of {given.shape[1]} may be more than {_MOST_CHOSEN} of {_MOST}"
    if computed is None or computed.dtype != torch.float32:
        return f"the probabilities must be float32, they are {describe(probabilities)}"
    return None if ctx.kernels("moe_routing") else "no kernel package implements moe_routing"


def _give(ctx: Context, node: fx.Node, ids: fx.Node, indices: list[fx.Node]) -> set[fx.Node]:
    """Let what reads indices read ids, which are int32; return the conversions that are not needed any more."""
    done = set()
    for index in indices:
        for user in list(index.users):
            value = val(user)
            if is_call(user, *CASTS) and value is not None and value.dtype == torch.int32:
                user.replace_all_uses_with(ids)
                done.add(user)
        if set(index.users) - done:
            wide = (prims.convert_element_type.default, (ids, torch.int64))
            index.replace_all_uses_with(ctx.call(node, *wide), lambda user: user not in done)
    return done
