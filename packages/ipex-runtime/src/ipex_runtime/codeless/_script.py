# SPDX-License-Identifier: Apache-2.0
"""The options of codeless optimization, and running a script or a module as the interpreter does."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import types
from collections.abc import Sequence

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8-dynamic", "woq-int8", "woq-int4")


def add_auto_ipex_params(
    parser: argparse.ArgumentParser, auto_ipex_default_enabled: bool = False
) -> None:
    """Add the options to a parser.

    Args:
        parser: The parser.
        auto_ipex_default_enabled: Whether ``--auto-ipex`` is on without being named.
    """
    group = parser.add_argument_group("Codeless optimization")

    def add(name: str, **settings: object) -> None:
        names = dict.fromkeys((name, "--" + name[2:].replace("-", "_")))
        group.add_argument(*names, **settings)  # type: ignore[arg-type]

    add(
        "--auto-ipex",
        action="store_true",
        default=auto_ipex_default_enabled,
        help="optimize the models of a script for inference with ipex, without changing it",
    )
    add("--dtype", choices=DTYPES, default="float32", help="data type of the optimized models")
    add(
        "--auto-ipex-quantization",
        choices=QUANTIZATIONS,
        default="none",
        help="quantize linear layers: activations and weights, or weights only",
    )
    add("--auto-ipex-verbose", action="store_true", help="print what was done, on stderr")
    add("--disable-ipex-graph-mode", action="store_true", help="do not capture models as graphs")


def as_arguments(args: argparse.Namespace) -> list[str]:
    """Return the command line of ``python -m ipex_runtime.codeless`` that says the same."""
    arguments = ["--dtype", args.dtype, "--auto-ipex-quantization", args.auto_ipex_quantization]
    if args.auto_ipex_verbose:
        arguments.append("--auto-ipex-verbose")
    if args.disable_ipex_graph_mode:
        arguments.append("--disable-ipex-graph-mode")
    return arguments


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to do with models.

    Attributes:
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        quantization: ``"none"``, ``"int8-dynamic"``, ``"woq-int8"`` or ``"woq-int4"``.
        graph_mode: Whether to capture models as graphs.
        verbose: Whether to tell what was done; what was left alone is always told.
    """

    dtype: str = "float32"
    quantization: str = "none"
    graph_mode: bool = True
    verbose: bool = False


# --- running ----------------------------------------------------------------------------------------------------------


def run(arguments: Sequence[str]) -> None:
    """Run ``script.py [arguments]`` or ``-m module [arguments]`` in this process, in its ``__main__`` module.

    Args:
        arguments: What would follow ``python``.

    Raises:
        SystemExit: The script ended itself, it could not be opened (2), or it raised (1, after its traceback).
    """
    if arguments[0] == "-m":
        _run_module(arguments[1], arguments[2:])
    else:
        _run_script(arguments[0], arguments[1:])


def _fresh_main() -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = module
    return module


def _run_script(script: str, arguments: Sequence[str]) -> None:
    sys.argv[:] = [script, *arguments]
    try:
        with io.open_code(os.path.abspath(script)) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {script!r}: {error}", file=sys.stderr)
        sys.exit(2)
    if not getattr(sys.flags, "safe_path", False):
        # In place of the folder that `python -m` has put there.
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    main = _fresh_main()
    path = main.__file__ = os.path.abspath(script)
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__cached__=None, __annotations__={})
    try:
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102  (the script of the user)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        # Without the frames of this file, as the interpreter prints it.
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _run_module(name: str, arguments: Sequence[str]) -> None:
    sys.argv[:] = ["-m", *arguments]
    _fresh_main()
    # Public runpy.run_module runs in a temporary module, which pickle and multiprocessing cannot find.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]
