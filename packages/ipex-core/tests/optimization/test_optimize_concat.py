# SPDX-License-Identifier: Apache-2.0
"""Linear layers that read the same input, computed as one."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from ipex_core.diagnostics.explain import explain
from ipex_core.kernels.policy import has_kernel
from ipex_core.optimization import optimize, restore
from ipex_core.optimization.passes import prepack

pytestmark = pytest.mark.usefixtures("small_weights_are_packed")


class Untraceable(nn.Module):
    def __init__(self, share=True):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(96, n, bias=n != 96) for n in (128, 96, 64))

    def forward(self, states, mask=None, **kwargs):
        shape = (*states.shape[:-1], -1, 32)
        query = self.query(states).view(*shape)
        key = self.key(states).view(*shape)
        value = self.value(states).view(*shape)
        if mask is not None:
            key = key + mask
        return torch.cat([query, key, value], -2)


class Flat(Untraceable):
    def forward(self, states):
        size = len([*states])
        return torch.cat([self.query(states).view(-1), self.key(states).view(-1)]) * size


class Changes(Untraceable):
    def forward(self, states, flag=True):
        a = self.query(states)
        states = states * len([*states])
        b = self.key(states)
        states.add_(1)
        return torch.cat([a, b, self.value(states)], -1)


def concat(model):
    return [r.text for r in explain(model).rows if r.step == "concat_linear" and r.done]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("form", ["mkldnn", "ipex"])
def test_concat_of_an_untraceable_forward(dtype, form, monkeypatch):
    if form == "ipex" and not has_kernel("linear"):
        pytest.skip("no kernel for linear")
    if form == "mkldnn" and dtype is not None and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    monkeypatch.setattr(prepack, "choose_linear", lambda *_: prepack.LinearChoice(form, ""))
    model = Untraceable().eval()
    x = torch.randn(2, 5, 96)
    result = optimize(model, dtype=dtype, concat_linear=True)
    assert concat(result) == ["query, key, value computed as one layer"]
    group = result.query._merged
    close = 1e-4 if dtype is None else 5e-2
    calls = (((x,), {}), ((x, torch.ones(1)), {}), ((x,), {"mask": None, "other": 1}))
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            for args, kwargs in calls:
                got, want = result(*args, **kwargs).float(), model(*args, **kwargs)
                torch.testing.assert_close(got, want, rtol=close, atol=close)
            got, want = result.key(x).float(), model.key(x)
            torch.testing.assert_close(got, want, rtol=close, atol=close)
    for name, value in model.state_dict().items():
        assert torch.equal(result.state_dict()[name], value)
    with torch.no_grad():
        want = result(x)
        wide = group.wide
        result.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        assert not torch.equal(result(x), want) and group.wide is not wide
        result.load_state_dict(model.state_dict())
        assert torch.equal(result(x), want)
        for twin in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
            assert torch.equal(twin(x), want)
            assert twin.query._merged is not group and twin.query._merged.wide is not None
        torch._dynamo.reset()
        assert torch.equal(torch.compile(result, backend="eager", fullgraph=True)(x), want)
        restore(result)
        assert torch.equal(result(x), model(x)) and "_merged" not in result.query.__dict__


def test_concat_when_views_do_not_fit_or_the_input_changes():
    for kind in (Flat, Changes):
        model = kind().eval()
        result = optimize(model, concat_linear=True)
        assert bool(concat(result)) == (kind is Flat)
        x = torch.randn(4, 96)
        with torch.no_grad():
            torch.testing.assert_close(result(x), model(x), rtol=1e-4, atol=1e-4)
