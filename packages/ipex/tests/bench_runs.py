# SPDX-License-Identifier: Apache-2.0
"""What the tests of `ipex bench` on several engines have in common."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from typer.testing import CliRunner

from ipex_bench import shapes
from ipex_bench.commands import bench
from ipex_bench.result import Row
from ipex_bench.task import Task


def task_in(folder: Path, kind: str, name: str, dtype: str = "float32") -> Task:
    label, shape = shapes.cases(kind, name, "tiny")[0]
    shape = {k: v for k, v in shape.items() if k not in {"weights", "texts"}}
    task = Task(kind, name, label, shape, dtype, 1, str(folder))
    task.write()
    return task


def run(*arguments: object) -> object:
    return CliRunner().invoke(bench.app, [str(a) for a in arguments])


def row(**changes: object) -> Row:
    base = Row(
        "a", "ipex_eager", "bfloat16", 1.0, 2.0, 1.9, 2.1, 7, 50.0, "memory", 9, 9, 1.0, 1.0, 1
    )
    return dataclasses.replace(base, **changes)
