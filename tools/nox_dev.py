# SPDX-License-Identifier: Apache-2.0
"""The session for daily work: all packages from the source tree, the native code from wheels."""

from __future__ import annotations

from pathlib import Path

import nox

from nox_common import (
    BUILD_TOOLS,
    KERNELS,
    PACKAGES,
    ROOT,
    SERVE_TOOLS,
    SMALL_TOOLS,
    TEST_TOOLS,
    built,
    prepare,
    wheel,
)
from nox_wheels import build

#: Packages whose wheel has libraries. Of these, the environment gets the wheel, and links to the Python files.
NATIVE = (KERNELS, "ipex-runtime")
LOCATE = "import sysconfig; print(sysconfig.get_path('purelib'))"


@nox.session(default=False, reuse_venv=True)
def dev(session: nox.Session) -> None:
    """Make an environment of the source tree, to run one test in seconds; `-- --prebuilt` takes kernels as they are.

    Python files of all packages are used where they lie. Native libraries come from dist/, and are built for this CPU
    where dist/ has none, or older ones than the sources.
    """
    prepare(session)
    if "--prebuilt" not in session.posargs:
        build(session, NATIVE, *BUILD_TOOLS, levels="native")
    elif missing := [name for name in NATIVE if name not in built()]:
        session.error(
            f"--prebuilt needs wheels of {', '.join(NATIVE)} in dist/, got none of {', '.join(missing)}:"
            " leave it out, and they are built"
        )
    session.install("--force-reinstall", "--no-deps", *(wheel(name) for name in NATIVE))
    editable = [name for name in PACKAGES if name not in NATIVE]
    folders = [
        f"{ROOT / 'packages' / name}{'[demo]' if name == 'ipex' else ''}" for name in editable
    ]
    options = [word for folder in folders for word in ("--editable", folder)]
    tools = (*TEST_TOOLS, *SERVE_TOOLS, *SMALL_TOOLS, "nox", "ruff", "mypy")
    session.install(*options, *(wheel(name) for name in NATIVE), *tools)
    site = Path(str(session.run("python", "-c", LOCATE, silent=True)).strip())
    for name in NATIVE:
        link(ROOT / "packages" / name / "src", site)
    python = Path(session.bin, "python")
    python = python.relative_to(ROOT) if python.is_relative_to(ROOT) else python
    session.log(f"{python} -m pytest packages/ipex-core/tests/config/test_config.py")


def link(source: Path, site: Path) -> None:
    """Replace installed Python files by links to their sources; libraries stay beside them.

    Args:
        source: The folder ``src`` of a package.
        site: The folder that its wheel was installed into.
    """
    for path in source.rglob("*.py"):
        target = site / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.symlink_to(path)
