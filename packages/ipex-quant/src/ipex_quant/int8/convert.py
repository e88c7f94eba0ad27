# SPDX-License-Identifier: Apache-2.0
"""Conversion of a calibrated model to INT8, and what speaks against it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check
from ipex_core.module_swap.state_dict import update
from ipex_core.optimization.passes.prepack import auto_channels_last
from ipex_core.optimization.records import Quantization, Record, quantization_of
from ipex_quant.int8.boundary import Codes, Early, Fused, Scale, Start
from ipex_quant.int8.dataflow import tensors_of
from ipex_quant.int8.modules import output_rows
from ipex_quant.int8.modules.conv import Int8Conv, Int8ConvTranspose
from ipex_quant.int8.modules.embedding import Int8EmbeddingBag, Int8MergedEmbeddingBag
from ipex_quant.int8.modules.linear import (
    DynamicInt8Linear,
    Int8Linear,
    SmoothNorm,
    share_input,
)
from ipex_quant.int8.modules.matmul import int8_product
from ipex_quant.int8.modules.pool import Int8Mean, pool_for
from ipex_quant.int8.modules.recurrent import from_float as recurrent_from_float
from ipex_quant.int8.observe import Watch
from ipex_quant.int8.plan import Layer, Plan, float_layer, root
from ipex_quant.int8.state import Prepared, detach, forget, replan, scales_of_layers, state_of
from ipex_quant.qconfig.static import default_dynamic_qconfig
from ipex_quant.util.modules import dtypes_of, keep_dtypes, replace_module
from ipex_quant.weight_only.convert import quantize_linears


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
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for path in paths:
            hook = functools.partial(_keep, outputs, path)
            hooks.enter_context(model.get_submodule(path).register_forward_hook(hook))
        outputs.model = [t.float() for t in tensors_of(model(*args, **kwargs))]
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
    log = quantization_of(model)
    if log is not None:
        log.notes += [f"check: cosine of the outputs {worst:.5f}", *notes]
    if worst < min_cosine:
        named = [(float(row[1]), row[0]) for row in rows[1 : len(rows) - len(before.model)]]
        hint = f"; the layer with the most noise is {min(named)[1]}" if named else ""
        warnings.warn(
            f"convert: the outputs of the INT8 model have a cosine of {worst:.4f} to the float"
            f" model, below {min_cosine}{hint}",
            stacklevel=3,
        )


# --- conversion -------------------------------------------------------------------------------------------------------


#: Of each quantized layer: path of the float module and of the INT8 module that give the same output.
Names = list[tuple[str, str, str]]

_STEP = "int8"


def convert_model(model: nn.Module) -> tuple[nn.Module, Names]:
    """Replace what the plan names; return the model and which outputs can be compared."""
    state = state_of(model)
    assert state is not None
    detach(model)
    dtypes = dtypes_of(model)
    conversion = _Conversion(model, state, replan(model, state), [], [])
    conversion.layers()
    conversion.pools()
    conversion.products()
    conversion.tables()
    conversion.dynamic_layers()
    conversion.float_layers()
    forget(model)
    conversion.weight_only_layers()
    conversion.nothing()
    keep_dtypes(model, dtypes)
    update(model, quantization=Quantization(conversion.records))
    return model, conversion.names


@dataclasses.dataclass
class _Conversion:
    """One call of `convert_model`: each method replaces one kind of module and writes down what became of it."""

    model: nn.Module
    state: Prepared
    plan: Plan
    records: list[Record]
    names: Names

    def _note(self, path: str, kind: str, done: bool, text: str, kernel: str = "") -> None:
        self.records.append(Record(path, kind, _STEP, done, text, kernel))

    def layers(self) -> None:
        """Replace the layers with static scales, and what they compute for others."""
        model, state, plan = self.model, self.state, self.plan
        scales = scales_of_layers(model, state, plan)
        folded = _fold_into_norms(model, plan, scales)
        built: dict[str, Any] = {}
        for path, layer in plan.layers.items():
            scale, factor = scales[path]
            made = _build(layer, float_layer(model, layer), scale, factor)
            if factor is not None:
                made.smooth, made.norm = factor.clone(), folded.get(path, "")
            if layer.codes:
                made.output = state.watches[layer.result].get_scale()
            if layer.residual_codes:
                made.residual = _residual_scale(state, layer)
                made.residual_free = layer.residual_free
            built[path] = made
        for group in _groups(state, plan, built):
            share_input([built[path] for path in group])
        for path, layer in plan.layers.items():
            module = model.get_submodule(path)
            self.records.append(_record(state, layer, module, built[path], path in folded))
        for path, layer in plan.layers.items():
            self._put(layer, built[path])

    def _put(self, layer: Layer, made: nn.Module) -> None:
        """Put an INT8 layer into its place, and what passes its results on into the places around it."""
        model, path = self.model, layer.path
        self.names.append((path, layer.fused[-1] if layer.fused else path, layer.place))
        for other in layer.fused:
            if other != layer.place:
                _pass_on(model, other, path, other != layer.norm)
        if layer.norm:
            text = f"folded into {path}"
            self._note(layer.norm, "BatchNorm", True, text, "none (identity)")
        if layer.before:
            stood = model.get_submodule(path)
            _replace(model, path, Start(path, layer.before, stood).eval())
        _replace(model, layer.place, made)

    def pools(self) -> None:
        """Replace poolings between INT8 layers."""
        for place in self.plan.pools:
            pool = self.model.get_submodule(place.path)
            watch = self.state.watches[place.value]
            made = pool_for(pool, place.channels, watch.get_scale()).eval()
            text = "uint8 codes in, float out" if isinstance(made, Int8Mean) else "on uint8 codes"
            self._note(place.path, type(pool).__name__, True, text)
            _replace(self.model, place.path, made)

    def products(self) -> None:
        """Replace products of two activations."""
        for path, product in self.plan.products.items():
            watches = [self.state.watches[value] for value in product.sources]
            output = self.state.watches[product.result].get_scale() if product.codes else Scale()
            module = self.model.get_submodule(path)
            made = int8_product(module, [it.get_scale() for it in watches], output, path).eval()
            text = f"8-bit activations, {made.extra_repr()} ({_source_of(watches[0])})"
            text += "; passes uint8 on" * product.codes
            self._note(path, type(module).__name__, True, text, made.kernel)
            _replace(self.model, path, made)
            self.names.append((path, path, path))

    def tables(self) -> None:
        """Replace embedding bags."""
        for path in self.state.tables:
            bag: Any = self.model.get_submodule(path)
            text, op = "8-bit rows, each with its scale", "embedding_bag_byte"
            made: nn.Module
            if isinstance(bag, nn.EmbeddingBag):
                made = Int8EmbeddingBag(bag.weight, bag.include_last_offset).eval()
            else:
                made, op = Int8MergedEmbeddingBag.from_float(bag), "merged_embeddingbag_int8"
            self._note(path, type(bag).__name__, True, text, op)
            _replace(self.model, path, made)

    def dynamic_layers(self) -> None:
        """Replace the layers whose scales are measured at each call."""
        for path in self.state.dynamic:
            module = self.model.get_submodule(path)
            made = _dynamic(path, module)
            last, text = path, "uint8 activations, scale of each row at each call"
            if path in self.state.activations:
                last, made.activation = self.state.activations[path]
                made.after = (last,)
                _pass_on(self.model, last, path, True)
                text += f"; computes {last} too"
            _replace(self.model, path, made)
            self._note(path, type(module).__name__, True, text)
            self.names.append((path, last, path))

    def float_layers(self) -> None:
        """Write down why the others stay as they are."""
        for path, reason in self.plan.left.items():
            kind = type(self.model.get_submodule(path)).__name__
            self._note(path, kind, False, f"stays float: {reason}")

    def nothing(self) -> None:
        """Write down that the model has no layers to quantize, if it has none."""
        if not self.records:
            text = "stays float: it has no layers that the configuration quantizes"
            self._note("", type(self.model).__name__, False, text)

    def weight_only_layers(self) -> None:
        """Quantize the weights of layers that a weight-only configuration names."""
        if self.state.weight_only is None:
            return
        kinds = {type(module).__module__ for module in self.model.modules()}
        casts_to_weights = any(name.startswith("transformers.") for name in kinds)
        for path in quantize_linears(self.model, self.state.weight_only):
            woq: Any = self.model.get_submodule(path)
            woq.shows_codes = not casts_to_weights
            self._note(path, "Linear", True, f"weights {woq.dtype.name}", "woq_linear")


def _groups(state: Prepared, plan: Plan, built: dict[str, Any]) -> list[list[str]]:
    """Return linear layers that read one float value with one scale, in the order of their calls."""
    flow = state.flow
    if flow is None:
        return []
    coded = {layer.result for layer in plan.layers.values() if layer.codes}
    found = []
    for value in {layer.source: None for layer in plan.layers.values()}:
        readers = flow.consumers.get(value, [])
        members = [
            event.path
            for event in readers
            if event.role == "linear"
            and event.path in plan.layers
            and len(flow.calls[event.path]) == 1
            and built[event.path].smooth is None
            # A sum computes where it stands, when the value may be another.
            and plan.layers[event.path].residual is None
        ]
        inplace = any(e.role == "function" and e.name.strip("_") != e.name for e in readers)
        same = {built[path].input for path in members}
        if value not in coded and len(members) > 1 and len(same) == 1 and not inplace:
            found.append(members)
    return found


def _residual_scale(state: Prepared, layer: Layer) -> Scale:
    """Return the scale of the codes that are added."""
    assert state.flow is not None
    return state.watches[root(state.flow, layer.residual_value)].get_scale()


def _pass_on(model: nn.Module, path: str, layer: str, activation: bool) -> None:
    """Let a module pass on what a layer computes for it; an activation can still compute for others."""
    original = model.get_submodule(path) if activation else None
    _replace(model, path, Fused(path, layer, original).eval())


def _fold_into_norms(model: nn.Module, plan: Plan, scales: dict[str, Any]) -> dict[str, str]:
    """Let norms multiply by channel scales where all who read them want the same; return these and their norms."""
    done: dict[str, str] = {}
    for value, place in plan.norms.items():
        layers = [path for path, layer in plan.layers.items() if layer.source == value]
        factors = [scales[path][1] for path in layers]
        if any(f is None or not torch.equal(f, factors[0]) for f in factors):
            continue
        _replace(model, place, SmoothNorm.of(place, model.get_submodule(place), factors[0]))
        done.update(dict.fromkeys(layers, place))
    return done


def _build(layer: Layer, module: Any, scale: Scale, factor: Tensor | None) -> Any:
    path = layer.path
    weight = output_rows(module).float()
    if factor is not None:
        weight = weight / factor
    halve = layer.kind != "linear" and _adds_pairs_in_16_bits()
    codes, steps = _quantize_weight(path, layer.qconfig, weight, halve)
    made: Any
    if layer.kind == "linear":
        made = Int8Linear(codes, steps, module.bias)
    elif module.transposed:
        made = Int8ConvTranspose(module, codes, steps)
    else:
        made = Int8Conv(module, codes, steps)
    made.float_dtype = module.weight.dtype
    made.set_input(scale)
    made.activation = layer.activation
    made.name = path
    made.contiguous = layer.kind != "linear" and (layer.contiguous or not auto_channels_last())
    made.residual_position = layer.residual
    made.place, made.after = layer.place, layer.after
    return made.eval()


def _adds_pairs_in_16_bits() -> bool:
    """Return whether oneDNN's convolutions add two products of codes in 16 bits, which large ones overflow.

    They do without VNNI: 255 * 127 * 2 does not fit, 255 * 64 * 2 does.
    """
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return not (torch.cpu._is_vnni_supported() or known.get("avx_vnni", False))


def _quantize_weight(
    path: str, qconfig: Any, weight: Tensor, halve: bool = False
) -> tuple[Tensor, Tensor]:
    """Return int8 codes and one scale for each output channel, as the observer of the weight says.

    Args:
        path: Of the layer.
        qconfig: Has the observer.
        weight: One row of numbers for each output channel, of any dimensions.
        halve: Take half of the codes, for twice the scale.
    """
    finite = weight.isfinite()
    bad = weight[~finite]
    check(
        not bad.numel(),
        "convert",
        f"the weight of {path}",
        "be finite",
        f"{bad.numel()} values that are not; leave this layer float with set_module_name({path!r}, None)",
    )
    observer: Any = qconfig.weight()
    observer(weight)
    scale, zero = observer.calculate_qparams()
    symmetric = observer.dtype == torch.qint8 and not bool(zero.any())
    what = f"the weight observer of {path}"
    check(symmetric, "convert", what, "be symmetric with qint8 codes", observer.qscheme)
    channels = weight.shape[0]
    per_row = scale.numel() in (1, channels) and getattr(observer, "ch_axis", 0) == 0
    check(per_row, "convert", what, "be per tensor or per output channel", list(scale.shape))
    scale = scale.float().clamp(min=2.0**-100).expand(channels).contiguous() * (1 + halve)
    steps = scale.view(-1, *[1] * (weight.dim() - 1))
    low, high = getattr(observer, "quant_min", -128), getattr(observer, "quant_max", 127)
    least, most = (-64, 64) if halve else (-128, 127)
    codes = torch.round(weight / steps).clamp(max(low, least), min(high, most)).to(torch.int8)
    return codes, scale


def _dynamic(path: str, module: Any) -> Any:
    """Return the dynamic INT8 form of a layer."""
    if isinstance(module, nn.Linear):
        codes, steps = _quantize_weight(
            path, default_dynamic_qconfig, module.weight.detach().float()
        )
        made = DynamicInt8Linear(codes, steps, module.bias)
        made.name, made.float_dtype = path, module.weight.dtype
        return made.eval()
    return recurrent_from_float(module)


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module in all places of the one at ``path``."""
    old = model.get_submodule(path)
    for name, found in list(model.named_modules(remove_duplicate=False)):
        if found is old:
            replace_module(model, name, module)


def _source_of(watch: Any) -> str:
    """Return where a scale comes from."""
    if watch.runs == 0:
        return "from a file"
    return f"{type(watch.observer).__name__}, {watch.runs} runs"


def _record(state: Prepared, layer: Layer, module: nn.Module, made: Any, folded: bool) -> Record:
    watch = state.watches[layer.source]
    source = f"SmoothQuant, {watch.runs} runs" if layer.smooth and watch.runs else _source_of(watch)
    text = f"uint8 activations, scale {made.input.scale:.4g} zero {made.input.zero} ({source})"
    if layer.smooth:
        text += ", channel scales in the norm before it" if folded else ", multiplies channels"
    computed = [path for path in layer.fused if path != layer.norm]
    if computed:
        text += f"; computes {', '.join(computed)} too"
    if getattr(made, "group", None) is not None:
        text += f"; input quantized once for {', '.join(made.group.members)}"
    if layer.codes:
        text += "; passes uint8 on"
    kernel = "int8_linear" if layer.kind == "linear" else "onednn qconv"
    return Record(layer.path, type(module).__name__, _STEP, True, text, kernel)
