# SPDX-License-Identifier: Apache-2.0
"""Fusion of optimized models while ``torch.jit.trace`` records them.

torch calls ``module._slow_forward`` in place of ``forward`` where a trace is recorded, and only there. An optimized
model has its own on the instance: it records the forward apart, freezes and fuses that program, and puts it into the
trace as one call. Calls without a trace never come here.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["ATTRIBUTE", "TracedForward"]

log = logging.getLogger("ipex")

#: Where torch looks for what runs while a trace is recorded.
ATTRIBUTE = "_slow_forward"
_inner = threading.local()
#: The place of a tensor in a result.
_TENSOR: Any = object()
_PLAIN = (torch.Tensor, bool, int, float, str, type(None), torch.dtype)


class _Flat(nn.Module):
    """A model that takes and returns flat tuples of tensors."""

    def __init__(self, module: nn.Module, leaves: list[Any], spec: Any) -> None:
        super().__init__()
        self.module = module
        self.training = False  # not `eval()`, which would change parts of the model
        self._leaves, self._spec = leaves, spec
        self.result: tuple[list[Any], Any] = [], None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model; remember the form of its result."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(v, torch.Tensor) else v for v in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        leaves, spec = pytree.tree_flatten(self.module.forward(*args, **kwargs))
        self.result = [_TENSOR if isinstance(v, torch.Tensor) else v for v in leaves], spec
        return tuple(v for v in leaves if isinstance(v, torch.Tensor))


class TracedForward:
    """What runs in place of the forward of an optimized model while a trace is recorded."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record one call of the fused program, or all calls of the model where that cannot be."""
        module = self._module()
        assert module is not None
        if torch.is_autocast_enabled("cpu"):
            # Weights that autocast has cast before, for another call or the first of the two traces that torch makes,
            # would be constants of the program, which may have no gradient. The casts are recorded instead.
            torch.clear_autocast_cache()
        found = None
        if not getattr(_inner, "busy", False) and _may_fuse(module):
            _inner.busy = True
            try:
                found = _record(module, args, kwargs)
            finally:
                _inner.busy = False
        if found is None:
            if torch.is_autocast_enabled("cpu"):
                torch.clear_autocast_cache()  # of what was recorded in vain
            return type(module)._slow_forward(module, *args, **kwargs)
        function, tensors, (leaves, spec) = found
        results = iter(function(*tensors))
        # Now: a graph that calls a function does not keep it alive.
        torch._C._jit_pass_inline(torch._C._get_tracing_state().graph())
        return pytree.tree_unflatten([next(results) if v is _TENSOR else v for v in leaves], spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedForward:
        import copy

        module = copy.deepcopy(self._module(), memo)
        assert module is not None
        return TracedForward(module)

    def __reduce__(self) -> Any:
        return TracedForward, (self._module(),)


def _may_fuse(module: nn.Module) -> bool:
    """Return whether the model is for inference, and fusion is on."""
    from ipex_core import jit

    return (
        jit.is_onednn_fusion_enabled()
        and not torch.onnx.is_in_onnx_export()
        and not any(part.training for part in module.modules())
    )


#: Why a trace is left alone that torch would warn of.
_ROUNDED = (
    "results that are rounded less often would fail the check of torch.jit.trace (check_trace); call ipex.jit.fuse on"
    " the frozen program"
)


def _agree(one: Any, other: Any, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Return whether two programs give what the check of ``torch.jit.trace`` takes for the same."""
    with torch.no_grad():
        results = [program(*(t.clone() for t in tensors)) for program in (one, other)]
    return all(
        torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-5, equal_nan=True)
        if a.is_floating_point()
        else torch.equal(a, b)
        for a, b in zip(*results, strict=True)
    )


def _record(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return the fused program as a function of tensors, what to call it with, and the form of the result."""
    from ipex_core import jit

    leaves, spec = pytree.tree_flatten((args, kwargs))
    if not all(isinstance(leaf, _PLAIN) for leaf in leaves):
        return None
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    # Gradients decide by the inputs, not by `no_grad`, which torch enters to check a trace against a second one.
    fits = (type(t) is torch.Tensor and t.is_cpu and not t.requires_grad for t in tensors)
    if not tensors or not all(fits):
        return None
    flat, name = _Flat(module, leaves, spec), type(module).__name__
    interpreter: Any = torch._C
    outer = interpreter._get_tracing_state()
    if any(
        outer.graph().findAllNodes(kind, True)
        for kind in ("prim::CallFunction", "prim::CallMethod")
    ):
        return None  # inlining would take them away from the trace
    interpreter._set_tracing_state(None)
    try:
        plain = torch.jit.freeze(torch.jit.trace(flat, tensors, check_trace=False, strict=False))
        program = jit.fuse(plain)
        if not _agree(program, plain, tensors):
            log.info("torch.jit.trace: %s is recorded without fusion: %s", name, _ROUNDED)
            return None
    except Exception as error:
        log.info("torch.jit.trace: %s is recorded without fusion: %s", name, error)
        return None
    finally:
        interpreter._set_tracing_state(outer)
    graph = program.graph.copy()
    itself = next(graph.inputs())
    if itself.uses() or _TENSOR not in flat.result[0]:
        return None  # the forward writes to something that it keeps, or returns no tensor
    graph.eraseInput(0)
    return interpreter._create_function_from_graph("ipex_fused", graph), tensors, flat.result
