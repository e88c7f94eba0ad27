# SPDX-License-Identifier: Apache-2.0
"""Pools, pinning, memory policy. All of it runs on one CPU, too."""

from __future__ import annotations

import os
import sys
import threading
import warnings

import pytest
import torch

from ipex_runtime import (
    CPUPool,
    cpupool,
    get_core_list_of_node_id,
    is_runtime_ext_enabled,
    memory,
    pin,
    place_memory,
    runtime_utils,
    set_memory_policy,
    team,
)
from ipex_runtime.cpupool import process_cpus

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pinning is of Linux")
FIRST = process_cpus()[0]
native = pytest.mark.skipif(team.library() is None, reason="the native library is not built")


def affinity() -> set[int]:
    return os.sched_getaffinity(0)


def team_affinities(count: int) -> list[set[int]]:
    """Return the affinity of each thread of the present team, by an exchange that changes nothing."""
    state = team.State([()] * count)
    # An empty place leaves the affinity alone, so ask by pinning to everything and back.
    everything = team.State([process_cpus()] * count)
    everything.exchange()
    words = team.CPU_WORDS
    masks = [
        {
            w * 64 + b
            for w in range(words)
            for b in range(64)
            if everything._masks[i * words + w] >> b & 1
        }
        for i in range(count)
    ]
    everything.exchange()
    state.exchange()
    return masks


# --- pools ------------------------------------------------------------------------------------------------------------


def test_the_default_is_what_the_process_may_use():
    pool = CPUPool()
    assert pool.core_ids == list(process_cpus())
    assert pool.cpu_pool.get_core_list() == pool.core_ids
    assert 1 <= pool.num_threads <= len(pool.core_ids)


@pytest.mark.parametrize("ids", [[FIRST], (FIRST,), range(FIRST, FIRST + 1)])
def test_numbers(ids):
    pool = CPUPool(ids)
    assert pool.core_ids == [FIRST]
    assert pool.places == ((FIRST,),)


def test_a_node():
    home = next(n for n in range(64) if FIRST in get_core_list_of_node_id(n))
    assert FIRST in CPUPool(node_id=home).core_ids
    with pytest.warns(UserWarning, match="node_id is ignored"):
        assert CPUPool([FIRST], node_id=home).core_ids == [FIRST]


def test_what_the_process_may_not_use_is_left_out():
    with pytest.warns(UserWarning, match=r"the cores 8191 are left out, this process may use"):
        assert CPUPool([FIRST, 8191]).core_ids == [FIRST]
    with pytest.raises(RuntimeError, match="must have a core this process may use, got 8000-8001"):
        CPUPool([8000, 8001])


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        ("0-3", TypeError, "must be a list, tuple or range.*parse_cpu_list"),
        (0, TypeError, "got int"),
        ({0}, AssertionError, "got set"),  # what IPEX raised
        ([0.0], TypeError, "must hold integers, got 0.0"),
        ([True], TypeError, "got True"),
        (["0"], TypeError, "got '0'"),
        ([], ValueError, "at least one core"),
        ([-1], ValueError, r"got \[-1\]"),
        ([10**30], ValueError, "must lie in 0..8191"),
        ([FIRST, FIRST], ValueError, "more than once"),
    ],
)
def test_bad_numbers(ids, error, text):
    with pytest.raises(error, match=text):
        CPUPool(ids)


@pytest.mark.parametrize("node", [4711, -1])
def test_bad_nodes(node):
    for function in (lambda n: CPUPool(node_id=n), get_core_list_of_node_id):
        with pytest.raises(ValueError, match=rf"node_id must be one of \[.*\], got {node}"):
            function(node)
        with pytest.raises(AssertionError):
            function(node)
    with pytest.raises(TypeError, match="node_id must be an integer"):
        CPUPool(node_id="0")


def test_bad_policy():
    with pytest.raises(ValueError, match="memory must be one of default, preferred"):
        CPUPool([FIRST], memory="fast")


def use(monkeypatch, machine):
    monkeypatch.setattr(cpupool.topology, "read", lambda *a, **k: machine)


def test_machines(monkeypatch, recorded):
    use(monkeypatch, recorded("xeon_snc"))
    assert runtime_utils.get_num_nodes() == 4
    assert runtime_utils.get_num_cores_per_node() == 4
    assert get_core_list_of_node_id(2) == [8, 9, 10, 11]
    pool = CPUPool(node_id=2)
    assert pool.core_ids == [8, 9, 10, 11]
    assert pool.nodes == [2]
    whole = CPUPool()
    assert whole.num_threads == 16  # cores, not hardware threads
    assert (0, 16) in whole.places
    assert [p.num_threads for p in whole.split(3)] == [6, 5, 5]


def test_a_quota_limits_threads_and_not_cores(monkeypatch, recorded):
    use(monkeypatch, recorded("container"))
    pool = CPUPool()
    assert pool.places == (tuple(pool.core_ids),) * 3


def test_numbers_of_an_interleaved_machine(monkeypatch, recorded):
    use(monkeypatch, recorded("vm_interleaved"))
    assert get_core_list_of_node_id(1) == [2, 6]
    assert CPUPool(node_id=1).nodes == [1]


def test_split():
    pool = CPUPool([FIRST])
    for parts in (0, 2):
        with pytest.raises(ValueError, match=r"parts must be in 1..1, the threads of the pool"):
            pool.split(parts)
    assert pool.split(1)[0].core_ids == [FIRST]


# --- pin --------------------------------------------------------------------------------------------------------------


@linux
def test_pin_and_back():
    before, threads = affinity(), torch.get_num_threads()
    with pin(CPUPool([FIRST])) as pool:
        assert affinity() == {FIRST}
        assert torch.get_num_threads() == 1
        assert pool.core_ids == [FIRST]
        # Other pools can be made inside: what the process may use has not changed.
        assert CPUPool().core_ids == sorted(process_cpus())
    assert affinity() == before
    assert torch.get_num_threads() == threads


@linux
def test_pins_nest():
    before, threads = affinity(), torch.get_num_threads()
    whole = CPUPool()
    with pin(whole), pin(CPUPool([FIRST])):
        with pin(whole):
            assert torch.get_num_threads() == whole.num_threads
        assert affinity() == {FIRST}
        assert torch.get_num_threads() == 1
    assert (affinity(), torch.get_num_threads()) == (before, threads)


@linux
@native
def test_each_thread_of_the_team_has_its_place():
    cpus = process_cpus()
    pool = CPUPool(cpus[:2])
    torch.ones(1 << 20).add_(1)  # a team that was there before
    with pin(pool):
        assert team_affinities(pool.num_threads) == [{cpu} for cpu in cpus[:2]]
    assert team_affinities(torch.get_num_threads())[0] == set(cpus)


@linux
def test_decorator_restores_after_an_error():
    before = affinity()

    @pin(CPUPool([FIRST]))
    def work(a, *, b):
        """Some text."""
        if b:
            raise KeyError(a)
        return a, affinity()

    assert work(3, b=False) == (3, {FIRST})
    assert work.__name__ == "work"
    with pytest.raises(KeyError):
        work(1, b=True)
    assert affinity() == before


@linux
def test_threads_have_pins_of_their_own():
    before = affinity()
    seen = []

    def other():
        with pin(CPUPool([FIRST])):
            seen.append(affinity())
        seen.append(affinity())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(60)
    assert seen == [{FIRST}, before]
    assert affinity() == before


def test_threads_of_others_keep_their_number():
    expected = []
    thread = threading.Thread(target=lambda: expected.append(torch.get_num_threads()))
    thread.start()
    thread.join(60)
    seen = []
    with pin(CPUPool([FIRST])):
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join(60)
    assert seen == expected


def test_what_cannot_be_pinned():
    pool = CPUPool([FIRST])
    with pytest.raises(TypeError, match="cpu_pool must be a CPUPool, got list"):
        pin([FIRST])

    async def coroutine():
        pass

    def generator():
        yield 1

    for function in (coroutine, generator):
        with pytest.raises(TypeError, match="must be a plain function"):
            pin(pool)(function)
    with pytest.raises(TypeError, match="func must be callable"):
        pin(pool)(3)


@linux
def test_without_the_native_library(monkeypatch):
    monkeypatch.setattr(team, "library", lambda: None)
    assert not is_runtime_ext_enabled()
    before = affinity()
    with pin(CPUPool([FIRST])):
        assert affinity() == {FIRST}
        assert torch.get_num_threads() == 1
    assert affinity() == before


@linux
@native
def test_enabled():
    assert is_runtime_ext_enabled()


@linux
@native
def test_a_refusal_is_told_once(monkeypatch):
    monkeypatch.setattr(memory, "_told", set())
    state = team.State([(8000,)])  # no machine has it
    with pytest.warns(RuntimeWarning, match="sched_setaffinity: the system refused"):
        state.exchange()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.exchange()


# --- memory -----------------------------------------------------------------------------------------------------------


def in_thread(function):
    """Run in a thread that ends, since a policy belongs to its thread."""
    seen = []
    thread = threading.Thread(target=lambda: seen.append(function()))
    thread.start()
    thread.join(60)
    return seen[0]


@linux
@pytest.mark.filterwarnings("ignore:.*the system refused.*:RuntimeWarning")
@pytest.mark.parametrize("mode", ["default", "local", "preferred", "bind", "interleave"])
def test_policies(mode):
    nodes = [] if mode in ("default", "local") else CPUPool([FIRST]).nodes
    assert in_thread(lambda: set_memory_policy(mode, nodes)) in (True, False)
    if mode != "default":
        tensor = torch.ones(1 << 16)
        assert place_memory(tensor, mode, nodes) in (True, False)
        assert bool((tensor == 1).all())

    def pinned():
        with pin(CPUPool([FIRST], memory=mode)):
            return torch.ones(1000).sum().item()

    assert in_thread(pinned) == 1000


@linux
@pytest.mark.filterwarnings("ignore:.*the system refused.*:RuntimeWarning")
def test_a_module_is_placed():
    module = torch.nn.Linear(512, 512)
    expected = module.weight.detach().clone()
    assert place_memory(module, "preferred", CPUPool([FIRST]).nodes) in (True, False)
    assert torch.equal(module.weight, expected)


def test_bad_memory():
    with pytest.raises(ValueError, match="mode must be one of"):
        set_memory_policy("fast")
    with pytest.raises(ValueError, match="nodes must be some of"):
        set_memory_policy("bind", [4711])
    with pytest.raises(ValueError, match="nodes must be some of"):
        set_memory_policy("bind")
    with pytest.raises(ValueError, match="nodes must be empty"):
        set_memory_policy("local", [0])
    with pytest.raises(TypeError, match="must be a tensor or a module, got int"):
        place_memory(3, "local")
