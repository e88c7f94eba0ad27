# SPDX-License-Identifier: Apache-2.0
"""The interaction of feature vectors and its derivative."""

from __future__ import annotations

import pytest
import torch

from ipex_core.library.kernels import specs
from ipex_core.nn.functional import InteractionFunc, interaction


def stock_interaction(*args):
    x = torch.stack(args, 1)
    products = x @ x.mT
    row, column = torch.tril_indices(len(args), len(args), -1)
    return torch.cat([args[0], products[:, row, column]], 1)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_interaction(count):
    torch.manual_seed(count)
    ours = [torch.randn(4, 6, requires_grad=True) for _ in range(count)]
    theirs = [value.detach().clone().requires_grad_() for value in ours]
    got, want = interaction(*ours), stock_interaction(*theirs)
    torch.testing.assert_close(got, want)
    got.square().sum().backward()
    want.square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    torch.testing.assert_close(InteractionFunc.apply(*ours), want)


def test_interaction_gradcheck():
    """In float64, with the definition of the derivative that the kernels are compared with."""
    torch.manual_seed(0)
    args = tuple(torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(4))
    assert torch.autograd.gradcheck(interaction, args)

    class Definition(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            return specs()["interaction"].reference(inputs)

        @staticmethod
        def backward(ctx, grad):
            return tuple(specs()["interaction_backward"].reference(grad, ctx.saved_tensors))

    assert torch.autograd.gradcheck(Definition.apply, args)


def test_interaction_autocast():
    first = torch.randn(4, 6, requires_grad=True)
    rest = [torch.randn(4, 6).bfloat16() for _ in range(2)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = interaction(first, *rest)
        direct = torch.ops.ipex.interaction([first, *rest])
    assert got.dtype == direct.dtype == torch.bfloat16
    assert torch.equal(got, direct)
    got.float().sum().backward()
    assert first.grad is not None
    assert first.grad.dtype == torch.float32


def test_interaction_of_wrong_tensors():
    with pytest.raises(RuntimeError, match="at least 1 tensor, got 0"):
        interaction()
    with pytest.raises(TypeError, match=r"args\[0\] must be a tensor, got list"):
        interaction([torch.ones(2, 3), torch.ones(2, 3)])
    with pytest.raises(RuntimeError, match=r"inputs\[1\] must have the shape of inputs\[0\]"):
        interaction(torch.ones(2, 3), torch.ones(2, 4))
