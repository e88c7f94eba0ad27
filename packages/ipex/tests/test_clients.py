# SPDX-License-Identifier: Apache-2.0
"""The calls that other projects make to Intel Extension for PyTorch: in their order, with their spelling of arguments.

Each test stands for one project. What it calls was listed from the project's last release that used IPEX; the test is
ours. The shapes are small.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch

import intel_extension_for_pytorch as ipex

Tensor = torch.Tensor

needs_llm = pytest.mark.skipif(
    importlib.util.find_spec("ipex_llm") is None, reason="ipex-llm is not installed"
)
needs_quant = pytest.mark.skipif(
    importlib.util.find_spec("ipex_quant") is None, reason="ipex-quant is not installed"
)
needs_runtime = pytest.mark.skipif(
    importlib.util.find_spec("ipex_runtime") is None, reason="ipex-runtime is not installed"
)


def mlp() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))


def conv() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Dropout(0.1)
    )


def trains(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, target = torch.randn(8, 16), torch.randn(8, 4)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(model(x).float(), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# --- the front door -------------------------------------------------------------------------------------------------


def test_accelerate() -> None:
    model = mlp().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = ipex.optimize(
        model, optimizer=optimizer, dtype=torch.bfloat16, inplace=True, level="O1"
    )
    trains(model, optimizer)
    reference = mlp().eval()
    model = ipex.optimize(reference, optimizer=None, dtype=torch.bfloat16, inplace=True, level="O1")
    assert model(torch.randn(2, 16).bfloat16()).shape == (2, 4)
    assert callable(ipex.xpu.mem_get_info)
    assert not (hasattr(torch, "xpu") and torch.xpu.is_available()) or ipex.xpu.is_available()


def test_transformers_trainer() -> None:
    model = mlp().eval()
    x = torch.randn(2, 16)
    expected = model(x)
    dtype = torch.bfloat16
    result = ipex.optimize(model, dtype=dtype, level="O1", conv_bn_folding=False, inplace=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        torch.testing.assert_close(result(x).float(), expected, rtol=0.05, atol=0.05)
    model = mlp().train()
    model, optimizer = ipex.optimize(
        model,
        dtype=dtype,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        inplace=True,
        level="O1",
    )
    trains(model, optimizer)


def test_diffusers_community() -> None:
    unet = conv().eval()
    x = torch.randn(1, 3, 8, 8)
    expected = unet(x)
    unet = ipex.optimize(
        unet.eval(),
        dtype=torch.bfloat16,
        inplace=True,
        level="O1",
        weights_prepack=True,
        auto_kernel_selection=False,
    )
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        traced = torch.jit.trace(unet, x, check_trace=False, strict=False)
        traced = torch.jit.freeze(traced)
        torch.testing.assert_close(traced(x).float(), expected, rtol=0.05, atol=0.05)


def test_fastchat_wenet_opea_torchserve() -> None:
    model = ipex.optimize(mlp().eval(), dtype=torch.bfloat16)
    assert model(torch.randn(1, 16).bfloat16()).dtype == torch.bfloat16
    ipex._C.disable_jit_linear_repack()
    try:
        x = torch.randn(1, 16)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            traced = torch.jit.freeze(torch.jit.trace(model, x, check_trace=False))
            assert traced(x).shape == (1, 4)
    finally:
        ipex._C.enable_jit_linear_repack()
    model = ipex.optimize(mlp().eval(), torch.float32, inplace=True)
    assert model(torch.randn(1, 16)).dtype == torch.float32


@needs_quant
def test_wenet_dynamic_int8() -> None:
    from intel_extension_for_pytorch.quantization import convert, prepare

    config = ipex.quantization.default_dynamic_qconfig
    x = torch.randn(4, 16)
    with pytest.warns(DeprecationWarning, match="QConfigMapping"):
        model = prepare(mlp().eval(), config, example_inputs=x, inplace=False)
    model = convert(model)
    torch.testing.assert_close(model(x), mlp()(x), rtol=0.1, atol=0.1)


@needs_runtime
def test_ai_reference_models() -> None:
    from intel_extension_for_pytorch.cpu.runtime import CPUPool, MultiStreamModule

    ipex.set_fp32_math_mode(mode=ipex.FP32MathMode.BF32, device="cpu")
    assert ipex.get_fp32_math_mode(device="cpu") == ipex.FP32MathMode.BF32
    ipex.set_fp32_math_mode(mode=ipex.FP32MathMode.FP32, device="cpu")
    pool = CPUPool(node_id=0)
    model = ipex.optimize(mlp().eval(), dtype=torch.float32)
    x = torch.randn(4, 16)
    with torch.no_grad():
        traced = torch.jit.freeze(torch.jit.trace(model, x))
        streams = MultiStreamModule(traced, num_streams=1, cpu_pool=pool)
        torch.testing.assert_close(streams(x), mlp()(x))


def test_ai_reference_models_layers() -> None:
    from intel_extension_for_pytorch.cpu.nn._roi_align import RoIAlign
    from intel_extension_for_pytorch.nn import FrozenBatchNorm2d
    from intel_extension_for_pytorch.nn.functional import interaction
    from intel_extension_for_pytorch.nn.modules import MergedEmbeddingBagWithSGD
    from intel_extension_for_pytorch.optim._lamb import Lamb
    from intel_extension_for_pytorch.optim._lars import create_optimizer_lars

    pooled = RoIAlign((2, 2), 1.0, 2)(torch.ones(1, 3, 8, 8), torch.tensor([[0.0, 0, 0, 4, 4]]))
    torch.testing.assert_close(pooled, torch.ones(1, 3, 2, 2))
    assert FrozenBatchNorm2d(3)(torch.ones(1, 3, 2, 2)).shape == (1, 3, 2, 2)
    assert interaction(torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 4)).shape == (2, 7)
    tables = [torch.nn.EmbeddingBag(10, 4, mode="sum", sparse=True) for _ in range(2)]
    merged = MergedEmbeddingBagWithSGD.from_embeddingbag_list(tables, lr=0.1)
    indices = [torch.tensor([0, 1, 2]), torch.tensor([3, 4])]
    offsets = [torch.tensor([0, 2]), torch.tensor([0, 1])]
    assert [out.shape for out in merged(indices, offsets)] == [(2, 4), (2, 4)]
    model = mlp()
    Lamb(model.parameters(), lr=1e-3)
    create_optimizer_lars(
        model, lr=0.1, momentum=0.9, weight_decay=1e-4, bn_bias_separately=True, epsilon=1e-5
    )
    scores = torch.tensor([0.1, 0.9, 0.8, 0.3])
    assert ipex._C.roc_auc_score(torch.tensor([0.0, 1.0, 1.0, 0.0]), scores)[0] == 1.0
    assert len(ipex._C.roc_auc_score_all(torch.tensor([0.0, 1.0, 1.0, 0.0]), scores)) == 3


# --- language models ------------------------------------------------------------------------------------------------


class Paged:
    """Two sequences of 5 and 3 tokens in a paged cache, and their attention from stock operations."""

    heads, kv_heads, size, block = 4, 2, 8, 16
    lengths = (5, 3)

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        tokens = sum(self.lengths)
        self.query = torch.randn(tokens, self.heads, self.size, dtype=dtype)
        self.key = torch.randn(tokens, self.kv_heads, self.size, dtype=dtype)
        self.value = torch.randn_like(self.key)
        self.key_cache = torch.zeros(4, self.kv_heads, self.block, self.size, dtype=dtype)
        self.value_cache = torch.zeros_like(self.key_cache)
        self.tables = torch.tensor([[2], [0]], dtype=torch.int32)
        self.slots = torch.tensor([2 * 16 + i for i in range(5)] + list(range(3)))
        self.starts = torch.tensor([0, 5, 8], dtype=torch.int32)
        self.context = torch.tensor(self.lengths, dtype=torch.int32)
        self.head_mapping = (
            torch.arange(0, self.kv_heads, dtype=torch.int32)
            .view(self.kv_heads, 1)
            .repeat_interleave(self.heads // self.kv_heads)
            .flatten()
        )
        self.scale = 1 / math.sqrt(self.size)
        self.last = torch.tensor([4, 7])

    def expected(self) -> Tensor:
        parts = [x.split(self.lengths) for x in (self.query, self.key, self.value)]
        found = []
        for q, k, v in zip(*parts, strict=True):
            k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
            )
            found.append(out.transpose(0, 1))
        return torch.cat(found)


@needs_llm
def test_vllm_cpu() -> None:
    import intel_extension_for_pytorch.llm.modules as ipex_modules

    assert ipex.__version__.endswith("cpu")
    p = Paged()
    ipex_modules.PagedAttention.reshape_and_cache(
        p.key, p.value, p.key_cache, p.value_cache, p.slots.flatten().int()
    )
    output = torch.empty_like(p.query)
    ipex.llm.functional.varlen_attention(
        p.query.contiguous(),
        p.key.contiguous(),
        p.value.contiguous(),
        output,
        p.starts.int(),
        p.starts.int(),
        5,
        5,
        0.0,
        p.scale,
        False,
        True,
        False,
        None,
    )
    torch.testing.assert_close(output, p.expected())
    output = torch.empty_like(p.query)
    ipex_modules.PagedAttention.flash_attn_varlen_func(
        output,
        p.query,
        p.key_cache,
        p.value_cache,
        p.starts,
        p.starts,
        5,
        5,
        p.scale,
        True,
        p.tables,
        None,
    )
    torch.testing.assert_close(output, p.expected())
    last = torch.empty_like(p.query[p.last])
    ipex_modules.PagedAttention.single_query_cached_kv_attention(
        last,
        p.query[p.last].contiguous(),
        p.key_cache,
        p.value_cache,
        p.head_mapping,
        p.scale,
        p.tables,
        p.context,
        p.block,
        5,
        None,
    )
    torch.testing.assert_close(last, p.expected()[p.last])


def experts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(2)
    w13, w2 = torch.randn(4, 64, 32) / 8, torch.randn(4, 32, 32) / 8
    return w13, w2, torch.randn(3, 32), torch.randn(3, 4)


@needs_llm
def test_vllm_experts() -> None:
    w13, w2, x, logits = experts()
    fused = ipex.llm.modules.GatedMLPMOE(w13, w2, use_prepack=False)
    expected = fused(x, False, 2, logits, True, None, None, None, "softmax", None)
    prepacked = ipex.llm.modules.GatedMLPMOE(w13, w2, use_prepack=True)
    result = prepacked(x, False, 2, logits, True)
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)
    dtype = torch.float8_e4m3fn
    scales = [w.abs().amax((1, 2)) / torch.finfo(dtype).max for w in (w13, w2)]
    eight = [(w / s.view(-1, 1, 1)).to(dtype) for w, s in zip((w13, w2), scales, strict=True)]
    fp8 = ipex.llm.modules.GatedMLPMOE(
        *eight,
        w1_scale_inv=scales[0],
        w2_scale_inv=scales[1],
        a1_scale_inv=None,
        a2_scale_inv=None,
        use_prepack=True,
        experts_start_id=0,
    )
    result = fp8(
        x.bfloat16(),
        use_grouped_topk=False,
        top_k=2,
        router_logits=logits,
        renormalize=True,
        topk_group=None,
        num_expert_group=None,
        custom_routing_function=None,
        scoring_func="softmax",
        e_score_correction_bias=None,
    )
    torch.testing.assert_close(result.float(), expected, rtol=0.1, atol=0.1)
    with pytest.raises(NotImplementedError, match=r"ipex\.llm\.optimize"):
        ipex.llm.modules.GatedMLPMOE(w13, w2, is_int4=True)
    with pytest.raises(ValueError, match="scales of W13 must have 4 numbers"):
        ipex.llm.modules.GatedMLPMOE(*eight, w1_scale_inv=torch.ones(3))


@needs_llm
def test_vllm_xpu() -> None:
    f = ipex.llm.functional
    p = Paged()
    x, weight = torch.randn(3, 32), torch.rand(16)
    out = torch.empty(3, 16)
    f.silu_and_mul(x, out)
    torch.testing.assert_close(out, torch.nn.functional.silu(x[:, :16]) * x[:, 16:])
    f.gelu_and_mul(x, out)
    torch.testing.assert_close(out, torch.nn.functional.gelu(x[:, :16]) * x[:, 16:])
    f.gelu_and_mul(x, out, approximate="tanh")
    same = torch.empty_like(x)
    f.gelu_quick(x, same)
    torch.testing.assert_close(same, x * torch.sigmoid(1.702 * x))
    norm = f.rms_norm(x[:, :16], weight, 1e-6)
    torch.testing.assert_close(norm, torch.nn.functional.rms_norm(x[:, :16], (16,), weight, 1e-6))
    residual, hidden = torch.randn(3, 16), torch.randn(3, 16)
    total = residual + hidden
    norm = f.add_rms_norm(residual, hidden, weight, None, 1e-6, True)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(norm, torch.nn.functional.rms_norm(total, (16,), weight, 1e-6))
    output = torch.empty_like(p.query)
    tail = (0.0, p.scale, False, True, False, None, -1, -1, -1.0)
    f.varlen_attention(
        p.query, p.key, p.value, output, p.starts.int(), p.starts.int(), None, 5, 5, *tail
    )
    torch.testing.assert_close(output, p.expected())
    paged = ipex.llm.modules.PagedAttention
    paged.reshape_and_cache_flash(
        p.key, p.value, p.key_cache, p.value_cache, p.slots, "auto", 1.0, 1.0
    )
    last = torch.empty_like(p.query[p.last])
    paged.single_query_kv_attention(
        last,
        p.query[p.last].contiguous(),
        p.key_cache.view_as(p.value_cache),
        p.value_cache,
        p.heads // p.kv_heads,
        p.scale,
        p.tables,
        p.context,
        p.block,
        5,
        None,
    )
    torch.testing.assert_close(last, p.expected()[p.last])
    again = torch.empty_like(last)
    places = (p.head_mapping, p.scale, p.tables, p.context, p.block, 5, None)
    query = p.query[p.last].contiguous()
    paged.single_query_cached_kv_attention(
        again, query, p.key_cache, p.value_cache, *places, "auto", -1, 1.0, 1.0, -1.0
    )
    torch.testing.assert_close(again, last)
    with pytest.raises(ValueError, match="num_queries_per_kv must be heads / kv_heads = 4 / 2"):
        paged.single_query_kv_attention(again, query, p.key_cache, p.value_cache, 3, *places[1:])
    paged.copy_blocks([p.key_cache], [p.value_cache], torch.tensor([[2, 1]]))
    assert torch.equal(p.key_cache[1], p.key_cache[2])
    other = torch.zeros_like(p.key_cache)
    paged.swap_blocks(p.key_cache, other, torch.tensor([[2, 3]]))
    assert torch.equal(other[3], p.key_cache[2])
    quantised = torch.empty(3, 32, dtype=torch.float8_e4m3fn)
    scale = torch.zeros(1)
    torch.ops.torch_ipex.dynamic_scaled_fp8_quant(quantised, x, scale)
    torch.testing.assert_close(quantised.float() * scale, x, rtol=0.1, atol=0.1)
    w = torch.randn(8, 32).to(torch.float8_e4m3fn)
    y = torch.ops.torch_ipex.fp8_gemm_w8a16(x, w, True, torch.ones(1), None)
    torch.testing.assert_close(y, x @ w.float().T, rtol=1e-3, atol=1e-3)
    assert ipex.llm.modules.MambaMixer.selective_scan_fn is not None


@needs_llm
def test_tgi() -> None:
    p = Paged()
    f, paged = ipex.llm.functional, ipex.llm.modules.PagedAttention
    paged.reshape_and_cache_flash(p.key, p.value, p.key_cache, p.value_cache, p.slots)
    out = torch.empty_like(p.query)
    paged.flash_attn_varlen_func(
        out,
        p.query,
        p.key_cache,
        p.value_cache,
        p.starts,
        p.starts,
        5,
        5,
        p.scale,
        True,
        p.tables,
        None,
        window_size_left=-1,
        window_size_right=-1,
        kv_cache_dtype="auto",
        k_scale=1.0,
        v_scale=1.0,
        softcap=-1.0,
    )
    torch.testing.assert_close(out, p.expected())
    out = torch.empty_like(p.query)
    f.varlen_attention(
        p.query,
        p.key,
        p.value,
        out,
        p.starts,
        p.starts,
        None,
        5,
        5,
        0,
        p.scale,
        zero_tensors=False,
        is_causal=True,
        return_softmax=False,
        gen_=None,
    )
    torch.testing.assert_close(out, p.expected())
    last = torch.empty_like(p.query[p.last])
    paged.single_query_cached_kv_attention(
        last,
        p.query[p.last],
        p.key_cache,
        p.value_cache,
        p.head_mapping,
        p.scale,
        p.tables,
        p.context,
        p.block,
        5,
        None,
        window_size=-1,
        k_scale=1.0,
        v_scale=1.0,
        softcap=-1.0,
    )
    torch.testing.assert_close(last, p.expected()[p.last])
    query, key = torch.randn(8, 4, 8), torch.randn(8, 2, 8)
    angles = torch.rand(8, 1, 4)
    norms = query.norm(dim=-1)
    f.rotary_embedding(query, key, angles.sin(), angles.cos(), 8, True)
    torch.testing.assert_close(query.norm(dim=-1), norms)
    x, residual, weight = torch.randn(3, 16), torch.randn(3, 16), torch.rand(16)
    normed = f.add_layer_norm(residual, x, weight, None, 1e-5, residual is not None)
    expected = torch.nn.functional.layer_norm(residual, (16,), weight, None, 1e-5)
    torch.testing.assert_close(normed, expected)
    hidden, rank, ids = torch.randn(3, 16), torch.zeros(3, 4), torch.tensor([0, 1, 0])
    a, b = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 16, 4)
    f.bgmv_shrink(hidden, a, rank, ids, 1.0)
    torch.testing.assert_close(rank[1], a[1, 0] @ hidden[1])
    result = torch.zeros(3, 16)
    f.bgmv_expand(rank, b, result, ids, add_inputs=True)
    torch.testing.assert_close(result[0], b[0, 0] @ rank[0])
    w13, w2, x, logits = experts()
    y = ipex.llm.modules.GatedMLPMOE(W13=w13, W2=w2, use_prepack=True)(
        hidden_states=x,
        router_logits=logits,
        top_k=2,
        renormalize=True,
        use_grouped_topk=False,
        num_expert_group=None,
        topk_group=None,
        scoring_func="softmax",
        e_score_correction_bias=None,
    )
    assert y.shape == x.shape
    assert callable(ipex.distributed.all_gather_into_tensor)


@needs_llm
def test_optimum_intel() -> None:
    from intel_extension_for_pytorch.llm.functional import varlen_attention
    from intel_extension_for_pytorch.llm.modules import (
        Linear2SiluMul,
        LinearAdd,
        LinearAddAdd,
        LinearGelu,
        LinearNewGelu,
        PagedAttention,
        RMSNorm,
        RotaryEmbedding,
    )

    device_type = "xpu" if ipex._C._has_xpu() else "cpu"
    PagedAttention.runtime_ops.device_type = device_type
    RMSNorm.runtime_ops.device_type = device_type
    RotaryEmbedding.runtime_ops.device_type = device_type
    x, y, z = (torch.randn(3, 16) for _ in range(3))
    first, second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
    functional = torch.nn.functional
    with torch.no_grad():
        torch.testing.assert_close(
            Linear2SiluMul(first, second)(x), functional.silu(first(x)) * second(x)
        )
        torch.testing.assert_close(LinearAdd(first)(x, y), first(x) + y)
        torch.testing.assert_close(LinearAddAdd(first)(x, y, z), first(x) + y + z)
        torch.testing.assert_close(LinearGelu(first)(x), functional.gelu(first(x)))
        expected = functional.gelu(first(x), approximate="tanh")
        torch.testing.assert_close(LinearNewGelu(first)(x), expected)
    weight = torch.rand(16)
    normed = RMSNorm.apply_function(x, weight, 1e-6)
    torch.testing.assert_close(normed, functional.rms_norm(x, (16,), weight, 1e-6))
    query, key = torch.randn(8, 4, 8), torch.randn(8, 2, 8)
    angles = torch.rand(8, 1, 8)
    RotaryEmbedding.apply_function(query, key, angles.sin(), angles.cos(), 8, True)
    p = Paged()
    PagedAttention.reshape_and_cache(p.key, p.value, p.key_cache, p.value_cache, p.slots)
    out = torch.empty_like(p.query)
    lengths = p.context
    largest: Any = max(lengths)  # a tensor, as there
    varlen_attention(
        p.query,
        p.key,
        p.value,
        out,
        p.starts,
        p.starts,
        largest,
        largest,
        0.0,
        p.scale,
        False,
        True,
        False,
        None,
    )
    torch.testing.assert_close(out, p.expected())
    last = torch.empty_like(p.query[p.last])
    PagedAttention.single_query_cached_kv_attention(
        last,
        p.query[p.last],
        p.key_cache,
        p.value_cache,
        p.head_mapping,
        p.scale,
        p.tables,
        lengths,
        p.block,
        largest,
        None,
    )
    torch.testing.assert_close(last, p.expected()[p.last])


# --- quantised weights ----------------------------------------------------------------------------------------------


def gptq(group: int = 32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return qweight, scales, qzeros and g_idx of a layer [64 -> 16], and its weight."""
    torch.manual_seed(3)
    codes = torch.randint(0, 16, (64, 16), dtype=torch.int32)
    scales = torch.rand(64 // group, 16) / 16
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    qweight = (codes.view(8, 8, 16) << shifts.view(1, 8, 1)).sum(1, dtype=torch.int32)
    zeros = torch.full((64 // group, 16), 7, dtype=torch.int32)  # stored minus one
    qzeros = (zeros.view(-1, 2, 8) << shifts).sum(-1, dtype=torch.int32)
    g_idx = torch.arange(64, dtype=torch.int32) // group
    weight = (codes - 8) * scales[g_idx.long()]
    return qweight, scales, qzeros, g_idx, weight.T.contiguous()


@needs_llm
@pytest.mark.parametrize("client", ["gptqmodel", "vllm", "tgi", "numbers"])
def test_gptq_clients(client: str) -> None:
    from intel_extension_for_pytorch.llm.quantization import (
        IPEXWeightOnlyQuantizedLinear,
        QuantDtype,
        QuantMethod,
    )

    qweight, scales, qzeros, g_idx, weight = gptq()
    bias, x = torch.randn(16), torch.randn(3, 64)
    expected = torch.nn.functional.linear(x, weight, bias)
    make = IPEXWeightOnlyQuantizedLinear.from_weight
    method, dtype = QuantMethod.GPTQ_GEMM, QuantDtype.INT4
    if client == "gptqmodel":
        layer = make(
            *(qweight, scales, qzeros, 64, 16, None, bias, 32, g_idx),
            quant_method=method,
            dtype=dtype,
        )
    elif client == "vllm":
        config = ipex.quantization.get_weight_only_quant_qconfig_mapping(
            weight_dtype=ipex.quantization.WoqWeightDtype.INT4,
            lowp_mode=ipex.quantization.WoqLowpMode.BF16,
            act_quant_mode=ipex.quantization.WoqActQuantMode.PER_BATCH_IC_BLOCK,
            group_size=32,
            weight_qscheme=ipex.quantization.WoqWeightQScheme.ASYMMETRIC,
        )
        layer = ipex.llm.quantization.woq_linear.IPEXWeightOnlyQuantizedLinear.from_weight(
            qweight,
            scales,
            qzeros,
            64,
            16,
            qconfig=config,
            g_idx=g_idx,
            bias=bias,
            group_size=32,
            quant_method=method,
            weight_qscheme="asym",
        )
    elif client == "tgi":
        layer = make(
            *(qweight, scales, qzeros, 64, 16),
            bias=bias,
            group_size=32,
            g_idx=g_idx,
            quant_method=method,
            dtype=dtype,
        )
    else:
        layer = make(*(qweight, scales, qzeros, 64, 16, None, bias, 32, g_idx, 0, 0))
    torch.testing.assert_close(layer(x), expected, rtol=0.05, atol=0.15)


@needs_llm
def test_autoawq() -> None:
    from intel_extension_for_pytorch.llm.quantization import IPEXWeightOnlyQuantizedLinear

    torch.manual_seed(4)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    codes = torch.randint(0, 16, (64, 16), dtype=torch.int32)
    zeros = torch.randint(0, 16, (2, 16), dtype=torch.int32)
    scales = torch.rand(2, 16) / 16

    def pack(values: Tensor) -> Tensor:
        parts = values.view(values.shape[0], 2, 8)[:, :, order]
        return (parts << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)

    groups = torch.arange(64) // 32
    weight = ((codes - zeros[groups]) * scales[groups]).T
    layer = IPEXWeightOnlyQuantizedLinear.from_weight(
        pack(codes), scales, pack(zeros), 64, 16, None, None, 32, None, 1, 0
    )
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), x @ weight.T, rtol=0.05, atol=0.15)
    hidden = ipex.llm.functional.rms_norm(x, torch.ones(64), 1e-6)
    assert hidden.shape == x.shape


def test_bitsandbytes() -> None:
    assert ipex._C._has_cpu() in (True, False) and ipex._C._has_xpu() in (True, False)
    torch.manual_seed(5)
    codes = torch.randint(0, 256, (16, 32), dtype=torch.uint8)
    absmax = torch.rand(16, 2) + 0.1
    packed, scales, zeros, bias, compensation = torch.ops.ipex_prepack.woq_linear_pack_weight(
        codes, "nf4", [16, 64], absmax, None, None, None, 32, 3
    )
    back = torch.ops.ipex_prepack.woq_linear_unpack_weight(packed, "nf4", [16, 64], 3)
    assert torch.equal(back, codes)
    x = torch.randn(2, 64)
    y = torch.ops.torch_ipex.woq_linear(
        x, packed, "nf4", [16, 64], scales, zeros, bias, None, 32, 3, 1, compensation
    )
    weight = torch.ops.torch_ipex.dequantize_4bit(codes, "nf4", [16, 64], absmax, None, 32)
    torch.testing.assert_close(y, x @ weight.T, rtol=0.1, atol=0.3)
    with pytest.raises(NotImplementedError, match="dequantize_4bit"):
        ipex.xpu.bitsandbytes.cdequantize_blockwise_fp16  # noqa: B018


@needs_quant
def test_neural_compressor(tmp_path: Any) -> None:
    from intel_extension_for_pytorch.quantization import convert, prepare

    x = torch.randn(4, 16)
    mapping = ipex.quantization.get_smooth_quant_qconfig_mapping(alpha=0.5)
    for config in (mapping, ipex.quantization.default_static_qconfig_mapping):
        model = prepare(mlp().eval(), config, example_inputs=x, inplace=True)
        model(x)
        path = str(tmp_path / "best_configure.json")
        model.save_qconf_summary(qconf_summary=path)
        model.load_qconf_summary(qconf_summary=path)
        result = convert(model, inplace=True)
        with torch.no_grad():
            traced = torch.jit.freeze(torch.jit.trace(result, x, check_trace=False))
            torch.testing.assert_close(traced(x), mlp()(x), rtol=0.1, atol=0.1)
    fast = ipex.optimize(conv().eval(), replace_dropout_with_identity=True)
    image = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(fast(image), conv().eval()(image), rtol=1e-4, atol=1e-5)
    assert ipex.nn.modules.MergedEmbeddingBagWithSGD and ipex.nn.functional.interaction


@needs_llm
def test_torchserve_and_ipex_llm() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=64
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    qconfig = ipex.quantization.get_weight_only_quant_qconfig_mapping(
        weight_dtype=ipex.quantization.WoqWeightDtype.INT8,
        lowp_mode=ipex.quantization.WoqLowpMode.BF16,
    )
    ipex._C.disable_jit_linear_repack()
    model = ipex.llm.optimize(
        model.eval(),
        dtype=torch.bfloat16,
        quantization_config=qconfig,
        inplace=True,
        deployment_mode=True,
    )
    ipex._C.enable_jit_linear_repack()
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = model.generate(ids, max_new_tokens=3, min_new_tokens=3, num_beams=1, do_sample=False)
    assert out.shape == (1, 6)
    with pytest.raises(NotImplementedError, match=r"ipex\.llm\.optimize"):
        from intel_extension_for_pytorch.transformers.optimize import (  # noqa: F401
            lowering_class_cpu,
        )


def test_deepspeed() -> None:
    assert ipex._C._has_xpu() in (True, False)
    with pytest.raises(NotImplementedError, match="DeepSpeed"):
        ipex.xpu.deepspeed.has_deepspeed()
    with pytest.raises(ImportError):
        from intel_extension_for_pytorch.xpu.deepspeed import has_deepspeed  # noqa: F401


def test_sdnext_and_comfyui() -> None:
    assert importlib.util.find_spec("intel_extension_for_pytorch") is not None
    assert hasattr(ipex, "xpu") and ipex.xpu.is_available() in (True, False)
    assert not hasattr(ipex._C, "_getCurrentRawStream")  # probed
    model = ipex.optimize(mlp().eval(), dtype=torch.float32, inplace=True, weights_prepack=False)
    assert model(torch.randn(1, 16)).shape == (1, 4)
