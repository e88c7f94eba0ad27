# SPDX-License-Identifier: Apache-2.0
"""The built-in instructions of whole graphs: natively the same as their reference."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from program_calls import both, layouts, refused, same, single, steps

from ipex_core.errors import OpArgumentError
from ipex_core.program import ProgramBuilder
from ipex_core.program.builtins import POINTWISE
from ipex_core.program.pointwise import POINTWISE_FUNCTIONS

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
CHANNELS_LAST = torch.channels_last
NAN, INF = float("nan"), float("inf")


# --- views ----------------------------------------------------------------------------------------------------------

BASE = torch.arange(120).view(2, 3, 4, 5)


@pytest.mark.parametrize(
    "call",
    [
        ("permute", [0, 2, 3, 1]),
        ("permute", [-1, 0, -2, 1]),
        ("expand", [2, 3, -1, 5]),
        ("expand", [6, 1, 2, -1, 4, 5]),
        ("expand", [0, 2, 3, 4, 5]),
        ("unsqueeze", 0),
        ("unsqueeze", 2),
        ("unsqueeze", 4),
        ("unsqueeze", -1),
        ("squeeze", 0),
        ("squeeze", 1),
        ("squeeze", -1),
        ("slice", 1, 1, 3, 1),
        ("slice", 2, -3, 100, 2),
        ("slice", -1, 4, 1, 1),
        ("slice", 3, -100, 2**63 - 1, 3),
        ("slice", 0, 0, -1, 2**62),
        ("select", 0, 1),
        ("select", -1, -5),
        ("select", 2, 3),
    ],
    ids=str,
)
def test_views(call):
    name, *args = call
    cases = [BASE, BASE.transpose(0, 3).contiguous().transpose(0, 3), BASE[:, ::2], BASE.bool()]
    for x in [*cases, BASE.to(torch.float64), BASE[:1], BASE[..., :1]]:
        program, inputs = single(name, x, *args)
        try:
            (want,) = program.run_reference(*inputs)
        except RuntimeError as error:
            with pytest.raises(RuntimeError) as caught:
                program.run(*inputs)
            assert str(caught.value) == str(error)
            continue
        (got,) = program.run(*inputs)
        assert torch.equal(got, want)
        assert steps(got) == steps(want) or not got.numel()
        assert got.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_views_of_small_tensors():
    point, none = torch.tensor(3.0), torch.empty(0, 3)
    for args in (
        ("permute", point, []),
        ("expand", point, [2, 0]),
        ("expand", point, []),
        ("unsqueeze", point, -1),
        ("squeeze", point, -1),
        ("slice", none, 0, 0, 5, 1),
        ("select", none, 1, 2),
        ("permute", none, [1, 0]),
    ):
        same(*args)


# --- pointwise ------------------------------------------------------------------------------------------------------


def code_of(*instructions):
    """Return the code of instructions ``(name, operands...)``."""
    words = []
    for name, *operands in instructions:
        words += [POINTWISE.index(name), *operands, *[-1] * (3 - len(operands))]
    return words


def test_functions_are_numbered_as_in_cpp():
    header = Path(__file__).parents[1] / "csrc/ops/program/pointwise.h"
    found = re.findall(r"\bF\((\w+), (\d)\)", header.read_text())
    assert [name for name, _ in found] == list(POINTWISE)
    assert [int(count) for _, count in found] == [n for n, _ in POINTWISE_FUNCTIONS.values()]


SPECIAL = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1e-8, 1e30, -3e38, 1e4]


def values(n, dtype, seed=0):
    torch.manual_seed(seed)
    x = torch.cat([torch.randn(n // 2) * 3, torch.randn(n - n // 2).exp() * 10])
    x[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool], ids=str)
@pytest.mark.parametrize("name", POINTWISE)
def test_each_function(name, dtype):
    count = POINTWISE_FUNCTIONS[name][0]
    inputs = [values(1031, dtype, i) for i in range(count)]
    if count > 1:
        inputs[1][: len(SPECIAL)] = inputs[1][: len(SPECIAL)].roll(3)
    if name == "gelu" and dtype != torch.bool:
        inputs[0][inputs[0].isinf()] = 0  # where stock PyTorch gives NaN
    got, want = both("pointwise", inputs, code_of((name, *range(count))), [], torch.float32)
    # The stock GELU of a negative number is a difference that cancels.
    atol = 1e-6 if name == "gelu" else 3e-7
    torch.testing.assert_close(got, want, rtol=1e-6, atol=atol, equal_nan=True)
    if dtype in FLOATS[1:]:
        got, want = both("pointwise", inputs, code_of((name, *range(count))), [], dtype)
        rtol = 8e-3 if dtype == torch.bfloat16 else 2e-3
        torch.testing.assert_close(got, want, rtol=rtol, atol=rtol, equal_nan=True)


@pytest.mark.parametrize("name", ["sin", "cos", "log", "exp", "log1p", "expm1", "floor", "round"])
def test_wide_ranges(name):
    exponents = torch.linspace(-140, 127.9, 4001)
    x = torch.cat([exponents.exp2(), -exponents.exp2(), torch.linspace(-200, 200, 4001)])
    same("pointwise", [x], code_of((name, 0)), [], torch.float32, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("exponent", [2.0, 3.0, 1.0, -1.0, 0.5, -2.5, 0.0])
def test_constant_powers(exponent):
    x = values(700, torch.float32)
    same("pointwise", [x], code_of(("pow", 0, 1)), [exponent], torch.float32, rtol=1e-6)


IMAGE = torch.randn(2, 20, 9, 7)
SHAPES = [
    (torch.randn(3, 700), torch.randn(3, 700)),
    (torch.randn(40, 700), torch.randn(700)),
    (torch.randn(40, 7), torch.randn(7)),
    (torch.randn(40, 700), torch.randn(40, 1)),
    (torch.randn(300, 7), torch.randn(300, 1)),
    (torch.randn(40, 1), torch.randn(7)),
    (torch.randn(700, 40).T, torch.randn(40, 700)),
    (torch.randn(5000), torch.tensor(0.3)),
    (torch.tensor(2.0), torch.tensor(0.3)),
    (torch.randn(4, 1, 300), torch.randn(1, 5, 1)),
    (torch.randn(3, 5, 40)[:, ::2], torch.randn(3, 3, 40)),
    (torch.randn(2, 9, 64)[..., 3:], torch.randn(2, 1, 61)),
    (torch.randn(0, 3), torch.randn(3)),
    (IMAGE, torch.randn(20, 1, 1)),
    (IMAGE.to(memory_format=CHANNELS_LAST), torch.randn(20, 1, 1)),
    (IMAGE.to(memory_format=CHANNELS_LAST), IMAGE.to(memory_format=CHANNELS_LAST)),
    (IMAGE.to(memory_format=CHANNELS_LAST), IMAGE),
    (IMAGE.to(memory_format=CHANNELS_LAST), IMAGE[:1, :, :, :1]),
    (torch.randn(2, 3, 1, 5, 1, 2), torch.randn(3, 4, 1, 3, 2)),
]


@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_broadcasting(case, threads):
    a, b = SHAPES[case]
    chain = code_of(("sub", 0, 1), ("mul", 3, 3), ("add", 4, 2), ("maximum", 0, 5))
    for dtype in FLOATS:
        same("pointwise", [a.to(dtype), b], chain, [0.25], torch.float32, rtol=1e-6, atol=1e-6)
        same("pointwise", [b.to(dtype), a], chain, [0.25], dtype, rtol=1e-2, atol=1e-2)
    same("pointwise", [a > 0, b], code_of(("where", 0, 1, 2)), [-1.5], torch.float32)
    same("pointwise", [a, b], code_of(("lt", 0, 1)), [], torch.bool)
    same("pointwise", [a, b], code_of(("add", 0, 1)), [], torch.float32)


def test_long_chains(threads):
    """Many values that live at once, values that die, values that nothing reads, repeated operands."""
    torch.manual_seed(0)
    x = [torch.randn(37, 130), torch.randn(130), torch.randn(37, 1)]
    chain = [("add", 0, 1), ("mul", 1, 2), ("exp", 0)]  # 4, 5, 6
    for i in range(60):
        chain.append((("add", "sub", "maximum")[i % 3], 4 + i, 4 + i // 2))
    chain.append(("tanh", 3))
    chain.append(("add", 4 + 62, 4 + 62))
    chain.append(("where", 4, 4 + 64, 0))
    got, want = both("pointwise", x, code_of(*chain), [0.5], torch.float32)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (([], [0], [], torch.float32), "inputs must have at least 1 tensor"),
        ((2, code_of(("add", 0, 1)), [], torch.int64), "dtype must be one of .*, got int64"),
        ((2, [0, 0, 1], [], torch.float32), "code must have four numbers for each of .*, got 3"),
        ((2, [], [], torch.float32), "code must have four numbers for each of .*, got 0"),
        ((2, [99, 0, 1, -1], [], torch.float32), r"code of instruction 0 must be in \[0, 41\)"),
        ((2, code_of(("add", 0, 3)), [1.0], torch.float32), r"operand 1 .* in \[0, 3\), got 3"),
        ((2, code_of(("add", 0, -1)), [1.0], torch.float32), r"operand 1 .* in \[0, 3\), got -1"),
        ((2, [4, 0, 1, -1], [], torch.float32), "operand 1 of instruction 0 must be -1, got 1"),
    ],
)
def test_wrong_code_is_refused_when_a_program_is_built(args, message):
    inputs, *rest = args
    b = ProgramBuilder()
    registers = [b.input(f"x{i}") for i in range(inputs)] if inputs else []
    with pytest.raises(OpArgumentError, match=f"^pointwise: {message}"):
        b.call("pointwise", registers, *rest)


def test_wrong_inputs_of_pointwise():
    x, add = torch.ones(2, 3), code_of(("add", 0, 1))
    refused("input 1 must have dtype .* got int64", "pointwise", [x, x.long()], add, [], x.dtype)
    refused(
        r"input 1 must broadcast with the inputs before it of shape \[2, 3\], got \[4\]",
        "pointwise",
        [x, torch.ones(4)],
        add,
        [],
        x.dtype,
    )
    b = ProgramBuilder()
    n = b.input_int("n")
    program = b.build([b.call("pointwise", [b.input("x")], [n, 0, -1, -1], [], torch.float32)])
    assert torch.equal(program.run(4, -x)[0], x)
    for method in (program.run, program.run_reference):
        with pytest.raises(RuntimeError, match=r"code of instruction 0 must be in \[0, 41\)"):
            method(41, x)
        with pytest.raises(RuntimeError, match="operand 1 of instruction 0 must be in"):
            method(0, x)


# --- casts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool], ids=str)
@pytest.mark.parametrize("to", [*FLOATS, torch.bool], ids=str)
def test_casts(dtype, to, threads):
    x = values(40000, dtype).view(2, 4, 50, 100)
    for one in (x, x.to(memory_format=CHANNELS_LAST), x.transpose(1, 3), x[:, :, ::3], x[:, :0]):
        same("cast", one, to)


# --- layouts and copies ---------------------------------------------------------------------------------------------

ITEMS = [torch.bool, torch.float16, torch.float32, torch.int64, torch.complex64]


@pytest.mark.parametrize("dtype", ITEMS, ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 3, 5, 7), (1, 70, 33, 130), (3, 64, 16, 16), (2, 1, 1, 40), (2, 3, 0, 4)], ids=str
)
def test_layouts(dtype, shape, threads):
    for x in layouts(dtype, *shape):
        same("contiguous", x)
        same("channels_last", x)
        if x.numel():
            same("reshape", x, [0, -1])


def test_layouts_that_are_there_already():
    x = torch.randn(2, 3, 4, 5)
    image = x.to(memory_format=CHANNELS_LAST)
    assert same("contiguous", x).data_ptr() == x.data_ptr()
    assert same("channels_last", image).data_ptr() == image.data_ptr()
    conjugate = torch.randn(3, 5, dtype=torch.complex64).T.conj()
    assert torch.equal(same("contiguous", conjugate), conjugate)
    refused("x must be 4-D, got 3-D", "channels_last", x[0])


@pytest.mark.parametrize("dtype", ITEMS[:4], ids=str)
def test_cat(dtype, threads):
    for x, y in zip(layouts(dtype, 2, 9, 5, 40), layouts(dtype, 2, 9, 5, 40)[::-1], strict=True):
        for dim in (0, 1, -1):
            same("cat", [x, y], dim)
            same("cat", [x, x], dim)
            same("cat", [x.narrow(dim, 0, 1), x, y.narrow(dim, 0, 0)], dim)
    same("cat", [torch.randn(7).to(dtype)], 0)
    x = torch.ones(2, 3)
    refused("dim must be a dimension of x", "cat", [x], 2)
    refused("tensor 1 must have the dtype of tensor 0 = float32", "cat", [x, x.long()], 0)
    refused("tensor 1 must have the shape .* except in dimension 0", "cat", [x, x[:, :2]], 0)
    refused("tensor 1 must have the shape .* except in dimension 0", "cat", [x, x[0]], 0)
    with pytest.raises(OpArgumentError, match="tensors must have at least 1"):
        single("cat", [], 0)


@pytest.mark.parametrize("dtype", [*ITEMS[:4], torch.bfloat16, torch.uint8], ids=str)
def test_pad(dtype, threads):
    for x in layouts(dtype, 2, 9, 5, 40):
        for padding in ([1, 1], [0, 0, 2, 3], [1, -2, -1, 4, 2, 0], [], [-3, 0], [0, 1] * 4):
            same("pad", x, padding, 2.5)
        same("pad", x, [-20, -20, 1, 1], 1.0)
    if dtype.is_floating_point:
        same("pad", torch.randn(3, 4).to(dtype), [2, 3, 1, 0], -INF)
    same("pad", torch.zeros(0, 3).to(dtype), [1, 1, 2, 0], 1.0)
    x = torch.ones(2, 3)
    refused("at most two numbers for each dimension", "pad", x, [1] * 6, 0.0)
    refused("cut off at most 3 in dimension 1", "pad", x, [-2, -2], 0.0)
    with pytest.raises(OpArgumentError, match="two numbers for a dimension, got 3"):
        single("pad", x, [1, 2, 3], 0.0)


# --- pooling --------------------------------------------------------------------------------------------------------


def images(dtype, *shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    if x.numel() > 10:
        x.view(-1)[:: x.numel() // 5] = torch.tensor(NAN)
        x.view(-1)[1 :: x.numel() // 3] = -INF
    x = x.to(dtype)
    return [x, x.to(memory_format=CHANNELS_LAST), x.transpose(2, 3).contiguous().transpose(2, 3)]


POOLS = [
    ([3, 3], [2, 2], [1, 1]),
    ([2], [], [0]),
    ([3, 2], [1, 1], [1, 0]),
    ([5], [3], [2]),
    ([1, 4], [2, 1], [0, 2]),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_pooling(pool, ceil_mode, dtype, threads):
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    options = [(True, None), (False, None), (True, 7)]
    for shape in ((2, 3, 9, 12), (1, 130, 7, 5), (1, 2, 6, 600), (0, 3, 9, 9)):
        for x, (counted, divisor) in zip(images(dtype, *shape), options, strict=True):
            for dilation in ([1], [2, 1]):
                if dilation[0] * (pool[0][0] - 1) < shape[2]:
                    same("max_pool2d", x, *pool, dilation, ceil_mode)
            if shape[0]:
                call = ("avg_pool2d", x, *pool, ceil_mode, counted, divisor)
                same(*call, rtol=tolerance, atol=1e-6)


def test_errors_of_pooling():
    x = torch.ones(1, 2, 4, 4)
    refused("x must be 4-D, got 3-D", "max_pool2d", x[0], [2], [], [0], [1], False)
    refused("x must have dtype", "avg_pool2d", x.long(), [2], [], [0], False, True, None)
    room = r"x must have room for a window of 7 in dimension 2, got \[1, 2, 4, 4\]"
    refused(room, "max_pool2d", x, [3], [], [0], [3], False)
    for args, message in (
        (([2, 2, 2], [], [0], [1], False), "kernel_size must have 1 or 2 numbers, got 3"),
        (([0], [], [0], [1], False), "kernel_size must be at least 1, got 0"),
        (([2], [0], [0], [1], False), "stride must be at least 1, got 0"),
        (([2], [], [2], [1], False), "padding must be at most half of kernel_size = 2, got 2"),
        (([2], [], [0], [], False), "dilation must have 1 or 2 numbers, got 0"),
    ):
        with pytest.raises(OpArgumentError, match=message):
            single("max_pool2d", x, *args)
    with pytest.raises(OpArgumentError, match="divisor_override must not be 0"):
        single("avg_pool2d", x, [2], [], [0], False, True, 0)


# --- normalization --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((2, 6, 5, 7), 3),
        ((1, 32, 17, 19), 8),
        ((3, 33, 1, 1), 11),
        ((2, 64, 40, 41), 32),
        ((1, 20, 1, 300), 1),
        ((2, 12, 9), 12),
        ((2, 12), 4),
        ((1, 8, 3, 4, 5), 2),
        ((0, 4, 3, 3), 2),
        ((2, 4, 0, 3), 2),
    ],
)
def test_group_norm(shape, groups, dtype, threads):
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.manual_seed(0)
    plain = (torch.randn(shape) * 3 + 50).to(dtype)  # a mean that is large beside the deviation
    affine = torch.randn(2, shape[1])
    for x in (plain, plain.to(memory_format=CHANNELS_LAST)) if len(shape) == 4 else (plain,):
        for weight, bias in ((None, None), (affine[0], None), tuple(affine)):
            got, stock = both("group_norm", x, groups, weight, bias, 1e-5)
            assert steps(got) == steps(stock)
            wide = (None if one is None else one.double() for one in (weight, bias))
            want = torch.nn.functional.group_norm(x.double(), groups, *wide, 1e-5)
            torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_errors_of_group_norm():
    x, ones = torch.ones(1, 6, 4, 4), torch.ones(6)
    refused("x must have dtype", "group_norm", x.long(), 2, None, None, 1e-5)
    refused("x must have at least 2", "group_norm", x[0, 0, 0], 2, None, None, 1e-5)
    channels = r"x must have a multiple of groups = 4 channels, got \[1, 6, 4, 4\]"
    refused(channels, "group_norm", x, 4, None, None, 1e-5)
    refused(
        "weight must have dtype float32, got float64", "group_norm", x, 2, ones.double(), None, 1
    )
    refused(
        r"bias must be contiguous of shape \[6\], got \[5\]", "group_norm", x, 2, ones, ones[1:], 1
    )
    with pytest.raises(OpArgumentError, match="groups must be positive, got 0"):
        single("group_norm", x, 0, None, None, 1e-5)


# --- convolution ----------------------------------------------------------------------------------------------------


def depthwise_case(dtype, shape, window, offset=True):
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    weight = (torch.randn(*window, shape[1]) / (window[0] * window[1]) ** 0.5).to(dtype)
    return x, weight, torch.randn(shape[1]).to(dtype) if offset else None


DEPTHWISE = [
    # shape, window, stride, padding, dilation
    ((2, 16, 17, 14), [7, 7], [1, 1], [3, 3], [1, 1]),
    ((1, 40, 9, 33), [7, 7], [1, 1], [3, 3], [1, 1]),
    ((2, 19, 7, 7), [7, 7], [1, 1], [3, 3], [1, 1]),
    ((1, 130, 3, 4), [7, 7], [1, 1], [3, 3], [1, 1]),
    ((2, 33, 12, 60), [3, 3], [1, 1], [1, 1], [1, 1]),
    ((1, 32, 30, 31), [3, 3], [2, 2], [1, 1], [1, 1]),
    ((1, 17, 12, 9), [3, 3], [2, 2], [0, 0], [1, 1]),
    ((1, 24, 9, 50), [5, 5], [1, 1], [2, 2], [1, 1]),
    ((1, 24, 9, 50), [5, 5], [2, 2], [2, 2], [1, 1]),
    ((1, 48, 14, 22), [3, 3], [1, 1], [2, 4], [2, 1]),
    ((1, 48, 14, 22), [3, 3], [1, 1], [2, 2], [2, 2]),
    ((1, 70, 10, 20), [7, 7], [2, 2], [3, 3], [1, 1]),
    ((1, 21, 9, 12), [2, 4], [3, 1], [0, 2], [1, 1]),
    ((2, 5, 9, 30), [3, 3], [1, 1], [1, 1], [1, 1]),
    ((1, 64, 8, 8), [1, 1], [1, 1], [0, 0], [1, 1]),
    ((1, 16, 2, 3), [3, 3], [1, 1], [6, 7], [1, 1]),
    ((1, 20, 1, 40), [3, 5], [1, 1], [1, 9], [1, 1]),
    ((0, 16, 9, 9), [3, 3], [1, 1], [1, 1], [1, 1]),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", range(len(DEPTHWISE)))
def test_depthwise_convolution(case, dtype, threads):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    shape, window, *rest = DEPTHWISE[case]
    for channels_last in (True, False):
        x, weight, bias = depthwise_case(dtype, shape, window, channels_last)
        x = x.to(memory_format=CHANNELS_LAST) if channels_last else x
        tolerances = {"rtol": tolerance, "atol": tolerance}
        same("depthwise_convolution", x, weight, bias, *rest, "none", **tolerances)
        same("depthwise_convolution", x, weight, bias, *rest, "relu", **tolerances)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations_of_depthwise_convolution(activation, dtype):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for shape in ((1, 37, 8, 23), (1, 6, 5, 9)):
        x, weight, bias = depthwise_case(dtype, shape, [3, 3])
        x[0, 0, 0, 0] = NAN
        for one in (bias.float(), weight[0, 0], None):
            call = (x, weight, one, [1, 1], [1, 1], [1, 1], activation)
            same("depthwise_convolution", *call, rtol=tolerance, atol=tolerance)


def test_depthwise_convolution_of_views():
    x, weight, bias = depthwise_case(torch.float32, (2, 48, 10, 20), [3, 3])
    wide = weight.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    rest = ([1, 1], [1, 1], [1, 1])
    for one in (x[:, ::2], x[:, 8:32], x.to(memory_format=CHANNELS_LAST)[:, 8:32, 1:, 2:]):
        call = (one, wide[..., :24], bias[::2], *rest)
        same("depthwise_convolution", *call, rtol=1e-5, atol=1e-5)


def test_errors_of_depthwise_convolution():
    op, one = "depthwise_convolution", [1, 1]
    x, weight, bias = depthwise_case(torch.float32, (1, 4, 5, 6), [3, 3])
    for message, *args in (
        (r"x must be 4-D \[N, C, H, W\] with C > 0, got shape", x[0], weight, bias),
        ("x must have dtype", x.long(), weight.long(), bias),
        ("weight must have the dtype of x = float32, got float16", x, weight.half(), bias),
        (r"weight must be 3-D .* C = 4, got shape \[3, 3, 3\]", x, weight[..., :3], bias),
        (r"weight must be 3-D .* C = 4, got shape \[3, 4\]", x, weight[0], bias),
        ("bias must have the dtype of x = float32", x, weight, bias.half()),
        (r"bias must have shape \[4\], got \[3\]", x, weight, bias[:3]),
        ("x must have room for a window of 3 in dimension 3", x[..., :2], weight, bias),
    ):
        refused(message, op, *args, one, [0, 0], one)
    for args, message in (
        (([1], one, one), "stride must have 2 numbers, got 1"),
        (([0, 1], one, one), r"stride must be in \[1, 4096\], got 0"),
        ((one, [0, -1], one), r"padding must be in \[0, 4096\], got -1"),
        ((one, one, [1, 4097]), r"dilation must be in \[1, 4096\], got 4097"),
        ((one, one, one, "tanh"), "activation must be one of none, relu, .*, got tanh"),
    ):
        with pytest.raises(OpArgumentError, match=message):
            single(op, x, weight, bias, *args)


# --- upsampling -----------------------------------------------------------------------------------------------------

UPSAMPLES = [
    # shape, size
    ((2, 64, 5, 7), (20, 28)),
    ((1, 130, 6, 5), (12, 10)),
    ((2, 3, 9, 40), (21, 57)),
    ((1, 37, 12, 100), (5, 33)),
    ((1, 16, 4, 5), (4, 5)),
    ((1, 16, 4, 5), (4, 9)),
    ((3, 33, 1, 1), (6, 4)),
    ((1, 2, 8, 9), (1, 1)),
    ((0, 3, 4, 4), (8, 8)),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", range(len(UPSAMPLES)))
def test_bilinear_upsampling(case, dtype, threads):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    shape, size = UPSAMPLES[case]
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    for one in (x, x.to(memory_format=CHANNELS_LAST), x.transpose(2, 3).contiguous().mT):
        for rest in ((False, 0.0, 0.0), (True, 0.0, 0.0), (False, 2.3, 1.7)):
            same("upsample_bilinear2d", one, *size, *rest, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", range(len(UPSAMPLES)))
def test_nearest_upsampling(case, dtype, threads):
    shape, size = UPSAMPLES[case]
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    for one in (x, x.to(memory_format=CHANNELS_LAST), x.transpose(2, 3).contiguous().mT):
        for scales in ((0.0, 0.0), (2.3, 1.7), (0.4, 0.0)):
            same("upsample_nearest2d", one, *size, *scales)


def test_places_of_upsampling():
    x = torch.arange(97.0).view(1, 1, 1, 97).expand(1, 2, 2, 97).contiguous()
    for one in (x, x.to(memory_format=CHANNELS_LAST)):
        for width in (*range(1, 97, 7), *range(97, 400, 13)):
            same("upsample_nearest2d", one, 2, width, 0.0, 0.0)
            same("upsample_nearest2d", one, 3, width, 0.0, width / 97 + 0.004)
            for corners in (False, True):
                call = (one, 3, width, corners, 0.0, 0.0)
                same("upsample_bilinear2d", *call, rtol=1e-6, atol=1e-4)
    # Scales that the sizes do not give.
    for channels in (1, 3, 4):
        for layout in (torch.contiguous_format, CHANNELS_LAST):
            one = torch.randn(1, channels, 80, 3).to(memory_format=layout)
            for size in ((80, 6), (160, 3), (160, 6)):
                same("upsample_nearest2d", one, *size, 1.3, 2.2)


def test_errors_of_upsampling():
    x = torch.ones(1, 2, 4, 4)
    for op, rest in (
        ("upsample_bilinear2d", (False, 0.0, 0.0)),
        ("upsample_nearest2d", (0.0, 0.0)),
    ):
        refused("x must be 4-D .* > 0, got shape", op, x[0], 8, 8, *rest)
        refused("x must be 4-D .* > 0, got shape", op, x[:, :, :0], 8, 8, *rest)
        refused("x must have dtype", op, x.long(), 8, 8, *rest)
        for name, size in (("height", (0, 8)), ("width", (8, 0))):
            with pytest.raises(OpArgumentError, match=f"{op}: {name} must be positive, got 0"):
                single(op, x, *size, *rest)


# --- reductions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["mean", "sum", "amax"])
def test_reductions(name, dtype, threads):
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    atol = 0.05 if name == "sum" else 5e-4  # the terms are about 50, and there are thousands
    for shape in ((2, 9, 5, 40), (3, 70, 1, 7)):
        for i, x in enumerate((*layouts(dtype, *shape), *images(dtype, *shape))):
            for dims in ([-1], [2, 3], [1], [0], [0, 2], [3, 1], [], [0, 2, 3], [-2]):
                same(name, x, dims, i % 2 == 0, rtol=tolerance, atol=atol)


@pytest.mark.parametrize("name", ["mean", "sum", "amax"])
def test_long_and_empty_reductions(name, threads):
    x = torch.rand(2, 100000) + 1
    for one in (x, x.T, x.T[:, :1]):
        got, want = both(name, one, [0 if one is not x else 1], False)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    same(name, torch.tensor(2.0), [], False)
    same(name, torch.tensor(2.0), [-1], True)
    same(name, torch.ones(3, 0), [0], False)
    if name == "amax":
        refused("x must have elements in the dimensions dims", name, torch.ones(3, 0), [1], False)
        x[1, 70000] = NAN
        assert same(name, x, [1], False).isnan().tolist() == [False, True]
    else:
        same(name, torch.ones(3, 0), [1], False)
    refused(r"dims must be a dimension of x \(1-D\), got 1", name, torch.ones(3), [1], False)
    refused("dims must be distinct", name, torch.ones(3), [0, -1], False)
    refused("x must have dtype", name, torch.ones(3).long(), [0], False)
    with pytest.raises(OpArgumentError, match="dims must be distinct"):
        single(name, torch.ones(3), [0, 0], False)


# --- together -------------------------------------------------------------------------------------------------------


def test_a_network_in_one_program(threads):
    """Results of one instruction are the inputs of the next, in recycled memory."""
    b = ProgramBuilder()
    x = b.input("x")
    chain = code_of(("mul", 0, 1), ("add", 4, 2), ("maximum", 5, 3))
    scale = [b.constant(torch.rand(16, 1, 1) + 0.5) for _ in range(2)]
    value = b.call("channels_last", x)
    for _ in range(4):
        h = b.call("pointwise", [value, *scale], chain, [0.0], torch.float32)
        padded = b.call("pad", h, [1, 1, 1, 1], 0.0)
        pooled = b.call("max_pool2d", padded, [3], [1], [0], [1], False)
        both_halves = b.call("cat", [b.call("slice", pooled, 1, 0, 16, 2), h], 1)
        value = b.call("slice", both_halves, 1, 8, 24, 1)
    pixels = b.call("permute", value, [0, 2, 3, 1])
    rows = b.call("reshape", pixels, [0, -1, 16])
    outputs = [b.call("mean", rows, [1], False), b.call("amax", value, [2, 3], False)]
    program = b.build([*outputs, b.call("contiguous", value)])
    assert program.native
    for seed in range(3):
        torch.manual_seed(seed)
        images = torch.randn(2, 16, 24, 24)
        for got, want in zip(program.run(images), program.run_reference(images), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
