# SPDX-License-Identifier: Apache-2.0
"""What codeless optimization does with models."""

from __future__ import annotations

import dataclasses

__all__ = ["Settings"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to do with models.

    Attributes:
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        quantization: ``"none"``, ``"int8-dynamic"``, ``"woq-int8"`` or ``"woq-int4"``.
        graph_mode: Whether to capture models as graphs.
        verbose: Whether to tell what was done; what was left alone is always told.
    """

    dtype: str = "float32"
    quantization: str = "none"
    graph_mode: bool = True
    verbose: bool = False
