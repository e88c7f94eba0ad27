# SPDX-License-Identifier: Apache-2.0
"""Write the op schemas for C++ programs: packages/ipex-cpu-kernels/csrc/cpp/schemas.inc.

In Python the schemas come from the op specifications of ipex-core. The build of the kernel wheel needs no other
package, so what a process without Python needs is a generated file in the repository; with ``--check`` this tool fails
if that is out of date. Both need ipex-core to be importable.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["FILE", "main", "text"]

FILE = Path(__file__).resolve().parent.parent / "packages/ipex-cpu-kernels/csrc/cpp/schemas.inc"
HEAD = """\
// SPDX-License-Identifier: Apache-2.0
// Generated from the op specifications of ipex-core: python tools/generate_schemas.py
"""


def text() -> str:
    """Return what the file must contain."""
    import ipex_core.program.run  # noqa: F401  (defines ops too)
    from ipex_core.library.kernels import schemas

    lines = []
    for _, schema in sorted(schemas().items()):
        quoted = schema.replace("\\", "\\\\").replace('"', '\\"')
        lines.append(f'"{quoted}",\n')
    return HEAD + "".join(lines)


def main(arguments: list[str]) -> int:
    """Write the file, or compare it; return 1 if it is out of date."""
    wanted = text()
    if "--check" not in arguments:
        FILE.write_text(wanted, encoding="utf-8")
        return 0
    if FILE.exists() and FILE.read_text(encoding="utf-8") == wanted:
        print("generate_schemas: ok")
        return 0
    print("csrc/cpp/schemas.inc is out of date: python tools/generate_schemas.py")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
