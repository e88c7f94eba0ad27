# SPDX-License-Identifier: Apache-2.0
"""uvicorn's protocol on h11, with limits of time and errors in the form of the OpenAI API."""

from __future__ import annotations

import asyncio
from typing import Any

from ipex_core.errors import MissingComponentError
from ipex_llm.entrypoints.openai.errors import ApiError

try:
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as _error:
    raise MissingComponentError("the server needs uvicorn: pip install 'ipex[serve]'") from _error

__all__ = ["protocol"]


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
