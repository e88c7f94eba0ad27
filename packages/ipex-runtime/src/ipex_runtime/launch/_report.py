# SPDX-License-Identifier: Apache-2.0
"""What the launcher writes: notes, log files, the dry run; and the step that runs or shows the instances."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ipex_runtime._errors import LaunchArgumentError
from ipex_runtime.launch import _supervise
from ipex_runtime.launch._instance import Instance

if TYPE_CHECKING:
    from ipex_runtime.launch.launcher_base import Launcher

#: Longest name of a log file: file systems allow 255 bytes.
LONGEST_NAME = 200


def make_logger(explain: bool) -> logging.Logger:
    """Return the logger of the launcher: warnings on stderr, with ``explain`` notes, too."""
    logger = logging.Logger("ipexrun", logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.INFO if explain else logging.WARNING)
    handler.setFormatter(_Format())
    logger.addHandler(handler)
    return logger


class _Format(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        level = "warning: " if record.levelno >= logging.WARNING else ""
        return f"ipexrun: {level}{record.getMessage()}"


def prepare_logs(args: argparse.Namespace, logger: logging.Logger) -> None:
    """Make the folder for logs and its first file; appends the time to the prefix.

    Raises:
        LaunchArgumentError: The folder cannot be made or written.
    """
    if os.sep in args.log_file_prefix:
        raise LaunchArgumentError(
            f"ipexrun: --log-file-prefix must be a name without {os.sep}, got {args.log_file_prefix!r}"
        )
    if not args.log_dir or args.dry_run:
        return
    args.log_file_prefix = f"{args.log_file_prefix}_{datetime.now():%Y%m%d%H%M%S}"
    folder = Path(args.log_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / f"{args.log_file_prefix}_instances.log")
    except OSError as error:
        raise LaunchArgumentError(
            f"ipexrun: --log-dir must be a folder that can be written, got {args.log_dir!r}: {error.strerror}"
        ) from error
    args.log_dir = str(folder)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)


def log_path(folder: str, name: str) -> Path:
    """Return the path of a log file, its name shortened to what file systems allow."""
    return Path(folder) / f"{name[:LONGEST_NAME]}.log"


def check_program(args: argparse.Namespace) -> None:
    """Raise a LaunchArgumentError if the program cannot be what the options say."""
    name = args.program
    if args.no_python and (args.module or args.auto_ipex):
        other = "--module" if args.module else "--auto-ipex"
        raise LaunchArgumentError(f"ipexrun: --no-python and {other} exclude each other, got both")
    if args.no_python:
        if shutil.which(name) is None:
            raise LaunchArgumentError(
                f"ipexrun: the program must exist and be executable, got {name!r}"
            )
        return
    if args.module:
        return
    if not name.endswith(".py"):
        raise LaunchArgumentError(
            f"ipexrun: the program must be a Python script (.py), got {name!r}: for others use --no-python, "
            "for modules -m"
        )
    if not os.path.isfile(name):
        raise LaunchArgumentError(f"ipexrun: the script must exist, got {name!r}: no such file")


def execute(
    launcher: Launcher,
    args: argparse.Namespace,
    instances: Sequence[Instance],
    combined: Path | None = None,
    prefixed: bool = False,
) -> None:
    """Run the instances, or print them for a dry run.

    Raises:
        LaunchArgumentError: A program or a log file cannot be opened.
        subprocess.CalledProcessError: An instance failed; its ``returncode`` is the exit code for the shell.
    """
    base = dict(os.environ)
    for instance in instances:
        launcher.verbose("info", f"{instance.label}: {instance.place()}")
        launcher.verbose("info", f"{instance.label}: {instance.written(base)}")
        if instance.log is not None:
            launcher.verbose("info", f"{instance.label}: log file {instance.log}")
    if args.dry_run:
        for instance in instances:
            print(f"# {instance.label}: {instance.place()}")
            print(instance.written(base))
        return
    table = args.table == "always" or (
        args.table == "auto" and len(instances) > 1 and sys.stderr.isatty()
    )
    with contextlib.ExitStack() as stack:
        try:
            whole: BinaryIO | None = (
                None if combined is None else stack.enter_context(combined.open("wb"))
            )
            code = _supervise.run(
                instances,
                stop_timeout=args.stop_timeout,
                table=table,
                combined=whole,
                prefixed=prefixed,
                complain=lambda text: launcher.verbose("warning", text),
            )
        except OSError as error:
            raise LaunchArgumentError(
                f"ipexrun: an instance cannot be started: {error}. Use --dry-run to see its command."
            ) from error
    if code:
        failed = next((i for i in instances if i.returncode), instances[0])
        raise subprocess.CalledProcessError(code, failed.command)
