# SPDX-License-Identifier: Apache-2.0
"""Second names of IPEX's ops for mixtures of experts and latent attention, against plain arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

import ipex  # noqa: F401  (registers the ops)

pytestmark = pytest.mark.usefixtures("no_gradients")

OPS = torch.ops.torch_ipex
PREPACK = torch.ops.ipex_prepack
DTYPES = [torch.float32, torch.bfloat16]
TOKENS, SIZE, INNER, EXPERTS = 5, 32, 24, 4
NONE = (None,) * 6


def near(dtype):
    return {"rtol": 2e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}


def numbers(*shape, dtype=torch.float32, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 3).to(dtype)


@pytest.fixture
def routed():
    """Ids and weights of two experts of each token; the last expert is nobody's."""
    order = torch.stack([torch.randperm(EXPERTS - 1)[:2] for _ in range(TOKENS)])
    return order.to(torch.int32), torch.rand(TOKENS, 2)


def expected(x, w13, w2, ids, weights):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(ids.shape[0]):
        for expert, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            gate, up = (w13[expert].double() @ x[t].double()).chunk(2)
            out[t] += weight * (w2[expert].double() @ (silu(gate) * up))
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [True, False])
def test_fused_experts(routed, packed, dtype):
    ids, weights = routed
    x = numbers(TOKENS, SIZE, dtype=dtype)
    w13 = numbers(EXPERTS, 2 * INNER, SIZE, dtype=dtype, seed=1)
    w2 = numbers(EXPERTS, SIZE, INNER, dtype=dtype, seed=2)
    one, two = OPS.convert_weight_packed_moe_bf16(w13, w2) if packed else (w13, w2)
    rest = (False, packed, False, False, 1, -1, 2, *NONE)
    got = OPS.fused_experts(x, one, two, weights, ids, *rest)
    want = expected(x, w13, w2, ids, weights)
    torch.testing.assert_close(got, want.to(dtype), **near(dtype))
    # The last expert is shared.
    got = OPS.fused_experts_with_shared(x, one, two, weights, ids, *rest)
    last = torch.full((TOKENS, 1), EXPERTS - 1)
    want = want + expected(x, w13, w2, last, torch.ones(TOKENS, 1))
    torch.testing.assert_close(got, want.to(dtype), **near(dtype))


def test_fused_experts_with_plain_weights_said_to_be_packed(routed):
    ids, weights = routed
    x, w13, w2 = numbers(TOKENS, 8), numbers(4, 12, 8), numbers(4, 8, 6)
    with pytest.raises(RuntimeError, match=r"packed by convert_weight_packed_moe_bf16.*4, 8, 6"):
        OPS.fused_experts(x, w13, w2, weights, ids, False, True, False, False, 1, -1, 2, *NONE)


def quantized(weight, lowp_mode, bias=None):
    """Return an int8 weight packed for ``lowp_mode``, and the numbers it stands for."""
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    codes = (weight.float() / scale).round().to(torch.int8)
    made = PREPACK.weight_only_qlinear_prepack(
        codes, 1, list(weight.shape), scale, None, bias, None, None, -1, lowp_mode, 3
    )
    return made, codes * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lowp_mode", [0, 2])
def test_experts_with_quantized_weights(routed, lowp_mode, dtype):
    ids, weights = routed
    x = numbers(TOKENS, SIZE, dtype=dtype)
    w13 = numbers(EXPERTS, 2 * INNER, SIZE, seed=1)
    w2 = numbers(EXPERTS, SIZE, INNER, seed=2)
    gate, up = (
        [quantized(w[part], lowp_mode) for w in w13] for part in (slice(INNER), slice(INNER, None))
    )
    down = [quantized(w, lowp_mode) for w in w2]
    plain13 = torch.stack([torch.cat((g[1], u[1])) for g, u in zip(gate, up, strict=True)])
    plain2 = torch.stack([d[1] for d in down])
    want = expected(x, plain13, plain2, ids, weights).to(dtype)
    lists = [[made for made, _ in part] for part in (gate, up, down)]
    got = OPS.deepseek_moe_woq(x, ids.long(), *lists, weights.to(dtype), False)
    tolerance = near(torch.bfloat16 if lowp_mode else dtype)
    torch.testing.assert_close(got, want, **tolerance)
    both = torch.stack([quantized(w, lowp_mode)[0].get_weight() for w in w13])
    second = torch.stack([made.get_weight() for made, _ in down])
    got = OPS.fused_experts(
        x, both, second, weights, ids, False, True, False, True, 1, -1, lowp_mode, *NONE
    )
    torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("lowp_mode", [0, 3])
def test_weight_only_qlinear_prepack(lowp_mode):
    weight, bias, x = numbers(24, 64, seed=1), numbers(24, seed=2), numbers(3, 64, seed=3)
    made, plain = quantized(weight, lowp_mode, bias)
    rounding = {"rtol": 2e-2, "atol": 3e-2} if lowp_mode == 3 else near(torch.float32)
    torch.testing.assert_close(made(x), x @ plain.T + bias, **rounding)
    assert made.get_weight_shape() == [24, 64] and made.get_zero_points() is None
    assert torch.equal(made.get_bias(), bias) and made.get_scales().shape == (24, 1)
    # IPEX's layers called the ops with the number that stands for the object.
    handle, other = made.get_data_handle(), numbers(3, 24, seed=4)
    plain, torch_ipex = made(x), torch.ops.torch_ipex
    assert handle.dtype == torch.int64 and torch.equal(handle, made.get_data_handle())
    for got, want in (
        (torch_ipex.ipex_woq_linear(x, handle), plain),
        (torch_ipex.woq_linear_relu(x, handle), plain.relu()),
        (torch_ipex.woq_linear_add(x, handle, [other]), plain + other),
    ):
        torch.testing.assert_close(got, want)
    traced = torch.jit.trace(lambda v: torch_ipex.woq_linear_relu(v, handle), x)
    torch.testing.assert_close(traced(x[:2]), plain[:2].relu())
    del made
    with pytest.raises(RuntimeError, match="weight_only_qlinear_prepack that still exists, got"):
        torch_ipex.woq_linear_relu(x, handle)
    with pytest.raises(RuntimeError, match=r"W_dtype must be a WoqWeightDtype.*got 9"):
        PREPACK.weight_only_qlinear_prepack(
            weight, 9, [24, 64], bias, None, None, None, None, -1, 0, 0
        )


def test_grouped_topk_and_gate():
    experts, groups, top_k = 16, 4, 3
    hidden, router = numbers(TOKENS, SIZE), numbers(experts, SIZE, seed=4)
    packed = OPS.convert_weight_packed(router.unsqueeze(0), True)
    logits = OPS.moe_gate_bmm_forward(hidden, packed, True, experts, None)
    torch.testing.assert_close(logits, hidden @ router.T)
    bias = torch.rand(1, experts)
    ids, weights = OPS.grouped_topk(hidden, logits, top_k, True, groups, 2, bias, torch.tensor(2.5))
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    scores = logits.sigmoid()
    for t in range(TOKENS):
        choice = scores[t] + bias[0]
        worth = choice.view(groups, -1).topk(2).values.sum(-1)
        allowed = torch.zeros(groups, 1).index_fill(0, worth.topk(2).indices, 1.0)
        chosen = (choice.view(groups, -1) * allowed).flatten().topk(top_k).indices
        assert set(ids[t].tolist()) == set(chosen.tolist())
        want = scores[t][ids[t].long()]
        torch.testing.assert_close(weights[t], 2.5 * want / want.sum())
    with pytest.raises(RuntimeError, match="topk = 7"):
        OPS.moe_gate_bmm_forward(hidden, packed, True, 7, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_deepseekv2_mla(dtype):
    """A prompt of five tokens, then two more, against attention with keys and values of each head."""
    batch, heads, nope, rotary, rank, size, scale = 2, 3, 16, 8, 32, 16, 5.0
    w_kc = numbers(heads, rank, nope, dtype=dtype, seed=1)
    w_vc = numbers(heads, size, rank, dtype=dtype, seed=2)
    whole = {
        "query": numbers(batch, 7, heads, nope + rotary, dtype=dtype, seed=3),
        "kv": numbers(batch, 7, rank, dtype=dtype, seed=4),
        "k_pe": numbers(batch, 7, 1, rotary, dtype=dtype, seed=5),
    }
    wide = {name: value.double() for name, value in whole.items()}
    key = torch.einsum("btr,hrn->bhtn", wide["kv"], w_kc.double())
    shared = wide["k_pe"].transpose(1, 2).expand(-1, heads, -1, -1)
    want = torch.nn.functional.scaled_dot_product_attention(
        wide["query"].transpose(1, 2),
        torch.cat((key, shared), -1),
        torch.einsum("btr,hvr->bhtv", wide["kv"], w_vc.double()),
        is_causal=True,
        scale=1 / scale,
    ).to(dtype)
    packed = [OPS.convert_weight_packed(w, False) for w in (w_kc, w_vc)]
    cache, beams = torch.zeros(1, 1, 1, 1, dtype=dtype), torch.zeros(1, batch, dtype=torch.long)
    start = 0
    for stop in (5, 6, 7):
        step = [value[:, start:stop] for value in whole.values()]
        mask = torch.zeros(batch, 1, stop - start, stop, dtype=dtype)
        out, _, cache, beams = OPS.deepseekv2_mla(
            *step,
            cache,
            torch.empty(0),
            *packed,
            beams,
            torch.tensor(start),
            scale,
            6,  # the cache grows
            size,
            None,
            mask,
            None,
            True,
        )
        torch.testing.assert_close(out, want[:, :, start:stop], **near(dtype))
        start = stop
    assert cache.shape[1:] == (batch, 1, rank + rotary)
    with pytest.raises(RuntimeError, match=r"w_vc must be \[3, 16, 32\], got \[3, 32, 16\]"):
        OPS.deepseekv2_mla(
            *(v[:, :1] for v in whole.values()),
            *(cache, torch.empty(0), w_kc, w_vc.transpose(1, 2), beams, torch.tensor(7)),
            *(scale, 6, size, None, mask, None),
        )
