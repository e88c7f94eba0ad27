# SPDX-License-Identifier: Apache-2.0
"""Files in the format of the Criteo display advertising data sets.

A line is a label (0 or 1), 13 integers and 26 categories of 8 hexadecimal digits, separated by tabs; a field may be
empty. Files may be compressed (.gz).
"""

from __future__ import annotations

import gzip
import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import torch

INTEGERS, CATEGORIES = 13, 26


class Batch(NamedTuple):
    """Samples of a file.

    Attributes:
        labels: ``[B]``, float32.
        dense: ``[B, 13]``, float32: ``log(1 + x)``; 0 for an empty field or a negative number.
        rows: ``[26, B]``, int64: the row of each table; row 0 is that of an empty field.
    """

    labels: torch.Tensor
    dense: torch.Tensor
    rows: torch.Tensor


def parse(lines: list[str], rows: int, first: int = 1) -> Batch:
    """Return the samples of some lines.

    Args:
        lines: Lines of a file.
        rows: Rows of each table; categories are taken modulo ``rows - 1``.
        first: Number of the first line, for messages.

    Raises:
        ValueError: A line has another number of fields, or a field is no number.
    """
    labels, dense, categories = [], [], []
    for number, line in enumerate(lines, first):
        fields = line.rstrip("\r\n").split("\t")
        if len(fields) != 1 + INTEGERS + CATEGORIES:
            raise ValueError(
                f"line {number}: must have {1 + INTEGERS + CATEGORIES} fields separated by tabs, got {len(fields)}"
            )
        try:
            labels.append(float(int(fields[0])))
            dense.append(
                [math.log1p(max(int(x), 0)) if x else 0.0 for x in fields[1 : 1 + INTEGERS]]
            )
            categories.append(
                [1 + int(x, 16) % (rows - 1) if x else 0 for x in fields[1 + INTEGERS :]]
            )
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return Batch(torch.tensor(labels), torch.tensor(dense), torch.tensor(categories).T.contiguous())


def batches(path: Path, size: int, rows: int, start: int = 0) -> Iterator[Batch]:
    """Yield full batches, from batch ``start`` on; after the end of the file from its beginning again.

    Args:
        path: File.
        size: Samples in a batch.
        rows: Rows of each table.
        start: Batches to skip.

    Raises:
        ValueError: The file has fewer lines than a batch, or a line is wrong.
    """
    skip = start * size
    while True:
        count = 0
        with _open(path) as file:
            while lines := list(itertools.islice(file, size)):
                if len(lines) < size:
                    break  # the rest of an epoch
                count += size
                if skip:
                    skip -= size
                    continue
                yield parse(lines, rows, count - size + 1)
        if count == 0:
            raise ValueError(f"{path}: must have at least {size} lines, the size of a batch")


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="ascii")
    return path.open(encoding="ascii")


def generate(path: Path, lines: int, seed: int = 0) -> None:
    """Write a file in which some integers and categories tell something about the label.

    Args:
        path: File to write.
        lines: Its number of lines.
        seed: The same seed gives the same file.
    """
    chance = random.Random(seed)
    values = [[chance.getrandbits(32) for _ in range(4 + 3 * i)] for i in range(CATEGORIES)]
    merits = [[chance.gauss(0, 1) for _ in column] for column in values]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="ascii", newline="\n") as file:
        for _ in range(lines):
            integers = [int(chance.lognormvariate(1, 1)) for _ in range(INTEGERS)]
            # A few categories are frequent, as in real data.
            picks = [int(len(column) * chance.random() ** 2) for column in values]
            score = sum(merits[i][pick] for i, pick in enumerate(picks[:8]))
            score += math.log1p(integers[0]) - math.log1p(integers[1]) - 1
            label = int(chance.random() < 1 / (1 + math.exp(-score)))
            fields = [str(label)]
            fields += ["" if chance.random() < 0.1 else str(x) for x in integers]
            fields += [
                "" if chance.random() < 0.05 else f"{values[i][pick]:08x}"
                for i, pick in enumerate(picks)
            ]
            file.write("\t".join(fields) + "\n")
