# SPDX-License-Identifier: Apache-2.0
"""Tokens of vLLM with the plug-in against the engine of ipex, on one model: one stream, many streams, a long prompt.

    python packages/ipex-llm/benchmarks/vllm_speed.py                        # a Llama of 1.1B, random weights, bfloat16
    python packages/ipex-llm/benchmarks/vllm_speed.py --model ./checkpoint --streams 1 16 --prompt 1024

Run it in the environment of vLLM. Each side has a process of its own, which waits while the other one measures; they
take turns. The time of a token is the time of a request without the time of the same request that ends after its first
token, so it has no prompt in it. Ratios are of one turn; the table has medians.
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

SHORT, NEW = 32, 48


def prompts(length: int, streams: int, turn: int) -> list[list[int]]:
    """Return token ids that no earlier turn had, so that no cache has them."""
    generator = random.Random(f"{length} {streams} {turn}")
    return [[generator.randrange(10, 30000) for _ in range(length)] for _ in range(streams)]


def vllm_side(model: str, streams: int, eager: bool) -> Callable[[list[list[int]], int], None]:
    """Return what generates with vLLM."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=streams,
        skip_tokenizer_init=True,
        enforce_eager=eager,
        kv_cache_memory_bytes=1 << 30,
    )

    def run(given: list[list[int]], new: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        engine.generate([{"prompt_token_ids": one} for one in given], params, use_tqdm=False)

    return run


def ipex_side(model: str, streams: int, eager: bool) -> Callable[[list[list[int]], int], None]:
    """Return what generates with the engine of ipex."""
    del eager
    import torch
    import transformers

    import ipex
    from ipex_llm.engine import Engine, SamplingParams

    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, trust_remote_code=False
    )
    prepared = ipex.llm.optimize(loaded.eval(), dtype=torch.bfloat16)
    engine = Engine(
        prepared,
        max_num_seqs=streams,
        max_tokens_per_step=2048,
        max_model_len=2048,
        cache_bytes=1 << 30,
    )

    def run(given: list[list[int]], new: int) -> None:
        engine.generate(given, SamplingParams(max_new_tokens=new, ignore_eos=True))

    return run


SIDES = {"vllm": vllm_side, "ipex": ipex_side}


def child(side: str, model: str, streams: int, eager: bool) -> None:
    """Answer each line of standard input, ``[length, streams, new, turn]``, with seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    run = SIDES[side](model, streams, eager)
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
        command = [sys.executable, __file__, "--side", name, "--model", model]
        command += ["--streams", str(max(arguments.streams)), *["--eager"] * arguments.eager]
        env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
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
        whole = self.seconds(SHORT, streams, NEW + 1, 2 * turn)
        first = self.seconds(SHORT, streams, 1, 2 * turn + 1)
        return (whole - first) / NEW


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder of a checkpoint; a random one of 1.1B without")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the long prompt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="vLLM without its compiler")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        child(arguments.side, arguments.model, max(arguments.streams), arguments.eager)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if model is None:
            from ipex_llm.model_loader.make import make_folder

            model = str(Path(folder, "llama"))
            make_folder(Path(model), "1b")
        sides = {name: Side(name, arguments, model) for name in SIDES}
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
        print("| | vLLM | ipex | vLLM / ipex |\n|---|---|---|---|")
        for label, work in works.items():
            found = {name: [] for name in SIDES}
            for turn in range(arguments.turns + 1):
                for name, side in sides.items():
                    found[name].append(work(side, turn))
            rows = [values[1:] for values in found.values()]  # the first turn warms up
            ratio = statistics.median(a / b for a, b in zip(*rows, strict=True))
            shown = " | ".join(f"{1e3 * statistics.median(row):.1f}" for row in rows)
            print(f"| {label} | {shown} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
