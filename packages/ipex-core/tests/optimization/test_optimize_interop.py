# SPDX-License-Identifier: Apache-2.0
"""Optimized layers meet nested tensors, function transforms, scripted parts and layers without an own class."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ipex_core.diagnostics.explain import explain
from ipex_core.optimization import optimize, restore
from ipex_core.optimization.passes import prepack

pytestmark = pytest.mark.usefixtures("small_weights_are_packed")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_nested_tensors_take_the_stock_ops():
    layers = [nn.Linear(96, 96), nn.GELU(), nn.Softmax(-1), nn.LayerNorm(96)]
    parts = [torch.randn(4, 96), torch.randn(3, 96)]
    for layer in (*layers, nn.Sequential(nn.Linear(96, 96), nn.GELU())):
        result = optimize(layer.eval())
        for layout in (torch.strided, torch.jagged):
            nested = torch.nested.nested_tensor(parts, layout=layout)
            with torch.no_grad():
                for got, part in zip(result(nested).unbind(), parts, strict=True):
                    torch.testing.assert_close(got, layer(part), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_transformer_encoder_makes_nested_tensors_of_padding(dtype):
    layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 9, 64), torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    with torch.no_grad():
        want = model(x, src_key_padding_mask=padding)
        got = optimize(model, dtype=dtype)(x, src_key_padding_mask=padding)
    close = 1e-4 if dtype is None else 6e-2
    torch.testing.assert_close(got.float()[~padding], want[~padding], rtol=close, atol=close)


@pytest.mark.parametrize("concat", [False, True])
def test_function_transforms(concat):
    from torch.func import functional_call, grad, hessian, jvp, vmap

    model = nn.Sequential(
        nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 64), nn.Softmax(-1)
    ).eval()
    result, x = optimize(model, concat_linear=concat), torch.randn(3, 64)
    parameters = dict(model.named_parameters())

    def loss(net, values, z):
        return functional_call(net, values, (z,)).square().sum()

    for what in (
        lambda m: vmap(m)(x),
        lambda m: jvp(m, (x,), (x,))[1],
        lambda m: grad(lambda z: m(z).square().sum())(x),
        lambda m: hessian(lambda z: m(z).square().sum())(x[0]),
        lambda m: vmap(grad(lambda p, z: loss(m, p, z)), (None, 0))(parameters, x)["0.weight"],
    ):
        torch.testing.assert_close(what(result), what(model), rtol=1e-3, atol=1e-4)


def test_layers_without_an_optimized_class_take_float32_input():
    x, h = torch.randn(3, 32), (torch.zeros(3, 16), torch.ones(3, 16))
    ids, weights = torch.arange(6).view(2, 3), torch.ones(2, 3)
    for layer, run in (
        (nn.LSTMCell(32, 16), lambda m: torch.cat([*m(x), *m(x, h), *m(x, hx=h)])),
        (nn.GRUCell(32, 16), lambda m: m(x, h[0])),
        (nn.Bilinear(32, 32, 8), lambda m: m(x, input2=x)),
        (nn.PReLU(), lambda m: m(x)),
        (nn.EmbeddingBag(9, 32, mode="sum"), lambda m: m(ids, per_sample_weights=weights)),
    ):
        layer.eval()
        result = optimize(layer, dtype=torch.bfloat16)
        with torch.no_grad():
            got, want = run(result), run(layer)
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got.float(), want, rtol=5e-2, atol=5e-2)
            torch.testing.assert_close(run(restore(result)), want)


def test_script_modules_inside_a_model_stay():
    script = torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.ReLU()).eval())
    model = nn.Sequential(nn.Linear(64, 64), script).eval()
    x = torch.randn(3, 64)
    with torch.no_grad():
        torch.testing.assert_close(optimize(model)(x), model(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match="1 is a ScriptModule"):
        optimize(model, dtype=torch.bfloat16)


class Lookups(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3))
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.conv(x))))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # bits of bfloat16 differ
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_trace_under_autocast(called, gradients):
    model, x = Lookups().eval(), torch.randn(1, 3, 8, 8)
    made = copy.deepcopy(optimize(model))
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(gradients):
        if called:
            made(x)
        traced = torch.jit.trace(made, x)  # twice: it checks its result
        found = torch.jit.freeze(traced)(x)
        torch.testing.assert_close(found, made(x), rtol=2e-2, atol=2e-2)
    assert "_slow_forward" not in restore(made).__dict__


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_of_fake_tensors(dtype):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        kinds = (nn.Conv2d(3, 8, 3), nn.Linear(9, 8), nn.Embedding(5, 9), nn.LSTM(9, 4))
        for layer in kinds:
            made = optimize(layer.eval(), dtype=dtype)
            assert all(p.dtype == dtype for p in made.parameters())
            assert all(v.dtype == torch.float32 for v in made.state_dict().values())
            x = torch.zeros(2, 3, 9, 9).flatten(0, 1) if isinstance(layer, nn.LSTM) else None
            x = torch.zeros(2, 3, 9, 9) if x is None else x
            y = made(x.long() if isinstance(layer, nn.Embedding) else x.to(dtype))
            assert (y[0] if isinstance(y, tuple) else y).dtype == dtype


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model, x = nn.Conv2d(64, 64, 3).eval(), torch.randn(1, 64, 16, 16)
        made = optimize(model, sample_input=x)
        assert made(x).shape == (1, 64, 14, 14)
        assert optimize(nn.BatchNorm2d(64).eval())(x).shape == x.shape
    model = nn.Conv2d(64, 64, 3).eval()
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = optimize(model, sample_input=torch.randn(1, 64, 16, 16))
    row = next(row for row in explain(made).rows if row.step == "prepack")
    assert not row.done and "FakeTensorMode" in row.text


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_copy_with_fake_tensors(monkeypatch, dtype):
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode

    choice = prepack.LinearChoice("mkldnn", "for this test")
    monkeypatch.setattr(prepack, "measure_conv", lambda *_: choice)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported() and dtype is not None:
        pytest.skip("no packed weight in bfloat16 here")
    x = torch.randn(2, 4, 9, 9)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(392, 6)).eval()
    fast = optimize(model, dtype=dtype, sample_input=x)
    assert fast[0]._packed is not None
    mode = FakeTensorMode(allow_fallback_kernels=False)
    with FakeCopyMode(mode):
        fake = copy.deepcopy(fast)
    with mode, torch.no_grad():
        y = fake(mode.from_tensor(x))
    assert isinstance(y, FakeTensor)
    assert y.shape == (2, 6) and y.dtype == (dtype or torch.float32)
