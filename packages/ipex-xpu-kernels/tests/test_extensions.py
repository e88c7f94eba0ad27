# SPDX-License-Identifier: Apache-2.0
"""Extensions with SYCL kernels where no SYCL compiler is installed, and programs in C++ without Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_checks import DEVICE

import ipex_xpu_kernels

pytestmark = [
    pytest.mark.usefixtures("needs_device"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]

KERNELS = """
#include "ipex/xpu.h"

template <typename T>
IPEX_KERNEL(1) void swish(const T* x, float beta, T* out, long n) {
  const long i = ipex::global_id();
  if (i >= n) return;
  const float value = ipex::load(x, i);
  ipex::store(out, i, value / (1.f + sycl::exp(-beta * value)));
}
IPEX_KERNEL(2) void outer(const float* x, const float* y, float* out, long rows, long columns) {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const long i = item.get_global_id(0), j = item.get_global_id(1);
  if (i < rows && j < columns) out[i * columns + j] = x[i] * y[j];
}
"""
MODULE = """
#include <ATen/Functions.h>
#include <ipex/xpu/program.h>
#include <torch/csrc/utils/pybind.h>

IPEX_SYCL_SOURCE(my_kernels)

namespace {

ipex::xpu::Program& program() {
  static ipex::xpu::Program one(ipex_sycl_my_kernels, {"swish<float>", "swish<ipex::half>", "outer"});
  return one;
}

at::Tensor swish(const at::Tensor& x, double beta) {
  at::Tensor y = at::empty_like(x);
  const char* kernel = x.scalar_type() == at::kFloat ? "swish<float>" : "swish<ipex::half>";
  program().launch(ipex::xpu::current_queue(x.get_device()), kernel, {x.numel()}, x.const_data_ptr(), beta,
                   y.data_ptr(), x.numel());
  return y;
}

at::Tensor outer(const at::Tensor& x, const at::Tensor& y) {
  at::Tensor out = at::empty({x.numel(), y.numel()}, x.options());
  program().launch(ipex::xpu::current_queue(x.get_device()), "outer", {x.numel(), y.numel()},
                   x.const_data_ptr<float>(), y.const_data_ptr<float>(), out.data_ptr<float>(), x.numel(), y.numel());
  return out;
}

void wrong(const at::Tensor& x) {
  program().launch(ipex::xpu::current_queue(x.get_device()), "outer", {1}, x.const_data_ptr());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("swish", &swish);
  m.def("outer", &outer);
  m.def("wrong", &wrong);
}
"""
USE = """
import torch, ipex_xpu_kernels
ipex_xpu_kernels.activate()
import my_extension
for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
    x = torch.randn(1000).to(dtype)
    y = my_extension.swish(x.to("xpu"), 2.0).cpu()
    torch.testing.assert_close(y.float(), x.float() * torch.sigmoid(2 * x.float()), rtol=tolerance, atol=tolerance)
a, b = torch.randn(5), torch.randn(300)
with torch.xpu.stream(torch.xpu.Stream()):
    out = my_extension.outer(a.to("xpu"), b.to("xpu"))
    torch.xpu.synchronize()
assert torch.equal(out.cpu(), torch.outer(a, b))
assert my_extension.swish(torch.empty(0, device="xpu"), 1.0).numel() == 0
try:
    my_extension.wrong(a.to("xpu"))
except ValueError as error:
    print(error)
"""
SETUP = """
from setuptools import setup
from ipex_xpu_kernels.cpp_extension import DpcppBuildExtension, SyclExtension
setup(name="x", ext_modules=[SyclExtension("my_extension", ["my_extension.cpp", "my_kernels.sycl"],
      extra_compile_args={"cxx": ["-O0", "-w"]})],
      cmdclass={"build_ext": DpcppBuildExtension.with_options(use_ninja=False)})
"""


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "IPEX_XPU_DEVICE": DEVICE},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture
def without_icpx(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CXX", "CMPLR_ROOT"):
        monkeypatch.delenv(name, raising=False)
    if shutil.which("icpx"):
        pytest.skip("icpx is installed")


@pytest.mark.usefixtures("without_icpx")
def test_a_setup_with_kernels(tmp_path: Path) -> None:
    (tmp_path / "my_kernels.sycl").write_text(KERNELS)
    (tmp_path / "my_extension.cpp").write_text(MODULE)
    (tmp_path / "setup.py").write_text(SETUP)
    built = _run([sys.executable, "setup.py", "build_ext", "--inplace"], tmp_path)
    assert built.returncode == 0, built.stderr[-3000:]
    used = _run([sys.executable, "-c", USE], tmp_path)
    assert used.returncode == 0, used.stderr[-3000:]
    assert used.stdout.strip() == "the kernel takes 5 arguments, got 1"


@pytest.mark.usefixtures("without_icpx")
def test_kernels_that_only_icpx_translates(tmp_path: Path) -> None:
    from torch.xpu import cpp_extension

    source = tmp_path / "lambdas.cpp"
    source.write_text(
        "// parallel_for is told of here\nvoid f(queue q) {\n  q.parallel_for(8, [](int) {});\n}\n"
    )
    with pytest.raises(RuntimeError, match=r"lambdas.cpp:3: .*NAME\.sycl.*install the oneAPI"):
        cpp_extension.load("lambdas", str(source), build_directory=str(tmp_path))


PROGRAM = r"""
#include <ipex/xpu/device.h>
#include <torch/torch.h>

#include <cstdio>
#include <stdexcept>

int main() {
  const ipex::xpu::Device device;
  torch::manual_seed(0);
  const auto options = torch::TensorOptions(torch::kXPU);
  auto x = torch::randn({64, 128}), w = torch::randn({32, 128}) / 8;
  auto there = w.to(torch::kXPU).requires_grad_();
  auto y = torch::softmax(torch::linear(x.to(torch::kXPU), there), -1);
  auto expected = torch::softmax(torch::linear(x, w), -1);
  y.square().sum().backward();
  std::printf("%d %d %d %d\n", y.is_xpu(), torch::allclose(y.cpu(), expected, 1e-4, 1e-5), there.grad().is_xpu(),
              torch::ones({3}, options).sum().item<float>() == 3.f);
  try {
    const ipex::xpu::Device second;
  } catch (const std::runtime_error& error) {
    std::puts(error.what());
  }
}
"""
LISTS = """
cmake_minimum_required(VERSION 3.22)
project(small LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
find_package(IPEX REQUIRED COMPONENTS ${COMPONENTS})
if(NOT IPEX_WITH_XPU OR NOT TARGET IPEX::xpu)
  message(FATAL_ERROR "variables")
endif()
add_executable(small main.cpp)
target_link_libraries(small PRIVATE IPEX::xpu)
"""


def _configure(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Configure the program with the CMake package of ipex-cpu-kernels, which lies beside this one or is installed."""
    cpu = pytest.importorskip("ipex_cpu_kernels")
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    (tmp_path / "main.cpp").write_text(PROGRAM)
    (tmp_path / "CMakeLists.txt").write_text(LISTS)
    prefix = f"{torch.utils.cmake_prefix_path};{cpu.cmake_prefix_path}"
    command = [
        cmake,
        "-S",
        ".",
        "-B",
        "build",
        "-Wno-dev",
        f"-DCMAKE_PREFIX_PATH={prefix}",
        *options,
    ]
    return _run(command, tmp_path)


def test_a_program_without_python(tmp_path: Path) -> None:
    folder = Path(ipex_xpu_kernels.__file__).with_name("share") / "cmake"
    done = _configure(tmp_path, "-DCOMPONENTS=cpu;xpu", f"-DIPEXXpu_DIR={folder / 'IPEXXpu'}")
    assert done.returncode == 0, done.stderr[-3000:]
    made = _run(["cmake", "--build", "build"], tmp_path)
    assert made.returncode == 0, made.stdout[-3000:] + made.stderr[-3000:]
    used = _run(["build/small"], tmp_path)
    assert used.returncode == 0, used.stderr[-3000:]
    lines = used.stdout.splitlines()
    assert lines[0] == "1 1 1 1"
    assert "the device must be made once in a process" in lines[1]


def test_a_program_for_another_torch(tmp_path: Path) -> None:
    package = tmp_path / "ipex_xpu_kernels"
    share = package / "share" / "cmake" / "IPEXXpu"
    shutil.copytree(Path(ipex_xpu_kernels.__file__).with_name("share"), package / "share")
    (package / "_build.py").write_text('TORCH = "2.1"\n')
    (package / "libipex_xpu.so").touch()
    (tmp_path / "program").mkdir()
    done = _configure(tmp_path / "program", "-DCOMPONENTS=xpu", f"-DIPEXXpu_DIR={share}")
    assert done.returncode != 0
    text = " ".join(done.stderr.split())
    assert "ipex-xpu-kernels was built for torch 2.1, but torch" in text
    (package / "libipex_xpu.so").unlink()
    shutil.rmtree(tmp_path / "program" / "build")
    done = _configure(tmp_path / "program", "-DCOMPONENTS=xpu", f"-DIPEXXpu_DIR={share}")
    assert done.returncode != 0 and "libipex_xpu.so is missing" in " ".join(done.stderr.split())
