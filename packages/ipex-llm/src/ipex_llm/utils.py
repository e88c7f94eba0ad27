# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints from model folders, whole or each rank's part, and into models.

Example:
    >>> from ipex_llm.utils import load_low_precision_checkpoint
    >>> state_dict, quant_config = load_low_precision_checkpoint("folder")  # doctest: +SKIP
    >>> ipex.llm.optimize(model, low_precision_checkpoint=(state_dict, quant_config))  # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ipex_core.library.spec import check
from ipex_llm.distributed.checkpoint import Splitter
from ipex_llm.model_loader import is_gguf, load_gguf, quantization_config, read_file, tensors
from ipex_llm.model_loader import model_config as read_model_config
from ipex_quant.formats.schemes import method_of
from ipex_quant.weight_only.checkpoint import quantized_names
from ipex_quant.weight_only.replace import Replaced, replace_linears_from_checkpoint

__all__ = [
    "Replaced",
    "load_low_precision_checkpoint",
    "replace_linears_from_checkpoint",
    "shard_low_precision_checkpoint",
]

#: Features of an MLP that stay together if nothing else is said.
_GRAIN = 64


def load_low_precision_checkpoint(
    pathname: str | os.PathLike[str], rank: int = 0, world_size: int = 1
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load a quantized checkpoint from a folder in the layout of Hugging Face.

    Weights are ``*.safetensors`` or ``*.bin``, one file or several with an index. The configuration is
    ``quantization_config`` in ``config.json``, or a ``quantize_config.json``. Tensors of safetensors files are mapped
    and not read until they are used.

    A GGUF file, or a folder that has nothing else, is read too: its tensors get the names and the order that
    Hugging Face's models of the architectures llama (Mistral too), qwen2 and qwen3 have. So is ``*.pt``, a state dict
    of 4-bit GPTQ weights as IPEX's ``gptq`` has written it.

    Args:
        pathname: The folder, or a GGUF file, or a ``.pt`` file.
        rank: With ``world_size`` > 1, whose part of the split layers is returned; see
            `shard_low_precision_checkpoint`.
        world_size: Number of ranks.

    Returns:
        ``(state_dict, quant_config)``, as ``ipex.llm.optimize`` takes it for ``low_precision_checkpoint``.

    Raises:
        OpArgumentError: The folder is not complete, a file is damaged, the method is not supported, no layer is
            quantized, or the model cannot be split among so many ranks.
    """
    op = "load_low_precision_checkpoint"
    if is_gguf(pathname):
        state, quant_config = load_gguf(op, pathname)
        check(bool(quantized_names(state)), op, "pathname", "have gguf weights", "none")
        check(world_size == 1 and rank == 0, op, "world_size", "be 1 for GGUF files", world_size)
        return state, quant_config
    if Path(pathname).suffix == ".pt" and Path(pathname).is_file():
        state = dict(read_file(op, Path(pathname)))
        check(bool(quantized_names(state)), op, "pathname", "have gptq weights", "none")
        what = "be 1 for .pt files: use shard_low_precision_checkpoint"
        check(world_size == 1 and rank == 0, op, "world_size", what, world_size)
        return state, {"quant_method": "gptq", "bits": 4}
    config = read_model_config(op, pathname)
    folder = Path(pathname)
    quant_config = quantization_config(op, folder, config)
    method = method_of(op, quant_config)
    state = dict(tensors(op, folder))
    check(bool(quantized_names(state)), op, "pathname", f"have {method} weights", "none")
    if world_size != 1 or rank != 0:
        splitter = _splitter(config, quant_config, rank, world_size, method)
        state = _split(state, splitter)
    return state, quant_config


def shard_low_precision_checkpoint(
    low_precision_checkpoint: Mapping[str, Tensor],
    model_config: Any,
    rank: int,
    world_size: int,
    quantization_method: str,
    tp_grain_size: int = _GRAIN,
    desc_act: bool = False,
    bits: int = 4,
) -> dict[str, Tensor]:
    """Return one rank's part of a quantized checkpoint for tensor parallelism.

    ``q_proj``, ``k_proj``, ``v_proj`` (or ``qkv_proj``), ``gate_proj``, ``up_proj`` (or ``gate_up_proj``), ``fc1``,
    ``fc_in``, ``w1`` and ``w3`` are split by output features; ``o_proj``, ``out_proj``, ``down_proj``, ``fc2``,
    ``fc_out`` and ``w2`` by input features, and only rank 0 keeps their bias, so that the sum over the ranks is right.
    Everything else is whole. Attention is split by key/value heads, the MLP by pieces that are no part of a group;
    where they do not divide evenly the first ranks have one more.

    Args:
        low_precision_checkpoint: All tensors of the checkpoint; not changed.
        model_config: The model's configuration, an object or a dictionary with ``num_attention_heads`` and, if they
            differ, ``num_key_value_heads``.
        rank: Whose part.
        world_size: Number of ranks, at most the number of key/value heads.
        quantization_method: ``"gptq"``, ``"awq"``, ``"rtn"``, ``"auto-round"`` or ``"int8"``.
        tp_grain_size: Features of the MLP that stay together, if that leaves a piece for each rank.
        desc_act: GPTQ's act-order: a rank's part of a layer that is split by input features keeps all scales.
        bits: Bits of a code.

    Returns:
        A new state dict; tensors that are not split are the tensors of the checkpoint.

    Raises:
        OpArgumentError: The model cannot be split so, or a tensor does not fit.
    """
    method = method_of("shard_low_precision_checkpoint", {"quant_method": quantization_method})
    group = _group_size(low_precision_checkpoint, bits, method)
    splitter = Splitter.make(
        model_config, rank, world_size, method, tp_grain_size, desc_act, bits, group
    )
    return _split(low_precision_checkpoint, splitter)


def _splitter(
    config: Mapping[str, Any],
    quant_config: Mapping[str, Any],
    rank: int,
    world_size: int,
    method: str,
) -> Splitter:
    bits = quant_config.get("bits", quant_config.get("w_bit", 4))
    group = quant_config.get("group_size", quant_config.get("q_group_size", -1))
    desc_act = bool(quant_config.get("desc_act", False))
    return Splitter.make(config, rank, world_size, method, _GRAIN, desc_act, bits, group)


def _group_size(state: Mapping[str, Tensor], bits: int, method: str) -> int:
    """Return the group size that the shapes tell."""
    for name in quantized_names(state):
        qweight, scales = state.get(f"{name}.qweight"), state.get(f"{name}.scales")
        if qweight is None or scales is None:
            continue
        words = method != "awq" and qweight.shape[1] == scales.shape[1]
        k = qweight.shape[0] * 32 // bits if words else qweight.shape[0]
        return -1 if scales.shape[0] == 1 else -(-k // scales.shape[0])
    return -1


def _split(state: Mapping[str, Tensor], splitter: Splitter) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for key, tensor in state.items():
        part = splitter.split(key, tensor, state)
        if part is not None:
            result[key] = part
        more = splitter.extra(key, state)
        if more is not None:
            result[more[0]] = more[1]
    return result
