# SPDX-License-Identifier: Apache-2.0
"""The paths that answer with vectors, scores and tokens."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch

from ipex_core.errors import MissingComponentError
from ipex_llm.engine import PoolingParams, StepOutput
from ipex_llm.engine.encoder import EncoderEngine
from ipex_llm.engine.limits import check_prompt
from ipex_llm.entrypoints.openai.job import Job, failure, submit
from ipex_llm.entrypoints.openai.protocol import (
    ApiError,
    Fields,
    Flag,
    Integer,
    Messages,
    chat_of,
    check_prompts,
    field_of,
    plain_messages,
    prompts_of,
    short,
    wrong,
)
from ipex_llm.entrypoints.openai.texts import Prompts
from ipex_llm.entrypoints.openai.worker import Accepted, Failed, Prompt, Worker
from ipex_llm.model_loader.pooling import PoolingConfig

try:
    from fastapi import Request
    from fastapi.responses import JSONResponse, Response
    from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
except ImportError as _error:
    raise MissingComponentError("the server needs FastAPI: pip install 'ipex[serve]'") from _error

#: Most texts of a request.
MAX_INPUTS = 2048
#: Numbers of vectors that are put into words at once, on the event loop.
_AT_ONCE = 1 << 16


class _Pooling(Fields):
    model: str | None = None
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1)] | None = None

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _some(cls, value: int | None) -> Any:
        if value == 0:
            raise wrong("must be -1 or at least 1, got 0")
        return value


class _Conversation(Fields):
    """What a body can have in the place of a text."""

    messages: Messages | None = Field(None, min_length=1)
    tools: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: Flag = False

    def tokens(self, prompts: Prompts) -> list[int]:
        """Return the tokens of the messages; called in a thread of the tokenizer."""
        messages = plain_messages(self.messages or ())
        prompts.check(messages, True)
        names = ("messages", "tools", "chat_template_kwargs")
        chat = chat_of({name: getattr(self, name) for name in names}, {})
        options = {"add_generation_prompt": self.add_generation_prompt, **chat.template()}
        return prompts.encode(messages, True, **options)[1]


class EmbeddingRequest(_Conversation, _Pooling):
    """Body of ``/v1/embeddings``; with ``messages`` as vLLM has it."""

    input: Any = Field(None, validate_default=True)
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Integer, Field(ge=1)] | None = None
    normalize: Flag | None = None
    use_activation: Flag | None = None  # a later name of vLLM's for it

    @field_validator("input")
    @classmethod
    def _known(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("messages") is not None:
            if value is not None:
                raise wrong("must not be there beside messages, got both")
            return value
        if value == []:
            raise wrong("must have at least one text, got none")
        return check_prompts(value, MAX_INPUTS, "texts")


def _texts(value: Any) -> Any:
    """Return a list of texts, after a check; objects with a text are taken as that."""
    value = short(value, MAX_INPUTS, "texts")
    if isinstance(value, list):
        found = [part.get("text") if isinstance(part, dict) else part for part in value]
        odd = next((part for part in found if not isinstance(part, str)), None)
        if not found or any(not isinstance(part, str) for part in found):
            got = type(odd).__name__ if found else "none"
            raise wrong(f"must be a list of texts, got {got}")
        return found
    return value


class RerankRequest(_Pooling):
    """Body of ``/rerank``: with ``documents`` as Jina and Cohere have it, with ``texts`` as TEI has it."""

    query: str
    documents: list[str] | None = None
    texts: list[str] | None = None
    top_n: Annotated[Integer, Field(ge=0)] | None = None
    return_documents: Flag = True
    raw_scores: Flag = False
    return_text: Flag = False
    truncate: Flag = False

    @field_validator("documents", "texts", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        return _texts(value)

    @model_validator(mode="after")
    def _one(self) -> Any:
        if (self.documents is None) == (self.texts is None):
            raise wrong("documents must be there, or texts, got both or none")
        if self.truncate and self.truncate_prompt_tokens is None:
            self.truncate_prompt_tokens = -1
        return self


_Side = Annotated[str | list[str] | None, BeforeValidator(_texts)]
#: Names that the two sides of scores can have, as in vLLM.
SIDES = (
    *(("text_1", "text_2"), ("data_1", "data_2")),
    *(("queries", "documents"), ("queries", "items")),
)


class ScoreRequest(_Pooling):
    """Body of ``/v1/score``."""

    text_1: _Side = None
    text_2: _Side = None
    data_1: _Side = None
    data_2: _Side = None
    queries: _Side = None
    documents: _Side = None
    items: _Side = None

    def pairs(self) -> tuple[tuple[str, str], list[tuple[str, str]]]:
        """Return the names of the two sides, and the pairs: one text is compared with each of many.

        Raises:
            ValueError: A side is not there, there are others, or the sides have unlike numbers of texts.
        """
        known = dict.fromkeys(name for pair in SIDES for name in pair)
        given = {name: texts for name in known if (texts := getattr(self, name)) is not None}
        names = max(SIDES, key=lambda pair: len(given.keys() & set(pair)))
        for name in names:
            if name not in given:
                raise ValueError(f"{name} must be there, as one of two sides, got none")
        if len(given) > 2:
            name = next(name for name in given if name not in names)
            raise ValueError(f"{name} must not be there beside {' and '.join(names)}, got both")
        sides = [given[name] for name in names]
        first, many = ([texts] if isinstance(texts, str) else texts for texts in sides)
        if len(first) == 1:
            first = first * len(many)
        if len(first) != len(many):
            raise ValueError(
                f"{names[1]} must have as many texts as {names[0]}, {len(first)}, got {len(many)}"
            )
        return names, list(zip(first, many, strict=True))


class Tokenize(_Conversation):
    """Body of ``/tokenize``."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: Flag = True
    add_generation_prompt: Flag = True
    return_token_strs: Flag = False

    @model_validator(mode="after")
    def _one(self) -> Any:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt must be there, or messages, got both or none")
        return self

    def answer(self, prompts: Prompts, tokenizer: Any) -> dict[str, Any]:
        """Return the answer; called in a thread of the tokenizer."""
        try:
            if self.messages is None:
                prompts.check(self.prompt, False)
                _, tokens = prompts.encode(self.prompt, False, self.add_special_tokens)
            else:
                tokens = self.tokens(prompts)
        except ValueError as error:
            raise ApiError(400, str(error), param=field_of(error)) from None
        found: dict[str, Any] = {"tokens": tokens, "count": len(tokens)}
        found["max_model_len"] = prompts.most
        if self.return_token_strs:
            found["token_strs"] = tokenizer.convert_ids_to_tokens(tokens)
        return found


class Detokenize(Fields):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: Any

    @field_validator("tokens")
    @classmethod
    def _ids(cls, value: Any) -> Any:
        if not isinstance(value, list) or not set(map(type, value)) <= {int}:
            raise wrong(f"must be a list of token ids, got {type(value).__name__}")
        return value

    def answer(self, prompts: Prompts, tokenizer: Any) -> dict[str, Any]:
        """Return the answer; called in a thread of the tokenizer."""
        try:
            if self.tokens:
                check_prompt(self.tokens, prompts.most, prompts.vocab, room=0)
        except ValueError as error:
            raise ApiError(400, str(error).replace("prompt", "tokens"), param="tokens") from None
        return {"prompt": str(tokenizer.decode(self.tokens, skip_special_tokens=False))}


class Pooled:
    """The work behind the paths with vectors.

    Args:
        worker: The engine's thread.
        name: Of the model.
        config: How vectors and scores are made.
        prompts: Makes tokens.
        check_model: Raises an error for another name.
    """

    def __init__(
        self,
        worker: Worker,
        name: str,
        config: PoolingConfig,
        prompts: Prompts,
        check_model: Callable[[str | None], None],
    ) -> None:
        self.worker = worker
        self.name = name
        self.config = config
        self.prompts = prompts
        self.check_model = check_model
        engine = worker.engine
        self.labels = engine.labels if isinstance(engine, EncoderEngine) else None
        self.tokenizer = engine.tokenizer
        self.most = min(engine.max_model_len, config.max_length or engine.max_model_len)

    # -- paths ---------------------------------------------------------------------------------------------------

    async def embed(self, request: Request, body: EmbeddingRequest) -> Response:
        """Answer with a vector for each text."""
        self.check_model(body.model)
        if self.labels is not None:
            text = f"the model {self.name!r} must give vectors, got a classifier: use /rerank or /v1/score"
            raise ApiError(400, text, param="model")
        if body.dimensions is not None and body.dimensions > (width := self._width):
            text = (
                f"dimensions must be at most {width}, the width of the model, got {body.dimensions}"
            )
            raise ApiError(400, text, param="dimensions")
        if body.messages is None:
            inputs, name = prompts_of(body.input), "input"
        else:
            try:
                inputs = [await self.worker.apart(lambda: body.tokens(self.prompts))]
            except ValueError as error:
                raise ApiError(400, str(error), param=field_of(error)) from None
            name = "messages"
        names = [(name,)] * len(inputs)
        vectors, count = await self._vectors(request, inputs, names, body.truncate_prompt_tokens)
        kept = body.dimensions or vectors[0].numel()
        data = []
        asked = body.use_activation if body.normalize is None else body.normalize
        scaled = self.config.normalize if asked is None else asked
        for index, vector in enumerate(vectors):
            vector = vector[:kept]
            if scaled:
                vector = vector / vector.norm().clamp_min(1e-12)
            data.append(
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _written(vector, body.encoding_format),
                }
            )
            if index % max(1, _AT_ONCE // kept) == 0:
                await asyncio.sleep(0)
        answer = {"object": "list", "data": data, "model": self.name, "usage": _usage(count)}
        return JSONResponse(answer)

    async def rerank(self, request: Request, body: RerankRequest) -> Response:
        """Answer with texts in the order of how well they fit a query."""
        self.check_model(body.model)
        texts = body.documents if body.documents is not None else body.texts or []
        name = "documents" if body.documents is not None else "texts"
        pairs = [(body.query, text) for text in texts]
        scores, count = await self._scores(
            request, pairs, ("query", name), body.truncate_prompt_tokens, body.raw_scores
        )
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        if body.top_n:  # 0 is all, as in vLLM
            order = order[: body.top_n]
        if body.texts is not None:
            return JSONResponse(
                [
                    {"index": i, "score": scores[i]}
                    | ({"text": texts[i]} if body.return_text else {})
                    for i in order
                ]
            )
        results = []
        for i in order:
            found: dict[str, Any] = {"index": i, "relevance_score": scores[i]}
            if body.return_documents:
                found["document"] = {"text": texts[i]}
            results.append(found)
        head = {"id": f"rerank-{secrets.token_hex(12)}", "model": self.name}
        return JSONResponse({**head, "usage": _usage(count), "results": results})

    async def score(self, request: Request, body: ScoreRequest) -> Response:
        """Answer with a number for each pair of texts."""
        self.check_model(body.model)
        try:
            names, pairs = body.pairs()
        except ValueError as error:
            raise ApiError(400, str(error), param=field_of(error)) from None
        scores, count = await self._scores(request, pairs, names, body.truncate_prompt_tokens)
        data = [{"index": i, "object": "score", "score": s} for i, s in enumerate(scores)]
        head = {"id": f"score-{secrets.token_hex(12)}", "object": "list"}
        head |= {"created": int(time.time()), "model": self.name}  # type: ignore[dict-item]
        return JSONResponse({**head, "data": data, "usage": _usage(count)})

    # -- behind them ---------------------------------------------------------------------------------------------

    @property
    def _width(self) -> int:
        """Numbers of a vector."""
        engine = self.worker.engine
        if isinstance(engine, EncoderEngine):
            return int(engine.model.config.get_text_config().hidden_size)
        return int(engine.runner.plan.hidden_size)

    async def _scores(
        self,
        request: Request,
        pairs: Sequence[tuple[str, str]],
        names: tuple[str, str],
        truncate: int | None,
        raw: bool = False,
    ) -> tuple[list[float], int]:
        """Return a score for each pair, and the number of tokens: of a classifier, or the cosine of vectors."""
        if self.labels is None:
            # Each text once, however many pairs it is in.
            sides = {text: (n,) for pair in pairs for text, n in zip(pair, names, strict=True)}
            texts = list(sides)
            vectors, count = await self._vectors(request, texts, list(sides.values()), truncate)
            units = {
                text: vector / vector.norm().clamp_min(1e-12)
                for text, vector in zip(texts, vectors, strict=True)
            }
            return [float(units[a] @ units[b]) for a, b in pairs], count
        if self.labels != 1:
            text = f"the model {self.name!r} must have one score, got a classifier of {self.labels}"
            raise ApiError(400, text, param="model")
        vectors, count = await self._vectors(request, pairs, [names] * len(pairs), truncate)
        squashed = self.config.sigmoid and not raw
        return [float(v[0].sigmoid() if squashed else v[0]) for v in vectors], count

    async def _vectors(
        self,
        request: Request,
        inputs: Sequence[Any],
        names: Sequence[tuple[str, ...]],
        truncate: int | None,
    ) -> tuple[list[torch.Tensor], int]:
        """Return a float32 vector for each input, and the number of tokens.

        Args:
            request: Whose client waits.
            inputs: Texts, token ids, or pairs of texts.
            names: For each the field that has it; for a pair both fields.
            truncate: Most tokens that are kept of each; -1: what the model takes; None: longer ones are an error.
        """
        for part, fields in zip(inputs, names, strict=True):
            parts = part if isinstance(part, tuple) else (part,)
            for one, name in zip(parts, fields, strict=True):
                if truncate is not None and not isinstance(one, str):
                    continue
                try:
                    self.prompts.check_text(one, name)
                except ValueError as error:
                    raise ApiError(400, str(error), param=name) from None
        # Those of alike length together, and no more at a time than a batch has: others get their turn, too.
        order = sorted(range(len(inputs)), key=lambda i: _length(inputs[i]))
        size = max(1, min(self.worker.engine.max_num_seqs, self.worker.limit))
        found: dict[int, torch.Tensor] = {}
        count = 0
        job = Job(self.worker)
        params = PoolingParams(self.config.pooling)
        with job.watching(request):
            for at in range(0, len(order), size):
                chosen = order[at : at + size]
                requests = [(self._maker(inputs[i], truncate), [params]) for i in chosen]
                while True:
                    try:
                        job.tickets = submit(self.worker, requests)
                        break
                    except ApiError as error:
                        if error.status != 429 or at == 0:
                            raise
                        await asyncio.sleep(0.02)
                for i, ticket in zip(chosen, job.tickets, strict=True):
                    while i not in found:
                        event = await job.event(ticket)
                        if isinstance(event, Failed):
                            raise _named(failure(event), names[i][-1])
                        if isinstance(event, Accepted):
                            count += len(event.prompt.tokens)
                            continue
                        assert isinstance(event, StepOutput) and event.vector is not None
                        found[i] = event.vector
        return [found[i] for i in range(len(inputs))], count

    def _maker(self, part: Any, truncate: int | None) -> Callable[[], Prompt]:
        """Return a function that makes the tokens of an input."""
        most = self.most if truncate in (None, -1) else min(truncate or 0, self.most)

        def made() -> Prompt:
            changes: Mapping[str, Any] = {}
            if isinstance(part, tuple):
                options = {} if truncate is None else {"truncation": True, "max_length": most}
                pair = self.tokenizer(*part, return_token_type_ids=True, **options)
                tokens = list(pair["input_ids"])
                changes = {"token_types": tuple(pair["token_type_ids"])}
            else:
                tokens = self.prompts.encode(part, False)[1]
                if truncate is not None and len(tokens) > most:
                    tokens = self._cut(part, tokens, most)
            check_prompt(tokens, self.most, self.prompts.vocab, room=0)
            return Prompt(tokens, changes)

        return made

    def _cut(self, part: Any, tokens: list[int], most: int) -> list[int]:
        """Return the first tokens of a text, with what the tokenizer puts at its end."""
        if isinstance(part, str) and callable(self.tokenizer):
            found = self.tokenizer(part, truncation=True, max_length=most)["input_ids"]
            return [int(token) for token in found]
        return tokens[:most]


def _written(vector: torch.Tensor, encoding: str) -> Any:
    """Return a vector as a list, or as its bytes in base64 (little-endian float32)."""
    if encoding == "float":
        return vector.tolist()
    return base64.b64encode(vector.contiguous().numpy().astype("<f4").tobytes()).decode()


def _length(part: Any) -> int:
    """Return the characters or tokens of a text or of a pair."""
    return sum(map(len, part)) if isinstance(part, tuple) else len(part)


def _usage(count: int) -> dict[str, int]:
    return {"prompt_tokens": count, "total_tokens": count}


def _named(error: ApiError, name: str) -> ApiError:
    """Return an error of the engine in the words of a request."""
    if error.status != 400:
        return error
    text = str(error).rpartition("add_request: ")[2].replace("prompt must", f"{name} must", 1)
    return ApiError(400, text, param=name)
