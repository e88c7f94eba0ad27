# SPDX-License-Identifier: Apache-2.0
"""Checks for authors of kernel packages: run an op on the samples of its spec and compare with the reference.

Example:
    >>> import torch, ipex_core
    >>> from ipex_core.testing import assert_matches_reference, samples
    >>> spec, sample = next(samples("rms_norm", torch.float32))
    >>> assert_matches_reference(spec, sample)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ipex_core._spec import OpSpec, Sample, specs
from ipex_core.errors import UnknownOpError

__all__ = [
    "assert_inputs_unchanged",
    "assert_matches_reference",
    "assert_same_for_any_thread_count",
    "reference_result",
    "samples",
]


def samples(
    op: str | None = None, dtype: torch.dtype | None = None
) -> Iterator[tuple[OpSpec, Sample]]:
    """Yield the samples of one op or of all ops, for one dtype or for all dtypes of the spec.

    Raises:
        UnknownOpError: ``op`` is not registered.
    """
    if op is not None and op not in specs():
        raise UnknownOpError(f"no op is named {op!r}")
    for spec in specs().values() if op is None else [specs()[op]]:
        for one in spec.dtypes if dtype is None else [dtype]:
            for sample in spec.samples(one):
                yield spec, sample


def _map(value: Any, function: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map(v, function) for v in value)
    if isinstance(value, dict):
        return {k: _map(v, function) for k, v in value.items()}
    return value


def _wider(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def reference_result(spec: OpSpec, sample: Sample) -> tuple[torch.Tensor, ...]:
    """Return the outputs of the reference, computed in float64 where the op computes at all."""
    moves_bits = spec.name.endswith("pack_linear_weight")
    lift = (lambda x: x) if moves_bits else _wider
    out = spec.reference(*_map(sample.args, lift), **_map(sample.kwargs, lift))
    return out if isinstance(out, tuple) else (out,)


def _call(spec: OpSpec, sample: Sample) -> tuple[torch.Tensor, ...]:
    out = spec.op(*sample.args, **sample.kwargs)
    return out if isinstance(out, tuple) else (out,)


def assert_matches_reference(spec: OpSpec, sample: Sample) -> None:
    """Compare the op with its reference in float64, and its result's shape, dtype and strides with its fake.

    Raises:
        AssertionError: They differ by more than the tolerance of the spec; NaN and infinities must agree.
    """
    got = _call(spec, sample)
    want = reference_result(spec, sample)
    fake = spec.fake(*sample.args, **sample.kwargs)
    fakes = fake if isinstance(fake, tuple) else (fake,)
    assert len(got) == len(want) == len(fakes)
    for g, w, f in zip(got, want, fakes, strict=True):
        assert g.dtype == f.dtype, f"dtype {g.dtype}, the fake says {f.dtype}"
        assert g.shape == f.shape, f"shape {list(g.shape)}, the fake says {list(f.shape)}"
        if g.numel():
            assert g.stride() == f.stride(), f"strides {g.stride()}, the fake says {f.stride()}"
        if g.is_floating_point():
            rtol, atol = spec.tolerance.get(g.dtype, (1e-5, 1e-5))
            # Rounding the wide result to the dtype is the best any kernel can do, so infinities agree too.
            w = w.to(g.dtype)
            torch.testing.assert_close(g, w, rtol=rtol, atol=atol, equal_nan=True)
        else:
            assert torch.equal(g, w), "values differ"


def assert_inputs_unchanged(spec: OpSpec, sample: Sample) -> None:
    """Check that a call does not write to its inputs and that no output shares memory with them."""
    tensors = [v for v in (*sample.args, *sample.kwargs.values()) if isinstance(v, torch.Tensor)]
    before = [t.clone() for t in tensors]
    outputs = _call(spec, sample)
    for tensor, copy in zip(tensors, before, strict=True):
        assert (
            torch.equal(tensor.view(-1).view(torch.uint8), copy.view(-1).view(torch.uint8))
            if (tensor.is_contiguous())
            else torch.allclose(tensor, copy, equal_nan=True)
        ), "an input was written to"
    for out in outputs:
        for tensor in tensors:
            if out.numel() and tensor.numel():
                shared = out.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                assert not shared, "an output shares memory with an input"


def assert_same_for_any_thread_count(spec: OpSpec, sample: Sample) -> None:
    """Check that one thread and all threads give equal bits."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = _call(spec, sample)
        torch.set_num_threads(max(2, threads))
        many = _call(spec, sample)
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(one, many, strict=True):
        same = torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
        assert same, "the result depends on the number of threads"
