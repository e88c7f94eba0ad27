# SPDX-License-Identifier: Apache-2.0
"""Graphs of the device xpu without a Triton for it: our patterns, and then op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ipex_core.compiler.options import Options
from ipex_core.fusion.report import GraphReport

#: Patterns whose ops read weights in the order of the CPU, or that gain by Inductor's code around them.
_CPU_ONLY = frozenset({"attention", "linear", "post_op"})


def compile_eager(
    gm: fx.GraphModule, example_inputs: Sequence[Any], asked: Options, report: GraphReport
) -> Callable[..., Any]:
    """Return the graph as a sequence of ops; in inference, ops that the patterns find are fused.

    Args:
        gm: The graph of Dynamo.
        example_inputs: One value for each input.
        asked: Options of the user; options of Inductor have no meaning here.
        report: Collects the decisions.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]

    report.notes.append("xpu without Triton: ops of ipex and torch run one by one")

    def inference(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from ipex_core.fusion.aten.passes import run_passes

        disabled = _CPU_ONLY | frozenset(asked.disable)
        run_passes(graph.graph, report, (), disabled, always=True, kernels=lambda op: True)
        graph.recompile()
        return make_boxed_func(graph.forward)

    def training(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return make_boxed_func(graph.forward)

    compiler: Any = aot_autograd(
        fw_compiler=training,
        bw_compiler=training,
        inference_compiler=inference if report.inference else training,
    )
    if report.inference:
        # As in Inductor's way: nothing here requires a gradient, though its calculation may be on.
        with torch.no_grad():
            compiled: Callable[..., Any] = compiler(gm, example_inputs)
        return compiled
    result: Callable[..., Any] = compiler(gm, example_inputs)
    return result
