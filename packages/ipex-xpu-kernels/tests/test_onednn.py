# SPDX-License-Identifier: Apache-2.0
"""oneDNN for SYCL, the optional extra: found or not, turned off, and its results against the host."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_checks import DEVICE
from torch.nn import functional

import ipex_xpu_kernels as xpu
from ipex_xpu_kernels import _device, _onednn
from ipex_xpu_kernels._settings import XPUComputeEng, compute_eng

Tensor = torch.Tensor


@pytest.fixture
def onednn(needs_device: None) -> Iterator[Any]:
    """Use oneDNN for all that it has; gives the native module."""
    module = _device.native()
    state = module.onednn_state()
    if not state["version"]:
        pytest.skip(f"no oneDNN: {state['why']}")
    with compute_eng(XPUComputeEng.ONEDNN):
        yield module


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "libdnnl.so.3"
    library.touch()
    for value, path, why in (
        ("0", "", "IPEX_XPU_ONEDNN=0"),
        (str(library), str(library), ""),
        (str(tmp_path / "none"), "", "there is no file"),
        ("yes", "", "must be auto, 0 or a path, got yes"),
    ):
        monkeypatch.setenv(_onednn.VARIABLE, value)
        found = _onednn.find()
        assert found[0] == path and why in found[1]

    def files(names: list[str] | None) -> Callable[[str], list[Any]]:
        def result(package: str) -> list[Any]:
            assert package == "onednn"
            if names is None:
                raise importlib.metadata.PackageNotFoundError(package)
            paths = [importlib.metadata.PackagePath(name) for name in names]
            for one in paths:
                one.dist = importlib.metadata.PathDistribution(tmp_path / "onednn.dist-info")
            return paths

        return result

    monkeypatch.setenv(_onednn.VARIABLE, "auto")
    for names, path, why in (
        (None, "", "pip install 'ipex-xpu-kernels[onednn]'"),
        (["../lib/other.so"], "", "has no libdnnl.so.3"),
        (["lib/libdnnl.so.3"], str(tmp_path / "lib" / "libdnnl.so.3"), ""),
    ):
        monkeypatch.setattr(importlib.metadata, "files", files(names))
        found = _onednn.find()
        assert found[0] == path and why in found[1]
    assert "3.11" in _onednn.describe({"version": "3.11.4", "path": "/p", "why": ""})
    assert "not installed" in _onednn.describe({"version": "", "path": "", "why": "not installed"})


@pytest.mark.usefixtures("needs_device")
def test_a_library_that_is_not_it(tmp_path: Path) -> None:
    text = tmp_path / "libdnnl.so.3"
    text.write_text("not a library", encoding="utf-8")
    other = next(Path(torch.__file__).parent.glob("lib/libc10.so"))
    code = (
        "import torch, ipex_xpu_kernels as xpu\n"
        "from ipex_xpu_kernels import _device, _onednn\n"
        "xpu.activate(); xpu.set_kernel_mode('always')\n"
        "x = torch.eye(3, device='xpu') * 2\n"
        "print((x @ x).sum().item(), dict(xpu.doctor()[0])['oneDNN'])"
    )
    for path, why in ((text, "invalid ELF header|file too short"), (other, "dnnl_version")):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**_environment(), "IPEX_XPU_ONEDNN": str(path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("12.0 not used: ")
        assert any(part in result.stdout for part in why.split("|"))


def _environment() -> dict[str, str]:
    return {**os.environ, "IPEX_XPU_DEVICE": DEVICE}


def _same(module: Any, function: Callable[..., Any], *args: Any, tolerance: float = 1e-4) -> None:
    """Compare with the host; oneDNN, and nothing else, has to do it."""
    xpu.reset_fallback_stats()
    runs = module.onednn_state()["runs"]
    there = [t.detach().to("xpu").requires_grad_(t.requires_grad) for t in args]
    results = []
    for values in (args, there):
        out = function(*values)
        wanted = [t for t in values if t.requires_grad]
        results.append(
            (out, *torch.autograd.grad(out.float().square().sum(), wanted)) if wanted else (out,)
        )
    assert module.onednn_state()["runs"] > runs
    assert [name for name in xpu.fallback_stats() if "mm" in name or "convolution" in name] == []
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(
            actual.detach().cpu(), expected.detach(), rtol=tolerance, atol=tolerance
        )


def test_products(onednn: Any) -> None:
    torch.manual_seed(0)
    for m, k, n in ((1, 1, 1), (3, 5, 7), (65, 130, 67), (1, 8, 3), (9, 1, 4)):
        a, b, c = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
        _same(onednn, torch.mm, a, b)
        _same(onednn, lambda a, b: a.t().contiguous().t() @ b.t().clone().t(), a, b)
        _same(onednn, torch.addmm, c, a, b)
        _same(onednn, lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), c, a, b)
        _same(onednn, lambda c, a, b: torch.addmm(c, a, b), torch.randn(m, n), a, b)
        _same(onednn, lambda c, a, b: c.clone().addmm_(a, b, beta=2), torch.randn(m, n), a, b)
        _same(onednn, lambda c, a, b: torch.addmm(c, a, b, beta=0), c * float("nan"), a, b)
        _same(onednn, lambda a, b: torch.mm(a, b, out=b.new_empty(n, m).t()), a, b)  # noqa: B023
    a, b = torch.randn(5, 33, 40), torch.randn(5, 40, 31)
    _same(onednn, lambda a, b: a[::2] @ b[::2], a, b)
    _same(onednn, lambda a, b: torch.bmm(a[:1].expand(5, -1, -1), b), a, b)
    # Products that the library does wrong if it is asked, and so is not.
    outer = [torch.randn(3, 5, 1, device="xpu"), torch.randn(3, 1, 4, device="xpu")]
    torch.testing.assert_close(torch.bmm(*outer), outer[0] * outer[1])
    _same(onednn, torch.baddbmm, torch.randn(33, 31), a, b)
    weight, bias = torch.randn(9, 40, requires_grad=True), torch.randn(9, requires_grad=True)
    _same(onednn, functional.linear, a.requires_grad_(), weight, bias, tolerance=1e-2)


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions(onednn: Any, channels_last: bool) -> None:
    torch.manual_seed(0)
    for x_shape, weight_shape, options in (
        ((2, 8, 9, 7), (6, 4, 3, 2), {"groups": 2, "dilation": 2, "padding": (2, 1)}),
        ((1, 16, 8, 8), (16, 1, 3, 3), {"groups": 16, "padding": 1, "stride": 2}),
        ((2, 3, 10, 10), (4, 3, 3, 3), {"stride": 3}),  # with columns that no window reaches
    ):
        x, weight, bias = (
            torch.randn(shape) for shape in (x_shape, weight_shape, weight_shape[:1])
        )
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        x, weight, bias = (t.requires_grad_() for t in (x, weight, bias))

        def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            out = functional.conv2d(x, weight, bias, **options)  # type: ignore[arg-type]  # noqa: B023
            assert not channels_last or out.is_contiguous(memory_format=torch.channels_last)
            return out

        _same(onednn, run, x, weight, bias)
    x, weight = torch.randn(2, 4, 5, 6), torch.randn(4, 3, 3, 3)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    _same(
        onednn,
        lambda x, w: functional.conv_transpose2d(x, w, stride=2, output_padding=1),
        x.requires_grad_(),
        weight.requires_grad_(),
    )


def test_convolutions_of_one_and_three_dimensions(onednn: Any) -> None:
    torch.manual_seed(0)
    _same(
        onednn,
        lambda x, w: functional.conv1d(x, w, padding=1),
        torch.randn(2, 3, 11),
        torch.randn(4, 3, 3),
    )
    x, weight = torch.randn(1, 2, 4, 5, 6), torch.randn(3, 2, 2, 3, 1)
    _same(onednn, functional.conv3d, x.requires_grad_(), weight.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(onednn: Any, dtype: torch.dtype) -> None:
    # What oneDNN does not have for this processor is left to the kernels.
    torch.manual_seed(0)
    xpu.set_kernel_mode("always")
    try:
        a, b = (torch.randn(40, 40).to(dtype) for _ in range(2))
        torch.testing.assert_close((a.to("xpu") @ b.to("xpu")).cpu(), a @ b, rtol=2e-2, atol=2e-2)
        x, weight = torch.randn(1, 4, 6, 6).to(dtype), torch.randn(3, 4, 3, 3).to(dtype)
        actual = functional.conv2d(x.to("xpu"), weight.to("xpu")).cpu()
        torch.testing.assert_close(
            actual, functional.conv2d(x.float(), weight.float()).to(dtype), rtol=2e-2, atol=5e-2
        )
    finally:
        xpu.set_kernel_mode("auto")


def test_engines(onednn: Any) -> None:
    x = torch.randn(8, 8, device="xpu")

    def runs_of(engine: XPUComputeEng, call: Callable[[], Any]) -> int:
        with compute_eng(engine):
            before = onednn.onednn_state()["runs"]
            call()
            return int(onednn.onednn_state()["runs"] - before)

    large = torch.randn(256, 256, device="xpu")
    assert runs_of(XPUComputeEng.BASIC, lambda: large @ large) == 0
    assert runs_of(XPUComputeEng.ONEDNN, lambda: x @ x) == 1
    assert runs_of(XPUComputeEng.RECOMMEND, lambda: x @ x) == 0  # a small one is the host's
    assert runs_of(XPUComputeEng.RECOMMEND, lambda: large @ large) == 1
    image, weight = torch.randn(1, 3, 9, 9, device="xpu"), torch.randn(4, 3, 3, 3, device="xpu")
    assert runs_of(XPUComputeEng.RECOMMEND, lambda: functional.conv2d(image, weight)) == 1


def test_threads_and_streams(onednn: Any) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 64, 64)
    expected = torch.linalg.matrix_power(a / 8, 5) @ b
    results: list[Tensor] = []

    def work() -> None:
        with torch.xpu.stream(torch.xpu.Stream()):
            x, y = (a / 8).to("xpu"), b.to("xpu")
            for _ in range(5):
                y = x @ y
            results.append(y.cpu())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_a_process_that_used_it_ends_cleanly(onednn: Any) -> None:
    code = (
        "import torch, ipex_xpu_kernels as xpu\n"
        "xpu.activate(); xpu.set_kernel_mode('always')\n"
        "x = torch.ones(64, 64, device='xpu', requires_grad=True); (x @ x).sum().backward()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
