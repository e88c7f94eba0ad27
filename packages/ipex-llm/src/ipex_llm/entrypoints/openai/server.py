# SPDX-License-Identifier: Apache-2.0
"""The HTTP server behind ``ipex llm serve``: requests in the form of OpenAI's completions, answered by one engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

from ipex_core.errors import MissingComponentError
from ipex_llm import __version__
from ipex_llm.engine import EngineStats, SamplingParams, StepOutput, TokenLogprobs
from ipex_llm.engine.encoder import EncoderEngine
from ipex_llm.entrypoints.openai import responses
from ipex_llm.entrypoints.openai.chat import Family, Parser, family_of, forced_parser
from ipex_llm.entrypoints.openai.grammar import Grammars, Wanted
from ipex_llm.entrypoints.openai.guard import Guard
from ipex_llm.entrypoints.openai.job import CHAT, Job, failure, submit
from ipex_llm.entrypoints.openai.lora import Models, add_lora_paths
from ipex_llm.entrypoints.openai.pooling import (
    Detokenize,
    EmbeddingRequest,
    Pooled,
    RerankRequest,
    ScoreRequest,
    Tokenize,
)
from ipex_llm.entrypoints.openai.protocol import (
    MAX_CHOICES,
    ApiError,
    ChatRequest,
    CompletionRequest,
    field_of,
    plain_messages,
    read_body,
    sampling_params,
)
from ipex_llm.entrypoints.openai.responses import Answer, ResponsesRequest
from ipex_llm.entrypoints.openai.texts import Prompts, Reply, usage
from ipex_llm.entrypoints.openai.tracing import Trace, Tracer
from ipex_llm.entrypoints.openai.worker import Accepted, Failed, StoppedError, Ticket, Worker
from ipex_llm.model_loader.pooling import PoolingConfig

try:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.exceptions import HTTPException
except ImportError as _error:
    raise MissingComponentError("the server needs FastAPI: pip install 'ipex[serve]'") from _error

__all__ = ["ApiError", "Settings", "create_app"]

#: Places whose log probabilities are put into words at once, on the event loop.
_AT_ONCE = 16
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
        pooling: How vectors and scores are made.
        log_requests: Write a line of JSON for each request to the logger ``ipex.requests``.
        base_names: Names of the model that adapters may have for it; empty: any.
        runtime_lora: Clients may load and drop adapters, with a path of this machine; only with a key.
        traces: Makes a span for each request that generates.
    """

    name: str
    api_key: str | None = None
    max_new_tokens: int | None = None
    max_body: int = 1 << 20
    max_prompt_characters: int | None = None
    request_timeout: float = 30.0
    hosts: tuple[str, ...] | None = None
    pooling: PoolingConfig = dataclasses.field(default_factory=PoolingConfig)
    log_requests: bool = False
    base_names: tuple[str, ...] = ()
    runtime_lora: bool = False

    def __post_init__(self) -> None:
        if self.runtime_lora and self.api_key is None:
            raise ValueError("Settings: runtime_lora must be with an api_key, got none")

    traces: Tracer | None = None


def _response(error: ApiError) -> Response:
    return Response(error.json(), error.status, error.headers)


def create_app(worker: Worker, settings: Settings) -> FastAPI:
    """Return the application. The worker starts and stops with it.

    Args:
        worker: The engine's thread, not started.
        settings: See `Settings`.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        if not isinstance(worker.engine, EncoderEngine):
            prepared = asyncio.ensure_future(worker.apart(api.grammars.prepare))
            prepared.add_done_callback(lambda done: done.cancelled() or done.exception())
        yield
        await asyncio.to_thread(worker.stop)
        if settings.traces is not None:
            await asyncio.to_thread(settings.traces.stop)

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
        log_requests=settings.log_requests,
    )
    api = _Api(worker, settings)
    turn = asyncio.Semaphore(1)

    @app.exception_handler(ApiError)
    async def on_error(request: Request, error: ApiError) -> Response:
        return _response(error)

    @app.exception_handler(StoppedError)
    async def on_stop(request: Request, error: StoppedError) -> Response:
        return _response(ApiError(503, str(error), "server_error"))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path = str(request.scope["path"])[:200]
        text = f"{request.method} {path!r}: {error.detail}"
        return _response(ApiError(error.status_code, text, headers=error.headers))

    @app.get("/health")
    @app.api_route("/ping", methods=["GET", "POST"])
    async def health() -> Response:
        ok = worker.alive
        return JSONResponse({"status": "ok" if ok else "stopping"}, 200 if ok else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(api.metrics(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": api.models.list()}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        api.models.check(name, adapters=True)
        return api.models.entry(name)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(CompletionRequest, request, turn)
        return await api.answer(request, body, body.prompts(), False)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await read_body(ChatRequest, request, turn)
        return await api.answer(request, body, [plain_messages(body.messages)], True)

    @app.post("/v1/responses")
    async def respond(request: Request) -> Response:
        body = await read_body(ResponsesRequest, request, turn)
        chat = body.chat()
        answer = Answer(chat.model or settings.name, body)
        return await api.answer(request, chat, [plain_messages(chat.messages)], True, answer)

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        return await api.pooled.embed(request, await read_body(EmbeddingRequest, request, turn))

    @app.post("/rerank")
    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    async def rerank(request: Request) -> Response:
        return await api.pooled.rerank(request, await read_body(RerankRequest, request, turn))

    @app.post("/score")
    @app.post("/v1/score")
    async def score(request: Request) -> Response:
        return await api.pooled.score(request, await read_body(ScoreRequest, request, turn))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_body(Tokenize, request, turn)
        api.check_model(body.model)
        return JSONResponse(await worker.apart(lambda: body.answer(api.prompts, api.tokenizer)))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_body(Detokenize, request, turn)
        api.check_model(body.model)
        return JSONResponse(await worker.apart(lambda: body.answer(api.prompts, api.tokenizer)))

    if settings.runtime_lora:
        add_lora_paths(app, api.models, turn)
    return app


class _Api:
    """The work behind the paths."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self.worker = worker
        self.settings = settings
        self.engine = worker.engine
        self.tokenizer = worker.engine.tokenizer
        self.prompts = Prompts(worker.engine, settings.max_prompt_characters)
        self.grammars = Grammars(worker.engine)
        self.models = Models(worker, settings.name, settings.base_names)
        self.pooled = Pooled(
            worker, settings.name, settings.pooling, self.prompts, self.check_model
        )
        self.family = family_of(str(getattr(self.tokenizer, "chat_template", None) or ""))

    def check_model(self, name: str | None) -> None:
        self.models.check(name)

    def check_generates(self) -> None:
        """Raise an error if the model writes no text."""
        if isinstance(self.engine, EncoderEngine):
            what = (
                f"the model {self.settings.name!r} must be a decoder for this path, got an encoder"
            )
            raise ApiError(400, what, param="model")

    def metrics(self) -> str:
        now = self.engine.stats()
        worker = self.worker
        gauges = {
            "vllm:num_requests_running": ("Requests in the batch.", now.running),
            "vllm:num_requests_waiting": ("Requests that wait.", worker.unfinished - now.running),
            "vllm:kv_cache_usage_perc": (
                "Part of the cache that running requests have, from 0 to 1.",
                now.blocks_held / max(now.blocks, 1),
            ),
            "cache_blocks": ("Blocks of the cache.", now.blocks),
        }
        counters: dict[str, tuple[str, float]] = {
            "steps_total": ("Batches computed.", now.steps),
            "requests_finished_total": ("Requests that came to their end.", now.finished),
            "requests_cancelled_total": ("Requests that were cancelled.", now.cancelled),
            "requests_failed_total": ("Requests whose logits were not finite.", now.failed),
            "requests_rejected_total": ("Requests refused: the queue was full.", worker.rejected),
            "engine_errors_total": ("Batches that failed.", worker.errors),
            "vllm:num_preemptions_total": (
                "Requests that had to be computed again.",
                now.preemptions,
            ),
            "vllm:prompt_tokens_total": ("Tokens of prompts.", now.prompt_tokens),
            "vllm:prefix_cache_hits_total": (
                "Tokens of prompts found in the cache.",
                now.cached_tokens,
            ),
            "vllm:generation_tokens_total": ("New tokens.", now.generated_tokens),
        }
        if getattr(self.engine, "speculative_config", None) is not None:
            counters |= _speculation(now)
        return worker.metrics.text(
            self.settings.name,
            {name: (text, float(value)) for name, (text, value) in gauges.items()},
            {name: (text, float(value)) for name, (text, value) in counters.items()},
        )

    async def answer(
        self,
        request: Request,
        body: CompletionRequest | ChatRequest,
        prompts: Sequence[Any],
        chat: bool,
        answer: Answer | None = None,
    ) -> Response:
        """Run the prompts of a request.

        Args:
            request: Whose client waits.
            body: The request.
            prompts: Its prompts.
            chat: Whether they are conversations.
            answer: Makes the answer, where it has another form.
        """
        lora = self.models.check(body.model, adapters=True)
        self.check_generates()
        if not prompts:
            raise ApiError(400, "prompt must have at least one prompt, got none", param="prompt")
        if len(prompts) * body.n > MAX_CHOICES:
            raise ApiError(400, f"prompts and n must give at most {MAX_CHOICES} choices", param="n")
        #: Fields of the request by other words for them.
        names = responses.FIELDS if answer is not None else CHAT if chat else {}
        most = self.settings.max_new_tokens or self.engine.max_model_len
        # The API's default for completions is 16; a chat ends where the model ends it.
        default = most if chat else min(16, most)
        try:
            wanted = body.wanted()
            if wanted is not None:
                self.grammars.check()
            params = [sampling_params(body, choice, most, default) for choice in range(body.n)]
            if lora is not None:
                params = [one.replace(lora=lora) for one in params]
            for prompt in prompts:
                self.prompts.check(prompt, chat)
        except ValueError as error:
            text, field = str(error), field_of(error, names)
            for word, name in names.items():
                text = text.replace(word, name, 1) if field == name else text
            raise ApiError(400, text, param=field) from None
        except RecursionError:  # of a schema that could be read just so
            text = "body: must be JSON that is not nested deeply"
            raise ApiError(400, text, param="body") from None
        except MissingComponentError as error:
            raise ApiError(400, str(error)) from None
        template: dict[str, Any] = {}
        if isinstance(body, ChatRequest):
            template = body.template()
            if self.family.special:
                params = [one.replace(skip_special_tokens=False) for one in params]

        def changes(length: int) -> dict[str, Any]:
            found: dict[str, Any]
            found = {} if wanted is None else {"grammar": self.grammars.make(wanted)}
            limit = getattr(body, "max_completion_tokens", None) or body.max_tokens
            if limit == -1 or (chat and not limit):  # as far as the cache goes
                room = self.engine.stats().blocks * self.engine.block_size + 1 - length
                found["max_new_tokens"] = max(1, params[0].min_new_tokens, min(most, room))
            return found

        requests = [
            (self.prompts.maker(prompt, chat, changes, **template), params) for prompt in prompts
        ]
        reply = Reply(chat, lora or self.settings.name, self.tokenizer)
        trace = self.trace(request, body, params[0], reply.id if answer is None else answer.id)
        try:
            job = Generation(self.worker, submit(self.worker, requests), body, prompts, names)
        except ApiError as error:
            trace.refuse(error)
            raise
        try:
            with job.watching(request):
                await job.accept()
                job.parsers = [self.parser(body, wanted, text) for text in job.texts]
                if not body.stream:
                    found = await (
                        job.collect(reply) if answer is None else job.respond(reply, answer)
                    )
                    trace.end(job)
                    return JSONResponse(found)
        except BaseException as error:
            trace.end(job, error)
            raise
        stream = job.stream(reply) if answer is None else job.stream_response(reply, answer)
        return StreamingResponse(
            trace.around(stream, job),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )

    def trace(self, request: Request, body: Any, params: SamplingParams, name: str) -> Trace:
        """Return the span of a request.

        Args:
            request: Whose headers may tell the span that it belongs to.
            body: The request.
            params: Of its first choice.
            name: Of its answer.
        """
        if self.settings.traces is None:
            return Trace(None)
        attributes = {
            "gen_ai.request.id": name,
            "gen_ai.request.max_tokens": params.max_new_tokens,
            "gen_ai.request.n": body.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.response.model": self.settings.name,
            "http.request.header.x_request_id": request.scope.get("request_id"),
        }
        return self.settings.traces.begin(request.headers, attributes)

    def parser(self, body: Any, wanted: Wanted | None, text: str) -> Any:
        """Return what reads an answer, None for a completion.

        Args:
            body: The request.
            wanted: What the answer must be; then all of it is text, whatever marks it has.
            text: The prompt.
        """
        if not isinstance(body, ChatRequest):
            return None
        if body.forced:
            return forced_parser(body.forced_name)
        family = self.family if wanted is None else Family("plain")
        return Parser(family, body.allowed_tools, text)


def _speculation(now: EngineStats) -> dict[str, tuple[str, float]]:
    """Return the counters of guessed tokens, with vLLM's names."""
    name = "vllm:spec_decode_num"
    found: dict[str, tuple[str, float]] = {
        f"{name}_drafts_total": ("Times that tokens were guessed.", now.drafts),
        f"{name}_draft_tokens_total": ("Guessed tokens.", now.draft_tokens),
        f"{name}_accepted_tokens_total": ("Guessed tokens that were right.", now.accepted_tokens),
    }
    for place, count in enumerate(now.accepted_at):
        about = "Guessed tokens that were right, by their place."
        found[f'{name}_accepted_tokens_per_pos_total{{position="{place}"}}'] = (about, count)
    return found


class Generation(Job):
    """The choices of one HTTP request."""

    def __init__(
        self,
        worker: Worker,
        tickets: Sequence[Ticket],
        body: Any,
        prompts: Sequence[Any],
        names: Mapping[str, str],
    ) -> None:
        super().__init__(worker, tickets)
        self.prompts = prompts
        self.chat = isinstance(body, ChatRequest)
        self.names = names
        self.n = body.n
        self.echo = getattr(body, "echo", False)
        self.empty = self.echo and body.max_tokens == 0
        options = body.stream_options
        self.usage_last = options is not None and options.include_usage
        self.usage_each = self.usage_last and options.continuous_usage_stats
        self.prompt_tokens = 0
        self.new_tokens = 0
        self.cached_tokens = 0
        #: For each choice: the prompt, its text in the chat template, and what reads the answer.
        self.tokens: list[Sequence[int]] = []
        self.texts: list[str] = []
        self.parsers: list[Any] = []

    async def accept(self) -> None:
        """Wait until the engine has taken all, so that a mistake is an error and no broken stream."""
        for number, ticket in enumerate(self.tickets):
            event = await self.event(ticket)
            if isinstance(event, Failed):
                raise failure(event, self.names)
            assert isinstance(event, Accepted)
            if number % self.n == 0:
                self.prompt_tokens += len(event.prompt.tokens)
            self.tokens.append(event.prompt.tokens)
            self.texts.append(event.prompt.text)

    def _text(self, index: int, event: StepOutput, first: bool, reply: Reply) -> str:
        """Return what an event adds to the text of a choice."""
        text = "" if self.empty else event.text
        if not (first and self.echo):
            return text
        prompt = self.prompts[index // self.n]
        if not isinstance(prompt, str):
            prompt = str(reply.tokenizer.decode(list(prompt), skip_special_tokens=True))
        return prompt + text

    async def logprobs(
        self, index: int, event: StepOutput, first: bool, reply: Reply, offset: int
    ) -> tuple[dict[str, Any] | None, int]:
        """Return the log probabilities of an event, and the characters up to its end."""
        if self.tickets[index].params.logprobs is None:  # type: ignore[union-attr]
            return None, offset
        entries = [] if self.empty else list(event.logprobs)
        if first and self.echo:
            start = TokenLogprobs(self.tokens[index][0], math.nan, ())
            entries = [start, *event.prompt_logprobs, *entries]
        parts = []
        for at in range(0, len(entries), _AT_ONCE):
            # One after the other: texts of a million alternatives at once take seconds.
            parts.append(reply.logprobs(entries[at : at + _AT_ONCE], offset))
            offset += sum(map(len, parts[-1].get("tokens", ())))
            await asyncio.sleep(0)
        return reply.joined(parts), offset

    async def collect(self, reply: Reply) -> dict[str, Any]:
        choices = []
        for index, ticket in enumerate(self.tickets):
            pieces: list[str] = []
            parts: list[Any] = []
            offset = 0
            while True:
                event = await self.event(ticket)
                if isinstance(event, Failed):
                    raise failure(event, self.names)
                pieces.append(self._text(index, event, not pieces, reply))
                part, offset = await self.logprobs(index, event, len(pieces) == 1, reply, offset)
                if part is not None:
                    parts.append(part)
                self.count(index, event)
                if event.finished:
                    break
            logprobs = reply.joined(parts) if parts else None
            text = "".join(pieces)
            choices.append(reply.choice(index, text, event.reason, logprobs, self.parsers[index]))
        return reply.whole(choices, self.usage())

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

    async def stream(self, reply: Reply) -> AsyncGenerator[str, None]:
        """Yield server-sent events; a client that goes away closes this, which cancels what is left."""
        count = len(self.tickets)
        first, offsets = [True] * count, [0] * count
        try:
            if reply.chat:
                for index in range(count):
                    delta = {"role": "assistant", "content": ""}
                    yield self._sse(reply.chunk(index, delta, None))
            async for index, event in self._merged():
                if isinstance(event, Failed):
                    error = self.error = failure(event, self.names)
                    yield f"data: {error.json()}\n\n"
                    return
                assert isinstance(event, StepOutput)
                self.count(index, event)
                text = self._text(index, event, first[index], reply)
                logprobs, offsets[index] = await self.logprobs(
                    index, event, first[index], reply, offsets[index]
                )
                first[index] = False
                deltas: list[Any] = [text]
                reason = event.reason
                parser = self.parsers[index]
                if parser is not None:
                    deltas = parser.feed(text, event.finished) or [{}]
                    reason = reply.reason(reason, parser)
                if not (deltas[0] or event.finished or logprobs is not None):
                    continue
                for delta in deltas[:-1]:
                    yield self._sse(reply.chunk(index, delta, None))
                yield self._sse(reply.chunk(index, deltas[-1], reason, logprobs))
            if self.usage_last:
                yield _sse(reply.last_chunk(self.usage()))
            yield "data: [DONE]\n\n"
        finally:
            self.cancel()

    def count(self, index: int, event: StepOutput) -> None:
        """Count the tokens of an event."""
        self.new_tokens += 0 if self.empty else len(event.tokens)
        if index % self.n == 0:  # the other choices have the same prompt
            self.cached_tokens += event.cached_tokens

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens up to now."""
        return usage(self.prompt_tokens, self.new_tokens, self.cached_tokens)

    async def respond(self, reply: Reply, answer: Answer) -> dict[str, Any]:
        """Return the object of ``/v1/responses``."""
        found: dict[str, Any] = {}
        async for event in responses.events(answer, self, reply):
            found = event
        return dict(found["response"])

    async def stream_response(self, reply: Reply, answer: Answer) -> AsyncGenerator[str, None]:
        """Yield the events of ``/v1/responses``; see `stream`."""
        try:
            async for event in responses.events(answer, self, reply):
                yield responses.sse(event)
        except ApiError as error:
            self.error = error
            text = {"code": str(error.status), "message": str(error), "param": error.param}
            yield responses.sse(answer.event("error", **text))
        finally:
            self.cancel()

    def _sse(self, chunk: dict[str, Any]) -> str:
        if self.usage_each:
            chunk["usage"] = self.usage()
        return _sse(chunk)


def _sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
