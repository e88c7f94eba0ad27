# SPDX-License-Identifier: Apache-2.0
"""Vectors and scores from encoders: many texts of unlike length in one pass, without padding."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ipex_core.errors import IpexError
from ipex_llm.engine.limits import check_positive, check_prompt
from ipex_llm.engine.params import EngineStats, Pooling, PoolingParams, SamplingParams, StepOutput

log = logging.getLogger("ipex")

#: The attention of transformers that treats one row of tokens as several sequences.
_NAME = "ipex_packed"
#: Lengths of the texts that packing is tried with; a longer one shows a window of attention, unless that is wide.
_PROBE = (3, 9, 5)
_WIDEST = 512
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}

_pack = threading.local()


class EncoderEngine:
    """Gives a vector for each request, with the methods of `ipex_llm.Engine` that a server needs.

    The tokens of all texts of a step lie behind each other in one row, and attention keeps them apart; no computation
    goes into padding. Whether a model takes such rows is tried at the start with a few tokens: position embeddings or
    biases that depend on the place in the row give other states than each text alone. Such models run texts of equal
    length together.

    Args:
        model: An encoder of transformers (``last_hidden_state``), or one with a classifier on its first token
            (``logits``), in evaluation mode.
        tokenizer: For text in prompts.
        max_num_seqs: Most texts of a step.
        max_tokens_per_step: Most tokens of a step, unless one text alone has more.
        max_model_len: Most tokens of a text; what position embeddings allow if None.

    Raises:
        ValueError: A number is no positive integer.

    Attributes:
        labels: Outputs of the classifier, or None.
        packed: Whether texts of unlike length run together.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_num_seqs: int = 64,
        max_tokens_per_step: int = 4096,
        max_model_len: int | None = None,
    ) -> None:
        check_positive("max_num_seqs", max_num_seqs)
        check_positive("max_tokens_per_step", max_tokens_per_step)
        if max_model_len is not None:
            check_positive("max_model_len", max_model_len)
        self.model = model
        self.tokenizer = tokenizer
        self.max_num_seqs = max_num_seqs
        self.max_tokens_per_step = max_tokens_per_step
        config = model.config
        self.vocab_size = int(config.vocab_size)
        classifies = "ForSequenceClassification" in type(model).__name__
        self.labels: int | None = int(config.num_labels) if classifies else None
        self._types = int(getattr(config, "type_vocab_size", 0) or 0)
        self._dtype = next(model.parameters()).dtype
        self._offset = _offset(model)
        positions = getattr(config, "max_position_embeddings", None)
        most = int(positions) - self._offset if positions else 1 << 20
        if max_model_len is not None and max_model_len > most:
            raise ValueError(
                f"Engine: max_model_len must be at most {most}, the context of the model, got {max_model_len}"
            )
        self.max_model_len = most if max_model_len is None else max_model_len
        self.block_size = 1
        self.eos_token_ids: frozenset[int] = frozenset()
        self._waiting: dict[str, tuple[list[int], PoolingParams]] = {}
        self._ended: list[StepOutput] = []
        self._ids = itertools.count()
        self._counts = dict.fromkeys(("steps", "finished", "cancelled", "failed", "prompt"), 0)
        self.packed = self._can_pack()

    # -- requests ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Sequence[int],
        params: PoolingParams | SamplingParams,
        *,
        request_id: str | None = None,
    ) -> str:
        """Queue a text; its one output has a `vector`: the pooled state, or the logits of the classifier.

        Args:
            prompt: Token ids.
            params: Which states count, and the kinds of the tokens.
            request_id: A name of its own; one is made if None.

        Raises:
            ValueError: The prompt is empty, too long or has ids that are none; new tokens are asked for; the id is in
                use.
        """
        where = "EncoderEngine.add_request"
        if not isinstance(params, PoolingParams):
            raise ValueError(f"{where}: params must be PoolingParams for an encoder, got others")
        tokens = list(prompt)
        check_prompt(tokens, self.max_model_len, self.vocab_size, room=0)
        types = params.token_types
        if types is not None and (len(types) != len(tokens) or not set(types) <= {0, 1}):
            raise ValueError(f"{where}: token_types must be 0 or 1 for each token, got others")
        if request_id is None:
            request_id = next(i for n in self._ids if (i := f"e{n}") not in self._waiting)
        elif request_id in self._waiting:
            raise ValueError(f"{where}: request_id must not be in use, got {request_id!r}")
        self._waiting[request_id] = tokens, params
        self._counts["prompt"] += len(tokens)
        return request_id

    def cancel(self, request_id: str) -> bool:
        """Forget a request; the next step reports it with the reason ``"cancelled"``."""
        if self._waiting.pop(request_id, None) is None:
            return False
        self._counts["cancelled"] += 1
        self._ended.append(StepOutput(request_id, (), "", True, "cancelled"))
        return True

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self._waiting or self._ended)

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Compute one batch, the requests that came first.

        Raises:
            Exception: The model failed. Nothing has changed: the step can be repeated.
        """
        outputs, self._ended = self._ended, []
        chosen = self._choose()
        if not chosen:
            return outputs
        requests = [self._waiting[name] for name in chosen]
        with torch.inference_mode():
            vectors = self._vectors(requests, self.packed)
        self._counts["steps"] += 1
        for name, vector in zip(chosen, vectors, strict=True):
            del self._waiting[name]
            if bool(vector.isfinite().all()):
                self._counts["finished"] += 1
                outputs.append(StepOutput(name, (), "", True, "stop", vector=vector))
            else:
                self._counts["failed"] += 1
                error = "Engine.step: the vector must be finite, got NaN or infinity"
                outputs.append(StepOutput(name, (), "", True, "error", error=error))
        return outputs

    def _choose(self) -> list[str]:
        """Return the requests of a step."""
        chosen: list[str] = []
        total = 0
        length = None
        for name, (tokens, _) in self._waiting.items():
            if length is not None and not self.packed and len(tokens) != length:
                continue
            if len(chosen) == self.max_num_seqs or (
                chosen and total + len(tokens) > self.max_tokens_per_step
            ):
                break
            chosen.append(name)
            total += len(tokens)
            length = len(tokens)
        return chosen

    def _vectors(
        self, requests: Sequence[tuple[list[int], PoolingParams]], packed: bool
    ) -> list[Tensor]:
        """Return a float32 vector for each request; without packing all have one length."""
        lengths = [len(tokens) for tokens, _ in requests]
        rows = [tokens for tokens, _ in requests]
        types = [params.token_types or (0,) * len(tokens) for tokens, params in requests]
        options: dict[str, Any] = {}
        if packed:
            rows = [list(itertools.chain.from_iterable(rows))]
            types = [tuple(itertools.chain.from_iterable(types))]
            places = [range(self._offset, self._offset + n) for n in lengths]
            options["position_ids"] = torch.tensor([[i for part in places for i in part]])
        if self._types > 1 and "token_type_ids" in _arguments(self.model):
            options["token_type_ids"] = torch.tensor(types)
        if not packed:
            # A text that has the padding token in it would lose its place else.
            options["attention_mask"] = torch.ones(len(rows), lengths[0], dtype=torch.int64)
        starts = [0, *itertools.accumulate(lengths)]
        with _sequences(self.model, starts if packed else None):
            output = self.model(input_ids=torch.tensor(rows), **options)
        if self.labels is not None:
            return list(output.logits.float())
        states = output.last_hidden_state
        parts = [states[0, a:b] for a, b in itertools.pairwise(starts)] if packed else list(states)
        return [
            _pooled(part, params.pooling) for part, (_, params) in zip(parts, requests, strict=True)
        ]

    def _can_pack(self) -> bool:
        """Return whether texts in one row get the vectors that each gets alone."""
        draw = torch.Generator().manual_seed(0)
        window = getattr(self.model.config, "sliding_window", None) or 0
        lengths = (*_PROBE, window + 9) if window <= _WIDEST else _PROBE
        least = min(8, self.vocab_size - 1)
        texts = [
            torch.randint(least, self.vocab_size, (min(n, self.max_model_len),), generator=draw)
            for n in lengths
        ]
        requests = [(text.tolist(), PoolingParams("mean")) for text in texts]
        try:
            with torch.inference_mode():
                alone = torch.stack([self._vectors([one], False)[0] for one in requests])
                together = torch.stack(self._vectors(requests, True))
        except (
            RuntimeError,
            TypeError,
            ValueError,
            AttributeError,
            IndexError,
            IpexError,
        ) as error:
            log.info("texts of unlike length do not run together: %s", error)
            return False
        apart = (alone - together).norm() / alone.norm().clamp_min(1e-12)
        return bool(apart <= _TOLERANCE.get(self._dtype, 1e-3))

    def stats(self) -> EngineStats:
        """Return the numbers of this moment, as an engine with a cache has them."""
        counts = self._counts
        return EngineStats(
            running=0,
            waiting=len(self._waiting),
            blocks=0,
            blocks_held=0,
            steps=counts["steps"],
            finished=counts["finished"],
            cancelled=counts["cancelled"],
            failed=counts["failed"],
            preemptions=0,
            evictions=0,
            prompt_tokens=counts["prompt"],
            cached_tokens=0,
            generated_tokens=0,
        )


def _pooled(states: Tensor, pooling: Pooling) -> Tensor:
    """Return one vector for the states ``[T, H]`` of a text."""
    if pooling == "mean":
        return states.float().mean(0)
    return states[-1 if pooling == "last" else 0].float()


def _arguments(model: Any) -> Any:
    return inspect.signature(model.forward).parameters


def _offset(model: Any) -> int:
    """Return the position of the first token: models of RoBERTa's kind count from behind the padding token."""
    embeddings = getattr(model.base_model, "embeddings", None)
    counts = hasattr(embeddings, "create_position_ids_from_input_ids")
    return int(model.config.pad_token_id) + 1 if counts else 0


# -- Several sequences in one row ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _sequences(model: Any, starts: list[int] | None) -> Iterator[None]:
    """Keep sequences in one row apart: in attention, and where a classifier takes the first token of each."""
    if starts is None:
        yield
        return
    _register()
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    changed = [
        (config, config._attn_implementation_internal)
        for config in configs.values()
        if hasattr(config, "_attn_implementation_internal")
    ]
    base = model.base_model
    hook = None
    if base is not model:
        first = torch.tensor(starts[:-1])

        def firsts(module: Any, inputs: Any, output: Any) -> Any:
            output.last_hidden_state = output.last_hidden_state[0, first].unsqueeze(1)
            pooler = getattr(module, "pooler", None)
            if pooler is not None:
                output.pooler_output = pooler(output.last_hidden_state)
            return output

        hook = base.register_forward_hook(firsts)
    _pack.starts = torch.tensor(starts, dtype=torch.int32)
    for config, _ in changed:
        config._attn_implementation_internal = _NAME
    try:
        yield
    finally:
        for config, name in changed:
            config._attn_implementation_internal = name
        if hook is not None:
            hook.remove()
        _pack.starts = None


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention ``[1, heads, T, D]`` within each sequence, as transformers asks for it."""
    foreign = ("position_bias", "s_aux", "cache")
    given = [name for name in foreign if others.get(name) is not None]
    if given or attention_mask is not None:
        got = ", ".join(given) or "a mask"
        raise NotImplementedError(f"attention of packed texts must have none of these, got {got}")
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    width = others.get("sliding_window")
    left = -1 if width is None else int(width) - 1
    right = -1 if causal else left
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = torch.empty(q.shape, dtype=q.dtype)
    starts = _pack.starts
    longest = int((starts[1:] - starts[:-1]).max())
    torch.ops.ipex.varlen_attention(
        *(q, k, v, out, starts, starts, None, longest, longest),
        *(0.0, float(scaling or 0.0), False, causal, False, left, right, float(softcap or -1.0)),
    )
    return out.unsqueeze(0), None
