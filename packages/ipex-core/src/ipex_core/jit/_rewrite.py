# SPDX-License-Identifier: Apache-2.0
"""The patterns, matched on the graph of a frozen TorchScript program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ipex_core._optimize._prepack import choose_linear
from ipex_core.jit._nodes import Node, Value, constant, is_constant, only_use, scalar, weight
from ipex_core.nn import _mkldnn
from ipex_core.nn._leaf import has_kernel
from ipex_core.nn._packed import pack
from ipex_core.nn._scripts import function

__all__ = ["Rewriter"]

CONV = "mkldnn::_convolution_pointwise"
LINEAR = "ipex::linear"

#: Activations that oneDNN computes with a convolution -> its name for them.
_CONV_POST = {
    "aten::relu": "relu",
    "aten::sigmoid": "sigmoid",
    "aten::tanh": "tanh",
    "aten::silu": "swish",
    "aten::hardswish": "hardswish",
    "aten::leaky_relu": "leaky_relu",
    "aten::hardtanh": "hardtanh",
    "aten::gelu": "gelu",
}
#: Others are computed in the memory of the result before them.
_IN_PLACE = frozenset(
    f"aten::{name}"
    for name in (
        *(
            "abs",
            "clamp",
            "elu",
            "exp",
            "hardsigmoid",
            "hardswish",
            "hardtanh",
            "leaky_relu",
            "log",
        ),
        *("mish", "relu", "round", "sigmoid", "silu", "sqrt", "square", "tanh"),
    )
)


class Rewriter:
    """Rewrites one graph; `done` has the name of each pattern that matched."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.done: list[str] = []
        self._packed: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def run(self) -> None:
        """Apply all patterns and remove what they leave behind."""
        passes: Any = torch._C
        passes._jit_pass_inline(self.graph)
        passes._jit_pass_remove_mutation(self.graph)
        passes._jit_pass_constant_propagation(self.graph)
        self._each("aten::_convolution", self._conv)
        for kind in (*_CONV_POST, "aten::gelu"):
            self._each(kind, self._conv_activation)
        self._each("aten::add", self._conv_add)
        if has_kernel("attention"):
            self._each("aten::matmul", self._attention)
        if has_kernel("rms_norm"):
            self._each("aten::mul", self._rms_norm)
        if has_kernel("add_layer_norm"):
            self._each("aten::layer_norm", self._add_layer_norm)
        if has_kernel("linear"):
            self._each("aten::linear", self._linear)
            for kind in ("aten::relu", "aten::gelu", "aten::silu"):
                self._each(kind, self._linear_activation)
            self._each("aten::mul", self._linear_mul)
            self._each("aten::add", self._linear_add)
        if has_kernel("gelu"):
            self._each("aten::gelu", self._gelu)
        for kind in sorted(_IN_PLACE):
            self._each(kind, self._in_place)
        passes._jit_pass_constant_propagation(self.graph)
        passes._jit_pass_dce(self.graph)
        passes._jit_pass_constant_pooling(self.graph)
        passes._jit_pass_lint(self.graph)

    # ---- tools

    def _each(self, kind: str, pattern: Callable[[Node], str | None]) -> None:
        # By name, and each found anew: a pattern may have removed others. Those it has inserted are not for it: the
        # branch for operands that do not fit has the very nodes that were matched.
        names = [n.output().debugName() for n in self.graph.findAllNodes(kind, True)]
        for name in names:
            nodes = self.graph.findAllNodes(kind, True)
            node = next((n for n in nodes if n.output().debugName() == name), None)
            done = pattern(node) if node is not None else None
            if done:
                self.done.append(done)

    def _constant(self, value: Any, before: Node) -> Value:
        self.graph.setInsertPoint(before)
        made = self.graph.insertConstant(value)
        self._leave()
        return made

    def _leave(self) -> None:
        # The place of insertion must not be a node that is removed later.
        self.graph.setInsertPoint(self.graph.return_node())

    def _op(self, kind: str, arguments: list[Any], before: Node) -> Node:
        """Insert an op; arguments that are no values become constants."""
        inputs = [
            a if isinstance(a, torch._C.Value) else self._constant(a, before) for a in arguments
        ]
        node = self.graph.create(kind, inputs, 1)
        node.insertBefore(before)
        return node

    def _call(self, name: str, arguments: list[Any], before: Node) -> list[Value]:
        """Insert the body of a function of `ipex_core.nn._scripts`."""
        inputs = [
            a if isinstance(a, torch._C.Value) else self._constant(a, before) for a in arguments
        ]
        self.graph.setInsertPoint(before)
        body: Any = function(name)
        made = list(self.graph.insertGraph(body.graph, inputs))
        self._leave()
        return made

    def _replace(self, node: Node, value: Value) -> None:
        value.setType(node.output().type())
        node.output().replaceAllUsesWith(value)
        node.destroy()

    # ---- convolutions

    def _conv(self, node: Node) -> str | None:
        x, w, b, stride, padding, dilation, transposed, _, groups, *_ = node.inputs()
        kernel = weight(w, 4)
        lists = [constant(v) for v in (padding, stride, dilation)]
        if (
            kernel is None
            or constant(transposed) is not False
            or not all(
                isinstance(v, list) and len(v) == 2 and all(isinstance(i, int) for i in v)
                for v in lists
            )
        ):
            return None
        if not _mkldnn.supports(kernel.dtype) or kernel.numel() == 0 or not is_constant(b):
            return None
        key = (kernel.data_ptr(), kernel.shape)
        if key not in self._packed:
            last = kernel.contiguous(memory_format=torch.channels_last)
            self._packed[key] = last
        arguments = [x, self._packed[key], b, *lists, groups, "none"]
        new = self._op(CONV, arguments, node)
        new.addInput(self._scalars([], node))
        new.addInput(self._constant("", node))
        self._replace(node, new.output())
        return "conv"

    def _scalars(self, values: list[float], before: Node) -> Value:
        """Make a list of optional numbers."""
        items = [self._constant(v, before) for v in values]
        node = self.graph.create("prim::ListConstruct", items, 1)
        node.insertBefore(before)
        node.output().setType(torch._C.ListType(torch._C.OptionalType(torch._C.NumberType.get())))
        return node.output()

    def _plain_conv(self, value: Value, user: Node) -> Node | None:
        """Return the convolution that makes a value, if nothing was fused to it and nobody else reads it."""
        node = value.node()
        found = node.kind() == CONV and only_use(value, user) and node.inputsSize() == 10
        return node if found and constant(node.inputsAt(7)) == "none" else None

    def _conv_activation(self, node: Node) -> str | None:
        name = _CONV_POST[node.kind()]
        conv = self._plain_conv(node.inputsAt(0), node)
        if conv is None:
            return None
        algorithm = ""
        numbers: list[float] = []
        if name == "gelu":
            algorithm = constant(node.inputsAt(1))
        elif name in ("leaky_relu", "hardtanh"):
            values = list(node.inputs())[1:]
            numbers = [n for n in map(scalar, values) if n is not None]
            if len(numbers) != len(values):
                return None
        conv.replaceInput(7, self._constant(name, conv))
        conv.replaceInput(8, self._scalars(numbers, conv))
        conv.replaceInput(9, self._constant(algorithm, conv))
        node.output().replaceAllUsesWith(conv.output())
        node.destroy()
        self.done.remove("conv")
        return f"conv + {node_name(name)}"

    def _conv_add(self, node: Node) -> str | None:
        a, b, alpha = node.inputs()
        if constant(alpha) != 1:
            return None
        for value, other in ((b, a), (a, b)):
            conv = self._plain_conv(value, node)
            if conv is None or is_constant(other) or other.node() == conv or not _is_tensor(other):
                continue
            uses = node.output().uses()
            relu = uses[0].user if len(uses) == 1 and uses[0].user.kind() == "aten::relu" else None
            x, w, bias, *lists = list(conv.inputs())[:7]
            arguments = [x, other, w, bias, *lists, relu is not None]
            new = self._call("conv_add", arguments, node)[0]
            if relu is not None:
                relu.output().replaceAllUsesWith(node.output())
                relu.destroy()
            self._replace(node, new)
            conv.destroy()
            self.done.remove("conv")
            return "conv + add" if relu is None else "conv + add + relu"
        return None

    # ---- linear layers

    def _linear(self, node: Node) -> str | None:
        x, w, b = node.inputs()
        matrix = weight(w, 2)
        if matrix is None or not is_constant(b):
            return None
        n, k = matrix.shape
        bias = constant(b)
        if choose_linear(matrix.dtype, n, k, None).form != "ipex" or (
            bias is not None and bias.dtype != matrix.dtype
        ):
            return None
        key = (matrix.data_ptr(), matrix.shape)
        if key not in self._packed:
            self._packed[key] = pack(matrix, "ipex")
        none = self._constant(None, node)
        arguments = [x, self._packed[key], n, b, none, "none", none, none, "none"]
        self._replace(node, self._op(LINEAR, arguments, node).output())
        return "linear"

    def _plain_linear(self, value: Value, user: Node) -> Node | None:
        node = value.node()
        if node.kind() != LINEAR or not only_use(value, user):
            return None
        rest = [constant(node.inputsAt(i)) for i in (4, 6, 7)]
        plain = rest == [None] * 3 and all(is_constant(node.inputsAt(i)) for i in (4, 6, 7))
        return node if plain and constant(node.inputsAt(8)) == "none" else None

    def _linear_activation(self, node: Node) -> str | None:
        linear = self._plain_linear(node.inputsAt(0), node)
        if linear is None or constant(linear.inputsAt(5)) != "none":
            return None
        name = node.kind().removeprefix("aten::")
        if name == "gelu" and constant(node.inputsAt(1)) == "tanh":
            name = "gelu_tanh"
        linear.replaceInput(5, self._constant(name, linear))
        node.output().replaceAllUsesWith(linear.output())
        node.destroy()
        self._upgrade("linear")
        return f"linear + {name}"

    def _linear_binary(self, node: Node, script: str, name: str) -> str | None:
        a, b = list(node.inputs())[:2]
        for value, other in ((b, a), (a, b)):
            if not _is_tensor(other):
                continue
            linear = self._plain_linear(value, node)
            if linear is None or is_constant(other):
                continue
            x, w, n, bias, _, post, *_ = linear.inputs()
            text = constant(post)
            new = self._call(script, [x, w, n, bias, post, other], node)[0]
            self._replace(node, new)
            linear.destroy()
            former = "linear" if text == "none" else f"linear + {text}"
            self._upgrade(former)
            return f"{former} + {name}"
        return None

    def _upgrade(self, former: str) -> None:
        # Programs of optimized models have linear ops that were not counted here.
        if former in self.done:
            self.done.remove(former)

    def _linear_mul(self, node: Node) -> str | None:
        return self._linear_binary(node, "linear_mul", "mul")

    def _linear_add(self, node: Node) -> str | None:
        if node.inputsSize() != 3 or constant(node.inputsAt(2)) != 1:
            return None
        return self._linear_binary(node, "linear_add", "add")

    # ---- norms and activations

    def _add_layer_norm(self, node: Node) -> str | None:
        x, shape, w, b, eps, _ = node.inputs()
        size = constant(shape)
        vectors = [constant(v) for v in (w, b)]
        if not isinstance(size, list) or len(size) != 1 or not all(map(is_constant, (w, b, eps))):
            return None
        if any(v is not None and v.dim() != 1 for v in vectors):
            return None
        total = x.node()
        same_block = total.owningBlock() == node.owningBlock()
        if total.kind() != "aten::add" or not same_block or constant(total.inputsAt(2)) != 1:
            return None
        left, right, _ = total.inputs()
        if any(is_constant(v) or not _is_tensor(v) for v in (left, right)):
            return None
        constants = [v.toIValue() for v in (w, b, eps)]  # they may stand behind the sum
        normed, summed = self._pair("add_layer_norm", [left, right, *constants], total)
        self._replace(node, normed)
        self._replace(total, summed)
        return "add + layer_norm"

    def _pair(self, name: str, arguments: list[Any], before: Node) -> tuple[Value, Value]:
        """Insert a function that returns two tensors."""
        found = self._call(name, arguments, before)
        node = self.graph.create("prim::TupleUnpack", [found[0]], 2)
        node.insertBefore(before)
        first, second = node.outputs()
        return first, second

    def _rms_norm(self, node: Node) -> str | None:
        """``weight * (x.float() * rsqrt(mean(x.float() ** 2) + eps)).to(x.dtype)``."""
        for w, value in (tuple(node.inputs()), tuple(node.inputs())[::-1]):
            scale = weight(w, 1)
            if scale is None:
                continue
            inner = _behind_cast(value).node()
            if inner.kind() != "aten::mul":
                continue
            for x, root in (tuple(inner.inputs()), tuple(inner.inputs())[::-1]):
                eps = _mean_square(root, x)
                if eps is None:
                    continue
                source = _behind_cast(x)
                if source is not x and _behind_cast(value) is value:
                    continue  # stays float32 behind the norm
                new = self._op("ipex::rms_norm", [source, w, eps, 0.0], node)
                self._replace(node, new.output())
                return "rms_norm"
        return None

    def _gelu(self, node: Node) -> str | None:
        new = self._op("ipex::gelu", list(node.inputs()), node)
        self._replace(node, new.output())
        return "gelu"

    def _in_place(self, node: Node) -> str | None:
        value = node.inputsAt(0)
        if value.node().kind() not in (CONV, LINEAR) or not only_use(value, node):
            return None
        producer, kind = node_name(value.node().kind()), node.kind()
        new = self.graph.create(f"{kind}_", list(node.inputs()), 1)
        new.insertBefore(node)
        self._replace(node, new.output())
        return f"{producer} + {kind.removeprefix('aten::')} in place"

    # ---- attention

    def _attention(self, node: Node) -> str | None:
        """``softmax(q @ k.T / c + mask) @ v`` in its usual spellings."""
        softmax, v = node.inputsAt(0), node.inputsAt(1)
        one = softmax.node()
        if one.kind() != "aten::softmax" or not only_use(softmax, node):
            return None
        if constant(one.inputsAt(1)) != -1 or not is_constant(one.inputsAt(2)):
            return None
        if constant(one.inputsAt(2)) is not None:
            return None
        value, user, mask = one.inputsAt(0), one, None
        if value.node().kind() == "aten::add" and only_use(value, user):
            add = value.node()
            if constant(add.inputsAt(2)) != 1:
                return None
            value, mask, user = add.inputsAt(0), add.inputsAt(1), add
            if not _is_tensor(mask):
                return None
        factor, divide = 1.0, False
        if value.node().kind() in ("aten::div", "aten::mul") and only_use(value, user):
            found = scalar(value.node().inputsAt(1))
            if found is None or found <= 0 or value.node().inputsSize() != 2:
                return None
            factor, divide = found, value.node().kind() == "aten::div"
            value, user = value.node().inputsAt(0), value.node()
        scores = value.node()
        if scores.kind() != "aten::matmul" or not only_use(value, user):
            return None
        q, turned = scores.inputs()
        keys = turned.node()
        if keys.kind() != "aten::transpose" or not only_use(turned, scores):
            return None
        dims = {constant(keys.inputsAt(1)), constant(keys.inputsAt(2))}
        if dims not in ({-1, -2}, {2, 3}):
            return None
        arguments = [q, keys.inputsAt(0), v, mask, factor, divide]
        self._replace(node, self._call("attention", arguments, node)[0])
        return "attention"


def node_name(kind: str) -> str:
    """Return the name of an op or of an activation of oneDNN as reports show it."""
    return {"swish": "silu", CONV: "conv", LINEAR: "linear"}.get(kind, kind)


def _is_tensor(value: Value) -> bool:
    return str(value.type()).startswith(("Tensor", "Float(", "BFloat16(", "Half("))


def _behind_cast(value: Value) -> Value:
    node = value.node()
    return (
        node.inputsAt(0) if node.kind() in ("aten::to", "aten::type_as", "aten::float") else value
    )


def _mean_square(root: Value, x: Value) -> float | None:
    """Return eps if a value is ``rsqrt(mean(x ** 2, -1, keepdim) + eps)``."""
    if root.node().kind() != "aten::rsqrt":
        return None
    add = root.node().inputsAt(0).node()
    if add.kind() != "aten::add" or constant(add.inputsAt(2)) != 1:
        return None
    eps, mean = scalar(add.inputsAt(1)), add.inputsAt(0).node()
    if eps is None or mean.kind() != "aten::mean" or mean.inputsSize() != 4:
        return None
    if constant(mean.inputsAt(1)) != [-1] or constant(mean.inputsAt(2)) is not True:
        return None
    power = mean.inputsAt(0).node()
    square = power.kind() == "aten::square" or (
        power.kind() == "aten::pow" and scalar(power.inputsAt(1)) == 2.0
    )
    return eps if square and power.inputsAt(0) == x else None
