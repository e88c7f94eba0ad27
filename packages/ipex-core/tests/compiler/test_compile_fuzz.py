# SPDX-License-Identifier: Apache-2.0
"""Random programs around the patterns of the compile passes give the results of eager execution.

The graphs are like those that AOTAutograd hands to Inductor: functional and decomposed, with the writes to inputs at
their end. The passes run on them, and then the graphs as they are, without Inductor's code generation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compile_draw import Draw, Run, assert_same
from compile_programs import FAMILIES
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_core.fusion import GraphReport
from ipex_core.fusion.aten.passes import run_passes


def check(family: str, seed: int) -> GraphReport:
    """Run one program eagerly and as a graph that the passes have been through, and compare results and inputs."""
    draw = Draw(seed)
    program = FAMILIES[family](draw)
    write = draw.mostly(None, *range(len(draw.inputs)), chance=0.9)
    report = GraphReport(f"{family} {seed}", inference=True)

    def function(*inputs: Tensor) -> Any:
        run = Run(draw.events, inputs)
        result = program(run)
        if write is not None and write not in draw.constants and not _overlaps(inputs[write]):
            inputs[write].mul_(0.5)
            run.extra.append(inputs[write])
        results = result if isinstance(result, tuple) else (result,)
        return (*results, *run.extra)

    eager, ours, traced = ([make() for make in draw.inputs] for _ in range(3))
    mode = "symbolic" if draw.flag(0.04) else "fake"
    with torch.no_grad():
        try:
            expected = function(*eager)
        except (RuntimeError, IndexError):
            return report  # the operands do not fit each other
        functional = torch.func.functionalize(function, remove="mutations")
        gm = make_fx(functional, select_decomp_table(), tracing_mode=mode)(*traced)
        remove_noop_ops(gm.graph)
        places = gm.graph.find_nodes(op="placeholder")
        constants = [places[i] for i in draw.constants]
        run_passes(gm.graph, report, constants, always=True, kernels=lambda op: True)
        gm.graph.lint()
        gm.recompile()
        got = gm(*ours)
    assert len(got) == len(expected)
    assert_same(draw, (*got, *ours), (*expected, *eager), report)
    return report


def _overlaps(x: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_random_programs(family: str) -> None:
    """60 programs of each family, 300 in all; and the patterns do fire in a good part of them."""
    reports = [check(family, seed) for seed in range(60)]
    assert sum(bool(r.count()) for r in reports) >= 15
    assert sum(bool(r.count(fired=False)) for r in reports) >= 3
