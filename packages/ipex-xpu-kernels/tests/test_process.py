# SPDX-License-Identifier: Apache-2.0
"""Processes of their own: start, exit, no device, two devices, damaged caches, late registration."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kernel_checks import DEVICE, on_cpu_device

TIMEOUT = 120


def python(code: str, **variables: str | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "IPEX_XPU_DEVICE": DEVICE, "OMP_NUM_THREADS": "1"}
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
    # One that does not end its threads aborts in every second run.
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(python, [code] * 6):
            assert result.returncode == 0 and result.stderr == ""


def test_the_package_may_be_imported_before_torch() -> None:
    code = "import ipex_xpu_kernels as xpu; print(xpu.activate().mode, xpu.state().mode)\n"
    code += "import torch; print(torch.xpu.memory_allocated(), xpu.fallback_stats())"
    assert output(code) == "own own\n0 {}"


def test_an_open_profiler_at_exit() -> None:
    code = START + (
        "p = torch.profiler.profile(); p.start()\n"
        "x = torch.ones(3, device='xpu', requires_grad=True); (x * 2).sum().backward()"
    )
    for _ in range(2):
        result = python(code)
        assert result.returncode == 0, result.stderr
    closed = START + (
        "with torch.profiler.profile() as p: (torch.ones(3, device='xpu') * 2).sum()\n"
        "print('aten::mul' in p.key_averages().table())"
    )
    assert output(closed).splitlines()[-1] == "True"


def test_a_kernel_whose_assertion_fails_ends_the_process() -> None:
    """It cannot be caught; what matters is that nobody waits for ever, and that the assertion is named."""
    result = python(
        START
        + "source = '#include \"ipex/xpu.h\"\\nIPEX_KERNEL(1) void k(float* x) { assert(x[0] > 1.f); }'\n"
        "x = torch.zeros(1, device='xpu'); xpu.load_inline('m', source, ['k']).k(x, size=1)\n"
        "torch.xpu.synchronize(); print('went on')"
    )
    assert result.returncode != 0 and "went on" not in result.stdout
    assert "x[0] > 1.f" in result.stdout + result.stderr


def test_an_exception_in_a_script() -> None:
    code = START + (
        "x = torch.ones(3, device='xpu', requires_grad=True)\n"
        "class Bad(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x): return x * 2\n"
        "    @staticmethod\n    def backward(ctx, g): raise ValueError('from backward')\n"
        "try: Bad.apply(x).sum().backward()\nexcept ValueError as e: print(e)\n"
        "torch.full((3,), 2.0, device='xpu'); raise SystemExit(3)"
    )
    result = python(code)
    assert result.returncode == 3 and result.stdout.strip() == "from backward", result.stderr


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
        "import os, torch; torch.ones(2, requires_grad=True).sum().backward(); os.environ['IPEX_XPU_DEVICE'] = "
        f"{DEVICE!r}\n"
        "import ipex_xpu_kernels as xpu, ipex_xpu_kernels._device as d; d._state = None\n"
        "try: xpu.activate()\nexcept RuntimeError as e: print(e)\nprint(xpu.state().mode)"
    )
    text = output(code, IPEX_XPU_DEVICE=None)
    assert "a backward pass has run" in text and text.endswith("none")


def test_late_registration_repairs_what_torch_has_asked() -> None:
    code = (
        "import os, torch; torch.ones(2).is_pinned(); torch.accelerator.is_available()\n"
        "os.environ['IPEX_XPU_DEVICE'] = "
        f"{DEVICE!r}\n"
        "import ipex_xpu_kernels as xpu, ipex_xpu_kernels._device as d; d._state = None\n"
        "xpu.activate(); print(torch.accelerator.current_accelerator(), torch.ones(2).pin_memory().is_pinned())"
    )
    assert output(code, IPEX_XPU_DEVICE=None) == "xpu True"


@on_cpu_device
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


@on_cpu_device
def test_cache_of_binaries(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = output(USE_KERNEL, IPEX_XPU_CACHE=str(folder)).split()
    assert int(first[0]) > 0 and first[1:] == ["0", "0"]
    assert output(USE_KERNEL, IPEX_XPU_CACHE=str(folder)).split() == ["0", first[0], "0"]
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[:-7])
    assert output(USE_KERNEL, IPEX_XPU_CACHE=str(folder)).split() == first  # made again
    for file in folder.iterdir():
        file.write_bytes(b"nonsense" * 100)
    assert output(USE_KERNEL, IPEX_XPU_CACHE=str(folder)).split() == first
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


def test_work_in_forked_children_raises() -> None:
    code = START + (
        "import os\nx = torch.ones(3, device='xpu'); x += 1\n"
        "def child():\n"
        "    for work in (lambda: x * 2, lambda: torch.ones(2, device='xpu'), lambda: x.cpu(),\n"
        "                 lambda: torch.special.i0(x), lambda: torch.randn(2).to('xpu')):\n"
        "        try: work(); return 1\n"
        "        except RuntimeError as e:\n"
        "            if 'forked subprocess' not in str(e): print(e, flush=True); return 2\n"
        "    return 0\n"
        "if (pid := os.fork()) == 0: raise SystemExit(child())\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), x.sum().item())"
    )
    assert output(code) == "0 6.0"


def test_staged_fallback_gives_the_same() -> None:
    code = START + (
        "torch.manual_seed(0); x = torch.randn(4, 5, device='xpu')\n"
        "out = torch.empty(0, device='xpu'); torch.cumsum(x.t(), 0, out=out)\n"
        "print(out.sum().item(), x.t().sort()[0].cumprod(0).sum().item(), x.t()[1:].tril_().sum().item())"
    )
    # The same kernels in both runs.
    always = {"IPEX_XPU_KERNELS": "always"}
    assert output(code, IPEX_XPU_ZERO_COPY="0", **always) == output(code, **always)


def test_another_torch_is_named() -> None:
    code = (
        "import ipex_xpu_kernels._build as b; b.TORCH = '2.9'\nimport ipex_xpu_kernels._load as l\n"
        "try: l.native()\nexcept ImportError as e: print(e)"
    )
    text = output(code, IPEX_XPU_DEVICE=None)
    assert "was built for torch 2.9, but torch" in text
    assert "install the wheel ipex_xpu_kernels-" in text and "+torch2.9-" not in text


@on_cpu_device  # the bundle for a GPU is no wheel
def test_doctor_names_the_wheel_that_fits() -> None:
    """Without a device, where nothing has tried to load the native module."""
    code = (
        "import ipex_xpu_kernels._build as b, ipex_xpu_kernels as xpu\n"
        "b.TORCH = '2.9'; print(*xpu.doctor()[1], sep='\\n'); import torch\n"
        "b.TORCH = '.'.join(torch.__version__.split('.')[:2])\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name: None if name.endswith('._C') else find(name)\n"
        "print(*xpu.doctor()[1], sep='\\n')"
    )
    text = output(code, IPEX_XPU_DEVICE=None)
    assert "was built for torch 2.9, but torch" in text
    assert "was built for another Python than" in text
    assert text.count("install the wheel ipex_xpu_kernels-") == 2


@on_cpu_device
def test_two_sycl_runtimes_are_refused(tmp_path: Path) -> None:
    # A library that looks like the run-time of another release.
    library = tmp_path / "libsycl.so.8"
    built = subprocess.run(
        ["g++", "-shared", "-x", "c++", "/dev/null", "-o", str(library)], check=False
    )
    if built.returncode != 0:
        pytest.skip("no compiler")
    code = (
        f"import ctypes; ctypes.CDLL({str(library)!r})\n"
        "import os; os.environ['IPEX_XPU_DEVICE'] = "
        f"{DEVICE!r}\n"
        "import ipex_xpu_kernels as xpu, ipex_xpu_kernels._device as d; d._state = None\n"
        "try: xpu.activate()\nexcept ImportError as e: print(e)\nprint(xpu.state().mode)"
    )
    text = output(code, IPEX_XPU_DEVICE=None)
    assert f"another SYCL run-time is loaded in this process ({library})" in text
    assert "libsycl.so.9" in text and text.endswith("none")


def test_a_missing_run_time_is_named() -> None:
    code = (
        "import importlib\nfrom ipex_xpu_kernels import _load\nreal = importlib.import_module\n"
        "def fake(name):\n"
        "    if name.endswith('._C'): raise ImportError('libsycl.so.9: cannot open shared object file')\n"
        "    return real(name)\n"
        "_load.importlib.import_module = fake\n"
        "try: _load.native()\nexcept ImportError as e: print(e)"
    )
    text = output(code, IPEX_XPU_DEVICE=None)
    assert "the SYCL run-time cannot be loaded (libsycl.so.9" in text
    assert "pip install 'intel-sycl-rt>=2026.0,<2027'" in text


@on_cpu_device
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o555)
    assert int(output(USE_KERNEL, IPEX_XPU_CACHE=str(folder)).split()[0]) > 0
    assert output(USE_KERNEL, IPEX_XPU_CACHE="0").split()[1:] == ["0", "0"]


def test_doctor() -> None:
    code = START + "rows, advice = xpu.doctor(); print(dict(rows)); print(advice)"
    rows, advice = output(code).splitlines()
    assert "xpu:0" in rows and "driver" in rows and advice == "[]"
    rows, advice = output(code, IPEX_XPU_DEVICE="").splitlines()
    assert "IPEX_XPU_DEVICE=cpu" in advice or "xpu:0" in rows
    rows, advice = output(code, IPEX_XPU_DEVICE="cpu:99").splitlines()
    assert "must be gpu, cpu" in rows and "must be gpu, cpu" in advice


@on_cpu_device
def test_a_torch_with_xpu_gets_kernels_and_nothing_else() -> None:
    # The stand-in for the device of such a torch is ours, without kernels for torch.ops.ipex.
    code = (
        "import os, torch\nos.environ['IPEX_XPU_DEVICE'] = "
        f"{DEVICE!r}\n"
        "import ipex_xpu_kernels as xpu, ipex_xpu_kernels._device as d, ipex_xpu_kernels._sycl as s\n"
        "import ipex_xpu_kernels._torch_xpu as t\n"
        "s.prepare_environment(); n = d.native(); n.initialize('cpu')\n"
        "d._configure(n); n.register_device(); t.install(n); d._state = None\n"
        "print(xpu.activate(), dict(xpu.doctor()[0])['device'])\n"
        "try: xpu._device.require('x')\nexcept RuntimeError as e: print(e)\n"
        "source = '#include \"ipex/xpu.h\"\\nIPEX_KERNEL(1) void f(int* p, long n) {}'\n"
        "f = xpu.load_inline('native_test', source, ['f']).f; print(f.parameters); f(None, 3, size=3)\n"
        "import ipex_core\nx = torch.randn(64, 512, device='xpu'); w = torch.rand(512, device='xpu')\n"
        "has = lambda: torch._C._dispatch_has_kernel_for_dispatch_key('ipex::rms_norm', 'XPU')\n"
        "dump = torch._C._dispatch_dump('aten::_embedding_bag')  # torch's own ops stay torch's\n"
        "before = has(); names = xpu.register(xpu.KERNEL_API).ops; print(before, has(), 'woq_linear' in names)\n"
        "xpu.set_fallback_mode('error'); xpu.reset_fallback_stats()\n"
        "with torch.xpu.stream(torch.xpu.Stream()): y = torch.ops.ipex.rms_norm(x, w, 1e-6).cpu()\n"
        "expected = torch.nn.functional.rms_norm(x.cpu(), (512,), w.cpu(), 1e-6)\n"
        "print(torch.allclose(y, expected, atol=1e-5), xpu.fallback_stats())\n"
        # All families, in a stream of torch's: the first sample of each op against its definition.
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_ipex_kernels import NAMES, run\nfrom ipex_core.library.kernels import specs\n"
        "same = torch.testing.assert_close\n"
        "for name in (*NAMES, 'silu_and_mul', 'add_layer_norm', 'adam_fused_step', 'rotary_embedding'):\n"
        "    assert torch._C._dispatch_has_kernel_for_dispatch_key('ipex::' + name, 'XPU'), name\n"
        "    sample = next(iter(specs()[name].samples(torch.float32)))\n"
        "    with torch.xpu.stream(torch.xpu.Stream()): got = run(name, sample, 'xpu')\n"
        "    torch.xpu.synchronize()\n"
        "    for a, b in zip(got, run(name, sample, 'cpu'), strict=True): same(a.cpu(), b, rtol=1e-4, atol=1e-4)\n"
        "print(xpu.fallback_stats(), dump == torch._C._dispatch_dump('aten::_embedding_bag'))\n"
        "d._shut_down(n)"
    )
    text = output(code, IPEX_XPU_DEVICE=None).splitlines()
    assert text[0].startswith("State(mode='native', count=1") and "unverified" in text[0]
    assert "this torch has XPU itself" in text[1] and text[2] == "('int*', 'long')"
    assert text[3].endswith("True True") and text[4] == "True {}"
    assert text[5] == "{} True"


@on_cpu_device
def test_no_driver_for_the_cpu() -> None:
    text = output(START + "print(state)", ONEAPI_DEVICE_SELECTOR="level_zero:gpu")
    assert "mode='none'" in text and "no SYCL CPU device was found: pip install" in text
    assert "ONEAPI_DEVICE_SELECTOR=level_zero:gpu" in text


def test_plain_compile_says_what_works() -> None:
    code = START + (
        "try: torch.compile(torch.nn.Linear(2, 2).to('xpu'))(torch.ones(1, 2, device='xpu'))\n"
        "except Exception as e: print(type(e).__name__, e)"
    )
    if importlib.util.find_spec("triton") is None:
        text = output(code)
        assert text.startswith("TritonMissing") and "backend='ipex'" in text
