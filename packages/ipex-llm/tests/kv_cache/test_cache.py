# SPDX-License-Identifier: Apache-2.0
"""The paged cache and the sequences in it."""

from __future__ import annotations

import pytest
import torch

from ipex_llm import kv_cache
from ipex_llm.kv_cache import LayerShape, PagedCache, Sequences, cache_dtype

SHAPES = [LayerShape(2, 4), LayerShape(2, 4), LayerShape(1, 8)]


def fill(sequences, step, values):
    """Write ``values[i]`` as the key of token i, in each layer."""
    cache = sequences.cache
    for keys, _ in map(cache.tensors_of, range(len(SHAPES))):
        flat = keys.transpose(1, 2)  # [blocks, rows, heads, dim]
        for slot, value in zip(step.slots.tolist(), values, strict=True):
            flat[slot // cache.block_size, slot % cache.block_size] = value


def read(sequences, row):
    found = []
    for layer in range(len(SHAPES)):
        keys, _ = sequences.cache.rows(layer, sequences.blocks[row], sequences.lengths[row])
        assert bool((keys == keys[:1, :, :1]).all())
        found.append(keys[0, :, 0].tolist())
    assert found[0] == found[1] == found[2]
    return found[0]


def test_sequences_grow_share_and_part():
    sequences = Sequences(PagedCache(SHAPES, 2, 4, torch.float32), 2)
    fill(sequences, sequences.append([5, 2]), [0, 1, 2, 3, 4, 10, 11])
    assert sequences.cache.num_blocks == 4  # it had to grow
    assert read(sequences, 0) == [0, 1, 2, 3, 4]
    sequences.select([0, 0, 1])  # two beams share both blocks
    step = sequences.append()
    assert step.singles and step.longest == 6 and step.starts.tolist() == [0, 1, 2, 3]
    fill(sequences, step, [50, 60, 70])
    assert read(sequences, 0) == [0, 1, 2, 3, 4, 50]
    assert read(sequences, 1) == [0, 1, 2, 3, 4, 60]
    assert read(sequences, 2) == [10, 11, 70]
    assert sequences.blocks[0][0] == sequences.blocks[1][0]
    assert sequences.blocks[0][1] != sequences.blocks[1][1]
    sequences.cut([2, 0, 3])
    assert read(sequences, 0) == [0, 1, 2, 3] and sequences.lengths[2] == 0
    sequences.select([1])
    assert read(sequences, 0) == [0, 1, 2, 3, 4, 60]
    sequences.clear()
    assert len(sequences._free) == sequences.cache.num_blocks and not sequences._owners


def test_random_histories():
    """Beams that split, end and come back, against lists."""
    generator = torch.Generator().manual_seed(0)

    def draw(high):
        return int(torch.randint(high, (1,), generator=generator))

    sequences = Sequences(PagedCache(SHAPES, 1, 3, torch.float32), 3)
    expected = [[], [], []]
    value = 0
    for _ in range(60):
        kind = draw(4)
        if kind == 0:
            picks = [draw(len(expected)) for _ in range(1 + draw(4))]
            sequences.select(picks)
            expected = [list(expected[i]) for i in picks]
        elif kind == 1:
            counts = [draw(3) for _ in expected]
            sequences.cut(counts)
            expected = [
                one[: max(len(one) - c, 0)] for one, c in zip(expected, counts, strict=True)
            ]
        else:
            counts = [draw(4) for _ in expected]
            step = sequences.append(counts)
            values = list(range(value, value + sum(counts)))
            value += len(values)
            fill(sequences, step, values)
            for one, count in zip(expected, counts, strict=True):
                one += values[:count]
                del values[:count]
        for row, one in enumerate(expected):
            assert read(sequences, row) == one


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16]
)
def test_growing_keeps_what_is_there(dtype):
    cache = PagedCache(SHAPES, 2, 4, dtype)
    raw = [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in cache.tensors]
    for i, tensor in enumerate(raw):
        tensor.fill_(i + 1)
    cache.grow(5)
    cache.copy_blocks([1], [4])
    for i, tensor in enumerate(cache.tensors):
        tensor = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        assert bool((tensor[[0, 1, 4]] == i + 1).all())
    per = sum(2 * s.kv_heads * s.head_dim for s in SHAPES) * dtype.itemsize
    per += sum(2 * s.kv_heads * 4 for s in SHAPES) if dtype == torch.int8 else 0
    assert PagedCache.bytes(SHAPES, 5, 4, dtype) == per * 20
    assert sum(t.numel() * t.element_size() for t in cache.tensors) == per * 20


def test_bad_arguments():
    for number, size in ((0, 4), (2, 0), (2.5, 4)):
        with pytest.raises(ValueError, match="must be a positive int"):
            PagedCache(SHAPES, number, size, torch.float32)
    with pytest.raises(ValueError, match="dtype must be"):
        cache_dtype(torch.float64, torch.float32)
    assert cache_dtype("fp8", torch.bfloat16) == torch.float8_e5m2
    assert cache_dtype("fp8_e4m3", torch.bfloat16) == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("anon 7\nfile 100\ninactive_file 30\nactive_file 12\n", 42),
        ("cache 9\ninactive_file 1\ntotal_inactive_file 30\ntotal_active_file 5\n", 35),
        ("anon 7\n", 0),
        ("inactive_file many\n", 0),
        ("broken\n", 0),
        (None, 0),
    ],
)
def test_files_that_the_system_keeps_are_no_used_memory(tmp_path, text, wanted):
    path = tmp_path / "memory.stat"
    if text is not None:
        path.write_text(text)
    assert kv_cache._kept_files(str(path)) == wanted
