# SPDX-License-Identifier: Apache-2.0
"""Op specifications: references against stock PyTorch, registration, autocast, derivatives. No kernels needed."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ipex_core  # noqa: F401
from ipex_core.benchmark import select
from ipex_core.errors import OpArgumentError
from ipex_core.library import kernels
from ipex_core.library.kernels import register, run_op, specs
from ipex_core.library.spec import BenchCase, OpSpec, Sample, check
from ipex_core.testing import reference_result, samples

OPS = list(specs())


def flat(values):
    """The tensors among the values and in lists among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from flat(value)


# Stock draws random numbers of its own; what the op draws is tested with the kernels.
DRAWS = {
    "dropout",
    "dropout_add_layer_norm",
    "dropout_add_layer_norm_backward",
    "sample_token",
    "softmax_dropout_backward",
}


@pytest.mark.parametrize("op", [spec.name for spec in select(()) if spec.name not in DRAWS])
def test_reference_means_what_stock_pytorch_does(op):
    """The stock chain of each bench case and the reference agree in float32."""
    if op == "int8_linear" and "vnni" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("stock's sums of products overflow 16 bits without VNNI")
    spec = specs()[op]
    checked = 0
    # Codes may round to the other neighbor, where the op allows that.
    codes = {"rtol": 0.0, "atol": spec.tolerance.get(torch.int8, (0.0, 0.0))[1]}

    def same(ours, theirs):
        if isinstance(ours, tuple):
            for mine, other in zip(ours, theirs, strict=True):
                same(mine, other)
        elif isinstance(theirs, list):  # one tensor each, where the op stacks them
            same(tuple(ours), tuple(theirs))
        elif isinstance(ours, torch.Tensor) and ours.dtype == torch.int8:
            torch.testing.assert_close(ours.int(), theirs.int(), **codes)
        elif not isinstance(ours, str):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    for case in spec.bench():
        if case.bytes(torch.float32) > 2**25:
            continue
        args = case.make(torch.float32)
        if max(a.numel() for a in flat(args)) > 2**22:
            continue
        ours, theirs = copy.deepcopy(args), copy.deepcopy(args)
        if spec.stock_args is not None:
            theirs = spec.stock_args(*theirs)
        got, want = spec.reference(*ours), spec.stock(*theirs)
        if got is None and want is not None:  # written in place here, new tensors there
            new = iter(want if isinstance(want, tuple) else (want,))
            names = [argument.name for argument in spec.op.default._schema.arguments]
            theirs = [
                next(new, other) if name in spec.mutates and torch.equal(other, before) else other
                for name, other, before in zip(names, theirs, args, strict=False)
            ]
            assert next(new, None) is None, "stock returned more than the op writes"
        else:
            same(got, want)
        if spec.mutates and spec.stock_args is None:
            same(tuple(ours), tuple(theirs))
        assert case.bytes(torch.float32) > 0
        checked += 1
    assert checked


@pytest.mark.parametrize("op", OPS)
def test_samples_are_valid_and_named(op):
    for dtype in specs()[op].dtypes:
        ids = []
        for spec, sample in samples(op, dtype):
            spec.check(spec.bind(*sample.args, **sample.kwargs))
            ids.append(sample.id)
        assert all(ids)
        assert len(set(ids)) == len(ids), "two samples have one name"


@pytest.mark.parametrize("op", OPS)
def test_fake_agrees_with_reference(op):
    for spec, sample in samples(op, torch.bfloat16):
        fake = spec.fake(spec.bind(*sample.args, **sample.kwargs))
        got = spec.reference(*sample.args, **sample.kwargs)
        if fake is None:  # an op that only writes to its arguments
            assert got is None, sample.id
            continue
        for f, g in zip(*(o if isinstance(o, tuple) else (o,) for o in (fake, got)), strict=True):
            assert f.shape == g.shape, sample.id
            assert f.dtype == g.dtype, sample.id


@pytest.mark.parametrize("op", [name for name in OPS if specs()[name].backward == "reference"])
def test_gradients_flow(op):
    spec = specs()[op]
    sample = list(spec.samples(torch.float32))[3]

    def leaf(value):
        if isinstance(value, list):
            return [leaf(v) for v in value]
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.clone().requires_grad_()
        return value

    args = [leaf(a) for a in sample.args]
    names = [argument.name for argument in spec.op.default._schema.arguments]
    # No op overwrites a leaf.
    given = [a * 1 if n in spec.mutates else a for n, a in zip(names, args, strict=False)]
    out = spec.op(*given, **sample.kwargs)
    out = out if isinstance(out, tuple) else (out,)
    sum(o.float().sum() for o in out).backward()
    for a in flat(args):
        if a.requires_grad:
            assert a.grad is not None
            assert a.grad.shape == a.shape


def test_gradient_through_a_compiled_op():
    x = torch.randn(4, 16, requires_grad=True)
    w = torch.randn(16, requires_grad=True)

    def f(x, w):
        return torch.ops.ipex.rms_norm(x, w, 1e-6).square().sum()

    torch.compile(f, backend="aot_eager", fullgraph=True)(x, w).backward()
    got = x.grad.clone(), w.grad.clone()
    x.grad = w.grad = None
    f(x, w).backward()
    torch.testing.assert_close(got, (x.grad, w.grad))


def test_no_gradient_graph_without_need():
    x = torch.randn(4, 16, requires_grad=True)
    assert torch.ops.ipex.gelu(x).requires_grad
    with torch.no_grad():
        assert not torch.ops.ipex.gelu(x).requires_grad
    with torch.inference_mode():
        assert torch.ops.ipex.gelu(x).is_inference()
    assert not torch.ops.ipex.gelu(x.detach()).requires_grad


def test_autocast_lower_precision():
    q = torch.randn(1, 2, 4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.ops.ipex.attention(q, q, q).dtype == torch.bfloat16
        assert (
            torch.ops.ipex.rms_norm(q, None).dtype == torch.float32
        )  # no rule: the dtype of the input
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.ops.ipex.attention(q, q, q).dtype == torch.float16
    assert torch.ops.ipex.attention(q, q, q).dtype == torch.float32


def test_autocast_keeps_the_gradient():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = torch.ops.ipex.attention(q, q, q)
    out.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


def test_outputs_are_contiguous_for_any_input():
    x = torch.randn(8, 6).t()
    for op in ("rms_norm", "layer_norm"):
        args = (x, None) if op == "rms_norm" else (x, None, None)
        assert getattr(torch.ops.ipex, op)(*args).is_contiguous()


def test_check_message():
    with pytest.raises(OpArgumentError, match=r"^rms_norm: weight must be 1-D, got \[3, 4\]$"):
        check(False, "rms_norm", "weight", "be 1-D", [3, 4])


def test_float64_is_checked_and_takes_the_definition():
    run, table = run_op, torch.randn(2, 4, 3, dtype=torch.float64)
    first, second = table  # two tables in one memory
    rows, starts = [torch.tensor([1, 3])] * 2, [torch.tensor([0])] * 2
    zeros = [torch.zeros(1, 3, dtype=torch.float64)] * 2
    trails = [torch.empty(0, dtype=torch.bfloat16)] * 2
    update = (zeros, [first, second], trails, rows, starts, [], "sum", False, 0.1, 0.0)
    run("merged_embeddingbag_sgd", torch.float64, *update)
    same = (zeros, [first, first], *update[2:])
    with pytest.raises(OpArgumentError, match="weights must not share memory"):
        run("merged_embeddingbag_sgd", torch.float64, *same)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    run("rms_norm", torch.float64, x, None, 1e-6).sum().backward()
    assert x.grad.dtype == torch.float64
    with pytest.raises(
        OpArgumentError, match=r"weight must be 1-D of size x.shape\[-1\] = 8, got \[7\]"
    ):
        run("rms_norm", torch.float64, x, x.new_ones(7), 1e-6)
    with pytest.raises(OpArgumentError, match="x must be a tensor, got None"):
        run("rms_norm", torch.float64, None, None, 1e-6)
    mapped = torch.func.vmap(lambda v: run("rms_norm", torch.float64, v, None, 1e-6))
    assert torch.equal(mapped(x), run("rms_norm", torch.float64, x, None, 1e-6))


def test_registering_an_op_of_ones_own():
    """What a plug-in author does: one spec gives schema, reference, fake, derivative and opcheck."""
    spec = OpSpec(
        name="test_double",
        schema="(Tensor x) -> Tensor",
        reference=lambda x: x * 2,
        check=lambda a: a.require(a.x.is_floating_point(), "x", "be floating", a.x.dtype),
        fake=lambda a: torch.empty_like(a.x),
        samples=lambda dtype: [Sample((torch.ones(3, dtype=dtype),), id="ones")],
        autocast="float32",
        bench=lambda: [
            BenchCase("3", lambda d: (torch.ones(3, dtype=d),), lambda d: 6 * d.itemsize)
        ],
    )
    try:
        register(spec)
        x = torch.ones(3, requires_grad=True)
        spec.op(x).sum().backward()
        assert x.grad.tolist() == [2.0, 2.0, 2.0]
        torch.library.opcheck(spec.op.default, (x,))
        with pytest.raises(OpArgumentError):
            spec.op(torch.ones(3, dtype=torch.int32))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert spec.op(torch.ones(3, dtype=torch.bfloat16)).dtype == torch.float32
        assert reference_result(spec, Sample((torch.ones(2),)))[0].dtype == torch.float64
        with pytest.raises(ValueError, match="registered already"):
            register(spec)
    finally:
        kernels._SPECS.pop("test_double", None)


def test_op_without_a_derivative_raises_in_backward():
    spec = OpSpec(
        name="test_no_backward",
        schema="(Tensor x) -> Tensor",
        reference=lambda x: x * 2,
        check=lambda a: None,
        fake=lambda a: torch.empty_like(a.x),
        samples=lambda dtype: [],
        backward=None,
    )
    try:
        register(spec)
        out = spec.op(torch.ones(3, requires_grad=True))
        with pytest.raises(RuntimeError, match="test_no_backward: is not differentiable"):
            out.sum().backward()
    finally:
        kernels._SPECS.pop("test_no_backward", None)


def test_op_that_writes_without_a_derivative():
    """As torch's own ops in place: a leaf is refused at once, other values where a gradient is asked for."""

    def reference(to, x):
        to.add_(x)

    spec = OpSpec(
        name="test_writes",
        schema="(Tensor(a!) to, Tensor x) -> ()",
        reference=reference,
        check=lambda a: None,
        samples=lambda dtype: [],
        backward=None,
    )
    with pytest.raises(ValueError, match="fake must be given for an op that returns Tensor"):
        dataclasses.replace(spec, schema="(Tensor to, Tensor x) -> Tensor")
    try:
        register(spec)
        x = torch.ones(3, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"test_writes: .* leaf .* torch\.no_grad\(\)"):
            spec.op(x, torch.ones(3))
        to = torch.ones(3)
        product = to * x  # needs `to` as it is now
        spec.op(to, x)
        assert to.tolist() == [2, 2, 2]
        first = to.grad_fn
        spec.op(to, x)
        assert to.grad_fn is first  # no chain that grows with each step
        with pytest.raises(RuntimeError, match="test_writes: is not differentiable"):
            to.sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
    finally:
        kernels._SPECS.pop("test_writes", None)


def test_strict_mode_forbids_the_reference():
    """Without a kernel package, IPEX_STRICT=1 turns the silent reference into an error."""
    code = (
        "import torch, ipex_core, ipex_core.kernels.providers as p\n"
        "p._entry_points = lambda group: ()\n"
        "torch.ops.ipex.gelu(torch.ones(3))"
    )
    for strict, fails in (("0", False), ("1", True)):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "IPEX_STRICT": strict},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (result.returncode != 0) == fails, result.stderr
        if fails:
            assert "FallbackError" in result.stderr
            assert "pip install 'ipex[cpu]'" in result.stderr


def test_arguments_have_the_names_and_defaults_of_the_schema():
    spec = specs()["rms_norm"]
    x = torch.ones(2, 3)
    a = spec.bind(x, None, weight_offset=1.0)
    assert a.x is x and a.weight is None and (a.eps, a.weight_offset) == (1e-6, 1.0)
    assert a.op == "rms_norm"


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((1, 2, 3, 4, 5), {}, "rms_norm: takes at most 4 arguments, got 5"),
        ((1, None), {"epsilon": 1}, "rms_norm: unknown arguments epsilon; known: x, weight, eps"),
        ((1,), {}, "rms_norm: arguments weight must be given"),
    ],
)
def test_arguments_that_the_schema_does_not_have(args, kwargs, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        specs()["rms_norm"].bind(*args, **kwargs)


def test_require_shows_the_argument_or_what_is_given():
    a = specs()["gelu"].bind(torch.ones(2), "no")
    with pytest.raises(OpArgumentError, match="gelu: approximate must be known, got no"):
        a.require(False, "approximate", "be known")
    with pytest.raises(OpArgumentError, match=r"gelu: x must be 3-D, got \[2\]"):
        a.require(False, "x", "be 3-D", list(a.x.shape))
    a.require(True, "x", "be 3-D")
