# SPDX-License-Identifier: Apache-2.0
"""FP8: numbers against their definition in `fp8_bits`, scales over steps, training, inference, state."""

from __future__ import annotations

import copy
import importlib
import io
import math
from fractions import Fraction

import fp8_bits
import pytest
import torch
from torch import nn

import ipex_core
import ipex_quant
from ipex_core._fp8 import amax, power_of_two_scale, to_fp8
from ipex_quant.fp8 import (
    DelayedScaling,
    Float8Format,
    Format,
    FP8Linear,
    FP8TensorMeta,
    cast_from_fp8,
    cast_to_fp8,
    default_amax_and_scale_update,
    fp8_autocast,
    get_fp8_recipe,
    is_fp8_calibration,
    is_fp8_enabled,
    prepare_backward,
    prepare_fp8,
    update_amax_history,
)

Tensor = torch.Tensor

_BITS = {torch.float8_e4m3fn: fp8_bits.E4M3, torch.float8_e5m2: fp8_bits.E5M2}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _numbers() -> Tensor:
    """Numbers of all magnitudes, ties and their neighbours, too large ones."""
    exact = torch.tensor(
        [float(v) for v in fp8_bits.E4M3.values + fp8_bits.E5M2.values if v], dtype=torch.float32
    )
    ties = (exact[1:] + exact[:-1]) / 2
    inf = torch.tensor(math.inf)
    some = torch.cat([exact, ties, ties.nextafter(inf), ties.nextafter(-inf)])
    some = torch.cat([some, torch.randn(300) * 10.0 ** torch.randint(-7, 6, (300,))])
    return torch.cat([some, -some, torch.zeros(1)])


@pytest.mark.parametrize("dtype", list(_BITS))
@pytest.mark.parametrize("scale", [1.0, 0.125, 64.0])
def test_rounding(dtype: torch.dtype, scale: float) -> None:
    x = _numbers()
    got = to_fp8(x, torch.tensor(scale), dtype).double().tolist()
    want = [float(_BITS[dtype].nearest(float(Fraction(v) * Fraction(scale)))) for v in x.tolist()]
    assert got == want


def test_not_finite() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e30])
    five = to_fp8(x, torch.tensor(1.0), torch.float8_e5m2).float()
    assert five[:2].tolist() == [math.inf, -math.inf] and five[2].isnan() and five[3] == 57344
    four = to_fp8(x, torch.tensor(1.0), torch.float8_e4m3fn).float()
    assert four[:3].isnan().all() and four[3] == 448
    assert amax(x) == 0 and amax(torch.empty(0)) == 0  # nothing to learn from such a step
    assert amax(torch.tensor([1.0, -3.0], dtype=torch.float16)) == 3


@pytest.mark.parametrize("limit", [448, 57344])
def test_scale(limit: int) -> None:
    near = [limit * 2.0**e for e in (-20, -1, 0, 5)]
    largest = torch.tensor([*near, 0.1, 3.0, 1e-30, 1e30])
    both = torch.cat(
        [largest, largest.nextafter(torch.tensor(math.inf)), largest.nextafter(-1 * largest)]
    )
    for margin in (0, 2, -1):
        got = power_of_two_scale(both, torch.ones_like(both), limit, margin)
        assert got.tolist() == [float(fp8_bits.scale_of(v, limit, margin)) for v in both.tolist()]
    odd = torch.tensor([0.0, math.inf, math.nan])
    assert power_of_two_scale(odd, torch.tensor([3.0, 4.0, 5.0]), limit, 0).tolist() == [3, 4, 5]
    tiny = power_of_two_scale(torch.tensor([1e-44]), torch.ones(1), limit, 0)
    assert tiny.isfinite().all() and (1 / tiny > 0).all()


def test_history() -> None:
    history = torch.tensor([[1.0, 20.0], [2.0, 0.0], [400.0, 0.0]])
    new, scale, inverse = default_amax_and_scale_update(history, torch.ones(2), 448, 1, "max")
    assert scale.tolist() == [0.5, 8.0] and torch.equal(inverse, 1 / scale)
    assert new.tolist() == [[0, 0], [400, 0], [1, 20]]
    assert update_amax_history(history[:1]).tolist() == [[0, 0]]
    _, scale, _ = default_amax_and_scale_update(history, torch.ones(2), 448, 0, "most_recent")
    assert scale.tolist() == [256, 16]
    _, scale, _ = default_amax_and_scale_update(history, torch.ones(2), 448, 0, lambda h: h[2])
    assert scale.tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"amax_compute_algo must return a tensor of shape \[2\]"):
        default_amax_and_scale_update(history, torch.ones(2), 448, 0, lambda h: h)


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


def test_nesting() -> None:
    mine = DelayedScaling(margin=3)
    assert not is_fp8_enabled()
    with fp8_autocast(enabled=True, fp8_recipe=mine):
        assert is_fp8_enabled() and get_fp8_recipe() is mine
        with fp8_autocast(enabled=False, calibrating=True):
            assert not is_fp8_enabled() and is_fp8_calibration()
            assert get_fp8_recipe() == DelayedScaling()
        assert is_fp8_enabled() and not is_fp8_calibration() and get_fp8_recipe() is mine
    with pytest.raises(KeyError), fp8_autocast(enabled=True):
        raise KeyError
    assert not is_fp8_enabled()


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
    with pytest.raises(ValueError, match="the extra state must be that of get_extra_state"):
        again[0].set_extra_state(torch.ones(8, dtype=torch.uint8))
    assert again[0].fp8_meta == {"recipe": DelayedScaling()}


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


def test_casts() -> None:
    meta = FP8TensorMeta(3, 2)
    meta.scale[1] = 16.0
    x = torch.randn(5, 7)
    low = cast_to_fp8(x, meta, 1, Float8Format.kFloat8_E5M2)
    assert low.dtype == torch.float8_e5m2 and meta.amax_history[0, 1] == x.abs().max()
    for given in (low, low.view(torch.uint8)):
        back = cast_from_fp8(given, meta, 1, Float8Format.kFloat8_E5M2, torch.float32)
        assert back.tolist() == fp8_bits.rounded(x.tolist(), fp8_bits.E5M2, Fraction(16))
    with pytest.raises(ValueError, match="inp must have dtype"):
        cast_from_fp8(x, meta, 1, Float8Format.kFloat8_E5M2, torch.float32)


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


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: DelayedScaling(margin=0.5), "margin must be an int, got 0.5"),
        (lambda: DelayedScaling(interval=0), "interval must be an int of at least 1, got 0"),
        (lambda: DelayedScaling(amax_history_len=0), "amax_history_len must be an int of at least"),
        (lambda: DelayedScaling(fp8_format="E4M3"), "fp8_format must be a Format"),
        (lambda: DelayedScaling(amax_compute_algo="min"), "amax_compute_algo must be 'max'"),
        (lambda: fp8_autocast(enabled=1).__enter__(), "enabled must be True or False"),
        (lambda: fp8_autocast(fp8_recipe=1).__enter__(), "fp8_recipe must be a DelayedScaling"),
        (lambda: fp8_autocast(device="xpu").__enter__(), "device must be 'cpu'"),
        (lambda: prepare_fp8(3), "m must be a torch.nn.Module"),
        (lambda: prepare_fp8(nn.Linear(1, 1), 3), "optimizer must be a torch.optim.Optimizer"),
        (lambda: prepare_fp8(nn.Linear(1, 1), device="xpu"), "device must be 'cpu'"),
        (lambda: FP8Linear(0, 1), "in_features must be a positive int"),
        (lambda: FP8Linear(1, 1, params_dtype=torch.int8), "params_dtype must be one of float32"),
        (lambda: FP8Linear(2, 2)(torch.ones(2, dtype=torch.int64)), "input must have dtype"),
        (lambda: FP8Linear(2, 2)(torch.ones(3)), r"input must have 2 features .*, got \[3\]"),
    ],
)
def test_bad_input(call: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()  # type: ignore[operator]


def _rank(rank: int, file: str, results: object) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    layer = FP8Linear(4, 4).train()
    for _ in range(2):
        with fp8_autocast(enabled=True, fp8_group=dist.group.WORLD):
            layer(torch.full((1, 4), 10.0 ** (rank + 1))).mul(10.0**rank).sum().backward()
    with fp8_autocast(calibrating=True, fp8_group=dist.group.WORLD):
        layer(torch.full((1, 4), 3000.0 * rank))
    meta = layer.fp8_meta
    results[rank] = meta["scaling_fwd"].scale[0].item(), meta["scaling_bwd"].scale[0].item()  # type: ignore[index]
    dist.destroy_process_group()


def test_ranks_share_scales(tmp_path: object) -> None:
    import torch.multiprocessing as mp

    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_rank, (f"{tmp_path}/store", results), nprocs=2)
        want = fp8_bits.scale_of(3000.0, 448), fp8_bits.scale_of(10.0, 57344)
        assert dict(results) == dict.fromkeys((0, 1), tuple(float(v) for v in want))


@pytest.mark.parametrize("name", ["fp8", "base", "linear", "recipe", "util"])
def test_paths_of_ipex(name: str) -> None:
    wanted = {
        "fp8": ("fp8_autocast", "amax_and_scale_update", "get_fp8_dtype", "get_fp8_device_type"),
        "base": ("Fp8BaseModule", "prepare_backward"),
        "linear": ("FP8Linear",),
        "recipe": ("DelayedScaling", "Format"),
        "util": ("cast_to_fp8", "cast_from_fp8", "convert", "convert_rec", "prepare_fp8"),
    }
    module = importlib.import_module(f"ipex_quant.fp8.{name}")
    for each in wanted[name]:
        assert getattr(module, each).__name__ == each


def test_facade() -> None:
    facade = pytest.importorskip("intel_extension_for_pytorch")
    if not hasattr(facade, "quantization"):
        pytest.skip("ipex-quant is not installed as a component")
    module = importlib.import_module("intel_extension_for_pytorch.quantization.fp8")
    assert module is ipex_quant.fp8 is facade.quantization.fp8
    helper = importlib.import_module("ipex._isa_help")
    assert helper.FP8TensorMeta is FP8TensorMeta and helper.Float8Format is Float8Format
