# SPDX-License-Identifier: Apache-2.0
"""Ranks that work together: their variables, rendezvous, logs, MPI where it is asked for."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 120
CPUS = sorted(os.sched_getaffinity(0))
TWO = pytest.mark.skipif(len(CPUS) < 2, reason="two ranks need two CPUs")

#: One line, so that those of two ranks cannot mix.
SHOW = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
         "OMP_NUM_THREADS", "CCL_WORKER_COUNT")
found = {name: os.environ.get(name) for name in names} | {"cpus": sorted(os.sched_getaffinity(0))}
sys.stdout.write(json.dumps(found) + "\\n")
"""


def launch(
    folder: Path, *arguments: str, text: str = SHOW, **environment: str
) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    base = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MASTER_"))}
    return subprocess.run(
        [sys.executable, "-m", "ipex_runtime.launch", *arguments, "script.py"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=folder,
        env=base | environment,
        check=False,
    )


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@TWO
def test_ranks_get_the_variables_of_torchrun_and_cores_of_their_own(tmp_path):
    done = launch(tmp_path, "--nnodes", "1", "--nprocs-per-node", "2", "--master-port", "0")
    ranks = sorted(map(json.loads, done.stdout.splitlines()), key=lambda r: r["RANK"])
    assert [r["RANK"] for r in ranks] == [r["LOCAL_RANK"] for r in ranks] == ["0", "1"]
    assert {r["WORLD_SIZE"] for r in ranks} == {"2"} and {r["GROUP_RANK"] for r in ranks} == {"0"}
    assert len({r["MASTER_PORT"] for r in ranks}) == 1
    assert not set(ranks[0]["cpus"]) & set(ranks[1]["cpus"])


def test_the_second_machine_of_two(tmp_path):
    (tmp_path / "hostfile").write_text("192.0.2.1  # another machine\n127.0.0.1\n")
    done = launch(tmp_path, "--nnodes", "2", "--nprocs-per-node", "1", "--master-port", "1234")
    rank = json.loads(done.stdout)
    assert (rank["RANK"], rank["LOCAL_RANK"], rank["WORLD_SIZE"], rank["GROUP_RANK"]) == (
        "1",
        "0",
        "2",
        "1",
    )
    assert (rank["MASTER_ADDR"], rank["MASTER_PORT"]) == ("192.0.2.1", "1234")
    (tmp_path / "hostfile").unlink()
    told = ("--node-rank", "1", "--master-addr", "192.0.2.1")
    done = launch(
        tmp_path, "--nnodes", "2", "--nprocs-per-node", "1", "--master-port", "1234", *told
    )
    assert json.loads(done.stdout) == rank


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "2"], "--nnodes 2 needs a --hostfile"),
        (["--distributed-launcher", "mpi"], "mpiexec.hydra"),
        (["--nnodes", "1", "--nprocs-per-node", "100000"], "--nprocs-per-node must be 0 to"),
        (["--nnodes", "1", "--nprocs-per-node", "5000"], "--ninstances must be at most"),
        (["--nnodes", "1", "--master-port", "70000"], "--master-port must be 0 to 65535"),
        (["--nnodes", "1", "--ccl-worker-count", "5000"], "--ccl-worker-count must be below"),
        (["--nnodes", "1", "--extra-mpi-params=-x"], "needs mpiexec.hydra"),
        (["--nnodes", "1", "--logical-cores-for-ccl", "--use-logical-cores"], "exclude each other"),
        (["--nnodes", "1", "--node-rank", "3"], "--node-rank must be below --nnodes"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path):
    done = launch(tmp_path, *arguments, PATH=str(tmp_path))
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and "Traceback" not in done.stderr


def test_a_port_that_is_taken(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = launch(tmp_path, "--nnodes", "1", "--master-port", port)
    assert done.returncode == 2 and f"must be a free port, got {port}" in done.stderr


@TWO
def test_logs_of_ranks(tmp_path):
    done = launch(tmp_path, "--nnodes", "1", "--nprocs-per-node", "2", "--master-port", "0", "--log-dir", "logs",
                  text="import os\nprint('I am', os.environ['RANK'])\n")  # fmt: skip
    expected = ["[0] I am 0", "[1] I am 1"]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr
    logs = {re.sub(r"_\d{14}", "", p.name): p for p in (tmp_path / "logs").iterdir()}
    assert sorted(logs) == ["run.log", "run_instances.log", "run_rank_0.log", "run_rank_1.log"]
    assert sorted(logs["run.log"].read_text().splitlines()) == expected
    assert logs["run_rank_1.log"].read_text() == "I am 1\n"


def test_mpi(tmp_path):
    more = ("--ccl-worker-count", "0", "--extra-mpi-params", "-x 'a b'", "--log-dir", "logs")
    fake = tmp_path / "mpiexec.hydra"
    fake.write_text(f"#!/bin/sh\necho \"[0] $*\"\necho '[1] second'\nexec {sys.executable} -c ''\n")
    fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    options = ("--distributed-launcher", "mpi", "--nprocs-per-node", "1", "--master-port", "0")
    done = launch(tmp_path, *options, *more, PATH=path)
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("[0] -l -np 1 -ppn 1 -genv ") and first.endswith("-u script.py")
    for text in ("-genv MASTER_ADDR 127.0.0.1", "-genv I_MPI_PIN_DOMAIN [0x", "-x a b"):
        assert text in first
    (rank,) = (tmp_path / "logs").glob("*_rank_0.log")
    assert rank.read_text() == first.removeprefix("[0] ") + "\n"


@TWO
def test_a_group_of_torch_meets(tmp_path):
    pytest.importorskip("torch")
    text = """
import datetime, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
x = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(x)
sys.stdout.write(f"{x.item()}\\n")
dist.destroy_process_group()
"""
    done = launch(
        tmp_path, "--nnodes", "1", "--nprocs-per-node", "2", "--master-port", free_port(), text=text
    )
    assert done.stdout == "3.0\n3.0\n", done.stderr
