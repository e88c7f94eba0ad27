# SPDX-License-Identifier: Apache-2.0
"""Calls of one instruction of a program: natively, and as its reference computes them."""

from __future__ import annotations

import pytest
import torch

from ipex_core.program import ProgramBuilder


def single(name, *args):
    """Return a program of one call and its tensor inputs."""
    b = ProgramBuilder()
    inputs = []

    def bound(value):
        if isinstance(value, torch.Tensor):
            inputs.append(value)
            return b.input(f"x{len(inputs)}")
        return [bound(one) for one in value] if isinstance(value, (list, tuple)) else value

    return b.build([b.call(name, *map(bound, args))]), inputs


def both(name, *args):
    """Return what a call gives natively and what its reference gives."""
    program, inputs = single(name, *args)
    assert program.native
    return program.run(*inputs)[0], program.run_reference(*inputs)[0]


def same(name, *args, rtol=0.0, atol=0.0, strides=True):
    """Compare a native call with its reference."""
    got, want = both(name, *args)
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)
    if strides and got.numel():
        assert steps(got) == steps(want)
    return got


def steps(x):
    """Return the strides of the dimensions that have more than one element."""
    return [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]


def refused(message, name, *args):
    """Check that both interpreters refuse a call, in the same words."""
    program, inputs = single(name, *args)
    texts = []
    for method in (program.run, program.run_reference):
        with pytest.raises(RuntimeError, match=message) as caught:
            method(*inputs)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def layouts(dtype, *shape):
    """Return tensors of one shape, stored in several ways."""
    torch.manual_seed(0)
    x = (torch.randn(shape) * 50).to(dtype)
    order = list(range(x.dim()))[::-1]
    wide = torch.cat([x, x], -1)
    return [
        x,
        x.permute(order).contiguous().permute(order),
        wide[..., ::2],
        wide[..., 1 : 1 + shape[-1]],
        x.to(memory_format=torch.channels_last),
        x.transpose(1, 2).contiguous().transpose(1, 2),
        x[:, :1].expand(shape),
        x[..., :1].expand(shape),
    ]
