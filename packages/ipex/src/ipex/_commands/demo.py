# SPDX-License-Identifier: Apache-2.0
"""``ipex demo``: a real model on real text, against stock PyTorch, on this machine."""

from __future__ import annotations

import concurrent.futures
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ipex_core._console import make_console, writable

if TYPE_CHECKING:
    from ipex._commands._demo_model import Batch, Encoder, Runner, Sentence

__all__ = ["app", "demo"]

app = typer.Typer(add_completion=False, help=__doc__)

#: The least cosine between an embedding and the one of stock float32.
LEAST_COSINE = 0.999

#: Share of the CPUs that others may take before the user is warned.
BUSY = 0.1


@app.command()
def demo(
    batches: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,32",
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.png.")] = Path("reports"),
    threads: Annotated[int, typer.Option(min=0, help="Threads (0: torch's default).")] = 0,
    seconds: Annotated[
        float, typer.Option(min=0, help="Time for the measurement of each batch.")
    ] = 20,
    compile: Annotated[bool, typer.Option(help="Also measure the compiled candidates.")] = True,
    memory: Annotated[
        bool, typer.Option(help="Also measure memory, in a process per candidate.")
    ] = True,
    quick: Annotated[
        bool, typer.Option(help="A tiny random model and short timings: a self-test.")
    ] = False,
) -> None:
    """Embed a text with MiniLM, answer three queries, and compare ipex with stock PyTorch.

    Every candidate runs once per round in one process, in alternating order; ratios are taken within each round.

    Exit codes: 0; 1 if a candidate fails, the search goes wrong, or an embedding of ipex has a cosine below 0.999 to
    the one of stock float32; 2 for bad arguments or missing packages. Being slower than stock is shown, not an error.
    """
    console = make_console()
    sizes = _parse_sizes(batches)
    writable(out / "demo.json", "--out")
    started = time.perf_counter()
    import torch

    from ipex._commands import _demo_model as dm
    from ipex._commands import _demo_report as report
    from ipex_core.benchmark import machine, paired

    try:
        encoder = dm.Encoder(quick)
    except ModuleNotFoundError as error:
        hint = "" if "pip install" in str(error) else ": pip install 'ipex[demo]'"
        Console(stderr=True, soft_wrap=True).print(
            f"[bold red]error:[/] {escape(f'{error}{hint}')}"
        )
        raise typer.Exit(2) from None
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

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        steps = (2 if memory else 1) * len(candidates) + 2 + len(sizes)
        task = progress.add_task("", total=steps)

        def step(text: str) -> None:
            progress.update(task, description=text)
            if not console.is_terminal:
                console.print(f"{text} ...", highlight=False)

        if memory:
            step("memory, one process per candidate")
            # Before everything else: it also fills the compiler's cache for the candidates below.
            requests = [
                {
                    "candidate": c.name,
                    "sizes": sizes,
                    "threads": torch.get_num_threads(),
                    "quick": quick,
                }
                for c in candidates
            ]
            with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
                for c, answer in zip(candidates, pool.map(_ask_child, requests), strict=True):
                    outcomes[c.name].peak_mb = answer.get("peak_mb", math.nan)
                    outcomes[c.name].base_mb = answer.get("base_mb", math.nan)
                    progress.advance(task)

        runners: dict[str, Runner] = {}
        for c in candidates:
            step(f"preparing {c.name}")
            begin = time.perf_counter()
            try:
                runners[c.name] = dm.prepare(c, encoder, list(inputs.values()))
            except Exception as error:
                outcomes[c.name].error = f"{type(error).__name__}: {error}".splitlines()[0]
            outcomes[c.name].prepare_s = time.perf_counter() - begin
            progress.advance(task)

        step("searching")
        finder = runners.get("ipex.optimize bf16") or next(iter(runners.values()))
        hits = _search(encoder, finder, sentences)
        progress.advance(task)

        step("comparing embeddings")
        _compare(encoder, runners, outcomes, texts, sentences, max(sizes))
        progress.advance(task)

        for n in sizes:
            step(f"measuring batch {n}")
            functions = {name: _call(run, inputs[n]) for name, run in runners.items()}
            with torch.inference_mode():
                times = paired(functions, seconds=seconds, min_rounds=3, warmup=1)
            for name, values in times.items():
                outcomes[name].seconds[n] = values
            progress.advance(task)

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
    if (facts["busy"] or 0) > BUSY:
        console.print(
            f"[yellow]Other processes took {facts['busy']:.0%} of the CPUs when this started:[/] latencies and ratios"
            " are not to be relied on. Repeat it on an idle machine, or with --threads 1."
        )
    for row in rows:
        if row.error:
            console.print(f"[red]{row.name} failed:[/] {escape(row.error)}")
    report.write(out, rows, outcomes.values(), sizes, hits, result)
    console.print(
        f"wrote {', '.join(str(p) for p in report.files(out))} after {result['duration_s']:.0f} s"
    )

    wrong = [q for q, topic, found in hits if not quick and found[0][1].topic != topic]
    low = [r for r in rows if r.stock and not r.error and not r.cosine_min >= LEAST_COSINE]
    for query in wrong:
        console.print(f"[red]the first answer is off the topic:[/] {query}")
    for row in low:
        console.print(f"[red]{row.name}: cosine {row.cosine_min:.5f} is below {LEAST_COSINE}[/]")
    if wrong or low or any(r.error for r in rows):
        raise typer.Exit(1)


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


def _call(run: Runner, batch: Batch) -> Any:
    return lambda: run(batch)


def _version(package: str) -> str:
    import importlib.metadata

    return importlib.metadata.version(package)


# -- the job itself ---------------------------------------------------------------------------------------------------


def _search(
    encoder: Encoder, run: Runner, sentences: list[Sentence]
) -> list[tuple[str, str, list[tuple[float, Sentence]]]]:
    """Embed the text and return the three best sentences for each query with their scores."""
    import torch

    from ipex._commands import _demo_model as dm

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


def _compare(
    encoder: Encoder,
    runners: dict[str, Runner],
    outcomes: dict[str, Any],
    texts: list[str],
    sentences: list[Sentence],
    size: int,
) -> None:
    """Fill in the cosines to stock float32, over all passages and some single sentences.

    The sentences, 16 or as many as fill the last batch, are padded: they tell whether the mask is obeyed.
    """
    import torch

    from ipex._commands import _demo_model as dm

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


def _ask_child(request: dict[str, Any]) -> dict[str, float]:
    """Run one candidate in a process of its own and return what memory it took; nothing if that fails."""
    code = "import sys; from ipex._commands.demo import child; child(sys.argv[1])"
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

    from ipex._commands import _demo_model as dm

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
