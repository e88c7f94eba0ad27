# SPDX-License-Identifier: Apache-2.0
"""Runs the probes on a small copy of a model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from ipex_core.kernels.machine import own_threads
from ipex_core.module_swap.base import original_class
from ipex_llm.arch import (
    AttentionPlan,
    ConvPlan,
    DecoderPlan,
    DeltaPlan,
    ExpertsPlan,
    LayerPlan,
    MixerPlan,
    ScanPlan,
    SelectivePlan,
    gated_norms,
)
from ipex_llm.optimization.proof.probes import Probe, distance, outcome, probes
from ipex_llm.optimization.proof.small import (
    POSITIONS,
    chosen_layers,
    config_of,
    kinds_of_layers,
    reach,
    small_model,
)
from ipex_llm.patch.decoder import silence

logger = logging.getLogger("ipex.llm")

Key = tuple[object, ...]

#: Seconds of a processor that a proof may take. It runs on one thread: ops of a small copy are shorter than the wait
#: for a thread that other programs hold up, which would count.
BUDGET = 4.0
#: Relative difference of float32 that is rounding, also in sums of another order and with kernels of other ISA levels:
#: what is proven differs by 4e-6 at most. A small copy is float32; `_Case.check_half` has bounds for bfloat16.
TOLERANCE = 1e-4
#: More than that is allowed up to this, where the last bits of the weights move the stock model a third as far.
LOOSE = 1e-3
#: Texts that are read at most until each expert was taken.
TEXTS = 8
#: Weights that a small copy may have.
WEIGHTS = 8_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What is proven of the models of a configuration.

    Attributes:
        keys: Kinds of layers that are proven (`layer_key`).
        calls: Calls that must run the stock forward.
        reason: Why something is not proven; empty if all is.
    """

    keys: frozenset[Key]
    calls: frozenset[str] = frozenset()
    reason: str = ""


class _Failed(Exception):
    """The probe that failed or was skipped."""


def _sensitivity(stock: nn.Module, probe: Probe, want: list[torch.Tensor]) -> float:
    """Return how far the answer of a model moves when its weights move by their last bit."""
    worst = 0.0
    for seed in range(2):
        moved = copy.deepcopy(stock)
        generator = torch.Generator().manual_seed(seed)
        for parameter in moved.parameters():
            if parameter.is_floating_point():
                steps = torch.randint(-1, 2, parameter.shape, generator=generator)
                parameter.mul_(1 + steps * torch.finfo(parameter.dtype).eps / 2)
        worst = max(worst, distance(probe.run(moved), want))
    return worst


def compared(
    probe: Probe,
    fast: nn.Module,
    want: list[torch.Tensor],
    sensitivity: Callable[[], float] | None = None,
) -> str:
    """Return why the answer of a model to a probe is not what is wanted, or an empty text.

    Args:
        probe: The probe.
        fast: The model.
        want: What the stock model answers.
        sensitivity: Returns how far its own rounding moves the stock model, which may be more than `TOLERANCE`.
    """
    try:
        got = probe.run(fast)
    except Exception as error:
        text = str(error).strip().split("\n")[0][:120]
        return f"probe {probe.name!r} raises {type(error).__name__}: {text}"
    off = distance(got, want)
    if off <= TOLERANCE:
        return ""
    if sensitivity is not None and off <= min(LOOSE, 3 * sensitivity()):
        return ""
    return f"probe {probe.name!r} is off by {off:.1e}"


_PARTS_OF_ATTENTION = (
    *("alibi_slopes", "sinks", "query_norm", "temperature", "query_factors", "gate_bias"),
    *("value_dim", "value_norm", "source", "output_norm", "key_bias", "difference", "near"),
    *("experts", "shared"),
)
_PARTS_OF_LAYERS = (
    *("input_norm", "mlp_norm", "post_attention_norm", "post_mlp_norm", "token_block", "low"),
    *("ngrams", "picture", "shortcut", "gains", "size", "rates"),
)
_PARTS_OF_EXPERTS = (
    *("correction_bias", "shared", "shared_gate", "entry", "norms", "expert_scales", "up"),
    *("added", "always", "table"),
)


def _attention_key(plan: AttentionPlan | MixerPlan | None) -> tuple[object, ...]:
    if plan is None:
        return ()
    if not isinstance(plan, AttentionPlan):
        norm = isinstance(plan, (DeltaPlan, ScanPlan)) and plan.norm is None
        groups: object = False
        if isinstance(plan, ScanPlan):
            groups = plan.norm_groups > 1, plan.limits is None
        elif isinstance(plan, SelectivePlan):
            groups = plan.step_norm is None, plan.key_norm is None, plan.query_norm is None
        order = plan.input.order is None, len(plan.input.modules)
        delta: tuple[object, ...] = ()
        if isinstance(plan, DeltaPlan):
            delta = plan.strength, plan.each, plan.opening, plan.lowest < 0, plan.up is None
        bias = plan.conv.bias if isinstance(plan, ConvPlan) else None
        return type(plan), bias is None, norm, groups, *delta, *order
    rope = plan.rope
    return (
        None if rope is None else (rope.kind, rope.half, rope.turn),
        plan.latent is None or (plan.latent.common_norm is None, plan.latent.doubled),
        *(plan.window >= 0, plan.softcap > 0, plan.norm_after_rope, plan.gated, plan.opening),
        *(plan.keys_as_values, plan.output.added is None, plan.windows is None),
        plan.apart is None or plan.apart.moving,
        *(getattr(plan, name) is None for name in _PARTS_OF_ATTENTION),
    )


def layer_key(kinds: Sequence[Key], index: int, plan: LayerPlan) -> Key:
    """Return what makes layers one kind: what the configuration says of them, and what the plan is made of."""
    mlp = plan.mlp
    parts: list[object] = [
        kinds[index] if index < len(kinds) else (),
        *_attention_key(plan.attention),
        *_attention_key(plan.beside),
        *(() if plan.side is None else ("side", *_attention_key(plan.side.attention))),
        *(plan.parallel, plan.residual_after_norm, plan.residual_factors == (1.0, 1.0)),
        *(type(plan.streams), len([*gated_norms(plan)])),
        getattr(plan.streams, "messages", None) is None,
        *(getattr(plan, name) is None for name in _PARTS_OF_LAYERS),
    ]
    if isinstance(mlp, ExpertsPlan):
        parts += [mlp.scoring, mlp.renormalize, mlp.groups > 1, mlp.scale_input, mlp.activation]
        parts += [mlp.gated, mlp.zeros > 0, mlp.apart]
        parts += [getattr(mlp, name) is None for name in _PARTS_OF_EXPERTS]
    elif mlp is not None:
        parts += [mlp.gate is None, mlp.fused, mlp.cutoff is None, mlp.learned is None]
        parts += [mlp.inner_norm is None, mlp.swiglu is None]
    return tuple(parts)


_known: dict[tuple[object, ...], Verdict] = {}


def _text(config: Any) -> str:
    """Return a configuration as text, without what says nothing about the computation."""
    values = config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"):
        values.pop(name, None)
    return json.dumps(values, sort_keys=True, default=str)


def _subject(model: nn.Module, decoder: nn.Module | None) -> tuple[type, Any] | None:
    """Return the class and the configuration to prove: of the model, or of the decoder in a larger model."""
    for module in (model, decoder):
        if module is None:
            continue
        kind = original_class(module)
        config = getattr(module, "config", None)
        own = config is not None and hasattr(config, "to_dict") and hasattr(kind, "config_class")
        if own and config_of(module) is config:
            return kind, config
    return None


def small_copy(model: nn.Module) -> nn.Module | None:
    """Return a small copy of a model with weights of its own, or None if none can be made."""
    subject = _subject(model, None)
    if subject is None:
        return None
    try:
        with torch.no_grad(), silence(), own_threads(1):
            return _Case(*subject, limited=False).stock
    except _Failed:
        return None


class _Case:
    """A small copy and what its stock forward answers."""

    def __init__(self, kind: type, config: Any, limited: bool) -> None:
        self.started = time.thread_time()
        self.limited = limited
        self.kinds = kinds_of_layers(config)
        self.chosen = chosen_layers(config)
        self.stock = self._make(kind, config)
        self.config = config_of(self.stock)
        self.reach = reach(self.config)
        self.answers: dict[str, list[torch.Tensor] | None] = {}
        self._moves: float | None = None

    def _make(self, kind: type, config: Any) -> nn.Module:
        problem: Exception | None = None
        for unknown in (True, False):
            try:
                model = small_model(kind, config, unknown)
                if sum(p.numel() for p in model.parameters()) > WEIGHTS:
                    raise ValueError("it has too many weights")
                with torch.no_grad():
                    size = reach(config_of(model))
                    outcome(
                        model(input_ids=torch.ones(1, size, dtype=torch.int64), use_cache=False)
                    )
            except Exception as error:  # whatever a model does with numbers that it does not expect
                problem = error
            else:
                return model
        text = str(problem).strip().split("\n")[0][:120]
        raise _Failed(f"no small copy can be made: {type(problem).__name__}: {text}")

    def positions(self) -> int:
        for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            value = getattr(self.config, name, None)
            if isinstance(value, int) and value > 24:
                return value
        return POSITIONS

    def key(self, index: int, plan: LayerPlan) -> Key:
        """Return the kind of a layer."""
        real = self.chosen[index] if index < len(self.chosen) else len(self.kinds)
        return layer_key(self.kinds, real, plan)

    @cached_property
    def plans(self) -> list[LayerPlan | None]:
        """The plan of each layer alone; None where a layer is not understood."""
        from ipex_llm.arch.detect import layer_plans

        return [layer.plan for layer in layer_plans(self.stock)]

    @cached_property
    def keys(self) -> list[Key | None]:
        """The kind of each layer; None where a layer is not understood."""
        return [None if plan is None else self.key(at, plan) for at, plan in enumerate(self.plans)]

    def answer(self, probe: Probe) -> list[torch.Tensor] | None:
        """Return what the stock forward answers; None if it raises."""
        if probe.name not in self.answers:
            try:
                self.answers[probe.name] = probe.run(self.stock)
            except Exception:  # not a call of this model
                self.answers[probe.name] = None
        return self.answers[probe.name]

    def check(self, fast: nn.Module, probe: Probe) -> str:
        """Return why a probe fails, or an empty text."""
        if self.limited and time.thread_time() - self.started > BUDGET:
            raise _Failed(f"probe {probe.name!r} was skipped: the time for proofs is over")
        want = self.answer(probe)
        if want is None:
            return ""
        return compared(probe, fast, want, lambda: self.sensitivity(probe, want))

    def sensitivity(self, probe: Probe, want: list[torch.Tensor]) -> float:
        """Return how far the stock model moves with the last bits of its weights, for the first probe that asks."""
        if self._moves is None:
            self._moves = _sensitivity(self.stock, probe, want)
        return self._moves

    def check_half(self, fast: nn.Module) -> str:
        """Compare in bfloat16, from which the stock forward in bfloat16 is as far away."""
        from ipex_llm.optimization.proof.probes import _ids

        ids = _ids(self.config, 2, min(self.reach, self.positions()), 0)
        given = {"input_ids": ids, "use_cache": False}
        want = outcome(self.stock(**given))

        def off(model: nn.Module) -> float:
            got = outcome(model(**given))
            return float((1 - nn.functional.cosine_similarity(got, want, dim=-1)).median())

        try:
            plain = off(copy.deepcopy(self.stock).bfloat16())
        except RuntimeError:  # without a cache xLSTM multiplies what is of two dtypes
            plain = 0.0
        more = off(fast)
        return "" if more < max(2e-3, 2 * plain) else f"probe 'bfloat16' is off by {more:.1e}"


def _texts(case: _Case, plans: Sequence[LayerPlan]) -> int:
    """Return how many texts are needed until each expert was taken."""
    from ipex_llm.arch.reference import _route
    from ipex_llm.optimization.proof.probes import _ids

    mixtures = [one for plan in plans for one in plan.mixtures if one.table is None]
    if not mixtures:
        return 1
    taken: list[set[int]] = [set() for _ in mixtures]
    rows: dict[nn.Module, torch.Tensor] = {}
    blocks = {m: b for b in case.stock.modules() for m in b.children()}

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        first = args[0] if args else kwargs.get("hidden_states")
        if isinstance(first, torch.Tensor):
            rows[module] = first.detach()

    outer = [blocks.get(plan.router, plan.router) for plan in mixtures]
    length = min(case.reach, case.positions())
    with contextlib.ExitStack() as hooks:
        for plan, block in zip(mixtures, outer, strict=True):
            for module in {plan.router, block}:
                hooks.enter_context(module.register_forward_pre_hook(keep, with_kwargs=True))
        for seed in range(TEXTS):
            case.stock(input_ids=_ids(case.config, 2, length, seed), use_cache=False)
            for plan, block, found in zip(mixtures, outer, taken, strict=True):
                x = rows.get(plan.router, rows.get(block))
                width = plan.router_weight.shape[-1]
                if x is not None and x.shape[-1] == width:
                    found.update(_route(plan, x.reshape(-1, width).float())[1].flatten().tolist())
            pairs = zip(taken, mixtures, strict=True)
            if all(len(found) == plan.experts + plan.zeros for found, plan in pairs):
                return max(2, seed + 1)
    return TEXTS


def _run(
    case: _Case,
    attach: Callable[[frozenset[str]], nn.Module],
    texts: int,
    loop: bool,
    states: bool = False,
    pictures: bool = False,
    calls: frozenset[str] = frozenset(),
) -> frozenset[str]:
    """Run all probes.

    Args:
        case: The small copy.
        attach: Returns the copy with programs, for calls that run the stock forward.
        texts: How many texts to read.
        loop: Whether ``generate`` runs a loop of ours.
        states: Whether layers keep a state.
        pictures: Whether layers read pictures.
        calls: Calls that are known to run the stock forward.

    Returns:
        The calls that must run the stock forward.

    Raises:
        _Failed: Something else differs.
    """
    fast = attach(calls)
    every = list(probes(case.config, case.reach, case.positions(), texts, loop, pictures))

    def failure(model: nn.Module, probe: Probe) -> str:
        why = case.check(model, probe)
        if why and states and probe.whole is not None:
            whole = probe.whole(case.stock)
            why = compared(probe, model, whole, partial(case.sensitivity, probe, whole))
        return why

    for probe in [one for one in every if one.call not in calls]:
        why = failure(fast, probe)
        # Where a forward is given no mask (RWKV), padding shows in ``generate`` alone.
        others = ("padding", probe.call) if probe.call == "generate" and states else (probe.call,)
        for call in others:
            if why and call:
                tried = calls | {call}
                other = attach(tried)
                if not failure(other, probe):
                    calls, fast, why = tried, other, ""
        if why:
            raise _Failed(why)
    return calls


def _with_programs(
    case: _Case, calls: frozenset[str], dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Return a copy that runs its whole plan, but for calls that run the stock forward."""
    from ipex_llm.patch import attach_decoder, find_plan, optimize_rest

    fast = copy.deepcopy(case.stock)
    plan, reason = find_plan(fast)
    if plan is None:
        raise _Failed(f"its small copy is not understood: {reason}")
    plan = dataclasses.replace(plan, stock_calls=calls)
    optimize_rest(fast, dtype, [], plan, fuse=False)
    reason = attach_decoder(fast, plan, None)
    if reason is not None:
        raise _Failed(reason)
    return fast


def _stack(case: _Case) -> Verdict:
    from ipex_llm.arch.detect import match

    plan: DecoderPlan = match(case.stock)
    loop = hasattr(case.stock, "generate") and plan.head is not None
    texts = _texts(case, plan.layers)
    make = partial(_with_programs, case)
    calls: frozenset[str] = frozenset()
    if any(a.windows for a in plan.attentions):  # which count places, with padding in them
        calls |= {"padding", "padding without position_ids", "position_ids"}
    calls = _run(case, make, texts, loop, plan.has_states, bool(plan.pictures), calls)
    keys = frozenset(case.key(at, one) for at, one in zip(plan.places, plan.layers, strict=True))
    return Verdict(keys, calls)


def _half_stack(case: _Case, verdict: Verdict) -> Verdict:
    """Return what of a verdict holds in bfloat16."""
    if why := case.check_half(_with_programs(case, verdict.calls, torch.bfloat16)):
        raise _Failed(why)
    return verdict


def _with_layers(
    case: _Case, wanted: frozenset[Key], dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Return a copy whose layers of the wanted kinds run their plans."""
    from ipex_llm.arch.detect import layer_plans
    from ipex_llm.patch import attach_layers, optimize_rest

    fast = copy.deepcopy(case.stock)
    layers = [
        layer if key in wanted else layer.without("not this one")
        for layer, key in zip(layer_plans(fast), case.keys, strict=True)
    ]
    optimize_rest(fast, dtype, layers)
    attach_layers(fast, layers)
    return fast


def _working(every: frozenset[Key], why_not: Callable[[frozenset[Key]], str]) -> Verdict:
    """Return which kinds of layers work, alone and together.

    Args:
        every: All kinds.
        why_not: Returns why some of them do not work together, or an empty text.
    """
    reason = why_not(every)
    if not reason:
        return Verdict(every)
    if len(every) == 1:
        return Verdict(frozenset(), reason=reason)
    good = frozenset(key for key in sorted(every, key=str) if not why_not(frozenset({key})))
    if good and (why := why_not(good)):
        return Verdict(frozenset(), reason=why)
    return Verdict(good, reason=reason)


def _layers(case: _Case) -> Verdict:
    every = frozenset(key for key in case.keys if key is not None)
    if not every:
        return Verdict(every, reason="its small copy has no layer that is understood")
    texts = _texts(case, [plan for plan in case.plans if plan is not None])

    def why_not(wanted: frozenset[Key]) -> str:
        fast = _with_layers(case, wanted)
        for probe in probes(case.config, case.reach, case.positions(), texts, False):
            if why := case.check(fast, probe):
                return why
        return ""

    return _working(every, why_not)


def _half_layers(case: _Case, verdict: Verdict) -> Verdict:
    """Return what of a verdict holds in bfloat16."""
    half = _working(
        verdict.keys,
        lambda wanted: case.check_half(_with_layers(case, wanted, torch.bfloat16)),
    )
    return dataclasses.replace(half, reason=half.reason or verdict.reason)


def _verdict(
    model: nn.Module, decoder: nn.Module | None, dtype: torch.dtype, limited: bool, whole: bool
) -> tuple[Verdict, Sequence[Key]]:
    subject = _subject(model, decoder)
    if subject is None:
        return Verdict(frozenset(), reason="it has no class and configuration of its own"), ()
    kind, config = subject
    known = (kind, _text(config), getattr(config, "_attn_implementation", None), whole)
    # What is compared in float32 holds for the other dtypes too, which ask for a little more.
    floats, halves = (*known, False), (*known, True)
    wanted = halves if dtype in (torch.bfloat16, torch.float16) else floats
    if wanted not in _known:
        began = time.perf_counter()
        try:
            with torch.no_grad(), silence(), own_threads(1):
                case = _Case(kind, config, limited)
                if floats not in _known:
                    _known[floats] = _stack(case) if whole else _layers(case)
                if wanted is halves:
                    more = _half_stack if whole else _half_layers
                    found = _known[floats]
                    _known[halves] = more(case, found) if found.keys else found
        except (_Failed, ValueError) as error:  # ValueError: a MatchError of the small copy
            own = "" if isinstance(error, _Failed) else "its small copy: "
            _known[wanted] = Verdict(frozenset(), reason=f"{own}{error}")
            _known.setdefault(floats, _known[wanted])
        logger.debug("proof of %s: %.2f s", kind.__name__, time.perf_counter() - began)
    return _known[wanted], kinds_of_layers(config)


def prove_stack(
    model: nn.Module, plan: DecoderPlan, dtype: torch.dtype, limited: bool = True
) -> tuple[DecoderPlan | None, str | None]:
    """Return the plan of a whole decoder with the calls that it must leave alone, or None and what is not proven.

    Args:
        model: The model.
        plan: Its plan.
        dtype: That it will have.
        limited: Whether the proof may only take `BUDGET` (not where several processes must come to one result).
    """
    verdict, kinds = _verdict(model, plan.decoder, dtype, limited, True)
    if not verdict.keys:
        return None, f"not proven: {verdict.reason}"
    for index, layer in zip(plan.places, plan.layers, strict=True):
        if layer_key(kinds, index, layer) not in verdict.keys:
            return None, f"not proven: layer {index} is of a kind that its small copy does not have"
    return dataclasses.replace(plan, stock_calls=verdict.calls), None


def prove_layers(
    model: nn.Module,
    plans: Iterator[tuple[int, LayerPlan]] | Sequence[tuple[int, LayerPlan]],
    dtype: torch.dtype,
) -> dict[int, str]:
    """Return the numbers of the layers that are not proven, each with the reason.

    Args:
        model: The model.
        plans: Number and plan of each layer.
        dtype: That the model will have.
    """
    plans = list(plans)
    if not plans:
        return {}
    owner = _owner(model, plans[0][1].module)
    verdict, kinds = _verdict(model, owner, dtype, True, False)
    reason = verdict.reason or "its small copy has no layer of this kind"
    return {
        index: f"not proven: {reason}"
        for index, plan in plans
        if layer_key(kinds, index, plan) not in verdict.keys
    }


def _owner(model: nn.Module, layer: nn.Module) -> nn.Module | None:
    """Return the innermost module around a layer that is a model of its own."""
    found = None
    for module in model.modules():
        own = hasattr(type(module), "config_class") and hasattr(module, "config")
        if own and module is not layer and any(part is layer for part in module.modules()):
            found = module
    return found
