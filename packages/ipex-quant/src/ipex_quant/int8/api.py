# SPDX-License-Identifier: Apache-2.0
"""`prepare` and `convert`: from a float model to one that computes on 8-bit integers."""

from __future__ import annotations

import copy
import dataclasses
import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import QConfig, QConfigMapping
from torch.utils._pytree import tree_leaves

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check
from ipex_core.module_swap.base import has_hooks
from ipex_quant.int8 import rewrite as _int8_rewrite
from ipex_quant.int8.dataflow import CONVS, Flow, record
from ipex_quant.int8.modules.embedding import TABLES
from ipex_quant.int8.modules.embedding import why_not as why_not_bag
from ipex_quant.int8.modules.matmul import NOT_NAMED, PRODUCTS, MatMul, named_in, why_float
from ipex_quant.int8.modules.recurrent import why_no_form
from ipex_quant.int8.modules.recurrent import why_not as why_not_lstm
from ipex_quant.int8.plan import Plan, fusable_activations, make_plan
from ipex_quant.int8.state import Prepared, attach, detach, forget, keep, state_of
from ipex_quant.int8.summary import load_summary, save_summary
from ipex_quant.qconfig.static import QConfigSmoothQuant, qconfig_of
from ipex_quant.qconfig.weight_only import QConfigWoq
from ipex_quant.util.modules import call_encoder_layers, replace_module

__all__ = ["convert", "prepare"]

log = logging.getLogger("ipex")

_STATIC = (nn.Linear, nn.LSTM, *TABLES, *CONVS)
_DYNAMIC = (nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
#: Static configurations leave these as they are: reported.
_FLOAT = (nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell, nn.MultiheadAttention)
#: Dynamic configurations leave these as they are: reported.
_DYNAMIC_FLOAT = (nn.RNN, nn.MultiheadAttention, *TABLES, *CONVS)
#: Functions that have weights as arguments, and the modules that have an INT8 form.
_FUNCTIONS = {
    "linear": "Linear",
    **{f"conv{i}d": f"Conv{i}d" for i in (1, 2, 3)},
    **{f"conv_transpose{i}d": f"ConvTranspose{i}d" for i in (1, 2, 3)},
    "embedding_bag": "EmbeddingBag",
}


def prepare(
    model: nn.Module,
    configure: Any,
    example_inputs: Any = None,
    inplace: bool = False,
    bn_folding: bool = True,
    example_kwarg_inputs: Mapping[str, Any] | None = None,
) -> Any:
    """Prepare a model for INT8: decide which layers become INT8, and observe their activations from then on.

    The model is run once on the example inputs to see which output goes where, without tracing, so its forward may be
    anything. Dropout layers are removed, and `convert` folds batch norms into the INT8 layers before them. With a
    static configuration, run the result on a few hundred typical inputs, then call `convert`; with a dynamic one call
    `convert` at once.

    A prepared model is prepared again, without what was observed. A model without a layer that the
    configuration quantizes gives a warning, and `convert` returns it as it is.

    Args:
        model: A float model. With a static configuration the result is in evaluation mode; a warning tells so where
            the model is in training mode.
        configure: A ``QConfigMapping`` of torch or a ``QConfig``; this package has defaults for both.
        example_inputs: A tensor or a tuple of positional arguments. Static configurations need them; with dynamic ones
            activations are found that linear layers can compute too.
        inplace: Whether to change the model itself rather than a copy.
        bn_folding: Whether to fold batch norms.
        example_kwarg_inputs: Keyword arguments, instead of positional ones or besides them.

    Returns:
        The prepared model. It computes what it did, and has ``save_qconf_summary(path)`` and
        ``load_qconf_summary(path)``, which write and read the scales as JSON.

    Raises:
        TypeError: ``model`` is not a module, or ``inplace`` or ``bn_folding`` not a bool.
        OpArgumentError: Another argument is not as described, or the example inputs do not fit the model. Without
            example inputs for a static configuration it is an ``AssertionError`` too, as in IPEX.
    """
    op = "prepare"
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be a torch.nn.Module, got {type(model).__name__}")
    _check_flag(op, "inplace", inplace)
    _check_flag(op, "bn_folding", bn_folding)
    mapping = _mapping(op, configure)
    given = example_inputs is not None or example_kwarg_inputs is not None
    asked = _what_is_asked(model, mapping, given)
    if not asked.anything:
        _warn_of_nothing(_what_there_is(model, mapping))
    args, kwargs = _examples(op, example_inputs, example_kwarg_inputs, asked.static)
    again, trains = state_of(model) is not None, asked.static and model.training
    if (again or trains) and not inplace:
        model, inplace = copy.deepcopy(model), True
    if again:
        _forget(model)
    if trains:
        warnings.warn(
            "prepare: the model is in training mode; the prepared model is in evaluation mode, as static scales need",
            stacklevel=2,
        )
        model.eval()
    runs = asked.static or (asked.dynamic and (args or kwargs) and not model.training)
    model, flow = _run_once(op, model, args, kwargs, bool(runs), inplace)
    impossible = {}
    for name in tuple(asked.dynamic):
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear) and (reason := why_no_form(module)):
            impossible[name] = reason
            asked.dynamic.remove(name)
    for name, module in model.named_modules():
        qconfig = qconfig_of(mapping, name, module) if type(module) in _DYNAMIC_FLOAT else None
        if qconfig is not None and _is_dynamic(qconfig) is True:
            impossible[name] = f"no dynamic INT8 form of {type(module).__name__}"
    state = Prepared(asked.layers, None, Plan({}, {}, {}, {}), dynamic=asked.dynamic)
    state.named, state.weight_only = named_in(mapping), mapping if asked.weight_only else None
    if flow is not None and asked.dynamic:
        state.activations = fusable_activations(model, flow, asked.dynamic)
    if flow is not None and asked.static:
        _int8_rewrite.remove_dropout(model)
        paths = _int8_rewrite.containers_to_rewrite(flow, state.named, asked.products)
        model = _expose(model, paths, args, kwargs)
        state.flow, state.bn_folding = record(model, args, kwargs), bn_folding
        _plan_static(model, state, mapping, asked.products)
    state.plan.left.update(impossible)
    for name, reason in state.plan.left.items():
        log.info("prepare: %s stays float: %s", name or "(model)", reason)
    keep(model, configure, state, save_summary, load_summary)
    return model


def convert(
    model: nn.Module, inplace: bool = False, *, check: Any = None, min_cosine: float = 0.99
) -> Any:
    """Turn a prepared and calibrated model into one that computes on 8-bit integers.

    The result is an ordinary module: it runs fast as it is and can be copied, pickled, traced and compiled.

    Args:
        model: Result of `prepare`.
        inplace: Whether to change the model itself rather than a copy.
        check: A batch (a tensor, a tuple of arguments, or a dict of keyword arguments) to compare the float and the
            INT8 model on: the error of each layer and of the output is printed.
        min_cosine: The cosine of the outputs below which the comparison warns.

    Returns:
        The INT8 model; `ipex.explain` tells what became of each layer.

    Raises:
        TypeError: ``model`` is not a module.
        OpArgumentError: The model was not prepared, or it was not calibrated.
    """
    from ipex_quant.int8 import convert as _int8_convert

    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model must be a torch.nn.Module, got {type(model).__name__}")
    state = state_of(model)
    _check_flag("convert", "inplace", inplace)
    if state is None:
        raise OpArgumentError(
            f"convert: model must be a result of prepare, got a {type(model).__name__} that is not prepared"
        )
    if state.watches and not state.loaded and not any(w.ready for w in state.watches.values()):
        raise OpArgumentError(
            "convert: model must be calibrated by running it on typical inputs, got no data"
        )
    model = model if inplace else copy.deepcopy(model)
    if check is None:
        return _int8_convert.convert_model(model)[0]
    args, kwargs = _int8_convert.as_call(check)
    before = _int8_convert.collect_float(model, args, kwargs)
    model, names = _int8_convert.convert_model(model)
    _int8_convert.compare(model, before, names, args, kwargs, min_cosine)
    return model


class _NoExamplesError(OpArgumentError, AssertionError):
    """A static configuration without example inputs; scripts for IPEX catch its AssertionError."""


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What a configuration asks for in a model.

    Attributes:
        dynamic: Paths of the layers whose scales are measured at each call.
        layers: Configurations of the layers with static scales, by path.
        weight_only: Whether the weights of some layers become codes.
        products: Whether products of activations may become INT8; a model may have nothing else.
    """

    dynamic: list[str]
    layers: dict[str, Any]
    weight_only: bool
    products: bool

    @property
    def anything(self) -> bool:
        return bool(self.dynamic or self.layers or self.weight_only or self.products)

    @property
    def static(self) -> bool:
        return bool(self.layers) or (self.products and not self.dynamic and not self.weight_only)


def _what_is_asked(model: nn.Module, mapping: QConfigMapping, has_examples: bool) -> _Asked:
    kinds = {
        name: (module, qconfig)
        for name, module in model.named_modules()
        if (qconfig := qconfig_of(mapping, name, module)) is not None
    }
    product = qconfig_of(mapping, "", MatMul())
    return _Asked(
        dynamic=[
            n for n, (m, q) in kinds.items() if n and type(m) in _DYNAMIC and _is_dynamic(q) is True
        ],
        layers={
            n: q for n, (m, q) in kinds.items() if type(m) in _STATIC and _is_dynamic(q) is False
        },
        weight_only=any(isinstance(q, QConfigWoq) for _, q in kinds.values()),
        products=(product is not None and _is_dynamic(product) is False and has_examples),
    )


def _what_there_is(model: nn.Module, mapping: QConfigMapping) -> str:
    """Return what an error says of a model without a layer that the configuration quantizes."""
    named = any(
        type(module) in CONVS and qconfig_of(mapping, name, module) is not None
        for name, module in model.named_modules()
    )
    return "only convolutions, which have static INT8 forms only" if named else "none"


def _warn_of_nothing(there: str) -> None:
    warnings.warn(
        f"prepare: the model has no layers that the configuration quantizes, got {there}; it stays as it is",
        stacklevel=3,
    )


def _forget(model: nn.Module) -> None:
    """Take back an earlier `prepare`, apart from the dropout layers it removed and the modules it made."""
    detach(model)
    forget(model)


def _plan_static(
    model: nn.Module, state: Prepared, mapping: QConfigMapping, products: bool
) -> None:
    """Plan what becomes INT8 with static scales, and put observers where these are measured."""
    assert state.flow is not None

    def wanted(name: str, module: nn.Module) -> Any:
        qconfig: Any = qconfig_of(mapping, name, module)
        return qconfig if qconfig is not None and _is_dynamic(qconfig) is False else None

    plan = state.plan = make_plan(model, state.flow, wanted, state.bn_folding, state.named)
    layers = state.qconfigs
    if not (layers or plan.products or plan.left):
        _warn_of_nothing("none")
    state.qconfigs = {path: layer.qconfig for path, layer in plan.layers.items()}
    state.qconfigs |= {path: product.qconfig for path, product in plan.products.items()}
    attach(model, state)
    _choose_others(model, state, layers, products)


def _choose_others(
    model: nn.Module, state: Prepared, statics: dict[str, Any], products: bool
) -> None:
    """Decide about what needs no calibration, and report what stays float."""
    assert state.flow is not None
    left = state.plan.left
    for name, module in model.named_modules():
        if name in statics and isinstance(module, (nn.LSTM, *TABLES)):
            if isinstance(module, nn.LSTM):
                reason = why_not_lstm(module, name in state.flow.packed)
            else:
                reason = why_not_bag(module)
            if not name:
                reason = "it is the model itself; put it into a container"
            elif has_hooks(module):
                reason = "it has hooks"
            if reason:
                left[name] = reason
            elif isinstance(module, nn.LSTM):
                state.dynamic.append(name)
            else:
                state.tables.append(name)
        elif type(module) in _FLOAT and name not in state.dynamic:
            left.setdefault(name, f"no static INT8 form of {type(module).__name__}")
    for event in state.flow.events:
        if event.role != "function" or event.path in left:
            continue
        name = event.name.strip("_")
        if name == "scaled_dot_product_attention":
            left[event.path] = f"no INT8 form of its {name}"
        elif name in _FUNCTIONS and type(model.get_submodule(event.path)) not in _STATIC:
            left[event.path] = f"its {name}: only the module {_FUNCTIONS[name]} has an INT8 form"
        elif event.name in PRODUCTS | {"interaction"} and not any(
            map(state.flow.constant, event.inputs)
        ):
            cannot = f"its {name}: a forward that cannot be rewritten; see MatMul"
            is_named = event.name in state.named
            reason = why_float(event.shapes, is_named) if is_named or products else NOT_NAMED
            left[event.path] = reason or cannot


def _mapping(op: str, configure: Any) -> QConfigMapping:
    if isinstance(configure, QConfigMapping):
        return configure
    single = isinstance(configure, (QConfig, QConfigSmoothQuant, QConfigWoq))
    got = type(configure).__name__
    check(single, op, "configure", "be a QConfigMapping or a QConfig", got)
    warnings.warn(
        "prepare: a QConfig is deprecated as configure, use a QConfigMapping",
        DeprecationWarning,
        stacklevel=3,
    )
    return QConfigMapping().set_global(configure)


def _is_dynamic(qconfig: Any) -> bool | None:
    """Return whether a configuration is dynamic, or None for weight-only ones."""
    if isinstance(qconfig, QConfigWoq):
        return None
    if isinstance(qconfig, QConfigSmoothQuant):
        return False
    # What IPEX's documentation made a configuration dynamic with; torch's observer drops it.
    asked = getattr(getattr(qconfig.activation, "p", None), "keywords", {})
    if asked.get("compute_dtype") is not None:
        return True
    return bool(getattr(qconfig.activation(), "is_dynamic", False))


def _examples(
    op: str, inputs: Any, named: Any, needed: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping) and named is None:
        inputs, named = None, inputs
    if needed and inputs is None and named is None:
        raise _NoExamplesError(
            f"{op}: example_inputs must be given for a static configuration, or example_kwarg_inputs, got None"
        )
    is_dict = named is None or isinstance(named, Mapping)
    check(is_dict, op, "example_kwarg_inputs", "be a dict", type(named).__name__)
    if inputs is None:
        args: tuple[Any, ...] = ()
    else:
        args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return args, dict(named or {})


def _check_flag(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be True or False, got {value!r}")


def _run_once(
    op: str,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    runs: bool,
    inplace: bool,
) -> tuple[nn.Module, Flow | None]:
    """Return the model, or a copy of it, and what it did with the example inputs if it runs."""
    changed, keep = call_encoder_layers(model), False
    try:
        flow = _record(op, model, args, kwargs) if runs else None
        keep = inplace
        return model if inplace else copy.deepcopy(model), flow
    finally:
        if not keep:
            for module, name, value in changed:
                setattr(module, name, value)


def _record(op: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flow:
    try:
        return record(model, args, kwargs)
    except Exception as error:
        shapes = [list(t.shape) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        raise OpArgumentError(
            f"{op}: example_inputs and example_kwarg_inputs must fit the model, got tensors of shapes {shapes} and"
            f" names {list(kwargs)}, which fail with"
            f" {type(error).__name__}: {error}"
        ) from error


def _expose(
    model: nn.Module, paths: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> nn.Module:
    """Turn sums, activations and products in forwards into modules, if that does not change the output."""
    if not paths:
        return model
    with torch.no_grad():
        before = _tensors(model(*args, **kwargs))
    originals = {}
    children = list(model._modules)
    for path in sorted(paths, key=lambda it: (-it.count("."), not it)):
        if not path:
            _int8_rewrite.rewrite_model(model)
            continue
        original = model.get_submodule(path)
        made = _int8_rewrite.rewrite(original)
        if made is not None:
            originals[path] = original
            replace_module(model, path, made)
    with torch.no_grad():
        after = _tensors(model(*args, **kwargs))
    same = len(before) == len(after) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
        for a, b in zip(before, after, strict=True)
    )
    if not same:
        _int8_rewrite.undo_rewrite_model(model, children)
        for path in reversed(list(originals)):
            replace_module(model, path, originals[path])
        log.info("prepare: sums and activations stay as they are: another form changes the output")
    return model


def _tensors(results: Any) -> list[torch.Tensor]:
    from ipex_quant.int8.dataflow import tensors_of

    return [t.clone() for t in tensors_of(results)]
