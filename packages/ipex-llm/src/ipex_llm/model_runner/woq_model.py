# SPDX-License-Identifier: Apache-2.0
"""Quantizing a model: its linear layers, and the experts of its mixtures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.ao.quantization import QConfig

from ipex_core.library.spec import check
from ipex_llm.arch import DecoderPlan, ExpertsPlan, LayerPlan, LinearPlan
from ipex_llm.arch.detect import Found
from ipex_llm.model_runner import woq_experts
from ipex_quant import quantize_linears
from ipex_quant.qconfig.weight_only import QConfigWoq
from ipex_quant.weight_only.convert import (
    ChosenLinear,
    choose_linears,
    woq_qconfig_of,
    woq_qconfigs,
)
from ipex_quant.weight_only.linear import WoqLinearModule

#: Name of the module with the experts, and why they were not quantized (None: they were).
Notes = list[tuple[str, nn.Module, str | None]]
Plan = TypeVar("Plan", DecoderPlan | None, LayerPlan | None)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What of a model is quantized, and how.

    Attributes:
        linears: The linear layers.
        skipped: Names of the linear layers that stay, with the reason.
        stacked: Stacked experts: name of their module, plan, configuration.
        notes: All mixtures of experts that are not linear layers.
        config: What was asked for.
        routers: Names of the layers that choose experts, and of others that stay.
    """

    linears: tuple[ChosenLinear, ...]
    skipped: dict[str, str]
    stacked: tuple[tuple[str, ExpertsPlan, QConfigWoq], ...]
    notes: Notes
    config: Any
    routers: tuple[str, ...]


def choose(model: nn.Module, plan: DecoderPlan | None, config: Any) -> Choice:
    """Return what `quantize` does with a model; the model stays as it is.

    Routers, which choose experts, stay in floating point.

    Args:
        model: The model.
        plan: Of its decoder, or None; experts are looked for in the model then.
        config: A `QConfigWoq`, or a mapping with one as global or for some modules.

    Raises:
        OpArgumentError: The configuration does not fit a layer.
    """
    given = getattr(config, "global_qconfig", config)
    check(
        not isinstance(given, QConfig),
        "optimize",
        "quantization_config",
        "be for weights only; quantize activations before, with ipex.quantization.prepare and convert",
        type(given).__name__,
    )
    first = woq_qconfigs("optimize", config, "quantization_config")[0]
    config = first if config is None else config
    paths = {id(module): name for name, module in model.named_modules()}
    found, notes = _mixtures(model, plan)
    stacked: list[tuple[str, ExpertsPlan, QConfigWoq]] = []
    for mixture in found:
        name = paths.get(id(mixture.module), "")
        if isinstance(mixture.gate_up, tuple) or woq_experts.owners(mixture.module):
            continue  # linear layers as all others, or quantized already
        reason = woq_experts.reason_against(mixture)
        qconfig = woq_qconfig_of(config, name, mixture.module)
        if qconfig is None:
            reason = reason or "the configuration has nothing for it"
        elif reason is None:
            woq_experts.check_group(mixture, name, qconfig)
            stacked.append((name, mixture, qconfig))
        notes.append((name, mixture.module, reason))
    kept = {m for one in found for m in (one.router, one.shared_gate) if m is not None}
    every = model.named_modules(remove_duplicate=False)
    routers = tuple(n for n, m in every if m in kept and isinstance(m, nn.Linear))
    reasons = dict.fromkeys(routers, "it chooses experts")
    reasons |= dict.fromkeys(_steps(model), "its block reads the weight without calling it")
    reasons |= dict.fromkeys(_mixing(model), "it mixes streams")
    kept_names = tuple(reasons)
    linears, skipped = choose_linears("optimize", model, config, kept_names)
    skipped |= reasons
    return Choice(tuple(linears), skipped, tuple(stacked), notes, config, kept_names)


def _steps(model: nn.Module) -> Iterator[str]:
    """Yield the names of the layers that blocks of Mamba never call, since they add the bias later."""
    for name, module in model.named_modules(remove_duplicate=False):
        step = getattr(module, "dt_proj", None)
        if isinstance(step, nn.Linear) and getattr(module, "A_log", None) is not None:
            yield f"{name}.dt_proj".lstrip(".")


def _mixing(model: nn.Module) -> Iterator[str]:
    """Yield the names of the layers that give factors on streams: a few rows, or of a few features."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(getattr(module, "prediction_coefs", None), nn.Linear):
            parts = ("modality_router", "prediction_coefs", "correction_coefs")
            yield from (f"{name}.{part}".lstrip(".") for part in parts)


def quantize(
    model: nn.Module, plan: DecoderPlan | None, choice: Choice, layers: Sequence[Found] = ()
) -> tuple[DecoderPlan | None, list[Found]]:
    """Quantize a model in place.

    Args:
        model: The model.
        plan: Of its decoder, or None.
        choice: What `choose` returned for it.
        layers: Its decoder layers, if they have plans of their own.

    Returns:
        The plan and the decoder layers with the new modules.

    Raises:
        OpArgumentError: A weight is not finite.
    """
    names = dict(model.named_modules(remove_duplicate=False))
    quantize_linears(model, choice.config, choice.routers)
    for name, mixture, qconfig in choice.stacked:
        woq_experts.quantize(mixture, name, qconfig)
    return remapped(model, names, plan, layers)


def remapped(
    model: nn.Module,
    names: Mapping[str, nn.Module],
    plan: DecoderPlan | None,
    layers: Sequence[Found],
) -> tuple[DecoderPlan | None, list[Found]]:
    """Return a plan and decoder layers with the modules that a model has now.

    Args:
        model: The model.
        names: Its modules when the plan was made.
        plan: The plan, or None.
        layers: The layers.
    """
    new = dict(model.named_modules(remove_duplicate=False))
    changed = {
        id(old): new[name] for name, old in names.items() if new.get(name) not in (None, old)
    }
    found = [dataclasses.replace(layer, plan=_remap(layer.plan, changed)) for layer in layers]
    return _remap(plan, changed), found


def _mixtures(model: nn.Module, plan: DecoderPlan | None) -> tuple[list[ExpertsPlan], Notes]:
    """Return the mixtures of experts of a model, and those that are not understood."""
    from ipex_llm.arch.detect import MatchError, find_mixtures

    if plan is not None:
        return plan.mixtures, []
    found: list[ExpertsPlan] = []
    notes: Notes = []
    for name, block, mixture in find_mixtures(model):
        if isinstance(mixture, MatchError):
            notes.append((name, block, mixture.reason))
        else:
            found.append(mixture)
    return found, notes


def _remap(plan: Plan, modules: dict[int, nn.Module]) -> Plan:
    """Return a plan with other modules in the place of those whose id is a key, and quantized experts."""

    def walk(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return modules.get(id(value), value)
        if isinstance(value, tuple):
            return tuple(walk(one) for one in value)
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        changes = {f.name: walk(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, LinearPlan) and any(
            isinstance(m, WoqLinearModule) for m in changes["modules"]
        ):
            changes["transposed"] = False
        if isinstance(value, ExpertsPlan) and (owners := woq_experts.owners(value.module)):
            gate_up, down = (getattr(owner, name) for owner, name in owners)
            changes |= {"gate_up": gate_up, "down": down}
        return dataclasses.replace(value, **changes)

    result: Plan = walk(plan)
    return result
