# SPDX-License-Identifier: Apache-2.0
"""What reads input from elsewhere, and the exceptions that its documentation names.

A target has seeds (its folder under ``corpus/``, or inputs that it makes itself), a way to change them, and a function
that reads one. Anything that the function raises besides ``allowed`` is a finding, and so is the end of the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import random
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mutate
import torch
from torch import nn

CORPUS = Path(__file__).parent / "corpus"
LARGEST = 1 << 20  # elements of a tensor of an input


@dataclasses.dataclass(frozen=True)
class Target:
    """Something that reads input.

    Attributes:
        run: Reads one input; the folder is empty and belongs to it.
        change: Returns a changed input.
        seeds: Returns inputs to begin with, besides those of the corpus.
        needs: Modules without which the target is left out.
    """

    run: Callable[[bytes, Path], object]
    change: Callable[[random.Random, bytes], bytes] = mutate.change_json_text
    seeds: Callable[[], Iterable[bytes]] = tuple
    needs: tuple[str, ...] = ()


def touch(tensors: Iterable[torch.Tensor]) -> None:
    """Read every byte: an address outside the file ends the process here."""
    for tensor in tensors:
        if tensor.numel():
            tensor.detach().contiguous().view(-1).view(torch.uint8).sum()


# -- files of tensors -----------------------------------------------------------------------------------------


def small_tensors() -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.arange(24, dtype=torch.float32).view(4, 6),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.ones(0, 2, dtype=torch.int8),
        "scalar": torch.tensor(7),
    }


def safetensors_seeds() -> Iterable[bytes]:
    from safetensors.torch import save

    yield save(small_tensors())


def read_safetensors(data: bytes, folder: Path) -> None:
    from ipex_quant.util.safetensors import CheckpointError, mapped

    path = folder / "model.safetensors"
    path.write_bytes(data)
    with contextlib.suppress(CheckpointError):
        touch(mapped(path).values())


def change_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Change the header as JSON, its length kept true, or the bytes."""
    if rng.random() < 0.4 or len(data) < 8:
        return mutate.change_bytes(rng, data)
    length = int.from_bytes(data[:8], "little")
    header = mutate.change_json_text(rng, data[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def gguf_seeds() -> Iterable[bytes]:
    def text(value: str) -> bytes:
        return len(value).to_bytes(8, "little") + value.encode()

    def number(value: int, size: int) -> bytes:
        return value.to_bytes(size, "little")

    entries = [
        text("general.architecture") + number(8, 4) + text("llama"),
        text("llama.attention.head_count") + number(4, 4) + number(2, 4),
        text("some.list") + number(9, 4) + number(5, 4) + number(2, 8) + bytes(8),
        text("some.texts") + number(9, 4) + number(8, 4) + number(1, 8) + text("x"),
    ]
    tables = [
        text("blk.0.attn_q.weight") + number(2, 4) + number(32, 8) + number(4, 8) + number(2, 4),
        text("output_norm.weight") + number(1, 4) + number(8, 8) + number(0, 4),
    ]
    body = b""
    for i, table in enumerate(tables):
        body += table + number(i * 96, 8)
    for version in (2, 3):
        head = b"GGUF" + number(version, 4) + number(len(tables), 8) + number(len(entries), 8)
        whole = head + b"".join(entries) + body
        yield whole + bytes(-len(whole) % 32) + bytes(range(96)) + bytes(32)


def read_gguf(data: bytes, folder: Path) -> None:
    from ipex_core.errors import OpArgumentError
    from ipex_llm.utils import load_low_precision_checkpoint
    from ipex_quant.formats.gguf import read_gguf
    from ipex_quant.weight_only.checkpoint import read_checkpoint

    path = folder / "model.gguf"
    path.write_bytes(data)
    with contextlib.suppress(OpArgumentError):
        state, config = read_gguf(path)
        touch(state.values())
        for weight in read_checkpoint(state, config):
            touch([weight.dequantize()])
    with contextlib.suppress(OpArgumentError):
        touch(load_low_precision_checkpoint(path)[0].values())


# -- quantized checkpoints ------------------------------------------------------------------------------------


def tensor_of(row: Any) -> torch.Tensor | None:
    """Return the tensor of ``[dtype, shape, value or list of values]``, None if the row has been changed too far."""
    try:
        name, shape, value = row
        dtype = getattr(torch, name)
        size = torch.Size(shape)
        if size.numel() > LARGEST or not isinstance(dtype, torch.dtype):
            return None
        if isinstance(value, str):
            value = list(value.encode())
        made = torch.tensor(value).to(dtype)
        return made.view(size) if made.dim() else made.expand(size).contiguous()
    except (TypeError, ValueError, RuntimeError, AttributeError, OverflowError):
        return None


def read_quantized(data: bytes, folder: Path) -> None:
    """Read ``{"config": quantization_config, "tensors": {name: row}}``."""
    from ipex_core.errors import OpArgumentError
    from ipex_quant.weight_only.checkpoint import linear_from, read_checkpoint

    try:
        given = json.loads(data)
        config = given["config"]
        state = {str(k): t for k, r in given["tensors"].items() if (t := tensor_of(r)) is not None}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return  # no input of this form
    with contextlib.suppress(OpArgumentError):
        for weight in read_checkpoint(state, config):
            touch([weight.dequantize()])
            linear_from(weight)(torch.ones(1, weight.in_features))


def read_folder(data: bytes, folder: Path) -> None:
    """Read ``{file name: JSON, or {"$tensors": {name: row}}}`` as a checkpoint of a language model."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from ipex_core.errors import OpArgumentError
    from ipex_llm.utils import load_low_precision_checkpoint

    try:
        files = json.loads(data)
        for name, content in files.items():
            if name != Path(name).name or name in ("", ".", "..") or len(name) > 80:
                continue
            if isinstance(content, dict) and isinstance(content.get("$tensors"), dict):
                rows = {str(k): tensor_of(row) for k, row in content["$tensors"].items()}
                save_file({k: t for k, t in rows.items() if t is not None}, folder / name)
            else:
                (folder / name).write_text(json.dumps(content))
    except (ValueError, AttributeError, RecursionError, SafetensorError):
        return  # among others, names that no file can have
    for ranks in (1, 2):
        with contextlib.suppress(OpArgumentError):
            touch(load_low_precision_checkpoint(folder, 0, ranks)[0].values())


# -- what ipex.quantization writes ----------------------------------------------------------------------------


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 32), nn.LayerNorm(32)).eval()


def calibrated() -> nn.Module:
    from ipex_quant import default_static_qconfig_mapping, prepare

    prepared = prepare(small_net(), default_static_qconfig_mapping, torch.ones(2, 32))
    prepared(torch.randn(4, 32))
    return prepared


@functools.cache
def saved_folders() -> tuple[dict[str, bytes], ...]:
    """Return the files of folders with an INT8 and with a weight-only quantized model."""
    import tempfile

    import ipex_quant

    woq = ipex_quant.convert(
        ipex_quant.prepare(small_net(), ipex_quant.get_weight_only_quant_qconfig_mapping())
    )
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        for number, model in enumerate((ipex_quant.convert(calibrated()), woq)):
            place = Path(temporary, str(number))
            ipex_quant.save(model, place)
            found.append({path.name: path.read_bytes() for path in place.iterdir()})
    return tuple(found)


def read_saved(data: bytes, folder: Path) -> None:
    """Load a saved model whose config.json is the input."""
    from ipex_core.errors import OpArgumentError
    from ipex_quant import load
    from ipex_quant.util.safetensors import CheckpointError

    for files in saved_folders():
        for name, content in files.items():
            (folder / name).write_bytes(content)
        (folder / "config.json").write_bytes(data)
        with contextlib.suppress(OpArgumentError, CheckpointError):
            load(folder, small_net())(torch.ones(1, 32))


@functools.cache
def summary() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "summary.json")
        prepared: Any = calibrated()
        prepared.save_qconf_summary(path)
        return path.read_bytes()


def read_summary(data: bytes, folder: Path) -> None:
    from ipex_core.errors import OpArgumentError

    path = folder / "summary.json"
    path.write_bytes(data)
    prepared: Any = calibrated()
    with contextlib.suppress(OpArgumentError):
        prepared.load_qconf_summary(path)
        prepared(torch.ones(1, 32))


def read_scales(data: bytes, folder: Path) -> None:
    from ipex_quant.kv_cache import KVCacheScales

    path = folder / "scales.json"
    path.write_bytes(data)
    with contextlib.suppress(ValueError):
        KVCacheScales.load(path).of(torch.int8)


# -- texts ----------------------------------------------------------------------------------------------------


def read_yaml(data: bytes, folder: Path) -> None:
    from ipex_runtime.hypertune._yaml import ConfigurationError
    from ipex_runtime.hypertune.conf import Conf

    (folder / "tune.yaml").write_bytes(data)
    (folder / "script.py").write_text("")
    with contextlib.suppress(ConfigurationError):
        Conf(folder / "tune.yaml", str(folder / "script.py"), [])


def read_environment(data: bytes, folder: Path) -> None:
    """Read lines ``NAME: value`` as environment variables."""
    from ipex_core import config
    from ipex_core.errors import ConfigError

    rows = (line.partition(":") for line in data.decode("utf-8", "replace").splitlines())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(ConfigError):
            config.reload({name.strip(): value.strip() for name, _, value in rows})


def run_command(data: bytes, folder: Path) -> None:
    """Run a list of words as a command line; commands that start programs get --dry-run, others only parse."""
    try:
        words = [str(word) for word in json.loads(data)]
    except (ValueError, TypeError, RecursionError):
        return
    if not words:
        return
    from ipex_core.errors import IpexError  # the command prints its text

    quiet = contextlib.ExitStack()
    with quiet, contextlib.suppress(SystemExit, IpexError):
        quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
        quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
        quiet.enter_context(contextlib.chdir(folder)) if sys.version_info >= (3, 11) else None
        if words[0] == "ipexrun":
            from ipex_runtime.launch.launch import main

            main(["--dry-run", *words[1:]])
        elif words[0] == "ipex":
            from ipex_cli.app import app

            allowed = ("op-info", "show-config", "version", "topology", "hypertune", "--version")
            if len(words) > 1 and (words[1] in allowed or words[1].startswith("-")):
                app(words[1:], prog_name="ipex")


def request_seeds() -> Iterable[bytes]:
    common = {"model": "m", "max_tokens": 4, "temperature": 0.5, "seed": -1, "n": 2, "stop": ["a"]}
    more = {"stop_token_ids": [1], "stream": True, "stream_options": {"include_usage": True}}
    parts = [{"type": "text", "text": "A"}]
    messages = [{"role": "system", "content": "A"}, {"role": "user", "content": parts}]
    for prompt in ("A", ["A", "B"], [1, 2], [[1], [2]]):
        yield json.dumps({**common, **more, "prompt": prompt, "logprobs": 2}).encode()
    yield json.dumps({**common, "messages": messages, "top_logprobs": 2}).encode()


def read_request(data: bytes, folder: Path) -> None:
    """Read the body of a request to the server, of both kinds."""
    from ipex_llm.entrypoints.openai.protocol import (
        ApiError,
        ChatRequest,
        CompletionRequest,
        parse_body,
        sampling_params,
    )

    for kind in (CompletionRequest, ChatRequest):
        try:
            body: Any = parse_body(kind, data)
            prompts = (
                body.prompts() if kind is CompletionRequest else [m.plain() for m in body.messages]
            )
            json.dumps(prompts, ensure_ascii=False).encode()
            with contextlib.suppress(ValueError):
                sampling_params(body, 0, 100, 16)
        except ApiError as error:
            assert error.status == 400 and len(error.json()) < 1000


# -- ops ------------------------------------------------------------------------------------------------------

#: What stock torch raises for arguments of the wrong kind, or for sizes that no machine has.
OP_ERRORS = (TypeError, ValueError, RuntimeError)


@functools.cache
def samples() -> list[tuple[str, Any]]:
    import ipex_core.ops  # noqa: F401  (registers)
    from ipex_core.library.kernels import specs

    found = []
    for name, spec in sorted(specs().items()):
        for dtype in spec.dtypes[:1]:
            found += [(name, sample) for sample in spec.samples(dtype)]
    return found


def run_op(data: bytes, folder: Path) -> None:
    """Call an op with arguments that are changed as the number in the input says."""
    from ipex_core.library.kernels import specs

    rng = random.Random(data)
    name, sample = rng.choice(samples())
    args = [a.clone() if isinstance(a, torch.Tensor) else a for a in sample.args]
    kwargs = dict(sample.kwargs)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places: list[Any] = [*range(len(args)), *kwargs]
        if places:
            place = rng.choice(places)
            owner: Any = args if isinstance(place, int) else kwargs
            owner[place] = mutate.change_argument(rng, owner[place])
    try:
        with torch.no_grad():
            specs()[name].op(*args, **kwargs)
    except NotImplementedError:
        pass  # of torch, for devices without data
    except OP_ERRORS as error:
        if type(error) not in OP_ERRORS and not type(error).__module__.startswith("ipex"):
            raise


def op_numbers(rng: random.Random, data: bytes) -> bytes:
    return str(rng.getrandbits(48)).encode()


TARGETS = {
    "safetensors": Target(read_safetensors, change_safetensors, safetensors_seeds),
    "gguf": Target(read_gguf, mutate.change_bytes, gguf_seeds, ("ipex_llm",)),
    "quantized": Target(read_quantized),
    "folder": Target(read_folder, needs=("ipex_llm",)),
    "saved": Target(read_saved, seeds=lambda: [f["config.json"] for f in saved_folders()]),
    "summary": Target(read_summary, seeds=lambda: [summary()]),
    "scales": Target(read_scales),
    "yaml": Target(read_yaml, mutate.change_lines, needs=("yaml", "ipex_runtime")),
    "environment": Target(read_environment, mutate.change_lines),
    "command": Target(run_command, needs=("ipex", "ipex_runtime")),
    "request": Target(read_request, seeds=request_seeds, needs=("ipex_llm", "fastapi")),
    "op": Target(run_op, op_numbers, lambda: [b"0"]),
}
