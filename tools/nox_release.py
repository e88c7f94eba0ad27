# SPDX-License-Identifier: Apache-2.0
"""Sessions for what is published: images and releases."""

from __future__ import annotations

import nox

from nox_common import DIST, PACKAGES, TEST_TOOLS, install_wheels, prepare


@nox.session(default=False, requires=["wheels"])
def images(session: nox.Session) -> None:
    """Execute the steps of docker/*.Dockerfile without Docker; `-- serve`: of this one, `-- --chroot`: in a Debian."""
    # No prepare(): a build with Docker knows no constraints.
    session.run("python", "tools/try_images.py", *session.posargs)


@nox.session(default=False, requires=["wheels", "wheels_xpu"])
def release(session: nox.Session) -> None:
    """Test the wheels and collect what a tag releases in dist/release/: `-- ipex-core-0.2.0`, or with `--rehearsal`."""
    prepare(session)
    if not session.posargs:
        session.error("release needs a tag: nox -s release -- NAME-VERSION")
    install_wheels(session, PACKAGES, *TEST_TOOLS, extras="[cpu]")
    session.env["IPEX_TEST_WHEELS"] = str(DIST)
    symbols = "packages/ipex-cpu-kernels/tests/test_symbols.py"
    session.run("pytest", "tests/test_wheels.py", symbols)
    session.run("python", "tools/release.py", *session.posargs)
