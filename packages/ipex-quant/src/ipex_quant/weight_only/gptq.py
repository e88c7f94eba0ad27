# SPDX-License-Identifier: Apache-2.0
"""GPTQ: weight-only quantization with calibration data, block by block.

Columns of a weight W ``[N, K]`` are rounded one after the other, and the error of each is spread over the columns that
are still to come, weighted by the inverse of H = X^T X, where X are inputs of the layer. What is minimized is
``trace((W - Q) H (W - Q)^T)``, the squared change of the outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.library.spec import FLOATS, check
from ipex_quant.qconfig.weight_only import QConfigWoq
from ipex_quant.util.modules import patterns_of, replace_module
from ipex_quant.util.safetensors import ShardWriter
from ipex_quant.weight.layouts import unsigned_weight
from ipex_quant.weight_only.build import as_qconfig
from ipex_quant.weight_only.calibrate import Block, Inputs, blocks, linears_of, samples_of
from ipex_quant.weight_only.checkpoint import linear_from
from ipex_quant.weight_only.convert import is_conv1d, is_linear, matches, stacks
from ipex_quant.weight_only.saving import (
    Kinds,
    entries,
    identity,
    model_config,
    modules,
    write_json,
)

# --- one weight -------------------------------------------------------------------------------------------------------


#: Columns whose errors are carried to the rest at once.
_BLOCK = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Solved:
    """A rounded weight.

    Attributes:
        codes: uint8 ``[N, K]``.
        scales: ``[N, G]`` in the dtype they are stored in.
        zeros: uint8 ``[N, G]``.
        g_idx: int32 ``[K]``, the group of each input feature.
        error: The squared change of the outputs, relative to them.
        nearest_error: The same for rounding to nearest.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    g_idx: Tensor
    error: float
    nearest_error: float


def _grid(
    part: Tensor, bits: int, symmetric: bool, scale_dtype: torch.dtype, name: str
) -> tuple[Tensor, Tensor]:
    """Return scales and zero points, both float32 ``[N]``, for columns ``[g, N]``."""
    largest = (1 << bits) - 1
    high, low = part.amax(0).clamp(min=0), part.amin(0).clamp(max=0)
    span = 2 * torch.maximum(high, -low) if symmetric else high - low
    scale = (span / largest).clamp(min=torch.finfo(torch.float32).eps).to(scale_dtype).float()
    fits = bool(scale.isfinite().all())
    check(
        fits, name, "scale_dtype", "hold the scales", f"{scale_dtype} for a weight of {span.max()}"
    )
    if symmetric:
        return scale, torch.full_like(scale, 1 << (bits - 1))
    return scale, torch.round(-low / scale).clamp(0, largest)


def _encode(columns: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    return (torch.round(columns / scale) + zero).clamp_(0, (1 << bits) - 1)


def change(error: Tensor, hessian: Tensor) -> float:
    """Return ``trace(E H E^T)`` for the transposed error ``[K, N]``."""
    return float((error * (hessian @ error)).sum())


def nearest(
    weight: Tensor, bits: int, group: int, symmetric: bool, scale_dtype: torch.dtype, name: str = ""
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round a transposed weight ``[K, N]`` to nearest.

    Returns:
        ``(codes, scales, zeros, values)``: uint8 ``[K, N]``, float32 ``[G, N]`` twice, and float32 ``[K, N]``.
    """
    codes, values = torch.empty_like(weight, dtype=torch.uint8), torch.empty_like(weight)
    scales, zeros = [], []
    for start in range(0, weight.shape[0], group):
        part = weight[start : start + group]
        scale, zero = _grid(part, bits, symmetric, scale_dtype, name)
        code = _encode(part, scale, zero, bits)
        codes[start : start + group] = code.to(torch.uint8)
        values[start : start + group] = (code - zero) * scale
        scales.append(scale)
        zeros.append(zero)
    return codes, torch.stack(scales), torch.stack(zeros), values


def _inverse(hessian: Tensor, percdamp: float, name: str) -> Tensor:
    """Return the upper Cholesky factor of the inverse, with as much damping as it needs."""
    k = hessian.shape[0]
    mean = float(hessian.diagonal().mean())
    eye = torch.arange(k)
    for times in (1, 10, 100, 1000):
        damped = hessian.clone()
        damped[eye, eye] += max(percdamp * times, 1e-7) * mean
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            inverse, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not bool(failed) and bool(inverse.isfinite().all()):
                return inverse
    check(False, name, "percdamp", "be larger for these inputs", percdamp)
    raise AssertionError


@torch.no_grad()
def solve(
    weight: Tensor,
    hessian: Tensor,
    *,
    bits: int = 4,
    group_size: int = -1,
    symmetric: bool = False,
    percdamp: float = 0.01,
    act_order: bool = False,
    scale_dtype: torch.dtype = torch.float16,
    name: str = "gptq",
) -> Solved:
    """Round a weight ``[N, K]`` for inputs with ``hessian`` ``[K, K]``, a float32 mean of ``x x^T``.

    Where rounding to nearest changes the outputs less (inputs that say little), that is the result.
    """
    wide = weight.float().t().contiguous()  # rows are the columns that are rounded one by one
    k = wide.shape[0]
    group = k if group_size == -1 else min(group_size, k)
    in_order = torch.arange(k, dtype=torch.int32) // group
    plain = nearest(wide, bits, group, symmetric, scale_dtype, name)
    base = max(change(wide, hessian), torch.finfo(torch.float32).tiny)
    usual = change(wide - plain[3], hessian) / base
    diagonal = hessian.diagonal()
    solved = None
    if bool((diagonal > 0).any()):
        solved = _columns(
            wide, hessian, bits, group, symmetric, percdamp, act_order, scale_dtype, name
        )
    error = usual
    codes, scales, zeros, g_idx = plain[0], plain[1], plain[2], in_order
    if solved is not None:
        found = change(wide - solved[4], hessian) / base
        if found <= usual:
            codes, scales, zeros, g_idx, _ = solved
            error = found
    return Solved(
        codes.t().contiguous(),
        scales.t().to(scale_dtype).contiguous(),
        zeros.t().to(torch.uint8).contiguous(),
        g_idx,
        error,
        usual,
    )


def _columns(
    weight: Tensor,
    hessian: Tensor,
    bits: int,
    group: int,
    symmetric: bool,
    percdamp: float,
    act_order: bool,
    scale_dtype: torch.dtype,
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return codes, scales, zero points, groups and values, all by columns in their own order."""
    k, n = weight.shape
    hessian = hessian.clone()
    dead = hessian.diagonal() == 0
    hessian[dead, dead] = 1  # an input that is always zero: any code will do, so the nearest
    order = torch.arange(k)
    if act_order:
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
        hessian = hessian[order][:, order]
    inverse = _inverse(hessian, percdamp, name)
    del hessian
    rest = weight[order].clone()
    codes, values = torch.empty(k, n, dtype=torch.uint8), torch.empty(k, n)
    scales, zeros = [], []
    for start in range(0, k, _BLOCK):
        end = min(start + _BLOCK, k)
        block, errors = rest[start:end], torch.empty(end - start, n)
        factor = inverse[start:end, start:end]
        for i in range(end - start):
            if (start + i) % group == 0:
                scale, zero = _grid(
                    rest[start + i : start + i + group], bits, symmetric, scale_dtype, name
                )
                scales.append(scale)
                zeros.append(zero)
            code = _encode(block[i], scales[-1], zeros[-1], bits)
            value = (code - zeros[-1]) * scales[-1]
            codes[start + i], values[start + i] = code.to(torch.uint8), value
            error = (block[i] - value) / factor[i, i]
            block[i:].addr_(factor[i, i:], error, alpha=-1)
            errors[i] = error
        rest[end:].addmm_(inverse[start:end, end:].t(), errors, alpha=-1)
    back = torch.argsort(order)
    g_idx = (back // group).to(torch.int32)
    return codes[back], torch.stack(scales), torch.stack(zeros), g_idx, values[back]


# --- the layers of a model --------------------------------------------------------------------------------------------


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


# --- checkpoints in GPTQ's format, written layer by layer while a model is quantized ----------------------------------


_FILE = "model.safetensors"
_NOTE = "quantize_config.json"
#: Columns whose bits are in memory at a time.
_COLUMNS = 1024


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Return int32 words ``[ceil(R * bits / 32), C]`` of codes ``[R, C]``, each column a stream of bits."""
    rows = -(-codes.shape[0] * bits // 32)
    words = torch.zeros(rows, codes.shape[1], dtype=torch.int32)
    shifts = torch.arange(bits, dtype=torch.uint8).view(1, bits, 1)
    for start in range(0, codes.shape[1], _COLUMNS):
        part = codes[:, start : start + _COLUMNS]
        planes = ((part.unsqueeze(1) >> shifts) & 1).flatten(0, 1)
        padded = torch.nn.functional.pad(planes, (0, 0, 0, rows * 32 - planes.shape[0]))
        view = padded.view(rows, 32, -1)
        for bit in range(32):
            words[:, start : start + _COLUMNS] |= view[:, bit].int() << bit
    return words


class GptqWriter:
    """Writes ``model.safetensors``, ``config.json`` and ``quantize_config.json``.

    The quantized layers come first, in the order in which they are done, then everything else.

    Args:
        folder: Where.
        model: The model before anything is quantized.
        settings: The ``quantization_config``.
        skip: Layers that stay as they are.
        scale_dtype: Of the scales.

    Raises:
        FileExistsError: The folder has weights of another kind.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        settings: dict[str, Any],
        skip: Sequence[str],
        scale_dtype: torch.dtype,
    ) -> None:
        self.folder, self.model, self.settings = folder, model, settings
        self.bits: int = settings["bits"]
        names = [p.name for p in folder.glob("*") if p.suffix in (".safetensors", ".bin", ".pt")]
        ours = not names or (names == [_FILE] and (folder / _NOTE).is_file())
        if not ours:
            raise FileExistsError(
                f"gptq: save_dir must have no weights of others, got {folder / names[0]}"
            )
        kinds: Kinds = {}
        self._layers: dict[str, list[str]] = {}
        replaced: set[str] = set()
        for name, layer in _targets(model, skip).items():
            found = self._kinds(name, layer, scale_dtype)
            kinds |= found
            self._layers[name] = list(found)
            replaced.add(f"{name}.weight")
        self._rest: dict[str, list[str]] = {}
        seen: set[tuple[Any, ...]] = set()
        for name, module in modules(model):
            for key, value in entries("gptq", name, module).items():
                place = identity(value)
                if key in replaced or (value.numel() and place in seen):
                    continue
                seen.add(place)
                kinds[key] = value.dtype, tuple(value.shape)
                self._rest.setdefault(name, []).append(key)
        self._about = kinds
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = ShardWriter(folder / _FILE, kinds)

    def _kinds(self, name: str, layer: Any, scale_dtype: torch.dtype) -> Kinds:
        k, n = layer.weight.shape if is_conv1d(layer) else reversed(layer.weight.shape)
        size = self.settings["group_size"]
        groups = 1 if size == -1 else -(-k // size)
        return {
            f"{name}.qweight": (torch.int32, (-(-k * self.bits // 32), n)),
            f"{name}.qzeros": (torch.int32, (groups, -(-n * self.bits // 32))),
            f"{name}.scales": (scale_dtype, (groups, n)),
            f"{name}.g_idx": (torch.int32, (k,)),
        }

    def __enter__(self) -> GptqWriter:
        (self.folder / f"{_FILE}.part").unlink(missing_ok=True)
        self._writer.open()
        return self

    def layer(self, name: str, solved: Solved) -> None:
        """Write the next layer."""
        following = next(iter(self._layers), None)
        check(following == name, "gptq", "model", f"run {following} next", name)
        del self._layers[name]
        stored = (solved.zeros - 1) & ((1 << self.bits) - 1)  # the first version of the format
        self._writer.write(pack_words(solved.codes.t(), self.bits))
        self._writer.write(pack_words(stored, self.bits).t())
        self._writer.write(solved.scales.t())
        self._writer.write(solved.g_idx)

    def finish(self) -> None:
        """Write everything else, then the configuration."""
        places = dict(self.model.named_modules())
        for name, keys in self._rest.items():
            values = entries("gptq", name, places[name])
            for key in keys:
                value = values.get(key)  # a quantized layer drops a bias of zeros
                dtype, shape = self._about[key]
                self._writer.write(torch.zeros(shape, dtype=dtype) if value is None else value)
        self._writer.close(True)
        config = {**model_config(self.model), "quantization_config": self.settings}
        write_json(self.folder / "config.json", config)
        write_json(self.folder / _NOTE, self.settings)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._writer.close(False)
            (self.folder / f"{_FILE}.part").unlink(missing_ok=True)


def _targets(model: nn.Module, skip: Sequence[str]) -> dict[str, nn.Module]:
    """Return the layers that will be quantized, in the order in which they will be."""
    found: dict[str, nn.Module] = {}
    for stack in stacks(model):
        for name, block in stack:
            for inner, module in block.named_modules():
                full = ".".join(part for part in (name, inner) if part)
                if is_linear(module) and not matches(full, skip) and module not in found.values():
                    found[full] = module
    return found
