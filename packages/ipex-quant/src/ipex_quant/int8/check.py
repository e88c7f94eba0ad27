# SPDX-License-Identifier: Apache-2.0
"""The accuracy gate of `convert`: the float and the INT8 model side by side on one batch."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ipex_core.errors import OpArgumentError
from ipex_core.optimization.records import quantisation_of
from ipex_quant.int8.boundary import Codes, Early
from ipex_quant.int8.dataflow import _tensors as tensors_of
from ipex_quant.int8.observe import Watch

__all__ = ["as_call", "collect_float", "compare"]

Tensor = torch.Tensor


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments of a batch."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


class _Outputs:
    """Outputs of modules and of the model."""

    def __init__(self) -> None:
        self.of: dict[str, Tensor] = {}
        self.model: list[Tensor] = []


def _keep(outputs: _Outputs, path: str, module: Any, args: Any, result: Any) -> None:
    if isinstance(result, Early):
        result = result.value
    if isinstance(result, Codes):  # a copy: reading these would make everyone read floats
        result = (result.codes.float() - result.scale.zero) * result.scale.scale
    first = next(tensors_of(result), None)
    if first is None or path in outputs.of:
        return
    outputs.of[path] = first.detach().float().clone()


def _run(model: nn.Module, paths: Any, args: Any, kwargs: Any) -> _Outputs:
    outputs = _Outputs()
    handles = []
    for path in paths:
        hook = functools.partial(_keep, outputs, path)
        handles.append(model.get_submodule(path).register_forward_hook(hook))
    try:
        with torch.no_grad():
            outputs.model = [t.float() for t in tensors_of(model(*args, **kwargs))]
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def collect_float(model: nn.Module, args: Any, kwargs: Any) -> _Outputs:
    """Run the prepared model without observing; keep what each module gives."""
    watches = [
        hook
        for module in model.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if isinstance(hook, Watch)
    ]
    for watch in watches:
        watch.enabled = False
    try:
        return _run(model, _candidates(model), args, kwargs)
    except Exception as error:
        raise OpArgumentError(
            f"convert: check must be a batch for the model, got one that fails with"
            f" {type(error).__name__}: {error}"
        ) from error
    finally:
        for watch in watches:
            watch.enabled = True


def _candidates(model: nn.Module) -> list[str]:
    """Return the paths whose outputs a layer may have to be compared with."""
    from ipex_quant.int8.state import state_of

    state = state_of(model)
    assert state is not None
    layers = state.plan.layers.values()
    return [
        *{p for it in layers for p in (it.path, *it.fused)},
        *state.plan.products,
        *state.dynamic,
        *(path for path, _ in state.activations.values()),
    ]


def sqnr(expected: Tensor, found: Tensor) -> float:
    """Return the ratio of signal and noise in decibels."""
    noise = (expected - found).square().sum().item()
    signal = expected.square().sum().item()
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def cosine(expected: Tensor, found: Tensor) -> float:
    """Return the mean cosine of the rows, of the images where there are some; rows of zeros do not count."""
    lead = 1 if expected.dim() > 3 else max(expected.dim() - 1, 0)
    rows = [t.double().reshape(*t.shape[:lead], -1).flatten(0, -2) for t in (expected, found)]
    counts = (rows[0] != 0).any(-1) | (rows[1] != 0).any(-1)
    if not bool(counts.any()):
        return 1.0
    first, second = (row[counts] for row in rows)
    return nn.functional.cosine_similarity(first, second, dim=-1).mean().item()


def compare(
    model: nn.Module,
    before: _Outputs,
    names: list[tuple[str, str, str]],
    args: Any,
    kwargs: Any,
    min_cosine: float,
) -> None:
    """Print the error of each layer and of the output, and warn about an output that is too far off."""
    after = _run(model, {place for _, _, place in names}, args, kwargs)
    rows = [("layer", "SQNR dB", "cosine")]
    for path, last, place in names:
        if last in before.of and place in after.of:
            expected, found = before.of[last], after.of[place]
            rows.append((path, f"{sqnr(expected, found):.1f}", f"{cosine(expected, found):.5f}"))
    worst = 1.0
    notes = []
    for number, (expected, found) in enumerate(zip(before.model, after.model, strict=True)):
        near = cosine(expected, found)
        worst = min(worst, near) if not math.isnan(near) else -1.0
        name = "output" if number == 0 else f"output {number}"
        rows.append((name, f"{sqnr(expected, found):.1f}", f"{near:.5f}"))
        if expected.dim() == 2 and expected.shape[1] > 1:
            same = (expected.argmax(-1) == found.argmax(-1)).float().mean().item()
            notes.append(f"{name}: the same largest element in {same:.1%} of {len(expected)} rows")
    width = max(len(row[0]) for row in rows)
    for row in rows:
        print(f"{row[0]:<{width}}  {row[1]:>7}  {row[2]:>8}")
    for note in notes:
        print(note)
    log = quantisation_of(model)
    if log is not None:
        log.notes += [f"check: cosine of the outputs {worst:.5f}", *notes]
    if worst < min_cosine:
        named = [(float(row[1]), row[0]) for row in rows[1 : len(rows) - len(before.model)]]
        hint = f"; the layer with the most noise is {min(named)[1]}" if named else ""
        warnings.warn(
            f"convert: the outputs of the INT8 model have a cosine of {worst:.4f} to those of the float"
            f" model, below {min_cosine}{hint}",
            stacklevel=3,
        )
