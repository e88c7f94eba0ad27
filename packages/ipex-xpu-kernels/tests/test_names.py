# SPDX-License-Identifier: Apache-2.0
"""The names of IPEX's ``ipex.xpu``: there, on torch.xpu, too, and doing what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kernel_checks
import pytest
import torch
from torch.nn import functional as F

import ipex_xpu_kernels as xpu
from ipex_core import config
from ipex_xpu_kernels import _names

pytestmark = pytest.mark.usefixtures("needs_device")

#: Of the documentation of IPEX 2.1 (xpu) to 2.8.
DEVICE = """init is_initialized is_available device_count getDeviceIdListForCard device device_of set_device
 get_device_name get_device_capability get_device_properties current_device synchronize StreamContext stream set_stream
 current_stream get_device_type Stream Event ByteStorage DoubleStorage FloatStorage HalfStorage LongStorage IntStorage
 ShortStorage CharStorage BoolStorage BFloat16Storage ComplexFloatStorage ComplexDoubleStorage"""
MEMORY = """empty_cache memory_stats memory_stats_as_nested_dict reset_accumulated_memory_stats reset_peak_memory_stats
 memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_snapshot memory_summary mem_get_info
 get_rng_state get_rng_state_all set_rng_state set_rng_state_all manual_seed manual_seed_all seed seed_all initial_seed
 fork_rng Generator default_generators"""
AUTOCAST = """autocast get_autocast_xpu_dtype is_autocast_xpu_enabled set_autocast_xpu_dtype set_autocast_xpu_enabled"""
CONFIGURATION = """optimize FP32MathMode get_fp32_math_mode set_fp32_math_mode fp32_math_mode XPUComputeEng
 get_compute_eng set_compute_eng compute_eng OnednnVerbLevel set_onednn_verbose onednn_verbose OnemklVerbLevel
 set_onemkl_verbose onemkl_verbose using_onednn_layout enable_onednn_layout disable_onednn_layout onednn_layout
 is_onednn_layout enable_onednn_deterministic disable_onednn_deterministic has_onemkl has_fp64_dtype has_2d_block_array
 has_xmx has_xetla get_compiler_version using_sync_mode enable_sync_mode disable_sync_mode using_tile_as_device
 enable_tile_as_device disable_tile_as_device using_simple_trace enable_simple_trace disable_simple_trace
 get_verbose_level set_verbose_level has_multi_context has_channels_last_1d has_jit_quantization_save from_usm to_usm
 set_log_level get_log_level set_log_output_file_path get_log_output_file_path set_log_rotate_file_size
 get_log_rotate_file_size set_log_split_file_size get_log_split_file_size set_log_component get_log_component"""


def test_all_names_are_there() -> None:
    for name in f"{DEVICE} {MEMORY} {AUTOCAST} {CONFIGURATION}".split():
        assert getattr(xpu, name, None) is not None, name
        assert getattr(torch.xpu, name, None) is not None, name
    with pytest.raises(AttributeError, match=r"torch.xpu.* has no attribute 'nonsense'"):
        torch.xpu.nonsense  # noqa: B018
    for name, instead in _names.INSTEAD.items():
        with pytest.raises(NotImplementedError, match=f"ipex.xpu.{name} is not offered; use"):
            getattr(xpu, name)()
        assert instead
    from torch.xpu import amp
    from torch.xpu.cpp_extension import DPCPPExtension, include_paths
    from torch.xpu.overrides import convert_default_dtype

    assert callable(DPCPPExtension) and callable(convert_default_dtype) and include_paths()
    assert amp.autocast is xpu.amp.autocast is torch.xpu.amp.autocast


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_devices_and_random_numbers() -> None:
    assert xpu.get_device_type() == kernel_checks.DEVICE[:3]
    assert xpu.getDeviceIdListForCard() == list(range(torch.xpu.device_count()))
    with pytest.raises(ValueError, match="card_id must be"):
        xpu.getDeviceIdListForCard(99)
    with torch.xpu.device_of(torch.ones(1, device="xpu")):
        assert torch.xpu.current_device() == 0
    storage = xpu.FloatStorage(4)
    assert storage.dtype == torch.float32 and storage.device.type == "xpu" and len(storage) == 4
    torch.xpu.manual_seed(3)
    first = torch.rand(3, device="xpu")
    torch.xpu.manual_seed(3)
    with xpu.fork_rng():
        torch.rand(5, device="xpu")
    assert torch.rand(3, device="xpu").equal(first)
    state = torch.xpu.get_rng_state_all()
    a = torch.randn(2, device="xpu")
    torch.xpu.set_rng_state_all(state)
    assert torch.randn(2, device="xpu").equal(a)
    assert isinstance(torch.xpu.initial_seed(), int) and torch.xpu.default_generators
    assert xpu.Generator().device.type == "xpu"


def test_settings() -> None:
    assert xpu.get_fp32_math_mode() == xpu.FP32MathMode.FP32
    with xpu.fp32_math_mode("2"):
        assert xpu.get_fp32_math_mode() == xpu.FP32MathMode.BF32
    assert xpu.get_fp32_math_mode() == xpu.FP32MathMode.FP32
    config.set_fp32_math_mode(config.FP32MathMode.BF32, device="xpu")
    assert xpu.get_fp32_math_mode() == config.get_fp32_math_mode("xpu") == xpu.FP32MathMode.BF32
    config.set_fp32_math_mode(device="xpu")
    assert xpu.get_fp32_math_mode() == xpu.FP32MathMode.FP32
    for bad in ("bf32", 7, None, 1.5j):
        with pytest.raises(RuntimeError, match="must be one of FP32 0, TF32 1, BF32 2"):
            xpu.set_fp32_math_mode(bad)
    with xpu.compute_eng(xpu.XPUComputeEng.BASIC):
        assert xpu.get_compute_eng() == xpu.XPUComputeEng.BASIC
    with pytest.raises(NotImplementedError, match="XETLA"):
        xpu.set_compute_eng(xpu.XPUComputeEng.XETLA)
    assert not xpu.using_onednn_layout() and not xpu.is_onednn_layout(torch.ones(1, device="xpu"))
    with pytest.raises(NotImplementedError, match="channels_last"), xpu.onednn_layout():
        pass
    with pytest.raises(RuntimeError, match="must be one of OFF 0, ON 1"):
        xpu.set_onednn_verbose(5)
    with xpu.onednn_verbose(xpu.OnednnVerbLevel.OFF), xpu.onemkl_verbose(xpu.OnemklVerbLevel.OFF):
        pass
    # torch's own test utilities, which other tests import, lock the flags.
    with torch.backends.__allow_nonbracketed_mutation():  # type: ignore[attr-defined]
        xpu.enable_onednn_deterministic()
        assert torch.backends.mkldnn.deterministic
        xpu.disable_onednn_deterministic()
    assert xpu.has_fp64_dtype() == torch.xpu.get_device_properties().has_fp64
    assert not (xpu.has_xmx() or xpu.has_xetla() or xpu.has_onemkl() or xpu.has_2d_block_array())
    assert xpu.get_compiler_version()


def test_autocast() -> None:
    a = torch.randn(4, 4, device="xpu")
    with torch.xpu.amp.autocast():
        assert xpu.amp.is_autocast_xpu_enabled() and (a @ a).dtype == torch.bfloat16
        with torch.xpu.amp.autocast(enabled=False):
            assert (a @ a).dtype == torch.float32
    with torch.xpu.amp.autocast(dtype=torch.float16):
        assert (a @ a).dtype == torch.float16
    before = xpu.amp.get_autocast_xpu_dtype()
    xpu.amp.set_autocast_xpu_dtype(torch.bfloat16)
    xpu.amp.set_autocast_xpu_enabled(True)
    assert (a @ a).dtype == xpu.amp.get_autocast_xpu_dtype() == torch.bfloat16
    xpu.amp.set_autocast_xpu_enabled(False)
    xpu.amp.set_autocast_xpu_dtype(before)

    class Twice(torch.autograd.Function):
        @staticmethod
        @xpu.amp.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        @xpu.amp.custom_bwd
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return 2 * grad

    x = a.bfloat16().requires_grad_()
    with torch.autocast("xpu"):
        assert Twice.apply(x).dtype == torch.float32


def test_other_default_dtypes() -> None:
    xpu.overrides.convert_default_dtype(torch.float64, torch.float32)
    try:
        assert torch.zeros(2, dtype=torch.float64, device="xpu").dtype == torch.float32
        assert torch.ones(2).to(torch.float64).dtype == torch.float32
        assert torch.tensor([1.0], dtype=torch.double, requires_grad=True).requires_grad
        xpu.overrides.convert_default_dtype(torch.float64, torch.float32, only_device=True)
        assert torch.zeros(2, dtype=torch.float64).dtype == torch.float64
        assert torch.zeros(2, dtype=torch.float64).to("xpu").dtype == torch.float32
    finally:
        xpu.overrides.convert_default_dtype(None, None)
    assert torch.zeros(2, dtype=torch.float64, device="xpu").dtype == torch.float64
    with pytest.raises(TypeError, match="must be dtypes, or both None"):
        xpu.overrides.convert_default_dtype(torch.float64, None)


def test_optimize_on_the_device() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(72, 4),
    )  # fmt: skip
    x = torch.randn(2, 3, 5, 5, device="xpu")
    model.to("xpu").eval()
    with torch.no_grad():
        expected = model(x)
        fast = torch.xpu.optimize(model, dtype=torch.bfloat16)
        assert F.cosine_similarity(fast(x.bfloat16()).float(), expected).min().item() > 0.99
    model.train()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained, optimizer = xpu.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
    with torch.autocast("xpu"):
        trained(x.bfloat16()).float().square().mean().backward()
    optimizer.step()
    assert all(p.device.type == "xpu" for p in trained.parameters())
    changed = [not a.equal(p.float()) for a, p in zip(before, trained.parameters(), strict=True)]
    assert any(changed)


def test_dlpack() -> None:
    x = torch.arange(6.0, device="xpu").view(2, 3)
    y = torch.from_dlpack(x)
    y[0, 0] = 7
    assert x[0, 0].item() == 7 and y.device == x.device
    kind = int(x.__dlpack_device__()[0])
    assert kind == 14  # kDLOneAPI


EXTENSION = r"""
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "xpu_extension", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_xpu_extension() { return PyModule_Create(&module); }
"""


def test_extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.xpu import cpp_extension

    for name in ("CXX", "CMPLR_ROOT"):
        monkeypatch.delenv(name, raising=False)
    source = tmp_path / "extension.cpp"
    source.write_text(EXTENSION)
    path = os.environ["PATH"]
    with pytest.raises(ValueError, match="only the key 'cxx'"):
        cpp_extension.DPCPPExtension("a", ["a.cpp"], extra_compile_args={"nvcc": []})
    # A compiler in the place of icpx that knows no SYCL shows that it is called, and how.
    fake = tmp_path / "root" / "bin" / "icpx"
    fake.parent.mkdir(parents=True)
    fake.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nfor a in "$@"; do shift; [ "$a" = -fsycl ] || set -- "$@" "$a";'
        ' done\nexec g++ "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("CMPLR_ROOT", str(tmp_path / "root"))
    (tmp_path / "setup.py").write_text(
        "import torch\nfrom setuptools import setup\n"
        "from ipex_xpu_kernels.cpp_extension import DPCPPExtension, DpcppBuildExtension\n"
        "setup(name='x', ext_modules=[DPCPPExtension('xpu_extension', ['extension.cpp'],"
        " extra_compile_args={'cxx': ['-DANSWER=42', '-O0']})],"
        " cmdclass={'build_ext': DpcppBuildExtension.with_options(use_ninja=False)})\n"
    )
    built = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    calls = (tmp_path / "calls").read_text()
    assert "-fsycl" in calls and "-DANSWER=42" in calls
    code = "import torch, xpu_extension; print(xpu_extension.answer())"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "42"


def test_names_that_the_migration_table_says_are_here() -> None:
    pytest.importorskip("ipex")
    from ipex.compat import migration

    names = [row.name for row in migration.rows().values() if row.state == "xpu"]
    assert len(names) > 100
    for name in names:
        assert migration.resolve(f"intel_extension_for_pytorch.{name}") is not None, name
    from intel_extension_for_pytorch.xpu.utils import set_compute_eng

    assert set_compute_eng is xpu.set_compute_eng


@pytest.mark.usefixtures("always")
def test_times_of_kernels() -> None:
    x = torch.randn(1 << 16, device="xpu")
    with pytest.raises(ZeroDivisionError), xpu.kernel_times() as times:
        x.exp()
        with torch.xpu.stream(torch.xpu.Stream()):
            x.exp()
        x + x
        raise ZeroDivisionError
    x.exp()  # not measured
    totals = times.totals()
    assert {name: count for name, (count, _) in totals.items()} == {
        "unary<exp_,float>": 2,
        "binary<add,float>": 1,
    }
    assert all(end > begin > 0 for _, begin, end in times.launches)
    assert "unary<exp_,float>" in str(times)
    with xpu.kernel_times() as none:
        pass
    assert none.launches == [] and none.totals() == {}
