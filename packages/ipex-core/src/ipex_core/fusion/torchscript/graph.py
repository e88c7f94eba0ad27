# SPDX-License-Identifier: Apache-2.0
"""Nodes of TorchScript graphs: what they are, and how they are replaced."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from ipex_core.library.spec import FLOATS
from ipex_core.nn.torchscript import function

__all__ = [
    "Editor",
    "behind_cast",
    "constant",
    "is_constant",
    "is_tensor",
    "key_of",
    "mean_square",
    "only_use",
    "scalar",
    "weight",
]

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


def weight(value: Value, dim: int) -> torch.Tensor | None:
    """Return the tensor of a constant of a floating dtype and ``dim`` dimensions on the CPU."""
    tensor = constant(value)
    plain = (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in FLOATS
        and tensor.device.type == "cpu"
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


def behind_cast(value: Value) -> Value:
    """Return what a cast reads, or the value itself."""
    node = value.node()
    return (
        node.inputsAt(0) if node.kind() in ("aten::to", "aten::type_as", "aten::float") else value
    )


def mean_square(root: Value, x: Value) -> float | None:
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


# --- changes of a graph -----------------------------------------------------------------------------------------------


class Editor:
    """A graph that is rewritten; `done` has the name of each pattern that matched."""

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
