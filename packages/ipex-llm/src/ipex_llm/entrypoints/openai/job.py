# SPDX-License-Identifier: Apache-2.0
"""Waits for the events of the tickets of one HTTP request, as long as its client does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ipex_llm.entrypoints.openai.protocol import ApiError, field_of
from ipex_llm.entrypoints.openai.worker import (
    Failed,
    QueueFull,
    RequestError,
    StoppedError,
    Ticket,
    Worker,
)

if TYPE_CHECKING:
    from fastapi import Request

#: Fields of chats for words of the engine.
CHAT: Mapping[str, str] = {"prompt": "messages"}


def failure(event: Failed, names: Mapping[str, str] = {}) -> ApiError:
    """Return what a client is told of a failure.

    Args:
        event: The failure.
        names: Fields of the request by the words of the engine.
    """
    if isinstance(event.error, StoppedError):
        return ApiError(503, str(event.error), "server_error")
    if event.of_the_request:
        field = field_of(event.error, names)
        if field == "model":  # an adapter that was there when the request came
            text = "the model does not exist any more: its adapter has been unloaded"
            return ApiError(404, text, param=field)
        return ApiError(400, str(event.error), param=field)
    if isinstance(event.error, RequestError):
        return ApiError(500, str(event.error), "server_error")
    return ApiError(500, "the engine failed; see the log of the server", "server_error")


def submit(worker: Worker, requests: Sequence[Any]) -> list[Ticket]:
    """Queue requests; see `Worker.submit`.

    Raises:
        ApiError: There is no room for them, or the server is shutting down.
    """
    try:
        return worker.submit(requests)
    except QueueFull as error:
        raise ApiError(429, str(error), "rate_limit_error") from None
    except StoppedError as error:
        raise ApiError(503, str(error), "server_error") from None


class Job:
    """What one HTTP request has the engine do."""

    def __init__(self, worker: Worker, tickets: Sequence[Ticket] = ()) -> None:
        self.worker = worker
        self.tickets = tickets
        self.error: BaseException | None = None
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        for ticket in self.tickets:
            self.worker.cancel(ticket)

    @contextlib.contextmanager
    def watching(self, request: Request) -> Iterator[None]:
        """Look for the end of the client within a block; an error in it cancels what is left."""
        self._gone = asyncio.ensure_future(_gone(request))
        try:
            yield
        except BaseException:
            self.cancel()
            raise
        finally:
            self._gone.cancel()
            # What is streamed from here on ends with the response.
            self._gone = asyncio.get_running_loop().create_future()

    async def event(self, ticket: Ticket) -> Any:
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


async def _gone(request: Request) -> None:
    """Come back when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
