# SPDX-License-Identifier: Apache-2.0
"""ipex in transformers and vLLM, through their registries."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import subprocess
import sys
import types

import pytest
import torch
from torch import nn

import ipex_quant
from ipex_core._optimize._hf_attention import attention_forward
from ipex_llm.integrations import IpexConfig, register_transformers
from ipex_llm.integrations import vllm as plugin

transformers = pytest.importorskip("transformers")

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def registered():
    register_transformers()
    register_transformers()  # again: nothing happens


def llama(**changes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SHAPE, **changes})
    return transformers.LlamaForCausalLM(config).eval()


def padded():
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


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
        model.set_attn_implementation(kind) if hasattr(model, "set_attn_implementation") else (
            setattr(model.config, "_attn_implementation", kind)
        )
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
        model.set_attn_implementation(kind)
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


# -- quantised folders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("weights", ["INT4", "INT8"])
def test_from_pretrained_loads_what_save_wrote(weights, tied, tmp_path, caplog):
    model = llama(tie_word_embeddings=tied)
    kind = ipex_quant.WoqWeightDtype[weights]
    skip = ["lm_head"] if tied else []
    ipex_quant.quantize_linears(
        model, ipex_quant.woq_qconfig(weight_dtype=kind, group_size=32), skip
    )
    with torch.no_grad():
        wanted = model(**padded()).logits
    ipex_quant.save(model, tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not [
        r for r in caplog.records if "newly initialized" in r.message or "not used" in r.message
    ]
    assert isinstance(again.model.layers[0].mlp.up_proj, ipex_quant.WeightOnlyQuantizedLinear)
    assert not any(t.is_meta for t in [*again.parameters(), *again.buffers()])
    with torch.no_grad():
        got = again(**padded()).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    # And once more: what was loaded can be saved and loaded.
    ipex_quant.save(again, tmp_path / "again")
    third = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        torch.testing.assert_close(third(**padded()).logits, wanted, rtol=0, atol=0)


def test_from_pretrained_quantises_while_loading(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "float")
    config = IpexConfig("int8", group_size=-1)
    fast = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "float", quantization_config=config
    )
    assert isinstance(fast.model.layers[1].self_attn.o_proj, ipex_quant.WeightOnlyQuantizedLinear)
    assert type(fast.lm_head) is nn.Linear
    with torch.no_grad():
        got, wanted = fast(**padded()).logits, model(**padded()).logits
    assert nn.functional.cosine_similarity(got.flatten(), wanted.flatten(), 0) > 0.99
    with pytest.raises(ValueError, match="weight_dtype must be one of"):
        IpexConfig("int3")


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


# -- vLLM -------------------------------------------------------------------------------------------------------------


def fake_vllm(monkeypatch, *, cpu=True, table_in_module=False):
    """Put modules with the contract of vLLM's registry of custom ops in the place of vLLM."""
    table: dict[str, type] = {}

    class CustomOp(nn.Module):
        def __new__(cls, *args, **kwargs):
            return super().__new__(table.get(cls.__name__, cls))

        def __init__(self):
            super().__init__()
            self._forward_method = self.forward_cpu

        def forward(self, *args, **kwargs):
            return self._forward_method(*args, **kwargs)

        def forward_cpu(self, *args, **kwargs):
            return self.forward_native(*args, **kwargs)

        @classmethod
        def register_oot(cls, _decorated_op_cls=None, name=None):
            def decorator(op_cls):
                assert name not in table, f"Duplicate op name: {name}"
                op_cls.name = name
                table[name] = op_cls
                return op_cls

            return decorator if _decorated_op_cls is None else decorator(_decorated_op_cls)

    class RMSNorm(CustomOp):
        offset = 0.0

        def __init__(self, hidden_size, eps=1e-6, var_hidden_size=None):
            super().__init__()
            self.variance_epsilon = eps
            self.variance_size_override = var_hidden_size
            self.weight = nn.Parameter(torch.rand(hidden_size))

        def forward_native(self, x, residual=None):
            x = x if residual is None else x + residual
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            y = x * scale * (self.weight + self.offset)
            return y if residual is None else (y, x)

    class GemmaRMSNorm(RMSNorm):
        offset = 1.0

    class SiluAndMul(CustomOp):
        def forward_native(self, x):
            gate, up = x.chunk(2, -1)
            return nn.functional.silu(gate) * up

    class GeluAndMul(CustomOp):
        def __init__(self, approximate="none"):
            super().__init__()
            self.approximate = approximate

        def forward_native(self, x):
            gate, up = x.chunk(2, -1)
            return nn.functional.gelu(gate, approximate=self.approximate) * up

    class QuickGELU(CustomOp):
        def forward_native(self, x):
            return x * torch.sigmoid(1.702 * x)

    contents = {
        "vllm": {},
        "vllm.platforms": {"current_platform": types.SimpleNamespace(is_cpu=lambda: cpu)},
        "vllm.model_executor": {},
        "vllm.model_executor.custom_op": {"CustomOp": CustomOp},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.layernorm": {"RMSNorm": RMSNorm, "GemmaRMSNorm": GemmaRMSNorm},
        "vllm.model_executor.layers.activation": {
            "SiluAndMul": SiluAndMul,
            "GeluAndMul": GeluAndMul,
            "QuickGELU": QuickGELU,
        },
    }
    if table_in_module:
        contents["vllm.model_executor.custom_op"]["op_registry_oot"] = table
    else:
        CustomOp.op_registry_oot = table
    for name, values in contents.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    ops = {**contents["vllm.model_executor.layers.layernorm"]}
    ops |= contents["vllm.model_executor.layers.activation"]
    return ops, table


@pytest.mark.parametrize("in_module", [False, True])
def test_vllm_runs_our_ops_where_its_registry_accepts_them(in_module, monkeypatch):
    ops, table = fake_vllm(monkeypatch, table_in_module=in_module)
    monkeypatch.setenv("VLLM_PLUGINS", "other, ipex")
    assert plugin.register() == plugin.register() == tuple(plugin.OPS)
    assert set(table) == set(plugin.OPS)
    x, more = torch.randn(5, 32), torch.randn(5, 32)
    for name, arguments in (
        ("RMSNorm", (32,)),
        ("GemmaRMSNorm", (32,)),
        ("SiluAndMul", ()),
        ("GeluAndMul", ("tanh",)),
        ("QuickGELU", ()),
    ):
        layer = ops[name](*arguments)
        assert type(layer) is table[name] and isinstance(layer, ops[name])
        inputs = [(x,), (x, more)] if "Norm" in name else [(x,)]
        for one in inputs:
            torch.testing.assert_close(
                layer(*one), layer.forward_native(*one), rtol=1e-5, atol=1e-5
            )
    # What the op does not compute stays vLLM's.
    norm = ops["RMSNorm"](32, var_hidden_size=16)
    torch.testing.assert_close(norm(x), norm.forward_native(x), rtol=0, atol=0)


def test_vllm_is_left_alone_unless_asked(monkeypatch, caplog):
    _, table = fake_vllm(monkeypatch)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert plugin.register() == () and not table
    monkeypatch.setenv("VLLM_PLUGINS", "ipex")
    _, table = fake_vllm(monkeypatch, cpu=False)
    assert plugin.register() == () and not table
    ops, table = fake_vllm(monkeypatch)
    table["SiluAndMul"] = ops["SiluAndMul"]  # of another plug-in
    assert "SiluAndMul" not in plugin.register()
    assert table["SiluAndMul"] is ops["SiluAndMul"]


def test_vllm_finds_the_plugin():
    if "site-packages" not in str(plugin.__file__):
        pytest.skip("ipex-llm is not installed, only on the path")
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="ipex")
    assert [entry.load() for entry in found] == [plugin.register]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_the_real_vllm_accepts_our_ops(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "ipex")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vllm is not for the CPU")
    assert set(plugin.register()) >= {"RMSNorm", "SiluAndMul"}
