# SPDX-License-Identifier: Apache-2.0
"""One graph while the passes work on it: replacing a matched part by one op."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from ipex_core.fusion.aten.nodes import PURE, VIEWING, describe, module_of, same, val
from ipex_core.fusion.report import Fusion, GraphReport

__all__ = ["Context"]

aten = torch.ops.aten


@dataclasses.dataclass
class Context:
    """One graph while the passes work on it.

    Attributes:
        graph: The graph.
        constants: Placeholders that freezing turns into constants.
        report: Where decisions go.
        always: Whether the tables of measured speed are left aside.
        disabled: Names of patterns that are off.
        kernels: Tells whether an op has a native kernel.
        weights: For linear nodes made here: the constant weight ``[N, K]`` and the bias.
    """

    graph: fx.Graph
    constants: set[fx.Node]
    report: GraphReport
    always: bool = False
    disabled: frozenset[str] = frozenset()
    kernels: Callable[[str], bool] = lambda op: True
    weights: dict[fx.Node, tuple[fx.Node, fx.Node | None]] = dataclasses.field(default_factory=dict)

    def nodes(self, *targets: Any) -> Iterator[fx.Node]:
        """Yield the nodes that call one of these ops, in the order of the graph, as long as they are in it."""
        wanted = set(targets)
        for node in [n for n in self.graph.nodes if n.op == "call_function" and n.target in wanted]:
            if not node._erased:
                yield node

    def is_constant(self, node: Any) -> bool:
        """Return whether freezing makes a constant of a node."""
        if not isinstance(node, fx.Node):
            return False
        if node.op == "placeholder":
            return node in self.constants
        if node.op == "get_attr":
            return True
        return (
            node.op == "call_function"
            and node.target in PURE
            and bool(node.all_input_nodes)
            and all(map(self.is_constant, node.all_input_nodes))
        )

    def reject(self, pattern: str, node: fx.Node, op: str, reason: str) -> None:
        """Record why a pattern leaves a place alone."""
        self.report.add(Fusion(pattern, False, op, reason, module_of(node), describe(node)))

    def outside_user(self, interior: Iterable[fx.Node], root: fx.Node) -> fx.Node | None:
        """Return an intermediate result that something outside the match uses, or None."""
        inside = {*interior, root}
        for node in inside:
            if node is not root and any(user not in inside for user in node.users):
                return node
        return None

    def call(
        self, before: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] = {}
    ) -> fx.Node:
        """Insert a call in front of a node, with its fake result."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, dict(kwargs))
        fake_args, fake_kwargs = fx.node.map_arg((args, dict(kwargs)), lambda n: n.meta.get("val"))
        node.meta.update(
            {k: before.meta[k] for k in ("stack_trace", "nn_module_stack") if k in before.meta}
        )
        with self.fake_mode():
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def fake_mode(self) -> Any:
        """Return the context in which ops run on the fake results of the graph."""
        from torch._guards import detect_fake_mode

        mode = detect_fake_mode([v for v in map(val, self.graph.nodes) if v is not None][:8])
        return mode if mode is not None else contextlib.nullcontext()

    def replace(
        self,
        pattern: str,
        root: fx.Node,
        interior: Iterable[fx.Node],
        target: Any,
        args: tuple[Any, ...],
        text: str,
        kwargs: Mapping[str, Any] = {},
        cut: int | None = None,
    ) -> fx.Node | None:
        """Put one op in the place of a match, unless something else needs what lies inside.

        Args:
            pattern: Name of the pattern.
            root: The node whose value the op computes.
            interior: Nodes between the inputs of the op and the root.
            target: The op.
            args: Its arguments.
            text: What was fused.
            kwargs: Its keyword arguments.
            cut: How much of the last dimension of its result is wanted, if not all.

        Returns:
            The new node, or None where the match was rejected.
        """
        interior = list(interior)
        op = str(target).removesuffix(".default").replace(".", "::")
        blocker = self.outside_user(interior, root)
        if blocker is not None:
            self.reject(pattern, root, op, f"{blocker.name} inside the pattern has another user")
            return None
        node = call = self.call(root, target, args, kwargs)
        if cut is not None:
            node = self.call(
                root, aten.slice.Tensor, (call, len(call.meta["val"].shape) - 1, 0, cut)
            )
        result, expected = val(node), val(root)
        if (
            result is None
            or expected is None
            or result.dtype != expected.dtype
            or not same(result.shape, expected.shape)
        ):
            got, want = describe(node), describe(root)
            self.drop([call, node])
            self.reject(pattern, root, op, f"the op gives {got}, the graph has {want}")
            return None
        root.replace_all_uses_with(node)
        if not same(result.stride(), expected.stride()):
            self._lay_out(node)
        self.fused(pattern, root, call, text)
        self.drop([root, *interior])
        return node

    def _lay_out(self, node: fx.Node) -> None:
        """Tell the views of a node that it lies otherwise now; where a view cannot be one any more, it copies."""
        with self.fake_mode():
            for user in node.users:
                if user.target not in VIEWING:
                    continue
                args = fx.node.map_arg(user.args, lambda n: n.meta.get("val"))
                try:
                    user.meta["val"] = user.target(*args)
                except (RuntimeError, ValueError):
                    user.target = aten.reshape.default
                    user.meta["val"] = user.target(*args)
                self._lay_out(user)

    def fused(self, pattern: str, root: fx.Node, node: fx.Node, text: str) -> None:
        """Record a replacement."""
        op = str(node.target).removesuffix(".default").replace(".", "::")
        self.report.add(Fusion(pattern, True, op, text, module_of(root), describe(root)))

    def drop(self, nodes: Iterable[fx.Node]) -> None:
        """Remove nodes that have no users left, last ones first."""
        pending = set(nodes)
        while True:
            dead = [n for n in pending if not n.users or n._erased]
            if not dead:
                return
            for node in dead:
                if not node._erased:
                    self.graph.erase_node(node)
                pending.discard(node)
                self.weights.pop(node, None)
