# SPDX-License-Identifier: Apache-2.0
"""The recipes of `docs/recipes.md`, carried out: their files are taken from the page."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import generate_isa

ROOT = Path(__file__).resolve().parents[1]
KERNELS = Path("packages/ipex-cpu-kernels")
OP = "squared_relu"

pytest.importorskip("ipex_core")


def blocks() -> dict[str, str]:
    """Return the files on the page by their titles."""
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    found = re.findall(r"```\{code-block\} \w+\n:caption: (\S+)\n(.*?)```", text, re.DOTALL)
    return dict(found)


def run(code: str, *path: Path) -> str:
    """Run Python with folders in front of its path, and return what it prints."""
    places = os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "2"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


CONFORMS = """
import torch, ipex_core
from ipex_core import testing
seen = 0
for spec, sample in testing.samples("squared_relu"):
    testing.assert_matches_reference(spec, sample)
    testing.assert_inputs_unchanged(spec, sample)
    seen += 1
x = torch.tensor([-1.0, 2.0], requires_grad=True)
torch.ops.ipex.squared_relu(x).sum().backward()
assert x.grad.tolist() == [0.0, 4.0]
try:
    torch.ops.ipex.squared_relu(torch.ones(2, dtype=torch.int32))
except RuntimeError as error:
    print(seen, error)
"""


def test_add_an_op(tmp_path: Path) -> None:
    import ipex_core

    # A copy of core as it is imported here, with one file more. Kernels for the op are not there: the reference runs.
    source = Path(ipex_core.__file__).parent
    shutil.copytree(source, tmp_path / "ipex_core", ignore=shutil.ignore_patterns("__pycache__"))
    title = f"packages/ipex-core/src/ipex_core/ops/activation/{OP}.py"
    (tmp_path / "ipex_core" / "ops" / f"{OP}.py").write_text(blocks()[title])
    out = run(CONFORMS, tmp_path)
    assert int(out.split()[0]) > 20
    assert "squared_relu: x must have dtype float32, bfloat16, float16, got int32" in out


@pytest.mark.skipif(
    shutil.which("g++") is None or shutil.which("cmake") is None or shutil.which("ninja") is None,
    reason="needs g++, cmake and ninja",
)
def test_add_a_kernel_and_a_level(tmp_path: Path) -> None:
    files = blocks()
    folder = tmp_path / KERNELS
    for part in ("csrc/include", "cmake"):
        shutil.copytree(ROOT / KERNELS / part, folder / part)
    for name in ("CMakeLists.txt",):
        shutil.copy(ROOT / KERNELS / name, folder / name)
    # Only the kernel of the recipe is compiled; the optimizer steps have flags of their own.
    table = folder / "cmake" / "IsaLevels.cmake"
    row = files[str(KERNELS / "cmake" / "IsaLevels.cmake")]
    first = '  "default|0|"\n'
    text = table.read_text()
    assert first in text
    table.write_text(text.replace(first, first + row))
    for title, content in files.items():
        if title.endswith((".cpp", ".h")):
            path = tmp_path / title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    (folder / "cmake" / "Sdk.cmake").write_text("")  # needs the sources of the run time
    build = tmp_path / "build"
    configure = ["cmake", "-S", str(folder), "-B", str(build), "-G", "Ninja"]
    options = [f"-DPython_EXECUTABLE={sys.executable}", "-DIPEX_WERROR=ON"]
    steps = [
        [*configure, *options],
        ["cmake", "--build", str(build), "--target", "ipex_cpu_sse4"],
    ]
    for command in steps:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert '{"sse4", kSse4}' in (build / "isa_levels.inc").read_text()
    check_python_side(table.read_text())
    library = ctypes.CDLL(str(next(build.glob("libipex_cpu_sse4.*"))))
    for dtype, suffix in ((torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.float16, "f16")):
        x = torch.randn(1001).to(dtype)
        x[3] = float("nan")
        y = torch.empty_like(x)
        kernel = library[f"ipex_k_{OP}_{suffix}"]
        kernel(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(1001))
        torch.testing.assert_close(y, x.float().relu().square().to(dtype), equal_nan=True)
    check_glue(folder)


def check_python_side(table: str) -> None:
    """Generate the levels that Python knows from the table with the new rows."""
    with pytest.raises(
        ValueError, match="the level sse4 needs kSse4, which IPEX_ISA_FEATURES does"
    ):
        generate_isa.text(table)
    named = '"kSse4|sse4_1 sse4_2"'
    assert named in (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    scope: dict[str, Any] = {}
    exec(generate_isa.text(f"set(IPEX_ISA_FEATURES\n{named}\n)\n{table}"), scope)
    assert scope["ISA_LEVELS"][:3] == ("default", "sse4", "avx2")
    assert scope["LEVEL_FEATURES"]["sse4"] == ("sse4_1", "sse4_2")


def check_glue(folder: Path) -> None:
    """Compile the file with the checks, without making code."""
    base = Path(torch.__file__).parent
    command = [
        "g++",
        "-std=c++20",
        "-fsyntax-only",
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
        f"-I{ROOT / KERNELS / 'csrc'}",
        f"-I{folder / 'csrc/include'}",
        f"-I{folder / 'csrc/ops'}",
        f"-isystem{base / 'include'}",
        str(folder / "csrc/ops" / OP / f"{OP}.op.cpp"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_add_a_component(tmp_path: Path) -> None:
    if importlib.util.find_spec("ipex") is None:
        pytest.skip("ipex is not installed")
    files = blocks()
    (tmp_path / "ipex_hello.py").write_text(files["ipex_hello.py"])
    # What `pip install` makes of the project file.
    info = tmp_path / "ipex_hello-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ipex-hello\nVersion: 0.1.0\n")
    entries = files["pyproject.toml"].split("\n\n", 1)[1]
    entries = re.sub(r'\[project\.entry-points\."(.*?)"\]', r"[\1]", entries).replace('"', "")
    (info / "entry_points.txt").write_text(entries)
    code = "import ipex, sys; print(ipex.hello.greet()); sys.argv = ['ipex', 'hello', '--name', 'you'];"
    out = run(f"{code} from ipex_cli.app import main; main()", tmp_path)
    lines = out.strip().splitlines()
    assert lines[0].startswith("hello world") and lines[1].startswith("hello you")
