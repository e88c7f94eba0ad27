# SPDX-License-Identifier: Apache-2.0
"""ipex: makes PyTorch models faster on CPUs.

Importing it imports torch and registers the ops ``torch.ops.ipex.*``; every other name is imported from the package it
lives in when it is first used.

Example:
    >>> import torch, ipex
    >>> model = torch.nn.Linear(8, 8).eval()
    >>> fast = ipex.optimize(model, dtype=torch.bfloat16)
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from ipex import _version
from ipex.compat import migration

if TYPE_CHECKING:
    from ipex import cpu as cpu
    from ipex import llm as llm
    from ipex import quantization as quantization
    from ipex import runtime as runtime
    from ipex import utils as utils
    from ipex import xpu as xpu
    from ipex.compat.on_device import OnDevice as OnDevice
    from ipex_core import amp as amp
    from ipex_core import config as config
    from ipex_core import distributed as distributed
    from ipex_core import errors as errors
    from ipex_core import jit as jit
    from ipex_core import nn as nn
    from ipex_core import optim as optim
    from ipex_core import testing as testing
    from ipex_core.bert import fast_bert as fast_bert
    from ipex_core.compile_backend import compile as compile
    from ipex_core.compile_backend import get_compiler_backend as _get_compiler_backend  # noqa: F401
    from ipex_core.compile_backend import set_compiler_backend as _set_compiler_backend  # noqa: F401
    from ipex_core.config import VERBOSE_OFF as VERBOSE_OFF
    from ipex_core.config import VERBOSE_ON as VERBOSE_ON
    from ipex_core.config import VERBOSE_ON_CREATION as VERBOSE_ON_CREATION
    from ipex_core.config import FP32MathMode as FP32MathMode
    from ipex_core.config import get_fp32_math_mode as get_fp32_math_mode
    from ipex_core.config import set_fp32_math_mode as set_fp32_math_mode
    from ipex_core.config import set_logging_level as set_logging_level
    from ipex_core.config import verbose as verbose
    from ipex_core.diagnostics.doctor import doctor as doctor
    from ipex_core.diagnostics.explain import explain as explain
    from ipex_core.diagnostics.explain import op_info as op_info
    from ipex_core.diagnostics.explain import show_config as show_config
    from ipex_core.exporter import export as export
    from ipex_core.jit import enable_onednn_fusion as enable_onednn_fusion
    from ipex_core.kernels import cmake_prefix_path as cmake_prefix_path
    from ipex_core.optimization import disable_auto_channels_last as disable_auto_channels_last
    from ipex_core.optimization import enable_auto_channels_last as enable_auto_channels_last
    from ipex_core.optimization import optimize as optimize
    from ipex_core.optimization import restore as restore
    from ipex_core.precompiled import load_precompiled as load_precompiled
    from ipex_core.precompiled import precompile as precompile

#: With the ending by which clients of IPEX tell its builds for the CPU from those for XPU.
__version__ = f"{_version.__version__}+cpu"

_MODES = "ipex_core.config"
_BACKEND = "ipex_core.compile_backend"

#: Public name -> module that has it.
_NAMES = {
    "optimize": "ipex_core",
    "restore": "ipex_core",
    "OnDevice": "ipex.compat.on_device",
    "explain": "ipex_core",
    "export": "ipex_core",
    "fast_bert": "ipex_core",
    "load_precompiled": "ipex_core",
    "precompile": "ipex_core",
    # Not in __all__: without other packages they are errors, and `from ipex import *` must work.
    "cmake_prefix_path": "ipex_core.kernels",
    "optimize_transformers": "ipex.llm",
    "op_info": "ipex_core",
    "show_config": "ipex_core",
    "doctor": "ipex_core",
    "enable_auto_channels_last": "ipex_core",
    "disable_auto_channels_last": "ipex_core",
    "FP32MathMode": _MODES,
    "get_fp32_math_mode": _MODES,
    "set_fp32_math_mode": _MODES,
    "VERBOSE_OFF": _MODES,
    "VERBOSE_ON": _MODES,
    "VERBOSE_ON_CREATION": _MODES,
    "verbose": _MODES,
    "set_logging_level": _MODES,
    "enable_onednn_fusion": "ipex_core.jit",
    "compile": _BACKEND,
    "_get_compiler_backend": _BACKEND,
    "_set_compiler_backend": _BACKEND,
}

_SUBMODULES = ("cpu", "tpp", "utils", *migration.SUBMODULES)

__all__ = [
    "VERBOSE_OFF",
    "VERBOSE_ON",
    "VERBOSE_ON_CREATION",
    "FP32MathMode",
    "OnDevice",
    "__version__",
    "amp",
    "compile",
    "config",
    "cpu",
    "disable_auto_channels_last",
    "distributed",
    "doctor",
    "enable_auto_channels_last",
    "enable_onednn_fusion",
    "errors",
    "explain",
    "export",
    "fast_bert",
    "get_fp32_math_mode",
    "jit",
    "load_precompiled",
    "nn",
    "op_info",
    "optim",
    "optimize",
    "precompile",
    "restore",
    "set_fp32_math_mode",
    "set_logging_level",
    "show_config",
    "testing",
    "verbose",
    "version",
]


def version() -> None:
    """Print the versions of ipex, of its installed packages and of torch."""
    from ipex_cli import print_versions

    print_versions()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'ipex' has no attribute {name!r}")
    value: Any
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
    elif _is_submodule(name):
        return importlib.import_module(f"ipex.{name}")
    else:
        value = _from_table(name)
    globals()[name] = value
    return value


def _is_submodule(name: str) -> bool:
    if name in _SUBMODULES:
        return True
    return not name.startswith("_") and name in migration.component_names()


def _from_table(name: str) -> Any:
    from ipex_core.errors import NotOfferedNameError

    try:
        return migration.lookup("", name)
    except NotOfferedNameError:
        raise
    except AttributeError:
        raise _unknown(name) from None


def _unknown(name: str) -> AttributeError:
    import difflib

    from ipex_core.errors import UnknownComponentError

    known = [*__all__, *migration.component_names()]
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    return UnknownComponentError(f"ipex {_version.__version__} has no {name!r}{hint}")


def __dir__() -> list[str]:
    # Without components that are not installed: who walks over all names must not meet an ImportError.
    from ipex_core.kernels import providers

    return sorted({*__all__, *(c.name for c in providers.components() if c.state == "active")})


migration.install()
if not migration.started_by_dash_m():
    try:
        import ipex_core  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "ipex_core":
            raise
        raise ModuleNotFoundError(
            f"ipex {_version.__version__} needs ipex-core, which is not installed: pip install ipex-core",
            name="ipex_core",
        ) from None
    import ipex.compat.torch_ops  # noqa: F401

    # Programs in files call ops by name, which nothing but an import defines.
    with contextlib.suppress(ImportError):  # not installed, or broken: ipex.quantization says so
        import ipex_quant.int8.ops  # noqa: F401
