# SPDX-License-Identifier: Apache-2.0
"""Wheels of ipex-xpu-kernels name and require the minor release of torch that they were built against."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import zipfile
from email import message_from_string
from pathlib import Path
from types import ModuleType

import pytest

import finish_wheels

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"dependencies": ["ipex-core~=0.1.0", "torch>=2.11,<2.16"]}


@pytest.fixture
def provider() -> ModuleType:
    path = ROOT / "packages/ipex-xpu-kernels/cmake/requirements.py"
    spec = importlib.util.spec_from_file_location("xpu_requirements", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("state", ["wheel", "editable", "metadata_wheel"])
def test_a_wheel_requires_the_torch_that_is_installed(
    provider: ModuleType, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.15.0+cpu")
    requirements = provider.Requirements()
    requirements.build_state(state)
    found = requirements.dynamic_metadata(SETTINGS, {})
    assert found == {"dependencies": ["ipex-core~=0.1.0", "torch==2.15.*"]}
    assert requirements.dynamic_wheel(SETTINGS) == {"dependencies": True}


def test_an_sdist_is_for_every_torch(provider: ModuleType) -> None:
    requirements = provider.Requirements()
    requirements.build_state("sdist")
    assert requirements.dynamic_metadata(SETTINGS, {}) == SETTINGS


def built(folder: Path, torch: str) -> Path:
    """Return a wheel as the build leaves it, without native code."""
    path = folder / "ipex_xpu_kernels-0.1.0-cp312-cp312-manylinux_2_34_x86_64.whl"
    metadata = (
        "Metadata-Version: 2.4\nName: ipex-xpu-kernels\nVersion: 0.1.0\nLicense-Expression: Apache-2.0\n"
        f"Requires-Dist: ipex-core~=0.1.0\nRequires-Dist: torch{torch}\n"
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ipex_xpu_kernels/__init__.py", "")
        archive.writestr("ipex_xpu_kernels-0.1.0.dist-info/METADATA", metadata)
        archive.writestr("ipex_xpu_kernels-0.1.0.dist-info/RECORD", "")
    return path


def test_the_version_names_torch(tmp_path: Path) -> None:
    wheel = finish_wheels.finish(built(tmp_path, "==2.15.*"))
    assert wheel.name == "ipex_xpu_kernels-0.1.0+torch2.15-cp312-cp312-manylinux_2_34_x86_64.whl"
    assert list(tmp_path.iterdir()) == [wheel]
    folder = "ipex_xpu_kernels-0.1.0+torch2.15.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = message_from_string(archive.read(f"{folder}/METADATA").decode())
        record = archive.read(f"{folder}/RECORD").decode()
        bill = archive.read(f"{folder}/sboms/ipex-xpu-kernels.cdx.json").decode()
    assert {name.split("/")[0] for name in names} == {"ipex_xpu_kernels", folder}
    assert {line.split(",")[0] for line in record.splitlines()} == set(names)
    assert metadata["Version"] == "0.1.0+torch2.15"
    assert "pkg:pypi/ipex-xpu-kernels@0.1.0%2Btorch2.15" in bill


def test_other_wheels_keep_their_version(tmp_path: Path) -> None:
    wheel = finish_wheels.finish(built(tmp_path, ">=2.11"))
    assert wheel.name == "ipex_xpu_kernels-0.1.0-cp312-cp312-manylinux_2_34_x86_64.whl"
