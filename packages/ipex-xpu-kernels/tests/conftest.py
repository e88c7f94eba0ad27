# SPDX-License-Identifier: Apache-2.0
"""The tests run on the SYCL CPU device, in a process that has it from the start (IPEX_XPU_DEVICE=cpu)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the device where nobody has asked for it; a device that was asked for must be there."""
    if os.environ.get("IPEX_XPU_DEVICE"):
        return
    for item in items:
        if "needs_device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="set IPEX_XPU_DEVICE=cpu"))


@pytest.fixture(scope="session")
def needs_device() -> None:
    """Let the device be registered before the first backward pass."""
    import ipex_xpu_kernels

    found = ipex_xpu_kernels.activate()
    assert found.mode == "own", found.reason


@pytest.fixture
def always(needs_device: None) -> Iterator[None]:
    """Use kernels wherever there are some, also where the host is faster."""
    import ipex_xpu_kernels

    ipex_xpu_kernels.set_kernel_mode("always")
    yield
    ipex_xpu_kernels.set_kernel_mode("auto")
    ipex_xpu_kernels.set_fallback_mode("silent")
