# SPDX-License-Identifier: Apache-2.0
"""Kernels that users write: compiled in the process, ops of torch, checked before they start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ipex_xpu_kernels as xpu

pytestmark = pytest.mark.usefixtures("needs_device")

SOURCE = """
#include "ipex/xpu.h"

template <typename T>
void swish(const T* x, T* out, float beta, long n) {
  const long i = ipex::global_id();
  if (i < n) ipex::store(out, i, ipex::load(x, i) / (1.f + sycl::exp(-beta * ipex::load(x, i))));
}
IPEX_KERNEL(1) void swish_f32(const float* x, float beta, float* out, long n) { swish(x, out, beta, n); }
IPEX_KERNEL(1) void swish_bf16(const ipex::bf16* x, float beta, ipex::bf16* out, long n) { swish(x, out, beta, n); }
IPEX_KERNEL(1) void add_(float* x, const float* y, int times, long n) {
  const long i = ipex::global_id();
  if (i < n) x[i] += times * (y ? y[i] : 1.f);
}
IPEX_KERNEL(2) void outer(const float* a, const float* b, float* out, long n, long m) {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const long i = item.get_global_id(0), j = item.get_global_id(1);
  if (i < n && j < m) out[i * m + j] = a[i] * b[j];
}
"""


def swish_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    (x,) = ctx.saved_tensors
    (beta,) = ctx.numbers
    s = torch.sigmoid(beta * x)
    return grad * s * (1 + beta * x * (1 - s)), None


@pytest.fixture(scope="module")
def ops(needs_device: None) -> xpu.SyclLibrary:
    return xpu.load_inline(
        "inline_test",
        SOURCE,
        {
            "swish": xpu.SyclOp(
                "(Tensor x, float beta=1.0) -> Tensor",
                kernel={torch.float32: "swish_f32", torch.bfloat16: "swish_bf16"},
                backward=swish_backward,
            ),
            "add_": "(Tensor(a!) x, Tensor? y, int times) -> ()",
            "outer": xpu.SyclOp(
                "(Tensor a, Tensor b) -> Tensor",
                outputs=lambda a, b: a.new_empty(a.numel(), b.numel()),
                size=lambda a, b: (a.numel(), b.numel()),
                local=(4, 32),
            ),
        },
    )


def test_ops(ops: xpu.SyclLibrary) -> None:
    x = torch.randn(3, 7, device="xpu")
    torch.testing.assert_close(ops.swish(x, 2.0), x * torch.sigmoid(2 * x))
    torch.testing.assert_close(torch.ops.inline_test.swish(x), x * torch.sigmoid(x))
    half = ops.swish(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), x * torch.sigmoid(x), rtol=2e-2, atol=2e-2)
    y = x.clone()
    ops.add_(y, x, 2)
    ops.add_(y, None, 1)
    torch.testing.assert_close(y, 3 * x + 1)
    a, b = torch.randn(5, device="xpu"), torch.randn(70, device="xpu")
    torch.testing.assert_close(ops.outer(a, b), torch.outer(a, b))
    assert ops.swish(torch.empty(0, 3, device="xpu")).shape == (0, 3)
    assert hasattr(ops, "swish") and "swish" in repr(ops)


def test_autograd_and_compile(ops: xpu.SyclLibrary) -> None:
    x = torch.randn(6, device="xpu", requires_grad=True)
    y = x.detach().clone().requires_grad_()
    ops.swish(x, 1.5).square().sum().backward()
    (y * torch.sigmoid(1.5 * y)).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    compiled = torch.compile(lambda t: ops.swish(t, 0.5) + 1, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), x * torch.sigmoid(0.5 * x) + 1)
    assert ops.outer(x.detach().to("meta"), y.detach().to("meta")).shape == (6, 6)
    with pytest.raises(RuntimeError, match="inline_test::outer: the op has no gradient"):
        ops.outer(x, y).sum().backward()


def test_arguments_are_checked(ops: xpu.SyclLibrary) -> None:
    x = torch.randn(4, 6, device="xpu")
    with pytest.raises(ValueError, match=r"argument 1 must be contiguous, got sizes \(6, 4\)"):
        ops.swish(x.t())
    with pytest.raises(
        TypeError, match=r"must be torch.float32, torch.bfloat16, got torch.float64"
    ):
        ops.swish(x.double())
    with pytest.raises(TypeError, match=r"argument 2 must be torch.float32 \(float const\*\)"):
        ops.add_(x, x.int(), 1)
    with pytest.raises(ValueError, match=r"argument 2 must be on xpu:0, got a tensor on cpu"):
        ops.add_(x, x.cpu(), 1)
    kernel = ops.kernels["add_"]
    with pytest.raises(
        ValueError, match=r"takes 4 arguments \(float\*, float const\*, int, long\), got 2"
    ):
        kernel(x, x, size=4)
    with pytest.raises(TypeError, match="argument 3 must be an integer"):
        kernel(x, x, 1.5, 4, size=4)
    with pytest.raises(ValueError, match="argument 3 must be -2147483648 to 2147483647"):
        kernel(x, x, 2**31, 4, size=4)
    with pytest.raises(TypeError, match="argument 1 must be a tensor"):
        kernel(3, x, 1, 4, size=4)
    with pytest.raises(TypeError, match="argument 4 must be a number"):
        kernel(x, x, 1, x, size=4)
    with pytest.raises(ValueError, match="size must be 1 to 3"):
        kernel(x, x, 1, 4, size=(1, 1, 1, 1))
    with pytest.raises(
        ValueError, match=r"size must be 1 numbers .* IPEX_KERNEL\(1\), got \(2, 2\)"
    ):
        kernel(x, x, 1, 4, size=(2, 2))
    with pytest.raises(ValueError, match=r"size must be 2 numbers .*, got 4"):
        ops.kernels["outer"](x, x, x, 2, 2, size=4)
    with pytest.raises(ValueError, match="local must be as many"):
        kernel(x, x, 1, 4, size=4, local=(2, 2))
    with pytest.raises(RuntimeError, match=r"(?i)work.?group"):
        kernel(x, x, 1, 4, size=4, local=1 << 20)
    kernel(x, None, 1, 24, size=24, local=8)


def test_functions_are_checked_when_loaded() -> None:
    def load(functions: Any, source: str = SOURCE, name: str = "inline_bad") -> None:
        xpu.load_inline(name, source, functions)

    with pytest.raises(ValueError, match=r"the source has no kernel named nothing"):
        load(["nothing"])
    with pytest.raises(ValueError, match=r"takes 4 arguments .* got 3 \(x, result, size\)"):
        load({"swish_f32": "(Tensor x) -> Tensor"})
    with pytest.raises(
        ValueError, match=r"x must be const in the kernel \(got float\*\) or a Tens"
    ):
        load({"add_": "(Tensor x, Tensor y, int times) -> ()"})
    with pytest.raises(ValueError, match=r"must be Tensor, Tensor\?, float, int or bool"):
        load({"swish_f32": "(Tensor x, int[] sizes) -> Tensor"})
    with pytest.raises(ValueError, match="schema of inline_bad::swish_f32 must be like"):
        load({"swish_f32": "Tensor x"})
    with pytest.raises(ValueError, match="name must be an identifier"):
        load(["add_"], name="a b")
    with pytest.raises(ValueError, match="functions must be"):
        load([])
    with pytest.raises(TypeError, match="sycl_source must be a string or strings, got NoneType"):
        load(["add_"], source=None)  # type: ignore[arg-type]
    with pytest.raises(xpu.SyclCompileError) as caught:
        load(["add_"], SOURCE.replace("times *", "many *"))
    text = str(caught.value)
    line = 1 + SOURCE[: SOURCE.index("times *")].count("\n")
    assert f"inline_bad.cpp:{line}:" in text and "many" in text
    assert "x[i] += many * (y ? y[i] : 1.f);" in text  # the line of the source
    with pytest.raises(xpu.SyclCompileError, match=r"install g\+\+"):
        load(["f"], "#include <nowhere>\nvoid f(int* p) {}")


def test_bfloat16_of_sycl() -> None:
    # Its conversions need a library of the device that the compiler breaks down without; ours take their place.
    source = """
    using bf = sycl::ext::oneapi::bfloat16;
    SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sycl::ext::oneapi::experimental::nd_range_kernel<1>))
    void affine(const bf* x, bf* out, long n) {
      const long i = sycl::ext::oneapi::this_work_item::get_nd_item<1>().get_global_id(0);
      if (i < n) out[i] = x[i] * bf(2.f) + bf(1.f);
    }
    """
    found = xpu.load_inline("inline_bf16", source, {"affine": "(Tensor x) -> Tensor"})
    x = torch.randn(300, device="xpu", dtype=torch.bfloat16)
    torch.testing.assert_close(found.affine(x), x * 2 + 1)
    source = '#include "ipex/xpu.h"' + source.replace("bf(1.f)", "nothing")
    with pytest.raises(xpu.SyclCompileError, match=r"inline_bf16.cpp:6:") as caught:
        xpu.load_inline("inline_bf16", source, ["affine"])
    assert "redefinition" not in str(caught.value)


def test_a_name_can_be_loaded_again() -> None:
    source = SOURCE[: SOURCE.index("template")] + (
        "IPEX_KERNEL(1) void scale(const float* x, float* out, long n)"
        " { const long i = ipex::global_id(); if (i < n) out[i] = FACTOR * x[i]; }"
    )
    x = torch.ones(2, device="xpu")
    for factor in (2, 3):
        found = xpu.load_inline(
            "inline_again",
            source,
            {"scale": "(Tensor x) -> Tensor"},
            options=[f"-DFACTOR={factor}"],
        )
        assert found.scale(x).tolist() == [factor, factor]


def test_example_of_the_documentation() -> None:
    pytest.importorskip("ipex")  # which the page imports
    page = Path(__file__).parents[3] / "docs" / "xpu.md"
    if not page.exists():
        pytest.skip("the documentation is not beside the package")
    text = page.read_text(encoding="utf-8")
    code = next(c for c in re.findall(r"```python\n(.*?)```", text, re.S) if "load_inline" in c)
    exec(compile(code, str(page), "exec"), {})
