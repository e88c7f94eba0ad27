# SPDX-License-Identifier: Apache-2.0
"""Sessions that test some of it: one package, one ISA level, other libraries, and for memory errors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import nox

import generate_isa
from nox_common import (
    BUILD_TOOLS,
    CLIENTS,
    DIST,
    INTEGRATIONS,
    PACKAGES,
    ROOT,
    SERVE_TOOLS,
    SMALL_TOOLS,
    TEST_TOOLS,
    TRACES,
    WORKER_ENV,
    WORKERS,
    XPU,
    install_wheels,
    prepare,
    wheel,
)


@nox.session(name=f"tests-{XPU}", default=False, requires=["wheels_tests", "wheels_xpu"])
def tests_xpu(session: nox.Session) -> None:
    """Test ipex-xpu-kernels on the SYCL CPU device, with only ipex-core."""
    prepare(session)
    install_wheels(session, ("ipex-core",), *TEST_TOOLS)
    test_xpu(session)


def test_all(session: nox.Session, markers: str) -> None:
    """Run the tests of all packages with these markers."""
    prepare(session)
    tools = (*TEST_TOOLS, *SERVE_TOOLS, *SMALL_TOOLS, "nox")
    install_wheels(session, PACKAGES, *tools, extras="[demo]")
    session.env["IPEX_TEST_WHEELS"] = str(DIST)
    session.run("ipex", "doctor")
    session.run("pytest", *WORKERS, "-m", markers, *session.posargs, env=WORKER_ENV)
    test_xpu(session, "-m", markers)


def test_xpu(session: nox.Session, *selected: str) -> None:
    """Run the tests of the xpu device, in a process that has it from the start."""
    session.install(wheel(XPU, "[cpu-device,onednn]"), "expecttest")
    # 5: no test is selected by the arguments that are meant for the other packages.
    session.run(
        "pytest",
        f"packages/{XPU}/tests",
        *WORKERS,
        # The files that take longest have few tests; in the order of their names they do not come last.
        "--no-loadscope-reorder",
        *selected,
        *session.posargs,
        env={"IPEX_XPU_DEVICE": "cpu", **WORKER_ENV},
        success_codes=[0, 5],
    )


@nox.session(default=False, requires=["wheels_native"])
def tests_integrations(session: nox.Session) -> None:
    """Run the examples with other libraries, with those libraries; `-- vllm` installs further ones."""
    prepare(session)
    install_wheels(session, PACKAGES, *TEST_TOOLS, *INTEGRATIONS, *session.posargs, extras="[demo]")
    session.run(
        "pytest", "tests/test_integration_examples.py", "packages/ipex-llm/tests/integrations"
    )


@nox.session(default=False, requires=["wheels_native"])
def clients(session: nox.Session) -> None:
    """Ask the server with the clients of other projects: openai, LangChain, LiteLLM, lm-eval, GuideLLM; test traces."""
    prepare(session)
    tools = (*TEST_TOOLS, *SERVE_TOOLS, *CLIENTS, *TRACES)
    install_wheels(session, PACKAGES, *tools, extras="[cpu,serve]")
    traces = "packages/ipex-llm/tests/entrypoints/test_serve_traces.py"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    session.run("pytest", "tests/test_clients.py", traces, *session.posargs, env=offline)


@nox.session(default=False, requires=["wheels_native"])
def kernel_hub(session: nox.Session) -> None:
    """Write the repository for Hugging Face's kernels to dist/kernel-hub, and test it."""
    prepare(session)
    # The last releases that know each other.
    tools = (*TEST_TOOLS, "kernels==0.17.2", "transformers==5.22.0")
    install_wheels(session, PACKAGES, *tools, extras="[cpu]")
    target = DIST / "kernel-hub"
    shutil.rmtree(target, ignore_errors=True)
    session.run("python", "-m", "ipex_llm.integrations.kernel_hub", str(target))
    tests = "packages/ipex-llm/tests/integrations/test_kernel_hub.py"
    session.run("pytest", tests, *session.posargs, env={"HF_HUB_OFFLINE": "1"})


#: What tests of IPEX import beside torch; of the other packages, those that lack are told by the table.
IPEX_SUITE = ("expecttest", "scipy", "scikit-learn", "numpy", "pytest", "hypothesis", "psutil")


@nox.session(default=False, requires=["wheels_native"])
def ipex_suite(session: nox.Session) -> None:
    """Run the CPU tests of a checkout of IPEX with our alias; `-- PATH`, `-- PATH --update` writes the table."""
    prepare(session)
    install_wheels(session, PACKAGES, *IPEX_SUITE, extras="[demo]")
    session.run("python", "tools/ipex_suite.py", *session.posargs)


def tests_of(package: str) -> Callable[[nox.Session], None]:
    """Return the session function that tests one package with only the siblings it cannot do without."""

    def tests_package(session: nox.Session) -> None:
        prepare(session)
        install_wheels(session, (*PACKAGES[package], package), *TEST_TOOLS)
        session.run("pytest", f"packages/{package}/tests", *session.posargs)

    company = f"with only {', '.join(PACKAGES[package])}" if PACKAGES[package] else "alone"
    tests_package.__doc__ = f"Test {package} {company}."
    return tests_package


for _package in PACKAGES:
    nox.session(name=f"tests-{_package}", default=False, requires=["wheels_tests"])(
        tests_of(_package)
    )


@nox.session(default=False, requires=["wheels"])
@nox.parametrize("level", [*generate_isa.levels()])
def tests_isa(session: nox.Session, level: str) -> None:
    """Run the kernel tests at one ISA level; `-- sde` or `-- qemu` emulates a CPU that has it, for conformance only."""
    prepare(session)
    posargs = [arg for arg in session.posargs if arg not in {"sde", "qemu"}]
    emulator = ["sde64", "-future", "--"] if "sde" in session.posargs else []
    if "qemu" in session.posargs:
        if level not in QEMU_CPUS:
            session.error(f"QEMU emulates {', '.join(QEMU_CPUS)}, got {level}; use -- sde")
        emulator = ["qemu-x86_64", "-cpu", QEMU_CPUS[level]]
    install_wheels(session, ("ipex-core", "ipex-cpu-kernels"), *TEST_TOOLS)
    if not emulator:
        possible = session.run("python", "-c", PRINT_LEVELS, silent=True) or ""
        if level not in possible.split():
            session.skip(f"this CPU cannot run {level}, only {possible.strip()}")
    session.env["IPEX_TEST_ISA"] = level
    tests = "packages/ipex-cpu-kernels/tests"
    if emulator:
        # Each start of a process takes half a minute: no compiler, and no program of its own.
        tests += "/test_conformance.py"
        posargs = ["-k", "not compiles and not opcheck", *posargs]
    # By its path: QEMU does not search for the program.
    python = str(Path(session.bin, "python"))
    session.run(*emulator, python, "-m", "pytest", tests, *posargs, external=bool(emulator))


#: The CPU that QEMU shows to a level: one that has no instruction of a higher level. Its emulation knows no AVX-512.
QEMU_CPUS = {"default": "Nehalem", "avx2": "Haswell"}
PRINT_LEVELS = """
from ipex_core.kernels.providers import provider_for
print(*provider_for("cpu").isa_available)
"""
#: Levels of the sanitized build: one per family of code. The others differ in single instructions.
ASAN_LEVELS = ("default", "avx2", "avx512_bf16")


@nox.session(default=False, reuse_venv=True)
def asan(session: nox.Session) -> None:
    """Run the kernel tests with AddressSanitizer; the variable IPEX_TEST_ISA limits build and tests to one level."""
    prepare(session)
    libraries = [compiler_library(session, name) for name in ("libasan.so", "libstdc++.so")]
    if "" in libraries:
        session.skip("g++ has no shared AddressSanitizer library (Debian: libgcc-12-dev)")
    only = os.environ.get("IPEX_TEST_ISA", "")
    levels = ";".join([only] if only else ASAN_LEVELS)
    session.install(*BUILD_TOOLS, *TEST_TOOLS)
    del session.env["PIP_BUILD_CONSTRAINT"]  # pip refuses it for builds without isolation
    again = ("--no-build-isolation", "--no-deps", "--force-reinstall")
    session.install(*again, str(ROOT / "packages" / "ipex-core"))
    session.install(
        *again,
        "-Cbuild-dir=build/asan",
        "-Cinstall.strip=false",  # reports name lines
        "-Ccmake.define.IPEX_ASAN=ON",
        f"-Ccmake.define.IPEX_ISA_LEVELS={levels}",
        str(ROOT / "packages" / "ipex-cpu-kernels"),
        env={"CXX": "g++"},
    )
    tests = "packages/ipex-cpu-kernels/tests"
    session.run(
        "pytest",
        tests,
        # What only asks for exports, text or graphs, and what runs a program of its own.
        f"--ignore={tests}/test_symbols.py",
        f"--ignore={tests}/test_vec_math.py",
        f"--ignore={tests}/test_cpp.py",
        f"--deselect={tests}/test_conformance.py::test_opcheck",
        f"--deselect={tests}/test_conformance.py::test_traces",
        f"--deselect={tests}/test_conformance.py::test_compiles_without_graph_break",
        # A finding ends its process: of a worker, so that the other tests still run, and not into captured output.
        "--numprocesses=2",
        "--capture=sys",
        "-pno:faulthandler",
        *session.posargs,
        env={
            # Loaded late, the sanitizer would not find the C++ run-time functions that it wraps.
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
            # Blocks of their own for Python's objects, and for packed weights in place of mapped memory.
            "PYTHONMALLOC": "malloc",
            "IPEX_HUGE_PAGES": "0",
            "OMP_NUM_THREADS": "2",
        },
    )


def compiler_library(session: nox.Session, name: str) -> str:
    """Return the path of a shared library that comes with g++, or an empty string."""
    if shutil.which("g++") is None:
        return ""
    found = session.run("g++", f"-print-file-name={name}", external=True, silent=True) or ""
    path = Path(found.strip())  # the bare name if there is none
    return str(path.resolve()) if path.is_absolute() else ""
