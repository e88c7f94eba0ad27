#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the stubs by which type checkers and editors find modules under their second names.

    python tools/generate_stubs.py [--check]

At run time a finder answers for ``ipex.llm.functional`` or ``intel_extension_for_pytorch.quantization``
(`ipex.compat.migration`). A type checker looks for files: each second name has a stub that takes everything from the
real one.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "packages"
FACADE = ROOT / "ipex" / "src"
OLD_NAME = "intel_extension_for_pytorch"
NOTICE = "# SPDX-License-Identifier: Apache-2.0\n# Written by tools/generate_stubs.py\n"

#: Name below ipex -> the module that it is.
COMPONENTS = {
    "amp": "ipex_core.amp",
    "config": "ipex_core.config",
    "cpu.runtime": "ipex_runtime",
    "cpu.tpp.optim": "ipex_core.optim.tpp",
    "distributed": "ipex_core.distributed",
    "errors": "ipex_core.errors",
    "jit": "ipex_core.jit",
    "llm": "ipex_llm",
    "nn": "ipex_core.nn",
    "optim": "ipex_core.optim",
    "quantization": "ipex_quant",
    "runtime": "ipex_runtime",
    "testing": "ipex_core.testing",
    "xpu": "ipex_xpu_kernels",
}


#: Those of other packages, which `ipex.__all__` does not have.
OPTIONAL = ("llm", "quantization", "runtime", "xpu")
#: Modules in them that programs name with a dot.
INNER = {
    "ipex_core.nn": ("functional", "modules"),
    "ipex_llm": ("functional", "generation", "modules", "quantization", "utils"),
    "ipex_quant": ("fp8",),
}


def text_of(module: str, second: str) -> str:
    """Return the stub of a module under its second name."""
    lines = [f"from {module} import *"]
    if module == "ipex_xpu_kernels":
        lines.append("from torch.xpu import *")
    more = [name for name in INNER.get(module, ()) if f"{module}.{name}" != "ipex_core.nn.modules"]
    lines += [f"from {second} import {name} as {name}" for name in more]
    return NOTICE + "\n".join(lines) + "\n"


def add(found: dict[Path, str], module: str, second: str) -> None:
    """Add the stubs of a module and of those in it."""
    path = FACADE / Path(*second.split("."))
    if module not in INNER:
        found[path.with_suffix(".pyi")] = text_of(module, second)
        return
    found[path / "__init__.pyi"] = text_of(module, second)
    for name in INNER[module]:
        add(found, f"{module}.{name}", f"{second}.{name}")


def stubs() -> dict[Path, str]:
    """Return all stubs."""
    found: dict[Path, str] = {}
    for package in ("ipex", OLD_NAME):
        for name, module in COMPONENTS.items():
            add(found, module, f"{package}.{name}")
    old = FACADE / OLD_NAME
    lines = ["from ipex import *", "from ipex import __version__ as __version__"]
    lines += [f"from {OLD_NAME} import {name} as {name}" for name in OPTIONAL]
    found[old / "__init__.pyi"] = NOTICE + "\n".join(lines) + "\n"
    lines = ["from ipex.cpu import *", f"from {OLD_NAME}.cpu import runtime as runtime"]
    found[old / "cpu" / "__init__.pyi"] = NOTICE + "\n".join(lines) + "\n"
    return found


def main() -> int:
    """Write the stubs, or say which differ."""
    wanted = stubs()
    there = {
        path
        for path in FACADE.rglob("*.pyi")
        if path.read_text(encoding="utf-8").startswith(NOTICE)
    }
    stale = sorted(there - set(wanted)) + [
        path
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)}: run tools/generate_stubs.py", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        if path in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
        else:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
