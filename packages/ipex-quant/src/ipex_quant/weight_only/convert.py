# SPDX-License-Identifier: Apache-2.0
"""Quantizing the linear layers of a model, in place and layer by layer, and packing several into one."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ipex_core import woq
from ipex_core.library.spec import check
from ipex_core.module_swap.base import has_hooks
from ipex_core.nn import OptimizedLinear
from ipex_core.util import progress as show_progress
from ipex_core.util import return_free_memory
from ipex_quant.qconfig.static import qconfig_of
from ipex_quant.qconfig.weight_only import QConfigWoq
from ipex_quant.util.modules import patterns_of, replace_module
from ipex_quant.weight.tensor import QuantizedWeight, float_scales, movable, packable_group
from ipex_quant.weight_only.build import as_qconfig
from ipex_quant.weight_only.linear import WeightOnlyQuantizedLinear, WoqLinearModule
from ipex_quant.weight_only.saving import describe_saved

log = logging.getLogger("ipex")

_SKIPPED = "it is among the modules to skip"
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

    One layer at a time is quantized and its float weight freed, so memory never exceeds the model by more than one
    layer. Layers on the meta device become layers without a weight, ready for ``load_state_dict``. Subclasses of
    `torch.nn.Linear` that compute something else are left alone; ``Conv1D`` of transformers is replaced.

    Args:
        model: The model; its class stays, its linear layers change.
        qconfig: A `QConfigWoq`, or a ``QConfigMapping`` with one for each layer that is to be quantized: by its name
            or the beginning of it, a pattern of names, its class, or as global.
        modules_to_skip: Layers to leave as they are: their names, the ends of names (``"lm_head"``), names of modules
            that contain them or their ends (``"model.vision"``, ``"self_attn"``), or patterns (``"*.router"``).
        progress: Whether to show a progress bar if it takes long, or a function that is called with the number of
            layers done, the number of all, and the name of the last one.
        scale_dtype: What scales are rounded to before codes are computed: float32, bfloat16 or float16.

    Returns:
        The names of the layers that were replaced.

    Raises:
        TypeError: ``modules_to_skip`` is a single text.
        OpArgumentError: The configuration does not fit a layer (nothing has changed then), or a weight is not finite.

    Example:
        >>> import torch
        >>> from ipex_quant import WoqWeightDtype, quantize_linears, woq_qconfig
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> quantize_linears(model, woq_qconfig(weight_dtype=WoqWeightDtype.INT8), modules_to_skip=["2"])
        ('0',)
    """
    op = "quantize_linears"
    skip = patterns_of(op, modules_to_skip)
    chosen, skipped = choose_linears(op, model, qconfig, skip)
    hits = (matching(name, skip) for name, reason in skipped.items() if reason == _SKIPPED)
    unused = set(skip).difference(*hits)
    for pattern in sorted(unused):
        log.warning("%s: no linear layer matches %r in modules_to_skip", op, pattern)
    names = {layer.module: list(layer.names) for layer in chosen}
    qconfigs = {layer.names[0]: layer.qconfig for layer in chosen}
    layers = list(names.items())
    done: list[str] = []
    for module, places in _with_progress(layers, progress):
        replacement = _quantize(module, qconfigs[places[0]], places[0], scale_dtype)
        for name in places:
            replace_module(model, name, replacement)
        done += places
        return_free_memory()
    describe_saved(model)
    return tuple(done)


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenLinear:
    """A linear layer that is to be quantized.

    Attributes:
        module: The layer.
        names: Its names in the model, several where modules share it.
        qconfig: How to quantize it.
    """

    module: nn.Module
    names: tuple[str, ...]
    qconfig: QConfigWoq


def choose_linears(
    op: str, model: nn.Module, qconfig: Any, modules_to_skip: Sequence[str] = ()
) -> tuple[list[ChosenLinear], dict[str, str]]:
    """Return the linear layers of a model that `quantize_linears` replaces; the model stays as it is.

    Args:
        op: Who asks, for messages.
        model: The model.
        qconfig: As for `quantize_linears`.
        modules_to_skip: As for `quantize_linears`.

    Returns:
        The layers in the order of the model, and the names of all others with the reason why they are left alone.

    Raises:
        OpArgumentError: The configuration does not fit a layer.
    """
    single = woq_qconfigs(op, qconfig)[0]
    qconfig = qconfig if isinstance(qconfig, QConfigMapping) else single
    check(not is_linear(model), op, "model", "contain linear layers, not be one", "a linear layer")
    names: dict[nn.Module, list[str]] = {}
    qconfigs: dict[nn.Module, QConfigWoq] = {}
    skipped: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not is_linear(module):
            if isinstance(module, nn.Linear):
                skipped[name] = f"{type(module).__name__} computes more than a linear layer"
            continue
        if matches(name, modules_to_skip):
            skipped[name] = _SKIPPED
            continue
        own = woq_qconfig_of(qconfig, name, module)
        if module in names:
            names[module].append(name)
        elif own is not None:
            names[module], qconfigs[module] = [name], own
        else:
            skipped[name] = "the configuration has nothing for it"
    for module, (name, *_) in names.items():
        _check_group(op, module, name, qconfigs[module])
    return [ChosenLinear(m, tuple(found), qconfigs[m]) for m, found in names.items()], skipped


def woq_qconfigs(op: str, qconfig: Any, name: str = "qconfig") -> list[QConfigWoq]:
    """Return the configurations that a mapping has, or the one there is.

    Args:
        op: Name of the function in messages.
        qconfig: A `QConfigWoq`, a mapping or None.
        name: Name of the argument in messages.

    Raises:
        OpArgumentError: There is no configuration.
    """
    if not isinstance(qconfig, QConfigMapping):
        return [as_qconfig(op, qconfig, name)]
    values: list[Any] = [
        qconfig.global_qconfig,
        *qconfig.module_name_qconfigs.values(),
        *qconfig.module_name_regex_qconfigs.values(),
        *qconfig.object_type_qconfigs.values(),
    ]
    found = [value for value in values if isinstance(value, QConfigWoq)]
    return found or [as_qconfig(op, qconfig, name)]


def woq_qconfig_of(qconfig: Any, name: str, module: nn.Module) -> QConfigWoq | None:
    """Return the configuration of a module: the one there is, or what a mapping has for it; None for others."""
    if isinstance(qconfig, QConfigMapping):
        qconfig = qconfig_of(qconfig, name, module)
    return qconfig if isinstance(qconfig, QConfigWoq) else None


def matching(name: str, patterns: Sequence[str]) -> list[str]:
    """Return the patterns that mean a module: whole parts of its name, or ``*`` and ``?``."""
    return [p for p in patterns if f".{p}." in f".{name}." or fnmatch.fnmatchcase(name, p)]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a module is meant by one of the patterns."""
    return bool(matching(name, patterns))


def stacks(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """Return the outermost lists of modules that have linear layers; the model itself if there are none."""
    found: list[list[tuple[str, nn.Module]]] = []

    def visit(name: str, module: nn.Module) -> None:
        prefix = f"{name}." if name else ""
        children = [(prefix + key, child) for key, child in module.named_children()]
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and children:
            if any(is_linear(m) for _, child in children for m in child.modules()):
                found.append(children)
            return
        for key, child in children:
            visit(key, child)

    visit("", model)
    return found or [[("", model)]]


def is_linear(module: nn.Module) -> bool:
    kind: Any = type(module)
    if kind is NonDynamicallyQuantizableLinear:  # multi-head attention reads its weight
        return False
    if kind in (nn.Linear, OptimizedLinear) or is_conv1d(module):
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


#: What the forward of a linear layer may read or call; a class that also sums over processes, or scales, reads more.
_LINEAR_NAMES = frozenset(
    {"weight", "bias", "T", "t", "matmul", "linear", "F", "functional", "nn", "torch"}
)


@functools.cache
def _computes_linear(kind: Any) -> bool:
    """Return whether a subclass computes what `torch.nn.Linear` does, in other words (``FalconLinear``)."""
    code = getattr(kind.forward, "__code__", None)
    if code is None or code.co_freevars or not _LINEAR_NAMES.issuperset(code.co_names):
        return False
    # A generator of its own: torch's generator belongs to the user.
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        layer = kind.__new__(kind)
        nn.Linear.__init__(layer, 8, 16, device="meta")
        layer.to_empty(device="cpu")
        for values in (layer.weight, layer.bias, x := torch.empty(3, 8)):
            values.normal_(generator=generator)
        expected = nn.functional.linear(x, layer.weight, layer.bias)
        found = layer.eval()(x)
    return found.shape == expected.shape and torch.allclose(found, expected, 1e-4, 1e-5)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether it is transformers' ``Conv1D``, a linear layer with a transposed weight."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _in_features(module: Any) -> int:
    return int(module.weight.shape[0 if is_conv1d(module) else 1])


def _check_group(op: str, module: nn.Module, name: str, qconfig: QConfigWoq) -> None:
    group, k = qconfig.group_size, _in_features(module)
    fits = packable_group(k if group == -1 else group, k) is not None
    check(fits, op, "qconfig.group_size", f"be -1 or at least 16 for {name}", group)


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
    if is_conv1d(module):
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
    result.shows_codes = False
    if source is not module:
        module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
    return result


# --- several layers that read one input -------------------------------------------------------------------------------


def combine_linears(
    linears: Sequence[WoqLinearModule],
    order: Tensor | None = None,
    gate: bool = False,
    *,
    codes_order: str | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """Return the packed weight and the bias of layers put side by side, exactly as the single ones compute.

    Args:
        linears: The layers; all have a weight and the same ``in_features``.
        order: int64 ``[n]``: output i of the result is output ``order[i]`` of the row of layers; outputs may come more
            than once. None for their own order.
        gate: The two layers, or the halves of one, are a gate and an up projection: rows come in the order that ops
            with an argument ``gate`` take (`ipex_core.woq.interleave_gate_up`). Not together with ``order``.
        codes_order: Order of the codes in memory, ``"dot"`` or ``"vnni"``; None for the one that the modes of the
            layers need.

    Returns:
        ``(packed_weight, bias)`` for ``torch.ops.ipex.woq_linear`` with the modes of the layers, or None where they
        differ in format, groups, order of input features or modes, and so have no common packed form.

    Raises:
        OpArgumentError: An argument is not as described.

    Example:
        >>> import torch
        >>> from ipex_quant import combine_linears, quantize_linears, woq_qconfig
        >>> layers = torch.nn.ModuleList(torch.nn.Linear(64, 32) for _ in range(3))
        >>> _ = quantize_linears(layers, woq_qconfig(weight_dtype=2, group_size=32))
        >>> packed, bias = combine_linears(list(layers))
        >>> x = torch.randn(2, 64)
        >>> y = torch.ops.ipex.woq_linear(x, packed, 96, bias)
        >>> torch.allclose(y, torch.cat([layer(x) for layer in layers], dim=1), atol=1e-5)
        True
    """
    op = "combine_linears"
    check(len(linears) > 0, op, "linears", "not be empty", "none")
    check(order is None or not gate, op, "order", "be None with gate", "a tensor")
    if len({(m.in_features, m.modes, m.group_size) for m in linears}) != 1:
        return None
    parts = [m.quantized_weight() for m in linears]
    if len({p.format for p in parts}) != 1 or not _same_g_idx(parts):
        return None
    rows = sum(p.out_features for p in parts)
    alone = len(parts) == 1 and order is None and not gate
    codes = _cat([p.codes for p in parts])
    scales = parts[0].scales if alone else _scales(parts)
    zeros = _zeros(parts)
    bias = _bias(parts)
    if gate:
        check(rows % 2 == 0, op, "linears", "have an even number of outputs", rows)
        codes, scales = _interleave(codes, rows // 2), _interleave(scales, rows // 2)
        zeros = None if zeros is None else _interleave(zeros, rows // 2)
        bias = None if bias is None else _interleave(bias, rows // 2)
    elif order is not None:
        check(order.dim() == 1, op, "order", "be 1-D", f"{order.dim()}-D")
        inside = bool(((order >= 0) & (order < rows)).all())
        check(inside, op, "order", f"be in [0, {rows})", order.tolist())
        codes, scales = _take(codes, order), _take(scales, order)
        zeros = None if zeros is None else zeros[order]
        bias = None if bias is None else bias[order]
    first = parts[0]
    weight = QuantizedWeight(
        first.format,
        first.in_features,
        codes,
        scales,
        zeros,
        first.group_size,
        first.g_idx,
        bias,
        op,
    )
    needed = "vnni" if linears[0].modes[0] == "int8" else "dot"
    return weight.pack(codes_order or needed), bias


def _same_g_idx(parts: Sequence[QuantizedWeight]) -> bool:
    first = parts[0].g_idx
    if first is None:
        return all(p.g_idx is None for p in parts)
    return all(p.g_idx is not None and torch.equal(p.g_idx, first) for p in parts)


def _cat(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([movable(v) for v in values]).view(values[0].dtype)


def _take(values: Tensor, order: Tensor) -> Tensor:
    return movable(values)[order].view(values.dtype)


def _interleave(values: Tensor, rows: int) -> Tensor:
    raw = movable(values)
    return woq.interleave_gate_up(raw[:rows], raw[rows:]).view(values.dtype)


def _scales(parts: Sequence[QuantizedWeight]) -> Tensor:
    """Return a scale for each output feature and group."""
    rows = [_row_scales(p) for p in parts]
    if len({r.dtype for r in rows}) > 1:
        rows = [float_scales(r) for r in rows]
    return _cat(rows)


def _row_scales(part: QuantizedWeight) -> Tensor:
    if part.scales.shape[0] == part.out_features:
        return part.scales
    # One for each 128 x 128 weights; rows that move leave their block.
    return part.scales.repeat_interleave(128, dim=0)[: part.out_features]


def _zeros(parts: Sequence[QuantizedWeight]) -> Tensor | None:
    if all(p.zeros is None for p in parts):
        return None
    usual = 8 if parts[0].format == "int4" else 0
    shapes = [(p.out_features, p.groups) for p in parts]
    zeros = [
        torch.full(shape, usual, dtype=torch.int8) if p.zeros is None else p.zeros
        for p, shape in zip(parts, shapes, strict=True)
    ]
    if len({z.dtype for z in zeros}) > 1:
        zeros = [z.float() for z in zeros]
    return torch.cat(zeros)


def _bias(parts: Sequence[QuantizedWeight]) -> Tensor | None:
    biases = [p.bias for p in parts]
    if all(b is None for b in biases):
        return None
    filled = [
        torch.zeros(p.out_features) if b is None else b.detach()
        for p, b in zip(parts, biases, strict=True)
    ]
    dtypes = {b.dtype for b in biases if b is not None}
    common = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return torch.cat([b.to(common) for b in filled])
