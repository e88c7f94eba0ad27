# SPDX-License-Identifier: Apache-2.0
"""Fused TorchScript programs of the device, and the op of which they consist."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import FLOATS, TOLERANCE
from kernel_checks import rand as on_host
from test_process import output
from torch import nn

import ipex_core
import ipex_xpu_kernels as xpu
from ipex_core import jit

pytestmark = [
    pytest.mark.usefixtures("always"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
chain: Any = torch.ops.ipex_xpu.chain if xpu.state().count else None

#: Step -> its numbers, and what it is.
UNARY: dict[str, tuple[list[float], Callable[..., torch.Tensor]]] = {
    "relu": ([], torch.relu),
    "sigmoid": ([], torch.sigmoid),
    "tanh": ([], torch.tanh),
    "silu": ([], F.silu),
    "gelu": ([], F.gelu),
    "gelu_tanh": ([], lambda x: F.gelu(x, approximate="tanh")),
    "exp": ([], torch.exp),
    "log": ([], torch.log),
    "sqrt": ([], torch.sqrt),
    "abs": ([], torch.abs),
    "square": ([], torch.square),
    "reciprocal": ([], torch.reciprocal),
    "leaky_relu": ([0.2], lambda x: F.leaky_relu(x, 0.2)),
    "clamp": ([-0.5, 1.0], lambda x: x.clamp(-0.5, 1.0)),
    "elu": ([0.7], lambda x: F.elu(x, 0.7)),
    "hardsigmoid": ([], F.hardsigmoid),
    "hardswish": ([], F.hardswish),
    "mish": ([], F.mish),
    "round": ([], torch.round),
    "pow": ([3.0], lambda x: x.pow(3.0)),
    "affine": ([2.0, -1.0], lambda x: x * 2 - 1),
}
BINARY: dict[str, tuple[list[float], Callable[..., torch.Tensor]]] = {
    "add": ([0.5], lambda x, y: x + 0.5 * y),
    "add_to": ([-1.0], lambda x, y: y - x),
    "mul": ([], lambda x, y: x * y),
    "div": ([], lambda x, y: x / y),
}


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return on_host(*shape, dtype=dtype).to("xpu")


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype and found.device == wanted.device
    rtol, atol = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=rtol, atol=atol)


@pytest.fixture
def launches() -> Iterator[Callable[[Callable[[], object]], int]]:
    def count(call: Callable[[], object]) -> int:
        with xpu.kernel_times() as times:
            call()
        return len(times.launches)

    yield count


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("step", UNARY)
def test_unary_steps(step: str, dtype: torch.dtype) -> None:
    numbers, function = UNARY[step]
    x = rand(33, 65, dtype=dtype) * 3
    x.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    if step == "pow":
        x = x.abs()
    near(chain(x, [], step, numbers), function(x.float()).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("step", BINARY)
def test_binary_steps(step: str, dtype: torch.dtype) -> None:
    numbers, function = BINARY[step]
    x, y = rand(2, 8, 9, 7, dtype=dtype), rand(2, 8, 9, 7, dtype=dtype) + 2
    others = [y, y[:, :, :1], y[:1, :1], y.transpose(2, 3).contiguous().transpose(2, 3)]
    for other in (*others, y.contiguous(memory_format=torch.channels_last), y[0, 0, 0, 0]):
        near(chain(x, [other], step, numbers), function(x.float(), other.float()).to(dtype))
    wider = rand(3, 2, 8, 9, 7, dtype=dtype) + 2  # the result has its shape
    near(chain(x, [wider], step, numbers), function(x.float(), wider.float()).to(dtype))


PASSES: list[tuple[str, list[float], Callable[..., torch.Tensor]]] = [
    ("add relu", [1.0], lambda x, a: F.relu(x + a)),
    ("add add relu", [1.0, 1.0], lambda x, a, b: F.relu(x + a + b)),
    ("add silu", [1.0], lambda x, a: F.silu(x + a)),
    ("add sigmoid", [1.0], lambda x, a: torch.sigmoid(x + a)),
    ("add gelu", [1.0], lambda x, a: F.gelu(x + a)),
    ("add clamp", [1.0, 0.0, 6.0], lambda x, a: F.relu6(x + a)),
    ("add hardswish", [1.0], lambda x, a: F.hardswish(x + a)),
    ("relu add", [1.0], lambda x, a: F.relu(x) + a),
    ("gelu add", [1.0], lambda x, a: F.gelu(x) + a),
    ("silu mul", [], lambda x, a: F.silu(x) * a),
    ("add tanh mul add_to", [1.0, -1.0], lambda x, a, b, c: c - torch.tanh(x + a) * b),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("steps", "numbers", "function"), PASSES, ids=[p[0] for p in PASSES])
def test_passes(
    steps: str, numbers: list[float], function: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    x = rand(2, 8, 12, 11, dtype=dtype)
    count = sum(step in BINARY for step in steps.split())
    same = [rand(2, 8, 12, 11, dtype=dtype) for _ in range(count)]
    bias = [rand(8, 1, 1, dtype=dtype), *same[1:]]
    for layout in (torch.contiguous_format, torch.channels_last):
        y = x.contiguous(memory_format=layout)
        for others in (same, bias):
            result = chain(y, others, steps, numbers)
            near(result, function(y.float(), *(o.float() for o in others)).to(dtype))
            assert result.stride() == y.stride()


def test_one_pass_is_one_kernel(launches: Callable[[Callable[[], object]], int]) -> None:
    x = torch.randn(64, 64, device="xpu")
    assert launches(lambda: chain(x, [x, x], "add silu mul", [1.0])) == 1


def test_what_has_no_kernel_runs_op_by_op() -> None:
    steps, numbers = "relu add mul", [2.0]
    x, y = torch.randn(5, 7), torch.randn(5, 7)

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x) + 2 * y) * y

    for first, second in ((x, y), (x.double(), y.double()), (x.double(), y), (x.half(), y)):
        found = chain(first.to("xpu"), [second.to("xpu")] * 2, steps, numbers)
        torch.testing.assert_close(found.cpu(), function(first, second), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(
            chain(first, [second] * 2, steps, numbers), function(first, second)
        )
    whole = torch.arange(-3, 4, device="xpu")
    assert chain(whole, [], "relu abs", []).tolist() == [0, 0, 0, 0, 1, 2, 3]
    empty = torch.ones(0, 3, device="xpu")
    assert chain(empty, [torch.ones(3, device="xpu")], "add relu", [1.0]).shape == (0, 3)
    many = rand(2, 3, 2, 3, 2, 3).flip(0)  # dimensions that do not merge
    turned = many.transpose(0, 4).transpose(1, 5)
    near(
        chain(many[..., ::2], [turned[..., ::2]], "add relu", [1.0]),
        F.relu(many + turned)[..., ::2],
    )


def test_gradients() -> None:
    x = torch.randn(4, 6, device="xpu", requires_grad=True)
    y = torch.randn(6, device="xpu", requires_grad=True)
    chain(x, [y], "add gelu", [1.0]).sum().backward()
    assert x.grad is not None and y.grad is not None
    other_x, other_y = (t.detach().clone().requires_grad_() for t in (x, y))
    F.gelu(other_x + other_y).sum().backward()
    assert other_x.grad is not None and other_y.grad is not None
    near(x.grad, other_x.grad)
    near(y.grad, other_y.grad)


def test_bad_arguments() -> None:
    x = torch.ones(2, device="xpu")
    with pytest.raises(ValueError, match="steps must be names of ops that are known, got rely"):
        chain(x, [], "rely", [])
    with pytest.raises(ValueError, match="numbers must be 2 for the steps clamp, got 1"):
        chain(x, [], "clamp", [1.0])
    with pytest.raises(ValueError, match="numbers must be 0 for the steps relu, got 1"):
        chain(x, [], "relu", [1.0])
    with pytest.raises(ValueError, match="others must be 1 tensors for the steps add, got 0"):
        chain(x, [], "add", [1.0])
    with pytest.raises(RuntimeError, match="must match the size"):
        chain(x, [torch.ones(3, device="xpu")], "add", [1.0])


# --- programs ---------------------------------------------------------------------------------------------------------


class After(nn.Module):
    """A layer and a function of its result, and of others."""

    def __init__(self, layer: nn.Module, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x), *others)


def frozen(model: nn.Module, *call: torch.Tensor) -> Any:
    with torch.no_grad():
        trace = torch.jit.trace(model.eval(), call, check_trace=False)
        # A trace has numbers as tensors of the host, which torch folds into convolutions of the host alone.
        return torch.jit.freeze(
            trace, optimize_numerics="aten::batch_norm" in str(trace.inlined_graph)
        )


def check(model: nn.Module, *calls: tuple[torch.Tensor, ...]) -> dict[str, int]:
    """Fuse a program, compare it with the model for calls of several shapes, and return what was fused."""
    plain = frozen(model, *calls[0])
    program: Any = jit.fuse(plain)
    with torch.no_grad():
        for call in calls:
            for _ in range(2):
                near(program(*call), model(*call))
    return jit.fused(program)


AFTER: dict[str, Callable[..., torch.Tensor]] = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": lambda y: F.leaky_relu(y, 0.1),
    "hardtanh": lambda y: F.hardtanh(y, -0.3, 0.4),
    "elu": lambda y: F.elu(y, 0.6),
    "mish": F.mish,
    "abs": torch.abs,
    "exp": torch.exp,
    "square": torch.square,
    "clamp": lambda y: y.clamp(min=0.1),
    "round": torch.round,
    "add": lambda y: y + 0.25,
    "mul": lambda y: 0.5 * y,
    "div": lambda y: y / 4,
    "rsub": lambda y: 1 - y,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("post", AFTER)
def test_conv_and_activation(
    post: str, dtype: torch.dtype, launches: Callable[[Callable[[], object]], int]
) -> None:
    model = After(nn.Conv2d(3, 8, 3, padding=1, stride=2), AFTER[post]).to("xpu", dtype)
    x = rand(2, 3, 9, 9, dtype=dtype)
    if post == "round":  # of numbers that are not near a half in any rounding
        model.layer.weight.data.round_()
        model.layer.bias.data.copy_(model.layer.bias.round() + 0.125)
        x = x.round()
    assert check(model, (x,), (x[:1, :, :6],)) == {f"conv + {post}": 1}
    plain = frozen(model, x)
    program: Any = jit.fuse(plain)
    xpu.reset_fallback_stats()
    fused = launches(lambda: program(x))
    assert xpu.fallback_stats() == {}
    assert fused < launches(lambda: plain(x)) + len(xpu.fallback_stats())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(4, 6, 3), (2, 4, 9)),
        (nn.Conv3d(2, 4, 2), (1, 2, 4, 5, 6)),
        (nn.Conv2d(4, 8, 3, groups=4), (2, 4, 7, 7)),
        (nn.ConvTranspose1d(4, 6, 3), (2, 4, 9)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 5, 6)),
    ],
)
def test_other_convolutions(layer: nn.Module, shape: tuple[int, ...]) -> None:
    name = "conv_transpose" if "Transpose" in type(layer).__name__ else "conv"
    assert check(After(layer, F.relu).to("xpu"), (rand(*shape),)) == {f"{name} + relu": 1}


def test_a_convolution_without_a_bias() -> None:
    model = After(nn.Conv2d(3, 4, 3, bias=False), lambda y, r: F.relu(y + r)).to("xpu")
    call = (rand(1, 3, 6, 6), rand(1, 4, 4, 4))
    assert check(model, call) == {"conv + add + relu": 1}
    alone = After(nn.Conv2d(3, 4, 3, bias=False), F.relu).to("xpu")
    assert check(alone, call[:1]) == {}  # there is nothing to save


class Residual(nn.Module):
    """The block of a residual network, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.relu = nn.BatchNorm2d(8), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.a(x)))
        y = self.b(x)
        y += x
        result: torch.Tensor = self.relu(y)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_residual_network(
    layout: torch.memory_format,
    dtype: torch.dtype,
    launches: Callable[[Callable[[], object]], int],
) -> None:
    model = Residual().to("xpu", dtype)
    x, y = (rand(*s, dtype=dtype) for s in ((1, 8, 7, 7), (2, 8, 5, 9)))
    calls = [(t.contiguous(memory_format=layout),) for t in (x, y)]
    assert check(model, *calls) == {"conv + relu": 1, "conv + add + relu": 1}
    plain = frozen(model, *calls[0])
    fused: Any = jit.fuse(plain)
    # Bias and relu; bias, sum and relu.
    assert launches(lambda: plain(*calls[0])) - launches(lambda: fused(*calls[0])) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear(dtype: torch.dtype) -> None:
    layer = nn.Linear(16, 32).to("xpu", dtype)
    x, r = rand(4, 16, dtype=dtype), rand(4, 32, dtype=dtype)
    wide = (rand(2, 4, 16, dtype=dtype), r)
    for name, function in {
        "linear + gelu + add": lambda y, r: F.gelu(y) + r,
        "linear + relu + mul": lambda y, r: r * F.relu(y),
        "linear + sub + sigmoid": lambda y, r: torch.sigmoid(r - y),
        "linear + silu + mul": lambda y, r: y * torch.sigmoid(y) * r,
    }.items():
        assert check(After(layer, function), (x, r), wide) == {name: 1}
    assert check(After(layer, lambda y, r: F.relu(y)), (x, r)) == {}
    assert check(After(layer, lambda y, r: F.hardswish(y)), (x, r)) == {"linear + hardswish": 1}


def test_long_chains_become_several() -> None:
    layer = nn.Conv2d(3, 4, 1).to("xpu")
    call = (rand(1, 3, 4, 4), *(rand(1, 4, 4, 4) for _ in range(5)))

    def function(y: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        for other in others:
            y = torch.tanh(y + other)
        return y

    found = check(After(layer, function), call)
    assert sum(name.count("add") * count for name, count in found.items()) == 5
    assert sum(found.values()) == 3


def test_near_misses() -> None:
    layer = nn.Linear(8, 8).to("xpu")
    x = rand(4, 8, dtype=torch.float32)
    # The result is needed before and after.
    assert check(After(layer, lambda y: torch.stack([F.relu(y), y])), (x,)) == {}
    thirds = check(After(layer, lambda y: F.relu(y) / 3), (x,))
    assert thirds == {}  # one third has no float that gives the same
    whole = torch.arange(-3, 3, device="xpu")
    program: Any = jit.fuse(frozen(After(nn.Identity(), lambda y: torch.relu(y * 2 + 1)), whole))
    assert jit.fused(program) == {} and program(whole).tolist() == [0, 0, 0, 1, 3, 5]

    def written(y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        z = F.relu(y)
        r[0] = 2.0
        return z + r

    model = After(layer, written)
    program = jit.fuse(frozen(model, x, x.clone()))
    near(program(x, x.clone()), model(x, x.clone()))


def test_attention_and_norms() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.scale = nn.LayerNorm(64), nn.Parameter(torch.rand(64))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            q = x.view(2, 5, 4, 16).transpose(1, 2)
            weights = torch.softmax(torch.matmul(q, q.transpose(-1, -2)) / 4.0, -1)
            y = y + torch.matmul(weights, q).transpose(1, 2).reshape(2, 5, 64)
            z = self.norm(y) + y
            z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.scale * z

    model = Layer().to("xpu")
    call = (rand(2, 5, 64, dtype=torch.float32), rand(2, 5, 64, dtype=torch.float32))
    found = check(model, call)
    assert found["attention"] == found["add + layer_norm"] == found["rms_norm"] == 1


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.out = Residual(), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.out(self.block(x).mean((2, 3)))) * 2


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_trace_of_an_optimized_model(dtype: torch.dtype | None, tmp_path: Path) -> None:
    model = ipex_core.optimize(Network().to("xpu").eval(), dtype=dtype)
    x = rand(2, 8, 7, 7)
    with torch.no_grad():
        wanted = model(x)
        program: Any = torch.jit.freeze(torch.jit.trace(model, x))
        near(program(x), wanted)
        near(program(x[:1, :, :5]), model(x[:1, :, :5]))
    assert str(program.graph).count("ipex_xpu::chain") == 3
    file = tmp_path / "program.pt"
    torch.jit.save(program, str(file))
    torch.save((x.cpu(), wanted.cpu()), tmp_path / "call.pt")
    # The op comes with the device: nothing of ipex is imported here.
    code = (
        "import torch, warnings\n"
        "warnings.simplefilter('ignore')\n"
        f"x, wanted = torch.load({str(tmp_path / 'call.pt')!r})\n"
        f"program = torch.jit.load({str(file)!r})\n"
        "with torch.no_grad(): found = program(x.to('xpu')).cpu()\n"
        "torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)\n"
        "print('same')\n"
    )
    assert output(code) == "same"


def test_gradients_of_a_program() -> None:
    model = Network().to("xpu").eval()
    x = rand(2, 8, 7, 7).requires_grad_()
    program: Any = jit.fuse(frozen(model, x.detach()))
    program(x).sum().backward()
    assert x.grad is not None
    other = x.detach().clone().requires_grad_()
    model(other).sum().backward()
    assert other.grad is not None
    near(x.grad, other.grad)


def test_switched_off() -> None:
    program = frozen(After(nn.Conv2d(2, 2, 1), F.relu).to("xpu"), rand(1, 2, 3, 3))
    jit.enable_onednn_fusion(False)
    try:
        assert jit.fuse(program) is program
    finally:
        jit.enable_onednn_fusion(True)


def test_programs_of_the_cpu_stay_theirs() -> None:
    program = frozen(After(nn.Conv2d(2, 2, 1), F.relu), torch.randn(1, 2, 3, 3))
    assert "ipex_xpu" not in str(jit.fuse(program).graph)
