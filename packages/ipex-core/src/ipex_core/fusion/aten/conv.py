# SPDX-License-Identifier: Apache-2.0
"""Convolutions in ATen graphs: with what follows them, and on packed weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from ipex_core.fusion import Fusion, GraphReport
from ipex_core.fusion.aten import (
    Context,
    binary,
    describe,
    is_call,
    module_of,
    same,
    shape_of,
    val,
)
from ipex_core.fusion.aten.linear import Activation, against_ours, find_activations
from ipex_core.library.spec import FLOATS
from ipex_core.util.symbolic import hints

aten = torch.ops.aten
prims = torch.ops.prims

_FOLLOWED = "convolution"
_STOCK = "aten::convolution"
#: Ops of a matched activation -> its name. What is in none of them is named op by op.
_ACTIVATIONS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"erf"}), "gelu"),
    (frozenset({"tanh", "pow"}), "gelu_tanh"),
    (frozenset({"gt", "where"}), "leaky_relu"),
    (frozenset({"add", "clamp_min", "clamp_max", "div", "mul"}), "hardswish"),
    (frozenset({"add", "clamp_min", "clamp_max", "div"}), "hardsigmoid"),
    (frozenset({"clamp_min", "clamp_max"}), "hardtanh"),
    (frozenset({"sigmoid", "mul"}), "silu"),
    (frozenset({"neg", "exp", "add", "div"}), "silu"),
)
_CASTS = ("convert_element_type", "_to_copy")


def report_convolutions(report: GraphReport, graph: fx.Graph) -> None:
    """Add the convolutions of a graph to its report, once Inductor's own patterns have been through it."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        inside = _matched(node)
        found = _convolution(inside)
        if found is not None:
            op = _name(found)
            report.add(
                Fusion(_FOLLOWED, True, op, _follows(inside), module_of(node), describe(node))
            )
        elif _convolution([node]) is not None:
            op, reason = _name(node), _reason(node)
            report.add(Fusion(_FOLLOWED, False, op, reason, module_of(node), describe(node)))
        elif is_call(node, aten.convolution.default, aten._convolution.default):
            reason = "the weight is not frozen" if not report.frozen else "oneDNN does not take it"
            report.add(Fusion(_FOLLOWED, False, _STOCK, reason, module_of(node), describe(node)))


def _matched(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a pattern of Inductor has put into this one."""
    target = node.target
    if not isinstance(target, functools.partial) or not target.args:
        return []
    return list(getattr(target.args[0], "nodes", ()))


def _convolution(nodes: Iterable[fx.Node]) -> fx.Node | None:
    for node in nodes:
        if getattr(node.target, "namespace", "") == "mkldnn" and "_conv" in str(node.target):
            return node
    return None


def _name(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default").replace(".", "::")


def _op(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", node.target))


def _follows(nodes: list[fx.Node]) -> str:
    names = [_op(n) for n in nodes if getattr(n.target, "namespace", "") != "mkldnn"]
    names = [name for name in names if name not in _CASTS]
    found = set(names)
    for ops, activation in _ACTIVATIONS:
        if ops <= found:
            return activation
    return " + ".join(names) or "nothing"


def _reason(node: fx.Node) -> str:
    if len(node.users) != 1:
        return f"{len(node.users)} others read the result"
    user = next(iter(node.users))
    other = _convolution(_matched(user))
    if other is not None:
        return "another convolution takes the result"
    return f"{_op(user)} reads the result, which is no part of a oneDNN convolution"


# --- packed weights ---------------------------------------------------------------------------------------------------
# This runs on the frozen graph, in which batch norms are part of the weights and before Inductor gives oneDNN what
# follows a convolution. oneDNN and our kernel win at different shapes, CPUs and numbers of threads, so that no table
# decides but a measurement at the shape in question, once in a process.


_PACKED = "convolution"
_OP = "ipex::convolution"
#: A measurement takes as many images as have this many multiplications, so that it lasts some milliseconds.
_WORK = 2.5e8


@dataclasses.dataclass(frozen=True)
class _Convolution:
    """The arguments of a convolution of images, as nodes and numbers."""

    x: fx.Node
    weight: Tensor
    bias: fx.Node | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    onednn: bool  # stock hands it to oneDNN with a packed weight
    winograd: bool  # ours computes it by minimal filtering

    @property
    def numbers(self) -> tuple[list[int], list[int], list[int]]:
        """Stride, padding and dilation."""
        return list(self.stride), list(self.padding), list(self.dilation)


def pack_convolutions(
    graph: fx.Graph,
    report: GraphReport,
    disabled: Iterable[str] = (),
    always: bool = False,
    kernels: Callable[[str], bool] | None = None,
    time_groups: bool = False,
) -> None:
    """Replace convolutions of a frozen graph, with what follows them, by ``ipex::convolution``.

    Args:
        graph: A functional graph with its weights as attributes, before Inductor's fusions.
        report: Collects the decisions.
        disabled: Names of patterns to leave out.
        always: Replace those, too, that stock code computes as fast.
        kernels: Tells whether an op has a native kernel; None asks the installed kernel package.
        time_groups: Leave convolutions with groups that oneDNN was measured to compute faster, whatever `always` says.
    """
    if kernels is None:
        from ipex_core.kernels.policy import has_kernel

        kernels = has_kernel
    ctx = Context(graph, set(), report, always, frozenset(disabled), kernels)
    if _PACKED in ctx.disabled or not kernels(_PACKED):
        return
    activations = {a.source: a for a in find_activations(ctx).values()}
    before = {n.target for n in graph.find_nodes(op="get_attr")}
    for node in ctx.nodes(aten.convolution.default, *_onednn()):
        found = _read(ctx, node)
        if isinstance(found, str):
            ctx.reject(_PACKED, node, _OP, found)
        elif found is not None:
            timed = not always or (time_groups and found.groups > 1)
            _pack(ctx, node, found, activations, timed)
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)
    for name in before - {n.target for n in graph.find_nodes(op="get_attr")}:
        # Not to keep a weight beside its packed form.
        if graph.owning_module is not None and hasattr(graph.owning_module, str(name)):
            delattr(graph.owning_module, str(name))


def _onednn() -> tuple[Any, ...]:
    if not torch.backends.mkldnn.is_available():
        return ()
    return (torch.ops.mkldnn._convolution_pointwise.default,)


def _read(ctx: Context, node: fx.Node) -> _Convolution | str | None:
    """Return the arguments of a convolution, a reason against it, or None if its weight is not frozen."""
    onednn = node.target is not aten.convolution.default
    x, weight, bias, *rest = node.args
    if onednn:
        padding, stride, dilation, groups, attribute = rest[:5]
        if attribute != "none":
            return None
    else:
        stride, padding, dilation, transposed, _, groups = rest
        if transposed:
            return None
    left, out = val(x), val(node)
    plain = _attribute(ctx, weight)
    if plain is None or left is None or out is None or left.device.type != "cpu":
        return None
    assert isinstance(x, fx.Node) and isinstance(groups, int)
    if left.dim() != 4 or plain.dim() != 4:
        return f"the images are {describe(x)}"
    if plain.shape[1] == 1 and groups != 1:
        return "it is depthwise"
    if left.dtype not in FLOATS or not left.dtype == plain.dtype == out.dtype:
        return f"the operands are {describe(x)} and {plain.dtype}"
    if bias is not None:
        value = val(bias)
        if value is None or value.dtype not in (left.dtype, torch.float32) or value.dim() != 1:
            return f"the bias is {describe(bias)}"
    if left.dtype == torch.float32 and torch.backends.mkldnn.conv.fp32_precision != "none":  # type: ignore[attr-defined]
        return "reduced precision of float32 convolutions is on"
    if 0 in plain.shape:
        return "the weight is empty"
    steps, padding, dilation = (
        tuple(v) * (2 // len(v))  # type: ignore[arg-type]
        for v in (stride, padding, dilation)
    )
    from ipex_core.ops.conv import winograd_pays

    winograd = "winograd" not in ctx.disabled and winograd_pays(
        hints(left.shape), plain, steps, padding, dilation, groups
    )
    return _Convolution(x, plain, bias, steps, padding, dilation, groups, onednn, winograd)  # type: ignore[arg-type]


def _attribute(ctx: Context, node: Any) -> Tensor | None:
    """Return a frozen weight as it was before it was packed for oneDNN."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = getattr(ctx.graph.owning_module, str(node.target), None)
    if not isinstance(value, Tensor) or isinstance(value, torch._subclasses.FakeTensor):
        return None
    with torch.utils._python_dispatch._disable_current_modes():
        return value.to_dense() if value.is_mkldnn else value.detach()


def _pack(
    ctx: Context,
    node: fx.Node,
    conv: _Convolution,
    activations: dict[fx.Node, Activation],
    timed: bool,
) -> None:
    root, interior, residual = node, [], None
    total = _addition(node)
    if total is not None:
        root, residual = total
        interior = [node]
    found = activations.get(root)
    if found is not None and len(root.users) == _readers(found):
        interior = [*interior, root, *found.interior]
        root = found.root
    kind = "none" if found is None or root is not found.root else found.kind
    if ctx.outside_user(interior, root) is not None:
        root, interior, residual, kind = node, [], None, "none"
    reason = _against(conv, residual is not None, kind) if timed else None
    if reason is not None:
        ctx.reject(_PACKED, node, _OP, reason)
        return
    weight = conv.weight
    with torch.utils._python_dispatch._disable_current_modes():
        from ipex_core.ops.conv import pack_convolution

        packed = _constant(ctx, root, pack_convolution(weight, conv.groups, conv.winograd))
    operands = [_channels_last(ctx, root, n) for n in (conv.x, residual)]
    args = (
        operands[0],
        packed,
        weight.shape[0],
        list(weight.shape[2:]),
        *conv.numbers,
        conv.bias,
        operands[1],
        kind,
        conv.groups,
    )
    names = [name for name, there in (("add", residual), (kind, kind != "none")) if there]
    text = " + ".join(names) or "nothing"
    new = ctx.replace(_PACKED, root, interior, torch.ops.ipex.convolution.default, args, text)
    if new is None:
        ctx.drop([n for n in (*operands, packed) if n is not None and not n.users])


def _readers(found: Activation) -> int:
    """Return how many nodes of an activation read its source."""
    inside = {found.root, *found.interior}
    return sum(user in inside for user in found.source.users)


def _addition(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the addition of another tensor of the same kind behind a node, and that tensor."""
    if len(node.users) != 1:
        return None
    root = next(iter(node.users))
    pair = binary(root, aten.add.Tensor)
    if pair is None or pair[0] is pair[1]:
        return None
    other = pair[1] if pair[0] is node else pair[0]
    value, own = val(other), val(node)
    if value is None or own is None or value.dtype != own.dtype:
        return None
    return (root, other) if same(value.shape, own.shape) else None


def _constant(ctx: Context, before: fx.Node, value: Tensor) -> fx.Node:
    module = ctx.graph.owning_module
    assert module is not None
    number = 0
    while hasattr(module, f"ipex_convolution_{number}"):
        number += 1
    module.register_buffer(f"ipex_convolution_{number}", value)
    with ctx.graph.inserting_before(before):
        node = ctx.graph.get_attr(f"ipex_convolution_{number}")
    mode: Any = ctx.fake_mode()
    node.meta["val"] = mode.from_tensor(value) if hasattr(mode, "from_tensor") else value
    return node


def _channels_last(ctx: Context, before: fx.Node, node: fx.Node | None) -> fx.Node | None:
    """Return the node itself if its channels lie side by side, else a copy in which they do."""
    value, shape = val(node), shape_of(node)
    if node is None or value is None or shape is None:
        return node
    _, c, h, w = shape
    wanted = (h * w * c, 1, w * c, c)
    fits = (
        same((size,), (1,)) or same((have,), (want,))
        for size, have, want in zip(shape, value.stride(), wanted, strict=True)
    )
    if all(fits):
        return node
    kwargs = {"memory_format": torch.channels_last}
    return ctx.call(before, aten.clone.default, (node,), kwargs)


# ---- measuring


def _against(conv: _Convolution, residual: bool, kind: str) -> str | None:
    """Return why stock code is to run, None if ours was measured to be faster."""
    shape = hints(val(conv.x).shape)  # type: ignore[union-attr]
    key = (
        *(_OP, conv.weight.dtype, conv.weight.shape, *shape, conv.stride, conv.padding),
        *(conv.dilation, conv.groups, conv.bias is None, conv.onednn, conv.winograd),
        *(residual, kind),
    )
    return against_ours(key, lambda: _runs(conv, shape, residual, kind))


def _runs(
    conv: _Convolution, shape: list[int], residual: bool, kind: str
) -> dict[str, Callable[[], Tensor]]:
    """Return the candidates, on as many of the images as make a call long enough to be timed."""
    from ipex_core.kernels.policy import numbers
    from ipex_core.ops.conv import pack_convolution
    from ipex_core.ops.linear import activate
    from ipex_core.packing import onednn as _mkldnn

    ipex, last = torch.ops.ipex.convolution.default, torch.channels_last
    weight = conv.weight.contiguous(memory_format=last)
    stride, padding, dilation = conv.numbers
    groups = conv.groups
    out, depth = weight.shape[0], weight[0].numel()
    places = shape[2] * shape[3] // (stride[0] * stride[1])
    shape = [min(shape[0], int(_WORK / (places * depth * out)) + 1), *shape[1:]]
    x = numbers(*shape, dtype=weight.dtype).contiguous(memory_format=last)
    bias = None if conv.bias is None else torch.zeros(out, dtype=weight.dtype)
    packed, window = pack_convolution(weight, groups, conv.winograd), list(weight.shape[2:])
    args = (packed, out, window, stride, padding, dilation, bias)
    other = ipex(x, *args, groups=groups) if residual else None
    runs = {"ipex": lambda: ipex(x, *args, other, kind, groups)}
    if conv.onednn:
        op: Any = torch.ops.mkldnn._convolution_pointwise
        for_onednn = torch.ops.mkldnn._reorder_convolution_weight(
            weight, padding, stride, dilation, groups, shape
        )
        rest = (for_onednn, bias, padding, stride, dilation, groups)
        name, algorithm = _mkldnn.POST_OPS[kind]
        if other is None:
            runs["stock"] = lambda: op.default(x, *rest, name, [], algorithm)
        elif kind in ("none", "relu"):
            then = None if kind == "none" else name
            runs["stock"] = lambda: op.binary(x, other, *rest, "add", 1.0, then, [], "")
        else:
            # Inductor's code adds and activates in one pass; the copy stands for it.
            runs["stock"] = lambda: op.default(x, *rest, "none", [], "").add_(other)
    else:
        plain = (weight, bias, stride, padding, dilation, False, [0, 0], groups)
        runs["stock"] = lambda: activate(aten.convolution.default(x, *plain), kind)
    return runs
