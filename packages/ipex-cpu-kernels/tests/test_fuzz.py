# SPDX-License-Identifier: Apache-2.0
"""Arguments that are slightly wrong: kernel and definition agree on what is an error and on what is not.

Each example takes a valid sample of an op and changes one argument: its sizes, strides or dtype, the values of an
index, a number, a name. Whatever comes of it, a kernel never accepts what the definition rejects, nor the other way
round; an accepted call gives the same numbers.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipex_core.library.kernels import specs
from ipex_core.library.spec import OpSpec, Sample
from ipex_core.testing import assert_matches_reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
INTEGERS = (-(2**63), -(2**31) - 1, -2, -1, 0, 1, 2, 7, 2**31, 2**40, 2**63 - 1)
NUMBERS = (0.0, -1.0, 1e-30, 1e30, math.inf, -math.inf, math.nan)
NAMES = ("", "none", "gelu", "silu", "int8", "bf16", "auto", "fp8", "no such name")

EXAMPLES = 25


@st.composite
def another_tensor(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like ``tensor`` but for one property."""
    dim = tensor.dim()
    kinds = ["dtype", "unsqueeze", "value"]
    if dim:
        kinds += ["shorter", "longer", "empty", "squeeze", "strided", "expanded", "transposed"]
    kind = draw(st.sampled_from(kinds))
    axis = draw(st.integers(0, dim - 1)) if dim else 0
    if kind == "dtype":
        return tensor.to(draw(st.sampled_from(DTYPES)))
    if kind == "unsqueeze":
        return tensor.unsqueeze(draw(st.integers(0, dim)))
    if kind == "value":
        return changed_value(draw, tensor)
    if kind == "shorter":
        return tensor.narrow(axis, 0, max(0, tensor.shape[axis] - 1))
    if kind == "longer":
        return torch.cat([tensor, tensor.narrow(axis, 0, min(1, tensor.shape[axis]))], axis)
    if kind == "empty":
        return tensor.narrow(axis, 0, 0)
    if kind == "squeeze":
        return tensor.select(axis, 0) if tensor.shape[axis] else tensor
    if kind == "strided":
        wide = torch.stack([tensor, tensor], -1) if axis == dim - 1 else tensor
        return wide[..., 0] if axis == dim - 1 else wide.flip(axis).flip(axis)
    if kind == "expanded":
        return tensor.narrow(axis, 0, min(1, tensor.shape[axis])).expand(tensor.shape)
    return tensor.transpose(axis, draw(st.integers(0, dim - 1)))


def changed_value(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0 or tensor.dtype == torch.bool or tensor.dtype.itemsize == 1:
        return tensor
    tensor = tensor.clone()
    place = tuple(draw(st.integers(0, size - 1)) for size in tensor.shape)
    if tensor.is_floating_point():
        return tensor  # values of floats are not errors; test_conformance has NaN and infinities
    least, most = torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max
    tensor[place] = draw(st.sampled_from([n for n in INTEGERS if least <= n <= most]))
    return tensor


class Call(Sample):
    """A sample that is printed in a line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{self.id}: {', '.join(map(text_of, self.args))} {self.kwargs or ''}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


def text_of(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value) if not isinstance(value, list) else f"[{', '.join(map(text_of, value))}]"
    numbers = f" {value.tolist()}" if value.numel() <= 8 else ""
    return f"{str(value.dtype)[6:]}{list(value.shape)}/{list(value.stride())}{numbers}"


@st.composite
def another_call(draw: st.DrawFn, samples: list[Sample]) -> Sample:
    sample = draw(st.sampled_from(samples))
    args = list(sample.args)
    place = draw(st.integers(0, len(args) - 1))
    args[place] = another_value(draw, args[place])
    return Call(tuple(args), sample.kwargs, id=f"{sample.id}, argument {place}")


def another_value(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return draw(another_tensor(value))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw(st.sampled_from((*INTEGERS, value + 1, value - 1)))
    if isinstance(value, float):
        return draw(st.sampled_from(NUMBERS))
    if isinstance(value, str):
        return draw(st.sampled_from(NAMES))
    if isinstance(value, torch.dtype):
        return draw(st.sampled_from(DTYPES))
    if isinstance(value, list) and value:
        return [another_value(draw, value[0]), *value[1:]]
    return value


def error_of(call: Any, *args: Any) -> str | None:
    try:
        call(*args)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return str(error)
    return None


def definition(spec: OpSpec, sample: Sample) -> None:
    sample = Sample(tuple(map(copy_of, sample.args)), sample.kwargs)
    spec.check(spec.bind(*sample.args, **sample.kwargs))
    spec.reference(*sample.args, **sample.kwargs)


def kernel(spec: OpSpec, sample: Sample) -> None:
    spec.op(*map(copy_of, sample.args), **sample.kwargs)


def copy_of(value: Any) -> Any:
    """Return a copy with the same strides and sharing of elements."""
    if isinstance(value, list):
        return [copy_of(v) for v in value]
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage().clone()
    copy = torch.empty(0, dtype=value.dtype)
    return copy.set_(storage, value.storage_offset(), value.shape, value.stride())


@pytest.mark.parametrize("op", list(specs()))
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_kernel_and_definition_agree(op: str, data: st.DataObject) -> None:
    spec = specs()[op]
    sample = data.draw(another_call(few_samples(op)))
    want, got = error_of(definition, spec, sample), error_of(kernel, spec, sample)
    assert (got is None) == (want is None), f"kernel: {got!r}, definition: {want!r}"
    if want is not None:
        # A step for a list of parameters refuses one of them as the step of one does.
        named = {f"{op}:", f"{op.removesuffix('s')}:"} if op.endswith("_steps") else {f"{op}:"}
        assert got is not None and got.split(" ")[0] in named, got
    elif comparable(sample):
        assert_matches_reference(spec, sample)


def comparable(sample: Sample) -> bool:
    """Return whether the tolerances hold: not for extreme factors, nor for values that nearly cancel in 16 bits."""
    numbers = [a for a in sample.args if isinstance(a, float)]
    lists = [a if isinstance(a, list) else [a] for a in sample.args]
    dtypes = {a.dtype for one in lists for a in one if isinstance(a, torch.Tensor)}
    return not dtypes & {*FLOATS[1:]} and all(1e-20 < abs(a) < 1e20 for a in numbers if a)


_SAMPLES: dict[str, list[Sample]] = {}


def few_samples(op: str) -> list[Sample]:
    """Return small samples in two dtypes."""
    if op not in _SAMPLES:
        spec = specs()[op]
        found = [s for dtype in spec.dtypes[:2] for s in spec.samples(dtype)]
        found.sort(key=lambda s: sum(a.numel() for a in s.args if isinstance(a, torch.Tensor)))
        _SAMPLES[op] = found[: max(6, len(found) // 2)]
    return _SAMPLES[op]
