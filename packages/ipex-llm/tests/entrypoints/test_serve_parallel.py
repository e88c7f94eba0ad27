# SPDX-License-Identifier: Apache-2.0
"""Several engines behind one port: routing, streams, what happens when one ends, numbers of all."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

from entrypoints.test_serve import GREEDY, events, text_of  # noqa: E402
from entrypoints.test_serve_security import error_of, until  # noqa: E402
from fake_runner import FakeRunner  # noqa: E402

from ipex_core.kernels import machine  # noqa: E402
from ipex_llm.entrypoints.openai.engines import EngineProcess, Engines, Place, places  # noqa: E402
from ipex_llm.entrypoints.openai.guard import Guard  # noqa: E402
from ipex_llm.entrypoints.openai.router import (  # noqa: E402
    Prefixes,
    Router,
    joined_metrics,
    prefix_digests,
)
from ipex_llm.entrypoints.openai.worker import Metrics  # noqa: E402

TESTS = Path(__file__).parents[1]
STUB = (sys.executable, str(TESTS / "engine_stub.py"))


class Front:
    """A router with two engines."""

    def __init__(self, command=STUB):
        self.engines = Engines([Place((), 1)] * 2, [], command)
        metrics = Metrics()
        self.router = Router(self.engines, metrics)
        self.app = Guard(self.router, 1 << 20, metrics, api_key="key")
        self.lifespan = []

    async def live(self):
        messages = asyncio.Queue()
        await messages.put({"type": "lifespan.startup"})

        async def send(message):
            self.lifespan.append(message["type"].removeprefix("lifespan."))

        task = asyncio.ensure_future(self.app({"type": "lifespan"}, messages.get, send))
        await until(lambda: self.lifespan)
        return messages, task

    def __call__(self, function):
        async def main():
            messages, task = await self.live()
            try:
                headers = {"Authorization": "Bearer key"}
                transport = httpx.ASGITransport(self.app)
                options = {"transport": transport, "base_url": "http://test", "headers": headers}
                async with httpx.AsyncClient(**options, timeout=60) as client:
                    await function(client)
            finally:
                await messages.put({"type": "lifespan.shutdown"})
                await task
            assert self.lifespan == ["startup.complete", "shutdown.complete"]
            assert all(engine.process.poll() is not None for engine in self.engines.all)
            assert not Path(self.engines.all[0].socket).parent.exists()

        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", path)
            asyncio.run(asyncio.wait_for(main(), 120))


async def post(client, **body):
    return await client.post("/v1/completions", json={**GREEDY, **body})


def test_two_engines_answer_as_one():
    front = Front()
    runner = FakeRunner()

    @front
    async def _(client):
        first, second = front.engines.all
        prompts = [chr(ord("A") + i) * 5 for i in range(8)]
        found = await asyncio.gather(*[post(client, prompt=prompt) for prompt in prompts])
        for prompt, answer in zip(prompts, found, strict=True):
            assert answer.json()["choices"][0]["text"] == text_of(runner, prompt, 8)
        assert first.served == second.served == 4 and first.load == second.load == 0
        # What begins alike goes to one engine, which has it in its cache.
        before = [engine.served for engine in front.engines.all]
        long = "THE SAME LONG BEGIN OF ALL OF THESE PROMPTS. " * 3
        for i in range(4):
            assert (await post(client, prompt=long + str(i))).status_code == 200
        after = [engine.served for engine in front.engines.all]
        assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, 4]
        # Streams pass as they come, and other paths, errors and ids.
        answer = await post(client, prompt="ABC", stream=True)
        assert "".join(e["choices"][0]["text"] for e in events(answer)) == text_of(runner, "ABC", 8)
        assert answer.headers["x-request-id"] and len(answer.headers.get_list("x-request-id")) == 1
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "toy"
        answer = await client.post("/tokenize", json={"prompt": "AB"})
        assert answer.json()["tokens"] == [33, 34]
        assert error_of(await post(client, prompt="A", temperature=-1))["param"] == "temperature"
        assert (await client.get("/v1/nothing")).status_code == 404
        answer = await client.get("/health", headers={"Authorization": ""})
        assert answer.json() == {"status": "ok", "engines": ["ok", "ok"]}
        assert (await client.post("/ping", headers={"Authorization": ""})).json() == answer.json()
        assert sorted((await client.get("/version")).json()) == ["version"]
        assert (await client.get("/metrics", headers={"Authorization": ""})).status_code == 401
        text = (await client.get("/metrics")).text
        for index in (0, 1):
            assert f'vllm:generation_tokens_total{{engine="{index}",model_name="toy"}}' in text
            assert f'ipex_llm_steps_total{{engine="{index}"}}' in text
            assert f'ipex_llm_engine_up{{engine="{index}"}} 1' in text
        heads = [line for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(heads) == len(set(heads))
        assert 'ipex_llm_router_responses_total{path="/metrics",status="401"} 1' in text


def test_an_engine_that_ends():
    front = Front()

    @front
    async def _(client):
        first, second = front.engines.all
        # A client that goes away frees its place.
        body = {"prompt": "ABC", "max_tokens": 200}
        task = asyncio.ensure_future(post(client, **body))
        await until(lambda: first.load or second.load)
        task.cancel()
        await asyncio.wait({task})
        await until(lambda: not (first.load or second.load))
        calls = [post(client, **body, stream=stream) for stream in (False, True)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await until(lambda: first.load and second.load)
        await asyncio.sleep(0.3)
        old = first.process
        # Those that are started again must not take requests before the answers are seen.
        may_come_back = asyncio.Event()
        ready = front.engines._ready

        async def held(engine, given_up):
            await may_come_back.wait()
            return await ready(engine, given_up)

        front.engines._ready = held
        for engine in (first, second):
            os.kill(engine.process.pid, signal.SIGKILL)
        whole, stream = await asyncio.gather(*tasks)
        error = error_of(whole)
        assert whole.status_code == 503 and whole.headers["retry-after"] == "1"
        assert "ended while the request ran" in error["message"]
        assert error["type"] == "server_error"
        # A stream tells in its last line, unless the engine ended before its first one.
        assert stream.status_code in (200, 503) and "[DONE]" not in stream.text
        last = json.loads(stream.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert "ended while the request ran" in last["error"]["message"]
        answer = await post(client, prompt="A")
        # An engine may be seen to have ended only by this request.
        told = error_of(answer)["message"]
        assert answer.status_code == 503
        assert "an engine must be up" in told or "ended while the request ran" in told
        await until(lambda: not (first.up or second.up))
        assert (await client.get("/health")).status_code == 503
        may_come_back.set()
        await until(lambda: first.up and second.up)
        assert first.process is not old and first.restarts == second.restarts == 1
        assert (await post(client, prompt="A")).status_code == 200
        assert 'ipex_llm_engine_restarts_total{engine="0"} 1' in (await client.get("/metrics")).text


def test_an_engine_that_does_not_start():
    front = Front((sys.executable, "-c", "raise SystemExit(2)"))

    async def main():
        _, task = await front.live()
        await task
        assert front.lifespan == ["startup.failed"] and front.router.failed

    asyncio.run(asyncio.wait_for(main(), 60))


def test_adapters_reach_all_engines():
    """Without processes: of the requests to load and drop adapters."""
    asked = []

    class Engine(EngineProcess):
        async def ask(self, target, body=None, seconds=0.0):
            asked.append((self.index, target, body))
            return (404, b"{}") if b"bad" in body else (200, b'"done"')

    engines = SimpleNamespace(all=[Engine(i, Place((), None), "", True) for i in range(2)])
    router = Router(engines, Metrics())
    sent = []

    async def send(message):
        sent.append(message)

    async def post(path, **body):
        async def receive():
            return {"type": "http.request", "body": json.dumps(body).encode()}

        sent.clear()
        await router({"type": "http", "method": "POST", "path": path}, receive, send)
        return sent[0]["status"]

    async def main():
        load, drop = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
        assert await post(load, lora_name="a", lora_path="x") == 200
        assert await post(load, lora_name="bad", lora_path="x") == 404
        assert await post(load, lora_name="b", lora_path="y") == 200
        assert await post(drop, lora_name="a") == 200
        assert [index for index, *_ in asked] == [0, 1] * 4
        asked.clear()
        await engines.on_ready(engines.all[1])
        assert asked == [(1, load.encode(), b'{"lora_name": "b", "lora_path": "y"}')]
        engines.all[0].up = engines.all[1].up = False
        assert await post(load, lora_name="c", lora_path="x") == 503

    asyncio.run(main())


def test_places():
    two = [(node, (core, core + 8)) for node in (0, 1) for core in range(4 * node, 4 * node + 4)]
    found = places(cores=two)
    assert [place.cpus for place in found] == [
        (0, 1, 2, 3, 8, 9, 10, 11),
        (4, 5, 6, 7, 12, 13, 14, 15),
    ]
    assert [place.threads for place in found] == [4, 4]
    assert [place.threads for place in places(each=2, cores=two)] == [2, 2, 2, 2]
    assert [place.threads for place in places(3, cores=two)] == [2, 3, 3]
    assert [place.threads for place in places(2, cores=two, quota=3.5)] == [2, 2]
    assert [place.cpus for place in places(3, cores=two[:2])] == [(0, 8), (1, 9), (0, 8)]
    assert places(2, cores=[]) == [Place((), None)] * 2
    assert sum(len(place.cpus) for place in places()) == len(machine.affinity() or ())


def test_cores_of_a_recorded_machine(tmp_path):
    for cpu, node in enumerate((0, 0, 1, 1, 0, 0, 1, 1)):
        (tmp_path / f"sys/devices/system/node/node{node}/cpu{cpu}").mkdir(parents=True)
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    found = machine.allowed_cores(tmp_path, (0, 1, 2, 3, 4, 6))
    assert found == [(0, (0, 4)), (0, (1,)), (1, (2, 6)), (1, (3,))]
    assert machine.allowed_cores(tmp_path / "none", (3, 5)) == [(0, (3,)), (0, (5,))]


def chat(*texts):
    return json.dumps({"messages": [{"role": "user", "content": text} for text in texts]}).encode()


def test_prefixes_of_requests():
    long = "x" * 500
    first, second = prefix_digests(chat(long)), prefix_digests(chat(long, "and more"))
    assert set(first) <= set(second) and len(first) == 4
    assert not set(first) & set(prefix_digests(chat("y" * 500)))
    named = json.dumps({"model": "other", **json.loads(chat(long))}).encode()
    assert not set(first) & set(prefix_digests(named))
    for body in (b"", b"[1]", b"{", b"{}", b'{"prompt": []}', b'{"prompt": "short"}', b"[" * 9999):
        assert prefix_digests(body) == []
    assert len(prefix_digests(json.dumps({"prompt": list(range(1000))}).encode())) == 7


def test_the_engine_of_a_prefix_unless_it_has_too_much_to_do():
    engines = [EngineProcess(i, Place((), None), "") for i in range(3)]
    known = Prefixes()
    assert known.choose([b"b", b"a"], engines) is engines[0]
    engines[0].load = 4
    assert known.choose([b"c", b"a"], engines) is engines[0]
    engines[0].load = 5
    assert known.choose([b"c", b"a"], engines) is engines[1]
    engines[1].load = 1
    assert known.choose([b"c", b"a"], engines) is engines[1]
    assert known.choose([], engines) is engines[2]
    known.forget(1)
    engines[0].load = 0
    engines[1].load = 0
    engines[0].served = 1
    assert known.choose([b"c", b"a"], engines[:2]) is engines[0]


def test_metrics_of_several_engines():
    text = '# HELP a A.\n# TYPE a gauge\na 1\n# HELP b B.\n# TYPE b counter\nb{c="d"} 2\n'
    assert joined_metrics([(0, text), (1, text)]) == (
        '# HELP a A.\n# TYPE a gauge\na{engine="0"} 1\na{engine="1"} 1\n'
        '# HELP b B.\n# TYPE b counter\nb{engine="0",c="d"} 2\nb{engine="1",c="d"} 2\n'
    )
    assert joined_metrics([]) == ""


def test_arguments_of_engines(tmp_path, monkeypatch):
    testing = pytest.importorskip("typer.testing")
    from ipex_llm.entrypoints import cli
    from ipex_llm.entrypoints.cli import parallel

    found = []
    monkeypatch.setattr(cli, "serve_parallel", lambda ctx: found.append(parallel.arguments_of(ctx)))
    command = ["serve", "--model", str(tmp_path), "--data-parallel", "2", "--port", "9", "--name"]
    command += ["x", "--max-queue", "7", "--log-requests", "--allowed-host", "h", "--dtype", "fp32"]
    run = testing.CliRunner().invoke
    assert run(cli.app, [*command, "--trust-remote-code"]).exit_code == 0
    (options,) = found
    pairs = {tuple(options[at : at + 2]) for at in range(len(options))}
    assert {("--model", str(tmp_path)), ("--name", "x"), ("--max-queue", "7")} <= pairs
    assert "--trust-remote-code" in options and ("--dtype", "fp32") in pairs
    assert not {"--data-parallel", "--port", "--log-requests", "--allowed-host"} & set(options)
    assert run(cli.app, [*command[:4], "many"]).exit_code == 2
    assert run(cli.app, [*command[:4], "0"]).exit_code == 2
