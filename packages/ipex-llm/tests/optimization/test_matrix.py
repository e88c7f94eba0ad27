# SPDX-License-Identifier: Apache-2.0
"""The matrix of model families: what `optimize` makes of each of them, and that it keeps the results.

``model_families.json`` says what is expected of each family, and the documentation shows that file as a table. A family
that silently does less, or more, than its row says fails here.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import ENCODER_DECODERS, FAMILIES, LOOKALIKES, OLD, VOCAB, build, cast, tokens
from plain_weights import with_plain_weights
from torch import nn

import ipex_core
import ipex_quant
from ipex_llm.generation._loop import Loop
from ipex_llm.model_runner import Runner
from ipex_llm.model_runner.encoder_decoder import PairRunner
from ipex_llm.optimization import optimize
from ipex_llm.patch.decoder import _silent

pytestmark = [
    pytest.mark.usefixtures("small_weights_are_packed", "no_gradients"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

Tensor = torch.Tensor

DATA: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "model_families.json").read_text("utf-8")
)
TABLE: dict[str, dict[str, Any]] = {row["name"]: row for row in DATA["families"]}
NAMES = [name for name in TABLE if name in FAMILIES or name in ENCODER_DECODERS]
#: One family of each structure, which also run in float16 and without the program.
MORE = [name for name in DATA["more"] if name in NAMES]
PROMPT, GREEDY, BEAM, BATCH = 12, 64, 16, 8
#: Difference of two logits, or of two beams' scores, that rounding may turn around.
TIE = 1e-4


#: What is wrong with the stock models of transformers 4.
WRONG = {
    "qwen2_window": "transformers 4 masks the windows of some layers in all of them",
    "phi3_longrope": "transformers 4 reads the prompt again without a causal mask where the rotation changes",
}


def depth(name: str) -> int:
    row = TABLE[name]
    return int(row.get("depth_transformers_4", row["depth"]) if OLD else row["depth"])


def inputs(name: str) -> dict[str, Tensor]:
    """Return what `generate` is given: a prompt, with a picture or sound where the family reads one."""
    ids = tokens(1, PROMPT)
    noise = functools.partial(torch.randn, generator=torch.Generator().manual_seed(2))
    if name == "whisper":
        return {"input_features": noise(1, 8, 32)}
    if name == "llava":
        ids[:, 2:6] = VOCAB - 1
        return {"input_ids": ids, "pixel_values": noise(1, 3, 16, 16)}
    if name == "mllama":
        ids[:, 1] = VOCAB - 1
        seen = torch.zeros(1, PROMPT, 1, 1, dtype=torch.int64)
        seen[:, 1:] = 1
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": noise(1, 1, 1, 3, 16, 16),
            "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.int64),
            "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.int64),
            "cross_attention_mask": seen,
        }
    return {"input_ids": ids}


def logits(model: Any, name: str) -> Tensor:
    """Return logits of the prompt ``[1, T, V]`` in float32."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs(name).items()}
    if name in ENCODER_DECODERS:
        rows = model.get_encoder()(*given.values())
        given = {"encoder_outputs": rows, "decoder_input_ids": tokens(1, 9, seed=3)}
    result: Tensor = model(**given, use_cache=False).logits.float()
    return result


def generate(model: Any, given: dict[str, Tensor], new: int, **options: Any) -> Any:
    return model.generate(
        **given,
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        **options,
    )


def padded() -> dict[str, Tensor]:
    """Return two prompts, the second with padding on the left."""
    ids = tokens(2, PROMPT)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@dataclasses.dataclass
class Stock:
    """What the stock model answers; made once for each family."""

    model: nn.Module
    logits: Tensor
    greedy: Any
    beam: Any
    batch: Any


@functools.cache
@torch.no_grad()
def stock(name: str) -> Stock:
    model = build(name)
    options = {"use_cache": False} if name in LOOKALIKES else {}
    given = inputs(name)
    return Stock(
        model,
        logits(model, name),
        generate(model, given, GREEDY, output_logits=True, **options),
        generate(model, given, BEAM, num_beams=4, output_scores=True, **options),
        generate(model, padded(), BATCH, output_logits=True) if has_batch(name) else None,
    )


def has_batch(name: str) -> bool:
    return name not in LOOKALIKES and name not in ENCODER_DECODERS


def same_tokens(got: Any, want: Any) -> None:
    """Compare greedy tokens; where the stock model is undecided, either choice is right, and what follows another."""
    a, b = got.sequences, want.sequences
    assert a.shape == b.shape
    start = b.shape[1] - len(want.logits)
    for row in range(len(b)):
        different = (a[row] != b[row]).nonzero()
        if len(different):
            at = int(different[0])
            best = want.logits[at - start][row].float().topk(2).values
            assert best[0] - best[1] < TIE, f"row {row}: tokens differ from place {at - start} on"


def same_beams(got: Any, want: Any) -> None:
    if not torch.equal(got.sequences, want.sequences):
        assert abs(got.sequences_scores - want.sequences_scores).max() < TIE


def error(got: Tensor, want: Tensor) -> float:
    """Return one minus the cosine of a token's logits, the median over tokens.

    Not the mean: in 16 bits a token whose experts are nearly tied may go to another one.
    """
    return float((1 - nn.functional.cosine_similarity(got, want, dim=-1)).median())


class Calls:
    """Counts how often programs and our loop ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.programs = self.loops = 0
        loop = Loop.run

        def count(kind: type[Runner] | type[PairRunner]) -> None:
            run = kind.run

            def counted(runner: Any, *args: Any, **kwargs: Any) -> Any:
                self.programs += not _silent.get()  # proofs do not count
                return run(runner, *args, **kwargs)

            monkeypatch.setattr(kind, "run", counted)

        def counted_loop(one: Loop, *args: Any, **kwargs: Any) -> Any:
            self.loops += not _silent.get()
            return loop(one, *args, **kwargs)

        count(Runner)
        count(PairRunner)
        monkeypatch.setattr(Loop, "run", counted_loop)

    def check(self, depth: int, steps: int, loops: int = 0) -> None:
        """Compare with what a depth should have called in some steps; at depth 2 it is one program per layer."""
        programs, own = self.take()
        assert own == loops
        assert programs > steps if depth == 2 else programs == steps * (depth == 3)

    def take(self) -> tuple[int, int]:
        """Return the numbers since the last call."""
        result = self.programs, self.loops
        self.programs = self.loops = 0
        return result


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def reached(model: nn.Module) -> tuple[int, str]:
    """Return the depth that `optimize` has reached, and its words about it."""
    row = next(row for row in ipex_core.explain(model).rows if row.step == "llm")
    return (3 if row.done else 2 if row.kernel else 1), row.text


def test_the_table_is_complete() -> None:
    # One is there to be not understood.
    assert set(TABLE) >= {*FAMILIES, *ENCODER_DECODERS} - {"jamba_gelu"}
    for name, row in TABLE.items():
        assert row["depth"] in (1, 2, 3), name
        assert row["loop"] in ("own", "transformers"), name
        assert (row["depth"] < 3) == ("because" in row) == ("why" in row), name
    assert set(DATA["more"]) <= set(TABLE)


@pytest.mark.parametrize("name", NAMES)
def test_float32(name: str, calls: Calls) -> None:
    want, wanted = stock(name), depth(name)
    fast = optimize(want.model)
    found, text = reached(fast)
    assert found == wanted, text
    if OLD and name == "qwen2_window":
        pytest.skip(WRONG[name])
    if not OLD and wanted < 3:
        assert TABLE[name]["because"] in text
    torch.testing.assert_close(
        logits(fast, name), want.logits, rtol=1e-4, atol=1e-4 * float(want.logits.abs().max())
    )
    if OLD and wanted == 2:
        pytest.skip("which layers run as programs depends on the caches of transformers 4")
    calls.check(wanted, 1)
    if OLD and name == "phi3_longrope":
        pytest.skip(WRONG[name])
    given = inputs(name)
    cached = {"use_cache": False} if name in LOOKALIKES and wanted == 1 else {}
    same_tokens(generate(fast, given, GREEDY, **cached), want.greedy)
    own = wanted == 3 and TABLE[name]["loop"] == "own"
    calls.check(wanted, GREEDY, int(own))
    if want.batch is not None:
        same_tokens(generate(fast, padded(), BATCH), want.batch)
        own = wanted == 3 and TABLE[name].get("padding") != "stock"
        assert (calls.take()[0] == BATCH) == own
    same_beams(generate(fast, given, BEAM, num_beams=4, output_scores=True, **cached), want.beam)
    assert (calls.take()[0] == BEAM) == (wanted == 3)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in NAMES] + [(name, torch.float16) for name in MORE],
)
def test_16_bits(name: str, dtype: torch.dtype) -> None:
    """Against the stock model in float32, from which the stock model in 16 bits is as far away."""
    if OLD and name == "qwen2_window":
        pytest.skip(WRONG[name])
    want = stock(name)
    plain = error(logits(cast(build(name), dtype), name), want.logits)
    fast = optimize(want.model, dtype=dtype)
    assert reached(fast)[0] == depth(name)
    assert error(logits(fast, name), want.logits) < max(1e-3, 1.5 * plain)


@pytest.mark.parametrize("name", MORE)
def test_layer_by_layer(name: str, calls: Calls) -> None:
    """At depth 1, which the families that are not named here reach in the tests above or share with one of these."""
    want = stock(name)
    fast = optimize(want.model, deployment_mode=False)
    assert reached(fast) == (1, "layer by layer: deployment_mode is False")
    torch.testing.assert_close(
        logits(fast, name), want.logits, rtol=1e-4, atol=1e-4 * float(want.logits.abs().max())
    )
    cached = {"use_cache": False} if name in LOOKALIKES else {}
    short = copy.copy(want.greedy)
    short.sequences = short.sequences[:, : PROMPT + BATCH]
    short.logits = short.logits[:BATCH]
    same_tokens(generate(fast, inputs(name), BATCH, **cached), short)
    assert calls.take() == (0, 0)
    half = optimize(want.model, dtype=torch.bfloat16, deployment_mode=False)
    plain = error(logits(build(name).to(torch.bfloat16), name), want.logits)
    assert error(logits(half, name), want.logits) < max(1e-3, 1.5 * plain)


#: Families of `MORE` whose layers cannot run alone, at depth 2, and what `explain` says about them.
WHOLE_ONLY = {
    "falcon_gqa": "its forward takes no past_key_values",
    "chatglm": "its forward takes no past_key_values",
}


@pytest.mark.parametrize("name", [name for name in MORE if depth(name) == 3])
def test_one_program_per_layer(name: str, calls: Calls) -> None:
    """At depth 2, which transformers' own forward, loop and cache are around."""
    if OLD and name in ("gemma3", "cohere2", "gpt2"):
        pytest.skip("transformers 4 has other caches for these layers")
    want = stock(name)
    fast = optimize(want.model, depth=2)
    if name in WHOLE_ONLY:
        rows = [row for row in ipex_core.explain(fast).rows if row.step == "layer"]
        assert {row.text for row in rows} == {WHOLE_ONLY[name]}
        assert reached(fast)[0] == 1
        return
    assert reached(fast)[0] == 2, [
        r.text for r in ipex_core.explain(fast).rows if r.step == "layer"
    ]
    torch.testing.assert_close(
        logits(fast, name), want.logits, rtol=1e-4, atol=1e-4 * float(want.logits.abs().max())
    )
    calls.check(2, 1)
    cached = {"use_cache": False} if name in LOOKALIKES else {}
    short = copy.copy(want.greedy)
    short.sequences = short.sequences[:, : PROMPT + BATCH]
    short.logits = short.logits[:BATCH]
    same_tokens(generate(fast, inputs(name), BATCH, **cached), short)
    calls.check(2, BATCH)
    if want.batch is not None:
        same_tokens(generate(fast, padded(), BATCH), want.batch)
    same_beams(
        generate(fast, inputs(name), BEAM, num_beams=4, output_scores=True, **cached), want.beam
    )


@pytest.mark.parametrize(
    ("name", "deployment_mode"),
    [(name, True) for name in NAMES] + [(name, False) for name in MORE],
)
def test_int8_weights(name: str, deployment_mode: bool) -> None:
    """Against the stock model with the weights that the codes and scales stand for."""
    if OLD and name == "qwen2_window":
        pytest.skip(WRONG[name])
    config = ipex_quant.woq_qconfig(weight_dtype=ipex_quant.WoqWeightDtype.INT8)
    fast = optimize(stock(name).model, quantization_config=config, deployment_mode=deployment_mode)
    assert reached(fast)[0] == (depth(name) if deployment_mode else 1)
    reference = with_plain_weights(build(name), fast)
    want, got = logits(reference, name), logits(fast, name)
    torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2 * float(want.abs().max()))
    assert error(got, want) < 1e-4
