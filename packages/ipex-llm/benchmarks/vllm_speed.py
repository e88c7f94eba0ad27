# SPDX-License-Identifier: Apache-2.0
"""Tokens of vLLM with the plug-in against the engine of ipex, on one model: one stream, many streams, a long prompt.

    python packages/ipex-llm/benchmarks/vllm_speed.py                        # a Llama of 1.1B, random weights, bfloat16
    python packages/ipex-llm/benchmarks/vllm_speed.py --model ./checkpoint --streams 1 16 --prompt 1024
    python packages/ipex-llm/benchmarks/vllm_speed.py --int4                 # the same with 4 bits, in groups of 128
    python packages/ipex-llm/benchmarks/vllm_speed.py --ranks 2 --wheel ./other/bin/python

Run it in the environment of vLLM. Each side has a process of its own, which waits while the other ones measure; they
take turns. `--ranks` adds a side with that many tensor-parallel ranks, `--wheel` one in another environment: of vLLM's
build for CPUs, say. The time of a token is the time of a request without the time of the same request that ends after
its first token, so it has no prompt in it. Ratios are of one turn, to the first side; the table has medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHORT = 8


def prompts(length: int, streams: int, turn: int) -> list[list[int]]:
    """Return token ids that no earlier turn had, so that no cache has them."""
    generator = random.Random(f"{length} {streams} {turn}")
    return [[generator.randrange(10, 30000) for _ in range(length)] for _ in range(streams)]


def vllm_side(
    model: str, streams: int, longest: int, eager: bool, ranks: int
) -> Callable[[list[list[int]], int], None]:
    """Return what generates with vLLM."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=streams,
        max_num_batched_tokens=longest,
        skip_tokenizer_init=True,
        enforce_eager=eager,
        kv_cache_memory_bytes=1 << 30,
        tensor_parallel_size=ranks,
    )

    def run(given: list[list[int]], new: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        engine.generate([{"prompt_token_ids": one} for one in given], params, use_tqdm=False)

    return run


def ipex_side(
    model: str, streams: int, longest: int, eager: bool, ranks: int
) -> Callable[[list[list[int]], int], None]:
    """Return what generates with the engine of ipex."""
    del eager, ranks
    from ipex_llm.engine import Engine, SamplingParams
    from ipex_llm.entrypoints.cli.common import load_model

    engine = Engine(
        load_model(Path(model), "bf16"),
        max_num_seqs=streams,
        max_tokens_per_step=longest,
        max_model_len=2048,
        cache_bytes=1 << 30,
    )

    def run(given: list[list[int]], new: int) -> None:
        engine.generate(given, SamplingParams(max_new_tokens=new, ignore_eos=True))

    return run


def child(side: str, model: str, streams: int, longest: int, eager: bool, ranks: int) -> None:
    """Answer each line of standard input, ``[length, streams, new, turn]``, with seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    run = (ipex_side if side == "ipex" else vllm_side)(model, streams, longest, eager, ranks)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        length, count, new, turn = json.loads(line)
        given = prompts(length, count, turn)
        begin = time.perf_counter()
        run(given, new)
        print(json.dumps(time.perf_counter() - begin), file=answers, flush=True)


class Side:
    """The process of one side."""

    def __init__(self, name: str, arguments: argparse.Namespace, model: str) -> None:
        self.new = arguments.new
        wheel = name == "wheel"
        ranks = arguments.ranks if name == "ranks" else 1
        command = [arguments.wheel if wheel else sys.executable, __file__, "--side", name]
        command += ["--model", model, "--ranks", str(ranks)]
        command += ["--streams", str(max(arguments.streams)), "--prompt", str(arguments.prompt)]
        command += ["--eager"] * arguments.eager
        env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        if wheel:
            env.pop("PYTHONPATH", None)  # it may have the plug-in
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.answer()

    def answer(self) -> Any:
        """Return the next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with status {self.process.wait()}: see its messages")
        return json.loads(line)

    def seconds(self, length: int, streams: int, new: int, turn: int) -> float:
        """Return how long the requests of one turn take."""
        assert self.process.stdin is not None
        print(json.dumps([length, streams, new, turn]), file=self.process.stdin, flush=True)
        return float(self.answer())

    def step(self, streams: int, turn: int) -> float:
        """Return the time of one token of all streams."""
        whole = self.seconds(SHORT, streams, self.new + 1, 2 * turn)
        first = self.seconds(SHORT, streams, 1, 2 * turn + 1)
        return (whole - first) / self.new


def write_model(folder: Path, int4: bool) -> Path:
    """Write the Llama of 1.1B with random weights, and with 4 bits if asked; return its folder."""
    from ipex_llm.model_loader.make import make_folder
    from ipex_llm.model_loader.quantize import quantize_folder
    from ipex_llm.model_loader.schemes import make_scheme

    make_folder(folder / "llama", "1b")
    if not int4:
        return folder / "llama"
    quantize_folder(folder / "llama", folder / "int4", make_scheme("int4"))
    return folder / "int4"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder of a checkpoint; a random one of 1.1B without")
    parser.add_argument("--int4", action="store_true", help="the random one with int4 weights")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the long prompt")
    parser.add_argument("--new", type=int, default=48, help="tokens of which a time is the mean")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="vLLM without its compiler")
    parser.add_argument("--ranks", type=int, default=1, help="also vLLM with these ranks")
    parser.add_argument("--wheel", help="also vLLM of the environment of this Python")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        streams, eager = max(arguments.streams), arguments.eager
        longest = max(arguments.prompt, SHORT * streams)
        child(arguments.side, arguments.model, streams, longest, eager, arguments.ranks)
        return
    names = ["vllm", "ipex"] + ["ranks"] * (arguments.ranks > 1) + ["wheel"] * bool(arguments.wheel)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or str(write_model(Path(folder), arguments.int4))
        sides = {name: Side(name, arguments, model) for name in names}
        works: dict[str, Callable[[Side, int], float]] = {
            f"ms for a token of {n} stream{'s' * (n > 1)}": lambda side, turn, n=n: side.step(
                n, turn
            )
            for n in arguments.streams
        }
        long = arguments.prompt
        works[f"ms to the first token of {long}"] = lambda side, turn: side.seconds(
            long, 1, 1, turn
        )
        print("| | " + " | ".join([*names, *(f"vllm / {name}" for name in names[1:])]) + " |")
        print("|---" * 2 * len(names) + "|")
        for label, work in works.items():
            found: dict[str, list[float]] = {name: [] for name in names}
            for turn in range(arguments.turns + 1):
                for name in names if turn % 2 else names[::-1]:
                    found[name].append(work(sides[name], turn))
            rows = {name: found[name][1:] for name in names}  # the first turn warms up
            shown = [f"{1e3 * statistics.median(row):.1f}" for row in rows.values()]
            for name in names[1:]:
                ratios = [a / b for a, b in zip(rows["vllm"], rows[name], strict=True)]
                shown.append(
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                )
            print(f"| {label} | " + " | ".join(shown) + " |", flush=True)


if __name__ == "__main__":
    main()
