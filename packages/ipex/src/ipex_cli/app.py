# SPDX-License-Identifier: Apache-2.0
"""The command line application. Sub-commands of other packages are found in the entry-point group ``ipex.commands``."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from ipex_cli import print_versions

try:
    import typer
    import typer.core
    import typer.main
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    if error.name not in {"rich", "typer"}:
        raise
    raise ModuleNotFoundError(
        f"the command ipex needs {error.name}, which is not installed: pip install rich typer",
        name=error.name,
    ) from None

if TYPE_CHECKING:
    from ipex_core.diagnostics.doctor import Report

__all__ = ["app", "main"]

COMMAND_GROUP = "ipex.commands"


@functools.cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=COMMAND_GROUP)}


def _load(entry: importlib.metadata.EntryPoint) -> Any:
    try:
        loaded = entry.load()
    except Exception as cause:
        return _broken(entry, cause)
    if isinstance(loaded, typer.Typer):
        return typer.main.get_command(loaded)
    if hasattr(loaded, "make_context"):
        return loaded
    if list(inspect.signature(loaded).parameters) == ["argv"]:
        return _pass_through(loaded)
    return typer.main.get_command(_stub(loaded))


def _stub(function: Any, text: str | None = None) -> typer.Typer:
    stub = typer.Typer(add_completion=False)
    settings = {"ignore_unknown_options": True, "allow_extra_args": True} if text else None
    stub.command(help=text, context_settings=settings)(function)
    return stub


def _pass_through(function: Any) -> Any:
    """Return a command that hands over its arguments, all of them and untouched."""

    def run(ctx: typer.Context) -> None:
        function(list(ctx.args))

    stub = typer.Typer(add_completion=False)
    settings = {
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "help_option_names": [],
    }
    stub.command(help=function.__doc__, add_help_option=False, context_settings=settings)(run)
    return typer.main.get_command(stub)


def _broken(entry: importlib.metadata.EntryPoint, cause: Exception) -> Any:
    """Return a command that says why the real one cannot run; one bad package must not take the others along."""
    package = entry.dist.name if entry.dist else entry.value
    reason = f"{type(cause).__name__}: {cause}"

    def run() -> None:
        _fail(f"the command {entry.name!r} of {package} cannot be loaded: {reason}")

    return typer.main.get_command(_stub(run, f"(broken, {package}: {reason})"))


class _Commands(typer.core.TyperGroup):
    """The built-in commands and commands of entry points, loaded when they are needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *sorted(name for name in _entry_points() if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        entry = _entry_points().get(cmd_name)
        if command is None and entry is not None:
            command = _load(entry)
            command.name = cmd_name
        return command


app = typer.Typer(
    cls=_Commands,
    name="ipex",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Makes PyTorch models faster on CPUs. Start with: ipex doctor",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_versions()
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the versions."
        ),
    ] = False,
) -> None:
    pass


def _fail(message: str, code: int = 2) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), message))
    raise typer.Exit(code)


def _tolerate_bad_environment() -> None:
    # Read by ipex_core.config when it is imported: the commands that explain the environment must not die from it.
    sys._xoptions["ipex-tolerant"] = True


def _print(table: Table) -> None:
    # Late, like all of ipex_core: what it finds in the environment must be tolerated, or become one line, first.
    from ipex_core.util.console import make_console

    make_console().print(table)


# --- doctor -----------------------------------------------------------------------------------------------------------


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    report_file: Annotated[
        Path | None,
        typer.Option(
            "--report", help="Write one file for a bug report: versions, CPU, settings, findings."
        ),
    ] = None,
) -> None:
    """Examine machine, process and installation. Exit code 1: something is broken."""
    _tolerate_bad_environment()
    if report_file is not None:
        with contextlib.suppress(ImportError):  # no core: below, after the report is written
            from ipex_core.util.console import writable

            writable(report_file, "--report")
    try:
        from ipex_core.diagnostics.doctor import doctor as examine

        report = examine()
    except ImportError as error:
        # No torch, or one that core refuses: there is nothing to examine with, but a clear answer.
        problem = f"ipex-core cannot be imported: {error}"
        if report_file is not None:
            _write_report(report_file, None, problem)
        if as_json:
            print(
                json.dumps(
                    {"schema": 1, "ok": False, "problems": [problem], "advice": []}, indent=2
                )
            )
            raise typer.Exit(1) from None
        _fail(problem, code=1)
    if report_file is not None:
        _write_report(report_file, report)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print_report(report)
    raise typer.Exit(1 if report.problems else 0)


def _write_report(path: Path, report: Report | None, problem: str = "") -> None:
    from ipex_cli.doctor_report import report_text

    path.write_text(report_text(report, problem), encoding="utf-8")
    # Standard output may be JSON for a program.
    print(f"wrote {path}", file=sys.stderr)


def _print_report(report: Report) -> None:
    # Not a terminal: no wrapping, so that a line of a log or a bug report is a line.
    console = Console(soft_wrap=not sys.stdout.isatty())
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    styles = {"broken": "red", "missing": "dim", "active": "green"}
    for title, text in report.rows():
        state = text.split(",")[0]
        table.add_row(
            title, Text(text, style=styles.get(state, "dim" if title.startswith(" ") else ""))
        )
    if console.soft_wrap:
        print("\n".join(f"{title:<26}{text}" for title, text in report.rows()))
    else:
        console.print(table)
    for problem in report.problems:
        console.print(Text.assemble(("\nproblem: ", "bold red"), problem))
    for line in report.advice:
        console.print(Text.assemble(("\nadvice: ", "bold yellow"), line))
    if report.problems:
        console.print("\nFor a bug report attach the file of: ipex doctor --report report.md")
    else:
        console.print(Text("\nnothing is broken", style="bold green"))


# --- the others -------------------------------------------------------------------------------------------------------


@app.command()
def version() -> None:
    """Show the versions of the installed packages."""
    print_versions()


@app.command("show-config")
def show_config(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show every configuration value, where it comes from, and the state of the packages."""
    _tolerate_bad_environment()
    from ipex_core import config
    from ipex_core.diagnostics import explain

    if not as_json:
        print(explain.show_config())
        return
    rows = [
        {
            "name": s.variable.name,
            "value": getattr(s.value, "name", s.value),
            "source": s.source,
            "default": getattr(s.variable.default, "name", s.variable.default),
            "allowed": s.variable.allowed,
            "error": s.error,
        }
        for s in config.settings()
    ]
    print(json.dumps(rows, indent=2))


@app.command("op-info")
def op_info(
    name: Annotated[str | None, typer.Argument(help="Name of an op. Without: list all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show which kernels stand behind an op, at which ISA level they run, and when the stock op is used."""
    from ipex_core.diagnostics import explain
    from ipex_core.library.kernels import specs

    if name is not None:
        info = explain.op_info(name)
        print(json.dumps(info, indent=2) if as_json else _describe(info))
        return
    found = [explain.op_info(op) for op in sorted(specs())]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table("op", "provider", "ISA level", "what it does", box=None, pad_edge=False)
    for info in found:
        levels = sorted({str(k["current"]) for k in info["kernels"].values()})
        level = ", ".join(levels) or "-"
        table.add_row(info["op"], info["provider"], level, Text(info["summary"]))
    _print(table)


def _describe(info: dict[str, Any]) -> str:
    kernels = info["kernels"]
    lines = [f"{key:<10} {_text(info[key])}" for key in info if key != "kernels"]
    lines += [
        f"kernel     {symbol}: {k['current']} (available: {', '.join(k['available'])})"
        for symbol, k in kernels.items()
    ]
    return "\n".join(lines)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


@app.command()
def migrate(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names, or parts of names, of Intel Extension for PyTorch."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    metadata: Annotated[
        Path | None,
        typer.Option(
            help="Write a wheel without code into this folder. Once installed, accelerate, transformers, optimum-intel"
            " and auto-round find the distribution intel_extension_for_pytorch in the release of torch."
        ),
    ] = None,
) -> None:
    """Show what has become of a name of Intel Extension for PyTorch. Exit code 1: no such name is known."""
    from ipex_cli import migration_table

    if metadata is not None:
        from ipex_cli.metadata import write_metadata_wheel

        print(write_metadata_wheel(metadata))
    if not names:
        if metadata is None:
            _fail("migrate: NAMES must be given, or --metadata", code=2)
        return

    found = [row for name in names for row in migration_table.search(name)]
    if as_json:
        print(json.dumps([row._asdict() for row in found], indent=2))
    elif found:
        table = Table(box=None, pad_edge=False)
        for title in ("name", "state", "here", "difference"):
            table.add_column(title, overflow="fold")
        for row in found:
            use = {"absent": "use ", "xpu": "without it use "}.get(row.state, "") + row.here
            table.add_row(row.name, migration_table.STATES[row.state], Text(use), Text(row.note))
        _print(table)
    if not found:
        _fail(f"no name of IPEX contains {', '.join(names)}", code=1)


#: Rounds that the threads of a server spin for others, in place of libgomp's ten times as many: programs that come
#: later shall not stop it for milliseconds at each op. `ipexrun` has the same number; see docs/tuning.md.
LONG_SPIN = 30000


def _bound_spin() -> None:
    """Bound how long OpenMP threads spin: shortly beside other programs, else longer. Variables that are set decide."""
    unset = not (os.environ.get("GOMP_SPINCOUNT") or os.environ.get("OMP_WAIT_POLICY"))
    # Read when torch loads libgomp, which the next import does.
    if unset and "torch" not in sys.modules:
        os.environ["GOMP_SPINCOUNT"] = str(LONG_SPIN)
    from ipex_core.kernels.machine import restart_if_crowded

    restart_if_crowded(bounded=unset)


def main() -> None:
    """Run the command; errors of ipex are one line on stderr and exit code 2."""
    # torch warns when it is imported without NumPy, which no command needs.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    try:
        if sys.argv[1:3] == ["llm", "serve"] and "--help" not in sys.argv:
            _bound_spin()
        app()
    except Exception as error:
        # By name: the package that defines the class may be what could not be imported.
        if any(c.__module__ == "ipex_core.errors" for c in type(error).__mro__):
            Console(stderr=True, soft_wrap=True).print(
                Text.assemble(("error: ", "bold red"), str(error))
            )
            sys.exit(2)
        raise
