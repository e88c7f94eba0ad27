# SPDX-License-Identifier: Apache-2.0
"""The choice of experts in the graph passes of the compile backend, and as instructions of programs."""

from __future__ import annotations

import pytest
import torch
from compile_checks import DTYPES, fired, fuse, randn, reasons
from torch import nn

import ipex_core
from ipex_core.fusion import reports_of


def mixtral(logits, k):
    weights, ids = torch.topk(torch.softmax(logits, dim=1, dtype=torch.float32), k, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), ids


def qwen(logits, k):
    weights, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(k)
    return weights.to(logits.dtype), ids


def gpt_oss(logits, k):
    values, ids = torch.topk(logits, k, dim=-1)
    return torch.softmax(values, dim=1, dtype=torch.float32), ids


CHOICES = (mixtral, qwen, gpt_oss)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choice", CHOICES)
def test_routing(choice, dtype, mode):
    # As in a model the number of experts is known, and the number of tokens may vary.
    report, gm = fuse(
        lambda x: choice(x @ torch.eye(16, dtype=dtype), 4), randn(9, 16, dtype=dtype), mode=mode
    )
    assert fired(report) == {"routing": 1}, reasons(report)
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.ipex.moe_routing.default)
    assert call.args[1:] == (4, choice is not qwen)


@pytest.mark.parametrize("choice", CHOICES)
def test_ids_as_they_are_read(choice):
    """As int32 nothing converts them; as int64 one conversion does."""

    def narrow(x, table):
        weights, ids = choice(x, 3)
        return weights.sum(1), ids.to(torch.int32)

    def both(x, table):
        weights, ids = choice(x, 3)
        return table[ids] * weights[..., None], ids.to(torch.int32), ids

    for function, conversions in ((narrow, 0), (both, 1)):
        report, gm = fuse(function, randn(5, 8), randn(8, 4))
        assert fired(report) == {"routing": 1}, reasons(report)
        casts = [
            n for n in gm.graph.nodes if n.target is torch.ops.prims.convert_element_type.default
        ]
        assert len(casts) == conversions


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: torch.softmax(x, -1).topk(3, largest=False), None),
        (lambda x: torch.softmax(x, 0).topk(3, 0), None),
        (lambda x: torch.softmax(x, 0).topk(3), None),
        (lambda x: torch.softmax(x[None], -1).topk(3), None),
        (lambda x: x.topk(3), None),
        (lambda x: torch.softmax(x.repeat(1, 65), -1).topk(3), "3 of 520 may be more"),
        (lambda x: torch.softmax(x.repeat(1, 8), -1).topk(33), "33 of 64 may be more"),
        (lambda x: torch.softmax(x.bfloat16(), -1).topk(3), None),
        (lambda x: torch.softmax(x.double(), -1).topk(3), "no kernel for"),
        (lambda x: (lambda p: (p.topk(3), p))(torch.softmax(x, -1)), "another user"),
    ],
)
def test_what_is_left_alone(function, why):
    def run(x):
        result = function(x)
        return (*result[0], result[1]) if isinstance(result[0], tuple) else tuple(result)

    torch.manual_seed(1)
    report, gm = fuse(run, torch.randn(6, 8) * 3)
    assert not fired(report)
    assert (
        len(list(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default))) == 1
    )
    told = reasons(report)
    assert told == "" if why is None else why in told, told


def test_values_that_are_read_twice():
    def function(x):
        weights, ids = torch.softmax(x, -1).topk(3)
        return weights / weights.sum(-1, keepdim=True), weights.amax(-1), ids

    report, gm = fuse(function, randn(6, 8))
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.ipex.moe_routing.default)
    assert fired(report) == {"routing": 1} and call.args[2] is False


class Experts(nn.Module):
    """A mixture of experts as transformers writes its router."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 8, bias=False)
        self.experts = nn.Parameter(torch.randn(8, 32, 32) / 6)

    def forward(self, x):
        weights, ids = mixtral(self.router(x), 2)
        return torch.einsum("ti,tkij->tkj", x, self.experts[ids]).mul(weights[..., None]).sum(1)


def test_inductor_takes_the_ids():
    torch.manual_seed(0)
    model, x = Experts().eval(), torch.randn(7, 32)
    fast = torch.compile(model, backend="ipex", options={"ipex.program": False})
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert sum(report.count("routing") for report in reports_of(fast)) == 1


class Nothing(nn.Module):
    """Chooses no expert at all, which the op refuses."""

    def forward(self, x):
        weights, ids = torch.softmax(x, -1).topk(0)
        return weights + x[:, :1], ids


def test_no_expert_is_chosen():
    x = torch.randn(3, 8)
    for fast in (
        ipex_core.precompile(Nothing().eval(), (x,)),
        torch.compile(Nothing(), backend="ipex"),
    ):
        with torch.no_grad():
            weights, ids = fast(x)
        assert weights.shape == ids.shape == (3, 0) and ids.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_program_has_no_call_of_topk(dtype):
    torch.manual_seed(0)
    model = Experts().eval().to(dtype)
    x = torch.randn(7, 32, dtype=dtype)
    fast = ipex_core.precompile(model, (x,))
    assert "topk" not in str(ipex_core.explain(fast))
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.05}
    )
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), **tolerance)
