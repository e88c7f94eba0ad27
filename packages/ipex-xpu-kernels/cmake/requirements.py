# SPDX-License-Identifier: Apache-2.0
"""Run-time requirements of a wheel: torch only in the minor release that the wheel is built against."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any


class Requirements:
    """Provider of the field ``dependencies`` for scikit-build-core."""

    def __init__(self) -> None:
        self._state = ""

    def build_state(self, state: str) -> None:
        """Note what is built: an sdist is for every torch."""
        self._state = state

    def dynamic_metadata(
        self, settings: Mapping[str, Any], project: Mapping[str, Any]
    ) -> dict[str, list[str]]:
        """Return the requirements in the settings, in a wheel with the torch that is installed."""
        listed = list(settings["dependencies"])
        if self._state != "sdist":
            release = ".".join(importlib.metadata.version("torch").split("+")[0].split(".")[:2])
            listed = [
                f"torch=={release}.*" if text.startswith("torch>") else text for text in listed
            ]
        return {"dependencies": listed}

    def dynamic_wheel(self, settings: Mapping[str, Any]) -> dict[str, bool]:
        """Tell that wheels have other requirements than their sdist."""
        return {"dependencies": True}
