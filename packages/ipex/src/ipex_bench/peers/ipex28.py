# SPDX-License-Identifier: Apache-2.0
"""Intel Extension for PyTorch 2.8, the last release, in an environment of its own (``--env ipex28=PYTHON``)."""

from __future__ import annotations

import importlib.metadata

from ..ipex_work import prepare
from ..task import Prepared, Task
from . import Peer

__all__ = ["Engine"]


class Engine(Peer):
    """The original."""

    title = "IPEX 2.8"
    module = "intel_extension_for_pytorch"
    install = (
        "an environment with torch==2.8 and intel-extension-for-pytorch, and --env ipex28=PYTHON"
    )

    def missing(self) -> str:
        """Return why not; our own module of the same name does not count."""
        try:
            version = importlib.metadata.version("intel_extension_for_pytorch")
        except importlib.metadata.PackageNotFoundError:
            version = ""
        return "" if version.startswith("2.8") else f"not installed ({self.install})"

    def version(self) -> str:
        """Return the version."""
        return importlib.metadata.version("intel_extension_for_pytorch")

    def prepare(self, task: Task) -> Prepared:
        """Optimize the model as its documentation says: inside autocast, traced and frozen for inference."""
        import intel_extension_for_pytorch as original

        return prepare(task, original, traced=True)
