# SPDX-License-Identifier: Apache-2.0
"""What a patched module keeps: the model around it, the options it was patched with, and how to pack it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from ipex_llm.arch.layers import Facts
from ipex_llm.model_runner.runner import Runner
from ipex_quant.kv_cache import KVCacheScales

__all__ = ["KEY", "Patch", "kv_dtype", "patch_of"]

#: Where a module keeps its `Patch`.
KEY = "_ipex_patch"


@dataclasses.dataclass
class Patch:
    """The patch of one module. A copy of the module has a copy of it, without a runner.

    Attributes:
        top: The model that was optimized.
        rebuild: Function that packs the module again and returns its runner, or None if that is not possible.
        kv: dtype of the cache, None for the dtype of the model.
        kv_scales: Scales of an FP8 or INT8 cache.
        stock_calls: Kinds of calls that the stock forward answers.
        layer: Of a layer that runs alone, what its forward must know.
        hooks: Modules inside a layer, with what is done around their forwards.
    """

    top: nn.Module
    rebuild: Callable[[nn.Module], Runner | None]
    kv: torch.dtype | None = None
    kv_scales: KVCacheScales | None = None
    stock_calls: frozenset[str] = frozenset()
    layer: Facts | None = None
    hooks: tuple[tuple[nn.Module, tuple[int, int, int]], ...] = ()


def patch_of(module: nn.Module) -> Patch | None:
    """Return the patch of a module, or None."""
    return module.__dict__.get(KEY)


def kv_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of the cache of a patched model, None for the dtype of the model."""
    patch = patch_of(module)
    return None if patch is None else patch.kv
