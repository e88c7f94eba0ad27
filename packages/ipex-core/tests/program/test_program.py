# SPDX-License-Identifier: Apache-2.0
"""Programs: what the builder refuses, what the reference interpreter computes, what a program keeps."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

import ipex_core  # noqa: F401
from ipex_core.errors import OpArgumentError, UnknownOpError
from ipex_core.library.checks import are_checked
from ipex_core.program import Program, ProgramBuilder
from ipex_core.program.builtins import POINTWISE


def run(build, *inputs):
    """Build with ``build(builder, *input registers)`` and run the reference; ints become int inputs."""
    b = ProgramBuilder()
    registers = [
        b.input_int(f"n{i}") if isinstance(value, int) else b.input(f"x{i}")
        for i, value in enumerate(inputs)
    ]
    outputs = build(b, *registers)
    program = b.build(outputs if isinstance(outputs, (list, tuple)) else [outputs])
    result = program.run_reference(*inputs)
    return result if isinstance(outputs, (list, tuple)) else result[0]


def test_ops_get_their_defaults_and_keywords():
    x, r, w = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
    got = run(lambda b, x, r, w: b.call("add_rms_norm", x, r, weight=w, eps=1e-3), x, r, w)
    want = torch.ops.ipex.add_rms_norm(x, r, w, 1e-3, 0.0)
    assert all(map(torch.equal, got, want))
    got = run(lambda b, x: b.call("rms_norm", x, None), x)
    assert torch.equal(got, torch.ops.ipex.rms_norm(x, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_built_ins(dtype):
    x, y = torch.randn(4, 6, dtype=dtype), torch.randn(4, 6, dtype=dtype)
    ids, table = torch.tensor([[1, 0], [2, 2]]), torch.randn(3, 5, dtype=dtype)
    rows = torch.tensor([3, 0])
    cases = [
        (lambda b, w, i: b.call("embedding", w, i), (table, ids), table[ids]),
        (lambda b, x, i: b.call("select_rows", x, i), (x, rows), x[rows]),
        (lambda b, x: b.call("reshape", x, [0, 2, -1]), (x,), x.reshape(4, 2, 3)),
        (lambda b, x, n: b.call("reshape", x, [n, -1]), (x, 3), x.reshape(3, 8)),
        (lambda b, x: b.call("narrow", x, 1, 2, 3), (x,), x[:, 2:5]),
        (lambda b, x, n: b.call("narrow", x, -2, n, length=1), (x, 1), x[1:2]),
        (lambda b, x: b.call("transpose", x, 0, -1), (x,), x.T),
        (lambda b, x: b.call("cast", x, torch.float64), (x,), x.double()),
        (lambda b, x, y: b.call("add", x, y), (x, y), x + y),
        (lambda b, x: b.call("add", x, 2), (x,), x + 2),
        (lambda b, x, y: b.call("mul", x, y), (x, y), x * y),
        (lambda b, x: b.call("mul", x, b=0.5), (x,), x * 0.5),
        (lambda b, x: b.call("tanh", x), (x,), x.tanh()),
        (lambda b, x: b.call("clamp", x, -0.3, 0.9), (x,), x.clamp(-0.3, 0.9)),
    ]
    for build, inputs, want in cases:
        got = run(build, *inputs)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def test_built_ins_of_graphs():
    """Each built-in that graphs of stock ops need, beside the stock op."""
    x, y = torch.randn(2, 4, 6, 6), torch.randn(4, 1, 1)
    image = x.to(memory_format=torch.channels_last)
    window = torch.randn(3, 2, 4)
    f = torch.nn.functional
    code = [POINTWISE.index("sigmoid"), 0, -1, -1, POINTWISE.index("mul"), 3, 1, -1]
    code += [POINTWISE.index("add"), 4, 2, -1]
    cases = [
        (lambda b, x: b.call("permute", x, [0, 2, 3, 1]), (x,), x.permute(0, 2, 3, 1)),
        (lambda b, y: b.call("expand", y, [2, -1, 6, 6]), (y,), y.expand(2, -1, 6, 6)),
        (lambda b, x, n: b.call("unsqueeze", x, n), (x, -1), x.unsqueeze(-1)),
        (lambda b, y: b.call("squeeze", y, 1), (y,), y.squeeze(1)),
        (lambda b, x, n: b.call("slice", x, 1, -3, n, 2), (x, 9), x[:, 1::2]),
        (lambda b, x: b.call("select", x, 2, -1), (x,), x[:, :, -1]),
        (lambda b, x: b.call("contiguous", x), (image,), x),
        (lambda b, x: b.call("channels_last", x), (x,), image),
        (lambda b, x, y: b.call("cat", [x, y], 1), (x, image), torch.cat([x, x], 1)),
        (lambda b, x: b.call("pad", x, [1, -2], 0.5), (x,), f.pad(x, [1, -2], value=0.5)),
        (
            lambda b, x, y: b.call("pointwise", [x, y], code, [0.5], torch.float16),
            (x, y),
            (x.sigmoid() * y + 0.5).half(),
        ),
        (
            lambda b, x: b.call("max_pool2d", x, [3], [2], [1], [1], True),
            (image,),
            f.max_pool2d(image, 3, 2, 1, ceil_mode=True),
        ),
        (
            lambda b, x: b.call("avg_pool2d", x, [2, 3], [], [1], False, False, None),
            (x,),
            f.avg_pool2d(x, (2, 3), None, 1, count_include_pad=False),
        ),
        (
            lambda b, x, w: b.call(
                "depthwise_convolution", x, w, None, [1, 2], [1, 0], [1, 1], "relu"
            ),
            (image, window),
            f.conv2d(image, window.permute(2, 0, 1)[:, None], None, (1, 2), (1, 0), 1, x.shape[1])
            .relu()
            .contiguous(memory_format=torch.channels_last),
        ),
        (
            lambda b, x: b.call("group_norm", x, 1, None, None, 1e-5),
            (image,),
            f.group_norm(image, 1).contiguous(memory_format=torch.channels_last),
        ),
        (
            lambda b, x: b.call("upsample_bilinear2d", x, 7, 9, False, 0.0, 0.0),
            (image,),
            f.interpolate(image, (7, 9), mode="bilinear"),
        ),
        (
            lambda b, x: b.call("upsample_nearest2d", x, 7, 9, 0.0, 0.0),
            (x,),
            f.interpolate(x, (7, 9)),
        ),
        (lambda b, x: b.call("mean", x, [2, 3], True), (x,), x.mean([2, 3], True)),
        (lambda b, x: b.call("sum", x, [], False), (x,), x.sum()),
        (lambda b, x: b.call("amax", x, [-1], False), (x,), x.amax(-1)),
    ]
    for build, inputs, want in cases:
        got = run(build, *inputs)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want)
        if got.dim() == 4:
            assert got.is_contiguous() == want.is_contiguous()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b, x: b.call("pointwise", [x], [0, 0, 9, -1], [], torch.float32), "operand 1"),
        (lambda b, x: b.call("permute", x, [0, 0]), r"dims must have each dimension .* once"),
        (lambda b, x: b.call("slice", x, 0, 0, 1, 0), "step must be positive, got 0"),
        (lambda b, x: b.call("cat", [], 0), "tensors must have at least 1"),
        (lambda b, x: b.call("pad", x, [1], 0.0), "padding must have two numbers"),
        (lambda b, x: b.call("max_pool2d", x, [0], [], [0], [1], False), "at least 1, got 0"),
        (lambda b, x: b.call("sum", x, [1, 1], False), "dims must be distinct"),
        (
            lambda b, x: b.call("depthwise_convolution", x, x, None, [1], [0, 0], [1, 1]),
            "stride must have 2 numbers, got 1",
        ),
        (
            lambda b, x: b.call("upsample_nearest2d", x, 0, 3, 0.0, 0.0),
            "height must be positive, got 0",
        ),
    ],
)
def test_built_ins_refuse_what_is_known_to_be_wrong(call, message):
    b = ProgramBuilder()
    with pytest.raises(OpArgumentError, match=message):
        call(b, b.input("x"))


def test_arguments_are_written_to():
    cache, rows = torch.zeros(2, 3), torch.ones(2, 3)

    def build(b, cache, rows):
        assert b.call("copy_", cache, rows) is None
        return b.call("empty_like", b.call("mul", cache, 2.0))

    assert run(build, cache, rows).shape == (2, 3)
    assert torch.equal(cache, rows)


@pytest.mark.parametrize("gate", ["none", "silu", "gelu", "gelu_tanh"])
def test_a_linear_layer_with_a_plain_weight(gate):
    rows = 5 if gate == "none" else 10
    x, weight, bias = torch.randn(3, 8), torch.randn(rows, 8), torch.randn(rows)
    first, second = torch.randn(3, 5), torch.randn(3, 5)
    got = run(
        lambda b, x, w, c, r, s: b.call("plain_linear", x, w, 5, c, r, residual2=s, gate=gate),
        *(x, weight, bias, first, second),
    )
    y = x @ weight.T + bias
    if gate != "none":
        approximate = "tanh" if gate == "gelu_tanh" else "none"
        left, right = y.chunk(2, dim=1)
        act = torch.nn.functional.silu(left)
        if gate != "silu":
            act = torch.nn.functional.gelu(left, approximate=approximate)
        y = act * right
    torch.testing.assert_close(got, y + first + second)
    got = run(
        lambda b, x, w, m: b.call("plain_linear", x, w, rows, activation="relu", mul=m),
        *(x, weight, torch.full((3, rows), 2.0)),
    )
    torch.testing.assert_close(got, 2 * (x @ weight.T).relu())


def test_calls_on_a_device():
    """Checked at the first run with inputs of some shapes, not checked and without autograd at the next."""
    b = ProgramBuilder()
    x, ids, n = b.input("x"), b.input("ids"), b.input_int("n")
    weight = torch.nn.Parameter(torch.randn(6, 8))
    y = b.call("plain_linear", b.call("rms_norm", x, None), b.constant(weight), 6)
    parts = [b.call("narrow", y, 1, 0, n), b.call("mul", b.call("narrow", y, 1, 2, 2), 2.0)]
    z = b.call("reshape", b.call("cat", parts, 1), [0, 2, -1])
    b.call("copy_", x, x)
    program = b.build([b.call("select_rows", z, ids), y])
    run_on_device = program._run_on_device  # here with tensors of the CPU
    for size in (3, 4, 3, 3):
        inputs = torch.randn(size, 8), torch.tensor([2, 0]), 4
        assert all(map(torch.equal, run_on_device(inputs), program.run_reference(*inputs)))
        assert not run_on_device(inputs)[1].requires_grad
    assert not are_checked()
    with pytest.raises(RuntimeError, match=r"program: instruction 2 \(narrow\)"):
        run_on_device((torch.randn(3, 8), torch.tensor([2, 0]), 9))
    assert not are_checked()
    assert not program.on(torch.device("cpu"))._on_device


def test_inputs_can_be_outputs():
    x = torch.randn(3)
    b = ProgramBuilder()
    r = b.input("x")
    out = b.build([r, b.call("add", r, 1.0), r]).run(x)
    assert out[0] is x or torch.equal(out[0], x)
    assert torch.equal(out[1], x + 1)
    assert len(out) == 3


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda b, x, n: b.call("rms_nrom", x), UnknownOpError, "did you mean rms_norm"),
        (lambda b, x, n: b.call("rms_norm"), TypeError, "rms_norm: argument 'x' must be given"),
        (lambda b, x, n: b.call("rms_norm", x), TypeError, "argument 'weight' must be given"),
        (
            lambda b, x, n: b.call("rms_norm", x, None, 0, 0, 0),
            TypeError,
            "takes 4 arguments, got 5",
        ),
        (lambda b, x, n: b.call("rms_norm", x, None, x=x), TypeError, "'x' must be given once"),
        (lambda b, x, n: b.call("rms_norm", x, None, sum=1), TypeError, "no argument 'sum'"),
        (lambda b, x, n: b.call("rms_norm", n, None), TypeError, "x must be a tensor register"),
        (lambda b, x, n: b.call("rms_norm", None, None), TypeError, "x must be a tensor .* None"),
        (
            lambda b, x, n: b.call("rms_norm", torch.ones(2), None),
            TypeError,
            r"use constant\(\) or input\(\)",
        ),
        (lambda b, x, n: b.call("rms_norm", x, None, "1"), TypeError, "eps must be a number"),
        (lambda b, x, n: b.call("rms_norm", x, 1), TypeError, "tensor register or None, got 1"),
        (lambda b, x, n: b.call("narrow", x, 0, x, 1), TypeError, "start must be an int or"),
        (lambda b, x, n: b.call("narrow", x, 0, True, 1), TypeError, "start must be .* got True"),
        (lambda b, x, n: b.call("reshape", x, 3), TypeError, "sizes must be a list of ints, got 3"),
        (lambda b, x, n: b.call("reshape", x, [1.5]), TypeError, "sizes must be an int"),
        (lambda b, x, n: b.call("cast", x, "float32"), TypeError, "dtype must be a torch.dtype"),
        (lambda b, x, n: b.call("gelu", x, 1), TypeError, "approximate must be a str, got 1"),
        (lambda b, x, n: b.call("tanh", ProgramBuilder().input("x")), ValueError, "of another"),
        (lambda b, x, n: b.build([n]), TypeError, "outputs must be a tensor register"),
        (lambda b, x, n: b.build(x), TypeError, "outputs must be a list of tensor registers"),
        (lambda b, x, n: b.input("x"), ValueError, "name must be new"),
        (lambda b, x, n: b.input_int(""), ValueError, "name must be new"),
        (lambda b, x, n: b.constant([1]), TypeError, "tensor must be a Tensor, got list"),
    ],
)
def test_mistakes_are_told_when_they_are_made(call, error, message):
    b = ProgramBuilder()
    with pytest.raises(error, match=message):
        call(b, b.input("x"), b.input_int("n"))


def failing():
    b = ProgramBuilder()
    x = b.input("x")
    y = b.call("mul", x, 2.0)
    return b.build([b.call("rms_norm", y, b.constant(torch.ones(4)))])


def test_an_error_names_the_instruction():
    message = r"program: instruction 1 \(rms_norm\): rms_norm: weight must be 1-D .* = 3"
    for method in (failing().run, failing().run_reference):
        with pytest.raises(
            RuntimeError, match=message
        ):  # a ValueError too where no kernel is loaded
            method(torch.ones(2, 3))
    b = ProgramBuilder()
    program = b.build([b.call("add", b.input("x"), b.input("y"))])
    with pytest.raises(
        RuntimeError, match=r"program: instruction 0 \(add\): add: b must broadcast"
    ):
        program.run_reference(torch.ones(2), torch.ones(3))


@pytest.mark.parametrize("method", ["run", "run_reference"])
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), r"takes 2 inputs \(x, n\), got 0"),
        ((torch.ones(4, 2), 1, 2), r"takes 2 inputs \(x, n\), got 3"),
        ((1, 1), "x must be a Tensor, got int"),
        ((torch.ones(4, 2), 1.5), "n must be an int, got float"),
        ((torch.ones(4, 2), "1"), "n must be an int, got str"),
        ((None, 1), "x must be a Tensor, got NoneType"),
    ],
)
def test_wrong_inputs(method, inputs, message):
    b = ProgramBuilder()
    program = b.build([b.call("narrow", b.input("x"), 0, b.input_int("n"), 1)])
    with pytest.raises(TypeError, match=f"Program.run: {message}"):
        getattr(program, method)(*inputs)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda b, x, i: b.call("embedding", x, i), r"embedding: ids must be in \[0, 4\), got 4"),
        (lambda b, x, i: b.call("select_rows", x, i), r"index must be in \[0, 4\), got 4"),
        (lambda b, x, i: b.call("embedding", x, x), "ids must be int32 or int64"),
        (lambda b, x, i: b.call("embedding", i, i), "weight must be 2-D, got 1-D"),
        (lambda b, x, i: b.call("narrow", x, 2, 0, 1), r"dim must be a dimension of x \(2-D\)"),
        (lambda b, x, i: b.call("narrow", x, 0, 3, 2), r"must lie in \[0, 4\], got 3, 2"),
        (lambda b, x, i: b.call("narrow", x, 0, -1, 2), r"must lie in \[0, 4\], got -1, 2"),
        (lambda b, x, i: b.call("transpose", x, 0, 5), "b must be a dimension of x"),
        (lambda b, x, i: b.call("reshape", x, [4, 2, 0]), "have 0 only below 2"),
        (lambda b, x, i: b.call("reshape", x, [3, -1]), "give the shape of 8 elements"),
        (lambda b, x, i: b.call("reshape", x, [-1, -1]), "negative but for one -1"),
        (lambda b, x, i: b.call("mul", x, i), "b must have the dtype of a = float32, got int64"),
        (lambda b, x, i: b.call("mul", i, 2), "mul: a must have dtype float32, .* got int64"),
        (lambda b, x, i: b.call("add", x, b.constant(torch.ones(3))), "b must broadcast with a"),
        (lambda b, x, i: b.call("copy_", x, b.constant(torch.ones(3))) or x, "shape of dst ="),
        (
            lambda b, x, i: b.call("plain_linear", x, b.constant(torch.ones(3, 3)), 3),
            r"weight must have shape \[3, 2\]",
        ),
    ],
)
@pytest.mark.parametrize("method", ["run", "run_reference"])
def test_bad_arguments_of_built_ins(method, build, message):
    b = ProgramBuilder()
    program = b.build([build(b, b.input("x"), b.input("i"))])
    with pytest.raises(RuntimeError, match=message):
        getattr(program, method)(torch.ones(4, 2), torch.tensor([0, 4]))


def test_registers_are_freed_after_their_last_use():
    b = ProgramBuilder()
    x = b.input("x")
    y = b.call("add", x, 1.0)
    view = b.call("reshape", y, [-1])
    z = b.call("mul", view, 2.0)
    b.call("tanh", z)
    program = b.build([z])
    frees = [instruction.frees for instruction in program.instructions]
    assert frees == [(), (), (view.index, y.index), (z.index + 1,)]
    recycles = [instruction.recycles for instruction in program.instructions]
    assert recycles == [(), (), (y.index,), (z.index + 1,)]


def test_memory_behind_an_output_is_not_recycled():
    b = ProgramBuilder()
    y = b.call("add", b.input("x"), 1.0)
    program = b.build([b.call("narrow", b.call("reshape", y, [-1]), 0, 0, 2)])
    assert all(y.index not in instruction.recycles for instruction in program.instructions)


def test_constants_are_kept_and_shared():
    b = ProgramBuilder()
    weight = torch.nn.Parameter(torch.ones(3))
    register = b.constant(weight)
    assert b.constant(weight) is register
    program = b.build([b.call("add", register, b.input("x"))])
    with torch.no_grad():
        weight.fill_(5.0)
    (y,) = program.run(torch.zeros(3))
    assert torch.equal(y, torch.full((3,), 5.0))
    assert not y.requires_grad
    kept = weakref.ref(weight)
    del b, register, weight
    gc.collect()
    assert kept() is None  # only the memory is kept
    assert torch.equal(program.run(torch.zeros(3))[0], y)


def test_a_builder_can_go_on():
    b = ProgramBuilder()
    y = b.call("add", b.input("x"), 1.0)
    first = b.build([y])
    second = b.build([b.call("mul", y, 3.0)])
    assert first.run(torch.ones(1))[0].item() == 2.0
    assert second.run(torch.ones(1))[0].item() == 6.0


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["deepcopy", "pickle"]
)
def test_copies(copied):
    program = failing()
    program.run(torch.ones(1, 4))
    again = copied(program)
    assert isinstance(again, Program)
    assert torch.equal(again.run(torch.ones(1, 4))[0], program.run(torch.ones(1, 4))[0])


def test_autocast_and_gradients_do_not_matter():
    b = ProgramBuilder()
    packed = torch.ops.ipex.pack_linear_weight(torch.eye(8))
    program = b.build([b.call("linear", b.input("x"), b.constant(packed), 8)])
    x = torch.randn(2, 8, requires_grad=True)
    for method in (program.run, program.run_reference):
        with torch.autocast("cpu", torch.bfloat16):
            (y,) = method(x)
        assert y.dtype == torch.float32
        assert not y.requires_grad


def test_text():
    program = failing()
    assert "1: %3 = rms_norm(%1, %2, 1e-06, 0.0)" in str(program)
    assert program.inputs == ("x",)
    assert "2 instructions" in repr(program)
