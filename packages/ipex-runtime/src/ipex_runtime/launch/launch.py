# SPDX-License-Identifier: Apache-2.0
"""The command line of the launcher, and the step from options to the launcher that runs them."""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ipex_runtime._errors import LaunchArgumentError
from ipex_runtime.launch import _options
from ipex_runtime.launch._report import check_program, make_logger, prepare_logs
from ipex_runtime.launch.launcher_base import Launcher
from ipex_runtime.launch.launcher_distributed import DistributedTrainingLauncher
from ipex_runtime.launch.launcher_multi_instances import MultiInstancesLauncher

__all__ = [
    "add_deprecated_params",
    "init_parser",
    "main",
    "process_deprecated_params",
    "run_main_with_args",
]

EPILOG = """\
examples:
  ipexrun script.py                                  one instance on all physical cores
  ipexrun --ninstances 2 script.py --batch 8         two instances, half of the cores each
  ipexrun --latency-mode script.py                   as many instances of 4 cores as there is room for
  ipexrun --throughput-mode --dry-run script.py      show what one instance per NUMA node would be
  ipexrun --nnodes 1 --nprocs-per-node 2 train.py    two ranks of one torch.distributed group
  ipexrun --auto-ipex --dtype bfloat16 script.py     optimize the models of a script for inference
"""


def add_deprecated_params(parser: argparse.ArgumentParser) -> None:
    """Add old names of options to a parser."""
    _options.add_deprecated(parser)


def process_deprecated_params(args: argparse.Namespace, logger: Any) -> None:
    """Warn of old names of options, which the parser has translated."""
    for text in getattr(args, "former", ()):
        logger.warning(text)


#: Options that do nothing unless another one is given, and that one.
_WITHOUT = (
    (
        *("nprocs_per_node", "ccl_worker_count", "logical_cores_for_ccl", "master_addr"),
        *("master_port", "hostfile", "node_rank", "extra_mpi_params"),
    ),
    ("dtype", "auto_ipex_quantization", "auto_ipex_verbose", "disable_ipex_graph_mode"),
    ("log_file_prefix",),
)
#: Options of the launcher of instances that the one of ranks has no use for.
_INSTANCES = ("ninstances", "instance_idx", "latency_mode", "throughput_mode", "multi_task_manager")


def warn_of_useless_options(args: argparse.Namespace, distributed: bool, logger: Any) -> None:
    """Warn of options that have no effect with the others."""
    parser = init_parser(argparse.ArgumentParser("ipexrun"))  # argv has no name under python -m
    given = {name for name, value in vars(args).items() if parser.get_default(name) != value}
    absent = (not distributed, not args.auto_ipex, not args.log_dir)
    why = ("without --nnodes", "without --auto-ipex", "without --log-dir")
    cases = [(names, text) for names, it, text in zip(_WITHOUT, absent, why, strict=True) if it]
    if distributed:
        cases.append((_INSTANCES, "with --nnodes"))
    for names, text in cases:
        for name in names:
            if name in given:
                logger.warning("--%s has no effect %s", name.replace("_", "-"), text)


def init_parser(parser: argparse.ArgumentParser | None = None) -> argparse.ArgumentParser:
    """Add all options of the launcher to a parser, or to a new one, and return it."""
    if parser is None:
        parser = argparse.ArgumentParser("ipexrun")
    _options.add_program(parser)
    _options.add_common(parser)
    _options.add_multi_instance(parser)
    _options.add_distributed(parser)
    _options.add_codeless(parser)
    add_deprecated_params(parser)
    group = parser.add_argument_group("XPU")
    group.add_argument(
        "--convert-fp64-to-fp32",
        "--convert_fp64_to_fp32",
        action="store_true",
        help="ipexrun xpu: make float64 tensors float32, for devices without float64",
    )
    return parser


def run_main_with_args(args: argparse.Namespace) -> None:
    """Run what parsed options ask for.

    Args:
        args: The result of a parser that `init_parser` filled.

    Raises:
        LaunchArgumentError: Options that cannot be met (a ValueError, AssertionError and RuntimeError).
        subprocess.CalledProcessError: An instance failed; ``returncode`` is the exit code for the shell.
    """
    logger = make_logger(args.explain)
    try:
        process_deprecated_params(args, logger)
        check_program(args)
        prepare_logs(args, logger)
        kind: type[Launcher] = MultiInstancesLauncher
        if args.nnodes < 0:
            raise LaunchArgumentError(f"ipexrun: --nnodes must be 0 or more, got {args.nnodes}")
        distributed = args.nnodes > 0 or args.distributed_launcher == "mpi"
        warn_of_useless_options(args, distributed, logger)
        if distributed:
            args.nnodes = max(1, args.nnodes)
            kind = DistributedTrainingLauncher
        launcher = kind(logger)
        describe(launcher)
        launcher.launch(args)
    finally:
        for handler in logger.handlers:
            if isinstance(handler, logging.FileHandler):
                handler.close()


def describe(launcher: Launcher) -> None:
    """Note what the machine has."""
    pool = launcher.cpuinfo.pool_all
    cores = len({c.core for c in pool})
    nodes = sorted({c.node for c in pool})
    slow = sum(not c.is_p_core for c in pool)
    launcher.verbose(
        "info",
        f"this process may use {len(pool)} CPUs ({pool.get_pool_txt()['cores']}) of {cores} cores"
        f"{f', {slow} of them efficiency cores' if slow else ''}, in NUMA nodes {', '.join(map(str, nodes))}",
    )


def main(argv: Sequence[str] | None = None, prog: str = "ipexrun") -> int:
    """Run a command line and return the exit code.

    Args:
        argv: The arguments, default the arguments of the process. A first word ``cpu`` or ``xpu`` names the backend.
        prog: Name of the command for help and messages.

    Returns:
        0; the exit code of the instance that failed first (128 + n if signal n ended it); 2 for bad arguments.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    backend = arguments.pop(0) if arguments and arguments[0] in ("cpu", "xpu") else "cpu"
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [cpu | xpu] [options] program [arguments]",
        description="Run Python programs on the right cores, with the right memory and libraries.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    args = init_parser(parser).parse_args(arguments)
    if args.convert_fp64_to_fp32 and backend != "xpu":
        parser.error("--convert-fp64-to-fp32 is an option of ipexrun xpu")
    try:
        run_main_with_args(args)
    except subprocess.CalledProcessError as error:
        return error.returncode
    except (LaunchArgumentError, RuntimeError) as error:
        print(f"{prog}: error: {str(error).removeprefix('ipexrun: ')}", file=sys.stderr)
        return 2
    return 0
