# SPDX-License-Identifier: Apache-2.0
"""A server of a model with recurrent layers: requests that run at the same time keep their states apart."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from families import VOCAB
from recurrent_models import NAMES, build

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from entrypoints.test_serve import events
from entrypoints.test_serve_fields import ask, serve, text_of

import ipex_llm
from ipex_llm.model_loader.make import make_tokenizer

needs_models = pytest.mark.skipif(not NAMES, reason="transformers 4 has other caches of states")
COUNT = 16


@needs_models
@pytest.mark.parametrize("name", [n for n in NAMES if n in ("qwen3_next", "lfm2", "falcon_h1")])
def test_streams_at_the_same_time_are_greedy(name: str) -> None:
    model, tokenizer = build(name), make_tokenizer()
    fast = ipex_llm.optimize(build(name), dtype=torch.float32)
    generator = torch.Generator().manual_seed(8)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (21, 6)]
    want = []
    for prompt in prompts:
        with torch.no_grad():
            ids = model.generate(
                torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, pad_token_id=0
            )
        want.append(tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True))
    server = serve((model, fast, tokenizer), max_num_seqs=2, max_tokens_per_step=8)
    runner = server.worker.engine.runner
    batches: list[int] = []
    forward = runner.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        batches.append(len(kwargs["state_rows"]))
        return forward(*args, **kwargs)

    runner.forward = counted

    @server
    async def _(client: Any) -> None:
        body = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
        for _ in range(2):  # the second time in rows that others had
            streams = [
                client.post("/v1/completions", json={**body, "prompt": one, "stream": True})
                for one in prompts
            ]
            assert [text_of(events(found)) for found in await asyncio.gather(*streams)] == want
        whole = await ask(client, **body, prompt=prompts[0])
        assert whole["choices"][0]["text"] == want[0]
        assert not whole["usage"].get("prompt_tokens_details", {}).get("cached_tokens")

    assert batches.count(2) >= COUNT
