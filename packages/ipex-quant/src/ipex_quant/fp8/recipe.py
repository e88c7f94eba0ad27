# SPDX-License-Identifier: Apache-2.0
"""How operands become 8-bit numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch

from ipex_core.library.spec import check

__all__ = ["DelayedScaling", "Format"]


class _FormatHelper(NamedTuple):
    """Largest numbers of the operands of forward products, and of the gradients of outputs."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Which 8-bit formats a recipe uses.

    Attributes:
        E4M3: 4 bits of exponent, 3 of mantissa, up to 448, for all operands.
        E5M2: 5 bits of exponent, 2 of mantissa, up to 57344, for all operands.
        HYBRID: E4M3 for inputs and weights, E5M2 for gradients of outputs.
    """

    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    E5M2 = _FormatHelper(max_fwd=57344, max_bwd=57344)
    HYBRID = _FormatHelper(max_fwd=448, max_bwd=57344)


@dataclasses.dataclass()
class DelayedScaling:
    """Each operand has one scale, from the largest magnitudes that it had in the steps before.

    The scale is ``2 ** (floor(log2(fp8_max / amax)) - margin)``; it stays what it was where ``amax`` is 0.

    Args:
        margin: Powers of two that are kept free above the largest magnitude.
        interval: Steps between two computations of the scale.
        fp8_format: Which formats.
        amax_history_len: Steps whose magnitudes are remembered.
        amax_compute_algo: ``"max"`` or ``"most_recent"`` of the history, or a function of the history
            ``[amax_history_len, tensors]`` that returns ``[tensors]``.

    Raises:
        ValueError: An argument is out of range.
    """

    margin: int = 0
    interval: int = 1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] | Callable[[torch.Tensor], torch.Tensor] = (
        "max"
    )

    def __post_init__(self) -> None:
        _check_int("margin", self.margin, None)
        _check_int("interval", self.interval, 1)
        _check_int("amax_history_len", self.amax_history_len, 1)
        form = self.fp8_format
        check(isinstance(form, Format), _OP, "fp8_format", "be a Format", repr(form))
        algo: Any = self.amax_compute_algo
        fits = callable(algo) or algo in ("max", "most_recent")
        expected = "be 'max', 'most_recent' or a function"
        check(fits, _OP, "amax_compute_algo", expected, repr(algo))


_OP = "DelayedScaling"


def _check_int(name: str, value: Any, least: int | None) -> None:
    fits = isinstance(value, int) and not isinstance(value, bool)
    fits = fits and (least is None or value >= least)
    expected = "be an int" if least is None else f"be an int of at least {least}"
    check(fits, _OP, name, expected, repr(value))
