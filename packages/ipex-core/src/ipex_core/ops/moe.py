# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: which experts a token goes to and with which weights, and the packing of their weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ipex_core.library.checks import (
    acc,
    check_device,
    check_one_of,
    check_tensor,
    randn,
    strided,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import FLOATS, Arguments, BenchCase, Sample, check, dtype_name
from ipex_core.packing import experts as _experts
from ipex_core.packing import woq
from ipex_core.packing.dense import FORMATS, HEADER_BYTES, bytes_text, header_text, read_header

SCORING = ("softmax", "sigmoid", "sparsemixer")


def _sparsemixer(logits: Tensor, top_k: int, jitter: float) -> tuple[Tensor, Tensor]:
    """Return weights and ids of experts that are taken one after another."""
    weights, ids = [], []
    taken = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    for _ in range(top_k):
        left = logits.masked_fill(taken, -float("inf"))
        chosen = left.argmax(-1, keepdim=True)  # the first of equal ones
        top = left.gather(1, chosen)
        low = (top - logits) / torch.maximum(logits.abs(), top) > 2 * jitter
        scores = torch.softmax(left.masked_fill(low, -float("inf")), -1)
        weights.append(scores.gather(1, chosen))
        ids.append(chosen)
        taken = taken.scatter(1, chosen, True)
    return torch.cat(weights, 1), torch.cat(ids, 1)


def _moe_routing(
    router_logits: Tensor,
    top_k: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    num_expert_group: int = 0,
    topk_group: int = 0,
    e_score_correction_bias: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    jitter: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token.

    The steps, all in float32:

    1. ``scores = softmax(logits)`` or ``sigmoid(logits)``.
    2. ``choice = scores + e_score_correction_bias`` (or ``scores``).
    3. With groups (``num_expert_group > 1``) the experts are cut into that many groups of neighbors. The score of a
       group is its largest ``choice``, or the sum of its two largest if there is a correction bias. Only experts of
       the ``topk_group`` best groups can be chosen.
    4. ``ids``: the ``top_k`` experts of largest ``choice``, largest first. Of equal values the lower index comes
       first, also among groups; NaN counts as larger than any number.
    5. ``weights``: the *scores*, without bias, of these experts, divided by ``sum + 1e-20`` if ``renormalize``, then
       multiplied by ``routed_scaling_factor``.

    With ``"sparsemixer"`` experts are taken one after another, without groups and bias. Each time the largest logit
    ``m`` of those that are left is taken. Its weight is its softmax among them, but for those with
    ``(m - logit) / max(|logit|, m) > 2 * jitter``.

    ==================  =========================================================================================
    Mixtral             ``softmax``, ``renormalize=True``
    Qwen3-MoE           ``softmax``, ``renormalize=norm_topk_prob``
    gpt-oss             ``softmax``, ``renormalize=True`` (equal to the softmax over the chosen logits)
    DeepSeek-V2         ``softmax``, groups, ``renormalize=False``, ``routed_scaling_factor``
    DeepSeek-V3         ``sigmoid``, groups, bias, ``renormalize=norm_topk_prob``, ``routed_scaling_factor``
    Phi-MoE             ``sparsemixer``, ``renormalize=False``, ``jitter=router_jitter_noise``
    ==================  =========================================================================================

    Args:
        router_logits: ``[T, E]``, float32, bfloat16 or float16.
        top_k: Number of experts per token.
        renormalize: Whether the weights of a token are made to sum to 1.
        scoring_func: ``"softmax"``, ``"sigmoid"`` or ``"sparsemixer"``.
        num_expert_group: Number of groups; 0 or 1 means no groups. Must divide E.
        topk_group: Number of groups that a token's experts come from; read only if there are groups.
        e_score_correction_bias: ``[E]`` float32, or None.
        routed_scaling_factor: Factor on the weights.
        jitter: Of ``"sparsemixer"``.

    Returns:
        ``weights`` float32 ``[T, top_k]`` and ``ids`` int32 ``[T, top_k]``.
    """
    logits = acc(router_logits)
    tokens, experts = logits.shape
    if scoring_func == "sparsemixer":
        weights, ids = _sparsemixer(logits, top_k, jitter)
        if renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * routed_scaling_factor, ids.to(torch.int32)
    scores = torch.softmax(logits, -1) if scoring_func == "softmax" else torch.sigmoid(logits)
    choice = scores
    if e_score_correction_bias is not None:
        choice = scores + e_score_correction_bias.to(scores.dtype)
    order = choice.sort(dim=-1, descending=True, stable=True).indices
    if num_expert_group > 1:
        size = experts // num_expert_group
        best = choice.view(tokens, num_expert_group, size).sort(dim=-1, descending=True).values
        count = 1 if e_score_correction_bias is None else 2
        groups = best[..., :count].sum(-1).sort(dim=-1, descending=True, stable=True).indices
        allowed = torch.zeros(
            tokens, num_expert_group, dtype=torch.uint8, device=logits.device
        ).scatter(1, groups[:, :topk_group], 1)
        allowed = allowed.repeat_interleave(size, dim=1).gather(1, order)
        # Experts of the best groups first, each part in its order.
        order = order.gather(1, allowed.sort(dim=-1, descending=True, stable=True).indices)
    ids = order[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return (weights * routed_scaling_factor).float(), ids.to(torch.int32)


def _check(a: Arguments) -> None:
    check_tensor(a.op, "router_logits", a.router_logits)
    a.require(a.router_logits.dim() == 2, "router_logits", "be 2-D", list(a.router_logits.shape))
    experts = a.router_logits.shape[1]
    check_one_of(a.op, "scoring_func", a.scoring_func, SCORING)
    a.require(
        0 < a.top_k <= experts, "top_k", f"be between 1 and the number of experts = {experts}"
    )
    if a.num_expert_group > 1:
        fits = experts % a.num_expert_group == 0
        a.require(fits, "num_expert_group", f"divide the number of experts = {experts}")
        fits = 0 < a.topk_group <= a.num_expert_group
        a.require(fits, "topk_group", f"be between 1 and num_expert_group = {a.num_expert_group}")
        most = a.topk_group * (experts // a.num_expert_group)
        a.require(a.top_k <= most, "top_k", f"be at most the {most} experts of topk_group")
    else:
        a.require(a.num_expert_group >= 0, "num_expert_group", "be 0 or more")
    a.require(a.jitter >= 0, "jitter", "be 0 or more")
    bias = a.e_score_correction_bias
    fits = a.scoring_func != "sparsemixer" or (a.num_expert_group <= 1 and bias is None)
    a.require(fits, "scoring_func", "be softmax or sigmoid with groups or a bias")
    if bias is not None:
        check_device(a.op, "e_score_correction_bias", bias, a.router_logits, "router_logits")
        a.require(
            bias.dtype == torch.float32 and list(bias.shape) == [experts],
            "e_score_correction_bias",
            f"be float32 of shape [{experts}]",
            f"{dtype_name(bias.dtype)} {list(bias.shape)}",
        )


def _fake(a: Arguments) -> tuple[Tensor, Tensor]:
    shape = (a.router_logits.shape[0], a.top_k)
    return (
        a.router_logits.new_empty(shape, dtype=torch.float32),
        a.router_logits.new_empty(shape, dtype=torch.int32),
    )


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample((randn(5, 8, dtype=dtype, seed=71), 2, True), id="mixtral")
    yield Sample((randn(70, 128, dtype=dtype, seed=72), 8, True), id="qwen3")
    yield Sample((randn(3, 60, dtype=dtype, seed=73), 4, False), id="not_normalized")
    x = randn(9, 64, dtype=dtype, seed=74, scale=2.0)
    bias = randn(64, seed=75, scale=0.3)
    yield Sample((x, 6, False, "softmax", 8, 3, None, 16.0), id="deepseek_v2")
    yield Sample((x, 8, True, "sigmoid", 8, 4, bias, 2.5), id="deepseek_v3")
    yield Sample((x, 8, False, "sigmoid", 64, 8, bias), id="groups_of_one")
    yield Sample((x, 8, True, "sigmoid", 1, 1, bias, 2.5), id="one_group")
    yield Sample((x, 5, True, "sigmoid"), id="sigmoid")
    yield Sample((x, 5, True, "softmax", 4, 2, bias), id="softmax_bias")
    mixer = ("sparsemixer", 0, 0, None)
    yield Sample((x, 2, False, *mixer, 1.0, 0.01), id="phimoe")
    yield Sample((x, 5, True, *mixer, 2.5, 0.2), id="sparsemixer_5")
    yield Sample((x.abs(), 64, False, *mixer, 1.0, 5.0), id="sparsemixer_all")
    yield Sample((x, 64, True), id="all_experts")
    yield Sample((x, 64, True, "sigmoid", 4, 4, bias), id="all_experts_groups")
    yield Sample((torch.zeros(3, 40, dtype=dtype), 7, True), id="ties")
    yield Sample((torch.zeros(3, 40, dtype=dtype), 7, True, "sigmoid", 5, 2), id="ties_groups")
    yield Sample((randn(4, 1, dtype=dtype, seed=76), 1, True), id="one_expert")
    yield Sample((strided(x), 6, True), id="noncontiguous")
    yield Sample((randn(9, 96, dtype=dtype, seed=77)[:, 8:72], 6, True), id="rows_strided")
    yield Sample((randn(0, 16, dtype=dtype), 2, True), id="no_tokens")
    special = randn(6, 32, dtype=dtype, seed=78)
    special[0, 3] = float("nan")
    special[1, 5] = float("inf")
    special[2, 7] = -float("inf")
    special[3] = -float("inf")
    special[4, 1:] = -float("inf")
    yield Sample((special, 4, True), id="special_values")
    yield Sample(
        (special, 4, True, "sigmoid", 8, 2, randn(32, seed=79)), id="special_values_sigmoid"
    )
    yield Sample((special, 4, False, "sigmoid", 8, 2), id="special_values_groups")


def _stock(
    router_logits: Tensor,
    top_k: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    num_expert_group: int = 0,
    topk_group: int = 0,
    e_score_correction_bias: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    jitter: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """What a model of the Hugging Face library does."""
    if scoring_func == "sparsemixer":
        weights, ids = _sparsemixer(router_logits.float(), top_k, jitter)
        return weights * routed_scaling_factor, ids.to(torch.int32)
    if scoring_func == "softmax":
        scores = torch.softmax(router_logits, -1, dtype=torch.float32)
    else:
        scores = router_logits.float().sigmoid()
    choice = scores
    if e_score_correction_bias is not None:
        choice = scores + e_score_correction_bias
    if num_expert_group > 1:
        size = choice.shape[1] // num_expert_group
        grouped = choice.view(-1, num_expert_group, size)
        if e_score_correction_bias is not None:
            group_scores = grouped.topk(2, dim=-1)[0].sum(-1)
        else:
            group_scores = grouped.max(-1).values
        groups = group_scores.topk(topk_group, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(group_scores).scatter_(1, groups, 1)
        mask = mask.unsqueeze(-1).expand_as(grouped).reshape(choice.shape)
        choice = choice.masked_fill(~mask.bool(), -float("inf"))
    ids = choice.topk(top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routed_scaling_factor, ids.to(torch.int32)


def _bench() -> Iterator[BenchCase]:
    for tokens in (1, 512):
        for name, experts, arguments in (
            ("mixtral", 8, (2, True)),
            ("qwen3", 128, (8, True)),
            ("deepseek_v3", 256, (8, True, "sigmoid", 8, 4, randn(256, seed=1), 2.5)),
        ):
            top_k = arguments[0]
            assert isinstance(top_k, int)
            yield BenchCase(
                f"{name}-{tokens}x{experts}",
                lambda dtype, t=tokens, e=experts, a=arguments: (randn(t, e, dtype=dtype), *a),
                lambda dtype, t=tokens, e=experts, k=top_k: t * (e * dtype.itemsize + 8 * k),
            )


register_op(
    reference=_moe_routing,
    check=_check,
    fake=_fake,
    samples=_samples,
    stock=_stock,
    tolerance={torch.float32: (1e-5, 1e-6)},
    # Which scores are equal depends on the type they are computed in.
    lift=False,
    bench=_bench,
    summary="Experts of each token and their weights: softmax, sigmoid or sparsemixer, groups, bias",
)


# --- packing of the weights -------------------------------------------------------------------------------------------


def check_experts(
    op: str,
    name: str,
    packed: Tensor,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    gated: bool,
) -> None:
    """Check that a tensor has the shape of packed ``[E, out_features, in_features]`` weights."""
    size = _experts.packed_shape(1, out_features, in_features, dtype, gated)[1]
    check(
        packed.dtype == torch.uint8
        and packed.dim() == 2
        and packed.shape[0] > 0
        and packed.shape[1] == size
        and packed.is_contiguous(),
        op,
        name,
        f"be {dtype_name(dtype)} weights of shape [E, {out_features}, {in_features}] packed by"
        f" pack_moe_weight (E rows of {size} bytes)",
        bytes_text(packed),
    )


def has_data(tensor: Tensor) -> bool:
    """Return whether the values can be looked at: not in a trace."""
    return type(tensor) is torch.Tensor and not tensor.is_meta


def is_quantized(packed: Tensor) -> bool:
    """Return whether a tensor with data holds packed quantized experts."""
    if packed.dim() != 2 or packed.dtype != torch.uint8 or packed.shape[0] == 0:
        return False
    return packed.shape[1] >= 64 and woq.FORMATS.get(_format_name(packed)) is not None


def _format_name(packed: Tensor) -> str:
    header = read_header(packed[0])
    names = {number: name for name, number in woq.FORMATS.items()}
    return "" if header is None else names.get(header[0], "")


def check_quantized_expert(
    op: str, name: str, packed: Tensor, index: int, out_features: int, in_features: int, gated: bool
) -> woq.Layout:
    """Check expert ``index`` of packed quantized weights and return its layout."""
    rows = 2 * _experts.padded(out_features // 2) if gated else out_features
    good = packed.dtype == torch.uint8 and packed.dim() == 2 and packed.is_contiguous()
    good = good and packed.shape[0] > 0 and packed.shape[1] >= HEADER_BYTES
    layout = woq.read_layout(packed[index]) if good else None
    fits = layout is not None and (layout.n, layout.k, layout.order) == (rows, in_features, "dot")
    text = f"be quantized weights of shape [E, {out_features}, {in_features}] packed with order dot"
    check(fits, op, name, text, header_text(packed[index]) if good else bytes_text(packed))
    assert layout is not None
    return layout


def check_expert_header(
    op: str,
    name: str,
    packed: Tensor,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    gated: bool,
) -> None:
    """Check the header of one expert, ``packed`` being its row."""
    rows = 2 * _experts.padded(out_features // 2) if gated else out_features
    check(
        read_header(packed) == (FORMATS[dtype], rows, in_features),
        op,
        name,
        f"be {dtype_name(dtype)} weights of shape [E, {out_features}, {in_features}] packed by"
        " pack_moe_weight",
        header_text(packed),
    )


def plain_expert(
    op: str, name: str, packed: Tensor, index: int, n: int, k: int, dtype: torch.dtype, gated: bool
) -> Tensor:
    """Return the weight ``[n, k]`` of an expert; in float32, or float64 as ``dtype`` is, if it is quantized."""
    if is_quantized(packed):
        layout = check_quantized_expert(op, name, packed, index, n, k, gated)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        weight = woq.dequantize(packed[index], layout, wide)
        return _experts.deinterleave(weight[None], n // 2)[0] if gated else weight
    stored = dtype
    if dtype == torch.float64:  # a check in higher precision: the dtype that the weight has
        header = read_header(packed[index])
        assert header is not None
        stored = next(d for d, f in FORMATS.items() if f == header[0])
    check_expert_header(op, name, packed[index], n, k, stored, gated)
    return _experts.unpack(packed[index : index + 1], n, k, stored, gated)[0]


def _pack_moe_weight(weight: Tensor, gated: bool = False) -> Tensor:
    """Pack the weights of all experts for `fused_experts`.

    Args:
        weight: ``[E, N, K]``, float32, bfloat16 or float16: the same linear layer of E experts.
        gated: Whether the rows are two halves, N = 2 I: first the gate, then the up projection. They are interleaved
            in blocks of 32, so that one pass gives both values of a feature.

    Returns:
        A uint8 tensor ``[E, bytes]``; row e is expert e in the format of `pack_linear_weight`.
        `unpack_moe_weight` gives the weights back exactly.
    """
    return _experts.pack(weight, gated)


def _check_shape(op: str, gated: bool, out_features: int, name: str) -> None:
    check(not gated or out_features % 2 == 0, op, name, "be even if gated", out_features)


def _pack_check(a: Arguments) -> None:
    check_tensor(a.op, "weight", a.weight)
    fits = a.weight.dim() == 3 and 0 not in a.weight.shape
    a.require(fits, "weight", "be 3-D and not empty", list(a.weight.shape))
    _check_shape(a.op, a.gated, a.weight.shape[1], "weight.shape[1]")


def _pack_fake(a: Arguments) -> Tensor:
    experts, n, k = a.weight.shape
    return a.weight.new_empty(
        _experts.packed_shape(experts, n, k, a.weight.dtype, a.gated), dtype=torch.uint8
    )


def _weights(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, bool]]:
    yield "1x1x1", randn(1, 1, 1, dtype=dtype, seed=61), False
    yield "3x33x65", randn(3, 33, 65, dtype=dtype, seed=61), False
    yield "gated_2x64x16", randn(2, 64, 16, dtype=dtype, seed=62), True
    yield "gated_2x128x33", randn(2, 128, 33, dtype=dtype, seed=62), True
    yield "gated_padded", randn(5, 2 * 41, 7, dtype=dtype, seed=63), True
    yield "transposed", randn(3, 24, 40, dtype=dtype, seed=64).transpose(1, 2), True
    special = randn(2, 4, 5, dtype=dtype, seed=65)
    special[0, 0, 0], special[1, 1, 1], special[1, 2, 2] = float("nan"), float("inf"), -0.0
    yield "special_values", special, True


def _pack_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, weight, gated in _weights(dtype):
        yield Sample((weight, gated), id=name)


def _unpack_moe_weight(
    packed: Tensor, out_features: int, in_features: int, dtype: torch.dtype, gated: bool = False
) -> Tensor:
    """Return the plain weights of packed experts, bit for bit.

    Args:
        packed: Result of `pack_moe_weight`.
        out_features: The number of output features, N.
        in_features: The number of input features, K.
        dtype: The dtype of the weights that were packed.
        gated: As given to `pack_moe_weight`.

    Returns:
        A contiguous ``[E, N, K]`` tensor.
    """
    for one in packed:
        check_expert_header(
            "unpack_moe_weight", "packed", one, out_features, in_features, dtype, gated
        )
    return _experts.unpack(packed, out_features, in_features, dtype, gated)


def _unpack_check(a: Arguments) -> None:
    a.require(a.dtype in FLOATS, "dtype", "be float32, bfloat16 or float16", dtype_name(a.dtype))
    a.require(a.out_features > 0, "out_features", "be positive")
    a.require(a.in_features > 0, "in_features", "be positive")
    _check_shape(a.op, a.gated, a.out_features, "out_features")
    check_experts(a.op, "packed", a.packed, a.out_features, a.in_features, a.dtype, a.gated)


def _unpack_fake(a: Arguments) -> Tensor:
    return a.packed.new_empty(a.packed.shape[0], a.out_features, a.in_features, dtype=a.dtype)


def _unpack_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, weight, gated in _weights(dtype):
        packed = _experts.pack(weight, gated)
        yield Sample((packed, *weight.shape[1:], dtype, gated), id=name)


def _pack_moe_stack(packed: list[Tensor]) -> Tensor:
    """Put the packed weights of single experts together, for `fused_experts`.

    Args:
        packed: E results of `pack_woq_weight` (or of `pack_linear_weight`) of one size.

    Returns:
        A uint8 tensor ``[E, bytes]`` in memory that is fast to read.
    """
    return torch.stack(packed)


def _stack_check(a: Arguments) -> None:
    a.require(len(a.packed) > 0, "packed", "hold at least one tensor", len(a.packed))
    for one in a.packed:
        same = one.dtype == torch.uint8 and one.dim() == 1 and one.shape == a.packed[0].shape
        fits = same and one.shape[0] > 0
        text = "hold packed weights of one size"
        a.require(fits, "packed", text, f"{dtype_name(one.dtype)} {list(one.shape)}")


def _stack_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for count, size in ((1, 64), (3, 128), (5, 1 << 15), (2, 100)):
        parts = [(torch.arange(size) * (i + 3) % 251).to(torch.uint8) for i in range(count)]
        yield Sample((parts,), id=f"{count}x{size}")


register_op(
    reference=_pack_moe_stack,
    check=_stack_check,
    fake=lambda a: a.packed[0].new_empty(len(a.packed), a.packed[0].shape[0]),
    samples=_stack_samples,
    backward=None,
    lift=False,
    summary="Put the packed weights of single experts together for `fused_experts`",
)
register_op(
    reference=_pack_moe_weight,
    check=_pack_check,
    fake=_pack_fake,
    samples=_pack_samples,
    backward=None,
    lift=False,
    summary="Pack the weights of all experts for `fused_experts`",
)
register_op(
    reference=_unpack_moe_weight,
    check=_unpack_check,
    fake=_unpack_fake,
    samples=_unpack_samples,
    backward=None,
    lift=False,
    summary="Give back the weights of packed experts, bit for bit",
)
