# SPDX-License-Identifier: Apache-2.0
"""The step of an optimizer whose parameters may be in 16 bits, and fused steps for those in float32."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from ipex_core.module_swap.base import derive, original_class, swap
from ipex_core.module_swap.state_dict import FORMER
from ipex_core.optim.dtensor import any_spread, is_spread
from ipex_core.optim.foreach import laid_out_alike, stock_step
from ipex_core.optim.master_weights import Masters
from ipex_core.optim.plain import PlainOptimizer, below_autograd, loss_of, plain_step
from ipex_core.optim.steps import Calls, step_of

#: Stock optimizers that have a fused form for CPUs, which is as fast as the memory.
_STOCK_FUSED = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW)
#: Those whose fused form also takes parameters that FSDP spreads over processes.
_STOCK_FUSED_SPREAD = (torch.optim.Adam, torch.optim.AdamW)

#: Group, parameter in 16 bits, gradient, and the rest of the parameter's bits.
_Low = tuple[dict[str, Any], nn.Parameter, torch.Tensor, Any]


@dataclasses.dataclass
class Record:
    """What `adopt` keeps on an optimizer."""

    #: The weights in float32 of parameters in 16 bits.
    masters: Masters
    #: Whether steps are fused.
    fuse: bool
    #: Until the first step: the model, and its parameters by name.
    made_for: tuple[weakref.ref[nn.Module], dict[nn.Parameter, str]] | None = None


def record_of(optimizer: Optimizer) -> Record | None:
    """Return the record of an optimizer that `adopt` has changed, else None."""
    record: Record | None = optimizer.__dict__.get("_ipex")
    return record


class OptimizerMixin(Optimizer):
    """Put in front of an optimizer's class by `adopt`."""

    _ipex: Record

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As torch does: no hooks, and no step that a scheduler has wrapped, because it belongs to this object.
        state = {
            key: value
            for key, value in self.__dict__.items()
            if key != "step" and not key.endswith("_hooks")
        }
        state["_ipex"] = dataclasses.replace(self._ipex, made_for=None)
        return _rebuild, (original_class(self),), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Files of ipex 0.1 have one attribute for each field of the record.
        old = {name: state.pop(name) for name in list(state) if name.startswith(FORMER)}
        if old:
            state["_ipex"] = Record(**{k.removeprefix(FORMER): v for k, v in old.items()})
        super().__setstate__(state)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state of the stock optimizer; its tensors stay float32."""
        with self._ipex.masters.as_float32(self, _parameters(self)):
            super().load_state_dict(state_dict)


def _rebuild(kind: type[Optimizer]) -> Optimizer:
    new = derive(kind, OptimizerMixin, _members)
    made: Optimizer = new.__new__(new)
    return made


def _parameters(optimizer: Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


@torch.no_grad()
def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Do one step; with ``closure``, which computes the loss, after calling it."""
    loss = loss_of(closure)
    record: Record = self._ipex
    if record.made_for is not None:  # the first step
        _follow(self, *record.made_for)
        record.made_for = None
    masters = record.masters
    kind = original_class(self)
    original: Any = kind.step
    if inspect.unwrap(original) is inspect.unwrap(PlainOptimizer.step):
        self.before_step()
        original = plain_step
    else:
        original = getattr(original, "__wrapped__", original)  # hooks run around this function
    fused = step_of(self) if record.fuse else None
    if fused is not None and not len(masters) and stock_step(self, kind):
        return loss
    low, has_others = _in_16_bits(self)
    differentiable = any(group.get("differentiable") for group in self.param_groups)
    if fused is None or differentiable:
        with masters.as_float32(self, [p for _, p, _, _ in low]), _stock_fused(self, kind):
            original(self)
        return loss
    if has_others:
        with _without_gradients(low):
            if not stock_step(self, kind):
                with _stock_fused(self, kind):
                    original(self)
    if _unscale(self, low):
        _fused_step(self, fused, low)
    return loss


def _unscale(optimizer: Any, low: list[_Low]) -> bool:
    """Do what `torch.amp.GradScaler` leaves to steps with ``fused=True``; return whether the step is to be done."""
    found_inf, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
    if found_inf is not None and bool(found_inf):
        return False
    if scale is not None:
        for _, _, grad, _ in low:
            grad.div_(scale)
    return True


def _in_16_bits(optimizer: Any) -> tuple[list[_Low], bool]:
    """Return the parameters with a gradient that have masters, and whether others have one."""
    low: list[_Low] = []
    has_others = False
    for group in optimizer.param_groups:
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            master = optimizer._ipex.masters.find(p)
            if master is None:
                has_others = True
                continue
            if grad.is_sparse:
                raise RuntimeError(
                    f"{type(optimizer).__name__}: gradients of parameters in {p.dtype} must be dense, got a sparse one"
                )
            low.append((group, p, grad, master))
    return low, has_others


@contextlib.contextmanager
def _without_gradients(low: list[_Low]) -> Iterator[None]:
    """Hide parameters from a step, which passes over those without a gradient."""
    for _, p, _, _ in low:
        p.grad = None
    try:
        yield
    finally:
        for _, p, grad, _ in low:
            p.grad = grad


def _fused_step(optimizer: Any, fused: Any, low: list[_Low]) -> None:
    """Step parameters in 16 bits together with the rest of their bits, as the ops do it."""
    calls = Calls()
    copies = []
    for group, p, grad, master in low:
        param, param2 = master.parts(p)
        state = optimizer.state[p]
        if grad.dtype == p.dtype:
            calls.add(fused(group, state, param, grad, param2))
        else:  # float16, whose gradients are float32
            calls.add(fused(group, state, param, grad, None))
            copies.append((p, param))
        if not state:  # SGD without momentum: no entry, as in torch
            del optimizer.state[p]
    with below_autograd():
        calls.run()
        for p, param in copies:
            p.copy_(param)
    increment_version([p for _, p, _, _ in low])
    for _, p, _, master in low:
        master.done(p)


def _follow(optimizer: Any, model: Any, names: dict[nn.Parameter, str]) -> None:
    """Let an optimizer have the parameters that FSDP has put in the place of its own, which get no gradients."""
    now = {} if model() is None else dict(model().named_parameters(remove_duplicate=False))
    parts = {old: now[name] for old, name in names.items() if is_spread(now.get(name, old))}
    stale = [p for p in _parameters(optimizer) if p in parts and parts[p] is not p]
    flat = any(name.rpartition(".")[2] == "_flat_param" for name in now)
    if flat or any(p in optimizer._ipex.masters or optimizer.state.get(p) for p in stale):
        raise RuntimeError(
            "optimize: parameters must not be replaced by FSDP between optimize and the first step if the optimizer"
            f" holds 16-bit weights, a loaded state or parts of a FlatParameter, got {type(model()).__name__}."
            " Wrap the model first, then create the optimizer, then call optimize."
        )
    for group in optimizer.param_groups:
        group["params"][:] = [parts.get(p, p) for p in group["params"]]


@contextlib.contextmanager
def _stock_fused(optimizer: Any, kind: type[Optimizer]) -> Iterator[None]:
    """Let a stock optimizer use its fused form for this step where it can."""
    changed = []
    if optimizer._ipex.fuse and kind in _STOCK_FUSED:
        for group in optimizer.param_groups:
            asked = group.get("fused") is not None or group.get("foreach")
            if not asked and _fusable(group, kind, optimizer.state):
                changed.append(group)
                group["fused"] = True
    try:
        yield
    finally:
        for group in changed:
            group["fused"] = None


def _fusable(group: dict[str, Any], kind: type[Optimizer], states: Any) -> bool:
    if group.get("differentiable") or group.get("capturable"):
        return False
    params = group["params"]
    if not all(p.is_cpu and p.is_floating_point() for p in params):
        return False
    if any_spread(params):
        return kind in _STOCK_FUSED_SPREAD
    if kind is torch.optim.SGD and group["momentum"]:
        # torch's fused op takes buffers of all parameters or of none: some may get their first gradient later.
        stepped = [p for p in params if p.grad is not None]
        if len({states.get(p, {}).get("momentum_buffer") is None for p in stepped}) > 1:
            return False
    for p in params:
        if p.grad is None:
            continue
        if p.grad.is_sparse or not laid_out_alike(p, states.get(p, {})):
            return False
    return True


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether a step computes the loss itself, perhaps several times (LBFGS)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _members() -> dict[str, Any]:
    # As torch does with its own optimizers where it cannot trace them: one break in a compiled step, not many.
    unseen: Any = torch._disable_dynamo  # type: ignore[attr-defined]
    step: Any = Optimizer.profile_hook_step(unseen(_step))
    step.hooked = True  # so that torch does not wrap it once more
    return {"step": step}


def adopt(optimizer: Any, masters: Masters, fuse: bool, model: nn.Module | None = None) -> None:
    """Make an optimizer update parameters of a model, some of which have masters; in place."""
    swap(optimizer, OptimizerMixin, _members)
    optimizer._ipex = Record(masters, fuse)
    if model is not None:
        names = {p: name for name, p in model.named_parameters()}
        optimizer._ipex.made_for = weakref.ref(model), names
    if "step" in optimizer.__dict__:  # a scheduler has wrapped the former step
        del optimizer.__dict__["step"]
        step = type(optimizer).step

        @functools.wraps(step)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            optimizer._opt_called = True
            return step(optimizer, *args, **kwargs)

        wrapped._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = wrapped
