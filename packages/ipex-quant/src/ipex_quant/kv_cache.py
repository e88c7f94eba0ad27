# SPDX-License-Identifier: Apache-2.0
"""Scales of quantized caches of keys and values: from calibration, or from checkpoints of other tools."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check
from ipex_core.util import write_whole
from ipex_quant.weight_only.calibrate import samples_of

__all__ = ["KVCacheScales", "calibrate_kv_cache", "read_kv_cache_scales"]

#: Number that the largest magnitude becomes. An e5m2 cache has room for 128 times as much: floats need no full range.
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 448.0}


@dataclasses.dataclass(frozen=True)
class KVCacheScales:
    """Largest magnitudes of the keys and values of each layer, from which the scales of a cache follow.

    Args:
        keys: Of each layer, positive.
        values: Of each layer, positive.

    Raises:
        ValueError: There are none, as many keys as values, or one is not positive and finite.
    """

    keys: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        op = "KVCacheScales"
        for name in ("keys", "values"):
            numbers = tuple(float(v) for v in getattr(self, name))
            object.__setattr__(self, name, numbers)
            for layer, number in enumerate(numbers):
                fits = math.isfinite(number) and number > 0
                check(fits, op, f"{name} of layer {layer}", "be positive and finite", number)
        check(bool(self.keys), op, "keys", "have a number for each layer", "none")
        count = len(self.keys)
        check(len(self.values) == count, op, "values", f"have {count} numbers", len(self.values))

    def of(self, dtype: torch.dtype) -> tuple[tuple[float, float], ...]:
        """Return ``(key_scale, value_scale)`` of each layer: what a stored 1 stands for.

        Args:
            dtype: Of the cache: int8, float8_e4m3fn or float8_e5m2.
        """
        fits = dtype in _LARGEST
        check(fits, "KVCacheScales", "dtype", f"be one of {', '.join(map(str, _LARGEST))}", dtype)
        largest = _LARGEST[dtype]
        pairs = zip(self.keys, self.values, strict=True)
        return tuple((k / largest, v / largest) for k, v in pairs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the numbers to a JSON file, completely or not at all."""
        text = json.dumps({"keys": self.keys, "values": self.values}, indent=1)
        write_whole(Path(path), f"{text}\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KVCacheScales:
        """Read a file of `save`.

        Raises:
            ValueError: It is not one.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(tuple(found["keys"]), tuple(found["values"]))
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise OpArgumentError(
                f"KVCacheScales: path must be a file of KVCacheScales.save, got {path}: {error}"
            ) from error


def calibrate_kv_cache(
    model: nn.Module, dataloader: Iterable[Any], nsamples: int = 128, pad_max_length: int = 2048
) -> KVCacheScales:
    """Observe the keys and values that a language model caches for typical texts.

    The model runs as it is, optimized or not; what it returns as ``past_key_values`` is looked at, so keys are those
    behind the rotary embedding. Padding does not count.

    Args:
        model: A model of transformers that returns a cache with ``use_cache=True``.
        dataloader: Yields token ids, dictionaries of arguments, or tuples that begin with one of them.
        nsamples: Rows to use.
        pad_max_length: Most tokens of a row.

    Returns:
        Scales for ``ipex.llm.optimize(kv_cache_scales=...)``.

    Raises:
        ValueError: There are no samples, the model returns no cache of keys and values, or they are not finite.
    """
    op = "calibrate_kv_cache"
    check(isinstance(model, nn.Module), op, "model", "be a torch.nn.Module", type(model).__name__)
    found: list[list[float]] = [[], []]
    for sample in samples_of(op, dataloader, nsamples, pad_max_length, False):
        with torch.no_grad():
            kwargs = {**sample.kwargs, "use_cache": True}
            cache = getattr(model(*sample.args, **kwargs), "past_key_values", None)
        for layer, pair in enumerate(_layers(op, cache)):
            for kind, name, tensor in zip(found, ("keys", "values"), pair, strict=True):
                largest = _largest(tensor, sample.mask)
                fits = math.isfinite(largest)
                check(fits, op, f"{name} of layer {layer}", "be finite", largest)
                if layer == len(kind):
                    kind.append(0.0)
                kind[layer] = max(kind[layer], largest)
    # A layer whose values are all zero is exact with any scale.
    keys, values = (tuple(v or 1.0 for v in kind) for kind in found)
    return KVCacheScales(keys, values)


def _layers(op: str, cache: Any) -> Iterator[tuple[Tensor, Tensor]]:
    expected = "return keys and values of each layer as past_key_values"
    try:
        items = [] if cache is None else list(cache)
    except (TypeError, AttributeError, NotImplementedError):  # of layers that keep states
        items = []
    check(bool(items), op, "model", expected, type(cache).__name__)
    for item in items:
        pair = item[:2] if isinstance(item, (tuple, list)) else ()
        fits = len(pair) == 2 and all(isinstance(t, Tensor) and t.dim() == 4 for t in pair)
        check(fits, op, "model", expected, "other states")
        yield pair[0], pair[1]


def _largest(states: Tensor, mask: Tensor | None) -> float:
    """Return the largest magnitude of ``[B, heads, T, head_dim]``; NaN if there is one."""
    if mask is not None:
        last = mask[:, -states.shape[2] :]  # a window holds the end
        states = states.transpose(1, 2)[last] if last.shape == states.shape[::2][:2] else states
    if not states.numel():
        return 0.0
    low, high = torch.aminmax(states.float())
    return float(torch.maximum(high, -low))


# -- checkpoints ----------------------------------------------------------------------------------------------

#: Names of scales; the first number of a name is the number of the layer.
_NAME = re.compile(
    r"(?:^|\.)(?P<layer>\d+)\.(?:\w+\.)*?"
    r"(?:(?P<kind>[kv])_scale|(?P<proj>[kv])_proj\.output_scale|(?P<both>kv)_scale)$"
)


def read_kv_cache_scales(
    state_dict: Mapping[str, Tensor], quant_config: Mapping[str, Any] | None = None
) -> KVCacheScales | None:
    """Read the scales of keys and values that a checkpoint holds, as compressed-tensors and vLLM name them.

    Names end in ``k_scale`` and ``v_scale`` (of the attention, or of its projections), in ``k_proj.output_scale`` and
    ``v_proj.output_scale``, or in ``kv_scale`` for both. Of scales for each head the largest is taken.

    Args:
        state_dict: Tensors of the checkpoint.
        quant_config: Its configuration; ``kv_cache_scheme`` says whether scales belong to 8-bit integers or
            (without it too) of float8_e4m3fn numbers.

    Returns:
        The scales, or None if there are none.

    Raises:
        ValueError: A layer lacks one, a scale is not positive, or the scheme is not one of 8 bits without zero points.
    """
    op = "read_kv_cache_scales"
    found: tuple[dict[int, float], dict[int, float]] = ({}, {})
    for name, tensor in state_dict.items():
        match = _NAME.search(name)
        if match is None or not tensor.numel():
            continue
        layer = int(match["layer"])
        kind = match["kind"] or match["proj"]
        value = float(tensor.float().max())
        check(math.isfinite(value) and value > 0, op, name, "be positive and finite", value)
        for part, letter in zip(found, "kv", strict=True):
            if kind in (None, letter):
                part[layer] = max(part.get(layer, 0.0), value)
    if not found[0] and not found[1]:
        return None
    largest = _scheme(op, quant_config or {})
    count = 1 + max([*found[0], *found[1]])
    for letter, part in zip("kv", found, strict=True):
        for layer in range(count):
            check(
                layer in part, op, "state_dict", f"have a {letter}_scale of layer {layer}", "none"
            )
    keys, values = (tuple(part[i] * largest for i in range(count)) for part in found)
    return KVCacheScales(keys, values)


def _scheme(op: str, config: Mapping[str, Any]) -> float:
    """Return the largest number of the codes that the scales of a checkpoint are for."""
    scheme = config.get("kv_cache_scheme") or {}
    bits, kind = scheme.get("num_bits", 8), scheme.get("type", "float")
    check(bits == 8, op, "num_bits of kv_cache_scheme", "be 8", bits)
    check(kind in ("float", "int"), op, "type of kv_cache_scheme", "be float or int", kind)
    check(bool(scheme.get("symmetric", True)), op, "symmetric of kv_cache_scheme", "be True", False)
    return 448.0 if kind == "float" else 127.0
