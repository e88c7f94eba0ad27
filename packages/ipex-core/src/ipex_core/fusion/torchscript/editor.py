# SPDX-License-Identifier: Apache-2.0
"""Changing a TorchScript graph: what all patterns use."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from ipex_core.fusion.torchscript.nodes import Node, Value
from ipex_core.nn.torchscript import function

__all__ = ["Editor"]


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
        # By name, and each found anew: a pattern may have removed others. Nodes that patterns have inserted are not
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
