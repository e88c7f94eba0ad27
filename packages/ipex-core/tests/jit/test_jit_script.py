# SPDX-License-Identifier: Apache-2.0
"""Programs that `torch.jit.script` makes of optimized models."""

import copy
import io

import pytest
import torch
from jit_checks import check_elsewhere, saved
from torch import nn
from torch.nn import functional as F

from ipex_core import jit, optimize, restore
from ipex_core.kernels.policy import has_kernel
from ipex_core.nn import PackedWeight
from ipex_core.optimization.passes import prepack

pytestmark = pytest.mark.filterwarnings("ignore")
kernels = pytest.mark.skipif(not has_kernel("linear"), reason="fuses only to kernels")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
X, IMAGE = torch.randn(2, 3, 512), torch.randn(1, 3, 8, 8)


def check(model, *call, dtype=torch.float32, **options):
    """Script an optimized copy, run it in all forms, and see that the model has not changed."""
    model = model.eval()
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    with torch.no_grad():
        fast = optimize(model, dtype=dtype, **options)
        wanted = fast(*call)
        before = [(m, type(m), dict(m._modules), dict(m._parameters)) for m in fast.modules()]
        script = torch.jit.script(fast)
        for module, kind, children, parameters in before:
            assert type(module) is kind
            assert all(module._modules[n] is child for n, child in children.items())
            assert all(module._parameters[n] is p for n, p in parameters.items())
        frozen = torch.jit.freeze(script)
        fused = jit.fuse(frozen)
        plain = sum(p.nbytes for p in model.parameters()) // (
            torch.float32.itemsize // dtype.itemsize
        )
        for program in (script, frozen, fused):
            file = saved(program)
            assert len(file) < 1.05 * plain + 80000  # each weight once
            for run in (program, program, torch.jit.load(io.BytesIO(file))):
                torch.testing.assert_close(run(*call), wanted, **tolerance)
        torch.testing.assert_close(fast(*call), wanted, rtol=0, atol=0)
        torch.testing.assert_close(
            torch.jit.script(copy.deepcopy(fast))(*call), wanted, **tolerance
        )
        back = restore(fast)
        torch.testing.assert_close(back(*call), model(*call), rtol=1e-5, atol=1e-5)
        assert not any("script" in name for m in back.modules() for name in m.__dict__)
    return fused


class Block(nn.Module):
    """What optimize packs, merges and fuses."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(512, 512), nn.Linear(512, 512, bias=False)
        self.down, self.norm = nn.Linear(512, 512), nn.LayerNorm(512)
        self.drop = nn.Dropout()

    def forward(self, x):
        y = F.silu(self.q(x)) * self.k(x)
        return self.norm(self.drop(self.down(y)) + x)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.b, self.c = nn.Conv2d(3, 8, 3, padding="same"), nn.ConvTranspose2d(8, 4, 3)
        self.norm.running_mean.uniform_()

    def forward(self, x):
        y = F.relu(self.norm(self.a(x)))
        return self.c(self.b(y + x))


class First(nn.Module):
    """The first result of a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(512, 8, batch_first=True)

    def forward(self, x):
        return self.layer(x, x, x)[0]


class Rms(nn.Module):
    """A module that optimize recognizes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(512))

    def forward(self, x):
        return self.scale * (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6))


def encoder(**options):
    layer = nn.TransformerEncoderLayer(512, 8, 512, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2)


KINDS = {
    "block": (Block, X),
    "residual": (Residual, IMAGE),
    "rms": (Rms, X),
    "attention": (Attention, X),
    "encoder": (encoder, X),
    "encoder-first": (lambda: encoder(norm_first=True, activation="gelu"), X),
    "lstm": (lambda: First(nn.LSTM(512, 64, 2, bidirectional=True, proj_size=16)), X),
    "lstm-1": (lambda: First(nn.LSTM(512, 64, batch_first=True)), X[0]),
    "gru": (lambda: First(nn.GRU(512, 64, batch_first=True)), X),
    "rnn": (lambda: First(nn.RNN(512, 64, nonlinearity="relu")), X[0]),
    "bag": (lambda: nn.EmbeddingBag(64, 32, mode="mean"), torch.randint(0, 64, (3, 4))),
    "sequence": (
        lambda: nn.Sequential(
            *(nn.Linear(512, 512), nn.ReLU(), nn.PReLU(), nn.GELU(), nn.RMSNorm(512)),
            *(nn.GroupNorm(3, 3), nn.Softmax(-1)),
        ),
        X,
    ),
    "signal": (
        lambda: nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.ConvTranspose1d(8, 4, 3)),
        X,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind, dtype):
    make, x = KINDS[kind]
    check(make(), x, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [{"level": "O0"}, {"weights_prepack": False}, {"concat_linear": True}], ids=str
)
def test_options(options, dtype):
    for kind in ("block", "residual"):
        make, x = KINDS[kind]
        check(make(), x, dtype=dtype, **options)


@kernels
def test_packed_layers_are_fused():
    fast = torch.jit.freeze(torch.jit.script(optimize(Block().eval())))
    assert str(fast.graph).count("ipex::linear") == 3
    assert jit.fused(jit.fuse(fast))["linear + silu"] == 1


def test_weights_packed_for_onednn(monkeypatch):
    """No program can hold these: it gets the plain weight."""
    always = prepack.LinearChoice("mkldnn", "always")
    monkeypatch.setattr(prepack, "measure_conv", lambda *_: always)
    monkeypatch.setattr(prepack, "choose_linear", lambda *_: always)
    check(Residual(), IMAGE, sample_input=IMAGE)
    check(Block(), X)


@pytest.mark.parametrize("shape", [(4, 512), (2, 5, 512)])
def test_batch_norm_behind_a_linear_layer(shape):
    model = nn.Sequential(nn.Linear(512, 5), nn.BatchNorm1d(5))
    model[1].running_mean.uniform_()
    model[1].running_var.uniform_(0.5, 2)
    check(model, torch.randn(shape))


class Outer(nn.Module):
    """Control flow around an optimized model and a part that is a program already."""

    def __init__(self, inner, program):
        super().__init__()
        self.inner, self.program = inner, program

    def forward(self, x, n: int):
        y = {"first": self.inner(x)}
        for _ in range(n):
            if bool(x.sum() > 0):
                y["first"] = y["first"] + self.inner(y["first"])
        return self.program(y["first"]), y["first"]


@pytest.mark.parametrize("traced", [True, False])
def test_model_inside_another(traced):
    inner, part = optimize(Block().eval()), optimize(Block().eval())
    with torch.no_grad():
        program = torch.jit.trace(part, X) if traced else torch.jit.script(part)
        outer = Outer(inner, program).eval()
        script = torch.jit.script(outer)
        assert outer.inner is inner
        assert outer.program is program
        for x in (X, X[:1].abs()):
            for run in (
                script,
                torch.jit.freeze(script),
                torch.jit.load(io.BytesIO(saved(script))),
            ):
                torch.testing.assert_close(run(x, 2), outer(x, 2), rtol=1e-4, atol=1e-4)


def test_a_program_in_a_fresh_process(tmp_path):
    fast = optimize(Block().eval())
    with torch.no_grad():
        program = torch.jit.freeze(torch.jit.script(fast))
        check_elsewhere(program, X, fast(X), tmp_path, rtol=1e-4, atol=1e-4)


def test_weights_that_change_later():
    """A program keeps the weights that it was made with; the model goes on."""
    model = Block().eval()
    fast = optimize(model)
    with torch.no_grad():
        wanted = fast(X)
        script = torch.jit.script(fast)
        other = Block().eval()
        fast.load_state_dict(other.state_dict())
        torch.testing.assert_close(fast(X), other(X), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.jit.script(fast)(X), other(X), rtol=1e-4, atol=1e-4)
        if has_kernel("linear"):
            assert script.q._c.hasattr("_script_packed")
            assert not torch.equal(script(X), fast(X))
        assert wanted.shape == script(X).shape


def test_what_cannot_be_scripted():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(8, 8)

        def forward(self, x):
            return self.cell(x)

    torch.jit.script(optimize(Cell().eval()))
    reduced = optimize(Cell().eval(), dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"whose input a hook of ipex.optimize casts"):
        torch.jit.script(reduced)
    torch.jit.script(restore(reduced))

    class Reads(First):
        def forward(self, x):
            return self.layer(x) + self.layer.weight.sum()

    if has_kernel("linear"):
        with pytest.raises(RuntimeError, match=r"'weight'.*ignored"):
            torch.jit.script(optimize(Reads(nn.Linear(512, 512)).eval()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_encoders_unpack_no_weight(monkeypatch, dtype):
    """The op of the stock layers would take packed weights, and unpack them in each call."""
    model = encoder().eval()
    fast = optimize(model, dtype=dtype)
    padding = torch.tensor([[False, False, True], [False, False, False]])
    causal = nn.Transformer.generate_square_subsequent_mask(3)
    calls = [{}, {"src_key_padding_mask": padding}, {"mask": causal, "is_causal": True}]
    monkeypatch.setattr(PackedWeight, "plain", None)
    with torch.no_grad():
        for call in calls:
            got, wanted = fast(X, **call), model(X, **call)
            torch.testing.assert_close(
                got.float(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )
    monkeypatch.undo()
    assert type(restore(fast).layers[0]) is nn.TransformerEncoderLayer
