# SPDX-License-Identifier: Apache-2.0
"""The ops of INT8 models, apart from the modules that call them: programs in files need only the ops.

``import ipex`` loads them, so that programs that were saved find them.
"""

from __future__ import annotations

import torch

from ipex_core.library.kernels import define
from ipex_core.library.spec import PORTABLE
from ipex_quant.int8.modules import conv

__all__ = ["TAIL", "conv", "run"]

Tensor = torch.Tensor

_LIBRARY = torch.library.Library("ipex_quant", "FRAGMENT")
_SCHEMA = (
    "int8_embedding_bag(Tensor weight, Tensor indices, Tensor offsets, Tensor? per_sample_weights,"
    " bool include_last_offset) -> Tensor"
)
#: Scale and least number of a row, which follow its codes.
TAIL = 8


def run(
    weight: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None, last: bool
) -> Tensor:
    """Return the sums of the bags, float32 ``[bags, D]``."""
    op = torch.ops.quantized.embedding_bag_byte_rowwise_offsets
    y: Tensor = op(weight, indices, offsets, False, 0, False, weights, None, last)
    return y


def _fake(
    weight: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None, last: bool
) -> Tensor:
    shape = (offsets.shape[0] - last, weight.shape[1] - TAIL)
    return weight.new_empty(shape, dtype=torch.float32)


if define(_SCHEMA, _LIBRARY):  # otherwise it has the kernel of libipex_cpp.so
    _LIBRARY.impl("int8_embedding_bag", run, "CPU")
torch.library.register_fake("ipex_quant::int8_embedding_bag", _fake, lib=_LIBRARY)
PORTABLE[torch.ops.ipex_quant.int8_embedding_bag.default] = run
