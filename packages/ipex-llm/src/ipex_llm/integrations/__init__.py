# SPDX-License-Identifier: Apache-2.0
"""ipex in other libraries, through what those offer for that; active when it is asked for, or when vLLM loads it.

==========================  ==========================================================================================
`register_transformers`     ``attn_implementation="ipex"`` and folders of ``ipex.quantization.save`` in
                            ``from_pretrained``
`IpexConfig`                the configuration of the latter, to quantize while loading
``vllm``                    the plug-in of vLLM, which vLLM finds by itself
==========================  ==========================================================================================
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["IpexConfig", "register_transformers"]


def register_transformers() -> None:
    """Register ``"ipex"`` with transformers: an attention function, its mask, and a quantizer.

    Uses its public registries (`AttentionInterface`, `AttentionMaskInterface`, ``register_quantization_config``,
    ``register_quantizer``). Models that choose their attention from a table of classes in their own module (Falcon,
    GPT-J, SAM) get the name as one more entry of that table, for the class they have; nothing of transformers is
    replaced.
    Calling it again does nothing. It imports the modelling part of transformers, which every model needs anyway.

    Raises:
        ImportError: transformers is missing.
        RuntimeError: Something else has registered a quantizer of the name ``"ipex"``.

    Example:
        >>> from ipex_llm.integrations import register_transformers
        >>> register_transformers()
        >>> from transformers import AttentionInterface
        >>> "ipex" in AttentionInterface()
        True
    """
    from ipex_core.optimization.transformers import register_interface
    from ipex_quant.io.transformers import register

    register_interface()
    register()


def __getattr__(name: str) -> Any:
    if name == "IpexConfig":
        # Its base class is one of transformers.
        return importlib.import_module("ipex_quant.io.transformers").IpexConfig
    raise AttributeError(f"module 'ipex_llm.integrations' has no attribute {name!r}")
