# SPDX-License-Identifier: Apache-2.0
"""The ops that vLLM's recurrent layers call, against their definitions, on caches whose rows lie apart."""

from __future__ import annotations

import pytest
import torch
import vllm_stand_in as stand_in
from torch.nn import functional as F

from ipex_llm.integrations.vllm import ranks
from ipex_llm.integrations.vllm import state_ops as ops

HEADS, GROUPS, KEYS, VALUES = 4, 2, 16, 24


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def cache(*shape, dtype=torch.float32, seed=0):
    """Return rows of a cache of several layers: each is contiguous, and the next one is not behind it."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(shape[0], 3, *shape[1:], generator=generator)
    return wide.to(dtype)[:, 1]


def randn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- the short convolution --------------------------------------------------------------------------------------------


def convolved(x, past, weight, bias, silu):
    """Return rows and the history behind them, from x ``[T, D]`` and what was before ``[D, W - 1]``."""
    rows = torch.cat([past, x.t()], 1)
    y = F.conv1d(rows[None], weight[:, None], bias, groups=x.shape[1])[0].t()
    return (F.silu(y) if silu else y), rows[:, rows.shape[1] - past.shape[1] :]


@pytest.mark.parametrize("silu", [False, True])
def test_convolution_of_prompts(silu):
    weight, bias, x = randn(6, 4), randn(6, seed=2), randn(9, 6, seed=3)
    states = cache(5, 6, 3)
    before = states.clone()
    given = (int32(0, 2, 9), int32(3, 1), torch.tensor([True, False]), silu, -1, True)
    y = ops.causal_conv1d_fwd_cpu(x.t(), weight[:, None], bias, states, *given)
    first, kept = convolved(x[:2], before[3], weight, bias, silu)
    second, other = convolved(x[2:], torch.zeros(6, 3), weight, bias, silu)
    torch.testing.assert_close(y.t(), torch.cat([first, second]))
    torch.testing.assert_close(states[3], kept)
    torch.testing.assert_close(states[1], other)
    assert torch.equal(states[[0, 2, 4]], before[[0, 2, 4]])


def test_convolution_of_steps():
    weight, x = randn(6, 4), randn(3, 6, seed=3)
    for slots in (int32(4, 0, 2), int32(4, -1, 2)):
        states = cache(5, 6, 3)
        other, before = states.clone(), states.clone()
        y = ops.causal_conv1d_update_cpu(x, states, weight[:, None], None, True, None, slots, -1, 1)
        same = ops.causal_conv1d_update_cpu_vec(x, other, weight, None, "silu", slots, None, -1)
        assert torch.equal(y, same) and torch.equal(states, other)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                wanted, kept = convolved(x[row : row + 1], before[slot], weight, None, True)
                torch.testing.assert_close(y[row : row + 1], wanted)
                torch.testing.assert_close(states[slot], kept)
        untouched = [i for i in range(5) if i not in slots.tolist()]
        assert torch.equal(states[untouched], before[untouched])


def test_convolution_of_several_rows_without_slots():
    weight, x, states = randn(6, 3), randn(5, 6, seed=3), cache(2, 6, 2)
    before = states.clone()
    starts = int32(0, 4, 5)
    y = ops.causal_conv1d_update_cpu_vec(x, states, weight, None, None, None, starts, 0)
    for i, rows in enumerate((x[:4], x[4:])):
        wanted, kept = convolved(rows, before[i], weight, None, False)
        torch.testing.assert_close(y[4 * i : 4 * i + len(rows)], wanted)
        torch.testing.assert_close(states[i], kept)


@pytest.mark.parametrize("length", [1, 3])
def test_convolution_of_rows_beside_each_other(length):
    """Rows that are padding leave their state, vLLM's block 0, as it is."""
    weight, bias, x, states = randn(6, 3), randn(6, seed=2), randn(4, 6, length), cache(5, 6, 2)
    before, slots = states.clone(), int32(3, 0, 1, 0)
    y = ops.causal_conv1d_update_cpu_vec(x, states, weight, bias, "silu", slots, None, 0)
    assert y.shape == x.shape
    for row, slot in ((0, 3), (2, 1)):
        wanted, kept = convolved(x[row].t(), before[slot], weight, bias, True)
        torch.testing.assert_close(y[row].t(), wanted)
        torch.testing.assert_close(states[slot], kept)
    assert torch.equal(states[[0, 2, 4]], before[[0, 2, 4]])


def test_convolution_of_drafts_goes_on_behind_what_was_accepted():
    weight, drafts = randn(6, 4), 2
    rows = randn(2, 1 + drafts, 6, seed=3)
    states = cache(4, 6, 3 + drafts)
    before, slots, accepted = states.clone(), int32(3, 1), int32(1, 3)
    given = (weight[:, None], None, True, accepted, slots, -1, True)
    y = ops.causal_conv1d_update_cpu(rows, states, *given)
    for i, (slot, count) in enumerate(zip((3, 1), (1, 3), strict=True)):
        past = before[slot][:, count - 1 : count + 2]
        wanted, _ = convolved(rows[i], past, weight, None, True)
        torch.testing.assert_close(y[i], wanted)
        torch.testing.assert_close(states[slot], torch.cat([past, rows[i].t()], 1)[:, 1:])


# -- the gated delta rule ---------------------------------------------------------------------------------------------


class Delta:
    """Rows of the rule, and its definition."""

    def __init__(self, count):
        self.q, self.k = randn(count, GROUPS, KEYS, seed=1), randn(count, GROUPS, KEYS, seed=2)
        self.v = randn(count, HEADS, VALUES, seed=3)
        self.a, self.b = randn(count, HEADS, seed=4), randn(count, HEADS, seed=5)
        self.A_log, self.dt_bias = randn(HEADS, seed=6) / 4, randn(HEADS, seed=7)

    def __call__(self, state, rows):
        y = []
        for t in rows:
            q, k = (
                F.normalize(x[t], dim=-1).repeat_interleave(HEADS // GROUPS, 0)
                for x in (self.q, self.k)
            )
            decay = torch.exp(-self.A_log.exp() * F.softplus(self.a[t] + self.dt_bias))
            state = state * decay[:, None, None]
            known = torch.einsum("hk,hkv->hv", k, state)
            new = (self.v[t] - known) * torch.sigmoid(self.b[t])[:, None]
            state = state + k[:, :, None] * new[:, None]
            y.append(torch.einsum("hk,hkv->hv", q, state) * KEYS**-0.5)
        return torch.stack(y), state


def test_delta_rule_of_prompts():
    rule, states = Delta(7), cache(5, HEADS, KEYS, VALUES)
    before = states.clone()
    gates = ops.fused_gdn_gating_cpu(rule.A_log, rule.a, rule.b, rule.dt_bias)
    rows = (x[None] for x in (rule.q, rule.k, rule.v))
    options = (True, int32(0, 4, 7), False, True, int32(3, 1))
    y, kept = ops.chunk_gated_delta_rule_cpu(*rows, *gates, states, *options)
    first, one = rule(before[3], range(4))
    second, two = rule(before[1], range(4, 7))
    torch.testing.assert_close(y[0], torch.cat([first, second]))
    torch.testing.assert_close(states[3], one)
    torch.testing.assert_close(states[1], two)
    assert kept is states and torch.equal(states[[0, 2, 4]], before[[0, 2, 4]])


def test_decay_of_one_and_strength_of_one_stay_exact():
    # exp(0) and sigmoid(inf): a state that is kept, and a value that takes its place.
    rows = (torch.ones(1, 1, 1, KEYS), torch.ones(1, 1, 1, KEYS), torch.full((1, 1, 1, 8), 3.0))
    states = torch.randn(2, 1, KEYS, 8)
    gates = (torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    options = (True, int32(0, 1), False, True, int32(1))
    y, _ = ops.chunk_gated_delta_rule_cpu(*rows, *gates, states, *options)
    torch.testing.assert_close(y, torch.full_like(y, 3.0 * KEYS**-0.5))


def test_delta_rule_takes_rows_of_sequences_only():
    rows = (torch.ones(1, 1, 1, KEYS),) * 2
    with pytest.raises(ValueError, match="head_first must be False"):
        ops.chunk_gated_delta_rule_cpu(
            *rows,
            torch.ones(1, 1, 1, 8),
            torch.zeros(1, 1, 1),
            torch.ones(1, 1, 1),
            torch.zeros(1, 1, KEYS, 8),
            True,
            int32(0, 1),
            True,
            True,
            int32(0),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_delta_rule_of_steps(dtype):
    rule, states = Delta(3), cache(5, HEADS, KEYS, VALUES, dtype=dtype)
    before, slots = states.clone(), int32(4, 0, 2)
    q, k, v = (x[None] for x in (rule.q, rule.k, rule.v))
    gates = (rule.A_log, rule.dt_bias, q, k, v, rule.a, rule.b)
    starts = int32(0, 1, 2, 3)
    y = ops.fused_sigmoid_gating_delta_rule_update_cpu(*gates, states, slots, starts, True)
    assert y.shape == (3, 1, HEADS, VALUES)
    for row, slot in enumerate(slots.tolist()):
        wanted, kept = rule(before[slot].float(), [row])
        torch.testing.assert_close(y[row], wanted)
        torch.testing.assert_close(states[slot], kept.to(dtype))


def test_delta_rule_of_drafts_leaves_the_state_after_each():
    rule, states = Delta(5), cache(8, HEADS, KEYS, VALUES)
    before = states.clone()
    slots, accepted, starts = int32(1, 2, 3, 5, 6, 7).view(2, 3), int32(2, 1), int32(0, 3, 5)
    gates = (rule.A_log, rule.dt_bias, rule.q, rule.k, rule.v, rule.a, rule.b)
    given = (states, slots, accepted, starts, True)
    y = ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(*gates, *given)
    for first, begin, rows in ((2, 1, range(3)), (5, 5, range(3, 5))):
        state = before[first]
        for step, row in enumerate(rows):
            wanted, state = rule(state, [row])
            torch.testing.assert_close(y[row : row + 1], wanted)
            torch.testing.assert_close(states[begin + step], state)
    assert torch.equal(states[[0, 4, 7]], before[[0, 4, 7]])


# -- Mamba-2 ----------------------------------------------------------------------------------------------------------


class Scan:
    """Rows of the scan, and its definition."""

    def __init__(self, count):
        self.x, self.dt = randn(count, HEADS, 6, seed=1), randn(count, HEADS, seed=2)
        self.B, self.C = randn(count, GROUPS, 8, seed=3), randn(count, GROUPS, 8, seed=4)
        self.A, self.D, self.bias = -randn(HEADS).exp(), randn(HEADS, seed=5), randn(HEADS, seed=6)
        self.z = randn(count, HEADS, 6, seed=7)

    def steps(self):
        return F.softplus(self.dt + self.bias)

    def __call__(self, state, rows, gated):
        y, steps = [], self.steps()
        for t in rows:
            B, C = (v[t].repeat_interleave(HEADS // GROUPS, 0) for v in (self.B, self.C))
            state = state * torch.exp(self.A * steps[t])[:, None, None]
            state = state + (self.x[t] * steps[t][:, None])[:, :, None] * B[:, None]
            one = (state * C[:, None]).sum(-1) + self.x[t] * self.D[:, None]
            y.append(one * F.silu(self.z[t]) if gated else one)
        return torch.stack(y), state


@pytest.mark.parametrize("gated", [False, True])
def test_scan_of_prompts(gated):
    scan, state = Scan(7), randn(2, HEADS, 6, 8, seed=9)
    before, out = state.clone(), torch.empty(7, HEADS, 6)
    z = scan.z if gated else None
    ops.mamba_chunk_scan_fwd_cpu(
        out, state, scan.x, scan.steps(), scan.A, scan.B, scan.C, scan.D, z, int32(0, 4, 7)
    )
    first, one = scan(before[0], range(4), gated)
    second, two = scan(before[1], range(4, 7), gated)
    torch.testing.assert_close(out, torch.cat([first, second]))
    torch.testing.assert_close(state, torch.stack([one, two]))


def steps_of(scan, softplus):
    """Return dt, A, B, C, D, z, dt_bias as vLLM repeats them, and whether softplus is to be done."""
    dt, bias = (scan.dt, scan.bias) if softplus else (scan.steps(), None)
    A = scan.A[:, None, None].expand(-1, 6, 8)
    D = scan.D[:, None].expand(-1, 6)
    bias = None if bias is None else bias[:, None].expand(-1, 6)
    return dt[..., None].expand(-1, -1, 6), A, scan.B, scan.C, D, scan.z, bias, softplus


@pytest.mark.parametrize("softplus", [False, True])
def test_scan_of_steps(softplus):
    scan, states = Scan(3), cache(5, HEADS, 6, 8)
    before, slots, target = states.clone(), int32(4, 0, 2), int32(1, 0, 3)
    out = torch.empty(3, HEADS, 6)
    given = steps_of(scan, softplus)
    ops.selective_state_update_cpu(states, scan.x, *given, slots, target, 0, out, None, None)
    for row, (slot, goal) in enumerate(zip((4, 0, 2), (1, 0, 3), strict=True)):
        wanted, kept = scan(before[slot], [row], True)
        torch.testing.assert_close(out[row : row + 1], wanted)
        torch.testing.assert_close(states[goal], kept)


def test_scan_of_drafts_leaves_the_state_after_each():
    scan, states = Scan(3), cache(5, HEADS, 6, 8)
    before, out = states.clone(), torch.empty(3, HEADS, 6)
    slots = int32(1, 2, 3, 4).view(2, 2)
    places = (slots, slots, 0, out, int32(2, 1), int32(0, 2, 3))
    ops.selective_state_update_cpu(states, scan.x, *steps_of(scan, True), *places)
    first, one = scan(before[2], [0], True)
    second, two = scan(one, [1], True)
    third, three = scan(before[3], [2], True)
    torch.testing.assert_close(out, torch.cat([first, second, third]))
    torch.testing.assert_close(states[1:4], torch.stack([one, two, three]))


def test_mamba_1_is_refused():
    scan, states = Scan(1), cache(2, HEADS, 6, 8)
    dt, _, *rest = steps_of(scan, True)
    given = (dt, randn(HEADS, 6, 8), *rest, int32(1), None, 0, torch.empty(1, HEADS, 6), None, None)
    with pytest.raises(ValueError, match="A must be one number for each head, as in Mamba-2"):
        ops.selective_state_update_cpu(states, scan.x, *given)


# -- what the platform allows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "drafts", "kept"),
    [
        ({"linear_num_value_heads": 4}, False, True),
        ({"linear_num_value_heads": 4}, True, False),
        ({"conv_L_cache": 3}, False, True),
        ({"mamba_n_heads": 4}, False, False),
        ({"conv_L_cache": 3}, True, None),
        ({"mamba_n_heads": 4}, True, None),
    ],
)
def test_prefix_caching_and_drafts_of_recurrent_models(monkeypatch, text, drafts, kept, caplog):
    stand_in.install(monkeypatch)
    monkeypatch.setattr(ranks, "bind", lambda count: None)
    platform = stand_in.ours("cpu_platform").IpexPlatform
    config = stand_in.vllm_config()
    model, cached = config.model_config, config.cache_config
    model.has_inner_state, model.max_model_len = True, 640
    cached.enable_prefix_caching, cached.mamba_cache_mode, cached.mamba_block_size = (
        True,
        "align",
        16,
    )
    for name, value in text.items():
        setattr(model.hf_text_config, name, value)
    if drafts:
        config.speculative_config = stand_in.Config(method="ngram")
    if kept is None:
        with pytest.raises(ValueError, match=r"speculative_config must be absent .* got ngram"):
            platform.check_and_update_config(config)
        return
    with caplog.at_level("WARNING", "ipex"):
        platform.check_and_update_config(config)
    assert cached.enable_prefix_caching is kept
    assert (cached.mamba_cache_mode, cached.mamba_block_size) == (
        ("align", 16) if kept else ("none", 640)
    )
    assert ("prefix caching is off" in caplog.text) is not kept
    cached.enable_prefix_caching = False
    platform.check_and_update_config(config)  # nothing to turn off
