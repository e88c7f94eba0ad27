# SPDX-License-Identifier: Apache-2.0
"""What the ops of optimizers share: the forms of a parameter, checks, samples.

A parameter comes in one of three forms:

- float32, with a float32 gradient;
- float32 with a copy ``param2`` in bfloat16 or float16, which the model uses and whose dtype the gradient has;
- split: bfloat16 ``param`` has the upper 16 bits of each number, bfloat16 ``param2`` the lower ones (their bits, which
  mean nothing as a number). Both together are the float32 parameter; the gradient is bfloat16.

Every operation is written out and rounded to float32, so kernels can give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.checks import (
    check_device,
    check_dtype_in,
    check_like,
    check_not_expanded,
    check_tensor,
    dtype_name,
    randn,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import FLOATS, Arguments, Sample


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 16 bits of float32 numbers, both as bfloat16 (truncated, not rounded)."""
    bits = x.contiguous().view(torch.int32)
    top, low = bits >> 16, (bits << 16) >> 16
    return top.to(torch.int16).view(torch.bfloat16), low.to(torch.int16).view(torch.bfloat16)


def join(top: Tensor, low: Tensor) -> Tensor:
    """Return the float32 numbers of two halves; undoes `split`."""
    upper = top.contiguous().view(torch.int16).to(torch.int32) << 16
    lower = low.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    return (upper | lower).view(torch.float32)


def read_param(param: Tensor, param2: Tensor | None) -> Tensor:
    """Return a parameter in float32, whatever its form."""
    if param.dtype == torch.bfloat16:
        assert param2 is not None
        return join(param, param2)
    return param.clone()


def write_param(param: Tensor, param2: Tensor | None, value: Tensor) -> None:
    """Write a float32 value to a parameter."""
    if param.dtype == torch.bfloat16:
        assert param2 is not None
        top, low = split(value)
        param.copy_(top)
        param2.view(torch.int16).copy_(low.view(torch.int16))  # bits: no conversion may touch them
        return
    param.copy_(value)
    if param2 is not None:
        param2.copy_(value)


def root(x: Tensor) -> Tensor:
    """Return square roots rounded correctly, which ``torch.sqrt`` in float32 does not promise."""
    return x.double().sqrt().to(x.dtype)


def with_momentum(
    g: Tensor, buffer: Tensor, momentum: float, dampening: float, nesterov: bool, first: bool
) -> Tensor:
    """Return the direction of a step with momentum, and write the new momentum to ``buffer``."""
    b = g if first else buffer * momentum + g * (1.0 - dampening)
    buffer.copy_(b)
    return g + b * momentum if nesterov else b


def check_param(a: Arguments) -> None:
    """Check the form of a parameter."""
    param, param2, bf16 = a.param, a.param2, torch.bfloat16
    known = param.dtype in (torch.float32, bf16)
    a.require(known, "param", "have dtype float32 or bfloat16", dtype_name(param.dtype))
    check_not_expanded(a.op, "param", param)
    check_tensor(a.op, "grad", a.grad, min_dim=0)
    if param.dtype == bf16:
        a.require(param2 is not None, "param2", "have the lower bits of a bfloat16 param")
        check_dtype_in(a.op, "param2", param2, bf16)
        check_dtype_in(a.op, "grad", a.grad, bf16)
    elif param2 is not None:
        check_dtype_in(a.op, "param2", param2, a.grad.dtype)
    else:
        check_dtype_in(a.op, "grad", a.grad, torch.float32)
    _check_shape(a, "grad")
    check_device(a.op, "grad", a.grad, param, of="param")
    if param2 is not None:
        _check_shape(a, "param2")
        check_not_expanded(a.op, "param2", param2)
        check_device(a.op, "param2", param2, param, of="param")


def check_states(a: Arguments, *names: str) -> None:
    """Check the float32 tensors that an optimizer keeps for a parameter; one may be None."""
    for name in names:
        state = getattr(a, name)
        if state is None:
            continue
        check_dtype_in(a.op, name, state, torch.float32)
        _check_shape(a, name)
        check_not_expanded(a.op, name, state)
        check_device(a.op, name, state, a.param, of="param")


def check_step(a: Arguments) -> None:
    """Check the number of a step; the first is 1."""
    a.require(a.step >= 1, "step", "be at least 1", f"{a.step:g}")


def check_numbers(a: Arguments, *shares: str) -> None:
    """Check shares of former means, such as ``beta1``, and what is added to a root."""
    for name in shares:
        share = getattr(a, name)
        a.require(0 <= share < 1, name, "be from 0 to below 1", f"{share:g}")
    a.require(a.eps >= 0, "eps", "not be negative", f"{a.eps:g}")


def _check_shape(a: Arguments, name: str) -> None:
    shape, wanted = list(getattr(a, name).shape), list(a.param.shape)
    a.require(shape == wanted, name, f"have the shape of param = {wanted}", shape)


SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (33,), (5, 16), (3, 50, 2), (300, 129), (0,))


def param_samples(
    dtype: torch.dtype, build: Callable[[Tensor, Tensor, Tensor | None, int], tuple[Any, ...]]
) -> Iterator[Sample]:
    """Yield samples of a step in the forms whose gradient has a dtype.

    Args:
        dtype: Of the gradient.
        build: ``(param, grad, param2, seed)`` -> arguments of the op.
    """
    assert dtype in FLOATS
    forms = {torch.float32: ("plain",), torch.bfloat16: ("copy", "split")}.get(dtype, ("copy",))
    for form in forms:
        for number, shape in enumerate(SHAPES):
            value = randn(*shape, seed=11 + number)
            grad = randn(*shape, dtype=dtype, seed=12 + number)
            name = "x".join(map(str, shape)) or "scalar"
            yield Sample(build(*_form(form, value, grad), 20 + number), id=f"{form}-{name}")
        for name, layout in (("channels_last", (2, 3, 4, 5)), ("transposed", (24, 7))):
            value, grad = randn(*layout, seed=13), randn(*layout, dtype=dtype, seed=14)
            if name == "transposed":
                value, grad = value.t(), grad.t()
            else:
                value = value.to(memory_format=torch.channels_last)
            yield Sample(build(*_form(form, value, grad), 31), id=f"{form}-{name}")


def random_state(param: Tensor, seed: int, scale: float = 1.0) -> Tensor:
    """Return float32 numbers in the layout of a parameter."""
    state = torch.empty_like(param, dtype=torch.float32)
    return state.copy_(randn(*param.shape, seed=seed, scale=scale))


def _form(form: str, value: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    if form == "plain":
        return value, grad, None
    if form == "copy":
        return value, grad, value.to(grad.dtype)
    top, low = split(value)
    return top, grad, low


# --- the op -----------------------------------------------------------------------------------------------------------


def _split_float_bfloat16(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 16 bits of float32 numbers.

    Args:
        x: float32, any shape.

    Returns:
        ``top``: ``x`` cut off (not rounded); ``low``: the other bits, no meaningful numbers; both bfloat16.

    Raises:
        RuntimeError: Another dtype.

    Source: Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019.
    """
    return split(x)


def _cat_bfloat16_float(top: Tensor, low: Tensor) -> Tensor:
    """Return the float32 numbers whose halves were taken apart by ``split_float_bfloat16``.

    Args:
        top: bfloat16, any shape.
        low: Like ``top``.

    Returns:
        float32, bit for bit what was split.

    Raises:
        RuntimeError: Another dtype, or different shapes.
    """
    return join(top, low)


def _check_cat(a: Arguments) -> None:
    check_tensor(a.op, "top", a.top, (torch.bfloat16,), min_dim=0)
    check_like(a.op, "low", a.low, a.top, of="top")


def _halves(a: Arguments) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(a.x.shape, dtype=torch.bfloat16, device=a.x.device),
        torch.empty(a.x.shape, dtype=torch.bfloat16, device=a.x.device),
    )


def _values() -> Iterator[tuple[str, Tensor]]:
    # First some whose halves are numbers, which checks that compare numbers can take.
    for size in (1, 7, 40, 300):
        yield f"integers-{size}", torch.arange(size, dtype=torch.float32) + 3 * 2**16
    for shape in ((), (1,), (31,), (5, 40), (300, 129), (0, 3)):
        yield "x".join(map(str, shape)) or "scalar", randn(*shape, seed=81)
    yield "transposed", randn(9, 20, seed=82).t()
    special = [0.0, -0.0, float("inf"), -float("inf"), 1e-42, -3.4e38]
    yield "special_values", torch.tensor(special)


def _split_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, x in _values():
        yield Sample((x,), id=name)


def _cat_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, x in _values():
        yield Sample(split(x), id=name)


register_op(
    reference=_split_float_bfloat16,
    check=lambda a: check_tensor(a.op, "x", a.x, (torch.float32,), min_dim=0),
    fake=_halves,
    samples=_split_samples,
    dtypes=(torch.float32,),
    backward=None,
    lift=False,
    tolerance={torch.bfloat16: (0.0, 0.0)},
    summary="Upper and lower halves of float32 numbers",
)
register_op(
    reference=_cat_bfloat16_float,
    check=_check_cat,
    fake=lambda a: torch.empty(a.top.shape, dtype=torch.float32, device=a.top.device),
    samples=_cat_samples,
    dtypes=(torch.bfloat16,),
    backward=None,
    lift=False,
    tolerance={torch.float32: (0.0, 0.0)},
    summary="float32 numbers from their halves",
)
