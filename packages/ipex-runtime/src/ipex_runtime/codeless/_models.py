# SPDX-License-Identifier: Apache-2.0
"""Decides what happens to a model at its first outermost call, does it, and remembers it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ipex_runtime.codeless import facade
from ipex_runtime.codeless._script import Settings

#: Arguments and results that hold keys and values for the next call; they stay as they are.
CACHES = ("past_key_values", "past_key_value", "cache_params")

#: Modules of torch that call models in order to turn them into something else.
TRANSFORMATIONS = (
    "torch.jit._trace",
    "torch.fx.",
    "torch.export.",
    "torch.onnx.",
    "torch._dynamo.",
    "torch._export.",
)


@dataclasses.dataclass
class _Record:
    """What became of one module: optimized (with what surrounds its calls), or the reason why not."""

    optimized: bool
    root: weakref.ref[nn.Module] | None = None
    dtype: torch.dtype | None = None
    result_dtype: torch.dtype | None = None


class Models:
    """The models of this process.

    Args:
        settings: What to do with them.
        original: The call of `torch.nn.Module`.
    """

    def __init__(self, settings: Settings, original: Callable[..., Any]) -> None:
        self._settings = settings
        self._original = original
        self._records: dict[int, tuple[weakref.ref[nn.Module], _Record]] = {}
        self._told: set[str] = set()
        self._lock = threading.RLock()

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module that no other module calls."""
        record = self._find(module)
        if record is None:
            if _in_transformation():
                return self._original(module, *args, **kwargs)
            with self._lock:
                record = self._find(module) or self._first(module, args, kwargs)
        if record.optimized and module.training:
            self._give_up(record)
        if not record.optimized:
            return self._original(module, *args, **kwargs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if record.dtype is not None:
                stack.enter_context(torch.autocast("cpu", dtype=record.dtype))
            result = self._original(module, *args, **kwargs)
        return result if record.dtype is None else _cast(result, record.dtype, record.result_dtype)

    # -- records -------------------------------------------------------------------------------------------------------

    def _find(self, module: nn.Module) -> _Record | None:
        entry = self._records.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def _keep(self, module: nn.Module, record: _Record) -> _Record:
        key = id(module)

        def forget(dead: Any) -> None:
            entry = self._records.get(key)
            if entry is not None and entry[0] is dead:
                del self._records[key]

        self._records[key] = (weakref.ref(module, forget), record)
        return record

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _first(self, module: nn.Module, args: Any, kwargs: Any) -> _Record:
        name = type(module).__name__
        if module.training and any(True for _ in module.parameters()):
            # Not kept: the script may call eval() later.
            self._say(f"{name} is in training mode and left alone (model.eval() for inference)")
            return _Record(False)
        reason = _why_not(module, args, kwargs)
        if reason is not None:
            if reason:
                self._say(f"{name} {reason} and is left alone")
            return self._keep(module, _Record(False))
        return self._optimize(module, name)

    def _optimize(self, module: nn.Module, name: str) -> _Record:
        start = time.monotonic()
        settings = self._settings
        first = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        low = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float16
        dtype = None if settings.dtype == "float32" else low
        graph = settings.graph_mode and not _generates(module)
        done = []
        try:
            ipex = facade()
            if settings.quantization != "none":
                done.append(_quantize(module, settings.quantization, dtype))
            ipex.optimize(module, dtype=dtype, inplace=True, graph_mode=graph)
        except Exception as error:
            with contextlib.suppress(Exception):
                facade().restore(module)
            self._say(
                f"{name} cannot be optimized and is left alone: {type(error).__name__}: {error}"
            )
            return self._keep(module, _Record(False))
        record = _Record(True, weakref.ref(module), dtype, first)
        for part in module.modules():
            # A part that the script calls by itself has the same data type.
            self._keep(part, record)
        if settings.verbose:
            done.append(settings.dtype + (", as a graph" if graph else ""))
            self._say(f"{name} optimized in {time.monotonic() - start:.1f} s: {', '.join(done)}")
            if not graph and settings.graph_mode:
                self._say(f"{name} generates token by token and is not captured as a graph")
            with contextlib.suppress(Exception):
                self._say(str(ipex.explain(module)))
        return record

    def _give_up(self, record: _Record) -> None:
        """Undo the optimization of a model that the script trains after all."""
        with self._lock:
            if not record.optimized:
                return
            record.optimized = False
            root = record.root() if record.root is not None else None
            if root is None:
                return
            mode = {part: part.training for part in root.modules()}
            facade().restore(root)
            for part, training in mode.items():
                part.training = training
            self._say(f"{type(root).__name__} is trained now: its optimization was undone")

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            print(f"auto-ipex: {text}", file=sys.stderr, flush=True)


def _in_transformation() -> bool:
    """Return whether a call now is part of a trace or of a pretended run, not of the script's work."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    if torch._C._get_tracing_state() is not None or _get_current_dispatch_mode() is not None:
        return True
    # What these run for themselves, for instance to check a trace.
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(TRANSFORMATIONS):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _why_not(module: nn.Module, args: Any, kwargs: Any) -> str | None:
    """Return why a module is not optimized; an empty text where no optimization is expected, None to optimize it."""
    parameters = list(module.parameters())
    if not parameters:
        return ""
    if isinstance(module, torch.jit.ScriptModule):
        return "is a TorchScript program"
    if type(module).__name__ == "OptimizedModule":
        return "is compiled by the script"
    devices = {p.device.type for p in parameters}
    if devices != {"cpu"}:
        return f"has parameters on {', '.join(sorted(devices))}"
    if not any(p.is_floating_point() for p in parameters):
        return "has no floating-point parameters"
    if any(name.startswith("_ipex") for name in module.__dict__):
        return "is optimized by the script"
    if torch.is_grad_enabled() and _has_gradient([args, kwargs]):
        return "is called with an input that needs a gradient"
    own = {id(p) for p in parameters}
    for thing in gc.get_objects():
        # By type: asking a lazy object for its class may import or warn.
        if issubclass(type(thing), torch.optim.Optimizer) and any(
            id(p) in own for group in thing.param_groups for p in group["params"]
        ):
            return "is trained (an optimizer has its parameters)"
    return None


def _has_gradient(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, Mapping):
        return any(map(_has_gradient, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_has_gradient, value))


def _generates(module: nn.Module) -> bool:
    can = getattr(module, "can_generate", None)
    return bool(can()) if callable(can) else False


def _quantize(module: nn.Module, how: str, dtype: torch.dtype | None) -> str:
    q = facade().quantization
    if how == "int8-dynamic":
        q.prepare(module, q.default_dynamic_qconfig_mapping, inplace=True)
        q.convert(module, inplace=True)
        return "linear layers in dynamic INT8"
    kind = q.WoqWeightDtype.INT8 if how == "woq-int8" else q.WoqWeightDtype.INT4
    mode = q.WoqLowpMode.BF16 if dtype == torch.bfloat16 else q.WoqLowpMode.NONE
    groups = (-1,) if how == "woq-int8" else (128, 32, -1)
    for size in groups:
        try:
            layers = q.quantize_linears(
                module,
                q.woq_qconfig(weight_dtype=kind, lowp_mode=mode, group_size=size),
                progress=False,
            )
        except ValueError:
            if size == groups[-1]:
                raise
        else:
            return f"weights of {len(layers)} linear layers in {kind.name}"
    raise AssertionError("unreachable")


def _cast(value: Any, low: torch.dtype, wanted: torch.dtype | None) -> Any:
    """Return a result in the data type of the original model, so that the script's next lines see what they know."""
    if isinstance(value, torch.Tensor):
        return value.to(wanted) if value.dtype == low else value
    if type(value) in (list, tuple):
        return type(value)(_cast(item, low, wanted) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, low, wanted) for item in value))
    if isinstance(value, dict):  # results of transformers are such
        for key, item in list(value.items()):
            if key not in CACHES:
                value[key] = _cast(item, low, wanted)
    return value
