# SPDX-License-Identifier: Apache-2.0
"""A package that was installed with ``pip install --no-deps`` says in one line what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: (modules that are there, code, what the last line of the error must have)
CASES = {
    "ipex-core": (["ipex_core"], "import ipex_core", "pip install 'torch>=2.11'"),
    "ipex-cpu-kernels": (
        ["ipex_cpu_kernels"],
        "import ipex_cpu_kernels",
        "ipex-cpu-kernels needs ipex-core, which is not installed: pip install ipex-core",
    ),
    "ipex-quant": (["ipex_quant"], "import ipex_quant", "pip install ipex-core"),
    "ipex-llm": (
        ["ipex_llm"],
        "import ipex_llm",
        "pip install ipex-core ipex-quant transformers",
    ),
    "ipex": (["ipex", "ipex_cli"], "import ipex", "pip install ipex-core"),
    "alias": (
        ["ipex", "ipex_cli", "intel_extension_for_pytorch"],
        "import intel_extension_for_pytorch",
        "pip install ipex-core",
    ),
    "command": (
        ["ipex_cli"],
        "sys.argv = ['ipex', '--help']; import ipex_cli.app",
        "pip install rich typer",
    ),
    "ipex-runtime": (
        ["ipex_runtime"],
        "import ipex_runtime; ipex_runtime.MultiStreamModule",
        "ipex_runtime.MultiStreamModule needs torch, which is not installed: pip install torch",
    ),
    "ipex-xpu-kernels": (
        ["ipex_xpu_kernels"],
        # Importing it must not fail: torch does so, and would not import.
        "import ipex_xpu_kernels; ipex_xpu_kernels.state()",
        "pip install torch ipex-core",
    ),
}
#: Hides core in an environment that has it, for what needs packages of others.
HIDE_CORE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ipex_core":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
"""


def alone(folder: Path, modules: list[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that has the standard library and these modules only."""
    for name in modules:
        (source,) = ROOT.glob(f"packages/*/src/{name}")
        (folder / name).symlink_to(source)
    start = f"import sys; sys.path.insert(0, {str(folder)!r}); sys.dont_write_bytecode = True\n"
    command = [sys.executable, "-S", "-I", "-c", start + code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("case", CASES)
def test_the_error_names_what_to_install(case: str, tmp_path: Path) -> None:
    modules, code, expected = CASES[case]
    done = alone(tmp_path, modules, code)
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ")
    assert last.endswith(expected), last


def test_what_needs_no_sibling_works_alone(tmp_path: Path) -> None:
    code = "import ipex_runtime; assert ipex_runtime.CPUPool([0]).core_ids"
    done = alone(tmp_path, ["ipex_runtime"], code)
    assert done.returncode == 0, done.stderr


def test_the_doctor_without_core_says_so_and_writes_its_report(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    code = (
        f"sys.argv = ['ipex', 'doctor', '--report', {str(report)!r}]\n"
        "from ipex_cli.app import main; main()"
    )
    command = [sys.executable, "-c", HIDE_CORE + code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "ipex-core cannot be imported" in done.stderr
    assert "Traceback" not in done.stderr
    assert f"wrote {report}" in done.stderr
    assert "ipex-core cannot be imported" in report.read_text(encoding="utf-8")
