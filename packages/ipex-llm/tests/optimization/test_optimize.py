# SPDX-License-Identifier: Apache-2.0
"""`ipex.llm.optimize`: what it changes, what it leaves, and how it goes back."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from families import FAMILIES, tokens
from torch.ao.quantization import QConfigMapping

import ipex_core
from ipex_llm.optimization import optimize, optimize_transformers
from ipex_quant import WoqWeightDtype, get_weight_only_quant_qconfig_mapping, woq_qconfig
from ipex_quant.weight_only.linear import WoqLinearModule

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def same(a, b):
    assert list(a) == list(b)
    for name, value in a.items():
        assert value.dtype == b[name].dtype and torch.equal(value, b[name]), name


def logits(model, ids=None):
    with torch.no_grad():
        return model(tokens(1, 9) if ids is None else ids).logits


def record(model):
    return next(row for row in ipex_core.explain(model).rows if row.step == "llm")


@pytest.mark.parametrize(
    "name", ["llama", "llama_tied", "gpt2", "gpt_neox", "phi3", "qwen3_moe", "gpt_oss"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_and_restore(name, dtype):
    if name not in FAMILIES:
        pytest.skip("not in this transformers")
    model = FAMILIES[name]()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    kinds = [type(m) for m in model.modules()]
    fast = optimize(model, dtype=dtype)
    assert fast is not model and record(fast).done
    assert isinstance(fast, type(model)) and type(fast).__name__ == type(model).__name__
    same(fast.state_dict(), before)
    same(model.state_dict(), before)
    ipex_core.restore(fast)
    same(fast.state_dict(), before)
    assert [type(m) for m in fast.modules()] == kinds
    assert torch.equal(logits(fast), logits(model))


def test_inplace_and_loading():
    model = FAMILIES["llama"]()
    other = {k: v + 0.01 for k, v in model.state_dict().items()}
    expected = FAMILIES["llama"]()
    expected.load_state_dict(other)
    assert optimize(model, inplace=True) is model
    logits(model)
    model.load_state_dict(other)
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-4)
    ids = tokens(1, 5)
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), expected.generate(ids, **options))


@pytest.mark.parametrize("name", ["llama", "jamba_gelu"])
@pytest.mark.parametrize("inplace", [False, True])
def test_once_more(name, inplace):
    """The second call begins with the original model; its arguments count."""
    stock = FAMILIES[name]()
    once = optimize(FAMILIES[name]())
    twice = optimize(copy.deepcopy(once), kv_cache_dtype="int8", inplace=inplace)
    assert record(twice).done == record(once).done
    assert type(twice).__mro__[1] is not type(once) and type(twice) is type(once)
    torch.testing.assert_close(logits(twice), logits(stock), rtol=0.1, atol=0.1)
    if not inplace:
        torch.testing.assert_close(logits(once), logits(stock), rtol=1e-4, atol=1e-4)
    thrice = optimize(twice)
    torch.testing.assert_close(logits(thrice), logits(stock), rtol=1e-4, atol=1e-4)
    same(stock.state_dict(), ipex_core.restore(thrice).state_dict())
    assert type(thrice) is type(stock)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_double_precision_runs_the_models_own_forward(name):
    stock, fast = FAMILIES[name]().double(), optimize(FAMILIES[name]()).double()
    torch.testing.assert_close(logits(fast), logits(stock))
    fast = optimize(FAMILIES[name]().double())
    torch.testing.assert_close(logits(fast), logits(stock))
    assert not record(fast).done


def test_copy_and_pickle():
    fast = optimize(FAMILIES["llama"]())
    want = logits(fast)
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        torch.testing.assert_close(logits(again), want, rtol=1e-5, atol=1e-5)
        assert torch.equal(
            again.generate(tokens(1, 5), max_new_tokens=5, do_sample=False),
            fast.generate(tokens(1, 5), max_new_tokens=5, do_sample=False),
        )
    buffer = io.BytesIO()
    torch.save(fast.state_dict(), buffer)


def test_save_pretrained(tmp_path):
    import safetensors.torch
    import transformers

    fast = optimize(FAMILIES["llama"](), dtype=torch.bfloat16)
    fast.save_pretrained(tmp_path)
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    wanted = FAMILIES["llama"]().state_dict()
    same(dict(sorted(saved.items())), dict(sorted(wanted.items())))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is transformers.LlamaForCausalLM


def test_layer_by_layer():
    fast = optimize(FAMILIES["jamba_gelu"]())
    assert not record(fast).done and "computes something else" in record(fast).text
    fast = optimize(FAMILIES["llama"](), deployment_mode=False)
    assert "deployment_mode" in record(fast).text


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"dtype": torch.int8}, ValueError, "dtype must be one of"),
        ({"dtype": "bf16"}, TypeError, "dtype must be a torch.dtype"),
        ({"device": "cuda"}, RuntimeError, "device must be 'cpu' or 'xpu'"),
        ({"device": "gpu"}, RuntimeError, "device must be 'cpu' or 'xpu'"),
        ({"inplace": 1}, TypeError, "inplace must be"),
        ({"deployment_mode": "x"}, TypeError, "deployment_mode must be True or False"),
        ({"cache_weight_for_large_batch": 2}, TypeError, "cache_weight_for_large_batch must be"),
        ({"depth": True}, ValueError, "depth must be 1, 2 or 3"),
        ({"qconfig_summary_file": "x.json"}, ValueError, "qconfig_summary_file must come with"),
        ({"kv_cache_dtype": "int4"}, ValueError, "kv_cache_dtype must be"),
        ({"low_precision_checkpoint": 3}, ValueError, "low_precision_checkpoint must be"),
    ],
)
def test_bad_arguments(options, error, text):
    with pytest.raises(error, match=text):
        optimize(FAMILIES["llama"](), **options)


def test_training():
    model = FAMILIES["llama"]()
    with pytest.raises(ValueError, match="optimizer must be None"):
        optimize(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(AssertionError, match="training mode"):
        optimize(model.train())
    with pytest.raises(AttributeError, match=r"must be a torch\.nn\.Module"):
        optimize(3)


def test_former_name():
    with pytest.warns(FutureWarning, match="optimize_transformers is deprecated"):
        optimize_transformers(FAMILIES["llama"]())


@pytest.mark.filterwarnings("ignore:optimize_transformers is deprecated")
def test_former_name_with_woq():
    def quantized(model):
        return [type(m).__name__ for m in model.modules() if isinstance(m, WoqLinearModule)]

    config = get_weight_only_quant_qconfig_mapping(weight_dtype=WoqWeightDtype.INT4, group_size=128)
    ids = torch.tensor([[1, 2, 3]])
    once = optimize_transformers(FAMILIES["llama"](), woq=True, depth=1)
    expected = optimize(FAMILIES["llama"](), quantization_config=config, depth=1)
    assert quantized(once) == quantized(expected) != []
    torch.testing.assert_close(once(ids).logits, expected(ids).logits)
    # What is quantized already stays as it is.
    again = optimize_transformers(once, woq=True, depth=1)
    torch.testing.assert_close(again(ids).logits, expected(ids).logits)
    assert quantized(optimize_transformers(FAMILIES["llama"](), woq=False, depth=1)) == []
    with pytest.raises(TypeError, match="woq must be True or False, got 'int4'"):
        optimize_transformers(FAMILIES["llama"](), woq="int4")


@pytest.mark.parametrize("lowp", ["NONE", "INT8"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "phi3"])
def test_quantized_weights(name, lowp):
    import ipex_quant as q

    config = q.woq_qconfig(
        weight_dtype=q.WoqWeightDtype.INT4, group_size=32, lowp_mode=q.WoqLowpMode[lowp]
    )
    model = FAMILIES[name]()
    reference = copy.deepcopy(model)
    q.quantize_linears(reference, config)
    fast = optimize(model, quantization_config=config)
    assert record(fast).done
    wanted, found = reference.state_dict(), fast.state_dict()
    assert set(wanted) == set(found)
    for key, value in wanted.items():
        assert torch.equal(value, found[key]), key
    ids = tokens(2, 12)
    close = {"rtol": 1e-4, "atol": 1e-4} if lowp == "NONE" else {"rtol": 0.1, "atol": 0.3}
    torch.testing.assert_close(logits(fast, ids), logits(reference, ids), **close)
    if lowp == "NONE":
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(fast.generate(ids, **options), reference.generate(ids, **options))
    with torch.no_grad():  # its own forward
        fast(ids, output_hidden_states=True)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_configurations_of_single_layers(name):
    """A mapping may say other things of some layers; what it leaves out stays float."""
    eight, four = woq_qconfig(), woq_qconfig(weight_dtype=WoqWeightDtype.INT4, group_size=16)
    mapping = QConfigMapping().set_global(eight).set_module_name("lm_head", None)
    mapping.set_module_name_regex(r".*(o_proj|experts)", four)
    model, fast = FAMILIES[name](), optimize(FAMILIES[name](), quantization_config=mapping)
    attention = fast.model.layers[0].self_attn
    assert attention.q_proj.dtype is WoqWeightDtype.INT8
    assert attention.o_proj.dtype is WoqWeightDtype.INT4
    assert fast.lm_head.weight.is_floating_point()
    assert [row.done for row in ipex_core.explain(fast).rows if row.step == "llm"] == [True]
    ids = tokens(2, 9)
    with torch.no_grad():
        got, want = (m(ids).logits.flatten() for m in (fast, model))
    assert torch.cosine_similarity(got, want, dim=0) > 0.98
    only = QConfigMapping().set_module_name("lm_head", eight)
    found = optimize(FAMILIES[name](), quantization_config=only)
    assert found.lm_head.dtype is WoqWeightDtype.INT8
    assert found.model.layers[0].self_attn.q_proj.weight.is_floating_point()


def test_low_precision_checkpoint():
    import ipex_quant as q

    model = FAMILIES["llama"]()
    source = copy.deepcopy(model)
    weights = {}
    for layer, module in source.named_modules():
        if isinstance(module, torch.nn.Linear) and layer != "lm_head":
            codes, scales, _ = q.quantize_per_channel(
                module.weight, q.WoqWeightDtype.INT8, sym_quant=True
            )
            weights[f"{layer}.weight"], weights[f"{layer}.weight_scale"] = codes, scales
            module.weight.data = codes.float() * scales[:, None]
    fast = optimize(model, low_precision_checkpoint=(weights, {"quant_method": "int8"}))
    assert record(fast).done
    torch.testing.assert_close(logits(fast), logits(source), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_made_faster_compile_without_graph_breaks(name, dtype):
    model = optimize(FAMILIES[name](), dtype=dtype, deployment_mode=False)
    ids = tokens(1, 12)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        got = compiled(ids, use_cache=False).logits
    bound = 1e-4 if dtype == torch.float32 else 0.05  # a few roundings of bfloat16
    torch.testing.assert_close(got, want, atol=bound, rtol=bound)
