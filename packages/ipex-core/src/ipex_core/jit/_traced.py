# SPDX-License-Identifier: Apache-2.0
"""Fusion of optimized models while ``torch.jit.trace`` records them.

torch calls ``module._slow_forward`` in place of ``forward`` where a trace is recorded, and only there. An optimized
model has its own on the instance: it records the forward apart, freezes and fuses that program, and puts it into the
trace as one call. Calls without a trace never come here.

torch runs a new trace against the model and warns where they differ by more than float32 rounds. Programs that round
bfloat16 less often than the model does are therefore put into the trace beside the plain one, which runs until the
trace is frozen: a parameter that wants gradients tells, which freezing makes a constant.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

log = logging.getLogger("ipex")

#: Where torch looks for what runs while a trace is recorded.
ATTRIBUTE = "_slow_forward"
_inner = threading.local()
#: The place of a tensor in a result.
_TENSOR: Any = object()
_PLAIN = (torch.Tensor, bool, int, float, str, type(None), torch.dtype)


@dataclasses.dataclass(frozen=True)
class Form:
    """What a model returns but for its tensors, which come in the order of ``leaves``."""

    leaves: list[Any]
    spec: Any

    def build(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return a result with these tensors."""
        given = iter(tensors)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    @property
    def others(self) -> list[Any]:
        """The leaves that are no tensors."""
        return [leaf for leaf in self.leaves if leaf is not _TENSOR]


class FlatCall(nn.Module):
    """A model that takes and returns flat tuples of tensors.

    Args:
        module: The model.
        args: Its arguments; those that are no tensors stay what they are.
        alone: Whether its forward runs alone, without hooks.

    Attributes:
        form: Of the last result.
        tensors: Of the last result.
    """

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, alone: bool = False) -> None:
        super().__init__()
        self.module = module
        self.training = False  # not `eval()`, which would change parts of the model
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._alone = alone
        self.form = Form([], None)
        self.tensors: tuple[torch.Tensor, ...] = ()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model; remember the form of its result and its tensors."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(v, torch.Tensor) else v for v in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        run = self.module.forward if self._alone else self.module
        leaves, spec = pytree.tree_flatten(run(*args, **kwargs))
        self.form = Form([_TENSOR if isinstance(v, torch.Tensor) else v for v in leaves], spec)
        self.tensors = tuple(v for v in leaves if isinstance(v, torch.Tensor))
        return self.tensors


class TracedForward:
    """What runs in place of the forward of an optimized model while a trace is recorded."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record one call of the fused program, or all calls of the model where that cannot be."""
        module = self._module()
        assert module is not None
        if _autocasts():
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
            if _autocasts():
                torch.clear_autocast_cache()  # of what was recorded in vain
            return type(module)._slow_forward(module, *args, **kwargs)
        function, tensors, form = found
        results = function(*tensors)
        # Now: a graph that calls a function does not keep it alive.
        torch._C._jit_pass_inline(torch._C._get_tracing_state().graph())
        return form.build(results)

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedForward:
        import copy

        module = copy.deepcopy(self._module(), memo)
        assert module is not None
        return TracedForward(module)

    def __reduce__(self) -> Any:
        return TracedForward, (self._module(),)


def _autocasts() -> bool:
    """Return whether autocast is on for a device whose programs are fused."""
    from ipex_core import jit

    return any(map(torch.is_autocast_enabled, ("cpu", *jit.rewriters)))


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
    "results that are rounded less often would fail the check of torch.jit.trace (check_trace), and no parameter wants"
    " gradients, which would tell when the trace is frozen; call ipex.jit.fuse on the frozen program"
)
#: Why a trace is left alone whose result has tensors out of sight.
_HIDDEN = (
    "its result has a %s, which may hold tensors; leave it out (a cache: use_cache=False), or call ipex.jit.fuse on the"
    " frozen program"
)

_UNTIL_FROZEN = """
def until_frozen({names}):
    if parameter.requires_grad:
        results = plain({tensors})
    else:
        results = fused({tensors})
    return results
"""


def _until_frozen(plain: Any, fused: Any, count: int) -> Any:
    """Return a graph that runs one function of ``count`` tensors, and another after freezing."""
    tensors = [f"x{i}" for i in range(count)]
    names = ", ".join(f"{name}: Tensor" for name in ["parameter", *tensors])
    source = _UNTIL_FROZEN.format(names=names, tensors=", ".join(tensors))
    unit: Any = torch.jit.CompilationUnit(source)  # it finds `plain` and `fused` here
    interpreter: Any = torch._C
    graph = unit.until_frozen.graph.copy()
    interpreter._jit_pass_inline(graph)
    interpreter._jit_pass_dce(graph)  # what named the two functions, which do not live on
    return graph


def _telling(module: nn.Module, state: Any) -> nn.Parameter | None:
    """Return a parameter that wants gradients and belongs to the model that is traced."""
    interpreter: Any = torch._C
    interpreter._set_tracing_state(state)
    try:
        for parameter in module.parameters():
            if type(parameter) is nn.Parameter and parameter.requires_grad:
                interpreter._get_value_trace(parameter)  # raises where it would be a constant
                return parameter
    except RuntimeError:
        return None
    finally:
        interpreter._set_tracing_state(None)
    return None


def _agree(one: Any, other: Any) -> bool:
    """Return whether the check of ``torch.jit.trace`` takes two results for the same."""
    return all(
        torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-5, equal_nan=True)
        if a.is_floating_point()
        else torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


def _record(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return the fused program as a function of tensors, what to call it with, and the form of the result."""
    from ipex_core import jit

    leaves = pytree.tree_leaves((args, kwargs))
    if not all(isinstance(leaf, _PLAIN) for leaf in leaves):
        return None
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    # Gradients decide by the inputs, not by `no_grad`, which torch enters to check a trace against a second one.
    fits = (type(t) is torch.Tensor and not t.requires_grad for t in tensors)
    devices = {t.device.type for t in tensors}
    if not all(fits) or len(devices) != 1 or not devices <= {"cpu", *jit.rewriters}:
        return None
    flat, name = FlatCall(module, args, kwargs, alone=True), type(module).__name__
    interpreter: Any = torch._C
    outer = interpreter._get_tracing_state()
    if any(
        outer.graph().findAllNodes(kind, True)
        for kind in ("prim::CallFunction", "prim::CallMethod")
    ):
        return None  # inlining would take them away from the trace
    interpreter._set_tracing_state(None)
    # The trace has the casts of autocast. Those that torch would add to the program differ from what the model does.
    casts = interpreter._jit_set_autocast_mode(False)
    try:
        plain = torch.jit.freeze(torch.jit.trace(flat, tensors, check_trace=False, strict=False))
        program = jit.fuse(plain)
        if any(next(one.graph.inputs()).uses() for one in (program, plain)):
            return None  # the forward writes to something that it keeps
        if not flat.tensors:
            return None  # it returns no tensor
        objects = [type(v).__name__ for v in flat.form.others if not isinstance(v, _PLAIN)]
        if objects:  # the trace would not know the tensors in it
            log.info(
                "torch.jit.trace: %s is recorded without fusion: %s", name, _HIDDEN % objects[0]
            )
            return None
        parameter = None
        with torch.no_grad():
            fused, stock = (one(*(t.clone() for t in tensors)) for one in (program, plain))
        if not _agree(fused, stock):
            parameter = _telling(module, outer)
            if parameter is None or not _agree(flat.tensors, stock):
                log.info("torch.jit.trace: %s is recorded without fusion: %s", name, _ROUNDED)
                return None
    except Exception as error:
        log.info("torch.jit.trace: %s is recorded without fusion: %s", name, error)
        return None
    finally:
        interpreter._jit_set_autocast_mode(casts)
        interpreter._set_tracing_state(outer)
    functions = []
    for one in (program, plain):
        graph = one.graph.copy()
        graph.eraseInput(0)
        functions.append(interpreter._create_function_from_graph("ipex_fused", graph))
    if parameter is None:
        return functions[0], tensors, flat.form
    graph = _until_frozen(functions[1], functions[0], len(tensors))
    function = interpreter._create_function_from_graph("ipex_fused", graph)
    return function, (parameter, *tensors), flat.form
