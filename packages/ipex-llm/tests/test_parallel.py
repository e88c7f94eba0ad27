# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism with two and three processes: the same logits and tokens as one."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from families import FAMILIES, tokens
from torch import nn

from ipex_core.testing import run_ranks
from ipex_llm._match import match
from ipex_llm._parallel import (
    AllReduce,
    adopt_deepspeed,
    parallel_plan,
    shard_model,
    split_features,
    split_heads,
)
from ipex_llm._reference import run_plan

NEW = 12
IDS = (2, 9)


def llama(heads: int = 4, kv_heads: int = 2, **options: Any) -> nn.Module:
    import transformers
    from families import randomize

    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return randomize(transformers.LlamaForCausalLM(config))


def made(name: str) -> nn.Module:
    if name.startswith("llama_"):
        heads, kv_heads = map(int, name.split("_")[1:3])
        biased = name.endswith("biased")
        return llama(heads, kv_heads, attention_bias=biased, mlp_bias=biased)
    return FAMILIES[name]()


def generated(model: nn.Module) -> list[list[int]]:
    with torch.no_grad():
        out = model.generate(tokens(*IDS), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return out.tolist()


def compared(rank: int, ranks: int, names: list[str], steps: bool = True) -> list[Any]:
    """Return what is wrong with each model, sharded, against the whole one in the same process."""
    found = []
    for name in names:
        whole, model = made(name), made(name)
        bytes_before = sum(p.numel() for p in model.parameters())
        with torch.no_grad():
            want = whole(tokens(*IDS)).logits
        same = shard_model(model)
        with torch.no_grad():
            got = same(tokens(*IDS)).logits
        plan = parallel_plan(model, match(model))
        planned = run_plan(plan, tokens(*IDS))
        wrong = []
        if same is not model or (got - want).abs().max() > 1e-5 * want.abs().max().clamp_min(1):
            wrong.append(f"logits {(got - want).abs().max().item():.1e}")
        if (planned - want).abs().max() > 1e-4 * want.abs().max():
            wrong.append(f"plan {(planned - want).abs().max().item():.1e}")
        if steps and generated(model) != generated(whole):
            wrong.append("tokens")
        if sum(p.numel() for p in model.parameters()) > 0.8 * bytes_before:
            wrong.append("not smaller")
        heads = sum(layer.attention.heads for layer in plan.layers)
        found.append((name, wrong, heads))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_sharded_llama_gives_the_same(ranks):
    names = ["llama_4_4", "llama_8_2", "llama_8_4_biased"]
    results = run_ranks(compared, ranks, names)
    for result in results:
        assert not isinstance(result, str) and result, results
        assert all(not wrong for _, wrong, _ in result), results
    for index, total in enumerate((8, 16, 16)):  # all heads of two layers, each once
        assert sum(result[index][2] for result in results) == total


DENSE = ["qwen2", "gemma2", "phi", "gpt_neox", "gpt2", "opt", "falcon_gqa", "phi3"]
MIXTURES = ["mixtral", "qwen2_moe", "gpt_oss"]


@pytest.mark.parametrize("names", [DENSE[:4], DENSE[4:], MIXTURES], ids=["a", "b", "experts"])
def test_sharded_families_give_the_same(names):
    for result in run_ranks(compared, 2, names, False):
        assert not isinstance(result, str) and result, result
        assert all(not wrong for _, wrong, _ in result), result


def refused(rank: int, ranks: int) -> list[str]:
    found = []
    models = {
        "too few heads": llama(2, 1),
        "norm over all heads": FAMILIES["olmo2"](),
        "alibi": FAMILIES["bloom"](),
        "other weights": llama(),
    }
    if rank == 0:
        with torch.no_grad():
            models["other weights"].model.embed_tokens.weight.mul_(-1.5)
    for model in models.values():
        try:
            shard_model(model)
            found.append("no error")
        except ValueError as error:
            found.append(str(error))
    model = shard_model(llama())
    for action in (lambda: shard_model(model), lambda: model.train()(tokens())):
        try:
            action()
            found.append("no error")
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
    return found


def test_what_cannot_be_split_says_why():
    for result in run_ranks(refused, 3):
        few, norm, alibi, other, twice, training = result
        assert "as many ranks as the model has heads = 2, got 3" in few
        assert "norms of q and k for each head, got one over all heads" in norm
        assert "forward that works on some of its heads, got BloomForCausalLM" in alibi
        assert "model must be the same on all ranks" in other
        assert "got one that is sharded already" in twice
        assert "is for inference" in training


def without_group(rank: int, ranks: int) -> Any:
    torch.distributed.destroy_process_group()
    try:
        shard_model(llama())
    except ValueError as error:
        return str(error)
    return None


def test_a_group_is_needed():
    (text,) = run_ranks(without_group, 1)
    assert "group must be started" in text


def one_dies(rank: int, ranks: int) -> Any:
    model = shard_model(llama())
    generated(model)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        generated(model)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_the_others_fail_when_a_rank_is_killed():
    found = run_ranks(one_dies, 2, timeout=4.0)
    assert found[1] is None
    assert "rank 1 of 2 did not arrive within 4 s" in found[0], found


class LinearAllreduce(nn.Module):
    """As DeepSpeed's."""

    def __init__(self, linear: nn.Linear, first: int, last: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach()[:, first:last].clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach())
        self.mp_group = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight.T
        torch.distributed.all_reduce(y)
        return y if self.bias is None else y + self.bias


class LmHeadLinearAllreduce(LinearAllreduce):
    """As DeepSpeed's: takes its part of the input itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return super().forward(x.narrow(-1, half * torch.distributed.get_rank(), half))


class LinearLayer(nn.Module):
    """As DeepSpeed's."""

    def __init__(self, linear: nn.Linear, first: int, last: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach()[first:last].clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach()[first:last])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def deepspeed_model(rank: int) -> nn.Module:
    model: Any = llama(attention_bias=True, mlp_bias=True)

    def half(kind: type, owner: nn.Module, name: str, side: int) -> None:
        linear = getattr(owner, name)
        size = linear.weight.shape[side] // 2
        setattr(owner, name, kind(linear, rank * size, rank * size + size))

    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            half(LinearLayer, layer.self_attn, name, 0)
        half(LinearAllreduce, layer.self_attn, "o_proj", 1)
        half(LinearLayer, layer.mlp, "gate_proj", 0)
        half(LinearLayer, layer.mlp, "up_proj", 0)
        half(LinearAllreduce, layer.mlp, "down_proj", 1)
    half(LmHeadLinearAllreduce, model, "lm_head", 1)
    return model.eval()


def adopted(rank: int, ranks: int) -> list[bool]:
    model = deepspeed_model(rank)
    names = sorted(k for k in model.state_dict() if rank == 0 or "bias" not in k)
    with torch.no_grad():
        want = llama(attention_bias=True, mlp_bias=True)(tokens(*IDS)).logits
        theirs = model(tokens(*IDS)).logits
        changed = adopt_deepspeed(model)
        ours = model(tokens(*IDS)).logits
    plan = parallel_plan(model, match(model))
    planned = run_plan(plan, tokens(*IDS))
    kept = sorted(k for k in model.state_dict() if rank == 0 or "bias" not in k)
    return [
        changed,
        torch.allclose(theirs, want, atol=1e-5),
        torch.allclose(ours, want, atol=1e-5),
        torch.allclose(planned, want, atol=1e-4),
        kept == names,
        adopt_deepspeed(model) is False,
    ]


def test_models_that_deepspeed_has_divided():
    assert run_ranks(adopted, 2) == [[True] * 6] * 2
    assert adopt_deepspeed(llama()) is False


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
