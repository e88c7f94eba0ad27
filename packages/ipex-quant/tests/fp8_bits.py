# SPDX-License-Identifier: Apache-2.0
"""8-bit floating-point formats from their definition, bit by bit, without torch's own 8-bit types."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction


class Bits:
    """A format of one sign bit, exponent and mantissa bits, and a way to tell NaN and infinity."""

    def __init__(self, exponent: int, mantissa: int, infinity: bool) -> None:
        self.bits = mantissa
        bias = 2 ** (exponent - 1) - 1
        #: Finite magnitudes by code, increasing.
        self.values: list[Fraction] = []
        for code in range(128):
            e, m = code >> mantissa, code & ((1 << mantissa) - 1)
            if infinity and e == 2**exponent - 1:
                break  # as IEEE 754: infinity and NaN
            if not infinity and code == 127:
                break  # all ones: the only NaN
            scale = Fraction(2) ** (max(e, 1) - bias)
            self.values.append(scale * (Fraction(m, 2**mantissa) + (1 if e else 0)))

    def nearest(self, x: float) -> Fraction:
        """Return the nearest number, of two the one with an even code; too large ones become the largest."""
        magnitude = abs(Fraction(x))
        at = bisect.bisect_left(self.values, magnitude)
        if at == len(self.values):
            found = self.values[-1]
        elif self.values[at] == magnitude or at == 0:
            found = self.values[at]
        else:
            low, high = magnitude - self.values[at - 1], self.values[at] - magnitude
            up = high < low or (high == low and at % 2 == 0)
            found = self.values[at if up else at - 1]
        return math.copysign(1, x).__int__() * found


E4M3 = Bits(4, 3, False)
E5M2 = Bits(5, 2, True)


def scale_of(largest: float, limit: int, margin: int = 0) -> Fraction:
    """Return the largest power of two that keeps a magnitude within the limit, less the margin."""
    ratio = Fraction(limit) / Fraction(largest)
    power = Fraction(1)
    while power * 2 <= ratio:
        power *= 2
    while power > ratio:
        power /= 2
    return power / Fraction(2) ** margin


def rounded(rows: list[list[float]], bits: Bits, scale: Fraction) -> list[list[float]]:
    """Return what is left of numbers after scaling, rounding and scaling back."""
    return [[float(bits.nearest(float(Fraction(x) * scale)) / scale) for x in row] for row in rows]
