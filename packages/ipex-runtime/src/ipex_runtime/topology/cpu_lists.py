# SPDX-License-Identifier: Apache-2.0
"""CPU lists as Linux and the command line write them: ``0-3,8,10-14:2``."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["CpuListError", "format_cpu_list", "parse_cpu_list"]

#: No kernel is configured for more; a list such as 0-4000000000 must not fill the memory.
MAX_CPUS = 8192


class CpuListError(ValueError):
    """A text is not a CPU list."""


def parse_cpu_list(text: str) -> list[int]:
    """Return the numbers of a CPU list, ascending and without duplicates.

    Args:
        text: Numbers and ranges separated by commas; ``a-b:s`` is every s-th number. Blanks are ignored.

    Raises:
        CpuListError: A part is no number or range, a range runs backwards, or a number is negative or above 8191.
    """
    found: set[int] = set()
    for part in text.replace(" ", "").strip().split(","):
        if not part:
            continue
        span, _, step = part.partition(":")
        first, dash, last = span.partition("-")
        numbers = [first, last if dash else first, step or "1"]
        if not all(n.isascii() and n.isdigit() for n in numbers) or (":" in part and not step):
            raise CpuListError(
                f"a CPU list must be numbers and ranges such as 0,2-4, got {part!r} in {text!r}"
            )
        low, high, stride = (int(n) for n in numbers)
        if high < low or high >= MAX_CPUS or stride < 1:
            raise CpuListError(
                f"the ranges of a CPU list must rise and stay below {MAX_CPUS}, as in 0-3, got {part!r} in {text!r}"
            )
        found.update(range(low, high + 1, stride))
    return sorted(found)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Return numbers as a CPU list, ranges shortened: ``[0, 1, 2, 5]`` gives ``"0-2,5"``."""
    spans: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
