# SPDX-License-Identifier: Apache-2.0
"""Times between the tokens of one stream of `ipex llm serve`, while another client sends what a server must refuse.

    ipex llm serve --model ./tiny --port 8000
    python packages/ipex-llm/benchmarks/neighbors.py --port 8000
    python packages/ipex-llm/benchmarks/neighbors.py --port 8000 --attacks "recursive schema" "long prompt"

For each attack the stream runs alone and beside it, in turns. The table has the median of the 99th percentiles of both,
and the median of their ratios. The attacker keeps one request under way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

Body = Callable[[], bytes]
HOST = "127.0.0.1"


def _body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _schema(schema: Any) -> bytes:
    format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    messages = [{"role": "user", "content": "a"}]
    return _body(messages=messages, max_tokens=8, response_format=format_)


def _large_schema() -> bytes:
    properties = {f"property_{i:07d}": {"type": "string"} for i in range(240_000)}
    return _schema({"type": "object", "properties": properties})


def _wide_schema() -> bytes:
    """Return the largest one that is compiled."""
    properties = {f"p{i:03d}": {"type": ["string", "number"]} for i in range(700)}
    return _schema({"type": "object", "properties": properties})


def _recursive_schema() -> bytes:
    node = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}]}
    many = {"type": "array", "items": node}
    pair = {"type": "object", "properties": {"x": node, "y": many}, "required": ["x", "y"]}
    return _schema({"$defs": {"a": pair, "b": many}, "$ref": "#/$defs/a"})


def _nested_schema() -> bytes:
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    return _schema(deep)


def _regex(pattern: str) -> bytes:
    return _body(prompt="a", max_tokens=8, regex=pattern)


#: Name -> path, function that makes the body.
ATTACKS: dict[str, tuple[str, Body]] = {
    "10 MB schema": ("/v1/chat/completions", _large_schema),
    "wide schema": ("/v1/chat/completions", _wide_schema),
    "recursive schema": ("/v1/chat/completions", _recursive_schema),
    "nested schema": ("/v1/chat/completions", _nested_schema),
    "repeated regex": ("/v1/completions", lambda: _regex("((a{0,900}){0,900}){0,900}b")),
    "ambiguous regex": ("/v1/completions", lambda: _regex("(a|a?)+" * 200 + "b")),
    "10^5 inputs": ("/v1/embeddings", lambda: _body(input=["a"] * 100_000)),
    "2,048 inputs": ("/v1/embeddings", lambda: _body(input=["a b c d"] * 2048)),
    "long prompt": ("/v1/completions", lambda: _body(prompt="sea and sun " * 80_000)),
    "longest prompt": ("/v1/completions", lambda: _body(prompt="a" * 30_000, max_tokens=1)),
}


def _head(path: str, length: int) -> bytes:
    lines = (
        f"POST {path} HTTP/1.1",
        f"Host: {HOST}",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode()


async def stream(port: int, tokens: int, **fields: Any) -> list[float]:
    """Return the seconds between the events of a stream; ``fields`` are further ones of the request."""
    fields = {"max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True, **fields}
    body = _body(prompt="One, two", **fields)
    reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 20)
    writer.write(_head("/v1/completions", len(body)) + body)
    await writer.drain()
    times = []
    with contextlib.closing(writer):
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
    if len(times) < tokens // 2:
        raise SystemExit(f"the stream must have about {tokens} tokens, got {len(times)}")
    return [after - before for before, after in itertools.pairwise(times)]


async def attack(port: int, name: str) -> None:
    """Send a request again and again, and print the status of each answer."""
    path, make = ATTACKS[name]
    body = make()
    while True:
        reader, writer = await asyncio.open_connection(HOST, port)
        with contextlib.closing(writer):
            try:
                writer.write(_head(path, len(body)))
                for at in range(0, len(body), 1 << 16):
                    writer.write(body[at : at + (1 << 16)])
                    await writer.drain()
                head = await reader.readline()
                await reader.read()
            except ConnectionError:  # refused before the body was sent
                head = b"closed"
        print(b"".join(head.split()[1:2]).decode() or "closed", flush=True)


def _p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[98]


async def compare(port: int, name: str, tokens: int, rounds: int) -> str:
    """Return the line of the table for one attack, which another process makes."""
    alone, beside, answers = [], [], list[str]()
    command = (sys.executable, __file__, "--port", str(port), "--attack", name)
    for _ in range(rounds):
        alone.append(_p99(await stream(port, tokens)))
        client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert client.stdout is not None
        answers.append((await client.stdout.readline()).decode().strip())  # from now on it asks
        try:
            beside.append(_p99(await stream(port, tokens)))
        finally:
            client.kill()
        answers += (await client.stdout.read()).decode().split()
        await client.wait()
    ratio = statistics.median(b / a for a, b in zip(alone, beside, strict=True))
    counts = ", ".join(f"{answers.count(s)} x {s}" for s in sorted(set(answers))) or "none"
    times = f"{1e3 * statistics.median(alone):9.2f} {1e3 * statistics.median(beside):10.2f}"
    return f"{name:18} {times} {ratio:7.2f}  {counts}"


async def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tokens", type=int, default=200, help="of a stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attack", choices=list(ATTACKS), help="only make this attack")
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    options = parser.parse_args()
    if options.attack is not None:
        await attack(options.port, options.attack)
    print(f"{'attack':18} {'alone ms':>9} {'beside ms':>10} {'ratio':>7}  answers")
    await stream(options.port, options.tokens)
    for name in options.attacks:
        line = await compare(options.port, name, options.tokens, options.rounds)
        print(line, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
