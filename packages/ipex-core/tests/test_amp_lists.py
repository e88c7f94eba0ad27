# SPDX-License-Identifier: Apache-2.0
"""The autocast lists that IPEX documented, op by op, against what torch does: importing ipex changes none of it."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

import ipex_core  # noqa: F401

torch.manual_seed(0)
REDUCED = (torch.bfloat16, torch.float16)


def r(*shape):
    return torch.rand(*shape) * 0.8 + 0.1


def square():
    return r(3, 3) + 3 * torch.eye(3)


def spd():
    m = square()
    return m @ m.T


def first(value):
    return value[0] if isinstance(value, tuple) else value


def apply(function, *shape_and_cast):
    *shape, c = shape_and_cast
    return function(c(r(*shape)))


def apply_spd(function, c):
    return first(function(c(spd())))


LABELS = torch.tensor([0, 1])

#: Each takes a function that casts an input to the dtype under test.
LOWER = {
    "conv1d": lambda c: F.conv1d(c(r(1, 2, 8)), c(r(3, 2, 3))),
    "conv2d": lambda c: F.conv2d(c(r(1, 2, 8, 8)), c(r(3, 2, 3, 3))),
    "conv3d": lambda c: F.conv3d(c(r(1, 2, 4, 4, 4)), c(r(3, 2, 3, 3, 3))),
    "conv_transpose1d": lambda c: F.conv_transpose1d(c(r(1, 2, 8)), c(r(2, 3, 3))),
    "conv_transpose2d": lambda c: F.conv_transpose2d(c(r(1, 2, 4, 4)), c(r(2, 3, 3, 3))),
    "conv_transpose3d": lambda c: F.conv_transpose3d(c(r(1, 2, 3, 3, 3)), c(r(2, 3, 2, 2, 2))),
    "conv_tbc": lambda c: torch.conv_tbc(c(r(8, 1, 2)), c(r(3, 2, 3)), c(r(3))),
    "bmm": lambda c: torch.bmm(c(r(2, 3, 4)), c(r(2, 4, 3))),
    "mm": lambda c: torch.mm(c(r(3, 4)), c(r(4, 3))),
    "matmul": lambda c: torch.matmul(c(r(3, 4)), c(r(4))),
    "baddbmm": lambda c: torch.baddbmm(c(r(2, 3, 3)), c(r(2, 3, 4)), c(r(2, 4, 3))),
    "addmm": lambda c: torch.addmm(c(r(3, 3)), c(r(3, 4)), c(r(4, 3))),
    "addbmm": lambda c: torch.addbmm(c(r(3, 3)), c(r(2, 3, 4)), c(r(2, 4, 3))),
    "linear": lambda c: F.linear(c(r(3, 4)), c(r(5, 4)), c(r(5))),
    "scaled_dot_product_attention": lambda c: F.scaled_dot_product_attention(
        c(r(1, 2, 3, 4)), c(r(1, 2, 3, 4)), c(r(1, 2, 3, 4))
    ),
}

#: Documented by IPEX as lower precision; torch computes them in the dtype of the input.
AS_INPUT = {"group_norm": lambda c: F.group_norm(c(r(2, 4, 3)), 2)}

LOSSES = {
    "mse_loss": lambda c: F.mse_loss(c(r(2, 3)), c(r(2, 3))),
    "l1_loss": lambda c: F.l1_loss(c(r(2, 3)), c(r(2, 3))),
    "smooth_l1_loss": lambda c: F.smooth_l1_loss(c(r(2, 3)), c(r(2, 3))),
    "huber_loss": lambda c: F.huber_loss(c(r(2, 3)), c(r(2, 3))),
    "binary_cross_entropy": lambda c: F.binary_cross_entropy(c(r(2, 3)), c(r(2, 3))),
    "binary_cross_entropy_with_logits": lambda c: F.binary_cross_entropy_with_logits(
        c(r(2, 3)), c(r(2, 3))
    ),
    "cosine_embedding_loss": lambda c: F.cosine_embedding_loss(
        c(r(2, 3)), c(r(2, 3)), torch.ones(2)
    ),
    "nll_loss": lambda c: F.nll_loss(c(r(2, 3)), LABELS),
    "nll_loss2d": lambda c: F.nll_loss(c(r(1, 3, 2, 2)), torch.zeros(1, 2, 2).long()),
    "hinge_embedding_loss": lambda c: F.hinge_embedding_loss(c(r(2, 3)), torch.ones(2, 3)),
    "poisson_nll_loss": lambda c: F.poisson_nll_loss(c(r(2, 3)), c(r(2, 3))),
    "cross_entropy_loss": lambda c: F.cross_entropy(c(r(2, 3)), LABELS),
    "margin_ranking_loss": lambda c: F.margin_ranking_loss(c(r(3)), c(r(3)), torch.ones(3)),
    "soft_margin_loss": lambda c: F.soft_margin_loss(c(r(3)), torch.ones(3)),
    "triplet_margin_loss": lambda c: F.triplet_margin_loss(c(r(2, 3)), c(r(2, 3)), c(r(2, 3))),
    "multi_margin_loss": lambda c: F.multi_margin_loss(c(r(2, 3)), LABELS),
    "multilabel_margin_loss": lambda c: F.multilabel_margin_loss(
        c(r(2, 3)), torch.tensor([[0, 1, -1], [2, -1, 0]])
    ),
    "kl_div": lambda c: F.kl_div(c(r(2, 3)).log(), c(r(2, 3)), reduction="batchmean"),
    "ctc_loss": lambda c: F.ctc_loss(
        c(r(4, 1, 3)).float().log_softmax(-1), torch.tensor([[1]]), (4,), (1,)
    ),
}

WIDE = {
    "avg_pool3d": lambda c: F.avg_pool3d(c(r(1, 1, 4, 4, 4)), 2),
    "grid_sampler": lambda c: F.grid_sample(
        c(r(1, 1, 3, 3)), c(r(1, 2, 2, 2)), align_corners=False
    ),
    "polar": lambda c: torch.polar(c(r(3)), c(r(3))),
    "prod": lambda c: torch.prod(c(r(3))),
    "quantile": lambda c: torch.quantile(c(r(5)), 0.5),
    "nanquantile": lambda c: torch.nanquantile(c(r(5)), 0.5),
    "stft": lambda c: torch.stft(c(r(32)), 8, window=torch.ones(8), return_complex=True),
    "cdist": lambda c: torch.cdist(c(r(2, 3)), c(r(4, 3))),
    "trace": lambda c: torch.trace(c(square())),
    "view_as_complex": lambda c: torch.view_as_complex(c(r(3, 2))),
    "cholesky_inverse": lambda c: torch.cholesky_inverse(c(spd())),
    "cholesky_solve": lambda c: torch.cholesky_solve(c(r(3, 1)), c(spd())),
    "inverse": lambda c: torch.inverse(c(square())),
    "lu_solve": lambda c: torch.lu_solve(
        c(r(3, 1)), c(square()), torch.tensor([1, 2, 3], dtype=torch.int32)
    ),
    "orgqr": lambda c: torch.orgqr(c(square()), c(r(3))),
    "ormqr": lambda c: torch.ormqr(c(square()), c(r(3)), c(square())),
    "pinverse": lambda c: torch.pinverse(c(square())),
    "max_unpool2d": lambda c: F.max_unpool2d(c(r(1, 1, 2, 2)), torch.arange(4).view(1, 1, 2, 2), 2),
    "max_unpool3d": lambda c: F.max_unpool3d(
        c(r(1, 1, 1, 1, 1)), torch.zeros(1, 1, 1, 1, 1).long(), 2
    ),
    "adaptive_avg_pool3d": lambda c: F.adaptive_avg_pool3d(c(r(1, 1, 4, 4, 4)), 2),
    "adaptive_max_pool3d": lambda c: F.adaptive_max_pool3d(c(r(1, 1, 4, 4, 4)), 2),
    "fractional_max_pool2d": lambda c: F.fractional_max_pool2d(c(r(1, 1, 5, 5)), 2, 2),
    "fractional_max_pool3d": lambda c: F.fractional_max_pool3d(c(r(1, 1, 5, 5, 5)), 2, 2),
    "reflection_pad1d": lambda c: F.pad(c(r(1, 2, 4)), (1, 1), "reflect"),
    "reflection_pad2d": lambda c: F.pad(c(r(1, 2, 4, 4)), (1, 1, 1, 1), "reflect"),
    "replication_pad1d": lambda c: F.pad(c(r(1, 2, 4)), (1, 1), "replicate"),
    "replication_pad2d": lambda c: F.pad(c(r(1, 2, 4, 4)), (1, 1, 1, 1), "replicate"),
    "replication_pad3d": lambda c: F.pad(c(r(1, 2, 3, 3, 3)), (1,) * 6, "replicate"),
    "fake_quantize_per_tensor_affine": lambda c: torch.fake_quantize_per_tensor_affine(
        c(r(3)), 0.1, 0, 0, 255
    ),
    "geqrf": lambda c: torch.geqrf(c(square()))[0],
    "_lu_with_info": lambda c: torch._lu_with_info(c(square()))[0],
    "svd": lambda c: torch.svd(c(square()))[0],
    "triangular_solve": lambda c: torch.triangular_solve(c(r(3, 1)), c(square()))[0],
    **{
        f"fft_{n}": partial(apply, getattr(torch.fft, n), 4)
        for n in ("fft", "ifft", "rfft", "hfft", "ihfft")
    },
    "fft_irfft": lambda c: torch.fft.irfft(torch.complex(c(r(3)).float(), r(3))),
    **{
        f"fft_{n}": partial(apply, getattr(torch.fft, n), 4, 4)
        for n in ("fft2", "ifft2", "fftn", "ifftn", "rfft2", "rfftn")
    },
    **{
        f"linalg_{n}": partial(apply_spd, getattr(torch.linalg, n))
        for n in (
            *("cond", "cholesky", "svdvals", "eigvals", "eigvalsh", "inv", "qr", "cholesky_ex"),
            *("svd", "eig", "eigh", "inv_ex"),
        )
    },
    "linalg_solve": lambda c: torch.linalg.solve(c(square()), c(r(3, 1))),
    "linalg_householder_product": lambda c: torch.linalg.householder_product(c(square()), c(r(3))),
    "linalg_tensorinv": lambda c: torch.linalg.tensorinv(c(square()), 1),
    "linalg_tensorsolve": lambda c: torch.linalg.tensorsolve(c(square()), c(r(3))),
    "linalg_lstsq": lambda c: torch.linalg.lstsq(c(square()), c(r(3, 1)))[0],
}

PROMOTE = {
    "cat": lambda c: torch.cat([c(r(2)), r(2)]),
    "stack": lambda c: torch.stack([c(r(2)), r(2)]),
    "index_copy": lambda c: torch.index_copy(c(r(4)), 0, torch.tensor([1]), r(1)),
}


#: Of IPEX's lists, gone from torch.
GONE = ("eig", "lstsq", "matrix_rank", "symeig")


def dtype_in_region(function, given, region, **options):
    with torch.autocast("cpu", dtype=region, **options):
        return function(lambda x: x.to(given)).dtype


@pytest.mark.parametrize("region", REDUCED, ids=str)
@pytest.mark.parametrize("name", LOWER)
def test_lower_precision(name, region):
    for given in (torch.float32, *REDUCED):
        assert dtype_in_region(LOWER[name], given, region) == region
        assert dtype_in_region(LOWER[name], given, region, cache_enabled=False) == region


@pytest.mark.parametrize("region", REDUCED, ids=str)
@pytest.mark.parametrize("name", [*LOSSES, *WIDE, *PROMOTE])
@pytest.mark.filterwarnings("ignore")  # of deprecated names
def test_float32(name, region):
    function = {**LOSSES, **WIDE, **PROMOTE}[name]
    for given in (torch.float32, region):
        assert dtype_in_region(function, given, region) in (torch.float32, torch.complex64)


@pytest.mark.parametrize("region", REDUCED, ids=str)
def test_what_differs_from_the_lists_of_ipex(region):
    for given in (torch.float32, region):
        assert dtype_in_region(AS_INPUT["group_norm"], given, region) == given
    # A call of a removed function raises; the names may stay for that.
    for name in GONE:
        with pytest.raises((AttributeError, RuntimeError, TypeError)):
            getattr(torch, name)(torch.eye(2))


def test_nested_and_disabled():
    # With torch's cache of weights this fails: the cache does not know for which dtype a weight was cast.
    layer, x = torch.nn.Linear(4, 4), r(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            assert layer(x).dtype == torch.float16
            with torch.autocast("cpu", enabled=False):
                assert layer(x).dtype == torch.float32
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast.*:FutureWarning")
def test_the_deprecated_name():
    with torch.cpu.amp.autocast(dtype=torch.bfloat16):
        assert torch.ops.ipex.attention(*[r(1, 2, 3, 4)] * 3).dtype == torch.bfloat16
