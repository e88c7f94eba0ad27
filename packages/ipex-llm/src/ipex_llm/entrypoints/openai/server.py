# SPDX-License-Identifier: Apache-2.0
"""The HTTP server behind ``ipex llm serve``: requests in the form of OpenAI's completions, answered by one engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from ipex_core.errors import MissingComponentError
from ipex_llm.engine import StepOutput
from ipex_llm.entrypoints.openai.guard import Guard
from ipex_llm.entrypoints.openai.protocol import (
    MAX_CHOICES,
    ApiError,
    ChatRequest,
    CompletionRequest,
    read_body,
    sampling_params,
)
from ipex_llm.entrypoints.openai.texts import Prompts, Reply, usage
from ipex_llm.entrypoints.openai.worker import (
    Accepted,
    Failed,
    QueueFull,
    RequestError,
    StoppedError,
    Ticket,
    Worker,
)

try:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.exceptions import HTTPException
except ImportError as _error:
    raise MissingComponentError("the server needs FastAPI: pip install 'ipex[serve]'") from _error

__all__ = ["ApiError", "Settings", "create_app"]

#: Requests that are read beside those that the queue takes, to tell them that it is full.
_REFUSED = 16


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the server behaves.

    Attributes:
        name: Of the model, as clients name it.
        api_key: What clients have to send as bearer token; None for no check.
        max_new_tokens: Most new tokens of a request; None for what the context allows.
        max_body: Most bytes of a request.
        max_prompt_characters: Most characters of a prompt or of all messages, which is checked before they are
            tokenized; None for 16 times the context.
        request_timeout: Seconds in which a request must come.
        hosts: Names that the header Host may have; None for any.
    """

    name: str
    api_key: str | None = None
    max_new_tokens: int | None = None
    max_body: int = 1 << 20
    max_prompt_characters: int | None = None
    request_timeout: float = 30.0
    hosts: tuple[str, ...] | None = None


def _response(error: ApiError) -> Response:
    return Response(error.json(), error.status, error.headers)


def _failure(event: Failed) -> ApiError:
    if isinstance(event.error, StoppedError):
        return ApiError(503, str(event.error), "server_error")
    if event.of_the_request:
        return ApiError(400, str(event.error))
    if isinstance(event.error, RequestError):
        return ApiError(500, str(event.error), "server_error")
    return ApiError(500, "the engine failed; see the log of the server", "server_error")


def create_app(worker: Worker, settings: Settings) -> FastAPI:
    """Return the application. The worker starts and stops with it.

    Args:
        worker: The engine's thread, not started.
        settings: See `Settings`.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.stop)

    # Nothing but the API: no page that describes it, no redirects to a host that the client names.
    app = FastAPI(title="ipex llm", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.add_middleware(
        Guard,
        max_body=settings.max_body,
        metrics=worker.metrics,
        api_key=settings.api_key,
        hosts=settings.hosts,
        timeout=settings.request_timeout,
        max_requests=worker.limit + _REFUSED,
    )
    api = _Api(worker, settings)
    turn = asyncio.Semaphore(1)

    @app.exception_handler(ApiError)
    async def on_error(request: Request, error: ApiError) -> Response:
        return _response(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path = str(request.scope["path"])[:200]
        text = f"{request.method} {path!r}: {error.detail}"
        return _response(ApiError(error.status_code, text, headers=error.headers))

    @app.get("/health")
    async def health() -> Response:
        ok = worker.alive
        return JSONResponse({"status": "ok" if ok else "stopping"}, 200 if ok else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(api.metrics(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [api.model()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        api.check_model(name)
        return api.model()

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(CompletionRequest, request, turn)
        return await api.answer(request, body, body.prompts(), False)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await read_body(ChatRequest, request, turn)
        return await api.answer(request, body, [[m.plain() for m in body.messages]], True)

    return app


class _Api:
    """The work behind the paths."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self.worker = worker
        self.settings = settings
        self.engine = worker.engine
        self.tokenizer = worker.engine.tokenizer
        self.prompts = Prompts(worker.engine, settings.max_prompt_characters)

    def model(self) -> dict[str, Any]:
        return {
            "id": self.settings.name,
            "object": "model",
            "created": 0,
            "owned_by": "local",
            "max_model_len": self.engine.max_model_len,
        }

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.name:
            text = f"the model {name[:100]!r} does not exist, only {self.settings.name!r}"
            raise ApiError(404, text, param="model")

    def metrics(self) -> str:
        now = self.engine.stats()
        worker = self.worker
        gauges = {
            "requests_running": ("Requests in the batch.", now.running),
            "requests_waiting": ("Requests that wait.", worker.unfinished - now.running),
            "cache_blocks": ("Blocks of the cache.", now.blocks),
            "cache_blocks_used": ("Blocks of running requests.", now.blocks_held),
        }
        counters = {
            "steps_total": ("Batches computed.", now.steps),
            "requests_finished_total": ("Requests that came to their end.", now.finished),
            "requests_cancelled_total": ("Requests that were cancelled.", now.cancelled),
            "requests_failed_total": ("Requests whose logits were not finite.", now.failed),
            "requests_rejected_total": ("Requests refused: the queue was full.", worker.rejected),
            "engine_errors_total": ("Batches that failed.", worker.errors),
            "preemptions_total": ("Requests that had to be computed again.", now.preemptions),
            "prompt_tokens_total": ("Tokens of prompts.", now.prompt_tokens),
            "cached_tokens_total": ("Tokens of prompts found in the cache.", now.cached_tokens),
            "generated_tokens_total": ("New tokens.", now.generated_tokens),
        }
        return worker.metrics.text(
            {name: (text, float(value)) for name, (text, value) in gauges.items()},
            {name: (text, float(value)) for name, (text, value) in counters.items()},
        )

    async def answer(
        self,
        request: Request,
        body: CompletionRequest | ChatRequest,
        prompts: Sequence[Any],
        chat: bool,
    ) -> Response:
        self.check_model(body.model)
        refused = body.refused()
        if refused is not None:
            raise ApiError(
                400, f"{refused} is not supported: remove it from the request", param=refused
            )
        if not prompts:
            raise ApiError(400, "prompt must have at least one prompt, got none")
        if len(prompts) * body.n > MAX_CHOICES:
            raise ApiError(400, f"prompts and n must give at most {MAX_CHOICES} choices")
        most = self.settings.max_new_tokens or self.engine.max_model_len
        # The API's default for completions is 16; a chat ends where the model ends it.
        default = most if chat else min(16, most)
        try:
            params = [sampling_params(body, choice, most, default) for choice in range(body.n)]
            for prompt in prompts:
                self.prompts.check(prompt, chat)
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        requests = [(self.prompts.tokens(prompt, chat), params) for prompt in prompts]
        try:
            tickets = self.worker.submit(requests)
        except QueueFull as error:
            raise ApiError(429, str(error), "rate_limit_error") from None
        except StoppedError as error:
            raise ApiError(503, str(error), "server_error") from None
        job = Job(self.worker, tickets, body.n)
        reply = Reply(chat, self.settings.name, self.tokenizer)
        try:
            with job.watching(request):
                await job.accept()
                if not body.stream:
                    return JSONResponse(await job.collect(reply))
        except BaseException:
            job.cancel()
            raise
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        events = job.stream(reply, with_usage)
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )


class Job:
    """The choices of one HTTP request."""

    def __init__(self, worker: Worker, tickets: Sequence[Ticket], n: int) -> None:
        self.worker = worker
        self.tickets = tickets
        self.n = n
        self.prompt_tokens = 0
        self.new_tokens = 0
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        for ticket in self.tickets:
            self.worker.cancel(ticket)

    @contextlib.contextmanager
    def watching(self, request: Request) -> Iterator[None]:
        """Look for the end of the client within a block."""
        self._gone = asyncio.ensure_future(_gone(request))
        try:
            yield
        finally:
            self._gone.cancel()

    async def _event(self, ticket: Ticket) -> Any:
        """Wait for the next event, as long as the client waits too."""
        # No wait_for: in Python 3.11 it loses the cancellation at the end of the server when an event comes.
        event = asyncio.ensure_future(ticket.events.get())
        try:
            either: set[asyncio.Future[Any]] = {event, self._gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._gone.done():
                raise ApiError(499, "the client is gone")
            return event.result()
        finally:
            event.cancel()

    async def accept(self) -> None:
        """Wait until the engine has taken all, so that a mistake is an error and no broken stream."""
        for number, ticket in enumerate(self.tickets):
            event = await self._event(ticket)
            if isinstance(event, Failed):
                raise _failure(event)
            assert isinstance(event, Accepted)
            if number % self.n == 0:
                self.prompt_tokens += event.prompt_tokens

    async def collect(self, reply: Reply) -> dict[str, Any]:
        choices = []
        for index, ticket in enumerate(self.tickets):
            pieces: list[str] = []
            wanted = ticket.params.logprobs is not None
            parts: list[Any] = []
            while True:
                event = await self._event(ticket)
                if isinstance(event, Failed):
                    raise _failure(event)
                pieces.append(event.text)
                if wanted and event.logprobs:
                    # As they come, and one after the other: texts of a million alternatives at once take seconds.
                    parts.append(reply.logprobs(event.logprobs))
                    await asyncio.sleep(0)
                self.new_tokens += len(event.tokens)
                if event.finished:
                    break
            logprobs = reply.joined(parts) if wanted else None
            choices.append(reply.choice(index, "".join(pieces), event.reason, logprobs))
        return reply.whole(choices, usage(self.prompt_tokens, self.new_tokens))

    async def _merged(self) -> AsyncIterator[tuple[int, Any]]:
        """Yield (choice, event) of all choices as they come."""
        merged: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

        async def forward(index: int, ticket: Ticket) -> None:
            while True:
                event = await ticket.events.get()
                await merged.put((index, event))
                if isinstance(event, Failed) or (isinstance(event, StepOutput) and event.finished):
                    return

        tasks = [asyncio.create_task(forward(i, ticket)) for i, ticket in enumerate(self.tickets)]
        try:
            left = len(tasks)
            while left:
                index, event = await merged.get()
                left -= isinstance(event, Failed) or event.finished
                yield index, event
        finally:
            for task in tasks:
                task.cancel()

    async def stream(self, reply: Reply, with_usage: bool) -> AsyncIterator[str]:
        """Yield server-sent events; a client that goes away closes this, which cancels what is left."""
        try:
            if reply.chat:
                for index in range(len(self.tickets)):
                    yield _sse(reply.chunk(index, "", None, first=True))
            async for index, event in self._merged():
                if isinstance(event, Failed):
                    error = _failure(event)
                    yield f"data: {error.json()}\n\n"
                    return
                assert isinstance(event, StepOutput)
                self.new_tokens += len(event.tokens)
                wanted = self.tickets[index].params.logprobs is not None
                if event.text or event.finished or (wanted and event.logprobs):
                    logprobs = event.logprobs if wanted else None
                    yield _sse(reply.chunk(index, event.text, event.reason, logprobs))
            if with_usage:
                yield _sse(reply.last_chunk(usage(self.prompt_tokens, self.new_tokens)))
            yield "data: [DONE]\n\n"
        finally:
            self.cancel()


async def _gone(request: Request) -> None:
    """Come back when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
