# SPDX-License-Identifier: Apache-2.0
"""Core of ipex: op specifications, plug-in discovery, configuration and the optimize pipeline.

Importing it checks the configuration and registers the op schemas. Kernel packages are loaded at the first op call;
everything else is imported when it is named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ipex_core import config, errors
from ipex_core._version import __version__

_OLDEST_TORCH = (2, 11)


def _check_torch() -> None:
    # Before anything else of torch is used: a name an old torch lacks would fail with a message that does not help.
    import re

    wanted = ".".join(map(str, _OLDEST_TORCH))
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":  # torch is there, but something of its own is not
            raise
        raise ModuleNotFoundError(
            f"ipex-core {__version__} needs torch >= {wanted}, which is not installed:"
            f" pip install 'torch>={wanted}'",
            name="torch",
        ) from None

    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST_TORCH:
        raise errors.TorchVersionError(
            f"ipex-core {__version__} needs torch >= {wanted}, but torch {torch.__version__} is installed:"
            f" pip install 'torch>={wanted}'"
        )


_check_torch()

from ipex_core import ops as _ops  # noqa: E402, F401  (registers the op schemas)
from ipex_core.kernels import providers as _providers  # noqa: E402, F401  (registers the device xpu)

if TYPE_CHECKING:  # for type checkers and editors; at run time see __getattr__
    from ipex_core import amp as amp
    from ipex_core import benchmark as benchmark
    from ipex_core import compile_backend as compile_backend
    from ipex_core import distributed as distributed
    from ipex_core import jit as jit
    from ipex_core import nn as nn
    from ipex_core import program as program
    from ipex_core import testing as testing
    from ipex_core import woq as woq
    from ipex_core.bert import fast_bert as fast_bert
    from ipex_core.diagnostics.doctor import doctor as doctor
    from ipex_core.diagnostics.explain import explain as explain
    from ipex_core.diagnostics.explain import op_info as op_info
    from ipex_core.diagnostics.explain import show_config as show_config
    from ipex_core.exporter import export as export
    from ipex_core.kernels.providers import KERNEL_API as KERNEL_API
    from ipex_core.kernels.providers import ProviderInfo as ProviderInfo
    from ipex_core.library.spec import BenchCase as BenchCase
    from ipex_core.library.spec import OpSpec as OpSpec
    from ipex_core.library.spec import Sample as Sample
    from ipex_core.optimization import disable_auto_channels_last as disable_auto_channels_last
    from ipex_core.optimization import enable_auto_channels_last as enable_auto_channels_last
    from ipex_core.optimization import optimize as optimize
    from ipex_core.optimization import restore as restore
    from ipex_core.precompiled import Precompiled as Precompiled
    from ipex_core.precompiled import load_precompiled as load_precompiled
    from ipex_core.precompiled import precompile as precompile

#: Public name -> module it comes from.
_LAZY = {
    "BenchCase": "ipex_core.library.spec",
    "OpSpec": "ipex_core.library.spec",
    "Sample": "ipex_core.library.spec",
    "KERNEL_API": "ipex_core.kernels.providers",
    "ProviderInfo": "ipex_core.kernels.providers",
    "disable_auto_channels_last": "ipex_core.optimization",
    "enable_auto_channels_last": "ipex_core.optimization",
    "doctor": "ipex_core.diagnostics.doctor",
    "explain": "ipex_core.diagnostics.explain",
    "export": "ipex_core.exporter",
    "fast_bert": "ipex_core.bert",
    "load_precompiled": "ipex_core.precompiled",
    "op_info": "ipex_core.diagnostics.explain",
    "optimize": "ipex_core.optimization",
    "precompile": "ipex_core.precompiled",
    "restore": "ipex_core.optimization",
    "show_config": "ipex_core.diagnostics.explain",
}

#: Modules that are imported when they are named.
_MODULES = (
    "amp",
    "benchmark",
    "compile_backend",
    "distributed",
    "jit",
    "nn",
    "program",
    "testing",
    "woq",
)

__all__ = ["__version__", "config", "errors", *_LAZY, *_MODULES]  # noqa: PLE0604  (the keys are strings)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    # Importing the submodule has bound the module under its own name; the public name is what it contains.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
