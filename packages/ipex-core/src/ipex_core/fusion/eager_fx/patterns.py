# SPDX-License-Identifier: Apache-2.0
"""Patterns of the fusion pass, matched on the trace of one module."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from ipex_core.kernels.policy import has_kernel
from ipex_core.module_swap.base import has_hooks
from ipex_core.module_swap.state_dict import state_of
from ipex_core.nn import OptimizedLinear, functional
from ipex_core.nn.layers import identity_dropout
from ipex_core.nn.merged_linear import linears, may_merge, merge

__all__ = [
    "Rewriter",
    "find_rms_norm",
]

_MAX_OPS = 16


def find_rms_norm(module: nn.Module, graph: fx.Graph) -> fx.Graph | None:
    """Return a graph that calls the fused norm if the module is an RMS norm, else None."""
    parameters = [(n, p) for n, p in module._parameters.items() if p is not None]
    inputs = graph.find_nodes(op="placeholder")
    if module._modules or len(parameters) != 1 or len(inputs) != 1 or len(graph.nodes) > _MAX_OPS:
        return None
    name, weight = parameters[0]
    text = " ".join(str(node.target) for node in graph.nodes)
    if weight.dim() != 1 or "mean" not in text or ("sqrt" not in text and "pow" not in text):
        return None
    if weight.device.type != "cpu":
        return None
    constants = {a for node in graph.nodes for a in node.args if isinstance(a, float)}
    for eps in sorted(c for c in constants if 0.0 < c < 1e-2):
        for offset in (0.0, 1.0):
            if _is_rms_norm(module, weight, eps, offset):
                return _graph(str(inputs[0].target), name, eps, offset)
    return None


@torch.no_grad()
def _is_rms_norm(module: nn.Module, weight: torch.Tensor, eps: float, offset: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, eps**0.5, 30.0):
        x = (torch.randn(3, weight.numel(), generator=generator) * scale).to(weight.dtype)
        x = x + 0.2 * scale  # a mean, which a layer norm would remove
        try:
            got = module.forward(x)
        except Exception:
            return False
        if not isinstance(got, torch.Tensor) or got.dtype != x.dtype or got.shape != x.shape:
            return False
        wide = x.double()
        root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        want = wide * root * (weight.double() + offset)
        close = 2e-5 if weight.dtype == torch.float32 else 2e-2
        if not torch.allclose(got.double(), want, rtol=close, atol=close * 0.1):
            return False
    return True


def _graph(argument: str, weight: str, eps: float, offset: float) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder(argument)
    parameter: Any = graph.create_node("get_attr", weight)
    graph.output(graph.call_function(functional.rms_norm, (x, parameter, eps, offset)))
    return graph


# --- patterns ---------------------------------------------------------------------------------------------------------


_ADD = (operator.add, operator.iadd, torch.add)
_MUL = (operator.mul, operator.imul, torch.mul)
_RELU = (F.relu, torch.relu)


class Rewriter:
    """Matches and replaces; collects what was fused and which children are no longer called.

    Args:
        graph: Trace of ``root``.
        root: The module.
        remove_dropout: Whether to replace calls of dropout by their inputs.
        concat_linear: Whether to merge linear layers that read the same tensor.
        fuse: Whether to apply the other patterns.
    """

    def __init__(
        self,
        graph: fx.Graph,
        root: nn.Module,
        *,
        remove_dropout: bool,
        concat_linear: bool,
        fuse: bool,
    ) -> None:
        self.graph = graph
        self.root = root
        self.remove_dropout = remove_dropout
        self.concat_linear = concat_linear
        self.fuse = fuse
        self.done: list[str] = []
        self.children: list[str] = []

    def run(self) -> tuple[list[str], list[str]]:
        """Apply all patterns; return what was fused and the children that are bypassed."""
        if self.remove_dropout:
            self._each(self._dropout)
        if self.concat_linear:
            self._each(self._concat)
        if not self.fuse:
            return self.done, self.children
        self._each(self._gated)
        self._each(self._linear_activation)
        self._each(self._linear_add)
        self._each(self._add_norm)
        self._each(self._attention)
        self._each(self._gelu)
        return self.done, self.children

    def _each(self, pattern: Callable[[fx.Node], None]) -> None:
        for node in list(self.graph.nodes):
            if node.op != "output" and (node.users or node.op == "placeholder"):
                pattern(node)

    # ---- what a node is

    def _child(self, node: fx.Node) -> nn.Module | None:
        """Return the child a node calls, if its call may be fused."""
        if node.op != "call_module":
            return None
        child = self.root._modules.get(str(node.target))
        if child is None or has_hooks(child) or "forward" in child.__dict__:
            return None
        return child

    def _kind(self, child: nn.Module) -> type[nn.Module]:
        state = state_of(child)
        return (state.original_class if state is not None else None) or type(child)

    def _is_linear(self, node: Any, packed: bool = False) -> bool:
        if not isinstance(node, fx.Node) or len(node.users) != 1:
            return False
        child = self._child(node)
        if child is None or self._kind(child) is not nn.Linear:
            return False
        return not packed or (isinstance(child, OptimizedLinear) and child._packed is not None)

    def _activation(self, node: Any) -> str | None:
        """Return the name of the activation a node computes."""
        if not isinstance(node, fx.Node):
            return None
        child = self._child(node)
        if child is not None:
            if isinstance(child, nn.GELU) and self._kind(child) is nn.GELU:
                return "gelu_tanh" if child.approximate == "tanh" else "gelu"
            return {nn.SiLU: "silu", nn.ReLU: "relu"}.get(type(child))
        if node.op == "call_method" and node.target == "relu":
            return "relu"
        if node.op != "call_function":
            return None
        if node.target is F.gelu:
            mode = node.kwargs.get("approximate", node.args[1] if len(node.args) > 1 else "none")
            return "gelu_tanh" if mode == "tanh" else "gelu"
        if node.target is F.silu:
            return "silu"
        return "relu" if node.target in _RELU else None

    def _operands(self, node: fx.Node, kinds: tuple[Any, ...]) -> tuple[fx.Node, fx.Node] | None:
        """Return the two tensor operands of an addition or a multiplication."""
        match = node.op == "call_function" and node.target in kinds and not node.kwargs
        if not match or len(node.args) != 2:
            return None
        a, b = node.args
        return (a, b) if isinstance(a, fx.Node) and isinstance(b, fx.Node) and a is not b else None

    # ---- replacing

    def _replace(self, node: fx.Node, function: Any, args: tuple[Any, ...], text: str) -> fx.Node:
        with self.graph.inserting_before(node):
            new = self.graph.call_function(function, args)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)
        self.done.append(text)
        return new

    def _module_node(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """Make a node that holds the child that another node calls."""
        with self.graph.inserting_before(before):
            return self.graph.create_node("get_attr", str(node.target))

    def _drop(self, node: fx.Node) -> None:
        """Remove a node that has no users left, remembering the child it called."""
        if node.op == "call_module":
            self.children.append(str(node.target))
        self.graph.erase_node(node)

    # ---- patterns

    def _dropout(self, node: fx.Node) -> None:
        child = self._child(node)
        if child is not None and identity_dropout(self._kind(child)) is not None:
            node.replace_all_uses_with(node.all_input_nodes[0])
            self._drop(node)

    def _concat(self, node: fx.Node) -> None:
        """Merge the linear layers among the users of a node."""
        users = [
            u
            for u in node.users
            if u.op == "call_module" and u.args == (node,) and not u.kwargs and self._child(u)
        ]
        users.sort(key=list(self.graph.nodes).index)
        names = [str(u.target) for u in users]
        members = tuple(self.root.get_submodule(name) for name in names)
        if len(set(names)) != len(names) or not may_merge(members) or not merge(members):
            return
        with self.graph.inserting_before(users[0]):
            layers = [self.graph.create_node("get_attr", str(u.target)) for u in users]
            both = self.graph.call_function(linears, (node, *layers))
            parts = [
                self.graph.call_function(operator.getitem, (both, i)) for i in range(len(users))
            ]
        for user, part in zip(users, parts, strict=True):
            user.replace_all_uses_with(part)
            self.graph.erase_node(user)
        self.done.append(f"concat of {', '.join(names)}")

    def _gated(self, node: fx.Node) -> None:
        operands = self._operands(node, _MUL)
        if operands is None:
            return
        for gate, up in (operands, operands[::-1]):
            post = self._activation(gate)
            op = "silu_mul" if post == "silu" else "gelu_mul"
            if (
                post not in ("silu", "gelu", "gelu_tanh")
                or not has_kernel(op)
                or len(gate.users) != 1
            ):
                continue
            source = gate.all_input_nodes[0]
            self._replace(node, functional.act_mul, (source, up, post), f"ipex::{op}")
            self._drop(gate)
            return

    def _linear_activation(self, node: fx.Node) -> None:
        post = self._activation(node)
        if post is None or len(node.all_input_nodes) != 1:
            return
        linear = node.all_input_nodes[0]
        if not self._is_linear(linear, packed=True):
            return
        module = self._module_node(linear, node)
        args = (module, linear.args[0], post)
        if node.op == "call_module":
            self.children.append(str(node.target))
        self._replace(node, functional.linear, args, f"linear + {post}")
        self._drop(linear)

    def _linear_add(self, node: fx.Node) -> None:
        operands = self._operands(node, _ADD)
        if operands is None:
            return
        for linear, residual in (operands, operands[::-1]):
            if self._is_linear(linear, packed=True):
                module = self._module_node(linear, node)
                args = (module, linear.args[0], "none", residual)
                self._replace(node, functional.linear, args, "linear + add")
                self._drop(linear)
                return

    def _add_norm(self, node: fx.Node) -> None:
        child = self._child(node)
        if child is None or not node.args or not isinstance(node.args[0], fx.Node):
            return
        kind = self._kind(child)
        if kind is nn.LayerNorm:
            function, op = functional.add_layer_norm, "add_layer_norm"
        elif kind is nn.RMSNorm:
            function, op = functional.add_rms_norm, "add_rms_norm"
        else:
            return
        total = node.args[0]
        operands = self._operands(total, _ADD)
        if operands is None or not has_kernel(op):
            return
        with self.graph.inserting_before(total):
            module = self.graph.create_node("get_attr", str(node.target))
            both = self.graph.call_function(function, (*operands, module))
            normed = self.graph.call_function(operator.getitem, (both, 0))
            summed = self.graph.call_function(operator.getitem, (both, 1))
        node.replace_all_uses_with(normed)
        self._drop(node)
        total.replace_all_uses_with(summed)
        self.graph.erase_node(total)
        self.done.append(f"ipex::{op}")

    def _attention(self, node: fx.Node) -> None:
        stock = node.op == "call_function" and node.target is F.scaled_dot_product_attention
        if stock and has_kernel("attention"):
            node.target = functional.attention
            self.done.append("ipex::attention")

    def _gelu(self, node: fx.Node) -> None:
        """Use the own GELU for calls of the function; modules were exchanged before."""
        if node.op == "call_function" and node.target is F.gelu and has_kernel("gelu"):
            node.target = functional.gelu
            self.done.append("ipex::gelu")
