# SPDX-License-Identifier: Apache-2.0
"""`optimize`: a model of transformers, made fast, still the user's model."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import ipex_core
from ipex_core.errors import OpArgumentError
from ipex_core.optimization.api import copy_model
from ipex_core.optimization.options import DTYPES, check_model
from ipex_core.optimization.records import log_of
from ipex_llm.arch.layers import Found, layer_plans
from ipex_llm.arch.types import DecoderPlan
from ipex_llm.distributed import (
    TensorParallel,
    adopt,
    divide,
    is_sharded,
    load_parts,
    shard_head,
    uncovered,
    wrap_head,
)
from ipex_llm.distributed.split import GRAINS
from ipex_llm.kv_cache.options import cache_text, checkpoint_scales, fitting, kv_dtype, kv_scales
from ipex_llm.model_runner.weights.woq_model import Notes, quantize
from ipex_llm.optimization.proof import prove_layers, prove_stack
from ipex_llm.optimization.rest import optimize_rest
from ipex_llm.optimization.static import is_static, quantize_static
from ipex_llm.optimization.xpu import optimize_on_xpu
from ipex_llm.patch.attach import attach_decoder, attach_layers, find_plan, share_random
from ipex_quant.kv_cache import KVCacheScales

__all__ = ["optimize", "optimize_transformers"]

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
        device: ``"cpu"``, or ``"xpu"``: the model is moved there and runs layer by layer, with fused ops for its norms
            and gated MLPs; ``tp_group`` and ``kv_cache_dtype`` must be None.
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
        kv_cache_dtype: dtype of cached keys and values: None (that of the model), ``"int8"``, ``"fp8_e4m3"`` or
            ``"fp8_e5m2"`` (also ``"fp8"``).
        kv_cache_scales: Scales of each layer for such a cache, of ``ipex.quantization.calibrate_kv_cache``, or the file
            in which they were saved. None: int8 rows have scales of their own, which is more exact; fp8 numbers have
            those of the ``low_precision_checkpoint``, or none.
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
        NotImplementedError: An option that xpu does not have.
        MissingComponentError: ``device`` is ``"xpu"``, but there is none.

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
    check_model(model, None)
    _check_flags(
        inplace=inplace,
        deployment_mode=deployment_mode,
        cache_weight_for_large_batch=cache_weight_for_large_batch,
    )
    _check_arguments(optimizer, dtype, device)
    static = is_static(quantization_config)
    if qconfig_summary_file is not None and not static:
        raise OpArgumentError(
            "optimize: qconfig_summary_file must come with a static quantization_config, such as"
            " ipex.quantization.get_smooth_quant_qconfig_mapping(), got"
            f" {type(quantization_config).__name__}"
        )
    if torch.device(device).type == "xpu":
        _check_xpu(tp_group, kv_cache_dtype, quantization_config if static else None)
        return optimize_on_xpu(
            model,
            dtype,
            inplace,
            torch.device(device),
            quantization_config,
            low_precision_checkpoint,
            lambda copy: _load(copy, quantization_config, low_precision_checkpoint, None),
        )
    kv = kv_dtype(kv_cache_dtype)
    scales = kv_scales(kv_cache_scales, kv)
    if isinstance(depth, bool) or depth not in (1, 2, 3):
        raise OpArgumentError(f"optimize: depth must be 1, 2 or 3, got {depth!r}")
    parallel = None if tp_group is None else TensorParallel.of(tp_group)
    if not inplace:
        model = copy_model(model)
    if any("_ipex_mixin" in vars(type(module)) for module in model.modules()):
        ipex_core.restore(model)  # begin anew: the arguments may be others
    if static:
        if parallel is not None:
            raise NotImplementedError(
                "optimize: tp_group must be None for static INT8, got a group"
            )
        model = quantize_static(
            model,
            quantization_config,
            qconfig_summary_file,
            low_precision_checkpoint,
            sample_inputs,
        )
        if qconfig_summary_file is None:
            return model
        quantization_config = low_precision_checkpoint = None
    adopt(model)
    plan, reason = None, None
    if low_precision_checkpoint is not None:
        if kv in (torch.float8_e5m2, torch.float8_e4m3fn) and scales is None:
            scales = checkpoint_scales(low_precision_checkpoint)
        _load(model, quantization_config, low_precision_checkpoint, parallel)
    elif parallel is not None:
        plan = divide(model, parallel, grains=_grains(quantization_config))
    if not deployment_mode or depth < 3:
        plan, reason = None, "deployment_mode is False" if depth == 3 else f"depth is {depth}"
    elif plan is None:
        plan, reason = find_plan(model)
    kept = dtype or next(
        (p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32
    )
    if plan is not None:
        plan, reason = prove_stack(model, plan, kept, limited=not is_sharded(model))
    if low_precision_checkpoint is not None and is_sharded(model):
        plan = _divide_head(model, plan)
    wants_layers = deployment_mode and depth > 1 and not is_sharded(model)
    layers = _proven_layers(model, kept) if wants_layers and plan is None else []
    notes: Notes = []
    if quantization_config is not None and low_precision_checkpoint is None:
        with uncovered(model):
            plan, layers, notes = quantize(model, plan, quantization_config, layers)
    optimize_rest(model, dtype, layers, plan)
    if plan is not None:
        scales = fitting(plan, scales, kv_cache_scales is not None)
        reason = attach_decoder(model, plan, kv, scales)
        if reason is not None:  # pack what was left to the plan
            ipex_core.restore(model)
            layers = _proven_layers(model, kept) if wants_layers else []
            optimize_rest(model, dtype, layers)
    layers = _attach_layers(model, layers, dtype)
    if is_sharded(model) and reason is not None:
        share_random(model)
    text = _report(model, reason, layers, notes, cache_text(kv, scales))
    if reason is not None:
        logger.info("optimize: %s: %s", type(model).__name__, text)
    return model


def _proven_layers(model: nn.Module, dtype: torch.dtype) -> list[Found]:
    """Return the decoder layers; those whose plan is not proven have the reason in its place."""
    layers = layer_plans(model)
    plans = [(i, layer.plan) for i, layer in enumerate(layers) if layer.plan is not None]
    refused = prove_layers(model, plans, dtype)
    return [layer.without(refused.get(index)) for index, layer in enumerate(layers)]


def _attach_layers(model: nn.Module, layers: list[Found], dtype: torch.dtype | None) -> list[Found]:
    """Let layers run as their plans and return them; where a plan fails, its layer is optimized as the others are."""
    refused = attach_layers(model, layers)
    if refused:
        ipex_core.restore(model)
        layers = [layer.without(refused.get(layer.name)) for layer in layers]
        optimize_rest(model, dtype, layers)
        attach_layers(model, layers)
    return layers


def _report(
    model: nn.Module, reason: str | None, layers: Sequence[Found], notes: Notes, cache: str
) -> str:
    """Tell `ipex.explain` what was done, and return the line about the whole model."""
    whole = sum(layer.plan is not None for layer in layers)
    if reason is None:
        text = f"the whole decoder stack runs as one program per step{cache}"
    elif whole:
        text = f"{whole} of {len(layers)} decoder layers run as one program each: {reason}"
    else:
        text = f"layer by layer: {reason}"
    log = log_of(model)
    if log is None:
        return text
    op = "ipex::program_run"
    for name, module, problem in notes:
        said = "quantized" if problem is None else f"experts are not quantized: {problem}"
        target = "ipex::fused_experts" if problem is None else ""
        log.add(name, module, "experts", problem is None, said, target)
    log.add("", model, "llm", reason is None, text, op if reason is None or whole else "")
    for layer in layers:
        done = layer.plan is not None
        said = "the whole layer runs as one program" if done else layer.reason
        log.add(layer.name, layer.module, "layer", done, said, op if done else "")
    return text


def optimize_transformers(*args: Any, **kwargs: Any) -> Any:
    """Return `optimize` of the arguments; the former name."""
    warnings.warn(
        "optimize_transformers is deprecated: use ipex.llm.optimize", FutureWarning, stacklevel=2
    )
    return optimize(*args, **kwargs)


def _check_flags(**flags: object) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"optimize: {name} must be True or False, got {flag!r}")


def _check_arguments(optimizer: Any, dtype: Any, device: Any) -> None:
    if optimizer is not None:
        raise OpArgumentError(
            "optimize: optimizer must be None, got one: ipex.llm.optimize is for inference; train with ipex.optimize"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"optimize: dtype must be a torch.dtype or None, got {dtype!r}")
    if dtype is not None and dtype not in DTYPES:
        names = ", ".join(map(str, DTYPES))
        raise OpArgumentError(f"optimize: dtype must be one of {names} or None, got {dtype}")
    try:
        kind = torch.device(device).type if isinstance(device, (str, torch.device)) else device
    except RuntimeError:  # not the name of a device
        kind = None
    if kind not in ("cpu", "xpu"):
        raise RuntimeError(f"optimize: device must be 'cpu' or 'xpu', got {device!r}")


def _check_xpu(tp_group: Any, kv_cache_dtype: Any, static: Any) -> None:
    for name, value in (("tp_group", tp_group), ("kv_cache_dtype", kv_cache_dtype)):
        if value is not None:
            raise NotImplementedError(
                f"optimize: {name} must be None for device 'xpu', got {value!r}"
            )
    if static is not None:
        raise NotImplementedError(
            "optimize: quantization_config must be for weights only for device 'xpu', got a static one"
        )


def _grains(config: Any) -> tuple[int, ...]:
    """Return how many features of an mlp should stay together: whole groups, so that their scales are the same."""
    if config is None:
        return GRAINS
    from ipex_quant.weight_only.convert import woq_qconfigs

    group = math.lcm(*(max(one.group_size, 1) for one in woq_qconfigs("optimize", config)))
    return GRAINS if group <= 1 else (math.lcm(GRAINS[0], group), group, *GRAINS)


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


def _load(model: nn.Module, config: Any, checkpoint: Any, parallel: TensorParallel | None) -> None:
    """Replace linear layers by those of a checkpoint, and load what else it has."""
    from ipex_quant.weight_only.replace import replace_linears_from_checkpoint

    if isinstance(checkpoint, Mapping):
        warnings.warn(
            "optimize: low_precision_checkpoint has no quant_config: it is taken as GPTQ with 4 bits; pass"
            " (state_dict, quant_config)",
            stacklevel=4,
        )
        checkpoint = (checkpoint, None)
    if not isinstance(checkpoint, (tuple, list)) or len(checkpoint) != 2:
        raise OpArgumentError(
            "optimize: low_precision_checkpoint must be (state_dict, quant_config), got"
            f" {type(checkpoint).__name__}"
        )
    tensors, scheme = checkpoint
    if parallel is not None:
        load_parts(model, tensors, scheme, config, parallel)
    else:
        replace_linears_from_checkpoint(model, tensors, scheme, config)
