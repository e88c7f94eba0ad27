# SPDX-License-Identifier: Apache-2.0
"""Run tiny models in vLLM with the plug-in and compare: ``python tools/vllm_check.py [PART ...] [--only NAME ...]``.

=============  ========================================================================================
``families``   greedy tokens in float32 beside those of transformers, for decoder families
``options``    one family in other dtypes, with fp8 caches, short steps, prefix caching, compiled, drafts
``quantized``  greedy tokens of quantized weights beside those of the float weights that they stand for
``recurrent``  models with recurrent layers, each prompt twice, and with drafts
``vision``     an image before a question
``encoders``   embeddings of encoder models beside those of transformers
``ranks``      two tensor-parallel ranks beside one
``cluster``    two stages of two ranks on two nodes of Ray, and a rank that is killed; needs ray
``serve``      `vllm serve`: completion, chat, streaming, a JSON schema
``refused``    what the plug-in does not have: one line that says so
=============  ========================================================================================

Without parts: all. With ``--compiled`` vLLM compiles the models, as it does by default. It prints a line per case and
ends with 1 if one differs. Nothing is downloaded: models are random.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_engine import (
    NEW_TOKENS,
    Tokens,
    behind,
    compare,
    generate,
    near_as_rounded,
    prompts,
    reference,
    start,
    stop,
)
from vllm_models import (
    eagle,
    family,
    nearest,
    nearest_fp4,
    nearest_fp8,
    online_fp8,
    tokenizer,
    vision_model,
)

ROOT = Path(__file__).resolve().parent.parent
for package in ("ipex-llm", "ipex-quant"):
    sys.path.insert(0, str(ROOT / "packages" / package / "tests"))

#: Decoder families whose greedy tokens must be those of transformers.
FAMILIES = (
    *("llama", "llama_tied", "llama_bias", "llama3", "mistral", "qwen2", "qwen3", "gemma"),
    *("gemma2", "gemma3", "phi", "phi3", "gptj", "gpt2", "opt", "falcon"),
    *("falcon_alibi", "bloom", "gpt_bigcode", "stablelm", "glm4", "granite"),
    *("olmo2", "cohere", "starcoder2", "nemotron"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss"),
    *("deepseek_v2", "deepseek_v3", "cohere2"),
    # Of vLLM's backend for models of transformers, whose classes it changes: the last.
    "gpt_neox",
)

Case = tuple[str, Callable[[], str]]


def families(folder: Path) -> Iterator[Case]:
    """Yield a case for each family."""
    for name in FAMILIES:

        def run(name: str = name) -> str:
            model, place = family(name, folder)
            return against(place, reference(model, prompts()))

        yield name, run


def against(place: Path, wanted: Tokens, **options: Any) -> str:
    """Compare the greedy tokens of vLLM. What is wanted is known before: vLLM changes classes of transformers."""
    engine = start(place, **options)
    try:
        return compare(generate(engine, prompts()), wanted)
    finally:
        stop(engine)


#: Name -> options of the engine, whose greedy tokens must be those of transformers in float32.
OPTIONS: dict[str, dict[str, Any]] = {
    "chunked-prefill": {"max_num_batched_tokens": 16, "enable_chunked_prefill": True},
    "no-prefix-caching": {"enable_prefix_caching": False},
    "block-size-16": {"block_size": 16},
    "compiled": {"enforce_eager": False},
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    },
    "eagle": {"speculative_config": {"method": "eagle", "num_speculative_tokens": 3}},
    # Its own draft: all drafts are accepted.
    "draft": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
}
#: Name -> options with other numbers: the text only has to be there.
ROUNDED: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "cache-fp8": {"kv_cache_dtype": "fp8"},
    "cache-fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "fp8-online": {"dtype": "bfloat16", "quantization": "fp8"},
}


def lora(folder: Path) -> str:
    """Compare an adapter of all linear layers of the attention with the weights that it was merged into."""
    import torch
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    model, place = family("llama", folder)
    adapter = folder / "adapter"
    adapter.mkdir()
    tensors, rank = {}, 4
    generator = torch.Generator().manual_seed(5)
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    for name, layer in model.named_modules():
        if name.endswith(parts):
            n, k = layer.weight.shape
            down = torch.randn(rank, k, generator=generator) / k**0.5
            up = torch.randn(n, rank, generator=generator) / 4
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
            layer.weight.data += 2 * up @ down
    save_file(tensors, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    settings["target_modules"] = list(parts)
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    wanted = reference(model, prompts())
    engine = start(place, enable_lora=True, max_lora_rank=8)
    try:
        got = generate(engine, prompts(), lora_request=LoRARequest("one", 1, str(adapter)))
    finally:
        stop(engine)
    return compare(got, wanted)


def options(folder: Path) -> Iterator[Case]:
    """Yield a case for each option of the engine, with a Llama."""
    for name, chosen in OPTIONS.items():

        def run(chosen: dict[str, Any] = chosen) -> str:
            model, place = family("llama", folder)
            speculative = dict(chosen.get("speculative_config", {}))
            if speculative.get("method") == "draft_model":
                chosen = {"speculative_config": {**speculative, "model": str(place)}}
            if speculative.get("method") == "eagle":
                head = str(eagle(model, place, folder / "eagle"))
                chosen = {"speculative_config": {**speculative, "model": head}}
            return against(place, reference(model, prompts()), **chosen)

        yield name, run
    yield "lora", functools.partial(lora, folder)
    for name, chosen in ROUNDED.items():

        def near(chosen: dict[str, Any] = chosen) -> str:
            model, place = family("llama", folder)
            engine = start(place, **chosen)
            try:
                got = generate(engine, prompts())
            finally:
                stop(engine)
            worst = behind(model, got)
            return "" if worst < 0.5 else f"a token is {worst:.2f} nats behind the best"

        yield name, near


def quantized(folder: Path) -> Iterator[Case]:
    """Yield a case for each format of quantized weights."""
    import packers as pack
    import quantized_llama as llama
    from transformers import LlamaConfig

    llama.CONFIG = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=96,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=None,
        architectures=["LlamaForCausalLM"],
        dtype="float16",
    )
    llama.SIZES = {
        "self_attn.q_proj": (256, 128),
        "self_attn.k_proj": (128, 128),
        "self_attn.v_proj": (128, 128),
        "self_attn.o_proj": (128, 256),
        "mlp.gate_proj": (256, 128),
        "mlp.up_proj": (256, 128),
        "mlp.down_proj": (128, 256),
    }

    def int8(n: int, k: int, seed: int = 0) -> Any:
        return pack.int8(n, k, "[N, 1]", seed)

    eight = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
                "input_activations": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
    }
    form = "pack-quantized"
    cases: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "gptq-4": (
            pack.gptq,
            {"symmetric": True, "group": 32},
            {**llama.GPTQ, "sym": True, "group_size": 32},
        ),
        "awq": (pack.awq, {"group": 32}, {**llama.AWQ, "group_size": 32}),
        "compressed-w4a16": (
            pack.compressed,
            {"group": 32},
            pack.compressed_config(4, 32, True, form),
        ),
        "compressed-w4a16-asymmetric": (
            pack.compressed,
            {"group": 32, "symmetric": False},
            pack.compressed_config(4, 32, False, form),
        ),
        "compressed-w8a16": (
            pack.compressed,
            {"group": 32, "bits": 8},
            pack.compressed_config(8, 32, True, form),
        ),
        "compressed-w8a8": (int8, {}, eight),
        "fp8-blocks": (
            pack.fp8,
            {},
            {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "ignored_layers": ["lm_head"],
            },
        ),
    }
    for name, (packer, chosen, config) in cases.items():

        def run(
            name: str = name, packer: Any = packer, chosen: Any = chosen, config: Any = config
        ) -> str:
            state, model = llama.checkpoint(packer, **chosen)
            floats = ("norm", "embed", "lm_head")
            state = {
                key: value.half() if any(part in key for part in floats) else value
                for key, value in state.items()
            }
            place = llama.write(folder / name, state, config)
            for key, value in model.named_parameters():
                if any(part in key for part in floats):
                    value.data = value.data.half().float()
            wanted = reference(model.float(), prompts())
            # vLLM has no GPTQ and no AWQ in float32.
            exact = name.startswith("compressed-w4a16") or name == "compressed-w8a16"
            engine = start(place, dtype="float32" if name.startswith("compressed") else "float16")
            try:
                got = generate(engine, prompts())
            finally:
                stop(engine)
            if exact:
                return compare(got, wanted)
            worst = behind(model, got)
            limit = 0.5 if name == "compressed-w8a8" else 0.1
            return "" if worst < limit else f"a token is {worst:.2f} nats behind the best"

        yield name, run
    for kind, name in (
        ("compressed-w4a16", "qwen3_moe"),
        ("compressed-fp8", "qwen3_moe"),
        ("mxfp4", "gpt_oss"),
    ):
        yield f"experts-{kind}", functools.partial(packed_experts, folder, name, kind)

    def online() -> str:
        model, place = family("qwen3_moe", folder)
        engine = start(place, dtype="bfloat16", quantization="fp8")
        try:
            got = generate(engine, prompts())
        finally:
            stop(engine)
        return near_as_rounded(online_fp8(model), got)

    yield "experts-fp8-online", online


_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}


def packed_experts(folder: Path, name: str, kind: str) -> str:
    """Compare quantized experts with the float experts that they stand for."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    _, place = family(name, folder)
    state = load_file(place / "model.safetensors")
    packed: dict[str, Any] = {}
    floats: dict[str, Any] = {}
    for key, value in state.items():
        stem = key.removesuffix(".weight")
        if name == "gpt_oss" and key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, exponents, weight = nearest_fp4(value.transpose(1, 2))
            packed |= {f"{key}_blocks": blocks, f"{key}_scales": exponents}
            floats[key] = weight.transpose(1, 2).contiguous()
        elif name != "gpt_oss" and ".experts." in key:
            tensors, floats[key] = (nearest_fp8 if kind == "compressed-fp8" else nearest)(value)
            packed |= {f"{stem}.{part}": tensor for part, tensor in tensors.items()}
        else:
            packed[key] = floats[key] = value
    schemes: dict[str, Any] = {
        "compressed-w4a16": {
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
            }
        },
        "compressed-fp8": {
            "weights": {**_FP8, "strategy": "channel"},
            "input_activations": {**_FP8, "strategy": "token", "dynamic": True},
        },
    }
    made: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    if kind in schemes:
        made = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized" if kind == "compressed-fp8" else "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], **schemes[kind]}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
        }
    config = json.loads((place / "config.json").read_text())
    places = []
    for form, tensors in (("float", floats), ("packed", packed)):
        places.append(folder / f"{name}-{kind}-{form}")
        places[-1].mkdir()
        save_file(tensors, places[-1] / "model.safetensors", {"format": "pt"})
        if form == "packed":
            # vLLM has no experts of these kinds in float32.
            config |= {"quantization_config": made, "dtype": "bfloat16"}
        (places[-1] / "config.json").write_text(json.dumps(config))
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load(places[0], dtype=torch.float32, attn_implementation="eager").eval()
    engine = start(places[1], dtype="bfloat16")
    try:
        got = generate(engine, prompts())
    finally:
        stop(engine)
    return near_as_rounded(model, got)


#: What LFM2's own files say and the class of transformers does not.
_LFM2 = {
    "conv_dim": 64,
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
#: Models with recurrent layers: name -> options of the engine.
RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": {},
    "granite": {},
    # vLLM has the gated delta rule on CPUs in bfloat16 only.
    "qwen3_5": {"dtype": "bfloat16"},
}


def recurrent(folder: Path) -> Iterator[Case]:
    """Yield a case for each kind of recurrent layers, with prompts that run twice, and drafts for one."""
    import recurrent_models

    recurrent_models.BASE["max_position_embeddings"] = 256

    def run(name: str, **options: Any) -> str:
        model, place = recurrent_models.build(name).float(), folder / name
        model.save_pretrained(place)
        file = place / "config.json"
        more = _LFM2 if name == "lfm2" else {}
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
        engine = start(place, **options)
        try:
            first, again = generate(engine, prompts()), generate(engine, prompts())
        finally:
            stop(engine)
        if "dtype" not in options:
            wanted = reference(model, prompts())
            return compare(first, wanted) or compare(again, wanted)
        return near_as_rounded(model, first) or near_as_rounded(model, again)

    for name, options in RECURRENT.items():
        yield name, functools.partial(run, name, **options)
    ngram = OPTIONS["ngram"]
    yield "qwen3_5-ngram", functools.partial(run, "qwen3_5", **RECURRENT["qwen3_5"], **ngram)

    def refused() -> str:
        try:
            return run("lfm2", **ngram) or "it was not refused"
        except ValueError as error:
            return "" if "speculative_config must be absent" in str(error) else f"{error}"

    yield "lfm2-ngram is refused", refused


def vision(folder: Path) -> Iterator[Case]:
    """Yield the case of an image before a question, with Qwen2.5-VL."""

    def run() -> str:
        import numpy
        import torch
        from PIL import Image

        place = folder / "qwen2_5_vl"
        model, processor = vision_model(place)
        noise = numpy.random.default_rng(0).integers(0, 255, (90, 120, 3), dtype=numpy.uint8)
        image = Image.fromarray(noise)
        text = "ab<|vision_start|><|image_pad|><|vision_end|>what is it"
        given = processor(text=[text], images=[image], return_tensors="pt")
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            out = model.generate(**given, max_new_tokens=NEW_TOKENS, **options)
        wanted = out[0, given["input_ids"].shape[1] :].tolist()
        from vllm import SamplingParams

        engine = start(place, skip_tokenizer_init=False, limit_mm_per_prompt={"video": 0})
        try:
            params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
            prompt = {"prompt": text, "multi_modal_data": {"image": image}}
            outputs = engine.generate([prompt], params, use_tqdm=False)
        finally:
            stop(engine)
        return compare([list(outputs[0].outputs[0].token_ids)], [wanted])

    yield "qwen2_5_vl", run


def encoders(folder: Path) -> Iterator[Case]:
    """Yield a case for each encoder."""
    import transformers

    size = {
        "vocab_size": 258,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    for name in ("Bert", "Roberta"):

        def run(name: str = name) -> str:
            import torch

            torch.manual_seed(0)
            config = getattr(transformers, f"{name}Config")(**size)
            model = getattr(transformers, f"{name}Model")(config).eval()
            place = folder / name
            model.save_pretrained(place)
            tokenizer(place)
            engine = start(place, runner="pooling", skip_tokenizer_init=False)
            try:
                given = [{"prompt_token_ids": one} for one in prompts()]
                outputs = engine.embed(given, use_tqdm=False)
            finally:
                stop(engine)
            worst = 0.0
            for one, output in zip(prompts(), outputs, strict=True):
                with torch.no_grad():
                    wanted = model(torch.tensor([one])).last_hidden_state[0, 0]
                wanted = wanted / wanted.norm()
                got = torch.tensor(output.outputs.embedding)
                worst = max(worst, float((got - wanted).abs().max()))
            return "" if worst < 1e-4 else f"largest difference {worst:.2e}"

        yield name.lower(), run


def ranks(folder: Path) -> Iterator[Case]:
    """Yield the case of two tensor-parallel ranks."""

    def run() -> str:
        model, place = family("llama", folder)
        wanted = reference(model, prompts())
        # In a process of its own: this one has an engine of one rank only.
        script = (
            "import json, sys; sys.path.insert(0, sys.argv[1]); import vllm_check as c\n"
            "if __name__ == '__main__':\n"
            "    e = c.start(sys.argv[2], tensor_parallel_size=2)\n"
            "    print('TOKENS', json.dumps(c.generate(e, c.prompts())))\n"
        )
        place_of_script = folder / "two_ranks.py"
        place_of_script.write_text(script)
        free = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        result = subprocess.run(
            [sys.executable, str(place_of_script), str(Path(__file__).parent), str(place)],
            check=False,
            env={**os.environ, **free},
            capture_output=True,
            text=True,
            timeout=900,
        )
        lines = [line for line in result.stdout.splitlines() if line.startswith("TOKENS ")]
        if not lines:
            return f"no result: {result.stderr[-1500:]}"
        return compare(json.loads(lines[0].removeprefix("TOKENS ")), wanted)

    yield "two ranks", run


#: In a process of its own: a pipeline of two stages of two ranks on a cluster, and what comes of a rank that is killed.
_CLUSTER = """
import json, os, signal, sys, time
sys.path.insert(0, sys.argv[1])
import psutil
import ray
import vllm_check as c

if __name__ == "__main__":
    ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
    while ray.cluster_resources().get("ipex_rank", 0) < 4:
        time.sleep(1)
    ray.shutdown()
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    engine = c.start(sys.argv[2], distributed_executor_backend="ray", **sizes)
    print("TOKENS", json.dumps(c.generate(engine, c.prompts())), flush=True)
    # Asked for all at once: a process of somebody else may end meanwhile.
    found = psutil.process_iter(["cmdline"])
    ranks = [p for p in found if "IpexRayWorker" in " ".join(p.info["cmdline"] or [])]
    os.kill(ranks[-1].pid, signal.SIGKILL)
    begin = time.monotonic()
    try:
        c.generate(engine, c.prompts())
        print("FAILED a killed rank was not seen")
    except Exception as error:
        print("ENDED", len(ranks), time.monotonic() - begin, type(error).__name__, flush=True)
"""
#: Seconds until a killed rank is told.
_SOON = 60


def cluster(folder: Path) -> Iterator[Case]:
    """Yield the case of two nodes of Ray on this machine."""

    def run() -> str:
        model, place = family("llama", folder)
        wanted = reference(model, prompts())
        script = folder / "cluster.py"
        script.write_text(_CLUSTER)
        port = 20000 + os.getpid() % 10000
        common = ["start", "--block", "--num-cpus=2", "--num-gpus=0", "--disable-usage-stats"]
        common += ["--object-store-memory=80000000", '--resources={"ipex_rank": 2}']
        nodes = []
        try:
            for number, special in enumerate(
                (
                    ["--head", f"--port={port}", "--include-dashboard=false"],
                    [f"--address=127.0.0.1:{port}"],
                )
            ):
                command = [str(Path(sys.executable).parent / "ray"), *common, *special]
                command.append(f"--node-ip-address=127.0.0.{number + 1}")
                log = (folder / f"node{number}.log").open("w")
                nodes.append(subprocess.Popen(command, stdout=log, stderr=log))
                if not number:
                    wait_for_port(port)
            environment = {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "RAY_ADDRESS": f"127.0.0.1:{port}",
            }
            result = subprocess.run(
                [sys.executable, str(script), str(Path(__file__).parent), str(place)],
                check=False,
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=1800,
            )
        finally:
            for node in reversed(nodes):
                node.terminate()
            for node in nodes:
                node.wait(60)
        lines = dict(line.split(" ", 1) for line in result.stdout.splitlines() if " " in line)
        if "TOKENS" not in lines:
            return f"no result: {result.stdout[-500:]} {result.stderr[-1500:]}"
        if problem := compare(json.loads(lines["TOKENS"]), wanted):
            return problem
        if "ENDED" not in lines:
            return lines.get("FAILED", f"no error after a rank was killed: {result.stderr[-1500:]}")
        count, seconds, kind = lines["ENDED"].split()
        print(f"     {count} ranks; {kind} {float(seconds):.1f} s after one was killed")
        return "" if float(seconds) < _SOON else f"the error came after {seconds} s"

    yield "two nodes of Ray", run


def wait_for_port(port: int) -> None:
    """Wait until something listens on a port of this machine."""
    for _ in range(300):
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(1)
    raise TimeoutError(f"nothing listens on port {port}")


def ask(url: str, body: dict[str, Any] | None = None) -> str:
    """Return the text of an answer of the server."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310
        return str(answer.read().decode())


def serve(folder: Path) -> Iterator[Case]:
    """Yield the cases of the server, alone and with two replicas, with a Llama and a tokenizer of bytes."""

    def run(replicas: int) -> str:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        place = folder / "served"
        torch.manual_seed(0)
        size: dict[str, Any] = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
        }
        heads: dict[str, Any] = {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 258,
        }
        ids: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 512}
        LlamaForCausalLM(LlamaConfig(**size, **heads, **ids)).save_pretrained(place)
        tokenizer(place)
        port = 8000 + os.getpid() % 1000
        command = [
            str(Path(sys.executable).parent / "vllm"),
            "serve",
            str(place),
            "--port",
            str(port),
        ]
        command += ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
        command += ["--host", "127.0.0.1", "--served-model-name", "tiny", "--max-num-seqs", "4"]
        command += ["--data-parallel-size", str(replicas)] if replicas > 1 else []
        log = folder / "serve.log"
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with log.open("w") as out:
            server = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            return talk(server, f"http://127.0.0.1:{port}", log)
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()

    yield "server", functools.partial(run, 1)
    yield "two replicas behind one port", functools.partial(run, 2)


def talk(server: subprocess.Popen[bytes], url: str, log: Path) -> str:
    """Wait for a server and ask it in four ways; return what was wrong."""
    begin = time.monotonic()
    while True:
        if server.poll() is not None or time.monotonic() > begin + 600:
            return f"the server did not start: {log.read_text()[-1500:]}"
        try:
            ask(f"{url}/health")
            break
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    print(f"     the server took {time.monotonic() - begin:.0f} s to start")
    base = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    text = json.loads(ask(f"{url}/v1/completions", {**base, "prompt": "hello"}))
    if text["usage"]["completion_tokens"] != 8:
        return f"completion: {text}"
    chat = {**base, "messages": [{"role": "user", "content": "hello"}]}
    answer = json.loads(ask(f"{url}/v1/chat/completions", chat))
    whole = answer["choices"][0]["message"]["content"]
    lines = ask(f"{url}/v1/chat/completions", {**chat, "stream": True}).splitlines()
    events = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
    pieces = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
    if "".join(pieces) != whole:
        return f"streamed {pieces}, whole {whole!r}"
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    strict = {**chat, "max_tokens": 64, "response_format": shape}
    content = json.loads(ask(f"{url}/v1/chat/completions", strict))["choices"][0]["message"]
    try:
        json.loads(content["content"])
    except ValueError:
        # White space between tokens of the schema is free, and a random model may not leave it.
        if content["content"].strip()[:1] not in ("", "{"):
            return f"not of the schema: {content}"
    return ""


#: Name -> family, options of the engine, and what the error says.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "cache dtype": (
        "llama",
        {"kv_cache_dtype": "int8_per_token_head"},
        "--kv-cache-dtype must be",
    ),
}


def refused(folder: Path) -> Iterator[Case]:
    """Yield a case for each request that is refused when the model is loaded."""
    for name, (kind, chosen, text) in REFUSED.items():

        def run(kind: str = kind, chosen: Any = chosen, text: str = text) -> str:
            _, place = family(kind, folder)
            try:
                engine = start(place, **chosen)
            except (NotImplementedError, ValueError) as error:
                return "" if text in str(error) else f"another error: {error}"
            stop(engine)
            return "it was not refused"

        yield name, run


PARTS: dict[str, Callable[[Path], Iterator[Case]]] = {
    "families": families,
    "options": options,
    "quantized": quantized,
    "recurrent": recurrent,
    "vision": vision,
    "encoders": encoders,
    "ranks": ranks,
    "cluster": cluster,
    "serve": serve,
    "refused": refused,
}


def main() -> int:
    """Run the chosen parts and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--only", nargs="*", metavar="NAME", help="cases of these names only")
    parser.add_argument("--compiled", action="store_true", help="let vLLM compile all models")
    arguments = parser.parse_args()
    if arguments.compiled:
        os.environ["VLLM_CHECK_COMPILED"] = "1"
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"PART must be one of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder = Path(tempfile.mkdtemp())
    failed = count = 0
    try:
        for part in arguments.parts or PARTS:
            for name, run in PARTS[part](folder):
                if arguments.only and name not in arguments.only:
                    continue
                begin = time.monotonic()
                try:
                    problem = run()
                except Exception as error:
                    traceback.print_exc()
                    problem = " ".join(f"{type(error).__name__}: {error}".split())[:400]
                count += 1
                failed += bool(problem)
                took = time.monotonic() - begin
                print(f"{part}: {name}: {problem or 'ok'} ({took:.0f} s)", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{count - failed} of {count} cases passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
