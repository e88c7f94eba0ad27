# SPDX-License-Identifier: Apache-2.0
"""The patterns, matched on the graph of a frozen TorchScript program."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from ipex_core.fusion.torchscript.conv import CONV, TRANSPOSED, Convolutions
from ipex_core.fusion.torchscript.graph import (
    Editor,
    Node,
    Value,
    behind_cast,
    constant,
    is_constant,
    is_tensor,
    key_of,
    mean_square,
    only_use,
    scalar,
    weight,
)
from ipex_core.fusion.torchscript.variants import normalize, packs
from ipex_core.kernels.policy import has_kernel
from ipex_core.packing.parameter import pack

__all__ = ["Rewriter"]

LINEAR = "ipex::linear"

#: Activations that are computed in the memory of the result before them; their other arguments must be numbers.
_IN_PLACE = tuple(
    f"aten::{name}"
    for name in (
        *("abs", "clamp", "elu", "exp", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu"),
        *("log", "mish", "pow", "relu", "round", "sigmoid", "silu", "sqrt", "square", "tanh"),
    )
)
#: What gives floating numbers in memory of its own -> its name in reports.
_PRODUCERS = {
    CONV: "conv",
    TRANSPOSED: "conv_transpose",
    LINEAR: "linear",
    "aten::batch_norm": "batch_norm",
}
#: What hides any score from a softmax that it is added to.
_HIDES = -1e9
#: Products of two activations.
_PRODUCTS = {"aten::matmul": "matmul", "aten::bmm": "bmm", "aten::einsum": "einsum"}


class Rewriter(Editor):
    """Rewrites one graph."""

    def __init__(self, graph: Any) -> None:
        super().__init__(graph)
        #: Names of sums and products that linear layers were fused with, whose memory is their own.
        self._sums: set[str] = set()
        #: Weights that others than linear layers read.
        self._read: set[Hashable] = set()

    def run(self) -> None:
        """Apply all patterns and remove what they leave behind."""
        passes: Any = torch._C
        passes._jit_pass_inline(self.graph)
        passes._jit_pass_remove_mutation(self.graph)
        passes._jit_pass_constant_propagation(self.graph)
        normalize(self, linears=has_kernel("linear"))
        self.begin()
        Convolutions(self).run()
        if has_kernel("attention"):
            self.each("aten::matmul", self._attention)
            self.each("aten::scaled_dot_product_attention", self._sdpa)
            passes._jit_pass_dce(self.graph)  # the scores are not for the patterns that follow
        if has_kernel("softmax"):
            self.each("aten::softmax", self._softmax)
        if has_kernel("rms_norm"):
            self.each("aten::mul", self._rms_norm)
        if has_kernel("add_layer_norm"):
            self.each("aten::layer_norm", self._add_layer_norm)
        if has_kernel("linear"):
            self._read = self._read_elsewhere()
            self.each("aten::linear", self._linear)
            for kind in ("aten::relu", "aten::gelu", "aten::silu"):
                self.each(kind, self._linear_activation)
            self.each("aten::mul", self._linear_mul)
            self.each("aten::add", self._linear_add)
        if has_kernel("gelu"):
            self.each("aten::gelu", self._gelu)
        for kind in ("aten::div", "aten::mul"):
            self.each(kind, self._product_scale)
        self.each("aten::add", self._product_add)
        for kind in _IN_PLACE:
            self.each(kind, self._in_place)
        passes._jit_pass_constant_propagation(self.graph)
        passes._jit_pass_dce(self.graph)
        passes._jit_pass_constant_pooling(self.graph)
        passes._jit_pass_lint(self.graph)

    # ---- linear layers

    def _linear(self, node: Node) -> str | None:
        x, w, b = node.inputs()
        matrix = weight(w, 2)
        if matrix is None or not is_constant(b):
            return None
        n, k = matrix.shape
        bias = constant(b)
        if not packs(n, k, matrix.dtype) or (bias is not None and bias.dtype != matrix.dtype):
            return None
        key = key_of(matrix)
        if key in self._read:  # a packed copy would be a second one
            return None
        if key not in self.packed:
            self.packed[key] = pack(matrix, "ipex")
        none = self.constant(None, node)
        arguments = [x, self.packed[key], n, b, none, "none", none, none, "none"]
        self.replace(node, self.op(LINEAR, arguments, node).output())
        return "linear"

    def _read_elsewhere(self) -> set[Hashable]:
        """Return the matrices that are more than the weight of linear layers."""
        found = set()
        for node in self.graph.findAllNodes("prim::Constant", True):
            matrix = weight(node.output(), 2)
            if matrix is not None and any(
                use.user.kind() != "aten::linear" for use in node.output().uses()
            ):
                found.add(key_of(matrix))
        return found

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
        linear.replaceInput(5, self.constant(name, linear))
        node.output().replaceAllUsesWith(linear.output())
        node.destroy()
        self.upgrade("linear")
        return f"linear + {name}"

    def _linear_binary(self, node: Node, script: str, name: str) -> str | None:
        a, b = list(node.inputs())[:2]
        for value, other in ((b, a), (a, b)):
            if not is_tensor(other):
                continue
            linear = self._plain_linear(value, node)
            if linear is None or is_constant(other):
                continue
            x, w, n, bias, _, post, *_ = linear.inputs()
            text = constant(post)
            new = self.call(script, [x, w, n, bias, post, other], node)
            self.replace(node, new)
            self._sums.add(new.debugName())
            linear.destroy()
            former = "linear" if text == "none" else f"linear + {text}"
            self.upgrade(former)
            return f"{former} + {name}"
        return None

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
        if any(is_constant(v) or not is_tensor(v) for v in (left, right)):
            return None
        constants = [v.toIValue() for v in (w, b, eps)]  # they may stand behind the sum
        normed, summed = self.pair("add_layer_norm", [left, right, *constants], total)
        self.replace(node, normed)
        self.replace(total, summed)
        return "add + layer_norm"

    def _rms_norm(self, node: Node) -> str | None:
        """``weight * (x.float() * rsqrt(mean(x.float() ** 2) + eps)).to(x.dtype)``."""
        for w, value in (tuple(node.inputs()), tuple(node.inputs())[::-1]):
            scale = weight(w, 1)
            if scale is None:
                continue
            inner = behind_cast(value).node()
            if inner.kind() != "aten::mul":
                continue
            for x, root in (tuple(inner.inputs()), tuple(inner.inputs())[::-1]):
                eps = mean_square(root, x)
                if eps is None:
                    continue
                source = behind_cast(x)
                if source is not x and behind_cast(value) is value:
                    continue  # stays float32 behind the norm
                new = self.op("ipex::rms_norm", [source, w, eps, 0.0], node)
                self.replace(node, new.output())
                return "rms_norm"
        return None

    def _gelu(self, node: Node) -> str | None:
        new = self.op("ipex::gelu", list(node.inputs()), node)
        self.replace(node, new.output())
        return "gelu"

    def _in_place(self, node: Node) -> str | None:
        value, rest = node.inputsAt(0), list(node.inputs())[1:]
        producer = value.node()
        name = _PRODUCERS.get(producer.kind())
        if value.debugName() in self._sums:
            name = "sum"
        if name is None or not only_use(value, node) or not all(map(_is_plain, rest)):
            return None
        new = self.graph.create(f"{node.kind()}_", list(node.inputs()), 1)
        new.insertBefore(node)
        kind = node.kind().removeprefix("aten::")
        self.replace(node, new.output())
        if name == "batch_norm" and producer.inputsAt(0).node().kind() == "aten::cat":
            name = "concat + batch_norm"
        return f"{name} + {kind} in place"

    # ---- products of two activations

    def _product(self, value: Value, user: Node) -> str | None:
        """Return the name of a product with memory of its own that only one node reads."""
        node = value.node()
        name = _PRODUCTS.get(node.kind())
        if name is None or not only_use(value, user):
            return None
        if name == "einsum":  # of one tensor it may be a view
            tensors = node.inputsAt(1).node()
            if tensors.kind() != "prim::ListConstruct" or tensors.inputsSize() != 2:
                return None
        return name

    def _product_scale(self, node: Node) -> str | None:
        value = node.inputsAt(0)
        name = self._product(value, node)
        factor = scalar(node.inputsAt(1)) if node.inputsSize() == 2 else None
        if name is None or factor is None:
            return None
        divide = node.kind() == "aten::div"
        self.replace(node, self.call("scale_in_place", [value, factor, divide], node))
        return f"{name} + {'div' if divide else 'mul'} in place"

    def _product_add(self, node: Node) -> str | None:
        if node.inputsSize() != 3 or constant(node.inputsAt(2)) != 1:
            return None
        a, b = list(node.inputs())[:2]
        for value, other in ((a, b), (b, a)):
            name = self._product(value, node)
            if name is not None and is_tensor(other) and other != value:
                self.replace(node, self.call("add_in_place", [value, other], node))
                return f"{name} + add in place"
        return None

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
        found = self._scores(one.inputsAt(0), one)
        if found is None:
            return None
        scores = found.value.node()
        if scores.kind() != "aten::matmul" or not found.only_read():
            return None
        q, turned = scores.inputs()
        keys = turned.node()
        if keys.kind() != "aten::transpose" or not only_use(turned, scores):
            return None
        dims = {constant(keys.inputsAt(1)), constant(keys.inputsAt(2))}
        if dims not in ({-1, -2}, {2, 3}):
            return None
        mask = self._mask(found, node)
        arguments = [q, keys.inputsAt(0), v, mask, found.factor, found.divide]
        self.replace(node, self.call("attention", arguments, node))
        return "attention"

    def _sdpa(self, node: Node) -> str | None:
        """The stock function; which of the two is faster depends on the sizes of each call."""
        if node.inputsSize() != 8:
            return None
        q, k, v, mask, dropout, causal, scale, gqa = node.inputs()
        plain = [constant(one) for one in (causal, scale, gqa)]
        if scalar(dropout) != 0.0 or not all(map(is_constant, (causal, scale, gqa))):
            return None
        if not is_constant(mask) and not is_tensor(mask):
            return None
        self.replace(node, self.call("sdpa", [q, k, v, mask, *plain], node))
        return "attention"

    def _softmax(self, node: Node) -> str | None:
        """Scores divided or multiplied, plus a mask, through softmax."""
        dim, dtype = (constant(node.inputsAt(i)) for i in (1, 2))
        if dim != -1 or dtype is not None or not is_constant(node.inputsAt(2)):
            return None
        found = self._scores(node.inputsAt(0), node)
        if found is None or found.user == node:
            return None
        arguments = [found.value, self._mask(found, node), found.factor, found.divide]
        self.replace(node, self.call("softmax", arguments, node))
        return f"{found.name} + softmax"

    def _scores(self, value: Value, user: Node) -> _Scores | None:
        """Return what a softmax reads: scores, divided or multiplied, plus a mask or filled by one."""
        mask, fill, names = None, None, []
        node = value.node()
        if node.kind() == "aten::add" and only_use(value, user):
            if node.inputsSize() != 3 or constant(node.inputsAt(2)) != 1:
                return None
            value, mask, user = node.inputsAt(0), node.inputsAt(1), node
            names = ["add"]
            if not is_tensor(mask):
                return None
        elif node.kind() == "aten::masked_fill" and only_use(value, user):
            fill = scalar(node.inputsAt(2))
            value, mask, user = node.inputsAt(0), node.inputsAt(1), node
            names = ["masked_fill"]
            if fill is None or fill > _HIDES:  # added, it would not hide the scores
                return None
        factor, divide = 1.0, False
        node = value.node()
        if node.kind() in ("aten::div", "aten::mul") and only_use(value, user):
            number = scalar(node.inputsAt(1))
            if number is None or number <= 0 or node.inputsSize() != 2:
                return None
            factor, divide = number, node.kind() == "aten::div"
            value, user = node.inputsAt(0), node
            names.insert(0, "div" if divide else "mul")
        return _Scores(value, user, mask, fill, factor, divide, " + ".join(names))

    def _mask(self, scores: _Scores, before: Node) -> Value | None:
        """Return the mask to be added."""
        mask = scores.mask
        if mask is None or scores.fill is None:
            return mask
        while mask.node().kind() in ("aten::expand", "aten::expand_as"):
            mask = mask.node().inputsAt(0)
        return self.call("fill", [mask, scores.value, scores.fill], before)


class _Scores(NamedTuple):
    value: Value
    user: Node  #: the node that reads it
    mask: Value | None
    fill: float | None  #: what a mask of truth values puts in their place
    factor: float
    divide: bool
    name: str

    def only_read(self) -> bool:
        """Return whether nothing else needs the scores; the mask that fills may take its size from them."""
        uses = [use.user for use in self.value.uses() if use.user != self.user]
        return self.value.node().owningBlock() == self.user.owningBlock() and all(
            user.kind() == "aten::expand_as"
            and user.inputsAt(1) == self.value
            and user.output() == self.mask
            and only_use(user.output(), self.user)
            for user in uses
        )


def _is_plain(value: Value) -> bool:
    """Return whether an argument is a constant and no tensor."""
    found = constant(value)
    return is_constant(value) and (found is None or isinstance(found, (bool, int, float, str)))
