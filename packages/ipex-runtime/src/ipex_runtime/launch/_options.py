# SPDX-License-Identifier: Apache-2.0
"""The options of the launcher: one list for the parser and the documentation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ipex_runtime._errors import LaunchArgumentError
from ipex_runtime.codeless._script import DTYPES, QUANTIZATIONS
from ipex_runtime.codeless._script import add_auto_ipex_params as add_codeless
from ipex_runtime.codeless._script import as_arguments as codeless_options
from ipex_runtime.topology.types import CpuListError, parse_cpu_list

__all__ = [
    "ALLOCATORS",
    "DTYPES",
    "OMP_RUNTIMES",
    "QUANTIZATIONS",
    "STRATEGIES",
    "TASK_MANAGERS",
    "add_codeless",
    "add_common",
    "add_deprecated",
    "add_distributed",
    "add_multi_instance",
    "add_program",
    "codeless_options",
    "parse_list",
]

ALLOCATORS = ("auto", "default", "tcmalloc", "jemalloc")
OMP_RUNTIMES = ("auto", "default", "intel")
STRATEGIES = ("scatter", "close")
TASK_MANAGERS = ("auto", "none", "numactl", "taskset")
DISTRIBUTED_LAUNCHERS = ("torchrun", "mpi")


class _Group:
    """Adds options, each also under its name with underscores."""

    def __init__(self, parser: argparse.ArgumentParser, title: str) -> None:
        self._group = parser.add_argument_group(title)

    def add(self, *names: str, **settings: Any) -> None:
        long = names[-1]
        alias = "--" + long[2:].replace("-", "_")
        self._group.add_argument(*names, *([alias] if alias != long else []), **settings)

    def flag(self, *names: str, help: str) -> None:
        self.add(*names, action="store_true", help=help)


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add what is run and how it is reported."""
    group = _Group(parser, "What to run")
    group.flag("-m", "--module", help="run a module, as python -m does")
    group.flag(
        "--no-python", help="run a program that is not a Python script, without the interpreter"
    )
    group.add("--log-dir", default="", help="folder for log files; empty: none")
    group.add(
        "--log-file-prefix",
        default="run",
        help="start of the names of log files; the time is appended",
    )
    group.flag("--dry-run", help="print commands and environment, and run nothing")
    group.flag("--explain", help="say what was found and why each choice was made")
    group.add(
        "--table",
        choices=("auto", "always", "never"),
        default="auto",
        help="live table of the instances on stderr; auto: several instances, on a terminal",
    )
    group.add(
        "--stop-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="time between the request to end (SIGTERM) and SIGKILL",
    )
    parser.add_argument("program", help="the script, module or program")
    parser.add_argument("program_args", nargs=argparse.REMAINDER, help="its arguments")


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options that all launchers have."""
    group = _Group(parser, "Cores and libraries")
    group.add(
        "--ncores-per-instance",
        type=int,
        default=0,
        help="cores of each instance; 0: an even part, what remains is unused; -1: an even part, all are used",
    )
    group.add("--nodes-list", default="", help='NUMA nodes to use, as in "0,2-3"; empty: all')
    group.flag("--use-e-cores", help="use efficiency cores, too")
    group.add(
        "--strategy",
        choices=STRATEGIES,
        default="scatter",
        help="where only a part of the cores is needed: spread instances over the machine, or keep them close",
    )
    group.add(
        "--memory-allocator",
        choices=ALLOCATORS,
        default="auto",
        help="auto: tcmalloc, else jemalloc, else the default one",
    )
    group.add(
        "--omp-runtime",
        choices=OMP_RUNTIMES,
        default="auto",
        help="auto: Intel's libiomp5 if it is found, else the default one",
    )


def add_multi_instance(parser: argparse.ArgumentParser) -> None:
    """Add the options of the launcher of independent instances."""
    group = _Group(parser, "Several instances")
    group.add(
        "--ninstances",
        type=int,
        default=0,
        help="number of instances; 0: one, or what the cores allow",
    )
    group.add(
        "--instance-idx",
        default="",
        help='run only these of the instances, as in "0,2-3"; empty or -1: all',
    )
    group.flag("--use-logical-cores", help="use all hardware threads of each core")
    group.flag("--bind-numa-node", help="keep each instance within one NUMA node")
    group.add(
        "--multi-task-manager",
        choices=TASK_MANAGERS,
        default="auto",
        help="what binds instances: auto: ipexrun itself; none: only variables for OpenMP",
    )
    group.flag("--latency-mode", help="4 cores per instance on all physical cores")
    group.flag("--throughput-mode", help="one instance per NUMA node with all its physical cores")
    group.add("--cores-list", default="", help='CPUs to use, as in "0,2-3"; empty: all')
    group.flag(
        "--benchmark", help="settings of jemalloc for measurements: memory is never given back"
    )


def add_distributed(parser: argparse.ArgumentParser) -> None:
    """Add the options of the launcher of ranks that work together."""
    group = _Group(parser, "Distributed")
    group.add("--nnodes", type=int, default=0, help="number of machines; above 0: distributed")
    group.add(
        "--nprocs-per-node", type=int, default=0, help="ranks on each machine; 0: one per NUMA node"
    )
    group.add(
        "--ccl-worker-count",
        type=int,
        default=4,
        action=_Given,
        help="cores of each rank for oneCCL; reserved if oneCCL is installed or this option is given",
    )
    group.flag(
        "--logical-cores-for-ccl", help="use the second hardware threads of cores for oneCCL"
    )
    group.add("--master-addr", default="127.0.0.1", help="address of the machine with rank 0")
    group.add(
        "--master-port",
        type=int,
        default=29500,
        help="port there; 0: a free one (one machine only)",
    )
    group.add(
        "--hostfile",
        default="hostfile",
        help="file with the address of each machine, one a line, rank 0 first",
    )
    group.add(
        "--node-rank",
        type=int,
        default=-1,
        help="number of this machine; -1: its line in the hostfile, or 0",
    )
    group.add(
        "--distributed-launcher",
        choices=DISTRIBUTED_LAUNCHERS,
        default="torchrun",
        help="torchrun: ranks with torchrun's variables on this machine; mpi: mpiexec.hydra, on all machines",
    )
    group.add(
        "--extra-mpi-params", default="", help="further arguments for mpiexec.hydra; implies mpi"
    )


#: Names that options of IPEX's launchers had -> the option that does it now; with a value, the old one was a flag.
FORMER = {
    "--skip-cross-node-cores": ("--bind-numa-node", True),
    "--ncore-per-instance": ("--ncores-per-instance", None),
    "--node-id": ("--nodes-list", None),
    "--core-list": ("--cores-list", None),
    "--use-logical-core": ("--use-logical-cores", True),
    "--log-path": ("--log-dir", None),
    "--enable-tcmalloc": ("--memory-allocator", "tcmalloc"),
    "--enable-jemalloc": ("--memory-allocator", "jemalloc"),
    "--use-default-allocator": ("--memory-allocator", "default"),
    "--disable-iomp": ("--omp-runtime", "default"),
    "--nproc-per-node": ("--nprocs-per-node", None),
    "--logical-core-for-ccl": ("--logical-cores-for-ccl", True),
    "--more-mpi-params": ("--extra-mpi-params", None),
    "--distributed": ("--nnodes", 1),
    # ipexrun binds by itself, and several instances need no word of their own.
    "--multi-instance": ("", True),
    "--disable-numactl": ("", True),
    "--disable-taskset": ("", True),
}


def add_deprecated(parser: argparse.ArgumentParser) -> None:
    """Add old names."""
    group = _Group(parser, "Deprecated")
    for old, (new, value) in FORMER.items():
        group.add(
            old,
            action=_Former,
            nargs=None if value is None else 0,
            type=int if new in ("--ncores-per-instance", "--nprocs-per-node") else str,
            default=argparse.SUPPRESS,
            help=f"the former name of {_now(new, value)}" if new else "not needed any more",
        )


def _now(new: str, value: object) -> str:
    return new if value is None or value is True else f"{new} {value}"


class _Former(argparse.Action):
    """Does what the new option does, and notes both names for a warning."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        new, value = FORMER[self.option_strings[0]]
        if new:
            setattr(namespace, new[2:].replace("-", "_"), values if value is None else value)
        advice = f"use {_now(new, value)}" if new else "it is not needed"
        noted = [*getattr(namespace, "former", ()), f"{option_string} is deprecated: {advice}"]
        namespace.former = noted


class _Given(argparse.Action):
    """Stores a value and that the user gave it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"{self.dest}_given", True)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"must be 0 to 86400 seconds, got {text}")
    return value


def parse_list(function: str, text: str) -> list[int]:
    """Return the numbers of a text such as ``"0,2-4"``, sorted, each once.

    Raises:
        LaunchArgumentError: The text is no list of CPUs.
    """
    try:
        return parse_cpu_list(text)
    except CpuListError as error:
        raise LaunchArgumentError(f"{function}: {error}") from error


def repeated(text: str) -> Sequence[str]:
    """Return the parts of a list that are in it twice, for a warning."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return sorted({part for part in parts if parts.count(part) > 1})
