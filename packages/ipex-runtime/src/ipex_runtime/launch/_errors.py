# SPDX-License-Identifier: Apache-2.0
"""The error that ``ipexrun`` turns into one line and exit code 2."""

from __future__ import annotations

__all__ = ["LaunchArgumentError"]


class LaunchArgumentError(ValueError, AssertionError, RuntimeError):
    """An option that cannot be met; old callers expect an AssertionError or a RuntimeError."""
