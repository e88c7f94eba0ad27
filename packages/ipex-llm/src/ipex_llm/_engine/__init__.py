# SPDX-License-Identifier: Apache-2.0
"""The parts of `ipex_llm.engine`: parameters, blocks of the cache, scheduling, sampling, text."""
