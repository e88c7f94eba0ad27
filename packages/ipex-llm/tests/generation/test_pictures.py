# SPDX-License-Identifier: Apache-2.0
"""Models whose layers read pictures: texts with one, padding, pieces, beams, and what programs leave alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from families import OLD, VOCAB, build, randomize, tokens
from plain_weights import with_plain_weights

import ipex_llm
import ipex_quant as q
from ipex_llm.kv_cache.transformers import state_of_cache
from ipex_llm.model_runner import Runner
from ipex_llm.optimization.proof.small import small_model

pytestmark = [
    pytest.mark.usefixtures("no_gradients"),
    pytest.mark.skipif(OLD, reason="transformers 4 counts the tokens of these caches otherwise"),
]
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 12}


def given(batch: int = 2, length: int = 14, padding: int = 0) -> dict[str, Any]:
    """Return texts with a picture each, the first behind padding; tokens before a picture do not see it."""
    ids, mask = tokens(batch, length), torch.ones(batch, length, dtype=torch.int64)
    ids[:, padding + 2] = VOCAB - 1
    mask[0, :padding] = 0
    seen = torch.zeros(batch, length, 1, 1, dtype=torch.int64)
    seen[:, padding + 2 :] = 1
    ones = torch.ones(batch, 1, dtype=torch.int64)
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "pixel_values": torch.randn(batch, 1, 1, 3, 16, 16, generator=torch.manual_seed(0)),
        "aspect_ratio_ids": ones,
        "aspect_ratio_mask": ones.unsqueeze(1),
        "cross_attention_mask": seen,
    }


def close(got: torch.Tensor, want: torch.Tensor, most: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=most * float(want.abs().max()))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets for each program that runs whether layers that read pictures are in it."""
    seen: list[bool] = []
    run = Runner.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs.get("look") is not None)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Runner, "run", counted)
    return seen


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 3, "use_cache": False}])
@pytest.mark.parametrize("padding", [0, 4])
def test_generate(padding: int, options: dict[str, Any], programs: list[bool]) -> None:
    model = build("mllama")
    fast, texts = ipex_llm.optimize(build("mllama")), given(padding=padding)
    programs.clear()
    got = fast.generate(**texts, **GREEDY, **options)
    assert programs == [True] * 12
    assert torch.equal(got, model.generate(**texts, **GREEDY, **options))
    texts = {name: texts[name] for name in ("input_ids", "attention_mask")}
    programs.clear()
    got = fast.generate(**texts, **GREEDY, **options)
    assert programs and not any(programs)
    assert torch.equal(got, model.generate(**texts, **GREEDY, **options))


def test_logits_pieces_and_copies() -> None:
    model, fast, texts = build("mllama"), ipex_llm.optimize(build("mllama")), given(padding=3)
    want = model(**texts, use_cache=False).logits
    valid = texts["attention_mask"].bool()
    for one in (fast, copy.deepcopy(fast)):
        close(one(**texts, use_cache=False).logits[valid], want[valid])
    texts = given()
    want = model(**texts, use_cache=False).logits
    first = {k: v[:, :9] if v.shape[1] == 14 else v for k, v in texts.items()}
    result = fast(**first, use_cache=True)
    cache, found = result.cache, [result.logits]
    assert state_of_cache(cache).pictures
    for end in (12, 13, 14):
        start = 9 if end == 12 else end - 1
        more = {"attention_mask": texts["attention_mask"][:, :end]}
        more["cross_attention_mask"] = texts["cross_attention_mask"][:, start:end]
        found.append(fast(texts["input_ids"][:, start:end], cache=cache, **more).logits)
    close(torch.cat(found, 1), want)


def test_a_stock_forward_goes_on_with_the_cache() -> None:
    model, fast, texts = build("mllama"), ipex_llm.optimize(build("mllama")), given()
    want, ids = model(**texts, use_cache=False).logits, texts["input_ids"]
    first = {k: v[:, :12] if v.shape[1] == 14 else v for k, v in texts.items()}
    cache = fast(**first, use_cache=True).cache
    more = {"cross_attention_mask": texts["cross_attention_mask"][:, 12:]}
    close(fast(ids[:, 12:], cache=cache, output_attentions=True, **more).logits, want[:, 12:])
    assert state_of_cache(cache) is None
    states = fast(**texts, output_hidden_states=True).hidden_states
    for got, one in zip(
        states, model(**texts, output_hidden_states=True).hidden_states, strict=True
    ):
        close(got, one)
    texts.pop("cross_attention_mask")  # without which attention of transformers is causal
    close(fast(**texts, use_cache=False).logits, model(**texts, use_cache=False).logits)


def test_changed_gates_are_followed() -> None:
    model, fast, texts = build("mllama"), ipex_llm.optimize(build("mllama")), given()
    for one in (model, fast):
        for name, parameter in one.named_parameters():
            if name.endswith("_gate"):
                parameter.add_(0.5)
    close(fast(**texts, use_cache=False).logits, model(**texts, use_cache=False).logits)


@pytest.mark.parametrize("kv", [None, torch.int8, torch.float8_e4m3fn])
def test_bfloat16_and_caches_of_8_bits(kv: torch.dtype | None, programs: list[bool]) -> None:
    model, texts = build("mllama"), given(padding=3)
    fast = ipex_llm.optimize(build("mllama"), dtype=torch.bfloat16, kv_cache_dtype=kv)
    valid = texts["attention_mask"].bool()
    want = model(**texts, use_cache=False).logits[valid]
    texts["pixel_values"] = texts["pixel_values"].bfloat16()
    programs.clear()
    got = fast(**texts, use_cache=True)
    assert programs == [True]
    if kv is not None:
        assert state_of_cache(got.cache).cache.dtype == kv
    apart = 1 - torch.cosine_similarity(got.logits[valid].float(), want, dim=-1)
    assert float(apart.median()) < (1e-3 if kv != torch.float8_e4m3fn else 1e-2)


@pytest.mark.parametrize("form", ["INT8", "INT4", "NF4"])
def test_quantized_weights(form: str) -> None:
    size = {} if form == "INT8" else {"group_size": 16}
    config = q.woq_qconfig(weight_dtype=getattr(q.WoqWeightDtype, form), **size)
    fast = ipex_llm.optimize(build("mllama"), quantization_config=config)
    model, texts = with_plain_weights(build("mllama"), fast), given(padding=3)
    valid = texts["attention_mask"].bool()
    got, want = (one(**texts, use_cache=False).logits[valid] for one in (fast, model))
    close(got, want, 1e-4)
    assert torch.equal(fast.generate(**texts, **GREEDY), model.generate(**texts, **GREEDY))


@pytest.mark.parametrize("first", [True, False])
def test_a_later_picture_stands_behind_the_first(first: bool) -> None:
    draw = torch.manual_seed(0)
    rows = torch.randn(2, 7, 64, generator=draw), torch.randn(2, 5, 64, generator=draw)
    ids, found = tokens(2, 10), []
    for model in (build("mllama_text"), ipex_llm.optimize(build("mllama_text"))):
        given = {"cross_attention_states": rows[0]} if first else {}
        mask = {"cross_attention_mask": torch.zeros(2, 1, 5, 7)} if first else {}
        result = model(ids[:, :5], use_cache=True, **given, **mask)
        logits, width = [result.logits], 12 if first else 5
        for start, end in ((5, 9), (9, 10)):
            given = {"cross_attention_mask": torch.zeros(2, 1, end - start, width)}
            given |= {"cross_attention_states": rows[1]} if start == 5 else {}
            logits.append(model(ids[:, start:end], cache=result.cache, **given).logits)
        found.append(torch.cat(logits, 1))
    close(found[1], found[0])


@pytest.mark.skipif(
    not hasattr(transformers, "Kimi_K25ForConditionalGeneration"), reason="a newer transformers"
)
def test_places_for_pictures_without_one() -> None:
    """The model has another embedding for them than its table."""
    kind: Any = transformers.Kimi_K25ForConditionalGeneration
    model = randomize(small_model(kind, transformers.Kimi_K25Config()))
    ids = torch.tensor([[5, 6, model.config.image_token_id, 7]])
    fast = ipex_llm.optimize(copy.deepcopy(model))
    got, want = (m.generate(ids, max_new_tokens=4, do_sample=False) for m in (fast, model))
    assert torch.equal(got, want)
