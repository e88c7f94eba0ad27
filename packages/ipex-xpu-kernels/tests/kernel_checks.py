# SPDX-License-Identifier: Apache-2.0
"""What tests of kernels share: the same call on device and host, where the device may not fall back."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import ipex_core  # noqa: F401  (defines torch.ops.ipex)
import ipex_xpu_kernels

#: The device under test, for processes that tests start: the CPU device unless the environment asks for another.
DEVICE = os.environ.get("IPEX_XPU_DEVICE") or "cpu"
on_cpu_device = pytest.mark.skipif(
    not DEVICE.startswith("cpu"), reason="about the SYCL CPU device, which is not under test"
)

#: The host reads the memory of the device: wrong indices are errors of the op itself.
TELLS_AT_ONCE = DEVICE.startswith("cpu")
since_torch_2_13 = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="this torch has it for no device"
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (2e-3, 1e-3),
}


@contextmanager
def raises(error: type[Exception], match: str, op: str | None = None) -> Iterator[None]:
    """Expect an error about a wrong index; a device whose memory the host cannot read may tell at the next op."""
    if TELLS_AT_ONCE:
        with pytest.raises(error, match=match):
            yield
        return
    try:
        yield
    except error as found:  # of an op that waits for what it looks at
        assert re.search(match, str(found)), found
        return
    torch.xpu.synchronize()
    later = f"{op or match.partition(':')[0]}: .*of an op that was started before"
    with pytest.raises(error, match=later):
        torch.zeros(2, device="xpu")[torch.zeros(1, dtype=torch.long, device="xpu")]


def on(device: str, value: Any) -> Any:
    """Clone to the device, strides kept."""
    if isinstance(value, torch.Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return made.copy_(value) if value.numel() else made
    if isinstance(value, (list, tuple)):
        return type(value)(on(device, v) for v in value)
    return value


def both(function: Callable[..., Any], *args: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs and arguments after the call, on device and host; the device may not fall back."""
    host = on("cpu", args)
    device = on("xpu", args)
    expected = function(*host)
    ipex_xpu_kernels.set_fallback_mode("error")
    actual = function(*device)
    ipex_xpu_kernels.set_fallback_mode("silent")

    def flat(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        return [t for v in value for t in flat(v)] if isinstance(value, (list, tuple)) else []

    return list(zip(flat((actual, device)), flat((expected, host)), strict=True))


def check(function: Callable[..., Any], *args: Any, rtol: float = 0, atol: float = 0) -> None:
    for actual, expected in both(function, *args):
        dtype = expected.dtype
        r, a = TOLERANCE.get(dtype, (0, 0))
        torch.testing.assert_close(
            actual.cpu(), expected, rtol=max(r, rtol), atol=max(a, atol), equal_nan=True
        )


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)
