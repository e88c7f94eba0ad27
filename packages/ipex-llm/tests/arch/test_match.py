# SPDX-License-Identifier: Apache-2.0
"""Plans of each family: their values, and that they compute what the models compute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from families import (
    CAUSAL,
    FAMILIES,
    OLD,
    POSITIONS,
    UNMATCHED,
    VOCAB,
    WINDOW,
    cast,
    randomize,
    tokens,
)
from torch import nn

import ipex_llm
from ipex_llm.arch import AttentionPlan, DecoderPlan, ExpertsPlan, MlpPlan
from ipex_llm.arch.detect import MatchError, match, why_not
from ipex_llm.arch.reference import run_plan, verify
from ipex_llm.records import record_of

#: Transformers 4 puts the window of some layers on all of them.
WRONG = {"qwen2_window"} if OLD else set()
MATCHED = [name for name in FAMILIES if name not in UNMATCHED | WRONG]


def attention(plan: DecoderPlan, layer: int = 0) -> AttentionPlan:
    return plan.layers[layer].attention


@pytest.mark.parametrize("name", MATCHED)
def test_plan_computes_what_the_model_computes(name: str) -> None:
    model = FAMILIES[name]()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    plan = match(model)
    assert why_not(model) == ()
    assert (plan.vocab_size, plan.hidden_size) == (VOCAB, 64)
    ids = tokens(2, 33)
    with torch.no_grad():
        torch.testing.assert_close(
            run_plan(plan, ids), model(ids, use_cache=False).logits, atol=1e-4, rtol=1e-4
        )
    assert verify(model, plan) < 1e-4
    # The model is as it was: same weights, no hooks.
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", [n for n in MATCHED if n in CAUSAL])
def test_plan_is_the_same_in_16_bits(name: str) -> None:
    dtype = torch.float16 if name in ("llama3", "gpt2", "gpt_oss") else torch.bfloat16
    expected, plan = match(FAMILIES[name]()), match(cast(FAMILIES[name](), dtype))
    for a, b in zip(expected.layers, plan.layers, strict=True):
        assert type(a.attention) is type(b.attention)
        assert a.mlp.activation == b.mlp.activation
        if not isinstance(a.attention, AttentionPlan):
            continue
        assert a.attention.rope == b.attention.rope
        assert a.attention.scale == b.attention.scale
        assert (a.attention.alibi_slopes is None) == (b.attention.alibi_slopes is None)
        assert (a.attention.qkv.order is None) == (b.attention.qkv.order is None)
        if a.attention.qkv.order is not None:
            assert torch.equal(a.attention.qkv.order, b.attention.qkv.order)
        assert (a.parallel, a.residual_after_norm) == (b.parallel, b.residual_after_norm)
        assert a.residual_scale == b.residual_scale
        for norm in ("input_norm", "mlp_norm", "post_attention_norm", "post_mlp_norm"):
            x, y = getattr(a, norm), getattr(b, norm)
            assert (x is None) == (y is None)
            assert x is None or (x.kind, x.eps, x.offset) == (y.kind, y.eps, y.offset)
    assert abs(expected.embedding_scale - plan.embedding_scale) < 2e-2
    assert expected.logit_scale == plan.logit_scale


#: name -> values of the plan, of its first layer and of that layer's attention.
VALUES: dict[str, dict[str, Any]] = {
    "llama": {"heads": 4, "kv_heads": 2, "head_dim": 16, "scale": 0.25, "parallel": False},
    "llama_bias": {"head_dim": 8, "heads": 4, "kv_heads": 2},
    "mistral": {"window": WINDOW - 1},
    "mistral_full": {"window": -1},
    "gemma": {"embedding_scale": 8.0, "logit_softcap": 0.0},
    "gemma2": {"scale": 24**-0.5, "softcap": 50.0, "logit_softcap": 30.0, "window": WINDOW - 1},
    "phi": {"parallel": True, "mlp_norm": None},
    "gptj": {"parallel": True, "mlp_norm": None},
    "gpt_neox": {"parallel": True},
    "gpt_neox_sequential": {"parallel": False},
    "gpt2": {"position_offset": 0, "rope": None, "alibi_slopes": None},
    "opt": {"position_offset": 2, "residual_after_norm": False},
    "opt_350m": {"residual_after_norm": True, "input_norm": None},
    "falcon": {"kv_heads": 1, "parallel": True, "mlp_norm": None},
    "falcon_gqa": {"kv_heads": 2, "parallel": True},
    "falcon_alibi": {"rope": None, "parallel": False, "kv_heads": 4},
    "bloom": {"rope": None, "residual_after_norm": False},
    "bloom_post_norm": {"residual_after_norm": True},
    "gpt_bigcode": {"kv_heads": 1},
    "gpt_bigcode_mha": {"kv_heads": 4},
    "stablelm_parallel": {"parallel": True, "norm_over": "head"},
    "mpt_clip": {"clip_qkv": 0.8, "scale": 0.3},
    "granite": {
        "embedding_scale": 3.0,
        "residual_scale": 0.3,
        "scale": 0.2,
        "logit_scale": 0.25,
    },
    "olmo": {"clip_qkv": 0.9},
    "olmo2": {"input_norm": None, "mlp_norm": None, "norm_over": "all"},
    "cohere": {"parallel": True, "logit_scale": 0.0625},
    "llama4": {"max_positions": 128},
    "baichuan": {"kv_heads": 4, "alibi_slopes": None},
    "baichuan_alibi": {"rope": None},
    "chatglm": {"kv_heads": 2, "max_positions": 256},
    "internlm2": {"kv_heads": 2},
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    plan = match(FAMILIES[name]())
    for key, value in VALUES[name].items():
        for owner in (plan.layers[0], attention(plan), plan):
            if hasattr(owner, key):
                assert getattr(owner, key) == pytest.approx(value), key
                break
        else:
            pytest.fail(f"no value {key}")


def test_norms() -> None:
    kinds = {"llama": ("rms", 0.0), "gemma": ("rms", 1.0), "gpt2": ("layer", 0.0)}
    for name, (kind, offset) in {**kinds, "nemotron": ("layer", 1.0)}.items():
        norm = match(FAMILIES[name]()).layers[0].input_norm
        assert norm is not None
        assert (norm.kind, norm.offset) == (kind, offset), name
    bare = match(FAMILIES["olmo"]()).layers[0].input_norm
    assert bare is not None
    assert (bare.kind, bare.weight, bare.bias) == ("layer", None, None)
    heads = attention(match(FAMILIES["stablelm_parallel"]())).query_norm
    assert heads is not None
    assert heads.weight is not None
    assert list(heads.weight.shape) == [4, 16]


def test_rope() -> None:
    plans = {
        name: attention(match(FAMILIES[name]())).rope
        for name in (
            "llama3",
            "llama_yarn",
            "phi3_longrope",
            "phi",
            "gptj",
            "glm",
            "cohere",
            "gpt2",
        )
    }
    assert plans.pop("gpt2") is None
    found = {name: (r.kind, r.dim, r.half) for name, r in plans.items() if r is not None}
    assert found == {
        "llama3": ("llama3", 16, True),
        "llama_yarn": ("yarn", 16, True),
        "phi3_longrope": ("longrope", 16, True),
        "phi": ("default", 8, True),
        "gptj": ("default", 8, False),
        "glm": ("default", 8, False),
        "cohere": ("default", 16, False),
    }
    llama3 = plans["llama3"]
    assert llama3 is not None
    assert llama3.base == 500000.0
    cos, sin = llama3.tables(5)
    assert cos.shape == sin.shape == (5, 8)


def test_layers_of_several_kinds() -> None:
    gemma = match(FAMILIES["gemma3"]())
    windows = [layer.attention.window for layer in gemma.layers]
    bases = [layer.attention.rope.base for layer in gemma.layers if layer.attention.rope]
    assert windows == [WINDOW - 1, WINDOW - 1, -1, WINDOW - 1]
    assert bases == [10000.0, 10000.0, 1000000.0, 10000.0]
    cohere = match(FAMILIES["cohere2"]())
    assert [layer.attention.rope is None for layer in cohere.layers] == [False, False, False, True]
    qwen = match(FAMILIES["qwen2_window"]())
    assert [layer.attention.window for layer in qwen.layers] == [-1, -1, WINDOW - 1, WINDOW - 1]
    moe = match(FAMILIES["qwen2_moe"]())
    assert [type(layer.mlp) for layer in moe.layers] == [MlpPlan, ExpertsPlan]


def test_models_that_bring_their_code() -> None:
    glm = attention(match(FAMILIES["chatglm"]()))
    assert glm.rope is not None
    assert (glm.rope.dim, glm.rope.half) == (8, False)
    assert glm.qkv.order is None
    intern = attention(match(FAMILIES["internlm2"]()))
    assert intern.qkv.order is not None
    assert intern.rope is not None
    assert intern.rope.base == pytest.approx(1e6)
    slopes = attention(match(FAMILIES["baichuan_alibi"]())).alibi_slopes
    assert slopes is not None
    assert slopes.tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    # The mlp of the first Qwen gates with what is named second.
    model = FAMILIES["qwen"]()
    mlp = match(model).layers[0].mlp
    assert isinstance(mlp, MlpPlan)
    assert mlp.gate is not None
    assert mlp.gate.modules[0] is model.transformer.h[0].mlp.w2


def test_experts() -> None:
    def first(name: str) -> ExpertsPlan:
        layers = match(FAMILIES[name]()).layers
        return next(x.mlp for x in layers if isinstance(x.mlp, ExpertsPlan))

    for name in {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "llama4", "granitemoe"} & set(
        CAUSAL
    ):
        plan = first(name)
        assert (plan.experts, plan.scoring) == (4, "sigmoid" if name == "llama4" else "softmax")
        assert plan.top_k == (1 if name == "llama4" else 2)
        assert plan.scale_input == (name == "llama4")
        assert (plan.shared is not None) == (name in ("llama4", "qwen2_moe"))
        assert (plan.shared_gate is not None) == (name == "qwen2_moe")
        assert plan.interleaved == (name == "gpt_oss")
        assert plan.activation == ("swigluoai" if name == "gpt_oss" else "silu")
    assert first("mixtral").renormalize
    assert not first("qwen2_moe").renormalize


@pytest.mark.parametrize(("name", "scoring"), [("kolibri1", "logits"), ("axk1", "sigmoid")])
@torch.no_grad()
def test_what_a_correction_bias_is_added_to(name: str, scoring: str) -> None:
    if name not in CAUSAL:
        pytest.skip("newer than this transformers")
    model = FAMILIES[name]()
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("correction_bias"):
            buffer.zero_()  # as in a new model
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("gate.weight"):
            parameter.mul_(0.1)
    found = {one.scoring for one in match(model).mixtures}
    assert found == {scoring}


@pytest.mark.skipif("apertus" not in CAUSAL, reason="newer than this one")
@torch.no_grad()
def test_learned_activation() -> None:
    model = FAMILIES["apertus"]()
    act = model.model.layers[1].mlp.act_fn
    plan = match(model)
    mlp = plan.layers[1].mlp
    assert isinstance(mlp, MlpPlan) and mlp.learned is act and mlp.gate is None
    ids = tokens(2)
    fast = ipex_llm.optimize(copy.deepcopy(model), dtype=torch.float32)
    assert record_of(fast.model).runner is not None
    fast(ids)
    for one in (model, fast):  # programs have the numbers, and notice others
        one.model.layers[1].mlp.act_fn.alpha_p.add_(0.5)
    want = model(ids).logits
    torch.testing.assert_close(fast(ids).logits, want, rtol=0, atol=1e-4 * float(want.abs().max()))
    act.forward = lambda x: act._xielu_python(x) + 0.1
    with pytest.raises(MatchError, match="has an unknown activation"):
        match(model)


@pytest.mark.skipif("bitnet" not in CAUSAL, reason="newer than this one")
def test_norms_before_projections() -> None:
    model = FAMILIES["bitnet"]()
    for layer, module in zip(match(model).layers, model.model.layers, strict=True):
        mlp, attention = layer.mlp, layer.attention
        assert isinstance(mlp, MlpPlan) and isinstance(attention, AttentionPlan)
        assert mlp.inner_norm is not None and attention.output_norm is not None
        assert mlp.inner_norm.module is module.mlp.ffn_sub_norm
        assert attention.output_norm.module is module.self_attn.attn_sub_norm


class _Rounded(nn.Linear):
    """A linear layer that rounds its weight when it is called, as BitNet's online form does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight.abs().mean()
        return nn.functional.linear(x, (self.weight / scale).round().clamp(-1, 1) * scale)


@pytest.mark.skipif("bitnet" not in CAUSAL, reason="newer than this one")
@torch.no_grad()
def test_linear_layers_of_another_forward() -> None:
    model = FAMILIES["bitnet"]()
    for module in [*model.model.layers.modules()]:
        if type(module) is nn.Linear:
            module.__class__ = _Rounded
    fast = ipex_llm.optimize(copy.deepcopy(model), dtype=torch.float32)
    assert record_of(fast.model).runner is None
    want = model(tokens(2)).logits
    close = 1e-4 * float(want.abs().max())
    torch.testing.assert_close(fast(tokens(2)).logits, want, rtol=0, atol=close)


@pytest.mark.skipif(OLD or not hasattr(transformers, "AfmoeConfig"), reason="newer than this one")
def test_gate_with_a_projection_of_its_own() -> None:
    config = transformers.AfmoeConfig(
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        num_experts=4,
        num_experts_per_tok=2,
        num_dense_layers=1,
        sliding_window=WINDOW,
        max_position_embeddings=POSITIONS,
    )
    torch.manual_seed(0)
    model = randomize(transformers.AfmoeForCausalLM(config))
    plan = match(model)
    assert all(one.gated and len(one.qkv.modules) == 4 for one in plan.attentions)
    mixtures = [layer.mlp for layer in plan.layers if isinstance(layer.mlp, ExpertsPlan)]
    assert len(mixtures) == 3 and all(one.correction_bias is not None for one in mixtures)
    assert verify(model, plan) < 1e-4
    fast = ipex_llm.optimize(copy.deepcopy(model), dtype=torch.float32)
    assert record_of(fast.model).runner is not None
    ids = torch.randint(3, VOCAB, (2, 21), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(fast.generate(ids, **options), model.generate(ids, **options))


def test_head() -> None:
    tied = match(FAMILIES["llama_tied"]())
    assert tied.head is not None
    assert tied.head.modules[0].weight is tied.embedding.weight
    own = match(FAMILIES["llama"]())
    assert own.head is not None
    assert own.head.modules[0].weight is not own.embedding.weight


def test_projections_around_the_layers() -> None:
    model = FAMILIES["opt_350m"]()
    plan = match(model)
    assert plan.embedding_projection is not None
    assert plan.output_projection is not None
    assert plan.embedding.weight.shape == (VOCAB, 32)
    decoder = model.model.decoder
    assert plan.layers[1].input_norm is not None
    assert plan.layers[1].input_norm.module is decoder.layers[0].final_layer_norm
    assert plan.final_norm is not None
    assert plan.final_norm.module is decoder.layers[1].final_layer_norm


class Wrapped(nn.Module):
    """What adapters do: the model is an attribute of an attribute."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.model(*args, **kwargs)


class Adapter(nn.Module):
    """A linear layer with a low-rank part, as PEFT makes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_wrapped_models() -> None:
    model = FAMILIES["llama"]()
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        layer.mlp.down_proj = Adapter(layer.mlp.down_proj)
    wrapped = Wrapped(model)
    plan = match(wrapped)
    assert plan.decoder is model.model
    assert isinstance(attention(plan).qkv.modules[0], Adapter)
    assert verify(wrapped, plan) < 1e-4


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt_350m", "gemma2"])
def test_decoder_without_a_head(name: str) -> None:
    model = FAMILIES[name]().base_model
    plan = match(model)
    assert plan.head is None
    assert plan.max_positions == POSITIONS
    assert verify(model, plan) < 1e-4


def test_language_model_of_a_vision_model() -> None:
    model = FAMILIES["llava"]()
    plan = match(model)
    text = next(m for m in model.modules() if type(m).__name__ == "LlamaModel")
    assert plan.decoder is text
    assert match(text).head is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("jamba_gelu", r"layers\.0\.mamba: JambaMambaMixer computes something else \(off by "),
        ("yuan", r"layers\.0\.self_attn: has linear layers \(q_proj, k_proj, v_proj, o_proj\)"),
    ],
)
def test_no_match(name: str, message: str) -> None:
    model = FAMILIES[name]()
    with pytest.raises(MatchError, match=message):
        match(model)
    errors = why_not(model)
    assert errors
    assert all(error.module and error.reason for error in errors)


def test_changed_parts_are_named() -> None:
    def broken(path: str, part: nn.Module) -> MatchError:
        model = FAMILIES["llama"]()
        owner, name = path.rsplit(".", 1)
        setattr(model.get_submodule(owner), name, part)
        with pytest.raises(MatchError) as caught:
            match(model)
        assert [str(e) for e in why_not(model)] == [str(caught.value)]
        return caught.value

    error = broken("model.layers.1.mlp.act_fn", nn.Softsign())
    assert error.module == "model.layers.1.mlp"
    assert "activation" in error.reason
    error = broken("model.layers.1.input_layernorm", nn.GroupNorm(1, 7))
    assert error.module == "model.layers.1.input_layernorm"
    error = broken("model.layers.0.self_attn.o_proj", nn.Sequential(nn.Linear(64, 64), nn.Tanh()))
    assert error.module == "model.layers.0"
    error = broken("model.layers.0.self_attn.v_proj", nn.Sequential(nn.Linear(64, 32), nn.Tanh()))
    assert error.module == "model.layers.0.self_attn"


def test_other_models() -> None:
    with pytest.raises(MatchError, match="training mode"):
        match(FAMILIES["llama"]().train())
    with pytest.raises(MatchError, match="fails on 7 tokens"):
        match(nn.Linear(3, 3).eval())
    with pytest.raises(MatchError, match="meta device"):
        match(FAMILIES["llama"]().to("meta"))

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, 8)

        def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
            return self.table(input_ids).mean(1)

    with pytest.raises(MatchError, match="no list of layers"):
        match(Bag().eval())
    with pytest.raises(ValueError, match=r"run_plan: input_ids must be \[B, T\], got \[3\]"):
        run_plan(match(FAMILIES["llama"]()), torch.tensor([1, 2, 3]))
