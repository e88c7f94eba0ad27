# SPDX-License-Identifier: Apache-2.0
"""Sessions that build wheels into dist/, only what has changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import nox

import machine
from nox_common import (
    BUILD_TOOLS,
    CONSTRAINTS,
    DIST,
    FINISH,
    FINISH_TOOLS,
    KERNELS,
    PACKAGES,
    ROOT,
    XPU,
    XPU_BUILD_TOOLS,
    built,
    prepare,
)

CHECK_ISA = ROOT / "tools" / "check_isa.py"
# Where ccache is installed. The sources are unpacked in another temporary folder at each build, and their precompiled
# headers are made anew.
CCACHE = {
    "CMAKE_CXX_COMPILER_LAUNCHER": "ccache",
    "CCACHE_BASEDIR": tempfile.gettempdir(),
    # Entries are found by the files themselves: to the preprocessed text a precompiled header with another comment is
    # the same, and the compiler then takes its files for others and reads them twice.
    "CCACHE_DEPEND": "true",
    "CCACHE_SLOPPINESS": "pch_defines,time_macros,include_file_mtime,include_file_ctime",
}
# Not the sources of a wheel, or products of a build.
NOT_SOURCE = {"tests", "benchmarks", "build", "dist", "__pycache__"}


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
