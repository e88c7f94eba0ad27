# SPDX-License-Identifier: Apache-2.0
"""Kernels that only GPUs use, and the way to kernels from their source, on any device."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import DEVICE, FLOATS, TOLERANCE, rand
from test_ipex_kernels import run
from test_llm_kernels import same
from test_process import output

import ipex_xpu_kernels as xpu
from ipex_core.library.kernels import specs
from ipex_core.ops.woq_weight import woq_weight

KERNELS = Path(xpu.__file__).with_name("kernels")
NAMES = {torch.float32: "float", torch.bfloat16: "ipex::bf16", torch.float16: "sycl::half"}
pytestmark = pytest.mark.usefixtures("needs_device")


def load(
    file: str,
    kernel: str,
    dtype: torch.dtype,
    *parameters: object,
    end: str = "",
    options: tuple[str, ...] = (),
) -> Any:
    """Return a kernel of the package, compiled for the device under test."""
    headers = {header.name: header.read_text() for header in KERNELS.glob("*.h")}
    # The same file by two names would be read twice.
    headers |= {"prelude.h": '#include "ipex/xpu.h"', "bfloat16.h": '#include "ipex/bfloat16.h"'}
    name = f"{kernel}<{', '.join([NAMES[dtype], *map(str, parameters)])}>"
    # Without the list of its kernels: one takes a second, all of them half a minute.
    source, _, _ = (
        (KERNELS / f"{file}.sycl.cpp").read_text().partition(f"#define {end or file.upper()}(")
    )
    return xpu.load_inline(kernel, source, [name], headers=headers, options=options).kernels[name]


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(
        actual.cpu(), expected, rtol=rtol, atol=max(atol, 1e-4), equal_nan=True
    )


#: As kernels are compiled for a GPU: items move 16 bytes, and groups join their values by sub-groups.
AS_GPU = ("-DIPEX_GPU", "-DIPEX_SUB_GROUP=0")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("lanes", [32, 256])
def test_rows_as_a_gpu_has_them(dtype: torch.dtype, lanes: int) -> None:
    softmax = load("rows", "softmax", dtype, "false", end="SOFTMAX", options=AS_GPU)
    norm = load("rows", "layer_norm", dtype, NAMES[dtype], "false", end="SOFTMAX", options=AS_GPU)
    for columns in (1, 31, 256, 1000, 4096, 8192):
        x = rand(7, columns, dtype=dtype) * 4 - 3
        x[3, columns // 2], x[4, -1], x[5, 0] = math.nan, math.inf, -math.inf
        x[6] = -math.inf
        there, size = x.to("xpu"), {"size": 7 * lanes, "local": lanes}
        y = torch.empty_like(there)
        softmax(there, y, columns, **size)
        close(y, x.double().softmax(-1).to(dtype), dtype)
        norm(there, None, None, None, y, None, None, None, columns, 1e-5, **size)
        expected = F.layer_norm(x[:3].double(), (columns,)).to(dtype)
        close(y[:3], expected, dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_products_by_tiles(dtype: torch.dtype) -> None:
    kernel = load("matmul_tiles", "matmul_tiles", dtype)
    for m, n, k in ((128, 128, 16), (130, 5, 33), (1, 200, 7), (3, 4, 0)):
        for a_swapped, b_swapped in ((False, False), (True, True)):
            a, b = rand(2, m, k, dtype=dtype) / 4, rand(2, n, k, dtype=dtype) / 4
            c = rand(2, m, n, dtype=dtype)
            left = a.mT.contiguous() if a_swapped else a
            right = b.mT.contiguous() if b_swapped else b
            out = torch.zeros(2, m, n, dtype=dtype, device="xpu")
            strides = [m * k, 1, m] if a_swapped else [m * k, k, 1]
            strides += [n * k, 1, n] if b_swapped else [n * k, k, 1]
            strides += [m * n, n, 1] * 2
            groups = (2, -(-m // 128), -(-n // 128) * 256)
            kernel(
                *(t.to("xpu") for t in (left, right, c)),
                out,
                m,
                n,
                k,
                *strides,
                0.5,
                2.0,
                size=groups,
                local=(1, 1, 256),
            )
            expected = 0.5 * (a.double() @ b.double().mT) + 2 * c.double()
            close(out, expected.to(dtype), dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [40, 64, 96, 200])
def test_attention_by_tiles(dtype: torch.dtype, size: int) -> None:
    kernel = load(
        "attention_tiles", "attention_tiles", dtype, 1 if size <= 64 else 2 if size <= 128 else 4
    )
    for heads, shared, queries, keys, causal in ((4, 2, 70, 70, True), (2, 2, 5, 130, False)):
        q = rand(2, heads, queries, size, dtype=dtype)
        k, v = (rand(2, shared, keys, size, dtype=dtype) * scale for scale in (1.0, 0.5))
        out = torch.zeros_like(q, device="xpu")
        strides = []
        for x in (q, k, v, out):
            strides += x.stride()[:3]
        group = heads // shared
        tiles = -(-group * queries // 64)
        kernel(
            *(t.to("xpu") for t in (q, k, v)),
            out,
            *[None] * 7,
            group,
            queries,
            keys,
            size,
            size,
            *strides,
            *[0] * 6,
            keys,
            -1,
            0 if causal else -1,
            1 / math.sqrt(size),
            0.0,
            0,
            size=(2, shared, tiles * 256),
            local=(1, 1, 256),
        )
        wide = [t.double().repeat_interleave(heads // t.size(1), 1) for t in (q, k, v)]
        expected = F.scaled_dot_product_attention(*wide, is_causal=causal)
        close(out, expected.to(dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [24, 64, 104, 128])
@pytest.mark.usefixtures("always")
def test_attention_of_16_bits(dtype: torch.dtype, size: int) -> None:
    """A GPU with joint_matrix takes its kernels for it; scores that grow late, since sums are scaled only then."""
    for heads, shared, queries, keys, causal in (
        (4, 2, 150, 150, True),
        (2, 2, 65, 333, False),
        (3, 1, 17, 31, False),
    ):
        q = rand(2, heads, queries, size, dtype=dtype)
        k, v = (rand(2, shared, keys, size, dtype=dtype) for _ in range(2))
        k[:, :, keys // 2 :] *= 3
        k[:, :, keys // 4] *= 6
        mask = None
        if not causal:
            mask = rand(1, heads, queries, keys).to(dtype)
            mask[..., ::7] = -torch.inf
        there = [x.to("xpu") for x in (q, k, v)]
        bias = None if mask is None else mask.to("xpu")
        more = {"is_causal": causal, "enable_gqa": heads != shared}
        actual = F.scaled_dot_product_attention(*there, attn_mask=bias, **more)
        wide = [t.double().repeat_interleave(heads // t.size(1), 1) for t in (q, k, v)]
        bias = None if mask is None else mask.double()
        expected = F.scaled_dot_product_attention(*wide, attn_mask=bias, is_causal=causal)
        rtol, atol = TOLERANCE[dtype]
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=rtol, atol=2 * atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("left", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("right", [False, True], ids=["rows", "columns"])
@pytest.mark.usefixtures("always")
def test_products_of_16_bits(dtype: torch.dtype, left: bool, right: bool) -> None:
    """A GPU with joint_matrix takes its tiles, of which these sizes fill some in part."""
    for batch, m, n, k in (
        (1, 128, 256, 64),
        (3, 264, 136, 72),
        (1, 16, 24, 2048),
        (2, 40, 520, 8),
    ):
        a = rand(batch, k, m, dtype=dtype).mT if left else rand(batch, m, k, dtype=dtype)
        b = rand(batch, n, k, dtype=dtype).mT if right else rand(batch, k, n, dtype=dtype)
        c = rand(n, dtype=dtype)
        for beta, alpha in ((0.0, 1.0), (1.0, 1.0), (-0.5, 2.0)):
            actual = torch.baddbmm(c.to("xpu"), a.to("xpu"), b.to("xpu"), beta=beta, alpha=alpha)
            expected = alpha * (a.double() @ b.double()) + beta * c.double()
            rtol, atol = TOLERANCE[dtype]
            scale = atol * k**0.5
            torch.testing.assert_close(actual.cpu().double(), expected, rtol=rtol, atol=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("always")
def test_products_into_strides(dtype: torch.dtype) -> None:
    """Results whose rows do not begin at eight bytes, and results by columns."""
    a, b = rand(72, 64, dtype=dtype), rand(64, 88, dtype=dtype)
    expected = (a.double() @ b.double()).to(dtype)
    for whole in (torch.empty(72, 91, dtype=dtype), torch.empty(91, 72, dtype=dtype).T):
        out = whole.to("xpu")[:, 1:89] if whole.is_contiguous() else whole.T.to("xpu").T[:, :88]
        torch.mm(a.to("xpu"), b.to("xpu"), out=out)
        close(out, expected, dtype)


# Not each op with each dtype: the CPU device compiles a kernel in a quarter of a minute.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("decode_attention", torch.float32),
        ("decode_attention", torch.float16),
        ("single_query_cached_kv_attention", torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.usefixtures("always")
def test_decoding_by_splits(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does, on any device; heads of eight numbers each, whatever the samples have."""
    monkeypatch.setattr("ipex_xpu_kernels._attention.is_gpu", lambda _: True)
    starts: list[str] = []
    launch = sys.modules["ipex_xpu_kernels._attention"].launch
    monkeypatch.setattr(
        "ipex_xpu_kernels._attention.launch",
        lambda kernel, *a: (starts.append(kernel), launch(kernel, *a)),
    )
    spec = specs()[name]
    rtol, atol = spec.tolerance[dtype]
    for sample in spec.samples(dtype):
        expected = run(name, sample, "cpu")
        try:
            found = run(name, sample, "xpu")
        except NotImplementedError:  # in ops of the device: arguments that no kernel has
            xpu.set_fallback_mode("silent")
            continue
        for one, wanted in zip(found, expected, strict=True):
            same(one, wanted, 2 * rtol, 2 * atol, str(sample.id))
    kinds = {kernel.partition(",")[0] for kernel in starts if "split" in kernel}
    assert kinds
    # More keys than a split has, of which few are seen.
    q = rand(2, 8, 1, 64, dtype=dtype)
    k, v = (rand(2, 2, 1500, 64, dtype=dtype) for _ in range(2))
    for window in (-1, 200):
        actual, wanted = (
            torch.ops.ipex.decode_attention(
                *(q.to(d), k.to(d), v.to(d), torch.tensor([1500, 700], device=d)),
                window_size=window,
            ).cpu()
            for d in ("xpu", "cpu")
        )
        torch.testing.assert_close(actual, wanted, rtol=2 * rtol, atol=2 * atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [40, 64, 128])
@pytest.mark.parametrize("shared", [1, 3, 16], ids=lambda n: f"{n}_queries")
@pytest.mark.usefixtures("always")
def test_decoding_of_16_bits(
    shared: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU with joint_matrix takes its kernel; a query in each head of `shared`, scores that grow late."""
    monkeypatch.setattr("ipex_xpu_kernels._attention.is_gpu", lambda _: True)
    rtol, atol = TOLERANCE[dtype]
    q = rand(2, 2 * shared, 1, size, dtype=dtype)
    k, v = (rand(2, 2, 700, size, dtype=dtype) for _ in range(2))
    k[:, :, 400:] *= 3
    codes = [(x * 40).round().clamp(-128, 127).to(torch.int8) for x in (k, v)]
    scales = [rand(2, 2, 700).float().abs() / 40 + 0.01 for _ in range(2)]
    lengths = torch.tensor([700, 77])
    for keys, values, more in (
        (k, v, {}),
        (k, v, {"window_size": 90, "softcap": 20.0, "alibi_slopes": rand(2 * shared).float()}),
        (*codes, {"k_scale": 0.02, "v_scale": 0.03}),
        (*codes, dict(zip(("key_scales", "value_scales"), scales, strict=True))),
    ):
        results = []
        for device in ("xpu", "cpu"):
            there = {
                name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in more.items()
            }
            tensors = (x.to(device) for x in (q, keys, values, lengths))
            results.append(torch.ops.ipex.decode_attention(*tensors, **there).cpu())
        torch.testing.assert_close(*results, rtol=2 * rtol, atol=2 * atol)


@pytest.mark.usefixtures("always")
def test_packed_weights_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipex_xpu_kernels._woq.is_gpu", lambda _: True)
    for format in ("int8", "int4", "nf4", "fp8_e4m3"):
        for group, size in ((-1, 96), (32, 200), (128, 1024)):
            weight = woq_weight(40, size, format, group)
            for rows in (1, 11):
                x = torch.randn(rows, size, generator=torch.Generator().manual_seed(rows))
                expected = torch.ops.ipex.woq_linear(x, weight, 40)
                actual = torch.ops.ipex.woq_linear(x.to("xpu"), weight.to("xpu"), 40)
                same(actual, expected, 1e-4, 1e-4, f"{format} {group} {rows}")


def test_kernels_from_their_source(tmp_path: Path) -> None:
    code = (
        "import torch, ipex_xpu_kernels as xpu; xpu.activate(); x = torch.randn(5, 7)\n"
        "xpu.set_kernel_mode('always'); y = x.to('xpu')\n"
        "same = torch.testing.assert_close\n"
        "same(y.sin().cpu(), x.sin()); same(y.exp().cpu(), x.exp()); same(y.softmax(-1).cpu(), x.softmax(-1))\n"
        "stats = xpu.kernel_load_stats(); print(stats['translated'], stats['compiled'] >= 2)"
    )
    variables = {"IPEX_XPU_SOURCE": "1", "IPEX_XPU_CACHE": str(tmp_path)}
    assert output(code, **variables) == "0 True"
    # The next process finds what the first one has compiled.
    code = code.replace("stats['compiled'] >= 2", "stats['compiled'], stats['from_cache'] >= 3")
    assert output(code, **variables) == "0 0 True"
    if not DEVICE.startswith("cpu"):
        return  # which take a minute to compile the files again
    for file in tmp_path.glob("*.bin"):
        file.write_bytes(file.read_bytes()[:-8])
    assert output(code, **variables).startswith("0 ")
