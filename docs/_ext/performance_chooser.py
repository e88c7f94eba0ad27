# SPDX-License-Identifier: Apache-2.0
"""The part of the performance page that answers: my model, my machine, which engine, which dtype, how much faster.

For each kind of model and machine it writes a picture, what to take, the code, and all numbers in a dropdown. All of it
follows from the files in ``docs/data``. An engine that is ahead of ours stays in the picture and in the table.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ipex_bench import peers
from performance_charts import NARROW, Bar, chart

__all__ = ["call", "parts"]

Data = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """A kind of model: its kind in the result files, and how their cases and models are called here."""

    title: str
    kind: str
    cases: Mapping[str, str]
    page: str


SUBJECTS = (
    Subject(
        "Language models",
        "llm",
        {
            "llama 128+32 decode": "Small Llama: one token",
            "llama 128+32 prefill": "Small Llama: prompt of 128",
        },
        "[Language models](llm.md), [weight-only quantization](weight_only.md)",
    ),
    Subject(
        "Encoders",
        "models",
        {
            "minilm batch 1": "MiniLM, batch 1",
            "minilm (random) batch 1": "MiniLM, random weights, batch 1",
            "minilm batch 32": "MiniLM, batch 32",
            "minilm (random) batch 32": "MiniLM, random weights, batch 32",
            "bert-base batch 1": "BERT-base, batch 1",
            "minilm, batch 32": "MiniLM, batch 32",
            "bert, batch 8": "BERT-base, batch 8",
        },
        "[Mixed precision](amp.md), [torch.compile](compile.md), [INT8](static_int8.md)",
    ),
    Subject(
        "Image models (CNN)",
        "models",
        {"resnet50 batch 1": "ResNet-50, batch 1", "resnet50, batch 16": "ResNet-50, batch 16"},
        "[Mixed precision](amp.md), [torch.compile](compile.md), [INT8](static_int8.md)",
    ),
    Subject(
        "Training of recommendation models",
        "train",
        {"dlrm batch 2048": "DLRM, batch 2048"},
        "[Recommendation models](recommendation.md), [training](training.md)",
    ),
)

#: The machines that were measured: the ISA levels that files name, and the title of the tab.
MACHINES = {
    "AMD Zen 4": ("avx512_bf16",),
    "Xeon with AMX": ("avx512_fp16", "amx"),
    "Xeon without bfloat16": ("avx512_vnni",),
    "AMD Zen 3": ("avx2",),
}
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
NOTHING = "No measurements are recorded in this tree yet."
LONG = {short: long for long, short in SHORT.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What one engine reached at one piece of work.

    Attributes:
        work: What was computed.
        engine: Its name in `ipex_bench.peers`, or what a finished table calls it.
        precision: What the engine computes in.
        stock: The dtype of stock eager in the same run, which the ratio is to.
        asked: The dtype of the run; ``"any"`` where a table compares dtypes.
        low: Least of the interval; the ratio itself where the table has no interval.
        code: How the call is named, and the code; None for other engines.
        where: The run, so that only results of one run are compared.
        machine: The machine in words.
    """

    work: str
    engine: str
    precision: str
    stock: str
    asked: str
    ratio: float
    low: float
    high: float
    ms: str
    code: tuple[str, str] | None
    where: str
    machine: str

    @property
    def ours(self) -> bool:
        """Whether it is an engine of this project."""
        return self.engine.startswith(("ipex_", "static ", "dynamic "))

    @property
    def title(self) -> str:
        """The engine as people call it."""
        return peers.load(self.engine).title if self.engine in peers.NAMES else self.engine

    @property
    def number(self) -> str:
        """The ratio with its interval."""
        interval = f" ({self.low:.2f}-{self.high:.2f})" if self.low < self.high else ""
        return f"{self.ratio:.2f}{interval}"


#: The results by title of the subject and of the machine.
Found = Mapping[tuple[str, str], Sequence[Result]]


def call(kind: str, engine: str, precision: str, stock: str) -> tuple[str, str] | None:
    """Return the name of the call that an engine of ours was measured with, and the code; None for other engines.

    Args:
        kind: ``"llm"``, ``"models"`` or ``"train"``.
        engine: The name of the engine in a result file, or of the candidate in a finished table.
        precision: What it computes in; of 1.1 billion parameters with ``" (1.1b)"``.
        stock: The float dtype of what is not quantized.
    """
    half = stock == "bfloat16"
    dtype = "torch.bfloat16" if half else "torch.float32"
    bits = precision.removesuffix(" (1.1b)")
    if kind == "llm" and engine == "ipex_eager":
        if bits not in ("int8", "int4"):
            return "`ipex.llm.optimize`", f"fast = ipex.llm.optimize(model, dtype={dtype})"
        large = precision != bits
        products = "INT8" if large or bits == "int4" else ("BF16" if half else "NONE")
        group = f"    group_size={128 if large else 32},\n" if bits == "int4" else ""
        return (
            "`ipex.llm.optimize` with `quantization_config=`",
            "qconfig = ipex.quantization.get_weight_only_quant_qconfig_mapping(\n"
            f"    weight_dtype=ipex.quantization.WoqWeightDtype.{bits.upper()},\n"
            f"    lowp_mode=ipex.quantization.WoqLowpMode.{products},\n{group})\n"
            f"fast = ipex.llm.optimize(model, dtype={dtype}, quantization_config=qconfig)",
        )
    if kind == "models" and engine == "ipex_eager":
        return "`ipex.optimize`", f"fast = ipex.optimize(model, dtype={dtype})"
    if kind == "models" and engine == "ipex_compile":
        cast = "model = model.to(torch.bfloat16)\n" if half else ""
        return (
            '`torch.compile(backend="ipex")` of the stock model',
            f"# The stock model is compiled: `ipex.optimize` does not run before.\n{cast}"
            'fast = torch.compile(model, backend="ipex")',
        )
    if kind == "models" and engine in ("static INT8", "dynamic INT8"):
        mapping = f"default_{engine.partition(' ')[0]}_qconfig_mapping"
        calibrate = (
            "with torch.no_grad():\n    for batch in batches:  # typical inputs\n"
            "        prepared(batch)\n"
            if engine == "static INT8"
            else ""
        )
        return (
            "`ipex.quantization.prepare`, `convert`, then `ipex.optimize`",
            f"qconfig = ipex.quantization.{mapping}\n"
            "prepared = ipex.quantization.prepare(model, qconfig, example_inputs=batches[0])\n"
            f"{calibrate}"
            "quantized = ipex.quantization.convert(prepared)\n"
            "fast = ipex.optimize(quantized, dtype=torch.bfloat16)  # what is not quantized",
        )
    if kind == "train" and engine in ("ipex_eager", "ipex_compile"):
        split = "tables.to_bfloat16_train()\n" if half else ""
        cast = f", dtype={dtype}" if half else ""
        after = "model = torch.compile(model)  # after `ipex.optimize`; Inductor\n"
        compiled = engine == "ipex_compile"
        name = "`MergedEmbeddingBagWithSGD`, `ipex.optimize`"
        return (
            f"{name}, then `torch.compile`" if compiled else name,
            "Merged = ipex.nn.modules.MergedEmbeddingBagWithSGD\n"
            f"tables = Merged.from_embeddingbag_list(tables, lr=0.1)\n{split}"
            f"model, optimizer = ipex.optimize(model.train(), optimizer=optimizer{cast})\n"
            f"{after if compiled else ''}".rstrip(),
        )
    return None


def parts(recorded: Mapping[str, Data]) -> dict[str, str]:
    """Return the overview, where others are faster, and the answers for all models and machines."""
    found = {
        (subject.title, machine): list(results(recorded, subject, levels))
        for subject in SUBJECTS
        for machine, levels in MACHINES.items()
    }
    names = ("overview", "behind", "chooser")
    if not any(found.values()):
        return {f"parts/{name}.md": f"{NOTHING}\n" for name in names}
    texts = (overview(found), behind(found), chooser(recorded, found))
    return {
        f"parts/{name}.md": "\n".join([*text, ""]) for name, text in zip(names, texts, strict=True)
    }


def chooser(recorded: Mapping[str, Data], found: Found) -> Iterator[str]:
    """Yield a section for each subject with a tab for each machine: pictures, what to take, code and numbers."""
    for subject in SUBJECTS:
        yield from (f"## {subject.title}", "", f"More: {subject.page}.", "")
        yield from ("::::::{tab-set}", ":sync-group: machine", "")
        for machine, levels in MACHINES.items():
            yield from (f":::::{{tab-item}} {machine}", f":sync: {machine}", "")
            here = found[subject.title, machine]
            more = without_ratio(recorded, subject, levels)
            yield from panel(here, more) if here else ("Not measured.", "")
            yield from (":::::", "")
        yield from ("::::::", "")


# --- what was measured ------------------------------------------------------------------------------------------------


def results(
    recorded: Mapping[str, Data], subject: Subject, levels: Sequence[str]
) -> Iterator[Result]:
    """Yield what was reached on a machine, of engine files first, then of finished tables."""
    for name, data in recorded.items():
        if data.get("kind") == subject.kind and data["machine"]["level"] in levels:
            yield from of_engines(data, name, subject)
    for table in finished(recorded, levels):
        yield from of_table(table, subject)


def finished(recorded: Mapping[str, Data], levels: Sequence[str]) -> Iterator[Data]:
    """Yield the finished tables of a machine."""
    for data in recorded.values():
        for table in data.get("tables", ()):
            level = re.search(r"level (\w+)", table.get("machine") or "")
            if level and level[1] in levels:
                yield table


def without_ratio(
    recorded: Mapping[str, Data], subject: Subject, levels: Sequence[str]
) -> Iterator[Data]:
    """Yield finished tables, or rows of them, that compare with another engine and not with stock eager."""
    for table in finished(recorded, levels):
        columns = list(table["columns"])
        if subject.kind == "llm" and "llama.cpp ms/token" in columns:
            yield table
        if subject.kind == "models" and {"Times stock fp32", "Times torchao static"} <= {*columns}:
            at = columns.index("Times stock fp32")
            left = [row for row in table["rows"] if row[0] in subject.cases and not row[at]]
            used = [i for i in range(len(columns)) if any(row[i] for row in left)]
            if left:
                yield {
                    "title": f"{table['title']}, against torchao only",
                    "columns": [columns[i] for i in used],
                    "rows": [[row[i] for i in used] for row in left],
                }


def of_engines(data: Data, name: str, subject: Subject) -> Iterator[Result]:
    """Yield the rows of a file that ``ipex bench`` wrote."""
    stock = {
        row["case"]: row["precision"] for row in data["rows"] if row["engine"] == peers.BASELINE
    }
    for row in data["rows"]:
        case, engine = row["case"], row["engine"]
        if engine != peers.BASELINE and case in subject.cases:
            yield Result(
                work=subject.cases[case],
                engine=engine,
                precision=row["precision"],
                stock=stock[case],
                asked=data["dtype"],
                ratio=row["ratio"],
                low=row["low"],
                high=row["high"],
                ms=f"{row['ms']:.3g}" if row["ms"] < 1000 else f"{row['ms']:,.0f}",
                code=call(subject.kind, engine, row["precision"], stock[case]),
                where=name,
                machine=f"{data['machine']['cpu']}, {data['machine']['threads']} threads",
            )


def of_table(table: Data, subject: Subject) -> Iterator[Result]:
    """Yield the rows of a finished table: weights of language models, or candidates against float32."""
    columns, title = list(table["columns"]), table["title"]
    if subject.kind == "llm" and {"Weights", "Ratio", "Stock ms/token"} <= {*columns}:
        token, prompt = columns.index("Stock ms/token"), columns.index("Ratio")
        lengths = re.search(r"Prompt of (\d+) for the prefill, of (\d+) for", table["note"])
        for row in table["rows"]:
            if row[0] not in ("bf16", "int8", "int4"):
                continue  # beams: on the page of all tables
            at = row[columns.index("Prompt")] if "Prompt" in columns else ""
            of_prompt, of_token = lengths.groups() if lengths else (at, at)
            precision = LONG.get(row[0], row[0])
            code = call("llm", "ipex_eager", f"{precision} (1.1b)", "bfloat16")
            for work, column in (
                (f"one token after {of_token}", token + 2),
                (f"prompt of {of_prompt}", prompt),
            ):
                ratio = number(row[column])
                yield Result(
                    work=f"Llama 1.1B: {work}",
                    engine="ipex_eager",
                    precision=precision,
                    stock="bfloat16",
                    asked=row[0],
                    ratio=ratio,
                    low=ratio,
                    high=ratio,
                    ms=row[column - 1],
                    code=code,
                    where=title,
                    machine=table["machine"],
                )
    elif {"Candidate", "Times stock fp32"} <= {*columns}:
        at = columns.index("Times stock fp32")
        for row in table["rows"]:
            if row[0] not in subject.cases or row[1] == "stock fp32" or not row[at]:
                continue
            engine = "ipex_eager" if row[1].startswith("ipex ") else row[1]
            precision = LONG.get(row[1].split()[-1], "int8") if engine == "ipex_eager" else "int8"
            code = call("models", engine, precision, "float32" if "fp32" in row[1] else "bfloat16")
            ratio = number(row[at])
            yield Result(
                work=subject.cases[row[0]],
                engine=engine,
                precision=precision,
                stock="float32",
                asked="any",
                ratio=ratio,
                low=ratio,
                high=ratio,
                ms=row[2],
                code=code,
                where=title,
                machine=table["machine"],
            )


def number(cell: str) -> float:
    """Return the first number of a cell such as ``**1.43** (1.2-1.6)``."""
    return float(re.search(r"\d+(?:\.\d+)?", cell)[0])  # type: ignore[index]


def one_run_each(found: Iterable[Result]) -> list[Result]:
    """Return the results of one run for each work and dtype: the one with the most other engines, then the first."""
    runs: dict[tuple[str, str, str], dict[str, list[Result]]] = {}
    for one in sorted(found, key=lambda one: "prompt" in one.work):
        runs.setdefault((one.work, one.asked, one.stock), {}).setdefault(one.where, []).append(one)
    return [
        one
        for of_work in runs.values()
        for one in max(of_work.values(), key=lambda run: sum(not r.ours for r in run))
    ]


# --- what to write ----------------------------------------------------------------------------------------------------


def verdict(ours: Result, other: Result | None) -> str:
    """Return the fastest other engine, and what its interval says against ours."""
    if other is None:
        return "none in this run"
    own = "" if other.precision == ours.precision or "INT8" in other.title else f" {short(other)}"
    text = f"{other.title}{own} {other.number}"
    if other.low == other.high:
        return f"{text}: {'**faster**' if other.ratio > ours.ratio else 'slower'}"
    if other.low > ours.high:
        return f"{text}: **faster**"
    return f"{text}: {'slower' if other.high < ours.low else 'no clear difference'}"


def best(found: Iterable[Result]) -> Result | None:
    """Return the fastest, or None if there is none."""
    return max(found, key=lambda one: one.ratio, default=None)


def fastest(found: Found, machine: str) -> dict[str, tuple[Result | None, Result | None]]:
    """Return for each work on a machine the fastest of ours in any dtype, and the fastest of the others."""
    pairs = {}
    for subject in SUBJECTS:
        engines, _ = separated(found[subject.title, machine])
        for work in dict.fromkeys(one.work for one in engines):
            here = [one for one in engines if one.work == work]
            pairs[work] = (best(r for r in here if r.ours), best(r for r in here if not r.ours))
    return pairs


def overview(found: Found) -> Iterator[str]:
    """Yield a tab for each machine with the fastest of ours and of the others, and the same as a table."""
    pairs = {machine: fastest(found, machine) for machine in MACHINES}
    yield from ("::::{tab-set}", ":sync-group: machine", "")
    for machine, works in pairs.items():
        bars = [
            (work, [Bar(label(one), one.ratio, one.low, one.high, one.ours) for one in pair if one])
            for work, pair in works.items()
        ]
        text = "Times as fast as stock PyTorch eager: the fastest call of ipex, and the fastest other engine."
        yield from (f":::{{tab-item}} {machine}", f":sync: {machine}", "")
        yield from (chart(bars, text, NARROW) or "Not measured.", ":::", "")
    yield from ("::::", "", ":::{dropdown} The same as a table", "")

    def cell(ours: Result | None, other: Result | None) -> str:
        if ours is None:
            return "-"
        text = f"**{ours.ratio:.2f}** {short(ours)}, {mode(ours)}"
        if other is not None and other.ratio > ours.ratio:
            text += f"; {other.title} {other.ratio:.2f} {short(other)}"
        return text

    every = dict.fromkeys(
        one.work
        for subject in SUBJECTS
        for machine in MACHINES
        for one in separated(found[subject.title, machine])[0]
    )
    yield from rows(
        ("Work", *MACHINES),
        [
            [work, *(cell(*works.get(work, (None, None))) for works in pairs.values())]
            for work in every
        ],
    )
    yield from ("", "Another engine is named where it reached more.", ":::", "")


def behind(found: Found) -> Iterator[str]:
    """Yield a table of the rows in which another engine is faster beyond the intervals."""
    lost = [
        (ours.work, machine, kind(ours), ours.number, f"{other.title} {other.number}")
        for (_, machine), here in found.items()
        for ours, other in choices(*separated(here))
        if other is not None and verdict(ours, other).endswith("**faster**")
    ]
    if lost:
        yield from rows(("Work", "Machine", "dtype", "ipex", "Faster"), lost)
    else:
        yield "No row: no interval of another engine lies above ours."


def separated(found: Iterable[Result]) -> tuple[list[Result], list[Result]]:
    """Return the results that compare engines, and those that compare dtypes."""
    chosen = one_run_each(found)
    return [r for r in chosen if r.asked != "any"], [r for r in chosen if r.asked == "any"]


def short(one: Result) -> str:
    """Return what an engine computes in, as charts call it."""
    return SHORT.get(one.precision, one.precision)


def mode(one: Result) -> str:
    """Return whether an engine of ours runs eagerly or compiled."""
    return "compiled" if one.engine == "ipex_compile" else "eager"


def panel(found: Sequence[Result], more: Iterable[Data]) -> Iterator[str]:
    """Yield what stands in the tab of a machine; ``more`` are finished tables without a ratio."""
    engines, dtypes = separated(found)
    for part in (engines, dtypes):
        if part:
            yield from (picture(part), "")
    yield "| Work | dtype | With ipex | Times stock eager | Fastest other engine |"
    yield "|---" * 5 + "|"
    taken: dict[tuple[str, str], str] = {}
    for ours, other in choices(engines, dtypes):
        assert ours.code is not None
        yield (
            f"| {ours.work} | {kind(ours)} | {ours.code[0]} | **{ours.number}** of {SHORT[ours.stock]} |"
            f" {verdict(ours, other)} |"
        )
        taken.setdefault(ours.code, f"{ours.work}, {kind(ours)}")
    yield ""
    for table in more:
        yield from (f"{table['title']}:", "", *rows(table["columns"], table["rows"]), "")
    yield from (":::{dropdown} The code of each row", "")
    for (_, code), name in taken.items():
        yield from (f"{name}:", "", "```python", code, "```", "")
    yield from (":::", "", ":::{dropdown} All engines and runs", "")
    yield from rows(
        ("Work", "Engine", "Computes in", "ms", "Times stock eager"),
        (
            (
                *(one.work, f"**{one.title}**" if one.ours else one.title, one.precision, one.ms),
                f"{one.number} of {SHORT[one.stock]}",
            )
            for one in found
        ),
    )
    machines = "; ".join(dict.fromkeys(one.machine for one in found))
    yield from ("", f"Each number is against stock eager in its own run. Measured on: {machines}.")
    yield from (":::", "")


def choices(
    engines: Iterable[Result], dtypes: Iterable[Result]
) -> Iterator[tuple[Result, Result | None]]:
    """Yield the results of ours to choose from, the fastest of a work first, each with the fastest other engine.

    Of a run of engines it is the faster of eager and compiled; of a run that compares dtypes each of them.
    """
    found: dict[str, list[tuple[Result, Result | None]]] = {}
    for of_work in grouped(engines).values():
        ours = best(one for one in of_work if one.code)
        if ours is not None:
            pair = (ours, best(one for one in of_work if not one.ours))
            found.setdefault(ours.work, []).append(pair)
    for of_work in grouped(dtypes).values():
        others = [one for one in of_work if not one.ours]
        found.setdefault(f"dtypes of {of_work[0].work}", []).extend(
            (one, best(other for other in others if other.precision == one.precision))
            for one in of_work
            if one.code
        )
    for pairs in found.values():
        yield from sorted(pairs, key=lambda pair: -pair[0].ratio)


def kind(one: Result) -> str:
    """Return the dtype of a result, of INT8 whether it is static or dynamic."""
    return one.engine if "INT8" in one.engine else one.precision


def rows(columns: Sequence[object], cells: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield a table."""
    yield f"| {' | '.join(map(str, columns))} |"
    yield "|---" * len(columns) + "|"
    for row in cells:
        yield f"| {' | '.join(map(str, row))} |"


def grouped(found: Iterable[Result]) -> dict[tuple[str, str, str], list[Result]]:
    """Return the results of each work, dtype of stock eager and dtype of the run."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for one in found:
        groups.setdefault((one.work, one.stock, one.asked), []).append(one)
    return groups


def picture(found: Iterable[Result]) -> str:
    """Return a chart with a group for each work, the fastest first."""
    groups: dict[str, list[Result]] = {}
    for one in found:
        groups.setdefault(f"{one.work}, against {SHORT[one.stock]}", []).append(one)
    bars = [
        (
            head,
            [
                Bar(label(one), one.ratio, one.low, one.high, one.ours)
                for one in sorted(group, key=lambda one: -one.ratio)
            ],
        )
        for head, group in groups.items()
    ]
    text = (
        "Times as fast as stock PyTorch eager in the dtype that stands above; line: 95 % interval."
    )
    return chart(bars, text, NARROW)


def label(one: Result) -> str:
    """Return the name of a bar: engine and dtype."""
    if "INT8" in one.engine:
        return one.engine.removesuffix(", bf16")
    return f"{one.title} {short(one)}"
