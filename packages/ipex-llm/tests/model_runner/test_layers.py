# SPDX-License-Identifier: Apache-2.0
"""Decoder layers that run as one program each, under the forward, the loop and the cache of transformers."""

from __future__ import annotations

import copy
import io
import operator
import re
from typing import Any

import pytest
import torch
from families import CAUSAL, OLD, build, tokens
from torch import nn
from transformers.cache_utils import DynamicCache

import ipex_core
import ipex_quant
from ipex_core.packing.parameter import PackedWeight
from ipex_llm.model_runner import Runner
from ipex_llm.model_runner.dense import Part
from ipex_llm.optimization import optimize
from ipex_llm.patch import layer
from ipex_llm.patch.decoder import _silent
from ipex_llm.patch.layer import _call, _read, _Rows, _spans

pytestmark = [
    pytest.mark.usefixtures("small_weights_are_packed", "no_gradients"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

Tensor = torch.Tensor


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect how many rows each program ran."""
    found: list[int] = []
    run = Runner.run

    def counted(runner: Runner, cache: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _silent.get():  # not those of proofs
            found.append(hidden.shape[0])
        return run(runner, cache, hidden, *args, **kwargs)

    monkeypatch.setattr(Runner, "run", counted)
    return found


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def layers_of(model: Any) -> Any:
    return model.model.layers


def test_tables_of_rotations_grow_with_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of millions, or a number from a config.json, must not take gigabytes for seven tokens."""
    from ipex_llm import model_runner
    from ipex_llm.arch import RopePlan

    rope = model_runner.Rope(RopePlan("default", 8, 1e4, None, True, 1 << 40), 1 << 40)
    cos, _, _ = rope.tables(torch.arange(7), 7)
    assert cos.shape == (model_runner._ROWS, 4)
    monkeypatch.setattr(model_runner, "_ROWS", 8)
    small = model_runner.Rope(RopePlan("default", 8, 1e4, None, True, 1 << 40), 1 << 40)
    for longest in (7, 9, 100):
        found = small.tables(torch.arange(longest), longest)
        assert all(
            torch.equal(a[:longest], b[:longest])
            for a, b in zip(found, (cos, rope.tables(torch.arange(7), 7)[1]), strict=False)
        )
        assert longest <= found[0].shape[0] <= 2 * longest


def test_chunks_and_steps_share_a_cache(runs: list[int]) -> None:
    model = build("llama")
    fast = optimize(model, depth=2)
    ids = tokens(2, 100)
    want = model(ids).logits
    cache, parts = DynamicCache(), []
    for start, end in ((0, 5), (5, 6), (6, 90), (90, 91), (91, 100)):
        parts.append(fast(ids[:, start:end], past_key_values=cache).logits)
    close(torch.cat(parts, 1), want)
    assert cache.get_seq_length() == 100
    assert runs == [n for rows in (10, 2, 168, 2, 18) for n in [rows] * len(layers_of(model))]


def test_memory_grows_rarely_and_shows_what_is_filled() -> None:
    model = build("llama")
    fast = optimize(model, depth=2)
    cache = DynamicCache()
    ids = tokens(1, 200)
    places = set()
    for at in range(200):
        fast(ids[:, at : at + 1], past_key_values=cache)
        keys = cache.layers[0].keys if hasattr(cache, "layers") else cache.key_cache[0]
        assert keys.shape[2] == at + 1
        places.add(keys.data_ptr())
    assert len(places) <= 4


def test_others_may_exchange_the_views(runs: list[int]) -> None:
    """As beams, assisted decoding and contrastive search do."""
    model = build("llama")
    fast = optimize(model, depth=2)
    ids = tokens(2, 12)
    mine, theirs = DynamicCache(), DynamicCache()
    fast(ids[:, :8], past_key_values=mine)
    model(ids[:, :8], past_key_values=theirs)
    for cache in (mine, theirs):
        cache.reorder_cache(torch.tensor([1, 1]))
    close(
        fast(ids[:, 8:9], past_key_values=mine).logits,
        model(ids[:, 8:9], past_key_values=theirs).logits,
    )
    removed = -2 if hasattr(mine, "layers") else 7
    for cache in (mine, theirs):
        cache.crop(removed)
    close(
        fast(ids[:, 9:11], past_key_values=mine).logits,
        model(ids[:, 9:11], past_key_values=theirs).logits,
    )
    for cache in (mine, theirs):
        cache.batch_select_indices(torch.tensor([0]))
    close(
        fast(ids[:1, 11:], past_key_values=mine).logits,
        model(ids[:1, 11:], past_key_values=theirs).logits,
    )
    assert len(runs) == 4 * len(layers_of(model))


def test_a_copied_cache_is_another() -> None:
    """A prompt's cache that several continuations start from."""
    model = build("llama")
    fast = optimize(model, depth=2)
    ids = tokens(1, 12)
    prompt = DynamicCache()
    fast(ids[:, :8], past_key_values=prompt)
    first, second = copy.deepcopy(prompt), copy.deepcopy(prompt)
    fast(tokens(1, 4, seed=9), past_key_values=first)
    close(fast(ids[:, 8:], past_key_values=second).logits, model(ids).logits[:, 8:])
    close(fast(ids[:, 8:], past_key_values=prompt).logits, model(ids).logits[:, 8:])


def test_a_cache_that_the_stock_model_filled() -> None:
    model = build("llama")
    fast = optimize(model, depth=2)
    ids = tokens(1, 12)
    cache = DynamicCache()
    model(ids[:, :8], past_key_values=cache)
    close(fast(ids[:, 8:], past_key_values=cache).logits, model(ids).logits[:, 8:])


def padded(side: str) -> dict[str, Tensor]:
    ids = tokens(3, 9)
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, :7] = 0, 0
    return {"input_ids": ids, "attention_mask": mask if side == "left" else mask.flip(1)}


@pytest.mark.skipif(
    OLD, reason="transformers 4 has other masks, with which some layers run as stock"
)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "gpt_oss"])
def test_padding_in_front_runs_programs(name: str, runs: list[int]) -> None:
    model = build(name)
    fast = optimize(model, depth=2)
    assert next(row for row in ipex_core.explain(fast).rows if row.step == "llm").kernel
    given = padded("left")
    mask = given["attention_mask"]
    given["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    runs.clear()
    close(fast(**given).logits[mask.bool()], model(**given).logits[mask.bool()])
    blocks = len(runs)
    assert runs == [17] * blocks and blocks >= 2  # without the rows of padding
    # Chunks with and without rows of padding, steps, and rows that leave the windows.
    ids = torch.cat([given["input_ids"], tokens(3, 40, seed=2)], 1)
    mask = torch.cat([mask, torch.ones(3, 40, dtype=torch.int64)], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    want = model(ids, attention_mask=mask, position_ids=positions).logits
    cache, start = None, 0
    for end in (8, 9, 12, 30, *range(31, 50)):
        part = slice(start, end)
        result = fast(
            ids[:, part],
            attention_mask=mask[:, :end],
            position_ids=positions[:, part],
            past_key_values=cache,
            use_cache=True,
        )
        cache, seen = result.past_key_values, mask[:, part].bool()
        close(result.logits[seen], want[:, part][seen])
        start = end
    assert runs.count(3) == 20 * blocks  # a row of each sequence at a time


def test_compiled_code_reads_masks() -> None:
    """Dynamo knows no attributes of tensors, in which layers of one forward find what they have in common."""
    mask = torch.ones(2, 1, 3, 7, dtype=torch.bool).tril(4)
    mask[1, ..., :2] = False
    rows = _Rows(torch.zeros(2, 2, 20, 8), torch.zeros(2, 2, 20, 8))

    def slots(mask: Tensor) -> Tensor:
        return _call(mask, 2, 4, 3, rows, _spans(mask, 2, 0, 4, 3, -1)).step.slots

    compiled = torch.compile(slots, backend="eager")
    assert torch.equal(compiled(mask), slots(mask))
    assert torch.equal(slots(mask), slots(mask.clone()))


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_padding(beams: int) -> None:
    model = build("llama")
    fast = optimize(model, depth=2)
    more = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
    given = {**padded("left"), **more}
    want = model.generate(**given)
    assert torch.equal(fast.generate(**given), want)
    with torch.inference_mode():
        assert torch.equal(fast.generate(**given), want)


def test_a_text_that_is_padding_alone_so_far_runs_the_model_s_own_layers(runs: list[int]) -> None:
    model = build("llama")
    fast = optimize(model, depth=2)
    given = padded("left")
    mask = given["attention_mask"]
    want = model(**given).logits
    parts, cache = [], None
    for part in (slice(0, 5), slice(5, 9)):
        result = fast(
            given["input_ids"][:, part],
            attention_mask=mask[:, : part.stop],
            past_key_values=cache,
            use_cache=True,
        )
        cache = result.past_key_values
        parts.append(result.logits)
    close(torch.cat(parts, 1)[mask.bool()], want[mask.bool()])
    assert runs == [10] * len(layers_of(model))  # the second part, without its rows of padding


@pytest.mark.skipif(OLD, reason="transformers 4 has other masks for windows")
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_padding_at_the_end(name: str, inference: bool, runs: list[int]) -> None:
    """Rows of padding give what they give in the stock model as well, if they see anything."""
    model = build(name)
    fast = optimize(model, depth=2)
    given = padded("right")
    runs.clear()
    with torch.inference_mode() if inference else torch.no_grad():
        close(fast(**given).logits, model(**given).logits)
    assert len(runs) == len(layers_of(model))
    both = {**given, "attention_mask": given["attention_mask"] * padded("left")["attention_mask"]}
    seen = both["attention_mask"].bool()
    close(fast(**both).logits[seen], model(**both).logits[seen])


def test_masks_that_are_written_to_between_layers() -> None:
    for inference in (False, True):
        with torch.inference_mode() if inference else torch.no_grad():
            mask = torch.ones(2, 1, 3, 7, dtype=torch.bool).tril(4)
            assert _spans(mask, 2, 0, 4, 3, -1) is None
            mask[1, ..., :2] = False
            assert _spans(mask, 2, 0, 4, 3, -1) == ((0, 7), (2, 7))


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "phi3", "qwen3_moe"])
def test_own_layers_compute_on_packed_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacking the weights made calls of a model's own layers 1.5 times as long as those of the stock model."""
    model = build(name)
    fast = optimize(model, depth=2)
    unpacked = []
    recover = Part.__call__
    monkeypatch.setattr(Part, "__call__", lambda part: unpacked.append(part) or recover(part))
    given = padded("right")
    given["attention_mask"][:, 1] = 0  # a hole, with which no program runs
    seen = given["attention_mask"].bool()
    close(fast(**given).logits[seen], model(**given).logits[seen])
    assert not unpacked
    with torch.inference_mode():
        close(fast(**given).logits[seen], model(**given).logits[seen])
    assert not unpacked


def test_an_input_that_is_written_to_between_its_projections() -> None:
    model = build("llama")
    fast = optimize(model, depth=2)
    x = torch.randn(3, model.config.hidden_size)
    for written in (False, True):
        one, two = x.clone(), x.clone()
        for layers, rows in ((layers_of(fast), one), (layers_of(model), two)):
            attention = layers[0].self_attn
            found = [attention.q_proj(rows)]
            if written:
                rows.mul_(2)
            found += [attention.k_proj(rows), attention.v_proj(rows), attention.q_proj(rows)]
            if layers is layers_of(fast):
                got = found
        for a, b in zip(got, found, strict=True):
            close(a, b)
        assert list(one.__dict__) in ([], ["_ipex_llm"])


@pytest.mark.parametrize("small", [0, 2048])
def test_masks(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "SMALL", small)
    low = torch.finfo(torch.float32).min
    causal = torch.ones(3, 7, dtype=torch.bool).tril(4)[None, None]

    def read(mask: Tensor, start: int, past: int, count: int, window: int) -> Any:
        return _read(mask, 2, start, past, count, window)

    assert read(causal, 0, 4, 3, -1) is None
    assert read(torch.where(causal, 0.0, low), 0, 4, 3, -1) is None
    assert read(torch.where(causal, 0.0, -torch.inf), 0, 4, 3, -1) is None
    other = "the attention mask has more than what comes later and padding at both ends"
    assert read(torch.where(causal, -0.5, low), 0, 4, 3, -1) == other  # ALiBi
    assert read(torch.ones_like(causal), 0, 4, 3, -1) == other
    assert read(torch.zeros_like(causal), 0, 4, 3, -1) == other
    assert read(causal[0, 0], 0, 4, 3, -1) == other
    assert read(causal[..., :-1], 0, 4, 3, -1) == other
    assert read(torch.cat([causal, causal[..., :1]], -1), 0, 4, 3, -1) is None
    assert read(causal, 0, 4, 3, 2) == other
    window = causal & torch.ones(3, 7, dtype=torch.bool).triu(2)
    assert read(window, 0, 4, 3, 2) is None
    assert read(window[..., 2:], 2, 4, 3, 2) is None
    assert read(window, 0, 4, 3, -1) == other
    # Padding.
    both = causal.repeat(2, 1, 1, 1)
    both[1, ..., :2] = False
    assert read(both, 0, 4, 3, -1) == ((0, 7), (2, 7))
    assert read(torch.where(both, 0.0, low), 0, 4, 3, -1) == ((0, 7), (2, 7))
    assert read(both[1:], 0, 4, 3, -1) == ((2, 7), (2, 7))
    late = both.clone()
    late[1, ..., 5:] = False  # padding at the end
    assert read(late, 0, 4, 3, -1) == ((0, 7), (2, 5))
    late[1, :, 2, 6] = True
    assert read(late, 0, 4, 3, -1) == other
    late[1, ..., 4:] = False  # no row is left that is no padding
    assert read(late, 0, 4, 3, -1) == other
    both[1, ..., 3] = False
    assert read(both, 0, 4, 3, -1) == other  # a hole
    late = causal.repeat(2, 1, 1, 1)
    late[1, ..., :5] = False  # the first of three rows is padding, whatever it sees
    assert read(late, 0, 4, 3, -1) == ((0, 7), (5, 7))
    late[1, :, 0] = True
    assert read(late, 0, 4, 3, -1) == other  # sees what comes later: not where padding ends
    heads = both.repeat(1, 2, 1, 1)
    heads[:, 1] = causal
    assert read(heads, 0, 4, 3, -1) == other


@pytest.mark.skipif(OLD, reason="transformers 4 has another cache for windows")
def test_windows_that_leave_rows_behind(runs: list[int]) -> None:
    model = build("gemma3")
    fast = optimize(model, depth=2)
    ids = tokens(1, 60)
    cache = DynamicCache(config=model.config)
    parts = [fast(ids[:, :20], past_key_values=cache).logits]
    parts += [fast(ids[:, at : at + 1], past_key_values=cache).logits for at in range(20, 60)]
    close(torch.cat(parts, 1), model(ids).logits)
    assert len(runs) == 41 * len(layers_of(model))


@pytest.mark.parametrize("depth", [2, 3])
def test_hooks_added_later_are_called(depth: int, runs: list[int]) -> None:
    fast = optimize(build("llama"), depth=depth)
    if not OLD:  # which leaves hooks of transformers
        fast(tokens(1, 4), output_attentions=True)
    seen = []
    handle = layers_of(fast)[0].mlp.register_forward_hook(lambda *a: seen.append(1))
    runs.clear()
    want = fast(tokens(1, 4)).logits
    fast.generate(tokens(1, 4), max_new_tokens=1, do_sample=False)
    assert seen == [1, 1]
    handle.remove()
    runs.clear()
    close(fast(tokens(1, 4)).logits, want)
    assert seen == [1, 1]
    assert runs


def other_mlp(model: Any) -> None:
    layers_of(model)[0].mlp = nn.Sequential(layers_of(model)[0].mlp, nn.Tanh())


def fewer_layers(model: Any) -> None:
    del layers_of(model)[1]


def other_head(model: Any) -> None:
    model.set_output_embeddings(build("llama_bias").lm_head)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("change", [other_mlp, fewer_layers, other_head])
def test_modules_exchanged_later_are_called(change: Any, depth: int) -> None:
    """As adapters are."""
    pair = [build("llama"), optimize(build("llama"), depth=depth)]
    for model in pair:
        change(model)
    close(pair[1](tokens(2, 6)).logits, pair[0](tokens(2, 6)).logits)
    got, want = (m.generate(tokens(2, 6), max_new_tokens=4, do_sample=False) for m in pair)
    assert torch.equal(got, want)


def test_hooks_there_before_are_called_by_the_whole() -> None:
    model, seen = build("llama"), []
    layers_of(model)[0].register_forward_hook(lambda *a: seen.append(1))
    fast = optimize(model, inplace=True)
    seen.clear()
    fast(tokens(1, 4))
    assert seen == [1]


def test_hooks_there_before_keep_a_layer_as_it_is() -> None:
    model = build("llama")
    layers_of(model)[0].mlp.register_forward_hook(lambda *a: None)
    fast = optimize(model, depth=2, inplace=True)
    rows = [row for row in ipex_core.explain(fast).rows if row.step == "layer"]
    assert [row.done for row in rows] == [False, *[True] * (len(rows) - 1)]
    assert "hooks" in rows[0].text


def test_new_weights_are_used(runs: list[int]) -> None:
    model, other = build("llama"), build("llama")
    for parameter in other.parameters():
        parameter.mul_(1.25)
    fast = optimize(model, depth=2)
    fast.load_state_dict(other.state_dict())
    close(fast(tokens(1, 6)).logits, other(tokens(1, 6)).logits)
    assert runs


_CHANGED = (
    *("mixtral", "gpt_oss", "gemma4_moe", "stablelm_parallel", "nemotron", "inkling"),
    *("inkling2_loop", "gemma3n", "apertus", "gptj"),
)


@pytest.mark.parametrize("name", [name for name in _CHANGED if name in CAUSAL])
def test_each_changed_tensor_is_seen(name: str) -> None:
    """Routers, norms and buffers whose numbers are computed, and all others: one of each kind."""
    model, ids = build(name), tokens(1, 8)
    fast = optimize(model)
    tensors = [*model.named_buffers(), *model.named_parameters()]
    kinds = {
        re.sub(r"\d+", "", key): key for key, one in reversed(tensors) if one.is_floating_point()
    }
    for key in kinds.values():
        pair = [operator.attrgetter(key)(one) for one in (model, fast)]
        if isinstance(pair[1], PackedWeight):
            continue  # it refuses changes
        before = model(ids).logits
        for one in pair:
            one.mul_(1.5)
        exact = model(ids).logits
        off = (fast(ids).logits - exact).abs().max()
        assert off <= 1e-3 + 0.01 * (exact - before).abs().max(), key


def test_restore_gives_the_same_model_back() -> None:
    model = build("llama")
    fast = ipex_core.restore(optimize(model, depth=2))
    assert [type(m) for m in fast.modules()] == [type(m) for m in model.modules()]
    for (name, a), b in zip(model.state_dict().items(), fast.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert not any(key.startswith("_ipex") for m in fast.modules() for key in m.__dict__)


def test_copies_and_files(runs: list[int]) -> None:
    model = build("llama")
    fast = optimize(model, depth=2)
    want = model(tokens(1, 6)).logits
    close(copy.deepcopy(fast)(tokens(1, 6)).logits, want)
    assert runs
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    close(torch.load(file, weights_only=False)(tokens(1, 6)).logits, want)


def test_quantized_layers(runs: list[int]) -> None:
    model = build("llama")
    config = ipex_quant.woq_qconfig(weight_dtype=ipex_quant.WoqWeightDtype.INT8)
    fast = optimize(model, depth=2, quantization_config=config)
    whole = optimize(model, quantization_config=config)
    close(fast(tokens(1, 6)).logits, whole(tokens(1, 6)).logits)
    assert len(runs) == len(layers_of(model)) + 1


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("depth", [2, 3])
def test_training_and_gradients_run_the_model_s_own_layers(
    depth: int, frozen: bool, runs: list[int]
) -> None:
    """Also where inputs alone need a gradient, as in prompt tuning."""
    fast = optimize(build("llama").requires_grad_(not frozen), depth=depth)
    with torch.enable_grad():
        embeds = torch.randn(1, 4, fast.config.hidden_size, requires_grad=True)
        fast(inputs_embeds=embeds).logits.sum().backward()
    assert embeds.grad is not None
    assert bool(embeds.grad.abs().sum() > 0)
    assert runs == []


@pytest.mark.parametrize("depth", [0, 4, "2", None, 1.5])
def test_wrong_depth(depth: Any) -> None:
    with pytest.raises(ValueError, match="optimize: depth must be 1, 2 or 3, got"):
        optimize(build("llama"), depth=depth)
