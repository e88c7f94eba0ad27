# SPDX-License-Identifier: Apache-2.0
"""Model folders that bring Python code: it runs only if the user says so, and nobody is asked on standard input."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest
import torch
from typer.testing import CliRunner

import ipex_quant
from ipex_core.errors import OpArgumentError
from ipex_llm.entrypoints.cli import app
from ipex_llm.model_loader.make import make_folder

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """Return the file that the code of a folder makes; transformers keeps its copies of such code elsewhere."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    # Its log goes to a stream that another test has closed.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    return tmp_path / "the_code_ran"


def add_code(folder, marker):
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    places = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    for name, more in (
        ("config.json", {"model_type": "own", "architectures": ["OwnModel"], "auto_map": places}),
        (
            "tokenizer_config.json",
            {
                "tokenizer_class": "OwnTokenizer",
                "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]},
            },
        ),
    ):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


@pytest.fixture
def folder(tmp_path, marker):
    place = tmp_path / "own"
    make_folder(place, "tiny", torch.float32, 0)
    return place


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input="y\n" * 9)


COMMANDS = {
    "generate": ("--prompt", "A", "--max-new-tokens", 2, "--dtype", "fp32"),
    "bench": ("--new", 2, "--rounds", 1, "--prompt", 4, "--dtype", "fp32"),
    "serve": ("--port", 0),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_do_not_run_the_code_of_a_folder(command, folder, marker):
    if command == "serve":
        pytest.importorskip("uvicorn")
    add_code(folder, marker)
    done = run(command, "--model", folder, *COMMANDS[command])
    assert done.exit_code == 2 and "error:" in done.output and "Traceback" not in done.output
    assert "trust" in done.output and "--trust-remote-code" in " ".join(done.output.split())
    assert not marker.exists()


def test_quantized_folders_are_not_asked_for_either(folder, marker, tmp_path):
    add_code(folder, marker)
    out = tmp_path / "int8"
    done = run("quantize", "--model", folder, "--out", out, "--scheme", "int8")
    assert done.exit_code == 0 and not marker.exists()
    (out / "tokenizer_config.json").unlink()  # so that the model is reached
    done = run("generate", "--model", out, "--prompt", "A")
    assert done.exit_code == 2 and not marker.exists()


def test_the_flag_runs_it(folder, marker):
    add_code(folder, marker)
    done = run("generate", "--model", folder, *COMMANDS["generate"], "--trust-remote-code")
    assert done.exit_code == 0, done.output
    assert marker.exists()


def test_load(folder, marker, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()
    ipex_quant.quantize_linears(model, ipex_quant.woq_qconfig(weight_dtype=1), progress=False)
    place = tmp_path / "saved"
    ipex_quant.save(model, place)
    (place / "tokenizer_config.json").write_text("{}")
    add_code(place, marker)
    for kind in (
        "OwnModel",
        "LlamaForCausalLM",
    ):  # a class of the folder, a configuration of the folder
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**config, "architectures": [kind]}))
        monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
        with pytest.raises(OpArgumentError, match="transformers"):
            ipex_quant.load(place)
        assert not marker.exists()
    (place / "config.json").write_text(json.dumps({**config, "architectures": ["OwnModel"]}))
    again = ipex_quant.load(place, trust_remote_code=True)
    assert marker.exists() and type(again).__name__ == "OwnModel"
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(ids).logits, model(ids).logits)
