# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a tensor that was changed, so that its exact original can be given back.

float32 -> bfloat16 keeps, next to the 16-bit value, the 16-bit difference of the bit patterns: together they are as
large as the original and rebuild it bit by bit. The difference of two neighboring patterns fits 16 bits except at
rounding ties and NaNs, which are listed. Other changes (float16, folding) keep the original itself.
"""

from __future__ import annotations

import sys

import torch

__all__ = ["SavedTensor"]

Tensor = torch.Tensor
#: Position of the low half in a 32-bit number.
_LOW = 0 if sys.byteorder == "little" else 1


class SavedTensor:
    """The original of one tensor, in terms of the value that replaced it.

    Attributes:
        dtype: dtype of the original.
        stride: Strides of the original.
        form: ``"same"`` (no values changed), ``"split"`` (16-bit difference) or ``"copy"`` (the original is kept).
    """

    __slots__ = (
        "cast_dtype",
        "dtype",
        "folded",
        "form",
        "index",
        "live",
        "patterns",
        "rest",
        "stride",
    )

    def __init__(self) -> None:
        self.dtype = self.cast_dtype = torch.float32
        self.stride: tuple[int, ...] = ()
        self.form = "same"
        self.rest: Tensor | None = None  # low halves, or the original
        self.index: Tensor | None = None  # flat positions of the exceptions
        self.patterns: Tensor | None = None  # their bit patterns
        self.folded = False  # the replacement is not a mere conversion of the original
        self.live = False  # the replacement is in place now

    @torch.no_grad()
    def capture(self, original: Tensor, replacement: Tensor, folded: bool = False) -> None:
        """Remember ``original``, which ``replacement`` takes the place of."""
        self.dtype, self.cast_dtype = original.dtype, replacement.dtype
        self.stride = tuple(original.stride())
        self.form, self.rest, self.index, self.patterns = "same", None, None, None
        self.folded = folded
        if folded:
            self.form, self.rest = "copy", original
        elif original.dtype == replacement.dtype:
            return
        elif original.dtype == torch.float32 and replacement.dtype == torch.bfloat16:
            self._split(original, replacement)
        elif not _same_bits(replacement.to(original.dtype), original):
            self.form, self.rest = "copy", original

    def _split(self, original: Tensor, replacement: Tensor) -> None:
        halves = original.contiguous().view(-1).view(torch.int16)
        low, high = halves[_LOW::2].contiguous(), halves[1 - _LOW :: 2]
        if not bool(low.any()):
            return
        # As a signed number the low half is the distance to the neighbor that rounding to nearest picks: a negative
        # one means that the high half was rounded up.
        wrong = (high + (low < 0)) != replacement.contiguous().view(-1).view(torch.int16)
        self.form, self.rest = "split", low
        if bool(wrong.any()):
            self.index = wrong.nonzero().flatten()
            self.patterns = original.contiguous().view(-1).view(torch.int32)[self.index]

    @torch.no_grad()
    def original(self, current: Tensor) -> Tensor:
        """Return the original, given the present value; a value changed since then is converted instead."""
        if current.dtype != self.cast_dtype or current.device.type == "meta":
            value = current.to(self.dtype)
        elif self.form == "copy" and self.rest is not None:
            kept = self.rest.to(current.device)
            unchanged = self.folded or _same_bits(kept.to(current.dtype), current)
            value = kept if unchanged else current.to(self.dtype)
        elif self.form == "split" and self.rest is not None:
            bits = current.contiguous().view(-1).view(torch.int16).to(torch.int32) << 16
            bits += self.rest.to(current.device)
            if self.index is not None and self.patterns is not None:
                bits[self.index.to(current.device)] = self.patterns.to(current.device)
            value = _written(bits.view(torch.float32).view(current.shape), current)
        else:
            value = current.to(self.dtype)
        if tuple(value.stride()) != self.stride and len(self.stride) == value.dim():
            plain = torch.empty_strided(
                value.shape, self.stride, dtype=value.dtype, device=value.device
            )
            value = plain.copy_(value)
        # Never an alias: what is handed out may be written to.
        return value.clone() if value is self.rest or value is current else value

    @property
    def nbytes(self) -> int:
        """Memory kept beside the replacement, in bytes."""
        kept = (self.rest, self.index, self.patterns)
        return sum(t.numel() * t.element_size() for t in kept if t is not None)


def _written(value: Tensor, current: Tensor) -> Tensor:
    """Return ``value``, but what is there now where that is not its rounding, which somebody has written then."""
    now = current.contiguous()
    same = value.to(now.dtype).view(torch.int16) == now.view(torch.int16)
    if bool(same.all()):
        return value
    # A written zero or infinity may be the rounding of what it makes with a low half, too.
    return torch.where(same & (now != 0) & now.isfinite(), value, now.float())


def _same_bits(a: Tensor, b: Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return bool(torch.equal(a.contiguous().view(kind), b.contiguous().view(kind)))
