# SPDX-License-Identifier: Apache-2.0
"""What structured output costs a token of `ipex llm serve`.

    ipex llm serve --model ./model --port 8000
    python packages/ipex-llm/benchmarks/structured.py --port 8000 --streams 1 8

Streams of free text and of JSON that a schema demands take turns. The table has the medians of the time between two
events of a stream, and the median of their ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

from neighbors import stream

#: A text so long that `max_tokens` ends it, and fields before it.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["a", "b", "c"]},
        "text": {"type": "string", "minLength": 4000},
    },
    "required": ["name", "kind", "text"],
    "additionalProperties": False,
}


async def interval(port: int, tokens: int, streams: int, **fields: Any) -> float:
    """Return the median of the seconds between two events, of streams at the same time."""
    found = await asyncio.gather(*(stream(port, tokens, **fields) for _ in range(streams)))
    return statistics.median(seconds for times in found for seconds in times)


async def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tokens", type=int, default=64, help="of a stream")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    wanted = {"structured_outputs": {"json": SCHEMA}}
    print("streams   free ms   JSON ms   ratio")
    for streams in options.streams:
        free, bound = [], []
        for turn in range(-1, options.rounds):
            pair = [
                await interval(options.port, options.tokens, streams, **fields)
                for fields in ({}, wanted)
            ]
            if turn >= 0:  # the first round compiles the schema
                free.append(pair[0])
                bound.append(pair[1])
        ratio = statistics.median(b / a for a, b in zip(free, bound, strict=True))
        times = f"{1e3 * statistics.median(free):9.2f} {1e3 * statistics.median(bound):9.2f}"
        print(f"{streams:7} {times} {ratio:7.3f}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
