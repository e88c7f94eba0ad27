# SPDX-License-Identifier: Apache-2.0
"""Numerics of the optimized layers, and which modules are left alone and why."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from ipex_core.diagnostics.explain import explain
from ipex_core.kernels import measured
from ipex_core.nn import OptimizedConv2d, OptimizedLinear, PackedWeight
from ipex_core.optimization import optimize, restore
from ipex_core.optimization.passes import prepack

pytestmark = pytest.mark.usefixtures("small_weights_are_packed")

TOLERANCE = {None: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def randomize(model):
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias)
    return model.eval()


@pytest.fixture
def packed_convs(monkeypatch):
    always = prepack.LinearChoice("mkldnn", "always")
    monkeypatch.setattr(prepack, "measure_conv", lambda *_: always)


def texts(model, path):
    return " | ".join(r.text for r in explain(model).for_module(path) if not r.done)


def check(model, *inputs, dtype=None, **kwargs):
    result = optimize(model, dtype=dtype, **kwargs)
    with torch.no_grad():
        got, want = result(*inputs), model(*inputs)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)
    return result


CONVS = {
    "1d": (lambda: nn.Conv1d(4, 8, 3), nn.BatchNorm1d, (2, 4, 15)),
    "2d": (lambda: nn.Conv2d(4, 8, 3, padding=1, stride=2), nn.BatchNorm2d, (2, 4, 9, 11)),
    "2d-groups": (lambda: nn.Conv2d(4, 8, 3, groups=2, bias=False), nn.BatchNorm2d, (2, 4, 9, 9)),
    "2d-depthwise": (
        lambda: nn.Conv2d(8, 8, 3, groups=8, dilation=2),
        nn.BatchNorm2d,
        (1, 8, 9, 9),
    ),
    "2d-1x1": (lambda: nn.Conv2d(3, 8, 1), nn.BatchNorm2d, (2, 3, 7, 7)),
    "2d-same": (lambda: nn.Conv2d(3, 8, 3, padding="same"), nn.BatchNorm2d, (2, 3, 7, 7)),
    "2d-reflect": (
        lambda: nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d,
        (2, 3, 7, 7),
    ),
    "3d": (lambda: nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d, (1, 3, 5, 6, 7)),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CONVS)
def test_conv_batch_norm(case, dtype):
    conv, norm, shape = CONVS[case]
    model = randomize(nn.Sequential(conv(), norm(8), nn.ReLU()))
    result = check(model, torch.randn(shape), dtype=dtype)
    assert isinstance(result[1], norm) and type(result[1]) is not norm
    assert "1.weight" in result.state_dict() and "1.running_mean" in result.state_dict()
    if model[0].bias is None:
        assert "0.bias" not in result.state_dict() and restore(result)[0].bias is None


@pytest.mark.parametrize("case", CONVS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_packed_conv_batch_norm(case, dtype, packed_convs):
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    conv, norm, shape = CONVS[case]
    model = randomize(nn.Sequential(conv(), norm(8), nn.ReLU()))
    x = torch.randn(shape)
    result = check(model, x, dtype=dtype, sample_input=x)
    packable = case.startswith(("2d", "3d")) and case not in ("2d-same", "2d-reflect")
    if dtype != torch.float16:
        assert isinstance(result[0].weight, PackedWeight) == packable
    for name, value in result.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


@pytest.mark.parametrize("case", CONVS)
def test_conv_inputs(case, packed_convs):
    conv, _, shape = CONVS[case]
    model = nn.Sequential(conv()).eval()
    x = torch.randn(shape)
    result = check(model, x, sample_input=x)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    others = [x[0], x[:0], torch.cat([x, x], -1)]
    if last is not None:
        others.append(x.to(memory_format=last))
    for other in others:
        with torch.no_grad():
            torch.testing.assert_close(result(other), model(other), rtol=1e-4, atol=1e-4)
    y, z = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(y).square().sum().backward()
    result(z).square().sum().backward()
    torch.testing.assert_close(z.grad, y.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(result[0].weight.grad, model[0].weight.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d])
def test_conv_transpose(kind):
    dims = int(kind.__name__[-2])
    model = nn.Sequential(kind(4, 6, 3, stride=2)).eval()
    x = torch.randn(2, 4, *[5] * dims)
    check(model, x)
    check(model, x, dtype=torch.bfloat16)


def test_linear_batch_norm():
    model = randomize(nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96)))
    result = check(model, torch.randn(5, 64))
    assert "folded into 0" in str(explain(result))
    check(model, torch.randn(5, 64), dtype=torch.bfloat16)


def test_linear_batch_norm_over_dimension_one_stays_right():
    # [B, C, F]: the batch norm normalizes dimension 1, not the features of the linear layer.
    model = randomize(nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96)))
    check(model, torch.randn(2, 96, 64))


def test_batch_norm_without_affine_and_in_several_regions():
    class Untraceable(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False))

        def forward(self, x):
            if x.sum() > 0:
                return self.body(x)
            return self.body(-x)

    result = check(randomize(Untraceable()), torch.randn(2, 3, 9, 9))
    assert "folded into body.0" in str(explain(result))


def test_folds_that_must_not_happen():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            y = self.conv(x)
            return self.bn(y) + y

    class Twice(Branch):
        def forward(self, x):
            return self.bn(self.conv(self.bn(self.conv(x))))

    for kind in (Branch, Twice):
        result = check(randomize(kind()), torch.randn(2, 3, 5, 5))
        assert type(result.bn) is nn.BatchNorm2d
    model = randomize(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    model[0].register_forward_hook(lambda *_: None)
    result = check(model, torch.randn(2, 3, 5, 5))
    assert "a hook would see other values" in texts(result, "1")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False)).eval()
    assert "no running statistics" in texts(check(model, torch.randn(2, 3, 5, 5)), "1")
    model = randomize(nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96)))
    model[1].weight.data[3] = 0
    assert "scale of the batch norm is zero" in texts(check(model, torch.randn(2, 64)), "1")


def test_folded_batch_norm_refuses_to_train():
    model = optimize(randomize(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))))
    with pytest.raises(RuntimeError, match=r"ipex\.restore"):
        model.train()(torch.randn(2, 3, 5, 5))


def test_dropout_drops_again_in_training_mode():
    model = optimize(nn.Sequential(nn.Dropout(0.5)).eval())
    x = torch.ones(1000)
    assert model(x) is x
    assert (model.train()(x) == 0).any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_shapes(dtype, bias):
    model = nn.Sequential(nn.Linear(100, 70, bias=bias)).eval()
    for shape in (
        (100,),
        (1, 100),
        (3, 100),
        (2, 5, 100),
        (2, 3, 4, 100),
        (0, 100),
        (2, 0, 100),
        (200, 100),
    ):
        check(model, torch.randn(shape), dtype=dtype)
    check(model, torch.randn(100, 8).t(), dtype=dtype)
    check(model, torch.randn(8, 200)[:, ::2], dtype=dtype)


def test_linear_activations_and_residuals():
    torch.manual_seed(0)
    for dtype, tolerance in TOLERANCE.items():
        layer = optimize(nn.Linear(100, 70).eval(), dtype=dtype)
        x, r = torch.randn(2, 5, 100), torch.randn(2, 5, 70)
        if dtype is not None:
            x, r = x.to(dtype), r.to(dtype)
        with torch.no_grad():
            plain = layer(x)
            for post, function in (
                ("relu", nn.functional.relu),
                ("gelu", nn.functional.gelu),
                ("gelu_tanh", lambda t: nn.functional.gelu(t, approximate="tanh")),
                ("silu", nn.functional.silu),
            ):
                torch.testing.assert_close(
                    layer.fused(x, post), function(plain), rtol=tolerance, atol=tolerance
                )
            for residual in (
                r,
                r[:1],
                r[:, :, :1],
                r.float(),
                r.transpose(0, 1).contiguous().transpose(0, 1),
            ):
                got, want = layer.fused(x, "none", residual), plain + residual
                torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_values_that_are_not_finite_pass_through():
    x = torch.randn(4, 100)
    x[0, 0], x[1, 1] = float("nan"), float("inf")
    layer = nn.Linear(100, 70).eval()
    with torch.no_grad():
        got, want = optimize(layer)(x), layer(x)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


def test_wrong_input_raises():
    layer = optimize(nn.Linear(100, 70).eval())
    with pytest.raises(RuntimeError, match="3x99 and 100x70"), torch.no_grad():
        layer(torch.randn(3, 99))


def test_autocast_of_a_float32_model():
    model = nn.Sequential(nn.Linear(100, 70), nn.ReLU(), nn.Conv1d(3, 4, 1)).eval()
    x = torch.randn(3, 100)
    for grad in (True, False):
        result = optimize(model)
        with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16):
            got, want = result(x), model(x)
        assert got.dtype == want.dtype == torch.bfloat16
        torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)


def test_autocast_of_a_bfloat16_model():
    model = randomize(
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(72, 80), nn.LayerNorm(80)
        )
    )
    x = torch.randn(2, 3, 5, 5)
    result = optimize(model, dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        inside = result(x)
    with torch.no_grad():
        torch.testing.assert_close(inside, result(x), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(inside.float(), model(x), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(64),
        nn.LayerNorm((5, 64)),
        nn.LayerNorm(64, elementwise_affine=False),
        nn.RMSNorm(64),
        nn.RMSNorm(64, eps=1e-4),
        nn.GroupNorm(5, 5),
        nn.GELU(),
        nn.GELU("tanh"),
        nn.Softmax(-1),
        nn.Softmax(0),
    ],
)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norms_and_activations(norm, dtype):
    model = nn.Sequential(norm).eval()
    check(model, torch.randn(3, 5, 64), dtype=dtype)
    x, y = torch.randn(3, 5, 64), None
    x, y = x.requires_grad_(), x.detach().clone().requires_grad_()
    model(x).square().sum().backward()
    optimize(model)(y).square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_transformer_encoder_layer(dtype):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    check(model, torch.randn(2, 7, 64), dtype=dtype)


def test_weight_norm_and_parametrizations_are_left_alone():
    x = torch.randn(3, 64)
    with pytest.warns(FutureWarning):
        old = nn.Sequential(weight_norm(nn.Linear(64, 64))).eval()
    for model in (
        old,
        nn.Sequential(spectral_norm(nn.Linear(64, 64))).eval(),
        nn.Sequential(parametrizations.weight_norm(nn.Linear(64, 64))).eval(),
    ):
        keys = list(model.state_dict())
        result = check(model, x)
        assert not isinstance(result[0], OptimizedLinear) and texts(result, "0")
        assert list(result.state_dict()) == keys
        reduced = check(model, x, dtype=torch.bfloat16)
        for name, value in reduced.state_dict().items():
            assert torch.equal(value, model.state_dict()[name])
        restore(reduced)
        with torch.no_grad():
            assert torch.equal(reduced(x), model(x))
        assert len(reduced[0]._forward_pre_hooks) == len(model[0]._forward_pre_hooks)


def test_shared_parameters_stay_shared():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(80, 64)
            self.body = nn.Linear(64, 64)
            self.head = nn.Linear(64, 80, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.body(self.embed(ids)))

    model = Tied().eval()
    ids = torch.randint(0, 80, (2, 5))
    for dtype in (None, torch.bfloat16):
        result = check(model, ids, dtype=dtype)
        assert result.head.weight is result.embed.weight
        assert result.head.weight.dtype == (dtype or torch.float32)
        assert not isinstance(result.head.weight, PackedWeight)
        assert "shared with another module" in texts(result, "head")
        state = result.state_dict()
        assert torch.equal(state["head.weight"], model.head.weight)
        assert torch.equal(state["embed.weight"], model.head.weight)
        result.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        assert result.head.weight is result.embed.weight
        restore(result)
        assert result.head.weight is result.embed.weight
        assert torch.equal(result.head.weight, model.head.weight + 1)


def test_a_module_in_two_places():
    layer = nn.Linear(64, 64)
    model = nn.Sequential(layer, nn.ReLU(), layer).eval()
    result = check(model, torch.randn(3, 64))
    assert result[0] is result[2] and isinstance(result[0].weight, PackedWeight)


def test_subclasses_are_left_alone():
    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    result = check(nn.Sequential(Odd(64, 64)).eval(), torch.randn(3, 64))
    assert type(result[0]) is Odd and "subclass" in texts(result, "0")
    check(nn.Sequential(Odd(64, 64)).eval(), torch.randn(3, 64), dtype=torch.bfloat16)


def test_a_replaced_forward_is_left_alone():
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    model[0].forward = lambda x: x * 3
    result = check(model, torch.randn(3, 64))
    assert type(result[0]) is nn.Linear and "replaced on this instance" in texts(result, "0")


def test_hooks_keep_firing():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU()).eval()
    seen = []
    model[0].register_forward_hook(lambda m, a, out: seen.append(out))
    result = check(model, torch.randn(3, 64))
    assert len(seen) == 2 and isinstance(result[0], OptimizedLinear)


def test_other_devices_and_dtypes_are_left_alone():
    meta = nn.Sequential(nn.Linear(64, 64, device="meta")).eval()
    assert "meta" in texts(optimize(meta), "0")
    double = nn.Sequential(nn.Linear(64, 64).double()).eval()
    result = optimize(double, dtype=torch.bfloat16)
    assert "float64" in texts(result, "0") and result[0].weight.dtype == torch.float64
    lazy = nn.Sequential(nn.LazyLinear(64)).eval()
    assert type(optimize(lazy, inplace=True)[0]) is nn.LazyLinear


def test_tiny_layers_keep_the_stock_op():
    result = optimize(nn.Sequential(nn.Linear(4, 4)).eval(), auto_kernel_selection=False)
    assert type(result[0]) is nn.Linear and "fewer than" in texts(result, "0")


def test_plain_layers_with_own_parameters():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 1, 64))
            self.list = nn.ParameterList([nn.Parameter(torch.randn(64))])
            self.fc = nn.Linear(64, 64)

        def forward(self, x):
            return self.fc(torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)) * self.list[0]

    result = check(Own().eval(), torch.randn(2, 3, 64), dtype=torch.bfloat16)
    assert result.token.dtype == torch.bfloat16 and result.list[0].dtype == torch.bfloat16
    assert result.state_dict()["token"].dtype == torch.float32


def test_measured_convolution():
    x = torch.randn(1, 3, 9, 9)
    result = optimize(nn.Conv2d(3, 8, 3).eval(), sample_input=x)
    assert "measured at input [1, 3, 9, 9]" in str(explain(result))
    assert isinstance(optimize(nn.Conv2d(3, 8, 3).eval(), dtype=torch.bfloat16), OptimizedConv2d)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_rows_in_16_bits_have_the_own_kernel(dtype, monkeypatch):
    monkeypatch.setattr(prepack, "has_kernel", lambda name: name == "linear")
    monkeypatch.setattr(measured, "side", lambda *_: None)  # of a machine without a table
    choice = prepack.choose_linear(dtype, 384, 384, 4096)
    assert choice.form == ("mkldnn" if dtype == torch.float32 else "ipex"), choice


def error_of(layer, *shape, dtype):
    with torch.no_grad(), pytest.raises((RuntimeError, ValueError)) as caught:
        layer(torch.randn(shape, dtype=dtype))
    return str(caught.value)


LAYERS = [nn.Linear(64, 64)]
LAYERS += [kind(4, 8, 3) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)]
LAYERS += [kind(4, 8, 3) for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_errors_are_those_of_torch(packed_convs, layer, dtype):
    stock, right, wrong = copy.deepcopy(layer).to(dtype).eval(), (3, 64), [(3, 65), (63,), ()]
    if not isinstance(layer, nn.Linear):
        size = (8,) * len(layer.kernel_size)
        right, wrong = (2, 4, *size), [(2, 5, *size), (3, *size), size, (8,)]
    made = optimize(layer.eval(), dtype=dtype, sample_input=torch.randn(right))
    for shape in wrong:
        assert error_of(made, *shape, dtype=dtype) == error_of(stock, *shape, dtype=dtype)
    if isinstance(layer, nn.Linear):
        return
    for name, number in (("padding", -1), ("stride", 0), ("dilation", -1)):
        changed = copy.deepcopy(layer)
        setattr(changed, name, (number,) * len(size))
        made, stock = optimize(changed, dtype=dtype), changed.to(dtype)
        assert error_of(made, *right, dtype=dtype) == error_of(stock, *right, dtype=dtype)
