# SPDX-License-Identifier: Apache-2.0
"""Linear layers with what follows them, and mixtures of experts."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipex_core import woq
from ipex_core.errors import OpArgumentError
from ipex_core.kernels.policy import has_kernel
from ipex_core.nn import OptimizedLinear
from ipex_llm import modules as M

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
native = has_kernel("linear")

#: Class -> what it computes from the result of its layer and its further arguments.
ONE = {
    M.LinearSilu: F.silu,
    M.LinearRelu: F.relu,
    M.LinearGelu: F.gelu,
    M.LinearNewGelu: lambda t: F.gelu(t, approximate="tanh"),
    M.LinearSiluMul: lambda t, y: F.silu(t) * y,
    M.LinearMul: lambda t, y: t * y,
    M.LinearAdd: lambda t, y: t + y,
    M.LinearAddAdd: lambda t, y, z: t + y + z,
}


class Quantized(nn.Module):
    """An int8 layer that offers what `FusableLinear` asks for and nothing else."""

    def __init__(self, plain):
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.register_buffer(
            "packed_weight", woq.pack_weight(plain.weight.detach().float(), "int8")
        )
        self.bias = plain.bias
        self.calls = []

    def fused(self, x, post="none", residual=None, mul=None, residual2=None):
        self.calls.append(post)
        return torch.ops.ipex.woq_linear(
            x, self.packed_weight, self.out_features, self.bias, residual, post, mul, residual2
        )


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(got, want, dtype=torch.float32, factor=1):
    tolerance = TOLERANCE[dtype] * factor
    torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)


def operands(function, dtype, shape=(2, 3, 40)):
    count = function.__code__.co_argcount - 1 if hasattr(function, "__code__") else 0
    count = 0 if function in (F.silu, F.relu, F.gelu) else count
    return [torch.randn(shape, dtype=dtype) for _ in range(count)]


def layer(dtype=torch.float32, bias=True, n=40):
    return nn.Linear(64, n, bias=bias).to(dtype)


def wide(plain, x):
    bias = None if plain.bias is None else plain.bias.float()
    return F.linear(x.float(), plain.weight.float(), bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ONE)
def test_fused_linear(kind, dtype):
    for bias in (True, False):
        plain = layer(dtype, bias)
        x, more = torch.randn(2, 3, 64, dtype=dtype), operands(ONE[kind], dtype)
        module = kind(copy.deepcopy(plain)).eval()
        with torch.no_grad():
            want = ONE[kind](wide(plain, x), *(t.float() for t in more))
            first = module(x, *more)
            assert first.dtype == dtype
            close(first, want, dtype)
            assert torch.equal(module(x, *more), first)  # packed now
            close(module(x[0, 0], *(t[0, 0] for t in more)), want[0, 0], dtype)
            assert module(x[:0], *(t[:0] for t in more)).shape == (0, 3, 40)
        if native:
            assert type(module.linear) is OptimizedLinear and isinstance(module.linear, nn.Linear)
        state = module.state_dict()
        assert list(state) == ["linear.weight", "linear.bias"][: 1 + bias]
        assert torch.equal(state["linear.weight"], plain.weight)


@pytest.mark.parametrize("kind", ONE)
def test_training_and_gradients_stay_with_the_stock_layer(kind):
    plain, x = layer(), torch.randn(3, 64)
    more = operands(ONE[kind], torch.float32, (3, 40))
    for mode in (True, False):
        module = kind(copy.deepcopy(plain)).train(mode)
        mine = [t.clone().requires_grad_() for t in (x, *more)]
        module(*mine).square().sum().backward()
        assert type(module.linear) is nn.Linear
        theirs, other = [t.clone().requires_grad_() for t in (x, *more)], copy.deepcopy(plain)
        ONE[kind](other(theirs[0]), *theirs[1:]).square().sum().backward()
        for a, b in zip(mine, theirs, strict=True):
            close(a.grad, b.grad)
        close(module.linear.weight.grad, other.weight.grad)
    module.eval()
    with torch.no_grad():
        module(x, *more)  # packs
    module.zero_grad()
    mine = [t.clone().requires_grad_() for t in (x, *more)]
    module(*mine).square().sum().backward()
    close(mine[0].grad, theirs[0].grad, factor=10)
    close(module.linear.weight.grad, other.weight.grad, factor=10)


def test_wrapped_layers_of_other_kinds():
    plain, x, y = layer(), torch.randn(3, 64), torch.randn(3, 40)
    quantized = Quantized(plain)
    dense = torch.ops.ipex.dequantize_woq_weight(quantized.packed_weight, 40, 64, torch.float32)
    want = F.linear(x, dense, plain.bias)

    class Twice(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    twice = Twice(64, 40)
    twice.load_state_dict(plain.state_dict())
    hooked = copy.deepcopy(plain)
    hooked.register_forward_hook(lambda module, args, output: 3 * output)
    with torch.no_grad():
        close(M.LinearSiluMul(quantized).eval()(x, y), F.silu(want) * y, factor=10)
        close(M.LinearAddAdd(quantized).eval()(x, y, y), want + 2 * y, factor=10)
        assert quantized.calls == ["silu", "none"]
        close(M.LinearRelu(twice).eval()(x), F.relu(2 * plain(x)))
        close(M.LinearRelu(hooked).eval()(x), F.relu(3 * plain(x)))
        close(M.LinearAdd(nn.Identity()).eval()(x, x), 2 * x)
        one, two = Quantized(plain), Quantized(plain)
        close(M.Linear2SiluMul(one, two).eval()(x), F.silu(want) * want, factor=10)
        assert (one.calls, two.calls) == (["silu"], ["none"])
        mixed = M.Linear2SiluMul(copy.deepcopy(plain), two).eval()
        close(mixed(x), F.silu(plain(x)) * want, factor=10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_only_quantized_layers(dtype):
    from ipex_quant import (
        WeightOnlyQuantizedLinear,
        WoqWeightDtype,
        get_weight_only_quant_qconfig_mapping,
    )

    config = get_weight_only_quant_qconfig_mapping(weight_dtype=WoqWeightDtype.INT4, group_size=32)
    plain = [layer(), layer()]
    for one in plain:
        one.qconfig = config.global_qconfig
    mine = [WeightOnlyQuantizedLinear.from_float(one) for one in plain]
    x, y = torch.randn(3, 64, dtype=dtype), torch.randn(3, 40, dtype=dtype)
    with torch.no_grad():
        gate, up = (F.linear(x.float(), one.dequantize().float(), one.bias.float()) for one in mine)
        close(M.LinearSiluMul(mine[0]).eval()(x, y), F.silu(gate) * y.float(), dtype, 10)
        close(M.LinearAddAdd(mine[0]).eval()(x, y, y), gate + 2 * y.float(), dtype, 10)
        close(M.LinearNewGelu(mine[0]).eval()(x), F.gelu(gate, approximate="tanh"), dtype, 10)
        close(M.Linear2SiluMul(*mine).eval()(x), F.silu(gate) * up, dtype, 10)


def test_operands_of_other_shapes_and_dtypes():
    plain, x = layer(torch.bfloat16), torch.randn(3, 64).bfloat16()
    row, single = torch.randn(40).bfloat16(), torch.randn(3, 40)
    with torch.no_grad():
        base = wide(plain, x)
        close(M.LinearMul(copy.deepcopy(plain)).eval()(x, row), base * row, torch.bfloat16)
        got = M.LinearAdd(copy.deepcopy(plain)).eval()(x, single)
        assert got.dtype == torch.float32
        close(got, base + single, torch.bfloat16)
        module = M.LinearSilu(layer()).eval()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = module(torch.randn(3, 64))
        assert got.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biases", [(True, True), (False, False), (False, True)])
def test_two_layers_in_front_of_a_gate(dtype, biases):
    one, two = (layer(dtype, bias) for bias in biases)
    x = torch.randn(2, 3, 64, dtype=dtype)
    module = M.Linear2SiluMul(copy.deepcopy(one), copy.deepcopy(two)).eval()
    with torch.no_grad():
        want = F.silu(wide(one, x)) * wide(two, x)
        for shape in ((2, 3, 64), (6, 64), (1, 6, 64)):
            close(module(x.view(shape)).view(want.shape), want, dtype)
        close(module(x[0, 0]), want[0, 0], dtype)
        if native:
            assert module.linear_1.weight.packed is module.linear_2.weight.packed
        again = copy.deepcopy(module)
        close(again(x), want, dtype)
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        close(torch.load(buffer, weights_only=False)(x), want, dtype)
    state = module.state_dict()
    assert torch.equal(state["linear_1.weight"], one.weight)
    assert torch.equal(state["linear_2.weight"], two.weight)
    with torch.no_grad():
        module.load_state_dict({name: -value for name, value in state.items()})
        close(module(x), F.silu(-wide(one, x)) * -wide(two, x), dtype)
    if dtype == torch.float32:
        module(x).sum().backward()
        assert module.linear_1.weight.grad is not None
        with torch.no_grad():
            for plain in (one, two):
                plain.load_state_dict({n: -v for n, v in plain.state_dict().items()})
        M.Linear2SiluMul(one, two)(x).sum().backward()
        close(module.linear_1.weight.grad, one.weight.grad, factor=10)
        close(module.linear_2.weight.grad, two.weight.grad, factor=10)


def test_two_layers_that_cannot_be_one():
    x = torch.randn(3, 64)
    shared = layer()
    with torch.no_grad():
        for one, two in ((layer(), layer(n=1)), (shared, shared)):
            want = F.silu(wide(one, x)) * wide(two, x)
            close(M.Linear2SiluMul(one, two).eval()(x), want)


def test_compiles_without_graph_break():
    x, y = torch.randn(3, 64), torch.randn(3, 40)
    single, pair = M.LinearSiluMul(layer()).eval(), M.Linear2SiluMul(layer(), layer()).eval()

    def function(x, y):
        return single(x, y) + pair(x)

    with torch.no_grad():
        for packed in (False, True):
            if packed:
                single.init_on_device(x)
                pair.init_on_device(x)
                torch._dynamo.reset()
            want = F.silu(wide(single.linear, x)) * y
            want = want + F.silu(wide(pair.linear_1, x)) * wide(pair.linear_2, x)
            got = torch.compile(function, backend="aot_eager", fullgraph=True)(x, y)
            close(got, want)


def test_linear_errors():
    with pytest.raises(
        TypeError, match=r"^LinearSilu: linear must be a torch\.nn\.Module, got Tensor"
    ):
        M.LinearSilu(torch.ones(2))
    with pytest.raises(TypeError, match="linear_m must be a torch"):
        M.Linear2SiluMul(layer(), None)
    with torch.no_grad(), pytest.raises(RuntimeError):
        M.LinearSilu(layer()).eval()(torch.randn(3, 63))


# -- experts ----------------------------------------------------------------------------------------------------------

E, H, INNER, T = 4, 48, 40, 7


def weights(dtype=torch.float32):
    w13, w2 = torch.randn(E, 2 * INNER, H) * H**-0.5, torch.randn(E, H, INNER) * INNER**-0.5
    return w13.to(dtype), w2.to(dtype)


def experts(x, w13, w2, routing, ids, act=F.silu, w13_bias=None, w2_bias=None):
    y = torch.zeros(x.shape, dtype=torch.float32)
    for t in range(x.shape[0]):
        for weight, e in zip(routing[t], ids[t].tolist(), strict=True):
            if not 0 <= e < w13.shape[0]:
                continue
            both = w13[e].float() @ x[t].float()
            both = both if w13_bias is None else both + w13_bias[e]
            gate, up = both.chunk(2)
            out = w2[e].float() @ (act(gate) * up)
            y[t] += weight * (out if w2_bias is None else out + w2_bias[e])
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prepack", [True, False])
@pytest.mark.parametrize("separate", [True, False])
def test_experts(dtype, prepack, separate):
    w13, w2 = weights(dtype)
    given = (w13, w2)
    if separate:
        given = (w13[:, :INNER], w2, w13[:, INNER:])
    module = M.GatedMLPMOE(*given, use_prepack=prepack).eval()
    x, logits = torch.randn(T, H, dtype=dtype), torch.randn(T, E)
    with torch.no_grad():
        routing, ids = logits.softmax(-1).topk(2)
        for renormalize in (True, False):
            scale = routing / routing.sum(-1, keepdim=True) if renormalize else routing
            got = module(x, False, 2, logits, renormalize)
            assert got.shape == x.shape and got.dtype == dtype
            close(got, experts(x, w13, w2, scale, ids), dtype)
        close(module(x.view(1, T, H), False, 2, logits, False)[0], got, dtype)
        routing, ids = logits.sigmoid().topk(1)
        got = module(x, False, 1, logits, False, scoring_func="sigmoid")
        close(got, experts(x, w13, w2, routing, ids), dtype)
        bias = torch.tensor([0.0, 5.0, 0.0, 0.0])  # everybody takes the second
        got = module(
            x, True, 1, logits, False, 1, 2, scoring_func="sigmoid", e_score_correction_bias=bias
        )
        ones = torch.ones(T, 1, dtype=torch.int64)
        close(got, experts(x, w13, w2, logits.sigmoid()[:, 1:2], ones), dtype)

        def custom(hidden_states, gating_output, topk, renormalize):
            assert (topk, renormalize) == (2, True) and gating_output is logits
            return torch.full((T, 2), 0.5), torch.tensor([[3, 0]]).expand(T, 2).contiguous()

        got = module(x, False, 2, logits, True, custom_routing_function=custom, activation="gelu")
        want = experts(x, w13, w2, torch.full((T, 2), 0.5), torch.tensor([[3, 0]] * T), F.gelu)
        close(got, want, dtype)
    assert (module._packed is not None) is prepack
    # The weights can be read, saved and loaded, whatever form they have.
    assert torch.equal(module.W2, w2) and torch.equal(module.W13, given[0])
    state = module.state_dict()
    names = ["W13", "W2", "W3"] if separate else ["W13", "W2"]
    assert sorted(state) == names
    assert all(torch.equal(state[n], t) for n, t in zip(names, given, strict=True))
    again = copy.deepcopy(module)
    with torch.no_grad():
        want = module(x, False, 2, logits, False)
        assert torch.equal(again(x, False, 2, logits, False), want)
        again.load_state_dict({"W13": state["W13"], **state, "W2": -state["W2"]})
        close(again(x, False, 2, logits, False), -want, dtype)
        assert again.to(torch.float16).W2.dtype == torch.float16


def test_experts_with_biases_of_one_of_several_processes():
    w13, w2 = weights()
    b13, b2 = torch.randn(E, 2 * INNER), torch.randn(E, H)
    x, logits = torch.randn(T, H), torch.randn(T, E)
    routing, ids = logits.softmax(-1).topk(3)
    want = experts(x, w13, w2, routing, ids, w13_bias=b13, w2_bias=b2)
    with torch.no_grad():
        for prepack in (True, False):
            parts = [
                M.GatedMLPMOE(
                    w13[s : s + 2],
                    w2[s : s + 2],
                    use_prepack=prepack,
                    w13_bias=b13[s : s + 2],
                    w2_bias=b2[s : s + 2],
                    experts_start_id=s,
                ).eval()
                for s in (0, 2)
            ]
            close(sum(part(x, False, 3, logits, False) for part in parts), want)


def test_experts_learn():
    w13, w2 = (nn.Parameter(w) for w in weights())
    module = M.GatedMLPMOE(w13, w2)
    x, logits = torch.randn(T, H, requires_grad=True), torch.randn(T, E, requires_grad=True)
    module(x, False, 2, logits, True).square().sum().backward()
    assert module.W13 is w13 and w2.grad.abs().sum() > 0
    assert x.grad.abs().sum() > 0 and logits.grad.abs().sum() > 0
    with torch.no_grad():
        plain = module(x, False, 2, logits, True)
        close(module.eval()(x, False, 2, logits, True), plain)
        assert module._packed is not None and not list(module.parameters())
    module(x, False, 2, logits, True).sum().backward()  # plain once more
    assert module.W13.requires_grad and module.W13.grad is not None
    with torch.no_grad():
        module(x, False, 2, logits, True)
    assert len(list(module.train().parameters())) == 2


def test_experts_compile():
    module = M.GatedMLPMOE(*weights()).eval()
    x, logits = torch.randn(T, H), torch.randn(T, E)
    with torch.no_grad():
        want = module(x, False, 2, logits, True)
        call = torch.compile(module, backend="aot_eager", fullgraph=True)
        close(call(x, False, 2, logits, True), want)


def test_expert_errors():
    w13, w2 = weights()
    for arguments, text in (
        ((w13, w2[0]), r"W2 must have shape \[E, H, I\], got \[48, 40\]"),
        ((w13[:, :-1], w2), r"W13 must have shape \[4, 80, 48\] for W2 of shape \[4, 48, 40\]"),
        ((w13, w2, w13), r"W13 must have shape \[4, 40, 48\]"),
        ((w13[:, :INNER], w2, w13), r"W3 must have shape \[4, 40, 48\]"),
        ((w13.bfloat16(), w2), "W13 must have dtype torch.float32, got torch.bfloat16"),
    ):
        with pytest.raises(OpArgumentError, match="GatedMLPMOE: " + text):
            M.GatedMLPMOE(*arguments)
    with pytest.raises(OpArgumentError, match=r"w2_bias must have shape \[4, 48\]"):
        M.GatedMLPMOE(w13, w2, w2_bias=torch.ones(4))
    with pytest.raises(OpArgumentError, match="experts_start_id must not be negative"):
        M.GatedMLPMOE(w13, w2, experts_start_id=-1)
    module, x, logits = M.GatedMLPMOE(w13, w2).eval(), torch.randn(T, H), torch.randn(T, E)
    with torch.no_grad():
        with pytest.raises(OpArgumentError, match="topk_group must be given with use_grouped"):
            module(x, True, 2, logits, True, num_expert_group=2)
        with pytest.raises(OpArgumentError, match="activation must be one of silu, gelu"):
            module(x, False, 2, logits, True, activation="relu")
        with pytest.raises(RuntimeError, match="top_k must"):
            module(x, False, 5, logits, True)
        with pytest.raises(RuntimeError, match="scoring_func must be one of"):
            module(x, False, 2, logits, True, scoring_func="tanh")
        with pytest.raises(RuntimeError, match=r"hidden_states must have dtype torch\.float32 of"):
            module(x.bfloat16(), False, 2, logits, True)
        with pytest.raises(RuntimeError, match="hidden_states must have 48 features, got 47"):
            module(x[:, 1:], False, 2, logits, True)
