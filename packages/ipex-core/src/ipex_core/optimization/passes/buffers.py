# SPDX-License-Identifier: Apache-2.0
"""Cast of the buffers without which a model with cast parameters does not run.

Buffers stay float32 when parameters are cast. Where a forward multiplies matrices of which one comes from a buffer (the
decays of MiniMax), torch refuses the two dtypes. Such a model is found by running it: on ``sample_input``, or on the
token ids that transformers has for each of its models. Nothing is run where no buffer could be the cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ipex_core.library.spec import dtype_name
from ipex_core.module_swap.state_dict import attach, realize, revert
from ipex_core.optimization.passes.base import Context, Pass, run_on
from ipex_core.optimization.passes.cast import wide_names

__all__ = ["Buffers"]

#: What angles are computed from; rounding it turns them by more the farther a token is.
_ROTARY = "inv_freq"


class Buffers(Pass):
    """Cast buffers, if the model does not run otherwise."""

    name = "buffers"

    def applies(self, context: Context) -> bool:
        """Return whether a reduced dtype was asked for."""
        return context.options.reduced is not None

    def apply(self, context: Context) -> None:
        """Run the model, and cast buffers if it raises."""
        found = list(_candidates(context))
        inputs = _inputs(context) if found else None
        if inputs is None or _runs(context.model, inputs) is not False:
            return
        beside = [one for one in found if any(p.is_floating_point() for p in one[1].parameters())]
        for chosen in (beside, found):
            if chosen and self._cast(context, chosen, inputs):
                return

    def _cast(
        self, context: Context, chosen: list[tuple[str, nn.Module, str]], inputs: Any
    ) -> bool:
        """Cast buffers; put them back and return False if the model does not run with them either."""
        dtype = context.options.reduced
        assert dtype is not None
        modules = {id(module): (path, module) for path, module, _ in chosen}
        for _, module, name in chosen:
            attach(module).buffers[name] = dtype
        for _, module in modules.values():
            realize(module)
        if _runs(context.model, inputs):
            for path, module in modules.values():
                names = ", ".join(name for _, other, name in chosen if other is module)
                text = (
                    f"buffers cast to {dtype_name(dtype)}, without which the model raises: {names}"
                )
                context.log.add(path, module, self.name, True, text)
            return True
        for _, module in modules.values():
            revert(module)
            attach(module).buffers.clear()
            realize(module)
        return False


def _candidates(context: Context) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, module and name of the buffers that may be cast."""
    wide = wide_names(context.model)
    for path, module in context.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            continue
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.dtype != torch.float32 or _ROTARY in name:
                continue
            if wide is None or not wide.search(f"{path}.{name}"):
                yield path, module, name


def _inputs(context: Context) -> Any:
    """Return arguments for the model, or None if there are none."""
    if torch._guards.detect_fake_mode() is not None:
        return None
    if context.sample is not None:
        return context.sample
    if getattr(context.model, "main_input_name", None) != "input_ids":
        return None
    inputs = getattr(context.model, "dummy_inputs", None)
    return inputs if isinstance(inputs, dict) else None


def _runs(model: nn.Module, inputs: Any) -> bool | None:
    """Return whether a model runs; None if these are not its inputs, or something else than dtypes is wrong."""
    try:
        run_on(model, inputs)
    except RuntimeError as error:
        return False if "type" in str(error) else None
    except Exception:  # whatever a model raises for inputs that are not its own
        return None
    return True
