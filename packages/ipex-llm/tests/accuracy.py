# SPDX-License-Identifier: Apache-2.0
"""How near results of the functions and modules come to plain PyTorch in float32."""

from __future__ import annotations

import torch

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Check the dtype of a result, and its numbers."""
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.float(), want.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
