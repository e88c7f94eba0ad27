# SPDX-License-Identifier: Apache-2.0
"""Fusion of frozen TorchScript graphs: what a graph says, decomposed forms, and their rewriting to fused ops."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from ipex_core.fusion import RMS_NORM, Reader
from ipex_core.kernels.policy import choose_linear, has_kernel
from ipex_core.library.spec import CHANNELS_LAST, FLOATS
from ipex_core.nn.torchscript import function
from ipex_core.packing import onednn
from ipex_core.packing.parameter import pack

# torch declares the classes of graphs without their methods.
Node = Any
Value = Any


def is_constant(value: Value) -> bool:
    """Return whether a value is known before the program runs."""
    return bool(value.node().kind() == "prim::Constant")


def constant(value: Value) -> Any:
    """Return the value of a constant (also of a list of constants); None where it is not one, or is None."""
    node = value.node()
    if node.kind() == "prim::ListConstruct":
        return [constant(v) for v in node.inputs()]
    return value.toIValue() if is_constant(value) else None


def weight(value: Value, dim: int, device: str = "cpu") -> torch.Tensor | None:
    """Return the tensor of a constant of a floating dtype and ``dim`` dimensions on a device."""
    tensor = constant(value)
    plain = (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in FLOATS
        and tensor.device.type == device
        and tensor.layout == torch.strided
        and tensor.dim() == dim
    )
    return tensor if plain else None


def key_of(tensor: torch.Tensor) -> Hashable:
    """Return what tells a constant from others; a matrix and its transpose share their memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def scalar(value: Value) -> float | None:
    """Return a number that is a constant, also one in a tensor without dimensions."""
    found = constant(value)
    if isinstance(found, torch.Tensor) and found.dim() == 0 and found.dtype != torch.bool:
        return float(found.item())
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        return float(found)
    return None


def is_tensor(value: Value) -> bool:
    """Return whether a value is known to be a tensor."""
    return str(value.type()).startswith(("Tensor", "Float(", "BFloat16(", "Half("))


def only_use(value: Value, user: Node) -> bool:
    """Return whether one node uses a value, once, in the block where it is made."""
    uses = value.uses()
    if len(uses) != 1 or uses[0].user != user:
        return False
    return bool(value.node().owningBlock() == user.owningBlock())


class _Reader(Reader):
    """Reads graphs of TorchScript."""

    def call(self, value: Value) -> tuple[str, tuple[Any, ...], tuple[Any, ...]] | None:
        if not isinstance(value, torch._C.Value):
            return None
        node = value.node()
        name, operands = node.kind().removeprefix("aten::"), tuple(node.inputs())
        if name == "add" and len(operands) == 3 and constant(operands[2]) == 1:
            operands = operands[:2]
        if name == "mean" and list(map(constant, operands[1:])) == [[-1], True, None]:
            return "row_mean", operands[:1], (node,)
        return name, operands, (node,)

    def number(self, value: Value) -> float | None:
        return value if isinstance(value, float) else scalar(value)

    def source(self, value: Value) -> tuple[Value, tuple[Any, ...]]:
        node = value.node()
        cast = node.kind() in ("aten::to", "aten::type_as", "aten::float")
        return (node.inputsAt(0), (node,)) if cast else (value, ())


READER = _Reader()


# --- changes of a graph -----------------------------------------------------------------------------------------------


class Editor:
    """A graph that is rewritten; `done` has the name of each pattern that matched."""

    #: Where the weights are that patterns look at.
    device = "cpu"

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.done: list[str] = []
        self._own: set[str] | None = None
        #: Weights in another layout, by the memory of the plain one: a weight that is used twice is laid out once.
        self.packed: dict[Hashable, torch.Tensor] = {}
        #: Weights that were transposed, likewise.
        self.turned: dict[Hashable, torch.Tensor] = {}

    def each(self, kind: str, pattern: Callable[[Node], str | None]) -> None:
        """Offer all nodes of a kind to a pattern, which returns a name where it has matched."""
        # By name, and each found again: a pattern may have removed others. Nodes that patterns have inserted are not
        # for them: the branch for operands that do not fit has the very nodes that were matched.
        names = self._names(kind)
        if self._own is not None:
            names = [n for n in names if n in self._own]
        for name in names:
            nodes = self.graph.findAllNodes(kind, True)
            node = next((n for n in nodes if n.output().debugName() == name), None)
            done = pattern(node) if node is not None else None
            if done:
                self.done.append(done)

    def upgrade(self, former: str) -> None:
        """Take back a match that another one now includes."""
        # Ops that were in the program before, of optimized models and of earlier rewrites, were not counted here.
        if former in self.done:
            self.done.remove(former)

    def begin(self) -> None:
        """From now on offer only the nodes that are in the graph now."""
        self._own = set(self._names(None))

    def _names(self, kind: str | None) -> list[str]:
        nodes = self.graph.findAllNodes(kind, True) if kind else _all(self.graph)
        return [n.output().debugName() for n in nodes if n.outputsSize() == 1]

    def constant(self, value: Any, before: Node) -> Value:
        """Insert a constant."""
        self.graph.setInsertPoint(before)
        made = self.graph.insertConstant(value)
        self._leave()
        return made

    def _leave(self) -> None:
        # The place of insertion must not be a node that is removed later.
        self.graph.setInsertPoint(self.graph.return_node())

    def _values(self, arguments: list[Any], before: Node) -> list[Value]:
        return [a if isinstance(a, torch._C.Value) else self.constant(a, before) for a in arguments]

    def op(self, kind: str, arguments: list[Any], before: Node) -> Node:
        """Insert an op; arguments that are no values become constants."""
        node = self.graph.create(kind, self._values(arguments, before), 1)
        node.insertBefore(before)
        return node

    def call(self, name: str, arguments: list[Any], before: Node) -> Value:
        """Insert the body of a function of `ipex_core.nn.torchscript`; return its result, which is no alias."""
        inputs = self._values(arguments, before)
        self.graph.setInsertPoint(before)
        body: Any = function(name)
        (made,) = self.graph.insertGraph(body.graph, inputs)
        self._leave()
        return made

    def pair(self, name: str, arguments: list[Any], before: Node) -> tuple[Value, Value]:
        """Insert a function that returns two tensors."""
        found = self.call(name, arguments, before)
        node = self.graph.create("prim::TupleUnpack", [found], 2)
        node.insertBefore(before)
        first, second = node.outputs()
        return first, second

    def replace(self, node: Node, value: Value) -> None:
        """Use a value in the place of what a node makes, and remove the node."""
        value.setType(node.output().type())
        node.output().replaceAllUsesWith(value)
        node.destroy()

    def scalars(self, values: list[float], before: Node) -> Value:
        """Make a list of optional numbers."""
        node = self.graph.create("prim::ListConstruct", self._values(list(values), before), 1)
        node.insertBefore(before)
        node.output().setType(torch._C.ListType(torch._C.OptionalType(torch._C.NumberType.get())))
        return node.output()


def _all(block: Any) -> list[Node]:
    """Return the nodes of a block and of the blocks in it."""
    found = []
    for node in block.nodes():
        found.append(node)
        for inner in node.blocks():
            found += _all(inner)
    return found


# --- decomposed forms -------------------------------------------------------------------------------------------------


#: Nodes whose result is a tensor of a floating dtype if their weight is a constant of one -> place of the weight.
_FLOATING = {"aten::linear": (1, (2,)), "aten::_convolution": (1, (3, 4, 5))}


def normalize(editor: Editor, linears: bool) -> None:
    """Rewrite ``y * sigmoid(y)`` behind a layer to silu and, with ``linears``, products with a weight to linear layers.

    Nothing is reported for these: the patterns that follow do that.
    """
    found = len(editor.done)

    def bind(pattern: Callable[[Editor, Node], None]) -> Callable[[Node], None]:
        return lambda node: pattern(editor, node)

    if linears:
        editor.each("aten::addmm", bind(_addmm))
        editor.each("aten::matmul", bind(_matmul))
    editor.each("aten::mul", bind(_swish))
    assert len(editor.done) == found


def packs(n: int, k: int, dtype: torch.dtype) -> bool:
    """Return whether a linear layer of this size is faster with a packed weight of ours."""
    return choose_linear(dtype, n, k, None).form == "ipex"


def _swish(editor: Editor, node: Node) -> None:
    for value, gate in (tuple(node.inputs()), tuple(node.inputs())[::-1]):
        sigmoid = gate.node()
        if sigmoid.kind() != "aten::sigmoid" or sigmoid.inputsAt(0) != value:
            continue
        place, dims = _FLOATING.get(value.node().kind(), (0, ()))
        inner = value.node()
        if not any(weight(inner.inputsAt(place), dim, editor.device) is not None for dim in dims):
            continue
        if only_use(gate, node) and all(u.user in (node, sigmoid) for u in value.uses()):
            editor.replace(node, editor.op("aten::silu", [value], node).output())
            sigmoid.destroy()
            return


def _addmm(editor: Editor, node: Node) -> None:
    """``addmm(bias, x, weight)``, as GPT-2 and what `torch.nn.Linear` once was write a linear layer."""
    bias, x, w, beta, alpha = node.inputs()
    matrix = weight(w, 2)
    if matrix is None or weight(bias, 1) is None or {constant(beta), constant(alpha)} != {1}:
        return
    k, n = matrix.shape
    if constant(bias).numel() == n and packs(n, k, matrix.dtype):
        _linear(editor, node, x, w, bias)


def _matmul(editor: Editor, node: Node) -> None:
    """``x @ weight`` and ``x @ weight + bias``."""
    x, w = node.inputs()
    matrix = weight(w, 2)
    if (
        matrix is None
        or is_constant(x)
        or not packs(matrix.shape[1], matrix.shape[0], matrix.dtype)
    ):
        return
    add, vector = _bias_behind(node)
    if add is None or vector is None or vector.shape != (matrix.shape[1],):
        _linear(editor, node, x, w, None)
    elif vector.dtype == matrix.dtype:
        # A new bias: its constant may come after the product.
        _linear(editor, node, x, w, editor.constant(vector, node))
        editor.replace(add, next(v for v in add.inputs() if not is_constant(v)))


def _bias_behind(node: Node) -> tuple[Node | None, torch.Tensor | None]:
    """Return a sum with a constant vector that is the only use of a product, and the vector."""
    uses = node.output().uses()
    add = uses[0].user if len(uses) == 1 else None
    if add is None or add.kind() != "aten::add" or add.inputsSize() != 3:
        return None, None
    if constant(add.inputsAt(2)) != 1 or not only_use(node.output(), add):
        return None, None
    other = next((v for v in list(add.inputs())[:2] if v != node.output()), None)
    return add, None if other is None else weight(other, 1)


def _linear(editor: Editor, node: Node, x: Value, w: Value, bias: Value | None) -> None:
    matrix = constant(w)
    key = key_of(matrix)
    turned = editor.turned.setdefault(key, matrix.t().contiguous())
    editor.replace(node, editor.op("aten::linear", [x, turned, bias], node).output())


# --- convolutions -----------------------------------------------------------------------------------------------------


CONV = "mkldnn::_convolution_pointwise"
TRANSPOSED = "mkldnn::_convolution_transpose_pointwise"
#: Where these ops have the name of the activation; its numbers and algorithm follow.
_POST = {CONV: 7, TRANSPOSED: 8}
_NAMES = {CONV: "conv", TRANSPOSED: "conv_transpose"}

#: Activations that oneDNN computes with a convolution -> its name for them.
_ACTIVATIONS = {
    "aten::relu": "relu",
    "aten::sigmoid": "sigmoid",
    "aten::tanh": "tanh",
    "aten::silu": "swish",
    "aten::hardswish": "hardswish",
    "aten::leaky_relu": "leaky_relu",
    "aten::hardtanh": "hardtanh",
    "aten::gelu": "gelu",
}


class Convolutions:
    """The patterns of convolutions on one graph."""

    def __init__(self, editor: Editor) -> None:
        self.editor = editor

    def run(self) -> None:
        """Apply all of them."""
        self.editor.each("aten::_convolution", self._conv)
        for kind in _ACTIVATIONS:
            self.editor.each(kind, self._activation)
        self.editor.each("aten::add", self._add)

    def _conv(self, node: Node) -> str | None:
        x, w, b, stride, padding, dilation, transposed, output_padding, groups, *_ = node.inputs()
        dim = next((d for d in (3, 4, 5) if weight(w, d) is not None), None)
        if dim is None or not is_constant(b) or not isinstance(constant(transposed), bool):
            return None
        kernel = constant(w)
        lists = [constant(v) for v in (padding, output_padding, stride, dilation)]
        if not all(_numbers(v, dim - 2) for v in lists):
            return None
        if not onednn.supports(kernel.dtype) or kernel.numel() == 0:
            return None
        bias = constant(b)
        if bias is not None and bias.dtype != kernel.dtype:
            return None
        kind = TRANSPOSED if constant(transposed) else CONV
        if kind == CONV:
            del lists[1]
        elif dim == 3:
            return None  # oneDNN has none for signals
        post = ["none", self.editor.scalars([], node), ""]
        arguments = [x, self._laid_out(kernel), b, *lists, groups, *post]
        self.editor.replace(node, self.editor.op(kind, arguments, node).output())
        return _NAMES[kind]

    def _laid_out(self, kernel: torch.Tensor) -> torch.Tensor:
        key = key_of(kernel)
        if key not in self.editor.packed:
            layout = CHANNELS_LAST.get(kernel.dim(), torch.contiguous_format)
            self.editor.packed[key] = kernel.contiguous(memory_format=layout)
        return self.editor.packed[key]

    def _plain(self, value: Value, user: Node) -> Node | None:
        """Return the convolution that makes a value, if nothing was fused to it and it has one reader."""
        node = value.node()
        place = _POST.get(node.kind())
        if place is None or not only_use(value, user):
            return None
        return node if constant(node.inputsAt(place)) == "none" else None

    def _activation(self, node: Node) -> str | None:
        name = _ACTIVATIONS[node.kind()]
        conv = self._plain(node.inputsAt(0), node)
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
        place = _POST[conv.kind()]
        conv.replaceInput(place, self.editor.constant(name, conv))
        conv.replaceInput(place + 1, self.editor.scalars(numbers, conv))
        conv.replaceInput(place + 2, self.editor.constant(algorithm, conv))
        node.output().replaceAllUsesWith(node.inputsAt(0))
        node.destroy()
        self.editor.upgrade(_NAMES[conv.kind()])
        return f"{_NAMES[conv.kind()]} + {'silu' if name == 'swish' else name}"

    def _add(self, node: Node) -> str | None:
        if node.inputsSize() != 3 or constant(node.inputsAt(2)) != 1:
            return None
        a, b = list(node.inputs())[:2]
        for value, other in ((b, a), (a, b)):
            conv = self._plain(value, node)
            if conv is None or is_constant(other) or not is_tensor(other) or other == value:
                continue
            # Of the others oneDNN has none, or not in all dtypes: the sum goes into the result.
            whole = conv.kind() == CONV and constant(conv.inputsAt(1)).dim() == 4
            uses = node.output().uses()
            relu = uses[0].user if len(uses) == 1 and uses[0].user.kind() == "aten::relu" else None
            name = _NAMES[conv.kind()]
            if not whole:
                self.editor.replace(node, self.editor.call("add_in_place", [value, other], node))
                self.editor.upgrade(name)
                return f"{name} + add"
            x, w, bias, *lists = list(conv.inputs())[:7]
            arguments = [x, other, w, bias, *lists, relu is not None]
            new = self.editor.call("conv_add", arguments, node)
            if relu is not None:
                relu.output().replaceAllUsesWith(node.output())
                relu.destroy()
            self.editor.replace(node, new)
            conv.destroy()
            self.editor.upgrade(name)
            return f"{name} + add" if relu is None else f"{name} + add + relu"
        return None


def _numbers(value: object, count: int) -> bool:
    return (
        isinstance(value, list) and len(value) == count and all(isinstance(i, int) for i in value)
    )


# --- rewriting --------------------------------------------------------------------------------------------------------


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

    def _linear_binary(self, node: Node, name: str) -> str | None:
        a, b = list(node.inputs())[:2]
        for value, other in ((b, a), (a, b)):
            if not is_tensor(other):
                continue
            linear = self._plain_linear(value, node)
            if linear is None or is_constant(other):
                continue
            after = [other, None, None] if name == "mul" else [None, other, None]
            text = constant(linear.inputsAt(5))
            given = [linear.inputsAt(i) for i in (0, 1, 2, 3, 5)]
            new = self.call("linear", [*given, *after], node)
            self.replace(node, new)
            self._sums.add(new.debugName())
            linear.destroy()
            former = "linear" if text == "none" else f"linear + {text}"
            self.upgrade(former)
            return f"{former} + {name}"
        return None

    def _linear_mul(self, node: Node) -> str | None:
        return self._linear_binary(node, "mul")

    def _linear_add(self, node: Node) -> str | None:
        if node.inputsSize() != 3 or constant(node.inputsAt(2)) != 1:
            return None
        return self._linear_binary(node, "add")

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
            narrow, back = READER.source(value)
            scale = weight(w, 1, self.device)
            found = READER.find(RMS_NORM, narrow) if scale is not None else None
            if found is None:
                continue
            if not back and any(READER.source(it.output())[1] for it in found.passed):
                continue  # stays float32 behind the norm
            new = self.op("ipex::rms_norm", [found["x"], w, found["eps"], 0.0], node)
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
        """``softmax(q @ k.T / c + mask) @ v`` in its usual spellings, also with the casts of autocast."""
        v = node.inputsAt(1)
        softmax, reader = _behind_autocast(node.inputsAt(0), node, "reduced")
        one = softmax.node()
        if one.kind() != "aten::softmax" or not only_use(softmax, reader):
            return None
        if constant(one.inputsAt(1)) != -1 or not is_constant(one.inputsAt(2)):
            return None
        if constant(one.inputsAt(2)) is not None:
            return None
        found = self._scores(one.inputsAt(0), one, casts=True)
        if found is None or (found.widened and reader == node):
            return None
        scores = found.value.node()
        if scores.kind() != "aten::matmul" or not found.only_read():
            return None
        q, right = scores.inputs()
        turned, cast = _behind_autocast(right, scores, "reduced")
        keys = turned.node()
        if keys.kind() != "aten::transpose" or not only_use(turned, cast):
            return None
        dims = {constant(keys.inputsAt(1)), constant(keys.inputsAt(2))}
        if dims not in ({-1, -2}, {2, 3}):
            return None
        mask, k = self._mask(found, node), keys.inputsAt(0)
        if cast != scores:
            k = self.op(cast.kind(), [k, *list(cast.inputs())[1:]], node).output()
        arguments = [q, k, v, mask, found.factor, found.divide, found.widened]
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

    def _scores(self, value: Value, user: Node, casts: bool = False) -> _Scores | None:
        """Return what a softmax reads: scores, divided or multiplied, plus a mask or filled by one.

        With ``casts`` also what autocast widens to float32 on the way.
        """
        mask, fill, names = None, None, []
        widened = False

        def narrow() -> None:
            nonlocal value, user, widened
            if casts:
                value, reader = _behind_autocast(value, user, "full")
                widened |= reader != user
                user = reader

        narrow()
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
        narrow()
        factor, divide = 1.0, False
        node = value.node()
        if node.kind() in ("aten::div", "aten::mul") and only_use(value, user):
            number = scalar(node.inputsAt(1))
            if number is None or number <= 0 or node.inputsSize() != 2:
                return None
            factor, divide = number, node.kind() == "aten::div"
            value, user = node.inputsAt(0), node
            names.insert(0, "div" if divide else "mul")
            narrow()
        return _Scores(value, user, mask, fill, factor, divide, " + ".join(names), widened)

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
    widened: bool  #: whether autocast has made them float32

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


#: Numbers of dtypes in a graph: what autocast widens to and lowers to.
_WIDE, _LOW = (6,), (5, 15)


def _behind_autocast(value: Value, user: Node, to: str) -> tuple[Value, Node]:
    """Return what casts of autocast read and the first one, or what is given: a value and the node that reads it.

    A trace has ``aten::to``, the pass of torch for programs ops of its own. ``to`` is ``"full"`` or ``"reduced"``.
    """
    dtypes = _WIDE if to == "full" else _LOW
    while only_use(value, user):
        node = value.node()
        cast = node.kind() == f"aten::_autocast_to_{to}_precision" or (
            node.kind() == "aten::to"
            and node.inputsSize() == 5
            and constant(node.inputsAt(1)) in dtypes
        )
        if not cast:
            break
        value, user = node.inputsAt(0), node
    return value, user


def _is_plain(value: Value) -> bool:
    """Return whether an argument is a constant and no tensor."""
    found = constant(value)
    return is_constant(value) and (found is None or isinstance(found, (bool, int, float, str)))
