# SPDX-License-Identifier: Apache-2.0
"""INT8 models to folders and back: equal outputs at every ISA level, and nothing half-written."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import full_after
from torch import nn
from torch.ao.quantization import QConfigMapping

from ipex_core import explain, optimize
from ipex_core.errors import OpArgumentError
from ipex_core.kernels import providers
from ipex_quant import (
    convert,
    default_dynamic_qconfig_mapping,
    default_static_qconfig,
    default_static_qconfig_mapping,
    get_smooth_quant_qconfig_mapping,
    get_weight_only_quant_qconfig_mapping,
    load,
    prepare,
    quantize_linears,
    save,
    woq_qconfig,
)
from ipex_quant.util.safetensors import CheckpointError, ShardWriter

Tensor = torch.Tensor


class Block(nn.Module):
    """A residual block whose sum and activations are in its forward."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.b = nn.Conv2d(channels, channels, 3, padding=1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(nn.functional.relu(self.norm(self.a(x))))
        y += x
        return self.act(y)


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding="valid"), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(2),
        Block(8), nn.Dropout(), Block(8), nn.Flatten(), nn.Linear(8 * 49, 24), nn.GELU(),
        nn.BatchNorm1d(24), nn.Linear(24, 5),
    )  # fmt: skip


class Text(nn.Module):
    def __init__(self, recurrent: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.norm = nn.LayerNorm(32)
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)
        self.again = self.q
        self.lstm = nn.LSTM(32, 32, 2, batch_first=True, bidirectional=True) if recurrent else None
        self.cell = nn.GRUCell(64 if recurrent else 32, 16)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        x = torch.tanh(self.q(x)) * self.again(x) + self.k(x)
        y = self.lstm(x)[0] if self.lstm is not None else x
        return self.head(x) + self.cell(y[0]).sum()  # type: ignore[no-any-return]


X = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(3))
IDS = torch.arange(14).view(2, 7)
#: What is saved: the float model, its input, how it is quantized.
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, Any]] = {
    "static": (images, X, default_static_qconfig_mapping),
    "dynamic": (functools.partial(Text, True), IDS, default_dynamic_qconfig_mapping),
    "smooth": (Text, IDS, get_smooth_quant_qconfig_mapping("auto")),
    "woq": (Text, IDS, get_weight_only_quant_qconfig_mapping()),
}
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")


def make(kind: str, seed: int = 0) -> Any:
    """Return a quantized model with the ties and dtypes of a real one."""
    torch.manual_seed(seed)
    model = CASES[kind][0]().eval()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    with torch.no_grad():
        prepared = prepare(model, CASES[kind][2], CASES[kind][1])
        prepared(CASES[kind][1])
        return convert(prepared)


def leaves(model: nn.Module) -> dict[str, str]:
    return {n: repr(m) for n, m in model.named_modules() if next(m.children(), None) is None}


@quiet
@pytest.mark.parametrize("most", [1 << 30, 3000])
@pytest.mark.parametrize("kind", list(CASES))
@torch.no_grad()
def test_round_trip(kind: str, most: int, tmp_path: Path) -> None:
    model, x = make(kind), CASES[kind][1]
    folder = tmp_path / "m"
    names = save(model, folder, shard_bytes=most)
    assert names and [p.name for p in tmp_path.iterdir()] == ["m"]
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (most == 3000)
    with torch.device("meta"):
        empty = CASES[kind][0]()
    done: list[Any] = []
    for other in (CASES[kind][0](), empty):
        found: Any = load(folder, other, progress=lambda *a: done.append(a))
        assert found is other and not found.training
        assert torch.equal(found(x), model(x))
        assert leaves(found) == leaves(model)
        assert explain(found).rows == explain(model).rows
        if kind != "static":
            assert found.again is found.q and (kind != "smooth" or found.q.norm == "norm")
    assert {name for *_, name in done} == set(names)
    again = tmp_path / "again"
    save(found, again, shard_bytes=most)
    for path in folder.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


@torch.no_grad()
def test_int8_and_weight_only_layers(tmp_path: Path) -> None:
    qconfig = default_static_qconfig
    mapping = QConfigMapping().set_object_type(nn.Conv2d, qconfig)
    torch.manual_seed(0)
    prepared = prepare(images().eval(), mapping, X)
    prepared(X)
    model = convert(prepared)
    quantize_linears(model, woq_qconfig(), progress=False)
    names = save(model, tmp_path / "m")
    assert names[:2] == ("8", "11") and "4.b" not in names[2:] and "0" in names[2:]
    assert torch.equal(load(tmp_path / "m", images())(X), model(X))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_layers_that_stay_float(tmp_path: Path) -> None:
    # A batch norm is folded into INT8 layers only.
    model = nn.Sequential(
        nn.Conv2d(3, 4, 2, padding="same", bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
    ).eval()
    other = nn.Sequential(
        nn.Conv2d(3, 4, 2, padding="same", bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
    )
    prepared = prepare(model, default_static_qconfig_mapping, X)
    prepared(X)
    converted = convert(prepared)
    assert type(converted[0]) is nn.Conv2d and type(converted[1]) is nn.BatchNorm2d
    save(converted, tmp_path / "m")
    assert torch.equal(load(tmp_path / "m", other)(X), converted(X))


@torch.no_grad()
def test_optimized_models(tmp_path: Path) -> None:
    model = make("smooth")
    expected = model(IDS)
    save(optimize(model), tmp_path / "m")
    torch.testing.assert_close(load(tmp_path / "m", Text())(IDS), expected)


def levels() -> list[str]:
    """Return the ISA levels that this machine runs, or the one there is without kernels."""
    providers.load_providers()
    provider = providers.provider_for("cpu")
    return list(provider.isa_available) if provider is not None else [""]


CHILD = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import int8.test_int8_saving as t
torch.set_num_threads(1)
with torch.no_grad():
    for kind, (build, x, _) in t.CASES.items():
        loaded = t.load(f"{sys.argv[2]}/{kind}", build())
        assert torch.equal(loaded(x), t.make(kind)(x)), kind
provider = t.providers.provider_for("cpu")
print("level", provider.current_isa() if provider is not None else "")
"""


@quiet
def test_every_level(tmp_path: Path) -> None:
    for kind in CASES:
        save(make(kind), tmp_path / kind)
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        CHILD,
        str(Path(__file__).parents[1]),
        str(tmp_path),
    ]
    children = {
        level: subprocess.Popen(
            command,
            env={**os.environ, **({"IPEX_CPU_ISA": level} if level else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for level in levels()
    }
    for level, child in children.items():
        out, err = child.communicate()
        assert child.returncode == 0, f"{level}: {err}"
        assert out.split()[-2:] == ["level", level] or (not level and out.split() == ["level"])


@torch.no_grad()
def test_full_disk_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "m"
    old, new = make("static"), make("static", seed=1)
    save(old, folder)
    for fails_at in (1, 4):
        monkeypatch.setattr(ShardWriter, "write", full_after(fails_at))
        with pytest.raises(OSError, match="No space left"):
            save(new, folder)
        monkeypatch.undo()
        assert [p.name for p in tmp_path.iterdir()] == ["m"]
        assert torch.equal(load(folder, images())(X), old(X))
    save(new, folder)
    assert torch.equal(load(folder, images())(X), new(X))


def test_damaged_folders(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save(make("static"), folder)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    for cut in (5, 60, len(data) - 1):
        file.write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match="must be a complete safetensors file, got"):
            load(folder, images())
    file.write_bytes(data)
    config = json.loads((folder / "config.json").read_text())
    about = config["quantization_config"]

    def fails(message: str, model: nn.Module | None = None, **changes: Any) -> None:
        int8 = {**about["int8"], **changes}
        changed = {"quantization_config": {**about, "int8": int8}}
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(OpArgumentError, match=message):
            load(folder, images() if model is None else model)

    fails(
        "int8 must have modules, identity, fused, start, rewritten in quantization_config, got",
        modules=None,
    )
    row = {**about["int8"]["modules"]["0"], "kind": "Int3Conv"}
    fails("kind of 0 must be one of DynamicInt8Linear, .*, got Int3Conv", modules={"0": row})
    row = {k: v for k, v in about["int8"]["modules"]["0"].items() if k != "stride"}
    fails("load: 0 must have what a Int8Conv needs, got KeyError: 'stride'", modules={"0": row})
    row = {**about["int8"]["modules"]["0"], "activation": "softmax"}
    fails("activation must be one of none, relu, relu6, silu, got softmax", modules={"0": row})
    fails("must be as ipex.quantization.save wrote it", fused={"0": ["step"]})
    fails("model must have the modules of the saved one, got none named 77", identity=["77"])
    with pytest.raises(TypeError, match=r"load: model must be a torch.nn.Module or None, got str"):
        load(folder, "model")  # type: ignore[arg-type]

    (folder / "config.json").write_text(
        json.dumps({"quantization_config": {**about, "format": "x"}})
    )
    with pytest.raises(OpArgumentError, match=r"must be a folder that ipex\.quantization"):
        load(folder, images())

    fails("model must have the modules of the saved one, got none named 4", nn.Sequential())
    wider = images()
    wider[0] = nn.Conv2d(3, 8, 5, stride=2)
    fails(r"load: 0 must have shape \[8, 3, 5, 5\], as the model says, got \[8, 3, 3, 3\]", wider)
    more = images()
    more.append(nn.Linear(5, 2))
    fails(r"folder must have all weights of the model, got no 12\.weight", more)
    other = images()

    class Other(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.norm(self.a(x))) + x

    other[6] = Other(8)
    fails(
        "the forward of 6 must be the same as in the saved model, got one of other steps, Other",
        other,
    )

    class Data(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else super().forward(x)

    other[6] = Data(8)
    fails(
        "the forward of 6 must be the same as in the saved model, got one that cannot be traced",
        other,
    )


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.relu(self.conv(x)).mean((2, 3)))


def changed_tensors(folder: Path, target: Path, **changes: Tensor) -> Path:
    """Return a copy of a folder with other tensors; a mapped file must not be overwritten."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    state = load_file(folder / "model.safetensors")
    assert set(changes) <= set(state)
    save_file({**state, **changes}, target / "model.safetensors")
    return target


@pytest.mark.parametrize("name", ["conv", "linear"])
def test_tensors_of_other_sizes(name: str, tmp_path: Path) -> None:
    """oneDNN reads as many scales as there are channels: fewer ended the process."""
    x, folder = torch.randn(2, 3, 8, 8), tmp_path / "m"
    prepared = prepare(Small().eval(), default_static_qconfig_mapping, example_inputs=(x,))
    prepared(x)
    save(convert(prepared), folder)
    rows = 8 if name == "conv" else 16
    nan = torch.ones(rows)
    nan[-1] = float("nan")
    wrong: dict[str, list[Tensor]] = {
        "weight_scale": [torch.ones(0), torch.ones(1), torch.ones(rows // 2), torch.ones(rows, 1)]
    }
    wrong["weight_scale"] += [torch.ones(rows, dtype=torch.int64), torch.ones(rows).double(), nan]
    wrong["bias"] = wrong["weight_scale"]
    for part, values in wrong.items():
        for number, value in enumerate(values):
            place = tmp_path / f"{part}{number}"
            other = changed_tensors(folder, place, **{f"{name}.{part}": value})
            with pytest.raises(OpArgumentError, match=f"{part} must be"):
                load(other, Small())
    shape = (8, 3, 3, 3) if name == "conv" else (16, 8)
    codes = torch.ones(shape, dtype=torch.uint8)
    other = changed_tensors(folder, tmp_path / "codes", **{f"{name}.weight": codes})
    with pytest.raises(OpArgumentError, match="weight must be int8"):
        load(other, Small())


@pytest.mark.parametrize(
    "changes",
    [
        {"stride": [0, 1]},
        {"stride": [1]},
        {"stride": 1},
        {"stride": [1.5, 1]},
        {"stride": [1 << 40, 1]},
        {"padding": [-1, 0]},
        {"dilation": [0, 0]},
        {"groups": 0},
        {"groups": 3},
        {"groups": True},
        {"input": [float("nan"), 0]},
        {"input": [-1.0, 0]},
        {"input": [1.0, 300]},
    ],
)
def test_geometry_and_scales_that_are_none(changes: dict[str, Any], tmp_path: Path) -> None:
    x, folder = torch.randn(2, 3, 8, 8), tmp_path / "m"
    prepared = prepare(Small().eval(), default_static_qconfig_mapping, example_inputs=(x,))
    prepared(x)
    save(convert(prepared), folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["int8"]["modules"]["conv"].update(changes)
    path.write_text(json.dumps(config))
    with pytest.raises(OpArgumentError, match=r"conv must have what a Int8Conv needs, got Value"):
        load(folder, Small())


def test_the_op_checks_what_one_dnn_reads() -> None:
    x, weight = torch.randn(1, 3, 8, 8), torch.ones(8, 3, 3, 3, dtype=torch.int8)
    scale = torch.ones(8)

    def run(
        weight: Tensor, scale: Tensor, bias: Tensor | None, stride: list[int], groups: int = 1
    ) -> Tensor:
        window = (stride, [0, 0], [1, 1])
        tail = (*window, groups, "none", torch.float32, 1.0, 0, None, 1.0, 0)
        y: Tensor = torch.ops.ipex_quant.int8_conv(x, weight, scale, 0.1, 128, bias, *tail)
        return y

    assert run(weight, scale, scale, [1, 1]).shape == (1, 8, 6, 6)
    for arguments, message in (
        ((weight, scale[:2], None, [1, 1]), "weight_scale must be float32"),
        ((weight, scale.double(), None, [1, 1]), "weight_scale must be float32"),
        ((weight, scale, scale[:2], [1, 1]), "bias must be float32"),
        ((weight.int(), scale, None, [1, 1]), "weight must have dtype int8"),
        ((weight.clone(), scale, None, [0, 1]), "stride and dilation must be 2 positive"),
        ((weight.clone(), scale, None, [1, 1], 0), "groups must be a divisor of 8"),
    ):
        with pytest.raises(OpArgumentError, match=message):
            run(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [{"num_layers": 10**30}, {"hidden_size": 1 << 40}, {"input_size": 0}, {"bidirectional": "x"}],
)
def test_recurrent_layers_of_other_sizes(changes: dict[str, Any], tmp_path: Path) -> None:
    """They are made with these sizes, so that no file may name any."""

    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 16), nn.LSTM(16, 512)).eval()

    x, folder = torch.randn(4, 2, 8), tmp_path / "m"
    model = convert(prepare(make(), default_dynamic_qconfig_mapping, example_inputs=(x,)))
    save(model, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    entry = config["quantization_config"]["int8"]["modules"]["1"]
    assert entry["kind"] == "LSTM"
    entry.update(changes)
    path.write_text(json.dumps(config))
    with pytest.raises(OpArgumentError, match="1 must have what a LSTM needs, got ValueError"):
        load(folder, make())
    entry.update({"num_layers": 1, "hidden_size": 512, "input_size": 16, "bidirectional": False})
    path.write_text(json.dumps(config))
    step = torch.tensor([float("nan"), 0], dtype=torch.float64)
    for name, value in (
        ("1.weight_ih_l0_q", step),
        ("1.weight_ih_l0", torch.ones(4, 16, dtype=torch.int8)),
        ("1.bias_ih_l0", torch.ones(4)),
    ):
        other = changed_tensors(folder, tmp_path / name, **{name: value})
        with pytest.raises(OpArgumentError, match="1 must have what a LSTM needs, got ValueError"):
            load(other, make())
