# SPDX-License-Identifier: Apache-2.0
"""`fast_bert` against the stock model: results, gradients, dropout, unpadding, what it leaves alone."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from ipex_core import explain, fast_bert, optimize, restore
from ipex_core.bert import MOST_GROUPS, FastBert, _alike

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

Tensor = torch.Tensor
LENGTHS = (17, 5, 9, 3, 16, 8)


def build(kind: str = "BertForSequenceClassification", p: float = 0.0, **more: Any) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 40,
        "hidden_dropout_prob": p,
        "attention_probs_dropout_prob": p,
        **more,
    }
    model = getattr(transformers, kind)(transformers.BertConfig(**settings)).train()
    for parameter in model.parameters():  # larger than the usual start, so that errors show
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch(right: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(
        1, 100, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1)
    )
    mask = torch.ones_like(ids)
    for row, length in zip(mask, LENGTHS, strict=True):
        row[slice(length, None) if right else slice(0, len(row) - length)] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}


def present(mask: Tensor) -> Tensor:
    return mask.bool()


@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("right", [True, False], ids=["padding_right", "padding_left"])
@pytest.mark.parametrize("act", ["gelu", "gelu_new"])
def test_same_results_and_gradients(unpad: bool, right: bool, act: str) -> None:
    model = build("BertForTokenClassification", hidden_act=act)
    fast, _ = fast_bert(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), unpad=unpad)
    inputs = batch(right)
    shown = present(inputs["attention_mask"])
    want, got = model(**inputs).logits, fast(**inputs).logits
    torch.testing.assert_close(got[shown], want[shown], rtol=1e-5, atol=1e-5)
    weight = torch.randn(want[shown].shape)
    (want[shown] * weight).sum().backward()
    (got[shown] * weight).sum().backward()
    wanted = dict(model.named_parameters())
    for name, parameter in fast.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            wanted[name].grad,
            rtol=1e-4,
            atol=2e-4,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize(
    "kind",
    ["BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForQuestionAnswering"],
)
@pytest.mark.parametrize("unpad", [False, True])
def test_heads(kind: str, unpad: bool) -> None:
    model = build(kind).eval()
    fast = fast_bert(model, unpad=unpad)
    inputs = batch()
    shown = present(inputs["attention_mask"])
    for one in ({}, {"output_hidden_states": True}, {"return_dict": False}):
        with torch.no_grad():
            want, got = model(**inputs, **one), fast(**inputs, **one)
        assert type(got) is type(want) and len(got) == len(want)
        values = zip(want, got, strict=True)
        if one:
            values = zip(_flat(want), _flat(got), strict=True)
        else:
            values = zip(want.to_tuple(), got.to_tuple(), strict=True)
        for a, b in values:
            rows = a.shape[:2] == shown.shape
            torch.testing.assert_close(
                b[shown] if rows else b, a[shown] if rows else a, rtol=1e-4, atol=1e-4
            )


def _flat(output: Any) -> list[Tensor]:
    parts = output.to_tuple() if hasattr(output, "to_tuple") else output
    found: list[Tensor] = []
    for part in parts:
        found.extend(part) if isinstance(part, tuple) else found.append(part)
    return found


@pytest.mark.parametrize("kind", ["sgd", "adamw", "rmsprop"])
@pytest.mark.parametrize("unpad", [False, True])
def test_trains_like_stock(kind: str, unpad: bool) -> None:
    make: Any = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-4),
    }[kind]
    model = build()
    fast, optimizer = fast_bert(model, optimizer=make(model.parameters()), unpad=unpad)
    low, low_optimizer = fast_bert(
        model, torch.bfloat16, optimizer=make(model.parameters()), unpad=unpad
    )
    stock_optimizer = make(model.parameters())
    inputs = batch()
    labels = torch.tensor([0, 1, 0, 1, 1, 0])
    losses: list[list[float]] = [[], [], []]
    for _ in range(12):
        for i, (m, o) in enumerate(
            ((model, stock_optimizer), (fast, optimizer), (low, low_optimizer))
        ):
            o.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=i == 2):
                loss = m(**inputs, labels=labels).loss
            loss.backward()
            o.step()
            losses[i].append(loss.item())
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-3, atol=2e-3)
    assert losses[2][-1] < losses[2][0] and abs(losses[2][-1] - losses[0][-1]) < 0.2
    state = low.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(v.dtype == torch.float32 for v in state.values() if v.is_floating_point())
    again = build()
    again.load_state_dict(state)  # by a stock model


def test_dropout_drops_and_follows_the_seed() -> None:
    model = build(p=0.3)
    fast, _ = fast_bert(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = batch()
    torch.manual_seed(5)
    a = fast(**inputs).logits
    b = fast(**inputs).logits
    torch.manual_seed(5)
    c = fast(**inputs).logits
    assert torch.equal(a, c) and not torch.equal(a, b)
    fast.eval()
    assert torch.equal(fast(**inputs).logits, fast(**inputs).logits)
    torch.testing.assert_close(fast(**inputs).logits, model.eval()(**inputs).logits)


def test_gradient_with_dropout_is_that_of_the_same_mask() -> None:
    model = build("BertModel", p=0.2).double().float()
    fast, _ = fast_bert(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), unpad=True)
    inputs = batch()
    weight = torch.randn(len(LENGTHS), max(LENGTHS), 32)
    table = fast.embeddings.LayerNorm.weight
    step = 1e-2

    def value() -> Tensor:
        torch.manual_seed(3)
        return (fast(**inputs).last_hidden_state.double() * weight).sum()

    value().backward()
    direction = torch.randn_like(table)
    with torch.no_grad():
        table.add_(step * direction)
        up = value()
        table.sub_(2 * step * direction)
        down = value()
    slope = float((up - down) / (2 * step))
    assert slope == pytest.approx(float((table.grad * direction).sum()), rel=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restore_gives_the_model_back(dtype: torch.dtype) -> None:
    model = build()
    fast, _ = fast_bert(model, dtype, optimizer=torch.optim.AdamW(model.parameters()), unpad=True)
    assert isinstance(fast.bert, FastBert) and isinstance(fast.bert, transformers.BertModel)
    assert "fused blocks, without padding" in str(explain(fast))
    before = model.state_dict()
    back = restore(fast)
    assert type(back.bert) is transformers.BertModel
    assert all(torch.equal(v, before[k]) for k, v in back.state_dict().items())
    assert all(p.dtype == torch.float32 for p in back.parameters())


def test_copies_and_files() -> None:
    model = build()
    fast = fast_bert(model.eval(), torch.bfloat16)
    inputs = batch()
    buffer = io.BytesIO()
    torch.save(fast, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        want = fast(**inputs).logits
        assert torch.equal(copy.deepcopy(fast)(**inputs).logits, want)
        assert torch.equal(loaded(**inputs).logits, want)


def test_original_where_it_is_needed() -> None:
    model = build("BertModel", attn_implementation="eager").eval()
    fast = fast_bert(model, unpad=True)
    inputs = batch()
    out = fast(**inputs, output_attentions=True)
    assert len(out.attentions) == 2
    embedded = fast(inputs_embeds=torch.randn(2, 5, 32))
    assert embedded.last_hidden_state.shape == (2, 5, 32)
    seen = []
    fast.encoder.layer[0].intermediate.register_forward_hook(lambda *a: seen.append(1))
    fast(**inputs)
    assert seen
    with pytest.raises(ValueError, match="input_ids"):
        fast()


def test_exchanged_layer_runs() -> None:
    class Twice(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = build("BertModel").eval()
    fast = fast_bert(model)
    fast.encoder.layer[1].output.dense.__class__ = Twice
    model.encoder.layer[1].output.dense.__class__ = Twice
    inputs = batch()
    torch.testing.assert_close(fast(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    grads = []
    for again in (False, True):
        model = build(p=0.2)
        fast, _ = fast_bert(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        if again:
            name = "activation_checkpointing_enable"  # in transformers 6, "gradient_" before
            getattr(fast, name, fast.gradient_checkpointing_enable)()
        torch.manual_seed(7)
        fast(**batch(), labels=torch.tensor([0, 1, 0, 1, 1, 0])).loss.backward()
        grads.append([p.grad for p in fast.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_frozen_parts_get_no_gradient() -> None:
    model = build()
    for parameter in model.bert.encoder.layer[0].parameters():
        parameter.requires_grad_(False)
    for parameter in model.bert.embeddings.parameters():
        parameter.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    fast, _ = fast_bert(model, optimizer=torch.optim.SGD(trained, lr=0.1))
    fast(**batch(), labels=torch.tensor([0, 1, 0, 1, 1, 0])).loss.backward()
    assert all(
        (p.grad is None) == n.startswith(("bert.encoder.layer.0", "bert.embeddings"))
        for n, p in fast.named_parameters()
        if "pooler" not in n
    )


def test_sequences_without_tokens_and_masks() -> None:
    model = build("BertModel").eval()
    fast = fast_bert(model, unpad=True)
    inputs = batch()
    inputs["attention_mask"][1] = 0
    out = fast(**inputs).last_hidden_state
    assert not out[1].any() and out.isfinite().all()
    rest = torch.arange(len(LENGTHS)) != 1
    shown = inputs["attention_mask"].bool() & rest[:, None]
    torch.testing.assert_close(
        out[shown], model(**inputs).last_hidden_state[shown], rtol=1e-4, atol=1e-4
    )
    inputs["attention_mask"][:] = 0
    assert not fast(**inputs).last_hidden_state.any()
    plain = {"input_ids": inputs["input_ids"]}
    torch.testing.assert_close(
        fast(**plain).last_hidden_state, model(**plain).last_hidden_state, rtol=1e-4, atol=1e-4
    )


def test_groups_of_similar_lengths() -> None:
    assert _alike([10, 0, 9, 3, 8, 7]) == [[0, 2, 4], [5], [3]]
    assert len(_alike([1 << n for n in range(40)])) == MOST_GROUPS


def test_other_models_stay() -> None:
    other = torch.nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="no part of it is a BertModel"):
        assert fast_bert(other) is other
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="stays as it is"):
        assert fast_bert(other, optimizer=optimizer) == (other, optimizer)
    with pytest.warns(UserWarning, match="hidden_act is relu"):
        fast_bert(build("BertModel", hidden_act="relu"))


def test_after_optimize_and_before() -> None:
    model = build()
    first, optimizer = optimize(
        model, torch.bfloat16, optimizer=torch.optim.AdamW(model.parameters())
    )
    fast, optimizer = fast_bert(first, torch.bfloat16, optimizer=optimizer)
    assert isinstance(fast.bert, FastBert)
    plain, _ = optimize(fast, torch.bfloat16, optimizer=optimizer)
    assert not isinstance(plain.bert, FastBert)
    want = model.state_dict()
    assert all(torch.equal(v, want[k]) for k, v in plain.state_dict().items())


def test_bad_arguments() -> None:
    model = build()
    with pytest.raises(TypeError, match=r"fast_bert: model must be a torch\.nn\.Module, got str"):
        fast_bert("bert")
    with pytest.raises(ValueError, match=r"dtype must be torch.float32 or torch.bfloat16, got"):
        fast_bert(model, torch.float16)
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got int"):
        fast_bert(model, optimizer=3)
    with pytest.raises(TypeError, match="unpad must be True or False, got 1"):
        fast_bert(model, unpad=1)
