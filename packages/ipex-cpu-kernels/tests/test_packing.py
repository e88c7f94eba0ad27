# SPDX-License-Identifier: Apache-2.0
"""Packed weights: exact, portable, on the arena, released."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch

import ipex_core  # noqa: F401
from ipex_core import config
from ipex_core.packing import dense
from ipex_cpu_kernels import _native

ops = torch.ops.ipex
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

needs_arena = pytest.mark.skipif(
    not config.get("huge_pages"), reason="IPEX_HUGE_PAGES=0: packed weights are ordinary tensors"
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (32, 32), (33, 7), (64, 129), (1000, 130)])
def test_round_trip_is_exact(dtype, shape):
    bits = torch.randint(-(2**15), 2**15, (*shape, dtype.itemsize // 2), dtype=torch.int16)
    weight = bits.view(dtype).squeeze(-1)  # any bit pattern, NaN payloads and denormals included
    packed = ops.pack_linear_weight(weight)
    back = ops.unpack_linear_weight(packed, *shape, dtype)
    assert torch.equal(back.view(torch.int16), weight.contiguous().view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_and_python_formats_are_equal(dtype):
    weight = torch.randn(70, 45).to(dtype)
    packed = ops.pack_linear_weight(weight)
    assert torch.equal(packed, dense.pack(weight))
    assert dense.read_header(packed)[1:] == (70, 45)
    assert packed.numel() == dense.packed_bytes(70, 45, dtype)


def test_copies_are_ordinary_tensors():
    weight = torch.randn(64, 64)
    packed = ops.pack_linear_weight(weight)
    buffer = io.BytesIO()
    torch.save(packed, buffer)
    buffer.seek(0)
    x = torch.randn(3, 64)
    want = ops.linear(x, packed, 64)
    for other in (
        copy.deepcopy(packed),
        packed.clone(),
        pickle.loads(pickle.dumps(packed)),
        torch.load(buffer),
    ):
        assert torch.equal(ops.linear(x, other, 64), want)


@needs_arena
def test_arena_memory_is_returned():
    native = _native.load()
    gc.collect()
    before = native.arena_bytes()
    packed = ops.pack_linear_weight(torch.randn(2048, 1024))  # 8 MiB, a mapping of its own
    assert native.arena_bytes() >= before + packed.numel()
    view = packed[64:]
    del packed
    assert native.arena_bytes() > before  # the view keeps it
    del view
    gc.collect()
    assert native.arena_bytes() == before


@needs_arena
def test_small_weights_share_a_mapping():
    native = _native.load()
    gc.collect()
    weights, mapped = [], set()
    for _ in range(50):
        weights.append(ops.pack_linear_weight(torch.randn(32, 32)))
        mapped.add(native.arena_bytes())
    assert len(mapped) <= 2  # what earlier weights left of the open mapping may come to an end
    assert all(weight.data_ptr() % 64 == 0 for weight in weights)
