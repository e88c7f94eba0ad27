# SPDX-License-Identifier: Apache-2.0
"""Linear layers that run what follows them: the protocol, lowering of single layers, pairs in front of a gate."""

import copy
import io

import pytest
import torch
from torch import nn

from ipex_core.kernels.policy import has_kernel
from ipex_core.nn import FusableLinear, OptimizedLinear, PackedWeight
from ipex_core.nn.functional import linear
from ipex_core.nn.linear import is_fusable, lower_linear
from ipex_core.nn.merged_linear import GatedPair

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
FUNCTIONS = {
    "none": lambda t: t,
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda t: nn.functional.gelu(t, approximate="tanh"),
    "silu": nn.functional.silu,
}
needs_kernel = pytest.mark.skipif(not has_kernel("linear"), reason="no kernel for linear")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(got, want, dtype):
    torch.testing.assert_close(
        got.float(), want.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def layer(dtype=torch.float32, n=40, k=64, bias=True):
    return nn.Linear(k, n, bias=bias).eval().to(dtype)


def supported(dtype):
    one = layer(dtype)
    return lower_linear(one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_lowered_layer_with_everything_after_it(dtype, bias):
    if not supported(dtype):
        pytest.skip("no packed linear of this dtype here")
    plain = layer(dtype, bias=bias)
    packed = copy.deepcopy(plain)
    assert lower_linear(packed) and lower_linear(packed)
    assert isinstance(packed, OptimizedLinear) and isinstance(packed.weight, PackedWeight)
    assert torch.equal(packed.state_dict()["weight"], plain.weight)
    x = torch.randn(2, 3, 64, dtype=dtype)
    full = [torch.randn(2, 3, 40, dtype=dtype) for _ in range(3)]
    others = [full[0][:1], full[1][..., :1], full[2].float()]
    with torch.no_grad():
        base = nn.functional.linear(
            x.float(), plain.weight.float(), None if not bias else plain.bias.float()
        )
        for post, function in FUNCTIONS.items():
            for mul, residual, residual2 in (
                (None, None, None),
                (full[0], None, None),
                (None, full[0], None),
                (None, full[0], full[1]),
                full,
                others,
            ):
                got = packed.fused(x, post, residual, mul, residual2)
                want = function(base)
                want = want if mul is None else want * mul.float()
                want = want if residual is None else want + residual.float()
                want = want if residual2 is None else want + residual2.float()
                close(got, want, dtype)
                close(linear(plain, x, post, residual, mul, residual2), want, dtype)
                close(linear(packed, x, post, residual, mul, residual2), want, dtype)


def test_gradients_through_all_operands():
    plain = layer()
    packed = copy.deepcopy(plain)
    lower_linear(packed)
    tensors = [torch.randn(2, 64), *(torch.randn(2, 40) for _ in range(3))]
    results = []
    for module in (plain, packed):
        inputs = [t.clone().requires_grad_() for t in tensors]
        x, mul, residual, residual2 = inputs
        linear(module, x, "silu", residual, mul, residual2).square().sum().backward()
        results.append([*(t.grad for t in inputs), module.weight.grad, module.bias.grad])
    for got, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_what_is_not_lowered():
    class Own(nn.Linear):
        def forward(self, input):
            return super().forward(input) + 1

    hooked = layer()
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    parametrized = nn.utils.parametrizations.weight_norm(layer())
    cases = {
        "a subclass": Own(8, 8).eval(),
        "a hook": hooked,
        "a parametrization": parametrized,
        "training": nn.Linear(8, 8),
        "meta": nn.Linear(8, 8, device="meta").eval(),
        "float64": layer(torch.float64),
        "another module": nn.Identity().eval(),
    }
    for name, module in cases.items():
        kind = type(module)
        assert not lower_linear(module), name
        assert type(module) is kind, name
    with torch.no_grad():
        x = torch.randn(3, 64)
        want = hooked(x) * torch.ones(3, 40)
        torch.testing.assert_close(linear(hooked, x, "relu"), want.relu())


def test_protocol_by_attributes():
    class Other(nn.Module):
        in_features, out_features, packed_weight = 4, 4, None

        def fused(self, x, post="none", residual=None, mul=None, residual2=None):
            return ("fused", post)

    class Half(nn.Module):
        def fused(self, x):
            raise AssertionError

        def forward(self, x):
            return x

    other: FusableLinear = Other()
    assert is_fusable(other) and not is_fusable(Half()) and not is_fusable(nn.Linear(2, 2))
    assert linear(other, torch.ones(1, 4), "silu") == ("fused", "silu")
    torch.testing.assert_close(linear(Half(), torch.ones(2), "relu"), torch.ones(2))


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biases", [(True, True), (False, False), (True, False)])
def test_gated_pair(dtype, biases):
    members = [layer(dtype, bias=bias) for bias in biases]
    plain = copy.deepcopy(members)
    for member in members:
        lower_linear(member)
    pair = GatedPair()
    x, residual = torch.randn(3, 64, dtype=dtype), torch.randn(3, 40, dtype=dtype)
    with torch.no_grad():
        for activation in ("silu", "gelu", "gelu_tanh"):
            assert pair.ready(x, *members, activation)
            got = pair.forward(x, activation, residual)
            gate, up = (m.float()(x.float()) for m in copy.deepcopy(plain))
            close(got, FUNCTIONS[activation](gate) * up + residual.float(), dtype)
        assert not pair.ready(x, *members, "relu")
        assert not pair.ready(x[0], *members)
        # One store, seen by both; each of them still works alone.
        for member, original in zip(members, plain, strict=True):
            assert member.weight.packed is pair.wide
            assert torch.equal(member.weight.plain(), original.weight)
            assert torch.equal(member.state_dict()["weight"], original.weight)
            close(member(x), original(x), dtype)
    assert not pair.ready(x, *members)  # gradients


@needs_kernel
def test_gated_pair_follows_its_members():
    members = [layer(), layer()]
    for member in members:
        lower_linear(member)
    pair, x = GatedPair(), torch.randn(2, 64)

    def want():
        gate, up = (
            nn.functional.linear(x, m.state_dict()["weight"], m.state_dict()["bias"])
            for m in members
        )
        return nn.functional.silu(gate) * up

    with torch.no_grad():
        assert pair.ready(x, *members)
        close(pair.forward(x), want(), torch.float32)
        members[1].load_state_dict(layer().state_dict())
        assert not pair.fresh(tuple(members)) and pair.ready(x, *members)
        close(pair.forward(x), want(), torch.float32)
        members[0].bias.add_(1)
        assert pair.ready(x, *members)
        close(pair.forward(x), want(), torch.float32)
        copies = copy.deepcopy(members)
        assert copy.deepcopy(pair).wide is None
        buffer = io.BytesIO()
        torch.save(nn.ModuleList(members), buffer)
        assert pair.ready(x, *copies)
        close(pair.forward(x), want(), torch.float32)
        for member in members:
            member.to(torch.bfloat16)
        assert pair.ready(x.bfloat16(), *members) and pair.dtype is torch.bfloat16
        members[0].register_forward_hook(lambda *_: None)
        assert not pair.ready(x, *members)


@needs_kernel
def test_pairs_that_do_not_fit():
    for first, second in (
        (layer(n=40), layer(n=41)),
        (layer(), layer(torch.bfloat16)),
        (layer(), layer(k=32)),
    ):
        for member in (first, second):
            lower_linear(member)
        with torch.no_grad():
            assert not GatedPair().ready(torch.randn(2, 64), first, second)
    same = layer()
    lower_linear(same)
    with torch.no_grad():
        assert not GatedPair().ready(torch.randn(2, 64), same, same)


@needs_kernel
def test_compiled():
    members = [layer(), layer()]
    for member in members:
        lower_linear(member)
    pair, x, mul = GatedPair(), torch.randn(2, 64), torch.randn(2, 40)

    def function(x, mul):
        y = pair.forward(x) if pair.ready(x, *members) else mul
        return y + linear(members[0], x, "silu", mul[:1], mul)

    with torch.no_grad():
        want = function(x, mul)
        got = torch.compile(function, backend="aot_eager", fullgraph=True)(x, mul)
    torch.testing.assert_close(got, want)
