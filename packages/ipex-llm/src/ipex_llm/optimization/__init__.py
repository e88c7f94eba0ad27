# SPDX-License-Identifier: Apache-2.0
"""`optimize`: a model of transformers, made fast, still the user's model."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import ipex_core
from ipex_core.errors import OpArgumentError
from ipex_core.module_swap.base import original_class
from ipex_core.optimization import copy_model
from ipex_core.optimization.records import Record, class_name, log_of
from ipex_llm.arch import DecoderPlan
from ipex_llm.arch.detect import Found
from ipex_llm.arch.encoder_decoder import PairPlan
from ipex_llm.distributed import (
    adopt,
    divide,
    is_sharded,
    load_parts,
    shard_head,
    uncovered,
    wrap_head,
)
from ipex_llm.model_runner.woq_model import Choice, choose, quantize, remapped
from ipex_llm.optimization.decide import (
    Decision,
    Form,
    OptimizePlan,
    decide,
    refused,
    without_layers,
)
from ipex_llm.optimization.proof import small_copy
from ipex_llm.optimization.request import Request, checked
from ipex_llm.patch import attach_decoder, attach_layers, optimize_rest, share_random
from ipex_llm.patch.encoder_decoder import attach_pair, find_pair
from ipex_quant.kv_cache import KVCacheScales
from ipex_quant.qconfig import WoqWeightDtype, get_weight_only_quant_qconfig_mapping
from ipex_quant.weight_only.linear import WoqLinearModule
from ipex_quant.weight_only.torchao import replace_torchao

__all__ = ["OptimizePlan", "optimize", "optimize_transformers", "plan", "planned"]

logger = logging.getLogger("ipex.llm")


def optimize(
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    dtype: torch.dtype | None = torch.float32,
    inplace: bool = False,
    device: str | torch.device = "cpu",
    quantization_config: Any = None,
    qconfig_summary_file: str | None = None,
    low_precision_checkpoint: Any = None,
    sample_inputs: Any = None,
    deployment_mode: bool = True,
    cache_weight_for_large_batch: bool = False,
    *,
    kv_cache_dtype: torch.dtype | str | None = None,
    kv_cache_scales: KVCacheScales | str | os.PathLike[str] | None = None,
    tp_group: Any = None,
    depth: int = 3,
) -> Any:
    """Make a language model of transformers faster on this CPU.

    The result is a model of the same class: ``generate``, ``forward``, ``state_dict`` and ``save_pretrained`` work as
    before, with the same tokens in float32. If the structure of its decoder is understood, the whole stack runs as one
    program per step over a paged cache (depth 3); otherwise each decoder layer that is understood runs as one program
    (depth 2), and the layers of the rest are made faster one by one (depth 1). `ipex.explain` tells which, and
    `ipex.restore` undoes it (but for quantized weights).

    Args:
        model: Model in inference mode. A ``torch.jit.ScriptModule`` is returned untouched.
        optimizer: Must be None.
        dtype: ``torch.bfloat16`` or ``torch.float16`` to cast the parameters, ``torch.float32`` or None to leave them.
        inplace: Change ``model`` itself. Otherwise a deep copy is changed and ``model`` stays as it is.
        device: ``"cpu"``, or ``"xpu"``: the model is moved there. A decoder runs as programs of ops of the device,
            other models layer by layer, with fused ops for their norms and gated MLPs. A quantized cache of these is on
            the device, and read back layer by layer.
        quantization_config: Weight-only quantization, of ``ipex.quantization.get_weight_only_quant_qconfig_mapping``,
            or static INT8 of activations and weights, of ``get_smooth_quant_qconfig_mapping`` or another mapping for
            ``ipex.quantization.prepare``. A static model runs layer by layer; the options of caches and depths are not
            for it.
        qconfig_summary_file: For static INT8: the scales that ``save_qconf_summary`` of the calibrated model wrote.
            None: the model is returned as it is, to be calibrated.
        low_precision_checkpoint: Quantized weights, of ``ipex.llm.utils.load_low_precision_checkpoint``.
        sample_inputs: For static INT8: inputs to run the model once, a tuple or a dict. None: those that transformers
            has for each model. Nothing else needs them.
        deployment_mode: True: run the whole decoder as a program. False: only make layers faster, so that
            ``torch.compile`` sees an ordinary model; the same as ``depth=1``.
        cache_weight_for_large_batch: Accepted; one packed form serves all batch sizes.
        kv_cache_dtype: dtype of cached keys and values: None (the dtype of the model), ``"int8"``, ``"fp8_e4m3"`` or
            ``"fp8_e5m2"`` (also ``"fp8"``).
        kv_cache_scales: Scales of each layer for such a cache, of ``ipex.quantization.calibrate_kv_cache``, or the file
            in which they were saved. None: int8 rows have scales of their own, which is more exact; fp8 numbers have
            the scales of the ``low_precision_checkpoint``, or none.
        tp_group: Divide the model among the ranks of a process group of ``torch.distributed`` (True: the default one,
            or a device mesh of one dimension): each rank calls this with the same whole model, keeps its part of the
            heads, features and vocabulary, and all call ``generate`` and ``forward`` together with the same input. A
            ``low_precision_checkpoint`` must be the part of this rank. None: the model is not divided, or has been by
            DeepSpeed or by the ``tp_plan`` of transformers.
        depth: The most that becomes one call: 3 the decoder stack, 2 a decoder layer, 1 neither.

    Returns:
        The model.

    Raises:
        TypeError: An argument has the wrong type (for the model it is an AttributeError too).
        ValueError: An unknown dtype or option; a model in training mode, or an optimizer (also an AssertionError); a
            group that is not started, or has more ranks than heads; a model that cannot be divided.
        RuntimeError: An unknown device.
        NotImplementedError: An option that xpu does not have for this model.
        MissingComponentError: ``device`` is ``"xpu"``, but there is no XPU.

    Example:
        >>> import torch, transformers
        >>> config = transformers.LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...     num_attention_heads=2)
        >>> model = optimize(transformers.LlamaForCausalLM(config).eval())
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False, pad_token_id=0).shape
        torch.Size([1, 5])
    """
    if isinstance(model, torch.jit.ScriptModule):
        return model
    request = checked(**locals())  # the arguments by their names
    if not inplace:
        model = copy_model(model)
    if request.device.type == "xpu":
        from ipex_llm.optimization.xpu import optimize_on_xpu

        return optimize_on_xpu(model, request, _load, _quantize_static)
    if any(original_class(module) is not type(module) for module in model.modules()):
        ipex_core.restore(model)  # the arguments may be others now
    if request.static and request.summary is None:
        logger.info(
            "optimize: %s is left as it is, for calibration: ipex.quantization.prepare, some runs,"
            " save_qconf_summary(file), then optimize with qconfig_summary_file=file",
            type(model).__name__,
        )
        return model
    return _run(model, request)


def plan(
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    dtype: torch.dtype | None = torch.float32,
    inplace: bool = False,
    device: str | torch.device = "cpu",
    quantization_config: Any = None,
    qconfig_summary_file: str | None = None,
    low_precision_checkpoint: Any = None,
    sample_inputs: Any = None,
    deployment_mode: bool = True,
    cache_weight_for_large_batch: bool = False,
    *,
    kv_cache_dtype: torch.dtype | str | None = None,
    kv_cache_scales: KVCacheScales | str | os.PathLike[str] | None = None,
    tp_group: Any = None,
    depth: int = 3,
) -> OptimizePlan:
    """Tell what `optimize` with the same arguments would do with a model; nothing is changed.

    The model is run on a few tokens, and a small copy of it is made, as `optimize` does. Its weights are neither copied
    nor packed, so this takes a few per cent of their memory. What a ``low_precision_checkpoint`` has is not loaded:
    whether its formats fit a program is judged when `optimize` has loaded it.

    Args:
        model: Model in inference mode that is not optimized yet.
        optimizer: As for `optimize`, and so are all others.
        dtype: See there.
        inplace: Checked, and not used.
        device: See there.
        quantization_config: See there.
        qconfig_summary_file: See there; the file has to be there.
        low_precision_checkpoint: See there.
        sample_inputs: Not used.
        deployment_mode: See there.
        cache_weight_for_large_batch: Not used.
        kv_cache_dtype: See there.
        kv_cache_scales: See there.
        tp_group: See there. Each rank gets the plan of its part.
        depth: See there.

    Returns:
        The plan; ``print(plan)`` shows a table, ``plan.to_dict()`` is ready for JSON.

    Raises:
        TypeError: As for `optimize`, and if ``model`` is a ``torch.jit.ScriptModule`` or cannot be copied.
        ValueError: As for `optimize`, and if ``model`` is optimized already.
        RuntimeError: As for `optimize`.
        NotImplementedError: As for `optimize`.
        MissingComponentError: As for `optimize`.

    Example:
        >>> import ipex_llm, transformers
        >>> config = transformers.LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...     num_attention_heads=2)
        >>> ipex_llm.plan(transformers.LlamaForCausalLM(config).eval()).summary
        'the whole decoder stack runs as one program per step'
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "plan: model must be a torch.nn.Module of Python, got a torch.jit.ScriptModule, which optimize returns"
            " as it is: plan the model before it is scripted"
        )
    request = checked(**locals())  # the arguments by their names
    done = any(original_class(module) is not type(module) for module in model.modules())
    if done or log_of(model) is not None:
        raise OpArgumentError(
            f"plan: model must not be optimized yet, got a {type(model).__name__} that is: ipex.explain(model) tells"
            " what was done, and ipex.restore(model) gives the original back"
        )
    return planned(model, request)


def optimize_transformers(*args: Any, woq: bool = False, **kwargs: Any) -> Any:
    """Return `optimize` of the arguments; the former name.

    Args:
        args: Positional arguments of `optimize`.
        woq: The weights are quantized, or else are to be: a model whose linear layers are not quantized, with neither
            ``quantization_config`` nor ``low_precision_checkpoint``, gets weights of 4 bits in groups of 128.
        kwargs: Keyword arguments of `optimize`.

    Returns:
        The model.

    Raises:
        TypeError: ``woq`` is not a bool, and as for `optimize`.
    """
    warnings.warn(
        "optimize_transformers is deprecated: use ipex.llm.optimize", FutureWarning, stacklevel=2
    )
    if not isinstance(woq, bool):
        raise TypeError(f"optimize_transformers: woq must be True or False, got {woq!r}")
    given = inspect.signature(optimize).bind(*args, **kwargs).arguments
    model = given["model"]
    if (
        woq
        and given.get("quantization_config") is None
        and given.get("low_precision_checkpoint") is None
        and isinstance(model, nn.Module)
        and not any(isinstance(module, WoqLinearModule) for module in model.modules())
    ):
        kwargs["quantization_config"] = get_weight_only_quant_qconfig_mapping(
            weight_dtype=WoqWeightDtype.INT4, group_size=128
        )
    return optimize(*args, **kwargs)


# ------------------------------------------------------------------------------------------------------------ the steps


def _run(model: nn.Module, request: Request) -> nn.Module:
    """Do all that is asked for, in place: load, decide, shard, quantize, pack, attach, report."""
    adopt(model)
    replace_torchao(model)
    if request.checkpoint is not None:
        _load(model, request)
    decision = decide(model, request)
    stack, layers, choice = decision.stack, list(decision.layers), decision.choice
    if decision.whole is not None:
        stack, choice = _shard(model, decision)
    elif request.checkpoint is not None and is_sharded(model):
        stack = _divide_head(model, stack)
    if request.static:
        model, layers = _quantize_static(model, request, layers)
    elif choice is not None:
        with uncovered(model):
            stack, layers = quantize(model, stack, choice, layers)
    pair = decision.pair
    if pair is not None and choice is not None:  # its linear layers are other modules now
        pair = _found_again(model, pair)
    optimize_rest(model, request.dtype, layers, stack or pair)  # packs what no program packs
    if stack is not None or decision.pair is not None:
        if stack is not None:
            problem = attach_decoder(model, stack, request.kv, decision.kv_scales)
        else:
            problem = "its quantized layers are not understood"
            problem = problem if pair is None else attach_pair(model, pair)
        if problem is not None:  # the stack cannot be packed, against what was planned
            ipex_core.restore(model)
            decision = refused(decision, model, problem)
            layers = list(decision.layers)
            optimize_rest(model, request.dtype, layers)
    problems = attach_layers(model, layers)
    if problems:
        ipex_core.restore(model)
        decision = without_layers(decision, problems)
        layers = list(decision.layers)
        optimize_rest(model, request.dtype, layers)
        attach_layers(model, layers)
    for module in model.modules():
        if isinstance(module, WoqLinearModule):
            module.packed()  # what no program has packed
    if decision.stack is None and is_sharded(model):
        share_random(model)
    _report(model, decision)
    return model


def _found_again(model: nn.Module, pair: PairPlan) -> PairPlan | None:
    """Return the plan of an encoder-decoder whose linear layers were exchanged."""
    found, _ = find_pair(model)
    return None if found is None else dataclasses.replace(found, stock_calls=pair.stock_calls)


def _shard(model: nn.Module, decision: Decision) -> tuple[DecoderPlan | None, Choice | None]:
    """Divide a model among the ranks, and return the structure and the choice of weights of this rank's part."""
    stack, choice, parallel = decision.stack, decision.choice, decision.request.parallel
    assert parallel is not None
    part = divide(model, parallel, grains=decision.grains, plan=decision.whole)
    if not is_sharded(model):  # there is one rank
        return stack, choice
    stack = None if stack is None else dataclasses.replace(part, stock_calls=stack.stock_calls)
    if choice is not None:
        with uncovered(model):
            choice = choose(model, stack, choice.config)
    return stack, choice


def _quantize_static(
    model: nn.Module, request: Request, layers: list[Found]
) -> tuple[nn.Module, list[Found]]:
    """Make a model INT8 in place, with the scales of the file that the request names."""
    from ipex_quant import convert, prepare

    names = dict(model.named_modules(remove_duplicate=False))
    inputs: Any = request.sample_inputs
    if inputs is None:
        inputs = model.dummy_inputs
    named = dict(inputs) if isinstance(inputs, Mapping) else None
    with torch.no_grad():
        prepared = prepare(
            model,
            request.quantization_config,
            example_inputs=inputs if named is None else None,
            example_kwarg_inputs=named,
            inplace=True,
        )
        prepared.load_qconf_summary(qconf_summary=request.summary)
        quantized: nn.Module = convert(prepared, inplace=True)
    return quantized, remapped(quantized, names, None, layers)[1]


def _report(model: nn.Module, decision: Decision) -> None:
    """Tell `ipex.explain` what was done, and log it if the stack is no program."""
    plan, log = decision.plan, log_of(model)
    if log is not None:
        if decision.choice is not None:
            log.records += plan.experts[: len(decision.choice.notes)]
        op = "ipex::program_run" if plan.depth > 1 else ""
        log.add("", model, "llm", plan.depth == 3, plan.summary, op)
        log.records += plan.layers if plan.depth < 3 else ()
    if plan.depth < 3:
        logger.info("optimize: %s: %s", plan.model, plan.summary)


def _divide_head(model: nn.Module, plan: DecoderPlan | None) -> DecoderPlan | None:
    """Divide the head of a model whose layers were divided by loading them, if it is not quantized."""
    if plan is None or plan.head is None or not _is_float(plan.head.modules[0]):
        return plan
    with torch.no_grad():
        plan = shard_head(plan)
    wrap_head(model, plan)
    return plan


def _is_float(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.is_floating_point()


def _load(model: nn.Module, request: Request) -> None:
    """Replace linear layers by quantized layers of a checkpoint, and load its other tensors."""
    from ipex_quant.weight_only.replace import replace_linears_from_checkpoint

    assert request.checkpoint is not None
    tensors, scheme = request.checkpoint
    if request.parallel is not None:
        load_parts(model, tensors, scheme, request.quantization_config, request.parallel)
    else:
        replace_linears_from_checkpoint(
            model, tensors, scheme, request.quantization_config, later=True
        )


# -- `ipex.llm.plan`: what is decided of a model, found on a copy that shares its weights -----------------------------


#: Buffers of more elements are shared with the copy; smaller ones are what a forward may change.
_SMALL = 4096


def planned(model: nn.Module, request: Request) -> OptimizePlan:
    """Return what `ipex.llm.optimize` would do with a model; the model stays as it is.

    Raises:
        TypeError: The model cannot be copied.
    """
    outline = _outline(model)
    adopt(outline)
    replace_torchao(outline)
    if request.checkpoint is None:
        return decide(outline, request).plan
    form = _checkpoint_form(outline, *request.checkpoint)
    found = decide(outline, request, form)
    if found.stack is None and any(p.is_meta for p in model.parameters()):
        return _by_small_copy(outline, request, found.plan)
    return found.plan


def _outline(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares its weights: what calling it changes is the copy."""
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
    shared: dict[int, Any] = {
        id(t): t for t in tensors if isinstance(t, nn.Parameter) or t.numel() > _SMALL
    }
    try:
        return copy.deepcopy(model, shared)
    except Exception as error:
        raise TypeError(
            f"plan: model must be one that copy.deepcopy can copy, got {type(model).__name__}: its weights would not"
            " be copied, but what a call may change is"
        ) from error


def _checkpoint_form(model: nn.Module, tensors: Mapping[str, torch.Tensor], scheme: Any) -> Form:
    """Return what gives the form that the weight of a linear layer has in a checkpoint, None for floats."""
    from ipex_quant.formats.schemes import scheme_of
    from ipex_quant.weight_only.replace import places_of

    forms: dict[int, object] = {}
    for name, place in places_of(model, tensors, scheme).items():
        start = f"{name}."
        parts = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
        order = parts.get("g_idx")
        exact = b"" if order is None else order.numpy().tobytes()
        kinds = sorted((k, str(v.dtype)) for k, v in parts.items() if k != "bias")
        layout = () if "woq" in parts else scheme_of("optimize", scheme, name)
        kind = parts["gguf_type"].item() if "gguf_type" in parts else None
        digest = hashlib.sha256(exact).hexdigest()
        forms[id(model.get_submodule(place))] = (layout, tuple(kinds), kind, digest)
    return lambda module: forms.get(id(module))


def _by_small_copy(model: nn.Module, request: Request, plan: OptimizePlan) -> OptimizePlan:
    """Return the plan of a model without weights, whose layers are judged by a small copy."""
    small = small_copy(model)
    if small is None:
        return plan
    bare = dataclasses.replace(
        request, checkpoint=None, quantization_config=None, kv_scales=None, parallel=None
    )
    found = decide(small, bare).plan
    layers = tuple(_real(model, found.layers))
    note = "the model has no weights yet: what is said of its layers is found on a small copy"
    if request.kv_scales is not None:
        note += "; kv_cache_scales are not looked at"
    return dataclasses.replace(
        plan,
        depth=found.depth,
        reason=found.reason,
        layers=layers,
        rest=found.rest,
        kv_cache=found.kv_cache,
        notes=(*plan.notes, note),
    )


def _real(model: nn.Module, small: tuple[Record, ...]) -> list[Record]:
    """Return what is said of the layers of a small copy for all layers of the model, the last ones as the last."""
    if not small:
        return []
    owner = small[0].module.rpartition(".")[0]
    children = list(model.get_submodule(owner).named_children())
    return [
        dataclasses.replace(
            small[min(index, len(small) - 1)], module=f"{owner}.{name}", kind=class_name(layer)
        )
        for index, (name, layer) in enumerate(children)
    ]
