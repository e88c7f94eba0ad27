# SPDX-License-Identifier: Apache-2.0
"""LLM inference: fused functions and modules, optimization of Hugging Face models, generation.

Names are imported from the module they live in when they are first used.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from ipex_llm._version import __version__


def _check_siblings() -> None:
    # Names are imported late: without this, a missing package would be told by whatever name is used first.
    wanted = {"ipex_core": "ipex-core", "ipex_quant": "ipex-quant", "transformers": "transformers"}
    missing = [n for n in wanted if n not in sys.modules and importlib.util.find_spec(n) is None]
    if missing:
        names = " ".join(wanted[name] for name in missing)
        raise ModuleNotFoundError(
            f"ipex-llm {__version__} needs packages that are not installed: pip install {names}",
            name=missing[0],
        )


_check_siblings()

if TYPE_CHECKING:  # for type checkers and editors; at run time see __getattr__
    from ipex_llm import engine as engine
    from ipex_llm import functional as functional
    from ipex_llm import generation as generation
    from ipex_llm import modules as modules
    from ipex_llm import quantization as quantization
    from ipex_llm import utils as utils
    from ipex_llm.engine import Engine as Engine
    from ipex_llm.engine import SamplingParams as SamplingParams
    from ipex_llm.optimization import optimize as optimize
    from ipex_llm.optimization import optimize_transformers as optimize_transformers
    from ipex_llm.optimization import plan as plan
    from ipex_llm.optimization.decide import OptimizePlan as OptimizePlan

#: Public name -> module that has it.
_LAZY: dict[str, str] = {
    "Engine": "ipex_llm.engine",
    "OptimizePlan": "ipex_llm.optimization.decide",
    "SamplingParams": "ipex_llm.engine",
    "optimize": "ipex_llm.optimization",
    "optimize_transformers": "ipex_llm.optimization",
    "plan": "ipex_llm.optimization",
    "register_transformers": "ipex_llm.integrations",
}

#: Modules that are imported when they are named.
_MODULES: tuple[str, ...] = (
    "engine",
    "functional",
    "generation",
    "integrations",
    "modules",
    "quantization",
    "utils",
)

__all__ = ["__version__", *_LAZY, *_MODULES]  # noqa: PLE0604  (the keys are strings)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    elif name in _MODULES:
        return importlib.import_module(f"ipex_llm.{name}")
    else:
        raise AttributeError(f"module 'ipex_llm' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
