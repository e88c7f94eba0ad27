# SPDX-License-Identifier: Apache-2.0
"""Second names of ops on 8-bit floating-point numbers."""

from __future__ import annotations

import torch

from ipex._torch_ipex._alias_op import alias_op

Tensor = torch.Tensor


@alias_op("dynamic_scaled_fp8_quant(Tensor(a!) out, Tensor input, Tensor(b!) scale) -> ()")
def _dynamic_scaled_fp8_quant(out: Tensor, input: Tensor, scale: Tensor) -> None:
    """Write ``input / scale`` to ``out`` and ``max|input| / largest number of out`` to ``scale``."""
    largest = torch.finfo(out.dtype).max
    _static(out, input, scale.copy_(input.abs().amax().float().clamp(min=1e-12) / largest))


@alias_op("static_scaled_fp8_quant(Tensor(a!) out, Tensor input, Tensor scale) -> ()")
def _static_scaled_fp8_quant(out: Tensor, input: Tensor, scale: Tensor) -> None:
    _static(out, input, scale)


def _static(out: Tensor, input: Tensor, scale: Tensor) -> None:
    largest = torch.finfo(out.dtype).max
    out.copy_((input.float() / scale).clamp(-largest, largest))
