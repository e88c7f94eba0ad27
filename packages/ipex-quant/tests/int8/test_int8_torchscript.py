# SPDX-License-Identifier: Apache-2.0
"""TorchScript of static INT8 models: the patterns that IPEX documented, traced, frozen, fused, saved and loaded."""

import io
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipex_core import jit
from ipex_quant import (
    convert,
    default_dynamic_qconfig_mapping,
    default_static_qconfig_mapping,
    prepare,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

#: What IPEX documented behind a quantized layer.
POSTS = {
    "abs": torch.abs,
    "elu": F.elu,
    "gelu": F.gelu,
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "sqrt": lambda y: torch.sqrt(y.abs()),
    "square": torch.square,
    "tanh": torch.tanh,
}
LAYERS = {
    "conv1d": (nn.Conv1d, (4, 9)),
    "conv2d": (nn.Conv2d, (4, 9, 9)),
    "conv3d": (nn.Conv3d, (4, 5, 5, 5)),
    "linear": (nn.Linear, (3, 4)),
}


class Net(nn.Module):
    """Two layers with the same activation, and a sum."""

    def __init__(self, kind, post):
        super().__init__()
        size = () if kind is nn.Linear else (3,)
        options = {} if kind is nn.Linear else {"padding": 1}
        self.a, self.b = kind(4, 8, *size, **options), kind(8, 8, *size, **options)
        self.post = post

    def forward(self, x):
        y = self.post(self.a(x))
        return self.post(self.b(y) + y)


class Pooled(nn.Module):
    """Max pooling on codes, and scores of attention behind quantized layers."""

    def __init__(self):
        super().__init__()
        self.conv, self.pool = nn.Conv2d(4, 8, 3, padding=1), nn.MaxPool2d(2)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        y = self.pool(F.relu(self.conv(x))).flatten(2).transpose(1, 2)
        scores = torch.matmul(self.q(y), self.k(y).transpose(-1, -2)) / 2.0
        return torch.matmul(torch.softmax(scores, -1), self.v(y))


def quantized(model, shape):
    torch.manual_seed(0)
    prepared = prepare(
        model.eval(), default_static_qconfig_mapping, example_inputs=torch.randn(2, *shape)
    )
    with torch.no_grad():
        for _ in range(3):
            prepared(torch.randn(2, *shape))
    return convert(prepared)


def check(model, shape):
    """Compare the frozen trace, the fused one and a saved one with the model, also at another batch size."""
    with torch.no_grad():
        program = torch.jit.freeze(torch.jit.trace(model, torch.randn(2, *shape)))
        buffer = io.BytesIO()
        torch.jit.save(program, buffer)
        buffer.seek(0)
        for run in (program, torch.jit.load(buffer), jit.fuse(program)):
            for batch in (1, 2):
                x = torch.randn(batch, *shape)
                torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    return str(program.graph)


@pytest.mark.parametrize("layer", LAYERS)
def test_documented_patterns(layer):
    kind, shape = LAYERS[layer]
    op = "ipex::int8_linear(" if kind is nn.Linear else "ipex_quant::int8_conv"
    # Preparing takes a second: all of them where there are kernels of their own, some elsewhere.
    names = POSTS if layer in ("conv2d", "linear") else ("elu", "relu")
    for post in (POSTS[name] for name in names):
        graph = check(quantized(Net(kind, post), shape), shape)
        assert graph.count(op) == 2
        assert "aten::_convolution" not in graph and "aten::linear" not in graph
        assert "PythonOp" not in graph


def test_pooling_and_products():
    graph = check(quantized(Pooled(), (4, 8, 8)), (4, 8, 8))
    assert "quantized::max_pool2d" in graph
    assert graph.count("aten::matmul") == 2  # of activations: these stay float


def test_weights_are_stored_once():
    model = quantized(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)), (512,))
    program = torch.jit.trace(model, torch.randn(2, 512))
    for found in (program, torch.jit.freeze(program)):
        buffer = io.BytesIO()
        torch.jit.save(found, buffer)
        assert len(buffer.getvalue()) < 1.1 * 2 * 512 * 512 + 40000


def test_a_saved_program_needs_one_import(tmp_path):
    pytest.importorskip("ipex")
    model = quantized(Net(nn.Conv2d, F.relu), (4, 9, 9))
    x = torch.randn(2, 4, 9, 9)
    with torch.no_grad():
        torch.jit.save(torch.jit.freeze(torch.jit.trace(model, x)), tmp_path / "program.pt")
        torch.save((x, model(x)), tmp_path / "tensors.pt")
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); import torch, ipex\n"
        "x, y = torch.load(sys.argv[2])\n"
        "torch.testing.assert_close(torch.jit.load(sys.argv[1])(x), y)\n"
    )
    arguments = [str(tmp_path / "program.pt"), str(tmp_path / "tensors.pt")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=120)


def test_scripted_parts_stay_as_they_are():
    inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    model = nn.Sequential(nn.Linear(8, 16), torch.jit.script(inner), nn.Linear(16, 8))
    graph = check(quantized(model, (8,)), (8,))
    assert graph.count("ipex::int8_linear(") == 2


@pytest.mark.parametrize(
    "mapping", [default_static_qconfig_mapping, default_dynamic_qconfig_mapping]
)
def test_scripting_is_refused(mapping):
    x, model = torch.randn(2, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    prepared = prepare(model, mapping, example_inputs=x, inplace=False)
    prepared(x)
    with pytest.raises(TypeError, match=r"INT8 layers .* use torch\.jit\.trace"):
        torch.jit.script(convert(prepared))
