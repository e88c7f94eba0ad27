# SPDX-License-Identifier: Apache-2.0
"""From a plan to programs: the whole decoder stack as one list of op calls.

Two programs run a decoder. Both take the tokens of all sequences back to back as rows ``[T, H]``, without padding, and
write keys and values to a paged cache:

- *decode*: one token of each sequence; attention is ``single_query_cached_kv_attention``.
- *prefill*: any number of tokens of each sequence, behind any history; attention is ``flash_attn_varlen_func``.

Each returns either the rows after the last norm or the logits of chosen rows.
"""

from __future__ import annotations

from ipex_llm.model_runner.program.emitter import Emitter, rope_key, unsupported_reason
from ipex_llm.model_runner.program.writer import Mode

__all__ = ["Emitter", "Mode", "rope_key", "unsupported_reason"]
