# SPDX-License-Identifier: Apache-2.0
"""What the tests of the graph passes share: they run on graphs of ATen ops, without Inductor's code generation."""

from __future__ import annotations

import torch
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from ipex_core.fusion import GraphReport
from ipex_core.fusion.aten.passes import PATTERNS, run_passes

__all__ = [
    "DTYPES",
    "attention_inputs",
    "fired",
    "fuse",
    "llama_norm",
    "randn",
    "reasons",
    "rotary",
    "rotate_half",
    "stock",
]

DTYPES = (torch.float32, torch.bfloat16)


@torch.no_grad()
def fuse(function, *inputs, constants=(), mode="fake", **options):
    """Run the passes on the graph of a function, compare the results, and return report and graph.

    ``constants`` are the positions of the inputs that freezing would make constant.
    """
    plain = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode=mode)(*inputs)
    # AOTAutograd removes mutations below the decompositions.
    gm = make_fx(torch.func.functionalize(plain, remove="mutations"), tracing_mode=mode)(*inputs)
    remove_noop_ops(gm.graph)
    placeholders = gm.graph.find_nodes(op="placeholder")
    report = GraphReport("test", inference=True)
    options = {"always": True, "kernels": lambda op: True} | options
    changed = run_passes(gm.graph, report, [placeholders[i] for i in constants], **options)
    assert changed == report.count()
    gm.graph.lint()
    gm.recompile()
    expected, got = function(*inputs), gm(*inputs)
    pairs = zip(expected, got, strict=True) if isinstance(expected, tuple) else [(expected, got)]
    for e, g in pairs:
        limits = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
        limit = limits.get(e.dtype, 1e-9)
        absolute = limit * max(1.0, e.abs().max().item())
        assert g.dtype == e.dtype
        torch.testing.assert_close(g, e, rtol=limit, atol=absolute, equal_nan=True)
    return report, gm


def fired(report):
    return {p: report.count(p) for p in PATTERNS if report.count(p)}


def reasons(report):
    return "; ".join(f.text for f in report.fusions if not f.fired)


def randn(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape) * scale).to(dtype)


def attention_inputs(dtype, kv_heads=4, length=6):
    q = randn(2, length, 4 * 16, dtype=dtype).view(2, length, 4, 16).transpose(1, 2)
    k, v = (
        randn(2, length, kv_heads * 16, dtype=dtype).view(2, length, kv_heads, 16).transpose(1, 2)
        for _ in range(2)
    )
    mask = torch.zeros(2, 1, length, length, dtype=dtype)
    mask[1, :, :, -2:] = torch.finfo(dtype).min
    return q, k, v, mask


def stock(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, mask, scale=0.2)


def llama_norm(x, weight):
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + 1e-6)
    return weight * wide.to(x.dtype)


def rotate_half(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotary(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)
