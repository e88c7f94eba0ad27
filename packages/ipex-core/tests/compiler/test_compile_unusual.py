# SPDX-License-Identifier: Apache-2.0
"""torch.compile(backend="ipex") of functions that compilers stumble over: results and inputs are those of eager."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ipex_core.compile_backend import ipex_backend

#: What is unusual about these functions concerns Dynamo, AOTAutograd and our passes, not the code in the end.
pytestmark = pytest.mark.usefixtures("no_code_generation")


def graph_break(x):
    y = F.layer_norm(x, (8,))
    torch._dynamo.graph_break()
    return F.layer_norm(y + x, (8,))


def data_dependent(x):
    rows = x[x[:, 0] > 0]
    return F.rms_norm(rows, (8,)) if rows.shape[0] > 1 else rows


def in_place_view(x):
    y = x * 2
    y[:, ::2].add_(1)
    return F.layer_norm(y, (8,)), y.view(-1)


def mutated_input(x):
    x.mul_(2)
    return F.rms_norm(x, (8,))


def aliases(x):
    y = F.layer_norm(x, (8,))
    return x, x[1:], y, y.t()


FUNCTIONS = (graph_break, data_dependent, in_place_view, mutated_input, aliases)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions(function):
    given = torch.randn(4, 8)
    ours, eager = given.clone(), given.clone()
    options = {"ipex.always": True}
    with torch.no_grad():
        got = torch.compile(function, backend="ipex", options=options)(ours)
        expected = function(eager)
    torch.testing.assert_close(ours, eager)
    torch.testing.assert_close(got, expected)
    if function is aliases:
        assert got[0] is ours and got[1].data_ptr() == ours[1:].data_ptr()
        assert got[3].data_ptr() == got[2].data_ptr()


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_dtypes_without_kernels(dtype):
    def function(x, w):
        y = (x @ w.t()) * 2 + x
        return y if dtype.is_complex else F.layer_norm(y, (8,))

    x, w = torch.randn(4, 8, dtype=dtype), torch.randn(8, 8, dtype=dtype)
    with torch.no_grad():
        compiled = torch.compile(function, backend=ipex_backend)
        torch.testing.assert_close(compiled(x, w), function(x, w))


def test_derivatives_inside():
    """`torch.func` takes derivatives of what requires none; a graph with them is not one for inference."""

    def function(x):
        return torch.func.jacrev(lambda y: F.layer_norm(y, (8,)))(x)

    x = torch.randn(2, 8)
    found = torch.compile(function, backend=ipex_backend)(x)
    torch.testing.assert_close(found, function(x))


def test_linear_layers_on_a_vector():
    """Inductor's own pass over a frozen graph fails at such views."""
    model, x = torch.nn.Linear(512, 512).eval(), torch.randn(512)
    graphs = []
    options = {
        "ipex.disable": ["linear"],
        "joint_custom_pre_pass": lambda graph: graphs.append(str(graph)),
    }
    with torch.no_grad():
        found = torch.compile(model, backend=ipex_backend, options=options)(x)
        torch.testing.assert_close(found, model(x))
    assert "aten.squeeze.dim" in graphs[0]


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_layer_without_outputs():
    layer, x = torch.nn.Linear(8, 0).eval(), torch.randn(3, 8)
    with torch.no_grad():
        assert torch.compile(layer, backend=ipex_backend)(x).shape == (3, 0)
