# SPDX-License-Identifier: Apache-2.0
"""TorchScript: traces of optimized models, and the fusion of frozen programs."""

import io

import pytest
import torch
from jit_checks import CONV_POST, IN_PLACE, After, Concat, check, check_elsewhere, frozen, saved
from torch import nn
from torch.nn import functional as F

from ipex_core import jit, optimize
from ipex_core.kernels.policy import has_kernel

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
kernels = pytest.mark.skipif(not has_kernel("linear"), reason="fuses only to kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("post", [*CONV_POST, "abs", "mish"])
def test_conv_and_activation(post, dtype):
    layer = nn.Conv2d(3, 8, 3, padding=1, stride=2).to(dtype)
    model = After(layer, {**CONV_POST, **IN_PLACE}[post])
    calls = [(torch.randn(2, 3, 9, 9).to(dtype),), (torch.randn(1, 3, 6, 11).to(dtype),)]
    found = check(model, *calls, tolerance=1e-4 if dtype is torch.float32 else 3e-2)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported() or dtype is torch.float32:
        name = f"conv + {post}" if post in CONV_POST else f"conv + {post} in place"
        assert found[name] == 1


class Residual(nn.Module):
    """The block of a residual network, written in place."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.relu = nn.BatchNorm2d(8), nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.relu(self.norm(self.a(x)))
        y = self.b(x)
        y += x
        return self.relu(y)


def test_conv_add_relu():
    found = check(Residual(), (torch.randn(1, 8, 7, 7),), (torch.randn(2, 8, 5, 9),))
    assert found == {"conv + relu": 1, "conv + add + relu": 1}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_conv_add_relu_in_any_layout(dtype, channels, size):
    """Of some images and weights torch cannot tell that they lie channels-last."""
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    model = After(nn.Conv2d(channels, 8, size), lambda y, other: F.relu(y + other)).eval().to(dtype)
    calls = []
    for side in (1, 6):
        x, other = torch.randn(2, channels, side + size - 1, size), torch.randn(2, 8, side, 1)
        last = [t.contiguous(memory_format=torch.channels_last).to(dtype) for t in (x, other)]
        calls += [(x.to(dtype), other.to(dtype)), tuple(last)]
    found = check(model, *calls, tolerance=1e-4 if dtype == torch.float32 else 3e-2)
    assert found == {"conv + add + relu": 1}


class Gate(nn.Module):
    """Results of convolutions that are broadcast when added."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return self.a(x) + self.b(x.mean((2, 3), keepdim=True))


def test_sum_of_convolutions_with_broadcasting():
    check(Gate(), (torch.randn(2, 8, 7, 7),), (torch.randn(1, 8, 1, 1),))


@kernels
@pytest.mark.parametrize("post", ["relu", "gelu", "gelu_tanh", "silu", *IN_PLACE])
def test_linear_and_activation(post):
    functions = {
        **{"relu": F.relu, "gelu": F.gelu, "silu": F.silu},
        "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
        **IN_PLACE,
    }
    model = After(nn.Linear(512, 512), functions[post])
    found = check(model, (torch.randn(3, 512),), (torch.randn(2, 1, 5, 512),))
    tail = " in place" if post in IN_PLACE else ""
    assert found == {f"linear + {post}{tail}": 1} or (tail and found["linear"] == 1)


@kernels
@pytest.mark.parametrize("name", ["add", "mul"])
def test_linear_and_operand_of_any_shape(name):
    model = After(nn.Linear(512, 512), lambda y, r: getattr(torch, name)(F.relu(y), r))
    calls = [(1, 4), (2, 4), (1, 1)]
    for first in calls:
        rest = [(torch.randn(2, 4, 512), torch.randn(*s, 512)) for s in calls]
        x = (torch.randn(1, 4, 512), torch.randn(*first, 512))
        assert check(model, x, *rest) == {f"linear + relu + {name}": 1}


def test_near_misses_stay():
    two = After(
        nn.Linear(512, 512), lambda y: F.relu(y) + y
    )  # the result is needed before and after
    assert "linear + relu" not in check(two, (torch.randn(2, 512),))
    scaled = After(nn.Linear(512, 512), lambda y, r: torch.add(y, r, alpha=2))
    assert "linear + add" not in check(scaled, (torch.randn(2, 512), torch.randn(2, 512)))
    conv = After(nn.Conv2d(2, 2, 1), lambda y: y + F.relu(y))
    assert "conv + relu" not in check(conv, (torch.randn(1, 2, 3, 3),))
    double = After(nn.Linear(8, 8), F.relu).double()
    assert check(double, (torch.randn(2, 8).double(),)) == {}


class Attention(nn.Module):
    """BERT's, with the scores divided or multiplied and with or without mask."""

    def __init__(self, divide, masked, dim=-1):
        super().__init__()
        self.divide, self.masked, self.dim = divide, masked, dim

    def forward(self, q, k, v, mask):
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / 4.0 if self.divide else scores * 0.3
        if self.masked:
            scores = scores + mask
        return torch.matmul(torch.softmax(scores, self.dim), v)


@kernels
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("divide", [True, False])
def test_attention(divide, masked):
    def call(heads, q, k, *mask):
        wide = [torch.randn(2, heads, n, 16) for n in (q, k, k)]
        return (*wide, torch.randn(*mask))

    calls = [call(4, 5, 7, 2, 1, 1, 7), call(3, 6, 2, 6, 2), call(2, 3, 3, 2, 2, 3, 3)]
    # One that the op does not take: a value of another size.
    odd = (*calls[0][:2], torch.randn(2, 4, 7, 8), calls[0][3])
    assert check(Attention(divide, masked), *calls, odd) == {"attention": 1}


def test_softmax_over_another_dimension_is_no_attention():
    call = (*(torch.randn(1, 2, 4, 8) for _ in range(3)), torch.zeros(4, 4))
    assert check(Attention(True, True, dim=-2), call) == {"matmul + div in place": 1}


def test_switched_off_leaves_every_pattern():
    jit.enable_onednn_fusion(False)
    try:
        for model, call in (
            (Concat(), (torch.randn(1, 2, 2, 2, 2), torch.randn(1, 4, 2, 2, 2))),
            (After(nn.Linear(512, 512), F.relu), (torch.randn(1, 512),)),
            (Attention(True, True), (*(torch.randn(1, 2, 4, 8),) * 3, torch.zeros(4, 4))),
        ):
            program = frozen(model, *call)
            assert jit.fuse(program) is program
            assert jit.fused(program) == {}
    finally:
        jit.enable_onednn_fusion(True)


class Norms(nn.Module):
    """Layer norm of a sum that is used again, and an RMS norm as decoders write it."""

    def __init__(self):
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(64), nn.Parameter(torch.rand(64))

    def forward(self, x, y):
        y = x + y
        z = (self.norm(y) + y).float()
        z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.scale * z.to(y.dtype)


@kernels
def test_norms():
    first = (torch.randn(1, 3, 64), torch.randn(1, 3, 64))
    found = check(Norms(), first, (torch.randn(4, 3, 64), torch.randn(3, 64)))
    assert found == {"add + layer_norm": 1, "rms_norm": 1}


def test_switch_and_bad_input():
    program = frozen(After(nn.Conv2d(2, 2, 1), F.relu), torch.randn(1, 2, 3, 3))
    jit.enable_onednn_fusion(False)
    try:
        assert not jit.is_onednn_fusion_enabled()
        assert jit.fuse(program) is program
    finally:
        jit.enable_onednn_fusion(True)
    with pytest.raises(TypeError, match="enabled must be True or False"):
        jit.enable_onednn_fusion(1)
    with pytest.raises(TypeError, match="program must be a ScriptModule, got Linear"):
        jit.fuse(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="must be frozen"):
        jit.fuse(torch.jit.trace(nn.Linear(2, 2).eval(), torch.ones(1, 2)))


class Encoder(nn.Module):
    """What optimize packs and fuses."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 1024), nn.Linear(1024, 512)
        self.norm = nn.LayerNorm(512)

    def forward(self, x):
        return self.norm(x + self.down(F.gelu(self.up(x))))


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("grad", [True, False])
def test_trace_of_an_optimized_model(dtype, grad):
    model = Encoder().eval()
    fast = optimize(model, dtype=dtype)
    x = torch.randn(1, 4, 512)
    with torch.set_grad_enabled(grad):
        program = torch.jit.freeze(torch.jit.trace(fast, x))
    file = saved(program)
    weights = sum(p.numel() for p in model.parameters()) * (4 if dtype is None else 2)
    assert weights < len(file) < 1.05 * weights + 30000  # each weight once
    with torch.no_grad():
        for call in (x, torch.randn(3, 2, 512)):  # another batch than the traced one
            for run in (program, torch.jit.load(io.BytesIO(file)), jit.fuse(program)):
                torch.testing.assert_close(run(call), fast(call), rtol=2e-2, atol=2e-2)
    if has_kernel("linear"):
        assert "ipex::linear" in str(program.graph)
        assert "PythonOp" not in str(program.graph)


class Kinds(nn.Module):
    """Each kind of packed parameter: linear, merged linear layers, convolution."""

    def __init__(self):
        super().__init__()
        self.conv, self.first = nn.Conv2d(3, 8, 3), nn.Linear(512, 512)
        self.q, self.k = nn.Linear(512, 512), nn.Linear(512, 512)
        self.norm = nn.LayerNorm(512)

    def forward(self, x, image):
        x = self.norm(x + F.relu(self.first(x)))
        return self.q(x) * self.k(x), self.conv(image)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_save_of_a_trace_that_is_not_frozen(dtype, tmp_path):
    """torch writes the memory of parameters without asking: packed ones need some, but not that of the weight."""
    model = Kinds().eval()
    calls = [(torch.randn(2, 512), torch.randn(1, 3, 8, 8)), (torch.randn(3, 1, 512),) * 2]
    calls[1] = (calls[1][0], torch.randn(2, 3, 9, 5))
    fast = optimize(model, dtype=dtype)
    with torch.no_grad():
        program = torch.jit.trace(fast, calls[0])
        program.save(str(tmp_path / "program.pt"))
        file = saved(program)
        for call in calls:
            for run in (
                program,
                torch.jit.load(io.BytesIO(file)),
                torch.jit.load(str(tmp_path / "program.pt")),
                torch.jit.freeze(torch.jit.load(io.BytesIO(file)).eval()),
            ):
                torch.testing.assert_close(run(*call), fast(*call), rtol=2e-2, atol=2e-2)
    weights = sum(p.numel() for p in model.parameters()) * (4 if dtype is None else 2)
    assert len(file) < 1.05 * weights + 60000


def test_a_saved_program_in_a_fresh_process(tmp_path):
    x = torch.randn(1, 4, 512)
    program = frozen(optimize(Encoder().eval()), x)
    check_elsewhere(program, x, program(x), tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_programs_that_were_fused_before():
    """What guards a sum of a convolution holds the very nodes that the pattern looks for."""
    model, x = Residual().eval(), torch.randn(2, 8, 6, 6)
    twice = jit.fuse(jit.fuse(frozen(model, x)))
    with torch.no_grad():
        torch.testing.assert_close(twice(x), model(x.clone()), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_scripted_model():
    model = After(nn.Linear(512, 512), nn.ReLU()).eval()
    x = torch.randn(2, 512)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.after = model.layer, model.after

        def forward(self, x):
            return self.after(self.layer(x))

    program = jit.fuse(torch.jit.freeze(torch.jit.script(Plain().eval())))
    with torch.no_grad():
        torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-4)
    if has_kernel("linear"):
        assert jit.fused(program) == {"linear + relu": 1}


class Prenorm(nn.Module):
    """Sums in front of norms, and a layer behind what TorchScript's autocast computes in float32."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
        self.norm, self.last = nn.RMSNorm(8), nn.LayerNorm(8)
        self.group, self.wide = nn.GroupNorm(2, 8), nn.Linear(8, 2048)

    def forward(self, x):
        x = x + self.inner(x).transpose(0, 1).transpose(0, 1)
        x = x + self.inner(self.norm(x))
        x = self.last(x + x)
        return self.wide(self.group(torch.exp(0.1 * x))), self.wide(torch.exp(0.1 * x))


@kernels
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # GroupNorm looks at its sizes
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_optimized_under_autocast(inside, fuse):
    """Recorded, frozen and run under autocast, as documented: there TorchScript adds in float32."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), Prenorm()) if inside else Prenorm()
    model = optimize(module.eval(), dtype=torch.bfloat16)
    calls = torch.randn(4, 8), torch.randn(6, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        program = torch.jit.freeze(torch.jit.trace(model, calls[0], check_trace=False))
        assert "_autocast_to_full_precision" in str(program.graph)
        run = jit.fuse(program) if fuse else program
        for x in calls:
            wanted = model(x)
            for _ in range(3):
                torch.testing.assert_close(run(x), wanted, rtol=5e-2, atol=0.1)
