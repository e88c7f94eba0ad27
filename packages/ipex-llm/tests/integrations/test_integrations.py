# SPDX-License-Identifier: Apache-2.0
"""ipex in transformers, through its registries."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from small_llama import SHAPE, llama, padded
from torch import nn

import ipex_core
from ipex_core.optimization import transformers as _hf_attention
from ipex_core.optimization.transformers import attention_forward
from ipex_llm import register_transformers
from ipex_llm.optimization.proof import small as _small

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def registered():
    register_transformers()
    register_transformers()  # again: nothing happens


def choose(model, kind):
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(kind)
    else:  # before 4.53
        model.config._attn_implementation = kind


# -- attention --------------------------------------------------------------------------------------------------------


def families():
    small = {**SHAPE, "head_dim": 16}
    yield "llama", lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    config = {**small, "sliding_window": 4, "pad_token_id": 0}
    yield (
        "gemma2 (softcap, window)",
        lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**config)),
    )
    bert = {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}
    yield "bert", lambda: transformers.BertModel(transformers.BertConfig(**bert))
    if hasattr(transformers, "GptOssForCausalLM"):
        more = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
        yield (
            "gpt-oss (sinks)",
            lambda: transformers.GptOssForCausalLM(transformers.GptOssConfig(**small, **more)),
        )


@pytest.mark.parametrize(
    ("name", "make"), list(families()), ids=lambda v: v if isinstance(v, str) else ""
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_attention_equals_eager(name, make, dtype):
    torch.manual_seed(0)
    model = make().eval().to(dtype)
    inputs = padded()
    found = {}
    calls = []
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    for kind in ("eager", "ipex"):
        choose(model, kind)
        calls.clear()
        with torch.no_grad(), Count():
            found[kind] = model(**inputs)[0].float()
        ours = sum("ipex.attention" in call for call in calls)
        if kind == "eager":
            assert ours == 0
        elif (
            "(" in name
        ):  # what the stock function cannot do; without it the faster of both is taken
            assert ours == SHAPE["num_hidden_layers"]
    seen = inputs["attention_mask"].bool()
    exact = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found["ipex"][seen], found["eager"][seen], **exact)


@pytest.mark.parametrize(
    ("name", "make"), [row for row in families() if "(" in row[0]], ids=lambda v: str(v)[:7]
)
@pytest.mark.parametrize("with_padding", [True, False])
def test_softcaps_and_sinks_are_trained(name, make, with_padding):
    torch.manual_seed(0)
    model = make().train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
        if hasattr(module, "sinks"):
            nn.init.normal_(module.sinks)
    inputs = padded()
    seen = inputs["attention_mask"].bool()
    if not with_padding:
        del inputs["attention_mask"]
        seen = torch.ones_like(seen)
    gradients = {}
    for kind in ("eager", "ipex"):
        choose(model, kind)
        model.zero_grad()
        model(**inputs)[0][seen].square().mean().backward()
        gradients[kind] = {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
    torch.testing.assert_close(gradients["ipex"], gradients["eager"], rtol=1e-4, atol=1e-6)


def test_dropout_of_attention_with_a_softcap():
    query, key = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16)
    arguments = (nn.Module(), query, key, key, None)
    plain, _ = attention_forward(*arguments, softcap=3.0)
    torch.manual_seed(0)
    tries = [attention_forward(*arguments, dropout=0.5, softcap=3.0)[0] for _ in range(400)]
    assert not torch.equal(tries[0], tries[1])
    torch.testing.assert_close(torch.stack(tries).mean(0), plain, rtol=0, atol=0.35)


def test_attention_through_generate_and_training():
    model = llama()
    wanted = model.generate(**padded(), max_new_tokens=5, do_sample=False)
    again = transformers.LlamaForCausalLM._from_config(model.config, attn_implementation="ipex")
    again.load_state_dict(model.state_dict())
    again.eval()
    assert again.config._attn_implementation == "ipex"
    got = again.generate(**padded(), max_new_tokens=5, do_sample=False)
    torch.testing.assert_close(got, wanted)
    again.train()
    loss = again(**padded(), labels=padded()["input_ids"]).loss
    loss.backward()
    assert again.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


@pytest.mark.skipif(not hasattr(transformers, "AttentionMaskInterface"), reason="of 4.53 and newer")
@pytest.mark.parametrize("name", ["Bloom", "CodeGen", "Mpt"])
def test_models_with_attention_of_their_own_get_the_mask_of_eager(name):
    shape = {"Bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4}}
    shape["CodeGen"] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64}
    shape["Mpt"] = {"d_model": 64, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2}
    eager, again = (
        getattr(transformers, f"{name}ForCausalLM")
        ._from_config(
            getattr(transformers, f"{name}Config")(vocab_size=96, **shape[name]),
            attn_implementation=kind,
        )
        .eval()
        for kind in ("eager", "ipex")
    )
    again.load_state_dict(eager.state_dict())
    inputs = padded()
    seen = inputs["attention_mask"].bool()
    if "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[type(eager).__module__]):
        pytest.skip(
            f"{name} uses the attention interface in transformers {transformers.__version__}"
        )
    _hf_attention._own.clear()
    with torch.no_grad():
        wanted = eager(**inputs).logits
        with pytest.warns(UserWarning, match=f"{name}Model has attention of its own"):
            got = again(**inputs).logits
        assert torch.equal(got[seen], wanted[seen])


def models_with_tables():
    """Yield a name, a model class, a configuration and inputs of models that choose attention from their own table."""
    t = transformers
    decoder = {"vocab_size": 96}
    yield (
        "Falcon",
        t.FalconForCausalLM,
        t.FalconConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True, **decoder
        ),
    )
    yield (
        "GPTJ",
        t.GPTJForCausalLM,
        t.GPTJConfig(n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64, **decoder),
    )
    yield (
        "GPTNeo",
        t.GPTNeoForCausalLM,
        t.GPTNeoConfig(
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            window_size=4,
            max_position_embeddings=64,
            attention_types=[[["global", "local"], 1]],
            **decoder,
        ),
    )
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
    vision |= {"patch_size": 8, "intermediate_size": 32}
    yield (
        "Git",
        t.GitForCausalLM,
        t.GitConfig(
            vision_config=vision,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            **decoder,
        ),
    )


@pytest.mark.skipif(not hasattr(transformers, "AttentionMaskInterface"), reason="of 4.53 and newer")
@pytest.mark.parametrize(
    ("name", "kind", "config"),
    list(models_with_tables()),
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_models_that_choose_attention_from_a_table_keep_their_own(name, kind, config, tmp_path):
    torch.manual_seed(0)
    eager = kind._from_config(config, attn_implementation="eager").eval()
    if not any("_ATTENTION_CLASSES" in name for name in vars(sys.modules[kind.__module__])):
        pytest.skip(f"{name} has no such table in transformers {transformers.__version__}")
    eager.save_pretrained(tmp_path)
    with pytest.warns(
        UserWarning, match=f"{name}\\w*Attention has attention of its own, which runs"
    ):
        again = kind.from_pretrained(tmp_path, attn_implementation="ipex")
    inputs = padded()
    seen = inputs["attention_mask"].bool()
    with torch.no_grad():
        wanted, got = eager(**inputs).logits, again(**inputs).logits
        torch.testing.assert_close(
            got[:, -seen.shape[1] :][seen], wanted[:, -seen.shape[1] :][seen]
        )
        tokens = again.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert torch.equal(tokens, eager.generate(**inputs, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("first", ["register", "model"])
def test_tables_of_modules_imported_before_and_after(first):
    code = """
import sys, inspect
from ipex_llm import register_transformers
if FIRST: register_transformers()
import transformers.models.falcon.modeling_falcon as falcon
stock = dict(falcon.FALCON_ATTENTION_CLASSES)
if not FIRST: register_transformers(); register_transformers()
table = falcon.FALCON_ATTENTION_CLASSES
assert set(table) == {*stock, "ipex"} and table["eager"] is falcon.FalconAttention
assert "class FalconAttention" in inspect.getsource(falcon) and falcon.__spec__.origin == falcon.__file__
assert sum(type(f).__module__ == "ipex_core.util.import_hooks" for f in sys.meta_path) == 1
import transformers.models.sam.modeling_sam as sam
tables = sam.SAM_VISION_ATTENTION_CLASSES
config = sam.SamVisionConfig(hidden_size=32, num_attention_heads=2, attn_implementation="ipex")
import warnings; warnings.simplefilter("error")
try: tables["ipex"](config, 2)
except UserWarning as text: assert "SamVisionSdpaAttention has attention of its own" in str(text), text
else: raise AssertionError
assert type(tables["ipex"](config, 2)) is tables["sdpa"]
"""
    code = f"FIRST = {first == 'register'}\n{code}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_the_first_call_may_be_a_compiled_one():
    code = """
import torch, transformers
from ipex_llm import register_transformers
register_transformers()
config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=96)
config._attn_implementation = "ipex"
model = transformers.LlamaForCausalLM(config).eval()
ids, mask = torch.ones(2, 7, dtype=torch.long), torch.ones(2, 7, dtype=torch.long)
mask[0, 0] = 0
with torch.no_grad():
    torch.compile(model, fullgraph=True, backend="eager")(ids, attention_mask=mask)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_registering_imports_no_model_and_patches_nothing():
    code = """
import sys, ipex_llm
assert "transformers" not in sys.modules
import transformers.modeling_utils as m
before = {k: id(v) for k, v in vars(m).items()}
ipex_llm.register_transformers()
assert before == {k: id(v) for k, v in vars(m).items()}
assert not [n for n in sys.modules if n.startswith("transformers.models.llama.")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# -- arguments that attention classes pass on purpose -----------------------------------------------------------------


#: Module, configuration, model and stock attention of classes whose forward masks what is not selected only where the
#: attention is called "eager" or "sdpa".
SELECTING = (
    ("deepseek_v32", "DeepseekV32Config", "DeepseekV32ForCausalLM", "sdpa"),
    ("glm_moe_dsa", "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", "sdpa"),
    ("axk2", "AXK2Config", "AXK2ForCausalLM", "sdpa"),
    ("dots3_note", "Dots3NoteTextConfig", "Dots3NoteForCausalLM", "sdpa"),
    ("mistral_large4", "MistralLarge4TextConfig", "MistralLarge4TextModel", "sdpa"),
    ("hy_v4", "HYV4Config", "HYV4ForCausalLM", "eager"),
    ("hy_v4_vl", "HYV4VLTextConfig", "HYV4VLTextModel", "eager"),
    # Its mask is another one under "sdpa", which leaves out rows that select nothing.
    ("glm5_next", "Glm5NextTextConfig", "Glm5NextTextModel", "eager"),
)


def selecting(module, config, kind, attention, **changes):
    """Return a small model with random weights; skip where transformers has none."""
    source = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    small = _small.small_config(getattr(source, config)())
    for name, value in changes.items():
        setattr(small, name, value)
    small._attn_implementation = attention
    return _small.randomize(getattr(source, kind)(small))


def outputs(model, ids, mask=None, cuts=()):
    """Return what the model says to texts, in parts that share a cache."""
    given = {} if mask is None else {"attention_mask": mask}
    found, cache = [], None
    for begin, end in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
        more = {"use_cache": True, "past_key_values": cache} if cuts else {"use_cache": False}
        result = model(input_ids=ids[:, begin:end], **given, **more)
        cache = result.past_key_values if cuts else None
        found.append(result.logits if "logits" in result else result.last_hidden_state)
    whole = torch.cat(found, 1)
    return whole if mask is None else whole[mask.bool()]


@pytest.mark.parametrize(("module", "config", "kind", "attention"), SELECTING)
@torch.no_grad()
def test_a_selection_of_keys_is_part_of_the_mask(module, config, kind, attention):
    model = selecting(module, config, kind, attention, index_topk=4)
    random = torch.Generator().manual_seed(0)
    # Below, at and beyond what is selected, and beyond the window of 9 of Dots 3.
    texts = [torch.randint(3, 90, (2, n), generator=random) for n in (3, 4, 5, 11, 20)]
    mask = torch.ones_like(texts[-1])
    mask[1, :5] = 0

    def said(one):
        found = [outputs(one, ids) for ids in texts]
        return [
            *found,
            outputs(one, texts[-1], mask),
            outputs(one, texts[-1], cuts=(3, 4, 5, 13)),
        ]

    wanted = said(model)
    optimized = ipex_core.optimize(model)
    assert optimized.config._attn_implementation == attention
    model.set_attn_implementation("ipex")
    for one in (model, optimized):
        for a, b in zip(said(one), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for one in model.modules():  # the selection matters
        if hasattr(one, "index_topk"):
            one.index_topk = 20
    assert (wanted[4] - outputs(model, texts[-1])).abs().max() > 1e-2


@torch.no_grad()
def test_a_selection_of_blocks_is_refused():
    changes = {
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    }
    names = ("minimax_m3_vl", "MiniMaxM3VLTextConfig", "MiniMaxM3VLForCausalLM", "sdpa")
    model = selecting(*names, **changes)
    ids = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(0))
    wanted = outputs(model, ids)
    optimized = ipex_core.optimize(model)
    assert optimized.config._attn_implementation == "sdpa"
    torch.testing.assert_close(outputs(optimized, ids), wanted, rtol=1e-4, atol=1e-4)
    model.set_attn_implementation("ipex")
    text = "MiniMaxM3VLAttention passes 'block_indices', which it does not know: use attn_impl"
    with pytest.raises(NotImplementedError, match=text):
        outputs(model, ids)


class Selective(torch.nn.Module):
    def forward(self, function, *tensors, **kwargs):
        return function(self, *tensors, None, blocks=torch.zeros(1), **kwargs)


def test_unknown_arguments_of_attention_classes_are_refused():
    q = torch.randn(1, 2, 6, 16)
    with pytest.raises(NotImplementedError, match=r"Selective passes 'blocks', which it does not"):
        Selective()(attention_forward, q, q, q)

    class Plain(torch.nn.Module):
        def forward(self, function, *tensors, **kwargs):
            return function(self, *tensors, None, **kwargs)

    # What a user hands through the forwards of a model says nothing to its attention.
    wanted, _ = Plain()(attention_forward, q, q, q)
    got, _ = Plain()(attention_forward, q, q, q, blocks=torch.zeros(1))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("masked", [None, torch.bool, torch.float32])
def test_selected_keys(masked):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 16) for _ in range(3))
    indices = torch.stack([torch.tensor([[0, -1], [0, 1], [2, 0], [1, 3], [4, 2]])] * 2)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    mask = None if masked is None else causal.expand(2, 1, 5, 5)
    if masked == torch.float32:
        mask = torch.zeros(2, 1, 5, 5).masked_fill(~mask, torch.finfo(torch.float32).min)
    chosen = torch.zeros(5, 5, dtype=torch.bool)
    for row, places in enumerate(indices[0].tolist()):
        chosen[row, [p for p in places if p >= 0]] = True
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, causal & chosen)
    got, _ = attention_forward(torch.nn.Module(), q, k, v, mask, indices=indices)
    torch.testing.assert_close(got.transpose(1, 2), wanted)
