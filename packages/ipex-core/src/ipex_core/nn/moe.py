# SPDX-License-Identifier: Apache-2.0
"""A gated mixture of experts in two calls: pack the weights once, then route and compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ipex_core.packing.experts import interleave


@dataclasses.dataclass(frozen=True, slots=True)
class PackedExperts:
    """Packed weights of E gated MLPs; made by `pack_experts`.

    Attributes:
        w13: Gate and up projections.
        w2: Down projections.
        intermediate_size: Features between the two.
        w13_bias: ``[E, 2 I]`` or None.
        w2_bias: ``[E, H]`` or None.
    """

    w13: Tensor
    w2: Tensor
    intermediate_size: int
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None


def pack_experts(
    w13: Tensor,
    w2: Tensor,
    w3: Tensor | None = None,
    *,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> PackedExperts:
    """Pack the weights of all experts.

    Args:
        w13: ``[E, 2 I, H]``, gate rows first; or, with ``w3``, only the gates, ``[E, I, H]``.
        w2: ``[E, H, I]``.
        w3: The up projections ``[E, I, H]``, where they are separate.
        w13_bias: ``[E, 2 I]`` or None.
        w2_bias: ``[E, H]`` or None.

    Raises:
        ValueError: The shapes do not belong together.
    """
    if w3 is not None:
        if w3.shape != w13.shape:
            raise ValueError(
                f"pack_experts: w3 must have the shape of w13 = {list(w13.shape)},"
                f" got {list(w3.shape)}"
            )
        w13 = torch.cat([w13, w3], dim=1)
    shape = [w13.shape[0], w13.shape[-1], w13.shape[1] // 2] if w13.dim() == 3 else []
    if list(w2.shape) != shape:
        raise ValueError(
            f"pack_experts: w2 must have shape [E, H, I] = {shape} for w13 of shape"
            f" {list(w13.shape)}, got {list(w2.shape)}"
        )
    return PackedExperts(
        torch.ops.ipex.pack_moe_weight(w13.detach(), True),
        torch.ops.ipex.pack_moe_weight(w2.detach(), False),
        w2.shape[2],
        w13_bias,
        w2_bias,
    )


def pack_woq_experts(
    qweights: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    zeros: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    format: str,
    in_features: tuple[int, int],
    group_size: int = -1,
) -> PackedExperts:
    """Pack the quantized weights of all experts. Each pair belongs to ``w13`` and ``w2``.

    Args:
        qweights: Codes ``[E, 2 I, ...]``, gate rows first, and ``[E, H, ...]``, as `pack_woq_weight` takes them.
        scales: ``[E, N, G]``; for fp8 also one for each block of 128 x 128, ``[E, ceil(N / 128), ceil(K / 128)]``.
        zeros: ``[E, N, G]`` or None.
        format: See `pack_woq_weight`. MXFP4 is ``"fp4"`` with groups of 32 and e8m0 scales.
        in_features: H and I.
        group_size: Elements of K that share a scale.
    """
    packed = []
    for part in (0, 1):
        codes, scale, zero = qweights[part], scales[part], zeros[part]
        rows = codes.shape[1]
        if part == 0:
            if scale.shape[1] != rows:  # blocks of 128 rows do not survive the interleaving
                scale = scale.repeat_interleave(128, dim=1)[:, :rows]
            codes, scale = _interleave(codes), _interleave(scale)
            zero = None if zero is None else _interleave(zero)
        packed.append(
            torch.ops.ipex.pack_moe_stack(
                [
                    torch.ops.ipex.pack_woq_weight(
                        codes[e],
                        scale[e],
                        None if zero is None else zero[e],
                        format,
                        in_features[part],
                        group_size,
                    )
                    for e in range(codes.shape[0])
                ]
            )
        )
    return PackedExperts(packed[0], packed[1], in_features[1])


def _interleave(values: Tensor) -> Tensor:
    """Interleave rows of any dtype; padded rows get zeros."""
    if values.dtype.itemsize == 1:  # torch cannot move every 8-bit float
        return interleave(values.contiguous().view(torch.uint8)).view(values.dtype)
    return interleave(values)


def gated_mlp_moe(
    hidden_states: Tensor,
    experts: PackedExperts,
    router_logits: Tensor,
    top_k: int,
    renormalize: bool,
    *,
    use_grouped_topk: bool = False,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    custom_routing_function: Callable[..., tuple[Tensor, Tensor]] | None = None,
    scoring_func: str = "softmax",
    e_score_correction_bias: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    activation: str = "silu",
    shared: PackedExperts | None = None,
    shared_weights: Tensor | None = None,
    experts_start_id: int = 0,
    lowp_mode: str = "none",
) -> Tensor:
    """Route each token and sum the results of its experts.

    Args:
        hidden_states: ``[..., H]``.
        experts: Result of `pack_experts`.
        router_logits: ``[T, number of all experts]``, T being the number of tokens of ``hidden_states``.
        top_k: Experts per token.
        renormalize: Whether the weights of a token are made to sum to 1.
        use_grouped_topk: Whether the groups count; see `moe_routing`.
        num_expert_group: Number of groups.
        topk_group: Number of groups that a token's experts come from.
        custom_routing_function: Called as ``f(hidden_states=, gating_output=, topk=, renormalize=)`` instead of
            `moe_routing`; returns weights and ids.
        scoring_func: ``"softmax"`` or ``"sigmoid"``.
        e_score_correction_bias: Added to the scores for the choice only.
        routed_scaling_factor: Factor on the weights.
        activation: Of the gate; see `fused_experts`.
        shared: One more expert (E = 1) that every token goes to.
        shared_weights: ``[T]``, factors on its result.
        experts_start_id: Id of the first expert in ``experts``; the others are skipped.
        lowp_mode: Of quantized weights; see `fused_experts`.

    Returns:
        A tensor like ``hidden_states``.
    """
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    if custom_routing_function is not None:
        weights, ids = custom_routing_function(
            hidden_states=x, gating_output=router_logits, topk=top_k, renormalize=renormalize
        )
    else:
        bias = e_score_correction_bias
        if bias is not None:
            bias = bias.float()  # it may have been cast with the model
        weights, ids = torch.ops.ipex.moe_routing(
            router_logits,
            top_k,
            renormalize,
            scoring_func,
            (num_expert_group or 0) if use_grouped_topk else 0,
            (topk_group or 0) if use_grouped_topk else 0,
            bias,
            routed_scaling_factor,
        )
    y: Tensor = torch.ops.ipex.fused_experts(
        x,
        experts.w13,
        experts.w2,
        weights,
        ids,
        experts.intermediate_size,
        activation,
        experts.w13_bias,
        experts.w2_bias,
        None if shared is None else shared.w13,
        None if shared is None else shared.w2,
        shared_weights,
        0 if shared is None else shared.intermediate_size,
        experts_start_id,
        router_logits.shape[-1],
        lowp_mode=lowp_mode,
    )
    return y.view(hidden_states.shape)
