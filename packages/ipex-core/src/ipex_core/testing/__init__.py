# SPDX-License-Identifier: Apache-2.0
"""Checks for authors of kernel packages: run an op on the samples of its spec and compare with the reference.

Example:
    >>> import torch, ipex_core
    >>> from ipex_core.testing import assert_matches_reference, samples
    >>> spec, sample = next(samples("rms_norm", torch.float32))
    >>> assert_matches_reference(spec, sample)
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ipex_core.errors import UnknownOpError
from ipex_core.library.derivatives import tensors_in
from ipex_core.library.kernels import specs
from ipex_core.library.spec import FLOATS, OpSpec, Sample

__all__ = [
    "assert_inputs_unchanged",
    "assert_matches_reference",
    "assert_same_for_any_thread_count",
    "reference_result",
    "run_ranks",
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
        raise UnknownOpError(f"samples: op must be one of {', '.join(specs())}, got {op!r}")
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
    return x.double() if x.dtype in FLOATS else x


def _argument_names(spec: OpSpec) -> list[str]:
    return [argument.name for argument in spec.op.default._schema.arguments]


def _with_copies(
    spec: OpSpec, sample: Sample, lift: Any = None
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call, with copies of those the op writes to."""
    names = _argument_names(spec)

    def one(name: str, value: Any) -> Any:
        if lift is not None:
            value = _map(value, lift)
        return _clone(value) if name in spec.mutates else value

    # More values than names: let the call itself report it.
    args = [one(names[i] if i < len(names) else "", value) for i, value in enumerate(sample.args)]
    return args, {name: one(name, value) for name, value in sample.kwargs.items()}


def _clone(value: Any) -> Any:
    """Return a copy with the same strides, so that views of a larger tensor stay such."""
    if isinstance(value, list):
        return [_clone(v) for v in value]
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() == 0 or value.is_contiguous():
        return value.clone()
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return copy.copy_(value)


def _results(spec: OpSpec, out: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return what a call returned, followed by the arguments it wrote to."""
    outputs = () if out is None else out if isinstance(out, tuple) else (out,)
    by_name = {**dict(zip(_argument_names(spec), args, strict=False)), **kwargs}
    written = (by_name.get(name) for name in spec.mutates)
    return (*outputs, *tensors_in(written))


def reference_result(spec: OpSpec, sample: Sample) -> tuple[torch.Tensor, ...]:
    """Return the outputs of the reference, computed in float64 where the op computes at all.

    The arguments the op writes to follow the outputs; the sample itself is not written to.
    """
    args, kwargs = _with_copies(spec, sample, _wider if spec.lift else None)
    return _results(spec, spec.reference(*args, **kwargs), args, kwargs)  # type: ignore[no-any-return]


def _call(spec: OpSpec, sample: Sample) -> tuple[torch.Tensor, ...]:
    args, kwargs = _with_copies(spec, sample)
    return _results(spec, spec.op(*args, **kwargs), args, kwargs)  # type: ignore[no-any-return]


def _promised(spec: OpSpec, sample: Sample) -> tuple[torch.Tensor, ...]:
    fake = spec.fake(spec.bind(*sample.args, **sample.kwargs))
    return _results(spec, fake, list(sample.args), sample.kwargs)  # type: ignore[no-any-return]


def assert_matches_reference(spec: OpSpec, sample: Sample) -> None:
    """Compare the op with its reference in float64, and its result's shape, dtype and strides with its fake.

    Raises:
        AssertionError: They differ by more than the tolerance of the spec; NaN and infinities must agree.
    """
    got = _call(spec, sample)
    want = reference_result(spec, sample)
    fakes = _promised(spec, sample)
    assert len(got) == len(want) == len(fakes)
    for g, w, f in zip(got, want, fakes, strict=True):
        assert g.dtype == f.dtype, f"dtype {g.dtype}, the fake says {f.dtype}"
        assert g.shape == f.shape, f"shape {list(g.shape)}, the fake says {list(f.shape)}"
        if g.numel():
            assert g.stride() == f.stride(), f"strides {g.stride()}, the fake says {f.stride()}"
        # Rounding the wide result to the dtype is the best any kernel can do, so infinities agree too.
        w = w.to(g.dtype)
        if g.is_floating_point():
            rtol, atol = spec.tolerance.get(g.dtype, (1e-5, 1e-5))
            if g.dtype not in (torch.float64, *FLOATS):  # no arithmetic in 8-bit types
                g, w = g.float(), w.float()
            torch.testing.assert_close(g, w, rtol=rtol, atol=atol, equal_nan=True)
        elif g.dtype in spec.tolerance:
            rtol, atol = spec.tolerance[g.dtype]
            torch.testing.assert_close(g.double(), w.double(), rtol=rtol, atol=atol)
        else:
            assert torch.equal(g, w), "values differ"


def assert_inputs_unchanged(spec: OpSpec, sample: Sample) -> None:
    """Check that a call writes only to the inputs that its schema names, and that no output shares memory with one."""
    args, kwargs = _with_copies(spec, sample)
    named = {**dict(zip(_argument_names(spec), args, strict=False)), **kwargs}
    everything = list(tensors_in(named.values()))
    tensors = list(tensors_in(v for k, v in named.items() if k not in spec.mutates))
    before = [t.clone() for t in tensors]
    out = spec.op(*args, **kwargs)
    outputs = () if out is None else out if isinstance(out, tuple) else (out,)
    for tensor, copy in zip(tensors, before, strict=True):
        assert (
            torch.equal(tensor.reshape(-1).view(torch.uint8), copy.reshape(-1).view(torch.uint8))
            if (tensor.is_contiguous())
            else torch.allclose(tensor, copy, equal_nan=True)
        ), "an input was written to"
    for out in outputs:
        for tensor in everything:
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
        if a.is_floating_point() and a.dtype not in FLOATS:
            a, b = a.float(), b.float()
        same = torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
        assert same, "the result depends on the number of threads"


# --- ranks ------------------------------------------------------------------------------------------------------------


#: How long processes may take to be ready to form a group.
_START = datetime.timedelta(seconds=60)


def run_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Run a function in new processes that form a group of the backend gloo, with one thread each.

    Args:
        function: Called as ``function(rank, ranks, *args)``; a function at the top of a module, that returns what can
            be pickled and is no tensor.
        ranks: Number of processes.
        args: Further arguments.
        timeout: Of the group, in seconds, once all processes have been started (for which a minute is given);
            processes that still run 30 s after both are killed.

    Returns:
        For each rank what the function returned; the text of the exception that it raised, as
        ``"ValueError: ..."``; or None for a process that ended without either.
    """
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        workers = [
            context.Process(
                target=_work,
                args=(_address(function), rank, ranks, directory, timeout, results, args),
            )
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        found: dict[int, Any] = {}
        end = time.monotonic() + _START.total_seconds() + timeout + 30
        while True:
            running = any(worker.is_alive() for worker in workers)
            while not results.empty():
                rank, result = results.get()
                found[rank] = result
            if not running or time.monotonic() > end:
                break
            time.sleep(0.02)
        for worker in workers:
            worker.kill()
            worker.join()
    return [found.get(rank) for rank in range(ranks)]


def _address(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return module, file and name of a function: test runners give modules names that cannot be imported."""
    return function.__module__, function.__code__.co_filename, function.__name__


def _find(module: str, path: str, name: str) -> Callable[..., Any]:
    """Return the function of an address: from its module where that can be imported, else from its file."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        spec = importlib.util.spec_from_file_location("ipex_ranks", path)
        assert spec is not None and spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    function: Callable[..., Any] = getattr(found, name)
    return function


def _work(
    address: tuple[str, str, str],
    rank: int,
    ranks: int,
    directory: str,
    timeout: float,
    results: Any,
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    from ipex_core.distributed import init_process_group

    torch.set_num_threads(1)
    try:
        function = _find(*address)
        # Imports take seconds on a busy machine, more than some groups wait.
        ready = dist.FileStore(f"{directory}/ready", ranks)  # type: ignore[attr-defined]
        ready.set(str(rank), "")
        ready.wait([str(other) for other in range(ranks)], _START)
        wait = datetime.timedelta(seconds=timeout)
        init_process_group("gloo", f"file://{directory}/meeting", wait, ranks, rank)
        # One that returns at once, or leaves the group, is not to be gone while others still connect to it.
        dist.barrier()
        result = function(rank, ranks, *args)
    except Exception as error:
        traceback.print_exc()
        result = f"{type(error).__name__}: {error}"
    results.put((rank, result))
    # Without the farewells of the backend, which wait for ranks that may be gone.
    os._exit(0)
