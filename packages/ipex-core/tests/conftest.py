# SPDX-License-Identifier: Apache-2.0
"""What the tests of ipex-core share: ``import compile_programs`` works in each of them, and compiling without C++."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Start and end without compiled functions, with seed 0."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let patterns fire without a kernel package too: the ops then run their reference."""
    monkeypatch.setattr("ipex_core.nn._leaf.has_kernel", lambda op: True)


@pytest.fixture
def no_code_generation(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None, kernels: None) -> None:
    """Interpret the graphs that the passes make instead of compiling them to C++, which takes most of the time."""
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
    from torch._inductor.decomposition import select_decomp_table

    def interpreted(gm: Any, inputs: Any, patches: dict[str, Any]) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
            if "joint_custom_pre_pass" in patches:
                patches["joint_custom_pre_pass"](graph.graph)
            graph.graph.lint()
            graph.recompile()
            return make_boxed_func(graph.forward)

        return aot_module_simplified(
            gm,
            inputs,
            fw_compiler=compiler,
            inference_compiler=compiler,
            decompositions=select_decomp_table(),
        )

    monkeypatch.setattr("ipex_core.compile_backend._inductor", interpreted)
