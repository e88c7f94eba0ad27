# SPDX-License-Identifier: Apache-2.0
"""What static quantization does with layers other than linear ones and plain convolutions."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.ao.quantization import QConfigMapping
from torch.utils._python_dispatch import TorchDispatchMode

from ipex_core import explain
from ipex_core.nn.embedding import MergedEmbeddingBagWithCat
from ipex_quant import (
    Int8Conv,
    convert,
    default_dynamic_qconfig_mapping,
    default_static_qconfig,
    default_static_qconfig_mapping,
    load,
    prepare,
    save,
)
from ipex_quant.int8.modules import output_rows
from ipex_quant.int8.modules.conv import Int8ConvTranspose
from ipex_quant.int8.modules.embedding import Int8EmbeddingBag
from ipex_quant.int8.modules.pool import Int8AvgPool, Int8MaxPool, Int8Mean

Tensor = torch.Tensor
F = nn.functional
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor"
)


def near(found: Tensor, expected: Tensor, least: float = 0.999) -> bool:
    rows = (t.reshape(1, -1).double() for t in (found, expected))
    return found.shape == expected.shape and F.cosine_similarity(*rows).item() >= least


def quantized(model: nn.Module, *args: Any) -> Any:
    with torch.no_grad():
        prepared = prepare(model, default_static_qconfig_mapping, args)
        prepared(*args)
        return convert(prepared)


def texts(model: nn.Module) -> dict[str, str]:
    return {row.module: row.text for row in explain(model).rows}


SHAPES = [  # kernel, stride, padding, output padding
    (2, 2, 0, 0), (4, 2, 1, 0), (3, 2, 1, 1), (3, 1, 1, 0), (2, 3, 0, 0), (2, 2, 0, 1), (5, 3, 2, 2),
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_transposed(dims: int, groups: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(dims)
    kind = getattr(nn, f"ConvTranspose{dims}d")
    kernel, stride, padding, extra = shape
    first = kind(4, 6, kernel, stride, padding, extra, groups=groups)
    norm = getattr(nn, f"BatchNorm{dims}d")(6)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    middle = [norm] if groups == 1 else []
    model = nn.Sequential(first, *middle, nn.ReLU(), kind(6, 2, 2)).eval()
    x = torch.randn(2, 4, *(5, 4, 3)[:dims])
    found = quantized(model, x)
    assert type(found[0]) is Int8ConvTranspose is type(found[-1])
    assert found(x[:0]).shape == model(x[:0]).shape
    assert found[0].output and found[0].activation == "relu"
    assert found[0](x).value.codes.dtype == torch.uint8
    assert near(found(x), model(x))
    # oneDNN chooses another kernel for the smaller batch on some CPUs: the last bits of the floats differ.
    torch.testing.assert_close(found(x[0]), found(x)[0], rtol=0, atol=1e-6)
    weight = output_rows(model[-1])
    codes = found[-1].int_weight().float() * found[-1].weight_scale[:2].view(-1, 1, *[1] * dims)
    step = weight.abs().amax().item() / 127
    torch.testing.assert_close(codes, weight, rtol=0, atol=step)


@torch.no_grad()
def test_transposed_with_dilation_stays() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 3, 3, dilation=2), nn.Conv2d(3, 2, 1)).eval()
    found = quantized(model, torch.randn(1, 3, 6, 6))
    assert type(found[0]) is nn.ConvTranspose2d
    assert "stays float: its dilation" in texts(found)["0"]


class Functional(nn.Module):
    """Everything is written in the forward of the model itself, as in many a tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.conv3 = nn.Conv2d(8, 8, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(8 * 16, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        y = F.avg_pool2d(self.conv2(x), 3, 1, 1)
        y = F.relu(self.conv3(y).add_(y))
        x = F.avg_pool2d(y, (2, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return self.fc2(x.view(-1, 32))  # type: ignore[no-any-return]


class Annotated(Functional):
    """The forward of `Functional` names types that cannot be imported by name."""

    def forward(self, x: Tensor | None) -> Tensor | None:  # type: ignore[override]
        y = F.relu(self.conv1(x))
        return y + F.relu(self.conv2(y))


@torch.no_grad()
def test_annotations_of_any_kind_and_graphs_of_several_models() -> None:
    x = torch.randn(1, 3, 8, 8)
    for annotation in ("Tensor | None", Tensor | None):
        Annotated.forward.__annotations__["return"] = annotation
        found = quantized(Annotated().eval(), x)
        assert "add_1" in found.__dict__["forward"].source
    # Dynamo counts what it compiles by code object.
    again = quantized(Annotated().eval(), x)
    forwards = [type(each.__dict__["forward"]).__call__ for each in (found, again)]
    assert forwards[0].__code__ is not forwards[1].__code__


@torch.no_grad()
def test_forward_of_the_model_itself(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Functional().eval()
    x = torch.randn(3, 3, 16, 16)
    found = quantized(model, x)
    assert type(found) is Functional and "forward" not in model.__dict__
    assert near(found(x), model(x), 0.998)
    kinds = [type(m) for m in found.modules()]
    assert {Int8MaxPool, Int8AvgPool, Int8Conv} <= set(kinds)
    assert found.conv1.activation == "relu" and found.conv1.output
    assert found.fc1.activation == "relu" and found.fc1.output
    assert kinds.count(nn.ReLU) == 0
    expected = found(x)
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert torch.equal(other(x=x), expected)
        assert other.__dict__["forward"]._module() is other
    save(found, tmp_path / "m")
    assert torch.equal(load(tmp_path / "m", Functional())(x), expected)


@torch.no_grad()
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_pools_on_codes(dims: int) -> None:
    torch.manual_seed(0)

    def kind(name: str) -> Any:
        return getattr(nn, f"{name}{dims}d")

    conv = kind("Conv")
    model = nn.Sequential(
        conv(3, 8, 3), nn.ReLU(), kind("MaxPool")(3, 2, 1), conv(8, 8, 3, padding=1),
        kind("AvgPool")(2), conv(8, 8, 1), kind("AdaptiveAvgPool")(1), nn.Flatten(), nn.Linear(8, 4),
    ).eval()  # fmt: skip
    x = torch.randn(2, 3, *[14] * dims)
    found = quantized(model, x)
    assert type(found[2]) is Int8MaxPool and type(found[6]) is Int8Mean
    assert (type(found[4]) is Int8AvgPool) == (dims < 3)
    assert found[0].output and found[5].output and bool(found[3].output) == (dims < 3)
    assert near(found(x), model(x), 0.997)
    assert found[:7](x).dtype == torch.float32
    first = found[1](found[0](x))
    codes, scale = found[2](first).codes, found[0].output
    assert codes.dtype == torch.uint8
    plain = (first.codes.float() - scale.zero) * scale.scale
    torch.testing.assert_close((codes.float() - scale.zero) * scale.scale, model[2](plain))
    assert torch.equal(found(x[:1])[0], found(x)[0])


@torch.no_grad()
def test_pools_without_a_form_for_codes_stay() -> None:
    pools = (
        nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.AvgPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2, divisor_override=3), nn.AdaptiveAvgPool2d(3), nn.MaxPool2d(2, dilation=2),
        nn.AvgPool2d(3, 1, 1),
    )  # fmt: skip
    x = torch.randn(2, 3, 9, 9)
    for pool in pools:
        model = nn.Sequential(nn.Conv2d(3, 4, 2), pool, nn.Conv2d(4, 2, 1)).eval()
        found = quantized(model, x)
        assert (type(found[1]) is Int8AvgPool) == (pool is pools[-1])
        assert near(found(x), model(x))


@torch.no_grad()
def test_average_of_a_wider_range() -> None:
    # Averages are small where values are large and of both signs: the scale must be that of the values.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.AvgPool2d(4), nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(2, 3, 32, 32)
    found = quantized(model, x)
    values = model[0](x)
    assert found[0].output.scale * 255 > 0.7 * (values.max() - values.min())
    assert near(found(x), model(x), 0.99)


@torch.no_grad()
@pytest.mark.parametrize("dims", [1, 3])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6, nn.SiLU])
def test_activations_after_other_convolutions(dims: int, activation: Any) -> None:
    torch.manual_seed(0)
    conv = getattr(nn, f"Conv{dims}d")
    model = nn.Sequential(conv(3, 8, 3), activation(), conv(8, 4, 1), activation()).eval()
    x = torch.randn(2, 3, *[7] * dims) * 6
    found = quantized(model, x)
    assert found[0].activation != "none" and isinstance(found[1], nn.Identity) and found[0].output
    assert near(found(x), model(x))
    if activation is nn.ReLU6:
        assert found(x).max() <= 6.0 and found(x).min() >= 0.0


class Sum(nn.Module):
    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.a, self.b = conv(4, 4, 3, padding=1), conv(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        return F.relu(self.b(y) + y)


@torch.no_grad()
@pytest.mark.parametrize("dims", [1, 3])
def test_residual_of_other_convolutions(dims: int) -> None:
    torch.manual_seed(0)
    conv = getattr(nn, f"Conv{dims}d")
    model = nn.Sequential(Sum(conv), conv(4, 2, 1)).eval()
    x = torch.randn(2, 4, *[20, 6, 5][:dims])
    found = quantized(model, x)
    added = [m for m in found.modules() if isinstance(m, Int8Conv) and m.residual]
    assert len(added) == 1 and added[0].activation == "relu"
    assert near(found(x), model(x)) and near(found(x[0]), model(x[0]))


class Ranking(nn.Module):
    """Embedding bags and an LSTM between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(100, 16, mode="sum")
        self.open = nn.EmbeddingBag(100, 16, mode="sum", include_last_offset=True)
        self.mean = nn.EmbeddingBag(100, 16, mode="mean")
        self.lstm = nn.LSTM(16, 512, batch_first=True)
        self.small = nn.LSTM(512, 16, batch_first=True)
        self.gru = nn.GRU(16, 16)
        self.head = nn.Linear(48, 4)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        a, b = self.bag(ids.view(-1), offsets), self.mean(ids.view(-1), offsets)
        c = self.open(ids.view(-1), torch.cat([offsets, ids.new_tensor([ids.numel()])]))
        y = self.gru(self.small(self.lstm(a.unsqueeze(1))[0])[0])[0].squeeze(1)
        y = torch.matmul(y, torch.ones(16, 16)) / 16
        return self.head(torch.cat([a, b, c + y], 1))  # type: ignore[no-any-return]


@torch.no_grad()
def test_tables_and_recurrent_layers(tmp_path: Path) -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch has no quantized recurrent layers here")
    torch.manual_seed(0)
    model = Ranking().eval()
    ids = torch.randint(0, 100, (4, 10))
    offsets = torch.arange(0, 40, 10)
    found = quantized(model, ids, offsets)
    assert type(found.bag) is Int8EmbeddingBag is type(found.open)
    assert isinstance(found.lstm, torch.ao.nn.quantized.dynamic.LSTM)
    assert (found.bag.num_embeddings, found.bag.embedding_dim, found.bag.mode) == (100, 16, "sum")
    assert found.bag.weight.shape == (100, 16) and found.bag.weight.dtype == torch.float32
    assert near(found.bag.weight * 1, model.bag.weight)
    assert near(found(ids, offsets), model(ids, offsets))
    assert near(found.bag(ids), model.bag(ids))  # two-dimensional
    weights = torch.rand(40)
    one = (ids.view(-1), offsets, weights)
    assert near(found.bag(*one), model.bag(*one))
    assert found.bag(ids[:0]).shape == (0, 16)
    empty = offsets.clone()
    empty[1:] = 0  # bags without rows
    assert near(found.bag(ids.view(-1), empty), model.bag(ids.view(-1), empty))
    with pytest.raises(ValueError, match="offsets must be given"):
        found.bag(ids.view(-1))
    with pytest.raises(ValueError, match="offsets must be None"):
        found.bag(ids, offsets)
    said = texts(found)
    assert "8-bit rows" in said["bag"] and "no INT8 form of mode 'mean'" in said["mean"]
    assert "no static INT8 form of GRU" in said["gru"] and "uint8" in said["lstm"]
    assert "with hidden_size 16 an LSTM is faster in float" in said["small"]
    assert "products of activations are INT8 if" in said[""]
    save(found, tmp_path / "m")
    assert torch.equal(load(tmp_path / "m", Ranking())(ids, offsets), found(ids, offsets))
    compiled = torch.compile(found.bag, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(ids), found.bag(ids))


class Functions(nn.Module):
    """A function with a weight as argument, in a module of its own and in a module beside layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 16)
        self.kept = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.kept(nn.functional.linear(x, self.weight)))  # type: ignore[no-any-return]


@torch.no_grad()
def test_functions_with_weights_are_reported() -> None:
    mapping = QConfigMapping().set_global(default_static_qconfig).set_module_name("kept", None)
    prepared = prepare(Functions().eval(), mapping, example_inputs=torch.randn(2, 16))
    prepared(torch.randn(2, 16))
    said = texts(convert(prepared))
    assert "its linear: only the module Linear has an INT8 form" in said[""]
    assert "uint8" in said["last"] and "only the module" not in said.get("kept", "")


class Call(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> Any:
        return self.layer(*args)


def one_scale(x: Tensor) -> Tensor:
    """Return what int8 codes with one scale stand for, as IPEX has them for tables and results."""
    step = x.abs().max() / 127.5
    return torch.round(x / step).clamp(-128, 127) * step


@pytest.mark.parametrize("merged", [False, True])
@torch.no_grad()
def test_tables_are_nearer_to_float_than_with_one_scale(merged: bool) -> None:
    """IPEX gives each table, and the result, one scale: its tests compare with that."""
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(50, 24, mode="sum")
    args: tuple[Any, ...] = (torch.randint(0, 50, (32,)), torch.arange(0, 32, 4))
    layer: Any = bag
    if merged:
        layer = MergedEmbeddingBagWithCat.from_embeddingbag_list([bag])
        args = ([args[0]], [args[1]], torch.randn(8, 24))
    other = copy.deepcopy(layer)
    for table in other.parameters():
        table.copy_(one_scale(table))
    rest = (one_scale(args[-1]),) if merged else ()
    coarse = one_scale(other(*args[:2], *rest))
    fine, exact = quantized(Call(layer).eval(), *args)(*args), layer(*args)
    assert (fine - exact).square().mean() < 0.7 * (coarse - exact).square().mean()


@torch.no_grad()
def test_views_pass_codes_on() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 24), nn.Linear(24, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x).reshape(2, 4, 3, 8).permute(0, 2, 1, 3).transpose(1, 2)
            return self.b(y.flatten(2).contiguous()).squeeze(0)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, x = nn.Sequential(Views(), nn.Tanh()).eval(), torch.randn(2, 4, 16)
    found = quantized(model, x)
    assert found[0].a.output and near(found(x), model(x))


@torch.no_grad()
def test_forwards_that_cannot_be_rewritten() -> None:
    class Data(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
            y = F.relu(self.a(x))
            y = F.relu(self.b(y)) if y.mean() > 0 else y
            return y if more is None else y + more

    torch.manual_seed(0)
    model, x = Data().eval(), torch.randn(2, 3, 5, 5)
    found = quantized(model, x)
    assert "forward" not in found.__dict__ and type(found.a) is Int8Conv
    for more, sign in itertools.product((None, torch.ones(1)), (1, -1)):
        assert near(found(sign * x, more), model(sign * x, more), 0.99)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, only: bool = False) -> Tensor:
        y = self.norm(x)
        return self.q(y) if only else torch.tanh(self.q(y)) * self.k(y) + self.v(y) + y  # type: ignore[no-any-return]


class Count(TorchDispatchMode):
    """Counts calls of an op."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name().startswith(self.name)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_layers_that_read_one_activation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(3, 5, 16)
    found = quantized(model, x)
    assert found.q.group is found.k.group is found.v.group is not None
    assert "input quantized once for q, k, v" in texts(found)["k"]
    expected = found(x)  # too small: each layer quantizes
    monkeypatch.setattr("ipex_quant.int8.modules.linear.LEAST", 1)
    save(found, tmp_path / "m")
    for other in (found, copy.deepcopy(found), load(tmp_path / "m", Attention())):
        with Count("ipex::quantize_per_tensor") as counted:
            assert torch.equal(other(x), expected)
        assert counted.count == 1
        assert other.q.group._entry is None  # nothing is kept
        with torch.inference_mode():
            assert torch.equal(other(x), expected)
    # The same tensor with other values, and a layer that was not called the last time.
    y = found.norm(x)
    other = copy.deepcopy(found)
    for values in (y, y * 0.5, y * 0.25):
        y.copy_(values)
        alone = [quantized_alone(layer, y) for layer in (found.q, found.k, found.v)]
        for layers in ((other.q, other.v), (other.v, other.k), (other.k, other.q, other.v)):
            for layer in layers:
                index = [other.q, other.k, other.v].index(layer)
                assert torch.equal(layer(y), alone[index])
        y.mul_(1.0)
    traced = torch.jit.freeze(torch.jit.trace(found, x, check_trace=False))
    assert torch.equal(traced(x), expected) and torch.equal(traced(x * 0.5), found(x * 0.5))
    inductor = {"ipex.program": False}
    compiled = torch.compile(found, backend="ipex", fullgraph=True, options=inductor)
    result, sources = run_and_get_code(compiled, x)
    torch.testing.assert_close(result, expected, atol=0.02, rtol=0)
    torch.compiler.reset()
    program = torch.compile(found, backend="ipex", fullgraph=True)
    torch.testing.assert_close(program(x), expected, atol=0.02, rtol=0)
    assert "\n".join(sources).count("= torch.ops.ipex.quantize_per_tensor") == 1


def quantized_alone(layer: Any, x: Tensor) -> Tensor:
    single = copy.deepcopy(layer)
    single.group = None
    result: Tensor = single(x)
    return result


@torch.no_grad()
def test_packed_sequences_stay_float() -> None:
    """As in IPEX; its test allows an error of 1e-3."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch has no quantized recurrent layers here")

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(32, 512, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            y = self.lstm(packed)[0]
            return nn.utils.rnn.pad_packed_sequence(y, batch_first=True)[0]

    torch.manual_seed(0)
    model, args = Packed().eval(), (torch.randn(2, 5, 32), torch.tensor([5, 3]))
    found = quantized(model, *args)
    assert type(found.lstm) is nn.LSTM and torch.equal(found(*args), model(*args))
    assert "PackedSequence" in texts(found)["lstm"]
    fast = convert(prepare(model, default_dynamic_qconfig_mapping, args))
    assert isinstance(fast.lstm, torch.ao.nn.quantized.dynamic.LSTM)
    assert near(fast(*args), model(*args))
