# SPDX-License-Identifier: Apache-2.0
"""Linear layers that `ipex.optimize` has packed go back to Inductor where its library was measured to be faster.

The choice of `ipex.optimize` is one against the stock op, which packs nothing. A frozen graph packs its weights for MKL
in float32, and that is faster on some CPUs; see `timing`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional

from ipex_core.fusion.aten.graph import Context, static, val
from ipex_core.fusion.aten.linear import arguments
from ipex_core.fusion.aten.timing import measured_linear
from ipex_core.ops.linear.epilogue import activate, apply_epilogue, weight_rows
from ipex_core.packing.dense import deinterleave_gate_up

__all__ = ["unpack_linears"]

ipex = torch.ops.ipex

Tensor = torch.Tensor


def unpack_linears(ctx: Context) -> None:
    """Replace ``ipex::linear`` on packed weights by plain ops where these are faster."""
    if ctx.always or torch.are_deterministic_algorithms_enabled():
        return
    for node in ctx.nodes(ipex.linear.default):
        given = arguments(node)
        x, bias = val(given["x"]), given["bias"]
        if x is None or x.dtype != torch.float32 or not static(x.shape):
            continue
        if not ctx.is_constant(given["packed_weight"]) or 0 in x.shape:
            continue
        n = weight_rows(given["out_features"], given["gate"])
        k, rows = int(x.shape[-1]), x.shape[:-1].numel()
        reason = measured_linear(x.dtype, n, k, rows, bias is not None, given["activation"])
        if reason is not None:
            ctx.reject("linear", node, "ipex::linear", reason)
            _unpack(ctx, node, given, n)


def _plain(
    x: Tensor,
    packed_weight: Tensor,
    rows: int,
    out_features: int,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    mul: Tensor | None,
    residual2: Tensor | None,
    gate: str,
) -> Tensor:
    weight = ipex.unpack_linear_weight(packed_weight, rows, x.shape[-1], x.dtype)
    if gate == "none":
        y = activate(functional.linear(x, weight, bias), activation)
    else:
        weights = deinterleave_gate_up(weight, out_features)
        biases = (None, None) if bias is None else deinterleave_gate_up(bias, out_features)
        first, up = (functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
        y = activate(first, gate) * up
    return apply_epilogue(y, out_features, None, "none", mul, residual, residual2)


def _unpack(ctx: Context, node: fx.Node, given: dict[str, Any], n: int) -> None:
    """Put the plain ops of a layer in its place."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    names = [name for name, value in given.items() if isinstance(value, fx.Node)]

    def function(*values: Tensor) -> Tensor:
        return _plain(rows=n, **{**given, **dict(zip(names, values, strict=True))})

    with ctx.fake_mode(), torch.no_grad():
        values = [val(given[name]) for name in names]
        plain = make_fx(function, select_decomp_table())(*values).graph
    inputs = plain.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(inputs, (given[n] for n in names), strict=True))
    with ctx.graph.inserting_before(node):
        result = ctx.graph.graph_copy(plain, copies)
    assert isinstance(result, fx.Node)
    for name in ("stack_trace", "nn_module_stack"):
        for new in copies.values():
            if name in node.meta and name not in new.meta and new.op == "call_function":
                new.meta[name] = node.meta[name]
    node.replace_all_uses_with(result)
    ctx.drop([node])
