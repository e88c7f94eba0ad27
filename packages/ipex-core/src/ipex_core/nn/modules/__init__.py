# SPDX-License-Identifier: Apache-2.0
"""IPEX's module path for layers: ``ipex.nn.modules``.

A name loads the module or the package that has it; `MissingComponentError` says what to install.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "DistMergeEmbeddingBagWithAdaGrad",
    "FrozenBatchNorm2d",
    "IPEXLinearEltwise",
    "MergedEmbeddingBag",
    "MergedEmbeddingBagWithAdaGrad",
    "MergedEmbeddingBagWithCat",
    "MergedEmbeddingBagWithSGD",
    "RoIAlign",
    "WeightOnlyQuantizedLinear",
    "WoqWeightFormat",
    "_roi_align",
    "merged_embeddingbag",
]

#: Name -> component that has it.
_NAMES = {
    "WeightOnlyQuantizedLinear": "quantization",
    "WoqWeightFormat": "quantization",
}

#: Name -> module of `ipex_core.nn` that has it.
_OWN = {
    "DistMergeEmbeddingBagWithAdaGrad": "embedding",
    "FrozenBatchNorm2d": "layers",
    "IPEXLinearEltwise": "linear",
    "MergedEmbeddingBag": "embedding",
    "MergedEmbeddingBagWithAdaGrad": "embedding",
    "MergedEmbeddingBagWithCat": "embedding",
    "MergedEmbeddingBagWithSGD": "embedding",
    "RoIAlign": "modules._roi_align",
}

_MODULES = ("_roi_align", "merged_embeddingbag")


def __getattr__(name: str) -> Any:
    if name in _OWN:
        return getattr(importlib.import_module(f"ipex_core.nn.{_OWN[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _NAMES:
        raise AttributeError(f"module 'ipex.nn.modules' has no attribute {name!r}")
    from ipex_core.kernels import providers

    return getattr(providers.load_component(_NAMES[name]), name)


def __dir__() -> list[str]:
    return __all__
