# SPDX-License-Identifier: Apache-2.0
"""The ops of vLLM's C++ extension that its Python calls: what they compute, and that they are defined once."""

from __future__ import annotations

import types

import pytest
import torch
from torch.nn import functional

from ipex_core.ops.sample_token import uniform
from ipex_llm.integrations.vllm import extension_ops

NEAR = {"rtol": 1e-5, "atol": 1e-5}


def test_ops_of_the_extension_are_defined_once():
    first = extension_ops.define()
    names = {*extension_ops.NATIVE, *extension_ops.OPS}
    assert {*first} <= names and extension_ops.define() == ()
    for name in names:
        assert hasattr(torch.ops._C, name)
    torch.ops._C.init_cpu_memory_env([0])
    logits = torch.randn(5, 70)
    torch.testing.assert_close(torch.ops._C.greedy_argmax(logits), logits.argmax(-1))
    traced = torch.compile(torch.ops._C.greedy_argmax, backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(logits), logits.argmax(-1))


def test_activations_are_written_to_their_outputs():
    extension_ops.define()
    x = torch.randn(3, 40)
    tanh = functional.gelu(x, approximate="tanh")
    for name, wanted in (
        ("gelu_new", tanh),
        ("gelu_fast", tanh),
        ("gelu_quick", x * (1.702 * x).sigmoid()),
    ):
        out = torch.empty_like(x)
        getattr(torch.ops._C, name)(out, x)
        torch.testing.assert_close(out, wanted, **NEAR)


def test_latent_attention_over_a_paged_cache():
    extension_ops.define()
    heads, rank, rotary, block = 3, 16, 8, 4
    cache = torch.randn(6, block, rank + rotary)
    query = torch.randn(2, heads, rank + rotary)
    table = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32)
    lengths = torch.tensor([6, 3], dtype=torch.int32)
    out = torch.empty(2, heads, rank)
    torch.ops._C.mla_decode_kvcache(out, query, cache, 0.3, table, lengths)
    for row, length in enumerate(lengths.tolist()):
        keys = cache[table[row].long()].flatten(0, 1)[:length]
        weights = (query[row] @ keys.T * 0.3).softmax(-1)
        torch.testing.assert_close(out[row], weights @ keys[:, :rank], **NEAR)


def test_weights_are_rounded_to_fp8():
    extension_ops.define()
    x = torch.randn(5, 12)
    out, kind = torch.empty(5, 12, dtype=torch.float8_e4m3fn), torch.float8_e4m3fn
    one, rows = torch.empty(1), torch.empty(5, 1)
    torch.ops._C.dynamic_scaled_fp8_quant(out, x, one)
    torch.testing.assert_close(one[0], x.abs().max() / 448)
    assert torch.equal(out.float(), (x / one).to(kind).float())
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(out, x, rows)
    torch.testing.assert_close(rows, x.abs().amax(1, keepdim=True) / 448)
    assert torch.equal(out.float(), (x / rows).to(kind).float())
    for scale, group in (
        (torch.rand(1) + 0.5, None),
        (torch.rand(5) + 0.5, (1, -1)),
        (torch.rand(12) + 0.5, (-1, 1)),
        (torch.rand(3, 3) + 0.5, (2, 4)),
    ):
        wide = scale
        if group == (1, -1):
            wide = scale[:, None]
        elif group == (2, 4):
            wide = scale.repeat_interleave(2, 0).repeat_interleave(4, 1)[:5]
        torch.ops._C.static_scaled_fp8_quant(out, x, scale, group)
        assert torch.equal(out.float(), (x / wide).to(kind).float())
    with pytest.raises(ValueError, match="group_shape must be given"):
        torch.ops._C.static_scaled_fp8_quant(out, x, torch.ones(5))


def test_slots_follow_the_block_tables():
    extension_ops.define()
    table = torch.tensor([[5, 2], [0, 7], [9, 9]], dtype=torch.int32)
    slots = torch.full((9,), 77)
    positions = torch.tensor([0, 1, 6, 3, 4, 5, 0, 0])
    starts = torch.tensor([0, 3, 6], dtype=torch.int32)
    torch.ops._C.compute_slot_mapping_kernel_impl(starts, positions, table, slots, 4)
    assert slots.tolist() == [20, 21, 10, 3, 28, 29, -1, -1, -1]


@pytest.mark.parametrize("neox", [True, False])
def test_rotary_turns_pairs(neox):
    extension_ops.define()
    tokens, size, rotary = 6, 16, 8
    positions = torch.tensor([3, 0, 1, 2, 9, 5])
    angles = torch.randn(10, rotary // 2)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    query, key = torch.randn(tokens, 3 * size), torch.randn(tokens, 2 * size)

    def turned(x, offset=0, sign=1.0):
        x = x.view(tokens, -1, size).clone()
        part = x[..., offset : offset + rotary]
        cos, sin = (t[positions][:, None] for t in table.chunk(2, -1))
        if neox:
            a, b = part.chunk(2, -1)
            part.copy_(torch.cat([a * cos - b * sin * sign, b * cos + a * sin * sign], -1))
        else:
            a, b = part[..., ::2].clone(), part[..., 1::2].clone()
            part[..., ::2] = a * cos - b * sin * sign
            part[..., 1::2] = b * cos + a * sin * sign
        return x.view(tokens, -1)

    q, k = query.clone(), key.clone()
    torch.ops._C.rotary_embedding(positions, q, k, size, table, neox)
    torch.testing.assert_close(q, turned(query), **NEAR)
    torch.testing.assert_close(k, turned(key), **NEAR)
    q = query.clone()
    torch.ops._C.rotary_embedding(positions, q, None, size, table, neox, 4, True)
    torch.testing.assert_close(q, turned(query, 4, -1.0), **NEAR)


def test_drawn_tokens_follow_the_seeds_and_the_probabilities():
    extension_ops.define()
    count = 4000
    logits = torch.tensor([0.5, 0.3, 0.2, 0.0]).log().repeat(count, 1)
    seeds = torch.arange(count)
    first = torch.ops._C.fused_gumbel_argmax(logits, seeds)
    assert torch.equal(first, torch.ops._C.fused_gumbel_argmax(logits, seeds))
    share = first.bincount(minlength=4) / count
    torch.testing.assert_close(share, torch.tensor([0.5, 0.3, 0.2, 0.0]), rtol=0, atol=0.03)
    numbers = uniform(torch.arange(-count, count))
    assert numbers.min() >= 0 and numbers.max() < 1
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.02)


def test_kernels_without_the_ops_of_vllm_are_told(monkeypatch):
    lacking = types.SimpleNamespace(version="0.1", define=lambda library, name: False)
    monkeypatch.setattr("ipex_core.kernels.providers.provider_for", lambda device: lacking)
    monkeypatch.setitem(extension_ops.NATIVE, "not_of_this_release", lambda *given: None)
    with pytest.raises(RuntimeError, match=r"must have not_of_this_release, got 0\.1: pip install"):
        extension_ops.define()


# --- speculative decoding ---------------------------------------------------------------------------------------------


def speculative(name, *arguments):
    extension_ops.define()
    getattr(torch.ops._C, f"{name}_kernel_impl")(*arguments)


def test_greedy_drafts_are_kept_up_to_the_first_that_differs():
    out = torch.full((4, 4), -1)
    sums, drafts = torch.tensor([3, 5, 5, 6]), torch.tensor([1, 2, 3, 4, 9, 6])
    best, bonus = torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([[10], [11], [12], [13]])
    greedy = torch.tensor([True, True, True, False])
    speculative("rejection_greedy_sample", out, sums, drafts, best, bonus, greedy, 3)
    assert out.tolist() == [[1, 2, 3, 10], [4, 5, -1, -1], [12, -1, -1, -1], [-1] * 4]
    speculative("rejection_greedy_sample", out, sums, drafts, best, bonus, None, 3)
    assert out[3].tolist() == [6, 13, -1, -1]


@pytest.mark.parametrize("known", [True, False])
def test_sampled_drafts_are_accepted_by_their_probability(known):
    out = torch.full((3, 3), -1)
    sums, drafts = torch.tensor([2, 4, 5]), torch.tensor([0, 1, 0, 1, -1])
    target = torch.tensor([[0.5, 0.5]] * 5)
    draft = torch.tensor([[0.25, 0.75]] * 5) if known else None
    noise = torch.tensor([0.45, 0.45, 0.45, 0.9, 0.0])
    spare, bonus = torch.tensor([5, 6, 7, 8, 9]), torch.tensor([10, 11, 12])
    greedy = torch.zeros(3, dtype=torch.bool)
    speculative(
        *("rejection_random_sample", out, sums, drafts, draft, target, bonus, spare, noise),
        *(greedy, 2, 2, not known),
    )
    assert out.tolist() == [[0, 1, 10], [0, 8, -1], [9, -1, -1]]
    out.fill_(-1)
    speculative(
        *("rejection_random_sample", out, sums, drafts, draft, target, bonus, spare, noise),
        *(~greedy, 2, 2, not known),
    )
    assert (out == -1).all()


def test_a_number_for_each_draft_token():
    out = torch.full((6,), -1)
    speculative("expand", out, torch.tensor([7, -1, 3]), torch.tensor([2, 3, 5]), -1, 0)
    assert out.tolist() == [7, 7, 0, 3, 3, -1]


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_tokens_in_the_place_of_drafts(shape):
    out, sums = torch.zeros(shape, dtype=torch.int64), torch.tensor([1, 1, 3])
    target = torch.tensor([[0.6, 0.3, 0.1]] * 3)
    noise = torch.tensor([[1.0, 1.0, 1.0], [1.0, 9.0, 1.0], [1.0, 1.0, 9.0]])
    drafts = torch.tensor([0, 1, 2]).view(shape)
    speculative("sample_recovered_tokens", out, sums, drafts, None, target, noise, 3, True)
    assert out.flatten().tolist() == [1, 2, 0]
    draft = torch.tensor([[0.8, 0.1, 0.1]] * 3)
    speculative("sample_recovered_tokens", out, sums, drafts, draft, target, noise, 3, False)
    assert out.flatten().tolist() == [1, 1, 1]


def test_drafts_that_were_refused_are_counted():
    places, refused = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    speculative(
        *("eagle_prepare_inputs_padded", torch.tensor([2, 2, 5]), torch.tensor([1, 1, 4])),
        *(torch.tensor([0, 3, 4, 8], dtype=torch.int32), places, refused, 3),
    )
    assert refused.tolist() == [2, 0, 0] and places.tolist() == [0, 3, 7]


def test_the_next_token_is_the_last_that_stays():
    sampled = torch.tensor([[5, 6, -1], [7, -1, -1], [-1, -1, -1], [1, 2, 3]])
    following, count = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    discard = torch.tensor([False, False, False, True])
    spare = torch.tensor([20, 21, 22, 23])
    speculative(
        "eagle_prepare_next_token_padded", sampled, discard, spare, following, count, 50, 3, 4
    )
    assert following.tolist() == [6, 7, 22, 23] and count.tolist() == [2, 1, 0, 0]


def test_a_draft_step_goes_on_by_one_position():
    lengths = torch.tensor([4, 10], dtype=torch.int32)
    positions, slots = torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    table = torch.tensor([[3, 5], [6, 7]], dtype=torch.int32)
    speculative(
        *("eagle_step_slot_mapping_metadata", torch.tensor([3, 9]), table, lengths),
        *(positions, slots, 4, 10, -1),
    )
    assert positions.tolist() == [4, 0] and slots.tolist() == [20, -1, -1]
    assert lengths.tolist() == [5, 1]


@pytest.mark.parametrize("shift", [True, False])
def test_inputs_of_a_draft_model(shift):
    # Two sequences of three tokens; the last token of the second was refused.
    ids, positions = torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([7, 8, 9, 0, 1, 2])
    extra = 2
    size = 6 + 2 * (extra - shift)
    tokens, places = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    away, masked = torch.zeros(2, size, dtype=torch.bool)
    new, hidden = torch.zeros(4, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    speculative(
        *("copy_and_expand_eagle_inputs", ids, positions, torch.tensor([30, 31]), tokens, places),
        *(away, masked, new, hidden, torch.tensor([0, 3, 6]), torch.tensor([2, 4])),
        *(-9, 99, 6, extra, shift),
    )
    if shift:
        assert tokens.tolist() == [2, 3, 30, 99, 5, 31, 99, -9]
        assert places.tolist() == [7, 8, 9, 10, 0, 1, 2, 0]
        assert new.tolist() == [2, 3, 5, 6] and hidden.tolist() == [0, 1, 2, 4, 5, 6]
    else:
        assert tokens.tolist() == [1, 2, 3, 30, 99, 4, 5, 31, 99, -9]
        assert places.tolist() == [7, 8, 9, 10, 11, 0, 1, 2, 3, 0]
        assert new.tolist() == [3, 4, 7, 8]
    assert away.tolist() == [token == -9 for token in tokens]
    assert masked.tolist() == [token == 99 for token in tokens]
