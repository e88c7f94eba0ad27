# SPDX-License-Identifier: Apache-2.0
"""The options of the commands of ``ipex llm``, from the commands themselves."""

from __future__ import annotations

from typing import Any

import typer.main

from ipex_llm._cli import app

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
        lines += command_section(name, command)
    return {"llm_options.md": "\n".join(lines)}


def command_section(name: str, command: Any) -> list[str]:
    """Return the text and the options of one command."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join(["ipex llm", name, *(p.name.upper() for p in arguments)])
    text = " ".join((command.help or "").split("\f")[0].split())
    lines = [f"## {name}", "", f"`{usage}`", "", text, ""]
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
    if value is None or value is False or callable(value) or value in ((), []):
        return ""
    return "on" if value is True else f"`{value}`"
