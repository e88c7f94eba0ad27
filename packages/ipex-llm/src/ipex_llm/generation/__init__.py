# SPDX-License-Identifier: Apache-2.0
"""Generation loops behind ``model.generate``."""

from __future__ import annotations

from ipex_llm.generation._functions import (
    hf_beam_sample,
    hf_beam_search,
    hf_greedy_search,
    hf_sample,
)

__all__ = ["hf_beam_sample", "hf_beam_search", "hf_greedy_search", "hf_sample"]
