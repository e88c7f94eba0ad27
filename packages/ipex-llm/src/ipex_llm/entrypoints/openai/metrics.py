# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms in the text format of Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_HISTOGRAMS = {
    "time_to_first_token_seconds": "Seconds from the arrival of a request to its first token.",
    "time_per_output_token_seconds": "Seconds between two tokens of a request.",
    "request_seconds": "Seconds from the arrival of a request to its end.",
}


class _Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """What ``/metrics`` shows besides the numbers of the engine. Can be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._histograms = {name: _Histogram(_SECONDS) for name in _HISTOGRAMS}
        self._responses: dict[tuple[str, int], int] = {}

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        with self._lock:
            self._histograms[name].add(value)

    def response(self, path: str, status: int) -> None:
        """Count a response."""
        with self._lock:
            self._responses[path, status] = self._responses.get((path, status), 0) + 1

    def text(
        self, gauges: Mapping[str, tuple[str, float]], counters: Mapping[str, tuple[str, float]]
    ) -> str:
        """Return everything as text.

        Args:
            gauges: name -> (help, value).
            counters: Likewise.
        """
        lines: list[str] = []

        def head(name: str, kind: str, text: str) -> str:
            lines.append(f"# HELP ipex_llm_{name} {text}")
            lines.append(f"# TYPE ipex_llm_{name} {kind}")
            return f"ipex_llm_{name}"

        for kind, values in (("gauge", gauges), ("counter", counters)):
            for name, (text, value) in values.items():
                lines.append(f"{head(name, kind, text)} {value:g}")
        with self._lock:
            full = head("http_responses_total", "counter", "Responses by path and status.")
            for (path, status), count in sorted(self._responses.items()):
                lines.append(f'{full}{{path="{path}",status="{status}"}} {count}')
            for name, histogram in self._histograms.items():
                full = head(name, "histogram", _HISTOGRAMS[name])
                count = 0
                for bound, more in zip(histogram.bounds, histogram.counts, strict=False):
                    count += more
                    lines.append(f'{full}_bucket{{le="{bound:g}"}} {count}')
                count += histogram.counts[-1]
                lines.append(f'{full}_bucket{{le="+Inf"}} {count}')
                lines.append(f"{full}_sum {histogram.total:g}")
                lines.append(f"{full}_count {count}")
        return "\n".join(lines) + "\n"
