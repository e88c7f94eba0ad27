# SPDX-License-Identifier: Apache-2.0
"""Fusion of frozen TorchScript programs.

IPEX fused every frozen program once it was imported. Here nothing happens until `fuse` is called with a program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ipex_core.fusion.torchscript import Rewriter, constant
from ipex_core.module_swap.state_dict import record_of, update

__all__ = ["enable_onednn_fusion", "fuse", "fused", "is_onednn_fusion_enabled"]

_enabled = True
#: What rewrites graphs with weights on a device other than the CPU, by its type: it returns the names of what matched.
rewriters: dict[str, Callable[[Any], list[str]]] = {}


def enable_onednn_fusion(enabled: bool) -> None:
    """Turn `fuse` on or off for the whole process; off, it returns programs as they are.

    Raises:
        TypeError: ``enabled`` is not a bool.
    """
    global _enabled
    if not isinstance(enabled, bool):
        raise TypeError(f"enable_onednn_fusion: enabled must be True or False, got {enabled!r}")
    _enabled = enabled


def is_onednn_fusion_enabled() -> bool:
    """Return whether `fuse` does anything."""
    return _enabled


def fuse(program: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """Rewrite the patterns of a frozen program to fused ops.

    Linear layers get packed weights, linear layers and convolutions run the activation, product or sum that follows,
    and attention, layer norms with the sum before them, and RMS norms become one op each. What an op cannot take, for
    instance a sum with broadcasting, runs as before: the test is part of the program. On the device xpu the ops that
    follow a layer run in one pass.

    Args:
        program: Result of `torch.jit.freeze`, on the CPU or the device xpu. It stays as it is.

    Returns:
        A new program. It shares constants with ``program``, except weights that were packed. A saved one needs
        ``import ipex`` where it is loaded.

    Raises:
        TypeError: ``program`` is not a ScriptModule.
        ValueError: ``program`` is not frozen.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
        >>> frozen = torch.jit.freeze(torch.jit.trace(model, torch.ones(1, 3, 8, 8)))
        >>> fused(fuse(frozen))
        {'conv + relu': 1}
    """
    if not isinstance(program, torch.jit.ScriptModule):
        raise TypeError(f"fuse: program must be a ScriptModule, got {type(program).__name__}")
    if hasattr(program, "training") or any(True for _ in program.parameters()):
        raise ValueError("fuse: program must be frozen by torch.jit.freeze, got one that is not")
    if not _enabled:
        return program
    interpreter: Any = torch._C
    # Freezing copies: the executor may have kept a plan of the given graph.
    copy: Any = torch.jit._recursive.wrap_cpp_module(
        interpreter._freeze_module(program._c, [], True, True)
    )
    rewrite = rewriters.get(_device_of(copy.graph), _rewrite)
    update(copy, fused=dict(Counter(rewrite(copy.graph))))
    result: torch.jit.ScriptModule = copy
    return result


def _rewrite(graph: Any) -> list[str]:
    rewriter = Rewriter(graph)
    rewriter.run()
    return rewriter.done


def _device_of(graph: Any) -> str:
    """Return the type of the device of the weights of a graph; the CPU where there are none elsewhere."""
    for node in graph.findAllNodes("prim::Constant", True):
        found = constant(node.output())
        if isinstance(found, torch.Tensor) and found.device.type in rewriters:
            return found.device.type
    return "cpu"


def fused(program: torch.jit.ScriptModule) -> dict[str, int]:
    """Return what `fuse` rewrote in a program it returned: pattern -> number; empty for others."""
    return dict(record_of(program).fused or {})
