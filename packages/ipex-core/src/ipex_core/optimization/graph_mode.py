# SPDX-License-Identifier: Apache-2.0
"""``graph_mode=True``: the model captures itself at its first call.

`torch.compile` of the whole model comes first, a frozen trace where that cannot capture it, and eager execution last.
The reason for a step down is in the record that `ipex.explain` shows.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ipex_core import config
from ipex_core.errors import FallbackError
from ipex_core.fusion import Weights
from ipex_core.jit._traced import FlatCall
from ipex_core.optimization.records import Log
from ipex_core.util import quiet, raised

_trace_lock = threading.Lock()
_TracerWarning: type[Warning] = torch.jit._trace.TracerWarning
STEP = "graph_mode"
#: A trace may have sizes in it, so each kind of input gets its own; further ones run eagerly.
MAX_TRACES = 16
#: How many kinds of inputs are remembered. A number among the arguments makes a kind of its own, so a server that
#: passes another one in each call would fill the memory. What is forgotten is decided again.
MAX_KINDS = 256
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format)


class GraphCall:
    """What a model with ``graph_mode`` runs when it is called; installed where ``Module.compile`` puts its result.

    Safe to call from several threads: one of them captures while others wait if they bring inputs of a kind not seen
    before.
    """

    def __init__(self, model: nn.Module, log: Log) -> None:
        # Weak: the model holds this object, and a cycle would keep its weights until the garbage collector runs.
        self._model = weakref.ref(model)
        self._log = log
        self._lock = threading.RLock()
        backend = "ipex" if "ipex" in torch._dynamo.list_backends(()) else "inductor"
        self._name = f"torch.compile({backend})"
        self._compiled: Callable[..., Any] | None = torch.compile(
            model._call_impl, backend=backend, fullgraph=True
        )
        self._captured = False
        self._runs: dict[Any, Callable[..., Any]] = {}
        self._reasons: list[str] = []
        self._traces = 0
        self._weights: Weights | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return model._call_impl(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if torch.is_grad_enabled() and _requires_grad(model, leaves):
            self._note("calls with gradients run eagerly")
            return model._call_impl(*args, **kwargs)
        key = (structure, _mode(model), tuple(map(_kind, leaves)))
        run = self._runs.get(key)
        if run is None or self._stale():
            with self._lock:
                return self._first(model, key, args, kwargs)
        return run(*args, **kwargs)

    def _first(self, model: nn.Module, key: Any, args: Any, kwargs: Any) -> Any:
        """Run inputs of a new kind, and remember how."""
        if self._stale():
            self._runs.clear()
            self._traces, self._weights = 0, None
        if key in self._runs:  # by the thread that had the lock before
            return self._runs[key](*args, **kwargs)
        eager = _Eager(self._model)
        if self._compiled is not None:
            try:
                result = self._compiled(*args, **kwargs)
            except Exception as error:
                reason = f"torch.compile: {_line(error)}"
            else:
                self._captured = True
                self._remember(key, self._compiled)
                self._record(True, "captured at the first call", self._name)
                return result
            if self._captured:  # other inputs work
                result = eager(*args, **kwargs)
                self._remember(key, eager)
                self._note(f"some inputs run eagerly: {reason}")
                return result
        else:
            reason = ""
        buffers = [(b, b._version, b.clone()) for b in model.buffers() if not b.is_inference()]
        try:
            if self._traces >= MAX_TRACES:
                raise _NoTraceError(f"more than {MAX_TRACES} kinds of inputs")
            result, run = _trace(model, args, kwargs)
            if any(b._version != version for b, version, _ in buffers):
                raise _NoTraceError("the forward changes buffers")
        except Exception as error:
            for buffer, version, saved in buffers:
                if buffer._version != version:
                    buffer.data.copy_(saved)
            result = eager(*args, **kwargs)  # wrong inputs raise here, and nothing is decided
            self._decide(reason, f"torch.jit.trace: {_line(error)}")
            if self._traces == 0:
                self._fall_back()
            self._remember(key, eager)
            return result
        self._decide(reason)
        self._traces += 1
        self._weights = Weights.of(model)
        self._remember(key, run)
        self._record(True, f"traced and frozen; {'; '.join(self._reasons)}", "TorchScript")
        return result

    def _stale(self) -> bool:
        """Return whether weights have changed since the first trace, which has them as constants."""
        return self._weights is not None and not self._weights.same()

    def _remember(self, key: Any, run: Callable[..., Any]) -> None:
        """Keep how a kind of inputs runs, in the place of the oldest one that is not a trace if there are many."""
        if len(self._runs) >= MAX_KINDS:
            cheap = (k for k, r in self._runs.items() if r is self._compiled or type(r) is _Eager)
            del self._runs[next(cheap)]
        self._runs[key] = run

    def _decide(self, *reasons: str) -> None:
        self._compiled = None
        for reason in filter(None, reasons):
            if reason not in self._reasons:
                self._reasons.append(reason)

    def _fall_back(self) -> None:
        text = f"cannot be captured, runs eagerly; {'; '.join(self._reasons)}"
        self._record(False, text)
        if config.get("strict"):
            raise FallbackError(f"optimize(graph_mode=True): the model {text}")

    def _record(self, done: bool, text: str, kernel: str = "") -> None:
        for i, record in enumerate(self._log.records):
            if record.step == STEP and record.module == "":
                self._log.records[i] = dataclasses.replace(
                    record, done=done, text=text, kernel=kernel
                )

    def _note(self, text: str) -> None:
        note = f"{STEP}: {text}"
        if note not in self._log.notes:
            self._log.notes.append(note)


class _NoTraceError(Exception):
    """A model that a trace would not be true to."""


class _Eager:
    def __init__(self, model: weakref.ref[nn.Module]) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None
        return model._call_impl(*args, **kwargs)


def _line(error: BaseException) -> str:
    if isinstance(error, SystemError) and error.__cause__ is not None:
        error = error.__cause__  # of a warning of the tracer inside C code
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def _requires_grad(model: nn.Module, leaves: list[Any]) -> bool:
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in leaves) or any(
        p.requires_grad for p in model.parameters()
    )


def _mode(model: nn.Module) -> tuple[Any, ...]:
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return model.training, torch.is_inference_mode_enabled(), torch.is_grad_enabled(), cast


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return type(leaf), leaf.shape, leaf.dtype, leaf.stride() if not leaf.is_mkldnn else None
    return (type(leaf), leaf) if isinstance(leaf, _CONSTANTS) else type(leaf)


def _trace(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Callable[..., Any]]:
    """Run the model once under `torch.jit.trace`; return its result and the frozen program."""
    leaves = pytree.tree_leaves((args, kwargs))
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *_CONSTANTS)):
            raise _NoTraceError(f"an argument is a {type(leaf).__name__}")
    tensors = tuple(v for v in leaves if isinstance(v, torch.Tensor))
    if not tensors:
        raise _NoTraceError("no argument is a tensor")
    flat = FlatCall(model, args, kwargs).eval()
    # torch calls all of TorchScript deprecated, and keeps one table of names for all traces.
    with _trace_lock, quiet(), raised(_TracerWarning), torch.no_grad():
        traced: Any = torch.jit.trace(flat, tensors, check_trace=False, strict=False)
        program: Any = torch.jit.freeze(traced)
    form = flat.form
    if not flat.tensors or not all(isinstance(v, _CONSTANTS) for v in form.others):
        raise _NoTraceError("a result is neither a tensor nor a plain value")

    def run(*args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        return form.build(program(*(v for v in given if isinstance(v, torch.Tensor))))

    return form.build(tensor.detach() for tensor in flat.tensors), run
