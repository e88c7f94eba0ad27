# SPDX-License-Identifier: Apache-2.0
"""Feed-forward blocks in programs: plain, gated, experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from ipex_core.program import ProgramBuilder, Register
from ipex_llm.arch.types import ExpertsPlan, MlpPlan
from ipex_llm.model_runner.weights.dense import Linear, UnsupportedPlan

if TYPE_CHECKING:
    from ipex_llm.model_runner.program.emitter import LayerWeights
    from ipex_llm.model_runner.program.writer import Writer

__all__ = ["GATES", "check_mlp", "write_experts", "write_inner"]

#: Activations that ``linear`` applies to its result, and those it takes for a gate.
EPILOGUES = ("none", "relu", "gelu", "gelu_tanh", "silu")
GATES = ("silu", "gelu", "gelu_tanh")

#: Activations that are instructions of their own behind the layer.
SEPARATE: Mapping[str, Callable[[ProgramBuilder, Register], Register]] = {
    "gelu_quick": lambda b, x: b.call("gelu_quick", x),
}


def check_mlp(mlp: MlpPlan) -> None:
    """Raise if no op computes the activation of a block.

    Raises:
        UnsupportedPlan: No op computes it.
    """
    if mlp.fused and mlp.activation not in (*GATES, *SEPARATE):
        raise UnsupportedPlan(f"activation {mlp.activation!r} of a fused pair")
    if mlp.activation not in (*EPILOGUES, "relu2", *SEPARATE):
        raise UnsupportedPlan(f"activation {mlp.activation!r}")


def write_inner(writer: Writer, mlp: MlpPlan, weights: tuple[Linear, ...], x: Register) -> Register:
    """Write everything before the down projection."""
    b, act = writer.b, mlp.activation
    if mlp.gate is None and not mlp.fused:
        return _activated(writer, act, weights[0], x)
    if act in GATES:
        return writer.linear(weights[0], x, gate=act)
    if mlp.fused:
        both = writer.linear(weights[0], x)
        size = weights[0].features // 2
        gate = b.call("narrow", both, 1, 0, size)
        result: Register = b.call(
            "mul", SEPARATE[act](b, gate), b.call("narrow", both, 1, size, size)
        )
        return result
    return writer.linear(weights[1], x, mul=_activated(writer, act, weights[0], x))


def _activated(writer: Writer, name: str, weight: Linear, x: Register) -> Register:
    """Write a linear layer and the activation behind it."""
    if name in EPILOGUES:
        return writer.linear(weight, x, activation=name)
    if name == "relu2":
        positive = writer.linear(weight, x, activation="relu")
        squared: Register = writer.b.call("mul", positive, positive)
        return squared
    return SEPARATE[name](writer.b, writer.linear(weight, x))


def write_experts(writer: Writer, mlp: ExpertsPlan, w: LayerWeights, x: Register) -> Register:
    """Write experts, with what all tokens share of them."""
    b = writer.b
    assert w.router is not None and w.experts is not None
    correction, plain = mlp.correction_bias, x
    weights, ids = b.call(
        "moe_routing",
        writer.linear(w.router, x),
        mlp.top_k,
        mlp.renormalize,
        mlp.scoring,
        mlp.groups,
        mlp.top_groups,
        None if correction is None else b.constant(correction.detach().float()),
        mlp.routed_scale,
    )
    if mlp.scale_input:
        x, weights = _scaled_input(writer, x, weights)
    e = w.experts
    y: Register = b.call(
        "fused_experts",
        *(x, b.constant(e.w13), b.constant(e.w2), weights, ids, mlp.intermediate_size),
        mlp.activation,
        None if e.w13_bias is None else b.constant(e.w13_bias),
        None if e.w2_bias is None else b.constant(e.w2_bias),
        swiglu_alpha=mlp.swiglu_alpha,
        swiglu_limit=mlp.swiglu_limit,
        lowp_mode=e.lowp,
    )
    if mlp.shared is None:
        return y
    inner = write_inner(writer, mlp.shared, w.mlp, plain)
    if w.shared_gate is None:
        return writer.linear(w.mlp[-1], inner, residual=y)
    # The sigmoid of one number per row is the routing to a single expert.
    factor, _ = b.call("moe_routing", writer.linear(w.shared_gate, x), 1, False, "sigmoid")
    own = b.call("mul", writer.linear(w.mlp[-1], inner), _like(writer, factor))
    result: Register = b.call("add", own, y)
    return result


def _scaled_input(writer: Writer, x: Register, weights: Register) -> tuple[Register, Register]:
    """Multiply rows with the weight of their only expert; return them and a weight of one for each."""
    ones, _ = writer.b.call("moe_routing", weights, 1, True)
    return writer.b.call("mul", x, _like(writer, weights)), ones


def _like(writer: Writer, x: Register) -> Register:
    dtype = writer.e.store.dtype
    if dtype == torch.float32:
        return x
    result: Register = writer.b.call("cast", x, dtype)
    return result
