# SPDX-License-Identifier: Apache-2.0
"""Plans whose calls of an op of another library become instructions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ipex_core.compile_backend import ipex_backend
from ipex_core.precompiled.lower import Call, Slot
from ipex_core.precompiled.whole import RUNNERS, NotWholeError, WholePlan

NAME = "ipex_test_whole::scale.default"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("shift", torch.randn(16))

    def forward(self, x):
        y = torch.ops.ipex_test_whole.scale(self.up(x), 3.0).view(x.shape[0], 4, 8)
        y = torch.ops.ipex_test_whole.scale(y.relu().reshape(-1, 32), 0.5)
        return self.down(y) + self.shift, y.sum(0), x.shape[0], None


@pytest.fixture
def calls():
    """Define the op; the values it was called with."""
    found = []
    library = torch.library.Library("ipex_test_whole", "FRAGMENT")
    library.define("scale(Tensor x, float factor) -> Tensor")

    def run(x, factor):
        found.append(factor)
        return x * factor

    library.impl("scale", run, "CPU")
    library.impl("scale", lambda x, factor: torch.empty_like(x), "Meta")
    yield found
    library._destroy()
    RUNNERS.pop(NAME, None)


class Whole:
    """Runs a plan as one program, with the op as an instruction."""

    def __init__(self, plan):
        self.plan, self.runs, self.off = plan, 0, False
        self.whole = WholePlan(plan)
        self.program = self.whole.write(self.call)

    def call(self, step: Call):
        if step.name != NAME:
            raise NotWholeError(f"{step.name} has no instructions")
        x, factor = step.args
        return [self.whole.builder.call("mul", self.whole.tensor(x), factor)]

    def __call__(self, tensors, numbers):
        if self.off:
            return None
        self.runs += 1
        given = [
            tensors[self.plan.inputs.index(one.index)]
            if isinstance(one, Slot)
            else numbers[one.index]
            for one in self.whole.given
        ]
        return self.whole.results(self.program.run(*given), numbers)


def compiled(model):
    return torch.compile(
        model, backend=ipex_backend, options={"ipex.program": True}, dynamic=True, fullgraph=True
    )


def test_a_plan_runs_as_one_program(calls):
    made = []
    RUNNERS[NAME] = lambda plan: made.append(Whole(plan)) or made[0]
    torch.manual_seed(0)
    # In 16 bit no linear layer is left to MKL.
    model = Model().eval().requires_grad_(False).bfloat16()
    fast = compiled(model)
    for rows in (5, 3, 8):
        x = torch.randn(rows, 16).bfloat16()
        wanted = model(x)
        calls.clear()
        result = fast(x)
        torch.testing.assert_close(result[:2], wanted[:2], rtol=0.05, atol=0.05)
        assert result[2:] == wanted[2:] == (rows, None)
    assert calls == [] and made[0].runs >= 2
    made[0].off = True  # the plan runs, which calls the op
    torch.testing.assert_close(fast(x)[0], result[0], rtol=0, atol=0)
    assert calls == [3.0, 0.5]


def test_what_is_not_whole_says_why(calls):
    found = []

    def make(plan):
        whole = WholePlan(plan)
        with pytest.raises(NotWholeError, match="got none in slot"):
            whole.write(lambda step: [None])  # the next program reads it
        found.append(plan)
        return lambda tensors, numbers: None

    RUNNERS[NAME] = make
    model = Model().eval().requires_grad_(False).bfloat16()
    x = torch.randn(5, 16).bfloat16()
    result = compiled(model)(x)
    assert len(found) == 1 and 3.0 in calls
    torch.testing.assert_close(result[0], model(x)[0], rtol=0.05, atol=0.05)


def test_plans_of_other_ops_have_no_runner():
    RUNNERS[NAME] = lambda plan: pytest.fail("the plan has no such op")
    try:
        model = nn.Linear(8, 8).eval().requires_grad_(False)
        x = torch.randn(3, 8)
        torch.testing.assert_close(compiled(model)(x), model(x), rtol=1e-4, atol=1e-5)
    finally:
        RUNNERS.pop(NAME)
