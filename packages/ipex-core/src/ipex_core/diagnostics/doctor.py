# SPDX-License-Identifier: Apache-2.0
"""The state of the installation, in numbers and in words, and what to do about it."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ipex_core import config
from ipex_core._version import __version__
from ipex_core.errors import ConfigError
from ipex_core.kernels import machine, providers
from ipex_core.kernels.providers import xpu_wheel
from ipex_core.util import quiet


@dataclasses.dataclass(frozen=True, slots=True)
class IsaReport:
    """Instruction-set level of the CPU kernels: in use, possible, built, asked for, and why nothing higher."""

    current: str | None
    available: tuple[str, ...]
    built: tuple[str, ...]
    request: str
    request_source: str
    not_higher: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class TorchReport:
    """The installed PyTorch."""

    version: str
    cpu_capability: str
    onednn: bool
    fp32_math_mode: str


@dataclasses.dataclass(frozen=True, slots=True)
class ThreadReport:
    """CPUs this process can use and threads PyTorch starts."""

    affinity: int | None
    usable: int | None
    intra_op: int
    inter_op: int


@dataclasses.dataclass(frozen=True, slots=True)
class PackageReport:
    """A kernel package or component: ``state`` is ``active``, ``missing`` or ``broken`` (with ``cause``).

    ``rows`` and ``advice`` are what a component itself found, in its function ``doctor(root) -> (rows, advice)``.
    """

    name: str
    kind: str
    distribution: str
    state: str
    version: str | None
    cause: str | None
    rows: tuple[tuple[str, str], ...] = ()
    advice: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything `doctor` found. ``str(report)`` is a plain-text form, `to_dict` a form for JSON.

    Attributes:
        version: Version of ipex-core.
        python: Version of Python.
        system: Operating system and its release.
        cpu: Model, counts and the features that matter for kernels.
        numa_nodes: Number of NUMA nodes.
        memory: Bytes of memory of the machine.
        limits: CPU quota and memory limit of the control group.
        threads: CPUs that are usable and threads PyTorch starts.
        amx: Permission to use AMX: ``no AMX``, ``granted``, ``unsupported``, ``denied``, ``unknown``.
        huge_pages: Mode of transparent huge pages.
        governor: ``driver/governor`` of the frequency scaling.
        torch: The installed PyTorch.
        openmp: OpenMP runtimes mapped into this process (paths).
        crowded: How it shows that programs wait for CPU time; empty if they do not.
        waiting: The variables that say how long OpenMP threads spin, as ``NAME=value``.
        allocator: Memory allocator: ``glibc``, ``jemalloc``, ``tcmalloc``, ``mimalloc`` ...
        isa: Instruction-set level of the CPU kernels.
        packages: Kernel packages and components.
        settings: Configuration values with their sources.
        problems: What is broken.
        advice: What could be better.
    """

    version: str
    python: str
    system: str
    cpu: machine.CpuInfo
    numa_nodes: int | None
    memory: machine.MemoryInfo
    limits: machine.CgroupLimits
    threads: ThreadReport
    amx: str
    huge_pages: str
    governor: str
    torch: TorchReport
    openmp: tuple[str, ...]
    allocator: str
    isa: IsaReport
    packages: tuple[PackageReport, ...]
    settings: tuple[Mapping[str, Any], ...]
    crowded: str = ""
    waiting: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return nested dictionaries and lists of JSON types; ``schema`` changes when a key changes its meaning."""
        return {"schema": 1, "ok": not self.problems, **_plain(dataclasses.asdict(self))}

    def rows(self) -> list[tuple[str, str]]:
        """Return the facts as (title, text) pairs, for tables."""
        return rows(self)

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(title) for title, _ in rows)
        lines = [f"{title:<{width}}  {text}" for title, text in rows]
        lines += [f"PROBLEM: {text}" for text in self.problems]
        lines += [f"advice: {text}" for text in self.advice]
        return "\n".join(lines)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _size(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"


def _count(value: float | None, nothing: str = "unknown") -> str:
    return nothing if value is None else f"{value:g}"


def rows(report: Report) -> list[tuple[str, str]]:
    """Return the facts as (title, text) pairs."""
    cpu, limits, threads, isa = report.cpu, report.limits, report.threads, report.isa
    cores = f"{_count(cpu.physical_cores)} physical, {_count(cpu.logical_cores)} logical"
    table = [
        ("ipex-core", f"{report.version} on Python {report.python}, {report.system}"),
        ("CPU", f"{cpu.model} ({cpu.vendor}, {cpu.architecture})"),
        ("CPU features", " ".join(cpu.features) or "none that matter"),
        (
            "cores",
            f"{cores}, {_count(cpu.sockets)} socket(s), {_count(report.numa_nodes)} NUMA node(s)",
        ),
        (
            "CPUs of this process",
            f"{_count(threads.usable)} usable (affinity {_count(threads.affinity)}, "
            f"cgroup {_count(limits.cpus, 'no limit')}, v{limits.version})",
        ),
        (
            "memory",
            f"{_size(report.memory.total_bytes)}, {_size(report.memory.available_bytes)} available, cgroup "
            + ("no limit" if limits.memory_bytes is None else _size(limits.memory_bytes)),
        ),
        ("AMX permission", report.amx),
        ("transparent huge pages", report.huge_pages),
        ("frequency governor", report.governor),
        (
            "torch",
            f"{report.torch.version} ({report.torch.cpu_capability}"
            f"{'' if report.torch.onednn else ', without oneDNN'}), float32 math mode {report.torch.fp32_math_mode}",
        ),
        ("threads", f"{threads.intra_op} intra-op, {threads.inter_op} inter-op"),
        (
            "OpenMP runtime",
            ", ".join((*report.openmp, *report.waiting)) if report.openmp else "none found",
        ),
        ("other programs", report.crowded or "leave the CPUs to this one"),
        ("allocator", report.allocator),
    ]
    if isa.current is None:
        table.append(("ISA level", "none: ops run their PyTorch reference"))
    else:
        source = f", {isa.request_source}: {isa.request}" if isa.request_source else ""
        table.append(("ISA level", f"{isa.current} (possible: {', '.join(isa.available)}{source})"))
    table += [(f"  not {level}", reason) for level, reason in isa.not_higher.items()]
    for package in report.packages:
        text = f"{package.state}, {package.distribution} {package.version or ''}".rstrip()
        cause = f": {package.cause}" if package.cause else ""
        if package.name == "xpu" and package.state == "missing" and package.kind == "component":
            # The only package whose wheel depends on torch and Python.
            cause = f" (this torch and Python need {xpu_wheel(report.torch.version)})"
        table.append((f"{package.kind} {package.name}", text + cause))
        table += [(f"  {title}", found) for title, found in package.rows]
    for setting in report.settings:
        value = setting["value"]
        shown = "" if value == "" else f"{int(value) if isinstance(value, bool) else value} "
        table.append((str(setting["name"]), f"{shown}({setting['source']})"))
    return table


def problems(report: Report) -> Iterator[str]:
    """Yield what is broken."""
    errors = [str(s["error"]) for s in report.settings if s["error"]]
    yield from errors
    if len(report.openmp) > 1:
        yield (
            f"{len(report.openmp)} OpenMP runtimes are loaded ({', '.join(report.openmp)}): their thread pools fight "
            "for the same cores; remove the package or LD_PRELOAD entry that brings the second one"
        )
    for package in report.packages:
        if package.state == "broken" and package.cause not in errors:
            what = "kernel package" if package.kind == "kernels" else "component"
            yield f"the {what} {package.distribution} is installed but cannot be used: {package.cause}"


def advice(report: Report) -> Iterator[str]:
    """Yield what could be better."""
    yield from _package_advice(report)
    yield from _thread_advice(report)
    yield from _waiting_advice(report)
    yield from _memory_advice(report)
    yield from _cpu_advice(report)
    for package in report.packages:
        yield from package.advice


def _package_advice(report: Report) -> Iterator[str]:
    cpu = next((p for p in report.packages if p.kind == "kernels" and p.name == "cpu"), None)
    if cpu is not None and cpu.state == "missing":
        if report.cpu.architecture in ("x86_64", "AMD64"):
            yield "no CPU kernels are installed, ops run their slow reference: pip install 'ipex[cpu]'"
        else:
            yield f"there are no CPU kernels for {report.cpu.architecture}: ops run their reference"
    if not report.torch.onednn:
        yield "this PyTorch was built without oneDNN: convolutions and bfloat16 linear layers are slow"


def _thread_advice(report: Report) -> Iterator[str]:
    threads = report.threads
    usable, limit = threads.usable, report.limits.cpus
    if usable is not None and threads.intra_op > usable:
        whose = (
            "the control group gives"
            if limit is not None and limit <= usable
            else "this process may use"
        )
        number = limit if limit is not None and limit <= usable else usable
        yield (
            f"PyTorch uses {threads.intra_op} threads, but {whose} {_count(number)} CPU(s): "
            f"set OMP_NUM_THREADS={usable} or IPEX_NUM_THREADS={usable}"
        )
        return
    cores = report.cpu.physical_cores
    if cores is not None and threads.intra_op > cores:
        yield (
            f"PyTorch uses {threads.intra_op} threads on {cores} physical cores: two threads on one core slow matrix "
            f"products down; set OMP_NUM_THREADS={cores}"
        )
    examined = any(package.name == "runtime" and package.rows for package in report.packages)
    if report.numa_nodes is not None and report.numa_nodes > 1 and not examined:
        yield (
            f"this machine has {report.numa_nodes} NUMA nodes: bind a process to one of them, for instance "
            "numactl --cpunodebind=0 --membind=0"
        )


def _waiting_advice(report: Report) -> Iterator[str]:
    if report.crowded and not report.waiting and any("gomp" in path for path in report.openmp):
        yield (
            f"{report.crowded}: threads of OpenMP spin for others that have no core; start programs with "
            f"GOMP_SPINCOUNT={machine.SHORT_SPIN}, as ipexrun and ipex llm serve do by themselves"
        )


def _memory_advice(report: Report) -> Iterator[str]:
    asked = next((s["value"] for s in report.settings if s["name"] == "IPEX_HUGE_PAGES"), None)
    if report.huge_pages == "never":
        yield (
            "transparent huge pages are off: packed weights are read slower from memory; as root: echo madvise > "
            "/sys/kernel/mm/transparent_hugepage/enabled"
        )
    elif asked is False:
        yield "IPEX_HUGE_PAGES=0: packed weights are read slower from memory"
    if "not loaded" in report.allocator:
        yield f"allocator: {report.allocator}; check that the path in LD_PRELOAD exists"


def _cpu_advice(report: Report) -> Iterator[str]:
    features = report.cpu.features
    known = report.cpu.model != "unknown"
    x86 = report.cpu.architecture in ("x86_64", "AMD64")
    if known and x86 and "avx2" not in features:
        yield "this CPU has no AVX2: only the baseline kernels run"
    elif known and x86 and not {"avx512_bf16", "amx_bf16"} & set(features):
        yield (
            "this CPU has no bfloat16 instructions: bfloat16 saves memory, but matrix products are computed in float32 "
            "and may be slower than float32"
        )
    elif (
        report.isa.current is not None
        and report.isa.current not in machine.NATIVE_LEVELS["bfloat16"]
    ):
        yield (
            f"the kernels run at ISA level {report.isa.current}, which has no bfloat16 instructions: bfloat16 saves "
            "memory, but matrix products are computed in float32 and may be slower than float32"
        )
    if report.amx in ("unsupported", "denied"):
        why = (
            "Linux 5.16 or newer is needed"
            if report.amx == "unsupported"
            else "a sandbox (seccomp) or container forbids arch_prctl"
        )
        yield f"the CPU has AMX, but the operating system does not grant it: {why}"
    # intel_pstate and amd_pstate call their normal dynamic mode "powersave"; elsewhere it pins the lowest frequency.
    if report.governor.endswith("/powersave") and "pstate" not in report.governor:
        yield f"the frequency governor is {report.governor}: cpupower frequency-set -g performance"
    if report.torch.fp32_math_mode == "BF32" and "amx_bf16" not in features:
        yield "float32 math mode BF32 gains nothing on this CPU: oneDNN uses bfloat16 for float32 inputs only with AMX"


# --- doctor -----------------------------------------------------------------------------------------------------------


def doctor(root: str | os.PathLike[str] = "/", environ: Mapping[str, str] | None = None) -> Report:
    """Examine machine, process and installation.

    It loads the kernel packages (as the first op call would, which fits torch's threads to a CPU quota) and imports the
    installed components, and changes nothing else.

    Args:
        root: Root of the procfs and sysfs trees; other than ``/`` for tests.
        environ: Environment to look for preloaded libraries in; default ``os.environ``.

    Returns:
        The report. ``report.problems`` is empty on a healthy installation.

    Example:
        >>> report = doctor()
        >>> report.to_dict()["schema"]
        1
    """
    tree = Path(root)
    environ = os.environ if environ is None else environ
    cpu = machine.cpu_info(tree)
    limits = machine.cgroup_limits(tree)
    allowed = machine.affinity() if tree == machine.ROOT else None
    packages, isa = _packages(cpu, tree)
    torch_report, intra, inter = _torch()  # after the kernels, which fit the threads to a quota
    # After torch and the kernels, so that what they bring is seen.
    libraries = machine.loaded_libraries(tree)
    report = Report(
        version=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        cpu=cpu,
        numa_nodes=machine.numa_nodes(tree),
        memory=machine.memory_info(tree),
        limits=limits,
        threads=ThreadReport(
            len(allowed) if allowed else None, machine.usable_cpus(limits, allowed), intra, inter
        ),
        amx=machine.amx_permission(cpu.features) if tree == machine.ROOT else "unknown",
        huge_pages=machine.huge_pages(tree),
        governor=machine.governor(tree),
        torch=torch_report,
        openmp=_openmp(libraries),
        crowded=machine.crowded(tree) or "",
        waiting=tuple(f"{name}={environ[name]}" for name in _WAITING if environ.get(name)),
        allocator=_allocator(libraries, environ),
        isa=isa,
        packages=packages,
        settings=tuple(_setting(s) for s in config.settings()),
    )
    return dataclasses.replace(
        report,
        problems=tuple(problems(report)),
        advice=tuple(advice(report)),
    )


def _setting(setting: config.Setting) -> dict[str, Any]:
    value = setting.value
    return {
        "name": setting.variable.name,
        "value": value.name if isinstance(value, config.FP32MathMode) else value,
        "source": setting.source,
        "error": setting.error,
    }


def _torch() -> tuple[TorchReport, int, int]:
    import torch

    backends: Any = torch.backends
    report = TorchReport(
        version=str(torch.__version__),
        cpu_capability=backends.cpu.get_cpu_capability(),
        onednn=bool(backends.mkldnn.is_available()),
        fp32_math_mode=config.get_fp32_math_mode().name,
    )
    return report, torch.get_num_threads(), torch.get_num_interop_threads()


_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
_OPENMP = re.compile(r"lib(gomp|iomp5|omp|omp140)[.\-]")
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


def _openmp(libraries: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(path for path in libraries if _OPENMP.match(path.rsplit("/", 1)[-1]))


def _allocator(libraries: tuple[str, ...], environ: Mapping[str, str]) -> str:
    names = [path.rsplit("/", 1)[-1] for path in libraries]
    for allocator in _ALLOCATORS:
        if any(allocator in name for name in names):
            return allocator
    preload = environ.get("LD_PRELOAD", "")
    wanted = next((a for a in _ALLOCATORS if a in preload), None)
    if not sys.platform.startswith("linux"):
        base = "system"
    elif any("musl" in name for name in names):
        base = "musl"
    else:
        base = "glibc" if any(re.match(r"libc[.-]", name) for name in names) else "unknown"
    return f"{base} ({wanted} in LD_PRELOAD is not loaded)" if wanted else base


# --- packages and instruction-set level -------------------------------------------------------------------------------


def _packages(cpu: machine.CpuInfo, root: Path) -> tuple[tuple[PackageReport, ...], IsaReport]:
    found: list[PackageReport] = []
    provider: providers.ProviderInfo | None = None
    failed = ""
    try:
        # Strict mode would stop at the first broken package; the list shall be complete.
        with quiet(), _lenient():
            statuses = providers.load_providers()
    except Exception as error:
        failed = str(error)
        statuses = ()
    for status in statuses:
        info, cause = status.info, status.cause
        found.append(
            PackageReport(
                status.name,
                "kernels",
                status.distribution,
                status.state,
                info.version if info else None,
                _reason(cause) if cause else None,
            )
        )
        if info is not None and info.device == "cpu":
            provider = info
    if failed:
        known = providers.KNOWN_PROVIDERS["cpu"]
        found.append(PackageReport("cpu", "kernels", known.distribution, "broken", None, failed))
    found += [_component(status, root) for status in providers.components()]
    return tuple(found), _isa(provider, cpu)


def _lenient() -> Any:
    import contextlib

    strict = next(s for s in config.settings() if s.variable.attribute == "strict")
    return config.override(strict=False) if strict.value is True else contextlib.nullcontext()


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _component(status: providers.ComponentStatus, root: Path) -> PackageReport:
    state: str = status.state
    cause = None
    rows: tuple[tuple[str, str], ...] = ()
    advice: tuple[str, ...] = ()
    if state == "active":
        try:
            component = providers.load_component(status.name)
            examine = getattr(component, "doctor", None)
            if examine is not None:
                found_rows, found_advice = examine(root)
                rows, advice = tuple(found_rows), tuple(found_advice)
        except Exception as error:
            state, cause = "broken", _reason(error.__cause__ or error)
    return PackageReport(
        status.name,
        "component",
        status.distribution,
        state,
        status.version,
        cause,
        rows,
        advice,
    )


def _isa(provider: providers.ProviderInfo | None, cpu: machine.CpuInfo) -> IsaReport:
    try:
        request = config.isa_request()
    except ConfigError:
        request = config.IsaRequest("auto", "", "")
    available = provider.isa_available if provider else ()
    built = provider.isa_built if provider else ()
    current = provider.level() if provider else None
    wanted = f"{request.kind} {request.level}".strip()
    levels = tuple(dict.fromkeys((*built, *(n for n in config.ISA_LEVELS if n not in built))))
    higher = levels[levels.index(current) + 1 :] if current in levels else levels
    reasons = {name: _why_not(name, cpu, provider, request) for name in higher}
    return IsaReport(current, tuple(available), tuple(built), wanted, request.source, reasons)


def _why_not(
    level: str,
    cpu: machine.CpuInfo,
    provider: providers.ProviderInfo | None,
    request: config.IsaRequest,
) -> str:
    missing = [f for f in config.LEVEL_FEATURES.get(level, ()) if f not in cpu.features]
    if provider is None:
        lacking = f", and this CPU has no {', '.join(missing)}" if missing else ""
        return f"no CPU kernels are loaded{lacking}"
    if level in provider.isa_available:
        if request.kind == "auto":
            return "eligible, but a test or tool chose a lower level"
        verb = "forces" if request.kind == "force" else "limits to"
        return f"{request.source} {verb} {request.level}"
    # The kernels' own detection knows more than /proc/cpuinfo: registers the system saves, permissions it grants.
    reason = provider.why_unavailable(level) if level in provider.isa_built else ""
    if reason:
        return reason
    if missing:
        return f"this CPU has no {', '.join(missing)}"
    if level not in provider.isa_built:
        return f"not in the installed kernel package {provider.version}"
    if level.startswith("amx") or "amx_tile" in config.LEVEL_FEATURES.get(level, ()):
        return "the operating system does not let this process use AMX"
    return "the kernels' own check of CPU and operating system says no"
