# SPDX-License-Identifier: Apache-2.0
"""Casts with the scales of a module, and models whose linear layers have 8-bit operands."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.library.spec import check
from ipex_core.module_swap.state_dict import update
from ipex_core.optimization.records import Quantization, Record, quantization_of
from ipex_core.packing.quantize import DTYPES, amax, to_fp8
from ipex_core.util import also_named
from ipex_quant.fp8.linear import EMULATED, FP8Linear
from ipex_quant.fp8.tensors import Float8Format, FP8TensorMeta
from ipex_quant.util.modules import replace_module

__all__ = [
    "cast_from_fp8",
    "cast_if_needed",
    "cast_to_fp8",
    "convert",
    "convert_rec",
    "prepare_fp8",
]


def cast_if_needed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype."""
    return tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)


def cast_to_fp8(
    inp: Tensor, fp8_meta_tensor: FP8TensorMeta, fp8_tensor: int, otype: Float8Format
) -> Tensor:
    """Multiply a tensor by its scale, round it to 8 bits, and record its magnitude.

    Args:
        inp: Of any shape, float32, bfloat16 or float16.
        fp8_meta_tensor: Scales of a module; the magnitude is entered into its history.
        fp8_tensor: Which of them, of `FP8FwdTensors` or `FP8BwdTensors`.
        otype: The format.

    Returns:
        A tensor of dtype float8_e4m3fn or float8_e5m2.
    """
    meta = fp8_meta_tensor
    scale = meta.scale[fp8_tensor]
    meta.record(int(fp8_tensor), amax(inp))
    meta.recorded = True
    meta.scale_inv[fp8_tensor] = 1.0 / scale
    return to_fp8(inp, scale, DTYPES[Float8Format(otype)])


def cast_from_fp8(
    inp: Tensor,
    fp8_meta_tensor: FP8TensorMeta,
    fp8_tensor: int,
    itype: Float8Format,
    otype: torch.dtype,
) -> Tensor:
    """Return what the 8-bit numbers of `cast_to_fp8` stand for.

    Args:
        inp: The numbers; uint8 is taken as bytes of the format.
        fp8_meta_tensor: Scales of a module.
        fp8_tensor: Which of them.
        itype: The format.
        otype: dtype of the result.
    """
    dtype = DTYPES[Float8Format(itype)]
    values = inp.view(dtype) if inp.dtype == torch.uint8 else inp
    check(values.dtype == dtype, "cast_from_fp8", "inp", f"have dtype uint8 or {dtype}", inp.dtype)
    return (values.float() * fp8_meta_tensor.scale_inv[fp8_tensor]).to(otype)


def convert_rec(m: nn.Module, optimizer: Any = None, device: str = "cpu") -> nn.Module:
    """Replace the linear layers of a model, in place; see `prepare_fp8`.

    Args:
        m: The model; if it is a linear layer itself, the result is another module.
        optimizer: Not looked at: parameters stay the same objects.
        device: ``"cpu"``.
    """
    check(str(device) == "cpu", "convert_rec", "device", "be 'cpu'", repr(device))
    log = quantization_of(m) or Quantization()
    made: dict[int, FP8Linear] = {}
    for path, module in list(m.named_modules(remove_duplicate=False)):
        if type(module) is not nn.Linear:
            continue
        new = made.get(id(module))
        if new is None:
            new = made[id(module)] = _layer(module)
            said = f"inside fp8_autocast: {EMULATED}"
            log.records.append(Record(path, "Linear", "fp8", True, said, "woq_linear"))
        if not path:
            m = new
        else:
            replace_module(m, path, new)
    update(m, quantization=log)
    return m


def _layer(module: nn.Linear) -> FP8Linear:
    bias = module._parameters["bias"]
    new = FP8Linear(module.in_features, module.out_features, bias is not None, "meta")
    new._parameters.update(weight=module._parameters["weight"], bias=bias)
    return new.train(module.training)


def convert(model: nn.Module, optimizer: Any = None, device: str = "cpu") -> Any:
    """Return a copy of a model with 8-bit linear layers, and of its optimizer; see `prepare_fp8`."""
    model, optimizer = copy.deepcopy((model, optimizer))  # together: parameters stay shared
    return convert_rec(model, optimizer, device), optimizer


@also_named(model="m")
def prepare_fp8(m: nn.Module, optimizer: Any = None, device: str = "cpu") -> Any:
    """Return a copy of a model in which each `torch.nn.Linear` is an `FP8Linear`.

    Subclasses of `torch.nn.Linear` stay what they are.

    Args:
        m: The model; ``model`` in IPEX for XPU.
        optimizer: An optimizer of its parameters, or None. It is copied with its state.
        device: ``"cpu"``.

    Returns:
        The model, or with an optimizer ``(model, optimizer)``.

    Raises:
        ValueError: An argument is not as described.
    """
    op = "prepare_fp8"
    check(isinstance(m, nn.Module), op, "m", "be a torch.nn.Module", repr(type(m)))
    fits = optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
    expected = "be a torch.optim.Optimizer or None"
    check(fits, op, "optimizer", expected, repr(type(optimizer)))
    check(str(device) == "cpu", op, "device", "be 'cpu'", repr(device))
    model, optimizer = convert(m, optimizer, device)
    return model if optimizer is None else (model, optimizer)
