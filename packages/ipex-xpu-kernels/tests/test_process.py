# SPDX-License-Identifier: Apache-2.0
"""Processes of their own: start, exit, no device, two devices, damaged caches, late registration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT = 120


def python(code: str, **variables: str | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "IPEX_XPU_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    for name, value in variables.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def output(code: str, **variables: str | None) -> str:
    result = python(code, **variables)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


START = "import torch, ipex_xpu_kernels as xpu; state = xpu.activate()\n"
pytestmark = pytest.mark.usefixtures("needs_device")


def test_a_training_script_ends_cleanly() -> None:
    code = START + "x = torch.ones(3, device='xpu', requires_grad=True); (x * 2).sum().backward()"
    for _ in range(4):
        result = python(code)
        assert result.returncode == 0 and result.stderr == ""


def test_nothing_changes_without_a_device() -> None:
    code = (
        START
        + "print(state.mode, state.reason, torch.xpu.is_available(), torch.accelerator.is_available())"
    )
    text = output(code, IPEX_XPU_DEVICE=None)
    if text.startswith("none"):  # a machine with a GPU has another story
        assert "IPEX_XPU_DEVICE=cpu" in text and text.endswith("False False")
    assert (
        output(
            START + "print(state.mode)\nimport sys; print('ipex_xpu_kernels._C' in sys.modules)",
            IPEX_XPU_DEVICE="",
        )
        == "none\nFalse"
    )


def test_requests_that_cannot_be_met() -> None:
    text = output(START + "print(state.reason)", IPEX_XPU_DEVICE="cpu:x")
    assert "must be gpu, cpu, cpu:N (1 to 16) or auto, got cpu:x" in text
    code = START + "try: xpu.fallback_stats()\nexcept RuntimeError as e: print(e)"
    assert "there is no xpu device of ipex-xpu-kernels" in output(code, IPEX_XPU_DEVICE="cpu:99")


def test_after_a_backward_pass_it_is_too_late() -> None:
    # Without the variable torch does not load the device at its import.
    code = (
        "import os, torch; torch.ones(2, requires_grad=True).sum().backward(); os.environ['IPEX_XPU_DEVICE'] = 'cpu'\n"
        "import ipex_xpu_kernels as xpu, ipex_xpu_kernels._device as d; d._state = None\n"
        "try: xpu.activate()\nexcept RuntimeError as e: print(e)\nprint(xpu.state().mode)"
    )
    text = output(code, IPEX_XPU_DEVICE=None)
    assert "a backward pass has run" in text and text.endswith("none")


def test_late_registration_repairs_what_torch_has_asked() -> None:
    code = (
        "import os, torch; torch.ones(2).is_pinned(); torch.accelerator.is_available()\n"
        "os.environ['IPEX_XPU_DEVICE'] = 'cpu'\n"
        "import ipex_xpu_kernels as xpu, ipex_xpu_kernels._device as d; d._state = None\n"
        "xpu.activate(); print(torch.accelerator.current_accelerator(), torch.ones(2).pin_memory().is_pinned())"
    )
    assert output(code, IPEX_XPU_DEVICE=None) == "xpu True"


def test_two_devices() -> None:
    code = START + (
        "assert state.count == 2\n"
        "a = torch.ones(3, device='xpu:0'); b = torch.full((3,), 2.0, device='xpu:1')\n"
        "try: a + b\nexcept RuntimeError as e: print('same device' in str(e))\n"
        "print((a + b.to('xpu:0')).tolist(), b.device)\n"
        "with torch.xpu.device(1): print(torch.empty(1, device='xpu').device, torch.xpu.current_device())\n"
        "w = torch.ones(2, device='xpu:1', requires_grad=True); (w * 3).sum().backward()\n"
        "print(w.grad.tolist(), w.grad.device)"
    )
    assert output(code, IPEX_XPU_DEVICE="cpu:2").split("\n") == [
        "True",
        "[3.0, 3.0, 3.0] xpu:1",
        "xpu:1 1",
        "[3.0, 3.0] xpu:1",
    ]


USE_KERNEL = (
    START
    + "torch.ones(3, device='xpu').sin()\n"
    + "s = xpu.kernel_load_stats(); print(s['translated'], s['from_cache'], s['cache_errors'])"
)


def test_cache_of_binaries(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = output(USE_KERNEL, IPEX_XPU_CACHE=str(folder)).split()
    assert int(first[0]) > 0 and first[1:] == ["0", "0"]
    assert output(USE_KERNEL, IPEX_XPU_CACHE=str(folder)).split() == ["0", first[0], "0"]
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[:-7])
    assert output(USE_KERNEL, IPEX_XPU_CACHE=str(folder)).split() == first  # made again
    # A folder that cannot be made costs time only.
    (tmp_path / "file").write_text("")
    assert output(USE_KERNEL, IPEX_XPU_CACHE=str(tmp_path / "file" / "x")).split()[0] == first[0]


def test_forked_children_are_told() -> None:
    code = START + (
        "import os\npid = os.fork()\n"
        "if pid == 0:\n"
        "    try: torch.xpu._lazy_init(); os._exit(1)\n"
        "    except RuntimeError as e: os._exit(0 if 'forked subprocess' in str(e) else 2)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert output(code) == "0"


def test_staged_fallback_gives_the_same() -> None:
    code = START + (
        "torch.manual_seed(0); x = torch.randn(4, 5, device='xpu')\n"
        "out = torch.empty(0, device='xpu'); torch.cumsum(x.t(), 0, out=out)\n"
        "print(out.sum().item(), x.t().sort()[0].cumprod(0).sum().item(), x.t()[1:].tril_().sum().item())"
    )
    assert output(code, IPEX_XPU_ZERO_COPY="0") == output(code)


def test_another_torch_is_named() -> None:
    code = (
        "import ipex_xpu_kernels._build as b; b.TORCH = '2.11'\nimport ipex_xpu_kernels._load as l\n"
        "try: l.native()\nexcept ImportError as e: print(e)"
    )
    text = output(code, IPEX_XPU_DEVICE=None)
    assert "was built for torch 2.11, but torch" in text
