# SPDX-License-Identifier: Apache-2.0
"""``ipex llm generate``: text from a prompt."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from ipex_core.util.console import make_console
from ipex_llm.entrypoints.cli.common import (
    Dtype,
    GroupSize,
    Model,
    Threads,
    TrustRemoteCode,
    errors,
    load_model,
    load_tokenizer,
    set_threads,
)

__all__ = ["generate"]


def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="Text, or - for standard input.", show_default=False)],
    dtype: Dtype = "bf16",
    group_size: GroupSize = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Only the most likely tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Only the most likely tokens with this probability together.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the random numbers.")] = None,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No line with the times.")] = False,
) -> None:
    """Generate text with a model folder."""
    if prompt == "-":
        prompt = sys.stdin.read()
    set_threads(threads)
    with errors():
        from ipex_llm.engine import SamplingParams

        if not prompt:
            raise ValueError("generate: prompt must have at least one character, got none")
        SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        )
        begin = time.perf_counter()
        tokenizer = load_tokenizer(model, trust_remote_code)
        inputs = _encode(tokenizer, prompt, chat)
        room = _room(model, inputs["input_ids"].shape[1])
        loaded = load_model(model, dtype, group_size, trust_remote_code=trust_remote_code)
        ready = time.perf_counter()

    import torch

    # As in the engine, the context of the model ends the output.
    options: dict[str, Any] = {
        "max_new_tokens": min(max_new_tokens, room),
        "do_sample": temperature > 0,
    }
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    if seed is not None:
        torch.manual_seed(seed)
    clock = _Clock(tokenizer if stream else None)
    with errors(), torch.inference_mode():
        output = loaded.generate(**inputs, **options, streamer=clock)
    count = output.shape[1] - inputs["input_ids"].shape[1]
    if not stream:
        print(tokenizer.decode(output[0, -count:] if count else [], skip_special_tokens=True))
    if not quiet:
        _report(inputs["input_ids"].shape[1], count, ready - begin, clock)


def _encode(tokenizer: Any, prompt: str, chat: bool) -> dict[str, Any]:
    if not chat:
        found = tokenizer(prompt, return_tensors="pt")
        return {name: found[name] for name in ("input_ids", "attention_mask")}
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("generate: the tokenizer must have a chat template for --chat, got none")
    from ipex_quant.util.safetensors import DAMAGE

    messages = [{"role": "user", "content": prompt}]
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, *DAMAGE) as error:
        got = f"{type(error).__name__}: {error}"
        raise ValueError(f"generate: the chat template must take a message, got {got}") from error
    found = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def _room(folder: Any, length: int) -> int:
    """Return how many tokens the context has left behind a prompt."""
    from ipex_quant.util.safetensors import read_config

    config = read_config(folder)
    context = config.get("max_position_embeddings") or config.get("n_positions")
    if length == 0:
        raise ValueError("generate: prompt must have at least one token, got none")
    if not isinstance(context, int):
        return sys.maxsize
    if length >= context:
        raise ValueError(
            f"generate: prompt must have fewer than {context} tokens, the context of the model, got {length}"
        )
    return context - length


class _Clock:
    """Notes when tokens come, and prints their text if it has a tokenizer; what `generate` takes as a streamer."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.start = time.perf_counter()
        self.first = self.last = 0.0
        self._prompt = True
        self._inner: Any = None
        if tokenizer is not None:
            from transformers import TextStreamer

            self._inner = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def put(self, value: Any) -> None:
        if self._inner is not None:
            self._inner.put(value)
        if not self._prompt:
            self.last = time.perf_counter()
            self.first = self.first or self.last
        self._prompt = False

    def end(self) -> None:
        if self._inner is not None:
            self._inner.end()


def _report(prompt: int, count: int, loading: float, clock: _Clock) -> None:
    text = f"loaded in {loading:.1f} s; prompt {prompt} tokens"
    if clock.first:
        text += f" in {1e3 * (clock.first - clock.start):.1f} ms"
    text += f"; {count} new"
    if count > 1 and clock.last > clock.first:
        each = (clock.last - clock.first) / (count - 1)
        text += f", {1e3 * each:.2f} ms each ({1 / each:.1f} tokens/s)"
    make_console(stderr=True).print(text, style="dim", highlight=False)
