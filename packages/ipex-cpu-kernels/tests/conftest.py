# SPDX-License-Identifier: Apache-2.0
"""Levels under test: every level of the build that this machine can run; the others are reported, not hidden.

``import refusals`` and ``import program_calls`` work in each test of this folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipex_core.kernels import providers

sys.path.insert(0, str(Path(__file__).parent))

_STATUS = next(s for s in providers.load_providers() if s.name == "cpu")
assert _STATUS.info is not None, f"ipex-cpu-kernels is {_STATUS.state}: {_STATUS.cause}"
INFO = _STATUS.info

#: IPEX_TEST_ISA=<level> limits the conformance tests to one level (nox -s tests_isa).
_ONLY = os.environ.get("IPEX_TEST_ISA", "")
if _ONLY and _ONLY not in INFO.isa_built:
    raise pytest.UsageError(
        f"IPEX_TEST_ISA={_ONLY}: levels of this build are {', '.join(INFO.isa_built)}"
    )
if _ONLY and _ONLY not in INFO.isa_available:
    raise pytest.UsageError(
        f"IPEX_TEST_ISA={_ONLY}: this CPU can run {', '.join(INFO.isa_available)}"
    )
LEVELS = [_ONLY] if _ONLY else list(INFO.isa_available)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "level" in metafunc.fixturenames:
        metafunc.parametrize("level", LEVELS, indirect=True)


@pytest.fixture
def level(request: pytest.FixtureRequest) -> str:
    """Make one ISA level the active one during the test."""
    import ipex_cpu_kernels

    with ipex_cpu_kernels.isa(request.param):
        yield request.param


@pytest.fixture(params=[1, 2], ids=["one_thread", "two_threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set the number of threads of torch during the test."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
