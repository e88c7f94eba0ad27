# SPDX-License-Identifier: Apache-2.0
"""Parameters in 16 bits that are float32 for their optimizer and for code that saves them.

A parameter keeps its identity; its data becomes the upper half of each number (split), or a rounded copy of a float32
master weight. `Masters` knows the rest of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.module_swap.state_dict import one_entry
from ipex_core.util.import_hooks import constant_when_traced


@dataclasses.dataclass
class _Master:
    rest: Tensor  # bfloat16: the lower halves; float32: the whole
    version: int  # of the parameter when both were in step
    dtype: torch.dtype  # of the parameter

    def __post_init__(self) -> None:
        self.split = self.rest.dtype == torch.bfloat16

    def parts(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        """Return ``param`` and ``param2`` as the ops of optimizers take them; call `done` after writing to them."""
        self.follow(parameter)
        return (parameter, self.rest) if self.split else (self.rest, parameter)

    def done(self, parameter: nn.Parameter) -> None:
        """Note that both parts have been written."""
        self.version = parameter._version

    def follow(self, parameter: nn.Parameter) -> None:
        """Take over what somebody wrote to the parameter itself."""
        if self.split:
            if parameter._version != self.version:
                self.rest.zero_()
        else:  # writes to ``.data`` count no version
            value = parameter.detach()
            if not _same_bits(self.rest.to(value.dtype), value):
                self.rest.copy_(_where_equal(self.rest, value))
        self.version = parameter._version


class Masters:
    """The float32 values of parameters in 16 bits."""

    def __init__(self) -> None:
        self._of: dict[nn.Parameter, _Master] = {}

    def __getstate__(self) -> list[tuple[nn.Parameter, Tensor]]:
        # Copies of parameters restart the count of their versions.
        for parameter in [p for p in list(self._of) if p in self]:
            self._of[parameter].follow(parameter)
        return [(parameter, master.rest) for parameter, master in self._of.items()]

    def __setstate__(self, state: list[tuple[nn.Parameter, Tensor]]) -> None:
        self._of = {p: _Master(rest, p._version, p.dtype) for p, rest in state}
        for parameter in self._of:
            _widen_gradient(parameter)

    def __contains__(self, parameter: Any) -> bool:
        return self.find(parameter) is not None

    def find(self, parameter: Any) -> _Master | None:
        """Return the rest of a parameter; None if it has no other values than its own."""
        master = self._of.get(parameter)
        if master is not None and parameter.dtype != master.dtype:
            self._release(parameter)
            return None
        return master

    def __len__(self) -> int:
        return len(self._of)

    @torch.no_grad()
    def add(self, parameter: nn.Parameter, dtype: torch.dtype, split: bool) -> None:
        """Take a float32 parameter to 16 bits."""
        value = parameter.detach()
        grad, parameter.grad = parameter.grad, None
        if split:
            dense = value.contiguous()
            top, rest = torch.ops.ipex.split_float_bfloat16(dense)
            if not value.is_contiguous():  # channels-last: keep the layout
                top = torch.empty_like(value, dtype=top.dtype).copy_(top)
                rest = _bits_like(value, rest)
            parameter.data = top
        else:
            rest = value.clone(memory_format=torch.preserve_format)
            parameter.data = value.to(dtype)
            _widen_gradient(parameter)
        if grad is not None:  # of a step that is accumulated
            parameter.grad = grad if dtype == torch.float16 else grad.to(dtype)
        self._of[parameter] = _Master(rest, parameter._version, dtype)

    def value(self, parameter: nn.Parameter) -> Tensor:
        """Return the float32 value, a new tensor."""
        self._of[parameter].follow(parameter)
        master = self._of[parameter]
        if not master.split:
            return master.rest.detach().clone(memory_format=torch.preserve_format)
        top = parameter.detach()
        joined = _join(top, master.rest)
        # Zeros that somebody wrote to ``.data``, which counts no version: lower halves of others are no part of them.
        return torch.where(top == 0, top.float(), joined)

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, value: Tensor, writes: int = 0) -> None:
        """Give a parameter a float32 value; ``writes`` more of the same 16 bits are going to follow."""
        master = self._of[parameter]
        value = value.detach().float()
        if master.split:
            top, rest = torch.ops.ipex.split_float_bfloat16(value.contiguous())
            parameter.copy_(top)
            master.rest.view(torch.int16).copy_(rest.view(torch.int16))
        else:
            master.rest.copy_(value)
            parameter.copy_(value)
        master.version = parameter._version + writes

    @torch.no_grad()
    def _release(self, parameter: nn.Parameter) -> None:
        """Let go of a parameter that somebody has cast (``model.float()``); in a wider dtype it gets all bits."""
        master = self._of.pop(parameter)
        if parameter.dtype in (torch.float32, torch.float64):
            former = parameter.detach().to(master.dtype)
            split = master.split
            parameter.copy_(
                _join(former, master.rest) if split else _where_equal(master.rest, former)
            )
        if master.dtype == torch.float16:
            grad, parameter.grad = parameter.grad, None
            parameter.grad_dtype = None
            parameter.grad = None if grad is None else grad.to(parameter.dtype)

    def remove(self, parameter: nn.Parameter) -> None:
        """Make a parameter float32 again."""
        value = self.value(parameter)
        grad, parameter.grad = parameter.grad, None
        if parameter.dtype == torch.float16:
            parameter.grad_dtype = None
        parameter.data = value
        parameter.grad = None if grad is None else grad.to(value.dtype)
        del self._of[parameter]

    @contextlib.contextmanager
    def as_float32(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]
    ) -> Iterator[None]:
        """Let an optimizer have float32 parameters and gradients for a while, and keep what it writes to them.

        They are other objects: who holds the accumulators of gradients of a parameter (DDP) loses them if its dtype
        changes, even for a moment.
        """
        whole: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in parameters:
            if parameter in self and parameter not in whole:
                whole[parameter] = nn.Parameter(self.value(parameter))
                if parameter.grad is not None:
                    whole[parameter].grad = parameter.grad.float()
        _exchange(optimizer, whole)
        try:
            yield
        finally:
            _exchange(optimizer, {wide: parameter for parameter, wide in whole.items()})
            for parameter, wide in whole.items():
                self.write(parameter, wide)


def _exchange(optimizer: torch.optim.Optimizer, by: dict[nn.Parameter, nn.Parameter]) -> None:
    """Put other parameters in the groups and the state of an optimizer."""
    for group in optimizer.param_groups:
        group["params"][:] = [by.get(p, p) for p in group["params"]]
    for old, new in by.items():
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def _widen_gradient(parameter: nn.Parameter) -> None:
    """Make the gradients of a float16 parameter float32."""
    # Unscaling gradients in float16 overflows; torch.amp.GradScaler refuses it.
    if parameter.dtype == torch.float16:
        parameter.grad_dtype = torch.float32


def _bits_like(layout: Tensor, rest: Tensor) -> Tensor:
    """Return lower halves in another layout; no conversion may touch them."""
    placed = torch.empty_like(layout, dtype=torch.bfloat16)
    placed.view(torch.int16).copy_(rest.view(torch.int16))
    return placed


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of 16-bit numbers hold the same bits."""
    # torch compares numbers one by one: four at a time take a fifth of the time.
    if not all(t.is_contiguous() and t.storage_offset() % 4 == 0 for t in (a, b)) or a.numel() % 4:
        return torch.equal(a, b)
    return torch.equal(a.view(-1).view(torch.int64), b.view(-1).view(torch.int64))


def _where_equal(value: Tensor, rounded: Tensor) -> Tensor:
    """Return float32 values; where they do not round to ``rounded``, the values of ``rounded``."""
    return torch.where(value.to(rounded.dtype) == rounded, value, rounded.float())


def _join(top: Tensor, low: Tensor) -> Tensor:
    joined: Tensor = torch.ops.ipex.cat_bfloat16_float(top, low)
    if not top.is_contiguous():
        joined = torch.empty_like(top, dtype=torch.float32).copy_(joined)
    return joined


def announce_gradients(module: nn.Module, args: Any) -> None:
    """Forward hook of layers in float16: `DistributedDataParallel` around the model learns that gradients are float32.

    It takes them in the dtype of the weights otherwise, and knows one other, which this makes float32.
    """
    if torch.is_grad_enabled():
        _announce()


#: Models in DistributedDataParallel that know that gradients are float32.
_announced: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _announce() -> bool:
    wrapper: Any = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if wrapper is None or wrapper in _announced:
        return False
    if wrapper.mixed_precision is not None:
        return False
    # It makes gradients in the dtype of the weights, or never makes its buckets again.
    unused = wrapper.find_unused_parameters and not wrapper.static_graph
    for name, given in (
        ("gradient_as_bucket_view", wrapper.gradient_as_bucket_view),
        ("find_unused_parameters", unused),
    ):
        if given:
            raise NotImplementedError(
                f"DistributedDataParallel: {name} must be False for float16 weights of ipex.optimize, whose gradients"
                " are float32, got True: use bfloat16 or leave it out"
            )
    _announced.add(wrapper)
    # The buckets that are there stay in float16; those that it would make after the first step anyway do not.
    wrapper.reducer._set_mixed_precision_param_dtype(torch.float32)
    wrapper.reducer._push_all_rebuilt_params()
    wrapper.reducer._rebuild_buckets()
    return True


# Done when a graph is traced, once for all.
constant_when_traced(_announce)


class StateHook:
    """Lets ``state_dict`` show float32 and ``load_state_dict`` take it; one object for each use.

    Args:
        masters: Of the model.
        loads: For ``load_state_dict``.
    """

    def __init__(self, masters: Masters, loads: bool) -> None:
        self.masters, self.loads = masters, loads

    def __call__(self, module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        for name, parameter in module._parameters.items():
            key = prefix + name
            if parameter is None or parameter not in self.masters or key not in state:
                continue
            if not self.loads:
                state[key] = one_entry(
                    state, parameter, functools.partial(self.masters.value, parameter)
                )
            elif state[key].shape == parameter.shape:  # else torch tells the mismatch
                self.masters.write(parameter, state[key], writes=1)
                state[key] = parameter.detach()  # which torch copies to itself
