# SPDX-License-Identifier: Apache-2.0
"""The experts of a mixture of experts: MLPs, gated or with a squared ReLU, each for the tokens routed to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ipex_core.library.checks import (
    PRODUCT_TOLERANCE,
    acc,
    check_device,
    check_dtype_in,
    check_kind,
    check_one_of,
    check_shape,
    check_tensor,
    randn,
    strided,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample
from ipex_core.ops.moe import (
    check_experts,
    check_quantized_expert,
    has_data,
    is_quantized,
    plain_expert,
)
from ipex_core.packing import experts as _experts
from ipex_core.packing import woq

GATES = ("silu", "gelu", "gelu_tanh", "swigluoai")
#: The last one has no gate.
ACTIVATIONS = (*GATES, "relu2")


def _case(
    dtype: torch.dtype, tokens: int, experts: int, top_k: int, hidden: int, inner: int
) -> tuple[Any, ...]:
    """Return the positional arguments of a call with random weights and routes."""
    x = randn(tokens, hidden, dtype=dtype, seed=81)
    first = randn(experts, 2 * inner, hidden, dtype=dtype, seed=82, scale=hidden**-0.5)
    second = randn(experts, hidden, inner, dtype=dtype, seed=83, scale=inner**-0.5)
    scores = randn(tokens, experts, seed=84).softmax(-1)
    weights, ids = scores.topk(top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    packed = _experts.pack(first, True), _experts.pack(second, False)
    return x, *packed, weights, ids.to(torch.int32), inner


def quantized_experts(
    weight: Tensor, gated: bool, format: str, group: int, scale_dtype: torch.dtype
) -> Tensor:
    """Return packed experts quantized from ``[E, N, K]``."""
    rows = _experts.interleave(weight) if gated else weight
    packed = []
    for one in rows:
        codes, scales, zeros = woq.quantize(one, format, group, True, scale_dtype)
        layout = woq.layout_of(codes, scales, zeros, format, one.shape[1], group, None, "dot")
        packed.append(woq.pack(codes, scales, zeros, layout))
    return torch.stack(packed)


def _quantized_case(
    dtype: torch.dtype, tokens: int, format: str, group: int, scale_dtype: torch.dtype
) -> tuple[Any, ...]:
    x, _, _, weights, ids, inner = _case(dtype, tokens, 4, 2, 66, 40)
    first = randn(4, 2 * inner, 66, seed=82, scale=66**-0.5)
    second = randn(4, 66, inner, seed=83, scale=inner**-0.5)
    packed13 = quantized_experts(first, True, format, group, scale_dtype)
    packed2 = quantized_experts(second, False, format, group, scale_dtype)
    return x, packed13, packed2, weights, ids, inner


def expert_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for tokens, experts, top_k, hidden, inner in (
        (1, 1, 1, 8, 4),
        (1, 8, 2, 64, 96),
        (4, 8, 3, 64, 32),
        (3, 16, 6, 70, 41),
        (33, 4, 2, 129, 65),
        (260, 2, 2, 32, 16),
    ):
        case = _case(dtype, tokens, experts, top_k, hidden, inner)
        yield Sample(case, id=f"{tokens}x{top_k}of{experts}_{hidden}_{inner}")
    x, w13, w2, weights, ids, inner = _case(dtype, 9, 4, 2, 66, 40)
    b13 = randn(4, 80, dtype=dtype, seed=85)
    b2 = randn(4, 66, dtype=dtype, seed=86)
    for activation in GATES:
        yield Sample((x * 3, w13, w2, weights, ids, inner, activation, b13, b2), id=activation)
    yield Sample(
        (strided(x), w13, w2, weights.to(dtype), ids.long(), inner, "silu", b13.float()),
        id="noncontiguous",
    )
    yield from _ungated_samples(dtype)
    shared = _case(dtype, 1, 1, 1, 66, 50)[1:3]
    yield Sample((x, w13, w2, weights, ids, inner, "silu", b13, b2, *shared, None, 50), id="shared")
    yield Sample(
        (x, w13, w2, weights, ids, inner, "gelu", None, b2, *shared, randn(9, seed=87), 50),
        id="shared_weights",
    )
    yield Sample((x[:0], w13, w2, weights[:0], ids[:0], inner), id="no_tokens")
    none = torch.full_like(ids, -1)
    yield Sample((x, w13, w2, weights, none, inner), id="all_skipped")
    yield Sample(
        (x, w13, w2, weights, none, inner, "silu", None, None, *shared, None, 50), id="only_shared"
    )
    yield Sample((x, w13, w2, weights, torch.zeros_like(ids), inner), id="duplicates")
    parts = torch.where(ids % 2 == 0, ids + 3, 9)
    yield Sample(
        (x, w13, w2, weights, parts, inner, *["silu", *[None] * 5, 0, 3, 10]), id="expert_parallel"
    )
    for format, group, scales in (
        ("int8", -1, torch.float32),
        ("int4", 32, torch.bfloat16),
        ("fp4", 32, torch.float8_e8m0fnu),
        ("nf4", 16, torch.float32),
    ):
        for tokens in (3, 150):
            yield Sample(
                _quantized_case(dtype, tokens, format, group, scales), id=f"{format}_{tokens}"
            )
    few = _quantized_case(dtype, 4, "fp4", 32, torch.float8_e8m0fnu)
    yield Sample((*few, "swigluoai", b13, b2), id="quantized_bias_swigluoai")
    special = x.clone()
    special[0, 3], special[1, 5], special[2, 0] = float("nan"), float("inf"), -float("inf")
    yield Sample((special, w13, w2, weights, ids, inner), id="special_values")


def _ungated_samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Yield calls of experts with a squared ReLU and no gate."""
    for tokens, hidden, inner in ((1, 64, 96), (9, 66, 40), (70, 40, 129)):
        x, _, w2, weights, ids, _ = _case(dtype, tokens, 4, 2, hidden, inner)
        up = randn(4, inner, hidden, dtype=dtype, seed=82, scale=hidden**-0.5)
        case = (x, _experts.pack(up, False), w2, weights, ids, inner, "relu2")
        yield Sample(case, id=f"relu2_{tokens}_{hidden}_{inner}")
    biases = randn(4, 129, dtype=dtype, seed=85), randn(4, 40, dtype=dtype, seed=86)
    first, second = (
        _experts.pack(randn(1, *shape, dtype=dtype, seed=89, scale=0.1), False)
        for shape in ((50, 40), (40, 50))
    )
    yield Sample((*case, *biases, first, second, None, 50), id="relu2_bias_shared")
    for format, group, scales in (("int8", -1, torch.float32), ("int4", 32, torch.bfloat16)):
        for tokens in (3, 150):
            x, _, w2, weights, ids, inner = _quantized_case(dtype, tokens, format, group, scales)
            up = randn(4, inner, 66, seed=82, scale=66**-0.5)
            w13 = quantized_experts(up, False, format, group, scales)
            yield Sample((x, w13, w2, weights, ids, inner, "relu2"), id=f"relu2_{format}_{tokens}")


#: name, tokens, experts, top_k, hidden, intermediate
_SHAPES = (
    ("small", 16, 4, 2, 256, 128),
    ("mixtral", 1, 8, 2, 2048, 3584),
    ("mixtral", 4, 8, 2, 2048, 3584),
    ("mixtral", 128, 8, 2, 2048, 3584),
    ("mixtral", 512, 8, 2, 2048, 3584),
    ("qwen3", 1, 64, 8, 2048, 768),
    ("qwen3", 512, 64, 8, 2048, 768),
    ("deepseek", 1, 64, 6, 2048, 704),
)


def _bench_case(
    dtype: torch.dtype, tokens: int, experts: int, top_k: int, hidden: int, inner: int
) -> tuple[Any, ...]:
    # The same weights for each expert: random numbers for all would take longer than the benchmark.
    x = randn(tokens, hidden, dtype=dtype, seed=81)
    first = randn(1, 2 * inner, hidden, dtype=dtype, seed=82, scale=hidden**-0.5)
    second = randn(1, hidden, inner, dtype=dtype, seed=83, scale=inner**-0.5)
    w13 = torch.ops.ipex.pack_moe_weight(first.expand(experts, -1, -1), True)
    w2 = torch.ops.ipex.pack_moe_weight(second.expand(experts, -1, -1), False)
    weights, ids = randn(tokens, experts, seed=88).softmax(-1).topk(top_k, dim=-1)
    return x, w13, w2, weights, ids.to(torch.int32), inner


def expert_bench() -> Iterator[BenchCase]:
    for name, tokens, experts, top_k, hidden, inner in _SHAPES:
        used = min(experts, tokens * top_k)
        yield BenchCase(
            f"{name}-{tokens}x{top_k}of{experts}x{hidden}x{inner}",
            lambda dtype, a=(tokens, experts, top_k, hidden, inner): _bench_case(dtype, *a),
            lambda dtype, w=used * 3 * hidden * inner, a=tokens * hidden: (
                (w + 2 * a) * dtype.itemsize
            ),
            flops=tokens * top_k * 6 * hidden * inner,
        )
    yield from _quantized_bench()


#: format, group, scales, bits of a weight with its share of the scales
_QUANTIZED = (
    ("int8", -1, torch.float32, 8.0),
    ("int4", 128, torch.bfloat16, 4.125),
    ("fp4", 32, torch.float8_e8m0fnu, 4.25),
)


def _quantized_bench_case(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int],
    format: str,
    group: int,
    scales: torch.dtype,
) -> tuple[Any, ...]:
    tokens, experts, top_k, hidden, inner = shape
    x = randn(tokens, hidden, dtype=dtype, seed=81)
    packed = []
    for n, k, gated in ((2 * inner, hidden, True), (hidden, inner, False)):
        one = quantized_experts(
            randn(1, n, k, seed=82, scale=k**-0.5), gated, format, group, scales
        )
        packed.append(torch.ops.ipex.pack_moe_stack([one[0]] * experts))
    weights, ids = randn(tokens, experts, seed=88).softmax(-1).topk(top_k, dim=-1)
    return x, *packed, weights, ids.to(torch.int32), inner


def _quantized_bench() -> Iterator[BenchCase]:
    for name, tokens, experts, top_k, hidden, inner in _SHAPES:
        if tokens not in (1, 512) or name == "deepseek":
            continue
        used = min(experts, tokens * top_k)
        for format, group, scales, bits in _QUANTIZED:
            shape = (tokens, experts, top_k, hidden, inner)
            yield BenchCase(
                f"{format}-{name}-{tokens}x{top_k}of{experts}x{hidden}x{inner}",
                lambda dtype, a=(shape, format, group, scales): _quantized_bench_case(dtype, *a),
                lambda dtype, w=used * 3 * hidden * inner * bits / 8, a=tokens * hidden: int(
                    w + 2 * a * dtype.itemsize
                ),
                flops=tokens * top_k * 6 * hidden * inner,
            )


# --- the op -----------------------------------------------------------------------------------------------------------


def gate(x: Tensor, activation: str, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """Apply the activation to the first half of the features and multiply with the second; to all without a gate."""
    if activation == "relu2":
        return functional.relu(x).square()
    first, second = x.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(first) * second
    if activation == "gelu":
        return functional.gelu(first) * second
    if activation == "gelu_tanh":
        return functional.gelu(first, approximate="tanh") * second
    first = first.clamp(max=limit)
    return (second.clamp(-limit, limit) + 1) * (first * torch.sigmoid(alpha * first))


def _fused_experts(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    intermediate_size: int,
    activation: str = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    shared_w13: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_weights: Tensor | None = None,
    shared_intermediate_size: int = 0,
    experts_start_id: int = 0,
    num_experts: int = 0,
    swiglu_alpha: float = 1.702,
    swiglu_limit: float = 7.0,
    lowp_mode: str = "none",
) -> Tensor:
    """Compute ``y[t] = sum over i of topk_weights[t, i] * expert(topk_ids[t, i])(hidden_states[t])``.

    An expert is ``w2 @ gate(w13 @ x + w13_bias) + w2_bias`` where ``gate`` is ``activation(first half) * second
    half``. The activation ``"swigluoai"``, gpt-oss's, is ``(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)``
    with ``g = min(gate, limit)``. With ``"relu2"`` (Nemotron-H) there is no gate: ``w2 @ relu(w13 @ x + w13_bias)^2 +
    w2_bias`` with I rows in ``w13``. Products are accumulated in float32; what goes from the first to the second
    product is rounded to the dtype of the input, and so is the sum over the experts, once. The sum runs in the order of
    the experts, so a token's result depends neither on the number of threads nor on the order of its ids.

    A shared expert is one more such MLP that every token goes to.

    Args:
        hidden_states: ``[T, H]``, float32, bfloat16 or float16.
        w13: Result of ``pack_moe_weight(weight, True)`` for ``[E, 2 I, H]``, gate rows first, in the dtype of
            ``hidden_states``; without a gate of ``pack_moe_weight(weight)`` for ``[E, I, H]``.
        w2: Result of ``pack_moe_weight(weight)`` for ``[E, H, I]``.
        topk_weights: ``[T, top_k]``, float32 or the dtype of ``hidden_states``.
        topk_ids: ``[T, top_k]``, int32 or int64. -1 means no expert. An id may occur twice in a row.
        intermediate_size: I.
        activation: ``"silu"``, ``"gelu"`` (erf), ``"gelu_tanh"``, ``"swigluoai"`` or ``"relu2"``.
        w13_bias: ``[E, 2 I]``, gates first, or ``[E, I]``, in the dtype of ``hidden_states`` or float32, or None.
        w2_bias: ``[E, H]``, or None.
        shared_w13: As ``w13``, for one shared expert ``[1, 2 S, H]``, or None.
        shared_w2: As ``w2``, ``[1, H, S]``, or None.
        shared_weights: ``[T]``, factors on the shared expert's result, or None for 1.
        shared_intermediate_size: S.
        experts_start_id: Id of the first expert in ``w13``, for expert parallelism: ids outside of
            ``[experts_start_id, experts_start_id + E)`` are other processes' and skipped.
        num_experts: Number of all experts, which ids must be below; 0 if all are here.
        swiglu_alpha: Of ``"swigluoai"``.
        swiglu_limit: Of ``"swigluoai"``.
        lowp_mode: For quantized weights, what they are multiplied in: ``"none"`` (the dtype of ``hidden_states``),
            ``"bf16"`` or ``"fp16"``; see `woq_linear`.

    The weights may be quantized, all of them in any formats of `pack_woq_weight` with order ``dot``: each expert's
    rows (of ``w13`` interleaved as `pack_moe_weight` says) packed alone and put together by `pack_moe_stack`;
    `ipex_core.nn.moe.pack_woq_experts` does that.

    Returns:
        A contiguous ``[T, H]`` tensor in the dtype of ``hidden_states``; zeros for a token without experts.

    Raises:
        RuntimeError: A shape or dtype does not fit, or an id is not -1 and not in ``[0, num_experts)``. Nothing has
            been computed then.
    """
    hidden = hidden_states.shape[1]
    x = acc(hidden_states)
    y = x.new_zeros(hidden_states.shape)
    pair = activation != "relu2"

    def expert(
        rows: Tensor, names: tuple[str, str], packed: tuple[Tensor, Tensor], size: int, index: int
    ) -> Tensor:
        first, second = (
            plain_expert("fused_experts", name, weight, index, n, k, hidden_states.dtype, gated)
            for name, weight, n, k, gated in (
                (names[0], packed[0], size * (1 + pair), hidden, pair),
                (names[1], packed[1], hidden, size, False),
            )
        )
        biases = (w13_bias, w2_bias) if names[0] == "w13" else (None, None)
        b13, b2 = (None if b is None else b[index].to(x.dtype) for b in biases)
        both = functional.linear(rows, first.to(x.dtype), b13)
        middle = gate(both, activation, swiglu_alpha, swiglu_limit)
        return functional.linear(middle, second.to(x.dtype), b2)

    for index in range(w13.shape[0]):
        token, place = torch.where(topk_ids == index + experts_start_id)
        if token.numel() == 0:
            continue
        out = expert(x[token], ("w13", "w2"), (w13, w2), intermediate_size, index)
        y = y.index_add(0, token, out * topk_weights[token, place, None].to(x.dtype))
    if shared_w13 is not None and shared_w2 is not None and hidden_states.shape[0]:
        names = ("shared_w13", "shared_w2")
        out = expert(x, names, (shared_w13, shared_w2), shared_intermediate_size, 0)
        y = y + (out if shared_weights is None else out * shared_weights[:, None].to(x.dtype))
    return y.to(hidden_states.dtype)


def _check(a: Arguments) -> None:
    x = a.hidden_states
    check_tensor(a.op, "hidden_states", x)
    a.require(x.dim() == 2, "hidden_states", "be 2-D", list(x.shape))
    a.require(x.shape[1] > 0, "hidden_states", "have at least one feature", list(x.shape))
    a.require(a.intermediate_size > 0, "intermediate_size", "be positive")
    hidden = x.shape[1]
    check_device(a.op, "w13", a.w13, x, "hidden_states")
    quantized = has_data(a.w13) and is_quantized(a.w13)
    check_one_of(a.op, "activation", a.activation, ACTIVATIONS)
    pair = a.activation != "relu2"
    rows = a.intermediate_size * (1 + pair)
    _check_weights("w13", a.w13, rows, hidden, x.dtype, pair, quantized)
    check_device(a.op, "w2", a.w2, x, "hidden_states")
    _check_weights("w2", a.w2, hidden, a.intermediate_size, x.dtype, False, quantized)
    experts = a.w13.shape[0]
    a.require(
        a.w2.shape[0] == experts, "w2", f"have as many experts as w13 = {experts}", a.w2.shape[0]
    )
    _check_routing(a)
    _check_bias(x, "w13_bias", a.w13_bias, [experts, rows])
    _check_bias(x, "w2_bias", a.w2_bias, [experts, hidden])
    _check_shared(a, quantized, pair)
    check_one_of(a.op, "lowp_mode", a.lowp_mode, ("none", "fp16", "bf16"))
    fits = quantized or a.lowp_mode == "none" or not has_data(a.w13)
    a.require(fits, "lowp_mode", "be none for weights that are not quantized")
    a.require(a.num_experts >= 0, "num_experts", "be 0 or more")
    total = a.num_experts or experts
    text = f"be between 0 and num_experts - {experts} = {total - experts}"
    a.require(0 <= a.experts_start_id <= total - experts, "experts_start_id", text)
    # Only the data tell, so tensors without data (fake tensors during a trace) pass.
    if has_data(a.topk_ids):
        ids = a.topk_ids.cpu().long()
        wrong = ids[(ids < -1) | (ids >= total)].tolist()
        a.require(not wrong, "topk_ids", f"be -1 or in [0, {total})", *wrong[:1])


def _check_routing(a: Arguments) -> None:
    """Check everything but the values of ids."""
    x, ids = a.hidden_states, a.topk_ids
    check_device(a.op, "topk_ids", ids, x, "hidden_states")
    check_dtype_in(a.op, "topk_ids", ids, torch.int32, torch.int64)
    shape = list(ids.shape)
    fits = len(shape) == 2 and shape[0] == x.shape[0]
    a.require(fits, "topk_ids", f"be 2-D with {x.shape[0]} rows", shape)
    check_kind(a.op, "topk_weights", a.topk_weights, x, "hidden_states", or_float32=True)
    got = list(a.topk_weights.shape)
    a.require(got == shape, "topk_weights", f"have the shape of topk_ids = {shape}", got)


def _check_bias(x: Tensor, name: str, bias: Tensor | None, shape: list[int]) -> None:
    op = "fused_experts"
    if bias is not None:
        check_kind(op, name, bias, x, "hidden_states", or_float32=True)
        check_shape(op, name, bias, shape)


def _check_weights(
    name: str, packed: Tensor, n: int, k: int, dtype: torch.dtype, gated: bool, quantized: bool
) -> None:
    op = "fused_experts"
    if quantized:
        check_quantized_expert(op, name, packed, 0, n, k, gated)
    elif has_data(packed) or packed.dim() != 2:
        check_experts(op, name, packed, n, k, dtype, gated)


def _check_shared(a: Arguments, quantized: bool, pair: bool) -> None:
    x, w13, w2, weights = a.hidden_states, a.shared_w13, a.shared_w2, a.shared_weights
    both = (w13 is None) == (w2 is None)
    got = "None" if w2 is None else "a tensor"
    a.require(both, "shared_w2", "be given if and only if shared_w13 is", got)
    if w13 is None:
        none = weights is None
        a.require(none, "shared_weights", "be None without a shared expert", "a tensor")
        return
    (tokens, hidden), size = x.shape, a.shared_intermediate_size
    a.require(size > 0, "shared_intermediate_size", "be positive")
    check_device(a.op, "shared_w13", w13, x, "hidden_states")
    _check_weights("shared_w13", w13, size * (1 + pair), hidden, x.dtype, pair, quantized)
    check_device(a.op, "shared_w2", w2, x, "hidden_states")
    _check_weights("shared_w2", w2, hidden, size, x.dtype, False, quantized)
    most = max(w13.shape[0], w2.shape[0])
    a.require(most == 1, "shared_w13", "hold one expert", most)
    if weights is not None:
        check_kind(a.op, "shared_weights", weights, x, "hidden_states", or_float32=True)
        shape = list(weights.shape)
        a.require(shape == [tokens], "shared_weights", f"be 1-D of size {tokens}", shape)


def _stock_args(
    x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, inner: int
) -> tuple[Any, ...]:
    """Plain weights in the dtype of x: stock has no other experts."""
    hidden = x.shape[1]
    plain = [
        torch.stack(
            [
                plain_expert("fused_experts", name, w, e, n, k, x.dtype, gated).to(x.dtype)
                for e in range(len(w))
            ]
        )
        for name, w, n, k, gated in (
            ("w13", w13, 2 * inner, hidden, True),
            ("w2", w2, hidden, inner, False),
        )
    ]
    return x, *plain, weights, ids.long()


def _stock(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The loop over the experts that models of the Hugging Face library have."""
    y = torch.zeros_like(x)
    mask = functional.one_hot(ids, w13.shape[0]).permute(2, 1, 0)
    for index in (mask.sum(dim=(-1, -2)) > 0).nonzero():
        expert = index[0]
        place, token = torch.where(mask[expert])
        both = functional.linear(x[token], w13[expert])
        out = functional.linear(gate(both, "silu"), w2[expert])
        y.index_add_(0, token, (out * weights[token, place, None]).to(x.dtype))
    return y


register_op(
    reference=_fused_experts,
    check=_check,
    fake=lambda a: torch.empty_like(a.hidden_states, memory_format=torch.contiguous_format),
    samples=expert_samples,
    stock=_stock,
    stock_args=_stock_args,
    tolerance=PRODUCT_TOLERANCE,
    bench=expert_bench,
    summary="Gated MLPs of a mixture of experts on packed weights, with a shared expert",
)


# --- one linear layer of each expert: a projection that is a mixture --------------------------------------------------

LINEAR_OP = "expert_linear"


def _expert_linear(
    x: Tensor,
    packed_weight: Tensor,
    ids: Tensor,
    out_features: int,
    weights: Tensor | None = None,
    lowp_mode: str = "none",
) -> Tensor:
    """Multiply rows with the weights of the experts that they go to.

    ``y[t, i] = weight[ids[t, i]] @ x[t]``, or ``x[t, i]`` where each expert has a row of its own. With weights it is
    the sum ``y[t] = sum over i of weights[t, i] * weight[ids[t, i]] @ x[t, i]``. Products and sums are accumulated in
    float32 and rounded once; the sum runs in the order of the experts.

    Args:
        x: ``[T, K]`` or ``[T, top_k, K]``, float32, bfloat16 or float16.
        packed_weight: Result of ``pack_moe_weight(weight)`` for ``[E, N, K]`` in the dtype of ``x``; or quantized, as
            in `fused_experts`.
        ids: ``[T, top_k]``, int32 or int64. -1 means no expert: zeros. An id may occur twice in a row.
        out_features: N.
        weights: ``[T, top_k]``, float32 or the dtype of ``x``, or None.
        lowp_mode: As in `fused_experts`.

    Returns:
        A contiguous tensor in the dtype of ``x``: ``[T, top_k, N]``, with weights ``[T, N]``.

    Raises:
        RuntimeError: A shape or dtype does not fit, or an id is not in ``[-1, E)``. Nothing has been computed then.
    """
    tokens, top_k = ids.shape
    wide = acc(x)
    each = wide.unsqueeze(1).expand(-1, top_k, -1) if x.dim() == 2 else wide
    y = wide.new_zeros(tokens, top_k, out_features)
    for index in range(packed_weight.shape[0]):
        token, place = torch.where(ids == index)
        if token.numel() == 0:
            continue
        shape = (index, out_features, x.shape[-1])
        weight = plain_expert(LINEAR_OP, "packed_weight", packed_weight, *shape, x.dtype, False)
        y[token, place] = functional.linear(each[token, place], weight.to(wide.dtype))
    if weights is not None:
        y = (y * weights.unsqueeze(-1).to(wide.dtype)).sum(1)
    return y.to(x.dtype)


def _linear_check(a: Arguments) -> None:
    check_tensor(LINEAR_OP, "x", a.x)
    a.require(a.x.dim() in (2, 3), "x", "be 2-D or 3-D", list(a.x.shape))
    a.require(a.x.shape[-1] > 0, "x", "have at least one feature", list(a.x.shape))
    a.require(a.out_features > 0, "out_features", "be positive")
    check_device(LINEAR_OP, "packed_weight", a.packed_weight, a.x)
    packed, size = a.packed_weight, (a.out_features, a.x.shape[-1])
    quantized = has_data(packed) and is_quantized(packed)
    if quantized:
        check_quantized_expert(LINEAR_OP, "packed_weight", packed, 0, *size, False)
    elif has_data(packed) or packed.dim() != 2:
        check_experts(LINEAR_OP, "packed_weight", packed, *size, a.x.dtype, False)
    check_device(LINEAR_OP, "ids", a.ids, a.x)
    check_dtype_in(LINEAR_OP, "ids", a.ids, torch.int32, torch.int64)
    shape = list(a.ids.shape)
    fits = len(shape) == 2 and shape[0] == a.x.shape[0]
    a.require(fits, "ids", f"be 2-D with {a.x.shape[0]} rows", shape)
    rows = a.x.dim() == 2 or a.x.shape[1] == shape[1]
    a.require(rows, "x", f"have a row for each of {shape[1]} ids", list(a.x.shape))
    check_one_of(LINEAR_OP, "lowp_mode", a.lowp_mode, ("none", "fp16", "bf16"))
    fits = quantized or a.lowp_mode == "none" or not has_data(packed)
    a.require(fits, "lowp_mode", "be none for weights that are not quantized")
    if a.weights is not None:
        check_kind(LINEAR_OP, "weights", a.weights, a.x, or_float32=True)
        check_shape(LINEAR_OP, "weights", a.weights, shape)
    # Only the data tell, so tensors without data (fake tensors during a trace) pass.
    if has_data(a.ids):
        experts, ids = packed.shape[0], a.ids.cpu().long()
        wrong = ids[(ids < -1) | (ids >= experts)].tolist()
        a.require(not wrong, "ids", f"be -1 or in [0, {experts})", *wrong[:1])


def _linear_fake(a: Arguments) -> Tensor:
    kept = tuple(a.ids.shape) if a.weights is None else (a.ids.shape[0],)
    return a.x.new_empty(*kept, a.out_features)


def _linear_case(dtype: torch.dtype, tokens: int, experts: int, top_k: int, k: int, n: int) -> Any:
    """Return rows, packed weights, ids and weights of experts."""
    x = randn(tokens, k, dtype=dtype, seed=91)
    weight = randn(experts, n, k, dtype=dtype, seed=92, scale=k**-0.5)
    weights, ids = randn(tokens, experts, seed=93).softmax(-1).topk(top_k, dim=-1)
    return x, torch.ops.ipex.pack_moe_weight(weight), ids.to(torch.int32), weights


def _linear_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for tokens, experts, top_k, k, n in (
        (1, 1, 1, 1, 1),
        (1, 8, 2, 64, 96),
        (4, 8, 3, 70, 33),
        (33, 4, 2, 129, 65),
        (300, 3, 2, 40, 72),
        (1100, 2, 1, 17, 130),
    ):
        x, packed, ids, weights = _linear_case(dtype, tokens, experts, top_k, k, n)
        each = randn(tokens, top_k, k, dtype=dtype, seed=94)
        name = f"{tokens}x{top_k}of{experts}_{k}_{n}"
        yield Sample((x, packed, ids, n), id=name)
        yield Sample((each, packed, ids, n, weights), id=f"{name}-sum")
    x, packed, ids, weights = _linear_case(dtype, 9, 4, 2, 66, 40)
    each = randn(9, 2, 66, dtype=dtype, seed=94)
    yield Sample((x, packed, ids.long(), 40, weights.to(dtype)), id="one_row-sum")
    yield Sample((each, packed, ids, 40), id="own_rows")
    yield Sample((strided(x), packed, strided(ids), 40), id="noncontiguous")
    heads = each.transpose(0, 1).contiguous().transpose(0, 1)
    yield Sample((heads, packed, ids, 40, strided(weights)), id="noncontiguous-sum")
    skipped = torch.where(ids == 1, -1, ids)
    yield Sample((x, packed, skipped, 40), id="skipped")
    yield Sample((each, packed, skipped, 40, weights), id="skipped-sum")
    yield Sample((each, packed, torch.full_like(ids, -1), 40, weights), id="all_skipped")
    yield Sample((each, packed, torch.zeros_like(ids), 40, weights), id="duplicates")
    yield Sample((x[:0], packed, ids[:0], 40), id="no_tokens")
    special = each.clone()
    special[0, 1, 3], special[2, 0, 5] = float("nan"), float("inf")
    yield Sample((special, packed, ids, 40, weights), id="special_values")
    for format, group, scales in (
        ("int8", -1, torch.float32),
        ("int4", 32, torch.bfloat16),
        ("nf4", 16, torch.float32),
    ):
        for tokens in (3, 150):
            x, _, ids, weights = _linear_case(dtype, tokens, 4, 2, 66, 40)
            weight = randn(4, 40, 66, seed=92, scale=66**-0.5)
            packed4 = quantized_experts(weight, False, format, group, scales)
            own = randn(tokens, 2, 66, dtype=dtype, seed=94)
            yield Sample((x, packed4, ids, 40), id=f"{format}_{tokens}")
            yield Sample((own, packed4, ids, 40, weights), id=f"{format}_{tokens}-sum")


def _linear_bench() -> Iterator[BenchCase]:
    for tokens in (1, 16, 128, 512):
        for name, experts, top_k, k, n in (("small", 4, 2, 256, 128), ("jetmoe", 8, 2, 2048, 2048)):
            used = min(experts, tokens * top_k)
            yield BenchCase(
                f"{name}-{tokens}x{top_k}of{experts}x{k}x{n}",
                lambda dtype, a=(tokens, experts, top_k, k, n): (
                    *_linear_case(dtype, *a)[:3],
                    a[4],
                ),
                lambda dtype, w=used * k * n, a=tokens * (k + top_k * n): (w + a) * dtype.itemsize,
                flops=2 * tokens * top_k * k * n,
                rotate=tokens <= 32,
            )


def _linear_stock_args(
    x: Tensor, packed: Tensor, ids: Tensor, out_features: int
) -> tuple[Any, ...]:
    return x, _experts.unpack(packed, out_features, x.shape[-1], x.dtype, False), ids.long()


def _linear_stock(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """The loop over the experts that models of the Hugging Face library have."""
    y = x.new_zeros(*ids.shape, weight.shape[1])
    for expert in range(weight.shape[0]):
        token, place = torch.where(ids == expert)
        y[token, place] = functional.linear(x[token], weight[expert])
    return y


register_op(
    reference=_expert_linear,
    check=_linear_check,
    fake=_linear_fake,
    samples=_linear_samples,
    stock=_linear_stock,
    stock_args=_linear_stock_args,
    tolerance=PRODUCT_TOLERANCE,
    bench=_linear_bench,
    summary="Linear layers of the experts that tokens go to, alone or as a weighted sum",
)
