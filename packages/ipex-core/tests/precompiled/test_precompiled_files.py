# SPDX-License-Identifier: Apache-2.0
"""Files of precompiled models: what is written is what runs, and damaged files are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

from ipex_core import load_precompiled, precompile
from ipex_core.errors import ExportError, MissingComponentError
from ipex_core.precompiled import files

safetensors = pytest.importorskip("safetensors.torch")


class Mixed(nn.Module):
    """Programs, calls of torch, sizes that vary, fixed values and a constant as a result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)
        self.register_buffer("table", torch.arange(4.0).to(torch.bfloat16))

    def forward(self, x: Tensor, kind: str = "sum", *, shift: Tensor) -> dict[str, Any]:
        y = functional.gelu(self.layer(x)).cumsum(0)
        z = torch.full((x.shape[0], 2), float("-inf")).to(torch.float16)
        return {"y": y * x.shape[0] + shift, "z": [z, self.table], "kind": kind}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Mixed().eval()


@pytest.fixture
def path(tmp_path: Path, model: nn.Module) -> Path:
    given = {"x": torch.randn(3, 8), "shift": torch.ones(16)}
    shapes = {"x": {0: Dim("rows", min=1, max=64)}, "shift": None}
    fast = precompile(model, given, shapes)
    return fast.save(tmp_path / "model.safetensors")


def test_a_loaded_model_is_the_saved_one(model: nn.Module, path: Path) -> None:
    fast = load_precompiled(path)
    assert fast.name == "Mixed"
    assert fast.report is None
    for rows in (3, 1, 20):
        x, shift = torch.randn(rows, 8), torch.randn(16)
        with torch.no_grad():
            want, got = model(x, shift=shift), fast(x=x, shift=shift)
        torch.testing.assert_close(got["y"], want["y"], rtol=1e-5, atol=1e-4)
        assert torch.equal(got["z"][0], want["z"][0])
        assert torch.equal(got["z"][1], want["z"][1])
        assert got["kind"] == "sum"
    with pytest.raises(ValueError, match="Mixed: input x must have size 0 to 64 in dimension 0"):
        fast(x=torch.randn(65, 8), shift=shift)


def test_a_loaded_model_can_be_saved(path: Path, tmp_path: Path) -> None:
    again = load_precompiled(load_precompiled(path).save(tmp_path / "again.safetensors"))
    x, shift = torch.randn(3, 8), torch.randn(16)
    assert torch.equal(again(x=x, shift=shift)["y"], load_precompiled(path)(x=x, shift=shift)["y"])


def test_another_process_needs_no_code_of_the_model(path: Path) -> None:
    code = (
        "import sys, torch, ipex_core; fast = ipex_core.load_precompiled(sys.argv[1]);"
        "y = fast(x=torch.ones(2, 8), shift=torch.ones(16))['y']; print(*y.shape, y.isfinite().all().item())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["2", "16", "True"]


def test_one_weight_is_written_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 64)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            return self.table(ids), self.table(ids + 1)

    target = precompile(Tied().eval(), torch.zeros(3, dtype=torch.int64)).save(
        tmp_path / "tied.safetensors"
    )
    assert target.stat().st_size < 1.1 * 1000 * 64 * 4


# --- bad files --------------------------------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[dict[str, Any]], None], seal: bool = True) -> None:
    """Change the JSON of a file, with a new digest or the old one."""
    with safetensors.safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    document = json.loads(metadata["ipex.precompiled"])
    change(document)
    metadata["ipex.precompiled"] = text = json.dumps(document)
    if seal:
        metadata["ipex.digest"] = files._digest(text, tensors)
    safetensors.save_file(tensors, path, metadata=metadata)


def refused(path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=f"^load_precompiled: '.*' must be {text}"):
        load_precompiled(path)


@pytest.mark.parametrize("place", [0.999, 0.5, 0.2])
def test_a_flipped_bit_is_seen(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 4
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"^load_precompiled: "):
        load_precompiled(path)


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_file_that_is_cut_is_refused(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])
    refused(path, "a complete safetensors file")


def test_other_files_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    safetensors.save_file({"x": torch.ones(2)}, other)
    refused(other, "written by Precompiled.save, got a safetensors file without a program")
    with pytest.raises(FileNotFoundError):
        load_precompiled(tmp_path / "missing.safetensors")
    with pytest.raises(TypeError, match="load_precompiled: path must be a path, got int"):
        load_precompiled(3)


def test_other_contents_are_refused(path: Path) -> None:
    rewrite(path, lambda document: document.update(name="Other"), seal=False)
    refused(path, "as Precompiled.save wrote it, got other contents")


@pytest.mark.parametrize(("key", "text"), [("kernel_api", "kernel API 1"), ("format", "format 1")])
def test_other_versions_are_refused(path: Path, key: str, text: str) -> None:
    rewrite(path, lambda document: document.update({key: 7}))
    refused(path, f"of {text}, which ipex-core .* reads, got 7")


def _op(name: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        step = next(step for step in document["plan"]["steps"] if "call" in step)
        step["call"] = name

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_op("aten::from_file."), "got one where an op must compute and do nothing else, got"),
        (_op("aten::add_.Tensor"), "got one where an op must compute and do nothing else, got"),
        (_op("os::system."), "got one where an op must be of aten, "),
        (_op("aten::no_such_op."), "got one where "),
        (lambda document: document["plan"].pop("steps"), "got one where 'steps'"),
        (lambda document: document.update(in_spec="[1]"), "got one where "),
    ],
)
def test_programs_that_cannot_be_built_are_refused(
    path: Path, change: Callable[[dict[str, Any]], None], text: str
) -> None:
    rewrite(path, change)
    refused(path, f"a program that can be built, {text}")


def test_instructions_of_a_file_are_checked(path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        step = next(step for step in document["plan"]["steps"] if "run" in step)
        step["run"]["instructions"][0][0] = "no_such_op"

    rewrite(path, change)
    refused(
        path,
        "a program that can be built, got one where ProgramBuilder.call: no op is named 'no_such_op'",
    )


# --- writing ----------------------------------------------------------------------------------------------------------


def test_paths_are_checked(path: Path, tmp_path: Path) -> None:
    fast = load_precompiled(path)
    with pytest.raises(ValueError, match=r"Precompiled.save: path must end with .safetensors, got"):
        fast.save(tmp_path / "model.bin")
    with pytest.raises(TypeError, match=r"Precompiled.save: path must be a path, got NoneType"):
        fast.save(None)
    with pytest.raises(FileNotFoundError):
        fast.save(tmp_path / "no" / "model.safetensors")


def test_a_file_that_cannot_be_completed_leaves_the_old_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    fast = load_precompiled(path)
    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        fast.save(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_without_safetensors_the_error_tells_what_to_install(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingComponentError, match="pip install safetensors"):
        load_precompiled(path)


class Checked(nn.Module):
    """Checks values, as models of transformers do under torch.export."""

    def __init__(self, negated: bool) -> None:
        super().__init__()
        self.negated = negated

    def forward(self, x: Tensor) -> Tensor:
        if self.negated:
            torch._check(torch.sym_not((x <= 0).any().item()))
        else:
            torch._check_tensor_all(x > 0)
        return x * 2


def test_checks_of_values_are_kept(tmp_path: Path) -> None:
    fast = precompile(Checked(negated=False).eval(), torch.ones(3))
    for one in (fast, load_precompiled(fast.save(tmp_path / "checked.safetensors"))):
        assert torch.equal(one(torch.ones(3)), torch.full((3,), 2.0))
        with pytest.raises(RuntimeError, match="the inputs fail a check of the model"):
            one(torch.tensor([1.0, -1.0, 1.0]))
    with pytest.raises(ExportError, match="must not depend on values of its tensors"):
        precompile(Checked(negated=True).eval(), torch.ones(3))
