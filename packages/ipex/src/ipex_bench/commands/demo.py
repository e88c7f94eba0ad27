# SPDX-License-Identifier: Apache-2.0
"""``ipex demo``: a real model on real text, against stock PyTorch, on this machine."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ipex_core.util.console import make_console, warn_if_busy, writable

if TYPE_CHECKING:
    from ipex_bench.commands.demo_model import Batch, Candidate, Encoder, Runner, Sentence
    from ipex_bench.commands.demo_report import Hits, Outcome, Row


app = typer.Typer(add_completion=False, help=__doc__)

#: The least cosine between an embedding and the one of stock float32.
LEAST_COSINE = 0.999


@app.command()
def demo(
    batches: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,32",
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.png.")] = Path("reports"),
    threads: Annotated[int, typer.Option(min=0, help="Threads (0: torch's default).")] = 0,
    seconds: Annotated[
        float, typer.Option(min=0, help="Time for the measurement of each batch.")
    ] = 12,
    limit: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds after which less is measured; 0: measure all, however long it takes.",
        ),
    ] = 90,
    compile: Annotated[bool, typer.Option(help="Also measure the compiled candidates.")] = True,
    memory: Annotated[
        bool | None,
        typer.Option(
            help="Also measure memory, in a process per candidate (default: if half of the limit is left)."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="A tiny random model and short timings: a self-test.")
    ] = False,
) -> None:
    """Embed a text with MiniLM, answer three queries, and compare ipex with stock PyTorch.

    Every candidate runs once per round in one process, in alternating order; ratios are taken within each round. On a
    busy machine the limit leaves time for fewer rounds and fewer compiled candidates; what is left out is told.

    Exit codes: 0; 1 if a candidate fails, the search goes wrong, or an embedding of ipex has a cosine below 0.999 to
    the one of stock float32; 2 for bad arguments or missing packages. Being slower than stock is shown, not an error.
    """
    console = make_console()
    sizes = _parse_sizes(batches)
    writable(out / "demo.json", "--out")
    started = time.perf_counter()
    import torch

    from ipex_bench.commands import demo_model as dm
    from ipex_bench.commands import demo_report as report
    from ipex_core.benchmark import machine

    encoder = _load_encoder(quick)
    if threads:
        torch.set_num_threads(threads)
    facts = machine()
    if quick:
        seconds = min(seconds, 0.5)
    candidates = [c for c in dm.CANDIDATES if compile or not c.compiled]
    outcomes = {c.name: report.Outcome(c.name, c.stock) for c in candidates}
    sentences = dm.read_corpus()
    texts = dm.passages([s.text for s in sentences], encoder.tokens)
    inputs = {n: encoder.encode(_repeat(texts, n), fixed=True) for n in sizes}
    left = _TimeLeft(limit, started)

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        steps = _Steps(console, progress, len(candidates) + 2 + len(sizes))
        runners = _prepare(steps, candidates, encoder, list(inputs.values()), outcomes, left)
        finder = runners.get("ipex.optimize bf16") or next(iter(runners.values()))
        with steps.one("searching"):
            hits = _search(encoder, finder, sentences)
        with steps.one("comparing embeddings"):
            _compare(encoder, runners, outcomes, texts, sentences, max(sizes))
        for place, n in enumerate(sizes):
            with steps.one(f"measuring batch {n}"):
                share = min(seconds, left.seconds() / (len(sizes) - place))
                _measure_time(runners, n, inputs[n], share, outcomes)
        if memory or (memory is None and left.share() > 0.5):
            _measure_memory(steps, outcomes, sizes, quick)

    result: dict[str, Any] = {
        "machine": {**facts, "transformers": _version("transformers")},
        "model": encoder.name,
        "text": {
            "sentences": len(sentences),
            "passages": len(texts),
            "tokens_per_passage": dm.LENGTH,
        },
        "duration_s": round(time.perf_counter() - started, 1),
    }
    rows = report.rows(outcomes.values(), sizes)
    console.print(report.search_text(hits))
    console.print(report.results_table(rows, sizes, result))
    warn_if_busy(console, facts["busy"])
    report.write(out, rows, outcomes.values(), sizes, hits, result)
    console.print(
        f"wrote {', '.join(str(p) for p in report.files(out))} after {result['duration_s']:.0f} s"
    )
    for name in (row.name for row in rows if row.left_out):
        console.print(f"left out after {limit:.0f} s: {name}; `ipex demo --limit 0` measures it")
    faults = list(_faults(rows, [] if quick else hits))
    for line in faults:
        console.print(line)
    if faults:
        raise typer.Exit(1)


def _faults(rows: Iterable[Row], hits: Hits) -> Iterator[str]:
    """Yield what failed or is wrong, as lines for the console."""
    for row in rows:
        if row.error:
            yield f"[red]{row.name} failed:[/] {escape(row.error)}"
        elif row.stock and not row.left_out and not row.cosine_min >= LEAST_COSINE:
            yield f"[red]{row.name}: cosine {row.cosine_min:.5f} is below {LEAST_COSINE}[/]"
    for query in _wrong_answers(hits):
        yield f"[red]the first answer is off the topic:[/] {query}"


class _TimeLeft:
    """What is left of the time for the command."""

    def __init__(self, limit: float, started: float) -> None:
        self._limit = limit or math.inf
        self._started = started

    def seconds(self) -> float:
        return max(0.0, self._limit - (time.perf_counter() - self._started))

    def share(self) -> float:
        """Return it as a share of the limit; 1 without a limit."""
        return 1.0 if math.isinf(self._limit) else self.seconds() / self._limit


class _Steps:
    """Tells what is being done: a bar on a terminal, lines elsewhere."""

    def __init__(self, console: Console, progress: Progress, total: int) -> None:
        self.console, self.progress = console, progress
        self.task = progress.add_task("", total=total)

    def begin(self, text: str) -> None:
        self.progress.update(self.task, description=text)
        if not self.console.is_terminal:
            self.console.print(f"{text} ...", highlight=False)

    def end(self) -> None:
        self.progress.advance(self.task)

    @contextlib.contextmanager
    def one(self, text: str) -> Iterator[None]:
        self.begin(text)
        yield
        self.end()


def _load_encoder(quick: bool) -> Encoder:
    from ipex_bench.commands import demo_model as dm

    try:
        return dm.Encoder(quick)
    except ModuleNotFoundError as error:
        hint = "" if "pip install" in str(error) else ": pip install 'ipex[demo]'"
        Console(stderr=True, soft_wrap=True).print(
            f"[bold red]error:[/] {escape(f'{error}{hint}')}"
        )
        raise typer.Exit(2) from None


def _parse_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes) or len(set(sizes)) != len(sizes):
        raise typer.BadParameter(
            f"must be different positive numbers, got {text!r}", param_hint="--batches"
        )
    return sizes


def _repeat(texts: list[str], n: int) -> list[str]:
    return (texts * math.ceil(n / len(texts)))[:n]


def _version(package: str) -> str:
    import importlib.metadata

    return importlib.metadata.version(package)


# -- the job itself ---------------------------------------------------------------------------------------------------


def _prepare(
    steps: _Steps,
    candidates: list[Candidate],
    encoder: Encoder,
    batches: list[Batch],
    outcomes: dict[str, Outcome],
    left: _TimeLeft,
) -> dict[str, Runner]:
    """Return the candidates that can run, by name; the outcome of another has its error, or says that it is left out.

    Those that are compiled come last. None is begun with less than half of the time left: timing needs the rest.
    """
    from ipex_bench.commands import demo_model as dm

    runners: dict[str, Runner] = {}
    for candidate in sorted(candidates, key=lambda c: c.compiled):
        outcome = outcomes[candidate.name]
        if candidate.compiled and left.share() < 0.5:
            outcome.left_out = True
            steps.end()
            continue
        with steps.one(f"preparing {candidate.name}"):
            begin = time.perf_counter()
            try:
                runners[candidate.name] = dm.prepare(candidate, encoder, batches)
            except Exception as error:
                outcome.error = f"{type(error).__name__}: {error}".splitlines()[0]
            outcome.prepare_s = time.perf_counter() - begin
    return runners


def _measure_time(
    runners: dict[str, Runner],
    size: int,
    batch: Batch,
    seconds: float,
    outcomes: dict[str, Outcome],
) -> None:
    """Time all candidates in turn on one batch, in two rounds at least."""
    import torch

    from ipex_core.benchmark import paired

    functions = {name: functools.partial(run, batch) for name, run in runners.items()}
    with torch.inference_mode():
        times = paired(functions, seconds=seconds, min_rounds=2, warmup=1)
    for name, values in times.items():
        outcomes[name].seconds[size] = values


def _search(encoder: Encoder, run: Runner, sentences: list[Sentence]) -> Hits:
    """Embed the text and return the three best sentences for each query with their scores."""
    import torch

    from ipex_bench.commands import demo_model as dm

    def vectors(texts: list[str]) -> torch.Tensor:
        batches = [texts[i : i + 32] for i in range(0, len(texts), 32)]
        with torch.inference_mode():
            return torch.cat([dm.embed(run, encoder.encode(batch)) for batch in batches])

    scores = vectors([q for q, _ in dm.QUERIES]) @ vectors([s.text for s in sentences]).T
    found = []
    for (query, topic), row in zip(dm.QUERIES, scores, strict=True):
        values, places = row.topk(3)
        best = [(v, sentences[i]) for v, i in zip(values.tolist(), places.tolist(), strict=True)]
        found.append((query, topic, best))
    return found


def _wrong_answers(hits: Hits) -> list[str]:
    """Return the queries whose best sentence is about another topic."""
    return [query for query, topic, found in hits if found[0][1].topic != topic]


def _compare(
    encoder: Encoder,
    runners: dict[str, Runner],
    outcomes: dict[str, Outcome],
    texts: list[str],
    sentences: list[Sentence],
    size: int,
) -> None:
    """Fill in the cosines to stock float32, over all passages and some single sentences.

    The sentences, 16 or as many as fill the last batch, are padded: they tell whether the mask is obeyed.
    """
    import torch

    from ipex_bench.commands import demo_model as dm

    singles = [s.text for s in sentences]
    n_batches = math.ceil((len(texts) + min(16, size)) / size)
    chosen = (texts + singles)[: n_batches * size]
    inputs = [
        encoder.encode(_repeat(chosen[i : i + size], size), fixed=True)
        for i in range(0, len(chosen), size)
    ]
    embeddings = {}
    with torch.inference_mode():
        for name, run in runners.items():
            embeddings[name] = torch.cat([dm.embed(run, batch) for batch in inputs])
    truth = embeddings.get("stock eager fp32")
    for name, vectors in embeddings.items():
        if truth is not None:
            cosines = torch.nn.functional.cosine_similarity(vectors.double(), truth.double())
            outcomes[name].cosine_min = cosines.min().item()
            outcomes[name].cosine_mean = statistics.fmean(cosines.tolist())
            outcomes[name].compared = len(cosines)


# -- memory -----------------------------------------------------------------------------------------------------------


def _measure_memory(
    steps: _Steps, outcomes: dict[str, Outcome], sizes: list[int], quick: bool
) -> None:
    """Run each candidate in a process of its own, two at a time."""
    import torch

    common = {"sizes": sizes, "threads": torch.get_num_threads(), "quick": quick}
    measured = [outcome for outcome in outcomes.values() if not outcome.left_out]
    requests = [{"candidate": outcome.name, **common} for outcome in measured]
    steps.begin("memory, one process per candidate")
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        answers = pool.map(_ask_child, requests)
        for outcome, answer in zip(measured, answers, strict=True):
            outcome.peak_mb = answer.get("peak_mb", math.nan)
            outcome.base_mb = answer.get("base_mb", math.nan)


def _ask_child(request: dict[str, Any]) -> dict[str, float]:
    """Run one candidate in a process of its own and return what memory it took; nothing if that fails."""
    code = "import sys; from ipex_bench.commands.demo import child; child(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(request)],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {}
    return answer


def child(request: str) -> None:
    """Load, prepare and run one candidate and print its memory; what `_ask_child` starts."""
    import resource

    import torch

    from ipex_bench.commands import demo_model as dm

    wanted = json.loads(request)
    torch.set_num_threads(wanted["threads"])
    encoder = dm.Encoder(wanted["quick"])
    candidate = next(c for c in dm.CANDIDATES if c.name == wanted["candidate"])
    texts = dm.passages([s.text for s in dm.read_corpus()], encoder.tokens)
    inputs = [encoder.encode(_repeat(texts, n), fixed=True) for n in wanted["sizes"]]

    def peak_mb() -> float:
        # Kilobytes on Linux, bytes on macOS.
        scale = 1e6 if sys.platform == "darwin" else 1e3
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale

    import transformers.models.bert.modeling_bert  # noqa: F401  (part of the base, not of the candidate)

    base = peak_mb()
    run = dm.prepare(candidate, encoder, inputs)
    with torch.inference_mode():
        for batch in inputs:
            run(batch)
    print(json.dumps({"base_mb": base, "peak_mb": peak_mb()}))


if __name__ == "__main__":
    app()
