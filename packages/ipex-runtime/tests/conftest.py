# SPDX-License-Identifier: Apache-2.0
"""Machines as sysfs, procfs and cgroup files describe them, written below a temporary folder.

``import launched`` works in each test of this folder.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from ipex_runtime.topology import Topology, format_cpu_list, read

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def interrupts_are_heard() -> Iterator[None]:
    """Let what the tests start hear SIGINT, which shells let their background processes, and all below them, ignore."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Machine:
    """Writes the files of one machine; each core is a tuple of its CPUs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.online: list[int] = []

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")

    def cpu(self, number: int, name: str, text: object) -> None:
        self.write(f"sys/devices/system/cpu/cpu{number}/{name}", text)

    def cores(self, cores: Iterable[Sequence[int]], package: int = 0, die: int = 0) -> None:
        for index, cpus in enumerate(cores):
            for cpu in cpus:
                self.cpu(cpu, "topology/physical_package_id", package)
                self.cpu(cpu, "topology/die_id", die)
                self.cpu(cpu, "topology/core_id", index)
                self.cpu(cpu, "topology/thread_siblings_list", format_cpu_list(cpus))
                self.online.append(cpu)

    def node(self, number: int, cpus: Iterable[int], gib: int = 64, distance: str = "10") -> None:
        folder = f"sys/devices/system/node/node{number}"
        self.write(f"{folder}/cpulist", format_cpu_list(cpus))
        self.write(f"{folder}/meminfo", f"Node {number} MemTotal:  {gib * 2**20} kB")
        self.write(f"{folder}/distance", distance)

    def finish(
        self,
        allowed: Iterable[int] | None = None,
        offline: Iterable[int] = (),
        possible: int | None = None,
    ) -> Topology:
        online, offline = sorted(self.online), sorted(offline)
        last = possible if possible is not None else max([*online, *offline])
        base = "sys/devices/system/cpu"
        self.write(f"{base}/online", format_cpu_list(online))
        self.write(f"{base}/offline", format_cpu_list(set(range(last + 1)) - set(online)))
        self.write(f"{base}/present", format_cpu_list([*online, *offline]))
        self.write(f"{base}/possible", f"0-{last}")
        shown = format_cpu_list(online if allowed is None else allowed)
        self.write("proc/self/status", f"Name:\tpython\nCpus_allowed_list:\t{shown}")
        return self.read()

    def read(self) -> Topology:
        return read(self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def client_hybrid(m: Machine) -> Topology:
    """One socket, 4 performance cores with two threads and 4 efficiency cores."""
    m.cores([(0, 1), (2, 3), (4, 5), (6, 7), (8,), (9,), (10,), (11,)])
    m.node(0, range(12), 32)
    m.write("sys/devices/cpu_core/cpus", "0-7")
    m.write("sys/devices/cpu_atom/cpus", "8-11")
    return m.finish()


def xeon_snc(m: Machine) -> Topology:
    """Two sockets of 8 cores with two sub-NUMA clusters each; the second threads are numbered after all cores."""
    for package in (0, 1):
        m.cores([(c, c + 16) for c in range(8 * package, 8 * package + 8)], package)
    for node in range(4):
        first = 4 * node
        m.node(node, [*range(first, first + 4), *range(first + 16, first + 20)])
    return m.finish()


def amd_nps4(m: Machine) -> Topology:
    """Two sockets of 16 cores, four NUMA nodes each, no hardware threads."""
    for package in (0, 1):
        m.cores([(c,) for c in range(16 * package, 16 * package + 16)], package)
    for node in range(8):
        m.node(node, range(4 * node, 4 * node + 4), distance=" ".join(["12"] * 8))
    return m.finish()


def vm_interleaved(m: Machine) -> Topology:
    """A cloud machine whose neighboring CPUs are threads of one core, dealt to two nodes in turn."""
    m.cores([(0, 1), (4, 5)], package=0)
    m.cores([(2, 3), (6, 7)], package=1)
    m.node(0, [0, 1, 4, 5])
    m.node(1, [2, 3, 6, 7])
    return m.finish()


def container(m: Machine) -> Topology:
    """A container: cpuset and quota of version 2, the affinity still that of the host."""
    m.cores([(c, c + 8) for c in range(8)])
    m.node(0, range(16))
    m.write("proc/self/cgroup", "0::/docker/4711")
    m.write("sys/fs/cgroup/cgroup.controllers", "cpuset cpu memory")
    m.write("sys/fs/cgroup/cpuset.cpus.effective", "0-15")
    m.write("sys/fs/cgroup/docker/4711/cpuset.cpus.effective", "2-5,10-13")
    m.write("sys/fs/cgroup/docker/4711/cpu.max", "250000 100000")
    return m.finish()


def one_core(m: Machine) -> Topology:
    """The smallest virtual machine, without any NUMA files."""
    m.cores([(0,)])
    return m.finish()


def arm_server(m: Machine) -> Topology:
    """ARM: the firmware names no package, cores are told by their own lists, one node without CPUs."""
    m.cores([(c,) for c in range(8)], package=-1)
    for cpu in range(8):
        m.cpu(cpu, "cpu_capacity", 1024)
    m.node(0, range(8))
    m.node(1, [], 128)
    return m.finish()


def offline_cpus(m: Machine) -> Topology:
    """Second threads and one whole core switched off, more numbers possible than CPUs present."""
    m.cores([(0,), (1,), (2,)])
    m.node(0, range(8))
    return m.finish(offline=[3, 4, 5, 6, 7], possible=127)


def arm_big_little(m: Machine) -> Topology:
    """ARM with small and large cores, told by their capacity."""
    m.cores([(c,) for c in range(6)])
    for cpu in range(6):
        m.cpu(cpu, "cpu_capacity", 1024 if cpu >= 4 else 420)
    m.node(0, range(6))
    return m.finish()


def frequency_hybrid(m: Machine) -> Topology:
    """A hybrid client under an old kernel: only the frequencies tell, and favored cores are a little faster."""
    m.cores([(0, 1), (2, 3), (4,), (5,)])
    for cpu, mhz in enumerate((5200, 5200, 5000, 5000, 3900, 3900)):
        m.cpu(cpu, "cpufreq/cpuinfo_max_freq", mhz * 1000)
    m.node(0, range(6))
    return m.finish()


MACHINES: dict[str, Callable[[Machine], Topology]] = {
    f.__name__: f
    for f in (
        client_hybrid, xeon_snc, amd_nps4, vm_interleaved, container,
        one_core, arm_server, offline_cpus, arm_big_little, frequency_hybrid,
    )
}  # fmt: skip


@pytest.fixture
def recorded(machine: Machine) -> Callable[[str], Topology]:
    """Return a function that writes a machine by name and reads it."""
    return lambda name: MACHINES[name](machine)
