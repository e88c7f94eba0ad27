# SPDX-License-Identifier: Apache-2.0
"""torch's threads are at most the CPU quota of the control group, where their number was not chosen."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="control groups are of Linux"
)

START = """
import ctypes, json, os, sys, threading
from pathlib import Path
import torch
import ipex_core
from ipex_core.kernels import machine

torch.get_num_threads()
ctypes.CDLL(None).omp_set_num_threads(3)  # as if torch had started with three, on any machine

def of_a_thread():
    numbers = []
    thread = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return numbers[0]

def in_child(prepare, root):
    read, write = os.pipe()
    if os.fork() == 0:
        exec(prepare)
        machine.fit_threads(Path(root))
        os.write(write, json.dumps([torch.get_num_threads(), of_a_thread()]).encode())
        os._exit(0)
    os.close(write)
    os.wait()
    return json.loads(os.read(read, 1000))
"""

V2 = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/cgroup.controllers": "cpu"}
V1 = {"proc/self/cgroup": "3:cpu,cpuacct:/a\n1:name=systemd:/\n"}
OWN, ABOVE = "sys/fs/cgroup/a/b/cpu.max", "sys/fs/cgroup/a/cpu.max"
QUOTA, PERIOD = (f"sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_{n}_us" for n in ("quota", "period"))

#: Name -> files of the machine, what the program did before, threads that it has then.
CASES = {
    "whole": ({**V2, OWN: "200000 100000"}, "", 2),
    "rounded up": ({**V2, OWN: "110000 100000"}, "", 2),
    "below one": ({**V2, OWN: "5000 100000"}, "", 1),
    "of the group above": ({**V2, OWN: "max 100000", ABOVE: "100000 100000"}, "", 1),
    "the smaller one": ({**V2, OWN: "200000 100000", ABOVE: "100000 100000"}, "", 1),
    "above the threads": ({**V2, OWN: "6400000 100000"}, "", 3),
    "max": ({**V2, OWN: "max 100000"}, "", 3),
    "version 1": ({**V1, QUOTA: "150000", PERIOD: "100000"}, "", 2),
    "version 1, none": ({**V1, QUOTA: "-1", PERIOD: "100000"}, "", 3),
    "no control groups": ({}, "", 3),
    "OMP_NUM_THREADS": ({**V2, OWN: "100000 100000"}, "os.environ['OMP_NUM_THREADS'] = '3'", 3),
    "MKL_NUM_THREADS": ({**V2, OWN: "100000 100000"}, "os.environ['MKL_NUM_THREADS'] = '3'", 3),
    "torch.set_num_threads": ({**V2, OWN: "100000 100000"}, "torch.set_num_threads(3)", 3),
    "the first op": (
        {},
        "machine.cgroup_limits = lambda root: machine.CgroupLimits('2', 1.5, None); "
        "torch.ops.ipex.silu_and_mul(torch.ones(1, 2))",
        2,
    ),
    "without MKL": (
        {**V2, OWN: "100000 100000"},
        "machine._set_mkl_threads = lambda: None; os.cpu_count = lambda: 3",
        1,
    ),
    "without MKL, another number": (
        {**V2, OWN: "100000 100000"},
        "machine._set_mkl_threads = lambda: None; os.cpu_count = lambda: 64; "
        "machine.affinity = lambda: tuple(range(32))",
        3,
    ),
}


def output(code):
    """Run Python code in a process whose environment chooses no number of threads."""
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    return done.stdout


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """All cases in one process, a child for each: the number is set once in a process."""
    code = "cases = {}\n"
    for name, (files, prepare, _) in CASES.items():
        root = tmp_path_factory.mktemp("root")
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        code += f"cases[{name!r}] = in_child({prepare!r}, {str(root)!r})\n"
    return json.loads(output(START + code + "print(json.dumps(cases))"))


@pytest.mark.parametrize("name", CASES)
def test_quota(fitted, name):
    expected = CASES[name][2]
    number, of_a_thread = fitted[name]
    assert number == expected
    if expected < 3:  # which torch does not start everywhere
        assert of_a_thread == expected


def test_the_affinity_mask_counts():
    """Of a process that could use more CPUs, torch itself sees it."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); import torch; "
        "print(torch.get_num_threads())"
    )
    assert output(code).strip() == "1"
