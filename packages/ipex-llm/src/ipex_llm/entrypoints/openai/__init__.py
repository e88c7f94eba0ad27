# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible server on `ipex_llm.engine`; needs the extra ``serve``."""
