# SPDX-License-Identifier: Apache-2.0
"""Optimizing a language model is nobody else's business: other threads compute and draw random numbers meanwhile."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import transformers
from families import build, tokens
from torch import nn

from ipex_core.kernels.machine import own_threads
from ipex_llm.arch.seeded import seeded
from ipex_llm.optimization import optimize
from ipex_llm.optimization.proof import prove, small
from ipex_llm.patch.generate import SameRandomMixin
from ipex_llm.records import update

pytestmark = pytest.mark.filterwarnings("ignore")

Tensor = torch.Tensor


def draws() -> list[Tensor]:
    """Return random numbers of all kinds that models are made with."""
    x = torch.empty(5)
    layer = nn.Linear(4, 3)
    found = [torch.rand(3), torch.randn(2, 2), torch.randint(9, (4,)), torch.randperm(6)]
    found += [torch.empty(4).normal_(1, 2), torch.empty(4).uniform_(), torch.randn_like(x)]
    found += [torch.rand_like(x, dtype=torch.float64), torch.bernoulli(torch.full((9,), 0.5))]
    found += [nn.init.trunc_normal_(torch.empty(7)), nn.init.xavier_normal_(torch.empty(3, 3))]
    found += [torch.multinomial(torch.ones(8), 3), torch.empty(3).exponential_()]
    return [*found, nn.Embedding(3, 4).weight.detach(), layer.weight.detach(), layer.bias.detach()]


def test_numbers_of_one_thread() -> None:
    torch.manual_seed(5)
    want = draws()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with seeded(5):
        got = draws()
        other: list[Tensor] = []
        thread = threading.Thread(target=lambda: other.append(torch.rand(3)))
        thread.start()
        thread.join()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    torch.manual_seed(7)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.rand(3), other[0])  # the other thread had the numbers of the process


def test_small_copies_leave_the_numbers_of_the_process_alone() -> None:
    seen = []

    class Spy(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            before = torch.get_rng_state()
            super().__init__(config)
            seen.append(torch.equal(before, torch.get_rng_state()))

    torch.manual_seed(3)
    before = torch.get_rng_state()
    config = build("llama").config
    one, two = (small.small_model(Spy, config, seed=1) for _ in range(2))
    assert seen == [True, True]
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


def test_proofs_run_on_one_thread_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    answer = prove._Case.answer

    def spy(self: Any, probe: Any) -> Any:
        others: list[int] = []
        thread = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        seen.append((torch.get_num_threads(), *others))
        return answer(self, probe)

    monkeypatch.setattr(prove._Case, "answer", spy)
    prove._known.clear()
    before = torch.get_num_threads()
    with own_threads(2):
        optimize(build("llama"))
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before
    assert seen
    assert set(seen) == {(1, before)}


class Drawing(nn.Module):
    """A model whose ``generate`` draws, and looks whether the numbers of the process are left alone."""

    do_sample = True

    def generate(self, **_: Any) -> tuple[Tensor, bool]:
        before = torch.get_rng_state()
        found = torch.multinomial(torch.ones(3, 50), 5), torch.rand(4)
        return torch.cat([t.flatten().double() for t in found]), torch.equal(
            before, torch.get_rng_state()
        )


class Sharded(SameRandomMixin, Drawing):
    pass


class First:
    """The group of a rank: hands on the numbers of rank 0."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def from_first(self, values: list[int]) -> list[int]:
        return self.values


def test_ranks_draw_the_same_numbers_and_leave_those_of_the_process_alone() -> None:
    found = []
    for rank in range(2):
        model = Sharded()
        update(model, parallel=First([17, 4]))
        torch.manual_seed(rank)
        numbers, alone = model.generate(do_sample=True)
        assert alone
        found.append(numbers)
    assert torch.equal(*found)


@torch.no_grad()
def test_other_threads_are_served_while_models_are_optimized() -> None:
    ids = tokens(2, 9)
    served = [build(name).eval() for name in ("llama", "gpt2", "qwen3_moe")]
    served.append(optimize(build("llama")))
    stop, wrong, states = threading.Event(), [], []
    torch.manual_seed(0)
    before = torch.get_rng_state()

    def serve(model: nn.Module, expected: Tensor) -> None:
        while not stop.is_set():
            try:
                with torch.no_grad():
                    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
            except Exception as error:
                wrong.append(error)
            states.append(torch.equal(before, torch.get_rng_state()))
            time.sleep(0.002)

    def optimizer(name: str, depth: int) -> None:
        try:
            model = build(name)
            made = optimize(model, depth=depth)
            with torch.no_grad():
                a, b = made(ids).logits, model(ids).logits
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        except Exception as error:
            wrong.append(error)

    for name in ("mistral", "gpt_neox"):  # made here: making them seeds the process
        build(name)
    prove._known.clear()  # prove them once more
    torch.set_rng_state(before)
    threads = [threading.Thread(target=serve, args=(m, m(ids).logits)) for m in served]
    workers = [
        threading.Thread(target=optimizer, args=given)
        for given in (("mistral", 3), ("gpt_neox", 2))
    ]
    for thread in (*threads, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong, (wrong[:1], len(wrong))
    assert states and all(states)
