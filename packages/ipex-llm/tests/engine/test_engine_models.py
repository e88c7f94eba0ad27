# SPDX-License-Identifier: Apache-2.0
"""`ipex_llm.engine` on models: the tokens are those of stock transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from families import FAMILIES, OLD

import ipex_llm
from ipex_core.errors import StaleWeightsError
from ipex_llm.engine import Engine, SamplingParams
from ipex_llm.records import record_of

transformers = pytest.importorskip("transformers")

PROMPTS = (3, 40, 17, 1, 70, 5)
NAMES = [
    name
    for name in (
        *("mistral", "gemma2", "gemma3", "gemma4", "gemma4_moe", "gemma3n", "apertus", "bitnet"),
        *("gpt2", "gptj", "xglm", "bloom", "mixtral", "qwen3", "gpt_oss", "mimo_v2_flash"),
        *("minicpm3", "laguna", "nanochat", "modernbert_decoder", "gpt_neox_japanese"),
        *("mllama_text", "dbrx", "longcat_flash", "doge", "diffllama", "inkling", "jetmoe"),
        *("deepseek_v32", "glm_moe_dsa", "dots3_note", "axk2", "hy_v4", "deepseek_v4", "kolibri1"),
        *("inkling2", "inkling2_loop", "beam", "dory", "axk1", "minimax_m3"),
    )
    if name in FAMILIES
]


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    stock = transformers.LlamaForCausalLM(config).eval()
    for parameter in stock.parameters():  # so that logits differ by more than rounding
        if parameter.dim() == 2:
            parameter.data.mul_(8)
    return stock, ipex_llm.optimize(stock)


def prompts():
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(1, 97, (n,), generator=draw).tolist() for n in PROMPTS]


@torch.inference_mode()
def greedy_without_cache(stock, prompt, count):
    ids = torch.tensor([prompt])
    for _ in range(count):
        ids = torch.cat([ids, stock(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return tuple(ids[0, len(prompt) :].tolist())


def greedy(stock, prompt, count):
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = stock.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
        )
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 64},
        {"num_blocks": 64, "max_tokens_per_step": 16, "max_num_seqs": 4},
        {"num_blocks": 14, "max_tokens_per_step": 9, "max_num_seqs": 6, "block_size": 8},
    ],
    ids=["all at once", "in pieces", "too little memory"],
)
def test_tokens_are_those_of_stock(models, options):
    stock, fast = models
    engine = Engine(fast, **{"block_size": 16, "eos_token_ids": ()} | options)
    params = SamplingParams(max_new_tokens=20)
    for _ in range(2):  # the second time on the prefixes of the first
        for prompt, output in zip(prompts(), engine.generate(prompts(), params), strict=True):
            assert output.tokens == greedy(stock, prompt, 20)
    stats = engine.stats()
    scarce = options["num_blocks"] == 14
    assert scarce == (stats.preemptions > 0)
    assert scarce or stats.cached_tokens > 0


def test_a_seed_gives_the_same_tokens_in_any_company(models):
    _, fast = models
    engine = Engine(fast, block_size=16, num_blocks=64, eos_token_ids=(), prefix_reuse=False)
    params = SamplingParams(max_new_tokens=16, temperature=1.0, top_p=0.95, seed=4)
    alone = engine.generate([prompts()[1]], params)[0].tokens
    assert engine.generate(prompts(), params)[1].tokens == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bad_request_in_a_batch_and_in_its_blocks(models, dtype):
    """NaN in an embedding, and in all the memory of the cache."""
    stock, _ = models
    fast = ipex_llm.optimize(copy.deepcopy(stock), dtype=dtype)
    options = {"block_size": 16, "num_blocks": 32, "eos_token_ids": (), "max_tokens_per_step": 24}
    params = SamplingParams(max_new_tokens=8)
    healthy = [prompt for prompt in prompts() if 96 not in prompt]
    assert len(healthy) > 2
    expected = Engine(fast, **options, prefix_reuse=False).generate(healthy, params)
    with torch.no_grad():
        fast.get_input_embeddings().weight[96] = torch.nan
    engine = Engine(fast, **options)
    for tensor in engine._cache.tensors:
        tensor.fill_(torch.nan)
    bad = [1] * 20 + [96] + [2] * 20
    for _ in range(2):
        *outputs, failed, again = engine.generate([*healthy, bad, bad], params)
        for output, want in zip(outputs, expected, strict=True):
            if 96 not in want.tokens:
                assert output.tokens == want.tokens
        for output in (failed, again):
            assert output.reason == "error" and output.tokens == () and "finite" in output.error
    assert engine.stats().failed == 4 and engine.stats().blocks_held == 0


@pytest.mark.parametrize("name", NAMES)
def test_families(name):
    """Windows, softcaps, biases, positions and experts in a batch of prompts and single tokens."""
    stock = FAMILIES[name]()
    fast = ipex_llm.optimize(stock)
    if record_of(fast).runner is None:
        pytest.skip("runs layer by layer")
    engine = Engine(
        fast, block_size=16, num_blocks=32, max_tokens_per_step=24, eos_token_ids=(), max_num_seqs=4
    )
    chosen = [[t % 95 + 1 for t in prompt] for prompt in prompts()]
    outputs = engine.generate(chosen, SamplingParams(max_new_tokens=8))
    for prompt, output in zip(chosen, outputs, strict=True):
        assert output.tokens == greedy(stock, prompt, 8)


@pytest.mark.parametrize(
    "options", [{}, {"block_size": 1, "num_blocks": 130, "max_tokens_per_step": 7}]
)
def test_frequencies_that_change_with_the_length(options):
    """LongRoPE computes a sequence anew when it gets long; short and long ones run side by side."""
    stock = FAMILIES["phi3_longrope"]()
    engine = Engine(ipex_llm.optimize(copy.deepcopy(stock)), **options)
    draw = torch.Generator().manual_seed(3)
    counts = ((5, 6), (30, 50), (90, 8), (62, 6), (64, 2), (20, 4))
    asked = [(torch.randint(1, 96, (n,), generator=draw).tolist(), m) for n, m in counts]
    asked.append((asked[2][0][:40], 30))  # begins as a long one does, and must not take its rows
    params = [SamplingParams(max_new_tokens=m, ignore_eos=True) for _, m in asked]
    found = engine.generate([prompt for prompt, _ in asked], params)
    # generate of transformers 4 reads a text that gets long again, but then without a causal mask.
    want = greedy_without_cache if OLD else greedy
    for (prompt, count), output in zip(asked, found, strict=True):
        assert output.tokens == want(stock, prompt, count)


def test_a_model_that_was_changed_or_copied():
    model, other = FAMILIES["llama"](), FAMILIES["llama"]()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.25)
        want = other.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False)
    fast = ipex_llm.optimize(model, inplace=True)
    fast.load_state_dict(other.state_dict())
    for one in (fast, copy.deepcopy(fast)):
        found = Engine(one, num_blocks=8, max_model_len=64).generate(
            [[5, 6, 7]], SamplingParams(max_new_tokens=6)
        )
        assert list(found[0].tokens) == want[0, 3:].tolist()
    engines = [Engine(fast, num_blocks=8, max_model_len=64) for _ in range(2)]
    fast.load_state_dict(other.state_dict())  # new versions of the same numbers
    with pytest.raises(StaleWeightsError, match="got a change: make a new Engine"):
        engines[0].generate([[5, 6, 7]])
    fast.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=1)  # packs them again
    with pytest.raises(StaleWeightsError):
        engines[1].generate([[5, 6, 7]])
    engine = Engine(fast, num_blocks=8, max_model_len=64)
    fast.model.layers[0].mlp = torch.nn.Identity()
    with pytest.raises(StaleWeightsError):
        engine.generate([[5, 6, 7]])
    with pytest.raises(TypeError, match="got LlamaForCausalLM: a module in it has other hooks, or"):
        Engine(fast)
