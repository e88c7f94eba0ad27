# SPDX-License-Identifier: Apache-2.0
"""Weights in the plug-in of vLLM: how linear layers and experts are packed, and what they compute then."""

from __future__ import annotations

import types

import pytest
import torch
import vllm_stand_in as stand_in
from torch.nn import functional

from ipex_llm.integrations.vllm import experts, linear, quantized_experts

NEAR = {"rtol": 1e-5, "atol": 1e-5}
pytestmark = pytest.mark.usefixtures("fresh_plugin", "no_fakes_left")


# --- linear layers ----------------------------------------------------------------------------------------------------


def test_a_layer_is_packed_once_and_freed(modules):
    layer = stand_in.layer_of(weight=torch.randn(40, 24))
    weight = layer.weight.detach().clone()
    linear.dispatch(layer, remove_weight=True)
    assert layer.weight.numel() == 0
    x, bias = torch.randn(3, 24), torch.randn(40)
    wanted = functional.linear(x, weight, bias)
    torch.testing.assert_close(layer.cpu_linear(x, layer.weight, bias), wanted, **NEAR)


def test_what_cannot_be_packed_stays_plain(modules):
    for weight in (
        torch.randn(4, 2, 3),
        torch.randn(4, 3).double(),
        torch.empty(4, 3, device="meta"),
    ):
        layer = stand_in.layer_of(weight=weight)
        linear.dispatch(layer, remove_weight=True)
        assert layer.cpu_linear is functional.linear and layer.weight.shape == weight.shape


def head(weight):
    made = type("ParallelLMHead", (torch.nn.Module,), {})()
    made.weight = weight
    return made


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_is_held_once(modules, monkeypatch, tied):
    config = stand_in.vllm_config()
    config.model_config.hf_text_config.tie_word_embeddings = tied
    modules["vllm.config"].get_current_vllm_config_or_none = lambda: config
    linear.replace_unquantized()
    method = modules["vllm.model_executor.layers.vocab_parallel_embedding"]
    method = method.UnquantizedEmbeddingMethod()
    table = stand_in.layer_of(weight=torch.randn(50, 24))
    last = head(table.weight if tied else torch.nn.Parameter(torch.randn(50, 24)))
    rows, weight = table.weight.detach().clone(), last.weight.detach().clone()
    for layer in (table, last):
        linear.dispatch(layer, remove_weight=False)
    ids, x = torch.tensor([[3, 49], [0, 3]]), torch.randn(2, 24)
    torch.testing.assert_close(method.embedding(table, ids), rows[ids], rtol=0, atol=0)
    wanted = functional.linear(x, weight)
    torch.testing.assert_close(last.cpu_linear(x, last.weight), wanted, **NEAR)
    assert last.weight.numel() == 0 and bool(table.weight.numel()) != tied
    if tied:
        assert table.ipex_rows[0] is last.ipex_rows[0]
        torch.testing.assert_close(table.cpu_linear(x, table.weight), wanted, **NEAR)


@pytest.mark.parametrize("reader", ["lora_config", "speculative_config"])
def test_a_head_that_something_else_reads_stays_plain(modules, reader):
    modules["vllm.config"].get_current_vllm_config_or_none = lambda: stand_in.vllm_config(
        **{reader: "some"}
    )
    last = head(torch.nn.Parameter(torch.randn(50, 24)))
    linear.dispatch(last, remove_weight=False)
    assert last.weight.numel() and last.cpu_linear is functional.linear


# --- quantized linear layers ------------------------------------------------------------------------------------------

N, K, GROUP = 48, 64, 32


def mixed_config(kind, zero_points=False, group=GROUP, **options):
    return types.SimpleNamespace(
        weight_type=stand_in.ScalarType[kind],
        partition_weight_shape=(K, N),
        full_weight_shape=(K, N),
        group_size=group,
        zero_points=zero_points,
        act_type=torch.float32,
        **options,
    )


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize(
    ("kind", "bits", "middle"),
    [("uint4b8", 4, 8), ("uint4", 4, None), ("uint8b128", 8, 128), ("uint8", 8, None)],
)
def test_integer_weights_by_groups(modules, kind, bits, middle, rows_first):
    quantized = stand_in.ours("quantized")
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (N, K), generator=generator)
    zeros = torch.randint(0, 2**bits, (N, K // GROUP), generator=generator)
    scales = torch.rand(N, K // GROUP, generator=generator) + 0.1
    if middle is not None:
        zeros.fill_(middle)
    weight = ((codes - zeros.repeat_interleave(GROUP, 1)) * scales.repeat_interleave(GROUP, 1)) / K
    scales = scales / K
    if rows_first:  # compressed-tensors
        layer = stand_in.layer_of(
            q=(stand_in.words(codes, bits, 1), {"input_dim": 1, "output_dim": 0, "packed_dim": 1}),
            s=(scales, {"output_dim": 0}),
            z=(stand_in.words(zeros, bits, 0), {"output_dim": 0, "packed_dim": 0}),
        )
    else:  # GPTQ
        layer = stand_in.layer_of(
            q=(
                stand_in.words(codes.t(), bits, 0),
                {"input_dim": 0, "output_dim": 1, "packed_dim": 0},
            ),
            s=(scales.t().contiguous(), {"output_dim": 1}),
            z=(stand_in.words(zeros.t(), bits, 1), {"output_dim": 1, "packed_dim": 1}),
        )
    config = mixed_config(kind, zero_points=middle is None)
    assert quantized.IpexWeightOnlyKernel.can_implement(config) == (True, None)
    kernel = quantized.IpexWeightOnlyKernel(config, "q", "s", "z")
    kernel.process_weights_after_loading(layer)
    assert layer.q.numel() == layer.s.numel() == 0
    x, bias = torch.randn(3, K), torch.randn(N)
    got = kernel.apply_weights(layer, x, bias)
    torch.testing.assert_close(got, functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (mixed_config("float6_e3m2f"), "weight_type must be"),
        (mixed_config("uint4b8", group=12), "group_size must be .* got 12"),
        (mixed_config("uint4b8", has_g_idx=True), "desc_act"),
    ],
)
def test_integer_weights_that_do_not_fit(modules, config, text):
    fits, reason = stand_in.ours("quantized").IpexWeightOnlyKernel.can_implement(config)
    assert not fits
    assert __import__("re").search(text, reason)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("channelwise", [False, True])
def test_int8_weights_and_activations(modules, static, symmetric, channelwise):
    quantized = stand_in.ours("quantized")
    codes = torch.randint(-127, 128, (N, K), dtype=torch.int8)
    scale = torch.rand(N, 1) / K if channelwise else torch.rand(2) / K
    rows = scale if channelwise else scale.repeat_interleave(torch.tensor([16, 32]))[:, None]
    layer = stand_in.layer_of(weight=codes.clone(), weight_scale=scale)
    layer.logical_widths = [16, 32]
    if static:
        layer.input_scale = torch.tensor([0.02, 0.03])
        layer.input_zero_point = None if symmetric else torch.tensor([3, -5])
    config = types.SimpleNamespace(
        is_channelwise=channelwise, is_static_input_scheme=static, input_symmetric=symmetric
    )
    names = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
    kernel = quantized.IpexInt8Kernel(config, names)
    kernel.process_weights_after_loading(layer)
    x, bias = torch.randn(5, K), torch.randn(N)
    got = kernel.apply_weights(layer, x, bias)
    step, zero = layer.ipex_input if static else range_of(x, symmetric)
    low, high = (-127, 127) if symmetric else (0, 255)
    zero = 0 if zero is None else zero
    rounded = (((x / step).round() + zero).clamp(low, high) - zero) * step
    wanted = functional.linear(rounded, codes.float() * rows, bias)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    if static and not symmetric:  # of both layers: [-3.69, 3.96]
        assert float(step) == pytest.approx(0.03) and int(zero) == 123


def range_of(x, symmetric):
    """Return the step and the zero point of each row."""
    if symmetric:
        return x.abs().amax(1, keepdim=True) / 127, None
    high, low = x.amax(1, keepdim=True).clamp(min=0), x.amin(1, keepdim=True).clamp(max=0)
    step = (high - low) / 255
    return step, (-low / step).round()


def group_shape(row, col):
    return types.SimpleNamespace(
        row=row,
        col=col,
        is_per_tensor=lambda: (row, col) == (-1, -1),
        is_per_token=lambda: (row, col) == (1, -1),
        is_per_channel=lambda: (row, col) == (-1, 1),
    )


def fp8_config(row, col):
    scale = types.SimpleNamespace(group_shape=group_shape(row, col))
    return types.SimpleNamespace(weight_quant_key=types.SimpleNamespace(scale=scale))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("channels", [False, True])
def test_fp8_weights(modules, kind, channels):
    quantized = stand_in.ours("quantized")
    codes = torch.randn(N, K).to(kind)
    scale = torch.rand(N, 1) if channels else torch.rand(1)
    layer = stand_in.layer_of(weight=codes.t(), weight_scale=scale)
    config = fp8_config(*((1, -1) if channels else (-1, -1)))
    assert quantized.IpexFp8Kernel.can_implement(config) == (True, None)
    assert not quantized.IpexFp8Kernel.can_implement(fp8_config(128, 128))[0]
    kernel = quantized.IpexFp8Kernel(config, ["weight", "weight_scale", "", ""])
    kernel.process_weights_after_loading(layer)
    x, bias = torch.randn(3, K), torch.randn(N)
    wanted = functional.linear(x, codes.float() * scale, bias)
    torch.testing.assert_close(kernel.apply_weights(layer, x, bias), wanted, rtol=1e-4, atol=1e-4)


def test_fp8_weights_by_blocks(modules):
    quantized = stand_in.ours("quantized")
    codes = torch.randn(160, 200).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2) + 0.1
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:160, :200]
    layer = stand_in.layer_of(weight=codes, weight_scale_inv=scale)
    assert quantized.IpexFp8BlockKernel.can_implement(fp8_config(128, 128)) == (True, None)
    assert not quantized.IpexFp8BlockKernel.can_implement(fp8_config(64, 128))[0]
    kernel = quantized.IpexFp8BlockKernel(fp8_config(128, 128))
    kernel.process_weights_after_loading(layer)
    x = torch.randn(3, 200)
    wanted = functional.linear(x, codes.float() * wide)
    torch.testing.assert_close(kernel.apply_weights(layer, x), wanted, rtol=1e-4, atol=1e-3)


# --- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["silu", "gelu", "swigluoai"])
@pytest.mark.parametrize("parallel", [False, True])
def test_experts(modules, name, parallel):
    count, hidden, inner, tokens, top = 4, 24, 20, 7, 2
    activation = types.SimpleNamespace(value=name)
    moe = types.SimpleNamespace(activation=activation)
    base = modules["vllm.model_executor.layers.fused_moe.experts.cpu_moe"].CPUUnquantizedExperts
    kernel = experts.expert_class(base)
    assert kernel._supports_grouped_gemm(moe) == (True, None)
    made = kernel(moe, types.SimpleNamespace(gemm1_alpha=None, gemm1_clamp_limit=None))
    w13, w2 = torch.randn(count, 2 * inner, hidden) / 5, torch.randn(count, hidden, inner) / 5
    b13, b2 = torch.randn(count, 2 * inner), torch.randn(count, hidden)
    made.w1_bias, made.w2_bias = b13, b2
    layer = stand_in.layer_of(w13_weight=w13.clone(), w2_weight=w2.clone())
    made.process_weights_after_loading(layer)
    assert layer.w13_weight.shape == (count, 2 * inner, 0)
    x = torch.randn(tokens, hidden)
    weights, ids = torch.randn(tokens, count).softmax(-1).topk(top)
    # Of four experts, the second rank of two has the last two.
    shift = torch.tensor([-1, -1, 0, 1]) if parallel else None
    out = torch.zeros(tokens, hidden)
    rest = (activation, count, shift, None, None, None, None, None, False)
    made.apply(out, x, layer.w13_weight, layer.w2_weight, weights, ids.int(), *rest)
    wanted = torch.zeros_like(out)
    for token in range(tokens):
        for weight, chosen in zip(weights[token], ids[token].tolist(), strict=True):
            e = chosen if shift is None else int(shift[chosen])
            if e < 0:
                continue
            both = w13[e] @ x[token] + b13[e]
            if name == "swigluoai":
                gate, up = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
                inside = (up + 1) * gate * (gate * 1.702).sigmoid()
            else:
                gate, up = both.chunk(2)
                inside = getattr(functional, name)(gate) * up
            wanted[token] += weight * (w2[e] @ inside + b2[e])
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


def moe(w13, w2, x, weights, ids, activation="silu", biases=(None, None)):
    """Return what the experts of float weights give, gates before the up projection or by turns."""
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for weight, e in zip(weights[token], ids[token].tolist(), strict=True):
            both = w13[e] @ x[token] + (0 if biases[0] is None else biases[0][e])
            if activation == "swigluoai":
                gate, up = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
                inside = (up + 1) * gate * (gate * 1.702).sigmoid()
            else:
                gate, up = both.chunk(2)
                inside = functional.silu(gate) * up
            out[token] += weight * (w2[e] @ inside + (0 if biases[1] is None else biases[1][e]))
    return out


def run_quantized(name, modules, layer, x, weights, ids, inner, activation="silu", **config):
    """Return what one of our quantized experts gives for a layer, packed by vLLM's steps."""
    quantized_experts.register_quantized_experts()
    module = modules["vllm.model_executor.layers.fused_moe.experts.cpu_moe"]
    named = types.SimpleNamespace(value=activation)
    chosen = stand_in.Config(intermediate_size_per_partition=inner, activation=named)
    made = getattr(module, name)(chosen, stand_in.Config(**config))
    biases = config.get("biases", (None, None))
    made.w1_bias, made.w2_bias = biases
    made.w1_scale, made.w2_scale = layer.w13_weight_scale, layer.w2_weight_scale
    if "process_weights_after_loading" in vars(type(made)):
        made.process_weights_after_loading(layer)
    assert made._supports_current_device() and made._supports_activation(named)
    assert made.supports_expert_map()
    sizes = made.moe_problem_size(x, layer.w13_weight, layer.w2_weight, ids)
    assert sizes == (layer.w13_weight.shape[0], x.shape[0], 2 * inner, x.shape[1], ids.shape[1])
    out = torch.empty_like(x)
    none = [None] * 4
    made.apply(
        *(out, x, layer.w13_weight, layer.w2_weight, weights, ids, named, 4, None),
        *none,
        None,
        False,
    )
    return out


def routed(tokens, hidden, experts_count=4):
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(tokens, hidden, generator=generator)
    scores = torch.randn(tokens, experts_count, generator=generator).softmax(-1)
    weights, ids = scores.topk(2)
    return x, weights, ids.int()


@pytest.mark.parametrize("form", ["symmetric", "gptq", "awq"])
def test_experts_of_four_bits(modules, form):
    count, hidden, inner, group = 4, 64, 32, 32
    x, weights, ids = routed(5, hidden, count)
    generator = torch.Generator().manual_seed(12)
    given, wanted = [], []
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        codes = torch.randint(0, 16, (count, n, k), generator=generator)
        zeros = torch.full((count, n, k // group), 8)
        if form != "symmetric":
            zeros = torch.randint(1, 16, zeros.shape, generator=generator)
        scale = torch.rand(count, n, k // group, generator=generator) / 20
        wide = zeros.repeat_interleave(group, 2), scale.repeat_interleave(group, 2)
        wanted.append((codes - wide[0]) * wide[1])
        if form == "awq":
            order = [0, 2, 4, 6, 1, 3, 5, 7]
            packed = codes.transpose(1, 2).unflatten(2, (-1, 8))[..., order].flatten(2)
            stored = zeros.transpose(1, 2).unflatten(2, (-1, 8))[..., order].flatten(2)
            given.append((stand_in.words(packed, 4, 2), scale, stand_in.words(stored, 4, 2)))
        else:
            words = stand_in.words(codes.transpose(1, 2), 4, 1)
            stored = stand_in.words(zeros.transpose(1, 2) - 1, 4, 2)
            given.append((words, scale, None if form == "symmetric" else stored))
    quantized_experts.register_quantized_experts()
    module = modules["vllm.model_executor.layers.fused_moe.experts.cpu_moe"]
    algorithm = types.SimpleNamespace(name="AWQ" if form == "awq" else "GPTQ")
    w13, w2, *rest = module.prepare_int4_moe_layer_for_cpu(
        *(given[0][0], given[1][0]),
        *(scale.transpose(1, 2) for _, scale, _ in given),
        quant_algo=algorithm,
        w13_zeros=given[0][2],
        w2_zeros=given[1][2],
    )
    assert len(rest) == 4 and all(not one.numel() for one in rest)
    supports = module.CPUExpertsInt4._supports_quant_scheme
    key = types.SimpleNamespace(dtype="int4", group=group)
    assert supports(key, None) and not supports(key, key)
    assert not supports(types.SimpleNamespace(dtype="int8"), None) and not supports(None, None)
    layer = stand_in.layer_of(
        w13_weight=w13, w2_weight=w2, w13_weight_scale=rest[0], w2_weight_scale=rest[1]
    )
    out = run_quantized("CPUExpertsInt4", modules, layer, x, weights, ids, inner)
    torch.testing.assert_close(out, moe(*wanted, x, weights, ids), rtol=2e-2, atol=2e-2)


def test_experts_of_eight_bits(modules):
    count, hidden, inner = 4, 64, 32
    x, weights, ids = routed(5, hidden, count)
    w13 = torch.randint(-127, 128, (count, 2 * inner, hidden), dtype=torch.int8)
    w2 = torch.randint(-127, 128, (count, hidden, inner), dtype=torch.int8)
    s13, s2 = torch.rand(count, 2 * inner, 1) / 500, torch.rand(count, hidden, 1) / 500
    layer = stand_in.layer_of(
        w13_weight=w13, w2_weight=w2, w13_weight_scale=s13, w2_weight_scale=s2
    )
    out = run_quantized("CPUExpertsInt8", modules, layer, x, weights, ids, inner)
    wanted = moe(w13 * s13, w2 * s2, x, weights, ids)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_experts_in_mxfp4(modules, activation):
    count, hidden, inner = 4, 64, 32
    x, weights, ids = routed(5, hidden, count)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    parts, wanted = {}, []
    for name, n, k in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
        codes = torch.randint(0, 16, (count, n, k), dtype=torch.uint8)
        powers = torch.randint(121, 126, (count, n, k // 32), dtype=torch.uint8)
        parts[f"{name}_weight"] = codes[..., 0::2] | (codes[..., 1::2] << 4)
        parts[f"{name}_weight_scale"] = powers
        scale = torch.exp2(powers.float() - 127).repeat_interleave(32, 2)
        wanted.append(values[codes.long()] * scale)
    biases = torch.randn(count, 2 * inner), torch.randn(count, hidden)
    layer = stand_in.layer_of(**parts)
    out = run_quantized(
        *("CPUExpertsMxfp4", modules, layer, x, weights, ids, inner, activation), biases=biases
    )
    assert not layer.w13_weight_scale.numel()
    expected = moe(*wanted, x, weights, ids, activation, biases)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("block", [None, (128, 128), (64, 64)])
@pytest.mark.parametrize("each", ["expert", "row"])
def test_experts_in_fp8(modules, block, each):
    count, hidden, inner = 4, 128, 128
    x, weights, ids = routed(5, hidden, count)
    parts, wanted = {}, []
    for name, n, k in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
        codes = torch.randn(count, n, k).to(torch.float8_e4m3fn)
        shape = (count,) if each == "expert" else (count, n, 1)
        if block is not None:
            shape = (count, n // block[0], k // block[1])
        scale = (torch.rand(shape) + 0.1) / k**0.5
        wide = scale.view(count, -1, 1) if block is None else scale
        wide = wide.repeat_interleave(n // wide.shape[1], 1)
        wanted.append(codes.float() * wide.repeat_interleave(k // wide.shape[2], 2))
        parts |= {f"{name}_weight": codes, f"{name}_weight_scale": scale}
    layer = stand_in.layer_of(**parts)
    # What the checkpoint says, also where vLLM has cut the blocks for its ranks.
    layer.weight_block_size = None if block is None else [128, 128]
    quantized_experts.register_quantized_experts()
    oracle = modules["vllm.model_executor.layers.fused_moe.oracle.fp8"]
    w13, w2, s13, s2 = oracle.convert_to_fp8_moe_kernel_format(
        fp8_backend=oracle.Fp8MoeBackend.CPU,
        layer=layer,
        w13=layer.w13_weight,
        w2=layer.w2_weight,
        w13_scale=layer.w13_weight_scale,
        w2_scale=layer.w2_weight_scale,
        w13_input_scale=None,
        w2_input_scale=None,
    )
    assert s13 is layer.w13_weight_scale and s2 is layer.w2_weight_scale
    packed = stand_in.layer_of(
        w13_weight=w13, w2_weight=w2, w13_weight_scale=s13, w2_weight_scale=s2
    )
    out = run_quantized("CPUExpertsFp8", modules, packed, x, weights, ids, inner)
    expected = moe(*wanted, x, weights, ids)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_which_experts_in_fp8_fit(modules):
    quantized_experts.register_quantized_experts()
    quantized_experts.register_quantized_experts()
    oracle = modules["vllm.model_executor.layers.fused_moe.oracle.fp8"]
    with pytest.raises(stand_in.Stated):  # another backend is vLLM's
        oracle.convert_to_fp8_moe_kernel_format(oracle.Fp8MoeBackend.TRITON, *[None] * 7)
    made = modules["vllm.model_executor.layers.fused_moe.experts.cpu_moe"].CPUExpertsFp8
    assert not made._supports_activation(types.SimpleNamespace(value="swigluoai"))

    def key(dtype, row, col):
        scale = types.SimpleNamespace(group_shape=group_shape(row, col))
        return types.SimpleNamespace(dtype=dtype, scale=scale)

    fp8 = torch.float8_e4m3fn
    for shape in ((-1, -1), (1, -1), (-1, 1), (128, 128), (64, 64)):
        assert made._supports_quant_scheme(key(fp8, *shape), key(fp8, 1, -1))
        assert made._supports_quant_scheme(key(fp8, *shape), None)
    assert not made._supports_quant_scheme(key(fp8, 1, 32), None)
    assert not made._supports_quant_scheme(key(torch.int8, -1, -1), None)
    assert not made._supports_quant_scheme(key(fp8, -1, -1), key(torch.int8, 1, -1))
    assert not made._supports_quant_scheme(None, None)
