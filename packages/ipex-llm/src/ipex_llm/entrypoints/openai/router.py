# SPDX-License-Identifier: Apache-2.0
"""One port for several engines: each request goes to one of them, and its answer comes back as it is made."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from ipex_llm.entrypoints.openai.engines import (
    EngineAbsent,
    EngineGone,
    EngineProcess,
    Engines,
    Exchange,
    exchange,
)
from ipex_llm.entrypoints.openai.guard import Message, Receive, Send
from ipex_llm.entrypoints.openai.protocol import ApiError
from ipex_llm.entrypoints.openai.worker import Metrics

__all__ = ["Prefixes", "Router", "joined_metrics", "prefix_digests"]

log = logging.getLogger("ipex")

#: Bytes of a body that is read at once, on the event loop.
_AT_ONCE = 16 << 10
#: Characters of the shortest prefix that counts; each further one is twice as long.
_SHORTEST = 64
#: Prefixes that are remembered.
_KEPT = 1 << 16
#: Requests that an engine may have beside twice the least before a prefix that it knows counts no more.
_SLACK = 4
#: What concerns all engines, and seconds that it may take.
_LOAD, _UNLOAD, _LOADING = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", 120.0
_NONE = "an engine must be up, got none: wait, then send the request again"
#: Headers of a connection, which end here; and the name of a request, which `Guard` adds.
_OWN = {
    *(b"connection", b"transfer-encoding", b"content-length", b"host", b"keep-alive", b"upgrade"),
    *(b"x-request-id", b"expect", b"authorization", b"te", b"trailer", b"date", b"server"),
}
#: Fields that an answer depends on in front of what was said, and what was said.
_FIRST, _SAID = ("model", "tools", "instructions"), ("messages", "prompt", "input")


def prefix_digests(body: bytes) -> list[bytes]:
    """Return digests of the prefixes of what a request says, the longest first; none for a short one or no JSON."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return []
    if not isinstance(found, dict):
        return []
    said = next((found[name] for name in _SAID if found.get(name)), None)
    if said is None:
        return []
    if isinstance(said, list) and isinstance(said[0], str):
        said = said[0]
    try:
        parts = [found.get(name) for name in _FIRST]
        text = said if isinstance(said, str) else json.dumps(said)
        head = json.dumps(parts)
    except (ValueError, RecursionError):
        return []
    digests = []
    whole = hashlib.blake2b(head.encode(), digest_size=16)
    data = text.encode("utf-8", "surrogatepass")
    begin, end = 0, _SHORTEST
    while end <= len(data):
        whole.update(data[begin:end])
        digests.append(whole.digest())
        begin, end = end, 2 * end
    return digests[::-1]


class Prefixes:
    """Which engines have computed which prefixes."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, set[int]] = OrderedDict()

    def choose(self, digests: Sequence[bytes], engines: Iterable[EngineProcess]) -> EngineProcess:
        """Return the engine for a request: one that has its longest prefix, unless it has much more to do than others.

        Args:
            digests: Of the prefixes, the longest first.
            engines: That take requests, at least one.
        """

        def order(engine: EngineProcess) -> tuple[int, int]:
            return engine.load, engine.served

        chosen = least = min(engines, key=order)
        for digest in digests:
            known = self._known.get(digest)
            have = [engine for engine in engines if known and engine.index in known]
            if have:
                best = min(have, key=order)
                if best.load <= 2 * least.load + _SLACK:
                    chosen = best
                break
        for digest in digests:
            self._known.setdefault(digest, set()).add(chosen.index)
            self._known.move_to_end(digest)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return chosen

    def forget(self, index: int) -> None:
        """Forget what an engine had: it has ended."""
        for digest, known in list(self._known.items()):
            known.discard(index)
            if not known:
                del self._known[digest]


def joined_metrics(texts: Sequence[tuple[int, str]]) -> str:
    """Return the metrics of several engines as one text.

    Args:
        texts: (number, metrics) of each engine; the numbers become the label ``engine``.
    """
    heads: dict[str, list[str]] = {}
    values: dict[str, list[str]] = {}
    for index, text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                kind, name, *_ = line[2:].split(" ", 2)
                if kind == "HELP":
                    family = name
                known = heads.setdefault(name, [])
                if not any(old.startswith(f"# {kind} ") for old in known):
                    known.append(line)
                continue
            name, brace, rest = line.partition("{")
            if not brace:
                name, _, rest = line.partition(" ")
                rest = f"}} {rest}"
            comma = "" if rest.startswith("}") else ","
            values.setdefault(family, []).append(f'{name}{{engine="{index}"{comma}{rest}')
    lines = [line for name, head in heads.items() for line in (*head, *values.get(name, ()))]
    return "\n".join(lines) + "\n" if lines else ""


class Router:
    """ASGI application in front of engines, to be wrapped by `Guard`.

    Args:
        engines: Not started.
        metrics: What `Guard` counts.
        given_up: Asked during the start whether to go on.
    """

    def __init__(
        self, engines: Engines, metrics: Metrics, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        self.engines = engines
        self.metrics = metrics
        self.given_up = given_up
        self.prefixes = Prefixes()
        self.failed = False
        engines.on_end = lambda engine: self.prefixes.forget(engine.index)
        engines.on_ready = self._adapt
        #: Names and requests of adapters that were loaded while it ran.
        self._adapters: dict[str, bytes] = {}
        self._turn = asyncio.Semaphore(1)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        try:
            health = scope["method"] == "GET" and scope["path"] == "/health"
            if health or (scope["method"] in ("GET", "POST") and scope["path"] == "/ping"):
                await self._health(send)
            elif scope["method"] == "GET" and scope["path"] == "/metrics":
                await self._metrics(send)
            elif scope["method"] == "POST" and scope["path"] in (_LOAD, _UNLOAD):
                await self._to_all(scope, receive, send)
            else:
                await self._pass(scope, receive, send)
        except ApiError as error:
            headers = [(k.lower().encode(), v.encode()) for k, v in error.headers.items()]
            await _send(send, error.status, headers, error.json().encode())

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        if await self.engines.start(self.given_up):
            await send({"type": "lifespan.startup.complete"})
        else:
            self.failed = True
            await send({"type": "lifespan.startup.failed", "message": "an engine did not start"})
            return
        await receive()
        await self.engines.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _health(self, send: Send) -> None:
        up = [engine.up for engine in self.engines.all]
        ok = any(up) and not self.engines.stopping
        found = {
            "status": "ok" if ok else "stopping" if self.engines.stopping else "starting",
            "engines": ["ok" if one else "starting" for one in up],
        }
        head = [(b"content-type", b"application/json")]
        await _send(send, 200 if ok else 503, head, json.dumps(found).encode())

    async def _metrics(self, send: Send) -> None:
        texts = []
        for engine in self._up():
            try:
                status, text = await engine.ask(b"/metrics")
            except EngineGone:
                continue
            if status == 200:
                texts.append((engine.index, text.decode()))
        whole = joined_metrics(texts) + self._own_metrics()
        await _send(send, 200, [(b"content-type", b"text/plain; version=0.0.4")], whole.encode())

    def _own_metrics(self) -> str:
        lines = []
        for name, kind, text, values in (
            ("engine_up", "gauge", "Whether an engine takes requests.", "up"),
            ("engine_requests", "gauge", "Requests that an engine has.", "load"),
            ("engine_requests_total", "counter", "Requests that an engine got.", "served"),
            ("engine_restarts_total", "counter", "How often an engine was restarted.", "restarts"),
        ):
            lines += [f"# HELP ipex_llm_{name} {text}", f"# TYPE ipex_llm_{name} {kind}"]
            lines += [
                f'ipex_llm_{name}{{engine="{e.index}"}} {int(getattr(e, values))}'
                for e in self.engines.all
            ]
        return "\n".join([*lines, *self.metrics.responses("router_responses_total")]) + "\n"

    async def _to_all(self, scope: Message, receive: Receive, send: Send) -> None:
        """Have all engines load or drop an adapter; the answer is the first that is an error, if there is one."""
        body = (await receive()).get("body", b"")
        target = scope["path"].encode()
        try:
            found = [await engine.ask(target, body, _LOADING) for engine in self._up()]
        except EngineGone:
            text = "all engines must answer, got one that ended: send the request again"
            raise ApiError(503, text, "server_error") from None
        if not found:
            raise ApiError(503, _NONE, "server_error")
        status, reply = next((answer for answer in found if answer[0] != 200), found[0])
        if status == 200:
            name = str(json.loads(body).get("lora_name"))
            self._adapters.pop(name, None)
            if target == _LOAD.encode():
                self._adapters[name] = body
        await _send(send, status, [(b"content-type", b"application/json")], reply)

    async def _adapt(self, engine: EngineProcess) -> None:
        """Load adapters into an engine that starts again."""
        for name, body in list(self._adapters.items()):
            try:
                status, _ = await engine.ask(_LOAD.encode(), body, _LOADING)
            except EngineGone:
                return
            if status != 200:
                log.error("engine %d could not load the adapter %s again", engine.index, name)

    def _up(self) -> list[EngineProcess]:
        return [engine for engine in self.engines.all if engine.up]

    async def _pass(self, scope: Message, receive: Receive, send: Send) -> None:
        """Have an engine answer, as long as the client waits."""
        body = b""
        if scope["method"] == "POST":
            body = (await receive()).get("body", b"")  # `Guard` has read all of it
        if len(body) <= _AT_ONCE:
            digests = prefix_digests(body)
        else:
            async with self._turn:
                digests = await asyncio.to_thread(prefix_digests, body)
        work = asyncio.ensure_future(self._answered(scope, body, digests, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})

    async def _answered(
        self, scope: Message, body: bytes, digests: Sequence[bytes], send: Send
    ) -> None:
        while True:
            up = self._up()
            if not up:
                raise ApiError(503, _NONE, "server_error")
            engine = self.prefixes.choose(digests, up)
            try:
                await self._ask(engine, scope, body, send)
                return
            except EngineAbsent:
                engine.up = False  # until it answers again

    async def _ask(self, engine: EngineProcess, scope: Message, body: bytes, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name not in _OWN]
        headers.append((b"x-request-id", scope["request_id"].encode()))
        target = scope["raw_path"]
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        engine.load += 1
        engine.served += 1
        started = events = False
        try:
            method = scope["method"].encode()
            async with exchange(engine.socket, method, target, headers, body) as answer:
                events = _kind(answer).startswith(b"text/event-stream")
                own = [(n, v) for n, v in answer.headers if n not in _OWN or n == b"content-length"]
                await send({"type": "http.response.start", "status": answer.status, "headers": own})
                started = True
                async for part in answer.body:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except EngineAbsent:
            engine.served -= 1
            raise
        except EngineGone:
            if engine.process is not None and engine.process.poll() is not None:
                engine.up = False  # before its watch sees it
            text = f"engine {engine.index} ended while the request ran: send it again"
            error = ApiError(503, text, "server_error")
            if not started:
                raise error from None
            if not events:
                raise  # `Guard` ends the connection
            await send({"type": "http.response.body", "body": _event(error, scope["path"])})
        finally:
            engine.load -= 1


def _kind(answer: Exchange) -> bytes:
    return dict(answer.headers).get(b"content-type", b"")


def _event(error: ApiError, path: str) -> bytes:
    """Return an error as the last event of a stream."""
    if path != "/v1/responses":
        return f"data: {error.json()}\n\n".encode()
    # Its number is not known here, and clients do not need it.
    found = {"type": "error", "code": str(error.status), "message": str(error), "param": None}
    return f"event: error\ndata: {json.dumps(found)}\n\n".encode()


async def _gone(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(
    send: Send, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes
) -> None:
    length = (b"content-length", b"%d" % len(body))
    head: dict[str, Any] = {"status": status, "headers": [*headers, length]}
    await send({"type": "http.response.start", **head})
    await send({"type": "http.response.body", "body": body})
