# SPDX-License-Identifier: Apache-2.0
"""Weight-only quantization with calibration data: GPTQ for the layers of a model, block by block."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ipex_core.library.spec import FLOATS, check
from ipex_quant.qconfig.weight_only import QConfigWoq
from ipex_quant.util.modules import patterns_of, replace_module
from ipex_quant.weight.layouts import unsigned_weight
from ipex_quant.weight_only.build import as_qconfig
from ipex_quant.weight_only.calibrate import Block, Inputs, blocks, linears_of, samples_of
from ipex_quant.weight_only.checkpoint import linear_from
from ipex_quant.weight_only.convert import is_conv1d, matches
from ipex_quant.weight_only.gptq_solve import Solved, solve
from ipex_quant.weight_only.gptq_writer import GptqWriter

__all__ = ["check_arguments", "gptq", "matrix_of", "replace_layer"]

Tensor = torch.Tensor
log = logging.getLogger("ipex")


def gptq(
    model: nn.Module,
    dataloader: Iterable[Any],
    group_size: int = 128,
    wbits: int = 4,
    sym: bool = False,
    percdamp: float = 0.01,
    act_order: bool = False,
    nsamples: int = 128,
    use_max_length: bool = False,
    pad_max_length: int = 2048,
    layer_wise: bool = False,
    compression_dtype: torch.dtype = torch.int32,
    compression_dim: int = 1,
    scale_dtype: torch.dtype = torch.float16,
    save_dir: str | os.PathLike[str] | None = "saved_results",
    *,
    modules_to_skip: Iterable[str] = (),
    qconfig: Any = None,
    progress: bool = True,
) -> nn.Module:
    """Quantize the linear layers of a model's blocks by GPTQ, in place, and write a checkpoint.

    Blocks are the layers of an encoder or decoder; what is outside of them (embeddings, the head) stays as it is, if
    the model has a list of blocks. Each one is run on the calibration data as the quantized blocks before it give
    them; its inputs, and one ``K x K`` matrix for each tensor that its layers see, are in memory. A layer for which
    rounding to nearest changes the outputs less, or that sees no data (an expert), is rounded to nearest.

    Args:
        model: The model, on the CPU; its layers become `WeightOnlyQuantizedLinear`.
        dataloader: Yields what the model takes: a tensor of token ids, a dictionary of arguments, or a tuple that
            begins with one of these. Positions where a 2-D ``attention_mask`` is 0 do not count.
        group_size: Input features that share a scale, or -1 for all. The last group may be shorter.
        wbits: 2, 3, 4 or 8.
        sym: Without zero points.
        percdamp: What is added to the diagonal of H, as a part of its mean.
        act_order: Round the features with the largest inputs first; groups are then not neighbors.
        nsamples: Rows of the data to use.
        use_max_length: Use only samples of at least ``pad_max_length`` tokens.
        pad_max_length: Longer samples are cut to so many tokens.
        layer_wise: Has no effect: it always works block by block.
        compression_dtype: ``torch.int32``, the words that codes are packed in.
        compression_dim: 1: codes that share a word are neighbors along the input features.
        scale_dtype: float16, bfloat16 or float32.
        save_dir: Folder for ``model.safetensors``, ``config.json`` and ``quantize_config.json``, which
            ``ipex.llm.utils.load_low_precision_checkpoint`` reads; None: nothing is written.
        modules_to_skip: Names, ends or patterns of layers that stay as they are.
        qconfig: How the layers compute: a `QConfigWoq`, or a mapping with one as global, of which only the modes
            matter. None: in the dtype of the input.
        progress: Whether to show a progress bar if it takes long.

    Returns:
        ``model``.

    Raises:
        OpArgumentError: An argument is not as described, there are no samples, or activations are not finite.
        FileExistsError: ``save_dir`` has weights that this function has not written.

    Example:
        >>> import torch
        >>> from ipex_quant import gptq
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).eval()
        >>> data = [torch.randn(16, 64) for _ in range(4)]
        >>> type(gptq(model, data, group_size=32, save_dir=None)[0]).__name__
        'WeightOnlyQuantizedLinear'
    """
    op = "gptq"
    check_arguments(op, model, group_size, wbits, scale_dtype)
    check(0 < percdamp < 1, op, "percdamp", "be between 0 and 1", percdamp)
    words = compression_dtype == torch.int32
    check(words, op, "compression_dtype", "be torch.int32", compression_dtype)
    check(compression_dim == 1, op, "compression_dim", "be 1", compression_dim)
    config = None if qconfig is None else as_qconfig(op, qconfig)
    samples = samples_of(op, dataloader, nsamples, pad_max_length, use_max_length)
    skip = patterns_of(op, modules_to_skip)
    settings = {
        "quant_method": "gptq",
        "bits": wbits,
        "group_size": group_size,
        "sym": sym,
        "desc_act": act_order,
        "damp_percent": percdamp,
        "checkpoint_format": "gptq",
    }
    solve_layer = functools.partial(
        solve,
        bits=wbits,
        group_size=group_size,
        symmetric=sym,
        percdamp=percdamp,
        act_order=act_order,
        scale_dtype=scale_dtype,
    )
    with (
        contextlib.nullcontext()
        if save_dir is None
        else GptqWriter(Path(save_dir), model, settings, skip, scale_dtype)
    ) as writer:
        for block in blocks(model, samples, progress):
            layers = {n: m for n, m in linears_of(block).items() if not matches(n, skip)}
            for name, layer, solved in _solved(block, layers, solve_layer):
                if writer is not None:
                    writer.layer(name, solved)
                replace_layer(model, name, layer, solved, wbits, group_size, config)
        if writer is not None:
            writer.finish()
    return model


def _solved(
    block: Block, layers: dict[str, nn.Module], solve_layer: Callable[..., Solved]
) -> Iterator[tuple[str, nn.Module, Solved]]:
    """Yield what the layers of a block become, from what all of them see before the first is replaced."""
    inputs = Inputs(layers)
    if layers:
        inputs.collect(block)
    for name, layer in layers.items():
        matrix = matrix_of(layer)
        solved = solve_layer(matrix, inputs.moment(name, matrix.shape[1]), name=name)
        _tell(name, solved, inputs.seen(name))
        yield name, layer, solved


def check_arguments(
    op: str, model: Any, group_size: int, wbits: int, scale_dtype: torch.dtype
) -> None:
    """Check what all methods with calibration data have in common."""
    check(isinstance(model, nn.Module), op, "model", "be a module", type(model).__name__)
    fits = group_size == -1 or group_size >= 1
    check(fits, op, "group_size", "be -1 or positive", group_size)
    check(wbits in (2, 3, 4, 8), op, "wbits", "be one of 2, 3, 4, 8", wbits)
    floats = FLOATS
    check(scale_dtype in floats, op, "scale_dtype", "be float16, bfloat16 or float32", scale_dtype)
    devices = {p.device.type for p in model.parameters()} - {"cpu"}
    check(not devices, op, "model", "be on the CPU", ", ".join(sorted(devices)))
    named = any(
        True for block in model.modules() if isinstance(block, nn.Linear) or is_conv1d(block)
    )
    check(named, op, "model", "have linear layers", type(model).__name__)


def matrix_of(layer: Any) -> Tensor:
    """Return the ``[N, K]`` weight of a linear layer."""
    weight: Tensor = layer.weight.detach()
    return weight.t() if is_conv1d(layer) else weight


def replace_layer(
    model: nn.Module,
    name: str,
    layer: Any,
    solved: Solved,
    bits: int,
    group_size: int,
    qconfig: QConfigWoq | None,
) -> None:
    """Put the quantized layer in every place where a model has this one."""
    dtype = layer.weight.dtype
    weight = unsigned_weight(
        solved.codes,
        solved.zeros,
        solved.scales,
        bits,
        group_size,
        solved.g_idx,
        None if layer.bias is None else layer.bias.detach(),
        name,
    )
    made = linear_from(weight, qconfig, dtype)
    places = [n for n, m in model.named_modules(remove_duplicate=False) if m is layer]
    for place in places:
        replace_module(model, place, made)


def _tell(name: str, solved: Solved, seen: bool) -> None:
    if not seen:
        log.warning("gptq: %s was given no data: rounded to nearest", name)
        return
    log.info(
        "gptq: %s: change of outputs %.4g, rounded to nearest %.4g",
        name,
        solved.error,
        solved.nearest_error,
    )
