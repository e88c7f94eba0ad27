# SPDX-License-Identifier: Apache-2.0
"""What is in the built wheels. Runs in `nox -s tests`, which builds them and sets IPEX_TEST_WHEELS."""

from __future__ import annotations

import configparser
import email
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.parse import quote

import pytest
from packaging.requirements import Requirement

import finish_wheels
import generate_isa
import rebuild_wheels
from check_versions import load_project
from try_wheels import ours_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
FOLDER = os.environ.get("IPEX_TEST_WHEELS", "")

pytestmark = pytest.mark.skipif(not FOLDER, reason="needs built wheels: nox -s tests")

# Megabytes, uncompressed. A limit is raised on purpose, never by accident.
SIZE_LIMIT = {
    "ipex-core": 2,
    "ipex-cpu-kernels": 60,
    "ipex-quant": 2,
    "ipex-llm": 2,
    "ipex-runtime": 1,
    "ipex": 4,
    "ipex-xpu-kernels": 10,
}

#: Megabytes of all wheels for the CPU together, as they are downloaded.
DOWNLOAD_LIMIT = 40
NATIVE = ("ipex-cpu-kernels", "ipex-runtime", "ipex-xpu-kernels")


def wheel_path(package: str) -> Path:
    (path,) = Path(FOLDER).glob(f"{package.replace('-', '_')}-[0-9]*.whl")
    return path


def members(package: str) -> dict[str, int]:
    with zipfile.ZipFile(wheel_path(package)) as archive:
        return {info.filename: info.file_size for info in archive.infolist()}


def read(package: str, ending: str) -> str:
    with zipfile.ZipFile(wheel_path(package)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(ending))
        return archive.read(name).decode()


@pytest.mark.parametrize("package", PACKAGES)
def test_only_what_belongs_there(package: str) -> None:
    names = members(package)
    top = {name.split("/")[0] for name in names}
    modules = {
        path.name for path in (ROOT / "packages" / package / "src").iterdir() if path.is_dir()
    }
    modules.discard("__pycache__")
    assert {name for name in top if not name.endswith((".dist-info", ".data"))} == modules
    unwanted = [
        name
        for name in names
        if re.search(r"(^|/)(tests|benchmarks|__pycache__|CMakeFiles)/|\.(pyc|o|cpp)$", name)
        # Kernels for devices whose driver takes no SPIR-V.
        and not re.fullmatch(r"ipex_xpu_kernels/kernels/\w+\.sycl\.cpp", name)
    ]
    assert not unwanted


@pytest.mark.parametrize("package", PACKAGES)
def test_typed_licensed_and_small(package: str) -> None:
    names = members(package)
    for module in {name.split("/")[0] for name in names if name.endswith("/__init__.py")}:
        if f"{module}/__init__.py" in names:
            assert f"{module}/py.typed" in names
    assert any(re.search(r"\.dist-info/(licenses/)?LICENSE", name) for name in names)
    assert sum(names.values()) < SIZE_LIMIT[package] * 2**20


def test_the_wheels_for_the_cpu_are_a_small_download() -> None:
    sizes = {name: wheel_path(name).stat().st_size for name in PACKAGES if "xpu" not in name}
    assert sum(sizes.values()) < DOWNLOAD_LIMIT * 2**20, sizes


@pytest.mark.parametrize("package", PACKAGES)
def test_metadata_agrees_with_the_project(package: str) -> None:
    project = load_project(ROOT / "packages" / package)
    metadata = email.message_from_string(read(package, ".dist-info/METADATA"))
    assert metadata["Name"] == project.name
    # A wheel for one torch names it: 0.1.0+torch2.13.
    label = r"(\+torch\d+\.\d+)?" if package == "ipex-xpu-kernels" else ""
    assert re.fullmatch(re.escape(project.version) + label, metadata["Version"])
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert f"# {package}" in str(metadata.get_payload())  # the readme
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    # Nothing that exists only in a checkout.
    assert "file:" not in str(metadata.get_all("Requires-Dist", []))


@pytest.mark.parametrize("package", PACKAGES)
def test_record_lists_every_file(package: str) -> None:
    recorded = {line.rsplit(",", 2)[0] for line in read(package, ".dist-info/RECORD").splitlines()}
    assert recorded == set(members(package))


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_runs_on_every_python(package: str) -> None:
    # The xpu device talks to torch's Python objects.
    tag = r"-cp3\d+-cp3\d+-" if package == "ipex-xpu-kernels" else r"-py3-none-"
    assert re.search(tag, wheel_path(package).name)


@pytest.mark.parametrize("package", PACKAGES)
def test_platform_tag(package: str) -> None:
    name = wheel_path(package).name
    if package not in NATIVE:
        assert name.endswith("-py3-none-any.whl")
    else:
        # The number depends on the system it was built on; test_symbols.py has the limit.
        assert re.search(r"-(manylinux\w+_x86_64\.)+whl$", name), name


@pytest.mark.parametrize("package", PACKAGES)
def test_bill_of_materials(package: str) -> None:
    bill = json.loads(read(package, f".dist-info/sboms/{package}.cdx.json"))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    own = bill["metadata"]["component"]
    assert own["purl"] == f"pkg:pypi/{package}@{quote(own['version'])}"
    with zipfile.ZipFile(wheel_path(package)) as archive:
        libraries = {
            name: hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
            if ".so" in name
        }
    parts = bill["components"]
    files = {p["name"]: p["hashes"][0]["content"] for p in parts if p["type"] == "file"}
    assert files == libraries
    assert bool(libraries) == (package in NATIVE)
    inside = {p["name"] for p in parts if p["type"] == "library" and "scope" not in p}
    assert ("gcc-runtime" in inside) == bool(libraries)
    assert all(p["licenses"] for p in parts if "scope" not in p)
    required = {p["properties"][0]["value"] for p in parts if "scope" in p}
    metadata = email.message_from_string(read(package, ".dist-info/METADATA"))
    assert required == set(metadata.get_all("Requires-Dist", []))
    references = [p["bom-ref"] for p in (own, *parts)]
    assert len(set(references)) == len(references)
    assert {d["ref"] for d in bill["dependencies"]} <= set(references)


@pytest.mark.parametrize("package", NATIVE)
def test_libraries_carry_no_path_of_the_build_machine(package: str) -> None:
    with zipfile.ZipFile(wheel_path(package)) as archive:
        for name in archive.namelist():
            if ".so" in name:
                found = re.findall(
                    rb"[^\0]*(?:site-packages|/home/|/tmp/)[^\0]*", archive.read(name)
                )
                assert not found, (name, found[:3])


@pytest.mark.parametrize("package", [name for name in PACKAGES if name not in NATIVE])
def test_a_pure_sdist_builds_the_same_wheel_alone(package: str, tmp_path: Path) -> None:
    """Outside the checkout, with hatchling only: complete, and the same bytes."""
    pytest.importorskip("hatchling")
    (sdist,) = Path(FOLDER).glob(f"{package.replace('-', '_')}-[0-9]*.tar.gz")
    source = rebuild_wheels.unpack(sdist, tmp_path / "unpacked")
    out = tmp_path / "out"
    out.mkdir()
    command = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", command, str(out)], cwd=source, check=True)
    (built,) = out.iterdir()
    result = finish_wheels.finish(built)
    if importlib.metadata.version("hatchling") in read(package, ".dist-info/WHEEL"):
        assert result.read_bytes() == wheel_path(package).read_bytes()
    else:  # the wheels are older than this environment
        with zipfile.ZipFile(result) as archive:
            assert set(archive.namelist()) == set(members(package))


def test_what_an_extra_brings_of_ours() -> None:
    found = ours_of(Requirement("ipex[all]"), {name: wheel_path(name) for name in PACKAGES})
    assert set(found) == {name for name in PACKAGES if "xpu" not in name}
    assert found["ipex-runtime"] == {"hypertune"}
    alone = ours_of(Requirement("ipex-runtime"), {name: wheel_path(name) for name in PACKAGES})
    assert alone == {"ipex-runtime": set()}


def test_kernel_wheel_has_one_module_per_level_and_no_other_library() -> None:
    levels = generate_isa.levels()
    libraries = {Path(name).name for name in members("ipex-cpu-kernels") if ".so" in name}
    built = {name.removeprefix("libipex_cpu_").removesuffix(".so") for name in libraries}
    if "-0native-" in wheel_path("ipex-cpu-kernels").name:  # the levels of this CPU, and no release
        assert {"default", "avx2"} <= built and not built >= set(levels)
    else:
        assert set(levels) <= built
    # A second OpenMP runtime or a copy of torch in a wheel is the classic way to break a process.
    assert not [name for name in libraries if not name.startswith(("libipex_", "_"))]


def test_entry_points() -> None:
    def groups(package: str) -> configparser.ConfigParser:
        parser = configparser.ConfigParser(delimiters=("=",))
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(read(package, ".dist-info/entry_points.txt"))
        return parser

    assert groups("ipex-core")["torch_dynamo_backends"]["ipex"]
    assert groups("ipex-cpu-kernels")["ipex.kernels"]["cpu"] == "ipex_cpu_kernels:register"
    assert groups("ipex")["console_scripts"]["ipex"]
    # torch runs this group at every import of torch: not for a CPU library.
    for package in ("ipex-core", "ipex-cpu-kernels", "ipex"):
        assert "torch.backends" not in groups(package).sections()


@pytest.mark.parametrize("module", ["ipex", "ipex_core", "ipex_cpu_kernels"])
def test_the_tests_run_on_the_installed_wheel(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).is_relative_to(sys.prefix), f"{module} comes from {spec.origin}"
