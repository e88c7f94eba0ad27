# SPDX-License-Identifier: Apache-2.0
"""The one attribute of a module that holds all that is known of it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from ipex_core.module_swap.state_dict import KEY, ModuleState, record_of, state_of, update
from ipex_core.nn.training_linear import TrainingLinear
from ipex_core.optimization import optimize, parse, restore
from ipex_core.optimization.records import Log, Quantization, log_of, quantization_of


def test_an_empty_record_is_no_attribute():
    module = nn.Linear(2, 2)
    before = set(module.__dict__)
    assert record_of(module).undo is None and set(module.__dict__) == before
    update(module, undo=print, fused={})
    update(module, undo=None)
    assert record_of(module).fused == {} and set(module.__dict__) == {*before, KEY}
    update(module, fused=None)
    assert set(module.__dict__) == before


def test_a_shallow_copy_keeps_its_record():
    module = nn.Linear(2, 2)
    update(module, undo=print)
    other = copy.copy(module)
    update(module, undo=None, packed_later=True)
    assert record_of(other).undo is print and record_of(other).packed_later is None


def test_copies_and_pickles_have_records_of_their_own():
    model = optimize(nn.Sequential(nn.Linear(64, 64)).eval(), dtype=torch.bfloat16)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert log_of(again) == log_of(model) and log_of(again) is not log_of(model)
        assert state_of(again[0]) is not state_of(model[0])
        assert torch.equal(restore(again)[0].weight, restore(copy.deepcopy(model))[0].weight)
        assert not any(name.startswith("_ipex") for m in again.modules() for name in m.__dict__)


def test_restore_leaves_what_was_quantized():
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    update(model, quantization=Quantization(notes=["one"]))
    model = restore(optimize(model, inplace=True))
    assert log_of(model) is None and quantization_of(model).notes == ["one"]


@pytest.mark.parametrize("first", [log_of, quantization_of, state_of])
def test_attributes_of_0_1_become_the_record(first):
    module = nn.Linear(2, 2)
    values = {"state": ModuleState(), "log": Log(parse("O1", None, {}, True)), "undo": print}
    module.__dict__.update({f"_ipex_{name}": value for name, value in values.items()})
    again = pickle.loads(pickle.dumps(module))
    first(again)
    assert [name for name in again.__dict__ if name.startswith("_ipex")] == [KEY]
    assert isinstance(state_of(again), ModuleState) and log_of(again) == values["log"]
    assert record_of(again).undo is print


def test_a_layer_of_0_1_goes_on_measuring():
    layer = TrainingLinear(2, 2)
    layer.__dict__["_ipex_measure"] = True
    again = pickle.loads(pickle.dumps(layer))
    assert again._measures and "_ipex_measure" not in again.__dict__
    assert not pickle.loads(pickle.dumps(TrainingLinear(2, 2)))._measures
