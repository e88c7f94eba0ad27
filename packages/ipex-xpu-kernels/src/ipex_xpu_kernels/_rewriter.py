# SPDX-License-Identifier: Apache-2.0
"""Fusion of frozen TorchScript programs of the device: element-wise ops in one pass, norms, attention."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ipex_core.fusion import torchscript
from ipex_core.fusion.torchscript import constant, is_constant, is_tensor, scalar, weight

# torch declares the classes of graphs without their methods.
Node = Any
Value = Any

#: Of one pass, as the op has them.
_MOST_STEPS, _MOST_OPERANDS = 4, 3
_DEVICE = "xpu"

#: What makes floating numbers of whatever it reads.
_FLOATING = (
    *("sigmoid", "tanh", "silu", "gelu", "exp", "log", "sqrt", "mish", "softmax"),
    *("ipex::gelu", "ipex::silu_mul", "ipex::gelu_mul"),
)
#: Whose result has the dtype of the first operand.
_SAME = (
    *("view", "reshape", "flatten", "transpose", "permute", "contiguous", "slice", "select"),
    *("squeeze", "unsqueeze", "expand", "expand_as", "dropout", "t", "clone", "detach"),
    *("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "relu", "hardtanh", "leaky_relu"),
    *("hardswish", "hardsigmoid", "elu", "clamp", "abs", "square", "add", "sub", "mul", "div"),
    *("mm", "bmm", "matmul", "linear", "ipex::rms_norm", "ipex::attention"),
)
#: Ops with a weight -> its place, its dimensions, their name in reports.
_LAYERS = {
    "_convolution": (1, (3, 4, 5), "conv"),
    **{f"conv{d}d": (1, (d + 2,), "conv") for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": (1, (d + 2,), "conv_transpose") for d in (1, 2, 3)},
    "linear": (1, (2,), "linear"),
    "addmm": (2, (2,), "linear"),
    "matmul": (1, (2,), "linear"),
    "layer_norm": (2, (1,), "layer_norm"),
    "batch_norm": (1, (1,), "batch_norm"),
}
#: Ops that the device has no kernel for: one of them alone is worth a pass.
_ALONE = ("clamp", "elu", "hardsigmoid", "hardswish", "mish", "round")


class Step(NamedTuple):
    """One op of a pass. Operands are places in the inputs of its node, since values are replaced on the way."""

    node: Node
    name: str  #: in the op
    numbers: tuple[float, ...] = ()
    value: int = 0
    other: int | None = None
    shown: str = ""  #: in reports, if not the name


_PLAIN = {
    f"aten::{name}": name
    for name in (
        *("relu", "sigmoid", "tanh", "silu", "exp", "log", "sqrt", "abs", "square", "reciprocal"),
        *("hardsigmoid", "hardswish", "mish", "round"),
    )
}


def _gelu(node: Node) -> Step | None:
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    name = names.get(constant(node.inputsAt(1)))
    return None if name is None else Step(node, name)


def _leaky_relu(node: Node) -> Step | None:
    slope = scalar(node.inputsAt(1))
    return None if slope is None else Step(node, "leaky_relu", (slope,))


def _clamp(node: Node) -> Step | None:
    low, high = list(node.inputs())[1:3]
    bounds = [-math.inf, math.inf]
    for i, bound in enumerate((low, high)):
        if is_constant(bound) and constant(bound) is None:
            continue
        found = scalar(bound)
        if found is None or math.isnan(found):
            return None
        bounds[i] = found
    shown = node.kind().removeprefix("aten::")
    return Step(node, "clamp", (bounds[0], bounds[1]), shown=shown)


def _relu6(node: Node) -> Step | None:
    return Step(node, "clamp", (0.0, 6.0), shown="relu6")


def _elu(node: Node) -> Step | None:
    alpha, *scales = (scalar(v) for v in list(node.inputs())[1:])
    return None if alpha is None or scales != [1.0, 1.0] else Step(node, "elu", (alpha,))


def _pow(node: Node) -> Step | None:
    exponent = scalar(node.inputsAt(1))
    if exponent is None:
        return None
    return Step(node, "square") if exponent == 2 else Step(node, "pow", (exponent,))


_WITH_NUMBERS: dict[str, Callable[[Node], Step | None]] = {
    "aten::gelu": _gelu,
    "aten::leaky_relu": _leaky_relu,
    "aten::hardtanh": _clamp,
    "aten::clamp": _clamp,
    "aten::relu6": _relu6,
    "aten::elu": _elu,
    "aten::pow": _pow,
}


def _sum(node: Node, place: int) -> Step | None:
    """``add``, ``sub`` and ``rsub``."""
    kind = node.kind().removeprefix("aten::")
    if node.inputsSize() != 3 or place > 1:
        return None
    other, alpha = node.inputsAt(1 - place), scalar(node.inputsAt(2))
    if alpha is None:
        return None
    # One operand plus the factor times the other one, which is the right one but for rsub.
    factor = alpha if kind == "add" else -alpha
    first = (place == 0) != (kind == "rsub")
    number = scalar(other)
    if number is not None:
        numbers = (1.0, factor * number) if first else (factor, number)
        return Step(node, "affine", numbers, place, shown=kind)
    if not is_tensor(other):
        return None
    return Step(node, "add" if first else "add_to", (factor,), place, 1 - place, kind)


def _product(node: Node, place: int) -> Step | None:
    """``mul``, and ``div`` of the value."""
    kind = node.kind().removeprefix("aten::")
    if node.inputsSize() != 2 or (kind == "div" and place == 1):
        return None
    other = node.inputsAt(1 - place)
    number = scalar(other)
    if number is not None:
        if kind == "div":
            # Exact for powers of two only.
            if number == 0 or math.isinf(number) or abs(math.frexp(number)[0]) != 0.5:
                return None
            number = 1.0 / number
        return Step(node, "affine", (number, 0.0), place, shown=kind)
    return Step(node, kind, (), place, 1 - place) if is_tensor(other) else None


def step_of(node: Node, value: Value) -> Step | None:
    """Return the op of a pass that a node is for one of its operands."""
    kind = node.kind()
    place = next((i for i, operand in enumerate(node.inputs()) if operand == value), None)
    if place is None:
        return None
    if kind in ("aten::add", "aten::sub", "aten::rsub"):
        return _sum(node, place)
    if kind in ("aten::mul", "aten::div"):
        return _product(node, place)
    if place != 0:
        return None
    if kind in _PLAIN:
        return Step(node, _PLAIN[kind]) if node.inputsSize() == 1 else None
    found = _WITH_NUMBERS.get(kind)
    return found(node) if found is not None else None


class Rewriter(torchscript.Rewriter):
    """Rewrites one graph whose weights are on the device."""

    device = _DEVICE

    def run(self) -> None:
        """Apply all patterns and remove what they leave behind."""
        passes: Any = torch._C
        passes._jit_pass_inline(self.graph)
        passes._jit_pass_remove_mutation(self.graph)
        passes._jit_pass_constant_propagation(self.graph)
        torchscript.normalize(self, linears=False)
        self.begin()
        self.each("aten::matmul", self._attention)
        passes._jit_pass_dce(self.graph)
        self.each("aten::mul", self._rms_norm)
        self.each("aten::layer_norm", self._add_layer_norm)
        # What still writes to a tensor may write to an operand of a pass before that.
        if not any(re.search(r"[a-z]_$", node.kind()) for node in torchscript._all(self.graph)):
            self._chains(self.graph)
        passes._jit_pass_constant_propagation(self.graph)
        passes._jit_pass_dce(self.graph)
        passes._jit_pass_constant_pooling(self.graph)
        passes._jit_pass_lint(self.graph)

    # ---- element-wise ops

    def _chains(self, block: Any) -> None:
        # Collected first: passes are put in the places of the last nodes.
        taken: set[str] = set()
        found = []
        for node in block.nodes():
            if node.outputsSize() != 1 or node.output().debugName() in taken:
                continue
            chain = self._chain(node, taken)
            taken.update(step.node.output().debugName() for step in chain)
            # One step and one operand are left to the bias of a convolution.
            spare = 1
            while chain:
                part, chain = self._part(chain, spare)
                spare = 0
                found.append(part)
        for part in found:
            self._fuse(part)

    def _chain(self, node: Node, taken: set[str]) -> list[Step]:
        """Return the ops from a node on, each of which is the only reader of the one before it."""
        step = self._first(node, taken)
        if step is None:
            return []
        chain = [step]
        while True:
            value = chain[-1].node.output()
            uses = value.uses()
            if len(uses) != 1 or uses[0].user.owningBlock() != node.owningBlock():
                return chain
            after = step_of(uses[0].user, value)
            if after is None or after.node.output().debugName() in taken:
                return chain
            chain.append(after)

    def _first(self, node: Node, taken: set[str]) -> Step | None:
        """Return a node as the first op of a pass; a layer before it that nothing else reads goes first."""
        values = [v for v in node.inputs() if not is_constant(v)][:2]
        own = [v for v in values if torchscript.only_use(v, node) and self._layer(v) is not None]
        for value in (*own, *values):
            step = step_of(node, value) if self._is_floating(value) else None
            if step is not None:
                return step
        return None

    def _layer(self, value: Value) -> str | None:
        """Return the name of the layer that makes a value."""
        node = value.node()
        place, dims, name = _LAYERS.get(node.kind().removeprefix("aten::"), (0, (), ""))
        if not any(weight(node.inputsAt(place), dim, self.device) is not None for dim in dims):
            return None
        if node.kind() == "aten::_convolution" and constant(node.inputsAt(6)):
            return "conv_transpose"
        return name

    def _is_floating(self, value: Value, depth: int = 30) -> bool:
        """Return whether a value is known to have floating numbers."""
        node = value.node()
        kind = node.kind().removeprefix("aten::")
        if str(value.type()).startswith(("Float(", "BFloat16(", "Half(")):
            return True
        if kind in _FLOATING:
            return True
        if self._layer(value) is not None:
            return True
        known = kind in _SAME and depth > 0 and node.inputsSize() > 0
        return known and self._is_floating(node.inputsAt(0), depth - 1)

    @staticmethod
    def _part(chain: list[Step], spare: int) -> tuple[list[Step], list[Step]]:
        """Return what fits one pass, and the rest."""
        operands = spare
        for i, step in enumerate(chain):
            operands += step.other is not None
            if i + spare == _MOST_STEPS or operands > _MOST_OPERANDS:
                return chain[:i], chain[i:]
        return chain, []

    def _fuse(self, steps: list[Step]) -> None:
        first, last = steps[0].node, steps[-1].node
        value = first.inputsAt(steps[0].value)
        layer = self._layer(value) if torchscript.only_use(value, first) else None
        bias = self._bias(value, last) if layer in ("conv", "conv_transpose") else None
        alone = len(steps) == 1 and bias is None and steps[0].name not in _ALONE
        if alone:
            return
        names = [step.name for step in steps]
        numbers = [number for step in steps for number in step.numbers]
        others = [step.node.inputsAt(step.other) for step in steps if step.other is not None]
        if bias is not None:
            names, numbers, others = ["add", *names], [1.0, *numbers], [bias, *others]
        arguments = [
            value,
            self._list(others, torch._C.TensorType.get(), last),
            " ".join(names),
            self._list(numbers, torch._C.FloatType.get(), last),
        ]
        new = self.op("ipex_xpu::chain", arguments, last).output()
        self.replace(last, new)
        for step in steps[-2::-1]:
            step.node.destroy()
        shown = [step.shown or step.name for step in steps]
        self.done.append(" + ".join([layer, *shown] if layer else shown))

    def _list(self, values: list[Any], kind: Any, before: Node) -> Value:
        node = self.graph.create("prim::ListConstruct", self._values(values, before), 1)
        node.insertBefore(before)
        node.output().setType(torch._C.ListType(kind))
        return node.output()

    def _bias(self, value: Value, before: Node) -> Value | None:
        """Take the bias away from a convolution; return it as what is added to images."""
        node = value.node()
        bias, kernel = constant(node.inputsAt(2)), constant(node.inputsAt(1))
        if not isinstance(bias, torch.Tensor) or bias.dtype != kernel.dtype or bias.dim() != 1:
            return None
        node.replaceInput(2, self.constant(None, node))
        return self.constant(bias.view(-1, *[1] * (kernel.dim() - 2)), before)


def rewrite(graph: Any) -> list[str]:
    """Rewrite a graph; return the names of what matched."""
    rewriter = Rewriter(graph)
    rewriter.run()
    return rewriter.done
