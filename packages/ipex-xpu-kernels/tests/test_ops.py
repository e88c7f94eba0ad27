# SPDX-License-Identifier: Apache-2.0
"""torch's own database of ops, on the device against the host, forward and backward."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from ipex_xpu_kernels import _device

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

pytestmark = pytest.mark.usefixtures("needs_device", "always")

#: Op -> why it is not compared.
LEFT_OUT = {
    "sparse.sampled_addmm": "sparse tensors do not exist on this device",
    "sparse.mm": "sparse tensors do not exist on this device",
    "to_sparse": "sparse tensors do not exist on this device",
    "tensor_split": "torch wants the indices on the host",
    "as_strided": "the sample views a part of a storage, which does not move with the tensor",
    "empty": "values are not defined",
    "empty_like": "values are not defined",
    "empty_permuted": "values are not defined",
    "empty_strided": "values are not defined",
    "new_empty": "values are not defined",
    "new_empty_strided": "values are not defined",
    **dict.fromkeys(
        (
            "bernoulli",
            "cauchy",
            "exponential",
            "geometric",
            "log_normal",
            "multinomial",
            "nn.functional.alpha_dropout",
            "nn.functional.dropout",
            "nn.functional.dropout2d",
            "nn.functional.dropout3d",
            "nn.functional.feature_alpha_dropout",
            "nn.functional.fractional_max_pool2d",
            "nn.functional.fractional_max_pool3d",
            "nn.functional.rrelu",
            "normal",
            "rand_like",
            "randint",
            "randint_like",
            "randn",
            "randn_like",
            "uniform",
        ),
        "the device draws numbers of its own; see test_random.py",
    ),
    "torch._scaled_mm": "numbers of 8 bits are not compared within a tolerance",
}
SAMPLES = 3
#: Earlier ones know this dtype for CUDA only.
FFT_OF_HALF = torch.__version__ >= "2.13"
#: Absolute tolerance where numbers nearly cancel.
LOOSE = {
    ("nn.functional.layer_norm", torch.float32): 1e-4,
    ("nn.functional.normalize", torch.bfloat16): 1e-1,
    # What the taps give is rounded before it is summed.
    **{(f"nn.functional.conv_transpose{n}d", torch.bfloat16): 3e-1 for n in (1, 2)},
    # Hosts without bfloat16 round sums of the taps on the way.
    ("nn.functional.conv1d", torch.bfloat16): 5e-2,
    # The host is up to 0.94 away from float64, the device up to 1.07, of numbers up to 145.
    ("nn.functional.conv_transpose3d", torch.bfloat16): 8e-1,
}
TOLERANCE = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (1.6e-2, 1e-2)}


def moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device).requires_grad_(value.requires_grad)
    if isinstance(value, torch.device) or value == "cpu":
        return torch.device(device)
    return value


def defined(op: Any, sample: Any) -> Any:
    """Leave out what is not defined: dropout, for which the device draws its own numbers, the choice of equal ones."""
    if op.name == "nn.functional.multi_head_attention_forward":
        sample.args = (*sample.args[:9], 0.0, *sample.args[10:])
    elif "dropout_p" in sample.kwargs:
        sample.kwargs["dropout_p"] = 0.0
    elif op.name == "topk":
        x = sample.input
        distinct = torch.randperm(x.numel()).view(x.shape).to(x.dtype)
        sample.input = distinct.requires_grad_(x.requires_grad)
    return sample


def run(op: Any, sample: Any, device: str, backward: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    args = pytree.tree_map(lambda v: moved(v, device), (sample.input, sample.args, sample.kwargs))
    outputs = [
        t
        for t in pytree.tree_leaves(op(args[0], *args[1], **args[2]))
        if isinstance(t, torch.Tensor)
    ]
    results: list[torch.Tensor | None] = [t.detach().cpu() for t in outputs]
    leaves = [
        t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    roots = [t for t in outputs if t.requires_grad]
    if backward and leaves and roots:
        sums = [t.abs().sum() if t.is_complex() else t.sum() for t in roots]
        grads = torch.autograd.grad(sums, leaves, allow_unused=True)
        results += [g if g is None else g.cpu() for g in grads]
    return results


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "op",
    op_db,
    ids=lambda op: op.full_name if hasattr(op, "full_name") else op.name + op.variant_test_name,
)
def test_op(op: Any, dtype: torch.dtype) -> None:
    if op.name in LEFT_OUT:
        pytest.skip(LEFT_OUT[op.name])
    supported = op.supported_dtypes("cpu")
    if dtype not in supported:
        if dtype == torch.bfloat16 or not supported:
            pytest.skip("not on the host either")
        dtype = min(supported, key=str)
    backward = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    try:
        found = op.sample_inputs("cpu", dtype, requires_grad=backward)
        samples = [defined(op, sample) for sample in itertools.islice(found, SAMPLES)]
        expected = [run(op, sample, "cpu", backward) for sample in samples]
    except Exception as error:
        pytest.skip(f"not on the host either: {error}")
    rtol, atol = TOLERANCE.get(dtype, (1e-5, 1e-6))
    atol = LOOSE.get((op.name, dtype), atol)
    for sample, wanted in zip(samples, expected, strict=True):
        for actual, reference in zip(run(op, sample, "xpu", backward), wanted, strict=True):
            assert (actual is None) == (reference is None)
            if actual is not None:
                torch.testing.assert_close(actual, reference, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero_copy", [True, False])
def test_small_floats_that_the_host_lacks(dtype: torch.dtype, zero_copy: bool) -> None:
    native = _device.native()
    native.set_zero_copy(zero_copy)
    try:
        x = torch.randn(2, 3, 4, 6, 4).to(dtype)
        avg_pool3d = torch._C._nn.avg_pool3d
        calls: list[Any] = [
            lambda x: functional.avg_pool3d(x, 2),
            lambda x: avg_pool3d(x, 2, out=x.new_empty(0)),
            lambda x: functional.multi_margin_loss(x[0, 0, 0], x.new_ones(6).long()),
            lambda x: functional.interpolate(x[0], (3, 2), mode="bilinear", antialias=True),
            lambda x: torch.autograd.grad(functional.avg_pool3d(x.requires_grad_(), 2).sum(), x)[0],
        ]
        if dtype == torch.float16 and FFT_OF_HALF:
            calls.append(lambda x: torch.view_as_real(torch.fft.rfft(x[0, 0, 0])))
        for call in calls:
            actual, expected = call(x.to("xpu")), call(x.float())
            assert actual.dtype == dtype
            torch.testing.assert_close(actual.cpu(), expected.to(dtype))
    finally:
        native.set_zero_copy(True)


@pytest.mark.parametrize("zero_copy", [True, False])
def test_results_that_the_host_leaves_to_be_conjugated(zero_copy: bool) -> None:
    _device.native().set_zero_copy(zero_copy)
    try:
        factors, pivots = torch.linalg.lu_factor(torch.randn(3, 3, dtype=torch.complex64))
        b = torch.randn(4, 3, dtype=torch.complex64)
        expected = torch.linalg.lu_solve(factors, pivots, b, left=False)
        assert expected.is_conj()
        actual = torch.linalg.lu_solve(factors.xpu(), pivots.xpu(), b.xpu(), left=False)
        torch.testing.assert_close(actual.cpu(), expected)
    finally:
        _device.native().set_zero_copy(True)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_dtypes_that_devices_have_and_the_host_has_not() -> None:
    truth = torch.randn(3, 4) > 0
    assert torch.equal(truth.xpu().abs().cpu(), truth)
    assert torch.equal(truth.xpu().t().abs().cpu(), truth.t())
    assert truth.xpu()[:3, :3].trace().item() == truth[:3, :3].long().trace().item()
    softsign = functional.softsign(truth.xpu()).cpu()
    torch.testing.assert_close(softsign, functional.softsign(truth.float()))

    z = torch.randn(3, 4, dtype=torch.complex64)
    z[0, 1], z[2, 3] = complex("nan"), complex(1, float("nan"))
    for dim in (None, 1, [0, 1]):
        expected = torch.where(z.isnan(), 0, z).sum(dim)
        torch.testing.assert_close(torch.nansum(z.xpu(), dim).cpu(), expected)
    x = z.real.contiguous()
    torch.testing.assert_close(torch.nansum(x.xpu(), 0, True).cpu(), torch.nansum(x, 0, True))
    assert torch.nansum(truth.xpu()).item() == truth.sum().item()

    half = torch.randn(4, 4, dtype=torch.complex64).to(torch.complex32)
    calls: list[Any] = [
        lambda z: z.exp(),
        lambda z: z.trace(),
        lambda z: z.sum(0),
        lambda z: z.angle(),
        lambda z: z / 3,
        torch.fft.ifft2,
        lambda z: torch.sqrt(z, out=z.new_empty(0)),
        lambda z: z.clone().tanh_(),
    ]
    for call in calls:
        actual, expected = call(half.xpu()).cpu(), call(half.to(torch.complex64))
        assert actual.dtype == (torch.complex32 if expected.is_complex() else torch.float16)
        torch.testing.assert_close(actual.to(expected.dtype), expected, rtol=2e-3, atol=2e-3)
    if not FFT_OF_HALF:
        return
    y = torch.randn(4, 4).half()
    actual = torch.fft.fft2(y.xpu()).cpu()
    assert actual.dtype == torch.complex32
    torch.testing.assert_close(
        actual.to(torch.complex64), torch.fft.fft2(y.float()), rtol=2e-3, atol=2e-2
    )
