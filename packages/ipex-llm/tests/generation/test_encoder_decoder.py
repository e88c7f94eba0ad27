# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoders: each decoder step is one program, with the tokens of the stock model."""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import pytest
import torch

import ipex_llm
from ipex_core.module_swap.base import original_class
from ipex_llm.kv_cache.encoder_decoder import state_of
from ipex_llm.model_runner.encoder_decoder import PairRunner
from ipex_llm.optimization.proof.small import randomize
from ipex_llm.records import record_of

transformers = pytest.importorskip("transformers")

VOCAB, SAMPLES = 96, 20
TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    **TOKENS,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
WHISPER = {
    **{k: v for k, v in BART.items() if k != "max_position_embeddings"},
    "num_mel_bins": 8,
    "max_source_positions": SAMPLES,
    "max_target_positions": 48,
    "begin_suppress_tokens": None,
    "suppress_tokens": None,
}
#: Class of the model, of its configuration, and what is in it.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "flan-t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", T5),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART),
    "mbart": (
        "MBartForConditionalGeneration",
        "MBartConfig",
        {**BART, "scale_embedding": True},
    ),
    "marian": (
        "MarianMTModel",
        "MarianConfig",
        {**BART, "decoder_vocab_size": VOCAB, "activation_function": "silu"},
    ),
    "m2m100": ("M2M100ForConditionalGeneration", "M2M100Config", BART),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", BART),
    "blenderbot": ("BlenderbotForConditionalGeneration", "BlenderbotConfig", BART),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
}


@functools.cache
def _stock(name: str) -> Any:
    model, config, values = FAMILIES[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**values))
    made = randomize(made)
    made.generation_config.eos_token_id = None  # a text of random weights has no end
    return made


@functools.cache
def _fast(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return ipex_llm.optimize(copy.deepcopy(_stock(name)), dtype=dtype)


def _input(name: str, batch: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "whisper":
        return {"input_features": torch.randn(batch, 8, 2 * SAMPLES, generator=generator)}
    ids = torch.randint(3, VOCAB, (batch, 9), generator=generator)
    mask = torch.ones_like(ids)
    if batch > 1:
        ids[0, -3:], mask[0, -3:] = 1, 0
    return {"input_ids": ids, "attention_mask": mask}


def _generate(model: Any, name: str, batch: int = 2, **options: Any) -> torch.Tensor:
    generate = transformers.GenerationMixin.generate  # Whisper's own is for whole recordings
    with torch.no_grad():
        made: torch.Tensor = generate(
            model, **_input(name, batch), do_sample=False, max_length=24, **options
        )
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_the_decoder_is_one_program(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ipex.llm")
    model = _fast(name)
    assert isinstance(record_of(model).runner, PairRunner)
    assert original_class(model) is type(_stock(name))
    for batch in (1, 2):
        got, want = (_generate(one, name, batch) for one in (model, _stock(name)))
        assert got.tolist() == want.tolist()
    assert "runs its own forward" not in caplog.text


@pytest.mark.parametrize("name", FAMILIES)
def test_beams(name: str) -> None:
    got, want = (
        _generate(one, name, num_beams=3, num_return_sequences=2)
        for one in (_fast(name), _stock(name))
    )
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("name", ("flan-t5", "marian", "m2m100", "whisper"))
def test_bfloat16(name: str) -> None:
    """Logits are nearly as close to float32 as the stock model is in bfloat16."""
    stock, fast = _stock(name), _fast(name, torch.bfloat16)
    plain = copy.deepcopy(stock).bfloat16()
    tokens = torch.randint(3, VOCAB, (2, 16), generator=torch.Generator().manual_seed(3))
    given = {**_input(name), "decoder_input_ids": tokens}

    def logits(model: Any) -> torch.Tensor:
        kind = next(p for p in model.parameters() if p.is_floating_point()).dtype
        own = {k: v.to(kind) if v.is_floating_point() else v for k, v in given.items()}
        mask = own.get("attention_mask")
        with torch.no_grad():
            main = "input_ids" if mask is not None else "input_features"
            encoder = model.get_encoder()
            more = {} if mask is None else {"attention_mask": mask}
            rows = encoder(own[main], **more)
            result = model(encoder_outputs=rows, decoder_input_ids=tokens, **more)
        return result.logits.float()

    want = logits(stock)
    off, own = ((logits(m) - want).square().mean().sqrt() for m in (fast, plain))
    assert off <= 1.5 * own + 1e-3


def test_bfloat16_greedy_tokens_are_those_of_stock_where_it_is_sure() -> None:
    stock = copy.deepcopy(_stock("bart")).bfloat16()
    fast = _fast("bart", torch.bfloat16)
    options = {"return_dict_in_generate": True, "output_scores": True}
    want, got = (_generate(one, "bart", **options) for one in (stock, fast))
    for row in range(2):
        for step, scores in enumerate(want.scores):
            best = scores[row].float().topk(2).values
            if best[0] - best[1] < 0.05:
                break  # two tokens are nearly equal: rounding decides
            assert got.sequences[row, step + 1] == want.sequences[row, step + 1]


def test_processors_of_logits_see_each_step() -> None:
    class Stamps(transformers.LogitsProcessor):  # type: ignore[misc, name-defined]
        """Every other token is a stamp that does not go back, as Whisper's are."""

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores = scores.clone()
            if ids.shape[1] % 2:
                scores[:, :48] = -torch.inf
                for row, text in zip(scores, ids, strict=True):
                    row[48 : max(48, int(text.max()))] = -torch.inf
            else:
                scores[:, 48:] = -torch.inf
            return scores

    processors = transformers.LogitsProcessorList([Stamps()])
    for options in ({}, {"num_beams": 2}):
        got, want = (
            _generate(one, "whisper", logits_processor=processors, **options)
            for one in (_fast("whisper"), _stock("whisper"))
        )
        assert got.tolist() == want.tolist()


def test_whisper_with_its_timestamps() -> None:
    """Whisper's own ``generate``, with its processor of timestamps."""
    config = transformers.WhisperConfig(**{**WHISPER, "vocab_size": 1700})
    stock = randomize(transformers.WhisperForConditionalGeneration(config))
    generation = stock.generation_config
    generation.no_timestamps_token_id = 90
    generation.is_multilingual = False
    generation.return_timestamps = True
    generation.max_initial_timestamp_index = 5
    fast = ipex_llm.optimize(copy.deepcopy(stock))
    features = torch.randn(1, 8, 2 * SAMPLES, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got, want = (
            m.generate(features, return_timestamps=True, max_new_tokens=20, do_sample=False)
            for m in (fast, stock)
        )
    assert got.tolist() == want.tolist()


def test_beams_share_what_the_encoder_gave() -> None:
    model = _fast("bart")
    rows = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(2))
    outputs = transformers.modeling_outputs.BaseModelOutput(rows.repeat_interleave(3, 0))
    ids = torch.randint(3, VOCAB, (6, 1), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        cache = _cache(model(encoder_outputs=outputs, decoder_input_ids=ids, use_cache=True))
        state = state_of(cache)
        assert state is not None and state.group == 3
        assert state.cross[0].shape[0] == 2
        shared = state.cross[0]
        cache.reorder_cache(torch.tensor([2, 2, 0, 4, 5, 5]))
        assert state.cross[0] is shared
        cache.reorder_cache(torch.tensor([5, 0, 1, 2, 2, 3]))  # across texts
        assert state.group == 1
        assert torch.equal(state.cross[0], shared[[1, 0, 0, 0, 0, 1]])


def _cache(result: Any) -> Any:
    cache = getattr(result, "cache", None)
    return result.past_key_values if cache is None else cache


def _with(cache: Any) -> dict[str, Any]:
    from ipex_llm.arch.detect import parameter_names

    names = parameter_names(transformers.BartForConditionalGeneration)
    return {"cache" if "cache" in names else "past_key_values": cache}


def test_the_stock_forward_goes_on_with_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    """What a program does not do runs the model's own forward, with what programs have cached."""
    caplog.set_level(logging.INFO, "ipex.llm")
    stock, model = _stock("bart"), _fast("bart")
    rows = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(2))
    outputs = transformers.modeling_outputs.BaseModelOutput(rows)
    ids = torch.randint(3, VOCAB, (2, 6), generator=torch.Generator().manual_seed(2))
    found = []
    for one in (model, stock):
        with torch.no_grad():
            cache = _cache(one(encoder_outputs=outputs, decoder_input_ids=ids[:, :5]))
            last = one(
                encoder_outputs=outputs,
                decoder_input_ids=ids[:, 5:],
                output_attentions=True,
                **_with(cache),
            )
        found.append(last.logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_explain_and_plan_tell() -> None:
    plan = ipex_llm.plan(copy.deepcopy(_stock("t5")), dtype=torch.bfloat16)
    assert plan.depth == 3
    assert all(layer.done for layer in plan.layers) and len(plan.layers) == 2
    noted = ipex_llm.plan(copy.deepcopy(_stock("t5")), kv_cache_dtype="int8")
    assert "no effect" in noted.notes[0]
    odd = copy.deepcopy(_stock("bart"))
    odd.model.decoder.layers[1].activation_fn = torch.nn.Tanh()
    plan = ipex_llm.plan(odd)
    assert plan.depth == 1
    assert "model.decoder.layers.1" in str(plan.reason)


def test_changed_weights_are_seen() -> None:
    stock = copy.deepcopy(_stock("marian"))
    model = ipex_llm.optimize(copy.deepcopy(stock))
    with torch.no_grad():
        for one in (stock, model):
            weight = one.model.decoder.layers[0].fc1.weight
            weight.data = weight.data * -1.5
    got, want = (_generate(one, "marian") for one in (model, stock))
    assert got.tolist() == want.tolist()


def test_changed_distances_are_seen() -> None:
    pair = [copy.deepcopy(_stock("t5")), ipex_llm.optimize(copy.deepcopy(_stock("t5")))]
    for _ in range(2):
        got, want = (
            _generate(one, "t5", output_scores=True, return_dict_in_generate=True)
            for one in pair[::-1]
        )
        torch.testing.assert_close(got.scores, want.scores, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            for one in pair:
                one.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.mul_(-9)


def test_restore_and_copy() -> None:
    import ipex_core

    stock = _stock("t5")
    model = ipex_llm.optimize(copy.deepcopy(stock))
    twin = copy.deepcopy(model)
    want = _generate(stock, "t5").tolist()
    assert _generate(twin, "t5").tolist() == want
    ipex_core.restore(model)
    assert type(model) is type(stock)
    for name, value in stock.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert _generate(model, "t5").tolist() == want


def test_int8_weights() -> None:
    from ipex_quant import WoqWeightDtype, get_weight_only_quant_qconfig_mapping

    config = get_weight_only_quant_qconfig_mapping(weight_dtype=WoqWeightDtype.INT8)
    model = ipex_llm.optimize(copy.deepcopy(_stock("bart")), quantization_config=config)
    assert isinstance(record_of(model).runner, PairRunner)
    with torch.no_grad():
        rows = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(2))
        outputs = transformers.modeling_outputs.BaseModelOutput(rows)
        ids = torch.randint(3, VOCAB, (2, 6), generator=torch.Generator().manual_seed(2))
        got, want = (
            m(encoder_outputs=outputs, decoder_input_ids=ids).logits
            for m in (model, _stock("bart"))
        )
    assert float((got - want).norm() / want.norm()) < 0.05


def test_bad_input() -> None:
    model = _fast("bart")
    rows = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(2))
    outputs = transformers.modeling_outputs.BaseModelOutput(rows)
    ids = torch.full((2, 1), 5)
    with torch.no_grad():
        cache = _cache(model(encoder_outputs=outputs, decoder_input_ids=ids))
        three = transformers.modeling_outputs.BaseModelOutput(rows[:1].expand(3, -1, -1))
        with pytest.raises(ValueError, match="decoder_input_ids must have 2 rows"):
            model(encoder_outputs=three, decoder_input_ids=ids[:1].expand(3, -1), **_with(cache))
        with pytest.raises((IndexError, RuntimeError)):
            model(encoder_outputs=outputs, decoder_input_ids=torch.full((2, 1), VOCAB))
        with pytest.raises((IndexError, RuntimeError)):
            model(encoder_outputs=outputs, decoder_input_ids=torch.full((2, 70), 5))


def test_training_and_gradients_run_the_stock_forward() -> None:
    model = ipex_llm.optimize(copy.deepcopy(_stock("t5")))
    given = {**_input("t5"), "labels": torch.full((2, 3), 7)}
    with torch.no_grad():
        got, want = (one(**given).loss for one in (model, _stock("t5")))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    model.requires_grad_(False)
    rows = torch.randn(1, 4, model.config.d_model, requires_grad=True)
    with torch.enable_grad():
        ids = torch.tensor([[3, 4]])
        model(encoder_outputs=(rows,), decoder_input_ids=ids).logits.sum().backward()
    assert rows.grad is not None
