# SPDX-License-Identifier: Apache-2.0
"""Adapters of a running server: which models there are, and paths that load and drop adapters, named as in vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ipex_core.errors import MissingComponentError
from ipex_llm.engine import Engine
from ipex_llm.entrypoints.openai.protocol import ApiError, field_of, read_body
from ipex_llm.entrypoints.openai.worker import Worker

try:
    from fastapi import FastAPI, Request
    from fastapi.responses import PlainTextResponse, Response
    from pydantic import BaseModel, Field
except ImportError as _error:
    raise MissingComponentError("the server needs FastAPI: pip install 'ipex[serve]'") from _error

if TYPE_CHECKING:
    from ipex_llm.engine.lora import LoadedAdapter

__all__ = ["Models", "add_lora_paths"]


class LoadLora(BaseModel):
    """Body of ``/v1/load_lora_adapter``."""

    lora_name: str = Field(min_length=1, max_length=200)
    lora_path: str = Field(min_length=1, max_length=4096)


class UnloadLora(BaseModel):
    """Body of ``/v1/unload_lora_adapter``."""

    lora_name: str = Field(min_length=1, max_length=200)


class Models:
    """The names that requests can have as ``model``.

    Args:
        worker: Its engine has the adapters.
        name: Of the model.
        base_names: Names that adapters may have for it; empty: any.
    """

    def __init__(self, worker: Worker, name: str, base_names: Sequence[str] = ()) -> None:
        self._worker = worker
        self.name = name
        self._base_names = base_names
        self._turn = asyncio.Lock()

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        """The adapters by name."""
        engine = self._worker.engine
        return dict(engine.loras) if isinstance(engine, Engine) else {}

    def list(self) -> list[dict[str, Any]]:
        """Return the entries of ``/v1/models``."""
        return [self.entry(name) for name in (self.name, *self.adapters)]

    def entry(self, name: str) -> dict[str, Any]:
        """Return the entry of a model that there is."""
        found: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "local",
            "max_model_len": self._worker.engine.max_model_len,
        }
        return found if name == self.name else {**found, "parent": self.name}

    def check(self, name: str | None, adapters: bool = False) -> str | None:
        """Return the adapter that a request names, None for the model itself.

        Args:
            name: The field ``model``.
            adapters: The path takes adapters.

        Raises:
            ApiError: There is no such model, or it is an adapter where none is taken.
        """
        if name is None or name == self.name:
            return None
        known = self.adapters
        if name not in known:
            names = ", ".join(map(repr, (self.name, *known)))
            text = f"the model {name[:100]!r} does not exist, only {names}"
            raise ApiError(404, text, param="model")
        if not adapters:
            text = f"model must be {self.name!r} for this path, got the adapter {name!r}"
            raise ApiError(400, text, param="model")
        return name

    async def load(self, body: LoadLora) -> str:
        """Load an adapter, and return what the client is told.

        Raises:
            ApiError: It is for another model, the name is in use, or there are too many.
        """
        engine, name = self._worker.engine, body.lora_name
        if not isinstance(engine, Engine):
            raise ApiError(
                400, "lora_name must be for a decoder, got an encoder", param="lora_name"
            )
        if name == self.name:
            text = f"lora_name must not be in use, got {name!r}, the name of the model"
            raise ApiError(400, text, param="lora_name")

        def read() -> LoadedAdapter:
            return engine.read_lora(body.lora_path, base_names=self._base_names)

        try:
            async with self._turn:  # the memory of one at a time
                if name in engine.loras:
                    raise ValueError(f"lora_name must not be in use, got {name!r}")
                adapter = await self._worker.apart(read)
                await self._worker.call(lambda: engine.load_lora(name, adapter))
        except ValueError as error:
            raise ApiError(400, str(error), param=field_of(error)) from None
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, body: UnloadLora) -> str:
        """Drop an adapter, and return what the client is told.

        Raises:
            ApiError: There is no adapter of this name.
        """
        engine, name = self._worker.engine, body.lora_name
        found = isinstance(engine, Engine) and await self._worker.call(
            lambda: engine.unload_lora(name)
        )
        if not found:
            raise ApiError(404, f"the adapter {name!r} does not exist", param="lora_name")
        return f"Success: LoRA adapter '{name}' removed successfully."


def add_lora_paths(app: FastAPI, models: Models, turn: asyncio.Semaphore) -> None:
    """Let clients load and drop adapters.

    Args:
        app: The server.
        models: What they change.
        turn: See `read_body`.
    """

    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        return PlainTextResponse(await models.load(await read_body(LoadLora, request, turn)))

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        return PlainTextResponse(await models.unload(await read_body(UnloadLora, request, turn)))
