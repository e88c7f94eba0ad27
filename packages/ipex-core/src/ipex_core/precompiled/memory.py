# SPDX-License-Identifier: Apache-2.0
"""How much memory the results of a graph take at a time."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, fx

from ipex_core.fusion.aten import VIEWING
from ipex_core.util.symbolic import hints

__all__ = ["peak_bytes"]

aten = torch.ops.aten


def _bytes(node: fx.Node) -> int:
    """Return the size of the tensors of a node; sizes that vary count as in the example."""
    found = node.meta.get("val")
    total = 0
    for value in found if isinstance(found, (list, tuple)) else (found,):
        if isinstance(value, Tensor) and value.layout == torch.strided:
            total += math.prod(hints(value.shape)) * value.element_size()
    return total


def peak_bytes(graph: fx.Graph) -> int:
    """Return the most memory that the results of a graph take at a time; views take none."""
    views = {*VIEWING, aten.t.default, aten.detach.default, operator.getitem}
    roots: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    nodes = list(graph.nodes)
    for number, node in enumerate(nodes):
        base = node.args[0] if node.target in views and node.args else node
        roots[node] = roots.get(base, node) if isinstance(base, fx.Node) else node
        last[roots[node]] = number
        for one in node.all_input_nodes:
            last[roots[one]] = number
    frees: dict[int, list[fx.Node]] = {}
    for node, number in last.items():
        frees.setdefault(number, []).append(node)
    now = most = 0
    for number, node in enumerate(nodes):
        if node.op == "call_function" and roots[node] is node:
            now += _bytes(node)
            most = max(most, now)
        now -= sum(_bytes(one) for one in frees.get(number, ()) if one.op == "call_function")
    return most
