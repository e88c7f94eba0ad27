# SPDX-License-Identifier: Apache-2.0
"""The house as a picture and a table, from the graph of imports; the page "Architecture" shows both."""

from __future__ import annotations

import dataclasses
import html
from collections import Counter
from collections.abc import Sequence

import house
from house_rooms import HOUSE, Room, room_of

__all__ = ["pages", "picture", "rooms", "wheel_imports"]

#: Wheels, storey by storey from the roof to the ground; each storey has the whole width.
STOREYS = (
    ("ipex",),
    ("ipex_llm", "ipex_runtime"),
    ("ipex_quant", "ipex_xpu_kernels", "ipex_cpu_kernels"),
    ("ipex_core",),
)
#: How a storey divides its width.
SHARES = {
    **{"ipex_llm": 0.68, "ipex_runtime": 0.32},
    **{"ipex_quant": 0.46, "ipex_xpu_kernels": 0.32, "ipex_cpu_kernels": 0.22},
}
#: Units of the picture: its width, the lanes at its sides, the space between storeys, a line of rooms, a letter.
WIDTH, LANE, GAP, LINE, LETTER = 720, 44, 46, 24, 6.4
OURS = "#3d97b8"


@dataclasses.dataclass
class Box:
    """Where a wheel stands in the picture."""

    x: float
    y: float
    width: float
    height: float = 0.0


def wheel_imports() -> dict[tuple[str, str], tuple[int, int]]:
    """Return (importing wheel, imported wheel) -> (imported names, private ones of them)."""
    private = Counter((f.place, f.line, f.text) for f in house.private_imports())
    alls: Counter[tuple[str, str]] = Counter()
    hidden: Counter[tuple[str, str]] = Counter()
    for entry in house.imports():
        target = house.resolved(entry)
        if target is not None and target.wheel != entry.module.wheel:
            edge = (entry.module.wheel, target.wheel)
            alls[edge] += 1
            name = f"{entry.target}.{entry.name}".strip(".")
            hidden[edge] += (entry.module.file, entry.line, f"imports {name}") in private
    return {edge: (number, hidden[edge]) for edge, number in sorted(alls.items())}


def picture() -> str:
    """Return the house as SVG in HTML without blank lines: wheels, their rooms, and imports between wheels."""
    parts: list[str] = []
    boxes: dict[str, Box] = {}
    y = 4.0
    for storey in STOREYS:
        x, inner = float(LANE), WIDTH - 2 * LANE - 10 * (len(storey) - 1)
        for wheel in storey:
            boxes[wheel] = Box(x, y, inner * SHARES.get(wheel, 1.0))
            x += boxes[wheel].width + 10
        tallest = 0.0
        for wheel in storey:
            drawn, boxes[wheel].height = _rooms_of(wheel, boxes[wheel])
            parts += drawn
            tallest = max(tallest, boxes[wheel].height)
        for wheel in storey:
            boxes[wheel].height = tallest
            parts.append(
                f"<rect x='{boxes[wheel].x:.0f}' y='{y:.0f}' width='{boxes[wheel].width:.0f}'"
                f" height='{tallest:.0f}' rx='4' fill='none' stroke='currentColor'/>"
            )
        y += tallest + GAP
    parts += _arrows(boxes)
    text = "Wheels, their rooms, and how many names they import from each other"
    return "\n".join(
        [
            # On a phone the picture is scrolled, for its letters would be too small.
            "<figure style='margin:1em 0;overflow-x:auto'>",
            f"<svg role='img' aria-label='{text}' viewBox='0 0 {WIDTH} {y - GAP + 4:.0f}'"
            " style='width:100%;min-width:40em;max-width:56em' font-size='11' font-family='sans-serif'>",
            "<defs><marker id='house-tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7'"
            " markerHeight='7' orient='auto'><path d='M0 0L8 4L0 8z' fill='currentColor'/></marker></defs>",
            *parts,
            "</svg>",
            f"<figcaption>{text}; of which private ones in brackets. A room imports only rooms to its left and in"
            " lines above it.</figcaption>",
            "</figure>",
        ]
    )


def _rooms_of(wheel: str, box: Box) -> tuple[list[str], float]:
    """Return the title and the rooms of a wheel, lowest layer first, and how high they stand."""
    modules = [module for module in house.modules().values() if module.wheel == wheel]
    sizes: Counter[str] = Counter()
    for module in modules:
        sizes[room_of(wheel, module.name) or ""] += module.text.count("\n")
    name = wheel.replace("_", "-")
    parts = [_text(box.x + 8, box.y + 16, name, "font-weight='bold'")]
    if len(name) < 14:
        size = f"{sum(sizes.values()):,} lines"
        parts.append(_text(box.x + box.width - 8, box.y + 16, size, "text-anchor='end'"))
    x, y = box.x + 8, box.y + 24
    for room in HOUSE[wheel]:
        if not sizes[room.name] or not room.name:
            continue
        width = LETTER * len(room.name) + 10
        if x + width > box.x + box.width - 6:
            x, y = box.x + 8, y + LINE
        # The more lines, the darker.
        shade = 0.08 + 0.5 * min(sizes[room.name] / 12_000, 1)
        parts += [
            f"<rect x='{x:.0f}' y='{y:.0f}' width='{width:.0f}' height='{LINE - 5}' rx='3' fill='{OURS}'"
            f" fill-opacity='{shade:.2f}'><title>{html.escape(_told(wheel, room, sizes))}</title></rect>",
            _text(x + 5, y + 13, room.name),
        ]
        x += width + 5
    return parts, y + LINE + 4 - box.y


def _told(wheel: str, room: Room, sizes: Counter[str]) -> str:
    return f"{wheel}/{room.name}: {room.subject}; {sizes[room.name]:,} lines"


def _arrows(boxes: dict[str, Box]) -> list[str]:
    """Return the imports between wheels: straight down to the next storey, else through a lane at a side."""
    floor = {wheel: i for i, storey in enumerate(STOREYS) for wheel in storey}
    parts, lanes = [], Counter[str]()
    for (above, below), (number, private) in wheel_imports().items():
        if floor[above] >= floor[below]:
            continue
        a, b = boxes[above], boxes[below]
        label = f"{number} ({private})" if private else str(number)
        if floor[below] == floor[above] + 1:
            low, high = max(a.x, b.x), min(a.x + a.width, b.x + b.width)
            x = (low + high) / 2
            path = f"M{x:.0f} {a.y + a.height:.0f}V{b.y - 1:.0f}"
            parts.append(_text(x + 5, b.y - 16, label))
        else:
            # The roof's imports on the right, those of other wheels on the left.
            side = "right" if above == "ipex" else "left"
            out = 1 if side == "right" else -1
            edge = WIDTH - LANE if side == "right" else LANE
            end = b.x + b.width if side == "right" else b.x
            lanes[side] += 1
            x = edge + out * (18 * lanes[side] - 4)
            path = f"M{edge} {a.y + a.height - 8 - 6 * lanes[side]:.0f}H{x}"
            if abs(end - edge) < 1:
                path += f"V{b.y + 16 + 8 * lanes[side]:.0f}H{end + out:.0f}"
            else:
                path += f"V{b.y - 22:.0f}H{end - 40 * out:.0f}V{b.y - 1:.0f}"
            y = a.y + a.height + GAP
            turned = f"transform='rotate(-90 {x - 4:.0f} {y:.0f})'"
            parts.append(_text(x - 4, y, label, turned))
        parts.append(
            f"<path d='{path}' fill='none' stroke='currentColor' marker-end='url(#house-tip)'>"
            f"<title>{above} imports {below}: {number} names, {private} private</title></path>"
        )
    return parts


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f"<text x='{x:.0f}' y='{y:.0f}' fill='currentColor' {more}>{html.escape(text)}</text>"


def rooms() -> str:
    """Return a table of all rooms as Markdown: what each holds, its size, and what it imports.

    What a room imports against the order stands in bold.
    """
    order = {(w, room.name): i for w, all_ in HOUSE.items() for i, room in enumerate(all_)}
    uses: dict[str, set[tuple[str, str]]] = {}
    for entry in house.imports():
        target = house.resolved(entry)
        if target is not None and not entry.typing and target.room != entry.module.room:
            used = room_of(target.wheel, target.name) or ""
            uses.setdefault(entry.module.room, set()).add((target.wheel, used))
    lines = ["| Room | Holds | Files | Lines | Imports |", "|---|---|---|---|---|"]
    for wheel, all_ in HOUSE.items():
        for room in all_:
            name = f"{wheel}/{room.name}".removesuffix("/")
            inside = [module for module in house.modules().values() if module.room == name]
            if not inside:
                continue
            here = order[wheel, room.name]
            own = sorted((order[w, r], r) for w, r in uses.get(name, ()) if w == wheel and r)
            named = [f"**{r}**" if i > here else r for i, r in own]
            others = sorted({w for w, _ in uses.get(name, ()) if w != wheel})
            size = sum(module.text.count("\n") for module in inside)
            lines.append(
                f"| `{name}` | {room.subject} | {len(inside)} | {size:,} |"
                f" {_joined([*named, *(f'`{other}`' for other in others)])} |"
            )
    return "\n".join(lines) + "\n"


def _joined(names: Sequence[str]) -> str:
    return ", ".join(names)


def pages() -> dict[str, str]:
    """Return the parts of the page "Architecture" by the file below ``docs/generated``."""
    return {"parts/house.md": picture() + "\n", "parts/rooms.md": rooms()}
