# SPDX-License-Identifier: Apache-2.0
"""``ipex auto`` and ``python -m ipex_runtime.codeless``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ipex_runtime.codeless._script import add_auto_ipex_params

__all__ = ["main", "make_parser", "parse_args"]


def make_parser(prog: str = "ipex auto") -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [options] script.py [arguments]\n       {prog} [options] -m module [arguments]",
        description="Run a Python script whose models are optimized for inference at their first call.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="run a module, as python -m does"
    )
    add_auto_ipex_params(parser, auto_ipex_default_enabled=True)
    parser.add_argument("program", help="the script or module")
    parser.add_argument("program_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def parse_args(argv: Sequence[str] | None = None, prog: str = "ipex auto") -> argparse.Namespace:
    """Return the parsed command line, by default the arguments of this process."""
    return make_parser(prog).parse_args(argv)


def main(argv: Sequence[str] | None = None, prog: str = "ipex auto") -> None:
    """Run a script with codeless optimization.

    Args:
        argv: Options, script and its arguments; by default the arguments of the process.
        prog: Name of the command for help and messages.

    Raises:
        SystemExit: As the script.
    """
    args = parse_args(argv, prog)
    from ipex_runtime.codeless import _hook, _script
    from ipex_runtime.codeless._script import Settings

    _hook.enable(
        Settings(
            dtype=args.dtype,
            quantization=args.auto_ipex_quantization,
            graph_mode=not args.disable_ipex_graph_mode,
            verbose=args.auto_ipex_verbose,
        )
    )
    _script.run([*(["-m"] if args.module else []), args.program, *args.program_args])


if __name__ == "__main__":
    main()
