# SPDX-License-Identifier: Apache-2.0
"""The diagnosis: readers on made-up machines, findings, and the report."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ipex_core import config
from ipex_core.diagnostics.doctor import Report, advice, doctor
from ipex_core.errors import IsaError
from ipex_core.kernels import machine, providers

AMX_FLAGS = (
    "fpu sse2 avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512cd avx512_vnni avx512_bf16 "
    "amx_tile amx_int8 amx_bf16 avx512_fp16"
)


def _write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _cpuinfo(flags: str, sockets: int = 1, cores: int = 2, threads: int = 2) -> str:
    blocks = []
    for n in range(sockets * cores * threads):
        blocks.append(
            f"processor\t: {n}\nvendor_id\t: GenuineIntel\nmodel name\t: Test CPU\n"
            f"physical id\t: {n // (cores * threads)}\ncore id\t\t: {n // threads % cores}\nflags\t\t: {flags}\n"
        )
    return "\n".join(blocks)


def _tree(root: Path, flags: str = AMX_FLAGS, thp: str = "always [madvise] never") -> Path:
    _write(
        root,
        proc__cpuinfo=_cpuinfo(flags),
        proc__meminfo="MemTotal:       8388608 kB\nMemAvailable:   4194304 kB\n",
        proc__self__maps="7f0 r-xp 0 00:00 1   /lib/libc.so.6\n7f1 r-xp 0 00:00 2 /t/libgomp.so.1\n"
        "7f2 rw 0 0 0 [heap]\n",
    )
    _write(root, **{"sys/kernel/mm/transparent_hugepage/enabled": thp})
    return root


# --- readers ----------------------------------------------------------------------------------------------------------


def test_cpu_info(tmp_path):
    _write(tmp_path, proc__cpuinfo=_cpuinfo("fpu avx2 fma f16c", sockets=2, cores=3, threads=2))
    cpu = machine.cpu_info(tmp_path)
    assert (cpu.model, cpu.vendor) == ("Test CPU", "GenuineIntel")
    assert (cpu.logical_cores, cpu.physical_cores, cpu.sockets) == (12, 6, 2)
    assert cpu.features == ("avx2", "fma", "f16c")


def test_memory_info(tmp_path):
    assert machine.memory_info(_tree(tmp_path)) == machine.MemoryInfo(8 << 30, 4 << 30)


def test_cgroup_v2_takes_the_smallest_limit_on_the_way_up(tmp_path):
    group = "sys/fs/cgroup/a"
    _write(
        tmp_path,
        **{
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
            f"{group}/cpu.max": "150000 100000\n",
            f"{group}/b/cpu.max": "max 100000\n",
            f"{group}/memory.max": "max\n",
            f"{group}/b/memory.max": "1073741824\n",
        },
    )
    limits = machine.cgroup_limits(tmp_path)
    assert limits == machine.CgroupLimits("2", 1.5, 1 << 30)
    assert machine.usable_cpus(limits, (0, 1, 2, 3)) == 2
    assert machine.usable_cpus(limits, (0,)) == 1


def test_cgroup_v2_in_a_container_that_shows_the_path_of_the_host(tmp_path):
    _write(
        tmp_path,
        **{
            "proc/self/cgroup": "0::/../../kubepods/pod1\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu\n",
            "sys/fs/cgroup/cpu.max": "400000 100000",
        },
    )
    assert machine.cgroup_limits(tmp_path).cpus == 4


def test_cgroup_v1(tmp_path):
    _write(
        tmp_path,
        **{
            "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n2:name=systemd:/\n",
            "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "2147483648",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert machine.cgroup_limits(tmp_path) == machine.CgroupLimits("1", 0.5, 2 << 30)


def test_nothing_is_known_about_an_empty_tree(tmp_path):
    assert machine.cpu_info(tmp_path).model == "unknown"
    assert machine.cpu_info(tmp_path).logical_cores is None
    assert machine.cgroup_limits(tmp_path) == machine.CgroupLimits("unknown", None, None)
    assert machine.usable_cpus(machine.cgroup_limits(tmp_path), None) is None
    assert machine.huge_pages(tmp_path) == "unknown"
    assert machine.governor(tmp_path) == "unknown"
    assert machine.memory_info(tmp_path) == machine.MemoryInfo(None, None)
    assert machine.numa_nodes(tmp_path) is None
    assert machine.loaded_libraries(tmp_path) == ()


def test_garbage_is_not_a_crash(tmp_path):
    _write(
        tmp_path,
        **{
            "proc/cpuinfo": "\x00\xff:::\n\nprocessor",
            "proc/meminfo": "MemTotal: lots",
            "proc/self/cgroup": "nonsense\n0::\n9:cpu",
            "proc/self/maps": "short line",
            "sys/fs/cgroup/cgroup.controllers": "",
            "sys/fs/cgroup/cpu.max": "100000 0",
            "sys/fs/cgroup/memory.max": "-5",
        },
    )
    assert machine.cgroup_limits(tmp_path) == machine.CgroupLimits("2", None, None)
    assert isinstance(doctor(tmp_path), Report)


@pytest.mark.parametrize(
    ("features", "supported", "granted", "answer"),
    [
        (("avx2",), True, True, "no AMX"),
        (("amx_tile",), True, True, "granted"),
        (("amx_tile",), False, True, "unsupported"),
        (("amx_tile",), True, False, "denied"),
    ],
)
def test_amx_permission(monkeypatch, features, supported, granted, answer):
    monkeypatch.setattr(machine.sys, "platform", "linux")
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    assert machine.amx_permission(features, lambda: supported, lambda: granted) == answer


def test_amx_permission_where_the_question_does_not_exist(monkeypatch):
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    assert machine.amx_permission(("amx_tile",)) == "unknown"


# --- report -----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    config.reload({})
    yield
    config.reload({})


@pytest.fixture
def _providers(monkeypatch):
    """Replace the installed kernel packages; returns the setter."""

    def use(*statuses: providers.ProviderStatus) -> None:
        monkeypatch.setattr(providers, "load_providers", lambda: statuses)

    return use


def _info(isa: str = "avx512_bf16", **changes) -> providers.ProviderInfo:
    levels = config.ISA_LEVELS
    info = providers.ProviderInfo(
        name="cpu",
        version="0.1.0",
        device="cpu",
        kernel_api=providers.KERNEL_API,
        isa=isa,
        isa_available=levels[: levels.index(isa) + 1],
        isa_built=levels,
        ops=("rms_norm",),
        kernels=lambda op: (),
    )
    return dataclasses.replace(info, **changes)


def _active(info: providers.ProviderInfo) -> providers.ProviderStatus:
    return providers.ProviderStatus("cpu", "active", "ipex-cpu-kernels", info=info)


def test_this_machine():
    report = doctor()
    assert report.torch.version == torch.__version__
    assert report.threads.intra_op == torch.get_num_threads()
    text = str(report)
    assert report.cpu.model in text
    assert "IPEX_CPU_ISA" in text


def test_torch_alone_has_one_openmp_library():
    """In a process of its own: other tests load libraries that bring a second one."""
    code = "from ipex_core.diagnostics.doctor import doctor; print(*doctor().problems, sep='\\n')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert "OpenMP" not in run.stdout


def test_the_dictionary_is_json_with_the_documented_keys(tmp_path):
    data = json.loads(json.dumps(doctor(_tree(tmp_path)).to_dict()))
    assert set(data) == {"schema", "ok", *(f.name for f in dataclasses.fields(Report))}
    assert data["schema"] == 1
    assert data["cpu"]["features"][:2] == ["avx2", "fma"]
    keys = {"name", "kind", "distribution", "state", "version", "cause", "rows", "advice"}
    assert keys == set(data["packages"][0])
    assert {"name", "value", "source", "error"} == set(data["settings"][0])
    assert set(data["isa"]) == {
        *("current", "available", "built", "request", "request_source", "not_higher")
    }
    assert data["settings"][4]["value"] == "FP32"


def test_missing_kernels_are_an_advice_and_not_a_problem(tmp_path, _providers):
    _providers(providers.ProviderStatus("cpu", "missing", "ipex-cpu-kernels"))
    report = doctor(_tree(tmp_path))
    assert report.problems == ()
    assert any("pip install 'ipex[cpu]'" in line for line in report.advice)
    assert report.isa.current is None
    assert "no CPU kernels are loaded" in report.isa.not_higher["amx"]


def test_why_not_a_higher_level(tmp_path, _providers):
    _providers(_active(_info()))
    report = doctor(_tree(tmp_path, flags="avx2 fma f16c avx512f avx512bw avx512vl avx512dq"))
    assert report.isa.current == "avx512_bf16"
    assert "amx_tile" in report.isa.not_higher["amx"]
    assert "avx512_fp16" in report.isa.not_higher["avx512_fp16"]

    report = doctor(_tree(tmp_path))  # all features, yet the package says no
    assert "operating system" in report.isa.not_higher["amx"]

    _providers(
        _active(
            _info("avx512", isa_available=config.ISA_LEVELS, isa_built=("default", "avx512", "amx"))
        )
    )
    with config.override(cpu_isa="avx512"):
        report = doctor(_tree(tmp_path))
    assert report.isa.not_higher["amx"] == "IPEX_CPU_ISA forces avx512"
    config.reload({"ATEN_CPU_CAPABILITY": "avx512"})
    assert doctor(_tree(tmp_path)).isa.not_higher["amx"] == "ATEN_CPU_CAPABILITY limits to avx512"


def test_a_broken_kernel_package_is_a_problem_with_its_cause(tmp_path, _providers):
    _providers(
        providers.ProviderStatus(
            "cpu", "broken", "ipex-cpu-kernels", cause=OSError("libx.so: no such file")
        )
    )
    report = doctor(_tree(tmp_path))
    assert len(report.problems) == 1
    assert "OSError: libx.so" in report.problems[0]
    assert report.to_dict()["ok"] is False


def test_a_demand_that_cannot_be_met_is_a_problem(tmp_path, monkeypatch):
    def refuse():
        raise IsaError("IPEX_CPU_ISA=amx: this CPU lacks amx_tile")

    monkeypatch.setattr(providers, "load_providers", refuse)
    report = doctor(_tree(tmp_path))
    assert any("IPEX_CPU_ISA=amx" in line for line in report.problems)
    assert report.packages[0].state == "broken"


def test_a_missing_xpu_package_is_named_with_its_wheel(tmp_path, _providers, monkeypatch):
    _providers()
    status = providers.ComponentStatus("xpu", "missing", "ipex-xpu-kernels")
    monkeypatch.setattr(providers, "components", lambda: (status,))
    report = doctor(_tree(tmp_path))
    report = dataclasses.replace(
        report, torch=dataclasses.replace(report.torch, version="2.15.0+cpu")
    )
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    text = dict(report.rows())["component xpu"]
    assert f"need ipex_xpu_kernels-*+torch2.15-{python}-{python}{sys.abiflags}-" in text
    assert report.problems == ()


def test_a_broken_component_is_a_problem(tmp_path, _providers, monkeypatch):
    _providers()
    status = providers.ComponentStatus("llm", "active", "ipex-llm", "0.1.0")
    monkeypatch.setattr(providers, "components", lambda: (status,))

    def load(name):
        raise RuntimeError("boom")

    monkeypatch.setattr(providers, "load_component", load)
    report = doctor(_tree(tmp_path))
    assert report.problems == (
        "the component ipex-llm is installed but cannot be used: RuntimeError: boom",
    )


def test_bad_configuration_is_shown(tmp_path, _providers):
    _providers()
    config.reload({"IPEX_STRICT": "maybe", "IPEX_CPU_ISA": "bogus"}, tolerant=True)
    report = doctor(_tree(tmp_path))
    assert [line.split("=")[0] for line in report.problems] == ["IPEX_CPU_ISA", "IPEX_STRICT"]
    assert "IPEX_STRICT" in str(report)


def test_a_component_tells_what_it_found(tmp_path, _providers, monkeypatch):
    _providers()
    status = providers.ComponentStatus("runtime", "active", "ipex-runtime", "0.1.0")
    monkeypatch.setattr(providers, "components", lambda: (status,))
    component = types.SimpleNamespace(doctor=lambda root: ([("root", str(root))], ["pin it"]))
    monkeypatch.setattr(providers, "load_component", lambda name: component)
    report = doctor(tmp_path)
    assert ("  root", str(tmp_path)) in report.rows()
    assert "pin it" in report.advice
    assert report.to_dict()["packages"][-1]["rows"] == [["root", str(tmp_path)]]
    component.doctor = lambda root: 1 / 0
    assert any("ZeroDivisionError" in problem for problem in doctor(tmp_path).problems)


def test_strict_mode_does_not_stop_the_list(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(providers, "load_providers", lambda: seen.append(config.strict) or ())
    with config.override(strict=True):
        doctor(_tree(tmp_path))
        assert config.strict is True
    assert seen == [False]


def test_two_openmp_runtimes_are_a_problem(tmp_path, _providers):
    _providers()
    _tree(tmp_path)
    _write(
        tmp_path,
        proc__self__maps=(
            "7f0 r-xp 0 00:00 1 /t/lib/libgomp-a34b3233.so.1\n7f1 r-xp 0 00:00 2 /t/lib/libgomp-a34b3233.so.1\n"
            "7f2 r-xp 0 00:00 3 /opt/with space/libiomp5.so\n7f3 r-xp 0 0 4 /t/libcomposite.so\n"
        ),
    )
    report = doctor(tmp_path)
    assert report.openmp == ("/opt/with space/libiomp5.so", "/t/lib/libgomp-a34b3233.so.1")
    assert "2 OpenMP runtimes" in report.problems[0]


def test_allocator(tmp_path, _providers):
    _providers()
    assert doctor(_tree(tmp_path), environ={}).allocator == "glibc"
    report = doctor(tmp_path, environ={"LD_PRELOAD": "/nowhere/libjemalloc.so.2"})
    assert report.allocator == "glibc (jemalloc in LD_PRELOAD is not loaded)"
    assert any("LD_PRELOAD" in line for line in report.advice)
    _write(tmp_path, proc__self__maps="7f0 r-xp 0 00:00 1 /usr/lib/libtcmalloc_minimal.so.4\n")
    assert doctor(tmp_path, environ={}).allocator == "tcmalloc"


def _advice(root: Path) -> str:
    return "\n".join(doctor(root).advice)


def test_advice_about_memory(tmp_path, _providers):
    _providers()
    assert "huge pages are off" in _advice(_tree(tmp_path, thp="always madvise [never]"))
    _tree(tmp_path)
    assert "huge pages" not in _advice(tmp_path)
    with config.override(huge_pages=False):
        assert "IPEX_HUGE_PAGES=0" in _advice(tmp_path)


def test_advice_about_the_cpu(tmp_path, _providers, monkeypatch):
    _providers()
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    assert "no bfloat16 instructions" in _advice(_tree(tmp_path, flags="avx2 fma f16c"))
    assert "no AVX2" in _advice(_tree(tmp_path, flags="sse2"))
    assert "bfloat16" not in _advice(_tree(tmp_path))
    base = "sys/devices/system/cpu/cpu0/cpufreq"
    _write(
        tmp_path,
        **{f"{base}/scaling_driver": "acpi-cpufreq", f"{base}/scaling_governor": "powersave"},
    )
    assert "governor is acpi-cpufreq/powersave" in _advice(tmp_path)
    _write(tmp_path, **{f"{base}/scaling_driver": "intel_pstate"})
    assert "governor" not in _advice(tmp_path)


def test_advice_about_a_level_without_bfloat16(tmp_path):
    report = doctor(_tree(tmp_path))
    for level, told in (("avx2", True), ("avx512_bf16", False), (None, False)):
        isa = dataclasses.replace(report.isa, current=level)
        text = "\n".join(advice(dataclasses.replace(report, isa=isa)))
        assert (f"ISA level {level}, which has no bfloat16" in text) is told


def test_advice_about_threads(tmp_path, _providers, monkeypatch):
    _providers()
    monkeypatch.setattr(providers, "components", lambda: ())  # ipex-runtime says more about nodes
    _tree(tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert "16 threads on 2 physical cores" in _advice(tmp_path)
    _write(
        tmp_path,
        **{
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu",
            "sys/fs/cgroup/cpu.max": "150000 100000",
            "sys/devices/system/node/node0/x": "",
            "sys/devices/system/node/node1/x": "",
        },
    )
    text = _advice(tmp_path)
    assert "the control group gives 1.5 CPU(s): set OMP_NUM_THREADS=2" in text
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert "2 NUMA nodes" in _advice(tmp_path)


def test_advice_about_the_math_mode(tmp_path, _providers):
    _providers()
    with config.override(fp32_math_mode="BF32"):
        assert "gains nothing" in _advice(_tree(tmp_path, flags="avx2 fma f16c avx512_bf16"))
        assert "gains nothing" not in _advice(_tree(tmp_path))
