# SPDX-License-Identifier: Apache-2.0
"""The code on a page of the documentation: its blocks in the order in which a reader runs them."""

from __future__ import annotations

import doctest
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: An opening fence with its language (a directive of Sphinx in braces), the text, and the closing fence.
FENCED = re.compile(r"^```(\w+|\{\w+\})\n(.*?)^```", re.DOTALL | re.MULTILINE)

#: Languages of commands.
SHELLS = ("bash", "console", "sh")


@dataclass(frozen=True)
class Block:
    """One block: its language, its text, and the line of the page at which the text begins."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page; of a doctest, the statements without prompts and output."""
    source = page.read_text(encoding="utf-8")
    for found in FENCED.finditer(source):
        language, text = found[1], found[2]
        line = source.count("\n", 0, found.start(2)) + 1
        if language == "{doctest}":
            for example in doctest.DocTestParser().get_examples(text):
                if doctest.SKIP not in example.options and example.exc_msg is None:
                    yield Block("python", example.source, line + example.lineno)
        else:
            yield Block(language, text, line)


#: The first line of a block that is a file: its name in a comment.
NAMED = re.compile(r"(?:#|//) ([\w.]+\.\w+)\n")

#: Why commands are not run with the page -> what they begin with.
ELSEWHERE = {
    "nox -s slim installs each package and each extra": ("pip install",),
    "the sessions themselves; test_readme.py checks that they exist": (
        *("nox ", "SKBUILD_CMAKE_DEFINE=", "PIP_EXTRA_INDEX_URL=", "export PIP_FIND_LINKS="),
    ),
    "needs another index": ("python3.11 -m venv", "ipex28/"),
    "takes minutes: tests of the command; its options are checked by test_docs_code.py": (
        *("ipex bench", "ipex demo", "ipex llm bench"),
    ),
    "does not end: tests of the server": ("ipex llm serve", "curl "),
    "needs a server that runs; the session clients has guidellm": (
        *("guidellm run", "python packages/ipex-llm/benchmarks/neighbors.py"),
    ),
    "needs vLLM: the session vllm": (
        "VLLM_PLUGINS=",
        "vllm serve",
        "python -m venv served",
        "python tools/vllm_",
    ),
    "test_examples.py runs all of them at small sizes": (
        *("cd examples/training", "python dlrm.py", "python bert.py", "python detection.py"),
        "torchrun --nproc-per-node 2 distributed.py",
    ),
    "test_codeless.py": ("ipex auto", "python -m ipex_runtime.codeless"),
    "test_tutorials.py": ("python -m intel_extension_for_pytorch.", "python docs/tutorials/"),
}


def files(page: Path) -> dict[str, str]:
    """Return the files that a page shows, by name; parts of one name are joined."""
    found: dict[str, str] = {}
    for block in blocks(page):
        name = NAMED.match(block.text)
        if name is not None:
            found[name[1]] = found.get(name[1], "") + block.text
    return found


def commands(block: Block) -> str:
    """Return the script of a block of commands without those that are run elsewhere."""
    lines = [line.removeprefix("$ ") for line in block.text.replace("\\\n", " ").splitlines()]
    elsewhere = tuple(itertools.chain.from_iterable(ELSEWHERE.values()))
    return "\n".join(line for line in lines if not line.startswith(elsewhere))
