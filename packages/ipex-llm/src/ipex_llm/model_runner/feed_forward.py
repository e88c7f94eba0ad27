# SPDX-License-Identifier: Apache-2.0
"""Blocks behind attention as parts of a program: plain ones, gated ones and experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ipex_core.program import ProgramBuilder, Register
from ipex_core.program.pointwise import POINTWISE
from ipex_llm.arch import ExpertsPlan, MlpPlan
from ipex_llm.arch.formulas import ALWAYS, weight_scale, xielu_numbers
from ipex_llm.model_runner.dense import Linear, UnsupportedPlan


def pointwise(
    b: ProgramBuilder,
    inputs: Sequence[Register],
    constants: Sequence[float],
    steps: Sequence[tuple[Any, ...]],
    dtype: torch.dtype,
) -> Register:
    """Write a chain of functions that reads and writes memory once, with all arithmetic in float32.

    Args:
        b: Of the program.
        inputs: Values 0 to n; they broadcast.
        constants: The values behind the inputs.
        steps: ``(name, operand, ...)``, each a further value; operands are numbers of values.
        dtype: Of the result, which is the last value.
    """
    code: list[int] = []
    for name, *operands in steps:
        code += [POINTWISE.index(name), *operands, *[-1] * (3 - len(operands))]
    result: Register = b.call("pointwise", list(inputs), code, list(constants), dtype)
    return result


#: Functions of gates, as steps of `pointwise` from the value 0 on; 1 is what they multiply.
_OPENINGS: Mapping[str, list[tuple[Any, ...]]] = {
    "sigmoid": [("sigmoid", 0)],
    # max(x, 0) + log(1 + exp(-|x|))
    "softplus": [("abs", 0), ("neg", 2), ("exp", 3), ("log1p", 4), ("relu", 0), ("add", 5, 6)],
}


def opened(
    b: ProgramBuilder, opening: str, gates: Register, x: Register, dtype: torch.dtype
) -> Register:
    """Write ``opening(gates) * x``; gates broadcast."""
    steps = _OPENINGS[opening]
    return pointwise(b, [gates, x], [], [*steps, ("mul", len(steps) + 1, 1)], dtype)


#: Activations that ``linear`` applies to its result, and those it takes for a gate.
EPILOGUES = ("none", "relu", "gelu", "gelu_tanh", "silu")
GATES = ("silu", "gelu", "gelu_tanh")

#: Activations that are instructions of their own behind the layer.
SEPARATE: Mapping[str, Callable[[ProgramBuilder, Register], Register]] = {
    "gelu_quick": lambda b, x: b.call("gelu_quick", x),
}


def together(mlp: MlpPlan) -> bool:
    """Return whether a gate and its factor are packed as one weight, or one module has both."""
    plain = mlp.cutoff is None and (mlp.gate is None or mlp.gate.factors is None)
    return mlp.activation in GATES and plain


def check_activation(name: str) -> None:
    """Raise UnsupportedPlan if no op computes an activation behind a linear layer."""
    if name not in (*EPILOGUES, *SEPARATE):
        raise UnsupportedPlan(f"activation {name!r}")


def check_mlp(mlp: MlpPlan) -> None:
    """Raise if no op computes the activation of a block.

    Raises:
        UnsupportedPlan: No op computes it.
    """
    if mlp.low is not None and not mlp.fused:
        raise UnsupportedPlan("layers of low rank beside a plain layer")
    if mlp.swiglu is not None:
        return
    if mlp.fused and mlp.activation not in (*GATES, *SEPARATE):
        raise UnsupportedPlan(f"activation {mlp.activation!r} of a fused pair")
    if mlp.gate is not None and mlp.gate.factors is not None and mlp.activation != "silu":
        raise UnsupportedPlan(f"activation {mlp.activation!r} of a gate with a factor")
    if mlp.learned is not None and mlp.activation == "xielu":
        return
    if mlp.cutoff is not None and mlp.activation not in POINTWISE:
        raise UnsupportedPlan(f"activation {mlp.activation!r} of a gate that is cut off")
    if mlp.activation not in (*EPILOGUES, "relu2", *SEPARATE):
        raise UnsupportedPlan(f"activation {mlp.activation!r}")


def write_inner(writer: Any, mlp: MlpPlan, weights: tuple[Linear, ...], x: Register) -> Register:
    """Write everything before the down projection."""
    inner = _inner(writer, mlp, weights, x)
    if mlp.inner_norm is None:
        return inner
    result: Register = writer.norm(mlp.inner_norm, inner)
    return result


def _inner(writer: Any, mlp: MlpPlan, weights: tuple[Linear, ...], x: Register) -> Register:
    b, act = writer.b, mlp.activation
    if mlp.learned is not None:
        return _xielu(writer, mlp.learned, writer.linear(weights[0], x))
    if mlp.low is not None:
        both = writer.linear(weights[0], x)
        both = writer.linear(weights[2], writer.linear(weights[1], x), residual=both)
        return _chunked(writer, act, both, weights[0].features // 2)
    if mlp.swiglu is not None:
        return _swiglu(writer, *mlp.swiglu, *_gate_and_up(writer, mlp, weights, x))
    if mlp.gate is None and not mlp.fused:
        return activated(writer, act, weights[0], x)
    if together(mlp):
        return writer.linear(weights[0], x, gate=act)
    if mlp.cutoff is not None:
        return _cut(writer, act, mlp.cutoff, *_gate_and_up(writer, mlp, weights, x))
    if act == "silu":
        result: Register = b.call("silu_mul", *_gate_and_up(writer, mlp, weights, x))
        return result
    if mlp.fused:
        return _chunked(writer, act, writer.linear(weights[0], x), weights[0].features // 2)
    return writer.linear(weights[1], x, mul=activated(writer, act, weights[0], x))


def _gate_and_up(
    writer: Any, mlp: MlpPlan, weights: tuple[Linear, ...], x: Register
) -> tuple[Register, Register]:
    """Write the projections of a gated block and return what both give."""
    if not mlp.fused:
        return writer.linear(weights[0], x), writer.linear(weights[1], x)
    return _halves(writer, writer.linear(weights[0], x), weights[0].features // 2)


def _halves(writer: Any, both: Register, size: int) -> tuple[Register, Register]:
    return writer.b.call("narrow", both, 1, 0, size), writer.b.call("narrow", both, 1, size, size)


def _swiglu(
    writer: Any, alpha: float, limit: float, added: float, gate: Register, up: Register
) -> Register:
    """Write ``g * sigmoid(alpha * g) * (u + added)`` of a gate and factors that are kept within a limit."""
    steps = [("minimum", 0, 2), ("mul", 6, 4), ("sigmoid", 7), ("mul", 6, 8)]
    steps += [("minimum", 1, 2), ("maximum", 10, 3), ("add", 11, 5), ("mul", 9, 12)]
    numbers = [limit, -limit, alpha, added]
    return pointwise(writer.b, [gate, up], numbers, steps, writer.e.store.dtype)


def _cut(writer: Any, act: str, cutoff: float, gate: Register, up: Register) -> Register:
    """Write ``act(relu(gate - mean - cutoff * standard deviation)) * up``, in float32."""
    b = writer.b
    wide = b.call("cast", gate, torch.float32)
    mean = b.call("mean", wide, [1], True)
    squares = pointwise(b, [wide, mean], [], [("sub", 0, 1), ("mul", 2, 2)], torch.float32)
    variance = b.call("mean", squares, [1], True)
    steps = [("sqrt", 2), ("mul", 5, 4), ("sub", 0, 1), ("sub", 7, 6), ("relu", 8)]
    steps += [(act, 9), ("mul", 10, 3)]
    return pointwise(b, [gate, mean, variance, up], [cutoff], steps, writer.e.store.dtype)


def _xielu(writer: Any, module: nn.Module, x: Register) -> Register:
    """Write ``slope * x`` plus ``positive * x^2`` above zero, ``negative * (exp(min(x, eps)) - 1 - x)`` elsewhere."""
    above = [("mul", 1, 0), ("mul", 6, 0)]
    below = [("minimum", 0, 4), ("expm1", 8), ("sub", 9, 0), ("mul", 10, 2)]
    last = [("gt", 0, 5), ("where", 12, 7, 11), ("mul", 3, 0), ("add", 13, 14)]
    numbers = [*xielu_numbers(module), 0.0]
    return pointwise(writer.b, [x], numbers, [*above, *below, *last], writer.e.store.dtype)


def _chunked(writer: Any, act: str, both: Register, size: int) -> Register:
    """Write the activation of the first half of the features times the second."""
    b = writer.b
    gate, up = _halves(writer, both, size)
    result: Register
    if act == "silu":
        result = b.call("silu_mul", gate, up)
    elif act in ("gelu", "gelu_tanh"):
        result = b.call("gelu_mul", gate, up, "none" if act == "gelu" else "tanh")
    else:
        result = b.call("mul", SEPARATE[act](b, gate), up)
    return result


def activated(writer: Any, name: str, weight: Linear, x: Register) -> Register:
    """Write a linear layer and the activation behind it."""
    if name in EPILOGUES:
        return writer.linear(weight, x, activation=name)
    if name == "relu2":
        positive = writer.linear(weight, x, activation="relu")
        squared: Register = writer.b.call("mul", positive, positive)
        return squared
    return SEPARATE[name](writer.b, writer.linear(weight, x))


def write_experts(writer: Any, mlp: ExpertsPlan, w: Any, x: Register, h: Register) -> Register:
    """Write experts, with what all tokens share of them; ``h`` is the stream, ``x`` the norm of it."""
    b, norms = writer.b, mlp.norms
    assert w.router is not None and w.experts is not None
    plain, routed = x, x
    if norms is not None:
        x, routed = writer.norm(norms.input, h), writer.norm(norms.router, h)
    weights, ids = routing(writer, mlp, w.router, routed)
    if mlp.expert_scales is not None:
        table = b.constant(mlp.expert_scales.detach().float().view(-1, 1))
        factors = b.call("reshape", b.call("embedding", table, ids), [0, mlp.top_k])
        weights = b.call("mul", weights, factors)
    if mlp.scale_input:
        x, weights = _scaled_input(writer, x, weights)
    if w.entry is not None:
        x = writer.linear(w.entry, x)
    y = _computed(writer, mlp, w.experts, x, weights, ids)
    if mlp.zeros:
        y = _with_identities(writer, mlp, y, x, weights, ids)
    if w.exit is not None:
        y = writer.linear(w.exit, y)
    y = with_added(writer, mlp, y)
    if mlp.shared is None:
        return y
    inner = write_inner(writer, mlp.shared, w.mlp, plain)
    if norms is not None:
        own = writer.norm(norms.shared, writer.linear(w.mlp[-1], inner))
        total: Register = b.call("add", own, writer.norm(norms.output, y))
        return total
    if w.shared_gate is None:
        return writer.linear(w.mlp[-1], inner, residual=y)
    # The sigmoid of one number per row is the routing to a single expert.
    factor, _ = b.call("moe_routing", writer.linear(w.shared_gate, plain), 1, False, "sigmoid")
    own = b.call("mul", writer.linear(w.mlp[-1], inner), _like(writer, factor))
    result: Register = b.call("add", own, y)
    return result


def _computed(
    writer: Any, mlp: ExpertsPlan, e: Any, x: Register, weights: Register, ids: Register
) -> Register:
    """Write the sum of what experts give."""
    b, inner = writer.b, mlp.intermediate_size
    w13, w2 = b.constant(e.w13), b.constant(e.w2)
    y: Register
    if mlp.apart:
        both = b.call("expert_linear", x, w13, ids, 2 * inner, lowp_mode=e.lowp)
        gate, up = (b.call("narrow", both, 2, start, inner) for start in (0, inner))
        numbers = mlp.swiglu_alpha, mlp.swiglu_limit, mlp.swiglu_added
        if mlp.activation == "softcaps":
            steps = [("div", 0, 2), ("tanh", 4), ("mul", 5, 2), ("sigmoid", 0), ("mul", 6, 7)]
            steps += [("div", 1, 3), ("tanh", 9), ("mul", 10, 3), ("mul", 8, 11)]
            rows = pointwise(b, [gate, up], numbers[:2], steps, writer.e.store.dtype)
        else:
            rows = _swiglu(writer, *numbers, gate, up)
        width = writer.plan.hidden_size
        y = b.call("expert_linear", rows, w2, ids, width, weights, e.lowp)
        return y
    y = b.call(
        "fused_experts",
        *(x, w13, w2, weights, ids, inner, mlp.activation),
        None if e.w13_bias is None else b.constant(e.w13_bias),
        None if e.w2_bias is None else b.constant(e.w2_bias),
        swiglu_alpha=mlp.swiglu_alpha,
        swiglu_limit=mlp.swiglu_limit,
        lowp_mode=e.lowp,
        num_experts=mlp.experts + mlp.zeros if mlp.zeros else 0,
    )
    return y


def with_added(writer: Any, mlp: ExpertsPlan, y: Register) -> Register:
    """Write what experts give with the parameter that is added to it."""
    if mlp.added is None:
        return y
    module, name = mlp.added
    added = writer.e.store.constant(module, name, getattr(module, name))
    result: Register = writer.b.call("add", y, writer.b.constant(added))
    return result


def routing(
    writer: Any, mlp: ExpertsPlan, router: Linear, x: Register
) -> tuple[Register, Register]:
    """Write which experts rows go to; return their weights and ids."""
    correction, b = mlp.correction_bias, writer.b
    if mlp.scoring in ("logits", "softplus"):
        return _routing_by_logits(
            writer, mlp, b.call("cast", writer.linear(router, x), torch.float32)
        )
    bias = None if correction is None else b.constant(correction.detach().float())
    if correction is not None and mlp.always is not None:
        last = torch.full((mlp.experts - len(correction),), ALWAYS)
        bias = b.call("cat", [bias, b.constant(last)], 0)
    weights, ids = b.call(
        "moe_routing",
        writer.linear(router, x),
        mlp.top_k,
        mlp.renormalize,
        mlp.scoring,
        mlp.groups,
        mlp.top_groups,
        bias,
        weight_scale(mlp),
        mlp.jitter,
    )
    return weights, ids


def _routing_by_logits(
    writer: Any, mlp: ExpertsPlan, logits: Register
) -> tuple[Register, Register]:
    """Write which experts rows go to by a bias and their logits, or other scores, with weights made of these."""
    b, correction, steps = writer.b, mlp.correction_bias, [("sigmoid", 0)]
    if mlp.scoring == "softplus":
        steps = [*_OPENINGS["softplus"], ("sqrt", len(_OPENINGS["softplus"]) + 1)]
        logits, steps = pointwise(b, [logits, logits], [], steps, torch.float32), []
    if mlp.table is None:
        bias = torch.zeros(mlp.experts) if correction is None else correction.detach().float()
        _, ids = b.call("moe_routing", b.call("add", logits, b.constant(bias)), mlp.top_k, False)
    else:
        ids = writer.chosen[id(mlp.table)]
    weights = b.call("gather", logits, 1, ids)
    weights = pointwise(b, [weights], [], steps, torch.float32) if steps else weights
    if mlp.renormalize:
        total = b.call("sum", weights, [1], True)
        weights = pointwise(b, [weights, total], [], [("div", 0, 1)], torch.float32)
    return b.call("mul", weights, mlp.routed_scale), ids


def _with_identities(
    writer: Any, mlp: ExpertsPlan, y: Register, x: Register, weights: Register, ids: Register
) -> Register:
    """Write ``y + x * w``, where ``w`` is the sum of the weights of experts that give what they read."""
    b = writer.b
    numbers = b.call("cast", ids, torch.float32)
    own = pointwise(
        b, [weights, numbers], [mlp.experts - 0.5], [("gt", 1, 2), ("mul", 0, 3)], torch.float32
    )
    mean = b.call("mean", own, [1], True)
    steps = [("mul", 2, 3), ("mul", 1, 4), ("add", 0, 5)]
    return pointwise(b, [y, x, mean], [float(mlp.top_k)], steps, writer.e.store.dtype)


def _scaled_input(writer: Any, x: Register, weights: Register) -> tuple[Register, Register]:
    """Multiply rows with the weight of their only expert; return them and a weight of one for each."""
    ones, _ = writer.b.call("moe_routing", weights, 1, True)
    return writer.b.call("mul", x, _like(writer, weights)), ones


def _like(writer: Any, x: Register) -> Register:
    dtype = writer.e.store.dtype
    if dtype == torch.float32:
        return x
    result: Register = writer.b.call("cast", x, dtype)
    return result
