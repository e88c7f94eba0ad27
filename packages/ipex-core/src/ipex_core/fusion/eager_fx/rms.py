# SPDX-License-Identifier: Apache-2.0
"""Recognition of hand-written RMS norms.

There are many ways to write one. The trace only has to contain a mean and a reciprocal root; that the forward *is* the
norm is then verified by running it on a few inputs against the definition, for weight offsets 0 and 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from ipex_core.nn import functional

__all__ = ["find_rms_norm"]

_MAX_OPS = 16


def find_rms_norm(module: nn.Module, graph: fx.Graph) -> fx.Graph | None:
    """Return a graph that calls the fused norm if the module is an RMS norm, else None."""
    parameters = [(n, p) for n, p in module._parameters.items() if p is not None]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
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
