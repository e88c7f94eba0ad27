# SPDX-License-Identifier: Apache-2.0
"""Instructions on integers and convolutions on codes: natively the same as their reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from program_calls import layouts, refused, same, single

from ipex_core.errors import OpArgumentError
from ipex_core.program.integers import INTEGER_FUNCTIONS

WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def drawn(seed, dtype, *shape):
    """Return small numbers, and the ends of the dtype."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-9, 10, shape, generator=generator)
    if dtype != torch.bool:
        ends = torch.iinfo(dtype)
        for at, value in enumerate((ends.min, ends.max)):
            x.view(-1)[at : at + 1] = value
    return x.to(dtype)


# --- element-wise ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", WHOLE, ids=str)
@pytest.mark.parametrize("name", INTEGER_FUNCTIONS)
def test_each_function(name, dtype):
    count = INTEGER_FUNCTIONS[name][0]
    for result in {dtype, torch.int64, torch.bool}:
        for shapes in (((5, 1300),) * 3, ((3, 1, 7), (4, 7), (3, 4, 1)), ((), (6,), ())):
            inputs = [drawn(seed, dtype, *shape) for seed, shape in enumerate(shapes)][:count]
            if "divide" in name or name == "remainder":
                inputs[1][inputs[1] == 0] = 1
            same("integer", inputs, name, result)
            if inputs[0].dim() == 2:
                same("integer", [one.T for one in inputs], name, result)


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes_dtypes_and_layouts(seed):
    generator = torch.Generator().manual_seed(seed)

    def pick(options):
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    name = pick(list(INTEGER_FUNCTIONS))
    shape = [pick([1, 2, 3, 9, 70]) for _ in range(pick([1, 2, 3, 4]))]
    inputs = []
    for place in range(INTEGER_FUNCTIONS[name][0]):
        own = [pick([size, size, 1]) for size in shape][pick([0, 0, len(shape) - 1]) :]
        x = drawn(seed + place, pick(WHOLE), *own)
        x = pick([x, x.flip(0), x.transpose(0, -1).contiguous().transpose(0, -1)])
        inputs.append(x.masked_fill(x == 0, 1) if "divide" in name or name == "remainder" else x)
    same("integer", inputs, name, pick(WHOLE))


def test_errors_of_functions():
    x = torch.ones(2, 3, dtype=torch.int64)
    refused(
        "inputs must have dtype int64, .*, bool, got float32",
        "integer",
        [x.float()],
        "neg",
        x.dtype,
    )
    wanted = r"input 1 must broadcast with the inputs before it of shape \[2, 3\], got \[2\]"
    refused(wanted, "integer", [x, x[:, 0]], "add", x.dtype)
    for name in ("floor_divide", "remainder"):
        refused("the divisor must not be 0, got 0", "integer", [x, x - 1], name, x.dtype)
    for args, message in (
        (([x, x], "pow", x.dtype), "function must be one of add, .*, where, got pow"),
        (([x], "add", x.dtype), r"inputs must have 2 tensor\(s\), got 1"),
        (([x], "neg", torch.float32), "dtype must have dtype int64, .*, bool, got float32"),
    ):
        with pytest.raises(OpArgumentError, match=message):
            single("integer", *args)


# --- lookups --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_lookups(dtype):
    for x in layouts(dtype, 3, 40, 5, 6):
        for dim in (0, 1, -1, 2):
            size = x.shape[dim]
            for shape in ((), (7,), (2, 3), (0,), (400,)):
                index = torch.randint(
                    -size, size, shape, generator=torch.Generator().manual_seed(0)
                )
                same("take", x, dim, index)
                same("take", x, dim, index.int())
            given = [min(n, 4) for n in x.shape]
            given[dim] = 9
            index = torch.randint(size, given, generator=torch.Generator().manual_seed(0))
            same("gather", x, dim, index)
            same("gather", x, dim, index.int().transpose(0, 3).contiguous().transpose(0, 3))


def test_errors_of_lookups():
    x, index = torch.ones(2, 3), torch.tensor([[0, 1], [2, 0]])
    for op in ("take", "gather"):
        refused(rf"{op}: dim must be a dimension of x \(2-D\), got 2", op, x, 2, index)
        refused(f"{op}: index must be int32 or int64, got torch.float32", op, x, 1, index.float())
        refused(rf"{op}: index must be in \[.*, 3\), got 3", op, x, 1, index + 1)
    refused(r"index must be in \[-3, 3\), got -4", "take", x, 1, index - 4)
    refused(r"index must be in \[0, 3\), got -1", "gather", x, 1, index - 1)
    wanted = (
        r"index must be at most as large as x of shape \[2, 3\] except in dimension 1, got \[2\]"
    )
    refused(wanted, "gather", x, 1, index[0])
    refused("at most as large as x", "gather", x, 1, index.repeat(2, 1))


# --- convolutions on codes ------------------------------------------------------------------------------------------


#: Without VNNI oneDNN adds two products in 16 bits, which larger codes overflow.
CODES = 256 if "vnni" in Path("/proc/cpuinfo").read_text() else 128


def convolution(dims=2, groups=1, seed=0, activation="none", dtype=torch.uint8, residual=None):
    """Return the arguments of a convolution."""
    torch.manual_seed(seed)
    x = torch.randint(0, CODES, (2, 8, *[9, 7, 5][:dims]), dtype=torch.uint8)
    weight = torch.randint(-127, 128, (16, 8 // groups, *[3, 2, 3][:dims]), dtype=torch.int8)
    stride, padding, dilation = [2, 1, 1][:dims], [1, 0, 1][:dims], [1, 2, 1][:dims]
    scale, bias = torch.rand(16) * 1e-3 + 1e-4, torch.randn(16)
    geometry = (stride, padding, dilation, groups)
    output = (0.1, 100) if dtype == torch.uint8 else (1.0, 0)
    args = [x, weight, scale, 0.05, CODES * 15 // 32, bias, *geometry, activation, dtype, *output]
    if residual is not None:
        plain = torch.nn.functional
        shape = (plain.conv1d, plain.conv2d, plain.conv3d)[dims - 1](
            *(x.float(), weight.float(), None, *geometry)
        ).shape
        residual = torch.randint(0, 256, shape, dtype=torch.uint8).to(residual)
        residual = residual if residual.dtype == torch.uint8 else residual / 50
    return [*args, residual, 0.07, 30]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("activation", ["none", "relu", "relu6", "silu"])
def test_convolutions_on_codes(dims, activation):
    for groups, dtype, residual in (
        (1, torch.uint8, None),
        (2, torch.uint8, torch.uint8),
        (1, torch.float32, torch.uint8),
        (8, torch.uint8, torch.float32),
        (1, torch.bfloat16, None),
    ):
        if residual is not None and dims < 3 and activation not in ("none", "relu"):
            residual = None  # oneDNN has none of this
        args = convolution(dims, groups, dims, activation, dtype, residual)
        # Codes that lie between two may go either way.
        atol = {torch.uint8: 1, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
        same(
            "int8_conv",
            *args,
            rtol=1e-2 if dtype == torch.bfloat16 else 0,
            atol=atol,
            strides=False,
        )
        if args[14] is not None:
            kept = args[14].clone()
            program, inputs = single("int8_conv_sum_", *args)
            got, want = program.run(*inputs)[0], program.run_reference(*inputs[:-1], kept)[0]
            torch.testing.assert_close(got, want, rtol=0, atol=atol)
    floats = convolution(dims)
    floats[0] = torch.randn(floats[0].shape)
    same("int8_conv", *floats, rtol=0, atol=1, strides=False)
    same("int8_conv", floats[0][0], *floats[1:], rtol=0, atol=1, strides=False)


def test_errors_of_convolutions_on_codes():
    args = convolution(residual=torch.uint8)
    for place, value, message in (
        (10, "silu", "activation must be none or relu behind a residual, got silu"),
        (0, args[0].long(), "x must have dtype uint8, float32, bfloat16, float16, got int64"),
        (0, args[0][:, :3], "x must have 2 dimensions behind 8 channels, got"),
        (0, args[0][..., :2], "x must have room for a window of 3 in dimension 3, got"),
        (1, args[1].float(), "weight must have dtype int8, got float32"),
        (1, args[1][0, 0], "weight must be 3-D to 5-D and not empty, got"),
        (1, args[1][..., 0], "stride must have 1 numbers, got 2"),
        (2, args[2].double(), "weight_scale must have dtype float32, got float64"),
        (2, args[2][:4], r"weight_scale must be contiguous of shape \[16\], got \[4\]"),
        (5, args[5][::2], r"bias must be contiguous of shape \[16\], got \[8\]"),
        (9, 3, "groups must be a divisor of 16, got 3"),
        (14, args[14][:1], r"residual must have shape \[2, 16, .*\], got \[1, 16"),
    ):
        refused(message, "int8_conv", *args[:place], value, *args[place + 1 :])
    for place, value, message in (
        (3, 0.0, "x_scale must be positive, got 0"),
        (4, 256, r"x_zero must be in \[0, 256\), got 256"),
        (6, [0, 1], r"stride must be in \[1, 4096\], got 0"),
        (7, [1], "padding must have 2 numbers, got 1"),
        (8, [1, 4097], r"dilation must be in \[1, 4096\], got 4097"),
        (9, 0, "groups must be positive, got 0"),
        (10, "tanh", "activation must be one of none, relu, relu6, silu, got tanh"),
        (
            11,
            torch.float32,
            "output_scale, output_zero must be 1 and 0 for a result .*, got 0.1, 100",
        ),
        (11, torch.int8, "dtype must be uint8, float32, bfloat16, got int8"),
    ):
        with pytest.raises(OpArgumentError, match=message):
            single("int8_conv", *args[:place], value, *args[place + 1 :])
