# SPDX-License-Identifier: Apache-2.0
"""The options of all commands, from the commands themselves."""

from __future__ import annotations

import argparse
from typing import Any

import typer.main

from ipex_llm.entrypoints.cli import app

__all__ = ["pages"]


def pages() -> dict[str, str]:
    """Return the page by file name."""
    lines = ["# Options of `ipex llm`", ""]
    lines += [
        "Generated from the commands; [the user page](../llm_commands.md) shows them at work.",
        "",
    ]
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        lines += command_section("ipex llm", name, command)
    return {"llm_options.md": "\n".join(lines), "options.md": all_commands()}


def all_commands() -> str:
    """Return the page of the other commands of ``ipex``, and of ``ipexrun``."""
    from ipex_cli import app as commands
    from ipex_runtime.codeless import __main__ as codeless
    from ipex_runtime.hypertune import __main__ as hypertune
    from ipex_runtime.launch import launch

    lines = [
        "# Options of the commands",
        "",
        "Generated from the commands; [Command line](../commands.md) says what they are for, and",
        "[those of `ipex llm`](llm_options.md) have a page of their own.",
        "",
    ]
    group: Any = typer.main.get_command(commands.app)
    for name in sorted(PLAIN):
        lines += command_section("ipex", name, group.get_command(None, name))
    parser = launch.init_parser(argparse.ArgumentParser(prog="ipexrun", add_help=False))
    lines += parser_section(
        "ipexrun [cpu|xpu]", "Run a program on the right cores; the same as `ipex run`.", parser
    )
    lines += parser_section(
        "ipex auto",
        "Run a script whose models are optimized; the options of `ipexrun` may be given, too.",
        codeless.make_parser(),
    )
    lines += parser_section(
        "ipex hypertune",
        "Search the options of the launcher with which a script is fastest.",
        hypertune.make_parser(),
    )
    return "\n".join(lines)


#: Commands of the facade whose parameters are declared; the others hand their arguments on.
PLAIN = ("bench", "demo", "doctor", "migrate", "op-info", "show-config", "topology", "version")


def parser_section(name: str, text: str, parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of a parser, by its groups."""
    lines = [f"## {name}", "", text, ""]
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS]
        if not actions:
            continue
        title = (group.title or "").strip()
        lines += [
            f"### {title[:1].upper()}{title[1:]}",
            "",
            "| Option | Default | |",
            "|---|---|---|",
        ]
        for action in actions:
            names = ", ".join(f"`{n}`" for n in action.option_strings if "_" not in n)
            value = action.default
            shown = "" if value in (None, False, "", argparse.SUPPRESS) else f"`{value}`"
            help_text = (
                " ".join(str(action.help or "").split()).replace("|", "\\|").replace("%%", "%")
            )
            lines.append(f"| {names or f'`{action.dest}`'} | {shown} | {help_text} |")
        lines.append("")
    return lines


def command_section(program: str, name: str, command: Any) -> list[str]:
    """Return the text and the options of one command, or of all commands of a group."""
    if hasattr(command, "commands"):
        parts = command.commands.items()
        return [s for n, c in parts for s in command_section(f"{program} {name}", n, c)]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([program, name, *(p.name.upper() for p in arguments)])
    text = " ".join((command.help or "").split("\f")[0].split())
    title = f"{program} {name}".removeprefix("ipex llm ").removeprefix("ipex ")
    lines = [f"## {title}", "", f"`{usage}`", "", text, ""]
    lines += ["| Option | Default | |", "|---|---|---|"]
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        names = ", ".join(f"`{one}`" for one in (*parameter.opts, *parameter.secondary_opts))
        if parameter in arguments:
            names = f"`{parameter.name.upper()}`"
        help_text = (getattr(parameter, "help", None) or "").replace("|", "\\|")
        lines.append(f"| {names} | {default(parameter)} | {help_text} |")
    return [*lines, ""]


def default(parameter: Any) -> str:
    """Return the default of an option as the command line would have it."""
    if parameter.required:
        return "required"
    value = parameter.default
    if value is None or value is False or callable(value) or value in ((), [], ""):
        return ""
    return "on" if value is True else f"`{value}`"
