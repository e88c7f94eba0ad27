# SPDX-License-Identifier: Apache-2.0
"""Linear layers in ATen graphs, and what follows them: activations, products and sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from ipex_core.fusion import ACTIVATIONS
from ipex_core.fusion.aten import (
    DEVICES,
    PURE,
    READER,
    Context,
    arguments,
    between,
    binary,
    describe,
    half_of_last,
    is_call,
    narrowed,
    same,
    shape_of,
    static,
    uncast,
    val,
)
from ipex_core.kernels import providers
from ipex_core.kernels.policy import choose_linear, fastest, numbers
from ipex_core.library.spec import FLOATS
from ipex_core.ops.linear import activate, apply_epilogue, weight_rows
from ipex_core.packing.dense import deinterleave_gate_up, interleave_gate_up
from ipex_core.util.symbolic import hints

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Activation:
    """``root = kind(source)``; the interior lies between."""

    kind: str
    root: fx.Node
    source: fx.Node
    interior: tuple[fx.Node, ...]


def find_activations(ctx: Context) -> dict[fx.Node, Activation]:
    """Return the activations of a graph by their root."""
    places: dict[fx.Node, Activation] = {}
    for node in ctx.graph.nodes:
        for kind, description in ACTIVATIONS.items():
            found = READER.find(description, node)
            if found is not None:
                match = _with_casts(Activation(kind, node, found["x"], found.passed[1:]))
                places[match.root] = match
                break
    return places


def _with_casts(match: Activation) -> Activation:
    """Widen a match over the conversions to float32 and back that surround it in 16 bit."""
    source = uncast(match.source)
    outer, inner = val(match.root), val(source)
    if source is match.source or outer is None or inner is None or inner.dtype not in FLOATS:
        return match
    if outer.dtype == inner.dtype:
        return match
    narrow = narrowed(match.root, inner.dtype)
    if narrow is None:
        return match
    inside = (match.root, *match.interior, *between(match.source, source))
    return Activation(match.kind, narrow, source, inside)


# --- linear layers ----------------------------------------------------------------------------------------------------


ipex = torch.ops.ipex

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

# What stands for a layer of torch while a graph is traced, which would take `aten::linear` apart.
_library.define("torch_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("torch_linear", functional.linear, "CompositeExplicitAutograd")
torch.library.register_fake(
    "ipex_core::torch_linear",
    lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
    lib=_library,
)


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
    left, right = half_of_last(gate.source), half_of_last(up)
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


# --- timing stock code and ours while a graph is compiled -----------------------------------------------------------

#: Seconds that a measurement may go on; the whole of a network should be far below the time that compiling takes.
_SECONDS = 0.04

_known: dict[Any, str | None] = {}


def against_ours(
    key: tuple[Any, ...],
    runs: Callable[[], dict[str, Callable[[], torch.Tensor]]],
    default: str = "stock",
    cold: bool = False,
) -> str | None:
    """Return why stock code is to run, None if ours was measured to be faster; once in a process.

    Args:
        key: What the times depend on, but for the number of threads.
        runs: Makes the candidates, ``"stock"`` and ``"ipex"``, on data of their own.
        default: The one that is taken unless the other is faster by more than times differ from run to run.
        cold: Whether the data is to come from memory.
    """
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and a measurement may come out either way"
    key = (*key, torch.get_num_threads())
    if key not in _known:
        # Below autograd, as compiled graphs run: its kernel for ours is Python and takes some 8 us.
        with (
            torch.utils._python_dispatch._disable_current_modes(),
            torch.no_grad(),
            torch._C._AutoDispatchBelowAutograd(),
        ):
            best, text = fastest(runs(), _SECONDS, default, cold)
        _known[key] = None if best == "ipex" else f"measured: {text}"
    return _known[key]


def measured_linear(
    dtype: torch.dtype, n: int, k: int, rows: int, biased: bool, activation: str = "none"
) -> str | None:
    """Return why Inductor is to compute a linear layer; None if ours was measured to be faster or a table says so.

    Args:
        dtype: Type of the operands.
        n: Rows of the weight.
        k: Columns of the weight.
        rows: Rows of the input.
        biased: Whether there is a bias.
        activation: What follows and our kernel computes on the way; Inductor makes a loop of its own of it.
    """
    if dtype != torch.float32 or rows == 0 or _table_holds():
        return None
    sizes = n, k, rows, biased, _stock_is_mkl(), activation
    return against_ours(("linear", *sizes), lambda: _linears(*sizes))


def _table_holds() -> bool:
    """Whether the table of `choose_linear` is also one against MKL on a packed weight, Inductor's in float32.

    MKL has other code for each vendor and level. On a Xeon with AVX512-VNNI it is 1.0-1.7 times as fast as ours from 32
    rows on and slower with 4 to 16; on Zen 4 it is slower throughout.
    """
    return providers.cpu_level() == "avx512_bf16"


def _stock_is_mkl() -> bool:
    """Whether Inductor hands a linear layer in float32 to MKL; a file compiled ahead of time has oneDNN."""
    from torch._inductor.virtualized import V

    return bool(torch._C.has_mkl) and not V.aot_compilation


def _linears(
    n: int, k: int, rows: int, biased: bool, mkl: bool, activation: str
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what computes a linear layer in float32: Inductor's choice and ours."""
    n = min(n, _MOST_OUT)
    x, weight = numbers(rows, k), numbers(n, k)
    bias = torch.zeros(n) if biased else None
    packed = torch.ops.ipex.pack_linear_weight(weight)
    stock = packed_by_torch(weight, bias, rows, mkl)
    return {
        "ipex": lambda: torch.ops.ipex.linear(x, packed, n, bias, None, activation),
        # The ops of torch take the time of Inductor's loops for these.
        "stock": lambda: activate(stock(x), activation),
    }


#: Rows of a weight that are timed: the rest is more of the same.
_MOST_OUT = 2048


def packed_by_torch(
    weight: Tensor, bias: Tensor | None, rows: int, mkl: bool
) -> Callable[[Tensor], Tensor]:
    """Return a linear layer in float32 on a weight in the form of MKL or of oneDNN.

    Args:
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
        rows: Rows of the input.
        mkl: Whether MKL computes it; else oneDNN.
    """
    if mkl:
        for_mkl = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
        return lambda x: torch.ops.mkl._mkl_linear(x, for_mkl, weight, bias, rows)
    from ipex_core.packing import onednn
    from ipex_core.packing.parameter import pack

    for_onednn = pack(weight, "mkldnn")
    return lambda x: onednn.linear(x, for_onednn, bias)


# ---- as steps between programs

#: Products of a layer below which no measurement is made: the step costs some 10 us, which nothing wins back.
_LEAST_WORK = 1 << 23
#: Products that are timed: rows beyond it are more of the same.
_MOST_WORK = 1 << 29


def leave_linears(ctx: Context) -> None:
    """Write layers in float32 as ``aten::linear`` where MKL or oneDNN and a step between programs are faster."""
    if torch.are_deterministic_algorithms_enabled():
        return
    for node in ctx.nodes(ipex.linear.default):
        given = arguments(node)
        x, bias = val(given["x"]), val(given["bias"])
        if x is None or x.dtype != torch.float32 or not static(x.shape) or 0 in x.shape:
            continue
        if not ctx.is_constant(given["packed_weight"]):
            continue
        if given["bias"] is not None and (bias is None or bias.dtype != x.dtype):
            continue
        added = sum(given[name] is not None for name in ("residual", "residual2"))
        rows, k = x.shape[:-1].numel(), int(x.shape[-1])
        layer = _Layer(
            *(rows, k, int(given["out_features"]), bias is not None, given["activation"]),
            *(given["gate"], given["mul"] is not None, added),
        )
        reason = measured_step(layer)
        if reason is not None:
            ctx.reject("linear", node, "ipex::linear", reason)
            _unpack(ctx, node, given, layer.weights, torch.ops.ipex_core.torch_linear.default)
    for node in ctx.nodes(torch.ops.ipex_core.torch_linear.default):
        node.target = aten.linear.default


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A linear layer with what follows it, as our kernel computes it at once."""

    rows: int
    k: int
    n: int
    biased: bool
    activation: str
    gate: str
    product: bool
    added: int

    @property
    def weights(self) -> int:
        """Rows of the weight."""
        return weight_rows(self.n, self.gate)


def measured_step(layer: _Layer) -> str | None:
    """Return why a program is to be cut for a layer of torch; None if ours was measured to be as fast."""
    if layer.rows * layer.k * layer.weights < _LEAST_WORK or _table_holds():
        return None
    most = _MOST_OUT if layer.gate == "none" else _MOST_OUT // 2
    n = min(layer.n, most)
    rows = max(min(layer.rows, _MOST_WORK // (weight_rows(n, layer.gate) * layer.k)), 16)
    timed = dataclasses.replace(layer, n=n, rows=min(rows, layer.rows))
    mkl = bool(torch._C.has_mkl)
    return against_ours(("step", timed, mkl), lambda: _steps(timed, mkl), "ipex", cold=True)


def _steps(layer: _Layer, mkl: bool) -> dict[str, Callable[[], Tensor]]:
    """Return what computes a layer: our kernel, and a layer of torch with a program behind it."""
    from ipex_core.program import ProgramBuilder
    from ipex_core.program.builtins import POINTWISE

    x, weight = numbers(layer.rows, layer.k), numbers(layer.weights, layer.k)
    bias = torch.zeros(layer.weights) if layer.biased else None
    packed = ipex.pack_linear_weight(weight)
    others = [numbers(layer.rows, layer.n) for _ in range(layer.product + layer.added)]
    given = [None] * (not layer.product) + others + [None, None]
    mul, first, second = given[:3]
    args = (x, packed, layer.n, bias, first, layer.activation, mul, second, layer.gate)
    products = [
        packed_by_torch(w, b, layer.rows, mkl)
        for w, b in _plain_weights(weight, bias, layer.n, layer.gate)
    ]
    kind = layer.activation if layer.gate == "none" else layer.gate
    names = [kind] * (kind != "none") + ["mul"] * (layer.gate != "none")
    names += ["mul"] * layer.product + ["add"] * layer.added
    builder = ProgramBuilder()
    count = len(products) + len(others)
    inputs = [builder.input(str(i)) for i in range(count)]
    code: list[int] = []
    last, read = 0, 1
    for number, name in enumerate(names):
        unary = name not in ("mul", "add")
        code += [POINTWISE.index(name), last, -1 if unary else read, -1]
        last, read = count + number, read + (not unary)
    # Where nothing follows, a tiny program stands for the one that the step ends.
    code = code or [POINTWISE.index("neg"), 0, -1, -1]
    program = builder.build([builder.call("pointwise", inputs, code, [], torch.float32)])
    tiny = torch.zeros(1)

    def stock() -> Tensor:
        found = [product(x) for product in products]
        if names:
            return program.run(*found, *others)[0]
        program.run(tiny)
        return found[0]

    return {"ipex": lambda: ipex.linear(*args), "stock": stock}


# --- back to Inductor -----------------------------------------------------------------------------------------------


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
            _unpack(ctx, node, given, n, functional.linear)


def _plain_weights(
    weight: Tensor, bias: Tensor | None, out_features: int, gate: str
) -> list[tuple[Tensor, Tensor | None]]:
    """Return weight and bias of a layer, or of its gate and of what that multiplies."""
    if gate == "none":
        return [(weight, bias)]
    weights = deinterleave_gate_up(weight, out_features)
    biases = (None, None) if bias is None else deinterleave_gate_up(bias, out_features)
    return list(zip(weights, biases, strict=True))


def _plain(
    x: Tensor,
    packed_weight: Tensor,
    rows: int,
    linear: Callable[..., Tensor],
    out_features: int,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    mul: Tensor | None,
    residual2: Tensor | None,
    gate: str,
) -> Tensor:
    weight = ipex.unpack_linear_weight(packed_weight, rows, x.shape[-1], x.dtype)
    found = [linear(x, w, b) for w, b in _plain_weights(weight, bias, out_features, gate)]
    y = activate(found[0], activation) if len(found) == 1 else activate(found[0], gate) * found[1]
    return apply_epilogue(y, out_features, None, "none", mul, residual, residual2)


def _unpack(
    ctx: Context, node: fx.Node, given: dict[str, Any], n: int, linear: Callable[..., Tensor]
) -> None:
    """Put the plain ops of a layer, whose product ``linear`` computes, in its place."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    names = [name for name, value in given.items() if isinstance(value, fx.Node)]

    def function(*values: Tensor) -> Tensor:
        bound = {**given, **dict(zip(names, values, strict=True))}
        return _plain(rows=n, linear=linear, **bound)

    # Programs have functions for activations as a whole.
    table = select_decomp_table() if linear is functional.linear else {}
    with ctx.fake_mode(), torch.no_grad():
        values = [val(given[name]) for name in names]
        plain = make_fx(function, table)(*values).graph
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
