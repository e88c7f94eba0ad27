# SPDX-License-Identifier: Apache-2.0
"""Programs of a plan against the model it was made from."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, tokens
from plans import llama_plan

from ipex_llm._cache import Sequences
from ipex_llm._runner import Runner


def run(runner, sequences, ids, rows=None, logits=True):
    """Run a list of token lists, one per sequence."""
    counts = [len(one) for one in ids]
    history = list(sequences.lengths)
    step = sequences.append(counts)
    flat = torch.tensor([t for one in ids for t in one])
    positions = torch.cat([torch.arange(h, h + c) for h, c in zip(history, counts, strict=True)])
    hidden = runner.embed(flat, positions)
    return runner.run(sequences.cache, hidden, positions, step, rows, logits=logits)


@pytest.mark.parametrize("block_size", [4, 64])
def test_llama_logits_of_prompts_pieces_and_single_tokens(block_size):
    model = FAMILIES["llama"]()
    ids = tokens(3, 24)
    with torch.no_grad():
        expected = model(ids).logits
    runner = Runner(llama_plan(model), torch.float32)
    sequences = Sequences(runner.new_cache(4, block_size), 3)
    got = run(runner, sequences, [ids[0, :9].tolist(), ids[1, :1].tolist(), ids[2, :5].tolist()])
    want = torch.stack([expected[0, 8], expected[1, 0], expected[2, 4]])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    # A piece with history, a single token, and a piece across blocks.
    run(runner, sequences, [ids[0, 9:12].tolist(), ids[1, 1:2].tolist(), ids[2, 5:20].tolist()])
    for at in range(4):
        got = run(runner, sequences, [[int(ids[b, n + at])] for b, n in enumerate((12, 2, 20))])
        want = torch.stack([expected[b, n + at] for b, n in enumerate((12, 2, 20))])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_parameters_stay_what_they_were():
    model = FAMILIES["llama_bias"]()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        expected = model(tokens()).logits
    runner = Runner(llama_plan(model), torch.float32)
    assert runner.fresh()
    after = model.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    # The model's own forward unpacks what it needs.
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()).logits, expected, rtol=1e-4, atol=1e-4)
    model.load_state_dict({k: v * 2 for k, v in before.items()})
    assert not runner.fresh()
    assert torch.equal(
        model.state_dict()["model.layers.0.self_attn.k_proj.weight"],
        2 * before["model.layers.0.self_attn.k_proj.weight"],
    )
