# SPDX-License-Identifier: Apache-2.0
"""The commands of `ipex llm`."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path

import pytest
import torch
from families import OLD
from typer.testing import CliRunner

from ipex_llm.entrypoints.cli import app
from ipex_llm.entrypoints.cli.common import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    done = run("make-model", path, "--dtype", "fp32")
    assert done.exit_code == 0 and "0.2 million" in " ".join(done.output.split())
    return path


def run(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def said(done):
    return " ".join(done.output.replace("│", " ").split())


def test_the_command_is_found():
    entries = importlib.metadata.entry_points(group="ipex.commands")
    found = [entry for entry in entries if entry.name == "llm"]
    if not found:
        pytest.skip("ipex-llm is not installed, only importable")
    assert found[0].value == "ipex_llm.entrypoints.cli:app"


def test_help_lists_the_commands():
    done = run("--help")
    assert done.exit_code == 0
    assert all(name in done.output for name in ("generate", "bench", "quantize", "serve"))


def test_the_tokenizer_gives_back_every_text(folder):
    tokenizer = load_tokenizer(folder)
    for text in ("The capital of France", "héllo 日本語 🎉", "  blanks\n"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id


def test_make_model_twice_is_the_same_and_never_overwrites(folder, tmp_path):
    from safetensors.torch import load_file

    assert run("make-model", tmp_path / "again", "--dtype", "fp32").exit_code == 0
    first, second = (load_file(p / "model.safetensors") for p in (folder, tmp_path / "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    done = run("make-model", folder)
    assert done.exit_code == 2 and "not an empty folder" in said(done)
    assert "shape must be one of" in said(run("make-model", tmp_path / "x", "--shape", "huge"))
    assert "must be bf16" in said(run("make-model", tmp_path / "x", "--dtype", "int4"))


def test_state_snapshots_of_serve(folder, monkeypatch):
    import ipex_llm.engine

    given = []

    def stop(*args, **options):
        given.append(options["max_state_snapshots"])
        raise ValueError("no further")

    monkeypatch.setattr(ipex_llm.engine, "Engine", stop)
    for arguments, want in (([], None), ([0], 0), ([24], 24)):
        options = ["--max-state-snapshots", *arguments] if arguments else []
        done = run("serve", "--model", folder, *options)
        assert done.exit_code == 2 and "no further" in said(done)
        assert given.pop() == want
    for wrong in ("-1", "1.5", "many", ""):
        done = run("serve", "--model", folder, "--max-state-snapshots", wrong)
        assert done.exit_code == 2 and "--max-state-snapshots" in said(done)
    assert not given


def test_quantize(folder, tmp_path):
    done = run("quantize", "--model", folder, "--out", tmp_path / "q", "--scheme", "int8")
    assert done.exit_code == 0, done.output
    assert "14 weights quantized" in said(done)
    config = json.loads((tmp_path / "q/config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"
    done = run("quantize", "--model", folder, "--out", tmp_path / "q")
    assert done.exit_code == 2 and "exists and is not an empty folder" in said(done)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "int3"], "scheme must be one of int4"),
        (["--group-size", "7"], "group_size must be"),
        (["--skip", "("], "error:"),
        (["--skip", "layers"], "got none"),
        (["--shard-size", "0"], "--shard-size"),
    ],
)
def test_bad_arguments_of_quantize(folder, tmp_path, arguments, message):
    done = run("quantize", "--model", folder, "--out", tmp_path / "q", *arguments)
    assert done.exit_code == 2 and message in said(done)
    assert "Traceback" not in done.output


def test_damaged_folders_are_told_before_anything_is_loaded(folder, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for command in (["generate", "--prompt", "A"], ["quantize", "--out", tmp_path / "q"]):
        done = run(command[0], "--model", damaged, *command[1:])
        assert done.exit_code == 2 and "1 fewer than" in said(done)
    weights.unlink()
    done = run("generate", "--model", damaged, "--prompt", "A")
    assert done.exit_code == 2 and "got no model.safetensors" in said(done)
    (damaged / "tokenizer.json").unlink()
    (damaged / "tokenizer_config.json").unlink()
    done = run("generate", "--model", damaged, "--prompt", "A")
    assert done.exit_code == 2 and "must have a tokenizer" in said(done)


def test_a_tokenizer_whose_library_is_missing_is_told(folder, monkeypatch):
    import transformers

    def missing(*args, **kwargs):
        raise ImportError("\nneeds the protobuf library")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", missing)
    with pytest.raises(ValueError, match="must have a tokenizer, got: needs the protobuf"):
        load_tokenizer(folder)


def test_shards_that_are_missing_or_damaged(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    sharded = tmp_path / "sharded"
    shutil.copytree(folder, sharded)
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    table = {name: names[i % 2] for i, name in enumerate(tensors)}
    for file in names:
        save_file({n: t for n, t in tensors.items() if table[n] == file}, sharded / file)
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": table}))
    common = ["generate", "--model", sharded, "--prompt", "A", "--max-new-tokens", 2]
    assert run(*common).exit_code == 0
    last = sharded / names[1]
    whole = last.read_bytes()
    for damaged, message in (
        (whole[:-5], "5 fewer than"),
        (b"", "0 bytes with no header"),
        (b"\xff" * 64, "64 bytes with no header"),
        (whole[:8] + b"{" + whole[9:50] + b"!" * (len(whole) - 50), "header that cannot be read"),
    ):
        last.write_bytes(damaged)
        done = run(*common)
        assert done.exit_code == 2 and message in said(done), message
        assert "Traceback" not in done.output
    last.unlink()
    assert f"all shards of its index, got no {names[1]}" in said(run(*common))
    index.write_text("{")
    assert "must be JSON" in said(run(*common))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 16}, "group"),
        ({"num_bits": 8}, "bit"),
    ],
)
def test_quantized_folders_whose_config_says_something_else(folder, tmp_path, changes, message):
    out = tmp_path / "q"
    done = run("quantize", "--model", folder, "--out", out, "--scheme", "int4", "--group-size", 32)
    assert done.exit_code == 0
    config = json.loads((out / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["weights"].update(changes)
    (out / "config.json").write_text(json.dumps(config))
    done = run("generate", "--model", out, "--prompt", "A", "--max-new-tokens", 2)
    assert done.exit_code == 2, done.output
    assert "error:" in said(done) and "Traceback" not in done.output


def test_the_context_ends_the_output(folder):
    common = ["generate", "--model", folder, "--prompt", "a" * 500, "--max-new-tokens", 50]
    done = run(*common)
    assert done.exit_code == 0
    assert " new" in said(done) and "50 new" not in said(done)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "at least one character"),
        (["--prompt", "word " * 600], "fewer than 512 tokens, the context of the model"),
        (["--prompt", "A", "--temperature", "-1"], "temperature must be 0 or in"),
        (["--prompt", "A", "--top-p", "2"], "top_p must be in [0, 1]"),
        (["--prompt", "A", "--top-k", "-1"], "top_k must be"),
        (["--prompt", "A", "--max-new-tokens", "0"], "max_new_tokens must be a positive integer"),
        (["--prompt", "A", "--dtype", "int7"], "must be one of bf16"),
        (["--prompt", "A", "--threads", "0"], "--threads"),
    ],
)
def test_bad_arguments_of_generate(folder, arguments, message):
    done = run("generate", "--model", folder, *arguments)
    assert done.exit_code == 2 and message in said(done)
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "must have a key, got an empty file"),
        (b" \n", "must have a key, got an empty file"),
        ("schl\u00fcssel".encode("latin-1"), "must be text in UTF-8, got the byte 0xfc at 4"),
        (b"one\ntwo\n", "must have one line with a key"),
        (b"one\0", "must have one line with a key"),
    ],
)
def test_files_without_a_key(folder, tmp_path, data, message):
    pytest.importorskip("uvicorn")
    (tmp_path / "key").write_bytes(data)
    done = run("serve", "--model", folder, "--api-key-file", tmp_path / "key")
    assert done.exit_code == 2 and message in said(done)


def test_a_key_behind_the_mark_of_its_encoding(tmp_path):
    from ipex_llm.entrypoints.cli import read_key

    (tmp_path / "key").write_text("\ufeffschl\u00fcssel-\u65e5\u672c\r\n", encoding="utf-8")
    assert read_key(tmp_path / "key") == "schl\u00fcssel-\u65e5\u672c"


def test_no_folder(tmp_path):
    assert "does not exist" in said(run("generate", "--model", tmp_path / "x", "--prompt", "A"))
    assert "config.json" in said(run("quantize", "--model", tmp_path, "--out", tmp_path / "q"))


@pytest.mark.parametrize(
    "dtype",
    ["fp32", "bf16", "int8", "int4", "fp8"],
)
def test_generate_and_stream_give_the_same_text(folder, dtype):
    common = ["generate", "--model", folder, "--prompt", "The sea", "--dtype", dtype]
    common += ["--max-new-tokens", 12, "--quiet"]
    plain, streamed = run(*common), run(*common, "--stream")
    assert plain.exit_code == 0, plain.output
    assert plain.stdout == streamed.stdout and plain.stdout.strip()
    first = run(*common, "--temperature", "1", "--seed", "3")
    again = run(*common, "--temperature", "1", "--seed", "3")
    assert first.stdout == again.stdout != plain.stdout
    assert run(*common, "--chat").exit_code == 0
    timed = run(*common[:-1])
    assert "tokens/s" in timed.output
    assert run(*common[:-1], "--prompt", "-", input="The sea").exit_code == 0


@pytest.mark.parametrize("scheme", ["int4", "int8", "nf4", "fp8", "mxfp4"])
def test_quantized_folders_generate(folder, tmp_path, scheme):
    done = run("quantize", "--model", folder, "--out", tmp_path / "q", "--scheme", scheme)
    assert done.exit_code == 0
    done = run("generate", "--model", tmp_path / "q", "--prompt", "The sea", "--quiet")
    assert done.exit_code == 0, done.output
    assert done.stdout.strip()


def test_a_quantized_folder_without_a_weight_is_refused(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    out = tmp_path / "q"
    assert run("quantize", "--model", folder, "--out", out, "--scheme", "int8").exit_code == 0
    tensors = load_file(out / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, out / "model.safetensors")
    done = run("generate", "--model", out, "--prompt", "The sea")
    assert done.exit_code == 2 and "got no model.norm.weight" in said(done)


def test_bench(folder, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "200")  # a narrow table would wrap its headings
    common = ["bench", "--model", folder, "--dtype", "fp32", "--new", 3, "--rounds", 1]
    files = ["--json", tmp_path / "a.json", "--plot", tmp_path / "a.png"]
    done = run(*common, "--batch", "1,2", "--prompt", "4,9", *files)
    assert done.exit_code == 0, done.output
    assert "% of limit" in done.output and "ratio" in done.output
    data = json.loads((tmp_path / "a.json").read_text())
    assert [(r["batch"], r["prompt"]) for r in data["results"]] == [(1, 4), (1, 9), (2, 4), (2, 9)]
    # A model this small decodes within the noise.
    assert all(r["prefill_ratio"] > 0 and r["limit_percent"] >= 0 for r in data["results"])
    assert data["machine"]["torch"] == torch.__version__
    assert (tmp_path / "a.png").stat().st_size > 1000
    done = run(*common, "--no-stock", "--dtype", "bf16")
    assert done.exit_code == 0 and "stock" not in done.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_bench_on_a_full_disk(folder):
    common = ["bench", "--model", folder, "--dtype", "fp32", "--new", 3, "--rounds", 1]
    done = run(*common, "--prompt", "4", "--no-stock", "--json", "/dev/full")
    assert done.exit_code == 1 and "% of limit" in done.output
    assert "cannot write /dev/full: No space left" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "must be positive numbers"),
        (["--prompt", "x"], "must be positive numbers"),
        (["--prompt", "500"], "must fit the context of 512"),
        (["--new", "1"], "--new"),
        (["--json", "/dev/null/x"], "cannot write"),
    ],
)
def test_bad_arguments_of_bench(folder, arguments, message):
    done = run("bench", "--model", folder, *arguments)
    assert done.exit_code == 2 and message in said(done)


def changed(folder, target, **changes):
    """Return a copy of a folder with other entries in its config.json."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


@pytest.mark.parametrize("value", [[], "int4", 5])
def test_quantization_that_is_no_object(folder, tmp_path, value):
    wrong = changed(folder, tmp_path / "wrong", quantization_config=value)
    for arguments in (
        ["quantize", "--out", tmp_path / "q"],
        ["generate", "--prompt", "A"],
        ["bench"],
    ):
        done = run(arguments[0], "--model", wrong, *arguments[1:])
        assert done.exit_code == 2 and "a JSON object as quantization_config" in said(done)
        assert "Traceback" not in done.output


@pytest.mark.skipif(OLD, reason="transformers 4 does not read it")
def test_quantization_that_is_null_is_none(folder, tmp_path):
    plain = changed(folder, tmp_path / "plain", quantization_config=None)
    out = tmp_path / "q"
    assert run("quantize", "--model", plain, "--out", out, "--scheme", "int8").exit_code == 0
    about = json.loads((out / "config.json").read_text())["quantization_config"]
    assert about["quant_method"] == "ipex" or about["format"] == "int-quantized"
    done = run("generate", "--model", plain, "--prompt", "A", "--max-new-tokens", 2)
    assert done.exit_code == 0, done.output


BROKEN = {
    "vocab_size": 5,
    "hidden_size": 0,
    "num_attention_heads": 0,
    "num_hidden_layers": "two",
    "intermediate_size": -1,
    "model_type": "nothing",
    "rope_parameters": 7,
}


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_configs_that_do_not_fit(folder, tmp_path, name, quantized):
    if OLD and name == "rope_parameters":
        pytest.skip("transformers 4 has no such field")
    source = folder
    if quantized:
        source = tmp_path / "q"
        done = run("quantize", "--model", folder, "--out", source, "--scheme", "int8")
        assert done.exit_code == 0
    wrong = changed(source, tmp_path / "wrong", **{name: BROKEN[name]})
    for command in (["generate", "--prompt", "A"], ["bench", "--prompt", 4]):
        done = run(command[0], "--model", wrong, *command[1:])
        assert done.exit_code == 2 and "error:" in said(done), done.output
        assert not isinstance(done.exception, Exception), done.exception


#: Values that the model of transformers never reads, or reads otherwise than it should.
ODD = {
    "sliding_window": [None],
    "partial_rotary_factor": [{}],
    "window": {"sliding_window": 10**30},
    "is_encoder_decoder": 1,
    "output_attentions": "yes",
    "text_config": 5,
    "max_position_embeddings": 1 << 31,
}


@pytest.mark.parametrize("name", ODD)
def test_configs_with_values_of_the_wrong_kind(folder, tmp_path, name):
    """They are refused, or the model runs as it does without ipex: no command ends in a traceback."""
    value = ODD[name]
    odd = changed(folder, tmp_path / "odd", **(value if name == "window" else {name: value}))
    for command in (
        ["generate", "--prompt", "A", "--max-new-tokens", 2, "--dtype", "fp32"],
        ["bench", "--prompt", 4, "--new", 2, "--rounds", 1, "--no-stock"],
    ):
        done = run(command[0], "--model", odd, *command[1:])
        assert done.exit_code in (0, 2), done.output
        assert done.exit_code == 0 or "error:" in said(done)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception


@pytest.mark.parametrize("kind", [[], {}, 5, True])
def test_kinds_of_models_that_are_no_text(folder, tmp_path, kind):
    odd = changed(folder, tmp_path / "odd", model_type=kind)
    for command in (["generate", "--prompt", "A"], ["quantize", "--out", tmp_path / "q"]):
        done = run(command[0], "--model", odd, *command[1:])
        assert done.exit_code == 2 and "error:" in said(done), done.output


def test_values_of_a_tokenizer_that_do_not_fit(folder, tmp_path):
    for number, (changes, code) in enumerate(
        (({"model_max_length": {}}, 2), ({"model_input_names": ["input_ids"]}, 0))
    ):
        odd = changed(folder, tmp_path / f"odd{number}")
        path = odd / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        for more in ((), ("--chat",)):
            done = run("generate", "--model", odd, "--prompt", "A", "--max-new-tokens", 2, *more)
            assert done.exit_code == code, done.output
            assert code == 0 or "the tokenizer must take the prompt" in said(done)


def test_a_folder_that_asks_for_more_than_tokens(folder, tmp_path):
    more = changed(folder, tmp_path / "more")
    path = more / "generation_config.json"
    wanted = {"return_dict_in_generate": True, "output_scores": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), **wanted}))
    done = run("generate", "--model", more, "--prompt", "A", "--max-new-tokens", 2)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("quantized", [False, True])
def test_more_layers_than_there_are_weights(folder, tmp_path, quantized):
    source = folder
    if quantized:
        source = tmp_path / "q"
        run("quantize", "--model", folder, "--out", source, "--scheme", "int8")
    wrong = changed(source, tmp_path / "wrong", num_hidden_layers=3, layer_types=None)
    done = run("generate", "--model", wrong, "--prompt", "A")
    assert done.exit_code == 2 and "must have all weights of the model, got no" in said(done)
    assert "layers.2." in said(done)


HUGE = {
    "width": {"hidden_size": 1 << 21, "head_dim": 64},
    "vocabulary": {"vocab_size": 1 << 40},
    "layers": {"num_hidden_layers": 1 << 40},
    "overflow": {"hidden_size": 1 << 62},
}


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", HUGE)
def test_configs_that_ask_for_more_than_there_is(folder, tmp_path, name, quantized, monkeypatch):
    """Terabytes that no file has are refused before anything is allocated."""
    source = folder
    if quantized:
        source = tmp_path / "q"
        run("quantize", "--model", folder, "--out", source, "--scheme", "int8")
    wrong = changed(source, tmp_path / "wrong", **HUGE[name])

    def allocate(*args, **kwargs):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", allocate)
    monkeypatch.setattr("ipex_llm.utils.load_low_precision_checkpoint", allocate)
    done = run("generate", "--model", wrong, "--prompt", "A")
    assert done.exit_code == 2 and "AssertionError" not in said(done), done.output
    assert "weights of its config.json" in said(done) or "config.json that fits" in said(done)


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ messages[5].x.y }}", "{{ raise_exception('no') }}"]
)
def test_a_bad_chat_template(folder, tmp_path, template):
    bad = changed(folder, tmp_path / "bad")
    (bad / "chat_template.jinja").unlink(missing_ok=True)
    path = bad / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    done = run("generate", "--model", bad, "--prompt", "A", "--chat")
    assert done.exit_code == 2 and "the chat template must take a message" in said(done)
