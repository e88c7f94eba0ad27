# SPDX-License-Identifier: Apache-2.0
"""Linear layers of one input, and embedding bags, that the compile backend merges into one call."""

from __future__ import annotations

import pytest
import torch
from compile_checks import DTYPES, fired, fuse, randn, reasons
from torch.nn import functional as F

from ipex_core import explain
from ipex_core.kernels import policy


def weights(*sizes, dtype=torch.float32, k=32):
    return [randn(n, k, dtype=dtype, scale=0.2) for n in sizes]


def heads(x, q, k, v, *biases):
    """Attention with as many key heads as the sizes of the weights say."""
    biases = biases or (None, None, None)
    parts = [F.linear(x, w, b) for w, b in zip((q, k, v), biases, strict=True)]
    q, k, v = (p.unflatten(-1, (-1, 8)).transpose(1, 2) for p in parts)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(32, 32, 32), (32, 16, 16)])
@pytest.mark.parametrize("length", [1, 9])
def test_query_key_value(length, sizes, bias, dtype):
    biases = [randn(n, dtype=dtype) for n in sizes] if bias else []
    inputs = (randn(2, length, 32, dtype=dtype), *weights(*sizes, dtype=dtype), *biases)
    report, gm = fuse(heads, *inputs, constants=range(1, len(inputs)))
    assert fired(report) == {"attention": 1, "linear": 3, "merged": 1}
    assert [n.target for n in gm.graph.nodes].count(torch.ops.ipex.linear.default) == 1


def test_at_any_length(no_code_generation):
    class Heads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(32, n) for n in (32, 16, 16))

        def forward(self, x):
            pairs = [(part.weight, part.bias) for part in self.parts]
            return heads(x, *(w for w, _ in pairs), *(b for _, b in pairs))

    model = Heads().eval()
    compiled = torch.compile(
        model, backend="ipex", fullgraph=True, dynamic=True, options={"ipex.always": True}
    )
    with torch.no_grad():
        for length in (9, 4, 1):
            x = randn(2, length, 32)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert all(report.count("merged") == 1 for report in explain(compiled).graphs)


def test_layers_that_stay_apart():
    def biased(x, a, b, bias):
        return F.linear(x, a, bias), F.linear(x, b)

    def inputs(x, a, b, y):
        return F.linear(x, a), F.linear(y, b)

    def activated(x, a, b, _):
        return F.relu(F.linear(x, a)), F.linear(x, b)

    def flat(x, a, b, _):
        return F.linear(x, a).view(-1), F.linear(x, b).view(-1)

    pair = weights(32, 16)
    for function, more in ((biased, randn(32)), (inputs, randn(4, 32)), (activated, randn(1))):
        report, _ = fuse(function, randn(4, 32), *pair, more, constants=(1, 2))
        assert fired(report)["linear"] == 2 and not report.count("merged")
    report, _ = fuse(flat, randn(4, 32), *pair, randn(1), constants=(1, 2))
    assert "needs the rows of one result together" in reasons(report)


def bags(table, ids, ends, mode="sum", **options):
    return F.embedding_bag(ids, table, ends, mode=mode, **options)


def lookups(count, dtype=torch.int64):
    ids = [torch.randint(20, (9,), dtype=dtype) for _ in range(count)]
    ends = [torch.tensor(e, dtype=dtype) for e in ([0, 3, 3], [0, 0, 9], [0, 2, 5])]
    return ids, ends[:count]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_tables_in_one_call(index, mode, dtype):
    tables, (ids, ends) = [randn(20, 16, dtype=dtype) for _ in range(3)], lookups(3, index)

    def cat(dense, *given):
        found = [bags(*g, mode) for g in zip(given[:3], given[3:6], given[6:], strict=True)]
        return torch.cat([F.relu(dense), *found], 1)

    def apart(dense, *given):
        found = [bags(*g, mode) for g in zip(given[:3], given[3:6], given[6:], strict=True)]
        return found[0] * dense, found[1].sin(), found[2]

    for function, text in (
        (cat, "3 tables in one call, with dense"),
        (apart, "3 tables in one call"),
    ):
        report, gm = fuse(function, randn(3, 16, dtype=dtype), *tables, *ids, *ends)
        assert fired(report) == {"bags": 1} and text in report.fusions[-1].text
        targets = [str(n.target) for n in gm.graph.nodes]
        assert not any("_embedding_bag" in t and "aten" in t for t in targets)


def test_tables_at_any_number_of_bags(no_code_generation):
    class Tables(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = torch.nn.ModuleList(
                torch.nn.EmbeddingBag(20, 16, mode="sum") for _ in range(3)
            )

        def forward(self, x, ids, ends):
            return torch.cat([x, *(table(ids, ends) for table in self.tables)], 1)

    model = Tables().eval()
    compiled = torch.compile(model, backend="ipex", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for count in (3, 5, 2):
            given = torch.randn(count, 16), torch.randint(20, (9,)), torch.arange(count)
            torch.testing.assert_close(compiled(*given), model(*given))
    (report,) = explain(compiled).graphs
    assert report.count("bags") == 1


def test_tables_that_stay_apart():
    tables, (ids, ends) = [randn(20, 16) for _ in range(2)], lookups(2)

    def two(first, second):
        def function(a, b, i, j, d, e):
            return first(a, i, d), second(b, j, e)

        return function

    def early(a, b, i, j, d, e):
        x = bags(a, i, d)
        return bags(b, (x.sum().long() + j) % 20, e), x

    def wide(a, i, d):
        return bags(torch.cat([a, a], 1), i, d)

    def weighted(a, i, d):
        return bags(a, i, d, per_sample_weights=a[:9, 0])

    def padded(a, i, d):
        return bags(a, i, d, padding_idx=3)

    def ended(a, i, d):
        return bags(a, i, torch.cat([d, d[-1:]]), include_last_offset=True)

    def largest(a, i, d):
        return bags(a, i, d, mode="max")

    cases = ((f, two(f, bags)) for f in (wide, weighted, padded, ended, largest))
    for name, function in (*cases, (early, early)):
        report, _ = fuse(function, *tables, *ids, *ends)
        assert not report.count(), name
        if name not in (wide, ended):
            assert reasons(report), name


def test_small_and_large_ones_are_told_apart():
    """What is not faster stays: small norms, merges for many rows and bags."""
    (one, two), w = weights(32, 16), torch.rand(256)

    def function(x, a, b):
        return F.linear(x, a), F.linear(x, b)

    def norm(x, w):
        return F.rms_norm(x, (256,), w)

    def tables(a, b, ids, ends):
        return bags(a, ids, ends), bags(b, ids, ends)

    for rows, kept in ((16, False), (1600, True)):
        x, ids = randn(rows, 256), torch.arange(rows) % 16
        report, _ = fuse(
            tables, *(randn(16, 8) for _ in range(2)), ids, torch.arange(rows), always=False
        )
        assert report.count("bags", fired=False) == 2 * kept
        report, _ = fuse(norm, x, w, always=False)
        assert report.count("rms_norm") == kept
        assert policy.prefer_merged_linears(rows) is not kept
    report, _ = fuse(function, randn(600, 32), one, two, constants=(1, 2))
    assert report.count("merged") == 1
