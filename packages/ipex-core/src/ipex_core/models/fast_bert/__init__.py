# SPDX-License-Identifier: Apache-2.0
"""`fast_bert`: BERT in training and inference on fused blocks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ipex_core.amp import warn_if_emulated
from ipex_core.errors import OpArgumentError
from ipex_core.models.fast_bert.model import bert_models, speed_up, unsupported
from ipex_core.optimization.api import copy_model, restore
from ipex_core.optimization.options import ModelTypeError, parse
from ipex_core.optimization.records import KEY, log_of
from ipex_core.optimization.training import train

__all__ = ["fast_bert"]


def fast_bert(
    model: Any,
    dtype: torch.dtype = torch.float,
    optimizer: torch.optim.Optimizer | None = None,
    unpad: bool = False,
) -> Any:
    """Make a BERT model faster in training and inference.

    Embeddings, self-attention, dropout, residual additions, norms and GELU run in fused kernels with gradients of
    their own. The model keeps its class, modules and names. The ``state_dict`` of model and optimizer is as before, in
    float32. `ipex.explain` tells what was done and `ipex.restore` undoes it.

    Call it after weights are loaded, instead of `ipex.optimize`, and before DistributedDataParallel.

    Args:
        model: A ``BertModel`` of transformers or a module that holds one; a copy is changed.
        dtype: ``torch.float32``, or ``torch.bfloat16`` to have weights in 16 bits and the rest of their float32
            values beside, as `ipex.optimize` does in training.
        optimizer: Optimizer of the model; the returned one belongs to the returned model.
        unpad: Leave out tokens whose ``attention_mask`` is 0. ``last_hidden_state`` is zero there.

    Returns:
        The model, or ``(model, optimizer)`` if an optimizer was given. A model without BERT comes back as it is, with
        a warning.

    Raises:
        TypeError: An argument has the wrong type (for the model it is an AttributeError too).
        ValueError: Another dtype.

    Example:
        >>> model, optimizer = fast_bert(model, dtype=torch.bfloat16, optimizer=optimizer)  # doctest: +SKIP
    """
    if not isinstance(model, nn.Module):
        raise ModelTypeError(
            f"fast_bert: model must be a torch.nn.Module, got {type(model).__name__}"
        )
    if dtype not in (torch.float32, torch.bfloat16):
        raise OpArgumentError(
            f"fast_bert: dtype must be torch.float32 or torch.bfloat16, got {dtype!r}"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"fast_bert: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if not isinstance(unpad, bool):
        raise TypeError(f"fast_bert: unpad must be True or False, got {unpad!r}")
    found = bert_models(model)
    reasons = {path: unsupported(part) for path, part in found}
    if all(reason is not None for reason in reasons.values()):
        why = "; ".join(f"{path or 'the model'}: {reason}" for path, reason in reasons.items())
        warnings.warn(
            f"fast_bert: the model stays as it is: {why or 'no part of it is a BertModel of transformers'}",
            stacklevel=2,
        )
        return model if optimizer is None else (model, optimizer)
    model, optimizer = copy_model((model, optimizer))
    if log_of(model) is not None:
        restore(model)
    if dtype == torch.bfloat16:
        warn_if_emulated(dtype, "fast_bert(dtype=torch.bfloat16)")
    train(model, optimizer, parse("O1", dtype, {}, channels_last=False))
    log = model.__dict__[KEY]
    for path, part in bert_models(model):
        reason = reasons[path]
        if reason is None:
            speed_up(part, unpad)
            reason = "embeddings and encoder in fused blocks" + (", without padding" * unpad)
            log.add(path, part, "fast_bert", True, reason, "ipex::dropout_add_layer_norm")
        else:
            log.add(path, part, "fast_bert", False, f"stays: {reason}")
    return model if optimizer is None else (model, optimizer)
