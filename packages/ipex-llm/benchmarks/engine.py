# SPDX-License-Identifier: Apache-2.0
"""Steps of the engine: how much of their time the model takes, and what sampling and structured output cost.

    python packages/ipex-llm/benchmarks/engine.py                            # a Llama of 1.1B, random weights, int4
    python packages/ipex-llm/benchmarks/engine.py --model ./checkpoint --streams 1 16

Each kind of request runs in turns with the greedy one, in one process: all streams begin together, and the steps that
only decode are counted. The share of the model is what the engine gives of the tokens that the batch step alone would
give. The last line compares the start from the files with the time to read them, both with the files in memory.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_speed import write_model

from ipex_llm.engine import Engine, SamplingParams
from ipex_llm.entrypoints.cli.common import load_model
from ipex_llm.entrypoints.openai.grammar import Grammars, Wanted

#: An array of numbers of any length: there is always a next token.
SCHEMA = '{"type": "array", "items": {"type": "integer"}, "minItems": 4096}'


class Watched:
    """The runner of an engine, with the time of its last forward pass."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.seconds = 0.0

    def forward(self, *args: Any, **options: Any) -> Any:
        """Compute one batch."""
        begin = time.perf_counter()
        result = self.runner.forward(*args, **options)
        self.seconds = time.perf_counter() - begin
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


def steps(
    engine: Engine, watched: Watched, params: list[SamplingParams], turn: int
) -> tuple[float, float]:
    """Return the median time of a step that decodes, and the share of the model in it."""
    generator = random.Random(turn)
    for one in params:
        engine.add_request([generator.randrange(10, 30000) for _ in range(8)], one)
    times, shares = [], []
    engine.step()  # the prompts
    while engine.has_work:
        begin = time.perf_counter()
        new = engine.step()
        seconds = time.perf_counter() - begin
        if len(new) == len(params):  # the end of a request frees what it had
            times.append(seconds)
            shares.append(watched.seconds / seconds)
    return statistics.median(times), statistics.median(shares)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", help="folder of a checkpoint; a random one of 1.1B in int4 without"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--new", type=int, default=32, help="tokens of a request")
    parser.add_argument("--turns", type=int, default=6)
    arguments = parser.parse_args()
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as made:
        folder = Path(arguments.model or write_model(Path(made), int4=True))
        files = sorted(folder.glob("*.safetensors"))
        begin = time.perf_counter()
        size = sum(len(file.read_bytes()) for file in files)
        read = time.perf_counter() - begin
        begin = time.perf_counter()
        model = load_model(folder, "bf16")
        start = time.perf_counter() - begin
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    most = max(arguments.streams)
    engine = Engine(model, tokenizer, max_num_seqs=most, max_model_len=2048, cache_bytes=1 << 30)
    watched: Any = Watched(engine.runner)
    engine.runner = watched
    grammar = Grammars(engine).make(Wanted("json", SCHEMA, "schema"))
    common: dict[str, Any] = {"max_new_tokens": arguments.new, "ignore_eos": True}
    kinds: dict[str, Callable[[], SamplingParams]] = {
        "greedy": lambda: SamplingParams(**common),
        "sampled": lambda: SamplingParams(temperature=0.8, top_p=0.95, **common),
        "structured": lambda: SamplingParams(grammar=grammar, **common),
    }
    print("| streams | request | ms for a step | times greedy | share of the model |")
    print("|---|---|---|---|---|")
    for count in arguments.streams:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for turn in range(arguments.turns + 1):
            for name in kinds if turn % 2 else list(kinds)[::-1]:
                params = [kinds[name]() for _ in range(count)]
                found[name].append(steps(engine, watched, params, turn))
        for name, rows in found.items():
            del rows[0]  # warms up
            ratios = [row[0] / plain[0] for row, plain in zip(rows, found["greedy"], strict=True)]
            print(
                f"| {count} | {name} | {1e3 * statistics.median(row[0] for row in rows):.2f} | "
                f"{statistics.median(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f}) | "
                f"{statistics.median(row[1] for row in rows):.3f} |",
                flush=True,
            )
    print(
        f"Start {start:.1f} s, reading {size / 1e6:.0f} MB {read:.2f} s: {start / read:.1f} times"
    )


if __name__ == "__main__":
    main()
