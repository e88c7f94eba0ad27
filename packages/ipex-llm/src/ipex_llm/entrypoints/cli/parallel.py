# SPDX-License-Identifier: Apache-2.0
"""``ipex llm serve`` with several engines: the process in front of them, and what an engine process does besides."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ipex_core.util.console import make_console
from ipex_llm.entrypoints.cli.common import errors, read_key

__all__ = [
    "DataParallel",
    "EngineCores",
    "TensorParallel",
    "TracesEndpoint",
    "Uds",
    "arguments_of",
    "end_with_parent",
    "log_lines",
    "serve_parallel",
]


def _count(value: str | None) -> str | None:
    if value is not None and value != "auto" and not (value.isdecimal() and 1 <= int(value) <= 999):
        raise typer.BadParameter(f"must be auto or a number from 1 to 999, got {value!r}")
    return value


DataParallel = Annotated[
    str | None,
    typer.Option(
        callback=_count,
        help="Engines, each a process with the whole model; auto: one for each NUMA node.",
    ),
]
EngineCores = Annotated[
    int | None,
    typer.Option(min=1, help="With --data-parallel auto: one engine for each so many cores."),
]
TensorParallel = Annotated[
    int, typer.Option(min=1, help="Processes among which the weights of an engine are divided.")
]
TracesEndpoint = Annotated[
    str | None,
    typer.Option(help="URL that OpenTelemetry traces are sent to (needs opentelemetry-sdk)."),
]
#: For the engines of --data-parallel: a Unix socket instead of a port. The server ends when standard input does.
Uds = Annotated[Path | None, typer.Option(hidden=True)]

#: What is the business of the process in front of the engines.
_FRONT = frozenset(
    {"host", "port", "api_key_file", "allowed_host", "log_requests", "data_parallel"}
    | {"engine_cores", "grace", "uds", "memory_share"}
)


def arguments_of(ctx: typer.Context) -> list[str]:
    """Return the arguments of a command line that engines get, too."""
    found: list[str] = []
    for param in ctx.command.params:
        value: Any = ctx.params.get(param.name or "")
        if param.name in _FRONT or value is None or value == param.default:
            continue
        if isinstance(value, bool):
            found += (param.opts if value else param.secondary_opts)[:1]
            continue
        for one in value if isinstance(value, (list, tuple)) else [value]:
            found += [param.opts[0], str(one)]
    return found


def serve_parallel(ctx: typer.Context) -> None:
    """Run the process in front of the engines.

    Args:
        ctx: Of ``ipex llm serve``, with ``data_parallel``.
    """
    options = ctx.params
    console = make_console(stderr=True)
    with errors():
        import uvicorn

        from ipex_llm.entrypoints.openai.engines import Engines, places
        from ipex_llm.entrypoints.openai.guard import Guard, protocol
        from ipex_llm.entrypoints.openai.router import Router
        from ipex_llm.entrypoints.openai.worker import Metrics

        wanted, each = options["data_parallel"], options["engine_cores"]
        if each is not None and wanted != "auto":
            raise ValueError(f"serve: engine_cores must go with data_parallel auto, got {wanted}")
        if options["otlp_traces_endpoint"] is not None:
            from ipex_llm.entrypoints.openai.tracing import check_sdk

            check_sdk()
        where = places(None if wanted == "auto" else int(wanted), each)
        host, key_file = options["host"], options["api_key_file"]
        key = None if key_file is None else read_key(key_file)
        local = ("127.0.0.1", "::1", "localhost")
        names = options["allowed_host"] or ()
        hosts = None
        if key is None and (host in local or names):
            hosts = (*local, host, *names)
        if host not in local and key is None:
            console.print(
                f"anybody who reaches {host} can use this server: see --api-key-file",
                style="yellow",
            )
        if options["log_requests"]:
            log_lines()
        share = ["--memory-share", f"{options['memory_share'] / len(where):.4f}", "--grace", "1"]
        metrics = Metrics()
        router = Router(Engines(where, [*arguments_of(ctx), *share]), metrics)
        most = len(where) * (options["max_num_seqs"] + options["max_queue"])
        guarded = Guard(
            router,
            max_body=options["max_body_kib"] << 10,
            metrics=metrics,
            api_key=key,
            hosts=hosts,
            timeout=options["request_timeout"],
            max_requests=most + 16,
            log_requests=options["log_requests"],
        )
        config = uvicorn.Config(
            guarded,
            host=host,
            port=options["port"],
            log_level="info",
            access_log=False,
            http=protocol(options["request_timeout"]),
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=options["grace"],
        )
        for number, place in enumerate(where):
            cpus = f"CPUs {','.join(map(str, place.cpus))}" if place.cpus else "any CPUs"
            console.print(f"engine {number}: {cpus}", highlight=False)
        server = uvicorn.Server(config)
        router.given_up = lambda: server.should_exit
        server.run()
    if router.failed and not server.should_exit:
        raise typer.Exit(2)


def log_lines() -> None:
    """Have lines of requests written to standard error."""
    lines = logging.getLogger("ipex.requests")
    lines.setLevel(logging.INFO)
    lines.addHandler(logging.StreamHandler())
    lines.propagate = False


def end_with_parent(seconds: float = 15.0) -> None:
    """End this process when its standard input ends: the process that wrote to it is gone.

    Args:
        seconds: That it gets for its own end.
    """

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=wait, name="ipex-llm-parent", daemon=True).start()
