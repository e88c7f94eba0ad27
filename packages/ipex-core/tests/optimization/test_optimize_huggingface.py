# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, small and with random weights."""

from __future__ import annotations

import copy
import json
import types
from pathlib import Path

import pytest
import torch

from ipex_core.bert import fast_bert
from ipex_core.diagnostics.explain import explain
from ipex_core.kernels.policy import has_kernel
from ipex_core.optimization import optimize, restore

pytestmark = pytest.mark.usefixtures("small_weights_are_packed")

transformers = pytest.importorskip("transformers")


#: Its BERT has attention of its own, and other arguments and helpers.
newer = pytest.mark.skipif(transformers.__version__.startswith("4."), reason="needs transformers 5")


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    return transformers.BertModel(config).eval()


def llama(**changes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **changes,
    )
    return transformers.LlamaForCausalLM(config).eval()


IDS = torch.randint(1, 100, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 8:] = 0


def outputs(model):
    with torch.no_grad():
        return [model(IDS, attention_mask=mask)[0].float() for mask in (None, MASK)]


@pytest.mark.parametrize("make", [bert, llama])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("concat", [False, True])
def test_outputs(make, dtype, concat):
    model = make()
    before = copy.deepcopy(model.config.to_dict())
    result = optimize(model, dtype=dtype, concat_linear=concat)
    assert type(result) is type(model) and model.config.to_dict() == before
    assert model.config._attn_implementation == "sdpa"
    tolerance = 2e-4 if dtype is None else 8e-2
    keep = MASK.bool()
    for (got, want), rows in zip(
        zip(outputs(result), outputs(model), strict=True), (keep | True, keep), strict=True
    ):
        torch.testing.assert_close(got[rows], want[rows], rtol=tolerance, atol=tolerance)
    for name, value in result.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert result(IDS)[0].isfinite().all()
    restore(result)
    assert result.config._attn_implementation == "sdpa"
    for got, want in zip(outputs(result), outputs(model), strict=True):
        assert torch.equal(got, want)


def test_what_is_fused_in_bert():
    report = str(explain(optimize(bert())))
    assert "linear + gelu" in report and "linear + add" in report


@pytest.mark.skipif(not has_kernel("rms_norm"), reason="no kernel package")
def test_what_is_fused_in_llama():
    report = str(explain(optimize(llama())))
    assert "ipex::rms_norm" in report and "ipex::silu_mul" in report


@newer
@pytest.mark.skipif(not has_kernel("attention"), reason="no kernel package")
def test_attention_interface():
    model = bert()
    result = optimize(model)
    assert result.config._attn_implementation == "ipex"
    eager = bert()
    eager.set_attn_implementation("eager")
    assert optimize(eager).config._attn_implementation == "eager"


def test_generate_gives_the_same_tokens():
    model = llama()
    result = optimize(model)
    kwargs = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want = model.generate(IDS, attention_mask=torch.ones_like(IDS), **kwargs)
    assert torch.equal(result.generate(IDS, attention_mask=torch.ones_like(IDS), **kwargs), want)


def test_hidden_states_are_still_reported():
    model = bert()
    with torch.no_grad():
        want = model(IDS, output_hidden_states=True).hidden_states
        got = optimize(model)(IDS, output_hidden_states=True).hidden_states
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


@newer
def test_save_pretrained(tmp_path):
    model = bert()
    optimize(model, dtype=torch.bfloat16).save_pretrained(tmp_path)
    loaded = transformers.BertModel.from_pretrained(tmp_path, dtype=torch.float32)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


class Hub:
    """Takes what transformers uploads."""

    def __init__(self) -> None:
        self.dtypes: list[str] = []

    def create_repo(self, repo_id, **_):
        return types.SimpleNamespace(repo_id=repo_id)

    def create_commit(self, *, operations, **_):
        files = {o.path_in_repo: Path(o.path_or_fileobj) for o in operations}
        self.dtypes.append(json.loads(files["config.json"].read_text())["dtype"])
        assert "model.safetensors" in files


@newer
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_uploaded_names_the_dtype_of_its_weights(tmp_path, monkeypatch, fails):
    hub = Hub()
    if fails:
        monkeypatch.setattr(hub, "create_commit", lambda **_: 1 / 0)
    card = types.SimpleNamespace(save=lambda path: None)
    for place in (transformers.modeling_utils, transformers.utils.hub):
        monkeypatch.setattr(place, "hf_api", lambda: hub)
        monkeypatch.setattr(place, "create_and_tag_model_card", lambda *_, **__: card)
    fast = optimize(bert(), dtype=torch.bfloat16)
    if fails:
        with pytest.raises(ZeroDivisionError):
            fast.save_pretrained(tmp_path / "one", push_to_hub=True)
    else:
        fast.save_pretrained(tmp_path / "one", push_to_hub=True)
        fast.push_to_hub("someone/two")
        assert hub.dtypes == ["float32", "float32"]
    assert json.loads((tmp_path / "one" / "config.json").read_text())["dtype"] == "float32"
    assert "_upload_modified_files" not in fast.__dict__


def test_tied_weights_stay_tied():
    model = llama(tie_word_embeddings=True)
    result = optimize(model, dtype=torch.bfloat16)
    assert result.lm_head.weight is result.model.embed_tokens.weight


def test_compile_fullgraph():
    result = optimize(bert())
    with torch.no_grad():
        want = result(IDS)[0]
        got = torch.compile(result, fullgraph=True)(IDS)[0]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("how", ["training", "whole", "inference", "fast_bert"])
def test_a_saved_model_is_loaded_unrounded(how, tmp_path):
    model = bert().train(how != "inference")
    if how == "inference":
        fast = optimize(model, dtype=torch.bfloat16)
    else:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        if how == "fast_bert":
            fast, _ = fast_bert(model, torch.bfloat16, sgd)
        else:
            split = {"split_master_weight_for_bf16": how == "training"}
            fast, _ = optimize(model, optimizer=sgd, dtype=torch.bfloat16, **split)
    for number, one in enumerate((fast, copy.deepcopy(fast))):
        one.save_pretrained(tmp_path / str(number))
        back = transformers.BertModel.from_pretrained(tmp_path / str(number))
        assert back.dtype == torch.float32
        for key, value in model.state_dict().items():
            assert torch.equal(back.state_dict()[key], value), key
    with torch.no_grad():
        fast.embeddings.word_embeddings.weight.zero_()
    fast.save_pretrained(tmp_path / "later")
    later = transformers.BertModel.from_pretrained(tmp_path / "later")
    assert later.embeddings.word_embeddings.weight.abs().max() == 0
    assert "save_pretrained" not in restore(fast).__dict__


@pytest.mark.parametrize("field", ["dtype", "torch_dtype", None])
def test_other_configurations_name_the_dtype_or_not(field, tmp_path):
    class Config:  # transformers before 4.56 calls it torch_dtype, diffusers has no such field
        def save_pretrained(self, path):
            (path / "config.json").write_text(json.dumps(vars(self)))

    class Model(torch.nn.Linear):
        dtype = torch.bfloat16
        config = Config()

        def save_pretrained(self, path, **_):
            self.config.save_pretrained(path)
            return "saved"

    model = Model(32, 32).eval()
    if field is not None:
        setattr(model.config, field, "bfloat16")
    assert optimize(model, dtype=torch.bfloat16, inplace=True).save_pretrained(tmp_path) == "saved"
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved == ({} if field is None else {field: "float32"})
