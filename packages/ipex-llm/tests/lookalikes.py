# SPDX-License-Identifier: Apache-2.0
"""Small models with the structure (names, layouts, rules) of families whose code comes with their checkpoints.

Written from the descriptions of these models; none of their code is here. They have no cache: `generate` needs
``use_cache=False``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

__all__ = ["make"]

Tensor = torch.Tensor


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * y.to(x.dtype)


class Rotary(nn.Module):
    """Frequencies of `dim` elements of a head."""

    inv_freq: Tensor

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", base ** -(torch.arange(0, dim, 2).float() / dim), False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """Rotate ``[B, T, heads, head_dim]``."""
    dim = 2 * cos.shape[-1]
    part, rest = x[..., :dim], x[..., dim:]
    a, b = (part[..., ::2], part[..., 1::2]) if pairs else part.chunk(2, -1)
    c, d = a * cos - b * sin, b * cos + a * sin
    part = torch.stack([c, d], -1).flatten(-2) if pairs else torch.cat([c, d], -1)
    return torch.cat([part, rest], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Causal attention of ``[B, T, heads, head_dim]``, and ``[heads]`` slopes."""
    length, groups = q.shape[1], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    rows = torch.arange(length)
    if bias is not None:
        scores = scores + bias.view(-1, 1, 1) * rows
    scores = scores.masked_fill(rows > rows[:, None], torch.finfo(scores.dtype).min)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)


class PackAttention(nn.Module):
    """Baichuan: one projection named W_pack; rotation, or slopes in the large model."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.num_heads, self.head_dim = (
            c.num_attention_heads,
            c.hidden_size // c.num_attention_heads,
        )
        self.W_pack = nn.Linear(c.hidden_size, 3 * c.hidden_size, bias=False)
        self.o_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.slopes = torch.tensor([2.0 ** (-8 * (i + 1) / 4) for i in range(4)])
        if not c.alibi:
            self.rotary_emb = Rotary(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.W_pack(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        if hasattr(self, "rotary_emb"):
            cos, sin = self.rotary_emb(x)
            return self.o_proj(attend(turn(q, cos, sin, False), turn(k, cos, sin, False), v))
        return self.o_proj(attend(q, k, v, self.slopes.to(x.dtype)))


class GatedMlp(nn.Module):
    """Gate, up and down under the names of a family; `first` is the one that goes through the activation."""

    def __init__(self, c: Any, gate: str, up: str, down: str) -> None:
        super().__init__()
        self.parts = (gate, up, down)
        for name in sorted((gate, up)):
            self.add_module(name, nn.Linear(c.hidden_size, c.intermediate_size, bias=False))
        self.add_module(down, nn.Linear(c.intermediate_size, c.hidden_size, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.parts)
        return down(functional.silu(gate(x)) * up(x))


class BaichuanLayer(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.self_attn = PackAttention(c)
        self.mlp = GatedMlp(c, "gate_proj", "up_proj", "down_proj")
        self.input_layernorm = RMSNorm(c.hidden_size)
        self.post_attention_layernorm = RMSNorm(c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class ChatAttention(nn.Module):
    """ChatGLM: query_key_value with few key heads behind all queries; a half of each head rotated in pairs."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.heads, self.groups, self.size = (
            c.num_attention_heads,
            c.multi_query_group_num,
            c.kv_channels,
        )
        rows = (self.heads + 2 * self.groups) * self.size
        self.query_key_value = nn.Linear(c.hidden_size, rows, bias=True)
        self.dense = nn.Linear(self.heads * self.size, c.hidden_size, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        rows = self.query_key_value(x).unflatten(-1, (-1, self.size))
        q, k, v = rows.split([self.heads, self.groups, self.groups], 2)
        return self.dense(attend(turn(q, *turns, True), turn(k, *turns, True), v))


class ChatMlp(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(c.hidden_size, 2 * c.ffn_hidden_size, bias=False)
        self.dense_4h_to_h = nn.Linear(c.ffn_hidden_size, c.hidden_size, bias=False)

        def swiglu(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return functional.silu(a) * b

        self.activation_func = swiglu

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.activation_func(self.dense_h_to_4h(x)))


class ChatLayer(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size)
        self.self_attention = ChatAttention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size)
        self.mlp = ChatMlp(c)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x), turns)
        return x + self.mlp(self.post_attention_layernorm(x))


class ChatEncoder(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ChatLayer(c) for _ in range(c.num_layers))
        self.final_layernorm = RMSNorm(c.hidden_size)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        for layer in self.layers:
            x = layer(x, turns)
        return self.final_layernorm(x)


class ChatEmbedding(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        return self.word_embeddings(ids)


class ChatTransformer(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.embedding = ChatEmbedding(c)
        self.rotary_pos_emb = Rotary(c.kv_channels // 2)
        self.encoder = ChatEncoder(c)
        self.output_layer = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> BaseModelOutput:
        x = self.embedding(input_ids)
        return BaseModelOutput(last_hidden_state=self.encoder(x, self.rotary_pos_emb(x)))


class InternAttention(nn.Module):
    """InternLM 2: for each key head its queries, the key and the value, one after the other."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.kv, self.size = c.num_key_value_heads, c.hidden_size // c.num_attention_heads
        rows = (c.num_attention_heads + 2 * self.kv) * self.size
        self.wqkv = nn.Linear(c.hidden_size, rows, bias=False)
        self.wo = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.rotary_emb = Rotary(self.size, 1e6)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.wqkv(x).unflatten(-1, (self.kv, -1, self.size))
        q, k, v = rows[..., :-2, :].flatten(2, 3), rows[..., -2, :], rows[..., -1, :]
        cos, sin = self.rotary_emb(x)
        return self.wo(attend(turn(q, cos, sin, False), turn(k, cos, sin, False), v))


class InternLayer(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.attention = InternAttention(c)
        self.feed_forward = GatedMlp(c, "w1", "w3", "w2")
        self.attention_norm = RMSNorm(c.hidden_size)
        self.ffn_norm = RMSNorm(c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class QwenAttention(nn.Module):
    """The first Qwen: c_attn holds queries, keys and values with a bias."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.heads = c.num_attention_heads
        self.c_attn = nn.Linear(c.hidden_size, 3 * c.hidden_size)
        self.c_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.rotary_emb = Rotary(c.hidden_size // self.heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p.unflatten(-1, (self.heads, -1)) for p in self.c_attn(x).chunk(3, -1))
        cos, sin = self.rotary_emb(x)
        return self.c_proj(attend(turn(q, cos, sin, False), turn(k, cos, sin, False), v))


class QwenLayer(nn.Module):
    """Its mlp gates with the second projection: ``c_proj(w1(x) * silu(w2(x)))``."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.ln_1 = RMSNorm(c.hidden_size)
        self.attn = QwenAttention(c)
        self.ln_2 = RMSNorm(c.hidden_size)
        self.mlp = GatedMlp(c, "w2", "w1", "c_proj")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class YuanAttention(nn.Module):
    """Yuan 2: a convolution over neighboring tokens in front of queries and keys."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.heads = c.num_attention_heads
        self.lf_gate = nn.Conv1d(c.hidden_size, c.hidden_size, 2, padding=1)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(c.hidden_size, c.hidden_size, bias=False))
        self.rotary_emb = Rotary(c.hidden_size // self.heads)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.lf_gate(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        sources = {"q_proj": y, "k_proj": y, "v_proj": x}
        q, k, v = (
            self.get_submodule(name)(source).unflatten(-1, (self.heads, -1))
            for name, source in sources.items()
        )
        cos, sin = self.rotary_emb(x)
        return self.o_proj(attend(turn(q, cos, sin, False), turn(k, cos, sin, False), v))


class YuanLayer(BaichuanLayer):
    def __init__(self, c: Any) -> None:
        super().__init__(c)
        self.self_attn = YuanAttention(c)


class PlainDecoder(nn.Module):
    def __init__(self, c: Any, layer: type[nn.Module], names: tuple[str, str, str]) -> None:
        super().__init__()
        self.config, self.parts = c, names
        self.add_module(names[0], nn.Embedding(c.vocab_size, c.hidden_size))
        self.add_module(names[1], nn.ModuleList(layer(c) for _ in range(2)))
        self.add_module(names[2], RMSNorm(c.hidden_size))

    def forward(self, input_ids: Tensor) -> BaseModelOutput:
        table, layers, norm = (self.get_submodule(name) for name in self.parts)
        x = table(input_ids)
        for layer in layers:  # type: ignore[attr-defined]
            x = layer(x)
        return BaseModelOutput(last_hidden_state=norm(x))


class Lookalike(PreTrainedModel, GenerationMixin):
    config_class = PretrainedConfig
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.kind == "chatglm":
            self.transformer = ChatTransformer(config)
        elif config.kind == "qwen":
            self.transformer = PlainDecoder(config, QwenLayer, ("wte", "h", "ln_f"))
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        else:
            layer = {"baichuan": BaichuanLayer, "internlm": InternLayer, "yuan": YuanLayer}
            names = (
                "tok_embeddings" if config.kind == "internlm" else "embed_tokens",
                "layers",
                "norm",
            )
            self.model = PlainDecoder(config, layer[config.kind], names)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutputWithPast:
        decoder = self.model if hasattr(self, "model") else self.transformer
        head = self.lm_head if hasattr(self, "lm_head") else self.transformer.output_layer
        logits = head(decoder(input_ids)[0])
        return CausalLMOutputWithPast(logits=logits)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **_: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}


_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "alibi": False,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

#: Name -> arguments of the config.
_OPTIONS: dict[str, dict[str, Any]] = {
    "baichuan": {"kind": "baichuan"},
    "baichuan_alibi": {"kind": "baichuan", "alibi": True},
    "chatglm": {
        "kind": "chatglm",
        "num_layers": 2,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 96,
        "seq_length": 256,
    },
    "internlm2": {"kind": "internlm", "num_key_value_heads": 2},
    "qwen": {"kind": "qwen"},
    "yuan": {"kind": "yuan"},
}


def make(name: str) -> nn.Module:
    """Return a look-alike with the weights that its layers were made with."""
    return Lookalike(PretrainedConfig(**{**_COMMON, **_OPTIONS[name]}))
