# SPDX-License-Identifier: Apache-2.0
"""The server and clients that do not mean well; those that need a socket talk to uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

from entrypoints.test_serve import GREEDY, Server, SlowRunner, Tokenizer, events, text_of  # noqa: E402
from fake_runner import FakeRunner  # noqa: E402

from ipex_llm import __version__  # noqa: E402
from ipex_llm.engine import SamplingParams  # noqa: E402
from ipex_llm.entrypoints.openai.texts import CHARACTERS_PER_TOKEN  # noqa: E402
from ipex_llm.entrypoints.openai.worker import TOKENIZERS, Prompt  # noqa: E402

JSON = {"Content-Type": "application/json"}


def error_of(response):
    """Return the error of an answer, after a check of its form."""
    assert response.headers["content-type"] == "application/json"
    found = response.json()
    assert list(found) == ["error"]
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["code"] == response.status_code
    return found["error"]


# -- tokenizing ---------------------------------------------------------------------------------------------------


class BlockingTokenizer(Tokenizer):
    """Does not come back from a prompt that begins with Z until it is let go."""

    def __init__(self):
        self.go = threading.Event()
        self.encoded = []

    def encode(self, text, add_special_tokens=True):
        self.encoded.append(text)
        if text.startswith("Z"):
            assert self.go.wait(30)
        return super().encode(text)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_streams_go_on_while_prompts_are_tokenized():
    tokenizer = BlockingTokenizer()
    server = Server(tokenizer=tokenizer)

    @server
    async def _(client):
        long = {**GREEDY, "prompt": "Z" * 8}
        tasks = [asyncio.create_task(client.post("/v1/completions", json=long))]
        await until(lambda: len(tokenizer.encoded) == 1)
        # Another request begins, streams and ends meanwhile.
        body = {**GREEDY, "prompt": "ABC", "stream": True}
        chunks = events(await client.post("/v1/completions", json=body))
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == text_of(server.runner, "ABC", 8)
        assert not tasks[0].done() and (await client.get("/health")).status_code == 200
        tokenizer.go.set()
        assert (await tasks[0]).json()["choices"][0]["text"] == text_of(server.runner, "Z" * 8, 8)


def test_the_threads_that_tokenize_are_few_and_cancelled_prompts_cost_nothing():
    tokenizer = BlockingTokenizer()
    server = Server(tokenizer=tokenizer, max_queue=4, seqs=4)

    @server
    async def _(client):
        def prompt(text):
            return lambda: Prompt(tokenizer.encode(text))

        one = [SamplingParams(max_new_tokens=2)]
        numbers = range(TOKENIZERS + 3)
        found = [server.worker.submit([(prompt(f"Z{i}"), one)])[0] for i in numbers]
        await until(lambda: len(tokenizer.encoded) == TOKENIZERS)
        for ticket in found[TOKENIZERS:]:
            server.worker.cancel(ticket)
        last = server.worker.submit([(prompt("A"), one)])[0]
        tokenizer.go.set()
        await asyncio.wait_for(last.events.get(), 20)
        assert sorted(tokenizer.encoded) == ["A", *(f"Z{i}" for i in range(TOKENIZERS))]


def test_a_prompt_of_several_choices_is_tokenized_once():
    tokenizer = BlockingTokenizer()
    server = Server(tokenizer=tokenizer)

    @server
    async def _(client):
        response = await client.post("/v1/completions", json={**GREEDY, "prompt": "AB", "n": 4})
        assert len(response.json()["choices"]) == 4 and tokenizer.encoded == ["AB"]


def test_long_prompts_are_refused_before_they_are_tokenized():
    tokenizer = BlockingTokenizer()
    most = 256 * CHARACTERS_PER_TOKEN
    for server, limit in (
        (Server(tokenizer=tokenizer), most),
        (Server(tokenizer=tokenizer, max_prompt_characters=20), 20),
    ):

        @server
        async def _(client, limit=limit):
            texts = ["A" * (limit + 1), ["A", "A" * (limit + 1)]]
            bodies = [("/v1/completions", {"prompt": text}) for text in texts]
            messages = [{"role": "user", "content": "A" * (limit // 2)}] * 2
            bodies.append(("/v1/chat/completions", {"messages": messages}))
            for path, body in bodies:
                error = error_of(await client.post(path, json=body))
                assert f"at most {limit} characters" in error["message"]
            error = error_of(await client.post("/v1/completions", json={"prompt": [1] * 256}))
            assert "fewer than 256 tokens" in error["message"]
            body = {"messages": [{"role": "", "content": ""}] * 256}
            error = error_of(await client.post("/v1/chat/completions", json=body))
            assert "fewer than 256 tokens" in error["message"]

    assert not tokenizer.encoded


def test_a_template_that_makes_much_of_little():
    class Wordy(Tokenizer):
        def apply_chat_template(self, messages, tokenize, add_generation_prompt):
            return "A" * 100_000

        def encode(self, text, add_special_tokens=True):
            raise AssertionError("tokenized")

    server = Server(tokenizer=Wordy())

    @server
    async def _(client):
        body = {"messages": [{"role": "user", "content": "A"}]}
        error = error_of(await client.post("/v1/chat/completions", json=body))
        assert "messages in the chat template must have at most" in error["message"]


def test_a_tokenizer_that_panics_fails_its_request_alone():
    class Panic(BaseException):  # as pyo3's is
        pass

    class Broken(Tokenizer):
        def encode(self, text, add_special_tokens=True):
            if text.startswith("Z"):
                raise Panic("/some/path/inside")
            return super().encode(text)

    server = Server(tokenizer=Broken())

    @server
    async def _(client):
        response = await client.post("/v1/completions", json={"prompt": "Z"})
        assert response.status_code == 500 and "/some/path" not in response.text
        error_of(response)
        assert server.worker.unfinished == 0
        assert (await client.post("/v1/completions", json={"prompt": "A"})).status_code == 200


def test_streams_go_on_while_large_bodies_are_read(monkeypatch):
    """A body of a megabyte takes 0.3 s: one at a time, and not on the event loop."""
    from ipex_llm.entrypoints.openai import protocol

    go, begun, parse = threading.Event(), [], protocol.parse_body

    def slow(kind, data):
        if len(data) > 100_000:
            begun.append(threading.current_thread())
            assert go.wait(30)
        return parse(kind, data)

    monkeypatch.setattr(protocol, "parse_body", slow)
    server = Server()

    @server
    async def _(client):
        large = {**GREEDY, "prompt": "A", "user": [{"a": 1}] * 20_000}
        chat = {**GREEDY, "messages": [{"role": "u", "content": "A"}], "user": "x" * 200_000}
        tasks = [
            asyncio.create_task(client.post(path, json=body))
            for path, body in (
                ("/v1/completions", large),
                ("/v1/chat/completions", chat),
                ("/v1/completions", large),
            )
        ]
        await until(lambda: begun)
        for stream in (False, True):
            body = {**GREEDY, "prompt": "ABC", "stream": stream}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert len(begun) == 1 and not any(task.done() for task in tasks)
        go.set()
        assert [(await task).status_code for task in tasks] == [200, 200, 200]
        assert len(begun) == 3 and threading.main_thread() not in begun


def test_large_bodies_leave_time_to_the_streams(monkeypatch):
    """Three clients that send one after the other kept a thread busy; an error must wait, too."""
    from ipex_llm.entrypoints.openai import protocol

    times, parse = [], protocol.parse_body

    def slow(kind, data):
        times.append(time.monotonic())
        time.sleep(0.03)
        times.append(time.monotonic())
        return parse(kind, data)

    monkeypatch.setattr(protocol, "parse_body", slow)
    server = Server()

    @server
    async def _(client):
        body = {"input": ["a"] * 5000}
        many = [client.post("/v1/embeddings", json=body) for _ in range(3)]
        assert [r.status_code for r in await asyncio.gather(*many)] == [400] * 3
        assert len(times) == 6 and all(times[i + 1] - times[i] > 0.08 for i in (1, 3))


def test_texts_of_alternatives_are_made_as_they_come():
    """Of all tokens at the end they took the event loop for seconds."""

    class Counting(Tokenizer):
        count = 0

        def decode(self, ids, skip_special_tokens=True):
            # The engine's thread decodes, too, and may.
            self.count += threading.current_thread() is threading.main_thread()
            return super().decode(ids)

    tokenizer = Counting()
    server = Server(tokenizer=tokenizer)

    @server
    async def _(client):
        for path, body in (
            ("/v1/completions", {"prompt": "A", "logprobs": 5}),
            (
                "/v1/chat/completions",
                {
                    "messages": [{"role": "u", "content": "A"}],
                    "logprobs": True,
                    "top_logprobs": 5,
                },
            ),
        ):
            body = {**GREEDY, **body, "max_tokens": 64, "n": 3, "seed": 1}
            task = asyncio.create_task(client.post(path, json=body))
            most, before = 0, tokenizer.count
            while not task.done():
                await asyncio.sleep(0)
                most, before = max(most, tokenizer.count - before), tokenizer.count
            for choice in (await task).json()["choices"]:
                found = choice["logprobs"]
                assert len(found["tokens" if "tokens" in found else "content"]) == 64
            assert most < 64


# -- what a request may say ---------------------------------------------------------------------------------------

HALF = r'"\ud800"'  # half of a surrogate pair: valid JSON, no text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": [true, false]}', "prompt: must be text"),
        ('{"prompt": [[true]]}', "prompt: must be text"),
        ('{"prompt": ["A", 1]}', "prompt: must be text"),
        ('{"prompt": [1, "A"]}', "prompt: must be text"),
        ('{"prompt": [1.0]}', "prompt: must be text"),
        ('{"prompt": {"a": 1}}', "prompt: must be text"),
        (f'{{"prompt": {HALF}}}', "half of a surrogate pair"),
        (f'{{"prompt": ["A", {HALF}]}}', "half of a surrogate pair"),
        (
            f'{{"prompt": "A", "stop": {HALF.upper().replace("U", "u")}}}',
            "half of a surrogate pair",
        ),
        (f'{{"prompt": "A", {HALF}: 1}}', "half of a surrogate pair"),
        (json.dumps({"prompt": ["A"] * 17}), "prompt: must have at most 16 prompts, got 17"),
        (json.dumps({"prompt": [[1]] * 17}), "at most 16 prompts, got 17"),
        ('{"prompt": [-1]}', "ids in"),
        ('{"prompt": [9223372036854775808]}', "ids in"),
        ('{"prompt": "A", "repetition_penalty": 1e-300}', "repetition_penalty: "),
        ('{"prompt": "A", "repetition_penalty": 1e300}', "repetition_penalty: "),
        ('{"prompt": "A", "temperature": NaN}', "numbers must be finite"),
        ('{"prompt": "A", "temperature": -Infinity}', "numbers must be finite"),
        ('{"prompt": "A", "temperature": 1e999}', "temperature: "),
        ('{"prompt": "A", "presence_penalty": 1e999}', "presence_penalty: "),
        ('{"prompt": "A", "unknown": [-1e999]}', "finite numbers, got -1e999"),
        ('{"prompt": "A", "temperature": true}', "temperature: "),
        ('{"prompt": "A", "temperature": "1"}', "temperature: "),
        ('{"prompt": "A", "max_tokens": true}', "max_tokens: "),
        ('{"prompt": "A", "max_tokens": 0}', "max_tokens must be at least 1"),
        ('{"prompt": "A", "max_tokens": -2}', "max_tokens: "),
        ('{"prompt": "A", "max_tokens": 1.5}', "max_tokens: "),
        (
            '{"prompt": "A", "max_tokens": 99999999999999999999999}',
            "max_tokens must be at most 256",
        ),
        ('{"prompt": "A", "n": true}', "n: "),
        ('{"prompt": "A", "n": 1000000}', "n: "),
        ('{"prompt": "A", "best_of": 1000000}', "best_of is not supported"),
        ('{"prompt": "A", "logprobs": 51}', "logprobs: "),
        ('{"prompt": "A", "stream": "yes"}', "stream: "),
        (json.dumps({"prompt": "A", "stop": ["x"] * 17}), "stop"),
        ('{"prompt": "A", "stop": 5}', "stop"),
        ('{"prompt": "A", "stop": "%s"}' % ("x" * 1001), "stop must have at most 1000 characters"),
        ('{"prompt": "A", "stop_token_ids": %s}' % ([1] * 1001), "stop_token_ids: "),
        ('{"prompt": "A", "stop_token_ids": [true]}', "stop_token_ids"),
        ('{"prompt": "A", "seed": 99999999999999999999999}', "seed must be"),
        ('{"prompt": "A", "seed": -9223372036854775809}', "seed must be"),
        ('{"prompt": "A", "top_k": 99999999999}', "top_k must be"),
        ('{"prompt": "A", "seed": %s}' % ("9" * 4000), "seed must be"),
        ('{"prompt": "A", "max_tokens": %s}' % ("9" * 4000), "max_tokens must be at most 256"),
        ('{"prompt": "A", "min_tokens": %s}' % ("9" * 4000), "min_new_tokens must be"),
        ('{"prompt": "A", "logit_bias": {"64": 1}}', "logit_bias must have ids in [0, 64)"),
        ('{"prompt": "A", "logit_bias": {"-1": 1}}', "logit_bias: must have ids"),
        ('{"prompt": "A", "logit_bias": {"a": 1}}', "logit_bias: must have ids"),
        ('{"prompt": "A", "logit_bias": {"%s": 1}}' % ("9" * 5000), "logit_bias: must have ids"),
        ('{"prompt": "A", "logit_bias": {"1": 101}}', "logit_bias: must have numbers"),
        ('{"prompt": "A", "logit_bias": {"1": 1e999}}', "logit_bias: must have numbers"),
        ('{"prompt": "A", "logit_bias": {"1": true}}', "logit_bias: "),
        ('{"prompt": "A", "logit_bias": [1]}', "logit_bias: "),
        (
            json.dumps({"prompt": "A", "logit_bias": {str(i): 1 for i in range(5000)}}),
            "logit_bias: must have at most 1024 tokens, got 5000",
        ),
        ('{"prompt": "A", "echo": 1}', "echo: "),
        ('{"prompt": "A", "include_stop_str_in_output": "a"}', "include_stop_str_in_output: "),
        ('{"prompt": "A", "stream_options": [1]}', "stream_options: "),
        ('{"prompt": "A", "prompt": "B"}', "each name must be there once"),
        ('{"prompt": "A", "x": {"a": 1, "a": 2}}', "each name must be there once"),
        (f'{{"prompt": {"[" * 20000}1{"]" * 20000}}}', "nested"),
        ('{"prompt": %s}' % ("9" * 5000), "body: must be JSON"),
        ('{"prompt": "A"', "body: must be JSON"),
        ('[{"prompt": "A"}]', "body: "),
        ("", "body: must be JSON"),
        (b'{"prompt": "\xff"}', "UTF-8, got the byte 0xff at 12"),
        (b"\xff\xfe{\x00}\x00", "UTF-8"),
    ],
)
def test_bodies_that_are_refused(text, message):
    server = Server()

    @server
    async def _(client):
        response = await client.post("/v1/completions", content=text, headers=JSON)
        assert response.status_code == 400
        assert message in error_of(response)["message"] and len(response.text) < 1000
        assert server.worker.unfinished == 0 and not server.runner.batches


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (json.dumps([1] * 5000), "at most 4096 messages, got 5000"),
        (json.dumps([{"role": "a", "content": [1] * 5000}]), "at most 4096 parts"),
        (json.dumps([{"role": "a", "content": [1, 1]}] * 3000), "at most 4096 parts"),
        ('[{"role": "a", "content": [{"type": "image_url"}]}]', "messages.0.content"),
        ('[{"role": "a", "content": "\\ud800"}]', "half of a surrogate pair"),
        ('[{"role": 1, "content": "a"}]', "messages.0.role"),
        ("[]", "messages: "),
        ("{}", "messages: "),
        ("[[]]", "messages.0: "),
    ],
)
def test_messages_that_are_refused(messages, message):
    """Each wrong element would be an error of its own: half a million took 20 s."""
    server = Server()

    @server
    async def _(client):
        text = f'{{"messages": {messages}}}'
        response = await client.post("/v1/chat/completions", content=text, headers=JSON)
        assert response.status_code == 400
        assert message in error_of(response)["message"] and len(response.text) < 1000


def test_the_collector_runs_again_after_a_body():
    import gc

    server = Server()

    @server
    async def _(client):
        for text in ('{"prompt": "A"}', "{"):
            await client.post("/v1/completions", content=text, headers=JSON)
            assert gc.isenabled()


def test_odd_requests_that_are_fine():
    server = Server()

    @server
    async def _(client):
        for more in (
            {"seed": -1},
            {"seed": 2**64 - 1, "temperature": 1},
            {"repetition_penalty": 0.01},
            {"repetition_penalty": 100},
            {"temperature": 1e-300},
            {"logit_bias": {}, "best_of": 1, "stop": [], "user": "x"},
        ):
            response = await client.post("/v1/completions", json={"prompt": "A", **more})
            assert response.status_code == 200, response.text
        headers = {"Content-Type": "application/json; charset=utf-8"}
        for body in ('{"prompt": "A"}', '{"prompt": "\\u0041"}'):
            response = await client.post("/v1/completions", content=body, headers=headers)
            assert response.status_code == 200
        emoji = '{"prompt": "A", "user": "\\ud83d\\ude00"}'  # a whole pair
        response = await client.post("/v1/completions", content=emoji, headers=JSON)
        assert response.status_code == 200


def test_bodies_of_pages_of_other_sites_are_refused():
    """A browser sends these types to any address without asking it first."""
    server = Server()

    @server
    async def _(client):
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data",
            None,
        ):
            headers = {} if kind is None else {"Content-Type": kind}
            body = b'{"prompt": "A"}'
            response = await client.post("/v1/completions", content=body, headers=headers)
            assert "Content-Type must be application/json" in error_of(response)["message"]
        assert not server.runner.batches


def test_what_is_not_there_is_told_as_the_api_does():
    server = Server()

    @server
    async def _(client):
        for method, path, status in (
            ("GET", "/nothing", 404),
            ("GET", "/openapi.json", 404),
            ("GET", "/docs", 404),
            ("GET", "/redoc", 404),
            ("GET", "/v1/models/", 404),
            ("GET", "/health/", 404),
            ("GET", "/v1/models/../../etc/passwd", 404),
            ("GET", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd", 404),
            ("GET", "/v1/completions", 405),
            ("DELETE", "/v1/models", 405),
            ("POST", "/health", 405),
        ):
            response = await client.request(method, path, headers={"Host": "evil.example"})
            assert response.status_code == status, path
            error = error_of(response)
            assert error["type"] == "invalid_request_error"
            assert status != 405 or response.headers["allow"]
        body = {"prompt": "A", "model": "\ud800" + "x" * 10_000}
        data = json.dumps(body).encode()
        response = await client.post("/v1/completions", content=data, headers=JSON)
        assert response.status_code in (400, 404) and len(response.text) < 1000
        error_of(response)


def test_a_mistake_of_the_server_is_told_as_the_api_does(monkeypatch):
    server = Server()

    @server
    async def _(client):
        def broken(*args):
            raise KeyError("/a/path/of/the/server")

        monkeypatch.setattr("ipex_llm.entrypoints.openai.server.Reply.whole", broken)
        response = await client.post("/v1/completions", json={"prompt": "A"})
        assert response.status_code == 500 and "/a/path" not in response.text
        assert error_of(response)["type"] == "server_error"


# -- keys and hosts -----------------------------------------------------------------------------------------------


def test_keys_are_compared_as_utf_8():
    server = Server(api_key="schlüssel-日本")

    @server
    async def _(client):
        right = "Bearer schlüssel-日本".encode()
        response = await client.get("/v1/models", headers={"Authorization": right})
        assert response.status_code == 200
        for wrong in (b"Bearer ", b"Bearer", b"", b"Basic " + right[7:], right[:-1], right + b"x"):
            response = await client.get("/v1/models", headers={"Authorization": wrong})
            assert response.status_code == 401
            assert error_of(response)["type"] == "authentication_error"
        twice = [("Authorization", right), ("Authorization", b"Bearer other")]
        assert (await client.get("/v1/models", headers=twice)).status_code == 401


def test_nothing_but_health_is_open_without_the_key():
    server = Server(api_key="secret")

    @server
    async def _(client):
        for path in (
            "/metrics",
            "/version",
            "/openapi.json",
            "/docs",
            "/redoc",
            "/v1/models",
            "/nothing",
        ):
            assert error_of(await client.get(path))["code"] == 401
        assert (await client.get("/health")).status_code == 200
        for ping in (client.get("/ping"), client.post("/ping", content=b"{}")):
            assert (await ping).json() == {"status": "ok"}
        right = {"Authorization": "bearer secret"}
        version = (await client.get("/version", headers=right)).json()
        assert version == {"version": __version__}
        assert "ipex_llm_steps_total" in (await client.get("/metrics", headers=right)).text
        assert (await client.get("/openapi.json", headers=right)).status_code == 404


def test_the_key_is_checked_before_the_body():
    server = Server(api_key="secret", max_body=1 << 20)

    @server
    async def _(client):
        taken = 0

        async def endless():
            nonlocal taken
            while True:
                taken += 1
                yield b" " * 1000

        response = await client.post("/v1/completions", content=endless(), headers=JSON)
        assert response.status_code == 401 and taken == 0
        assert response.headers["connection"] == "close"


def test_a_client_that_asks_before_it_sends_is_not_told_to_go_on():
    async def main():
        async with Live(Server(api_key="secret")) as live:
            ask = HEAD + b"Expect: 100-continue\r\nContent-Length: 15\r\n"
            ((status, headers, body),) = answers(await live.talk(ask + b"\r\n"))
            assert status == 401 and headers["connection"] == "close"
            assert json.loads(body)["error"]["code"] == 401
            right = (
                ask + b'Authorization: Bearer secret\r\nConnection: close\r\n\r\n{"prompt": "A"}'
            )
            assert (await live.talk(right)).startswith(b"HTTP/1.1 100 ")

    run(main)


def test_names_of_other_hosts():
    server = Server(hosts=("localhost", "127.0.0.1", "::1"))

    @server
    async def _(client):
        for host, status in (
            ("localhost", 200),
            ("LOCALHOST:8000", 200),
            ("127.0.0.1:80", 200),
            ("[::1]:8000", 200),
            ("evil.example", 403),
            ("localhost.evil.example", 403),
            ("127.0.0.1.evil.example:8000", 403),
        ):
            response = await client.get("/v1/models", headers={"Host": host})
            assert response.status_code == status, host
            assert status == 200 or "--allowed-host" in error_of(response)["message"]


# -- sockets ------------------------------------------------------------------------------------------------------


class Live:
    """A server behind uvicorn, as the command starts it."""

    def __init__(self, server, timeout=30.0, grace=30):
        import uvicorn

        from ipex_llm.entrypoints.openai.guard import protocol

        config = uvicorn.Config(
            server.app,
            log_config=None,
            timeout_graceful_shutdown=grace,
            http=protocol(timeout),
            ws="none",
            lifespan="on",
        )
        self.server = uvicorn.Server(config)
        self.socket = socket.create_server(("127.0.0.1", 0))

    async def __aenter__(self):
        self.task = asyncio.create_task(self.server.serve(sockets=[self.socket]))
        await until(lambda: self.server.started or self.task.done())
        return self

    async def __aexit__(self, *_):
        self.server.should_exit = True
        await self.task

    async def connect(self):
        return await asyncio.open_connection(*self.socket.getsockname())

    async def talk(self, *parts):
        """Send something and return all that comes until the server closes the connection."""
        reader, writer = await self.connect()
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)
        try:
            return await reader.read()
        finally:
            writer.close()


def run(main):
    asyncio.run(asyncio.wait_for(main(), 60))


def answers(data):
    """Return (status, headers, body) of each answer on a connection."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", len(data)))
        found.append((int(first.split()[1]), headers, data[:length]))
        data = data[length:]
    return found


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: x\r\n",
        HEAD + b"Content-Length: 100\r\n\r\n{",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5000\r\n{",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
    ],
    ids=["nothing", "headers", "body", "chunks", "ignored_body"],
)
def test_what_does_not_come_to_its_end_is_closed(start):
    """Also if a byte comes now and then."""

    async def main():
        server = Server(request_timeout=0.3)
        async with Live(server, timeout=0.3) as live:
            reader, writer = await live.connect()
            writer.write(start)
            read = asyncio.create_task(reader.read())
            while not read.done():
                if start:
                    writer.write(b" " if b"\r\n\r\n" in start and b"chunked" not in start else b"1")
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                await asyncio.sleep(0.05)
            found = []
            with contextlib.suppress(ConnectionError):
                found = answers(read.result())
            if b"POST" in start or start.endswith(b"x\r\n"):
                status, headers, body = found[0]
                assert status == 408 and headers["connection"] == "close"
                assert json.loads(body)["error"]["code"] == 408
            writer.close()

    run(main)


def test_a_client_that_takes_nothing_is_let_go():
    """Its request ends, and its place in the batch is free again."""

    class Wordy(Tokenizer):
        def decode(self, ids, skip_special_tokens=True):
            return super().decode(ids) * 100_000

    async def main():
        server = Server(tokenizer=Wordy(), request_timeout=0.3)
        async with Live(server, timeout=0.3) as live:
            body = json.dumps(
                {**GREEDY, "prompt": "AB", "max_tokens": 200, "stream": True}
            ).encode()
            _, writer = await live.connect()
            writer.transport.pause_reading()
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: live.server.server_state.tasks)
            await until(lambda: not live.server.server_state.tasks)
            assert server.worker.unfinished == 0
            await until(lambda: not server.worker.engine.has_work)
            assert server.worker.engine.stats().blocks_held == 0
            writer.close()

    run(main)


def test_bytes_that_are_no_request():
    async def main():
        async with Live(Server(max_body=1000)) as live:
            for data in (
                b"\x16\x03\x01\x02\x00\x01\x00",
                b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
                b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
                b"GET /health HTTP/1.1\r\n\r\n",
                HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
                HEAD + b"Content-Length: -1\r\n\r\n",
                HEAD + b"Content-Length: 1_0\r\n\r\n",
                HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
                HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
                HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
            ):
                ((status, headers, body),) = answers(await live.talk(data))
                error = json.loads(body)["error"]
                assert status == error["code"] in (400, 501), data
                assert headers["connection"] == "close"
            big = b"Content-Length: " + b"9" * 19 + b"\r\n\r\n"
            ((status, _, _),) = answers(await live.talk(HEAD + big))
            assert status == 413

    run(main)


def test_a_small_request_with_a_wrong_key_keeps_its_connection():
    async def main():
        async with Live(Server(api_key="secret")) as live:
            one = HEAD + b'Content-Length: 15\r\n\r\n{"prompt": "A"}'
            last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            found = answers(await live.talk(one, one, last))
            assert [status for status, _, _ in found] == [401, 401, 200]

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_when_the_grace_is_over_the_answer_is_503(stream, caplog):
    class Steps(SlowRunner):
        first = True

        def forward(self, *args):
            if self.first and stream:  # one token is on its way
                self.first = False
                return FakeRunner.forward(self, *args)
            return super().forward(*args)

    async def main():
        runner = Steps()
        server = Server(runner)
        async with Live(server, grace=0) as live:
            body = json.dumps({**GREEDY, "prompt": "AB", "stream": stream}).encode()
            request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
            reader, writer = await live.connect()
            writer.write(request)
            found = await reader.readuntil(b"data: ") if stream else b""
            await until(lambda: server.worker.unfinished == 1)
            live.server.should_exit = True
            found += await reader.read()
            writer.close()
            runner.go.set()
        if stream:
            assert b"200 OK" in found and b"[DONE]" not in found
            last = json.loads(found[found.rindex(b"data: ") + 6 :].partition(b"\n\n")[0])
        else:
            ((status, headers, body),) = answers(found)
            assert status == 503 and headers["content-type"] == "application/json"
            last = json.loads(body)
        assert last["error"]["code"] == 503 and last["error"]["type"] == "server_error"
        assert set(last["error"]) == {"message", "type", "param", "code"}

    run(main)
    assert "Traceback" not in caplog.text and "Exception" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("what", ["event", "body"])
def test_the_end_of_the_server_is_never_lost(what, steps):
    """`asyncio.wait_for` of Python 3.11 forgets that it was cancelled when that comes together with its result."""
    from ipex_llm.entrypoints.openai.guard import within
    from ipex_llm.entrypoints.openai.server import Job

    async def main():
        items = asyncio.Queue()

        class Ticket:
            events = items

        if what == "event":
            work = Job(None, [Ticket()]).event(Ticket())
        else:
            work = within(items.get(), 10)
        task = asyncio.create_task(work)
        for _ in range(3):
            await asyncio.sleep(0)
        items.put_nowait("it")
        for _ in range(steps):
            await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            assert task.result() == "it"

    run(main)
