# SPDX-License-Identifier: Apache-2.0
"""Topology of recorded machines, CPU lists and limits of control groups."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipex_runtime.topology import CpuListError, format_cpu_list, parse_cpu_list, read

#: name -> packages, NUMA nodes with CPUs, cores, threads per core, hybrid, nodes per package, allowed cores
FACTS = {
    "client_hybrid": (1, 1, 8, 2, True, 1, 8),
    "xeon_snc": (2, 4, 16, 2, False, 2, 16),
    "amd_nps4": (2, 8, 32, 1, False, 4, 32),
    "vm_interleaved": (2, 2, 4, 2, False, 1, 4),
    "container": (1, 1, 8, 2, False, 1, 4),
    "one_core": (1, 1, 1, 1, False, 1, 1),
    "arm_server": (1, 1, 8, 1, False, 1, 8),
    "offline_cpus": (1, 1, 3, 1, False, 1, 3),
    "arm_big_little": (1, 1, 6, 1, True, 1, 6),
    "frequency_hybrid": (1, 1, 4, 2, True, 1, 4),
}


@pytest.mark.parametrize("name", FACTS)
def test_facts(recorded, name):
    t = recorded(name)
    found = (
        len(t.packages),
        sum(1 for node in t.nodes if node.cpus),
        len(t.cores),
        t.threads_per_core,
        t.hybrid,
        t.nodes_per_package,
        len(t.allowed_cores()),
    )
    assert found == FACTS[name]
    # Every CPU belongs to one core and to one node, and what is allowed is online.
    assert sorted(cpu for core in t.cores for cpu in core.cpus) == list(t.cpus)
    assert sorted(cpu for node in t.nodes for cpu in node.cpus) == list(t.cpus)
    assert set(t.allowed) <= set(t.cpus)
    assert len(t.physical()) == len({t.core_of(cpu) for cpu in t.physical()})
    assert json.loads(json.dumps(t.to_dict()))["allowed"] == list(t.allowed)
    assert "allowed here" in str(t)


def test_kinds_of_cores(recorded):
    t = recorded("client_hybrid")
    assert t.physical(kind="performance") == (0, 2, 4, 6)
    assert t.physical(kind="efficiency") == (8, 9, 10, 11)
    assert any("efficiency" in line for line in t.advice())


def test_kinds_by_capacity(recorded):
    assert recorded("arm_big_little").physical(kind="performance") == (4, 5)


def test_kinds_by_frequency(recorded):
    assert recorded("frequency_hybrid").physical(kind="efficiency") == (4, 5)


def test_one_kind_has_both_names(recorded):
    t = recorded("amd_nps4")
    assert t.physical(kind="performance") == t.physical() == t.physical(kind="efficiency")


def test_sub_numa_clusters(recorded):
    t = recorded("xeon_snc")
    assert t.physical(node=3) == (12, 13, 14, 15)
    assert [core.package for core in t.allowed_cores(node=2)] == [1] * 4
    assert any("sub-NUMA" in line for line in t.advice())


def test_interleaved_map(recorded):
    t = recorded("vm_interleaved")
    assert t.physical(node=0) == (0, 4)
    assert t.core_of(7).cpus == (6, 7)
    assert any("hardware threads of one core" in line for line in t.advice())


def test_container(recorded):
    t = recorded("container")
    assert t.allowed == (2, 3, 4, 5, 10, 11, 12, 13)
    assert t.quota == 2.5
    assert t.usable_threads == 3
    assert any("quota" in line for line in t.advice())


def test_first_version_of_control_groups(machine):
    machine.cores([(c,) for c in range(8)])
    machine.node(0, range(8))
    machine.write("proc/self/cgroup", "5:cpuset:/a/b\n4:cpu,cpuacct:/a\n1:name=systemd:/x")
    machine.write("sys/fs/cgroup/cpuset/a/b/cpuset.cpus", "4-7")
    machine.write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "150000")
    machine.write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000")
    t = machine.finish(allowed=range(6))
    assert t.allowed == (4, 5)
    assert t.quota == 1.5


@pytest.mark.parametrize("text", ["max 100000", "", "garbage", "-1 100000", "0 0"])
def test_no_quota(machine, text):
    machine.write("proc/self/cgroup", "0::/")
    machine.write("sys/fs/cgroup/cgroup.controllers", "cpu")
    machine.write("sys/fs/cgroup/cpu.max", text)
    machine.cores([(0,), (1,)])
    assert machine.finish().quota is None


def test_offline(recorded):
    t = recorded("offline_cpus")
    assert t.offline == (3, 4, 5, 6, 7)  # not the numbers up to 127 that were never there
    assert t.nodes[0].cpus == (0, 1, 2)
    with pytest.raises(ValueError, match="core_of: cpu must be one of 0-2, got 5"):
        t.core_of(5)


def test_memory_node_without_cpus(recorded):
    t = recorded("arm_server")
    assert t.nodes[1].cpus == ()
    assert t.nodes[1].memory_bytes == 128 * 2**30
    assert t.packages == (0,)


def test_a_foreign_cpuset_leaves_what_the_affinity_allows(machine):
    machine.cores([(0,), (1,)])
    machine.write("proc/self/cgroup", "0::/")
    machine.write("sys/fs/cgroup/cgroup.controllers", "cpuset")
    machine.write("sys/fs/cgroup/cpuset.cpus.effective", "40-47")
    assert machine.finish(allowed=[1]).allowed == (1,)


def test_nothing_to_read(tmp_path):
    t = read(tmp_path)
    assert t.allowed == (0,)
    assert t.nodes[0].cpus == (0,)
    assert t.advice() == []


def test_contradicting_sibling_lists_are_joined(machine):
    machine.cores([(0,), (1,), (2,)])
    machine.cpu(1, "topology/thread_siblings_list", "1-2")
    assert [core.cpus for core in machine.finish().cores] == [(0,), (1, 2)]


def test_this_machine():
    t = read()
    assert t.allowed
    assert t.usable_threads >= 1
    assert any("threads compute" in line for line in t.advice(threads=10**6))


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(0, 8191)))
def test_lists_come_back(cpus):
    assert parse_cpu_list(format_cpu_list(cpus)) == sorted(cpus)


def test_lists():
    assert parse_cpu_list(" 0-3, 8 ,10-14:2\n") == [0, 1, 2, 3, 8, 10, 12, 14]
    assert parse_cpu_list("") == []


@pytest.mark.parametrize(
    "text", ["a", "1-", "-1", "3-1", "1,2;3", "0-99999999999", "1:", "1-4:0", "1-2-3", "٣", "0x1"]
)
def test_bad_lists(text):
    with pytest.raises(CpuListError):
        parse_cpu_list(text)


def test_a_topology_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read().quota = 3.0
