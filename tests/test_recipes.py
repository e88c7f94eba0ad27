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
SPECIFICATION = f"packages/ipex-core/src/ipex_core/ops/{OP}.py"

pytest.importorskip("ipex_core")


def blocks(language: str = "") -> dict[str, str]:
    """Return the files on the page by their titles; with a language, those in it."""
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    found = re.findall(r"```\{code-block\} (\w+)\n:caption: (\S+)\n(.*?)```", text, re.DOTALL)
    titles = [title for _, title, _ in found]
    assert len({*titles}) == len(titles), "two blocks have one title"
    return {title: content for kind, title, content in found if language in ("", kind)}


def commands() -> str:
    """Return the commands on the page."""
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    return "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))


def copied(package: str, folder: Path) -> None:
    """Copy a package, as it is imported here, into a folder."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent
    shutil.copytree(source, folder / package, ignore=shutil.ignore_patterns("__pycache__"))


def place(title: str, folder: Path) -> Path:
    """Return where the file of a title is in a folder with copies of packages."""
    return folder / re.sub(r"^packages/[^/]+/src/", "", title)


def write(title: str, folder: Path) -> None:
    """Write a file of the page into a folder with copies of packages; it must be a new one."""
    path = place(title, folder)
    assert path.parent.is_dir() and not path.exists(), f"{title} is no new file of a folder"
    path.write_text(blocks()[title], encoding="utf-8")


def change(title: str, folder: Path) -> None:
    """Change a file in a folder with copies of packages as the page shows it."""
    path = place(title, folder)
    text = path.read_text(encoding="utf-8")
    for part in re.split(r"^@@\n", blocks("diff")[title], flags=re.MULTILINE):
        lines = part.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert old != new and text.count(old) == 1, f"{title} does not have once:\n{old}"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def example(title: str, folder: Path) -> str:
    """Return code that runs an example of the page in a folder, and fails if it prints something else."""
    (folder / title).write_text(blocks("pycon")[title], encoding="utf-8")
    done = f"doctest.testfile({str(folder / title)!r}, module_relative=False)"
    return f"import doctest; done = {done}; assert done.attempted and not done.failed"


def run(code: str, *path: Path) -> str:
    """Run Python in the first of some folders, with all in front of its path, and return what it prints."""
    places = os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "2"},
        cwd=path[0],
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
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
    # Kernels for the op are not there: the reference runs.
    copied("ipex_core", tmp_path)
    write(SPECIFICATION, tmp_path)
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
    for part in ("csrc/include", "csrc/cpp", "cmake"):
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


def test_add_a_fusion(tmp_path: Path) -> None:
    copied("ipex_core", tmp_path)
    core = "packages/ipex-core"
    for title in (SPECIFICATION, f"{core}/src/ipex_core/fusion/aten/{OP}.py"):
        write(title, tmp_path)
    change(f"{core}/src/ipex_core/fusion/aten/passes.py", tmp_path)
    tests = tmp_path / core / "tests"
    (tests / "compiler").mkdir(parents=True)
    for name in ("compiler/test_compile_linear.py", "compile_checks.py"):
        shutil.copy(ROOT / core / "tests" / name, tests / name)
    change(f"{core}/tests/compiler/test_compile_linear.py", tmp_path)
    case = "test_each_pattern_can_be_disabled"
    assert f'nox -s tests-ipex-core -- -k "{case} and {OP}"' in commands()
    own = f"import compiler.test_compile_linear as t; assert {OP!r} in t.PATTERNS; t.{case}({OP!r})"
    run(f"{example(f'{OP}_fused.txt', tmp_path)}\n{PATTERN_CASES}\n{own}", tmp_path, tests)


#: What the pattern must take and leave, through the checks that the page names.
PATTERN_CASES = """
import torch
from compile_checks import fired, fuse, reasons
from torch.nn import functional as F
once, fused = {"squared_relu": 1}, []
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x = torch.randn(4, 8).to(dtype)
    for plain in (lambda x: F.relu(x) ** 2, lambda x: (lambda y: y * y)(F.relu(x))):
        assert fired(fuse(plain, x)[0]) == once
x = torch.randn(4, 8)
assert not fired(fuse(lambda x: F.relu(x) ** 3, x)[0])
assert not fired(fuse(lambda x: F.relu(x) * x, x)[0])
assert not fired(fuse(lambda x: x * x, x)[0])
assert not fired(fuse(lambda x: F.relu(x) ** 2, x.double())[0])
report, _ = fuse(lambda x: (lambda y: (y * y, y))(F.relu(x)), x)
assert not fired(report) and "has another user" in reasons(report)
report, _ = fuse(lambda x: F.relu(x) ** 2, x, always=False)
assert not fired(report) and reasons(report) == "not measured against Inductor's own code"
"""


def test_add_a_model_structure(tmp_path: Path) -> None:
    for package in ("ipex", "ipex_llm", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if "hardswish" not in importlib.import_module("transformers.activations").ACT2FN:
        pytest.skip("this transformers has no activation hardswish")
    copied("ipex_llm", tmp_path)
    for name in ("arch/formulas.py", "model_runner/feed_forward.py"):
        change(f"packages/ipex-llm/src/ipex_llm/{name}", tmp_path)
    run(example("hardswish_llama.txt", tmp_path), tmp_path)


def test_add_an_engine_to_the_benchmark(tmp_path: Path) -> None:
    for package in ("ipex", "numpy", "typer"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    copied("ipex_bench", tmp_path)
    write("packages/ipex/src/ipex_bench/peers/torchscript.py", tmp_path)
    change("packages/ipex/src/ipex_bench/peers/__init__.py", tmp_path)
    page = tmp_path / "docs" / "tools" / "bench.md"
    page.parent.mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "tools" / "bench.md", page)
    change("docs/tools/bench.md", tmp_path)
    command = re.search(r"^ipex (bench .* torchscript .*)$", commands(), re.MULTILINE)
    assert command is not None
    code = ENGINE_CASES.format(arguments=command[1].split()[1:], folder=str(tmp_path))
    assert run(code, tmp_path).split()[-2:] == ["TorchScript", "float32"]


#: The command of the page as far as its plan, and the work of its engine without the processes around it.
ENGINE_CASES = """
import dataclasses
from typer.testing import CliRunner
from ipex_bench import peers, shapes, torch_work, worker
from ipex_bench.commands import bench, peers as commands
from ipex_bench.task import Task, UnsupportedError
plans = []
commands.run = lambda plan, *_: plans.append(plan)
result = CliRunner().invoke(bench.app, {arguments!r})
assert result.exit_code == 0, result.output
(plan,) = plans
assert plan.engines == ("stock_eager", "torchscript") and plan.names == ("linear",)
worker.ALIAS = "ipex_bench"
for dtype in (plan.dtype, "bfloat16"):
    label, shape = shapes.cases(plan.kind, "linear", plan.size)[0]
    task = Task(plan.kind, "linear", label, shape, dtype, 1, {folder!r})
    torch_work.make(task)
    prepared, fact = worker.prepare(task, "torchscript")
    assert prepared is not None, fact
    prepared.calls["call"]()
    assert fact["precision"] == dtype
try:
    worker.prepare(dataclasses.replace(task, dtype="int8"), "torchscript")
except UnsupportedError:
    print(peers.load("torchscript").title, plan.dtype)
"""
