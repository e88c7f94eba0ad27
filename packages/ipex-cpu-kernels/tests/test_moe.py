# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: routes and results against the Hugging Face library and plain layers, bad input."""

from __future__ import annotations

import pytest
import refusals
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import ipex_core  # noqa: F401
from ipex_core.nn.moe import gated_mlp_moe, pack_experts, pack_woq_experts
from ipex_core.packing.woq import quantize

pytestmark = pytest.mark.usefixtures("no_gradients")

ops = torch.ops.ipex
E, H, INNER = 4, 40, 24


def _weights(experts=E, hidden=H, inner=INNER, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.randn(experts, 2 * inner, hidden, generator=generator) * hidden**-0.5
    w2 = torch.randn(experts, hidden, inner, generator=generator) * inner**-0.5
    return w13.to(dtype), w2.to(dtype)


W13, W2 = _weights()
P13, P2 = ops.pack_moe_weight(W13, True), ops.pack_moe_weight(W2)
X = torch.randn(5, H, generator=torch.Generator().manual_seed(1))
TOPK_W = torch.rand(5, 2, generator=torch.Generator().manual_seed(2))
IDS = torch.tensor([[0, 1], [3, 2], [1, 1], [2, 0], [3, 0]], dtype=torch.int32)
LOGITS = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))


def _plain(x, w13, w2, weights, ids):
    """Each token alone, expert by expert."""
    y = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for weight, e in zip(weights[t], ids[t].tolist(), strict=True):
            if e >= 0:
                gate, up = (w13[e] @ x[t]).chunk(2)
                y[t] += weight * (w2[e] @ (F.silu(gate) * up))
    return y


# Routing


def _router(module, cls, **config):
    transformers = pytest.importorskip("transformers")
    models = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    from types import SimpleNamespace

    if transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 has other routers")
    torch.manual_seed(5)
    router = getattr(models, cls)(SimpleNamespace(**config))
    router.weight.data.normal_()
    return router


def _same_routes(got, want_weights, want_ids, logits):
    """The same experts with the same weights, in any order."""
    experts = logits.shape[1]
    dense = [
        torch.zeros(logits.shape[0], experts).scatter(1, ids.long(), weights.float())
        for weights, ids in (got, (want_weights, want_ids))
    ]
    torch.testing.assert_close(dense[0], dense[1], rtol=1e-5, atol=1e-6)
    assert torch.equal(got[1].long().sort(-1).values, want_ids.sort(-1).values)


def test_mixtral_router(level):
    router = _router(
        "mixtral", "MixtralTopKRouter", num_experts_per_tok=2, num_local_experts=8, hidden_size=16
    )
    logits, weights, ids = router(torch.randn(30, 16))
    _same_routes(ops.moe_routing(logits, 2, True), weights, ids, logits)


@pytest.mark.parametrize("norm", [True, False])
def test_qwen3_router(level, norm):
    router = _router(
        "qwen3_moe",
        "Qwen3MoeTopKRouter",
        num_experts_per_tok=8,
        num_experts=60,
        norm_topk_prob=norm,
        hidden_size=16,
    )
    logits, weights, ids = router(torch.randn(30, 16))
    _same_routes(ops.moe_routing(logits, 8, norm), weights, ids, logits)


@pytest.mark.parametrize("jitter", [0.01, 0.4])
def test_phimoe_router(level, jitter):
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    for scale in (0.1, 1.0, 8.0):
        logits = torch.randn(50, 16) * scale
        weights, ids = sparsemixer(logits, jitter, False)
        got = ops.moe_routing(logits, 2, False, "sparsemixer", 0, 0, None, 1.0, jitter)
        _same_routes(got, weights, ids, logits)
        assert torch.equal(got[1].long(), ids)


def test_gpt_oss_router(level):
    logits = torch.randn(30, 32)
    values, ids = logits.topk(4, dim=-1)
    _same_routes(ops.moe_routing(logits, 4, True), values.softmax(-1), ids, logits)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_deepseek_v2_router(level, method):
    router = _router(
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        num_experts_per_tok=6,
        num_experts=64,
        hidden_size=16,
        routed_scaling_factor=16.0,
        topk_method=method,
        n_group=8,
        topk_group=3,
    )
    logits, weights, ids = router(torch.randn(30, 16))
    groups = (8, 3) if method == "group_limited_greedy" else (0, 0)
    got = ops.moe_routing(logits, 6, False, "softmax", *groups, None, 16.0)
    _same_routes(got, weights, ids, logits)


@pytest.mark.parametrize("norm", [True, False])
def test_deepseek_v3_router(level, norm):
    router = _router(
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        num_experts_per_tok=8,
        num_local_experts=64,
        hidden_size=16,
        routed_scaling_factor=2.5,
        n_group=8,
        topk_group=4,
        norm_topk_prob=norm,
    )
    router.e_score_correction_bias.normal_(std=0.2)
    logits, weights, ids = router(torch.randn(30, 16))
    bias = router.e_score_correction_bias
    got = ops.moe_routing(logits, 8, norm, "sigmoid", 8, 4, bias, 2.5)
    _same_routes(got, weights, ids, logits)


def test_ties_and_nan_have_an_order(level):
    logits = torch.zeros(1, 20)
    assert ops.moe_routing(logits, 5, True)[1].tolist() == [[0, 1, 2, 3, 4]]
    logits[0, 7] = logits[0, 9] = 1
    assert ops.moe_routing(logits, 5, True)[1].tolist() == [[7, 9, 0, 1, 2]]
    grouped = ops.moe_routing(torch.zeros(1, 20), 5, True, "sigmoid", 5, 2)
    assert grouped[1].tolist() == [[0, 1, 2, 3, 4]]
    logits[0, 15] = float("nan")
    weights, ids = ops.moe_routing(logits, 3, True, "sigmoid")
    assert ids.tolist() == [[15, 7, 9]] and weights.isnan().all()


def bad_routing():
    yield (X.double(), 2, True), "router_logits must have dtype"
    yield (X[0], 2, True), "router_logits must be 2-D"
    yield (LOGITS, 0, True), "top_k must be between 1 and the number of experts = 8, got 0"
    yield (LOGITS, 9, True), "top_k must be between 1"
    yield (LOGITS, 2, True, "tanh"), "scoring_func must be one of softmax, sigmoid"
    yield (LOGITS, 2, True, "softmax", 3, 1), "num_expert_group must divide"
    mixer = (LOGITS, 2, True, "sparsemixer")
    yield (*mixer, 2, 1), "scoring_func must be softmax or sigmoid with groups or a bias"
    yield (*mixer, 0, 0, torch.ones(8)), "scoring_func must be softmax or sigmoid with groups or"
    yield (*mixer, 0, 0, None, 1.0, -0.5), "jitter must be 0 or more, got -0.5"
    yield (LOGITS, 2, True, "softmax", -1, 1), "num_expert_group must be 0 or more"
    yield (LOGITS, 2, True, "softmax", 4, 0), "topk_group must be between 1"
    yield (LOGITS, 2, True, "softmax", 4, 5), "topk_group must be between 1"
    yield (LOGITS, 3, True, "softmax", 4, 1), "top_k must be at most the 2 experts of topk_group"
    yield (LOGITS, 2, True, "sigmoid", 0, 0, torch.ones(7)), "e_score_correction_bias must be"
    yield (LOGITS, 2, True, "sigmoid", 0, 0, torch.ones(8).half()), "e_score_correction_bias must"


# Experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_equal_plain_layers(level, dtype):
    w13, w2 = _weights(dtype=dtype)
    y = ops.fused_experts(
        X.to(dtype), ops.pack_moe_weight(w13, True), ops.pack_moe_weight(w2), TOPK_W, IDS, INNER
    )
    want = _plain(X.to(dtype).double(), w13.double(), w2.double(), TOPK_W.double(), IDS)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("hidden", "inner"), [(6144, 32), (64, 6144)])
def test_long_sums_of_float32(level, hidden, inner):
    """Terms of one sign: one sum along 6144 features has three to nine times the error of sums in blocks."""
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(2, hidden, generator=generator)
    w13 = torch.rand(2, 2 * inner, hidden, generator=generator)
    w2 = torch.rand(2, hidden, inner, generator=generator)
    weights, ids = torch.tensor([[0.75, 0.25]] * 2), torch.tensor([[0, 1]] * 2, dtype=torch.int32)
    packed = ops.pack_moe_weight(w13, True), ops.pack_moe_weight(w2)
    y = ops.fused_experts(x, *packed, weights, ids, inner)
    exact = _plain(x.double(), w13.double(), w2.double(), weights.double(), ids)
    assert ((y - exact).abs() / exact).max() < 6e-7


def test_equals_a_model_of_the_hub_library(level):
    models = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    from transformers import MixtralConfig

    torch.manual_seed(6)
    config = MixtralConfig(
        hidden_size=48, intermediate_size=72, num_local_experts=6, num_experts_per_tok=2
    )
    block = models.MixtralSparseMoeBlock(config).eval()
    if isinstance(block.experts, torch.nn.ModuleList):
        pytest.skip("transformers 4 has a module for each expert")
    for parameter in block.parameters():
        parameter.normal_(std=0.15)
    x = torch.randn(2, 9, 48)
    experts = pack_experts(block.experts.gate_up_proj, block.experts.down_proj)
    logits = F.linear(x.view(-1, 48), block.gate.weight)
    y = gated_mlp_moe(x, experts, logits, 2, True)
    torch.testing.assert_close(y, block(x), rtol=1e-4, atol=1e-5)


def test_separate_gate_and_up():
    gate, up = W13.chunk(2, dim=1)
    together, apart = pack_experts(W13, W2), pack_experts(gate, W2, up)
    assert torch.equal(together.w13, apart.w13)
    with pytest.raises(ValueError, match="w3 must have the shape"):
        pack_experts(gate, W2, up[:, :-1])
    with pytest.raises(ValueError, match="w2 must have shape"):
        pack_experts(gate, W2)


def test_parts_of_the_experts_sum_to_all(level):
    """Expert parallelism: each process computes its experts of the same routes."""
    logits = torch.randn(5, E)
    whole = gated_mlp_moe(X, pack_experts(W13, W2), logits, 3, True)
    halves = [
        gated_mlp_moe(
            X, pack_experts(W13[at : at + 2], W2[at : at + 2]), logits, 3, True, experts_start_id=at
        )
        for at in (0, 2)
    ]
    torch.testing.assert_close(halves[0] + halves[1], whole, rtol=1e-5, atol=1e-5)


def test_correction_bias_that_was_cast_with_the_model():
    experts = pack_experts(W13, W2)
    bias = torch.tensor([0.5, -0.25, 1.0, 0.0])

    def run(bias):
        return gated_mlp_moe(
            X,
            experts,
            LOGITS[:, :E],
            2,
            True,
            scoring_func="sigmoid",
            e_score_correction_bias=bias,
        )

    torch.testing.assert_close(run(bias.bfloat16()), run(bias), rtol=0, atol=0)


def test_custom_routing_and_shared_expert(level):
    def route(hidden_states, gating_output, topk, renormalize):
        assert hidden_states.shape == (5, H)
        return TOPK_W, IDS

    s13, s2 = _weights(1, inner=30, seed=9)
    factor = torch.rand(5)
    y = gated_mlp_moe(
        X,
        pack_experts(W13, W2),
        torch.zeros(5, E),
        2,
        True,
        custom_routing_function=route,
        shared=pack_experts(s13, s2),
        shared_weights=factor,
    )
    zero = torch.zeros(5, 1, dtype=torch.int32)
    want = _plain(X, W13, W2, TOPK_W, IDS) + _plain(X, s13, s2, factor[:, None], zero)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("format", "group", "symmetric", "blocks"),
    [
        ("int8", -1, True, False),
        ("int4", 32, False, False),
        ("nf4", 64, True, False),
        ("fp4", 32, True, False),
        ("fp8_e4m3", 128, True, True),
    ],
)
@pytest.mark.parametrize("tokens", [1, 6, 90])
def test_quantized_experts(level, format, group, symmetric, blocks, tokens):
    experts, hidden, inner = 3, 256, 160
    w13, w2 = _weights(experts, hidden, inner)
    parts, plain = [], []
    for weight in (w13, w2):
        n, k = weight.shape[1:]
        codes = [quantize(one, format, group, symmetric) for one in weight]
        qweight = torch.stack([c[0].view(torch.uint8) for c in codes]).view(codes[0][0].dtype)
        scales = torch.stack([c[1] for c in codes])
        zeros = None if symmetric else torch.stack([c[2] for c in codes])
        if blocks:
            scales = torch.rand(experts, -(-n // 128), -(-k // 128)) * 1e-3 + 1e-4
        parts.append((qweight, scales, zeros))
        packed = [
            ops.pack_woq_weight(
                qweight[e], scales[e], zeros[e] if zeros is not None else None, format, k, group
            )
            for e in range(experts)
        ]
        plain.append(
            torch.stack([ops.dequantize_woq_weight(p, n, k, torch.float32) for p in packed])
        )
    qweights, scales, zeros = zip(*parts, strict=True)
    packed = pack_woq_experts(
        qweights, scales, zeros, format=format, in_features=(hidden, inner), group_size=group
    )
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(tokens, hidden, generator=generator)
    weights = torch.rand(tokens, 2, generator=generator)
    ids = torch.randint(-1, experts, (tokens, 2), generator=generator)
    args = (packed.w13, packed.w2, weights, ids, inner)
    y = ops.fused_experts(x, *args)
    want = _plain(x, *plain, weights, ids)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()) + 1e-6)
    low = ops.fused_experts(x, *args, lowp_mode="bf16")
    torch.testing.assert_close(low, want, rtol=2e-2, atol=3e-2 * float(want.abs().max()) + 1e-6)
    x[0, 0] = float("nan")
    ids[0, 0] = 0
    assert ops.fused_experts(x, *args)[0].isnan().all()


def test_nan_stays_with_its_token(level):
    x = X.clone()
    x[1, 3] = float("nan")
    clean = ops.fused_experts(X, P13, P2, TOPK_W, IDS, INNER)
    y = ops.fused_experts(x, P13, P2, TOPK_W, IDS, INNER)
    assert y[1].isnan().all()
    rest = [0, 2, 3, 4]
    assert torch.equal(y[rest], clean[rest])


def test_a_token_does_not_depend_on_the_order_of_its_ids(level):
    y = ops.fused_experts(X, P13, P2, TOPK_W, IDS, INNER)
    turned = ops.fused_experts(X, P13, P2, TOPK_W.flip(1), IDS.flip(1), INNER)
    rows = [0, 1, 3, 4]  # row 2 has one expert twice
    assert torch.equal(y[rows], turned[rows])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ids(data):
    """Valid ids give the plain result for any number of threads; others raise before anything is computed."""
    tokens = data.draw(st.integers(0, 40))
    top_k = data.draw(st.integers(0, 5))
    start, total = data.draw(st.sampled_from([(0, 0), (0, 4), (3, 9), (5, 9)]))
    limit = total or E
    low, high = data.draw(st.sampled_from([(-1, limit - 1), (0, limit - 1), (-3, limit + 1)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    ids = torch.randint(low, high + 1, (tokens, top_k), generator=generator)
    if data.draw(st.booleans()):
        ids = ids.int()
    if data.draw(st.booleans()) and ids.numel():
        ids[:] = ids[0, 0]  # all tokens to one expert
    weights = torch.rand(tokens, top_k, generator=generator)
    x = torch.randn(tokens, H, generator=generator)
    tail = ("silu", *[None] * 5, 0, start, total)

    def call():
        return ops.fused_experts(x, P13, P2, weights, ids, INNER, *tail)

    if ids.numel() and (ids.min() < -1 or ids.max() >= limit):
        with pytest.raises(RuntimeError, match="topk_ids must be -1 or in"):
            call()
        return
    local = ids - start
    local = torch.where((local < 0) | (local >= E) | (ids < 0), -1, local)
    want = _plain(x, W13, W2, weights, local)
    y = call()
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(call(), y)
    finally:
        torch.set_num_threads(threads)


def bad_experts():
    good = (X, P13, P2, TOPK_W, IDS, INNER)

    def but(**changes):
        names = ("x", "w13", "w2", "weights", "ids", "inner")
        return tuple(changes.get(n, v) for n, v in zip(names, good, strict=True))

    yield but(x=X.double()), "hidden_states must have dtype"
    yield but(x=X[None]), "hidden_states must be 2-D"
    yield but(x=X[:, :0]), "hidden_states must have at least one feature"
    yield but(x=X.bfloat16()), "w13 must be bfloat16 weights"
    yield but(x=X[:, :-1]), "w13 must be float32 weights of shape \\[E, 48, 39\\]"
    yield but(inner=0), "intermediate_size must be positive, got 0"
    yield but(inner=40), "w13 must be"
    yield but(inner=25), "w2 must be float32 weights of shape \\[E, 40, 25\\]"
    yield but(w13=W13), "w13 must be"
    yield but(w13=P13[0]), "w13 must be"
    yield but(w13=torch.zeros_like(P13)), "got a tensor without the header of a packed weight"
    yield but(w2=P2[:3]), "w2 must have as many experts as w13 = 4, got 3"
    yield but(w2=torch.zeros_like(P2)), "got a tensor without the header of a packed weight"
    yield but(ids=IDS.float()), "topk_ids must have dtype int32, int64, got float32"
    yield but(ids=IDS[:4]), "topk_ids must be 2-D with 5 rows"
    yield but(ids=IDS[:, 0]), "topk_ids must be 2-D"
    yield but(ids=IDS + 2), "topk_ids must be -1 or in \\[0, 4\\), got"
    yield but(ids=IDS - 2), "topk_ids must be -1 or in \\[0, 4\\), got -2"
    yield but(weights=TOPK_W[:, :1]), "topk_weights must have the shape of topk_ids"
    yield but(weights=TOPK_W.half()), "topk_weights must have the dtype"
    yield (*good, "relu"), "activation must be one of"
    yield (*good, "relu2"), "w13 must be float32 weights of shape \\[E, 24, 40\\]"
    up = ops.pack_moe_weight(W13[:, :INNER])
    ungated = but(w13=up)
    yield ungated, "w13 must be float32 weights of shape \\[E, 48, 40\\]"
    yield (*ungated, "relu2", torch.ones(E, 2 * INNER)), "w13_bias must have shape \\[4, 24\\]"
    yield (*ungated, "relu2", None, None, P13[:1], P2[:1], None, INNER), "shared_w13 must be"
    yield (*good, "silu", torch.ones(E, INNER)), "w13_bias must have shape \\[4, 48\\]"
    yield (*good, "silu", None, torch.ones(H)), "w2_bias must have shape \\[4, 40\\]"
    yield (*good, "silu", None, torch.ones(E, H).half()), "w2_bias must have the dtype"
    yield (*good, "silu", None, None, P13[:1]), "shared_w2 must be given if and only if"
    yield (*good, "silu", *[None] * 4, torch.ones(5)), "shared_weights must be None"
    shared = (None, None, P13[:1], P2[:1])
    yield (*good, "silu", *shared, None, 0), "shared_intermediate_size must be positive"
    yield (*good, "silu", *shared, None, 40), "shared_w13 must be"
    yield (*good, "silu", *shared, torch.ones(4), INNER), "shared_weights must be 1-D of size 5"
    yield (*good, "silu", None, None, P13, P2, None, INNER), "shared_w13 must hold one expert"
    rest = ("silu", *[None] * 5, 0)
    yield (*good, *rest, 1, 4), "experts_start_id must be between 0 and num_experts - 4 = 0, got 1"
    yield (*good, *rest, -1, 8), "experts_start_id must be between"
    yield (*good, *rest, 0, 3), "experts_start_id must be between"
    yield (*good, *rest, 0, -1), "num_experts must be 0 or more"


def bad_quantized():
    codes = quantize(torch.randn(64, 32), "int8")
    first = ops.pack_moe_stack([ops.pack_woq_weight(*codes, "int8", 32)] * 2)
    codes = quantize(torch.randn(32, 32), "int8")
    second = ops.pack_moe_stack([ops.pack_woq_weight(*codes, "int8", 32)] * 2)
    vnni = ops.pack_moe_stack([ops.pack_woq_weight(*codes, "int8", 32, order="vnni")] * 2)
    broken = second.clone()
    broken[1, 8] = 5  # another format than its size says
    x, weights, ids = torch.ones(1, 32), torch.ones(1, 1), torch.ones(1, 1).int()
    text = "w2 must be quantized weights of shape \\[E, 32, 32\\] packed with order dot, got the header of"
    yield (x, first, broken, weights, ids, 32), text
    yield (x, first, vnni, weights, ids, 32), text
    yield (x, first, ops.pack_moe_weight(torch.ones(2, 32, 32)), weights, ids, 32), text
    yield (x, first, second, weights, ids, 40), "w13 must be quantized weights of shape"
    yield (x[:, :31], first, second, weights, ids, 32), "w13 must be quantized weights of shape"
    tail = ("silu", *[None] * 5, 0, 0, 0, 1.0, 1.0)
    yield (x, first, second, weights, ids, 32, *tail, "int8"), "lowp_mode must be one of none"
    dense = (X, P13, P2, TOPK_W, IDS, INNER)
    yield (*dense, *tail, "bf16"), "lowp_mode must be none for weights that are not quantized"


def bad_projections():
    packed = ops.pack_moe_weight(torch.randn(E, INNER, H))
    good = (X, packed, IDS, INNER, TOPK_W)

    def but(**changes):
        names = ("x", "packed", "ids", "features", "weights")
        return tuple(changes.get(n, v) for n, v in zip(names, good, strict=True))

    yield but(x=X.double()), "x must have dtype"
    yield but(x=X[0]), "x must be 2-D or 3-D"
    yield but(x=X[:, :8]), "packed_weight must be float32 weights of shape"
    yield but(x=torch.randn(5, 3, H)), "x must have a row for each of 2 ids"
    yield but(features=0), "out_features must be positive, got 0"
    yield but(features=INNER + 40), "packed_weight must be float32 weights of shape"
    yield but(ids=IDS.float()), "ids must have dtype int32, int64, got float32"
    yield but(ids=IDS[:4]), "ids must be 2-D with 5 rows"
    yield but(ids=IDS + 2), r"ids must be -1 or in \[0, 4\), got"
    yield but(weights=TOPK_W[:, :1]), r"weights must have shape \[5, 2\], got"
    yield (*good, "bf16"), "lowp_mode must be none for weights that are not quantized"
    yield (*good, "int8"), "lowp_mode must be one of none, fp16, bf16, got"


def bad_packing():
    yield "pack_moe_stack", ([],), "packed must hold at least one tensor"
    yield "pack_moe_stack", ([P2[0], P2[0][:64]],), "packed must hold packed weights of one size"
    yield "pack_moe_stack", ([P2],), "packed must hold packed weights of one size"
    yield "pack_moe_weight", (torch.ones(3, 4),), "weight must be 3-D"
    yield "pack_moe_weight", (torch.ones(0, 2, 4),), "not empty"
    yield "pack_moe_weight", (torch.ones(1, 3, 4), True), "must be even if gated, got 3"
    yield "pack_moe_weight", (torch.ones(1, 2, 4).int(),), "weight must have dtype"
    yield "unpack_moe_weight", (P2, H, 0, torch.float32), "in_features must be positive"
    yield "unpack_moe_weight", (P2, 0, INNER, torch.float32), "out_features must be positive"
    yield "unpack_moe_weight", (P2, H, INNER, torch.float64), "dtype must be"
    yield "unpack_moe_weight", (P2, H, INNER, torch.float16), "packed must be"
    yield "unpack_moe_weight", (P13, 47, H, torch.float32, True), "must be even if gated"
    yield (
        "unpack_moe_weight",
        (torch.zeros_like(P2), H, INNER, torch.float32),
        "got a tensor without the header of a packed weight",
    )


CASES = [
    *(("moe_routing", *case) for case in bad_routing()),
    *(("fused_experts", *case) for case in bad_experts()),
    *(("expert_linear", *case) for case in bad_projections()),
    *(("fused_experts", *case) for case in bad_quantized()),
    *bad_packing(),
]


@refusals.each(CASES)
def test_bad_input(op, args, text):
    refusals.assert_refused(op, args, text)
