# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of machine, process and installation: `doctor`, the data behind ``ipex doctor``.

A finding is either a *problem* (something is broken or contradicts a demand; the command exits with 1) or an *advice*
(works, but could be faster or is likely not what was meant).
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ipex_core import config
from ipex_core._version import __version__
from ipex_core.diagnostics.report import (
    IsaReport,
    PackageReport,
    Report,
    ThreadReport,
    TorchReport,
    advice,
    problems,
)
from ipex_core.errors import ConfigError
from ipex_core.kernels import machine, providers
from ipex_core.util.quiet import quiet

__all__ = ["IsaReport", "PackageReport", "Report", "ThreadReport", "TorchReport", "doctor"]


def doctor(root: str | os.PathLike[str] = "/", environ: Mapping[str, str] | None = None) -> Report:
    """Examine machine, process and installation.

    It loads the kernel packages (as the first op call would) and imports the installed components, and changes nothing
    else.

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
    torch_report, intra, inter = _torch()
    packages, isa = _packages(cpu, tree)
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
