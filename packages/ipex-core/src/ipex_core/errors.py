# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the ipex packages.

Every class also derives from the built-in exception a caller would expect, so that code which knows nothing of
ipex (``except ImportError``) handles it. A name that cannot be used has one of three causes, each its own class:
unknown (`UnknownComponentError`, `UnknownOpError`), known but not installed (`MissingComponentError`), installed but
broken (`BrokenComponentError`, with the original error as ``__cause__``).
"""

from __future__ import annotations

__all__ = [
    "BrokenComponentError",
    "ConfigError",
    "ExportError",
    "FallbackError",
    "IpexError",
    "IsaError",
    "KernelApiError",
    "MissingComponentError",
    "NotOfferedError",
    "NotOfferedModuleError",
    "NotOfferedNameError",
    "OpArgumentError",
    "StaleWeightsError",
    "TorchVersionError",
    "UnknownComponentError",
    "UnknownOpError",
]


class IpexError(Exception):
    """Base class of all errors raised by the ipex packages."""


class ConfigError(IpexError, ValueError):
    """A configuration value (usually an ``IPEX_*`` environment variable) is not one of the allowed ones."""


class IsaError(IpexError, ValueError):
    """The requested instruction-set level is unknown, not built, or not available on this CPU."""


class UnknownOpError(IpexError, ValueError):
    """No op of this name exists."""


class UnknownComponentError(IpexError, AttributeError):
    """No component or public name of this name exists."""


class MissingComponentError(IpexError, ImportError):
    """A known component is not installed; the message names the ``pip install`` that adds it."""


class NotOfferedError(IpexError, NotImplementedError):
    """A name of Intel Extension for PyTorch that is knowingly not there; the message says what to use instead."""


class NotOfferedNameError(NotOfferedError, AttributeError):
    """The same, for a name in a module: ``hasattr`` is False."""


class NotOfferedModuleError(NotOfferedError, ImportError):
    """The same, for an import."""


class BrokenComponentError(IpexError, ImportError):
    """A component is installed but cannot be loaded; ``__cause__`` holds the original error."""


class KernelApiError(BrokenComponentError):
    """A kernel package was built for another ``KERNEL_API`` than this core."""


class TorchVersionError(IpexError, ImportError):
    """The installed torch is older than the oldest supported one."""


class FallbackError(IpexError, RuntimeError):
    """Under ``IPEX_STRICT=1``: a slower path would have been taken silently."""


class StaleWeightsError(IpexError, RuntimeError):
    """The weights of a model changed after it was compiled."""


class ExportError(IpexError, RuntimeError):
    """A model cannot be exported; the message has the reason that torch gives, ``__cause__`` all of its report."""


class OpArgumentError(IpexError, ValueError, RuntimeError):
    """An op got a wrong argument.

    It is a ``ValueError`` for callers of the Python functions and a ``RuntimeError`` because that is the only type
    the native kernels can raise for the same mistake: ``except RuntimeError`` catches both.
    """
