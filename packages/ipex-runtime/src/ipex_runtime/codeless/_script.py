# SPDX-License-Identifier: Apache-2.0
"""Runs a script or a module as the interpreter does: argv, ``__main__``, ``__file__``, path, tracebacks."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import types
from collections.abc import Sequence

__all__ = ["run"]


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
