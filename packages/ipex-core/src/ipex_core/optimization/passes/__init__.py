# SPDX-License-Identifier: Apache-2.0
"""Passes of `ipex.optimize`, one file each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from ipex_core.library.spec import FLOATS
from ipex_core.module_swap.state_dict import state_of
from ipex_core.optimization.records import Log, Options


def run_on(model: nn.Module, sample: Any) -> None:
    """Run a model without gradients on a tuple or list of arguments, or a dict of keyword arguments."""
    with torch.no_grad():
        if isinstance(sample, dict):
            model(**sample)
        else:
            model(*sample)


@dataclasses.dataclass
class Context:
    """What a pass works on.

    Attributes:
        model: The model, already copied if a copy was asked for.
        options: Checked options.
        log: Where each decision is recorded.
        shapes: Module -> shape of its largest input, from ``sample_input``.
        sample: ``sample_input``, a tuple of arguments or a dict of keyword arguments, or None.
        owners: Parameter id -> the modules that hold it.
        paths: Module id -> all paths of the module.
        old: Ids of modules that an earlier call had already optimized.
    """

    model: nn.Module
    options: Options
    log: Log
    shapes: dict[nn.Module, torch.Size] = dataclasses.field(default_factory=dict)
    sample: Any = None
    owners: dict[int, list[nn.Module]] = dataclasses.field(default_factory=dict)
    paths: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    old: set[int] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        for path, module in self.model.named_modules(remove_duplicate=False):
            self.paths.setdefault(id(module), []).append(path)
        for module in self.model.modules():
            if state_of(module) is not None:
                self.old.add(id(module))
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.owners.setdefault(id(parameter), []).append(module)

    def modules(self, scripts: bool = False) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the modules that this call may change; with ``scripts``, over ScriptModules too."""
        for path, module in self.model.named_modules():
            script = isinstance(module, torch.jit.ScriptModule)
            if id(module) not in self.old and (scripts or not script):
                yield path, module

    def shared(self, module: nn.Module) -> bool:
        """Return whether a parameter of the module belongs to another module too."""
        own = (p for p in module._parameters.values() if p is not None)
        return any(len(self.owners[id(p)]) > 1 for p in own)


class Pass:
    """One step of the pipeline; `ipex_core.optimization.PASSES` has them in their order.

    Attributes:
        name: What records call the step.
        knob: The option that asks for it, none for a pass that is always done.
    """

    name: ClassVar[str]
    knob: ClassVar[str] = ""

    def applies(self, context: Context) -> bool:
        """Return whether the options ask for this pass."""
        return not self.knob or bool(getattr(context.options, self.knob))

    def apply(self, context: Context) -> None:
        """Change the model, or plan a change, and record each decision."""
        raise NotImplementedError

    def undo(self, model: nn.Module, log: Log) -> None:
        """Take back what `apply` did beyond the module states, which are undone together."""


def swap_reason(module: nn.Module) -> str | None:
    """Return why the class of a stock layer must stay, or None if it may be exchanged."""
    if "forward" in module.__dict__:
        return "forward was replaced on this instance"
    if torch._guards.detect_fake_mode() is not None:
        return "tensors have no values under FakeTensorMode"
    if "weight" in type(module).__dict__ or (
        "weight" in module.__dict__ and "weight" not in module._parameters
    ):
        return "weight is computed by a hook or a parametrization"
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        if isinstance(parameter, UninitializedParameter):
            return "parameters are not initialized yet"
        if type(parameter) is not nn.Parameter:
            return f"a parameter is a {type(parameter).__name__}"
        if parameter.device.type != "cpu":
            return f"parameters are on {parameter.device}"
        if parameter.dtype not in FLOATS:
            return f"a parameter has dtype {parameter.dtype}"
    return None
