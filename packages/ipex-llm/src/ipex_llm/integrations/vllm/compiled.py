# SPDX-License-Identifier: Apache-2.0
"""vLLM's compiled models as programs: a step in one parallel region, or all between two calls of attention."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ipex_core.compile_backend import ipex_backend

#: Where vLLM finds the backend.
BACKEND = f"{__name__}.backend"
#: vLLM writes what Inductor has compiled to files, by torch's own form, which has no place for programs.
_FILES = "VLLM_USE_AOT_COMPILE"


def choose(compilation: Any) -> None:
    """Take this backend in the place of Inductor, which vLLM's CPU platform has chosen.

    Who sets ``VLLM_USE_AOT_COMPILE=1`` asks for files of Inductor, and keeps it.

    Args:
        compilation: The ``CompilationConfig`` of vLLM.
    """
    if compilation.backend != "inductor" or os.environ.get(_FILES) == "1":
        return
    compilation.backend = BACKEND
    # The processes that vLLM starts read this.
    os.environ[_FILES] = "0"


def backend(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph of Dynamo as programs, with calls of torch for ops that have no instruction.

    A graph that no program can run, for one with control flow, is compiled by Inductor with the patterns of ipex.
    """
    return ipex_backend(graph, example_inputs, options={"ipex.program": True})
