# SPDX-License-Identifier: Apache-2.0
"""What this machine and process look like, read from procfs and sysfs.

Every reader takes the root of the file tree, so that tests can hand in a made-up machine, and answers None or an empty
value where a file is missing or unreadable: the diagnosis has to work on the machines on which nothing else does.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ipex_core.config.isa_levels import LEVEL_FEATURES

ROOT = Path("/")

#: Reduced dtype -> features of a CPU (any of them) that multiplies in it, and the levels whose kernels do.
NATIVE_FEATURES = {"bfloat16": ("avx512_bf16", "amx_bf16"), "float16": ("avx512_fp16",)}
NATIVE_LEVELS = {
    dtype: tuple(n for n, has in LEVEL_FEATURES.items() if not set(has).isdisjoint(features))
    for dtype, features in NATIVE_FEATURES.items()
}

#: Shown and compared; the other hundred flags of a CPU say nothing about our kernels.
_SHOWN = tuple(dict.fromkeys(f for level in LEVEL_FEATURES.values() for f in level))


@dataclasses.dataclass(frozen=True, slots=True)
class CpuInfo:
    """Model and counts of the machine; ``features`` are those that matter for the choice of kernels."""

    model: str
    vendor: str
    architecture: str
    features: tuple[str, ...]
    logical_cores: int | None
    physical_cores: int | None
    sockets: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class CgroupLimits:
    """Limits of the control group: CPUs (may be fractional) and bytes; None means unlimited."""

    version: str
    cpus: float | None
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of memory of the machine."""

    total_bytes: int | None
    available_bytes: int | None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def cpu_info(root: Path = ROOT) -> CpuInfo:
    """Read ``/proc/cpuinfo``."""
    text = _text(root / "proc/cpuinfo") or ""
    processors = [_fields(block) for block in re.split(r"\n\s*\n", text) if block.strip()]
    processors = [p for p in processors if "processor" in p]
    first = processors[0] if processors else {}
    flags = set(first.get("flags", first.get("Features", "")).split())
    cores = {
        (p["physical id"], p["core id"])
        for p in processors
        if "core id" in p and "physical id" in p
    }
    sockets = {p["physical id"] for p in processors if "physical id" in p}
    logical = len(processors) or (os.cpu_count() if root == ROOT else None)
    return CpuInfo(
        model=first.get("model name", "")
        or (platform.processor() if root == ROOT else "")
        or "unknown",
        vendor=first.get("vendor_id", "unknown"),
        architecture=platform.machine() or "unknown",
        features=tuple(f for f in _SHOWN if f in flags),
        logical_cores=logical,
        physical_cores=len(cores) or None,
        sockets=len(sockets) or None,
    )


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def affinity() -> tuple[int, ...] | None:
    """Return the CPUs this process may run on."""
    get = getattr(os, "sched_getaffinity", None)
    return tuple(sorted(get(0))) if get is not None else None


def allowed_cores(
    root: Path = ROOT, allowed: tuple[int, ...] | None = None
) -> list[tuple[int, tuple[int, ...]]]:
    """Return (NUMA node, hardware threads) of each core that this process may use, node by node.

    Args:
        root: Of the file tree.
        allowed: CPUs that may be used; None: see `affinity`. Without either there are no cores.
    """
    allowed = affinity() if allowed is None else allowed
    found: dict[tuple[int, int], list[int]] = {}
    base = root / "sys/devices/system"
    nodes = {}
    for path in sorted((base / "node").glob("node[0-9]*/cpu[0-9]*")):
        nodes[int(path.name[3:])] = int(path.parent.name[4:])
    for cpu in allowed or ():
        siblings = _text(base / f"cpu/cpu{cpu}/topology/thread_siblings_list") or ""
        first = re.match(r"\d+", siblings)
        core = int(first[0]) if first else cpu
        found.setdefault((nodes.get(cpu, 0), core), []).append(cpu)
    return [(node, tuple(cpus)) for (node, _), cpus in sorted(found.items())]


def numa_nodes(root: Path = ROOT) -> int | None:
    """Return the number of NUMA nodes."""
    try:
        return sum(1 for _ in (root / "sys/devices/system/node").glob("node[0-9]*")) or None
    except OSError:
        return None


def memory_info(root: Path = ROOT) -> MemoryInfo:
    """Read ``/proc/meminfo``."""
    fields = _fields(_text(root / "proc/meminfo") or "")

    def size(key: str) -> int | None:
        match = re.match(r"(\d+) kB", fields.get(key, ""))
        return int(match[1]) * 1024 if match else None

    return MemoryInfo(size("MemTotal"), size("MemAvailable"))


# --- control groups ---------------------------------------------------------------------------------------------------


def _up(base: Path, path: str) -> Iterator[Path]:
    # Each level limits the levels below it. In a container the path often names one of the host, unknown inside;
    # the mount itself is then the container's own group.
    parts = [p for p in path.split("/") if p not in ("", "..")]
    for n in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:n])


def _smallest(values: Iterator[float | None]) -> float | None:
    return min((v for v in values if v is not None), default=None)


def _v2_cpus(group: Path) -> float | None:
    match = re.match(r"(\d+) (\d+)", _text(group / "cpu.max") or "")
    return int(match[1]) / int(match[2]) if match and int(match[2]) else None


def _v1_cpus(group: Path) -> float | None:
    quota = _number(_text(group / "cpu.cfs_quota_us"))
    period = _number(_text(group / "cpu.cfs_period_us"))
    return quota / period if quota and period and quota > 0 else None


def _number(text: str | None) -> int | None:
    match = re.match(r"-?\d+\s*$", text or "")
    return int(match[0]) if match else None


def _bytes(name: str) -> Callable[[Path], float | None]:
    def read(group: Path) -> float | None:
        value = _number(_text(group / name))
        # Version 1 writes "no limit" as the largest multiple of the page size.
        return value if value is not None and 0 < value < 1 << 60 else None

    return read


def cgroup_limits(root: Path = ROOT) -> CgroupLimits:
    """Return the CPU quota and memory limit of this process, for control groups of version 1, 2 and both at once."""
    mount = root / "sys/fs/cgroup"
    cpus: list[float | None] = []
    memory: list[float | None] = []
    versions = set()
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            bases = [b for b in (mount, mount / "unified") if (b / "cgroup.controllers").exists()]
            for base in bases:
                versions.add("2")
                cpus += [_smallest(_v2_cpus(g) for g in _up(base, path))]
                memory += [_smallest(_bytes("memory.max")(g) for g in _up(base, path))]
            continue
        for base in _v1_mounts(mount, controllers.split(",")):
            versions.add("1")
            cpus += [_smallest(_v1_cpus(g) for g in _up(base, path))]
            memory += [_smallest(_bytes("memory.limit_in_bytes")(g) for g in _up(base, path))]
    bytes_ = _smallest(iter(memory))
    return CgroupLimits(
        "+".join(sorted(versions)) or "unknown",
        _smallest(iter(cpus)),
        int(bytes_) if bytes_ is not None else None,
    )


def _v1_mounts(mount: Path, controllers: list[str]) -> list[Path]:
    wanted = {"cpu", "memory"} & set(controllers)
    if not wanted:
        return []
    try:
        entries = sorted(p for p in mount.iterdir() if p.is_dir())
    except OSError:
        return []
    return [p for p in entries if wanted & set(p.name.split(","))]


def usable_cpus(limits: CgroupLimits, allowed: tuple[int, ...] | None) -> int | None:
    """Return how many threads can run at once: the smaller of quota (rounded up) and affinity."""
    counts = [math.ceil(limits.cpus)] if limits.cpus else []
    if allowed:
        counts.append(len(allowed))
    return max(1, min(counts)) if counts else None


#: Rounds that libgomp spins for a thread before it sleeps, where cores are shared. Its default, some milliseconds,
#: costs most where the thread that is waited for has no core; this, some microseconds, costs little elsewhere.
SHORT_SPIN = 3000


def crowded(root: Path = ROOT) -> str | None:
    """Return how it shows that programs wait for CPU time, or None if they do not.

    From the share of time in which some program waited, in the last ten seconds; where the kernel does not tell, from
    the load of the last minute; and from how often the control group was stopped for having used up its quota.
    """
    waits = re.search(r"some avg10=([\d.]+)", _text(root / "proc/pressure/cpu") or "")
    load = re.match(r"[\d.]+", _text(root / "proc/loadavg") or "")
    cpus = len(re.findall(r"^cpu\d", _text(root / "proc/stat") or "", re.MULTILINE))
    if waits:
        if float(waits[1]) >= 25:
            return f"programs waited for a CPU {float(waits[1]):.0f} % of the last 10 s"
    elif load and cpus and float(load[0]) > cpus:
        return f"the load is {float(load[0]):g} on {cpus} CPUs"
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        for group in _up(root / "sys/fs/cgroup", line.split(":", 2)[-1]):
            stat = _text(group / "cpu.stat") or ""
            counts = [re.search(rf"^{name} (\d+)", stat, re.M) for name in _THROTTLED]
            throttled, periods = (int(count[1]) if count else 0 for count in counts)
            if throttled > 0.05 * periods:
                return f"the control group was throttled in {throttled} of {periods} periods"
    return None


_THROTTLED = ("nr_throttled", "nr_periods")


# --- settings of the operating system ---------------------------------------------------------------------------------


def huge_pages(root: Path = ROOT) -> str:
    """Return the mode of transparent huge pages: ``always``, ``madvise``, ``never`` or ``unknown``."""
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else "unknown"


def governor(root: Path = ROOT) -> str:
    """Return ``<driver>/<governor>`` of the first CPU's frequency scaling, or ``unknown``."""
    base = root / "sys/devices/system/cpu/cpu0/cpufreq"
    driver, name = _text(base / "scaling_driver"), _text(base / "scaling_governor")
    return f"{driver.strip()}/{name.strip()}" if driver and name else "unknown"


_ARCH_PRCTL = 158  # x86-64 system call number
_ARCH_GET_XCOMP_SUPP = 0x1021
_ARCH_REQ_XCOMP_PERM = 0x1023
_XTILEDATA = 18


def _arch_prctl(code: int, argument: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(
        ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(code), ctypes.c_ulong(argument)
    )
    return result


def _amx_supported() -> bool:
    mask = ctypes.c_uint64(0)
    done = _arch_prctl(_ARCH_GET_XCOMP_SUPP, ctypes.addressof(mask)) == 0
    return done and bool(mask.value >> _XTILEDATA & 1)


def _amx_request() -> bool:
    return _arch_prctl(_ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0


def amx_permission(
    features: tuple[str, ...],
    supported: Callable[[], bool] = _amx_supported,
    request: Callable[[], bool] = _amx_request,
) -> str:
    """Return whether the operating system lets this process use AMX tiles.

    ``no AMX`` (the CPU has none), ``granted``, ``unsupported`` (Linux before 5.16, or switched off), ``denied`` (a
    sandbox or an ancestor forbids it) or ``unknown`` (not Linux on x86-64). Asking grants it to the process, as the
    first use of an AMX kernel would.
    """
    if "amx_tile" not in features:
        return "no AMX"
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return "unknown"
    try:
        if not supported():
            return "unsupported"
        return "granted" if request() else "denied"
    except (OSError, AttributeError):
        return "unknown"


def loaded_libraries(root: Path = ROOT) -> tuple[str, ...]:
    """Return the paths of the shared libraries mapped into this process, sorted."""
    found = set()
    for line in (_text(root / "proc/self/maps") or "").splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and re.search(r"\.so(\.|$)", parts[5]):
            found.add(parts[5].removesuffix(" (deleted)"))
    return tuple(sorted(found))


# --- threads ----------------------------------------------------------------------------------------------------------


def fit_threads(root: Path = ROOT) -> None:
    """Reduce torch's threads to the CPU quota of the control group, unless somebody chose their number.

    torch counts the CPUs that the process may run on and knows no quota. ``OMP_NUM_THREADS``, ``MKL_NUM_THREADS``,
    `torch.set_num_threads`, ``IPEX_NUM_THREADS`` and a pool to which the calling thread is pinned choose the number.
    """
    import torch

    usable = usable_cpus(cgroup_limits(root), None)
    now = torch.get_num_threads()
    if usable is None or now <= usable or _threads_are_chosen(now):
        return
    torch.set_num_threads(usable)
    logging.getLogger("ipex").info(
        "the control group gives the time of %d CPU(s): %d threads instead of %d",
        usable,
        usable,
        now,
    )


def _threads_are_chosen(now: int) -> bool:
    if os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS"):
        return True
    set_mkl_threads = _set_mkl_threads()
    if set_mkl_threads is None:
        return now not in (len(affinity() or ()), os.cpu_count())
    # The thread's own number, 0 without one. torch gives one to each thread once a number was chosen.
    own = set_mkl_threads(0)
    set_mkl_threads(own)
    return own != 0


def _set_mkl_threads() -> Callable[[int], int] | None:
    import torch

    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
    return getattr(torch_cpu, "MKL_Set_Num_Threads_Local", None)


@contextlib.contextmanager
def own_threads(count: int) -> Iterator[None]:
    """Let torch use this many threads in the calling thread, and in no other.

    `torch.set_num_threads` would also change what threads that start later find. Without an OpenMP that is found by
    name the number stays as it is.

    Args:
        count: At least 1.
    """
    import torch

    before = torch.get_num_threads()  # also gives this thread the settings of the process
    set_omp = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    set_mkl = _set_mkl_threads()
    if set_omp is None:
        yield
        return
    set_omp(count)
    mkl_before = 0 if set_mkl is None else set_mkl(count)
    try:
        yield
    finally:
        set_omp(before)
        if set_mkl is not None:
            set_mkl(mkl_before)


def restart_if_crowded(bounded: bool = False) -> None:
    """Start this command again with a short spin if programs wait for CPU time; else return.

    libgomp reads ``GOMP_SPINCOUNT`` when it is loaded, which importing torch has done. Variables that the user has set
    (``GOMP_SPINCOUNT``, ``OMP_WAIT_POLICY``) decide instead.

    Args:
        bounded: The command itself has set ``GOMP_SPINCOUNT``, to the longer spin of machines that look idle.
    """
    if os.environ.get("OMP_WAIT_POLICY") or (os.environ.get("GOMP_SPINCOUNT") and not bounded):
        return
    reason = crowded() if sys.platform.startswith("linux") else None
    gomp = any("libgomp" in path for path in loaded_libraries())
    if reason is None or not gomp or not sys.orig_argv:
        return
    text = f"{reason}: starting with GOMP_SPINCOUNT={SHORT_SPIN}"
    print(text, file=sys.stderr, flush=True)
    environment = {**os.environ, "GOMP_SPINCOUNT": str(SHORT_SPIN)}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606
