# SPDX-License-Identifier: Apache-2.0
"""`ipex.precompile`: what is checked at a call, and what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ipex_core import precompile
from ipex_core.errors import ExportError, StaleWeightsError

# --- inputs that are refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (torch.ones(3, 8), ValueError, r"of shape \[2, 8\], got \[3, 8\]"),
        (torch.ones(2, 8, 1), ValueError, r"of shape \[2, 8\], got \[2, 8, 1\]"),
        (torch.ones(0, 8), ValueError, r"of shape \[2, 8\], got \[0, 8\]"),
        (torch.ones(2, 8).double(), ValueError, "of dtype float32, got float64"),
        (torch.ones(2, 8, device="meta"), ValueError, "a dense tensor on the CPU, got .* on meta"),
        (
            torch.ones(2, 8).to_sparse(),
            ValueError,
            "a dense tensor on the CPU, got torch.sparse_coo",
        ),
        (torch.ones(2, 8, requires_grad=True), ValueError, "without gradient"),
        ([[1.0] * 8] * 2, TypeError, "a torch.Tensor, got list"),
        (None, TypeError, "a torch.Tensor, got NoneType"),
    ],
)
def test_inputs_that_differ_from_the_example_are_refused(given: Any, error: Any, text: str) -> None:
    fast = precompile(nn.Linear(8, 4).eval(), torch.ones(2, 8))
    with pytest.raises(error, match=text):
        fast(given)
    with pytest.raises(TypeError, match="must have the form of the example"):
        fast(torch.ones(2, 8), torch.ones(2, 8))


def test_no_gradient_is_computed() -> None:
    fast = precompile(nn.Linear(8, 4).eval(), torch.ones(2, 8))
    assert not fast(torch.ones(2, 8)).requires_grad
    with torch.no_grad():
        fast(torch.ones(2, 8, requires_grad=True))


# --- weights that change ----------------------------------------------------------------------------------------------


def _replaced(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.ones(4, 8))


def _in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)


def _data(model: nn.Module) -> None:
    model[0].weight.data = torch.ones(4, 8)


def _state(model: nn.Module) -> None:
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})


def _buffer(model: nn.Module) -> None:
    model[1].running_mean.add_(1)


def _buffer_replaced(model: nn.Module) -> None:
    model[1].running_var = torch.ones(4)


@pytest.mark.parametrize("change", [_replaced, _in_place, _data, _state, _buffer, _buffer_replaced])
def test_weights_that_change_are_refused(change: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).eval()
    fast = precompile(model, torch.ones(2, 8))
    fast(torch.ones(2, 8))
    change(model)
    with pytest.raises(
        StaleWeightsError, match=r"Sequential: the weights .*, got a change of [01]\."
    ):
        fast(torch.ones(2, 8))
    torch.testing.assert_close(
        precompile(model, torch.ones(2, 8))(torch.ones(2, 8)), model(torch.ones(2, 8)).detach()
    )


def test_the_model_is_not_kept() -> None:
    model = nn.Linear(8, 4).eval()
    fast = precompile(model, torch.ones(2, 8))
    want = model(torch.ones(2, 8)).detach()
    gone = weakref.ref(model)
    weight = weakref.ref(model.weight)
    del model
    gc.collect()
    assert gone() is None
    assert weight() is None
    torch.testing.assert_close(fast(torch.ones(2, 8)), want)


# --- models that are refused ------------------------------------------------------------------------------------------


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.count


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1) * 2


class Found(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class Cached(nn.Module):
    """Returns an object, as models of transformers do their cache."""

    class Cache:
        pass

    def forward(self, x: Tensor) -> tuple[Tensor, Cache]:
        return x, self.Cache()


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Branch(), "torch.export cannot record the model"),
        (Cached(), "outputs must be tensors in tuples, lists and dicts .*use_cache=False"),
        (Counter(), "must not write to its buffers, got a write to 'count'"),
        (Writes(), "must not write to its inputs, got a write to 'x'"),
        (Found(), "must not depend on values of its tensors"),
    ],
)
def test_models_that_cannot_be_programs_are_refused(model: nn.Module, text: str) -> None:
    with pytest.raises(ExportError, match=f"^precompile: .*{text}"):
        precompile(model.eval(), torch.ones(3))


def test_modes_hooks_and_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="precompile: model must be in evaluation mode"):
        precompile(nn.Dropout(), torch.ones(3))
    with pytest.raises(
        TypeError, match=r"precompile: model must be a torch\.nn\.Module, got function"
    ):
        precompile(lambda x: x, torch.ones(3))
    with pytest.raises(TypeError, match="precompile: example_inputs must be a tensor, a sequence"):
        precompile(nn.ReLU().eval(), 3)
    with pytest.raises(ValueError, match="precompile: example_inputs must fit the forward"):
        precompile(nn.ReLU().eval(), (torch.ones(3), torch.ones(3)))
    with pytest.raises(
        ValueError, match="precompile: example_inputs must be accepted by the model"
    ):
        precompile(nn.Linear(4, 4).eval(), torch.ones(3))
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    model[0].register_forward_hook(lambda module, args, output: print(output))
    with pytest.raises(ValueError, match="must have no forward hooks, got one on '0'"):
        precompile(model, torch.ones(2, 4))
