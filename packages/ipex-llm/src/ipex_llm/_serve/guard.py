# SPDX-License-Identifier: Apache-2.0
"""What stands in front of the application: a limit on the size of requests, and the count of responses."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ipex_llm._serve.metrics import Metrics

__all__ = ["Guard"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

#: Paths that are counted by name; others together, so that clients cannot fill the memory with names.
_PATHS = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/health"}


class Guard:
    """ASGI middleware.

    Args:
        app: What it stands in front of.
        max_body: Most bytes of a request; larger ones get the status 413.
        metrics: Where responses are counted.
    """

    def __init__(self, app: Any, max_body: int, metrics: Metrics) -> None:
        self.app = app
        self.max_body = max_body
        self.metrics = metrics

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in _PATHS else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.response(path, message["status"])
            await send(message)

        declared = dict(scope["headers"]).get(b"content-length", b"0")
        body = b""
        too_large = not declared.isdigit() or int(declared) > self.max_body
        more = not too_large
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client is gone
            body += message.get("body", b"")
            more = message.get("more_body", False)
            too_large = len(body) > self.max_body
            more = more and not too_large
        if too_large:
            await self._refuse(counted)
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, counted)

    async def _refuse(self, send: Send) -> None:
        error = {
            "message": f"the request must have at most {self.max_body} bytes",
            "type": "invalid_request_error",
            "param": None,
            "code": 413,
        }
        body = json.dumps({"error": error}).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})
