# SPDX-License-Identifier: Apache-2.0
"""The arguments of `optimize` that say how keys and values are cached."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ipex_core.errors import OpArgumentError
from ipex_core.ops.kv_cache.checks import QUANTIZED
from ipex_llm.arch.types import DecoderPlan
from ipex_llm.kv_cache.paged import CACHE_DTYPES
from ipex_quant.kv_cache import KVCacheScales, read_kv_cache_scales

__all__ = ["cache_text", "checkpoint_scales", "fitting", "kv_dtype", "kv_scales"]


def kv_dtype(value: Any) -> torch.dtype | None:
    """Return the dtype that ``kv_cache_dtype`` names, None for the model's own."""
    if isinstance(value, str):
        if value not in CACHE_DTYPES:
            names = ", ".join(map(repr, CACHE_DTYPES))
            raise OpArgumentError(f"optimize: kv_cache_dtype must be one of {names}, got {value!r}")
        return CACHE_DTYPES[value]
    if value not in (None, *QUANTIZED):
        names = ", ".join(map(str, QUANTIZED))
        raise OpArgumentError(
            f"optimize: kv_cache_dtype must be None or one of {names}, got {value!r}"
        )
    return value  # type: ignore[no-any-return]


def kv_scales(value: Any, kv: torch.dtype | None) -> KVCacheScales | None:
    """Return the scales that ``kv_cache_scales`` gives or names."""
    if value is None:
        return None
    if kv is None:
        raise OpArgumentError(
            "optimize: kv_cache_dtype must be 'int8', 'fp8_e4m3' or 'fp8_e5m2' with kv_cache_scales, got None"
        )
    if isinstance(value, (str, os.PathLike)):
        return KVCacheScales.load(value)
    if not isinstance(value, KVCacheScales):
        raise OpArgumentError(
            f"optimize: kv_cache_scales must be KVCacheScales or a path, got {type(value).__name__}"
        )
    return value


def checkpoint_scales(checkpoint: Any) -> KVCacheScales | None:
    """Return the scales that a checkpoint has for a cache of 8-bit floats."""
    state, config = checkpoint if isinstance(checkpoint, (tuple, list)) else (checkpoint, None)
    return read_kv_cache_scales(state, config) if isinstance(state, Mapping) else None


def fitting(plan: DecoderPlan, scales: KVCacheScales | None, given: bool) -> KVCacheScales | None:
    """Return scales if they are those of the plan's layers; others are an error if somebody gave them."""
    if scales is None:
        return None
    reason = None
    if any(layer.attention.latent is not None for layer in plan.layers):
        reason = "be None for a model that caches latents"
    elif len(scales.keys) != len(plan.layers):
        reason = f"have scales of {len(plan.layers)} layers"
    if reason is not None and given:
        raise OpArgumentError(f"optimize: kv_cache_scales must {reason}, got {len(scales.keys)}")
    return scales if reason is None else None


def cache_text(kv: torch.dtype | None, scales: KVCacheScales | None) -> str:
    """Return what `ipex.explain` adds about a cache of 8-bit numbers."""
    if kv is None:
        return ""
    if scales is not None:
        return f"; cache in {kv}, a scale for keys and values of each layer"
    return f"; cache in {kv}, {'a scale for each row' if kv == torch.int8 else 'no scales'}"
