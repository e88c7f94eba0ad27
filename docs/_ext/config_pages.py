# SPDX-License-Identifier: Apache-2.0
"""One page per configuration variable, and their index."""

from __future__ import annotations

import enum

from ipex_core.config import VARIABLES, Variable

__all__ = ["pages"]

#: Variables that are read where they are used, and not by `ipex_core.config`.
OTHERS = """\
## Other variables

These are read where they are used.

| Variable | Read by | Meaning |
|---|---|---|
| `DISABLE_IPEX_SAMPLE` | `generate` of models of `ipex.llm.optimize` | set: sampling runs in the loop of transformers |
| `VLLM_PLUGINS` | [vLLM](../../vllm.md#when-it-is-active) | which plug-ins vLLM takes; `ipex` is this one |
| `IPEX_INSTALL_PREFIX` | CMake, `find_package(IPEX)` | [another installation](../../export.md#c-programs) |
| `ONEDNN_MAX_CPU_ISA`, `DNNL_MAX_CPU_ISA` | `ipex._C` | oneDNN's upper limit, for clients that ask for it |
| `ONEAPI_DEVICE_SELECTOR`, `OCL_ICD_FILENAMES` | the SYCL run-time | [devices](../../xpu.md#which-device) |

A variable with a name like `IPEX_...` that none of these tables has is warned about when `ipex_core` is imported.
""".splitlines()


def pages() -> dict[str, str]:
    """Return the pages by file name."""
    found = {
        f"config/{variable.name.lower()}.md": variable_page(variable)
        for variable in VARIABLES.values()
    }
    found["config/index.md"] = index_page()
    return found


def index_page() -> str:
    """Return the table of all variables."""
    rows = [
        f"| [`{v.name}`]({v.name.lower()}.md) | `{v.attribute}` | {v.type} | {default(v)} |"
        for v in VARIABLES.values()
    ]
    return "\n".join(
        [
            "# Configuration",
            "",
            "Environment variables are read once, when `ipex_core` is imported, and checked strictly: a value not",
            "allowed raises `ConfigError`, which names the variable and the allowed values. In Python the same values",
            "are read with `ipex_core.config.get`, set with `set_value`, and changed for a block with `override`:",
            "",
            "```{doctest}",
            ">>> from ipex_core import config",
            ">>> with config.override(strict=True):",
            '...     config.get("strict")',
            "True",
            "```",
            "",
            "`ipex.show_config()` and `ipex doctor` show the current values and where each comes from. This table is",
            "generated from the code.",
            "",
            "| Variable | In Python | Type | Default |",
            "|---|---|---|---|",
            *rows,
            "",
            *OTHERS,
            "```{toctree}",
            ":hidden:",
            "",
            *(variable.name.lower() for variable in VARIABLES.values()),
            "```",
            "",
        ]
    )


def variable_page(variable: Variable) -> str:
    """Return the page of one variable."""
    lines = [
        f"# {variable.name}",
        "",
        variable.meaning,
        "",
        "| | |",
        "|---|---|",
        f'| In Python | `ipex_core.config.get("{variable.attribute}")` |',
        f"| Type | {variable.type} |",
        f"| Default | {default(variable)} |",
        f"| Allowed | {variable.allowed} |",
    ]
    if variable.old_names:
        names = ", ".join(f"`{name}`" for name in variable.old_names)
        lines.append(f"| Also read | {names}, when `{variable.name}` is unset |")
    if variable.foreign:
        lines.append("| Belongs to | PyTorch: a value we do not know is warned about and ignored |")
    return "\n".join(lines) + "\n"


def default(variable: Variable) -> str:
    """Return the default value as code."""
    value = variable.default
    if isinstance(value, enum.Enum):
        value = value.name
    return "empty" if value == "" else f"`{value}`"
