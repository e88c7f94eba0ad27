# SPDX-License-Identifier: Apache-2.0
"""Linear layers: frozen weights are packed for our kernel, and what follows a layer moves into its kernel.

Three steps, each of use without the others:

* `pack_linears`: ``addmm`` and ``mm`` with a weight that freezing makes constant become ``ipex::linear`` (float32,
  bfloat16, float16), for few rows above all.
* `fuse_gated`: ``silu(x @ gate.T) * (x @ up.T)`` becomes one ``ipex::linear`` on the interleaved weights.
* `fuse_post_ops`: an activation, a product and up to two additions move into any of ``ipex::linear``,
  ``ipex::woq_linear`` and ``ipex::int8_linear``, also those that `ipex.optimize` or `ipex.quantization` have put there.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ipex_core.fusion.aten.epilogue import Activation, find_activations
from ipex_core.fusion.aten.graph import (
    DEVICES,
    PURE,
    Context,
    binary,
    describe,
    is_call,
    same,
    shape_of,
    static,
    val,
)
from ipex_core.fusion.aten.timing import measured_linear
from ipex_core.kernels.policy import choose_linear
from ipex_core.library.spec import FLOATS
from ipex_core.packing.dense import interleave_gate_up
from ipex_core.util.symbolic import hints

__all__ = [
    "VIEWS",
    "arguments",
    "fuse_gated",
    "fuse_post_ops",
    "pack_linears",
    "unflattened",
]

aten = torch.ops.aten
ipex = torch.ops.ipex

Tensor = torch.Tensor

_OP = "ipex::linear"
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_TARGETS = (ipex.linear.default, ipex.woq_linear.default, ipex.int8_linear.default)

_library = torch.library.Library("ipex_core", "FRAGMENT")
_library.define("interleave_gate_up(Tensor gate, Tensor up) -> Tensor")
_library.impl("interleave_gate_up", interleave_gate_up, "CompositeExplicitAutograd")


def _interleaved_fake(gate: Tensor, up: Tensor) -> Tensor:
    blocks = -(-gate.shape[0] // 32)
    return gate.new_empty(2 * 32 * blocks, *gate.shape[1:])


torch.library.register_fake("ipex_core::interleave_gate_up", _interleaved_fake, lib=_library)


# ---- packing


def pack_linears(ctx: Context) -> None:
    """Replace matrix products with constant weights by ``ipex::linear``."""
    activations = {a.source: a for a in find_activations(ctx).values()}
    for node in ctx.nodes(aten.addmm.default, aten.mm.default):
        _pack(ctx, node, activations)


def _pack(ctx: Context, node: fx.Node, activations: dict[fx.Node, Activation]) -> None:
    bias, x, weight = node.args[:3] if node.target is aten.addmm.default else (None, *node.args[:2])
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    if not ctx.is_constant(weight):
        if ctx.is_constant(x) or not _parameter_like(weight):
            return  # a product of activations: no linear layer
        ctx.reject("linear", node, _OP, "the weight is not frozen")
        return
    root, interior, source = unflattened(node, x)
    followed = activations.get(root)
    if followed is not None and ctx.outside_user((root, *followed.interior), followed.root):
        followed = None
    kind = "none" if followed is None else followed.kind
    reason = _against_packing(ctx, node, bias, x, weight, kind)
    if reason is not None:
        ctx.reject("linear", node, _OP, reason)
        return
    rows = _rows(ctx, weight, node)
    packed = ctx.call(node, ipex.pack_linear_weight.default, (rows,))
    n = val(rows).shape[0]  # type: ignore[union-attr]
    new = ctx.replace(
        "linear", root, interior, ipex.linear.default, (source, packed, n, bias), "frozen weight"
    )
    if new is None:
        ctx.drop([packed, rows])
    else:
        ctx.weights[new] = (rows, bias)  # type: ignore[assignment]


def _parameter_like(weight: fx.Node) -> bool:
    while weight.op == "call_function" and weight.target in PURE and weight.all_input_nodes:
        weight = weight.all_input_nodes[0]
    return weight.op in ("placeholder", "get_attr")


def _against_packing(
    ctx: Context, node: fx.Node, bias: Any, x: fx.Node, weight: fx.Node, activation: str
) -> str | None:
    left, right, out = val(x), val(weight), val(node)
    if left is None or right is None or out is None:
        return "shapes are unknown"
    if 0 in right.shape:
        return "the weight is empty"
    if any(v.device.type != "cpu" or v.dtype not in FLOATS for v in (left, right, out)):
        return f"the operands are {describe(x)} and {describe(weight)}"
    if not left.dtype == right.dtype == out.dtype:
        return f"the operands are {describe(x)} and {describe(weight)}"
    if any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return "alpha or beta is not 1"
    if bias is not None:
        given = val(bias)
        if given is None or not same(given.shape, right.shape[1:]):
            return f"the bias is {describe(bias)}"
        if given.dtype not in (left.dtype, torch.float32):
            return f"the bias is {describe(bias)}"
    if not static(right.shape):
        return "the weight has dynamic sizes"
    if left.dtype == torch.float32 and torch.backends.mkldnn.matmul.fp32_precision != "none":  # type: ignore[attr-defined]
        return "reduced precision of float32 products is on"
    if not ctx.kernels("linear"):
        return "no kernel package implements linear"
    if ctx.always:
        return None
    rows = hints(left.shape[:1])[0] if static(left.shape[:1]) else None
    k, n = (int(size) for size in right.shape)
    choice = choose_linear(left.dtype, n, k, rows)
    if choice.form != "ipex":
        return choice.reason
    if rows is None:
        return None
    return measured_linear(left.dtype, n, k, rows, bias is not None, activation)


def _rows(ctx: Context, weight: fx.Node, before: fx.Node) -> fx.Node:
    """Return the weight as ``[N, K]``: before its transposition, if that is what made it ``[K, N]``."""
    swaps = is_call(weight, aten.t.default, aten.transpose.int) or (
        is_call(weight, aten.permute.default) and weight.args[1] == [1, 0]
    )
    inner = weight.args[0] if swaps else ctx.call(before, aten.permute.default, (weight, [1, 0]))
    assert isinstance(inner, fx.Node)
    return ctx.call(
        before, aten.clone.default, (inner,), {"memory_format": torch.contiguous_format}
    )


def unflattened(node: fx.Node, x: fx.Node) -> tuple[fx.Node, list[fx.Node], fx.Node]:
    """Leave out the views to 2-D and back around a product; return root, interior and input."""
    if len(node.users) == 1 and is_call(x, *VIEWS):
        root, source = next(iter(node.users)), x.args[0]
        inner, outer = shape_of(source), shape_of(root)
        if (
            is_call(root, *VIEWS)
            and inner is not None
            and outer is not None
            and same(inner[:-1], outer[:-1])
            and same(inner[-1:], (shape_of(x) or ())[-1:])
            and same(outer[-1:], (shape_of(node) or ())[-1:])
        ):
            assert isinstance(source, fx.Node)
            return root, [node], source
    return node, [], x


# ---- gates


def fuse_gated(ctx: Context) -> None:
    """Fuse gated MLPs, into one linear layer or into ``ipex::silu_mul`` and ``ipex::gelu_mul``."""
    activations = find_activations(ctx)
    for node in ctx.nodes(aten.mul.Tensor):
        pair = binary(node, aten.mul.Tensor)
        if pair is None or node in activations:
            continue
        for gate, up in (pair, pair[::-1]):
            found = activations.get(gate)
            if found is None or found.kind == "relu" or not isinstance(up, fx.Node):
                continue
            if not same(shape_of(gate), shape_of(up)) or val(gate).dtype != val(node).dtype:  # type: ignore[union-attr]
                continue
            if not (_one_layer(ctx, node, found, up) or _joint_layer(ctx, node, found, up)):
                _two_tensors(ctx, node, found, up)
            break


def _one_layer(ctx: Context, node: fx.Node, gate: Activation, up: fx.Node) -> bool:
    layers = [gate.source, up]
    if any(layer not in ctx.weights or len(layer.args) != 4 for layer in layers):
        return False
    if layers[0] is up or layers[0].args[0] is not up.args[0] or layers[0].args[2] != up.args[2]:
        return False
    (first, first_bias), (second, second_bias) = (ctx.weights[layer] for layer in layers)
    if (first_bias is None) != (second_bias is None):
        return False
    interior = [gate.root, *gate.interior, *layers]
    blocker = ctx.outside_user(interior, node)
    if blocker is not None:
        ctx.reject("gated", node, _OP, f"{blocker.name} inside the pattern has another user")
        return True
    biases = None if first_bias is None else (first_bias, second_bias)
    unused = [n for layer in layers for n in layer.all_input_nodes[1:2]]
    done = _gate(ctx, node, gate, max(layers), up.args[2], interior, ((first, second), biases))
    if done:
        ctx.drop(unused)
    return done


def _gate(
    ctx: Context,
    node: fx.Node,
    gate: Activation,
    layer: fx.Node,
    size: Any,
    interior: list[fx.Node],
    parts: tuple[tuple[Any, Any], tuple[Any, Any] | None],
) -> bool:
    """Put one linear layer with a gate in the place of ``node``; ``parts`` are its two weights and biases."""
    interleave = torch.ops.ipex_core.interleave_gate_up.default
    both = ctx.call(layer, interleave, parts[0])
    packed = ctx.call(layer, ipex.pack_linear_weight.default, (both,))
    bias = None if parts[1] is None else ctx.call(layer, interleave, parts[1])
    args = (layer.args[0], packed, size, bias, None, "none", None, None, gate.kind)
    new = ctx.replace("gated", node, interior, ipex.linear.default, args, f"{gate.kind}(gate) * up")
    if new is None:
        ctx.drop([n for n in (packed, both, bias) if n is not None])
    return new is not None


def _joint_layer(ctx: Context, node: fx.Node, gate: Activation, up: fx.Node) -> bool:
    """Fuse a gate and a factor that are the two halves of the result of one layer (Phi-3, GLM)."""
    left, right = _half(gate.source), _half(up)
    if left is None or right is None:
        return False
    (layer, first, cut), (other, second, _) = left, right
    if layer is not other or {first, second} != {0, 1} or layer not in ctx.weights:
        return False
    if len(layer.args) != 4:
        return False
    interior = [gate.root, *gate.interior, gate.source, up, layer]
    interior += [cut] if cut is not layer else []
    blocker = ctx.outside_user(interior, node)
    if blocker is not None:
        ctx.reject("gated", node, _OP, f"{blocker.name} inside the pattern has another user")
        return True
    weight, bias = ctx.weights[layer]
    size = layer.args[2] // 2  # type: ignore[operator]

    def part(x: fx.Node, index: int) -> fx.Node:
        return ctx.call(layer, aten.slice.Tensor, (x, 0, index * size, (index + 1) * size))

    weights = (part(weight, first), part(weight, second))
    biases = None if bias is None else (part(bias, first), part(bias, second))
    unused = layer.all_input_nodes[1:2]
    done = _gate(ctx, node, gate, layer, size, interior, (weights, biases))
    ctx.drop(unused if done else [*weights, *(biases or ())])
    return done


def _half(node: Any) -> tuple[fx.Node, int, fx.Node] | None:
    """Match one half of the last dimension; return what is halved, 0 or 1, and the op that cuts it."""
    if is_call(node, aten.slice.Tensor):
        given = arguments(node)
        source, cut, dim = node.args[0], node.args[0], given["dim"]
        start, end, step = given["start"] or 0, given["end"], given["step"]
    elif is_call(node, operator.getitem) and is_call(node.args[0], aten.split.Tensor):
        cut, step = node.args[0], 1
        given = arguments(cut)
        source, dim = cut.args[0], given["dim"]
        if not isinstance(given["split_size"], int):
            return None
        start, end = (i * given["split_size"] for i in (node.args[1], node.args[1] + 1))
    else:
        return None
    shape = shape_of(source)
    if not shape or not isinstance(shape[-1], int) or dim not in (-1, len(shape) - 1) or step != 1:
        return None
    size = shape[-1]
    end = size if end is None else end
    if isinstance(start, int) and isinstance(end, int) and size % 2 == 0:
        start, end = (i + size if i < 0 else min(i, size) for i in (start, end))
        if (start, end) in ((0, size // 2), (size // 2, size)):
            return source, int(start > 0), cut
    return None


def _two_tensors(ctx: Context, node: fx.Node, gate: Activation, up: fx.Node) -> None:
    if gate.source.target in _TARGETS or up.target in _TARGETS:
        return  # the linear layer takes it
    name = "silu_mul" if gate.kind == "silu" else "gelu_mul"
    op = f"ipex::{name}"
    value = val(gate.source)
    if value is None or value.dtype not in FLOATS or value.device.type not in DEVICES:
        return
    if not (_heavy(gate.source) and _heavy(up)):
        ctx.reject("gated", node, op, "Inductor fuses it with the elementwise ops before it")
    elif not ctx.kernels(name):
        ctx.reject("gated", node, op, f"no kernel package implements {name}")
    else:
        target = ipex.silu_mul.default if gate.kind == "silu" else ipex.gelu_mul.default
        args: tuple[Any, ...] = (gate.source, up)
        if gate.kind != "silu":
            args += ("tanh" if gate.kind == "gelu_tanh" else "none",)
        interior = [gate.root, *gate.interior]
        ctx.replace("gated", node, interior, target, args, f"{gate.kind}(gate) * up")


def _heavy(node: Any) -> bool:
    """Return whether a tensor comes out of an op that Inductor calls and does not generate."""
    while is_call(node, *VIEWS):
        node = node.args[0]
    return is_call(node, aten.mm.default, aten.addmm.default, aten.bmm.default) or (
        isinstance(node, fx.Node) and getattr(node.target, "namespace", "") in ("ipex", "mkldnn")
    )


# ---- what follows


def fuse_post_ops(ctx: Context) -> None:
    """Move activations, products and additions that follow linear layers into them."""
    activations = {a.source: a for a in find_activations(ctx).values()}
    for node in ctx.nodes(*_TARGETS):
        _follow(ctx, node, activations)


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call of an op by their names, with defaults."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    given.update(zip((a.name for a in schema.arguments), node.args, strict=False))
    return {**given, **node.kwargs}


def _follow(ctx: Context, node: fx.Node, activations: dict[fx.Node, Activation]) -> None:
    while True:
        given = arguments(node)
        if given.get("output_scale"):
            return  # the result is quantized
        idle = given["residual"] is None and given["residual2"] is None
        found = activations.get(node)
        new: fx.Node | None = None
        if found is not None:
            if given["activation"] != "none" or given["gate"] != "none" or given["mul"] is not None:
                return
            if not idle:
                return
            given["activation"] = found.kind
            inside = [node, *found.interior]
            new = _exchange(ctx, found.root, inside, node, given, found.kind)
        elif len(node.users) == 1:
            root = next(iter(node.users))
            pair = binary(root, aten.mul.Tensor, aten.add.Tensor)
            if pair is None or pair[0] is pair[1]:
                return
            other = pair[1] if pair[0] is node else pair[0]
            value, own = val(other), val(node)
            if value is None or own is None:
                return
            product = root.target is aten.mul.Tensor
            slot = "mul" if product else "residual" if given["residual"] is None else "residual2"
            if given[slot] is not None or (product and not idle):
                return
            if _is_bias(node, given, root, value):
                slot, own = "bias", value
            if value.dtype != own.dtype or not same(value.shape, own.shape):
                if value.dim():
                    what = "factor" if product else "addend"
                    ctx.reject(
                        "post_op", root, str(node.target), f"the {what} is {describe(other)}"
                    )
                return
            given[slot] = other
            new = _exchange(ctx, root, [node], node, given, "product" if product else "addition")
            if slot == "bias" and new is not None and root in activations:
                activations[new] = activations[root]
        if new is None:
            return
        node = new


def _is_bias(node: fx.Node, given: dict[str, Any], root: fx.Node, value: Tensor) -> bool:
    """Return whether an addend is the bias that quantized layers of other libraries add themselves."""
    own = val(node)
    if node.target is not ipex.woq_linear.default or root.target is not aten.add.Tensor:
        return False
    names = ("activation", "gate")
    free = given["bias"] is None and given["mul"] is None and given["residual"] is None
    free = free and all(given[name] == "none" for name in names)
    return free and own is not None and own.dim() > 1 and same(value.shape, own.shape[-1:])


def _exchange(
    ctx: Context,
    root: fx.Node,
    interior: list[fx.Node],
    node: fx.Node,
    given: dict[str, Any],
    text: str,
) -> fx.Node | None:
    target = node.target
    schema = target._schema  # type: ignore[union-attr]
    args = tuple(given[a.name] for a in schema.arguments)
    return ctx.replace("post_op", root, interior, target, args, text)
