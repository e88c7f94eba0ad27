# SPDX-License-Identifier: Apache-2.0
"""The proof that programs compute what the stock model computes.

A few tokens show what the parts of a model are (`ipex_llm.arch.detect`). They do not show what begins later: a window,
a chunk, a selection of keys; nor padding, other positions or a cache. Those are tried on a small copy of the model: the
same class, made from the same configuration with smaller numbers and fewer layers, with random weights. Its programs
must give what its stock forward gives in all `probes`.
"""

from __future__ import annotations

from ipex_llm.optimization.proof.encoder_decoder import prove_pair
from ipex_llm.optimization.proof.prove import prove_layers, prove_stack, small_copy

__all__ = ["prove_layers", "prove_pair", "prove_stack", "small_copy"]
