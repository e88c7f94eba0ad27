# SPDX-License-Identifier: Apache-2.0
"""Random programs around the patterns of the passes give the results of eager execution as programs, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compile_draw import Draw, Run, assert_same
from compile_programs import FAMILIES
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_core.fusion import GraphReport
from ipex_core.fusion.aten import linear
from ipex_core.precompiled.graph import decompositions, forms_of, fuse, hold
from ipex_core.precompiled.lower import Plan, lower
from ipex_core.precompiled.run import first_values, run_plan, with_packed_linears


def check(family: str, seed: int) -> Plan | None:
    """Run one program eagerly and as a plan, and compare the results."""
    draw = Draw(seed)
    program = FAMILIES[family](draw)

    def function(*inputs: Tensor) -> Any:
        run = Run(draw.events, inputs)
        result = program(run)
        return (*(result if isinstance(result, tuple) else (result,)), *run.extra)

    eager, ours, traced = ([make() for make in draw.inputs] for _ in range(3))
    with torch.no_grad():
        try:
            expected = function(*eager)
        except (RuntimeError, IndexError):
            return None  # the operands do not fit each other
        functional = torch.func.functionalize(function, remove="mutations")
        gm = make_fx(functional, decompositions(), tracing_mode="fake")(*traced)
        forms = forms_of(gm.graph)
        for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            if place in draw.constants:
                hold(gm, node, ours[place])
        given = [x for place, x in enumerate(ours) if place not in draw.constants]
        fuse(gm, GraphReport(f"{family} {seed}", inference=True, frozen=True), always=True)
        plan = lower(gm, forms)
        ready = with_packed_linears(plan)
        for _ in range(2):  # what a run leaves behind must not change the next
            got = run_plan(ready, first_values(plan), given, ())
    assert_same(draw, (*got, *ours), (*expected, *eager), f"{family} {seed}")
    return plan


@pytest.mark.parametrize("family", FAMILIES)
def test_random_programs(family: str) -> None:
    plans = [plan for plan in (check(family, seed) for seed in range(25)) if plan is not None]
    assert len(plans) > 15
    # Programs in float64 go through torch.
    assert sum(plan.instructions > sum(plan.calls.values()) for plan in plans) > len(plans) / 2


@pytest.mark.parametrize("family", ["layers", "gated"])
def test_random_programs_with_layers_of_torch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "measured_step", lambda layer: "measured: a and b")
    plans = [plan for plan in (check(family, seed) for seed in range(25)) if plan is not None]
    assert sum(plan.linears > 0 for plan in plans) > 5
