# SPDX-License-Identifier: Apache-2.0
"""Where oneDNN for SYCL is, which is optional; the native module loads it when it is first needed."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path

#: "0" does without oneDNN; a path names another libdnnl.
VARIABLE = "IPEX_XPU_ONEDNN"
_LIBRARY = "libdnnl.so.3"


def find() -> tuple[str, str]:
    """Return the path of the library, or an empty path and the reason why there is no library."""
    chosen = os.environ.get(VARIABLE, "").strip()
    if chosen.lower() in ("0", "off"):
        return "", f"{VARIABLE}={chosen}"
    if "/" in chosen:
        path = Path(chosen)
        return (str(path), "") if path.is_file() else ("", f"{VARIABLE}: there is no file {chosen}")
    if chosen.lower() not in ("", "auto"):
        return "", f"{VARIABLE} must be auto, 0 or a path, got {chosen}"
    try:
        files = importlib.metadata.files("onednn") or []
    except importlib.metadata.PackageNotFoundError:
        return "", "not installed (pip install 'ipex-xpu-kernels[onednn]')"
    for file in files:
        if file.name == _LIBRARY:
            return str(Path(str(file.locate())).resolve()), ""
    return "", f"the package onednn has no {_LIBRARY}"


def describe(state: Mapping[str, str]) -> str:
    """Return what ``ipex doctor`` says.

    Args:
        state: Of the native module: ``version``, ``path`` and ``why``.
    """
    if state["version"]:
        return f"{state['version']} ({state['path']})"
    return f"not used: {state['why']}"
