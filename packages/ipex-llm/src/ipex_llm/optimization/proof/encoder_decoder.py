# SPDX-License-Identifier: Apache-2.0
"""The proof for the decoder of an encoder-decoder: probes on a small copy, with random rows of an encoder."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ipex_llm.arch.encoder_decoder import PairPlan
from ipex_llm.optimization.proof import prove
from ipex_llm.optimization.proof.probes import Probe, _cache, _ids, _with, outcome
from ipex_llm.optimization.proof.prove import WEIGHTS, _subject, _text, compared
from ipex_llm.optimization.proof.small import config_of, reach, small_model
from ipex_llm.patch.decoder import silence

__all__ = ["prove_pair"]

#: Rows of the encoder.
ROWS = 11


class _Failed(Exception):
    """The probe that failed or was skipped."""


def _given(rows: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
    from transformers.modeling_outputs import BaseModelOutput

    given: dict[str, Any] = {"encoder_outputs": BaseModelOutput(last_hidden_state=rows)}
    return given if mask is None else given | {"attention_mask": mask}


def _whole(model: Any, rows: Tensor, ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    return [outcome(model(**_given(rows, mask), decoder_input_ids=ids, use_cache=False))]


def _steps(
    model: Any, rows: Tensor, ids: Tensor, first: int, mask: Tensor | None = None
) -> list[Tensor]:
    found, cache, start = [], None, 0
    for end in (first, *range(first + 1, ids.shape[1] + 1)):
        more: dict[str, Any] = {} if cache is None else _with(model, cache)
        given = _given(rows, mask)
        result = model(**given, decoder_input_ids=ids[:, start:end], use_cache=True, **more)
        cache, start = _cache(result), end
        found.append(outcome(result))
    return found


def _generated(model: Any, rows: Tensor, beams: int) -> list[Tensor]:
    from transformers import GenerationMixin

    # Not one of the model's own (Whisper's), which is made for whole recordings.
    made = GenerationMixin.generate(
        model, **_given(rows), max_length=6, do_sample=False, num_beams=beams
    )
    return [made.float()]


def _probes(config: Any, length: int, width: int) -> Iterator[Probe]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, ROWS, width, generator=generator)
    ids = _ids(config, 2, length, 0)
    yield Probe(f"{length} tokens", partial(_whole, rows=rows, ids=ids))
    yield Probe("one token", partial(_whole, rows=rows, ids=ids[:, :1]))
    yield Probe("token by token", partial(_steps, rows=rows, ids=ids, first=1))
    yield Probe("a prompt, then token by token", partial(_steps, rows=rows, ids=ids, first=4))
    twice = rows.repeat_interleave(2, 0)
    many, ids = _ids(config, 4, min(length, 12), 1), ids[:, :12]
    yield Probe("two sequences of a text", partial(_steps, rows=twice, ids=many, first=2))
    for side, hidden in (("right", slice(-4, None)), ("left", slice(0, 4))):
        mask = torch.ones(2, ROWS, dtype=torch.int64)
        mask[0, hidden] = 0
        name = f"padding on the {side}"
        yield Probe(name, partial(_steps, rows=rows, ids=ids, first=1, mask=mask), "padding")
        both = mask.repeat_interleave(2, 0)
        run = partial(_steps, rows=twice, ids=many, first=2, mask=both)
        yield Probe(f"{name} and two sequences of a text", run, "padding")
    yield Probe("generate", partial(_generated, rows=rows, beams=1))
    yield Probe("generate with beams", partial(_generated, rows=rows, beams=3))


def _facts(plan: PairPlan) -> tuple[object, ...]:
    """Return what makes two plans ones of a kind."""
    layers = {(p.bias is None, p.mlp.gate is None, p.mlp.activation) for p in plan.layers}
    around = (plan.embedding_norm, plan.final_norm, plan.positions, plan.logit_bias)
    return plan.norm_first, plan.masked, frozenset(layers), *(one is None for one in around)


@dataclasses.dataclass(frozen=True, slots=True)
class _Verdict:
    facts: tuple[object, ...] = ()
    calls: frozenset[str] = frozenset()
    reason: str = ""


_known: dict[tuple[object, ...], _Verdict] = {}


def _small(kind: type, config: Any) -> nn.Module:
    problem: Exception | None = None
    for unknown in (True, False):
        try:
            model = small_model(kind, config, unknown)
            if sum(p.numel() for p in model.parameters()) > WEIGHTS:
                raise ValueError("it has too many weights")
            width = int(config_of(model).hidden_size)
            _whole(model, torch.zeros(1, ROWS, width), torch.ones(1, 8, dtype=torch.int64))
        except Exception as error:  # whatever a model does with numbers that it does not expect
            problem = error
        else:
            return model
    text = str(problem).strip().split("\n")[0][:120]
    raise _Failed(f"no small copy can be made: {type(problem).__name__}: {text}")


def _attached(stock: nn.Module, dtype: torch.dtype, calls: frozenset[str]) -> nn.Module:
    from ipex_llm.patch import optimize_rest
    from ipex_llm.patch.encoder_decoder import attach_pair, find_pair

    fast = copy.deepcopy(stock)
    plan, reason = find_pair(fast)
    if plan is None:
        raise _Failed(f"its small copy is not understood: {reason}")
    plan = dataclasses.replace(plan, stock_calls=calls)
    optimize_rest(fast, dtype, [], plan)
    reason = attach_pair(fast, plan)
    if reason is not None:
        raise _Failed(reason)
    return fast


def _check(started: float, stock: nn.Module, fast: nn.Module, probe: Probe) -> str:
    if time.thread_time() - started > prove.BUDGET:
        raise _Failed(f"probe {probe.name!r} was skipped: the time for proofs is over")
    try:
        want = probe.run(stock)
    except Exception:  # not a call of this model
        return ""
    return compared(probe, fast, want)


def _half(stock: nn.Module, fast: nn.Module, length: int, width: int) -> str:
    """Compare in bfloat16, from which the stock forward in bfloat16 is as far away."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2, ROWS, width, generator=generator)
    ids = _ids(config_of(stock), 2, length, 1)
    want = _whole(stock, rows, ids)[0]
    plain_model = copy.deepcopy(stock).bfloat16()
    off, plain = (
        float(
            (
                1
                - nn.functional.cosine_similarity(
                    _whole(model, rows.bfloat16(), ids)[0], want, dim=-1
                )
            ).median()
        )
        for model in (fast, plain_model)
    )
    return "" if off < max(2e-3, 2 * plain) else f"probe 'bfloat16' is off by {off:.1e}"


def _prove(kind: type, config: Any, half: bool) -> _Verdict:
    from ipex_llm.arch.detect.encoder_decoder import match_pair

    started = time.thread_time()
    stock = _small(kind, config)
    own = config_of(stock)
    width = int(own.hidden_size)
    plan = match_pair(copy.deepcopy(stock))
    length = min(reach(own), plan.max_positions or 1 << 20, 80)
    calls: frozenset[str] = frozenset()
    fast = _attached(stock, torch.float32, calls)
    for probe in _probes(own, length, width):
        why = _check(started, stock, fast, probe)
        if why and probe.call:
            calls |= {probe.call}
            fast = _attached(stock, torch.float32, calls)
            why = _check(started, stock, fast, probe)
        if why:
            raise _Failed(why)
    if half:
        fast = _attached(stock, torch.bfloat16, calls)
        if why := _half(stock, fast, length, width):
            raise _Failed(why)
    return _Verdict(_facts(plan), calls)


def prove_pair(
    model: nn.Module, plan: PairPlan, dtype: torch.dtype
) -> tuple[PairPlan | None, str | None]:
    """Return the plan of an encoder-decoder with the calls that it must leave alone, or None and what is not proven.

    Args:
        model: The model.
        plan: Its plan.
        dtype: That it will have.
    """
    subject = _subject(model, None)
    if subject is None:
        return None, "not proven: it has no class and configuration of its own"
    kind, config = subject
    half = dtype in (torch.bfloat16, torch.float16)
    key = kind, _text(config), half, getattr(config, "_attn_implementation", None)
    verdict = _known.get(key)
    if verdict is None:
        try:
            with torch.no_grad(), silence():
                verdict = _prove(kind, config, half)
        except _Failed as error:
            verdict = _Verdict(reason=str(error))
        except ValueError as error:  # a MatchError of the small copy
            verdict = _Verdict(reason=f"its small copy: {error}")
        _known[key] = verdict
    if verdict.reason:
        return None, f"not proven: {verdict.reason}"
    if verdict.facts != _facts(plan):
        return None, "not proven: its small copy is of another kind"
    return dataclasses.replace(plan, stock_calls=verdict.calls), None
