# SPDX-License-Identifier: Apache-2.0
"""Streams: splitting, joining, errors, shared weights. With one CPU, several streams share it."""

from __future__ import annotations

import collections
import concurrent.futures
import copy
import pickle
import threading

import pytest
import torch

from ipex_runtime import CPUPool, MultiStreamModule, MultiStreamModuleHint, Task
from ipex_runtime.cpupool import process_cpus
from ipex_runtime.multi_stream import MultiStreamBenchmarkModule, get_default_num_streams

pytestmark = pytest.mark.usefixtures("no_gradients")

FIRST = process_cpus()[0]
MODEL = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).eval()
Pair = collections.namedtuple("Pair", "first second")


def pool(threads: int) -> CPUPool:
    """Return a pool of several threads, on one CPU if there is no other."""
    found = CPUPool([FIRST])
    found.places = ((FIRST,),) * threads
    return found


def streams(model, count: int, **kwargs) -> MultiStreamModule:
    return MultiStreamModule(model, count, pool(count), **kwargs)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("batch", [0, 1, 2, 5, 7])
def test_results_are_those_of_the_model(count, batch):
    x = torch.randn(batch, 8)
    torch.testing.assert_close(streams(MODEL, count)(x), MODEL(x))
    parts = streams(MODEL, count, concat_output=False)(x)
    assert isinstance(parts, list)
    assert len(parts) == max(1, min(count, batch))
    torch.testing.assert_close(torch.cat(parts), MODEL(x))


def test_kinds_of_models():
    x = torch.randn(4, 8)
    traced = torch.jit.freeze(torch.jit.trace(MODEL, x))
    compiled = torch.compile(MODEL, backend="eager", dynamic=True)
    for model in (traced, compiled, torch.jit.script(MODEL)):
        torch.testing.assert_close(streams(model, 2)(x), MODEL(x))


def test_parts_are_even_and_in_order():
    parts = streams(lambda x: x, 3, concat_output=False)(torch.arange(8))
    assert [p.tolist() for p in parts] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_number_of_streams():
    assert streams(MODEL, 3).get_stream_number() == 3
    three = pool(3)
    assert get_default_num_streams(three) == 3
    assert MultiStreamModule(MODEL, cpu_pool=three).get_stream_number() == 3
    assert MultiStreamModule(MODEL).get_stream_number() == CPUPool().num_threads
    with pytest.warns(UserWarning, match="num_streams is 5, more than the 3 thread"):
        assert MultiStreamModule(MODEL, 5, three).get_stream_number() == 3
    workers = MultiStreamModule(MODEL, 2, three)._workers
    assert [w.pool.num_threads for w in workers] == [2, 1]


@pytest.mark.parametrize(
    ("value", "error"), [("auto", ValueError), ("2", ValueError), (0, ValueError), (-1, ValueError),
                         (1.0, TypeError), (True, TypeError), (None, TypeError)]
)  # fmt: skip
def test_bad_numbers_of_streams(value, error):
    with pytest.raises(error, match="MultiStreamModule: num_streams must be"):
        MultiStreamModule(MODEL, value, pool(2))


def test_bad_arguments():
    with pytest.raises(TypeError, match="model must be callable"):
        MultiStreamModule(3)
    with pytest.raises(TypeError, match="cpu_pool must be a CPUPool"):
        MultiStreamModule(MODEL, 1, [0])
    with pytest.raises(TypeError, match="input_split_hint must be a MultiStreamModuleHint"):
        MultiStreamModule(MODEL, 1, input_split_hint=0)
    for bad in ("0", 1.0, True, [object()]):
        with pytest.raises(TypeError, match="MultiStreamModuleHint: hints must be"):
            MultiStreamModuleHint(bad)


# --- hints ------------------------------------------------------------------------------------------------------------


def record(*args, **kwargs):
    return {"args": args, "kwargs": kwargs}


def test_without_hints_all_batches_are_split():
    x, mask, table = torch.arange(4), torch.ones(4, 2), torch.zeros(3, 3)
    first, second = streams(record, 2, concat_output=False)(
        x, [mask, 5], table, mask=mask, scale=0.5, cache={"k": mask, "n": None}
    )
    assert first["args"][0].tolist() == [0, 1]
    assert second["args"][0].tolist() == [2, 3]
    assert first["args"][1][0].shape == (2, 2)
    assert first["args"][1][1] == 5
    assert first["args"][2].shape == (3, 3)
    assert first["kwargs"]["mask"].shape == (2, 2)
    assert first["kwargs"]["scale"] == 0.5
    assert second["kwargs"]["cache"]["k"].shape == (2, 2)
    assert second["kwargs"]["cache"]["n"] is None


def test_hints():
    x, y, z = torch.zeros(4, 2), torch.zeros(3, 4), torch.zeros(4)
    hint = MultiStreamModuleHint(0, [1, None], mask=-1, both={"a": 0})
    assert repr(hint) == "MultiStreamModuleHint(0, [1, None], mask=-1, both={'a': 0})"
    call = streams(record, 2, concat_output=False, input_split_hint=hint)
    part, _ = call(x, (y, z), mask=y, both={"a": x, "b": z}, whole=x)
    assert part["args"][0].shape == (2, 2)
    assert part["args"][1][0].shape == (3, 2)
    assert part["args"][1][1].shape == (4,)
    assert isinstance(part["args"][1], tuple)
    assert part["kwargs"]["mask"].shape == (3, 2)
    assert part["kwargs"]["both"]["a"].shape == (2, 2)
    assert part["kwargs"]["both"]["b"].shape == (4,)
    assert part["kwargs"]["whole"].shape == (4, 2)


@pytest.mark.parametrize(
    ("hint", "args", "kwargs", "error", "text"),
    [
        ((0, 0), (torch.zeros(4),), {}, ValueError, "more positional hints than arguments, got 2 for 1"),
        ((), (), {"b": 0}, ValueError, r"must name arguments of the call, got \['a'\]"),
        ((0, 0), (torch.zeros(4), torch.zeros(3)), {}, ValueError, "must have one size, got 4 for argument 0 and 3"),
        ((2,), (torch.zeros(4),), {}, ValueError, r"must be a dimension of shape \[4\], got 2"),
        ((0,), (3,), {}, TypeError, "must be a tensor to be split along dimension 0, got int"),
        (([0],), (torch.zeros(4),), {}, TypeError, r"must be a dimension, got \[0\]"),
        (({"x": 0},), ([torch.zeros(4)],), {}, TypeError, "must have its form"),
        (([0, 0],), ([torch.zeros(4)],), {}, TypeError, "must have its form"),
    ],
)  # fmt: skip
def test_hints_that_do_not_fit(hint, args, kwargs, error, text):
    names = {"a": 0} if kwargs else {}
    call = streams(record, 2, input_split_hint=MultiStreamModuleHint(*hint, **names))
    with pytest.raises(error, match=text):
        call(*args, **kwargs)


def test_results_of_any_form():
    x = torch.arange(4.0).view(4, 1)

    def model(x):
        return {
            "a": x,
            "pair": Pair(x, [x + 1]),
            "n": 3,
            "none": None,
            "ordered": collections.OrderedDict(k=x),
        }

    found = streams(model, 2)(x)
    assert torch.equal(found["a"], x)
    assert isinstance(found["pair"], Pair)
    assert torch.equal(found["pair"].second[0], x + 1)
    assert found["n"] == 3
    assert found["none"] is None
    assert isinstance(found["ordered"], collections.OrderedDict)
    assert torch.equal(found["ordered"]["k"], x)


def test_output_hints():
    x = torch.arange(4.0).view(4, 1)
    hint = MultiStreamModuleHint((1, None))
    found = streams(lambda x: (x.T, x), 2, output_concat_hint=hint)(x)
    assert torch.equal(found[0], x.T)
    assert torch.equal(found[1], x[:2])
    with pytest.raises(ValueError, match="to be joined, got a scalar"):
        streams(lambda x: x.sum(), 2)(x)
    with pytest.raises(TypeError, match="must have its form"):
        streams(lambda x: (x,), 2, output_concat_hint=MultiStreamModuleHint({"a": 0}))(x)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_state_of_the_caller():
    x = torch.ones(4, 8)
    call = streams(MODEL, 2)
    with torch.enable_grad():
        y = call(x)
        assert y.requires_grad
        y.sum().backward()
        assert MODEL[0].weight.grad is not None
    MODEL.zero_grad()
    assert not call(x).requires_grad
    with torch.inference_mode():
        assert call(x).is_inference()
    with torch.autocast("cpu", torch.bfloat16):
        assert streams(MODEL[0], 2)(x).dtype == torch.bfloat16


def test_the_first_error_comes_after_all_streams_have_ended():
    ended = threading.Event()
    begun = threading.Event()

    def model(x):
        if x[0] == 0:
            assert begun.wait(60)
            raise KeyError("stream 0")
        begun.set()
        ended.set()
        return x

    call = streams(model, 2)
    with pytest.raises(KeyError, match="stream 0"):
        call(torch.arange(2))
    assert ended.is_set()
    assert call(torch.arange(1, 3)).tolist() == [1, 2]


def test_calling_itself():
    call = streams(lambda x: call(x), 2)
    with pytest.raises(RuntimeError, match="must not call its own"):
        call(torch.zeros(2))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
def test_streams_are_not_traced():
    with pytest.raises(RuntimeError, match="trace the model, then make a MultiStreamModule"):
        torch.jit.trace(streams(MODEL, 2), torch.randn(4, 8))
    trace = torch.jit.trace(MODEL, torch.randn(4, 8))
    x = torch.randn(5, 8)
    torch.testing.assert_close(streams(trace, 2)(x), MODEL(x))


def test_inside_a_task_and_from_many_threads():
    call = streams(MODEL, 2)
    x = torch.randn(4, 8)
    with Task(call, pool(1)) as task:
        torch.testing.assert_close(task(x).get(60), MODEL(x))
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        inputs = [torch.randn(3, 8) for _ in range(40)]
        with torch.inference_mode():
            found = list(threads.map(call, inputs))
    for x, y in zip(inputs, found, strict=True):
        torch.testing.assert_close(y.detach(), MODEL(x))


def test_one_copy_of_the_weights():
    seen = []

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x):
            seen.append(self.linear.weight.data_ptr())
            return self.linear(x)

    model = Model()
    streams(model, 3)(torch.zeros(3, 8))
    assert seen == [model.linear.weight.data_ptr()] * 3


def test_copies_have_threads_of_their_own():
    call = streams(MODEL, 2)
    x = torch.randn(4, 8)
    call(x)
    for other in (copy.deepcopy(call), pickle.loads(pickle.dumps(call))):
        assert other._workers[0] is not call._workers[0]
        torch.testing.assert_close(other(x), call(x))
    assert {"model.0.weight", "model.0.bias"} == set(call.state_dict())


def test_benchmark_module():
    x = torch.randn(4, 8)
    found = MultiStreamBenchmarkModule(MODEL, 2, pool(2))(x)
    assert len(found) == 2
    for y in found:
        torch.testing.assert_close(y, MODEL(x))
