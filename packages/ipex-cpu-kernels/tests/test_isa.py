# SPDX-License-Identifier: Apache-2.0
"""Choice of the ISA level, in processes of their own because the choice is made once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch

import ipex_cpu_kernels
from ipex_core import benchmark
from ipex_core.errors import IsaError, KernelApiError
from ipex_core.kernels.providers import KERNEL_API, provider_for
from ipex_cpu_kernels import _native


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


CALL = (
    "import torch, ipex_core; y = torch.ops.ipex.gelu(torch.ones(8));"
    "from ipex_core.kernels.providers import provider_for; print(provider_for('cpu').isa)"
)


def test_best_level_is_chosen():
    assert run(CALL).stdout.strip() == provider_for("cpu").isa_available[-1]


@pytest.mark.parametrize("name", provider_for("cpu").isa_available)
def test_level_can_be_forced(name):
    assert run(CALL, IPEX_CPU_ISA=name).stdout.strip() == name


def test_results_name_the_level_that_is_active_now():
    before = benchmark.active_level()
    lowest = provider_for("cpu").isa_available[0]
    assert before == provider_for("cpu").level()
    with ipex_cpu_kernels.isa(lowest):
        assert provider_for("cpu").level() == lowest
        result = next(benchmark.run_bench(["rms_norm"], seconds=0.01))
        assert result.level == lowest
    assert benchmark.active_level() == before


def test_unknown_level_raises():
    result = run(CALL, IPEX_CPU_ISA="avx1024")
    assert result.returncode != 0
    assert "IPEX_CPU_ISA" in result.stderr
    assert "avx1024" in result.stderr
    assert "avx512_bf16" in result.stderr  # the allowed values are named


@pytest.mark.skipif(
    len(provider_for("cpu").isa_available) == len(provider_for("cpu").isa_built),
    reason="this CPU has every level",
)
def test_level_the_cpu_lacks_raises():
    info = provider_for("cpu")
    name = next(level for level in info.isa_built if level not in info.isa_available)
    result = run(CALL, IPEX_CPU_ISA=name)
    assert result.returncode != 0
    assert "IsaError" in result.stderr
    assert "lacks" in result.stderr or "operating system" in result.stderr
    with pytest.raises(IsaError, match=name), ipex_cpu_kernels.isa(name):
        pass


def test_old_variable_is_a_limit():
    if "avx2" not in provider_for("cpu").isa_available:
        pytest.skip("no level avx2 here")
    assert run(CALL, ATEN_CPU_CAPABILITY="avx2").stdout.strip() == "avx2"


def test_other_kernel_api_raises():
    with pytest.raises(KernelApiError, match="KERNEL_API"):
        ipex_cpu_kernels.register(KERNEL_API + 1)


def test_features_agree_with_torch():
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if not capabilities:
        pytest.skip("this torch does not report CPU capabilities")
    features = _native.load().features()
    pairs = {
        "avx512_vnni": "avx512_vnni",
        "avx512_bf16": "avx512_bf16",
        "avx512_fp16": "avx512_fp16",
    }
    for mine, theirs in pairs.items():
        if theirs in capabilities:
            assert (features[mine] == "") == bool(capabilities[theirs]), mine


def test_two_threads_may_call_first():
    code = """
import threading, torch, ipex_core
x = torch.randn(64, 512)
want = torch.nn.functional.gelu(x)
results, barrier = [], threading.Barrier(4)
def work():
    barrier.wait()
    for _ in range(20):
        results.append(torch.allclose(torch.ops.ipex.gelu(x), want, atol=1e-5))
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
print(len(results), all(results))
"""
    assert run(code).stdout.strip() == "80 True"


def test_threads_calling_at_once():
    x = torch.randn(32, 96)
    packed = torch.ops.ipex.pack_linear_weight(torch.randn(64, 96))
    want = torch.ops.ipex.linear(x, packed, 64)
    wrong = []

    def work():
        for _ in range(50):
            if not torch.equal(torch.ops.ipex.linear(x, packed, 64), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_fork_after_use():
    """Workers of a DataLoader are forked from a process that has used the kernels."""
    code = """
import torch, ipex_core
from torch.utils.data import DataLoader, Dataset
torch.ops.ipex.rms_norm(torch.randn(256, 512), torch.ones(512))
class Data(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        torch.set_num_threads(1)
        return torch.ops.ipex.rms_norm(torch.full((4, 512), float(i + 1)), torch.ones(512))
out = torch.cat(list(DataLoader(Data(), batch_size=2, num_workers=2)))
print(out.shape[0], bool((out - 1).abs().max() < 1e-3))
"""
    result = run(code)
    assert result.stdout.strip() == "8 True", result.stderr


def test_library_that_cannot_be_loaded_is_told_once(tmp_path):
    """A broken native library: one warning with the cause, the reference runs, IPEX_STRICT=1 raises."""
    code = """
import warnings, torch, ipex_core
from ipex_cpu_kernels import _native
from pathlib import Path
bad = Path(r"%s"); bad.write_bytes(b"not a library")
_native._find_library = lambda: bad
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    y = torch.ops.ipex.gelu(torch.ones(4)); torch.ops.ipex.gelu(torch.ones(4))
print(len([w for w in seen if "ipex-cpu-kernels" in str(w.message)]), tuple(y.shape))
""" % (tmp_path / "libipex_cpu.so")
    assert run(code).stdout.strip() == "1 (4,)"
    strict = run(code, IPEX_STRICT="1")
    assert strict.returncode != 0
    assert "BrokenComponentError" in strict.stderr


@pytest.mark.parametrize("content", [b"not a library", None], ids=["damaged", "truncated"])
def test_damaged_module_of_a_level_is_found_before_anything_is_registered(tmp_path, content):
    """Kernels cannot be taken back from torch: a bad module must be seen first, so that the reference runs."""
    source = _native._find_library().parent
    for path in source.glob("libipex_cpu*.so"):
        shutil.copy(path, tmp_path)
    module = tmp_path / f"libipex_cpu_{provider_for('cpu').isa_available[-1]}.so"
    module.write_bytes(module.read_bytes()[:-100] if content is None else content)
    code = """
import warnings, torch, ipex_core
from ipex_core.diagnostics.doctor import doctor
from ipex_cpu_kernels import _native
from pathlib import Path
_native._find_library = lambda: Path(r"%s")
print([p for p in doctor().problems if "damaged" in p] != [])
print(bool((torch.ops.ipex.gelu(torch.ones(4)) - 0.8413).abs().max() < 1e-3))
""" % (tmp_path / "libipex_cpu.so")
    result = run(code)
    assert result.stdout.split() == ["True", "True"], result.stderr
    strict = run(code.replace("doctor().problems", "[]"), IPEX_STRICT="1")
    assert "BrokenComponentError" in strict.stderr
    assert "damaged" in strict.stderr


def test_missing_modules_of_all_levels(tmp_path):
    shutil.copy(_native._find_library(), tmp_path)
    with pytest.raises(ImportError, match=r"needs libipex_cpu_<level>\.so in .*, which is missing"):
        _native.Native(tmp_path / "libipex_cpu.so")
    with pytest.raises(ImportError, match=r"needs libipex_cpu\.so in .*, which is missing"):
        _native.Native(tmp_path / "nowhere" / "libipex_cpu.so")


def test_what_op_info_says_about_the_stock_op_is_what_core_does(monkeypatch):
    from ipex_core.diagnostics.explain import op_info
    from ipex_core.kernels import measured
    from ipex_core.kernels.policy import MIN_WEIGHTS, prefer_ipex_attention

    monkeypatch.setattr(measured, "side", lambda *_: None)  # of a machine without a table
    words = op_info("linear")["stock_when"]
    assert f"{MIN_WEIGHTS[torch.float32]} elements in float32" in words
    assert f"{MIN_WEIGHTS[torch.bfloat16]} in bfloat16" in words
    words = op_info("attention")["stock_when"]
    for dtype, rows in ((torch.float32, 128), (torch.bfloat16, 8)):
        assert f"fewer than {rows}" in words
        for length in (rows - 1, rows):
            shape = (1, 4, length, 64)
            assert prefer_ipex_attention(shape, shape, dtype) == (length == rows)
    assert op_info("rms_norm")["stock_when"] is None
