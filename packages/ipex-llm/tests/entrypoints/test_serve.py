# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-compatible server, on a runner that checks the paged cache."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from fake_runner import CharTokenizer, FakeRunner  # noqa: E402

from ipex_llm.engine import Engine  # noqa: E402
from ipex_llm.entrypoints.openai.server import Settings, create_app  # noqa: E402
from ipex_llm.entrypoints.openai.worker import Worker  # noqa: E402


class Tokenizer(CharTokenizer):
    chat_template = "yes"

    def encode(self, text, add_special_tokens=True):
        return super().encode(text)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        if any(m["role"] == "odd" for m in messages):
            raise RuntimeError("no such role")
        return "".join(f"{m['role'][0].upper()}{m['content']}" for m in messages) + "A"


class SlowRunner(FakeRunner):
    """Stops in front of each step until it is let go on."""

    def __init__(self, **options):
        super().__init__(**options)
        self.go = threading.Event()

    def forward(self, *args):
        assert self.go.wait(20)
        return super().forward(*args)


class Server:
    def __init__(self, runner=None, tokenizer=None, max_queue=8, seqs=4, **settings):
        self.runner = runner or FakeRunner()
        engine = Engine(
            self.runner,
            tokenizer or Tokenizer(),
            block_size=4,
            num_blocks=64,
            max_num_seqs=seqs,
            eos_token_ids=(),
        )
        self.worker = Worker(engine, max_queue)
        self.app = create_app(self.worker, Settings(name="toy", **settings))

    def __call__(self, function):
        async def main():
            async with self.app.router.lifespan_context(self.app):
                transport = httpx.ASGITransport(self.app)
                async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                    await function(client)

        asyncio.run(asyncio.wait_for(main(), 60))


def text_of(runner, prompt, count):
    return Tokenizer().decode(runner.alone(Tokenizer().encode(prompt), count))


def events(response):
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines[:-1]]


GREEDY = {"model": "toy", "temperature": 0, "max_tokens": 8}


def test_completions():
    server = Server()

    @server
    async def _(client):
        body = {**GREEDY, "prompt": ["ABC", "DE"], "logprobs": 2}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200
        found = response.json()
        assert found["object"] == "text_completion" and found["model"] == "toy"
        assert [c["text"] for c in found["choices"]] == [
            text_of(server.runner, "ABC", 8),
            text_of(server.runner, "DE", 8),
        ]
        assert [c["finish_reason"] for c in found["choices"]] == ["length", "length"]
        usage = {"prompt_tokens": 5, "completion_tokens": 16, "total_tokens": 21}
        assert found["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}
        logprobs = found["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == 8
        ids = await client.post("/v1/completions", json={**GREEDY, "prompt": [33, 34, 35]})
        assert ids.json()["choices"][0]["text"] == found["choices"][0]["text"]
        default = await client.post("/v1/completions", json={"prompt": "A"})
        assert default.json()["usage"]["completion_tokens"] == 16


def test_a_request_that_fails_alone():
    runner = FakeRunner()
    runner.poison = {33: float("nan")}
    server = Server(runner)

    @server
    async def _(client):
        body = {**GREEDY, "max_tokens": 1}
        bad = await client.post("/v1/completions", json={**body, "prompt": "AB"})
        assert bad.status_code == 500
        assert "must be finite" in bad.json()["error"]["message"]
        stream = {**body, "prompt": "AB", "stream": True}
        text = (await client.post("/v1/completions", json=stream)).text
        assert "must be finite" in text and "[DONE]" not in text
        good = await client.post("/v1/completions", json={**body, "prompt": "B"})
        assert good.status_code == 200
        assert "requests_failed_total 2" in (await client.get("/metrics")).text


def test_streams_are_the_same_text():
    server = Server()

    @server
    async def _(client):
        body = {**GREEDY, "prompt": "ABC", "n": 2, "seed": 5, "temperature": 0.8}
        whole = (await client.post("/v1/completions", json=body)).json()["choices"]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = await client.post("/v1/completions", json={**body, **options})
        assert response.headers["content-type"].startswith("text/event-stream")
        texts, reasons = ["", ""], [None, None]
        *chunks, last = events(response)
        for chunk in chunks:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
        assert texts == [c["text"] for c in whole] and texts[0] != texts[1]
        assert reasons == ["length", "length"]
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 16
        assert len({chunk["id"] for chunk in chunks}) == 1


def test_chat():
    server = Server()

    @server
    async def _(client):
        messages = [
            {"role": "system", "content": "XY"},
            {"role": "user", "content": [{"type": "text", "text": "AB"}]},
        ]
        body = {**GREEDY, "messages": messages}
        response = await client.post("/v1/chat/completions", json=body)
        expected = text_of(server.runner, "SXYUABA", 8)
        (choice,) = response.json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": expected}
        body |= {"stream": True, "logprobs": True, "top_logprobs": 2}
        chunks = events(await client.post("/v1/chat/completions", json=body))
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == expected
        assert all(c["object"] == "chat.completion.chunk" for c in chunks)
        assert len(chunks[1]["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
        body = {**GREEDY, "messages": [{"role": "odd", "content": "x"}]}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400 and "no such role" in response.text


def test_stop_strings():
    server = Server()

    @server
    async def _(client):
        text = text_of(server.runner, "ABC", 20)
        stop = text[6:8]
        body = {**GREEDY, "prompt": "ABC", "max_tokens": 20, "stop": stop}
        (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
        assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "prompt: "),
        ({"prompt": ""}, 400, "at least one token"),
        ({"prompt": []}, 400, "at least one prompt"),
        ({"prompt": "A" * 300}, 400, "context"),
        ({"prompt": [99]}, 400, "ids in"),
        ({"prompt": "A", "temperature": -1}, 400, "temperature: "),
        ({"prompt": "A", "top_p": 2}, 400, "top_p: "),
        ({"prompt": "A", "max_tokens": 0}, 400, "max_tokens must be at least 1 without echo"),
        ({"prompt": "A", "max_tokens": 1000}, 400, "max_tokens must be at most 256"),
        ({"prompt": "A", "min_tokens": 99}, 400, "min_new_tokens"),
        ({"prompt": "A", "n": 17}, 400, "n: "),
        ({"prompt": ["A"] * 9, "n": 2}, 400, "at most 16 choices"),
        ({"prompt": "A", "stop": [""]}, 400, "stop must be strings that are not empty"),
        ({"prompt": "A", "logit_bias": {"64": 1}}, 400, "logit_bias must have ids in [0, 64)"),
        ({"prompt": "A", "suffix": "B"}, 400, "suffix is not supported"),
        ({"prompt": "A", "model": "other"}, 404, "'other' does not exist"),
        ({"prompt": "A" * 3000}, 413, "at most 2000 bytes"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(body, status, message, stream):
    server = Server(max_body=2000)

    @server
    async def _(client):
        response = await client.post("/v1/completions", json={**body, "stream": stream})
        assert response.status_code == status
        error = response.json()["error"]
        assert message in error["message"] and error["code"] == status
        assert server.worker.unfinished == 0
        assert (await client.post("/v1/completions", json={"prompt": "A"})).status_code == 200


def test_no_json_and_endless_bodies():
    server = Server(max_body=1000)

    @server
    async def _(client):
        response = await client.post("/v1/completions", content=b"{")
        assert response.status_code == 400

        async def endless():
            while True:
                yield b" " * 100

        response = await client.post("/v1/completions", content=endless())
        assert response.status_code == 413


def test_the_api_key():
    server = Server(api_key="secret")

    @server
    async def _(client):
        assert (await client.get("/v1/models")).status_code == 401
        for wrong in ("Bearer wrong", "secret", "Bearer sécret".encode()):
            response = await client.get("/v1/models", headers={"Authorization": wrong})
            assert response.status_code == 401
        right = {"Authorization": "Bearer secret"}
        response = await client.get("/v1/models", headers=right)
        assert [m["id"] for m in response.json()["data"]] == ["toy"]
        assert (await client.get("/v1/models/toy", headers=right)).status_code == 200
        assert (await client.get("/v1/models/none", headers=right)).status_code == 404
        assert (await client.post("/v1/completions", json={"prompt": "A"})).status_code == 401
        assert (await client.get("/health")).status_code == 200


def test_a_full_queue_is_429():
    runner = SlowRunner()
    server = Server(runner, max_queue=1, seqs=1)

    @server
    async def _(client):
        body = {**GREEDY, "prompt": "AB"}
        tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
        while server.worker.unfinished < 2:
            await asyncio.sleep(0.01)
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
        runner.go.set()
        assert [(await task).status_code for task in tasks] == [200, 200]
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        text = (await client.get("/metrics")).text
        assert "ipex_llm_requests_rejected_total 1\n" in text


async def request_and_leave(app, body, leave):
    """Send a request as a server would, and disconnect when `leave` is set."""
    sent = []
    data = json.dumps(body).encode()
    messages = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place(stream):
    class Steps(FakeRunner):
        def forward(self, *args):
            import time

            time.sleep(0.02)
            return super().forward(*args)

    server = Server(Steps())

    @server
    async def _(client):
        leave = asyncio.Event()
        body = {**GREEDY, "prompt": "AB", "max_tokens": 200, "stream": stream}
        task = asyncio.create_task(request_and_leave(server.app, body, leave))
        while server.worker.engine.stats().generated_tokens < 3:
            await asyncio.sleep(0.01)
        leave.set()
        await task
        while server.worker.engine.has_work:
            await asyncio.sleep(0.01)
        assert server.worker.unfinished == 0
        stats = server.worker.engine.stats()
        assert stats.cancelled == 1 and stats.generated_tokens < 100


def test_a_failure_of_the_engine_is_500_and_not_the_end():
    server = Server()

    @server
    async def _(client):
        server.runner.broken = True
        body = {**GREEDY, "prompt": "AB"}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 500 and "broken" not in response.text
        response = await client.post("/v1/completions", json={**body, "stream": True})
        assert "server_error" in response.text
        server.runner.broken = False
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert "ipex_llm_engine_errors_total 2\n" in (await client.get("/metrics")).text


def test_shutdown_ends_what_runs():
    runner = SlowRunner()
    server = Server(runner)

    async def main():
        context = server.app.router.lifespan_context(server.app)
        await context.__aenter__()
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {**GREEDY, "prompt": "AB"}
            task = asyncio.create_task(client.post("/v1/completions", json=body))
            while not server.worker.unfinished:
                await asyncio.sleep(0.01)
            stop = asyncio.create_task(context.__aexit__(None, None, None))
            await asyncio.sleep(0.05)
            runner.go.set()
            assert (await task).status_code == 503
            await stop
            assert (await client.get("/health")).status_code == 503
            assert (await client.post("/ping")).status_code == 503
            assert (await client.post("/v1/completions", json=body)).status_code == 503

    asyncio.run(asyncio.wait_for(main(), 30))
    assert not server.worker.alive


def test_metrics():
    server = Server()

    @server
    async def _(client):
        for _ in range(2):
            await client.post("/v1/completions", json={**GREEDY, "prompt": "ABCDEFGHI"})
        await client.get("/nothing/here")
        text = (await client.get("/metrics")).text
        for line in (
            'vllm:generation_tokens_total{model_name="toy"} 16',
            'vllm:prompt_tokens_total{model_name="toy"} 18',
            'vllm:prefix_cache_hits_total{model_name="toy"} 8',
            'vllm:num_requests_running{model_name="toy"} 0',
            'vllm:kv_cache_usage_perc{model_name="toy"} 0',
            'vllm:time_to_first_token_seconds_count{model_name="toy"} 2',
            'vllm:inter_token_latency_seconds_count{model_name="toy"} 14',
            'vllm:e2e_request_latency_seconds_bucket{model_name="toy",le="+Inf"} 2',
            'ipex_llm_http_responses_total{path="/v1/completions",status="200"} 2',
            'ipex_llm_http_responses_total{path="other",status="404"} 1',
        ):
            assert line + "\n" in text
        assert text.count("# TYPE ipex_llm_steps_total counter\n") == 1


def test_a_model_without_a_template_has_no_chat():
    tokenizer = Tokenizer()
    tokenizer.chat_template = None
    server = Server(tokenizer=tokenizer)

    @server
    async def _(client):
        body = {"messages": [{"role": "user", "content": "A"}]}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400 and "no chat template" in response.text


def test_names_of_requests_and_lines_about_them(caplog):
    server = Server(log_requests=True)

    @server
    async def _(client):
        caplog.set_level("INFO", "ipex.requests")
        for name, kept in (("abc-1.2", True), ("a b", False), ("x" * 65, False), ("", False)):
            headers = {"X-Request-Id": name}
            response = await client.post("/v1/completions", json={"prompt": "A"}, headers=headers)
            found = response.headers["x-request-id"]
            assert (found == name) == kept and 0 < len(found) <= 64
        await client.post("/v1/completions", json={})
        lines = [json.loads(r.message) for r in caplog.records if r.name == "ipex.requests"]
        assert [line["status"] for line in lines] == [200] * 4 + [400]
        assert lines[0]["request_id"] == "abc-1.2" and lines[0]["path"] == "/v1/completions"
        assert lines[0]["seconds"] >= 0 and lines[0]["bytes"] > 0
