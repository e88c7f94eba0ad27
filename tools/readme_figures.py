#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the chart and the table of measured ratios in README.md, from the files in docs/data.

python tools/readme_figures.py            # writes README.md and docs/_static/readme-{light,dark}.svg
python tools/readme_figures.py --check    # fails if they are not what the data says
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "data"
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

from performance_charts import Bar, chart  # noqa: E402  (the folder of the documentation's extensions)

#: What is shown: name, machine, file in docs/data, case in it. Where others are ahead, too.
CASES = (
    ("MiniLM, batch 1", "Zen 4", "9-models.json", "minilm batch 1"),
    ("BERT-base, batch 1", "Zen 4", "9-models.json", "bert-base batch 1"),
    ("ResNet-50, batch 1", "Zen 4", "9-models.json", "resnet50 batch 1"),
    ("DLRM training step", "Zen 4", "9-train.json", "dlrm batch 2048"),
    ("MiniLM, batch 1", "AMX", "9-models-xeon-minilm.json", "minilm batch 1"),
    ("ResNet-50, batch 1", "AMX", "9-models-xeon-openvino.json", "resnet50 batch 1"),
    ("Llama, one token", "AMX", "9-llm-xeon-bf16.json", "llama 128+32 decode"),
    ("DLRM training step", "AMX", "9-train-xeon.json", "dlrm batch 2048"),
)
#: Columns: title, and the engines of which the fastest counts.
ENGINES = (
    ("ipex", ("ipex_eager", "ipex_compile")),
    ("stock compile", ("stock_compile",)),
    ("IPEX 2.8", ("ipex28",)),
    ("OpenVINO", ("openvino",)),
)
COLORS = {"light": "#1f2328", "dark": "#e6edf3"}
BEGIN, END = "<!-- measured: tools/readme_figures.py -->", "<!-- /measured -->"

Row = Mapping[str, Any]


def measured(file: str, case: str) -> tuple[float, dict[str, Row]]:
    """Return the milliseconds of stock eager in one case and, by title, the fastest engine of each column."""
    rows = json.loads((DATA / file).read_text(encoding="utf-8"))["rows"]
    here = {row["engine"]: row for row in rows if row["case"] == case}
    found = {}
    for title, engines in ENGINES:
        there = [here[name] for name in engines if name in here]
        if there:
            found[title] = max(there, key=lambda row: row["ratio"])
    return here["stock_eager"]["ms"], found


def table() -> str:
    """Return the table as Markdown; the fastest of a row is bold."""
    lines = [
        "| bfloat16 | stock eager, ms | " + " | ".join(title for title, _ in ENGINES) + " |",
        "|---|---|" + "---|" * len(ENGINES),
    ]
    for name, machine, file, case in CASES:
        ms, found = measured(file, case)
        best = max(found.values(), key=lambda row: row["ratio"])
        cells = [
            "" if title not in found else bold(found[title], found[title] is best)
            for title, _ in ENGINES
        ]
        lines.append(f"| {name}, {machine} | {ms:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def bold(row: Row, best: bool) -> str:
    text = f"{row['ratio']:.2f}x"
    return f"**{text}**" if best else text


def groups(*machines: str) -> list[tuple[str, list[Bar]]]:
    """Return the bars of each case on the machines; without machines of all cases, which then name theirs."""
    found = []
    for name, machine, file, case in CASES:
        if machines and machine not in machines:
            continue
        bars = [
            Bar(title, row["ratio"], row["low"], row["high"], title == "ipex")
            for title, row in measured(file, case)[1].items()
        ]
        found.append((name if machines else f"{name}, {machine}", bars))
    return found


def pictures() -> Iterator[tuple[Path, str]]:
    """Yield the chart for light and dark pages: files and their contents."""
    text = "Times as fast as stock PyTorch eager in bfloat16, with the 95 % interval."
    (svg,) = re.findall(r"<svg.*</svg>", chart(groups(), text), re.DOTALL)
    # A file of its own has no page to take size and color from.
    svg = re.sub(r"style='[^']*'", "font-family='sans-serif' width='640'", svg, count=1)
    svg = svg.replace("<svg", "<svg xmlns='http://www.w3.org/2000/svg'", 1)
    for theme, color in COLORS.items():
        picture = svg.replace("currentColor", color)
        yield ROOT / "docs" / "_static" / f"readme-{theme}.svg", picture + "\n"


def main(arguments: list[str]) -> int:
    """Write the files, or compare them."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    wanted = [*pictures(), (readme, f"{before}{BEGIN}\n{table()}\n{END}{after}")]
    if "--check" in arguments:
        old = [
            path.name
            for path, content in wanted
            if not path.exists() or path.read_text(encoding="utf-8") != content
        ]
        if old:
            print(f"not as docs/data says: {', '.join(old)}; run tools/readme_figures.py")
        return 1 if old else 0
    for path, content in wanted:
        path.write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
