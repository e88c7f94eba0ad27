# SPDX-License-Identifier: Apache-2.0
"""Regular expressions that a checkpoint brings, searched only where a search must end soon.

Python's `re` tries all ways to match, which are exponentially many for ``(a+)+b``. A checkpoint could stop a program
with that. The ways are counted before: patterns of the known quantizers have a few repeats and no repeated groups.
"""

from __future__ import annotations

import math
import re

from ipex_core.errors import OpArgumentError

#: Ways to try at most, about a tenth of a second.
_MOST = 5_000_000
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_CLASS = re.compile(r"\[\^?\]?[^\]]*\]")
#: What follows the parenthesis of a group that is more than that.
_KIND = re.compile(r"\(\?(?:P?<\w+>|<?[=!]|[:>]|[aiLmsux-]+:?)")
_LAZY = re.compile(r"([*+?}])[?+]")
_COUNT = re.compile(r"\{\d*,?\d*\}")


def match(op: str, pattern: str, name: str, whole: bool = False) -> bool:
    """Return whether a pattern matches the beginning of a name.

    Args:
        op: Name of the function in messages.
        pattern: A regular expression of `re`.
        name: Name of a layer.
        whole: Whether it must match to the end.

    Raises:
        re.error: It is no regular expression.
        OpArgumentError: Matching could take long.
    """
    compiled = re.compile(pattern)
    if _ways(pattern, name) > _MOST:
        raise OpArgumentError(
            f"{op}: quant_config must have patterns without repeated groups and with few repeats, got {pattern!r} for"
            f" a name of {len(name)} characters; write out what the group repeats"
        )
    return (compiled.fullmatch if whole else compiled.match)(name) is not None


def _ways(pattern: str, name: str) -> float:
    """Return how many ways a search may try at most."""
    plain = _ESCAPE.sub(lambda m: "1" if m[1] == "d" else "x", pattern)
    plain = _LAZY.sub(r"\1", _KIND.sub("(", _CLASS.sub("x", plain)))
    plain = _COUNT.sub(lambda m: "*" if "," in m[0] else "=", plain)
    if re.search(r"\)[*+=]", plain):
        return math.inf
    digits, repeats = len(re.findall(r"1[*+]", plain)), len(re.findall(r"[^1][*+]", plain))
    # What repeats digits ends with a run of them, and a layer's number is short.
    run = max(map(len, re.findall(r"\d+", name)), default=0)
    ways = float(min(math.comb(len(name) + repeats, repeats), _MOST + 1))
    ways *= min(math.comb(run + digits, digits), _MOST + 1)
    ways *= 2.0 ** min(plain.count("?"), 100)
    depth = [1]  # alternatives of each group that is open
    for char in plain:
        if char == "(":
            depth.append(1)
        elif char == "|":
            depth[-1] += 1
        elif char == ")" and len(depth) > 1:
            ways *= depth.pop()
    return ways * depth[0]
