# SPDX-License-Identifier: Apache-2.0
"""The C++ SDK: programs without Python, and Python processes that have opened the C++ library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ipex_cpu_kernels
from ipex_cpu_kernels import _native

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "cpp"
LIBRARY = _native._find_library().parent / "libipex_cpp.so"
COMPILER = os.environ.get("CXX") or shutil.which("g++")
CMAKE = shutil.which("cmake")

# A wheel always has it.
pytestmark = pytest.mark.skipif(
    LIBRARY.parent.resolve().is_relative_to(ROOT) and not LIBRARY.exists(),
    reason="the build folder of the source tree has no libipex_cpp.so",
)


def python(code: str, *arguments: str, **variables: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


CHECK = """
import json, sys, torch
def same():
    x, w = torch.randn(3, 8), torch.randn(8)
    with torch.no_grad():
        torch.testing.assert_close(torch.ops.ipex.rms_norm(x, w), torch.nn.functional.rms_norm(x, (8,), w, 1e-6))
library = sys.argv[1]
"""


def _schemas() -> list[str]:
    """Return the names of all ops, in a process in which no other test has defined any."""
    code = "import json, ipex_core.program.run as _, ipex_core.library.kernels as s; print(json.dumps([*s.schemas()]))"
    names: list[str] = json.loads(python(code))
    return names


def test_opened_without_ipex() -> None:
    """All ops and their kernels are there, with no line of our Python; the variable for the level counts."""
    out = python(
        CHECK
        + """
torch.ops.load_library(library)
same()
names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("ipex::")}
has = torch._C._dispatch_has_kernel_for_dispatch_key
without = [n for n in names if not any(has(n, key) for key in ("CPU", "CompositeExplicitAutograd"))]
import ctypes
level = ctypes.CDLL(library.replace("libipex_cpp", "libipex_cpu")).ipex_cpu_level
level.restype = ctypes.c_char_p
print(json.dumps([sorted(names), without, level().decode(), [m for m in sys.modules if "ipex" in m]]))
""",
        str(LIBRARY),
        IPEX_CPU_ISA="default",
    )
    names, without, level, modules = json.loads(out)
    assert names == sorted(f"ipex::{name}" for name in _schemas())
    assert without == ["ipex::_sum_over_backend"]
    assert level == "default"
    assert modules == []


@pytest.mark.parametrize("first", ["library", "ipex_core"])
def test_beside_python(first: str) -> None:
    """Whichever comes second leaves the ops as they are; derivatives and fake kernels work."""
    steps = ["torch.ops.load_library(library); same()", "import ipex_core; same()"]
    code = "\n".join([*(steps if first == "library" else reversed(steps)), "same()"])
    out = python(
        CHECK
        + code
        + """
x = torch.randn(3, 8, requires_grad=True)
torch.ops.ipex.rms_norm(x, None).sum().backward()
print(tuple(torch.ops.ipex.rms_norm(x.detach().to("meta"), None).shape), x.grad is not None)
from ipex_core import program
from ipex_core.program.run import NativeProgram
""",
        str(LIBRARY),
    )
    assert out.split("\n")[0] == "(3, 8) True"


def test_another_version_is_an_error() -> None:
    """A schema that differs from that of a library loaded before is no definition to go on with."""
    out = python(
        CHECK
        + """
torch.ops.load_library(library)
from ipex_core.library.kernels import define
try:
    define("rms_norm(Tensor x) -> Tensor")
except ImportError as error:
    print(type(error).__name__, error)
""",
        str(LIBRARY),
    )
    assert out.startswith("KernelApiError libipex_cpp.so must be of the version of ipex-core")


def _int8_calls() -> list[tuple[str, tuple[object, ...]]]:
    """Return calls of the ops of static INT8: all kinds of input, residual, activation and result."""
    torch.manual_seed(0)
    calls: list[tuple[str, tuple[object, ...]]] = []
    scale = torch.rand(8) * 0.01 + 0.01
    for dims in (1, 2, 3):
        weight = torch.randint(-128, 128, (8, 4, *[3] * dims), dtype=torch.int8)
        geometry = ([2] * dims, [1] * dims, [1] * dims, 1)
        image = torch.randn(2, 4, *[7] * dims)
        memory = {2: torch.channels_last, 3: torch.channels_last_3d}.get(
            dims, torch.contiguous_format
        )
        codes = torch.randint(0, 256, image.shape, dtype=torch.uint8)
        inputs = (image, image.to(memory_format=memory), image[0], image.bfloat16(), codes)
        added = torch.randn(2, 8, *[4] * dims)
        residuals = (
            None,
            added,
            added.bfloat16(),
            torch.randint(0, 256, added.shape, dtype=torch.uint8),
        )
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            output = (0.05, 100) if dtype == torch.uint8 else (1.0, 0)
            for x in inputs:
                for activation in ("none", "relu", "relu6", "silu"):
                    head = (
                        x,
                        weight,
                        scale,
                        0.02,
                        120,
                        torch.randn(8),
                        *geometry,
                        activation,
                        dtype,
                    )
                    calls.append(("int8_conv", (*head, *output, None, 1.0, 0)))
            for residual in residuals[1:]:
                for activation in ("none", "relu"):
                    head = (codes, weight, scale, 0.02, 120, None, *geometry, activation, dtype)
                    calls.append(("int8_conv", (*head, *output, residual, 0.03, 110)))
                    calls.append(("int8_conv_sum_", (*head, *output, residual.clone(), 0.03, 110)))
    table = torch.ops.quantized.embedding_bag_byte_prepack(torch.randn(20, 8))
    bag = (torch.randint(0, 20, (9,)), torch.tensor([0, 2, 9]))
    calls.append(("int8_embedding_bag", (table, *bag, None, True)))
    calls.append(("int8_embedding_bag", (table, *bag, torch.rand(9), False)))
    return calls


def test_int8_ops_are_those_of_python(tmp_path: Path) -> None:
    """The native convolutions and embedding bags give the bits and the layout that ipex_quant gives."""
    pytest.importorskip("ipex_quant.int8.ops")
    calls = _int8_calls()
    torch.save(calls, tmp_path / "calls.pt")
    results = [getattr(torch.ops.ipex_quant, name)(*arguments) for name, arguments in calls]
    torch.save(results, tmp_path / "results.pt")
    out = python(
        CHECK
        + """
torch.ops.load_library(library)
calls, results = (torch.load(f"{sys.argv[2]}/{name}.pt") for name in ("calls", "results"))
for again in (True, False):
    for (name, arguments), y in zip(calls, results):
        if name.endswith("_") and again: continue
        got = getattr(torch.ops.ipex_quant, name)(*arguments)
        assert got.dtype == y.dtype and got.stride() == y.stride() and torch.equal(got, y), (name, arguments[6:])
print(len(calls), [m for m in sys.modules if "ipex" in m])
""",
        str(LIBRARY),
        str(tmp_path),
    )
    assert out.split("\n")[0] == f"{len(calls)} []"


def test_int8_weights_that_change() -> None:
    """A weight that is written to is packed again; two that follow each other at one address are two."""
    python(
        CHECK
        + """
torch.ops.load_library(library)
def run(x, weight):
    tail = ([1, 1], [0, 0], [1, 1], 1, "none", torch.float32, 1.0, 0, None, 1.0, 0)
    return torch.ops.ipex_quant.int8_conv(x, weight, torch.ones(8), 1.0, 0, None, *tail)
x = torch.randint(0, 50, (1, 4, 6, 6)).float()
weight = torch.randint(-9, 9, (8, 4, 3, 3), dtype=torch.int8)
for _ in range(20):
    torch.testing.assert_close(run(x, weight), torch.nn.functional.conv2d(x, weight.float()))
    if _ % 2:
        weight.random_(-9, 9)
    else:
        del weight
        weight = torch.randint(-9, 9, (8, 4, 3, 3), dtype=torch.int8)
""",
        str(LIBRARY),
    )


@pytest.mark.parametrize("first", ["library", "ipex_quant"])
def test_int8_ops_beside_python(first: str) -> None:
    """Whichever comes second leaves the ops as they are, and both have fake kernels."""
    steps = ["torch.ops.load_library(library)", "import ipex_quant.int8.ops"]
    out = python(
        CHECK
        + "\n".join(steps if first == "library" else reversed(steps))
        + """
table = torch.ops.quantized.embedding_bag_byte_prepack(torch.randn(20, 8))
bag = (torch.tensor([0, 1, 2]), torch.tensor([0, 2]))
y = torch.ops.ipex_quant.int8_embedding_bag(table, *bag, None, False)
fake = torch.ops.ipex_quant.int8_embedding_bag(*[x.to("meta") for x in (table, *bag)], None, False)
print(tuple(y.shape), tuple(fake.shape))
""",
        str(LIBRARY),
    )
    assert out.split("\n")[0] == "(2, 8) (2, 8)"


def test_impossible_level_is_reported() -> None:
    command = "import sys, torch; torch.ops.load_library(sys.argv[1])"
    result = subprocess.run(
        [sys.executable, "-c", command, str(LIBRARY)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "IPEX_CPU_ISA": "sse9"},
    )
    assert result.returncode == 0
    assert "libipex_cpp: IPEX_CPU_ISA: ISA level sse9 cannot be used" in result.stderr


def test_schemas_are_those_of_the_specs() -> None:
    """The generated file is up to date: python tools/generate_schemas.py."""
    tool = ROOT / "tools" / "generate_schemas.py"
    result = subprocess.run(
        [sys.executable, str(tool), "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_headers_stand_alone(tmp_path: Path) -> None:
    """Each installed header compiles as C++17, ipex/c_api.h as C, too; only headers in ipex/torch need torch."""
    include = Path(ipex_cpu_kernels.cmake_prefix_path).parent.parent / "include"
    found = (path.relative_to(include) for path in include.rglob("*.h"))
    headers = sorted(header for header in found if header.parent.name != "torch")
    assert Path("ipex/c_api.h") in headers and Path("ipex/ops/rms_norm/rms_norm.h") in headers
    paths = [f"-I{include}", f"-I{include / 'ipex' / 'ops'}"]
    source = tmp_path / "headers.cpp"
    source.write_text("".join(f'#include "{header.as_posix()}"\n' for header in headers))
    flags = ["-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([COMPILER, "-std=c++17", *flags, *paths, str(source)], check=True)
    source = tmp_path / "c_api.c"
    source.write_text('#include "ipex/c_api.h"\n')
    subprocess.run([COMPILER, "-xc", "-std=c99", *flags, *paths, str(source)], check=True)


def test_kernels_by_name() -> None:
    """The C function gives the address of a kernel at the level in use."""
    import ctypes

    native = _native.load()._library
    find = native.ipex_cpu_find_kernel
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    address = find(b"ipex_k_rms_norm_f32")
    assert address and find(b"ipex_k_no_such_kernel") is None
    kernel = ctypes.CFUNCTYPE(
        *(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_bool),
        *(ctypes.c_float, ctypes.c_float, ctypes.c_void_p),
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
    )(address)
    x, w, y = torch.randn(2, 40), torch.randn(40), torch.empty(2, 40)
    kernel(x.data_ptr(), 40, w.data_ptr(), True, 1e-6, 0.0, y.data_ptr(), 40, 0, 2)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (40,), w, 1e-6))


@pytest.mark.skipif(COMPILER is None or CMAKE is None, reason="no C++ compiler or no cmake")
@pytest.mark.skipif(not EXAMPLE.is_dir(), reason="examples are not in this tree")
def test_example_program(tmp_path: Path) -> None:
    """examples/cpp, built outside the source tree, gives what Python gave, at two ISA levels."""
    pytest.importorskip("ipex")
    models, build = tmp_path / "models", tmp_path / "build"
    run(sys.executable, str(EXAMPLE / "make_models.py"), str(models))
    prefix = f"{torch.utils.cmake_prefix_path};{ipex_cpu_kernels.cmake_prefix_path}"
    generator = ["-GNinja"] if shutil.which("ninja") else []
    run(
        *(CMAKE, "-S", str(EXAMPLE), "-B", str(build), *generator),
        *(f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_CXX_COMPILER={COMPILER}"),
        "-DCMAKE_CXX_FLAGS=-Wall -Wextra",
    )
    run(CMAKE, "--build", str(build))
    for level in ("", "default"):
        out = run(str(build / "run_models"), str(models), IPEX_CPU_ISA=level)
        assert "TorchScript: same as in Python" in out
        assert "AOTInductor: same as in Python" in out
        assert "Precompiled: same as in Python" in out
        assert "INT8 TorchScript: same as in Python" in out
        assert f"ISA level {level}" in out
    # Without the library the models cannot run: it is what brings the ops.
    code = "import sys, torch; torch.jit.load(sys.argv[1])"
    for file, namespace in (("model.ts", "ipex::"), ("int8.ts", "ipex_quant::")):
        command = [sys.executable, "-c", code, str(models / file)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode != 0 and namespace in result.stderr


PRECOMPILED = """
#include <ipex/torch/precompiled.h>
#include <torch/script.h>
#include <fstream>
#include <iostream>
std::vector<at::Tensor> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<at::Tensor> tensors;
  const c10::IValue list = torch::jit::pickle_load(bytes);
  for (const c10::IValue& one : list.toListRef()) tensors.push_back(one.toTensor());
  return tensors;
}
// run FILE INPUTS WANTED: compares; run FILE INPUTS: prints the error
int main(int argc, char** argv) {
  try {
    const ipex::Precompiled model(argv[1]);
    const std::vector<at::Tensor> inputs = read(argv[2]);
    const std::vector<c10::IValue> got = model(inputs);
    if (argc < 4) return 1;
    const std::vector<at::Tensor> wanted = read(argv[3]);
    for (std::size_t i = 0; i < wanted.size(); ++i)
      if (!got.at(i).toTensor().equal(wanted[i])) return 2;
    std::cout << "same " << wanted.size() << " " << got.size() << std::endl;
  } catch (const c10::Error& error) {
    std::cout << error.what_without_backtrace() << std::endl;
  }
}
"""


class Net(torch.nn.Module):
    """A convolution, a linear layer, ops without an instruction, and a result that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.linear = torch.nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.cumsum(torch.relu(self.conv(x)).mean((2, 3)) * scale, 1)
        return self.linear(y), y.sort(dim=1)[0], x, x.shape[0] * 2


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_precompiled_files_without_python(tmp_path: Path) -> None:
    """A program runs files with the bits of Python, and refuses what Python refuses."""
    ipex = pytest.importorskip("ipex")
    torch_folder, kernels = Path(torch.__path__[0]), LIBRARY.parent
    include = Path(ipex_cpu_kernels.cmake_prefix_path).parent.parent / "include"
    (tmp_path / "main.cpp").write_text(PRECOMPILED)
    program = tmp_path / "run"
    run(
        *(COMPILER, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", str(tmp_path / "main.cpp")),
        *("-isystem", str(torch_folder / "include")),
        *("-isystem", str(torch_folder / "include" / "torch" / "csrc" / "api" / "include")),
        *(
            f"-I{include}",
            "-o",
            str(program),
            f"-L{torch_folder / 'lib'}",
            "-ltorch",
            "-ltorch_cpu",
        ),
        *("-lc10", "-Wl,--no-as-needed", str(LIBRARY), str(kernels / "libipex_cpu.so")),
        f"-Wl,-rpath,{torch_folder / 'lib'}:{kernels}",
    )
    torch.manual_seed(0)
    model = Net().eval()

    def inputs(*sizes: int) -> list[torch.Tensor]:
        return [torch.randn(sizes), torch.rand(16)]

    def save(name: str, tensors: object) -> str:
        torch.save(tensors, tmp_path / name)
        return str(tmp_path / name)

    batch, height = torch.export.Dim("batch", min=1, max=9), torch.export.Dim("height", min=2)
    dynamic = {"x": {0: batch, 2: 2 * height + 1}, "scale": None}
    with torch.no_grad():
        for shapes, sizes in ((None, (2, 3, 5, 6)), (dynamic, (4, 3, 9, 6))):
            made = ipex.precompile(model, tuple(inputs(2, 3, 5, 6)), dynamic_shapes=shapes)
            assert made.calls
            file = made.save(tmp_path / "model.safetensors")
            given = inputs(*sizes)
            wanted = [one for one in made(*given) if isinstance(one, torch.Tensor)]
            files = (str(file), save("in.pt", given), save("out.pt", wanted))
            assert run(str(program), *files) == "same 3 4\n"
    x, scale = inputs(4, 3, 9, 6)
    for wrong, text in (
        (
            [x.double(), scale],
            "input x must be a dense tensor of float32 on the CPU, got CPUDouble",
        ),
        ([x[0], scale], "input x must have 4 dimensions, got 3"),
        ([x[:, :2], scale], "input x must have size 3 in dimension 1 got shape [4, 2, 9, 6]"),
        ([x[:, :, :8], scale], "must have size 2*"),
        ([x.repeat(3, 1, 1, 1), scale], "in dimension 0, in its range, got shape [12, 3, 9, 6]"),
        ([x], "the model takes 2 tensors, got 1"),
    ):
        assert text in run(str(program), str(file), save("wrong.pt", wrong))
    whole = Path(file).read_bytes()
    changed = bytearray(whole)
    changed[-3] ^= 1
    for content, text in (
        (bytes(changed), "the contents are not what was written"),
        (whole[:-8], "is not in the file"),
        (whole[:40], "it is no complete safetensors file"),
        (b"\xff" * 64, "it is no complete safetensors file"),
    ):
        (tmp_path / "bad.safetensors").write_bytes(content)
        out = run(str(program), str(tmp_path / "bad.safetensors"), files[1])
        assert text in out and "bad.safetensors must be a file of Precompiled.save" in out


PROGRAM = """
#include <cstdio>
#include <ipex/c_api.h>
int main() { std::printf("level %s\\n", ipex_cpu_level()); }
"""
LISTS = """
cmake_minimum_required(VERSION 3.22)
project(small LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 17)
find_package(IPEX REQUIRED ${COMPONENTS})
find_package(IPEX REQUIRED)
if(NOT IPEX_WITH_CPU OR IPEX_WITH_XPU OR NOT IPEX_INCLUDE_DIRS OR NOT TORCH_IPEX_INCLUDE_DIRS)
  message(FATAL_ERROR "variables")
endif()
add_executable(small main.cpp)
target_link_libraries(small PRIVATE ${TARGET})
target_compile_options(small PRIVATE ${TORCH_IPEX_CXX_FLAGS})
"""


@pytest.mark.skipif(COMPILER is None or CMAKE is None, reason="no C++ compiler or no cmake")
def test_cmake_package(tmp_path: Path) -> None:
    """Spaces in all paths, the package asked for twice, each name of the target; components and what is missing."""
    root, source = tmp_path / "an installation", tmp_path / "a program"
    share = Path(ipex_cpu_kernels.cmake_prefix_path)
    shutil.copytree(share, root / "share" / "cmake")
    shutil.copytree(share.parent.parent / "include", root / "include")
    (root / "lib").symlink_to(LIBRARY.parent.resolve())
    source.mkdir()
    (source / "main.cpp").write_text(PROGRAM)
    (source / "CMakeLists.txt").write_text(LISTS)

    def configure(
        components: str, target: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        prefix = f"{torch.utils.cmake_prefix_path};{root / 'share' / 'cmake'}"
        command = [
            *(str(CMAKE), "-S", str(source), "-B", str(tmp_path / f"build {target}"), "-Wno-dev"),
            *(f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_CXX_COMPILER={COMPILER}"),
            *(f"-DCOMPONENTS={components}", f"-DTARGET={target}"),
        ]
        environment = {**os.environ, **variables}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    for target, components in (
        ("IPEX::ipex", "COMPONENTS;cpu"),
        ("intel-ext-pt-cpu", "OPTIONAL_COMPONENTS;xpu"),
        ("IPEX::cpu_kernels", ""),
    ):
        done = configure(components, target)
        assert done.returncode == 0, done.stderr[-2000:]
        build = tmp_path / f"build {target}"
        run(CMAKE, "--build", str(build))
        assert run(str(build / "small")).startswith("level ")
    for components, variables, text in (
        ("COMPONENTS;xpu", {}, "the component xpu is in the package ipex-xpu-kernels: pip install"),
        ("COMPONENTS;gpu", {}, "there is no component gpu, the components are: cpu, xpu"),
        ("", {"IPEX_INSTALL_PREFIX": str(tmp_path / "none")}, "none/libipex_cpp.so is missing"),
    ):
        done = configure(components, "wrong", **variables)
        assert done.returncode != 0
        assert text in " ".join(done.stderr.split())


def run(*command: str | None, **variables: str) -> str:
    result = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout
