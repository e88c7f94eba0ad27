# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of an engine, against models into which peft has merged them."""

from __future__ import annotations

import copy
import json

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import safetensors.torch  # noqa: E402
from families import FAMILIES  # noqa: E402
from small_llama import llama  # noqa: E402

import ipex_llm  # noqa: E402
from ipex_llm.engine import Engine, SamplingParams  # noqa: E402
from ipex_llm.records import record_of  # noqa: E402

GREEDY = SamplingParams(max_new_tokens=10)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def scaled(model, factor=4):
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(factor)
    return model


def base():
    return scaled(llama(max_position_embeddings=256))


def adapter(model, folder, seed=0, **config):
    """Write an adapter with random factors; return the model with it merged into its weights."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": ALL, "task_type": "CAUSAL_LM"} | config
    wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**options))
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.3
    wrapped.save_pretrained(folder)
    return wrapped.merge_and_unload().eval()


@torch.inference_mode()
def written(model, prompt, count):
    ids = torch.tensor([prompt])
    for _ in range(count):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return tuple(ids[0, len(prompt) :].tolist())


def prompts(count=6, vocab=96):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab, (n,), generator=draw).tolist() for n in (3, 40, 17, 1, 9, 25)][
        :count
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, folders of two adapters, and models with them merged."""
    root = tmp_path_factory.mktemp("adapters")
    model = base()
    folders = [root / "one", root / "two"]
    merged = [
        adapter(model, folders[0], 0),
        adapter(
            model,
            folders[1],
            1,
            r=3,
            lora_alpha=5,
            use_rslora=True,
            target_modules=["q_proj", "v_proj", "up_proj"],
            rank_pattern={"v_proj": 6},
        ),
    ]
    return model, folders, merged


def engine(model, **options):
    options = {"block_size": 4, "num_blocks": 256, "eos_token_ids": ()} | options
    return Engine(ipex_llm.optimize(copy.deepcopy(model)), **options)


def test_adapters_and_the_model_in_one_batch(made):
    model, folders, merged = made
    e = engine(model, max_tokens_per_step=30)
    e.load_lora("one", folders[0])
    e.load_lora("two", str(folders[1]))
    assert list(e.loras) == ["one", "two"]
    some = prompts()
    names = [None, "one", "two", "one", "two", None]
    found = e.generate(some, [GREEDY.replace(lora=name) for name in names])
    models = {None: model, "one": merged[0], "two": merged[1]}
    for output, prompt, name in zip(found, some, names, strict=True):
        assert output.tokens == written(models[name], prompt, 10), name
    tokens = {name: written(one, some[1], 10) for name, one in models.items()}
    assert len(set(tokens.values())) == 3
    # The same prompt again: what is in the cache belongs to one of the three.
    for name in ("two", None, "one", "two"):
        again = e.generate([some[1]], GREEDY.replace(lora=name))[0]
        assert again.tokens == tokens[name]
    assert again.cached_tokens > 0
    assert e.stats().blocks_held == 0
    runner = record_of(e._model).runner
    assert all(program.native for program in runner._lora_programs.values()) or not any(
        program.native for program in runner._programs.values()
    )


def check_numbers(e, models, some, tolerance=2e-3):
    """Compare the log probabilities of prompts with what merged models say, by the names of adapters."""
    pairs = [(prompt, name) for prompt in some for name in models]
    params = SamplingParams(max_new_tokens=1, logprobs=20, prompt_logprobs=20)
    found = e.generate([p for p, _ in pairs], [params.replace(lora=name) for _, name in pairs])
    values = {}
    for output, (prompt, name) in zip(found, pairs, strict=True):
        with torch.inference_mode():
            wanted = models[name](torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        values.setdefault(tuple(prompt), []).append(wanted)
        for place, entry in enumerate((*output.prompt_logprobs, *output.logprobs)):
            for token, value in entry.top:
                assert abs(value - float(wanted[place, token])) < tolerance, name
    for first, *rest in values.values():
        assert all(float((first - other).abs().max()) > 20 * tolerance for other in rest)


def test_numbers_are_those_of_the_merged_model(made):
    model, folders, merged = made
    e = engine(model)
    for name, folder in zip(("one", "two"), folders, strict=True):
        e.load_lora(name, folder)
    check_numbers(e, {"one": merged[0], "two": merged[1], None: model}, prompts(3))


def test_load_and_unload_while_requests_run(made):
    model, folders, merged = made
    e = engine(model, max_loras=2)
    e.load_lora("a", folders[0])
    prompt = prompts()[1]
    first = e.add_request(prompt, GREEDY.replace(lora="a"))
    plain = e.add_request(prompt, GREEDY)
    tokens = {first: [], plain: []}

    def step():
        for output in e.step():
            tokens.setdefault(output.request_id, []).extend(output.tokens)

    for _ in range(3):
        step()
    assert e.unload_lora("a") and not e.unload_lora("a") and not e.loras
    with pytest.raises(ValueError, match=r"lora must be a loaded adapter \(none\), got 'a'"):
        e.add_request(prompt, GREEDY.replace(lora="a"))
    e.load_lora("a", folders[1])
    second = e.add_request(prompt, GREEDY.replace(lora="a"))
    with pytest.raises(ValueError, match="lora_name must be one of at most 2 adapters"):
        e.load_lora("b", folders[1])
    while e.has_work:
        step()
    assert tuple(tokens[first]) == written(merged[0], prompt, 10)
    assert tuple(tokens[second]) == written(merged[1], prompt, 10)
    assert tuple(tokens[plain]) == written(model, prompt, 10)
    e.load_lora("b", folders[0])  # there is room again
    assert e.generate([prompt], GREEDY.replace(lora="b"))[0].tokens == tuple(tokens[first])
    assert e.unload_lora("b") and e.unload_lora("a")
    assert e.generate([prompt], GREEDY)[0].tokens == tuple(tokens[plain])


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in ("gpt2", "phi3", "gpt_neox", "gemma2", "falcon", "olmo2", "axk2", "inkling2")
        if n in FAMILIES
    ],
)
def test_families(name, tmp_path):
    """Fused projections, other activations, transposed weights, biases, blocks side by side, norms with gates."""
    model = scaled(FAMILIES[name](), 2)
    others = ["wq_b", "wk", "weights_proj", "kv_b_proj"] if name == "axk2" else []  # take none
    options = {"target_modules": "all-linear", "exclude_modules": ["lm_head", *others]}
    merged = adapter(model, tmp_path, fan_in_fan_out=name == "gpt2", **options)
    e = engine(model)
    e.load_lora("x", tmp_path)
    check_numbers(e, {"x": merged, None: model}, prompts(3, 90))


@pytest.mark.parametrize("dtype", ["INT8", "INT4"])
def test_quantized_weights(made, tmp_path, dtype):
    """The layers of the model are quantized, the factors are not."""
    from ipex_quant import WoqLowpMode, WoqWeightDtype, get_weight_only_quant_qconfig_mapping

    model, folders, _ = made
    mapping = get_weight_only_quant_qconfig_mapping(
        weight_dtype=WoqWeightDtype[dtype], lowp_mode=WoqLowpMode.NONE
    )
    options = {"dtype": torch.float32, "quantization_config": mapping}
    optimized = ipex_llm.optimize(copy.deepcopy(model), **options)
    stored = copy.deepcopy(model)
    for name, module in stored.named_modules():
        quantized = dict(optimized.named_modules())[name]
        if hasattr(quantized, "quantized_weight"):
            module.weight.data = quantized.quantized_weight().dequantize().float()
    wrapped = peft.PeftModel.from_pretrained(stored, folders[0]).merge_and_unload().eval()
    e = Engine(optimized, block_size=4, num_blocks=128, eos_token_ids=())
    e.load_lora("one", folders[0])
    check_numbers(e, {"one": wrapped}, prompts(3))


def test_speculation_with_adapters(made):
    model, folders, merged = made
    e = engine(model, speculative_config={"method": "ngram", "prompt_lookup_min": 1})
    e.load_lora("one", folders[0])
    prompt = prompts()[0] * 4
    names = ["one", None, "one"]
    params = [GREEDY.replace(lora=name, max_new_tokens=30) for name in names]
    for output, name in zip(e.generate([prompt] * 3, params), names, strict=True):
        assert output.tokens == written(merged[0] if name else model, prompt, 30)
    assert e.stats().accepted_tokens > 0


# -- Adapters that are refused ----------------------------------------------------------------------------------------


def changed(folder, target, config=None, weights=None):
    """Write an adapter again, with changes of its config and its tensors."""
    target.mkdir()
    found = json.loads((folder / "adapter_config.json").read_text()) | (config or {})
    (target / "adapter_config.json").write_text(json.dumps(found))
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    tensors = tensors if weights is None else weights(tensors)
    safetensors.torch.save_file(tensors, target / "adapter_model.safetensors")
    return target


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"peft_type": "IA3"}, "the peft_type LORA, got 'IA3'"),
        ({"use_dora": True}, "two factors for each layer, got use_dora = True"),
        ({"bias": "all"}, "got bias = all"),
        ({"modules_to_save": ["lm_head"]}, r"got modules_to_save = \['lm_head'\]"),
        ({"alpha_pattern": {"q": 3}}, "got alpha_pattern"),
        ({"lora_alpha": "8"}, "a number as lora_alpha, got '8'"),
        ({"lora_alpha": True}, "a number as lora_alpha, got 'True'"),
        ({"r": 0}, "a number as r, got '0'"),
        ({"base_model_name_or_path": 3}, "a text as base_model_name_or_path, got int"),
        (
            {"base_model_name_or_path": "org/Other-7B"},
            r"an adapter of this model \('org/Llama-1B'\), got one of 'org/Other-7B'",
        ),
    ],
)
def test_configs_that_are_refused(made, tmp_path, config, text):
    model, folders, _ = made
    e = engine(model)
    folder = changed(folders[0], tmp_path / "x", config)
    with pytest.raises(ValueError, match=f"^lora_path must have .*{text}"):
        e.load_lora("x", folder, base_names=["org/Llama-1B"])
    for name in ("else/llama-1b", "/data/models--org--Llama-1B/snapshots/abc", "", None):
        folder = changed(folders[0], tmp_path / f"n{hash(name)}", {"base_model_name_or_path": name})
        e.read_lora(folder, base_names=["org/Llama-1B"])
    assert not e.loras


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (lambda t: {}, "factors of at least one layer, got none"),
        (lambda t: {**t, "x": torch.ones(2)}, "tensors named base_model.*, got 'x'"),
        (
            lambda t: {**t, "base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)},
            "got 'lm_head', which takes no adapter here",
        ),
        (
            lambda t: {
                **t,
                "base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": t[
                    f"{Q}.lora_A.weight"
                ].clone(),
            },
            "layers.7.mlp.up_proj', which the model does not have",
        ),
        (
            lambda t: {k: v for k, v in t.items() if k != f"{Q}.lora_B.weight"},
            "both factors of 'model.layers.0",
        ),
        (
            lambda t: {**t, f"{Q}.lora_A.weight": torch.ones(4, 65)},
            r"factors \[r, 64\] and \[64, r\].*got \[4, 65\]",
        ),
        (lambda t: {**t, f"{Q}.lora_A.weight": torch.ones(4)}, r"factors \[r, 64\].*got \[4\]"),
        (
            lambda t: {
                **t,
                f"{Q}.lora_A.weight": torch.ones(0, 64),
                f"{Q}.lora_B.weight": torch.ones(64, 0),
            },
            r"got \[0, 64\]",
        ),
        (
            lambda t: {
                **t,
                f"{Q}.lora_A.weight": torch.ones(17, 64),
                f"{Q}.lora_B.weight": torch.ones(64, 17),
            },
            "a rank of at most 16, got 17",
        ),
        (
            lambda t: {**t, f"{Q}.lora_A.weight": torch.ones(4, 64, dtype=torch.int32)},
            "factors of floats, got torch.int32",
        ),
        (
            lambda t: {**t, f"{Q}.lora_A.weight": torch.full((4, 64), torch.nan)},
            "finite factors, got NaN",
        ),
    ],
)
def test_tensors_that_are_refused(made, tmp_path, weights, text):
    model, folders, _ = made
    e = engine(model, max_lora_rank=16)
    folder = changed(folders[0], tmp_path / "x", weights=weights)
    with pytest.raises(ValueError, match=f"^lora_path must have .*{text}"):
        e.load_lora("x", folder)
    assert not e.loras and e.generate([[5]], GREEDY)[0].tokens == written(model, [5], 10)


def test_folders_and_names_that_are_refused(made, tmp_path):
    model, folders, _ = made
    e = engine(model)
    with pytest.raises(
        ValueError, match=r"^lora_path must be the folder .* no adapter_config.json"
    ):
        e.load_lora("x", tmp_path)
    (tmp_path / "adapter_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"^lora_path must be the folder .* must be JSON"):
        e.load_lora("x", tmp_path)
    (tmp_path / "adapter_config.json").write_text((folders[0] / "adapter_config.json").read_text())
    with pytest.raises(ValueError, match=r"^lora_path must be the folder"):
        e.load_lora("x", tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match=r"^lora_path must be the folder .* safetensors file"):
        e.load_lora("x", tmp_path)
    e.load_lora("x", folders[0])
    with pytest.raises(ValueError, match="lora_name must not be in use, got 'x'"):
        e.load_lora("x", folders[0])
    with pytest.raises(ValueError, match="lora_name must have a character"):
        e.load_lora("", folders[0])
    with pytest.raises(TypeError, match="lora_name must be text, got int"):
        e.load_lora(3, folders[0])
    from fake_runner import FakeRunner

    with pytest.raises(ValueError, match="got a runner without modules"):
        Engine(FakeRunner(), num_blocks=4).load_lora("x", folders[0])
