# SPDX-License-Identifier: Apache-2.0
"""Sessions with other versions of torch, transformers and other dependencies."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import nox
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from nox_common import (
    BUILD_TOOLS,
    CONSTRAINTS,
    DIST,
    FINISH,
    FINISH_TOOLS,
    PACKAGES,
    ROOT,
    SMALL_TOOLS,
    TEST_TOOLS,
    WORKER_ENV,
    WORKERS,
    XPU,
    XPU_BUILD_TOOLS,
    install_wheels,
    prepare,
)

#: Minor releases of torch that are supported: one wheel of ipex-cpu-kernels serves all of them.
TORCH_RELEASES = ("2.11", "2.12", "2.13", "2.14", "2.15")
#: Where pip looks for them besides its own index: builds without GPU libraries.
TORCH_INDEX = "--extra-index-url=https://download.pytorch.org/whl/cpu"
#: What can differ between releases of torch: the native boundary, graphs, file formats and transformers' models.
#: About 1,300 tests.
TORCH_TESTS = tuple(
    f"packages/{package}/tests/{path}.py"
    for package, paths in {
        "ipex-cpu-kernels": ("test_conformance", "test_program"),
        "ipex-core": (
            "test_amp_lists",
            *(
                f"compiler/test_compile_{name}"
                for name in ("attention", "backend", "linear", "modes", "woq")
            ),
            "exporter/test_export",
            "jit/test_jit",
            "library/test_functional_derivatives",
            *(
                f"optimization/test_{name}"
                for name in (
                    *("graph_mode", "optimize_arguments", "optimize_fuse", "optimize_layers"),
                    *("optimize_state", "training_prepack"),
                )
            ),
            "program/test_program",
        ),
        "ipex-quant": (
            "test_export",
            *(f"int8/test_{name}" for name in ("int8_dynamic", "int8_static")),
            "io/test_saving",
            "qconfig/test_qconfig",
            "weight_only/test_linear",
        ),
        "ipex-llm": (
            "arch/test_match",
            "generation/test_generate",
            "model_runner/test_emit",
            "optimization/test_optimize",
        ),
    }.items()
    for path in paths
)


def torch_options() -> list[str]:
    """Return options of pip for the sessions that install another torch: TORCH_PIP_OPTIONS, or PyTorch's CPU index."""
    return os.environ.get("TORCH_PIP_OPTIONS", TORCH_INDEX).split()


def without_torch(session: nox.Session, *more: str) -> None:
    """Take the constraints of the repository without torch and the packages in ``more``."""
    free = {"torch", *more}
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if re.split(r"[^\w.-]", line)[0] not in free]
    path = Path(session.create_tmp()).resolve() / "constraints.txt"
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    session.env["PIP_CONSTRAINT"] = session.env["PIP_BUILD_CONSTRAINT"] = path.as_uri()


@nox.session(default=False, requires=["wheels_native"])
@nox.parametrize("version", TORCH_RELEASES)
def torch(session: nox.Session, version: str) -> None:
    """Test the wheels in dist/ with another torch: `"torch(version='2.15')"`; `-- all` runs all tests of four packages.

    Other arguments go to pytest. TORCH_PIP_OPTIONS has the options with which pip finds that torch.
    """
    prepare(session)
    without_torch(session)
    # First and alone: later steps keep what is there.
    session.install(*torch_options(), f"torch=={version}.*")
    install_wheels(
        session, PACKAGES, *TEST_TOOLS, *SMALL_TOOLS, f"torch=={version}.*", extras="[cpu]"
    )
    session.run("python", "-c", "import torch; print('torch', torch.__version__)")
    tests: tuple[str, ...] = TORCH_TESTS
    if "all" in session.posargs:
        names = ("ipex-core", "ipex-cpu-kernels", "ipex-quant", "ipex-llm")
        tests = tuple(f"packages/{name}/tests" for name in names)
    more = [argument for argument in session.posargs if argument != "all"]
    session.run("pytest", *tests, *WORKERS, *more, env=WORKER_ENV)


@nox.session(default=False, requires=["wheels_native"])
def nightly(session: nox.Session) -> None:
    """Run the conformance tests with the newest torch and transformers of the index, whatever constraints.txt says.

    TORCH_PIP_OPTIONS has the options with which pip finds torch; `--pre --index-url=...` takes nightly builds of it.
    """
    prepare(session)
    without_torch(session, "transformers", "numpy")
    session.install("--upgrade", *torch_options(), "torch", "transformers", "numpy")
    install_wheels(session, PACKAGES, *TEST_TOOLS, extras="[cpu]")
    versions = "import torch, transformers as t; print('torch', torch.__version__, 'transformers', t.__version__)"
    session.run("python", "-c", versions)
    tests = (
        "packages/ipex-cpu-kernels/tests/test_conformance.py",
        "packages/ipex-llm/tests/arch/test_match.py",
    )
    session.run("pytest", *tests, *WORKERS, *session.posargs, env=WORKER_ENV)


@nox.session(default=False)
@nox.parametrize("version", TORCH_RELEASES)
def wheels_xpu_for(session: nox.Session, version: str) -> None:
    """Build the wheel of ipex-xpu-kernels for another torch into dist/xpu/; `--force-python 3.12` for another Python.

    TORCH_PIP_OPTIONS has the options with which pip finds that torch.
    """
    prepare(session)
    without_torch(session)
    session.install(*torch_options(), f"torch=={version}.*")
    tools = [tool for tool in (*BUILD_TOOLS, *XPU_BUILD_TOOLS) if tool != "torch"]
    session.install(*tools, *FINISH_TOOLS, f"torch=={version}.*")
    python = session.run("python", "-c", PRINT_TAG, silent=True) or ""
    folder = DIST / "xpu"
    label = f"torch{version}-{python.strip()}"
    for old in folder.glob(f"ipex_xpu_kernels-*+{label}-*.whl"):
        old.unlink()
    out = Path(session.create_tmp()).resolve() / "wheel"
    shutil.rmtree(out, ignore_errors=True)
    # A folder of its own, since CMake's cache names the torch that it was configured with.
    place = f"-Cbuild-dir=build/{label}"
    command = ("python", "-m", "build", "--wheel", "--no-isolation", place, "--outdir", str(out))
    session.run(*command, str(ROOT / "packages" / XPU))
    session.run("python", str(FINISH), str(next(out.glob("*.whl"))))
    folder.mkdir(parents=True, exist_ok=True)
    for path in out.glob("*.whl"):
        shutil.move(path, folder / path.name)
        session.log(f"built {folder / path.name}")


PRINT_TAG = "import sys; print('cp%d%d' % sys.version_info[:2])"


@nox.session(default=False, requires=["wheels_native"])
def minimums(session: nox.Session) -> None:
    """Run the tests with the oldest supported dependencies (torch excepted, see CONTRIBUTING.md)."""
    prepare(session)
    lowest = lower_bounds()
    session.log("lower bounds: " + ", ".join(lowest))
    # The constraints hold versions newer than the lower bounds: keep its torch only.
    torch = re.findall(r"^torch==.*$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    torch_only = Path(session.create_tmp()).resolve() / "constraints.txt"
    torch_only.write_text("\n".join(torch) + "\n", encoding="utf-8")
    session.env["PIP_CONSTRAINT"] = torch_only.as_uri()
    # accelerate: transformers 4.51 does not load models without it.
    install_wheels(session, PACKAGES, *TEST_TOOLS, "accelerate", *lowest, extras="[cpu]")
    # Old releases may use what is deprecated by now; that is theirs.
    deprecated = ("-W", "ignore::DeprecationWarning")
    session.run("pytest", *WORKERS, *deprecated, *session.posargs, env=WORKER_ENV)


def lower_bounds() -> list[str]:
    """Return `name==lowest` for each run-time dependency of the packages, siblings and torch excepted."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        project = nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")["project"]
        for text in project.get("dependencies", ()):
            requirement = Requirement(text)
            if requirement.name not in PACKAGES and requirement.name != "torch":
                found[requirement.name] = lower_bound(requirement.specifier)
    return [f"{name}=={version}" for name, version in sorted(found.items()) if version]


def lower_bound(specifier: SpecifierSet) -> str:
    """Return the version a range starts with, or an empty string."""
    return next((part.version for part in specifier if part.operator in {">=", "~=", "=="}), "")
