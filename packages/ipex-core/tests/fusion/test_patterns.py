# SPDX-License-Identifier: Apache-2.0
"""Descriptions of patterns: both kinds of graphs are read by them, and what only looks alike is not."""

import math

import pytest
import torch
from torch.nn import functional

import ipex_core.fusion as patterns
from ipex_core.fusion import aten, torchscript
from ipex_core.module_swap.base import computed_by


def of_aten(function, *args):
    """Return the result of a graph of ATen ops."""
    return aten.READER, aten.graph_of(function, *args).output_node().args[0]


def of_script(function, *args):
    """Return the result of a graph of TorchScript."""
    graph = torch.jit.trace(function, args).graph
    torch._C._jit_pass_constant_propagation(graph)
    return torchscript.READER, next(graph.outputs())


def rms(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def rms_by_root(x):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)


def rms_by_power(x):
    return x * ((x**2).mean(-1, keepdim=True) + 1e-5) ** -0.5


def rms_reversed(x):
    return torch.rsqrt(1e-5 + (x * x).mean(-1, keepdim=True)) * x


@pytest.mark.parametrize("kind", [of_aten, of_script])
@pytest.mark.parametrize("function", [rms, rms_by_root, rms_by_power, rms_reversed])
def test_rms_norm_in_all_spellings(kind, function):
    reader, result = kind(function, torch.randn(3, 8))
    found = reader.find(patterns.RMS_NORM, result)
    assert found is not None and found["eps"] == pytest.approx(1e-5)


def over_all(x):
    return x * torch.rsqrt(x.pow(2).mean() + 1e-5)


def over_rows(x):
    return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5)


def of_another(x):
    return x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-5)


def cubed(x):
    return x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize("kind", [of_aten, of_script])
@pytest.mark.parametrize("function", [over_all, over_rows, of_another, cubed])
def test_what_is_no_rms_norm(kind, function):
    reader, result = kind(function, torch.randn(8, 8))
    assert reader.find(patterns.RMS_NORM, result) is None


SPELLED = {
    "silu": [lambda x: x * torch.sigmoid(x), lambda x: x / (1 + torch.exp(-x))],
    "gelu": [
        lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
        lambda x: x * (1 + torch.erf(x * 0.70711)) * 0.5,
    ],
    "gelu_tanh": [
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        lambda x: x * (1 + torch.tanh((x + x * x * x * 0.044715) * 0.79788)) * 0.5,
    ],
    "relu": [functional.relu],
}


@pytest.mark.parametrize("kind", [of_aten, of_script])
@pytest.mark.parametrize(
    "name, number", [(n, i) for n, v in SPELLED.items() for i in range(len(v))]
)
def test_activations(kind, name, number):
    reader, result = kind(SPELLED[name][number], torch.randn(3, 8))
    found = {n for n, one in patterns.ACTIVATIONS.items() if reader.find(one, result) is not None}
    assert found == {name}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 0.5 * x * (1 + torch.erf(x)),
        lambda x: 0.5 * x * (2 + torch.erf(x / math.sqrt(2))),
        lambda x: x * torch.sigmoid(1.702 * x),
        lambda x: 0.51 * x * (1 + torch.erf(x / math.sqrt(2))),
    ],
)
def test_what_is_no_activation(function):
    reader, result = of_aten(function, torch.randn(3, 8))
    assert not any(reader.find(one, result) for one in patterns.ACTIVATIONS.values())


def test_interior_is_what_lies_between_root_and_values():
    reader, result = of_aten(SPELLED["gelu"][0], torch.randn(3, 8))
    found = reader.find(patterns.ACTIVATIONS["gelu"], result)
    assert found.passed[0] is result and found["x"].op == "placeholder"
    assert {node.op for node in found.passed} == {"call_function"}


def test_a_word_means_one_value():
    reader, result = of_aten(lambda x, y: x * torch.sigmoid(y), *torch.randn(2, 3, 8))
    assert reader.find(("mul", "x", ("sigmoid", "x")), result) is None
    found = reader.find(("mul", "x", ("sigmoid", "y")), result)
    assert (found["x"].name, found["y"].name) == ("x0", "x1")


@pytest.mark.parametrize(
    "function, expected",
    [
        (torch.nn.GELU(approximate="tanh"), "gelu_tanh"),
        (torch.nn.GELU(), "gelu"),
        (lambda x: x.sigmoid() * x, "silu"),
        (torch.nn.Tanh(), ""),
        (lambda x: functional.gelu(x).clip(-10, 10), ""),
        (torch.nn.Linear(3, 3), ""),
        (lambda x: x.sum(), ""),
    ],
)
def test_functions_told_by_values(function, expected):
    known = {
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "silu": functional.silu,
    }
    assert computed_by(function, known) == expected


def test_graph_of_a_function():
    graph = aten.graph_of(lambda x, y: torch.var_mean(x @ y, 1)[0], *torch.randn(2, 4, 4))
    ops = [str(n.target).partition(".")[2] for n in graph.nodes if n.op == "call_function"]
    assert len(ops) == 4 and ops[:2] == ["mm.default", "var_mean.correction"]
    with pytest.raises(ValueError, match="write"):
        aten.graph_of(lambda x: x.add_(1), torch.ones(2))
    with pytest.raises(ValueError, match="return tensors"):
        aten.graph_of(lambda x: x * float(x.sum()), torch.ones(2))
    other = torch.ones(2)
    with pytest.raises(KeyError):
        aten.graph_of(lambda x: x + other, torch.ones(2))
