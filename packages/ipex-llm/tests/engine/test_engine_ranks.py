# SPDX-License-Identifier: Apache-2.0
"""An engine of two and three processes gives the tokens of one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from fake_runner import FakeRunner
from ranks import llama

from ipex_core.testing import run_ranks
from ipex_llm.engine import Engine, PoolingParams, SamplingParams, follow
from ipex_llm.engine.ranks import LeadRunner, lead
from ipex_llm.optimization import optimize

PROMPTS = [list(range(3, 3 + length)) for length in (1, 9, 30, 17)]


def answers(model: Any) -> Any:
    """Return what an engine gives that is so small that requests give way."""
    engine = Engine(
        model, block_size=4, num_blocks=16, max_num_seqs=3, max_tokens_per_step=11, eos_token_ids=()
    )
    params = [
        SamplingParams(max_new_tokens=20),
        SamplingParams(max_new_tokens=20, temperature=1.0, seed=3),
        SamplingParams(max_new_tokens=20, repetition_penalty=1.3),
        SamplingParams(max_new_tokens=20, temperature=0.7, top_p=0.9, seed=4),
    ]
    tokens = [output.tokens for output in engine.generate(PROMPTS, params)]
    engine.add_request(PROMPTS[1], PoolingParams())
    vector = None
    while engine.has_work:
        for output in engine.step():
            vector = output.vector
    assert vector is not None
    return tokens, vector.tolist(), engine.stats().preemptions


def computed(rank: int, ranks: int) -> Any:
    model = optimize(llama(8, 4), tp_group=True)
    if rank:
        follow(model)
        return "ended"
    return answers(model)


@pytest.mark.parametrize("ranks", [2])
def test_the_tokens_of_one_process(ranks: int) -> None:
    found, *others = run_ranks(computed, ranks, timeout=300.0)
    tokens, vector, preemptions = answers(optimize(llama(8, 4)))
    assert found[0] == tokens and found[2] == preemptions > 0
    assert torch.allclose(torch.tensor(found[1]), torch.tensor(vector), atol=1e-5)
    assert others == ["ended"] * (ranks - 1)


def test_a_rank_that_has_ended() -> None:
    from multiprocessing import Pipe

    own, other = Pipe()
    runner = LeadRunner(FakeRunner(), [own])
    engine = Engine(runner, block_size=4, num_blocks=16, eos_token_ids=())
    assert other.recv()[0] == "cache" and not engine.lost
    engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=4))
    assert [len(output.tokens) for output in engine.step()] == [1]
    kind, place, arrays, options = other.recv()
    assert (kind, place, options) == ("forward", 0, {}) and arrays[0].tolist() == [1, 2, 3]
    other.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="all ranks must run"):
            engine.step()
        assert engine.lost


def test_what_is_refused() -> None:
    whole = optimize(llama())
    with pytest.raises(TypeError, match="divided by tp_group"):
        follow(whole)
    parallel = SimpleNamespace(rank=1, ranks=2)
    with pytest.raises(RuntimeError, match="rank 0, got rank 1"):
        lead(SimpleNamespace(plan=SimpleNamespace(parallel=parallel)))
