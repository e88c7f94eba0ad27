# SPDX-License-Identifier: Apache-2.0
"""`ipex.precompile`: a model recorded once, fused, and run as programs of the kernel package.

A model is recorded with ``torch.export``, fused by the passes of ``torch.compile(backend="ipex")`` and written as a
`Program`: what is left at a call is a check of the inputs and one call of the kernel package. An op without an
instruction is called through torch, between two programs.

Example:
    >>> import torch
    >>> from ipex_core.precompiled import precompile
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
    >>> fast = precompile(model, torch.ones(2, 8))
    >>> fast(torch.ones(2, 8)).shape
    torch.Size([2, 4])
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.precompiled.call import Precompiled
from ipex_core.recording import checked_arguments, checked_model, try_model
from ipex_core.util import quiet

__all__ = ["Precompiled", "load_precompiled", "precompile"]


def precompile(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    dynamic_shapes: Any = None,
) -> Precompiled:
    """Record a model and return it as programs, for inference on the CPU.

    The model is run once on the example inputs, without gradients, and then recorded. It is not changed. Its weights
    are packed into the programs; if they change afterwards, a call of the result raises. What the model computes from
    Python values (attributes, the environment) is fixed when it is recorded, and so are autocast and the dtypes.

    Args:
        model: In evaluation mode; may come from ``ipex.optimize`` or ``ipex.quantization.convert``.
        example_inputs: A tensor, a sequence of positional arguments, or a mapping of keyword arguments.
        dynamic_shapes: Which sizes may vary, as ``torch.export.export`` takes them; None: none.

    Returns:
        A `Precompiled`, which is called as the model is and can be saved.

    Raises:
        TypeError: ``model`` is no module that can be recorded, or ``example_inputs`` has another form.
        ValueError: ``model`` is in training mode, has hooks, or does not accept the inputs.
        ExportError: torch.export refuses the model, or the model writes to its inputs or buffers, or its sizes depend
            on values of tensors. The message has the reason.

    Example:
        >>> fast = ipex.precompile(torch.nn.Linear(8, 4).eval(), torch.ones(2, 8))
        >>> fast(torch.ones(2, 8)).shape
        torch.Size([2, 4])
    """
    from ipex_core.precompiled.graph import capture, peak_bytes
    from ipex_core.precompiled.lower import lower
    from ipex_core.precompiled.run import Parts

    module = checked_model("precompile", model)
    _refuse_hooks(module)
    args, kwargs = checked_arguments("precompile", module, example_inputs)
    with torch.no_grad():
        try_model("precompile", module, args, kwargs)
        # torch's own use of what it has deprecated.
        with quiet(FutureWarning, text=".*treespec"):
            recorded = capture(module, args, kwargs, dynamic_shapes)
        plan = lower(recorded.module, recorded.forms)
    parts = Parts(
        type(module).__name__,
        plan,
        recorded.inputs,
        recorded.in_spec,
        recorded.out_spec,
        recorded.ranges,
        recorded.conditions,
        (peak_bytes(recorded.module.graph), recorded.eager_bytes),
    )
    return Precompiled(parts, recorded.report, module)


def load_precompiled(path: str | os.PathLike[str]) -> Precompiled:
    """Load what `Precompiled.save` has written.

    No code of the model is needed and nothing in the file is executed but ops of torch and ipex without side effects.

    Args:
        path: The file.

    Returns:
        The precompiled model, without a report of the passes.

    Raises:
        TypeError: ``path`` is no path.
        OSError: There is no such file, or it cannot be read.
        ValueError: The file is damaged, is no precompiled model, or was written for another kernel API.
    """
    from ipex_core.precompiled.files import load

    return Precompiled(load(path))


#: Packages whose hooks do nothing but compute.
_PURE_HOOKS = ("torch", "transformers", "ipex_core", "ipex_quant", "ipex_llm")


def _refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks of users: what they do beside computing would be lost.

    Those of torch (weight norm) and of transformers (intermediate results that a call asks for) only compute.
    """
    for path, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            owner = getattr(hook, "__module__", None) or type(hook).__module__
            if str(owner).partition(".")[0] not in _PURE_HOOKS:
                where = repr(path) if path else "the model"
                raise ValueError(
                    f"precompile: model must have no forward hooks, got one on {where}: remove it first"
                )
