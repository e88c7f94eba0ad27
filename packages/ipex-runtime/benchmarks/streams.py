# SPDX-License-Identifier: Apache-2.0
"""Measures pinned streams: overhead of a call, throughput and latency of single requests, memory.

    python packages/ipex-runtime/benchmarks/streams.py [--only overhead,requests,memory] [--model script] [--json FILE]

Compared variants take turns in one run. Requests are one sequence of 128 tokens for an encoder with the sizes of
all-MiniLM-L6-v2 (random weights: the arithmetic does not depend on them). The machine should be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ipex_runtime import CPUPool, MultiStreamModule, Task, pin, topology
from ipex_runtime.multi_stream import MultiStreamBenchmarkModule

SIZES = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
TOKENS = torch.randint(0, 30000, (1, 128), generator=torch.Generator().manual_seed(0))


def encoder(kind: str) -> Callable[[torch.Tensor], Any]:
    """Return the model: eager, as TorchScript program, or optimized by ipex (bfloat16)."""
    import transformers

    config = transformers.BertConfig(**SIZES)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    if kind == "ipex":
        import ipex

        model = ipex.optimize(model, dtype=torch.bfloat16)
    if kind == "script":
        model.config.return_dict = False
        model = torch.jit.freeze(torch.jit.trace(model, TOKENS, strict=False))
    return model


def seconds(call: Callable[..., Any], argument: Any, count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        call(argument)
    return (time.perf_counter() - begin) / count


def overhead(pool: CPUPool) -> dict[str, float]:
    """Return microseconds per call and stream that a module costs which computes nothing."""
    found = {}
    for streams in range(1, pool.num_threads + 1):
        module = MultiStreamModule(torch.nn.Identity(), streams, pool)
        x = torch.zeros(streams, 64)
        seconds(module, x, 300)
        best = min(seconds(module, x, 1000) for _ in range(5))
        found[f"{streams} streams"] = best / streams * 1e6
    return found


def served(ask: list[Callable[[], Any]], count: int) -> tuple[float, list[float]]:
    """Return requests per second and latencies when each of some clients asks one after the other."""
    latencies: list[float] = []

    def client(call: Callable[[], Any]) -> None:
        for _ in range(count):
            begin = time.perf_counter()
            call()
            latencies.append(time.perf_counter() - begin)

    clients = [threading.Thread(target=client, args=(call,)) for call in ask]
    begin = time.perf_counter()
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    return len(latencies) / (time.perf_counter() - begin), latencies


@torch.inference_mode()
def requests(pool: CPUPool, kind: str, rounds: int, count: int) -> dict[str, Any]:
    """Compare one stream with all cores, one stream per core, and as many threads that nobody pins."""
    model = encoder(kind)
    streams = pool.num_threads

    def ask(call: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
        def request() -> None:
            with torch.inference_mode():
                call(TOKENS)

        return request

    def unpinned(x: torch.Tensor) -> Any:
        return model(x)

    def one_thread(call: Callable[[], Any]) -> Callable[[], Any]:
        state = threading.local()

        def request() -> None:
            if not hasattr(state, "ready"):
                from ipex_runtime.team import set_threads

                set_threads(1)
                state.ready = True
            call()

        return request

    whole = Task(model, pool)
    parts = [Task(model, part) for part in pool.split(streams)]
    variants = {
        "one stream, all cores": [ask(whole.run_sync)],
        "pinned, one core each": [ask(part.run_sync) for part in parts],
        "not pinned, one thread each": [one_thread(ask(unpinned)) for _ in range(streams)],
    }
    rates: dict[str, list[float]] = {name: [] for name in variants}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(rounds + 1):
        for name, calls in variants.items():
            rate, latencies = served(calls, count if round_ else 8)
            if round_:  # the first round warms up
                rates[name].append(rate)
                times[name] += latencies
    found: dict[str, Any] = {}
    for name in variants:
        ordered = sorted(times[name])
        found[name] = {
            "requests/s": statistics.median(rates[name]),
            "p50 ms": ordered[len(ordered) // 2] * 1e3,
            "p99 ms": ordered[int(len(ordered) * 0.99)] * 1e3,
        }
    pairs = zip(rates["pinned, one core each"], rates["one stream, all cores"], strict=True)
    found["throughput, streams over one stream"] = statistics.median(a / b for a, b in pairs)
    return found


def rss() -> int:
    """Return the resident bytes of this process, shared pages once."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@torch.inference_mode()
def memory(pool: CPUPool, kind: str) -> dict[str, float]:
    """Return the resident memory with one stream in MB, and its growth per further stream in percent."""
    model = encoder(kind)
    cpus = pool.core_ids
    found = {}
    first = 0
    for streams in (1, 2, 4):
        shared = CPUPool(cpus)
        shared.places = tuple((cpus[i % len(cpus)],) for i in range(streams))
        module = MultiStreamBenchmarkModule(model, streams, shared)
        for _ in range(10):
            module(TOKENS)
        now = rss()
        first = first or now
        found[f"{streams} streams, MB"] = now / 1e6
        if streams > 1:
            found[f"{streams} streams, growth per stream in %"] = (
                (now - first) / first / (streams - 1) * 100
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="overhead,requests,memory")
    parser.add_argument("--model", default="script", choices=["eager", "script", "ipex"])
    parser.add_argument("--cores", default="", help="CPU list; default: one CPU of each core")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40, help="per client and round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = topology.parse_cpu_list(options.cores)
    pool = CPUPool(wanted or topology.read().physical())
    found: dict[str, Any] = {"model": options.model, "cores": pool.core_ids}
    torch.set_num_threads(pool.num_threads)
    for part in options.only.split(","):
        if part == "overhead":
            found[part] = overhead(pool)
        elif part == "requests":
            found[part] = requests(pool, options.model, options.rounds, options.requests)
        elif part == "memory":
            with pin(pool):
                found[part] = memory(pool, options.model)
        else:
            parser.error(f"--only must name overhead, requests, memory, got {part!r}")
    text = json.dumps(found, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
