# SPDX-License-Identifier: Apache-2.0
"""Arguments, knobs and results of `ipex.optimize`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ipex_core.diagnostics.explain import explain
from ipex_core.module_swap.state_dict import state_of
from ipex_core.nn import OptimizedLinear, PackedWeight
from ipex_core.optimization import (
    disable_auto_channels_last,
    enable_auto_channels_last,
    optimize,
    restore,
)
from ipex_core.optimization.passes import prepack

pytestmark = pytest.mark.usefixtures("small_weights_are_packed")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(8, 512)
        self.bn1 = nn.BatchNorm1d(512)

    def forward(self, x):
        x = torch.relu(self.bn(self.conv(x))).mean((2, 3))
        return self.bn1(self.fc(self.drop(x)))

    def extra(self):
        return "mine"


def make():
    torch.manual_seed(0)
    model = Net()
    for norm in (model.bn, model.bn1):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
    return model.eval()


def snapshot(model):
    """Everything about a model that somebody could notice."""
    return [
        (
            name,
            type(module),
            module.training,
            sorted(module.__dict__),
            len(module._forward_hooks),
            len(module._state_dict_hooks),
            len(module._load_state_dict_pre_hooks),
            [
                (n, id(p), p.dtype, p.stride(), p.requires_grad, p.data_ptr(), p.detach().clone())
                for n, p in [*module._parameters.items(), *module._buffers.items()]
                if p is not None
            ],
        )
        for name, module in model.named_modules()
    ]


def same(a, b):
    for left, right in zip(a, b, strict=True):
        assert left[:-1] == right[:-1]
        for p, q in zip(left[-1], right[-1], strict=True):
            assert p[:-1] == q[:-1] and torch.equal(p[-1], q[-1])


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_original_is_untouched_and_class_is_kept(dtype):
    model = make()
    before = snapshot(model)
    result = optimize(model, dtype=dtype)
    same(before, snapshot(model))
    assert result is not model and type(result) is Net and result.extra() == "mine"
    assert [n for n, _ in result.named_modules()] == [n for n, _ in model.named_modules()]
    assert isinstance(result.fc, nn.Linear) and isinstance(result.bn, nn.BatchNorm2d)


def test_inplace_returns_the_same_object():
    model = make()
    assert optimize(model, inplace=True) is model
    assert isinstance(model.fc, OptimizedLinear)


def test_level_o0_returns_an_unchanged_copy():
    model = make()
    disable_auto_channels_last()
    try:
        result = optimize(model, level="O0")
    finally:
        enable_auto_channels_last()
    assert result is not model
    assert not any(state_of(m) for m in result.modules())
    x = torch.randn(2, 3, 9, 9)
    assert torch.equal(result(x), model(x))
    assert explain(result).optimized


def test_level_o0_with_a_knob():
    result = optimize(make(), level="O0", replace_dropout_with_identity=True)
    assert type(result.drop) is not nn.Dropout and type(result.fc) is nn.Linear


KNOBS = {
    "conv_bn_folding": "bn",
    "linear_bn_folding": "bn1",
    "replace_dropout_with_identity": "drop",
}


@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("on", [True, False])
def test_knob(knob, on):
    model = make()
    x = torch.randn(3, 3, 9, 9)
    result = optimize(model, **{knob: on})
    stock = type(model.get_submodule(KNOBS[knob]))
    assert (type(result.get_submodule(KNOBS[knob])) is not stock) == on
    torch.testing.assert_close(result(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("on", [True, False])
def test_weights_prepack(on, monkeypatch):
    always = prepack.LinearChoice("mkldnn", "always")
    monkeypatch.setattr(prepack, "measure_conv", lambda *_: always)
    result = optimize(make(), weights_prepack=on, sample_input=torch.randn(2, 3, 9, 9))
    assert isinstance(result.fc.weight, PackedWeight) == on
    assert isinstance(result.conv.weight, PackedWeight) == on


@pytest.mark.parametrize("on", [True, False])
def test_optimize_lstm(on):
    model = nn.Sequential(nn.LSTM(8, 16, 2, batch_first=True)).eval()
    x = torch.randn(2, 5, 8)
    result = optimize(model, optimize_lstm=on)
    assert (type(result[0]) is not nn.LSTM) == on
    torch.testing.assert_close(result(x), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_recurrent_layers_take_float32_input(dtype):
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        torch.manual_seed(0)
        model = nn.Sequential(kind(8, 16)).eval()
        x = torch.randn(5, 2, 8)
        with torch.no_grad():
            got, want = optimize(model, dtype=dtype)(x)[0], model(x)[0]
        torch.testing.assert_close(got.float(), want, rtol=0.05, atol=0.05)


def test_float32_buffers_in_products():
    """What the page on troubleshooting says of them."""

    class Decay(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.register_buffer("decay", torch.rand(8, 8))

        def forward(self, x):
            y = self.fc(x)
            return (y * self.decay) @ y

    x = torch.randn(8, 8)
    stock = Decay().eval()
    model = optimize(stock, dtype=torch.bfloat16)
    assert model.decay.dtype == torch.float32
    with torch.no_grad(), pytest.raises(RuntimeError, match="to have the same dtype"):
        model(x)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(model(x).float(), stock(x).float(), rtol=0.05, atol=0.05)
    model.decay = model.decay.bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(model(x).float(), stock(x), rtol=0.05, atol=0.05)


_SIGNALS = [
    dict(kernel_size=3, padding=1),
    dict(kernel_size=5, stride=2, dilation=2, bias=False),
    dict(kernel_size=3, groups=4, padding=2, padding_mode="reflect"),
    dict(kernel_size=5, padding="same", groups=2),
    dict(kernel_size=3, padding="valid", padding_mode="circular"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kwargs", _SIGNALS, ids=range(len(_SIGNALS)))
def test_sequences_run_channels_last(kwargs, dtype):
    stock = torch.nn.Conv1d(8, 12, **kwargs).eval()
    made = optimize(stock, dtype=dtype)
    assert made.weight.mT.is_contiguous() and not stock.weight.mT.is_contiguous()
    limit = dict(rtol=1e-5, atol=1e-5) if dtype is torch.float32 else dict(rtol=3e-2, atol=3e-2)
    for x in (torch.randn(3, 8, 21), torch.randn(1, 8, 9), torch.randn(2, 21, 8).mT):
        with torch.no_grad():
            y = made(x)
            torch.testing.assert_close(y.float(), stock(x), **limit)
            assert y.dtype is dtype and y.mT.is_contiguous()
            torch.testing.assert_close(made(x[0]).float(), stock(x[0]), **limit)  # no batch
            traced = torch.jit.trace(made, x, check_trace=False)
            torch.testing.assert_close(traced(x).float(), stock(x), **limit)
    x = torch.randn(2, 8, 15, requires_grad=True)
    (grad,) = torch.autograd.grad(made(x).float().square().sum(), x)
    (expected,) = torch.autograd.grad(stock(x).square().sum(), x)
    torch.testing.assert_close(
        grad, expected, rtol=5e-2, atol=0.3 if dtype is torch.bfloat16 else 1e-4
    )


def test_channels_last_flag():
    on = optimize(make(), weights_prepack=False)
    assert on.conv.weight.is_contiguous(memory_format=torch.channels_last)
    disable_auto_channels_last()
    try:
        off = optimize(make(), weights_prepack=False)
    finally:
        enable_auto_channels_last()
    assert off.conv.weight.is_contiguous()
    x = torch.randn(2, 3, 9, 9)
    torch.testing.assert_close(on(x), off(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "sample", [torch.randn(2, 3, 9, 9), (torch.randn(2, 3, 9, 9),), {"x": torch.randn(2, 3, 9, 9)}]
)
def test_sample_input(sample):
    result = optimize(make(), sample_input=sample)
    assert any("2 rows" in r.text for r in explain(result).for_module("fc"))
    assert not any(m._forward_pre_hooks for m in result.modules())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_sample_input_that_becomes_nested():
    """Torch's encoder gives its layers texts without their padding, as nested tensors, which have no shape."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    result = optimize(model, sample_input=(x, None, padding))
    with torch.no_grad():
        expected = model(x, None, padding)
        torch.testing.assert_close(result(x, None, padding), expected)


def test_auto_kernel_selection_measures():
    result = optimize(make(), auto_kernel_selection=True, sample_input=torch.randn(2, 3, 9, 9))
    assert any("measured at 2 rows" in r.text for r in explain(result).for_module("fc"))


def test_graph_mode():
    model = make()
    x = torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        result = optimize(model, graph_mode=True)
        assert type(result) is Net
        torch.testing.assert_close(result(x), model(x), rtol=1e-4, atol=1e-4)
        restore(result)
        assert result._compiled_call_impl is None
        assert torch.equal(result(x), model(x))


@pytest.mark.parametrize("level", ["O2", "o1", None, 1])
def test_bad_level(level):
    with pytest.raises(RuntimeError, match="level must be one of 'O0', 'O1'") as error:
        optimize(make(), level=level)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.complex64])
def test_unknown_dtype(dtype):
    with pytest.raises(ValueError, match="dtype must be one of"):
        optimize(make(), dtype=dtype)


def test_dtype_of_wrong_type():
    with pytest.raises(TypeError, match="dtype must be a torch"):
        optimize(make(), dtype="bfloat16")


@pytest.mark.parametrize(
    "knob", ["conv_bn_folding", "weights_prepack", "concat_linear", "graph_mode", "inplace"]
)
def test_knob_of_wrong_type(knob):
    with pytest.raises(TypeError, match=knob):
        optimize(make(), **{knob: "yes"})


def test_bad_models():
    for bad in (None, 3, lambda x: x):
        with pytest.raises(AttributeError) as error:
            optimize(bad)
        assert isinstance(error.value, TypeError)
    with pytest.raises(TypeError, match="sample_input"):
        optimize(make(), sample_input=3)
    with pytest.raises(TypeError, match="optimizer"):
        optimize(make().train(), optimizer=3)


def test_modes_must_fit():
    model = make()
    with pytest.raises(
        AssertionError, match=r"optimizer, got training mode: call model\.eval"
    ) as error:
        optimize(model.train())
    assert isinstance(error.value, ValueError)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AssertionError, match=r"optimizer, got inference mode: call model\.train"):
        optimize(model.eval(), optimizer=sgd)


def test_training_with_an_optimizer():
    model = make().train()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    result, optimizer = optimize(model, optimizer=sgd)
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert result is not model and held == {id(p) for p in result.parameters()}
    assert result.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.conv.weight.is_contiguous()
    same_model, same_optimizer = optimize(model, optimizer=sgd, inplace=True)
    assert same_model is model and same_optimizer is sgd


def test_script_module_is_returned():
    script = torch.jit.script(nn.Linear(4, 4).eval())
    assert optimize(script) is script


def test_a_model_that_cannot_be_copied():
    class Odd(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("no")

    with pytest.raises(TypeError, match="inplace=True"):
        optimize(Odd(3, 3).eval())


def test_second_call_with_the_same_options_changes_nothing():
    x = torch.randn(2, 3, 9, 9)
    first = optimize(make(), dtype=torch.bfloat16)
    packed = first.fc._packed
    again = optimize(first, dtype=torch.bfloat16, inplace=True)
    assert again is first and again.fc._packed is packed
    with torch.no_grad():
        assert torch.equal(optimize(first, dtype=torch.bfloat16)(x), first(x))


def test_second_call_with_other_options_starts_from_the_original():
    model = make()
    first = optimize(model)
    second = optimize(first, dtype=torch.bfloat16)
    assert second.fc.weight.dtype == torch.bfloat16 and first.fc.weight.dtype == torch.float32
    for p, q in zip(restore(second).parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_part_that_was_optimized_before_is_left_alone():
    inner = optimize(nn.Sequential(nn.Linear(64, 64), nn.ReLU()).eval())
    model = nn.Sequential(inner, nn.Linear(64, 64)).eval()
    result = optimize(model)
    rows = explain(result).for_module("0.0")
    assert [r.text for r in rows] == ["already optimized by an earlier call"]
    x = torch.randn(3, 64)
    torch.testing.assert_close(result(x), model(x))
    restore(result)
    assert type(result[0][0]) is nn.Linear and type(result[1]) is nn.Linear


def test_restore_of_a_model_that_is_not_optimized():
    with pytest.raises(ValueError, match="got a Net that is not optimized"):
        restore(make())
    with pytest.raises(TypeError):
        restore(3)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_explain_names_layers_that_no_pass_is_for(dtype):
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(1), nn.GRU(48, 5))
    model.append(nn.MultiheadAttention(5, 1)).append(nn.Conv2d(3, 4, 3)).append(nn.Linear(5, 4))
    found = explain(optimize(model.eval(), dtype=dtype))
    left = "1 GRU, 1 GroupNorm, 1 MultiheadAttention"
    assert f"stock PyTorch computes what no pass is for: {left}" in found.notes
    assert not any("no pass" in note for note in explain(optimize(make())).notes)


def test_explain():
    model = make()
    before = explain(model)
    assert not before.optimized and "1 Linear" in str(before)
    assert "eval()" in str(explain(copy.deepcopy(model).train()))
    assert "nothing to offer" in str(explain(nn.Identity()))
    assert "1 Softmax" in str(explain(nn.Softmax(-1)))
    after = explain(optimize(model, dtype=torch.bfloat16))
    text = str(after)
    assert "folded into conv" in text and (
        "mkldnn::_linear_pointwise" in text or "ipex::linear" in text
    )
    as_dict = after.to_dict()
    assert (
        as_dict["optimized"]
        and as_dict["dtype"] == "bfloat16"
        and len(as_dict["rows"]) == len(after.rows)
    )
    assert after.extra_bytes > 0
    with pytest.raises(TypeError):
        explain("model")


def test_parts_are_named_by_explain():
    model = nn.Sequential(optimize(nn.Sequential(nn.Linear(64, 64)).eval()))
    assert "parts of it are optimized: 0" in str(explain(model))
