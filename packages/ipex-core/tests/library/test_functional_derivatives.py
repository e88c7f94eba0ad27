# SPDX-License-Identifier: Apache-2.0
"""``torch.func`` and forward differentiation of every op that has a derivative, and of layers that use them."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import ipex_core as ipex
from ipex_core.library.kernels import specs
from ipex_core.nn.modules import MergedEmbeddingBag

Tensor = torch.Tensor

OPS = [name for name, spec in specs().items() if spec.backward is not None]


def floats(values: Any) -> list[Tensor]:
    flat = values if isinstance(values, (list, tuple)) else (values,)
    return [v for v in flat if isinstance(v, Tensor) and v.is_floating_point()]


class Call:
    """An op at a sample, as a function of the tensors among its arguments, also of those in lists."""

    def __init__(self, spec: Any, sample: Any) -> None:
        self.spec, self.sample = spec, sample
        self.tensors = [v for a in sample.args for v in floats(a)]

    def outputs(self, *tensors: Tensor) -> list[Tensor]:
        left = iter(tensors)
        args = [
            [next(left) for _ in a]
            if isinstance(a, list) and len(floats(a)) == len(a)
            # one by one, so that integers keep their places
            else next(left)
            if isinstance(a, Tensor) and a.is_floating_point()
            else a
            for a in self.sample.args
        ]
        names = [argument.name for argument in self.spec.op.default._schema.arguments]
        # No op overwrites a leaf.
        args = [a * 1 if n in self.spec.mutates else a for n, a in zip(names, args, strict=False)]
        return floats(self.spec.op(*args, **self.sample.kwargs))

    def weighted(self, weights: list[Tensor]) -> Any:
        """Return a function with one number as its result."""

        def function(*tensors: Tensor) -> Tensor:
            found = self.outputs(*tensors)
            return sum((o * w).sum() for o, w in zip(found, weights, strict=True))  # type: ignore[return-value]

        return function


def call_of(name: str) -> Call:
    spec = specs()[name]
    calls = (Call(spec, sample) for sample in spec.samples(torch.float32))
    full = (c for c in calls if c.tensors and all(t.numel() for t in c.tensors))
    some = [c for c in itertools.islice(full, 12) if sum(t.numel() for t in c.tensors) < 100_000]
    return max(some, key=lambda c: sum(t.numel() for t in c.tensors))


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_the_derivatives_of_its_backward_pass(name: str) -> None:
    call = call_of(name)
    torch.manual_seed(0)
    leaves = [t.clone().requires_grad_() for t in call.tensors]
    outputs = call.outputs(*leaves)
    weights = [torch.randn_like(o) for o in outputs]
    loss = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
    want = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
    function, every = call.weighted(weights), tuple(range(len(leaves)))
    assert any(bool(g.any()) for g in want)

    got = torch.func.grad(function, argnums=every)(*call.tensors)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

    _, pull = torch.func.vjp(lambda *t: tuple(call.outputs(*t)), *call.tensors)
    for a, b in zip(pull(tuple(weights)), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

    directions = tuple(torch.randn_like(t) for t in call.tensors)
    along = sum((g.double() * d).sum() for g, d in zip(want, directions, strict=True))
    _, forward = torch.func.jvp(function, tuple(call.tensors), directions)
    torch.testing.assert_close(forward.double(), along, rtol=1e-3, atol=1e-3)  # type: ignore[arg-type]

    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, call.tensors, directions)
        tangent = forward_ad.unpack_dual(function(*duals)).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent.double(), along, rtol=1e-3, atol=1e-3)  # type: ignore[arg-type]


def test_second_derivatives_and_batches() -> None:
    x, weight = torch.randn(3, 8), torch.rand(8) + 0.5
    for op, stock in (
        (lambda x: torch.ops.ipex.rms_norm(x, weight, 1e-6), nn.functional.rms_norm),
        (lambda x: torch.ops.ipex.gelu(x), None),
    ):

        def plain(x: Tensor, stock: Any = stock) -> Tensor:
            return nn.functional.gelu(x) if stock is None else stock(x, (8,), weight, 1e-6)

        for transform in (torch.func.hessian, torch.func.jacrev, torch.func.jacfwd):
            got = transform(lambda x, op=op: op(x).square().sum())(x)
            want = transform(lambda x, plain=plain: plain(x).square().sum())(x)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no batching rule
            got = torch.func.vmap(torch.func.grad(lambda x, op=op: op(x).square().sum()))(x)
        want = torch.func.vmap(torch.func.grad(lambda x, plain=plain: plain(x).square().sum()))(x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_ops_without_a_derivative() -> None:
    boxes, scores = torch.rand(4, 4), torch.rand(4)
    with pytest.raises(RuntimeError, match="not differentiable"):
        torch.func.grad(lambda w: _stepped(w).sum())(torch.ones(3))
    assert torch.func.vmap(lambda x: x + 1)(boxes).shape == (
        4,
        4,
    )  # nothing is left behind by the error
    assert torch.func.grad(lambda s: (torch.ops.ipex.argmax(s[None]) * s).sum())(scores).shape == (
        4,
    )


def _stepped(weight: Tensor) -> Tensor:
    torch.ops.ipex.sgd_fused_step(weight, torch.ones(3), None, None, 0.0, 0.1, 0.0, 0.0, False)
    return weight


def test_layers_of_optimized_models() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1)).eval()
    fast = ipex.optimize(model)
    x, v = torch.randn(5, 64), torch.randn(5, 64)
    want, got = (torch.func.jvp(m, (x,), (v,)) for m in (model, fast))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(fast(forward_ad.make_dual(x, v))).tangent
    torch.testing.assert_close(tangent, want[1], rtol=1e-4, atol=1e-4)
    hessian = torch.func.hessian(lambda x: fast(x).sum())(x[:1])
    torch.testing.assert_close(
        hessian, torch.func.hessian(lambda x: model(x).sum())(x[:1]), rtol=1e-3, atol=1e-3
    )


def test_interaction_and_merged_tables() -> None:
    args = [torch.randn(3, 4) for _ in range(3)]
    leaves = [a.clone().requires_grad_() for a in args]
    ipex.nn.functional.interaction(*leaves).square().sum().backward()
    got = torch.func.grad(lambda *a: ipex.nn.functional.interaction(*a).square().sum(), (0, 1, 2))
    for a, leaf in zip(got(*args), leaves, strict=True):
        torch.testing.assert_close(a, leaf.grad)
    merged = MergedEmbeddingBag.from_embeddingbag_list(
        [nn.EmbeddingBag(9, 4), nn.EmbeddingBag(5, 4)]
    )
    lookups = ([torch.tensor([1, 2])] * 2, [torch.tensor([0])] * 2)

    def lookup(weights: dict[str, Tensor]) -> Tensor:
        return torch.cat(torch.func.functional_call(merged, weights, lookups)).sum()

    weights = {name: p.detach() for name, p in merged.named_parameters()}
    with pytest.raises(NotImplementedError, match=r"MergedEmbeddingBag: torch\.func cannot"):
        torch.func.grad(lookup)(weights)
    with pytest.raises(RuntimeError, match="not differentiable"):
        torch.func.jvp(lookup, (weights,), (weights,))
    assert lookup(weights).isfinite()
