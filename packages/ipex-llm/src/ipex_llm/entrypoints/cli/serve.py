# SPDX-License-Identifier: Apache-2.0
"""``ipex llm serve``: an OpenAI-compatible server for a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ipex_core.util.console import make_console
from ipex_llm.entrypoints.cli.common import (
    Dtype,
    GroupSize,
    Model,
    Threads,
    TrustRemoteCode,
    errors,
    load_model,
    load_tokenizer,
    set_threads,
)

__all__ = ["serve"]

_LOCAL = ("127.0.0.1", "::1", "localhost")


def serve(
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
            min=0, help="Memory for the cache of keys and values (default: half of what is free)."
        ),
    ] = None,
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
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve a model folder over HTTP: /v1/completions, /v1/chat/completions, /v1/models, /metrics, /health."""
    set_threads(threads)
    console = make_console(stderr=True)
    with errors():
        from ipex_llm.engine import Engine
        from ipex_llm.entrypoints.openai.http import protocol
        from ipex_llm.entrypoints.openai.server import Settings, create_app
        from ipex_llm.entrypoints.openai.worker import Worker

        key = None
        if api_key_file is not None:
            key = api_key_file.read_text(encoding="utf-8").strip()
            if not key:
                raise ValueError(f"serve: {api_key_file} must have a key, got an empty file")
        hosts = None
        if key is None and (host in _LOCAL or allowed_host):
            hosts = (*_LOCAL, host, *(allowed_host or ()))
        if host not in _LOCAL and key is None:
            console.print(
                f"anybody who reaches {host} can use this server: see --api-key-file",
                style="yellow",
            )
        tokenizer = load_tokenizer(model, trust_remote_code)
        engine = Engine(
            load_model(model, dtype, group_size, trust_remote_code=trust_remote_code),
            tokenizer,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            cache_bytes=None if cache_gib is None else int(cache_gib * (1 << 30)),
        )
        import uvicorn

        settings = Settings(
            name=name or model.resolve().name,
            api_key=key,
            max_new_tokens=max_new_tokens,
            max_body=max_body_kib << 10,
            max_prompt_characters=max_prompt_chars,
            request_timeout=request_timeout,
            hosts=hosts,
        )
        app = create_app(Worker(engine, max_queue), settings)
        console.print(
            f"{settings.name}: cache of {engine.stats().blocks * engine.block_size:,} tokens",
            highlight=False,
        )
        uvicorn.run(
            app,
            host=host,
            port=port,
            log_level="info",
            access_log=False,
            http=protocol(request_timeout),
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=grace,
        )
