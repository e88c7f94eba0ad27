# SPDX-License-Identifier: Apache-2.0
"""Every op at every level this machine can run, on every sample of its spec, against the reference in float64."""

from __future__ import annotations

import copy

import pytest
import torch

import ipex_core  # noqa: F401  (registers the ops)
from ipex_core.diagnostics.explain import op_info
from ipex_core.kernels.providers import provider_for
from ipex_core.library.kernels import specs
from ipex_core.testing import (
    assert_inputs_unchanged,
    assert_matches_reference,
    assert_same_for_any_thread_count,
    samples,
)

pytestmark = pytest.mark.usefixtures("no_gradients")

OPS = list(specs())
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("op", OPS)
def test_matches_reference(op, dtype, level):
    if dtype not in specs()[op].dtypes:
        pytest.skip("not a dtype of this op")
    checked = 0
    for spec, sample in samples(op, dtype):
        try:
            assert_matches_reference(spec, sample)
            assert_inputs_unchanged(spec, sample)
        except AssertionError as error:
            raise AssertionError(f"sample {sample.id}: {error}") from None
        checked += 1
    assert checked > 3


@pytest.mark.parametrize("op", OPS)
def test_threads_do_not_change_the_result(op, level):
    for dtype in specs()[op].dtypes:
        for spec, sample in samples(op, dtype):
            assert_same_for_any_thread_count(spec, sample)


@pytest.mark.parametrize("op", OPS)
def test_level_really_ran(op, level):
    """The kernel of each symbol comes from the active level, or from a lower one if the active has none."""
    info = op_info(op)
    if not info["kernels"]:
        # Packing and gathering move bytes: one version, in the glue. The draw by seeds calls the draw by numbers.
        names = ("pack_", "packed_", "unpack_", "all_gather_", "rnnt_", "cache_slots")
        assert op.startswith((*names, "sample_token_seeded"))
        return
    assert info["provider"] == "cpu"
    built = list(provider_for("cpu").isa_built)
    for symbol, kernel in info["kernels"].items():
        available = kernel["available"]
        allowed = [name for name in available if built.index(name) <= built.index(level)]
        assert kernel["current"] == allowed[-1], symbol
        # All kernels of this release exist at all levels: a missing one is a mistake in the build.
        assert kernel["current"] == level, symbol


@pytest.mark.parametrize("op", OPS)
def test_kernel_exists_for_each_dtype(op):
    kernels = op_info(op)["kernels"]
    if not kernels:
        return
    suffixes = dict(zip(DTYPES, ("f32", "bf16", "f16"), strict=True))
    for suffix in (suffixes[d] for d in specs()[op].dtypes if d in suffixes):
        assert any(symbol.endswith(suffix) for symbol in kernels), (
            f"{op} has no kernel for {suffix}"
        )


@pytest.mark.parametrize("op", OPS)
def test_gradients_equal_those_of_the_reference(op):
    spec = specs()[op]
    if spec.backward is None:
        pytest.skip("not differentiable by design")
    for sample in list(spec.samples(torch.float32))[2:7]:
        with torch.enable_grad():
            mine = _leaves(sample.args)
            theirs = _leaves(sample.args)
            got = spec.op(*_writable(spec, mine), **sample.kwargs)
            want = spec.reference(*_writable(spec, theirs), **sample.kwargs)
            outs = zip(*(o if isinstance(o, tuple) else (o,) for o in (got, want)), strict=True)
            for g, w in outs:
                if not w.is_floating_point():
                    continue
                weight = torch.ones_like(w)
                g.backward(weight, retain_graph=True)
                w.backward(weight, retain_graph=True)
        for a, b in zip(_tensors(*mine), _tensors(*theirs), strict=True):
            if a.requires_grad:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4, equal_nan=True)


def _writable(spec, args):
    """No op overwrites a leaf that requires a gradient."""
    names = [argument.name for argument in spec.op.default._schema.arguments]
    return [v * 1 if n in spec.mutates else v for n, v in zip(names, args, strict=False)]


def _leaves(args):
    return [_leaf(v) for v in args]


def _leaf(value):
    if isinstance(value, list):
        return _leaves(value)
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for dtype in specs()[op].dtypes[:2]:
        for spec, sample in list(samples(op, dtype))[:4]:
            torch.library.opcheck(spec.op.default, sample.args, sample.kwargs, test_utils=checks)


@pytest.mark.parametrize("op", OPS)
def test_traces(op):
    for spec, sample in list(samples(op, specs()[op].dtypes[0]))[:4]:
        torch.library.opcheck(
            spec.op.default, sample.args, sample.kwargs, test_utils="test_aot_dispatch_dynamic"
        )


@pytest.mark.parametrize("op", OPS)
def test_compiles_without_graph_break(op):
    spec = specs()[op]
    sample = list(spec.samples(spec.dtypes[0]))[2]
    compiled = torch.compile(
        lambda *args: spec.op(*args, **sample.kwargs), fullgraph=True, backend="aot_eager"
    )
    ours, theirs = (copy.deepcopy(sample.args) for _ in range(2))
    got, want = compiled(*ours), spec.op(*theirs, **sample.kwargs)
    for a, b in zip(_tensors(got, *ours), _tensors(want, *theirs), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def _tensors(*values):
    flat = [v for value in values for v in (value if isinstance(value, (tuple, list)) else [value])]
    return [v for v in flat if isinstance(v, torch.Tensor)]
