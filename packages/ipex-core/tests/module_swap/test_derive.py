# SPDX-License-Identifier: Apache-2.0
"""A mixin in front of an object's class: what stays, copies, pickles, and the way back."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from ipex_core.module_swap import base as derive
from ipex_core.nn.training_linear import TrainingLinear


class Doubled(nn.Module):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


class Counted:
    def __getattr__(self, name):
        if name == "count":
            return len(self.param_groups)
        return super().__getattr__(name)


CASES = {
    "module": (lambda: nn.Linear(3, 2), Doubled),
    "optimizer": (lambda: torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), Counted),
}


@pytest.mark.parametrize("case", CASES)
def test_the_object_stays_the_same(case):
    make, mixin = CASES[case]
    value = make()
    kind = type(value)
    derive.swap(value, mixin)
    assert isinstance(value, kind) and isinstance(value, mixin)
    assert type(value).__name__ == kind.__name__ and type(value).__module__ == kind.__module__
    assert derive.original_class(value) is kind
    derive.swap(value, mixin)  # not twice in front of itself
    assert type(value) is derive.derive(kind, mixin)
    for again in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(again) is type(value) and again is not value
    derive.restore_class(value)
    assert type(value) is kind


def test_forward_has_the_signature_of_the_original():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    expected = layer(x)
    names = list(inspect.signature(layer.forward).parameters)
    derive.swap(layer, Doubled)
    torch.testing.assert_close(layer(x), 2 * expected)
    assert list(inspect.signature(layer.forward).parameters) == names
    with derive.as_original(layer):
        torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x), 2 * expected)


def test_as_original_gives_the_class_back_after_an_error():
    layer = nn.Linear(3, 2)
    derive.swap(layer, Doubled)
    with pytest.raises(RuntimeError), derive.as_original(layer):
        raise RuntimeError("on the way")
    assert isinstance(layer, Doubled)


def test_another_mixin_takes_the_place_of_the_first():
    layer = nn.Linear(3, 2)
    derive.swap(layer, Doubled)
    derive.swap(layer, nn.Identity)
    assert not isinstance(layer, Doubled) and derive.original_class(layer) is nn.Linear


def test_the_original_of_a_class_that_derives_from_a_derived_one():
    layer = nn.Linear(3, 2)
    derive.swap(layer, Doubled)
    derive.set_class(layer, type("Wrapped", (type(layer),), {}))
    assert derive.original_class(layer) is nn.Linear


def test_threads_that_derive_at_once_get_one_class():
    class Kind(nn.Module):
        pass

    def content():
        other.append(derive.derive(Kind, nn.Identity))  # another thread was faster
        return {}

    other = []
    assert derive.derive(Kind, nn.Identity, content) is other[0]


def test_a_class_of_ours_for_its_own():
    layer = nn.Linear(3, 2)
    derive.set_class(layer, TrainingLinear)
    assert type(layer) is TrainingLinear and derive.original_class(layer) is TrainingLinear
    derive.set_class(layer, nn.Linear)
    assert type(layer) is nn.Linear
