# SPDX-License-Identifier: Apache-2.0
"""Linear layers on weights that GPTQ and AWQ have quantized, in the form in which other libraries ask for them.

Example:
    >>> import torch
    >>> from ipex_llm.quantization import IPEXWeightOnlyQuantizedLinear, QuantDtype, QuantMethod
    >>> qweight = torch.zeros(64 // 8, 32, dtype=torch.int32)
    >>> scales, qzeros = torch.ones(2, 32), torch.full((2, 32 // 8), 0x77777777, dtype=torch.int32)
    >>> linear = IPEXWeightOnlyQuantizedLinear.from_weight(
    ...     qweight, scales, qzeros, 64, 32, None, None, 32, None, QuantMethod.GPTQ_GEMM, QuantDtype.INT4
    ... )
    >>> linear(torch.ones(1, 64))[0, 0].item()
    -512.0
"""

from __future__ import annotations

from typing import Any

import torch

from ipex_core.library.spec import check
from ipex_quant.weight_only.linear import QuantDtype, QuantMethod, WeightOnlyQuantizedLinear

__all__ = ["IPEXWeightOnlyQuantizedLinear", "QuantDtype", "QuantMethod"]


class IPEXWeightOnlyQuantizedLinear(WeightOnlyQuantizedLinear):
    """`WeightOnlyQuantizedLinear` under the name that serving engines and quantizers use.

    It is made with `from_weight`, whose positional order is (qweight, scales, zero_points, in_features, out_features,
    qconfig, bias, group_size, g_idx, quant_method, dtype).
    """

    def forward(  # type: ignore[override]  # `x` is IPEX's name of it
        self, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Compute ``x @ weight.T + bias``; the result has the dtype of ``x``.

        Args:
            x: ``[..., in_features]``.
            bias: ``[out_features]``, for a layer that was made without one; or None.
            kwargs: Ignored.

        Raises:
            OpArgumentError: Both the layer and the call have a bias.
        """
        if bias is None:
            return self.fused(x)
        has_none = self.bias is None
        check(has_none, type(self).__name__, "bias", "be None for a layer that has one", "a tensor")
        return self.fused(x) + bias.to(x.dtype)
