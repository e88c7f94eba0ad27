# SPDX-License-Identifier: Apache-2.0
"""Bad arguments and thread counts of the products of activations on 8-bit integers."""

import pytest
import torch

import ipex_core.ops  # noqa: F401  (registers torch.ops.ipex)
from ipex_core.library.kernels import specs

ops = torch.ops.ipex
A, B = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
X = [torch.randn(3, 4) for _ in range(3)]
SCALES = torch.ones(3)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((A, B.double(), 1.0, 0, 1.0, 0), "b must have the dtype of a = float32, got float64"),
        (
            (A, A, 1.0, 0, 1.0, 0),
            r"b must have a.shape\[-1\] rows and leading sizes that broadcast",
        ),
        ((A, B[:1].expand(3, 4, 5), 1.0, 0, 1.0, 0), r"b must have .* of shape \[2, 3, 4\], got"),
        ((A, B[0, 0], 1.0, 0, 1.0, 0), "b must have"),
        ((A[(None,) * 14], B, 1.0, 0, 1.0, 0), "a must have at most 16 dimensions, got 17"),
        ((A[0, 0], B, 1.0, 0, 1.0, 0), "a must have at least 2 dimension"),
        ((A, B, 0.0, 0, 1.0, 0), r"a_scale must be finite and at least 2\^-120"),
        ((A, B, 1.0, 0, float("inf"), 0), r"b_scale must be finite and at least 2\^-120"),
        ((A, B, 1.0, 256, 1.0, 0), r"a_zero must be in \[0, 255\], got 256"),
        ((A, B, 1.0, 0, 1.0, -1), r"b_zero must be in \[0, 255\], got -1"),
        (
            (torch.zeros(1, 32769), torch.zeros(32769, 1), 1.0, 0, 1.0, 0),
            "a must have at most 32768 columns, got 32769",
        ),
    ],
)
def test_matmul(args, text):
    spec = specs()["int8_matmul"]
    for call in (ops.int8_matmul, lambda *args: spec.check(spec.bind(*args))):
        with pytest.raises(RuntimeError, match=f"int8_matmul: {text}"):
            call(*args)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (([], SCALES[:0]), "inputs must hold at least 1 tensor, got 0"),
        (([X[0].int()], SCALES[:1]), "must have dtype float32, bfloat16, float16, int8, got int32"),
        (([X[0][0]], SCALES[:1]), r"inputs\[0\] must be 2-D \[B, D\], got 1-D"),
        (([X[0], X[0][:2]], SCALES[:2]), r"inputs\[1\] must have the shape of inputs\[0\]"),
        ((X, SCALES[:2]), r"scales must have shape \[3\], got \[2\]"),
        ((X, SCALES.double()), "scales must have dtype float32, got float64"),
        (
            (X, SCALES, torch.bfloat16),
            r"dtype must be the dtype of inputs\[0\] = float32, int8 or uint8, got",
        ),
        ((X, SCALES, torch.int32), "dtype must be float32, bfloat16, float16, int8 or uint8"),
        ((X, SCALES, torch.uint8), "output_scale must be finite and at least"),
        ((X, SCALES, torch.uint8, 1.0, -1), r"output_zero must be in \[0, 255\], got -1"),
    ],
)
def test_interaction(args, text):
    spec = specs()["int8_interaction"]
    for call in (ops.int8_interaction, lambda *args: spec.check(spec.bind(*args))):
        with pytest.raises(RuntimeError, match=f"int8_interaction: .*{text}"):
            call(*args)


def test_scales_of_an_interaction():
    with pytest.raises(RuntimeError, match="scales must be finite"):
        ops.int8_interaction(X, torch.tensor([1.0, 0.0, 1.0]))


def test_threads_do_not_matter():
    a, b = torch.randn(2, 500, 100), torch.randn(2, 100, 90)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(ops.int8_matmul(a, b, 0.03, 128, 0.03, 120))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
