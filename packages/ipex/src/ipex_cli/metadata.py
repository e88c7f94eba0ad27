# SPDX-License-Identifier: Apache-2.0
"""A wheel without code that answers for the distribution ``intel_extension_for_pytorch``.

accelerate, transformers, optimum-intel and auto-round look for the metadata of that distribution, in the release of
torch, before they use the module. Users who want that install this wheel; pip removes it again.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import zipfile
from pathlib import Path

from ipex import _version
from ipex_cli.migration_table import OLD_NAME


def write_metadata_wheel(folder: Path) -> Path:
    """Write the wheel for the torch that is installed.

    Args:
        folder: Where to; made if it is not there.

    Returns:
        The path of the wheel, whose version is ``<major>.<minor>.0+ipex<version of ipex>``.

    Raises:
        PackageNotFoundError: torch is not installed.
    """
    major, minor, *_ = importlib.metadata.version("torch").split(".")
    version = f"{major}.{minor}.0+ipex{_version.__version__}"
    info = f"{OLD_NAME}-{version}.dist-info"
    files = {
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {OLD_NAME}\nVersion: {version}\n"
            "Summary: Says that ipex offers this module; has no code.\nLicense: Apache-2.0\n"
            f"Requires-Dist: ipex=={_version.__version__}\n"
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: ipex\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},{_digest(text)},{len(text)}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{OLD_NAME}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)  # (of 1980: the same bytes each time)
    return wheel


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"
