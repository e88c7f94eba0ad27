# SPDX-License-Identifier: Apache-2.0
"""Second names of batched products."""

from __future__ import annotations

import torch

from ipex.compat.torch_ops._alias_op import alias_op
from ipex_core.errors import OpArgumentError

Tensor = torch.Tensor
_OPS = torch.ops.ipex


@alias_op("bmm_add(Tensor input, Tensor batch1, Tensor batch2, Scalar alpha) -> Tensor")
def _bmm_add(input: Tensor, batch1: Tensor, batch2: Tensor, alpha: float) -> Tensor:
    """Return ``input + alpha * batch1 @ batch2``; IPEX took an alpha but computed with 1."""
    return _OPS.bmm(batch1, batch2, input, float(alpha))  # type: ignore[no-any-return]


@alias_op(
    "bmm(Tensor(a!) out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> Tensor(a!)"
)
def _bmm(out: Tensor, mat1: Tensor, mat2: Tensor, is_vnni: bool, scale: Tensor | None) -> Tensor:
    """Write ``mat1 @ mat2^T`` to ``out``: ``[B, M, K]`` times ``[B, N, K]``.

    ``mat2`` is plain, or from ``convert_weight_packed``, which packs nothing here.
    """
    if scale is not None:
        raise OpArgumentError("bmm: scale must be None, got a tensor: scale mat2 before")
    return out.copy_(_OPS.bmm(mat1, mat2.transpose(1, 2)))
