# SPDX-License-Identifier: Apache-2.0
"""What stands between a client and the application: who may ask, how much a request may send, how fast it must come.

`Guard` is middleware of the application, `protocol` the protocol of uvicorn on h11 with limits of time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, MutableMapping
from typing import Any, TypeVar

from ipex_core.errors import MissingComponentError
from ipex_llm.entrypoints.openai.protocol import ApiError
from ipex_llm.entrypoints.openai.worker import Metrics

log = logging.getLogger("ipex")
requests = logging.getLogger("ipex.requests")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Value = TypeVar("Value")

#: Paths whose requests have a body; of others none is read.
_BODIES = {
    *(
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/tokenize",
        "/detokenize",
    ),
    *("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
}
#: Paths that are counted by name; others together, so that clients cannot fill the memory with names.
_PATHS = {*_BODIES, "/v1/models", "/metrics", "/version", "/health", "/ping"}
#: Paths that need no key.
_OPEN = {"/health", "/ping"}
#: A refused body up to this size is read and thrown away, so that the client sees the answer and no reset connection.
_DRAIN = 64 << 10
#: A number with more digits is larger than any limit.
_DIGITS = 15


class _ClientGone(Exception):
    """The client closed the connection within the body."""


class Guard:
    """ASGI middleware. A request that is refused costs no more than its headers: its body is not kept.

    Args:
        app: The application.
        max_body: Most bytes of a request; larger ones get the status 413.
        metrics: Where responses are counted.
        api_key: What clients have to send as bearer token, in UTF-8; None for no check.
        hosts: Names that the header Host may have (without port); None for any.
        timeout: Seconds in which the body must come; slower ones get the status 408.
        max_requests: Most requests with a body that are read or answered at the same time; more get the status 429.
        log_requests: Write a line of JSON for each request to the logger ``ipex.requests``.
    """

    def __init__(
        self,
        app: Any,
        max_body: int,
        metrics: Metrics,
        api_key: str | None = None,
        hosts: Collection[str] | None = None,
        timeout: float = 30.0,
        max_requests: int = 1024,
        log_requests: bool = False,
    ) -> None:
        self.app = app
        self.max_body = max_body
        self.metrics = metrics
        self.api_key = None if api_key is None else api_key.encode("utf-8")
        self.hosts = None if hosts is None else {host.lower() for host in hosts}
        self.timeout = timeout
        self.max_requests = max_requests
        self.log_requests = log_requests
        self._requests = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket: not supported
            await send({"type": "websocket.close", "code": 1000})
            return
        path = scope["path"] if scope["path"] in _PATHS else "other"
        answer = _Answer(send, self.metrics, path, _identity(scope["headers"]))
        scope["request_id"] = answer.identity
        try:
            await self._answer(scope, receive, answer)
        finally:
            if self.log_requests:
                requests.info("%s", answer.line(scope["method"]))

    async def _answer(self, scope: Message, receive: Receive, answer: _Answer) -> None:
        try:
            await self._run(scope, receive, answer)
        except _ClientGone:
            pass
        except asyncio.CancelledError:
            # The server cancels what still runs when the time for its shutdown is over.
            with contextlib.suppress(asyncio.CancelledError):
                await answer.fail(ApiError(503, "the server is shutting down", "server_error"))
        except Exception:
            log.exception("the request %s failed", answer.identity)
            await answer.fail(ApiError(500, "the server failed; see its log", "server_error"))

    async def _run(self, scope: Message, receive: Receive, answer: _Answer) -> None:
        headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        try:
            length = self._check(scope["path"], headers)
        except ApiError as error:
            await self._refuse(receive, answer, error, headers)
            return
        if scope["method"] != "POST" or scope["path"] not in _BODIES:
            await self.app(scope, receive, answer.send)
            return
        if length > self.max_body:
            text = f"the request must have at most {self.max_body} bytes"
            await self._refuse(receive, answer, ApiError(413, text), headers)
            return
        if self._requests >= self.max_requests:
            text = f"the queue is full: {self._requests} requests are read or answered"
            await self._refuse(receive, answer, ApiError(429, text, "rate_limit_error"), headers)
            return
        self._requests += 1
        try:
            try:
                body = await within(self._body(receive), self.timeout)
            except asyncio.TimeoutError:
                text = f"the request must come within {self.timeout:g} seconds"
                await answer.fail(ApiError(408, text), close=True)
            except ApiError as error:
                await answer.fail(error, close=True)
            else:
                await self.app(scope, _Replay(body, receive), answer.send)
        finally:
            self._requests -= 1

    def _check(self, path: str, headers: list[tuple[bytes, bytes]]) -> int:
        """Return the length of the body that the headers tell, 0 for none.

        Raises:
            ApiError: The headers contradict each other, name a foreign host, or have no key.
        """
        lengths = {value for name, value in headers if name == b"content-length"}
        chunked = any(name == b"transfer-encoding" for name, _ in headers)
        if len(lengths) + chunked > 1:
            # A proxy in front may have read the other one, and would take the rest for another request.
            raise ApiError(400, "the request must have one Content-Length or Transfer-Encoding")
        declared = next(iter(lengths), b"0")
        if not declared.isdigit():
            raise ApiError(400, "Content-Length must be a number")
        if self.hosts is not None:
            given = [value for name, value in headers if name == b"host"]
            if len(given) != 1 or _host(given[0]) not in self.hosts:
                # A page of another site whose name leads here would else talk to this server.
                raise ApiError(403, "the header Host must name this server; see --allowed-host")
        if self.api_key is not None and path not in _OPEN:
            given = [value for name, value in headers if name == b"authorization"]
            kind, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
            same = hmac.compare_digest(key.strip(), self.api_key)
            if not same or kind.lower() != b"bearer":
                what = "a header that does not match" if given else "no header"
                raise ApiError(
                    401,
                    f"Authorization must be 'Bearer <API key>', got {what}",
                    "authentication_error",
                )
        return int(declared) if len(declared) <= _DIGITS else self.max_body + 1

    async def _body(self, receive: Receive) -> bytes:
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise _ClientGone
            body += message.get("body", b"")
            if len(body) > self.max_body:
                raise ApiError(413, f"the request must have at most {self.max_body} bytes")
            more = message.get("more_body", False)
        return bytes(body)

    async def _refuse(
        self,
        receive: Receive,
        answer: _Answer,
        error: ApiError,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        """Answer a request whose body has not been read."""
        found = dict(headers)
        declared = found.get(b"content-length", b"0")
        small = declared.isdigit() and len(declared) <= _DIGITS and int(declared) <= _DRAIN
        close = b"transfer-encoding" in found or not small or error.status == 400
        close = close or b"expect" in found  # it waits for an answer before it sends the body
        if not close:
            try:
                await within(_drain(receive), self.timeout)
            except asyncio.TimeoutError:
                close = True
        await answer.fail(error, close)


class _Replay:
    """Gives the application a body that has been read, and then what the client does."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _Answer:
    """The way to the client, which remembers how far the answer has come."""

    def __init__(self, send: Send, metrics: Metrics, path: str, identity: str) -> None:
        self.identity = identity
        self._begun = time.monotonic()
        self._status = 499  # unless there is an answer
        self._bytes = 0
        self._send = send
        self._metrics = metrics
        self._path = path
        self._started = self._done = self._events = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            self._events = kind.startswith(b"text/event-stream")
            self._status = message["status"]
            self._metrics.response(self._path, self._status)
            name = (b"x-request-id", self.identity.encode())
            message = {**message, "headers": [*message.get("headers", ()), name]}
        elif message["type"] == "http.response.body":
            self._done = not message.get("more_body", False)
            self._bytes += len(message.get("body", b""))
        await self._send(message)

    def line(self, method: str) -> str:
        """Return what is written of the request: nothing that the client has sent but its own name for it."""
        found = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "request_id": self.identity,
            "method": method[:16],
            "path": self._path,
            "status": self._status,
            "bytes": self._bytes,
            "seconds": round(time.monotonic() - self._begun, 6),
        }
        return json.dumps(found)

    async def fail(self, error: ApiError, close: bool = False) -> None:
        """Send an error: as the answer, or as the last event of a stream that has begun."""
        if self._done:
            return
        if self._started:
            body = f"data: {error.json()}\n\n".encode() if self._events else b""
            await self.send({"type": "http.response.body", "body": body})
            return
        headers = [(k.lower().encode(), v.encode()) for k, v in error.headers.items()]
        body = error.json().encode()
        headers.append((b"content-length", str(len(body)).encode()))
        if close:
            headers.append((b"connection", b"close"))
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def _identity(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the client's name for its request, if it has one of a few letters, or a new one."""
    given = [value for name, value in headers if name == b"x-request-id"]
    if len(given) == 1 and re.fullmatch(rb"[\w.-]{1,64}", given[0]):
        return given[0].decode("ascii")
    return secrets.token_hex(16)


def _host(value: bytes) -> str:
    """Return the name in a Host header, without its port."""
    text = value.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


async def within(work: Coroutine[Any, Any, Value], seconds: float) -> Value:
    """Wait for something so long. `asyncio.wait_for` of Python 3.11 loses a cancellation that comes with its end.

    Raises:
        asyncio.TimeoutError: It takes longer.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.cancel() and not task.cancelled():
            task.exception()  # has been seen


async def _drain(receive: Receive) -> None:
    """Read a body and forget it."""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise _ClientGone
        if not message.get("more_body", False):
            return


# -- uvicorn's protocol on h11, with limits of time and errors in the form of the OpenAI API --------------------------


try:
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as _error:
    raise MissingComponentError("the server needs uvicorn: pip install 'ipex[serve]'") from _error


class _Protocol(H11Protocol):
    """Closes connections whose headers do not come, whose body is not awaited, or that do not take what was written.

    The body of a request that is being answered is not watched here: `Guard` does that.
    """

    timeout = 30.0

    _asked: asyncio.TimerHandle | None = None  # runs while the rest of a request is due
    _stalled: asyncio.TimerHandle | None = None  # runs while the client takes nothing
    _began = False  # a request has begun to come

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._asked = _cancel(self._asked)
        self._stalled = _cancel(self._stalled)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._began = True
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._watch()

    def _watch(self) -> None:
        """Start the timer where the next thing must come from the client; it does not restart with each byte."""
        answered = self.cycle is None or self.cycle.response_complete
        due = self.conn.their_state is h11.IDLE
        due = due or (self.conn.their_state is h11.SEND_BODY and answered)
        if not due or self.transport.is_closing():
            self._asked = _cancel(self._asked)
            self._began = False
        elif self._asked is None:
            self._asked = self.loop.call_later(self.timeout, self._expire)

    def _expire(self) -> None:
        self._asked = None
        if self.transport.is_closing():
            return
        if self._began and self.conn.our_state is h11.IDLE:
            text = f"the headers must come within {self.timeout:g} seconds"
            self._answer(ApiError(408, text))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, unless an answer has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._answer(ApiError(400, msg))
        else:
            self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            # The connection cannot be written to any more.
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _answer(self, error: ApiError) -> None:
        body = error.json().encode()
        headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
        headers += [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=error.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._stalled = _cancel(self._stalled)
        super().resume_writing()


def _cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer, if there is one; return what is there then: none."""
    if timer is not None:
        timer.cancel()
    return None


def protocol(timeout: float) -> type[asyncio.Protocol]:
    """Return the class for uvicorn's ``http``.

    Args:
        timeout: Seconds in which the headers of a request must come, and the client must take what was written.
    """
    return type("Protocol", (_Protocol,), {"timeout": timeout})
