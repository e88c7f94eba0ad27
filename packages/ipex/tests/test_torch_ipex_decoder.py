# SPDX-License-Identifier: Apache-2.0
"""Ops of Intel Extension for PyTorch around attention in decoders, against plain torch."""

from __future__ import annotations

import pytest
import torch

import ipex  # noqa: F401  (registers the ops)

pytestmark = pytest.mark.usefixtures("no_gradients")

OPS = torch.ops.torch_ipex
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def near(dtype):
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("past", "positions", "keys", "window"), [
    (0, 6, 6, 100), (0, 6, 6, 2), (5, 3, 8, 4), (5, 1, 6, 2), (2, 4, 3, 3), (2, 4, 9, 3),
])  # fmt: skip
def test_prepare_4d_causal_attention_mask(past, positions, keys, window, dtype):
    given = torch.ones(2, keys, dtype=torch.int64)
    given[1, :2] = 0
    low = torch.finfo(dtype).min
    want = torch.zeros(2, 1, positions, past + positions, dtype=dtype)
    for b in range(2):
        for q in range(positions):
            for k in range(past + positions):
                padding = k < keys and given[b, k] == 0
                if k > q + past or k < q + past - window or padding:
                    want[b, 0, q, k] = low
    embeds = torch.randn(2, positions, 8, dtype=dtype)
    got = OPS.prepare_4d_causal_attention_mask(
        given, embeds, torch.tensor(past), torch.tensor(low), window
    )
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_traced_mask_takes_other_lengths():
    def run(mask, embeds, past, low):
        return OPS.prepare_4d_causal_attention_mask(mask, embeds, past, low, 50)

    def inputs(past, positions):
        mask = torch.ones(2, past + positions, dtype=torch.int64)
        mask[0, 0] = 0
        return mask, torch.randn(2, positions, 4), torch.tensor(past), torch.tensor(-1e9)

    traced = torch.jit.trace(run, inputs(0, 5), check_trace=False)
    other = inputs(7, 3)
    torch.testing.assert_close(traced(*other), run(*other))
    compiled = torch.compile(run, backend="aot_eager")
    torch.testing.assert_close(compiled(*other), run(*other))


def test_mask_with_a_wrong_batch():
    with pytest.raises(RuntimeError, match=r"attention_mask must be 2-D .*got \[3, 4\]"):
        OPS.prepare_4d_causal_attention_mask(
            torch.ones(3, 4), torch.randn(2, 4, 8), torch.tensor(0), torch.tensor(-1.0), 9
        )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "same", "float32"])
@pytest.mark.parametrize(
    "shape", [(2, 1, 9, 9), (2, 3, 1, 9), (1, 1, 9, 1), (9, 9), (1, 9), (1, 1)]
)
def test_flash_attention(shape, mask, causal, dtype):
    q, k, v = (torch.randn(2, 9, 3, 8, dtype=dtype).transpose(1, 2) for _ in range(3))
    bias, given = torch.zeros(2, 3, 9, 9, dtype=torch.float64), None
    if mask == "bool":
        given = torch.rand(shape) > 0.3
        given[..., 0] = True  # a row without any key has no softmax
        bias.masked_fill_(~given, -torch.inf)
    elif mask is not None:
        given = torch.randn(shape).to(torch.float32 if mask == "float32" else dtype)
        bias += given
    if causal:
        bias.masked_fill_(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    scores = q.double() @ k.double().mT * 0.5 + bias
    out, logsumexp = OPS.flash_attention(
        q, k, v, dropout_p=0.0, is_causal=causal, attention_mask=given, scale=0.5
    )
    torch.testing.assert_close(out, (scores.softmax(-1) @ v.double()).to(dtype), **near(dtype))
    want = scores.logsumexp(-1)
    torch.testing.assert_close(logsumexp, want.to(logsumexp.dtype), **near(dtype))


def test_flash_attention_differentiates_and_takes_expanded_tensors():
    q = torch.randn(1, 4, 1, 8).expand(1, 4, 3, 8)
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(OPS.flash_attention(q, q, q)[0], want)
    with torch.enable_grad():
        leaf, other = (q.clone().requires_grad_() for _ in range(2))
        OPS.flash_attention(leaf, leaf, leaf, 0.0, True)[0].square().sum().backward()
        torch.nn.functional.scaled_dot_product_attention(
            other, other, other, is_causal=True
        ).square().sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


def rotated(x, sin, cos, half):
    """`x` [batch, positions, heads, rotary], `sin` and `cos` [batch, positions, 1, rotary / 2], in float32."""
    x, size = x.float(), x.shape[-1] // 2
    first, second = (x[..., :size], x[..., size:]) if half else (x[..., 0::2], x[..., 1::2])
    a, b = first * cos - second * sin, second * cos + first * sin
    return torch.cat((a, b), -1) if half else torch.stack((a, b), -1).flatten(-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("rotary", [8, 16])
@pytest.mark.parametrize("positions", ["batch", "shared", "first"])
def test_rotary_position_embedding(positions, rotary, half, dtype):
    batch, length, heads, kv_heads, size = 2, 5, 4, 2, 16
    fused = torch.randn(batch, length, (heads + 2 * kv_heads) * size).to(dtype)
    table = torch.randn(32, rotary)
    given = {
        "batch": torch.randint(0, 32, (batch, length)),
        "shared": torch.arange(3, 3 + length)[None],
        "first": torch.tensor([7]),
    }[positions]
    rows = torch.arange(7, 7 + length)[None] if positions == "first" else given
    sin, cos = table[rows].unsqueeze(2).chunk(2, -1)
    parts = fused.unflatten(2, (-1, size)).split((heads, kv_heads, kv_heads), 2)
    want = [
        torch.cat((rotated(x[..., :rotary], sin, cos, half).to(dtype), x[..., rotary:]), -1)
        for x in parts[:2]
    ]
    offset = rotary // 2 if half else 1
    q, k, v = OPS.rotary_position_embedding(fused, table, given, heads, size, offset, rotary)
    for got, expected in zip((q, k, v), (*want, parts[2]), strict=True):
        torch.testing.assert_close(got, expected, **near(dtype))
    for x in (parts[0], parts[0].flatten(2)):
        before = x.clone()
        q, k, v = OPS.rotary_position_embedding(x, table, given, heads, size, offset, rotary)
        torch.testing.assert_close(q, want[0], **near(dtype))
        assert k is None and v is None and torch.equal(x, before)


def test_rotary_position_embedding_compiles_and_tells_wrong_arguments():
    x, table, rows = torch.randn(1, 3, 96), torch.randn(8, 16), torch.tensor([[1, 2, 3]])

    def run(x):
        return OPS.rotary_position_embedding(x, table, rows, 2, 16, 8, 16)

    for dynamic in (False, True):
        torch._dynamo.reset()
        got = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)(x)
        torch.testing.assert_close(got, run(x))
    with pytest.raises(RuntimeError, match="offset must be 1 or rotary_ndims / 2 = 8, got 4"):
        OPS.rotary_position_embedding(x, table, rows, 2, 16, 4, 16)
    with pytest.raises(RuntimeError, match=r"t_in must be .*got \[1, 3, 90\]"):
        OPS.rotary_position_embedding(x[..., :90], table, rows, 2, 16, 8, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [False, True])
def test_rotary_position_embedding_deepseek(shared, dtype):
    batch, length, heads, nope, rope, value_size = 2, 5, 3, 8, 16, 8
    size = nope + rope
    q = torch.randn(batch, length, heads * size).to(dtype)
    kv = torch.randn(batch, length, heads, nope + value_size).to(dtype)
    k_pe = torch.randn(batch, length, 1, rope).to(dtype)
    table = torch.randn(12, 2 * rope)
    positions = torch.randint(0, 12, (1 if shared else batch, length))
    sin, cos = table[positions].unsqueeze(2).chunk(2, -1)

    def turned(x):  # as DeepSeek's own code has it: even elements, then odd ones
        x = torch.cat((x[..., 0::2], x[..., 1::2]), -1).float()
        swapped = torch.cat((-x[..., rope // 2 :], x[..., : rope // 2]), -1)
        return (x * cos + swapped * sin).to(dtype)

    split = q.unflatten(2, (heads, size))
    want_q = torch.cat((split[..., :nope], turned(split[..., nope:])), -1)
    want_pe = turned(k_pe)
    want_k = torch.cat((kv[..., :nope], want_pe.expand(-1, -1, heads, -1)), -1)
    want_v = torch.zeros(batch, length, heads, size, dtype=dtype)
    want_v[..., :value_size] = kv[..., nope:]
    got = OPS.rotary_position_embedding_deepseek(
        q, kv, k_pe, table, positions, heads, size, nope, rope
    )
    for result, want in zip(got, (want_q, want_k, want_v), strict=True):
        torch.testing.assert_close(result, want, **near(dtype))
    got = OPS.rotary_position_embedding_deepseek_v2(
        q, k_pe, table, positions, heads, size, nope, rope
    )
    for result, want in zip(got, (want_q, want_pe), strict=True):
        torch.testing.assert_close(result, want, **near(dtype))
    with pytest.raises(RuntimeError, match=r"t_emb_pos must be \[rows, 2 \* rotary_ndims = 32\]"):
        OPS.rotary_position_embedding_deepseek_v2(
            q, k_pe, table[:, :16], positions, heads, size, nope, rope
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_deepseek_moegate(bias, dtype):
    tokens, groups, top_groups, experts, top_k, scale = 12, 4, 2, 16, 3, 2.5
    # Different numbers in every dtype: equal scores would leave the choice open.
    order = torch.stack([torch.randperm(experts) for _ in range(tokens)])
    scores = ((order + 1) / 32).to(dtype)
    extra = (torch.randperm(experts) / 100.0).float() if bias else None
    hidden = torch.randn(tokens, 8, dtype=dtype)
    got_ids, got = OPS.deepseek_moegate(
        hidden, scores, torch.tensor(scale), groups, top_groups, experts, top_k, extra
    )
    assert got_ids.shape == got.shape == (tokens, top_k) and got.dtype == dtype
    for t in range(tokens):
        row = scores[t].double().tolist()
        choice = [s + (extra[e].item() if bias else 0) for e, s in enumerate(row)]
        size, best = experts // groups, 2 if bias else 1
        worth = [sum(sorted(choice[g * size :][:size])[-best:]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: -worth[g])[:top_groups]
        allowed = [e for g in kept for e in range(g * size, (g + 1) * size)]
        ids = sorted(allowed, key=lambda e: -choice[e])[:top_k]
        assert set(got_ids[t].tolist()) == set(ids)
        want = scores[t][got_ids[t]].float() * (1.0 if bias else scale)
        torch.testing.assert_close(got[t].float(), want, rtol=8e-3, atol=1e-6)


def test_deepseek_moegate_with_wrong_scores():
    with pytest.raises(RuntimeError, match=r"n_routed_experts = 16.*got \[2, 12\]"):
        OPS.deepseek_moegate(torch.randn(2, 8), torch.rand(2, 12), torch.tensor(1.0), 4, 2, 16, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("distributed", [False, True])
def test_deepseek_moe_tpp(distributed, dtype):
    tokens, size, inner, experts = 6, 16, 24, 4
    x = torch.randn(tokens, size).to(dtype)
    gate, up = ([torch.randn(inner, size).to(dtype) / 4 for _ in range(experts)] for _ in range(2))
    down = [torch.randn(size, inner).to(dtype) / 4 for _ in range(experts)]
    ids = torch.stack(
        [torch.randperm(experts - 1)[:2] for _ in range(tokens)]
    )  # one is never taken
    weights = torch.rand(tokens, 2).to(dtype)
    want = torch.zeros(tokens, size, dtype=torch.float64)
    for t in range(tokens):
        for s in range(2):
            g, u, d = (w[ids[t, s]].double() for w in (gate, up, down))
            row = x[t].double()
            want[t] += weights[t, s].double() * (
                d @ (torch.nn.functional.silu(g @ row) * (u @ row))
            )
    if distributed:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    try:
        for fallback in (True, False):
            got = OPS.deepseek_moe_tpp(x, ids, gate, up, down, fallback, weights, distributed)
            torch.testing.assert_close(got, want.to(dtype), **near(dtype))
        layers = [None] * experts  # objects of IPEX's packed layers
        for op in (OPS.deepseek_moe, OPS.deepseek_moe_mkl):
            again = op(x, ids, gate, layers, up, layers, down, layers, weights, distributed)
            assert torch.equal(again, got)
    finally:
        if distributed:
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lowp_mode", [0, 3])  # two packed orders
def test_woq_linear_with_what_follows(lowp_mode, dtype):
    n, k, functional = 48, 64, torch.nn.functional
    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scales = torch.rand(n, 1) / 512
    packed = torch.ops.ipex_prepack.woq_linear_pack_weight(
        codes, "int8", [n, k], scales, None, None, None, -1, lowp_mode
    )[0]
    x = torch.randn(2, 5, k).to(dtype)
    a, b = torch.randn(2, 2, 5, n)  # float32 beside a bfloat16 input, too
    y = functional.linear(x.double(), codes.double() * scales.double())
    # Activations of 8 bits are near only.
    tolerance = 1e-4 if dtype == torch.float32 and lowp_mode == 0 else 5e-2
    for got, want in (
        (OPS.woq_linear_gelu(x, packed), functional.gelu(y)),
        (OPS.woq_linear_new_gelu(x, packed), functional.gelu(y, approximate="tanh")),
        (OPS.woq_linear_relu(x, packed), functional.relu(y)),
        (OPS.woq_linear_silu(x, packed), functional.silu(y)),
        (OPS.woq_linear_add(x, packed, [a]), y + a),
        (OPS.woq_linear_add_add(x, packed, [a, b]), y + a + b),
        (OPS.woq_linear_mul(x, packed, [a]), y * a),
    ):
        torch.testing.assert_close(got, want.to(dtype), rtol=tolerance, atol=tolerance)
    with pytest.raises(RuntimeError, match="woq_linear_add: others must have 1 tensors, got 2"):
        OPS.woq_linear_add(x, packed, [a, b])
    with pytest.raises(RuntimeError, match="W_prepack must be a weight packed by"):
        OPS.woq_linear_relu(x, torch.zeros(1, dtype=torch.int64))
