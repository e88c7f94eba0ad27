# SPDX-License-Identifier: Apache-2.0
"""INT8 modules in a saved folder, and how they come back into a float model.

``quantization_config`` of a model with INT8 layers has, besides what weight-only layers need::

    "int8": {
        "modules": {path: {"kind": name of the class, its scales and numbers}},
        "identity": [paths of modules that do nothing],
        "fused": {path: [its own path, path of the layer that computes it too]},
        "start": {path: [path of a layer, paths of modules up to the sum in whose place it computes]},
        "rewritten": {path: [one line for each node of the graph that its forward became]}
    }

and for all models ``records``, what ``ipex.explain`` shows.

Weights are plain int8 tensors. A forward that `prepare` rewrote is rewritten again at loading, which gives the same
graph for the same code; that it does is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check
from ipex_core.module_swap.state_dict import update
from ipex_core.optimization.records import Quantization, Record
from ipex_quant.int8.boundary import Fused, Start
from ipex_quant.int8.dataflow import activation_of
from ipex_quant.int8.modules import Int8Layer, output_rows
from ipex_quant.int8.modules import recurrent as _int8_recurrent
from ipex_quant.int8.modules.conv import Int8Conv, Int8ConvTranspose
from ipex_quant.int8.modules.embedding import Int8EmbeddingBag, Int8MergedEmbeddingBag
from ipex_quant.int8.modules.linear import (
    DynamicInt8Linear,
    Int8Linear,
    SmoothNorm,
    share_input,
)
from ipex_quant.int8.modules.matmul import Int8Interaction, Int8MatMul
from ipex_quant.int8.modules.pool import Int8AvgPool, Int8MaxPool, Int8Mean
from ipex_quant.int8.rewrite import RewrittenForward, lines_of, rewrite, rewrite_model
from ipex_quant.util.modules import (
    RECURRENT,
    dtypes_of,
    is_whole,
    keep_dtypes,
    replace_module,
    saved_parts,
)

Progress = Callable[[int, int, str], None]

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        DynamicInt8Linear,
        Int8AvgPool,
        Int8Conv,
        Int8ConvTranspose,
        Int8EmbeddingBag,
        Int8Interaction,
        Int8Linear,
        Int8MatMul,
        Int8MaxPool,
        Int8Mean,
        Int8MergedEmbeddingBag,
        SmoothNorm,
    )
}
_PARTS: dict[str, Any] = {
    "modules": Mapping,
    "identity": list,
    "fused": Mapping,
    "start": Mapping,
    "rewritten": Mapping,
}


def describe(model: nn.Module) -> dict[str, Any] | None:
    """Return the entry for ``quantization_config``, or None for a model without INT8 modules."""
    every = list(model.named_modules(remove_duplicate=False))
    found = {name: saved_parts(m)[0] for name, m in model.named_modules() if is_whole(m)}
    if not found:
        return None
    graphs = {n: lines_of(m) for n, m in every if isinstance(m, fx.GraphModule) and n}
    forward = model.__dict__.get("forward")
    if isinstance(forward, RewrittenForward):
        graphs[""] = forward.lines
    first = {id(model.get_submodule(name)): name for name in found}
    return {
        "modules": found,
        "shared": {n: first[id(m)] for n, m in every if id(m) in first and first[id(m)] != n},
        "identity": [n for n, m in every if type(m) is nn.Identity and n],
        "fused": {n: [m.step, m.layer] for n, m in every if isinstance(m, Fused)},
        "start": {n: [m.layer, *m.steps] for n, m in every if isinstance(m, Start)},
        "rewritten": graphs,
    }


def restore_records(op: str, model: nn.Module, about: Mapping[str, Any]) -> None:
    """Give a model the records of a saved one."""
    if "records" not in about:
        return
    try:
        found = [Record(*row) for row in about["records"]]
    except TypeError as error:
        raise OpArgumentError(f"{op}: records must have rows of 6, got {error}") from error
    update(model, quantization=Quantization(found, list(about.get("notes", ()))))


def rebuild(
    op: str,
    model: nn.Module,
    about: Any,
    state: MutableMapping[str, Tensor],
    progress: Progress | None = None,
) -> tuple[str, ...]:
    """Give a float model the INT8 modules of a saved one, in place, and take their tensors out of ``state``.

    Args:
        op: Name of the function for messages.
        model: A model of the structure that was prepared, with any weights or on the meta device.
        about: What `describe` returned.
        state: All tensors of the folder.
        progress: Called with the number of modules done, of all, and the name of the last one.

    Returns:
        The paths of the INT8 modules.

    Raises:
        OpArgumentError: The description or the model is another one. The model may have changed then.
    """
    usable = isinstance(about, Mapping) and all(
        isinstance(about.get(part), kind) for part, kind in _PARTS.items()
    )
    check(usable, op, "int8", f"have {', '.join(_PARTS)} in quantization_config", about)
    model.eval()
    dtypes = dtypes_of(model)
    _rewrite(op, model, about["rewritten"])
    made: dict[str, nn.Module] = {}
    for name, entry in about["modules"].items():
        made[name] = _make(op, model, name, entry, state)
        if progress is not None:
            progress(len(made), len(about["modules"]), name)
    _share_inputs(about["modules"], made)
    shared = {name: made[first] for name, first in about.get("shared", {}).items()}
    for name in about["identity"]:
        module = _find(op, model, name)
        if type(module) is not nn.Identity:
            replace_module(model, name, nn.Identity().eval())
    for name, (step, layer) in about["fused"].items():
        module = _find(op, model, name)
        original = module if activation_of(module) else None
        replace_module(model, name, Fused(step, layer, original).eval())
    for name, (layer, *steps) in about["start"].items():
        stood = _find(op, model, name)
        replace_module(model, name, Start(layer, tuple(steps), stood).eval())
    for name, module in (*made.items(), *shared.items()):
        _find(op, model, name)
        replace_module(model, name, module)
    keep_dtypes(model, dtypes)
    return tuple(made)


def _share_inputs(entries: Mapping[str, Any], made: dict[str, nn.Module]) -> None:
    """Put layers that quantize their input together into groups again."""
    layers = {m.name: m for m in made.values() if isinstance(m, Int8Linear)}
    for members in {tuple(it["group"]) for it in entries.values() if it.get("group")}:
        if all(name in layers for name in members):
            share_input([layers[name] for name in members])


def _find(op: str, model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise OpArgumentError(
            f"{op}: model must have the modules of the saved one, got none named {name}"
        ) from None


def _rewrite(op: str, model: nn.Module, graphs: Mapping[str, list[str]]) -> None:
    for name in sorted(graphs, key=lambda it: (-it.count("."), not it)):
        container = _find(op, model, name)
        made: Any
        if not name:
            made = model.__dict__.get("forward") or rewrite_model(model)
            lines = getattr(made, "lines", None)
        else:
            made = container if isinstance(container, fx.GraphModule) else rewrite(container)
            lines = None if made is None else lines_of(made)
        what = f"the forward of {name or 'the model'}"
        got = "one of other steps" if made is not None else "one that cannot be traced"
        same = lines == list(graphs[name])
        text = "be the same as in the saved model"
        check(same, op, what, text, f"{got}, {type(container).__name__}")
        if name and made is not container:
            replace_module(model, name, made)


def _make(
    op: str, model: nn.Module, name: str, entry: Any, state: MutableMapping[str, Tensor]
) -> nn.Module:
    kind: Any = entry.get("kind") if isinstance(entry, Mapping) else None
    recurrent = RECURRENT
    known = sorted((*_KINDS, *recurrent))
    check(kind in known, op, f"kind of {name}", f"be one of {', '.join(known)}", kind)
    start = f"{name}."
    keys = [key for key in state if key.startswith(start) and "." not in key[len(start) :]]
    tensors = {key[len(start) :]: state.pop(key) for key in keys}
    dtype = None
    if "weight" in tensors:
        dtype = _check_shape(op, model, str(entry.get("layer", name)), tensors["weight"])
    try:
        maker: Any = _int8_recurrent.from_saved if kind in recurrent else _KINDS[kind].from_saved
        made: nn.Module = maker(entry, tensors)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise OpArgumentError(
            f"{op}: {name} must have what a {kind} needs, got {type(error).__name__}: {error}"
        ) from error
    if dtype is not None and isinstance(made, Int8Layer):
        made.float_dtype = dtype
    return made


def _check_shape(op: str, model: nn.Module, name: str, weight: Tensor) -> torch.dtype | None:
    """Check that the float layer has the weight's shape, and return its dtype.

    INT8 layers of other forms have none to compare.
    """
    layer: Any = _find(op, model, name)
    if isinstance(layer, nn.Linear) or hasattr(layer, "transposed"):
        wanted, got = list(output_rows(layer).shape), list(weight.shape)
        check(wanted == got, op, name, f"have shape {wanted}, as the model says", got)
        dtype: torch.dtype = layer.weight.dtype
        return dtype
    return None
