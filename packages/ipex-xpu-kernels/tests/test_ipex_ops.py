# SPDX-License-Identifier: Apache-2.0
"""The ops of ipex on the device: their definition, which runs in ops of the device."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils import _pytree as pytree

from ipex_core.library.kernels import specs
from ipex_core.library.spec import Sample

pytestmark = pytest.mark.usefixtures("needs_device")

#: Ops of the host alone: what they read or write lies in its memory.
HOST_ONLY = {"program_run"}
SAMPLES = 3


def run(name: str, sample: Sample, device: str) -> list[torch.Tensor]:
    def move(value: object) -> object:
        return value.detach().clone().to(device) if isinstance(value, torch.Tensor) else value

    args, kwargs = pytree.tree_map(move, (sample.args, sample.kwargs))
    out = getattr(torch.ops.ipex, name)(*args, **kwargs)
    # What an op writes to its arguments counts, too.
    leaves = pytree.tree_leaves((out, args))
    return [t for t in leaves if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", [name for name in specs() if name not in HOST_ONLY])
def test_op(name: str) -> None:
    samples = list(itertools.islice(specs()[name].samples(torch.float32), SAMPLES))
    assert samples
    for sample in samples:
        expected = run(name, sample, "cpu")
        for actual, wanted in zip(run(name, sample, "xpu"), expected, strict=True):
            assert actual.device.type == "xpu"
            torch.testing.assert_close(actual.cpu(), wanted, rtol=1e-3, atol=1e-4, equal_nan=True)
