#!/usr/bin/env -S python3 -m nox -f
# SPDX-License-Identifier: Apache-2.0
"""Everything this repository can do, one session each: ``nox -l`` lists them, ``nox -s NAME`` runs one.

Every session works in its own fresh environment and uses *built wheels*, never the source tree, so that what is tested
is what a user would install. The wheels are built once (session ``wheels``) and reused until a source file changes.

Arguments after ``--`` go to the tool of the session: ``nox -s tests -- -k rms_norm``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
import nox_common as common


@nox.session(default=False, requires=["wheels_native"])
def demo(session: nox.Session) -> None:
    """Build, install, and speed up a real model on real text: `ipex demo`."""
    common.prepare(session)
    common.install_wheels(session, common.PACKAGES, extras="[demo]")
    common.REPORTS.mkdir(exist_ok=True)
    session.run("ipex", "demo", *session.posargs)


@nox.session(requires=["wheels_tests", "wheels_xpu"])
def tests(session: nox.Session) -> None:
    """Run the tests of each package and across packages from built wheels, all but those marked slow."""
    nox_tests.test_all(session, "not slow")


@nox.session(default=False, requires=["wheels_tests", "wheels_xpu"])
def tests_slow(session: nox.Session) -> None:
    """Run the tests marked slow, which `tests` leaves out: long ones, and cases that are like another."""
    nox_tests.test_all(session, "slow")


# The other sessions: each module registers its own, in the order in which `nox -l` lists them.
import nox_wheels  # noqa: E402, F401, I001
import nox_dev  # noqa: E402, F401
import nox_tests  # noqa: E402
import nox_versions  # noqa: E402, F401
import nox_vllm  # noqa: E402, F401
import nox_checks  # noqa: E402, F401
import nox_docs  # noqa: E402, F401
import nox_release  # noqa: E402, F401

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_external_run = True
nox.options.sessions = ["lint", "typecheck", "tests", "docs"]
nox.options.envdir = common.environments()

if __name__ == "__main__":
    nox.main()
