# SPDX-License-Identifier: Apache-2.0
"""The session with vLLM's wheel of PyPI and the plug-in."""

from __future__ import annotations

import nox

from nox_common import PACKAGES, install_wheels, prepare

#: One release of each minor version that the plug-in knows.
VLLM_RELEASES = ("0.32.0", "0.33.0")


@nox.session(default=False, requires=["wheels_native"])
@nox.parametrize("version", VLLM_RELEASES)
def vllm(session: nox.Session, version: str) -> None:
    """Run tiny models in vLLM with the plug-in: `"vllm(version='0.33.0')"`; `-- families` runs one part.

    It downloads 336 MB of vLLM, and torch with the libraries of CUDA that its import loads: 2.5 GB.
    """
    prepare(session)
    # vLLM says exactly which torch, and in which ranges the rest must be.
    session.env["PIP_CONSTRAINT"] = ""
    session.install("packaging", "pytest")
    session.run("python", "tools/vllm_install.py", version)
    session.install("ray")
    install_wheels(session, PACKAGES, "--no-deps")
    session.run("python", "tools/vllm_record.py")
    session.run("python", "tools/vllm_check.py", *session.posargs)
