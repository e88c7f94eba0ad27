# SPDX-License-Identifier: Apache-2.0
"""Model folders: made, read, and quantized piece by piece."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ipex_core.errors import OpArgumentError
from ipex_core.packing.quantize import CODEBOOKS, unpack_nibbles
from ipex_llm.model_loader import quantize
from ipex_llm.model_loader.make import make_folder
from ipex_llm.model_loader.quantize import quantize_folder
from ipex_llm.model_loader.schemes import make_scheme
from ipex_quant.util.safetensors import (
    CheckpointError,
    ShardWriter,
    check_model_folder,
    read_header,
    weight_files,
)

LINEAR = [
    f"model.layers.{i}.{name}"
    for i in range(2)
    for name in (
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
    )
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_folder(folder, "tiny", shard_size="90KB")
    return folder


def tensors(folder):
    return {k: v for path in weight_files(folder) for k, v in load_file(path).items()}


def dequantize(scheme, name, found, shape):
    _, k = shape
    scale = found[f"{name}.weight_scale"]
    if scheme.name == "mxfp4":
        scale = torch.exp2(scale.float() - 127)
    groups = scale.shape[1]
    size = -(-k // groups) if scheme.group_size == -1 else scheme.group_size
    scale = scale.float().repeat_interleave(size, dim=1)[:, :k]
    if scheme.packed:
        codes = found[f"{name}.weight_packed"]
        if scheme.name in ("int4", "int8"):
            bits = 4 if scheme.name == "int4" else 8
            parts = [(codes >> (bits * i)) & (2**bits - 1) for i in range(32 // bits)]
            values = torch.stack(parts, -1).flatten(1)[:, :k].float() - 2 ** (bits - 1)
        else:
            table = torch.tensor(CODEBOOKS["nf4" if scheme.name == "nf4" else "fp4"])
            values = table[unpack_nibbles(codes, k).int()]
    else:
        values = found[f"{name}.weight"].float()
    return values * scale


@pytest.mark.parametrize(
    ("name", "group", "error"),
    [
        ("int4", 128, 0.14),
        ("int4", 32, 0.13),
        ("int8", None, 0.01),
        ("int8", 32, 0.008),
        ("nf4", None, 0.1),
        ("fp8", None, 0.04),
        ("mxfp4", None, 0.16),
    ],
)
def test_quantized_weights_are_near_the_source(source, tmp_path, name, group, error):
    scheme = make_scheme(name, group)
    summary = quantize_folder(source, tmp_path / "out", scheme)
    assert summary.quantized == len(LINEAR)
    before, after = tensors(source), tensors(tmp_path / "out")
    for module in LINEAR:
        weight = before[f"{module}.weight"].float()
        got = dequantize(scheme, module, after, weight.shape)
        assert got.shape == weight.shape
        assert (got - weight).norm() / weight.norm() < error
        if f"{module}.weight_shape" in after:
            assert after[f"{module}.weight_shape"].tolist() == list(weight.shape)
    for kept in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(before[kept], after[kept])
    config = json.loads((tmp_path / "out/config.json").read_text())
    stored = config["quantization_config"]
    assert stored["format"] == scheme.file_format
    assert stored["ignore"] == ["lm_head"]
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()
    assert not (tmp_path / "out.partial").exists()
    assert not list((tmp_path / "out").glob("ipex_quantize*"))


def test_head_skip_and_shards(source, tmp_path):
    scheme = make_scheme("int8")
    summary = quantize_folder(
        source, tmp_path / "out", scheme, head=True, skip=[r"layers\.1\."], shard_bytes=60_000
    )
    assert summary.quantized == 8 and summary.shards > 1
    after = tensors(tmp_path / "out")
    assert after["lm_head.weight"].dtype == torch.int8
    assert after["model.layers.1.mlp.up_proj.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "model.layers.1.mlp.up_proj" in config["quantization_config"]["ignore"]
    assert all(path.stat().st_size < 70_000 + 2**16 for path in weight_files(tmp_path / "out"))


class Killed(BaseException):
    pass


@pytest.mark.parametrize("shard_bytes", [2 << 30, 60_000])
def test_a_killed_run_goes_on(source, tmp_path, shard_bytes, monkeypatch):
    monkeypatch.setattr(quantize, "_PART", 1 << 11)  # several parts of each weight
    scheme = make_scheme("int4", 32)
    quantize_folder(source, tmp_path / "whole", scheme, shard_bytes=shard_bytes)
    names = []

    def stop_at(count):
        def on_progress(progress):
            names.append((progress.name, progress.resumed))
            if len(names) == count:
                raise Killed

        return on_progress

    for count in (7, 40, 25):
        names.clear()
        with pytest.raises(Killed):
            quantize_folder(
                source,
                tmp_path / "out",
                scheme,
                shard_bytes=shard_bytes,
                on_progress=stop_at(count),
            )
        assert not (tmp_path / "out").exists()
    names.clear()
    quantize_folder(
        source, tmp_path / "out", scheme, shard_bytes=shard_bytes, on_progress=stop_at(-1)
    )
    assert any(resumed for _, resumed in names)
    whole, again = tensors(tmp_path / "whole"), tensors(tmp_path / "out")
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_other_arguments_start_anew(source, tmp_path):
    def stop(progress):
        if progress.done > progress.total // 2:
            raise Killed

    with pytest.raises(Killed):
        quantize_folder(source, tmp_path / "out", make_scheme("int8"), on_progress=stop)
    seen = []
    quantize_folder(source, tmp_path / "out", make_scheme("nf4"), on_progress=seen.append)
    assert not any(progress.resumed for progress in seen)
    assert seen[-1].done == seen[-1].total


def test_memory_does_not_grow_with_the_model(tmp_path):
    """In a process of its own: the peak over the start is far below the size of the weights."""
    import subprocess
    import sys

    (tmp_path / "in").mkdir()
    weights = {
        f"model.layers.{i}.mlp.up_proj.weight": torch.zeros(4096, 4096).bfloat16() for i in range(4)
    }
    save_file(weights, tmp_path / "in/model.safetensors")
    (tmp_path / "in/config.json").write_text("{}")
    code = f"""
from pathlib import Path
from ipex_llm.model_loader.quantize import quantize_folder
from ipex_llm.model_loader.schemes import make_scheme
from ipex_llm.kv_cache import peak_memory
import torch
torch.set_num_threads(1)
make_scheme("int4").encode(torch.ones(64, 64))
before = peak_memory()
quantize_folder(Path({str(tmp_path / "in")!r}), Path({str(tmp_path / "out")!r}), make_scheme("int4"))
print(peak_memory() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    result = sum(path.stat().st_size for path in weight_files(tmp_path / "out"))
    layer = 4096 * 4096 * 2
    assert int(done.stdout) < 1.3 * result + layer
    assert int(done.stdout) < 64 << 20


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_bad_schemes():
    for arguments, message in (
        (("int5",), "scheme must be one of int4"),
        (("mxfp4", 64), "group_size must be 32"),
        (("fp8", 128), "group_size must be -1"),
        (("int4", 12), "multiple of 8"),
    ):
        with pytest.raises(OpArgumentError, match=message):
            make_scheme(*arguments)


def copy(source, target):
    import shutil

    shutil.copytree(source, target)
    return target


def test_incomplete_and_damaged_folders(source, tmp_path):
    scheme = make_scheme("int4", 32)
    out = tmp_path / "out"

    def fails(folder, message):
        for call in (check_model_folder, lambda f: quantize_folder(f, out, scheme)):
            with pytest.raises(CheckpointError, match=message):
                call(folder)
        assert not out.exists()

    fails(tmp_path / "none", "must be a model folder, got no config.json")
    folder = copy(source, tmp_path / "a")
    shards = weight_files(folder)
    assert len(shards) > 2
    shards[1].unlink()
    fails(folder, f"must have all shards of its index, got no {shards[1].name}$")
    shards[2].unlink()
    fails(folder, "and 1 more")
    folder = copy(source, tmp_path / "b")
    with shards[0].with_name(shards[0].name).open("rb") as file:
        data = file.read()
    target = folder / shards[0].name
    target.write_bytes(data[:-100])
    fails(folder, "100 fewer than .* ends")
    target.write_bytes(data[:5])
    fails(folder, "5 bytes with no header")
    target.write_bytes(b"\xff" * 200)
    fails(folder, "no header")
    target.write_bytes(data[:8] + b"x" + data[9:])
    fails(folder, "header that cannot be read")
    (folder / "model.safetensors.index.json").write_text("{}")
    fails(folder, "must have a weight_map")
    (folder / "model.safetensors.index.json").unlink()
    fails(folder, "safetensors weights, got no model.safetensors")
    (folder / "config.json").write_text("{")
    fails(folder, "must be JSON")
    (folder / "config.json").write_text("[]")
    fails(folder, "JSON object")


def test_what_cannot_be_quantized(source, tmp_path):
    scheme = make_scheme("int8")
    out = tmp_path / "out"
    quantize_folder(source, out, scheme)
    with pytest.raises(FileExistsError, match="not an empty folder"):
        quantize_folder(source, out, scheme)
    with pytest.raises(CheckpointError, match="not be quantized already, got method 'compressed"):
        quantize_folder(out, tmp_path / "again", scheme)
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    save_file({"a.weight": torch.ones(4)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="as \\[out, in\\], got model type 'gpt2'"):
        quantize_folder(folder, tmp_path / "x", scheme)
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="got none"):
        quantize_folder(folder, tmp_path / "x", scheme)
    save_file({"a.weight": torch.full((32, 32), torch.nan)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"finite weights, got a\.weight"):
        quantize_folder(folder, tmp_path / "x", scheme)
    (tmp_path / "y.partial").mkdir()
    (tmp_path / "y.partial/file").touch()
    with pytest.raises(FileExistsError, match="no unfinished run"):
        quantize_folder(source, tmp_path / "y", scheme)


def test_written_files_are_those_of_safetensors(tmp_path):
    values = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.zeros(0, 4, dtype=torch.int8),
        "c": torch.tensor(3),
    }
    writer = ShardWriter(
        tmp_path / "x.safetensors", {k: (v.dtype, tuple(v.shape)) for k, v in values.items()}
    )
    assert writer.open() == set()
    for value in values.values():
        writer.write(value)
    writer.close(True)
    back = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(back[name], value) for name, value in values.items())
    assert read_header(tmp_path / "x.safetensors")["a"].shape == (2, 3)
