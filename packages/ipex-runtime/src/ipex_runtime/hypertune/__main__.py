# SPDX-License-Identifier: Apache-2.0
"""``ipex hypertune`` and ``python -m ipex_runtime.hypertune``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from ipex_runtime.hypertune._yaml import ConfigurationError
from ipex_runtime.hypertune.conf import Conf
from ipex_runtime.hypertune.strategy import STRATEGIES

__all__ = ["Hypertune", "main", "make_parser", "parse_args"]


class Hypertune:
    """A search as the command line describes it.

    Args:
        args: With ``conf_file``, ``program``, ``program_args`` and, optionally, ``resume``.

    Raises:
        ConfigurationError: The configuration is not as documented.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.conf = Conf(args.conf_file, args.program, args.program_args)
        kind = STRATEGIES[self.conf.execution_conf.tuning.strategy]
        self.strategy = kind(self.conf, resume=getattr(args, "resume", False), out=_print)

    def tune(self) -> int:
        """Run it; returns how many trials have a result."""
        return self.strategy.traverse()


def _print(text: str) -> None:
    print(text, flush=True)


def make_parser(prog: str = "ipex hypertune") -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} --conf-file FILE [--resume] script.py [arguments]",
        description="Find the options of the launcher with which a script reaches the best numbers.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--conf-file", "--conf_file", required=True, help="YAML file: what to tune, and how"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the trials that record.csv has"
    )
    parser.add_argument("program", help="the script; it prints @hypertune lines")
    parser.add_argument("program_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def parse_args(
    argv: Sequence[str] | None = None, prog: str = "ipex hypertune"
) -> argparse.Namespace:
    """Return the parsed command line, by default the arguments of this process."""
    return make_parser(prog).parse_args(argv)


def main(argv: Sequence[str] | None = None, prog: str = "ipex hypertune") -> None:
    """Run a search.

    Raises:
        SystemExit: 0; 1 if no trial had a result; 2 if the arguments or the configuration are wrong.
    """
    args = parse_args(argv, prog)
    # Like Ctrl-C: the running trial is ended, and the record is complete.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        found = Hypertune(args).tune()
    except (ConfigurationError, ImportError) as error:
        print(f"{prog}: error: {str(error).removeprefix('hypertune: ')}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if found else 1)


if __name__ == "__main__":
    main()
