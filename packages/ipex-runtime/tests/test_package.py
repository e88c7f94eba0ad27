# SPDX-License-Identifier: Apache-2.0
"""The package by itself: light to import, honest about names, and its command."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest

import ipex_runtime


def test_importing_it_and_reading_the_machine_needs_no_torch():
    code = (
        "import sys, ipex_runtime\n"
        "from ipex_runtime import topology\n"
        "topology.read()\n"
        "assert 'torch' not in sys.modules and 'ipex_core' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_exists():
    for name in ipex_runtime.__all__:
        assert getattr(ipex_runtime, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'CPUPol'"):
        ipex_runtime.CPUPol  # noqa: B018


def test_command(capsys):
    from ipex_runtime._commands import show_topology

    show_topology()
    assert "NUMA node" in capsys.readouterr().out
    show_topology(json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["allowed"] == list(ipex_runtime.topology.read().allowed)


def test_what_the_doctor_shows(recorded, machine):
    recorded("xeon_snc")
    rows, advice = ipex_runtime.doctor(str(machine.root))
    assert ("cores", "16 in 2 package(s), 2 hardware thread(s) each") in rows
    assert any("sub-NUMA" in line for line in advice)


def test_names_of_the_facade():
    ipex = pytest.importorskip("ipex")
    installed = {entry.name for entry in importlib.metadata.entry_points(group="ipex.components")}
    if "runtime" not in installed:
        pytest.skip("ipex-runtime is not installed, only importable")
    import intel_extension_for_pytorch.cpu.runtime.task as old

    assert ipex.runtime is ipex.cpu.runtime is ipex_runtime
    assert old.Task is ipex_runtime.Task
    assert ipex.cpu.runtime.runtime_utils.get_num_nodes() >= 1
