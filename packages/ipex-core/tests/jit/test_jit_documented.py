# SPDX-License-Identifier: Apache-2.0
"""TorchScript: the patterns that IPEX documented, in all their spellings."""

import copy

import pytest
import torch
from jit_checks import CONV_POST, IN_PLACE, After, Concat, check, frozen
from torch import nn
from torch.nn import functional as F

from ipex_core import jit
from ipex_core.kernels.policy import has_kernel

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
kernels = pytest.mark.skipif(not has_kernel("linear"), reason="fuses only to kernels")


LAYERS = {
    "conv1d": (nn.Conv1d(4, 8, 3, padding=1, stride=2), (4, 9), (4, 12)),
    "conv2d": (nn.Conv2d(4, 8, 3, padding=1), (4, 6, 7), (4, 9, 5)),
    "conv2d groups": (nn.Conv2d(4, 8, 3, padding=1, groups=2), (4, 6, 7), (4, 9, 5)),
    "conv3d": (nn.Conv3d(4, 8, 3, padding=1), (4, 4, 5, 6), (4, 3, 3, 3)),
    "conv_transpose2d": (
        nn.ConvTranspose2d(4, 8, 3, stride=2, padding=1, output_padding=1),
        (4, 5, 6),
        (4, 3, 3),
    ),
    "conv_transpose3d": (nn.ConvTranspose3d(4, 8, 3, stride=2), (4, 3, 4, 2), (4, 2, 2, 2)),
    "linear": (nn.Linear(512, 512), (5, 512), (3, 512)),
}
#: The activations that IPEX documented behind each of them.
DOCUMENTED = {
    **CONV_POST,
    **IN_PLACE,
    "log": torch.log,
    "pow": lambda y: torch.pow(y, 3),
    "round": torch.round,
    "sqrt": torch.sqrt,
    "swish": lambda y: y * torch.sigmoid(y),
}


def base_name(layer):
    return layer.split()[0].rstrip("123d")


def fused_name(layer, post):
    base = base_name(layer)
    inside = ("relu", "gelu", "silu") if layer == "linear" else CONV_POST
    post = {"swish": "silu"}.get(post, post)
    return f"{base} + {post}" if post in inside else f"{base} + {post} in place"


@kernels
@pytest.mark.parametrize("layer", LAYERS)
def test_documented_activations(layer):
    """Each activation of IPEX's list, behind each kind of layer, is one node with it or works in its memory."""
    module, *shapes = LAYERS[layer]
    torch.manual_seed(0)
    module.reset_parameters()  # logarithms and roundings of some numbers differ by more
    calls = [(torch.randn(2, *shape),) for shape in shapes]
    for post, function in DOCUMENTED.items():
        model = After(module, function)
        program = frozen(model, *calls[0])
        result = jit.fuse(program)
        assert jit.fused(result)[fused_name(layer, post)] == 1
        with torch.no_grad():
            for call in calls:
                torch.testing.assert_close(
                    result(*call), model(*call), rtol=1e-3, atol=1e-3, equal_nan=True
                )


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_documented_sums(layer, dtype):
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    module, *shapes = LAYERS[layer]
    module = copy.deepcopy(module).to(dtype)
    model = After(module, lambda y, r: F.relu(y + r))
    calls = []
    for shape in shapes:
        x = torch.randn(2, *shape).to(dtype)
        y = module(x)
        calls += [(x, torch.randn_like(y)), (x, torch.randn_like(y)[:1])]
    found = check(model, *calls, tolerance=1e-4 if dtype is torch.float32 else 5e-2)
    base = base_name(layer)
    if layer.startswith("conv2d"):
        assert found == {"conv + add + relu": 1}
    else:
        assert found[f"{base} + add"] == 1


class Spelled(nn.Module):
    """Linear layers as GPT-2 and as plain products write them."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.w, self.b = nn.Parameter(torch.randn(512, 640) / 20), nn.Parameter(torch.randn(640))

    def forward(self, x):
        if self.kind == "addmm":
            return F.gelu(torch.addmm(self.b, x.view(-1, x.size(-1)), self.w))
        y = torch.matmul(x, self.w)
        return F.relu(y + self.b) if self.kind == "bias" else F.relu(y)


@kernels
@pytest.mark.parametrize("kind", ["addmm", "bias", "product"])
def test_other_spellings_of_linear_layers(kind):
    post = "gelu" if kind == "addmm" else "relu"
    calls = [(torch.randn(4, 512),), (torch.randn(2, 3, 512),), (torch.randn(1, 512),)]
    assert check(Spelled(kind), *calls) == {f"linear + {post}": 1}
    if kind != "addmm":
        assert check(Spelled(kind), (torch.randn(512),)) == {f"linear + {post}": 1}


class Tied(nn.Module):
    """A square matrix and its transpose, in the same memory."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(512, 512) / 20)

    def forward(self, x):
        return F.linear(F.relu(F.linear(x, self.w)), self.w.t()) + x @ self.w.t() - x @ self.w


@kernels
def test_tied_square_weights():
    assert check(Tied(), (torch.randn(4, 512),))["linear + relu"] == 1


class Scores(nn.Module):
    """Scores of attention, returned instead of used."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, q, k, mask):
        scores = torch.matmul(q, k.transpose(-1, -2))
        if self.how == "div":
            return torch.softmax(scores / 4.0 + mask, -1)
        if self.how != "einsum":
            value = 0.5 if self.how == "replace" else torch.finfo(q.dtype).min
            return torch.softmax(scores.masked_fill((mask > 0).expand_as(scores), value), -1)
        return torch.einsum("bhqd,bhkd->bhqk", q, k) + mask


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores(dtype):
    def call(b, h, q, k, *mask):
        shapes = ((b, h, q, 16), (b, h, k, 16), mask)
        return tuple(torch.randn(*s).to(dtype) for s in shapes)

    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    calls = [call(2, 3, 4, 5, 2, 1, 1, 5), call(1, 2, 3, 3, 3, 3), call(1, 1, 2, 6, 6)]
    assert check(Scores("div"), *calls, tolerance=tolerance) == {"div + add + softmax": 1}
    assert check(Scores("fill"), *calls, tolerance=tolerance) == {"masked_fill + softmax": 1}
    assert check(Scores("replace"), *calls, tolerance=tolerance) == {}
    # The sum is larger than the product, and of another dtype.
    odd = (*calls[1][:2], torch.randn(4, 1, 3, 3))
    found = check(Scores("einsum"), *calls, odd, tolerance=tolerance)
    assert found == {"einsum + add in place": 1}


class Filled(nn.Module):
    """Attention as DistilBERT wrote it."""

    def forward(self, q, k, v, keep):
        q = q / 4.0
        scores = torch.matmul(q, k.transpose(2, 3))
        mask = (keep == 0).view(keep.size(0), 1, 1, keep.size(1)).expand_as(scores)
        weights = torch.softmax(scores.masked_fill(mask, torch.finfo(scores.dtype).min), dim=-1)
        return torch.matmul(weights, v)


@kernels
def test_attention_with_a_filling_mask():
    keep = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    call = (*(torch.randn(2, 3, 5, 16) for _ in range(3)), keep)
    other = (*(torch.randn(1, 2, 7, 16) for _ in range(3)), torch.ones(1, 7))
    assert check(Filled(), call, other) == {"attention": 1}


class Stock(nn.Module):
    """Attention as models call it today."""

    def __init__(self, causal, masked):
        super().__init__()
        self.causal, self.masked = causal, masked

    def forward(self, q, k, v, mask):
        mask = mask if self.masked else None
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("how", ["causal", "masked", "plain"])
def test_stock_attention(how, dtype):
    def call(heads, q, k):
        wide = [torch.randn(2, heads, n, 16).to(dtype) for n in (q, k, k)]
        return (*wide, torch.rand(2, 1, q, k) > 0.1)

    model = Stock(how == "causal", how == "masked")
    calls = [call(4, 16, 16), call(2, 2, 2), call(1, 130, 130)]
    tolerance = 5e-2 if dtype is torch.bfloat16 else 1e-4
    assert check(model, *calls, tolerance=tolerance) == {"attention": 1}


def test_concat_batch_norm_relu():
    model = Concat()
    model.norm.running_mean.normal_()
    call = (torch.randn(1, 2, 3, 4, 5), torch.randn(1, 4, 3, 4, 5))
    assert check(model, call) == {"concat + batch_norm + relu in place": 1}
