# SPDX-License-Identifier: Apache-2.0
"""Quantized models to folders and back: equal tensors and outputs, and nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import full_after
from torch import nn

from ipex_core.errors import OpArgumentError
from ipex_quant import (
    WeightOnlyQuantizedLinear,
    WoqLowpMode,
    WoqWeightDtype,
    load,
    quantize_linears,
    quantized_names,
    read_checkpoint,
    save,
    woq_qconfig,
)
from ipex_quant.util.safetensors import CheckpointError, ShardWriter, mapped


class Net(nn.Module):
    """Quantized and other layers, a buffer, and tensors that have two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        self.norm = nn.LayerNorm(64)
        self.a = nn.Linear(64, 96)
        self.b = nn.Linear(96, 64, bias=False)
        self.again = self.a
        self.head = nn.Linear(64, 40, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("count", torch.tensor(7))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids))
        return self.head(self.b(self.again(self.b(self.a(x)))) * self.table[1] + self.count)  # type: ignore[no-any-return]


CONFIGS: dict[str, Any] = {
    "int8": woq_qconfig(),
    "int4": woq_qconfig(
        weight_dtype=WoqWeightDtype.INT4, group_size=32, lowp_mode=WoqLowpMode.BF16
    ),
    "int8 mode": woq_qconfig(
        weight_dtype=WoqWeightDtype.INT4, group_size=32, lowp_mode=WoqLowpMode.INT8
    ),
    "nf4": woq_qconfig(weight_dtype=WoqWeightDtype.NF4, group_size=32),
    "fp8": woq_qconfig(weight_dtype=WoqWeightDtype.FP8, lowp_mode=WoqLowpMode.FP16),
    "mxfp4": woq_qconfig(weight_dtype=WoqWeightDtype.MXFP4),
}
IDS = torch.tensor([[1, 2, 39]])


def make(kind: str = "int4", seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net().eval()
    quantize_linears(model, CONFIGS[kind], modules_to_skip=["head"])
    return model


@pytest.mark.parametrize("most", [1 << 30, 4000])
@pytest.mark.parametrize("kind", list(CONFIGS))
@torch.no_grad()
def test_round_trip(kind: str, most: int, tmp_path: Path) -> None:
    model = make(kind)
    model.norm.half()
    model.norm.float()
    folder = tmp_path / "m"
    assert save(model, folder, shard_bytes=most) == ("a", "b")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (most == 4000)
    torch.manual_seed(5)
    with torch.device("meta"):
        empty = Net()
    done: list[Any] = []
    for other in (Net(), empty):
        found: Any = load(str(folder), other, progress=lambda *a: done.append(a))
        assert found is other and not found.training and done[-2:] == [(1, 2, "a"), (2, 2, "b")]
        assert found.again is found.a and found.head.weight is found.embed.weight
        assert type(found.a) is WeightOnlyQuantizedLinear
        assert repr(found.a) == repr(model.a) and found.a.modes == model.a.modes  # type: ignore[comparison-overlap]
        wanted = model.state_dict()
        for key, value in found.state_dict().items():
            assert value.dtype == wanted[key].dtype and torch.equal(
                value.flatten().view(torch.uint8), wanted[key].flatten().view(torch.uint8)
            ), key
        assert torch.equal(found(IDS), model(IDS))


def test_a_reader_of_checkpoints_reads_it(tmp_path: Path) -> None:
    model = make()
    save(model, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    state = mapped(tmp_path / "m" / "model.safetensors")
    assert quantized_names(state) == ["a", "b"]
    for weight in read_checkpoint(state, config):
        layer: Any = model.get_submodule(weight.name)
        assert torch.equal(weight.dequantize(), layer.dequantize())


@torch.no_grad()
def test_dtypes_are_kept(tmp_path: Path) -> None:
    model = make("int8").to(torch.bfloat16)
    save(model, tmp_path / "m")
    found: Any = load(tmp_path / "m", Net())
    assert (
        found.norm.weight.dtype == torch.bfloat16 and found.a.weight.dtype == model.a.weight.dtype
    )
    assert torch.equal(found(IDS), model(IDS))


@torch.no_grad()
def test_models_of_transformers_need_no_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "tie_word_embeddings": True,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    quantize_linears(model, CONFIGS["int4"], modules_to_skip=["lm_head"])
    ids = torch.tensor([[1, 2, 3, 63]])
    expected = model(ids).logits
    folder = tmp_path / "m"
    save(model, folder)
    found: Any = load(folder)
    assert type(found) is type(model) and torch.equal(found(ids).logits, expected)
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert (folder / "generation_config.json").is_file()
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(OpArgumentError, match=r"load: model must be given, since .* does not name"):
        load(folder)
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Foo"]}))
    with pytest.raises(OpArgumentError, match="model must be given, since transformers has no Foo"):
        load(folder)
    # A name from a file is not a way to call anything else.
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["pipeline"]}))
    with pytest.raises(OpArgumentError, match="has no pipeline that is a model"):
        load(folder)


@torch.no_grad()
def test_full_disk_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "m"
    old, new = make(), make(seed=1)
    save(old, folder)
    for fails_at in (1, 5):
        monkeypatch.setattr(ShardWriter, "write", full_after(fails_at))
        with pytest.raises(OSError, match="No space left"):
            save(new, folder)
        monkeypatch.undo()
        assert [p.name for p in tmp_path.iterdir()] == ["m"]
        assert torch.equal(load(folder, Net())(IDS), old(IDS))
        monkeypatch.setattr(ShardWriter, "write", full_after(fails_at))
        with pytest.raises(OSError, match="No space left"):
            save(new, tmp_path / "fresh")
        assert [p.name for p in tmp_path.iterdir()] == ["m"]
    monkeypatch.undo()
    save(new, folder)
    assert torch.equal(load(folder, Net())(IDS), new(IDS))
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_folders_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="folder must be new, empty or one that save wrote"):
        save(make(), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="folder must be new, empty or one that save wrote"):
        save(make(), tmp_path)
    (tmp_path / "empty").mkdir()
    save(make(), tmp_path / "empty")


def test_models_that_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(OpArgumentError, match="save: model must have quantized layers, got Net"):
        save(Net(), tmp_path / "m")
    with pytest.raises(OpArgumentError, match="save: model must be a module, got str"):
        save("model", tmp_path / "m")  # type: ignore[arg-type]
    with pytest.raises(OpArgumentError, match="shard_bytes must be positive, got 0"):
        save(make(), tmp_path / "m", shard_bytes=0)
    model = make()
    model.register_buffer("z", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(OpArgumentError, match="z must have a dtype of safetensors, got"):
        save(model, tmp_path / "m")
    model = make()
    model.norm.to("meta")
    with pytest.raises(OpArgumentError, match=r"norm\.weight must have values"):
        save(model, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_damaged_and_other_folders(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    with pytest.raises(CheckpointError, match=r"must be a model folder, got no config\.json"):
        load(folder, Net())
    save(make(), folder, shard_bytes=4000)
    file = sorted(folder.glob("*.safetensors"))[1]
    data = file.read_bytes()
    for cut in (3, 40, len(data) - 1):
        file.write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match="must be a complete safetensors file, got"):
            load(folder, Net())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    first = next(name for name, row in header.items() if "dtype" in row)
    text = json.dumps({**header, "more": header[first]}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(CheckpointError, match=f"got the same bytes for {first} and more"):
        load(folder, Net())
    file.unlink()
    with pytest.raises(
        CheckpointError, match="must have all shards of its index, got no model-00002"
    ):
        load(folder, Net())
    file.write_bytes(data)
    load(folder, Net())

    config = json.loads((folder / "config.json").read_text())
    about = config["quantization_config"]

    def fails(message: str, model: nn.Module | None = None, **changes: Any) -> None:
        changed = {**config, "quantization_config": {**about, **changes}}
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(OpArgumentError, match=message):
            load(folder, model or Net())

    fails("must be a folder that ipex.quantization.save wrote", format="pack-quantized")
    fails("version of .* must be 1, got 2", version=2)
    fails(r"folder must have the layers of its config\.json, got \['a', 'b'\]", layers={})
    row = {**about["layers"]["a"], "lowp_mode": "FP7"}
    fails("lowp_mode of a must be one of NONE, FP16", layers={**about["layers"], "a": row})
    fails(
        "must have quantized layers of this model only, got b",
        nn.ModuleDict({"a": nn.Linear(64, 96)}),
    )
    larger = Net()
    larger.more = nn.Linear(2, 2)
    fails(r"folder must have all weights of the model, got no more\.weight", larger)
    smaller = Net()
    del smaller.norm
    fails(r"must have a place for all tensors of .*, got \('norm\.bias'|norm\.weight", smaller)
    wider = Net()
    wider.b = nn.Linear(96, 65, bias=False)
    fails(r"b must have shape \[65, 96\], as the model says, got \[64, 96\]", wider)
