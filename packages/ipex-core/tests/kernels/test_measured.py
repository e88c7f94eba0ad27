# SPDX-License-Identifier: Apache-2.0
"""The table of measured choices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ipex_core import optimize
from ipex_core.kernels import measured, policy
from ipex_core.kernels.providers import cpu_level

LINES = """# a comment
{0}\t1\tlinear\tbfloat16
128,768,768\to\t10\t7\t8
1,768,768\ts\t3\t4\t5
{0}\tmany\tlinear\tbfloat16
128,768,768\ti\t10\t7\t5
nolevel\t1\tgelu:none\tfloat32
1024\ts\t10\t-\t12
{0}\t1\tgelu:none\tfloat32
4096\ts\t10\t-\t12
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    file = tmp_path / "measured.tsv"
    file.write_text(LINES.format(cpu_level()))
    rows = measured.rows
    monkeypatch.setattr(measured, "rows", lambda: rows(file))
    monkeypatch.setattr(measured, "_table", None)
    monkeypatch.setattr(measured, "_kept", {})
    monkeypatch.setattr(measured, "_stays", {})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


needs_kernels = pytest.mark.skipif(cpu_level() is None, reason="needs a kernel package")


@needs_kernels
def test_the_nearest_shape_decides(table, monkeypatch):
    bf16 = torch.bfloat16
    assert measured.side("linear", bf16, (128, 768, 768)) == "onednn"
    assert measured.side("linear", bf16, (100, 1024, 768)) == "onednn"
    assert measured.side("linear", bf16, (2, 768, 768)) == "stock"
    assert measured.side("linear", bf16, (128, 4096, 4096)) is None  # far away
    assert measured.side("linear", torch.float32, (128, 768, 768)) is None
    assert measured.side("gelu:none", torch.float32, (1024,)) == "stock"
    assert measured.side("gelu:none", torch.float32, (512,)) is None  # of another level
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert measured.side("linear", bf16, (128, 768, 768)) == "ipex"


@needs_kernels
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_layers_and_weights_follow_the_table(table):
    choice = policy.choose_linear(torch.bfloat16, 768, 768, 1)
    assert choice.form is None and "stock" in choice.reason
    if policy.onednn_supports(torch.bfloat16):
        assert policy.choose_linear(torch.bfloat16, 768, 768, 128).form == "mkldnn"
    gelu = optimize(nn.Sequential(nn.GELU()).eval())
    for count in (4096, 64):  # the stock op, and ours
        x = torch.randn(count)
        torch.testing.assert_close(gelu(x), nn.functional.gelu(x), rtol=1e-5, atol=1e-5)
    assert measured.stays_stock("gelu:none", torch.randn(4096))
    assert measured.stays_stock("gelu:none", torch.randn(4096))  # kept
    assert not measured.stays_stock("gelu:none", torch.randn(64))
    assert not measured.stays_stock("softmax", torch.randn(64, 64))
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    assert not measured.stays_stock("gelu:none", nested)


def test_a_forced_side_ends_with_its_block():
    with measured.forced("softmax", "stock"):
        assert measured.side("softmax", torch.float32, (2, 2)) == "stock"
        with measured.forced("softmax", "ipex"):
            assert measured.side("softmax", torch.float32, (2, 2)) == "ipex"
        assert measured.side("softmax", torch.float32, (2, 2)) == "stock"
    assert not measured._forced


def test_rows_of_the_table_are_whole():
    levels = set()
    for row in measured.rows():
        times = {"stock": row.stock, "onednn": row.onednn, "ipex": row.ipex}
        assert row.side in measured.SIDES and times[row.side] is not None
        assert row.threads in ("1", "many") and isinstance(getattr(torch, row.dtype), torch.dtype)
        levels.add(row.level)
    assert "avx512_fp16" in levels


@pytest.mark.parametrize(
    ("wide", "rows", "taken"), [(True, 64, True), (False, 64, False), (False, 4, True)]
)
def test_products_of_batches_without_wide_vectors(table, monkeypatch, wide, rows, taken):
    monkeypatch.setattr(policy, "_wide_vectors", wide)
    a, b = (8, rows, 64), (8, 64, 64)
    assert policy.prefer_ipex_bmm(a, b, torch.float32) is taken
    assert policy.prefer_ipex_bmm(a, b, torch.bfloat16)
    with measured.forced("bmm", "ipex"):  # what was measured decides first
        assert policy.prefer_ipex_bmm(a, b, torch.float32)
