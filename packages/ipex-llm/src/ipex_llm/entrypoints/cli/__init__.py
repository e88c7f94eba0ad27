# SPDX-License-Identifier: Apache-2.0
"""``ipex llm``: generation, benchmark, quantization and a server for model folders."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ipex_core.util.console import make_console
from ipex_llm.entrypoints.cli.bench import bench
from ipex_llm.entrypoints.cli.common import (
    DTYPES,
    Dtype,
    GroupSize,
    Model,
    Threads,
    TrustRemoteCode,
    errors,
    load_encoder,
    load_model,
    load_tokenizer,
    quiet_transformers,
    read_key,
    set_threads,
)
from ipex_llm.entrypoints.cli.parallel import (
    DataParallel,
    EngineCores,
    TensorParallel,
    TracesEndpoint,
    Uds,
    end_with_parent,
    log_lines,
    serve_parallel,
)
from ipex_llm.entrypoints.cli.ranks import divided

if TYPE_CHECKING:
    from ipex_llm.engine import SpeculativeConfig
    from ipex_llm.model_loader import quantize as work

__all__ = ["app", "generate", "make_model", "quantize", "serve"]


def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="Text, or - for standard input.", show_default=False)],
    dtype: Dtype = "bf16",
    group_size: GroupSize = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Only the most likely tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Only the most likely tokens with this probability together.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the random numbers.")] = None,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No line with the times.")] = False,
) -> None:
    """Generate text with a model folder."""
    if prompt == "-":
        prompt = sys.stdin.read()
    set_threads(threads)
    with errors():
        from ipex_llm.engine import SamplingParams

        if not prompt:
            raise ValueError("generate: prompt must have at least one character, got none")
        SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        )
        begin = time.perf_counter()
        tokenizer = load_tokenizer(model, trust_remote_code)
        inputs = _encode(tokenizer, prompt, chat)
        room = _room(model, inputs["input_ids"].shape[1])
        loaded = load_model(model, dtype, group_size, trust_remote_code=trust_remote_code)
        ready = time.perf_counter()

    import torch

    # As in the engine, the context of the model ends the output.
    options: dict[str, Any] = {
        "max_new_tokens": min(max_new_tokens, room),
        "do_sample": temperature > 0,
        # Whatever the folder says: only the tokens are wanted.
        "return_dict_in_generate": False,
    }
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    if seed is not None:
        torch.manual_seed(seed)
    clock = _Clock(tokenizer if stream else None)
    from ipex_quant.weight_only.build import building

    with errors(), building(model), torch.inference_mode():
        output = loaded.generate(**inputs, **options, streamer=clock)
    count = output.shape[1] - inputs["input_ids"].shape[1]
    if not stream:
        print(tokenizer.decode(output[0, -count:] if count else [], skip_special_tokens=True))
    if not quiet:
        _report(inputs["input_ids"].shape[1], count, ready - begin, clock)


def _encode(tokenizer: Any, prompt: str, chat: bool) -> dict[str, Any]:
    if not chat:
        return _tokens(tokenizer, prompt, True)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("generate: the tokenizer must have a chat template for --chat, got none")
    from ipex_quant.util.safetensors import DAMAGE

    messages = [{"role": "user", "content": prompt}]
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, *DAMAGE) as error:
        got = f"{type(error).__name__}: {error}"
        raise ValueError(f"generate: the chat template must take a message, got {got}") from error
    return _tokens(tokenizer, text, False)


def _tokens(tokenizer: Any, text: str, special: bool) -> dict[str, Any]:
    """Return the arguments of a model for one text.

    Raises:
        ValueError: The files of the tokenizer have values with which it does not run.
    """
    import torch

    try:
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=special)["input_ids"]
    except Exception as error:  # of its own libraries
        got = f"{type(error).__name__}: {error}"
        raise ValueError(f"generate: the tokenizer must take the prompt, got {got}") from error
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _room(folder: Any, length: int) -> int:
    """Return how many tokens the context has left behind a prompt."""
    from ipex_quant.util.safetensors import read_config

    config = read_config(folder)
    context = config.get("max_position_embeddings") or config.get("n_positions")
    if length == 0:
        raise ValueError("generate: prompt must have at least one token, got none")
    if not isinstance(context, int):
        return sys.maxsize
    if length >= context:
        raise ValueError(
            f"generate: prompt must have fewer than {context} tokens, the context of the model, got {length}"
        )
    return context - length


class _Clock:
    """Notes when tokens come, and prints their text if it has a tokenizer; what `generate` takes as a streamer."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.start = time.perf_counter()
        self.first = self.last = 0.0
        self._prompt = True
        self._inner: Any = None
        if tokenizer is not None:
            from transformers import TextStreamer

            self._inner = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def put(self, value: Any) -> None:
        if self._inner is not None:
            self._inner.put(value)
        if not self._prompt:
            self.last = time.perf_counter()
            self.first = self.first or self.last
        self._prompt = False

    def end(self) -> None:
        if self._inner is not None:
            self._inner.end()


def _report(prompt: int, count: int, loading: float, clock: _Clock) -> None:
    text = f"loaded in {loading:.1f} s; prompt {prompt} tokens"
    if clock.first:
        text += f" in {1e3 * (clock.first - clock.start):.1f} ms"
    text += f"; {count} new"
    if count > 1 and clock.last > clock.first:
        each = (clock.last - clock.first) / (count - 1)
        text += f", {1e3 * each:.2f} ms each ({1 / each:.1f} tokens/s)"
    make_console(stderr=True).print(text, style="dim", highlight=False)


# -- ipex llm serve ---------------------------------------------------------------------------------------------------


#: Seconds that a thread runs Python before another one gets its turn.
_TURN = 0.0005
_LOCAL = ("127.0.0.1", "::1", "localhost")


def serve(
    ctx: typer.Context,
    model: Model,
    dtype: Dtype = "bf16",
    group_size: GroupSize = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option(help="Of the model, for clients (default: the name of the folder)."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="File with the key that clients have to send."
        ),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most requests in a batch.")] = 16,
    max_queue: Annotated[
        int, typer.Option(min=0, help="Most requests that wait; more get the status 429.")
    ] = 64,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=2, help="Most tokens of prompt and output (default: the model's context)."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most new tokens that a request can ask for.")
    ] = None,
    cache_gib: Annotated[
        float | None,
        typer.Option(
            min=0, help="Memory for the cache of keys and values (default: see --memory-share)."
        ),
    ] = None,
    max_state_snapshots: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Most prefixes whose states are kept, for a model with recurrent layers; 0: no prefix is shared"
            " (default: --max-num-seqs, or fewer in little memory).",
        ),
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Guess tokens and check several at once, which changes no output:"
            ' {"method": "ngram"} or {"model": "FOLDER"}, with num_speculative_tokens, prompt_lookup_min,'
            " prompt_lookup_max, disable_by_batch_size, min_acceptance.",
        ),
    ] = None,
    prompt_lookup: Annotated[
        bool,
        typer.Option(
            "--prompt-lookup", help="Guess what followed the last tokens earlier in the text."
        ),
    ] = False,
    speculative_model: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of a smaller model with the same vocabulary, which guesses tokens.",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens that are guessed at a time (default: 4).")
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="LoRA adapter in peft's form, for requests with this model name. Can be repeated.",
        ),
    ] = None,
    max_loras: Annotated[
        int, typer.Option(min=1, help="Most adapters that are loaded at the same time.")
    ] = 8,
    max_lora_rank: Annotated[int, typer.Option(min=1, help="Largest rank of an adapter.")] = 64,
    lora_any_base: Annotated[
        bool,
        typer.Option(
            "--lora-any-base", help="Take adapters that name another base model, if they fit."
        ),
    ] = False,
    allow_runtime_lora: Annotated[
        bool,
        typer.Option(
            "--allow-runtime-lora",
            help="Clients may load and drop adapters by paths of this machine (/v1/load_lora_adapter)."
            " Needs --api-key-file.",
        ),
    ] = False,
    memory_share: Annotated[
        float,
        typer.Option(
            min=0.0001, max=1, help="Part of the free memory for the cache, without --cache-gib."
        ),
    ] = 0.5,
    max_body_kib: Annotated[int, typer.Option(min=1, help="Largest request.")] = 1024,
    max_prompt_chars: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most characters of a prompt or a conversation (default: 16 for each token of the context).",
        ),
    ] = None,
    request_timeout: Annotated[
        float,
        typer.Option(min=1, help="Seconds in which the headers and then the body have to come."),
    ] = 30.0,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name that clients may use for this server, besides --host. Can be repeated. Checked"
            " on this machine's own addresses if there is no key."
        ),
    ] = None,
    grace: Annotated[
        int, typer.Option(min=0, help="Seconds that running requests get when the server stops.")
    ] = 30,
    log_requests: Annotated[
        bool,
        typer.Option("--log-requests", help="Write a line of JSON to standard error per request."),
    ] = False,
    data_parallel: DataParallel = None,
    engine_cores: EngineCores = None,
    tensor_parallel: TensorParallel = 1,
    otlp_traces_endpoint: TracesEndpoint = None,
    uds: Uds = None,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve a model folder over HTTP, as the OpenAI API has it.

    Decoders answer /v1/completions and /v1/chat/completions, and like encoders /v1/embeddings, /rerank and /v1/score.
    Besides, there are /tokenize, /detokenize, /v1/models, /metrics and /health.
    """
    if data_parallel is not None:
        serve_parallel(ctx)
        return
    if uds is not None:
        end_with_parent()
    set_threads(threads)
    console = make_console(stderr=True)
    with errors(), contextlib.ExitStack() as stack:
        from ipex_llm.engine import Engine
        from ipex_llm.engine.encoder import EncoderEngine
        from ipex_llm.entrypoints.openai.guard import protocol
        from ipex_llm.entrypoints.openai.server import Settings, create_app
        from ipex_llm.entrypoints.openai.worker import Worker
        from ipex_llm.model_loader.pooling import encoder_class, read_pooling

        key = None if api_key_file is None else read_key(api_key_file)
        hosts = None
        if uds is None and key is None and (host in _LOCAL or allowed_host):
            hosts = (*_LOCAL, host, *(allowed_host or ()))
        if host not in _LOCAL and key is None and uds is None:
            console.print(
                f"anybody who reaches {host} can use this server: see --api-key-file",
                style="yellow",
            )
        if allow_runtime_lora and key is None:
            raise ValueError("serve: --allow-runtime-lora must be with --api-key-file, got no key")
        bases = () if lora_any_base else base_names(model, name)
        adapters = read_lora_options(lora or (), name or model.resolve().name)
        speculative = read_speculation(
            speculative_config, prompt_lookup, speculative_model, num_speculative_tokens
        )
        tokenizer = load_tokenizer(model, trust_remote_code)
        encoder = encoder_class(model)
        pooling = read_pooling(model, encoder is not None)
        engine: Engine | EncoderEngine
        if encoder is not None and tensor_parallel > 1:
            raise ValueError(
                f"serve: tensor_parallel must be 1 for an encoder, got {tensor_parallel}"
            )
        if encoder is not None:
            if speculative is not None:
                raise ValueError("serve: speculation must have a decoder, got an encoder")
            if adapters or allow_runtime_lora:
                raise ValueError("serve: --lora must have a decoder, got an encoder")
            engine = EncoderEngine(
                load_encoder(model, encoder, dtype, trust_remote_code),
                tokenizer,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
            )
            about = f"an encoder, texts of at most {engine.max_model_len:,} tokens"
        else:
            if speculative is not None and speculative.model is not None:
                draft = load_model(
                    Path(speculative.model), dtype, group_size, trust_remote_code=trust_remote_code
                )
                speculative = dataclasses.replace(speculative, model=draft)
            load: dict[str, Any] = {"folder": model, "dtype": dtype, "group_size": group_size}
            load["trust_remote_code"] = trust_remote_code
            engine = Engine(
                load_model(**load)
                if tensor_parallel == 1
                else stack.enter_context(divided(tensor_parallel, threads, **load)),
                tokenizer,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                cache_bytes=None if cache_gib is None else int(cache_gib * (1 << 30)),
                speculative_config=speculative,
                max_loras=max_loras,
                max_lora_rank=max_lora_rank,
                memory_share=memory_share,
                max_state_snapshots=max_state_snapshots,
            )
            for lora_name, folder in adapters.items():
                try:
                    engine.load_lora(lora_name, folder, base_names=bases)
                except ValueError as error:
                    what = f"--lora {lora_name} must have an adapter that fits"
                    raise ValueError(f"serve: {what}, got {folder}: {error}") from error
            about = f"cache of {engine.stats().blocks * engine.block_size:,} tokens"
        import uvicorn

        traces = None
        if otlp_traces_endpoint is not None:
            from ipex_llm.entrypoints.openai.tracing import Tracer

            traces = Tracer(otlp_traces_endpoint)
        settings = Settings(
            name=name or model.resolve().name,
            api_key=key,
            max_new_tokens=max_new_tokens,
            max_body=max_body_kib << 10,
            max_prompt_characters=max_prompt_chars,
            request_timeout=request_timeout,
            hosts=hosts,
            pooling=pooling,
            log_requests=log_requests,
            base_names=bases,
            runtime_lora=allow_runtime_lora,
            traces=traces,
        )
        if log_requests:
            log_lines()
        app = create_app(Worker(engine, max_queue), settings)
        console.print(f"{settings.name}: {about}", highlight=False)
        # A thread that reads a large request gives way soon: the engine's asks for its turn many times in a step.
        sys.setswitchinterval(_TURN)
        uvicorn.run(
            app,
            host=host,
            port=port,
            uds=None if uds is None else str(uds),
            log_level="info" if uds is None else "warning",
            access_log=False,
            http=protocol(request_timeout),
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=grace,
        )


def read_speculation(
    text: str | None, lookup: bool, model: Path | None, tokens: int | None
) -> SpeculativeConfig | None:
    """Return what the options of `serve` say of speculation, None if they say nothing.

    Args:
        text: ``--speculative-config``; the others cannot be beside it.
        lookup: ``--prompt-lookup``.
        model: ``--speculative-model``.
        tokens: ``--num-speculative-tokens``.

    Raises:
        ValueError: They do not fit each other, or a value is wrong.
    """
    from ipex_llm.engine import SpeculativeConfig

    if text is not None:
        for option, given in (
            ("--prompt-lookup", lookup),
            ("--speculative-model", model is not None),
            ("--num-speculative-tokens", tokens is not None),
        ):
            if given:
                raise ValueError(
                    f"serve: {option} must be left out, got it with --speculative-config"
                )
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"serve: --speculative-config must be JSON, got {error}") from None
        if not isinstance(found, dict):
            got = type(found).__name__
            raise ValueError(f"serve: --speculative-config must be an object, got {got}")
        if not isinstance(found.get("model"), (str, type(None))):
            got = type(found["model"]).__name__
            raise ValueError(f"SpeculativeConfig: model must be the folder of a model, got {got}")
        return SpeculativeConfig.of(found)
    if lookup and model is not None:
        raise ValueError("serve: --prompt-lookup must be without --speculative-model, got both")
    if not lookup and model is None:
        if tokens is not None:
            raise ValueError(
                "serve: --num-speculative-tokens must be beside --prompt-lookup or"
                " --speculative-model, got neither"
            )
        return None
    options: dict[str, Any] = {} if tokens is None else {"num_speculative_tokens": tokens}
    return SpeculativeConfig(model=None if model is None else str(model), **options)


def read_lora_options(values: Sequence[str], served: str) -> dict[str, str]:
    """Return the folders of ``--lora NAME=FOLDER`` by name.

    Args:
        values: What was given.
        served: The name of the model, which no adapter can have.

    Raises:
        ValueError: A value has another form, or a name is there twice.
    """
    found: dict[str, str] = {}
    for value in values:
        name, equal, folder = value.partition("=")
        if not (name and equal and folder):
            raise ValueError(f"serve: --lora must be NAME=FOLDER, got {value!r}")
        if name == served or name in found:
            raise ValueError(f"serve: --lora must have a name of its own, got {name!r} twice")
        found[name] = folder
    return found


def base_names(folder: Path, name: str | None) -> tuple[str, ...]:
    """Return the names that an adapter may have for the model of a folder."""
    from ipex_quant.util.safetensors import CheckpointError, read_config

    found = [str(folder.absolute()), str(folder.resolve())]
    with contextlib.suppress(CheckpointError):
        own = read_config(folder).get("_name_or_path")
        found += [own] if isinstance(own, str) and own else []
    return tuple(dict.fromkeys([*found, *([] if name is None else [name])]))


# -- Commands that write a model folder -------------------------------------------------------------------------------


def quantize(
    model: Model,
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.", show_default=False)],
    scheme: Annotated[str, typer.Option(help="int4, int8, nf4, fp8 or mxfp4.")] = "int4",
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Input features that share a scale, -1 for all (default: what is usual for the scheme)."
        ),
    ] = None,
    head: Annotated[bool, typer.Option("--head", help="Quantize the head (lm_head) too.")] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option(help="Regular expression: modules that stay as they are. Can be repeated."),
    ] = None,
    shard_size: Annotated[float, typer.Option(min=0.001, help="Largest file in GiB.")] = 2.0,
    threads: Threads = None,
) -> None:
    """Quantize the linear layers of a model folder.

    Weights are read, quantized and written a few rows at a time: no model is built, and little memory is needed. The
    folder appears when it is complete. If the command is interrupted, the same command goes on where it stopped.
    """
    set_threads(threads)
    console = make_console()
    start = time.monotonic()
    with errors():
        from ipex_llm.kv_cache import format_bytes, peak_memory, resident_memory
        from ipex_llm.model_loader import quantize as work
        from ipex_llm.model_loader.schemes import make_scheme

        columns = (
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("memory {task.fields[memory]}"),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None, memory="")
            resumed = 0

            def show(progress: work.Progress) -> None:
                nonlocal resumed
                resumed += progress.resumed
                bar.update(
                    task,
                    total=progress.total,
                    completed=progress.done,
                    description=progress.name,
                    memory=format_bytes(resident_memory()),
                )

            summary = work.quantize_folder(
                model,
                out,
                make_scheme(scheme, group_size),
                skip=skip or (),
                head=head,
                shard_bytes=int(shard_size * (1 << 30)),
                on_progress=show,
            )
    if resumed:
        console.print("went on where an earlier run had stopped")
    console.print(
        f"wrote {out}: {summary.quantized} weights quantized, {summary.kept} tensors kept,"
        f" {format_bytes(summary.source_bytes)} -> {format_bytes(summary.result_bytes)},"
        f" {time.monotonic() - start:.1f} s, peak memory {format_bytes(peak_memory())}",
        highlight=False,
    )


def make_model(
    folder: Annotated[Path, typer.Argument(help="Folder to make.", show_default=False)],
    shape: Annotated[str, typer.Option(help="tiny, small or 1b.")] = "tiny",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
) -> None:
    """Make a Llama-shaped model with random weights and a small tokenizer, to try the other commands on.

    It writes nothing that makes sense, but takes as long as a trained model of its shape.
    """
    if DTYPES.get(dtype, ("", ""))[1] is not None:
        raise typer.BadParameter(f"must be bf16, fp16 or fp32, got {dtype!r}", param_hint="--dtype")
    with errors():
        import torch

        from ipex_llm.model_loader.make import make_folder

        quiet_transformers()
        count = make_folder(folder, shape, getattr(torch, DTYPES[dtype][0]), seed)
    make_console().print(f"wrote {folder}: {count / 1e6:,.1f} million parameters", highlight=False)


# -- The application --------------------------------------------------------------------------------------------------


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="LLM inference on model folders (Hugging Face layout, safetensors).",
)
app.command()(generate)
app.command()(bench)
app.command()(quantize)
app.command()(serve)
app.command("make-model")(make_model)
