# SPDX-License-Identifier: Apache-2.0
"""`ipex_core.export`: the file gives what the model gives, in a fresh process; bad input is told before any work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ipex_core
from ipex_core.errors import ExportError
from ipex_core.nn import MergedEmbeddingBag

# torch's own: of tracing, which is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Mlp(nn.Module):
    """Layers with packed weights, one of which the model reads itself too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = self.down(functional.gelu(self.up(self.norm(x)))) * scale
        return x + y + functional.linear(x, self.up.weight).mean()


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, shift: Tensor) -> dict[str, Tensor]:
        y = torch.relu(self.bn(self.conv(x)))
        return {"logits": self.head(y.mean((2, 3))) + shift, "features": y}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


LOAD = """
import sys, torch, ipex_core
model = torch._inductor.aoti_load_package(sys.argv[1])
inputs, wanted = torch.load(sys.argv[2])
for x, y in zip(inputs, wanted):
    torch.testing.assert_close(model(x), y, rtol=2e-2, atol=2e-2)
print("same")
"""


def test_optimized_model_in_another_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ipex_core.optimize(Mlp().eval(), dtype=torch.bfloat16)
    path = tmp_path / "model.pt2"
    path.write_bytes(b"an older file")
    umask = os.umask(0)
    os.umask(umask)
    sizes = [torch.randn(n, 32, dtype=torch.bfloat16) for n in (3, 1, 40)]
    with torch.no_grad():
        wanted = [model(x) for x in sizes]
    batch = torch.export.Dim("batch", min=1, max=64)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    result = ipex_core.export(model, sizes[:1], str(path), dynamic_shapes={"x": {0: batch}})
    assert result == path
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt2"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    # The model is as it was.
    assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        torch.testing.assert_close(model(sizes[1]), wanted[1], rtol=0, atol=0)
    # Plain torch.export still gets plain weights: its programs may run where our ops are not.
    plain = torch.export.export(model, (sizes[0],))
    assert not any("ipex.linear" in str(node.target) for node in plain.graph.nodes)
    torch.save((sizes, wanted), tmp_path / "values.pt")
    command = [sys.executable, "-c", LOAD, str(path), str(tmp_path / "values.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "same\n", done.stderr


def test_stock_model_with_keywords(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Conv().eval()
    inputs = {"x": torch.randn(2, 3, 8, 8), "shift": torch.randn(4)}
    path = ipex_core.export(model, inputs, tmp_path / "model.pt2", options={"freezing": True})
    got = torch._inductor.aoti_load_package(str(path))(**inputs)
    with torch.no_grad():
        wanted = model(**inputs)
    assert list(got) == ["logits", "features"]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*float16")
def test_recurrent_model_in_float16(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ipex_core.optimize(Recurrent().eval(), dtype=torch.float16)
    x = torch.randn(2, 5, 16, dtype=torch.float16)
    path = ipex_core.export(model, x, tmp_path / "model.pt2")
    with torch.no_grad():
        wanted = model(x)
    got = torch._inductor.aoti_load_package(str(path))(x)
    assert got.dtype == wanted.dtype == torch.float16
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-3)


class Tables(nn.Module):
    """Bags that the compile backend would look up in one call, and a module that does."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 16, mode="sum") for _ in range(3))
        self.merged = MergedEmbeddingBag.from_embeddingbag_list(
            [nn.EmbeddingBag(20, 8, mode="mean") for _ in range(2)]
        )

    def forward(self, ids: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
        found = [table(ids, ends).sin() for table in self.tables]
        return *found, *self.merged((ids, ids), (ends, ends))


def test_embedding_bags_of_any_number(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ipex_core.optimize(Tables().eval())
    batch = torch.export.Dim("batch", min=1, max=64)
    sizes = {"ids": {0: torch.export.Dim("ids", min=1, max=64)}, "ends": {0: batch}}

    def make(count: int) -> tuple[Tensor, Tensor]:
        return torch.randint(20, (count,)), torch.arange(0, count, 3)

    path = ipex_core.export(model, make(12), tmp_path / "model.pt2", dynamic_shapes=sizes)
    run = torch._inductor.aoti_load_package(str(path))
    for count in (12, 30):
        given = make(count)
        with torch.no_grad():
            torch.testing.assert_close(tuple(run(*given)), tuple(model(*given)))


# -- bad input ---------------------------------------------------------------------------------------------------------

X = torch.ones(2, 32)


class Inputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, x: Tensor, mask: Tensor, state: Tensor) -> Tensor:
        state.add_(1.0)
        return torch.relu(self.layer(x)) * 2 + mask + x.sum(-1, keepdim=True) + state.sum()


def test_files_check_their_inputs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Wrong dtypes and sizes are told; other strides give the same numbers."""
    torch.manual_seed(0)
    model, batch = Inputs().eval(), torch.export.Dim("batch", min=1, max=64)
    example = {"x": torch.randn(3, 8), "mask": torch.ones(3, 16), "state": torch.ones(4, 2)}
    shapes = {"x": {0: batch}, "mask": {0: batch}, "state": None}
    path = tmp_path / "m.pt2"
    ipex_core.export(model, [*example.values()], path, dynamic_shapes=shapes)
    loaded = torch._inductor.aoti_load_package(str(path))

    def check(x: Tensor, mask: Tensor) -> None:
        states = torch.zeros(4, 2), torch.zeros(4, 2)
        with torch.no_grad():
            torch.testing.assert_close(loaded(x, mask, states[0]), model(x, mask, states[1]))
        assert states[0].eq(1).all()

    for n in (3, 1, 64, 0):
        check(torch.randn(n, 8), torch.randn(n, 16))
    check(torch.randn(8, 5).t(), torch.randn(5, 1).expand(5, 16))
    check(torch.randn(1, 16)[:, ::2], torch.randn(16, 7).t()[:1])
    x, mask, state = example.values()
    for wrong, text in (
        ((x.double(), mask, state), "input x must be float32, got float64"),
        ((x, mask.to(torch.bfloat16), state), "input mask must be float32, got bfloat16"),
        ((x[None], mask, state), "input x must be 2-D, got 3-D"),
        ((x[:, :7], mask, state), r"input x must be of size 8 in dimension 1, got \[3, 7\]"),
        ((x, mask[:2], state), r"input mask must be of size 3 in dimension 0, got \[2, 16\]"),
        ((torch.ones(65, 8), torch.ones(65, 16), state), r"at most 64 in dimension 0, got \[65, 8"),
        ((x, mask, torch.ones(2, 4).t()), r"state must be laid out with strides \[2, 1\]"),
    ):
        with pytest.raises(RuntimeError) as caught:
            loaded(*wrong)
        # torch 2.11 and 2.12 print the reason, and raise an error that names a line of their own.
        assert re.search(f"Inputs: .*{text}", f"{caught.value}{capfd.readouterr().err}")


def test_control_flow_on_data_names_torchs_reason(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(b"an older file")
    with pytest.raises(
        ExportError, match=r"^export: torch.export cannot record the model: .*data"
    ) as caught:
        ipex_core.export(Branch().eval(), X, path)
    assert "Stack" not in str(caught.value) and "\n\n" not in str(caught.value)
    assert caught.value.__cause__ is not None
    assert path.read_bytes() == b"an older file"
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt2"]


def test_language_models_are_told_to_be_restored(tmp_path: Path) -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.neg() if x.sum().item() > 0 else x

    model = nn.Sequential(Layer()).eval()
    with pytest.raises(ExportError) as plain:
        ipex_core.export(model, X, tmp_path / "model.pt2")
    assert "restore" not in str(plain.value)
    Layer.__module__ = "ipex_llm.patch.layer"
    with pytest.raises(
        ExportError, match=r"ipex.llm.optimize has put .* ipex.restore\(model\) first"
    ):
        ipex_core.export(model, X, tmp_path / "model.pt2")


def test_wrong_model(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with pytest.raises(TypeError, match=r"export: model must be a torch.nn.Module, got function"):
        ipex_core.export(lambda x: x, X, path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"evaluation mode \(model.eval\(\)\), got training mode$"):
        ipex_core.export(Mlp(), X, path)
    part = Mlp().eval()
    part.down.train()
    with pytest.raises(ValueError, match="got training mode of 'down'"):
        ipex_core.export(part, X, path)
    traced = torch.jit.trace(nn.Linear(32, 4).eval(), X)
    with pytest.raises(TypeError, match="got a TorchScript module"):
        ipex_core.export(traced, X, path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        (3, TypeError, "example_inputs must be a tensor, a sequence .*, got int"),
        ("x", TypeError, "got str"),
        (
            (),
            ValueError,
            r"must fit the forward of the model, got \(\): missing a required argument: 'x'",
        ),
        ((X, 1.0, X), ValueError, r"got \(float32 \[2, 32\], float, float32 \[2, 32\]\): too many"),
        ({"y": X}, ValueError, "missing a required argument|unexpected keyword"),
        (
            torch.ones(2, 31),
            ValueError,
            r"must be accepted by the model, got \(float32 \[2, 31\]\)",
        ),
        (["text"], ValueError, r"must be accepted by the model, got \(str\)"),
    ],
)
def test_wrong_inputs(inputs: object, error: type[Exception], text: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=text):
        ipex_core.export(Mlp().eval(), inputs, tmp_path / "model.pt2")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_wrong_path(tmp_path: Path) -> None:
    model = Mlp().eval()
    with pytest.raises(ValueError, match=r"export: path must end with .pt2, got 'model.pt'"):
        ipex_core.export(model, X, "model.pt")
    with pytest.raises(TypeError, match="export: path must be a path, got int"):
        ipex_core.export(model, X, 3)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        ipex_core.export(model, X, tmp_path / "none" / "model.pt2")
    folder = tmp_path / "folder.pt2"
    folder.mkdir()
    with pytest.raises(IsADirectoryError, match="export: path must be a file, got the folder"):
        ipex_core.export(model, X, folder)
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    if not os.access(locked, os.W_OK):  # root may write anywhere
        with pytest.raises(PermissionError):
            ipex_core.export(model, X, locked / "model.pt2")


def test_sizes_that_cannot_vary_are_named(tmp_path: Path) -> None:
    size = torch.export.Dim("size", min=1, max=64)
    with pytest.raises(ExportError, match=r"(?s)Constraints violated \(size\).*32"):
        ipex_core.export(Mlp().eval(), X, tmp_path / "m.pt2", dynamic_shapes={"x": {1: size}})


def test_wrong_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown option 'freezin', did you mean freezing"):
        ipex_core.export(Mlp().eval(), X, tmp_path / "m.pt2", options={"freezin": True})
    with pytest.raises(ExportError, match=r"(?s)torch.export cannot record the model: .*'z'"):
        ipex_core.export(Mlp().eval(), X, tmp_path / "m.pt2", dynamic_shapes={"z": {0: 1}})
    assert not list(tmp_path.iterdir())
