# SPDX-License-Identifier: Apache-2.0
"""Second names of the ops of mixtures of experts: routing, and experts with plain, packed or quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ipex.compat.torch_ops import alias_op, python_op
from ipex.compat.torch_ops.woq import PackedLinear, lowp_name
from ipex_core.errors import OpArgumentError
from ipex_core.packing.dense import read_header

_OPS = torch.ops.ipex
_linear = torch.nn.functional.linear


@alias_op("deepseek_moegate")
def _deepseek_moegate(
    hidden_states: Tensor,
    scores: Tensor,
    routed_scaling_factor: Tensor,
    n_group: int,
    topk_group: int,
    n_routed_experts: int,
    top_k: int,
    e_score_cbias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token and their weights, ``[tokens, top_k]`` both.

    ``scores`` are ``[tokens, n_routed_experts]``, after the softmax or sigmoid. With a bias (DeepSeek-V3) the experts
    are chosen by score + bias, groups by the sum of their two best, and the weights are the plain scores, not
    scaled; without, groups by their best, and the weights are scaled.
    """
    if scores.shape[-1] != n_routed_experts or n_routed_experts % n_group:
        raise OpArgumentError(
            f"deepseek_moegate: scores must be [tokens, n_routed_experts = {n_routed_experts}], a"
            f" multiple of n_group = {n_group}, got {list(scores.shape)}"
        )
    choice = scores if e_score_cbias is None else scores.float() + e_score_cbias.float()
    grouped = choice.unflatten(-1, (n_group, -1))
    if e_score_cbias is None:
        group_scores = grouped.amax(-1)
    else:
        group_scores = grouped.topk(2, -1).values.sum(-1)
    groups = group_scores.topk(topk_group, -1, sorted=False).indices
    chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, groups, True)
    choice = grouped.masked_fill(~chosen.unsqueeze(-1), 0.0).flatten(-2)
    if e_score_cbias is None:
        choice = choice * routed_scaling_factor.to(scores.dtype)
    best = choice.topk(top_k, -1, sorted=False)
    weights = best.values if e_score_cbias is None else scores.gather(-1, best.indices)
    return best.indices, weights.to(hidden_states.dtype)


@alias_op("grouped_topk")
def _grouped_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    e_score_correction_bias: Tensor,
    routed_scaling_factor: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, int32, and their weights, float32: ``moe_routing`` as DeepSeek-V3 has it."""
    if hidden_states.shape[0] != gating_output.shape[0]:
        raise OpArgumentError(
            f"grouped_topk: gating_output must have the {hidden_states.shape[0]} tokens of hidden_states, got"
            f" {gating_output.shape[0]}"
        )
    weights, ids = _OPS.moe_routing(
        gating_output,
        topk,
        renormalize,
        "sigmoid",
        num_expert_group,
        topk_group,
        e_score_correction_bias.reshape(-1).float(),
        float(routed_scaling_factor),
    )
    return ids, weights


@alias_op("moe_gate_bmm_forward")
def _moe_gate_bmm_forward(
    mat1: Tensor, mat2: Tensor, is_vnni: bool, topk: int, scale: Tensor | None
) -> Tensor:
    """Return ``mat1 @ mat2[0].T``, the logits ``[tokens, experts]`` of a router ``mat2``, ``[1, experts, size]``.

    ``topk`` is the number of experts. ``scale`` is not read, as in IPEX.
    """
    if mat2.dim() != 3 or mat2.shape[:2] != (1, topk):
        raise OpArgumentError(
            f"moe_gate_bmm_forward: mat2 must be [1, topk = {topk}, size], plain or from convert_weight_packed, got"
            f" {list(mat2.shape)}"
        )
    return _linear(mat1, mat2[0])


@alias_op("convert_weight_packed(Tensor(a) weight, bool use_tuned_block_n) -> Tensor(a)")
def _convert_weight_packed(weight: Tensor, use_tuned_block_n: bool) -> Tensor:
    """Return ``weight [B, N, K]`` itself: the ops that take the result have plain products."""
    if weight.dim() != 3:
        raise OpArgumentError(
            f"convert_weight_packed: weight must be 3-D [B, N, K], got {list(weight.shape)}"
        )
    return weight


@alias_op("convert_weight_packed_moe_bf16")
def _convert_weight_packed_moe_bf16(weight1: Tensor, weight2: Tensor) -> tuple[Tensor, Tensor]:
    """Pack ``[E, 2 I, H]``, gate rows first, and ``[E, H, I]`` for ``fused_experts``; any floating dtype."""
    return _OPS.pack_moe_weight(weight1, True), _OPS.pack_moe_weight(weight2)


def _each_expert(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: int,
    mlp: Callable[[int, Tensor], Tensor],
    is_distributed: bool,
) -> Tensor:
    """Add up what ``mlp`` of each expert gives for its tokens, in float32, and over all processes if asked."""
    total = torch.zeros_like(hidden_states, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        if not 0 <= expert < experts:  # another process's, or none
            continue
        tokens, slots = torch.where(topk_ids == expert)
        y = mlp(expert, hidden_states[tokens]) * topk_weights[tokens, slots].unsqueeze(1)
        total.index_add_(0, tokens, y.float())
    return _summed(total.to(hidden_states.dtype), is_distributed)


def _summed(output: Tensor, is_distributed: bool) -> Tensor:
    if is_distributed:
        torch.distributed.all_reduce(output)
    return output


_EXPERTS = (
    "(Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids,"
    " bool inplace, bool is_vnni, bool is_distributed, bool is_woq, int woq_weight_dtype,"
    " int woq_group_size, int woq_lowp_mode, Tensor? w1_scale, Tensor? w1_zp,"
    " Tensor? w1_compensation, Tensor? w2_scale, Tensor? w2_zp, Tensor? w2_compensation) -> Tensor"
)


@alias_op(f"fused_experts{_EXPERTS}")
def _fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    inplace: bool,
    is_vnni: bool,
    is_distributed: bool,
    is_woq: bool,
    woq_weight_dtype: int,
    woq_group_size: int,
    woq_lowp_mode: int,
    *parameters: Tensor | None,
) -> Tensor:
    """Return the weighted sum of the gated MLPs of each token's experts, like ``hidden_states``, ``[tokens, H]``.

    ``w1`` and ``w2`` are ``[E, 2 I, H]``, gate rows first, and ``[E, H, I]``, packed by
    ``convert_weight_packed_moe_bf16`` or, with ``is_vnni`` False, plain; or, with ``is_woq``, E weights of
    ``weight_only_qlinear_prepack`` put together, which hold their scales and zero points. ``hidden_states`` is not
    overwritten, whatever ``inplace`` says.
    """
    if is_woq:
        mode = lowp_name("fused_experts", woq_lowp_mode)

        def mlp(expert: int, x: Tensor) -> Tensor:
            gate, up = PackedLinear(w1[expert], None, mode)(x).chunk(2, -1)
            return PackedLinear(w2[expert], None, mode)(torch.nn.functional.silu(gate) * up)

        return _each_expert(hidden_states, topk_ids, topk_weights, w1.shape[0], mlp, is_distributed)
    if not is_vnni:
        w1, w2 = _convert_weight_packed_moe_bf16(w1, w2)
    header = read_header(w2[0]) if w2.dim() == 2 else None
    if header is None:
        raise OpArgumentError(
            "fused_experts: w2 must be packed by convert_weight_packed_moe_bf16 where is_vnni is True, got"
            f" {w2.dtype} {list(w2.shape)}"
        )
    output = _OPS.fused_experts(hidden_states, w1, w2, topk_weights, topk_ids, header[2])
    return _summed(output, is_distributed)


@alias_op(f"fused_experts_with_shared{_EXPERTS}")
def _fused_experts_with_shared(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *rest: bool,
) -> Tensor:
    """Do as ``fused_experts``, and let every token go to the last expert too, with weight 1."""
    one = topk_weights.new_ones(topk_weights.shape[0], 1)
    last = topk_ids.new_full((topk_ids.shape[0], 1), w1.shape[0] - 1)
    weights, ids = torch.cat((topk_weights, one), 1), torch.cat((topk_ids, last), 1)
    return _fused_experts(hidden_states, w1, w2, weights, ids, *rest)  # type: ignore[arg-type]


@alias_op("deepseek_moe_tpp")
def _deepseek_moe_tpp(
    hidden_states: Tensor,
    topk_ids: Tensor,
    gate_wei: list[Tensor],
    up_wei: list[Tensor],
    down_wei: list[Tensor],
    tpp_fallback: bool,
    routing_weights: Tensor,
    is_distributed: bool,
) -> Tensor:
    """Return the weighted sum of the gated MLPs of each token's experts, like ``hidden_states``, ``[tokens, size]``.

    ``topk_ids`` and ``routing_weights`` are ``[tokens, top_k]``; the weights of the experts are as in
    `torch.nn.Linear`, whatever ``tpp_fallback`` says. With ``is_distributed`` the results of all processes are added.
    """

    def mlp(expert: int, x: Tensor) -> Tensor:
        gate = torch.nn.functional.silu(_linear(x, gate_wei[expert]))
        return _linear(gate * _linear(x, up_wei[expert]), down_wei[expert])

    return _each_expert(
        hidden_states, topk_ids, routing_weights, len(gate_wei), mlp, is_distributed
    )


def _deepseek_moe(
    hidden_states: Tensor,
    topk_ids: Tensor,
    gate_wei: list[Tensor],
    gate_op_ctx: Sequence[object],
    up_wei: list[Tensor],
    up_op_ctx: Sequence[object],
    down_wei: list[Tensor],
    down_op_ctx: Sequence[object],
    routing_weights: Tensor,
    is_distributed: bool,
) -> Tensor:
    """Do as ``deepseek_moe_tpp``; the objects of packed layers, ``*_op_ctx``, are not read: weights are plain."""
    return _deepseek_moe_tpp(
        *(hidden_states, topk_ids, gate_wei, up_wei, down_wei, False),
        *(routing_weights, is_distributed),
    )


for _name in ("deepseek_moe", "deepseek_moe_mkl"):
    python_op("torch_ipex", _name)(_deepseek_moe)


@python_op("torch_ipex")
def deepseek_moe_woq(
    hidden_states: Tensor,
    topk_ids: Tensor,
    gate_ctx: Sequence[PackedLinear],
    up_ctx: Sequence[PackedLinear],
    down_ctx: Sequence[PackedLinear],
    routing_weights: Tensor,
    is_distributed: bool,
) -> Tensor:
    """Do as ``deepseek_moe_tpp`` with results of ``weight_only_qlinear_prepack`` as weights."""

    def mlp(expert: int, x: Tensor) -> Tensor:
        gate = torch.nn.functional.silu(gate_ctx[expert](x))
        return down_ctx[expert](gate * up_ctx[expert](x))

    return _each_expert(
        hidden_states, topk_ids, routing_weights, len(gate_ctx), mlp, is_distributed
    )
