# SPDX-License-Identifier: Apache-2.0
"""Parts of a plan: linear layers, norms, and what blocks read of streams and of earlier rows."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True, slots=True)
class LinearPlan:
    """A linear layer: one module, or several that read the same input, whose outputs are put side by side."""

    modules: tuple[nn.Module, ...]
    transposed: bool = False  # weights are [in, out] (GPT-2's Conv1D)
    #: Order of the output rows, if it is not the one that the user of the layer expects: an index ``[out_features]``
    #: such that ``rows[order]`` are in the expected order (fused QKV that interleaves heads).
    order: Tensor | None = None
    #: float32 ``[out_features]``: what the expected rows, with their biases, are multiplied with.
    factors: Tensor | None = None
    #: Module and name of a parameter ``[out_features]`` that is added to the rows, besides their biases: the layer
    #: around adds it (GPT-NeoX Japanese).
    added: tuple[nn.Module, str] | None = None
    gain: tuple[nn.Module, str] | None = None  # of a parameter with one number: a factor (Inkling)
    multiplied: bool = False  # the module multiplies with `factors` itself (Dory's head)


@dataclasses.dataclass(frozen=True, slots=True)
class NormPlan:
    """RMS or layer norm over the last dimension; ``y = norm(x) * (weight + offset) + bias``.

    With a gate it gives ``y * sigmoid(gate[1](silu(gate[0](y))))`` (A.X K2). A "clip" shortens rows longer than
    `eps`: ``y * min(eps / (|y| + 1e-6), 1)`` with ``y = x * weight`` (Inkling 2).

    Weight and bias are ``[width]``; in a norm of queries or keys they may be ``[heads, head_dim]``, one for each head.
    """

    kind: Literal["rms", "layer", "clip"]
    module: nn.Module
    eps: float
    offset: float = 0.0  # 1.0: weights are stored less one (Gemma)
    bare: bool = False  # the weight that the module has is not used (Falcon-Mamba)
    order: Tensor | None = None  # of the elements, if it is not the one of the module
    gate: tuple[LinearPlan, LinearPlan] | None = None
    factor: float = 1.0  # on what it gives (Dory: rows of length one)

    @property
    def weight(self) -> Tensor | None:
        """The weight as it is stored (without `offset`); None: the norm has none."""
        name = "scale" if self.kind == "clip" else "weight"
        return None if self.bare else self._values(name)

    @property
    def bias(self) -> Tensor | None:
        """The bias, or None."""
        return self._values("bias")

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """The module, or one for each head (StableLM)."""
        lists = (c for c in self.module.children() if isinstance(c, nn.ModuleList))
        return tuple(next(lists, (self.module,)))

    def _values(self, name: str) -> Tensor | None:
        parts = self.parts
        if parts == (self.module,):
            value = getattr(self.module, name, None)
            if not isinstance(value, Tensor):
                return None
            return value if self.order is None else value[self.order]
        rows = [row for part in parts if (row := getattr(part, name, None)) is not None]
        return torch.stack(rows) if len(rows) == len(parts) else None


@dataclasses.dataclass(frozen=True, slots=True)
class StreamsPlan:
    """Streams beside each other, of which a layer reads one and corrects all (Gemma 3n's alternating updates).

    With ``c(x) = tanh(router(norm(x)))`` and the streams `s`,

    - ``p[i] = s[i] + sum_j predict(c(s[0]))[i * count + j] * s[j]``; the layer reads ``p[0]`` and gives `y`,
    - ``s[i] = p[i] + (correct(c(y))[i] + 1) * (y - p[0])``.

    The block of `LayerPlan.token_block` reads ``s[0] * scale``; what it gives is added to all streams but the first.
    """

    count: int
    norm: NormPlan
    router: LinearPlan
    predict: LinearPlan
    correct: LinearPlan
    scale: Tensor | None  # [hidden]


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionPlan:
    """How a block reads one row made of several streams, and is added to all of them (hyper-connections of HY 4).

    With ``f = sigmoid(scale * (weight @ norm(s)) + base)``, where the norm goes over all streams `s` side by side and
    has no weight,

    - the block reads ``sum_i (f[i] + eps) * s[i]`` and gives `y`,
    - ``s[i] += (magnitude * f[count + i] + eps) * y``.

    Behind the last layer there is the first half alone; all streams begin as the embedding.

    With `rounds` (DeepSeek V4) that has no `eps`, and ``count * count`` rows more of the weight give a matrix: softmax
    plus `eps`, divided by the sums of its columns plus `eps`, and in further rounds of rows and of columns. Streams are
    multiplied with its transpose before `y` is added.
    """

    module: nn.Module  # has the parameters named below
    weight: str  # [2 * count, count * hidden]
    base: str  # [2 * count]
    scale: str  # [2], for each half; a third one for the matrix
    count: int
    norm_eps: float
    eps: float
    magnitude: float
    rounds: int = 0

    @property
    def numbers(self) -> tuple[Tensor, ...]:
        """Scale, base, size and what is added at last of each row of the weight, float32."""
        scale, base = (getattr(self.module, n).detach().float() for n in (self.scale, self.base))
        counts = torch.tensor([self.count, self.count, self.count**2][: len(scale)])
        sizes, added = torch.full_like(base, self.magnitude), torch.full_like(base, self.eps)
        sizes[: self.count] = 1.0
        added[self.count :] *= not self.rounds
        return scale.repeat_interleave(counts), base, sizes, added


@dataclasses.dataclass(frozen=True, slots=True)
class GatedConnectionPlan:
    """How a block reads the mean of several streams with gates, and is added to all of them (Qwen 4).

    With ``n[i] = norm(s[i])``, which has a weight for each stream `s`, and all of these side by side as `n`,

    - the block reads the mean of ``sigmoid(second(silu(factor * first(n))))[i] * n[i]`` and gives `y`,
    - ``s[i] += 2 * sigmoid(factor * last(n))[i] * y``.

    Behind the last layer there is no `last`; all streams begin as the embedding.
    """

    norm: NormPlan  # weight [count, hidden]
    first: LinearPlan
    second: LinearPlan
    last: LinearPlan | None
    count: int
    factor: float

    @property
    def linears(self) -> tuple[LinearPlan, ...]:
        """All linear layers."""
        return (self.first, self.second, *(() if self.last is None else (self.last,)))


Connection = ConnectionPlan | GatedConnectionPlan


@dataclasses.dataclass(frozen=True, slots=True)
class MeansPlan:
    """Rows that blocks read: means of what the stream was before, by learned weights (Inkling 2).

    With `n`, the norms of the stream, and of the streams that groups of layers before ended with, row q is
    ``sum_i softmax_i(query[q] @ n[i] / sqrt(hidden)) * n[i]``.
    """

    module: nn.Module
    query: str  # [hidden] or [count, hidden]
    norm: NormPlan
    index: int | None = None  # of the queries in [layers, count, hidden]

    @property
    def queries(self) -> Tensor:
        """The queries with the root in them, float32 ``[count, hidden]``."""
        query: Tensor = getattr(self.module, self.query).detach().float()
        query = query if self.index is None else query[self.index]
        return query.view(-1, query.shape[-1]) * query.shape[-1] ** -0.5


@dataclasses.dataclass(frozen=True, slots=True)
class MessageGatePlan:
    """How a message `m` is added to a row `x`: ``(1 - tanh(f)) * x + tanh(g) * m``.

    Here `f` and `g` are ``gates(low(cat(norm(x), norm(m))))``, one behind the other.
    """

    norm: NormPlan
    low: LinearPlan
    gates: LinearPlan


@dataclasses.dataclass(frozen=True, slots=True)
class MessagesPlan:
    """What a layer that runs again reads of the time before, for queries, keys, values and the mlp.

    The messages are means of the stream that the last of these layers gave, and of those that groups of them, but the
    first, began with.
    """

    means: MeansPlan
    gates: tuple[MessageGatePlan, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerMeansPlan:
    """What the blocks of a layer read: attention one row, or one each for queries, keys and values."""

    attention: MeansPlan | None  # None: the stream
    mlp: MeansPlan
    begins: bool  # a group of layers: attention is not added to the stream but takes its place
    #: The first of layers that run several times: streams are kept, or are again what they were at the start.
    loop: Literal["", "start", "again"] = ""
    messages: MessagesPlan | None = None


#: Of a layer: all at once, or a connection for each of its two blocks, or means.
LayerStreams = StreamsPlan | tuple[Connection, Connection] | LayerMeansPlan


@dataclasses.dataclass(frozen=True, slots=True)
class NgramsPlan:
    """What the last tokens bring into all streams `s` (Qwen 4's PLE).

    With the row `e` of a token in tables of n-grams, and
    ``g[i] = key_norm(key(e))[i] @ query_norm(s[i]) / sqrt(hidden)``,

    - ``v[i] = sigmoid(sign(g[i]) * sqrt(max(abs(g[i]), 1e-6))) * value(e)``,
    - ``s[i] += v[i] + silu(conv(conv_norm(v)))[i]``.

    Norms have a weight for each stream.
    """

    table: (
        nn.Module
    )  # gives the rows of tokens [B, T], each made of `context` tokens before it, too
    context: int
    empty: int  # the token that stands for those before the first
    width: int
    key: LinearPlan
    value: LinearPlan
    key_norm: NormPlan
    query_norm: NormPlan
    conv_norm: NormPlan
    conv: nn.Conv1d  # depthwise over all streams side by side; its taps may be apart

    @property
    def taps(self) -> Tensor:
        """The filter with zeros between taps that are apart, float32 ``[W, count * hidden]``."""
        weight, apart = self.conv.weight.detach().float(), self.conv.dilation[0]
        taps = weight.new_zeros((weight.shape[-1] - 1) * apart + 1, weight.shape[0])
        taps[::apart] = weight[:, 0].t()
        return taps


@dataclasses.dataclass(frozen=True, slots=True)
class StreamEndsPlan:
    """How several streams begin and end: the first one is `h`, and the end is the mean of all.

    The others are ``first(h)`` at the start and ``last(s)`` at the end, each as long as the first stream is: times
    ``sqrt(mean(s[0]^2) / max(mean(x^2), 1e-5))``.
    """

    first: tuple[LinearPlan, ...]
    last: tuple[LinearPlan, ...]


StreamEnds = StreamEndsPlan | Connection | MeansPlan


@dataclasses.dataclass(frozen=True, slots=True)
class WindowsPlan:
    """Rows made of windows of `rate` tokens, which are keys and values beside the rows of tokens (DeepSeek V4).

    A feature is the mean of the values of the tokens with the softmax of gates and `bias` as weights; then there are
    the norm and the rotation of the first token. A token sees the windows that have ended, with its own. If the bias is
    twice as wide as a row, windows have twice as many rows: their second half is the tokens' own, and the first one,
    with the first halves of values, gates and bias, the tokens of the window before.
    """

    module: nn.Module
    bias: str  # [rate, width]
    norm: NormPlan
    rate: int

    def biases(self, width: int) -> Tensor:
        """Return what is added to the gates of a window, float32 ``[rows, width]``."""
        bias: Tensor = getattr(self.module, self.bias).detach().float()
        return torch.cat(bias.split(width, dim=-1))


@dataclasses.dataclass(frozen=True, slots=True)
class SharedRowPlan:
    """One row of a token that is key and value of all heads (DeepSeek V4).

    `AttentionPlan.qkv` gives what the queries are made of, the row, and with `windows` values and gates. Ends of
    queries and keys are rotated, and back what heads attend to. Then each group of heads has a linear layer.
    """

    query: LinearPlan
    query_norm: NormPlan
    output: nn.Module  # weight [groups * rank, heads * head_dim / groups]
    groups: int
    windows: WindowsPlan | None
