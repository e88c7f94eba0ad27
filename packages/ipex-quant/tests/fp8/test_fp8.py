# SPDX-License-Identifier: Apache-2.0
"""FP8 layers: training, inference, state, copies, compilers, process groups."""

from __future__ import annotations

import copy
import io
from fractions import Fraction

import fp8_bits
import pytest
import torch
from torch import nn

import ipex_core
import ipex_quant
from ipex_core.testing import run_ranks
from ipex_quant.fp8 import (
    DelayedScaling,
    Float8Format,
    Format,
    FP8Linear,
    FP8TensorMeta,
    cast_from_fp8,
    cast_to_fp8,
    fp8_autocast,
    prepare_backward,
    prepare_fp8,
)

Tensor = torch.Tensor


def _reference_step(
    x: Tensor, w: Tensor, b: Tensor, scales: tuple[Fraction, Fraction], bits: fp8_bits.Bits
) -> Tensor:
    rows = torch.tensor(fp8_bits.rounded(x.tolist(), bits, scales[0]), dtype=torch.float64)
    weight = torch.tensor(fp8_bits.rounded(w.tolist(), bits, scales[1]), dtype=torch.float64)
    return rows @ weight.t() + b.double()


@pytest.mark.parametrize("form", list(Format))
def test_training_steps(form: Format) -> None:
    """Three steps of forward and backward, with scales from the steps before, by hand."""
    layer = FP8Linear(8, 5).train()
    w, b = layer.weight.detach().clone(), layer.bias.detach().clone()
    bits = fp8_bits.E5M2 if form is Format.E5M2 else fp8_bits.E4M3
    back = fp8_bits.E4M3 if form is Format.E4M3 else fp8_bits.E5M2
    limits = form.value
    recipe = DelayedScaling(margin=1, fp8_format=form, amax_history_len=2)
    inputs, outputs = [], []  # largest magnitudes of the steps
    top = w.abs().max().item()
    for factor in (1.0, 300.0, 0.01, 5.0):
        x = (torch.randn(3, 4, 8) * factor).requires_grad_()
        g = torch.randn(3, 4, 5) * factor
        with fp8_autocast(enabled=True, fp8_recipe=recipe):
            y = layer(x)
        y.backward(g)  # outside
        # A history of two steps; the first step has none and uses its own magnitude.
        seen = inputs[-2:] or [x.detach().abs().max().item()]
        scale_x = fp8_bits.scale_of(max(seen), int(limits.max_fwd), 1)
        scale_w = fp8_bits.scale_of(top, int(limits.max_fwd), 1)
        want = _reference_step(x.detach().view(12, 8), w, b, (scale_x, scale_w), bits)
        torch.testing.assert_close(
            y.detach().view(12, 5).double(), want, rtol=1e-5, atol=1e-5 * factor
        )
        seen = outputs[-2:] or [g.abs().max().item()]
        scale_g = fp8_bits.scale_of(max(seen), int(limits.max_bwd), 1)
        grad, rows, weight = (
            torch.tensor(fp8_bits.rounded(t.tolist(), kind, scale))
            for t, kind, scale in (
                (g.view(12, 5), back, scale_g),
                (x.detach().view(12, 8), bits, scale_x),
                (w, bits, scale_w),
            )
        )
        torch.testing.assert_close(x.grad.view(12, 8), grad @ weight, rtol=1e-5, atol=1e-5 * factor)
        torch.testing.assert_close(
            layer.weight.grad, grad.t() @ rows, rtol=1e-5, atol=1e-4 * factor**2
        )
        torch.testing.assert_close(layer.bias.grad, g.view(12, 5).sum(0))
        layer.zero_grad()
        inputs.append(x.detach().abs().max().item())
        outputs.append(g.abs().max().item())


def test_interval_and_most_recent() -> None:
    layer = FP8Linear(4, 4, bias=False).train()
    recipe = DelayedScaling(interval=2, amax_compute_algo="most_recent")
    scales = []
    with fp8_autocast(enabled=True, fp8_recipe=recipe), torch.no_grad():
        for largest in (1.0, 4.0, 16.0, 64.0, 256.0):
            layer(torch.full((1, 4), largest))
            scales.append(layer.fp8_meta["scaling_fwd"].scale[0].item())
    assert scales == [256, 256, 256, 16, 16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    layer = FP8Linear(16, 8, params_dtype=dtype)
    x = torch.randn(2, 16).to(dtype).requires_grad_()
    with fp8_autocast(enabled=True):
        y = layer(x)
        y.float().sum().backward()
        assert layer(x[0]).shape == (8,)
    assert y.dtype == x.grad.dtype == layer.weight.grad.dtype == dtype
    assert layer(x).dtype == dtype
    with fp8_autocast(enabled=True), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    low = FP8Linear(16, 8, activation_dtype=torch.bfloat16)
    assert low(torch.randn(1, 16)).dtype == torch.bfloat16


def test_float16_does_not_overflow() -> None:
    layer = FP8Linear(4, 4, bias=False, params_dtype=torch.float16).eval()
    nn.init.eye_(layer.weight)
    x = torch.full((1, 4), 65504.0, dtype=torch.float16)
    with fp8_autocast(enabled=True), torch.no_grad():
        y = layer(x * 0.9)
    assert torch.isfinite(y).all()


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16))


def _sqnr(y: Tensor, want: Tensor) -> float:
    return float(10 * torch.log10(want.square().sum() / (y - want).square().sum()))


def test_the_model_has_two_names() -> None:
    net = _net()
    for model in (prepare_fp8(m=net), prepare_fp8(model=net)):
        assert type(model[0]).__name__ == "FP8Linear"
    with pytest.raises(TypeError, match="model must not be given beside m"):
        prepare_fp8(m=net, model=net)


def test_inference_with_calibrated_scales() -> None:
    net = _net().eval()
    model = prepare_fp8(net)
    batches = [torch.randn(8, 32) * s for s in (0.5, 2.0, 1.0)]
    recipe = DelayedScaling(fp8_format=Format.E4M3)
    with torch.no_grad():
        with fp8_autocast(calibrating=True, fp8_recipe=recipe):
            for batch in batches:
                assert torch.equal(model(batch), net(batch))  # ordinary products
        meta = model[0].fp8_meta["scaling_fwd"]
        top = max(b.abs().max().item() for b in batches)
        weight = net[0].weight
        scales = [fp8_bits.scale_of(v, 448) for v in (top, weight.abs().max().item())]
        assert meta.scale[:2].tolist() == [float(s) for s in scales]
        with fp8_autocast(enabled=True, fp8_recipe=recipe):
            got = model[0](batches[2])
            want = _reference_step(batches[2], weight, net[0].bias, scales, fp8_bits.E4M3)
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
            y = model(batches[2])
            _ = model(1000 * batches[2])
            assert torch.equal(model(batches[2]), y)  # no state changes in evaluation
        assert _sqnr(y, net(batches[2])) > 25
        assert torch.equal(model(batches[2]), net(batches[2]))


def test_inference_without_calibration() -> None:
    net = _net().eval()
    model = prepare_fp8(net)
    x = torch.randn(8, 32) * 1e-4  # far below what 8-bit numbers hold without a scale
    with torch.no_grad(), fp8_autocast(enabled=True):
        assert _sqnr(model(x), net(x)) > 25
    assert not model[0].fp8_meta["scaling_fwd"].recorded


def test_weight_changes_in_evaluation() -> None:
    model = prepare_fp8(_net().eval())
    x = torch.randn(4, 32)
    with torch.no_grad(), fp8_autocast(enabled=True):
        first = model(x)
        model[0].weight.mul_(-1)
        assert not torch.equal(model(x), first)
        model[0].weight.mul_(-1)
        assert torch.equal(model(x), first)
        with torch.inference_mode():
            assert torch.equal(prepare_fp8(model)(x), first)


def test_training_and_evaluation_agree() -> None:
    """The packed weight and the float products of training give the same."""
    layer = FP8Linear(32, 16).train()
    x = torch.randn(6, 32)
    with fp8_autocast(enabled=True):
        y = layer(x)
        with torch.no_grad():
            torch.testing.assert_close(layer.eval()(x), y.detach(), rtol=1e-5, atol=1e-6)
        frozen = layer(x.requires_grad_())  # gradients in evaluation mode: nothing is recorded
        history = layer.fp8_meta["scaling_bwd"].amax_history.clone()
        frozen.sum().backward()
    assert torch.equal(layer.fp8_meta["scaling_bwd"].amax_history, history)
    assert x.grad is not None


def test_training_converges() -> None:
    x = torch.randn(256, 32)
    goal = torch.randn(32, 16) / 32**0.5
    losses = {}
    for low in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if low:
            model, optimizer = prepare_fp8(model, optimizer)
        for _ in range(60):
            optimizer.zero_grad()
            with fp8_autocast(enabled=low):
                loss = (model(x) - x @ goal).square().mean()
            loss.backward()
            optimizer.step()
        losses[low] = loss.item()
    assert losses[True] < 1.3 * losses[False] < 0.1


def test_prepare_copies_model_and_optimizer() -> None:
    net = _net()
    net.append(net[2])  # a layer that is there twice
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net[:4](torch.randn(2, 32)).sum().backward()
    optimizer.step()
    before = net[0].weight.detach().clone()
    model, copied = prepare_fp8(net, optimizer)
    assert [type(m) for m in model] == [FP8Linear, nn.GELU, FP8Linear, nn.LayerNorm, FP8Linear]
    assert model[2] is model[4] and type(net[0]) is nn.Linear
    assert torch.equal(
        copied.state[model[0].weight]["exp_avg"], optimizer.state[net[0].weight]["exp_avg"]
    )
    copied.step()
    assert torch.equal(net[0].weight, before)
    assert {id(p) for g in copied.param_groups for p in g["params"]} == {
        id(p) for p in model.parameters()
    }

    class Mine(nn.Linear):
        pass

    assert type(prepare_fp8(Mine(2, 2))) is Mine
    assert type(prepare_fp8(nn.Linear(2, 2))) is FP8Linear
    rows = ipex_core.explain(model).for_module("0")
    assert [row.kernel for row in rows] == ["woq_linear"] and "emulated" in rows[0].text


def test_state_dict() -> None:
    model = prepare_fp8(_net())
    model.load_state_dict(_net().state_dict())  # of ordinary layers
    assert model.state_dict()["0._extra_state"].numel() == 0
    recipe = DelayedScaling(amax_history_len=5, fp8_format=Format.E4M3, margin=1)
    x = torch.randn(4, 32)
    for _ in range(3):
        with fp8_autocast(enabled=True, fp8_recipe=recipe):
            model(x * (1 + torch.rand(()))).sum().backward()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = prepare_fp8(_net())
    again.load_state_dict(torch.load(file, weights_only=True))
    for part in ("scaling_fwd", "scaling_bwd"):
        for name in ("scale", "scale_inv", "amax_history", "recorded"):
            a, b = (getattr(m[0].fp8_meta[part], name) for m in (model, again))
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), name
    assert again[0].fp8_meta["recipe"] == recipe
    with fp8_autocast(enabled=True, fp8_recipe=recipe):
        assert torch.equal(again(x), model(x))
        assert torch.equal(copy.deepcopy(again).eval()(x), model.eval()(x))
    with pytest.raises(ValueError, match="the extra state must be a result of get_extra_state"):
        again[0].set_extra_state(torch.ones(8, dtype=torch.uint8))
    assert again[0].fp8_meta == {"recipe": DelayedScaling()}


@torch.no_grad()
def test_encoder_layers_call_their_parts() -> None:
    """In inference torch's encoder layer would read the float weights of its parts instead."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    model = prepare_fp8(layer)
    x = torch.randn(2, 3, 16)
    with fp8_autocast(enabled=True):
        found = model(x)
    assert 0 < (found - layer(x)).abs().max() < 0.5
    assert layer.activation_relu_or_gelu == 1


def test_another_recipe() -> None:
    """A history is cut or extended, and scales fit the new format at once."""
    layer = FP8Linear(4, 4).train()
    with torch.no_grad():
        for length, form in ((3, Format.HYBRID), (1, Format.HYBRID), (4, Format.E5M2)):
            with fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(0, 1, form, length)):
                layer(torch.full((2, 4), 2.0))
    meta = layer.fp8_meta["scaling_fwd"]
    assert meta.amax_history.shape[0] == 4
    assert meta.scale[0].item() == fp8_bits.scale_of(2.0, 57344)
    meta = FP8TensorMeta(1, 4)
    meta.amax_history = torch.tensor([[9.0], [1.0], [2.0], [3.0]])  # current, oldest ... newest
    meta.resize(3)
    assert meta.amax_history.flatten().tolist() == [9, 2, 3]
    meta.resize(5)
    assert meta.amax_history.flatten().tolist() == [9, 0, 0, 2, 3]


def test_own_module() -> None:
    """A module of the user on `Fp8BaseModule`, with IPEX's functions."""

    class Twice(ipex_quant.fp8.Fp8BaseModule):
        def forward(self, x: Tensor) -> Tensor:
            with self.prepare_forward():
                meta = self.fp8_meta["scaling_fwd"]
                low = cast_to_fp8(x, meta, 0, Float8Format.kFloat8_E4M3)
                return 2 * cast_from_fp8(low, meta, 0, Float8Format.kFloat8_E4M3, x.dtype)

    module, x = Twice(), torch.rand(4) + 1
    with fp8_autocast(enabled=True):
        module(x)
        assert module.fp8_meta["scaling_fwd"].scale[0] == 1  # the first step of these functions
        module(x)
        scale = module.fp8_meta["scaling_fwd"].scale[0].item()
        assert scale == fp8_bits.scale_of(x.max().item(), 448)
        with prepare_backward(module.fp8_meta):
            pass


@pytest.mark.parametrize("calibrated", [True, False])
def test_compile_and_trace(calibrated: bool) -> None:
    model = prepare_fp8(_net().eval())
    x = torch.randn(4, 32)
    with torch.no_grad():
        if calibrated:
            with fp8_autocast(calibrating=True):
                model(x)
        with fp8_autocast(enabled=True):
            want = model(x)
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            torch.testing.assert_close(compiled(x), want)
            torch.testing.assert_close(compiled(2 * x), model(2 * x))
            traced = torch.jit.trace(copy.deepcopy(model), x)
        assert torch.equal(traced(x), want)  # also where nothing is enabled
        assert torch.equal(torch.jit.freeze(traced)(2 * x), traced(2 * x))
        assert "woq_linear" in str(traced.inlined_graph)
        assert "pack_woq_weight" not in str(traced.inlined_graph)
        torch.testing.assert_close(compiled(x), model(x))  # compiled anew outside the region


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch, where a graph ends
def test_compiled_training() -> None:
    a, b = prepare_fp8(_net()), prepare_fp8(_net())
    b.load_state_dict(a.state_dict())
    compiled = torch.compile(b, backend="aot_eager")
    for i in range(3):
        x = torch.randn(4, 32) * 10.0**i
        with fp8_autocast(enabled=True):
            results = a(x), compiled(x)
        for y in results:
            y.sum().backward()
        torch.testing.assert_close(*results)
    torch.testing.assert_close(a[0].weight.grad, b[0].weight.grad)


def test_compile_without_packed_weight() -> None:
    model = prepare_fp8(_net().eval())
    x = torch.randn(4, 32)
    with torch.no_grad(), fp8_autocast(enabled=True):
        compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x))


def _rank(rank: int, ranks: int) -> tuple[float, float]:
    import torch.distributed as dist

    torch.manual_seed(0)
    layer = FP8Linear(4, 4).train()
    for _ in range(2):
        with fp8_autocast(enabled=True, fp8_group=dist.group.WORLD):
            layer(torch.full((1, 4), 10.0 ** (rank + 1))).mul(10.0**rank).sum().backward()
    with fp8_autocast(calibrating=True, fp8_group=dist.group.WORLD):
        layer(torch.full((1, 4), 3000.0 * rank))
    meta = layer.fp8_meta
    return meta["scaling_fwd"].scale[0].item(), meta["scaling_bwd"].scale[0].item()


def test_ranks_share_scales() -> None:
    want = fp8_bits.scale_of(3000.0, 448), fp8_bits.scale_of(10.0, 57344)
    assert run_ranks(_rank, 2) == [tuple(float(v) for v in want)] * 2
