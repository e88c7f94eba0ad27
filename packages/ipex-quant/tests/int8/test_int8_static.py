# SPDX-License-Identifier: Apache-2.0
"""Static INT8: what is fused, that the result behaves like any module, and bad input."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import QConfig, QConfigMapping
from torch.ao.quantization.observer import MinMaxObserver, PerChannelMinMaxObserver

import ipex_quant
from ipex_core import disable_auto_channels_last, enable_auto_channels_last, explain
from ipex_core.errors import OpArgumentError
from ipex_quant import (
    Int8Conv,
    Int8Linear,
    convert,
    default_dynamic_qconfig_mapping,
    default_static_qconfig,
    default_static_qconfig_mapping,
    get_smooth_quant_qconfig_mapping,
    get_weight_only_quant_qconfig_mapping,
    prepare,
)
from ipex_quant.int8.dataflow import Add

Tensor = torch.Tensor


class Block(nn.Module):
    """Two convolutions and a sum, with one activation module for all."""

    def __init__(self, channels: int, wider: int = 1) -> None:
        super().__init__()
        out = channels * wider
        self.conv1 = nn.Conv2d(channels, out, 3, stride=wider, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(channels, out, 1, stride=wider) if wider > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        other = x if self.down is None else self.down(x)
        y += other
        return self.relu(y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.Sequential(Block(8), Block(8, 2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def images(seed: int = 1) -> Tensor:
    return torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(seed))


def calibrated(model: nn.Module, x: Tensor, **options: Any) -> Any:
    prepared = prepare(model, default_static_qconfig_mapping, x, **options)
    with torch.no_grad():
        prepared(x)
    return prepared


def near(found: Tensor, expected: Tensor, least: float = 0.999) -> bool:
    rows = (t.reshape(1, -1).double() for t in (found, expected))
    return nn.functional.cosine_similarity(*rows).item() >= least


@torch.no_grad()
def test_residual_network(net: nn.Module) -> None:
    x = images()
    prepared = calibrated(net, x)
    torch.testing.assert_close(prepared(x), net(x))
    model = convert(prepared)
    assert near(model(x), net(x))
    kinds = [type(m).__name__ for m in model.modules()]
    assert kinds.count("Int8Conv") == 6
    assert "Conv2d" not in kinds and "BatchNorm2d" not in kinds
    codes = [m for m in model.modules() if isinstance(m, Int8Conv) and m.output]
    assert len(codes) == 6  # of the last the mean is taken, in the forward of the model itself
    assert model.stem[0].activation == "relu"
    assert model.stem(x).codes.dtype == torch.uint8
    assert isinstance(net.stem[0], nn.Conv2d)  # the original stays
    rows = {row.module: row for row in explain(model).rows}
    assert "scale" in rows["stem.0"].text and "stem.2" in rows["stem.0"].text


@torch.no_grad()
def test_sum_written_in_a_forward() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
            self.after = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x)
            y += x
            return self.after(y)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Sum(), nn.Conv2d(4, 2, 1)).eval()
    x = images()
    quantized = convert(calibrated(model, x))
    added = [m for m in quantized.modules() if isinstance(m, Int8Conv) and m.residual]
    assert len(added) == 1 and added[0].activation == "relu" and added[0].output
    assert near(quantized(x), model(x))


@torch.no_grad()
def test_ordinary_module(net: nn.Module) -> None:
    x = images()
    prepared = calibrated(net, x)
    model = convert(pickle.loads(pickle.dumps(prepared)))
    expected = convert(prepared)(x)
    assert torch.equal(model(x), expected)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    other = convert(calibrated(net, images(5) * 3))
    assert not torch.equal(other(x), expected)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), expected)
    assert torch.equal(model.to(torch.bfloat16).float()(x), expected)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_and_compiled(net: nn.Module) -> None:
    x = images()
    model = convert(calibrated(net, x))
    expected = model(x)
    traced = torch.jit.trace(model, x, check_trace=False)
    assert torch.equal(torch.jit.freeze(traced)(x), expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)


@torch.no_grad()
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions(dims: int, groups: int) -> None:
    torch.manual_seed(dims)
    kind = getattr(nn, f"Conv{dims}d")
    model = nn.Sequential(
        kind(4, 8, 3, stride=2, padding=1, groups=groups), nn.ReLU(), kind(8, 6, 2, padding="same"),
        kind(6, 4, 3, padding="same", dilation=2),
    ).eval()  # fmt: skip
    x = torch.randn(2, 4, *[9] * dims)
    quantized = convert(calibrated(model, x))
    assert near(quantized(x), model(x))
    assert near(quantized(x[0]), model(x[0]))
    assert isinstance(quantized[0], Int8Conv) and isinstance(quantized[3], Int8Conv)
    assert isinstance(quantized[2], kind)  # uneven padding
    assert any(row.module == "2" and not row.done for row in explain(quantized).rows)
    compiled = torch.compile(quantized, backend="aot_eager", fullgraph=True)
    assert compiled(x).stride() == quantized(x).stride()


@torch.no_grad()
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_disable_auto_channels_last(dims: int, transposed: bool, tmp_path: Path) -> None:
    torch.manual_seed(dims)
    kind = getattr(nn, f"Conv{'Transpose' * transposed}{dims}d")
    model = nn.Sequential(nn.Conv2d(4, 4, 1) if dims == 2 else nn.Identity(), kind(4, 8, 3)).eval()
    x = torch.randn(2, 4, *[9] * dims)
    last = convert(calibrated(model, x))
    disable_auto_channels_last()
    try:
        plain = convert(calibrated(model, x))
    finally:
        enable_auto_channels_last()
    y = plain(x)
    assert torch.equal(y, last(x))
    assert y.is_contiguous() and not last(x).is_contiguous()
    assert plain(x[0]).is_contiguous()
    assert torch.jit.freeze(torch.jit.trace(plain, x, check_trace=False))(x).is_contiguous()
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    assert compiled(x).stride() == y.stride()
    ipex_quant.save(plain, tmp_path / "saved")
    assert ipex_quant.load(tmp_path / "saved", copy.deepcopy(model))(x).stride() == y.stride()


@torch.no_grad()
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.SiLU])
def test_linear_chain(activation: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(24, 48),
        activation(),
        nn.Dropout(),
        nn.Linear(48, 24),
        nn.Tanh(),
        nn.Linear(24, 5),
    ).eval()
    x = torch.randn(3, 7, 24)
    quantized = convert(calibrated(model, x))
    first, second = quantized[0], quantized[3]
    assert isinstance(first, Int8Linear) and first.output and not second.output
    assert first(x).value.codes.dtype == torch.uint8
    assert isinstance(quantized[1], nn.Identity)
    assert near(quantized(x), model(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert quantized(x).dtype == torch.bfloat16
    assert quantized(x.bfloat16()).dtype == torch.bfloat16  # after codes too


@torch.no_grad()
def test_values_that_others_see_stay_float() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.a(x)
            z = self.b(y)
            return self.c(z) + z.sum(), y

    model = Two().eval()
    x = torch.randn(4, 16)
    quantized = convert(calibrated(model, x))
    assert not any(m.output for m in (quantized.a, quantized.b, quantized.c))
    for found, expected in zip(quantized(x), model(x), strict=True):
        assert near(found, expected)


@torch.no_grad()
def test_layer_called_twice() -> None:
    layer = nn.Linear(16, 16)
    model = nn.Sequential(layer, nn.ReLU(), layer).eval()
    x = torch.randn(4, 16)
    quantized = convert(calibrated(model, x))
    assert quantized[0] is quantized[2] and isinstance(quantized[0], Int8Linear)
    assert near(quantized(x), model(x), 0.99)


class _Sum(nn.Module):
    """A convolution, a sum, ReLU, a convolution."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.first, self.act, self.second = conv(6, 8, 3), nn.ReLU(), conv(8, 4, 1)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.second(self.act(self.first(x) + other))


@torch.no_grad()
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_sums_with_operands_of_other_sizes(dims: int) -> None:
    model, x = _Sum(dims).eval(), torch.randn(3, 6, *[5] * dims)
    full = (8, *[3] * dims)
    ones = [1] * dims
    for shape in ((), (1,), (1, *full), full, (3, 8, *ones), (1, 1, *ones)):
        other = torch.randn(shape)
        prepared = prepare(model, default_static_qconfig_mapping, (x, other))
        prepared(x, other)
        assert near(convert(prepared)(x, other), model(x, other))
    small, other = torch.randn(3, 6, *[3] * dims), torch.randn(3, *full)
    prepared = prepare(model, default_static_qconfig_mapping, (small, other))
    prepared(small, other)
    assert near(convert(prepared)(small, other), model(small, other))
    # The sizes were the same in the example: the sum is fused.
    other = torch.randn(1, *full)
    prepared = prepare(model, default_static_qconfig_mapping, (x[:1], other))
    prepared(x, other)
    found = convert(prepared)
    assert found.first.__class__.__name__ == "Start"
    assert near(found(x, other), model(x, other))


@torch.no_grad()
@pytest.mark.parametrize("lead", [(4,), (3, 5)])
def test_sums_of_linear_layers_with_operands_of_other_sizes(lead: tuple[int, ...]) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x) + other))

    model, x = Sum().eval(), torch.randn(*lead, 6)
    for shape in ((), (1,), (8,), (1, *lead[1:], 8), (*lead, 1), (2, *lead, 8)):
        other = torch.randn(shape)
        prepared = prepare(model, default_static_qconfig_mapping, (x, other))
        prepared(x, other)
        assert near(convert(prepared)(x, other), model(x, other))
    other = torch.randn(1, *lead[1:], 8)  # fused, as the sizes were the same in the example
    prepared = prepare(model, default_static_qconfig_mapping, (x[:1], other))
    prepared(x, other)
    found = convert(prepared)
    assert found.first.__class__.__name__ == "Start"
    assert near(found(x, other), model(x, other))


class _Views(nn.Module):
    """Flattens images with `view`, which wants them in contiguous order."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.conv, self.act, self.linear = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Linear(288, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        y = self.function(self.act(self.conv(x)))
        flat = y.view(y.size(0), -1)
        return self.linear(flat), flat.sum()


@torch.no_grad()
@pytest.mark.parametrize(
    "function", [torch.clone, torch.sigmoid, nn.Identity(), nn.MaxPool2d(3, 1, 1)]
)
def test_views_of_images(function: Any, tmp_path: Path) -> None:
    model = _Views(function).eval()
    for x in (torch.randn(1, 3, 8, 8), torch.randn(2, 3, 8, 8)):
        found = convert(calibrated(model, x))
        y = torch.randn(3, 3, 8, 8)
        assert all(near(a, b) for a, b in zip(found(y), model(y), strict=True))
        assert found.conv.contiguous
        ipex_quant.save(found, tmp_path / f"m{len(x)}")
        again = ipex_quant.load(tmp_path / f"m{len(x)}", copy.deepcopy(model))
        assert torch.equal(again(y)[0], found(y)[0])


@torch.no_grad()
def test_views_that_any_order_has() -> None:
    """A shuffle of channels costs no copy."""

    class Shuffle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(self.conv(x))
            b, c, h, w = y.shape
            y = y.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
            return self.last(y).view(b, 4, h * w)

    found = convert(calibrated(Shuffle().eval(), torch.randn(1, 3, 8, 8)))
    assert not found.conv.contiguous and not found.last.contiguous
    assert found(torch.randn(2, 3, 8, 8)).shape == (2, 4, 36)


class _ByName(nn.Module):
    """Calls its layers with keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.pool, self.up = nn.MaxPool2d(2), nn.ConvTranspose2d(8, 8, 2)
        self.flat, self.ln, self.linear = nn.Flatten(), nn.LayerNorm(128), nn.Linear(128, 16)
        self.rms, self.last = nn.RMSNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(input=self.norm(input=self.conv(input=x)))
        y = self.ln(input=self.flat(input=self.up(input=self.pool(input=y))))
        return self.last(input=self.rms(x=self.linear(input=y)))


@torch.no_grad()
@pytest.mark.parametrize(
    "mapping",
    [
        default_static_qconfig_mapping,
        get_smooth_quant_qconfig_mapping(alpha="auto"),
        default_dynamic_qconfig_mapping,
        get_weight_only_quant_qconfig_mapping(),
    ],
)
def test_layers_called_by_name(mapping: Any) -> None:
    model = _ByName().eval()
    x = torch.randn(2, 3, 8, 8)
    prepared = prepare(model, mapping, example_inputs=x)
    assert torch.allclose(prepared(x), model(x), atol=1e-5)
    found = convert(prepared)
    assert near(found(x), model(x)) and type(found.linear) is not nn.Linear


@torch.no_grad()
def test_other_observers_and_signed_codes() -> None:
    qconfig = QConfig(
        activation=MinMaxObserver.with_args(qscheme=torch.per_tensor_symmetric, dtype=torch.qint8),
        weight=PerChannelMinMaxObserver.with_args(
            dtype=torch.qint8, qscheme=torch.per_channel_symmetric
        ),
    )
    model = nn.Sequential(nn.Linear(16, 32), nn.Conv1d(4, 4, 3), nn.Linear(30, 8)).eval()
    x = torch.randn(2, 4, 16)
    mapping = QConfigMapping().set_global(qconfig).set_module_name("2", None)
    prepared = prepare(model, mapping, x)
    prepared(x)
    quantized = convert(prepared)
    assert quantized[0].input.zero == 128 and isinstance(quantized[2], nn.Linear)
    assert near(quantized(x), model(x))


@torch.no_grad()
def test_summary(net: nn.Module, tmp_path: Path) -> None:
    x, file = images(), tmp_path / "summary.json"
    prepared = calibrated(net, x)
    prepared.save_qconf_summary(qconf_summary=file)
    data = json.loads(file.read_text())
    info = data["stem"]["q_op_infos"]["0"]
    assert info["fqn"] == "stem.0" and info["op_type_is_module"]
    assert info["input_tensor_infos"][0]["inf_dtype"] == "torch.quint8"
    assert info["activation_observer"]["name"] == "HistogramObserver"
    assert " " in data  # the model itself has the head
    other = prepare(net, default_static_qconfig_mapping, x)
    other.load_qconf_summary(str(file))
    assert torch.equal(convert(other)(x), convert(prepared)(x))
    other(x * 4)  # calibrating again wins
    assert not torch.equal(convert(other)(x), convert(prepared)(x))


def as_ipex_writes_it(data: dict[str, Any], kept_in_float: str) -> dict[str, Any]:
    """One group; activations, functions and results before the activation have entries; no codes where it is float."""
    entries = [info for group in data.values() for info in group["q_op_infos"].values()]
    for info in entries:
        (result,) = info["output_tensor_infos"]
        result.update(inf_dtype="torch.float32", scale=[0.5], zero_point=[3])
        if info["fqn"] == kept_in_float:
            info["input_tensor_infos"][0]["force_dtype"] = "torch.float32"
    del entries[-1]["output_tensor_infos"][0]["scale"]
    bare = {**entries[0], "weight_tensor_infos": []}
    relu = {**bare, "op_type": "<class 'torch.nn.modules.activation.ReLU'>", "fqn": "stem.2"}
    add = {**bare, "op_type": "<method 'add'>", "op_type_is_module": False, "fqn": ""}
    ops = dict(enumerate([relu, *entries, add]))
    return {" ": {"q_op_infos": ops, "nonq_op_infos": {}, "layer_output_infos": []}}


@torch.no_grad()
def test_summary_of_ipex(net: nn.Module, tmp_path: Path) -> None:
    x, file = images(), tmp_path / "summary.json"
    prepared = calibrated(net, x)
    prepared.save_qconf_summary(qconf_summary=file)
    data = as_ipex_writes_it(json.loads(file.read_text()), kept_in_float="blocks.0.conv1")
    file.write_text(json.dumps(data))
    other = prepare(net, default_static_qconfig_mapping, x)
    other.load_qconf_summary(file)
    quantized = convert(other)
    assert isinstance(quantized.get_submodule("blocks.0.conv1"), nn.Conv2d)
    assert near(quantized(x), net(x)) and not torch.equal(quantized(x), net(x))


@torch.no_grad()
def test_wrong_summary(net: nn.Module, tmp_path: Path) -> None:
    x, file = images(), tmp_path / "summary.json"
    prepared = calibrated(net, x)
    prepared.save_qconf_summary(file)
    other = prepare(
        nn.Sequential(nn.Linear(8, 8)).eval(), default_static_qconfig_mapping, torch.ones(1, 8)
    )
    with pytest.raises(
        OpArgumentError, match=r"only in the file: blocks\.0\.conv1.*only in the model: 0"
    ):
        other.load_qconf_summary(file)
    data = json.loads(file.read_text())
    entry = data["stem"]["q_op_infos"]["0"]
    entry["weight_tensor_infos"][0]["scale"].pop()
    file.write_text(json.dumps(data))
    with pytest.raises(OpArgumentError, match=r"weight scales of stem.0 must be 1 or 8, got 7"):
        prepared.load_qconf_summary(file)
    entry["weight_tensor_infos"][0]["scale"] = [1.0]
    entry["input_tensor_infos"][0]["zero_point"] = [256]
    file.write_text(json.dumps(data))
    with pytest.raises(
        OpArgumentError, match=r"entry of stem.0 must have scales, .*zero point .* got 256"
    ):
        prepared.load_qconf_summary(file)
    entry["input_tensor_infos"][0]["zero_point"] = [float("inf")]
    file.write_text(json.dumps(data))
    with pytest.raises(OpArgumentError, match=r"entry of stem.0 must have scales, .*OverflowError"):
        prepared.load_qconf_summary(file)
    file.write_text("{}")
    with pytest.raises(OpArgumentError, match=r"must have layers of this model, got none"):
        prepared.load_qconf_summary(file)
    entry["input_tensor_infos"] = []
    file.write_text(json.dumps(data))
    with pytest.raises(OpArgumentError, match=r"entry of stem.0 must have scales"):
        prepared.load_qconf_summary(file)
    file.write_text("[1, 2")
    with pytest.raises(OpArgumentError, match="must be JSON"):
        prepared.load_qconf_summary(file)
    with pytest.raises(OpArgumentError, match="qconf_summary must be a path, got None"):
        prepared.save_qconf_summary(None)
    assert torch.equal(convert(prepared)(x), convert(calibrated(net, x))(x))


@torch.no_grad()
def test_forward_that_reads_the_geometry_of_a_layer() -> None:
    """As MobileNetV2 of transformers, which pads by hand."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 8, (3, 5), stride=2, groups=2)
            self.last = nn.Conv2d(8, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = x = self.conv(self.padded(self.conv, x))
            for _ in range(1 if x.numel() else 0):
                y = self.last(self.padded(self.last, x))
            return x + y

        def padded(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
            rows, columns = conv.kernel_size
            same = x.shape[-1] % conv.stride[1] == 0
            return nn.functional.pad(x, [columns // 2] * 2 + [rows // 2] * 2) if same else x

    model, x = Padded().eval(), torch.randn(2, 4, 8, 8)
    fast = convert(calibrated(model, x))
    assert sum(isinstance(m, Int8Conv) for m in fast.modules()) == 2
    assert fast.conv.in_channels == 4 and fast.conv.out_channels == 8
    torch.testing.assert_close(fast(x), model(x), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("inplace", [False, True])
def test_model_without_layers_to_quantize(inplace: bool) -> None:
    model, x = nn.Sequential(nn.ReLU()), images()
    for mapping in (default_static_qconfig_mapping, default_dynamic_qconfig_mapping):
        with pytest.warns(
            UserWarning, match="no layers that the configuration quantizes, got none"
        ):
            prepared = prepare(model.eval(), mapping, x, inplace=inplace)
        converted = convert(prepared)
        assert torch.equal(converted(x), x.relu())
        said = str(explain(converted))
        assert said.startswith("Sequential: not optimized")
        assert "stays float: it has no layers that the configuration quantizes" in said


@pytest.mark.parametrize("inplace", [False, True])
@torch.no_grad()
def test_model_in_training_mode(net: nn.Module, inplace: bool) -> None:
    x = images()
    want = convert(calibrated(net, x))(x)
    model = copy.deepcopy(net).train()
    with pytest.warns(UserWarning, match="prepared model is in evaluation mode"):
        prepared = prepare(model, default_static_qconfig_mapping, x, inplace=inplace)
    assert not prepared.training and model.training is not inplace
    prepared(x)
    assert torch.equal(convert(prepared)(x), want)


@pytest.mark.parametrize("inplace", [False, True])
@torch.no_grad()
def test_prepare_twice(net: nn.Module, inplace: bool) -> None:
    """The second preparation starts anew: what the first observed has no effect."""
    x = images()
    want = convert(calibrated(net, x))(x)
    first = prepare(copy.deepcopy(net), default_static_qconfig_mapping, x)
    first(100 * x)
    second = prepare(first, default_static_qconfig_mapping, x, inplace=inplace)
    assert (second is first) is inplace
    with pytest.raises(OpArgumentError, match="got no data"):
        convert(second)
    second(x)
    assert torch.equal(convert(second)(x), want)


def test_bad_input(net: nn.Module) -> None:
    x = images()
    for kind in (OpArgumentError, AssertionError):  # the second as in IPEX
        with pytest.raises(kind, match="example_inputs must be given for a static"):
            prepare(net, default_static_qconfig_mapping)
    with pytest.raises(
        OpArgumentError, match=r"must fit the model, got tensors of shapes \[\[2, 5\]\]"
    ):
        prepare(net, default_static_qconfig_mapping, torch.ones(2, 5))
    with pytest.raises(OpArgumentError, match="configure must be a QConfigMapping or a QConfig"):
        prepare(net, {"": 1}, x)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module"):
        prepare("net", default_static_qconfig_mapping, x)  # type: ignore[arg-type]
    with pytest.warns(DeprecationWarning, match="use a QConfigMapping"):
        prepared = prepare(net, default_static_qconfig, x)
    with pytest.raises(OpArgumentError, match=r"must be calibrated.*got no data"):
        convert(prepared)
    with pytest.raises(OpArgumentError, match="must be a result of prepare"):
        convert(net)
    prepared(x[:0])  # an empty batch tells nothing
    with pytest.raises(OpArgumentError, match="got no data"):
        convert(prepared)
    with pytest.raises(OpArgumentError, match=r"stem.0 must get finite inputs, got NaN in run 1"):
        prepared(x * float("nan"))


@torch.no_grad()
def test_layers_without_data_stay_float() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

        def forward(self, x: Tensor, first: bool = True) -> Tensor:
            return self.a(x) if first else self.b(x)

    x = torch.randn(2, 8)
    prepared = prepare(Either().eval(), default_static_qconfig_mapping, (x, False))
    prepared.b[1](x)
    model = convert(prepared)
    assert type(model.b[0]) is nn.Linear and isinstance(model.b[1], Int8Linear)
    left = {row.module: row.text for row in explain(model).rows if not row.done}
    assert "do not reach" in left["a"] and "no calibration data" in left["b.0"]


@torch.no_grad()
def test_check(net: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    x = images()
    model = convert(calibrated(net, x), check=x)
    text = capsys.readouterr().out
    assert "blocks.1.conv2" in text and "the same largest element in" in text
    assert any(note.startswith("check: cosine") for note in explain(model).notes)
    far = calibrated(net, x * 0.02)
    with pytest.warns(UserWarning, match=r"have a cosine of .* below 0.99"):
        convert(far, check=(x,))
    with pytest.raises(OpArgumentError, match="check must be a batch for the model"):
        convert(far, check=torch.ones(3))


def test_names() -> None:
    for name in ("prepare", "convert", "default_static_qconfig", "Int8Linear"):
        assert name in dir(ipex_quant)


@torch.no_grad()
def test_residuals_that_may_be_overwritten() -> None:
    class Sums(nn.Module):
        def __init__(self, late: bool) -> None:
            super().__init__()
            self.late = late
            self.stem, self.a, self.b, self.c, self.d, self.head = (
                nn.Conv2d(4, 4, 3, padding=1) for _ in range(6)
            )
            self.add1, self.add2, self.add3 = Add(), Add(), Add()

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            y = self.add1(self.a(x), x)  # computed from what it adds
            z = self.b(y)
            z = self.add2(self.c(z), y)  # nobody reads y again ...
            return self.head(self.add3(self.d(y), z) if self.late else z)  # ... or somebody does

    for late in (False, True):
        torch.manual_seed(0)
        model, x = Sums(late).eval(), torch.randn(2, 4, 9, 9)
        quantized = convert(calibrated(model, x))
        assert near(quantized(x), model(x))
        first, second = quantized.add1, quantized.add2
        assert isinstance(second, Int8Conv) and second.residual and second.residual_free != late
        assert not getattr(first, "residual_free", False)
        before = quantized(x)
        for module in quantized.modules():
            if isinstance(module, Int8Conv):
                module.residual_free = False
        assert torch.equal(quantized(x), before)
        compiled = torch.compile(convert(calibrated(model, x)), backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), before)
