# SPDX-License-Identifier: Apache-2.0
"""Pools of CPUs for instances, on machines that are described as lscpu describes them."""

from __future__ import annotations

import pytest

from ipex_runtime.launch import (
    CoreInfo,
    CPUPool,
    CPUPoolList,
    DistributedTrainingLauncher,
    LaunchArgumentError,
)


def machine(
    nodes: int, cores: int, order: str = "threads last", e_cores: int = 0, node_column=True
) -> str:
    """Return lscpu's text of a machine with two hardware threads per core.

    ``order``: CPU numbers run over the first threads of all cores and then the second ones (``"threads last"``), over
    both within each node (``"by node"``), or over the threads of each core (``"siblings"``).
    """
    rows = []
    for node in range(nodes):
        for i in range(cores + e_cores):
            core = node * (cores + e_cores) + i
            fast = i < cores
            for thread in range(2 if fast else 1):
                keys = {
                    "threads last": (not fast, thread, node, core),
                    "by node": (node, not fast, thread, core),
                    "siblings": (node, not fast, core, thread),
                }
                rows.append((keys[order], core, node, 5000.0 if fast else 3800.0))
    rows.sort()
    head = "CPU CORE SOCKET NODE MAXMHZ" if node_column else "CPU CORE SOCKET MAXMHZ"
    lines = [head]
    for cpu, (_, core, node, mhz) in enumerate(rows):
        lines.append(
            f"{cpu:3} {core:4} {node:6} " + (f"{node:4} " if node_column else "") + f"{mhz}"
        )
    return "\n".join(lines)


def texts(pools: CPUPoolList) -> list[tuple[str, str]]:
    return [tuple(pool.get_pool_txt().values()) for pool in pools.pools_ondemand]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("order", "options", "expected"),
    [
        ("threads last", {}, [("0-15", "0,1")]),
        ("threads last", {"ninstances": 2}, [("0-7", "0"), ("8-15", "1")]),
        ("by node", {"ninstances": 2}, [("0-7", "0"), ("16-23", "1")]),
        ("siblings", {"ninstances": 2}, [("0,2,4,6,8,10,12,14", "0"), ("16,18,20,22,24,26,28,30", "1")]),
        ("threads last", {"ninstances": 3}, [("0-4", "0"), ("5-9", "0,1"), ("10-14", "1")]),
        (
            "threads last",
            {"ninstances": 3, "ncores_per_instance": -1},
            [("0-5", "0"), ("6-10", "0,1"), ("11-15", "1")],
        ),
        (
            "threads last",
            {"ninstances": 3, "bind_numa_node": True},
            [("0-7", "0"), ("8-11", "1"), ("12-15", "1")],
        ),
        ("threads last", {"ninstances": 1, "bind_numa_node": True}, [("0-7", "0")]),
        (
            "threads last",
            {"ncores_per_instance": 4, "ninstances": 2, "strategy": "close"},
            [("0-3", "0"), ("4-7", "0")],
        ),
        (
            "threads last",
            {"ncores_per_instance": 4, "ninstances": 2, "strategy": "scatter"},
            [("0-3", "0"), ("8-11", "1")],
        ),
        (
            "threads last",
            {"ncores_per_instance": 3, "ninstances": 3, "strategy": "scatter", "bind_numa_node": True},
            [("0-2", "0"), ("3-5", "0"), ("8-10", "1")],
        ),
        ("threads last", {"ncores_per_instance": 3, "ninstances": 4, "strategy": "scatter"}, 4),
        ("threads last", {"ncores_per_instance": 5, "bind_numa_node": True}, [("0-4", "0"), ("8-12", "1")]),
        ("threads last", {"ninstances": 2, "use_logical_cores": True}, [("0-7,16-23", "0"), ("8-15,24-31", "1")]),
        ("threads last", {"nodes_list": [1]}, [("8-15", "1")]),
        ("threads last", {"cores_list": [2, 3, 18]}, [("2-3", "0")]),
        ("threads last", {"cores_list": [18, 19]}, [("18-19", "0")]),
    ],
)  # fmt: skip
def test_division(order, options, expected):
    pools = CPUPoolList(lscpu_txt=machine(2, 8, order))
    assert len(pools.pool_all) == 32
    pools.gen_pools_ondemand(**options)
    found = texts(pools)
    assert found == expected if isinstance(expected, list) else len(found) == expected
    cpus = [c.cpu for pool in pools.pools_ondemand for c in pool]
    assert len(cpus) == len(set(cpus))


def test_efficiency_cores_are_left_out_unless_asked_for():
    pools = CPUPoolList(lscpu_txt=machine(1, 4, "siblings", e_cores=4))
    pools.gen_pools_ondemand()
    assert texts(pools) == [("0,2,4,6", "0")]
    pools.gen_pools_ondemand(use_e_cores=True)
    assert texts(pools) == [("0-0,2-2,4-4,6-6,8-11", "0")]
    pools.gen_pools_ondemand(cores_list=[8, 9])  # there are no others in this list
    assert texts(pools) == [("8-9", "0")]


def test_without_nodes_a_socket_is_one():
    pools = CPUPoolList(lscpu_txt=machine(2, 2, node_column=False))
    pools.gen_pools_ondemand(nodes_list=[1])
    assert texts(pools) == [("2-3", "1")]


def test_offline_cpus_and_other_columns_are_skipped():
    text = (
        "CPU NODE SOCKET CORE L1d:L1i:L2:L3 ONLINE MAXMHZ\n"
        "0 0 0 0 0:0:0:0 yes 3000.0\n1 - - - - no -\n2 0 0 1 1:1:1:0 yes 3000,0\n"
    )
    pools = CPUPoolList(lscpu_txt=text)
    assert [(c.cpu, c.core, c.maxmhz) for c in pools.pool_all] == [(0, 0, 3000.0), (2, 1, 3000.0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cores_list": [99]}, r"--cores-list must name CPUs .*\(0-31\), got 99"),
        ({"nodes_list": [2]}, r"--nodes-list must name NUMA nodes .*\(0-1\), got 2"),
        ({"ninstances": 17}, "--ninstances must be at most 16, .* got 17"),
        ({"ninstances": -1}, "--ninstances must be at least 0, got -1"),
        ({"ncores_per_instance": -2}, "--ncores-per-instance must be at least -1, got -2"),
        (
            {"ncores_per_instance": 17},
            "--ncores-per-instance must be at most 16, .* got 17",
        ),
        ({"ncores_per_instance": 8, "ninstances": 3}, "must be at most 2 with"),
        ({"strategy": "far"}, "--strategy must be"),
    ],
)
def test_what_cannot_be_met(options, message):
    pools = CPUPoolList(lscpu_txt=machine(2, 8))
    with pytest.raises(LaunchArgumentError, match=message) as error:
        pools.gen_pools_ondemand(**options)
    assert isinstance(error.value, AssertionError) and isinstance(error.value, RuntimeError)


def test_a_text_without_cpus():
    with pytest.raises(LaunchArgumentError, match="CPUPoolList: lscpu_txt must have"):
        CPUPoolList(lscpu_txt="nothing here")


def test_this_machine_is_what_the_process_may_use():
    import os

    pools = CPUPoolList()
    assert {c.cpu for c in pools.pool_all} <= os.sched_getaffinity(0)
    pools.gen_pools_ondemand()
    assert len(pools.pools_ondemand) == 1 and pools.pools_ondemand[0]


def test_time_of_a_control_group_limits_the_cores(monkeypatch):
    from dataclasses import replace

    from ipex_runtime import topology

    core = topology.read().cores[0]
    cores = tuple(replace(core, cpus=(i,), node=0) for i in range(8))
    limited = replace(topology.read(), cores=cores, allowed=tuple(range(8)), quota=2.5)
    monkeypatch.setattr(topology, "read", lambda: limited)
    pools = CPUPoolList()
    pools.gen_pools_ondemand()
    assert texts(pools) == [("0-2", "0")]
    pools.gen_pools_ondemand(cores_list=list(range(4)))
    assert texts(pools) == [("0-3", "0")]


def test_text_of_a_pool():
    def core(cpu: int) -> CoreInfo:
        info = CoreInfo()
        info.cpu, info.node = cpu, cpu // 4
        return info

    pool = CPUPool([core(cpu) for cpu in (0, 1, 2, 5, 6)])
    assert pool.get_pool_txt() == {"cores": "0-2,5-6", "nodes": "0,1"}
    assert pool.get_pool_txt("list")["cores"] == "0,1,2,5,6"
    assert CPUPool([core(0), core(2)]).get_pool_txt("range")["cores"] == "0-0,2-2"
    assert CPUPool().get_pool_txt() == {"cores": "", "nodes": ""}


@pytest.mark.parametrize(
    ("logical", "domain", "affinity"),
    [
        (False, "[0xf0,0xf000]", "0,1,2,3,8,9,10,11"),
        (True, "[0xff,0xff00]", "16,17,18,19,24,25,26,27"),
    ],
)
def test_cores_of_the_workers_of_oneccl(logical, domain, affinity):
    launcher = DistributedTrainingLauncher(lscpu_txt=machine(2, 8))
    launcher.cpuinfo.gen_pools_ondemand(ninstances=2, use_logical_cores=True)
    found = launcher.get_pin_domain_affinity(launcher.cpuinfo.pools_ondemand, 4, logical)
    assert found == {"pin_domain": domain, "affinity": affinity}


def test_more_workers_than_cores():
    launcher = DistributedTrainingLauncher(lscpu_txt=machine(1, 4))
    launcher.cpuinfo.gen_pools_ondemand(ninstances=1)
    with pytest.raises(LaunchArgumentError, match=r"--ccl-worker-count must be below .* 4, got 4"):
        launcher.get_pin_domain_affinity(launcher.cpuinfo.pools_ondemand, 4)
