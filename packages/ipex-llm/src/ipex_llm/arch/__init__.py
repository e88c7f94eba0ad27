# SPDX-License-Identifier: Apache-2.0
"""The structure of a decoder, as far as running it needs to know: what `ipex_llm.arch.detect` finds in a model.

A plan names modules and not tensors, so it is made before weights are packed and stays valid after. Everything that
differs between the families of models is a value here; nothing that runs a plan asks for the name of a model.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from ipex_llm.arch.parts import (
    ConnectionPlan,
    GatedConnectionPlan,
    LayerMeansPlan,
    LayerStreams,
    LinearPlan,
    MeansPlan,
    MessageGatePlan,
    MessagesPlan,
    NgramsPlan,
    NormPlan,
    SharedRowPlan,
    StreamEnds,
    StreamEndsPlan,
    StreamsPlan,
)

if TYPE_CHECKING:
    from ipex_llm.distributed.group import TensorParallel

__all__ = [
    "ApartPlan",
    "AttentionPlan",
    "CellPlan",
    "ConnectionPlan",
    "ConvPlan",
    "DecayPlan",
    "DecoderPlan",
    "DeltaPlan",
    "DifferencePlan",
    "ExpertNormsPlan",
    "ExpertsPlan",
    "GatedConnectionPlan",
    "HeadBlockPlan",
    "KeyBiasPlan",
    "LatentPlan",
    "LayerMeansPlan",
    "LayerPlan",
    "LayerStreams",
    "LinearPlan",
    "LowRankPlan",
    "LruPlan",
    "MeansPlan",
    "MessageGatePlan",
    "MessagesPlan",
    "MixerPlan",
    "MlpPlan",
    "NearPlan",
    "NgramsPlan",
    "NormPlan",
    "PicturePlan",
    "RopePlan",
    "ScanPlan",
    "SelectivePlan",
    "ShiftPlan",
    "SidePlan",
    "StreamEndsPlan",
    "StreamsPlan",
    "TemperaturePlan",
    "TokenBlockPlan",
    "TokenRowsPlan",
    "WkvPlan",
    "gated_norms",
    "linear_modules",
]

#: Activations by the names that the op ``linear`` takes; ``"gelu_quick"``, ``"relu2"`` and others have no fusion.
Activation = str


@dataclasses.dataclass(frozen=True, slots=True)
class RopePlan:
    """Rotary embedding; the tables come from `ipex_core.nn.rope.rope_tables`, or are given."""

    kind: str  # "default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"
    dim: int  # rotated elements of a head
    base: float
    scaling: dict[str, object] | None
    half: bool  # NeoX halves; False: interleaved pairs (GPT-J)
    max_position_embeddings: int
    #: Factor on cosines and sines beyond what the kind brings along.
    factor: float = 1.0
    turn: int = 1  # -1: the other way round (nanochat)

    def tables(self, positions: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each ``[positions, dim / 2]``, as the rotary ops take them."""
        from ipex_core.nn.rope import rope_tables

        cos, sin = rope_tables(
            self.kind,
            self.dim,
            positions,
            self.base,
            self.scaling,
            max_position_embeddings=self.max_position_embeddings,
        )
        return (cos * self.factor).to(dtype), (sin * (self.factor * self.turn)).to(dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class LatentPlan:
    """Keys and values of all heads from one latent row (multi-head latent attention).

    `AttentionPlan.qkv` gives the queries, or what they are made of; then the latent ``[rank]``; then the part of the
    keys that is the same for all heads, ``[common]``, and is rotated if anything is. The head of a query is
    ``[head_dim - common | common]``, and so is the head of a key: what `up` makes of the latent, and the common part.
    """

    up: nn.Module  # rows: of each head the key's without the common part, then the value's
    norm: NormPlan | None  # of the latent, before `up`
    rank: int
    value_dim: int
    common: int
    query: LinearPlan | None = None  # None: `qkv` gives the queries
    query_norm: NormPlan | None = None  # before `query`
    factor: float = 1.0  # on what `norm` gives (LongCat-Flash)
    common_norm: NormPlan | None = None  # of the common part, before it is rotated (dots3)
    #: `query` reads what `query_norm` gives and, behind that, what it reads; behind the queries it gives the gates of a
    #: gated attention, for each feature, which `qkv` has not (A.X K2).
    doubled: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class KeyBiasPlan:
    """A number for each key that is added to its scores, ``exp(rate * softplus(linear(values)))`` (Doge)."""

    linear: LinearPlan  # reads the values of all heads; rows: one for each key head
    module: nn.Module  # has the parameter `rate`, [kv_heads]
    rate: str


@dataclasses.dataclass(frozen=True, slots=True)
class DifferencePlan:
    """Attention of half of the heads less a multiple of the attention of the other half (DiffLlama).

    Each head attends twice, to the first half of the value heads and to the second, each of which stands for two heads,
    and what it gives is twice as wide. ``(1 - start) * norm(a - (exp(q1 . k1) - exp(q2 . k2) + start) * b)``.
    """

    module: nn.Module  # has the parameters `factors`, [head_dim] each
    factors: tuple[str, str, str, str]  # q1, k1, q2, k2
    start: float
    norm: NormPlan  # over 2 * head_dim

    @property
    def factor(self) -> float:
        """What the other half is multiplied with."""
        q1, k1, q2, k2 = (getattr(self.module, name).detach().float() for name in self.factors)
        return float((q1 * k1).sum().exp() - (q2 * k2).sum().exp()) + self.start


@dataclasses.dataclass(frozen=True, slots=True)
class NearPlan:
    """Numbers that are added to the scores of the last keys of each query (Inkling).

    The key `d` places before has the number `d` of ``rows @ weight``, times the factor of the query. `rows` are what
    `AttentionPlan.qkv` gives behind all else, ``[heads, rank]``.
    """

    module: nn.Module
    weight: str  # [rank, keys]
    norm: NormPlan | None = None  # of the rows

    @property
    def rows(self) -> Tensor:
        """The weight as ``[keys, rank]``; the last row is of the query's own key."""
        weight: Tensor = getattr(self.module, self.weight)
        return weight.detach().flip(1).t()


@dataclasses.dataclass(frozen=True, slots=True)
class ApartPlan:
    """Keys and values with projections of their own (Inkling 2).

    `AttentionPlan.qkv` gives queries, gates, the rows of `AttentionPlan.near` and sinks ``[heads]`` of each query. Each
    token may add to the taps of `AttentionPlan.convs`.
    """

    key: LinearPlan  # rows: all key heads; with `moving` what is added to the taps of each, ``[kv_heads, taps]``
    value: LinearPlan  # the same of values
    norms: (
        tuple[NormPlan, NormPlan] | None
    )  # before `key` and `value`; None: they read what `qkv` reads
    moving: bool  # the tap of the token itself is the first


@dataclasses.dataclass(frozen=True, slots=True)
class TemperaturePlan:
    """A factor on the queries of each position.

    It is ``1 + scale * log(1 + floor((position + shift) / unit))``, or ``(1 + (position + shift) / unit) ** scale``, or
    ``1 + scale * log(max((position + shift) / unit, 1))``.
    """

    scale: float
    unit: float
    shift: float  # 1 (Llama 4, Beam) or 0 (Ministral 3)
    power: bool = False  # the second one (Beam)
    smooth: bool = False  # the third one (Inkling)


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention of queries to cached keys and values."""

    qkv: (
        LinearPlan  # rows: all query heads, all key heads, all value heads; with `latent` see there
    )
    output: LinearPlan  # without modules where `experts` have it
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopePlan | None = None
    query_norm: NormPlan | None = None  # over head_dim, or over all heads if `norm_over` says so
    key_norm: NormPlan | None = None
    norm_over: Literal["head", "all"] = "head"
    norm_after_rope: bool = False
    alibi_slopes: Tensor | None = None  # float32 [heads]
    window: int = -1  # keys visible to the left, the own one not counted; -1: all
    softcap: float = -1.0
    sinks: Tensor | None = None  # [heads]
    clip_qkv: float | None = None
    temperature: TemperaturePlan | None = None
    query_factors: Tensor | None = None  # float32 [heads, head_dim], behind the rotation (Dory)
    latent: LatentPlan | None = None  # `kv_heads` is 1 then
    #: `qkv` gives gates behind all else, for each feature of what is attended, or one for each head (LFM3, Ling 3);
    #: `opening` of them multiplies what is attended.
    gated: Literal["", "features", "heads"] = ""
    opening: Literal["sigmoid", "softplus"] = "sigmoid"
    #: Module and name of a parameter ``[heads]`` that is added to the gates of a head (Beam).
    gate_bias: tuple[nn.Module, str] | None = None
    value_norm: NormPlan | None = None  # over head_dim
    #: `qkv` gives no rows of values: they are the keys before norm and rotation (Gemma 4).
    keys_as_values: bool = False
    #: Index of the layer whose cached keys and values are read; `qkv` gives queries alone then (Gemma 4). The norms of
    #: keys and values, and `keys_as_values`, are then of that layer.
    source: int | None = None
    output_norm: NormPlan | None = None  # of what is attended, over all heads (BitNet)
    #: Width of values if it is less than `head_dim` (MiMo V2); `qkv` gives rows as wide as keys, the rest are copies.
    value_dim: int | None = None
    key_bias: KeyBiasPlan | None = None
    difference: DifferencePlan | None = None
    near: NearPlan | None = None
    #: Short convolutions of keys and of values, added to what they read (Inkling), and a factor on the sum.
    convs: tuple[nn.Module, ...] = ()
    conv_scale: float = 1.0
    apart: ApartPlan | None = None
    #: Experts without an activation that give queries, `gate_up` ``[E, kv_heads * head_dim, hidden]``, and read what
    #: these attend to, `down`; `qkv` gives keys and values alone. A key head has a query of each expert (JetMoE).
    experts: ExpertsPlan | None = None
    shared: SharedRowPlan | None = None

    @property
    def ropes(self) -> tuple[RopePlan, ...]:
        """The rotation of queries and keys, and the one of what heads attend to."""
        own = () if self.rope is None else (self.rope,)
        return own + tuple(dataclasses.replace(r, turn=-r.turn) for r in own if self.shared)

    @property
    def windows(self) -> tuple[int, int, int] | None:
        """Tokens of a window, the rows that the cache has of a token, and `window`; None without rows of windows."""
        plan = self.shared and self.shared.windows
        if not plan:
            return None
        return plan.rate, 2 + 2 * len(plan.biases(self.head_dim)) // plan.rate, self.window

    @property
    def value_width(self) -> int:
        """Features of what a head attends to."""
        if self.latent is not None:
            return self.latent.value_dim
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def gates(self) -> int:
        """How many rows of `qkv` are gates."""
        if self.latent is not None and self.latent.doubled:
            return 0
        return self.heads * {"": 0, "heads": 1, "features": self.value_width}[self.gated]


@dataclasses.dataclass(frozen=True, slots=True)
class ConvPlan:
    """A short convolution between two gates: ``output(c * conv(b * x))`` (LFM2)."""

    input: LinearPlan  # rows: b, c, x
    output: LinearPlan
    conv: nn.Module  # depthwise, looking back only

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return int(self.conv.weight.shape[0])  # type: ignore[arg-type, union-attr, index]

    @property
    def taps(self) -> int:
        """Width of the filter."""
        return int(self.conv.weight.shape[-1])  # type: ignore[arg-type, union-attr, index]


@dataclasses.dataclass(frozen=True, slots=True)
class DeltaPlan(ConvPlan):
    """A gated delta net: a convolution with silu, the gated delta rule, a norm of each head and a gate.

    Heads of queries and keys are shared by ``heads / groups`` heads of values. See the op ``gated_delta_rule``.
    """

    module: nn.Module  # has A_log and dt_bias
    norm: NormPlan  # over `value_dim`; what it gives is multiplied with `opening` of z
    groups: int
    heads: int
    key_dim: int
    value_dim: int
    strength: float = 1.0  # factor on sigmoid(b); 2 allows negative eigenvalues (OLMo hybrid)
    each: bool = False  # a has a step for each key (Kimi delta attention)
    opening: Literal["silu", "sigmoid"] = "silu"
    lowest: float = 0.0  # below zero: logarithms of decays are this times a sigmoid (Ling 3)
    #: What z and a are made of, if `input` gives rows of low rank in their places, and the rank (Kimi Linear).
    up: tuple[LinearPlan, LinearPlan] | None = None
    rank: int = 0
    # rows of `input`: q, k, v, z, b, a

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Rows of `input`: q, k and v; z; b; a."""
        values = self.heads * self.value_dim
        steps = self.heads * (self.key_dim if self.each else 1)
        first = 2 * self.groups * self.key_dim + values
        return first, self.rank or values, self.heads, self.rank or steps


@dataclasses.dataclass(frozen=True, slots=True)
class ScanPlan(ConvPlan):
    """Mamba-2: a convolution with silu, the scan, a gate and a norm. See the op ``ssd_scan``."""

    module: nn.Module  # has A_log, D and dt_bias
    norm: NormPlan | None  # of ``y * silu(gate)``
    norm_groups: int  # parts of a row that the norm divides by lengths of their own
    groups: int
    heads: int
    head_dim: int
    state_dim: int
    #: Steps of several tokens at once are kept within these; a single new token of a text is not (as in the models).
    limits: tuple[float, float] | None = None
    # rows of `input`: gate, x, B, C, dt


@dataclasses.dataclass(frozen=True, slots=True)
class SelectivePlan(ConvPlan):
    """Mamba: a convolution with silu, the selective scan and a gate. See the op ``selective_scan_varlen``."""

    module: nn.Module  # has A_log and D
    middle: LinearPlan  # reads what the convolution gives; rows: what steps are made of, B, C
    step: LinearPlan  # to the steps of all channels; its bias is added in float32
    rank: int  # features of what steps are made of
    state_dim: int
    step_norm: NormPlan | None = None  # before `step` (Jamba)
    key_norm: NormPlan | None = None  # of B
    query_norm: NormPlan | None = None  # of C
    # rows of `input`: x, gate


@dataclasses.dataclass(frozen=True, slots=True)
class LruPlan(ConvPlan):
    """A short convolution, a recurrence of each channel and a gate (RG-LRU of Griffin, RecurrentGemma).

    Two gates are made of what the convolution gives, by products for each block of channels. Token by token
    ``s = 8 * softplus(rate) * sigmoid(r)`` and ``h = exp(-s) * h + sqrt(1 - exp(-2 * s)) * sigmoid(i) * x``; at
    position 0 the root is one.
    """

    module: nn.Module  # has the parameters named below
    rate: str  # [channels]
    # Weight [blocks, width, width], in before out, and bias [blocks, width] of r.
    decay: tuple[str, str]
    entry: tuple[str, str]  # the same of i
    activation: Activation  # of the gate
    # rows of `input`: x, gate


@dataclasses.dataclass(frozen=True, slots=True)
class DecayPlan:
    """Linear attention whose heads forget at fixed rates, a norm of all heads and a gate (MiniMax).

    Token by token ``S = exp(-rate) * S + outer(k, v)`` and ``y = q @ S``: the op ``ssd_scan`` with steps of one.
    """

    input: LinearPlan  # rows: q, k, v, of all heads each; gate, of which there is a sigmoid
    output: LinearPlan
    rates: Tensor  # [heads], positive
    norm: NormPlan
    heads: int
    head_dim: int
    activation: Activation  # of q, k and v

    @property
    def width(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_dim


@dataclasses.dataclass(frozen=True, slots=True)
class CellPlan:
    """Linear attention whose heads have gates for what they forget and add, and a norm of each (mLSTM of xLSTM).

    Token by token ``S = sigmoid(f) * S + exp(i) * outer(k, v)`` and `n` likewise of k alone, with gates
    ``cap * tanh(gate / cap)``. With ``p = q / sqrt(key_dim)`` it is ``norm(p @ S / max(|p . n|, 1)) * sigmoid(o)``.
    """

    input: LinearPlan  # rows: q, k, v, o, i, f
    output: LinearPlan
    norm: NormPlan  # weights [heads, value_dim]
    heads: int
    key_dim: int
    value_dim: int
    cap: float  # at most 30, so that float32 has the exponentials

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows of `input`."""
        keys, values = self.heads * self.key_dim, self.heads * self.value_dim
        return keys, keys, values, values, self.heads, self.heads


@dataclasses.dataclass(frozen=True, slots=True)
class ShiftPlan:
    """A dense block that also reads the row of the token before (RWKV): ``sigmoid(gate(b)) * last(relu(first(a))^2)``.

    ``a`` and ``b`` are ``before + mix * (x - before)``, each with a mix of its own; at position 0 `before` is zero.
    """

    input: LinearPlan  # without modules: there are several, which read different rows
    output: LinearPlan  # without modules: what comes out is a product
    module: nn.Module  # has the parameters `mixes`, [hidden]
    mixes: tuple[str, ...]  # of `first` and `gate`
    first: LinearPlan
    gate: LinearPlan
    last: LinearPlan


@dataclasses.dataclass(frozen=True, slots=True)
class WkvPlan:
    """Means of the values so far, whose weights fade, times a gate (RWKV). See the op ``wkv_scan``.

    Keys, values and gates are made of the row of a token and the one before, as in `ShiftPlan`.
    """

    input: LinearPlan  # without modules
    output: LinearPlan
    module: nn.Module  # has the parameters named below
    mixes: tuple[str, ...]  # [hidden], of `key`, `value` and `gate`
    key: LinearPlan
    value: LinearPlan
    gate: LinearPlan
    channels: int
    decay: str  # [channels]: logarithms of what is taken from exponents for each token
    first: str  # [channels]


#: A block that keeps a state of fixed size instead of keys and values; `ConvPlan` has more kinds.
MixerPlan = ConvPlan | DecayPlan | CellPlan | ShiftPlan | WkvPlan


@dataclasses.dataclass(frozen=True, slots=True)
class MlpPlan:
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without a gate."""

    gate: LinearPlan | None
    up: LinearPlan
    down: LinearPlan
    activation: Activation
    #: `up` holds both projections in one module: first all rows of the gate, then all rows of up.
    fused: bool = False
    #: Two layers of low rank, one behind the other; what they give is added to what `up` gives (Zamba 2).
    low: tuple[LinearPlan, LinearPlan] | None = None
    #: Of the gate, only what is above ``mean + cutoff * standard deviation`` of its row is left: ``relu(gate - that)``
    #: (Gemma 3n).
    cutoff: float | None = None
    learned: nn.Module | None = (
        None  # activation "xielu", without a gate: has alpha_p, alpha_n, beta and eps
    )
    inner_norm: NormPlan | None = None  # before `down` (BitNet)
    swiglu: tuple[float, float, float] | None = None  # of "swigluoai": alpha, limit, what is added


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertNormsPlan:
    """Norms around experts that read the stream, as a dense block beside them does (Gemma 4).

    ``output(experts(input(h))) + shared(dense(x))``; the router reads ``router(h) * factors``. `x` is what the norm of
    the layer before the mlp gives.
    """

    module: nn.Module  # the router and what is around it
    router: NormPlan
    input: NormPlan
    output: NormPlan
    shared: NormPlan

    @property
    def factors(self) -> Tensor:
        """Factors on what the router reads, ``[hidden]`` or one."""
        scale = getattr(self.module, "scale", torch.ones(())).detach().float()
        return scale * float(getattr(self.module, "scalar_root_size", 1.0))


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """A routed mixture of experts, with an optional shared one."""

    router: nn.Module
    router_weight: Tensor  # [E, hidden]
    router_bias: Tensor | None
    #: The module with the experts; their weights stacked, ``[E, 2 I, hidden]`` (rows of the gate first) and
    #: ``[E, hidden, I]``, or modules: the gates of all experts and then their other projections; the E last ones.
    module: nn.Module
    gate_up: Tensor | tuple[nn.Module, ...]
    down: Tensor | tuple[nn.Module, ...]
    transposed: bool
    interleaved: bool  # rows of gate_up alternate gate, up (gpt-oss)
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    experts: int
    top_k: int
    intermediate_size: int
    activation: Activation
    #: "logits": `correction_bias` is added to logits and not to scores, which are sigmoids of logits (Kolibri).
    #: "softplus": scores are square roots of softplus (DeepSeek V4).
    scoring: Literal["softmax", "sigmoid", "sparsemixer", "logits", "softplus"]
    renormalize: bool
    groups: int = 0
    top_groups: int = 0
    correction_bias: Tensor | None = None
    routed_scale: float = 1.0
    scale_input: bool = False  # weights multiply the expert's input and not its output (Llama 4)
    shared: MlpPlan | None = None
    shared_gate: nn.Module | None = None  # sigmoid gate of the shared expert (Qwen2-MoE)
    #: In "softcaps" (Inkling 2) both bound gates and factors: ``cap(alpha, g) * sigmoid(g) * cap(limit, u)``.
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    swiglu_added: float = 1.0  # to what the gate multiplies; 0: silu with a bound (HY 4)
    jitter: float = 0.0  # of "sparsemixer" (Phi-MoE)
    gated: bool = True  # False: `gate_up` has the rows of up alone, ``[E, I, hidden]`` (Nemotron-H)
    #: Around the experts, but not around the router and what is shared: to fewer features, and back (Nemotron-H).
    entry: LinearPlan | None = None
    exit: LinearPlan | None = None
    expert_scales: Tensor | None = None  # [E]: factors on the weights of the experts that are taken
    #: What gates multiply, if `gate_up` has the gates alone; all three weights are ``[E * I, hidden]`` then (DBRX).
    up: Tensor | None = None
    zeros: int = 0  # experts behind the others, which give what they read (LongCat-Flash)
    #: The experts read the stream; `shared` reads what others give to all.
    norms: ExpertNormsPlan | None = None
    added: tuple[nn.Module, str] | None = None  # of a parameter [hidden], added to all (JetMoE)
    #: Has gate_proj, up_proj and down_proj of the last experts, to which all tokens go; `experts` and `top_k` count
    #: them, `gate_up`, `down` and `correction_bias` do not (Inkling).
    always: nn.Module | None = None
    gain: tuple[nn.Module, str] | None = None  # of a parameter with one number: a factor on weights
    table: Tensor | None = None  # [vocab, top_k]: the experts of each token (DeepSeek V4)

    @property
    def apart(self) -> bool:
        """Whether no op has both products and the activation: each is an instruction."""
        return self.activation == "softcaps" or (
            self.activation == "swigluoai" and self.swiglu_added != 1.0
        )

    @property
    def paired(self) -> bool:
        """Whether rows of a gate and of its factor are packed side by side, for an op that multiplies both."""
        return self.gated and not self.apart


@dataclasses.dataclass(frozen=True, slots=True)
class SidePlan:
    """Attention and an mlp behind it, without residuals: ``output(mlp(mlp_norm(attention(norm([h, e])))))``.

    They read the stream and the embeddings of the tokens side by side. What comes out is added to what the norm of
    the layer reads, and not to the residual (Zamba 2, whose layers of this kind share weights).
    """

    norm: NormPlan
    attention: AttentionPlan
    mlp_norm: NormPlan
    mlp: MlpPlan
    output: LinearPlan


@dataclasses.dataclass(frozen=True, slots=True)
class TokenBlockPlan:
    """A block behind the mlp that brings in the layer's part of `TokenRowsPlan`: ``norm(output(act(gate(h)) * part))``.

    (Gemma 4's embeddings for each layer.)
    """

    gate: LinearPlan
    output: LinearPlan
    norm: NormPlan
    activation: Activation


@dataclasses.dataclass(frozen=True, slots=True)
class LowRankPlan:
    """Two layers of low rank beside attention: ``h = (h + attention(x) + x + norm(second(first(x)))) * factor``.

    (Gemma 3n's augmented residual.)
    """

    first: LinearPlan
    second: LinearPlan
    norm: NormPlan
    factor: float


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRowsPlan:
    """What each token brings for each layer, ``[layers, width]``.

    ``scale * (norm(projection(h)) + table_scale * table[token])``; `h` is what the first layer reads.
    """

    table: nn.Module  # weight [vocab, layers * width]
    table_scale: float
    projection: LinearPlan  # rows: of all layers, one behind the other
    norm: NormPlan  # over `width`
    width: int
    scale: float


@dataclasses.dataclass(frozen=True, slots=True)
class HeadBlockPlan:
    """A block before the head: ``norm(act(linear(h)))`` (the decoder of ModernBERT)."""

    linear: LinearPlan
    activation: Activation
    norm: NormPlan


@dataclasses.dataclass(frozen=True, slots=True)
class PicturePlan:
    """A layer that reads rows of a picture (Llama 3.2 Vision); it is left out of texts without.

    ``h += tanh(gates[0]) * output(attention(query(norm(h)), key_value(rows)))``, then
    ``h += tanh(gates[1]) * seen * mlp(mlp_norm(h))``; `seen` is 0 for tokens that come before the picture.
    """

    module: nn.Module  # has the parameters named in `gates`
    norm: NormPlan
    query: LinearPlan
    key_value: LinearPlan  # rows: all key heads, all value heads
    output: LinearPlan
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    query_norm: NormPlan | None
    key_norm: NormPlan | None
    mlp_norm: NormPlan
    mlp: MlpPlan
    gates: tuple[str, str]  # [1] each


@dataclasses.dataclass(frozen=True, slots=True)
class LayerPlan:
    """One decoder layer; `attention` may be another block that mixes tokens, with a state.

    Sequential: ``h += post_attention?(attention(input_norm(h)))``, then ``h += post_mlp?(mlp(mlp_norm(h)))``.
    Parallel: both read ``h`` as it came in, through one norm or two, and both are added.
    A layer with one block has no `mlp`, or no `attention` (Mamba-2, Nemotron-H).

    A decoder whose layers end in a norm of the sum (OPT 350m) is the same chain cut elsewhere, and is given so: with
    `residual_after_norm`, no `input_norm` in the first layer, the last norm of each layer as the next one's
    `input_norm`, and the last norm of the last layer as the decoder's `final_norm`.
    """

    module: nn.Module
    attention: AttentionPlan | MixerPlan | None
    mlp: MlpPlan | ExpertsPlan | None
    input_norm: NormPlan | None
    mlp_norm: NormPlan | None  # parallel and None: the mlp reads what input_norm gives
    post_attention_norm: NormPlan | None = None  # sandwich, or OLMo 2's norm after the block
    post_mlp_norm: NormPlan | None = None
    parallel: bool = False
    residual_scale: float = 1.0  # factor on what a block adds
    #: A block with a state that reads what `attention` reads; the sum of both is added (Falcon-H1).
    beside: MixerPlan | None = None
    #: In front of a layer with a state as its only block.
    side: SidePlan | None = None
    #: The residual is what the norm (of either block) gave, not what it read (Bloom's option).
    residual_after_norm: bool = False
    #: With `residual_after_norm`: factors on it where the first block, and the second one, is added (MiniMax).
    residual_factors: tuple[float, float] = (1.0, 1.0)
    #: Names of parameters ``[hidden]`` of `module`: factors on the residual where each block is added (Doge).
    gains: tuple[str, str] | None = None
    #: With `residual_after_norm`: what the norm gave moves towards what each block gives by these shares, float32
    #: ``[hidden]`` (Dory).
    rates: tuple[Tensor, Tensor] | None = None
    #: The layer reads the norm of the stream, and the norm of the stream of the first such layer is added (Dory, whose
    #: layers run several times: each time is a layer here).
    restart: NormPlan | None = None
    #: The model's own stream is the one here divided by this, and by another number behind each block: its residuals
    #: have factors. Norms read the same in both, with an epsilon that is larger here (Beam).
    size: float | None = None
    #: Factor on the stream behind all blocks (Gemma 4).
    stream_scale: float = 1.0
    token_block: TokenBlockPlan | None = None
    low: LowRankPlan | None = None
    streams: LayerStreams | None = None
    #: In front of the first block.
    ngrams: NgramsPlan | None = None
    #: Behind all that: a layer of its own in the model.
    picture: PicturePlan | None = None
    #: Experts that read what `mlp` reads. What they give is added behind the next layer (LongCat-Flash).
    shortcut: ExpertsPlan | None = None
    #: Short convolutions of what attention and what the mlp gives, added to it (Inkling), and a factor on the sums.
    convs: tuple[nn.Module, ...] = ()
    conv_scale: float = 1.0

    @property
    def mixtures(self) -> list[ExpertsPlan]:
        """The mixtures of experts of the layer."""
        own = self.attention.experts if isinstance(self.attention, AttentionPlan) else None
        return [one for one in (own, self.mlp, self.shortcut) if isinstance(one, ExpertsPlan)]

    @property
    def cached(self) -> AttentionPlan | None:
        """The attention of the layer that has keys and values in the cache, or None."""
        if self.side is not None:
            return self.side.attention
        own = isinstance(self.attention, AttentionPlan) and self.attention.source is None
        return self.attention if own else None  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderPlan:
    """A whole decoder: embedding, layers, last norm, head."""

    decoder: nn.Module  # the module that has the layers
    embedding: nn.Module  # token embedding, weight [vocab, width]
    layers: tuple[LayerPlan, ...]
    final_norm: NormPlan | None
    head: LinearPlan | None  # None: the decoder alone
    hidden_size: int
    vocab_size: int
    max_positions: int
    attention_chunk: int = 0  # places; in some layers, tokens do not see earlier chunks
    #: Beyond `attention_chunk` an indexer chooses the keys of each query (DeepSeek V3.2); its own keys are not cached.
    indexed: bool = False
    embedding_scale: float = 1.0
    embedding_norm: NormPlan | None = None
    embedding_projection: LinearPlan | None = None  # OPT's project_in
    output_projection: LinearPlan | None = None  # OPT's project_out
    position_embedding: nn.Module | None = None
    position_offset: int = 0  # row of position 0
    token_rows: TokenRowsPlan | None = None
    streams: StreamEnds | None = None
    #: Calls that run the stock forward, since a program is not proven for them; see `ipex_llm.optimization.proof`.
    stock_calls: frozenset[str] = frozenset()
    head_block: HeadBlockPlan | None = None
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    dropped: int = 0  # how many rows at the end of the head are no logits (Inkling)
    #: The ranks that have the rest of a sharded model: output and down projections, experts and the head give parts.
    parallel: TensorParallel | None = None

    @property
    def attentions(self) -> list[AttentionPlan]:
        """The attentions of the layers that have keys and values."""
        return [p.cached for p in self.layers if p.cached is not None]

    @property
    def has_states(self) -> bool:
        """Whether a layer keeps a state instead of keys and values."""
        return any(isinstance(p.attention, MixerPlan) or p.beside or p.convs for p in self.layers)

    @property
    def repeated(self) -> bool:
        """Whether layers run several times."""
        loops = (isinstance(p.streams, LayerMeansPlan) and p.streams.loop for p in self.layers)
        return any(p.restart is not None for p in self.layers) or any(loops)

    @property
    def ngrams(self) -> dict[int, NgramsPlan]:
        """What brings the last tokens into streams, by the index of the layer."""
        return {i: p.ngrams for i, p in enumerate(self.layers) if p.ngrams is not None}

    @property
    def tables(self) -> dict[int, Tensor]:
        """The experts of tokens where they are chosen so, by the index of the layer."""
        found = {i: getattr(p.mlp, "table", None) for i, p in enumerate(self.layers)}
        return {i: table for i, table in found.items() if table is not None}

    @property
    def mixtures(self) -> list[ExpertsPlan]:
        """The mixtures of experts of the layers, once each."""
        return [*{id(one.router): one for p in self.layers for one in p.mixtures}.values()]

    @property
    def pictures(self) -> list[PicturePlan]:
        """The layers that read a picture."""
        return [p.picture for p in self.layers if p.picture is not None]

    @property
    def places(self) -> list[int]:
        """The indices that the layers have in the model, which counts those that read a picture."""
        modules = list(dict.fromkeys(p.module for p in self.layers))
        if self.repeated:
            return [modules.index(p.module) for p in self.layers]
        before = itertools.accumulate((p.picture is not None for p in self.layers), initial=0)
        return [
            index + count for index, count in zip(range(len(self.layers)), before, strict=False)
        ]

    def linear_modules(self) -> Iterator[nn.Module]:
        """Iterate over the modules of all linear layers of the plan."""
        return linear_modules(self)


def _parts(value: object) -> Iterator[object]:
    """Iterate over a plan, or a part of one, and all parts in it."""
    if isinstance(value, tuple):
        for one in value:
            yield from _parts(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield value
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name))


def gated_norms(value: object) -> Iterator[NormPlan]:
    """Iterate over the norms with a gate of a plan, or of a part of one."""
    for part in _parts(value):
        if isinstance(part, NormPlan) and part.gate is not None:
            yield part


def linear_modules(value: object) -> Iterator[nn.Module]:
    """Iterate over the modules of all linear layers of a plan, or of a part of one."""
    for part in _parts(value):
        if isinstance(part, LinearPlan):
            yield from part.modules
