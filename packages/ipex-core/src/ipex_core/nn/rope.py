# SPDX-License-Identifier: Apache-2.0
"""Tables of cosines and sines for rotary embeddings, for the ways models stretch their context.

The parameters are the ones of the ``rope_scaling`` (or ``rope_parameters``) entry of a Hugging Face configuration.

Example:
    >>> cos, sin = rope_tables("default", dim=8, max_positions=16, base=10000.0)
    >>> cos.shape, float(cos[0, 0]), float(sin[0, 0])
    (torch.Size([16, 4]), 1.0, 0.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Scaling = Mapping[str, Any]


def rope_tables(
    kind: str,
    dim: int,
    max_positions: int,
    base: float = 10000.0,
    scaling: Scaling | None = None,
    *,
    max_position_embeddings: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all positions, as `rotary_embedding` takes them.

    Args:
        kind: One of `ROPE_KINDS`.
        dim: Elements of a head that are rotated, even.
        max_positions: How many positions the tables have. It is also the length of the sequence that ``dynamic`` and
            ``longrope`` choose their frequencies by.
        base: Base of the geometric series of frequencies (``rope_theta``).
        scaling: Parameters of the kind; unknown ones are ignored.
        max_position_embeddings: Of the configuration; needed by ``dynamic`` and, without a ``factor``, by ``yarn``
            and ``longrope``. None: ``max_positions``.
        dtype: Of the tables; angles are computed in float64.

    Returns:
        ``(cos, sin)``, each ``[max_positions, dim / 2]``. Where a kind scales attention, both are multiplied by its
        factor.

    Raises:
        ValueError: The kind is unknown, a parameter is missing or does not fit.
    """
    if max_positions < 1:
        raise ValueError(f"rope_tables: max_positions must be positive, got {max_positions}")
    frequencies, factor = rope_frequencies(
        kind,
        dim,
        base,
        scaling,
        positions=max_positions,
        max_position_embeddings=max_position_embeddings,
    )
    angles = torch.arange(max_positions, dtype=torch.float64).unsqueeze(1) * frequencies
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rope_frequencies(
    kind: str,
    dim: int,
    base: float = 10000.0,
    scaling: Scaling | None = None,
    *,
    positions: int = 1,
    max_position_embeddings: int | None = None,
) -> tuple[Tensor, float]:
    """Return the angle per position of each pair, float64 ``[dim / 2]``, and the factor on cosines and sines.

    Args:
        kind: One of `ROPE_KINDS`.
        dim: Elements of a head that are rotated, even.
        base: Base of the geometric series of frequencies.
        scaling: Parameters of the kind.
        positions: Length of the sequence.
        max_position_embeddings: Of the configuration; None: ``positions``.

    Raises:
        ValueError: The kind is unknown, a parameter is missing or does not fit.
    """
    if kind not in _KINDS:
        known = ", ".join(sorted(_KINDS))
        raise ValueError(f"rope_tables: kind must be one of {known}, got {kind!r}")
    if dim < 2 or dim % 2:
        raise ValueError(f"rope_tables: dim must be even and positive, got {dim}")
    context = _Context(kind, dim, float(base), dict(scaling or {}), positions)
    context.trained = max_position_embeddings or positions
    return _KINDS[kind](context)


class _Context:
    """What the kinds need; looks parameters up with one message for those missing."""

    def __init__(
        self, kind: str, dim: int, base: float, scaling: dict[str, Any], positions: int
    ) -> None:
        self.kind = kind
        self.dim = dim
        self.base = base
        self.scaling = scaling
        self.positions = positions
        self.trained = positions

    def get(self, name: str) -> Any:
        value = self.scaling.get(name)
        if value is None:
            raise ValueError(f"rope_tables: scaling must have {name!r} for {self.kind!r}, got None")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        if default is not None and self.scaling.get(name) is None:
            return default
        return float(self.get(name))

    def stretch(self) -> float:
        """Return how much longer the context is than the original one."""
        if self.scaling.get("factor") is not None:
            return float(self.scaling["factor"])
        return self.trained / self.number("original_max_position_embeddings")

    def series(self, base: float | None = None) -> Tensor:
        """Return ``base ** (-2 i / dim)``."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim
        return torch.pow(torch.tensor(base or self.base, dtype=torch.float64), -exponents)


def _default(c: _Context) -> tuple[Tensor, float]:
    """Su et al., "RoFormer", 2021."""
    return c.series(), 1.0


def _linear(c: _Context) -> tuple[Tensor, float]:
    """Positions are divided by a factor: Chen et al., "Extending Context Window ...", 2023."""
    return c.series() / c.number("factor"), 1.0


def _dynamic(c: _Context) -> tuple[Tensor, float]:
    """NTK-aware scaling: the base grows with the sequence once that is longer than the trained context."""
    factor = c.number("factor")
    growth = factor * max(c.positions, c.trained) / c.trained - (factor - 1.0)
    if c.dim == 2:  # a single frequency, which is 1 whatever the base
        return c.series(), 1.0
    return c.series(c.base * growth ** (c.dim / (c.dim - 2))), 1.0


def _llama3(c: _Context) -> tuple[Tensor, float]:
    """Llama 3.1: long waves are stretched, short ones kept, with a linear passage in between."""
    frequencies = c.series()
    low, high = c.number("low_freq_factor"), c.number("high_freq_factor")
    turns = c.number("original_max_position_embeddings") * frequencies / (2 * math.pi)
    # 0 where a wave makes at most `low` turns in the original context, 1 from `high` turns on.
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / c.number("factor")), 1.0


def _yarn(c: _Context) -> tuple[Tensor, float]:
    """Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023."""
    factor = c.stretch()
    original = c.number("original_max_position_embeddings")

    def place(turns: float) -> float:
        """Return the (fractional) index of the pair that makes so many turns in the original context."""
        return c.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(c.base))

    first = place(c.number("beta_fast", 32.0))
    last = place(c.number("beta_slow", 1.0))
    if c.scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, c.dim - 1)
    width = (last - first) or 1e-3
    index = torch.arange(c.dim // 2, dtype=torch.float64)
    stretched = ((index - first) / width).clamp(0.0, 1.0)
    frequencies = c.series() * (stretched / factor + (1.0 - stretched))

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    if c.scaling.get("attention_factor") is not None:
        return frequencies, float(c.scaling["attention_factor"])
    mscale, all_dim = c.scaling.get("mscale"), c.scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return frequencies, magnitude(float(mscale)) / magnitude(float(all_dim))
    return frequencies, magnitude(1.0)


def _longrope(c: _Context) -> tuple[Tensor, float]:
    """Ding et al., "LongRoPE", 2024: a factor for each frequency, one set for short and one for long sequences."""
    original = c.number("original_max_position_embeddings")
    name = "long_factor" if c.positions > original else "short_factor"
    factors = torch.tensor(c.get(name), dtype=torch.float64)
    if list(factors.shape) != [c.dim // 2]:
        raise ValueError(
            f"rope_tables: {name} must have {c.dim // 2} numbers, got {factors.numel()}"
        )
    if c.scaling.get("attention_factor") is not None:
        attention = float(c.scaling["attention_factor"])
    else:
        factor = c.stretch()
        attention = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return c.series() / factors, attention


def _proportional(c: _Context) -> tuple[Tensor, float]:
    """Gemma 4: of all pairs of a head, a share of the fastest turns, the others stand still."""
    angles = int(c.number("partial_rotary_factor", 1.0) * c.dim // 2)
    frequencies = c.series() / c.number("factor", 1.0)
    frequencies[angles:] = 0.0
    return frequencies, 1.0


_KINDS: dict[str, Callable[[_Context], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}

#: Names that `rope_tables` knows: values of ``rope_type`` in configurations.
ROPE_KINDS: tuple[str, ...] = tuple(_KINDS)
