# SPDX-License-Identifier: Apache-2.0
"""`ipex.llm.plan` says what `ipex.llm.optimize` does, and changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest
import torch
from families import FAMILIES, build
from torch import nn
from torch.ao.quantization import QConfigMapping

import ipex_core
import ipex_llm
from ipex_core.errors import MissingComponentError
from ipex_core.optimization.records import class_name
from ipex_llm import OptimizePlan, optimization, optimize, plan
from ipex_llm.model_runner import woq_experts
from ipex_llm.optimization.xpu import optimize_on_xpu
from ipex_llm.patch.decoder import DecoderMixin
from ipex_llm.patch.layer import LayerMixin
from ipex_quant import WoqWeightDtype, quantize_linears, woq_qconfig
from ipex_quant.weight_only.linear import WoqLinearModule

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

INT8 = woq_qconfig()
INT4 = woq_qconfig(weight_dtype=WoqWeightDtype.INT4, group_size=32)
MIXED = (
    QConfigMapping()
    .set_global(INT8)
    .set_module_name("lm_head", None)
    .set_module_name_regex(
        ".*(o_proj|experts)", woq_qconfig(weight_dtype=WoqWeightDtype.INT4, group_size=16)
    )
)
#: Queries stay float where keys and values do not: they have no common packed weight.
SPLIT = QConfigMapping().set_global(INT8).set_module_name_regex(".*q_proj", None)
#: Formats differ among layers with one input.
UNLIKE = QConfigMapping().set_global(INT8).set_module_name_regex(".*k_proj", INT4)

OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "depth 2": {"depth": 2},
    "depth 1": {"depth": 1},
    "not deployed": {"deployment_mode": False},
    "int8": {"quantization_config": INT8},
    "int4": {"quantization_config": INT4, "dtype": torch.bfloat16},
    "mixed": {"quantization_config": MIXED},
    "split": {"quantization_config": SPLIT},
    "split depth 2": {"quantization_config": SPLIT, "depth": 2},
    "unlike": {"quantization_config": UNLIKE},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "fp8 cache": {"kv_cache_dtype": "fp8", "dtype": torch.bfloat16},
}
#: A decoder, mixtures of experts, one whose layers run alone, one with latent attention.
CASES = [
    *(("llama", name) for name in OPTIONS),
    *(("mixtral", name) for name in ("float32", "int8", "mixed", "split", "depth 2")),
    *(("qwen3_moe", name) for name in ("int4", "unlike")),
    *(("gpt_oss", name) for name in ("bfloat16", "int8")),
    *(("jamba_gelu", name) for name in ("float32", "int8", "split", "not deployed")),
    *(("gpt2", name) for name in ("int8", "split")),
    *(("deepseek_v3", name) for name in ("float32", "int8", "depth 2")),
    *(("bloom", name) for name in ("depth 2", "int8 cache")),
]


def state(model: nn.Module) -> Any:
    """Return all that a call could change in a model."""
    tensors = {
        name: (id(t), t._version, t.data_ptr(), t.detach().clone())
        for name, t in (*model.named_parameters(), *model.named_buffers())
    }
    modules = {
        name: (type(module), {k: id(v) for k, v in vars(module).items()}, module.training)
        for name, module in model.named_modules()
    }
    inside = {
        (name, key): list(value.items())
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, dict)
    }
    config: Any = model.config
    return tensors, modules, inside, config.to_dict(), vars(config).copy(), torch.get_rng_state()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def check(found: OptimizePlan, model: Any) -> None:
    """Compare a plan with what has become of the model."""
    rows = ipex_core.explain(model).rows
    whole = next(row for row in rows if row.step == "llm")
    assert found.summary == whole.text and (found.depth == 3) == whole.done
    assert (found.depth > 1) == (whole.kernel == "ipex::program_run")
    assert found.depth == 3 or found.layers == tuple(row for row in rows if row.step == "layer")
    assert any(isinstance(m, DecoderMixin) for m in model.modules()) == (found.depth == 3)
    modules = dict(model.named_modules())
    for row in found.layers:
        assert isinstance(modules[row.module], LayerMixin) == (row.done and found.depth < 3)
    told = [row for row in rows if row.step == "experts"]
    assert [row for row in found.experts if row in told] == told
    for row in found.experts:
        assert bool(woq_experts.owners(modules[row.module])) == (row.text == "quantized")
    linears = dict(model.named_modules(remove_duplicate=False))
    quantized = {n for n, m in linears.items() if isinstance(m, WoqLinearModule)}
    assert {row.module for row in found.linears if row.done} == quantized
    assert all(class_name(modules[row.module]) == row.kind for row in found.layers)


@pytest.mark.parametrize(("name", "option"), CASES, ids=[f"{n}-{o}" for n, o in CASES])
def test_the_plan_is_what_is_done(name: str, option: str) -> None:
    if name not in FAMILIES:
        pytest.skip("not in this transformers")
    model = build(name)
    before = state(model)
    found = plan(model, **OPTIONS[option])
    assert same(state(model), before)
    check(found, optimize(model, inplace=True, **OPTIONS[option]))


def test_cases_reach_all_that_can_be_decided() -> None:
    """A plan that says the same of everything would be no plan."""
    depths = {n: plan(build("llama"), **OPTIONS[n]).depth for n in ("float32", "depth 2", "split")}
    assert depths == {"float32": 3, "depth 2": 2, "split": 1}
    found = plan(build("jamba_gelu"))
    assert found.depth == 2 and {row.done for row in found.layers} == {True, False}
    assert found.rest
    reasons = {plan(build("llama"), **OPTIONS[n]).reason for n in ("split", "unlike", "depth 1")}
    assert reasons == {
        "some layers with one input are quantized, others are not",
        "quantized layers with one input have different formats",
        "depth is 1",
    }


def test_a_refused_program_is_told_beforehand() -> None:
    """A hook makes a layer other than its weights say."""
    model = build("llama")
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *args: None)
    found = plan(model)
    assert found.depth == 2 and found.reason == "match: layers.1.mlp.down_proj: has hooks"
    assert [row.done for row in found.layers] == [True, False]
    check(found, optimize(model))
    double = build("llama").double()
    assert plan(double).summary == "layer by layer: weights of torch.float64"
    check(plan(double), optimize(double))


def test_static_int8(tmp_path: Any) -> None:
    from optimization.test_static import build as static_model
    from optimization.test_static import calibrate, int8_layers

    from ipex_quant import get_smooth_quant_qconfig_mapping

    mapping = get_smooth_quant_qconfig_mapping().set_module_name_regex(r".*layers\.1\..*", None)
    path = str(tmp_path / "summary.json")
    ids = calibrate(static_model("llama"), mapping, path)
    model = static_model("llama")
    options = {"quantization_config": mapping, "qconfig_summary_file": path}
    before = state(model)
    found = plan(model, **options)
    assert same(state(model), before)
    assert [row.done for row in found.layers] == [False, True]
    assert found.reason == "the model is static INT8"
    wanted = model(ids).logits
    fast = optimize(model, **options)
    rows = ipex_core.explain(fast).rows
    assert found.summary == next(row.text for row in rows if row.step == "llm")
    assert found.layers == tuple(row for row in rows if row.step == "layer")
    done = {n.removesuffix(".float_module") for n in int8_layers(fast)}
    assert {row.module for row in found.linears if row.done} <= done
    assert not {row.module for row in found.linears if not row.done} & done
    logits = fast(ids).logits
    assert torch.cosine_similarity(logits, wanted, -1).min() > 0.98
    uncalibrated = plan(model, quantization_config=mapping)
    assert not any(row.done for row in uncalibrated.linears)
    assert uncalibrated.depth == 1 and not uncalibrated.layers and not uncalibrated.rest
    assert uncalibrated.reason == "the model is left as it is, to be calibrated"
    with pytest.raises(ValueError, match="must be a file of save_qconf_summary"):
        plan(model, quantization_config=mapping, qconfig_summary_file=str(tmp_path / "no.json"))


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("order", [False, True])
def test_low_precision_checkpoint(meta: bool, order: bool) -> None:
    q = pytest.importorskip("quantized_llama", reason="needs the tests of ipex-quant")
    # In act-order each layer has an order of its own, so that queries, keys and values have no common weight.
    tensors, _ = q.checkpoint(q.P.gptq, act_order=order)
    if meta:
        with torch.device("meta"):
            model = q.make_model()
    else:
        model = q.make_model()
    options = {"low_precision_checkpoint": (tensors, {**q.GPTQ, "desc_act": order})}
    kept = {key: value.clone() for key, value in tensors.items()}
    found = plan(model, **options)
    assert same(tensors, kept) and not any(isinstance(m, WoqLinearModule) for m in model.modules())
    fast = optimize(model, inplace=True, **options)
    if meta:
        assert found.depth == 3 and "no weights yet" in found.notes[0]
        assert len(found.layers) == len(fast.model.layers)
    if not (meta and order):  # a small copy knows no orders
        assert (found.depth == 3) != order
        check(found, fast)
    with pytest.raises(ValueError, match="have quantized layers of this model only"):
        plan(build("gpt2"), **options)


def test_quantized_before() -> None:
    model = build("llama")
    quantize_linears(model, INT4)
    found = plan(model)
    assert {row.text for row in found.linears} == {"quantized already: int4"}
    check(found, optimize(model))


def test_xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device `plan` and `optimize` raise; with one, a decoder is a program, or runs layer by layer."""
    for function in (plan, optimize):
        with pytest.raises(MissingComponentError, match="device 'xpu' needs a device"):
            function(build("llama"), device="xpu")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    found = plan(build("llama"), device="xpu", quantization_config=INT8)
    assert found.depth == 3 and found.reason is None and found.device == "xpu"
    assert all(row.done for row in (*found.layers, *found.linears)) and not found.rest
    found = plan(build("mllama_text"), device="xpu")
    assert found.depth == 1 and found.reason == "on xpu, layers that read pictures have no program"
    assert not found.layers and not found.rest
    requests = []
    monkeypatch.setattr(optimization, "planned", lambda model, request: requests.append(request))
    plan(build("llama"), device="xpu", dtype=torch.bfloat16, depth=1)
    model = build("llama")
    request = dataclasses.replace(requests[0], device=torch.device("cpu"))
    assert optimize_on_xpu(model, request, lambda *_: None, lambda *_: (model, [])) is model
    assert "forward" in vars(model.model.norm) and model.dtype is torch.bfloat16
    model(torch.tensor([[1, 2, 3]]))


def test_a_model_that_is_no_decoder() -> None:
    """Nothing is known of it, so nothing is said of its layers."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval()
    found = plan(model, dtype=torch.bfloat16)
    assert found.depth == 1 and not found.layers and found.rest == (("Linear", 2),)
    assert found.bytes_after == found.bytes_before // 2
    assert found.summary.startswith("layer by layer: match: ")
    assert next(
        row.text for row in ipex_core.explain(optimize(model)).rows if row.step == "llm"
    ) == (found.summary)


def test_what_is_shown() -> None:
    found = plan(build("mixtral"), **OPTIONS["mixed"], kv_cache_dtype="int8")
    with pytest.raises(AttributeError):
        found.depth = 1  # type: ignore[misc]
    text = str(found)
    first, *lines = text.splitlines()
    assert (
        first == "MixtralForCausalLM on cpu: the whole decoder stack runs as one program per step"
    )
    assert found.summary == f"{first.partition(': ')[2]}; cache in torch.int8, a scale for each row"
    assert any(line.split()[0] == "cache" and found.kv_cache in line for line in lines)
    assert "int4 asymmetric, a scale for 16 weights, computed in the dtype of the input" in text
    assert "lm_head: the configuration has nothing for it" in text
    assert len(text.splitlines()) < 14  # equal layers are one line
    plain = found.to_dict()
    assert json.loads(json.dumps(plain)) == plain and plain["summary"] == found.summary
    assert pickle.loads(pickle.dumps(found)) == found == copy.deepcopy(found)
    assert ipex_llm.OptimizePlan is OptimizePlan


@pytest.mark.parametrize("option", ["float32", "int8", "int4"])
def test_bytes_of_weights(option: str) -> None:
    model = build("llama")
    found = plan(model, **OPTIONS[option])
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    assert found.bytes_before == sum(t.nbytes for t in tensors.values())
    quantized = copy.deepcopy(model)
    if config := OPTIONS[option].get("quantization_config"):
        quantize_linears(quantized, config)
    dtype = OPTIONS[option].get("dtype", torch.float32)
    for parameter in quantized.parameters():
        parameter.data = parameter.data.to(dtype)
    real = sum(t.nbytes for t in (*quantized.parameters(), *quantized.buffers()))
    assert found.bytes_after == pytest.approx(real, rel=0.15)


def test_weights_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    seen: list[nn.Module] = []
    decide = optimization.decide
    monkeypatch.setattr(optimization, "decide", lambda m, *args: seen.append(m) or decide(m, *args))
    plan(model)
    (copied,) = seen
    assert copied is not model and copied.model.layers[0] is not model.model.layers[0]
    assert all(map(lambda a, b: a is b, copied.parameters(), model.parameters()))


BAD: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"dtype": torch.int8}, ValueError),
    ({"dtype": "bf16"}, TypeError),
    ({"device": "cuda"}, RuntimeError),
    ({"inplace": 1}, TypeError),
    ({"deployment_mode": "x"}, TypeError),
    ({"depth": 4}, ValueError),
    ({"qconfig_summary_file": "x.json"}, ValueError),
    ({"kv_cache_dtype": "int4"}, ValueError),
    ({"kv_cache_scales": 3, "kv_cache_dtype": "int8"}, ValueError),
    ({"low_precision_checkpoint": 3}, ValueError),
    ({"low_precision_checkpoint": (3, None)}, ValueError),
    ({"quantization_config": 3}, ValueError),
    ({"quantization_config": woq_qconfig(group_size=8)}, ValueError),
    ({"tp_group": True}, ValueError),
    ({"optimizer": 3}, ValueError),
]


@pytest.mark.parametrize(("options", "error"), BAD)
def test_bad_arguments_are_those_of_optimize(options: Any, error: type[Exception]) -> None:
    texts = []
    for function in (plan, optimize):
        with pytest.raises(error) as caught:
            function(build("llama"), **options)
        texts.append(str(caught.value))
    assert texts[0] == texts[1] and "must" in texts[0]


def test_bad_models() -> None:
    for model in (3, build("llama").train()):
        texts = []
        for function in (plan, optimize):
            with pytest.raises((AttributeError, AssertionError)) as caught:
                function(model)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]
    model = build("llama")
    for fast in (optimize(model), optimize(model, depth=2), ipex_core.optimize(model)):
        with pytest.raises(ValueError, match=r"plan: model must not be optimized yet, got a Llama"):
            plan(fast)
        assert plan(ipex_core.restore(fast)) == plan(model)
    scripted = torch.jit.trace(nn.Linear(4, 4).eval(), torch.ones(1, 4))
    with pytest.raises(TypeError, match=r"plan: model must be a torch\.nn\.Module of Python"):
        plan(scripted)
    model.own = (number for number in range(3))  # cannot be copied
    with pytest.raises(TypeError, match=r"plan: model must be one that copy\.deepcopy can copy"):
        plan(model)


def test_the_signature_is_that_of_optimize() -> None:
    import inspect

    a, b = (inspect.signature(function).parameters for function in (plan, optimize))
    assert a == b
