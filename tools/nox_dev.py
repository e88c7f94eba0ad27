# SPDX-License-Identifier: Apache-2.0
"""The session for daily work: all packages from the source tree, the native code from wheels."""

from __future__ import annotations

import zipfile
from pathlib import Path

import nox

from nox_common import (
    BUILD_TOOLS,
    DIST,
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
        link(DIST / built()[name]["wheel"], ROOT / "packages" / name / "src", site)
    python = Path(session.bin, "python")
    python = python.relative_to(ROOT) if python.is_relative_to(ROOT) else python
    session.log(f"{python} -m pytest packages/ipex-core/tests/test_config.py")


def link(installed: Path, source: Path, site: Path) -> None:
    """Replace the Python files of an installed wheel by links to their sources; libraries stay beside them.

    Args:
        installed: The wheel.
        source: The folder ``src`` of its package.
        site: The folder that it was installed into.
    """
    with zipfile.ZipFile(installed) as wheel_file:
        names = set(wheel_file.namelist())
    for path in source.rglob("*.py"):
        name = path.relative_to(source)
        target = site / name
        # A file that is younger than the wheel is linked, too.
        if name.as_posix() in names or not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            target.symlink_to(path)
