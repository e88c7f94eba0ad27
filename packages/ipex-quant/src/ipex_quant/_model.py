# SPDX-License-Identifier: Apache-2.0
"""Quantising the linear layers of a model, in place and layer by layer."""

from __future__ import annotations

import fnmatch
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ipex_core._memory import return_free_memory
from ipex_core._optimize._progress import progress as show_progress
from ipex_core._spec import check
from ipex_core.nn import OptimizedLinear
from ipex_core.nn._leaf import has_hooks
from ipex_quant._build import as_qconfig
from ipex_quant._weight import packable_group
from ipex_quant.linear import WeightOnlyQuantizedLinear
from ipex_quant.qconfig import QConfigWoq

__all__ = ["dtypes_of", "keep_dtypes", "matches", "quantize_linears", "replace_module"]

log = logging.getLogger("ipex")

#: Called as ``progress(done, total, name)`` after each layer.
Progress = Callable[[int, int, str], None]


def quantize_linears(
    model: nn.Module,
    qconfig: Any,
    modules_to_skip: Iterable[str] = (),
    progress: bool | Progress = True,
    *,
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[str, ...]:
    """Replace the linear layers of a model by `WeightOnlyQuantizedLinear`, in place.

    One layer at a time is quantised and its float weight freed, so memory never exceeds that of the model by more than
    one layer. Layers on the meta device become layers without a weight, ready for ``load_state_dict``. Subclasses of
    `torch.nn.Linear` that compute something else are left alone; ``Conv1D`` of transformers is replaced.

    Args:
        model: The model; its class stays, its linear layers change.
        qconfig: A `QConfigWoq`, or a mapping with one as global.
        modules_to_skip: Layers to leave as they are: their names, the ends of names (``"lm_head"``), names of modules
            that contain them (``"model.vision"``), or patterns (``"*.router"``).
        progress: Whether to show a progress bar if it takes long, or a function that is called with the number of
            layers done, the number of all, and the name of the last one.
        scale_dtype: What scales are rounded to before codes are computed: float32, bfloat16 or float16.

    Returns:
        The names of the layers that were replaced.

    Raises:
        OpArgumentError: The configuration does not fit a layer (nothing has changed then), or a weight is not finite.

    Example:
        >>> import torch
        >>> from ipex_quant import WoqWeightDtype, quantize_linears, woq_qconfig
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> quantize_linears(model, woq_qconfig(weight_dtype=WoqWeightDtype.INT8), modules_to_skip=["2"])
        ('0',)
    """
    op = "quantize_linears"
    qconfig = as_qconfig(op, qconfig)
    check(not _is_linear(model), op, "model", "contain linear layers, not be one", "a linear layer")
    skip = tuple(modules_to_skip)
    names: dict[nn.Module, list[str]] = {}
    unused = set(skip)
    for name, module in model.named_modules(remove_duplicate=False):
        if not _is_linear(module):
            continue
        hits = [pattern for pattern in skip if matches(name, (pattern,))]
        unused.difference_update(hits)
        if not hits:
            names.setdefault(module, []).append(name)
    for pattern in sorted(unused):
        log.warning("%s: no linear layer matches %r in modules_to_skip", op, pattern)
    _check_groups(op, names, qconfig)
    layers = list(names.items())
    done: list[str] = []
    for module, places in _with_progress(layers, progress):
        replacement = _quantize(module, qconfig, places[0], scale_dtype)
        for name in places:
            replace_module(model, name, replacement)
        done += places
        return_free_memory()
    return tuple(done)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a module is meant by one of the patterns: a name, an end or a beginning of it, or ``*``, ``?``."""
    return any(
        name == p
        or name.endswith(f".{p}")
        or name.startswith(f"{p}.")
        or fnmatch.fnmatchcase(name, p)
        for p in patterns
    )


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place that has this name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype of the modules that have a property for it, which reads their first floating parameter."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(getattr(type(module), "dtype", None), property):
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    found[name] = parameter.dtype
                    break
    return found


def keep_dtypes(model: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """Give modules that have no floating parameter any more one without elements, for their dtype and device."""
    for name, dtype in sorted(dtypes.items(), key=lambda it: -it[0].count(".")):
        module = model.get_submodule(name)
        if not any(parameter.is_floating_point() for parameter in module.parameters()):
            empty = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
            module.register_parameter("float_dtype", empty)


def _is_linear(module: nn.Module) -> bool:
    kind: Any = type(module)
    if kind in (nn.Linear, OptimizedLinear) or _is_conv1d(module):
        return True
    return isinstance(module, nn.Linear) and _has_only(module) and _computes_linear(kind)


def _has_only(module: nn.Linear) -> bool:
    """Return whether a layer consists of a weight and a bias, and nothing of its own changes what it computes."""
    return (
        set(module._parameters) == {"weight", "bias"}
        and not module._buffers
        and not module._modules
        and not has_hooks(module)
    )


#: What the forward of a linear layer may read or call; whoever also sums over processes, or scales, reads more.
_LINEAR_NAMES = frozenset(
    {"weight", "bias", "T", "t", "matmul", "linear", "F", "functional", "nn", "torch"}
)


@functools.cache
def _computes_linear(kind: Any) -> bool:
    """Return whether a subclass computes what `torch.nn.Linear` does, in other words (``FalconLinear``)."""
    code = getattr(kind.forward, "__code__", None)
    if code is None or code.co_freevars or not _LINEAR_NAMES.issuperset(code.co_names):
        return False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        layer = kind.__new__(kind)
        nn.Linear.__init__(layer, 8, 16)
        x = torch.randn(3, 8)
        expected = nn.functional.linear(x, layer.weight, layer.bias)
        found = layer.eval()(x)
    return found.shape == expected.shape and torch.allclose(found, expected, 1e-4, 1e-5)


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether it is transformers' ``Conv1D``, a linear layer with a transposed weight."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _in_features(module: Any) -> int:
    return int(module.weight.shape[0 if _is_conv1d(module) else 1])


def _check_groups(op: str, names: dict[nn.Module, list[str]], qconfig: QConfigWoq) -> None:
    group = qconfig.group_size
    for module, (name, *_) in names.items():
        k = _in_features(module)
        fits = packable_group(k if group == -1 else group, k) is not None
        what = f"be -1 or at least 16 for {name}"
        check(fits, op, "qconfig.group_size", what, group)


def _with_progress(
    layers: list[tuple[nn.Module, list[str]]], progress: bool | Progress
) -> Iterator[tuple[nn.Module, list[str]]]:
    if not callable(progress):
        yield from show_progress(layers) if progress else layers
        return
    for done, layer in enumerate(layers, 1):
        yield layer
        progress(done, len(layers), layer[1][-1])


def _quantize(
    module: Any, qconfig: QConfigWoq, name: str, scale_dtype: torch.dtype
) -> WeightOnlyQuantizedLinear:
    source = module
    if _is_conv1d(module):
        rows, columns = module.weight.shape
        source = nn.Linear(rows, columns, bias=False, device="meta")
        source.weight = nn.Parameter(module.weight.detach().t(), requires_grad=False)
        source.bias = module.bias
        source.train(module.training)
    before = source.__dict__.get("qconfig", module)
    source.qconfig = qconfig
    try:
        result = WeightOnlyQuantizedLinear.from_float(source, scale_dtype=scale_dtype)
    except ValueError as error:
        error.args = (f"{name}: {error}",)
        raise
    finally:
        if before is module:
            del source.qconfig
        else:
            source.qconfig = before
    assert isinstance(result, WeightOnlyQuantizedLinear)
    if source is not module:
        module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
    return result
