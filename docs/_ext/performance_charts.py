# SPDX-License-Identifier: Apache-2.0
"""Charts of ratios as SVG inside the page: they take its colors, light or dark, and fit a phone."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence

__all__ = ["Bar", "Dot", "chart", "scatter"]

#: Units of the picture; a phone shows them at about two thirds of a pixel, and a narrow picture at nine tenths.
WIDTH, LEFT, RIGHT, LINE = 480, 130, 56, 18
NARROW = 360
#: About as wide as a letter of a label is on average; the labels get at least LEFT, at most half of the picture.
LETTER = 6.2

OURS, OTHERS = "#3d97b8", "#929292"


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """A ratio with the ends of its interval; ``ours`` decides the color."""

    label: str
    ratio: float
    low: float
    high: float
    ours: bool


def chart(groups: Sequence[tuple[str, Sequence[Bar]]], text: str, width: int = WIDTH) -> str:
    """Return bars to both sides of 1 on a logarithmic axis, as HTML without blank lines.

    Args:
        groups: The head of each group, which may be empty, and its bars.
        text: What the chart shows, for the line below and for readers that see no pictures.
        width: Units of the picture, `WIDTH` or `NARROW`. A narrow one has room for labels of 15 letters, and its
            letters are larger on a phone.
    """
    bars = [bar for _, group in groups for bar in group]
    if not bars:
        return ""
    # One wide interval must not make all others a dot.
    least = min(0.5, max(min(bar.ratio for bar in bars) / 1.5, 1 / 64))
    most = max(2.0, min(max(bar.ratio for bar in bars) * 1.5, 64))

    left = LETTER * max(len(bar.label) for bar in bars) + 12
    left = max(LEFT * width / WIDTH, min(left, width / 2))

    def x(value: float) -> float:
        inside = min(max(value, least), most)
        share = math.log(inside / least) / math.log(most / least)
        return round(left + share * (width - left - RIGHT), 1)

    ticks = [2.0**n for n in range(-6, 7) if least <= 2.0**n <= most]
    parts, y = [], 4
    for head, group in groups:
        if head:
            parts.append(_text(4, y + 13, head, "font-weight='bold'"))
            y += LINE
        # Lines of the axis only beside the bars: a long head would cross them.
        for tick in ticks:
            dashes = "" if tick == 1 else " stroke-dasharray='2 3' opacity='0.5'"
            parts.append(
                f"<line x1='{x(tick)}' x2='{x(tick)}' y1='{y}' y2='{y + LINE * len(group)}'"
                f" stroke='currentColor'{dashes}/>"
            )
        for bar in group:
            begin, end = sorted((x(1), x(bar.ratio)))
            middle = y + LINE / 2
            parts += [
                _text(left - 6, y + 13, bar.label, "text-anchor='end'"),
                f"<rect x='{begin}' y='{y + 3}' width='{max(end - begin, 1):.1f}' height='{LINE - 6}'"
                f" fill='{OURS if bar.ours else OTHERS}'/>",
                f"<line x1='{x(bar.low)}' x2='{x(bar.high)}' y1='{middle}' y2='{middle}'"
                " stroke='currentColor'/>",
                _text(width - 4, y + 13, f"{bar.ratio:.2f}", "text-anchor='end'"),
            ]
            y += LINE
        y += 6
    for tick in ticks:
        parts.append(_text(x(tick), y + 13, f"{tick:g}", "text-anchor='middle'"))
    y += LINE
    return _figure(parts, width, y, text)


@dataclasses.dataclass(frozen=True, slots=True)
class Dot:
    """A ratio at a size; ``label`` is shown where a mouse rests on it, ``ours`` decides the color."""

    size: float
    ratio: float
    label: str
    ours: bool


#: Height of a picture of dots, and the room of the numbers beside and below it.
HEIGHT, BESIDE, BELOW = 200, 40, 24


def scatter(dots: Sequence[Dot], text: str) -> str:
    """Return ratios over sizes, both axes logarithmic, as HTML without blank lines.

    Args:
        dots: At least one; sizes are positive.
        text: What the picture shows, for the line below and for readers that see no pictures.
    """
    sizes = [math.log10(dot.size) for dot in dots]
    first, last = math.floor(min(sizes)), math.ceil(max(sizes))
    last = max(last, first + 1)
    low = min(-1, math.floor(min(math.log2(dot.ratio) for dot in dots)))
    high = max(1, math.ceil(max(math.log2(dot.ratio) for dot in dots)))

    def x(size: float) -> float:
        return round(BESIDE + (math.log10(size) - first) / (last - first) * (WIDTH - BESIDE - 8), 1)

    def y(ratio: float) -> float:
        return round(8 + (high - math.log2(ratio)) / (high - low) * (HEIGHT - BELOW - 8), 1)

    parts = []
    for tick in range(low, high + 1):
        dashes = "" if tick == 0 else " stroke-dasharray='2 3' opacity='0.5'"
        at = y(2.0**tick)
        line = (
            f"<line x1='{BESIDE}' x2='{WIDTH}' y1='{at}' y2='{at}' stroke='currentColor'{dashes}/>"
        )
        parts += [line, _text(BESIDE - 6, at + 4, f"{2.0**tick:g}", "text-anchor='end'")]
    for tick in range(first, last + 1):
        anchor = "end" if tick == last else "middle"
        parts.append(_text(x(10.0**tick), HEIGHT - 6, f"1e{tick}", f"text-anchor='{anchor}'"))
    parts += [
        f"<circle cx='{x(dot.size)}' cy='{y(dot.ratio)}' r='3' fill='{OURS if dot.ours else OTHERS}'"
        f" fill-opacity='0.7'><title>{html.escape(dot.label)}</title></circle>"
        for dot in dots
    ]
    return _figure(parts, WIDTH, HEIGHT, text)


def _figure(parts: Sequence[str], width: int, height: int, text: str) -> str:
    return "\n".join(
        [
            "<figure>",
            f"<svg role='img' aria-label='{html.escape(text)}' viewBox='0 0 {width} {height}'"
            f" style='width:100%;max-width:{width * 4 // 3}px;height:auto' font-size='12' fill='currentColor'>",
            *parts,
            "</svg>",
            f"<figcaption>{html.escape(text)}</figcaption>",
            "</figure>",
        ]
    )


def _text(x: float, y: float, text: str, more: str) -> str:
    return f"<text x='{x}' y='{y}' {more}>{html.escape(text)}</text>"
