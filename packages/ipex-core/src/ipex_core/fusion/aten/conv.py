# SPDX-License-Identifier: Apache-2.0
"""Convolutions that are left to Inductor, which gives oneDNN what follows a frozen one.

Nothing is replaced here; the report gets what was fused, and what was not and why. See packed_convolutions.py for those
that become an op of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import fx

from ipex_core.fusion.aten.nodes import describe, is_call, module_of
from ipex_core.fusion.report import Fusion, GraphReport

__all__ = ["report_convolutions"]

aten = torch.ops.aten
prims = torch.ops.prims

_NAME = "convolution"
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
            report.add(Fusion(_NAME, True, op, _follows(inside), module_of(node), describe(node)))
        elif _convolution([node]) is not None:
            op, reason = _name(node), _reason(node)
            report.add(Fusion(_NAME, False, op, reason, module_of(node), describe(node)))
        elif is_call(node, aten.convolution.default, aten._convolution.default):
            reason = "the weight is not frozen" if not report.frozen else "oneDNN does not take it"
            report.add(Fusion(_NAME, False, _STOCK, reason, module_of(node), describe(node)))


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
