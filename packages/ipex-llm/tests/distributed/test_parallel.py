# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism with two and three processes: the same logits and tokens as one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import ranks as work
import torch
from families import OLD
from torch import nn

from ipex_core.errors import OpArgumentError
from ipex_core.testing import run_ranks
from ipex_llm.distributed import (
    AllReduce,
    adopt_deepspeed,
    adopt_transformers,
    shard_model,
    split_features,
    split_heads,
)
from ipex_llm.optimization import optimize

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    """Return a folder with models."""
    from quantized_llama import AWQ, GPTQ, P, checkpoint, write

    path = tmp_path_factory.mktemp("models")
    for name, config in (("gptq", GPTQ), ("awq", AWQ)):
        state, _ = checkpoint(getattr(P, name))
        write(path / name, state, config)
    work.llama(4, 2).save_pretrained(path / "whole")
    return str(path)


@pytest.fixture(scope="module")
def results(folder: str) -> Any:
    """Return a function that gives what a case returned on each rank."""
    known: dict[int, list[Any]] = {}

    def of(case: str, ranks: int) -> list[Any]:
        if ranks not in known:
            ends = run_ranks(work.every, ranks, folder)
            files = [Path(folder, f"{rank} of {ranks}") for rank in range(ranks)]
            assert all(file.exists() for file in files), ends
            known[ranks] = [
                {**pickle.loads(file.read_bytes()), "end": end}
                for file, end in zip(files, ends, strict=True)
            ]
        found = [one[case] for one in known[ranks]]
        failed = [one for one in found if isinstance(one, str) and one.startswith("Traceback")]
        assert not failed, "\n".join(failed)
        return found

    return of


def assert_true(found: Any) -> None:
    """Check that no value of a dict or list is False, or holds a False."""
    items = found.items() if isinstance(found, dict) else enumerate(found)
    wrong = [
        (k, v)
        for k, v in items
        if v is False or (isinstance(v, tuple) and any(x is False for x in v))
    ]
    assert not wrong, found


@pytest.mark.parametrize("ranks", [2, 3])
def test_sharded_llama_gives_the_same(results, ranks):
    found = results("llamas", ranks)
    for one in found:
        assert one and all(not wrong for _, wrong, _ in one), one
    for index, total in enumerate((8, 16, 16)):  # all heads of two layers, each once
        assert sum(one[index][2] for one in found) == total


def test_sharded_families_give_the_same(results):
    for one in results("families", 2):
        assert one and all(not wrong for _, wrong, _ in one), one


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", ["optimized", "quantized", "loaded"])
def test_optimize_gives_the_tokens_of_one_process(results, case, ranks):
    found = results(case, ranks)
    for one in found:
        assert_true(one)
    for key, value in found[0].items():  # the same bits, and so the same tokens, on all ranks
        assert all(one[key] == value for one in found), key


@pytest.mark.parametrize("ranks", [2, 3])
def test_plans_are_what_is_done(results, ranks):
    for one in results("planned", ranks):
        assert one and not any(one.values()), one


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_draw_the_same_tokens(results, ranks):
    found = results("sampled", ranks)
    for one in found:
        assert_true(one)
        assert one == found[0]
    assert found[0][0] != found[0][1]


def test_models_that_deepspeed_has_divided(results):
    for one in results("deepspeed", 2):
        assert_true(one)
    assert adopt_deepspeed(work.llama()) is False


@pytest.mark.skipif(OLD, reason="transformers 4 divides otherwise")
def test_models_that_transformers_has_divided(results):
    for one in results("transformers_plan", 2):
        assert_true(one)
    assert adopt_transformers(work.llama()) is False
    model = work.llama()
    model.lm_head._hf_tp_plan = "colwise"
    with pytest.raises(ValueError, match="an older transformers has divided: load it whole"):
        adopt_transformers(model)


@pytest.mark.skipif(OLD, reason="transformers 4 refuses an argument of the script")
def test_the_script_of_the_manual(results):
    first, second = results("documented", 2)
    if first is None:
        pytest.skip("the manual or the package ipex is not here")
    assert first == "36 tokens\n" and second == ""


def test_what_cannot_be_split_says_why(results):
    for one in results("refused", 3):
        few, norm, alibi, strange, other, twice, training, group, checkpoint, heads = one
        assert "tp_group must have at most as many ranks as the model has heads = 2, got 3" in few
        assert "norms of q and k for each head, got one over all heads" in norm
        assert "forward that works on some of its heads" in alibi and "BloomForCausalLM" in alibi
        assert "attention in each layer to be divided, got a layer that keeps a state" in strange
        assert "model must be the same on all ranks" in other
        assert "got one that is sharded already" in twice
        assert "must be in inference mode" in training
        assert "tp_group must be a process group" in group and "got str" in group
        assert "low_precision_checkpoint must be the part of this rank" in checkpoint
        assert "world_size must be at most the number of key/value heads, 4, got 5" in heads


def test_a_group_is_needed():
    with pytest.raises(OpArgumentError, match="tp_group must be started"):
        optimize(work.llama(), tp_group=True)
    with pytest.raises(OpArgumentError, match="tp_group must be started"):
        shard_model(work.llama())


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_others_fail_when_a_rank_is_killed(results, ranks):
    *others, killed = results("end", ranks)
    assert killed is None
    name = f"rank {ranks - 1} of {ranks}"
    for text in others:  # who waits in vain tells the rest
        assert f"{name} did not arrive within 5 s" in text or f"{name} is missing" in text, others
    assert any("within 5 s" in text for text in others)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "expected"),
    [
        (8, 8, 3, [(3, 3), (3, 3), (2, 2)]),
        (8, 4, 3, [(4, 2), (2, 1), (2, 1)]),
        (8, 2, 3, [(4, 1), (2, 1), (2, 1)]),
        (8, 1, 3, [(3, 1), (3, 1), (2, 1)]),
        (8, 2, 8, [(1, 1)] * 8),
        (4, 2, 2, [(2, 1), (2, 1)]),
    ],
)
def test_heads_are_split_by_groups(heads, kv_heads, ranks, expected):
    parts = [split_heads(heads, kv_heads, rank, ranks) for rank in range(ranks)]
    assert [(part.heads, part.kv_heads) for part in parts] == expected
    assert [h for part in parts for h in range(part.query, part.query_end)] == list(range(heads))
    group = heads // kv_heads
    for part in parts:  # the query heads of a rank belong to its key/value heads
        assert {h // group for h in range(part.query, part.query_end)} == set(
            range(part.kv, part.kv_end)
        )


def test_heads_and_features_that_cannot_be_split():
    with pytest.raises(ValueError, match="at most as many ranks as the model has heads = 2, got 3"):
        split_heads(2, 1, 0, 3)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        split_heads(6, 4, 0, 2)
    with pytest.raises(ValueError, match="3 ranks for 256 features in pieces of 128"):
        split_features(256, 0, 3, "the mlp", (128,))


def test_wrapper_looks_like_what_is_inside():
    class Doubled:
        group = "g"

        def all_reduce(self, x):
            return x + x

    linear = nn.Linear(4, 3).eval()
    wrapper: Any = AllReduce(linear, Doubled())  # type: ignore[arg-type]
    model = nn.Sequential(wrapper).eval()
    x = torch.randn(2, 4)
    assert torch.equal(model(x), 2 * linear(x))
    assert wrapper.weight is linear.weight and wrapper.in_features == 4 and wrapper.mp_group == "g"
    assert set(model.state_dict()) == {"0.weight", "0.bias"}
    new = {"0.weight": torch.ones(3, 4), "0.bias": torch.zeros(3)}
    model.load_state_dict(new)
    assert torch.equal(linear.weight, torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**new, "0.other": torch.zeros(1)})
    with pytest.raises(AttributeError):
        wrapper.no_such_name  # noqa: B018
