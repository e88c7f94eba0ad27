# SPDX-License-Identifier: Apache-2.0
"""Errors for wrong arguments where IPEX raised AssertionError: programs that catch either kind keep working."""

from __future__ import annotations


class WrongTypeError(TypeError, AssertionError):
    """An argument has the wrong type."""


class WrongValueError(ValueError, AssertionError):
    """An argument has a value that cannot be."""


class LaunchArgumentError(ValueError, AssertionError, RuntimeError):
    """An option that cannot be met; old callers expect an AssertionError or a RuntimeError."""
