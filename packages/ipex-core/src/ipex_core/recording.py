# SPDX-License-Identifier: Apache-2.0
"""Recording a model with ``torch.export``: what `ipex.export` and `ipex.precompile` begin with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.errors import ExportError, OpArgumentError
from ipex_core.library.spec import FUNCTIONAL, PORTABLE, dtype_name
from ipex_core.packing.parameter import PackedWeight, exporting_kernels
from ipex_core.util import quiet

__all__ = ["checked_arguments", "checked_model", "reason", "record", "try_model"]


def checked_model(op: str, model: nn.Module) -> nn.Module:
    """Return the module to record, in evaluation mode, or raise in the name of ``op``."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be a torch.nn.Module, got {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"{op}: model must be a torch.nn.Module, got a TorchScript module: save it with torch.jit.save"
        )
    training = next((name for name, part in model.named_modules() if part.training), None)
    if training is not None:
        where = f" of {training!r}" if training else ""
        raise ValueError(
            f"{op}: model must be in evaluation mode (model.eval()), got training mode{where}"
        )
    return model


def checked_arguments(
    op: str, model: nn.Module, given: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of an example, or raise in the name of ``op``."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(given, Tensor):
        args = (given,)
    elif isinstance(given, Mapping):
        kwargs = dict(given)
    elif isinstance(given, Sequence) and not isinstance(given, str):
        args = tuple(given)
    else:
        raise TypeError(
            f"{op}: example_inputs must be a tensor, a sequence of arguments or a mapping of keyword arguments,"
            f" got {type(given).__name__}"
        )
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"{op}: example_inputs must fit the forward of the model, got {_summary(args, kwargs)}: {error}"
        ) from None
    return args, kwargs


def _summary(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    def one(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{dtype_name(value.dtype)} {list(value.shape)}"
        return type(value).__name__

    texts = [*map(one, args), *(f"{name}={one(value)}" for name, value in kwargs.items())]
    return f"({', '.join(texts)})"


def try_model(op: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run the model: inputs that do not fit are told in its own words, and layers merge as they do at a first call."""
    try:
        model(*args, **kwargs)
    except OpArgumentError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ValueError(
            f"{op}: example_inputs must be accepted by the model, got {_summary(args, kwargs)}: {error}"
        ) from error


def record(
    op: str,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    decompositions: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
    whole: Collection[str] = (),
) -> torch.export.ExportedProgram:
    """Record a model with ``torch.export`` as a functional graph, with plain weights for packed parameters.

    Args:
        op: In whose name errors are raised.
        model: In evaluation mode.
        args: Positional arguments.
        kwargs: Keyword arguments.
        dynamic_shapes: Which sizes may vary, as ``torch.export.export`` takes them.
        decompositions: Op -> its composition of others, beside those that all recorded programs need.
        whole: Names of ops that stay whole, though they have a composition.

    Raises:
        ExportError: torch.export refuses the model.
    """
    # Non-strict runs the forward as it is, so what ipex.optimize has put in place of it is recorded too.
    program: torch.export.ExportedProgram
    try:
        # A recurrent layer lists its weights a second time, and that list follows them.
        with exporting_kernels(), quiet(text=r"The tensor attributes? .*_flat_weights"):
            program = torch.export.export(
                model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False
            )
        for node in program.graph.nodes:
            node.target = FUNCTIONAL.get(node.target, node.target)
        program.graph_module.recompile()
        # Even without anything to decompose it makes the graph functional, which the names of the weights depend on.
        portable = {one: rule for one, rule in PORTABLE.items() if one.name() not in whole}
        program = program.run_decompositions({**decompositions, **portable})
    except Exception as error:
        what = "torch.export cannot record the model"
        if any(type(part).__module__.startswith("ipex_llm.") for part in model.modules()):
            what += " with what ipex.llm.optimize has put into it, ipex.restore(model) first"
        if "in output, which is not a known type" in str(error):  # a cache of transformers, say
            what += ", whose outputs must be tensors in tuples, lists and dicts (for a cache: use_cache=False)"
        raise ExportError(reason(op, what, error)) from error
    _unpack(program)
    return program


def _unpack(program: torch.export.ExportedProgram) -> None:
    """Give the program plain weights in the place of packed parameters.

    Most of them it does not use: the layers have recorded calls on the packed tensors. Those get no memory.
    """
    signature = program.graph_signature
    used = {
        signature.inputs_to_parameters[node.name]
        for node in program.graph.find_nodes(op="placeholder")
        if node.name in signature.inputs_to_parameters and node.users
    }
    for name, value in list(program.state_dict.items()):
        if isinstance(value, PackedWeight):
            plain = value.plain() if name in used else torch.empty(value.shape, dtype=value.dtype)
            program.state_dict[name] = nn.Parameter(plain, requires_grad=False)


def reason(op: str, what: str, error: BaseException) -> str:
    """Return the message for an error of torch: what failed, and the first paragraph of its text."""
    # Reports of torch go on with stacks and advice after an empty line; the cause keeps all of it.
    text = str(error).strip().partition("\n\n")[0] or type(error).__name__
    return f"{op}: {what}: {type(error).__name__}: {text}"
