# SPDX-License-Identifier: Apache-2.0
"""Adapters in the server: by the name of the model, loaded and dropped while it runs."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
pytest.importorskip("typer")

from engine.test_lora import ALL, base, peft  # noqa: E402
from entrypoints.test_serve import Server, events  # noqa: E402

import ipex_llm  # noqa: E402
from ipex_llm.engine import Engine, SamplingParams  # noqa: E402
from ipex_llm.entrypoints.cli import base_names, read_lora_options  # noqa: E402
from ipex_llm.entrypoints.openai.server import Settings, create_app  # noqa: E402
from ipex_llm.entrypoints.openai.worker import Worker  # noqa: E402

KEY = {"Authorization": "Bearer secret"}
BODY = {"temperature": 0, "max_tokens": 6, "prompt": [5, 6, 7, 8, 9]}


class Letters:
    """Token i is the character chr(32 + i)."""

    chat_template = "yes"

    def encode(self, text, add_special_tokens=True):
        return [ord(c) - 32 for c in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(32 + i) for i in ids)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return "".join(m["content"] for m in messages)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model and the folders of two adapters."""
    root = tmp_path_factory.mktemp("adapters")
    model = base()
    for seed, name in enumerate(("one", "two")):
        config = peft.LoraConfig(r=4, target_modules=ALL, task_type="CAUSAL_LM")
        wrapped = peft.get_peft_model(copy.deepcopy(model), config)
        draw = torch.Generator().manual_seed(seed)
        for key, parameter in wrapped.named_parameters():
            if ".lora_" in key:
                parameter.data = torch.randn(parameter.shape, generator=draw) * 0.5
        wrapped.peft_config["default"].base_model_name_or_path = "org/Base"
        wrapped.save_pretrained(root / name, save_embedding_layers=False)
    return ipex_llm.optimize(model), root


class Adapted(Server):
    def __init__(self, made, **settings):
        options = {"block_size": 4, "num_blocks": 64, "eos_token_ids": (), "max_loras": 2}
        self.engine = Engine(made[0], Letters(), **options)
        self.worker = Worker(self.engine)
        options = {"api_key": "secret", "runtime_lora": True, "base_names": ("x/base",)} | settings
        self.app = create_app(self.worker, Settings(name="toy", **options))


async def ask(client, path="/v1/completions", status=200, **body):
    response = await client.post(path, json=body, headers=KEY)
    assert response.status_code == status, response.text
    return response.json() if response.headers["content-type"] == "application/json" else None


def test_adapters_by_name(made):
    server = Adapted(made)
    server.engine.load_lora("one", made[1] / "one")
    server.engine.load_lora("two", made[1] / "two")
    params = SamplingParams(max_new_tokens=6)
    wanted = {
        name: server.engine.generate([BODY["prompt"]], params.replace(lora=name))[0].text
        for name in (None, "one", "two")
    }
    assert len(set(wanted.values())) == 3

    @server
    async def _(client):
        found = (await client.get("/v1/models", headers=KEY)).json()["data"]
        assert [m["id"] for m in found] == ["toy", "one", "two"]
        assert [m.get("parent") for m in found] == [None, "toy", "toy"]
        one = (await client.get("/v1/models/one", headers=KEY)).json()
        assert one == found[1] and one["max_model_len"] == 256
        names = [None, "one", "two", "one", "toy"]
        bodies = [{**BODY, **({} if name is None else {"model": name})} for name in names]
        answers = await asyncio.gather(*(ask(client, **body) for body in bodies))
        for name, answer in zip(names, answers, strict=True):
            assert answer["model"] == (name or "toy")
            assert answer["choices"][0]["text"] == wanted[None if name == "toy" else name]
        stream = await client.post(
            "/v1/completions", json={**BODY, "model": "two", "stream": True}, headers=KEY
        )
        assert {e["model"] for e in events(stream)} == {"two"}
        text = "".join(e["choices"][0]["text"] for e in events(stream))
        assert text == wanted["two"]
        messages = [{"role": "user", "content": "%&'()"}]  # the same tokens
        body = {"model": "one", "messages": messages, "max_tokens": 6, "temperature": 0}
        chat = await ask(client, "/v1/chat/completions", **body)
        assert chat["model"] == "one"
        assert chat["choices"][0]["message"]["content"] == wanted["one"].strip()
        body = {"model": "one", "input": "%&'()", "max_output_tokens": 6, "temperature": 0}
        assert (await ask(client, "/v1/responses", **body))["model"] == "one"
        error = await ask(client, status=404, **{**BODY, "model": "three"})
        assert error["error"]["param"] == "model" and "'toy', 'one'" in error["error"]["message"]
        body = {"model": "one", "input": "A"}
        error = await ask(client, "/v1/embeddings", 400, **body)
        assert error["error"]["param"] == "model" and "adapter 'one'" in error["error"]["message"]


def test_load_and_unload(made):
    server = Adapted(made)

    @server
    async def _(client):
        async def load(name, folder, status=200):
            body = {"lora_name": name, "lora_path": str(made[1] / folder)}
            return await ask(client, "/v1/load_lora_adapter", status, **body)

        async def unload(name, status=200):
            return await ask(client, "/v1/unload_lora_adapter", status, lora_name=name)

        plain = (await ask(client, **BODY))["choices"][0]["text"]
        await ask(client, status=404, **{**BODY, "model": "a"})
        await load("a", "one")
        first = (await ask(client, **{**BODY, "model": "a"}))["choices"][0]["text"]
        running = asyncio.create_task(ask(client, **{**BODY, "model": "a", "max_tokens": 100}))
        while not server.engine.stats().running:
            await asyncio.sleep(0.001)
        await unload("a")
        assert (await running)["choices"][0]["text"].startswith(first)
        await ask(client, status=404, **{**BODY, "model": "a"})
        assert (await unload("a", 404))["error"]["param"] == "lora_name"
        await load("a", "two")
        second = (await ask(client, **{**BODY, "model": "a"}))["choices"][0]["text"]
        assert len({plain, first, second}) == 3
        error = await load("a", "one", 400)
        assert error["error"]["param"] == "lora_name" and "in use" in error["error"]["message"]
        assert (await load("toy", "one", 400))["error"]["param"] == "lora_name"
        some = await asyncio.gather(
            *(
                client.post(
                    "/v1/load_lora_adapter",
                    json={"lora_name": f"n{i}", "lora_path": str(made[1] / "one")},
                    headers=KEY,
                )
                for i in range(3)
            )
        )
        assert sorted(r.status_code for r in some) == [200, 400, 400]
        assert "at most 2 adapters" in next(r.text for r in some if r.status_code == 400)
        assert (await ask(client, **BODY))["choices"][0]["text"] == plain
        add = server.engine.add_request

        def unload_and_add(*args, **options):
            server.engine.unload_lora("a")
            return add(*args, **options)

        server.engine.add_request = unload_and_add  # between the check and the start of a request
        for stream in (False, True):
            error = (await ask(client, status=404, **BODY, model="a", stream=stream))["error"]
            assert error["param"] == "model" and "unloaded" in error["message"]
            del server.engine.add_request
            await load("a", "two")
            server.engine.add_request = unload_and_add

    with pytest.raises(Exception, match="must be running"):
        asyncio.run(server.worker.call(lambda: None))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": 3, "lora_path": "x"}, "lora_name"),
        ({"lora_name": "", "lora_path": "x"}, "lora_name"),
        ({"lora_name": "a" * 201, "lora_path": "x"}, "lora_name"),
        ({"lora_name": ["a"], "lora_path": "x"}, "lora_name"),
        ({"lora_name": "a", "lora_path": None}, "lora_path"),
        ({"lora_name": "a", "lora_path": {"x": 1}}, "lora_path"),
        ({"lora_name": "a", "lora_path": ""}, "lora_path"),
        ({"lora_name": "a", "lora_path": "x" * 4097}, "lora_path"),
        ({"lora_name": "a", "lora_path": "x" * 4000}, "lora_path"),
        ({"lora_name": "a", "lora_path": "a\0b"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/nothing/here"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/dev/null"}, "lora_path"),
        ([], "body"),
    ],
)
def test_bodies_that_are_refused(made, body, field):
    @Adapted(made)
    async def _(client):
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            if path != "/v1/load_lora_adapter" and field == "lora_path":
                continue
            response = await client.post(path, json=body, headers=KEY)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == field


def test_who_may_load(made):
    with pytest.raises(ValueError, match="runtime_lora must be with an api_key"):
        Settings(name="toy", runtime_lora=True)
    body = {"lora_name": "a", "lora_path": str(made[1] / "one")}

    @Adapted(made)
    async def _(client):
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert (await client.post(path, json=body)).status_code == 401
            wrong = {"Authorization": "Bearer other"}
            assert (await client.post(path, json=body, headers=wrong)).status_code == 401

    @Adapted(made, runtime_lora=False)
    async def _(client):
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert (await client.post(path, json=body, headers=KEY)).status_code == 404

    @Adapted(made, base_names=("org/Another", "/models/Another"))
    async def _(client):
        error = (await ask(client, "/v1/load_lora_adapter", 400, **body))["error"]
        assert error["param"] == "lora_path"
        assert "one of 'org/Base'" in error["message"] and "org/Another" in error["message"]

    @Server(api_key="secret", runtime_lora=True)  # a runner of its own
    async def _(client):
        error = (await ask(client, "/v1/load_lora_adapter", 400, **body))["error"]
        assert "without modules" in error["message"]


def test_options_of_serve(tmp_path):
    assert read_lora_options(["a=x", "b=/y=z"], "toy") == {"a": "x", "b": "/y=z"}
    for values in (["a"], ["=x"], ["a="]):
        with pytest.raises(ValueError, match="--lora must be NAME=FOLDER"):
            read_lora_options(values, "toy")
    for values in (["a=x", "a=y"], ["toy=x"]):
        with pytest.raises(ValueError, match="--lora must have a name of its own"):
            read_lora_options(values, "toy")
    (tmp_path / "config.json").write_text('{"_name_or_path": "org/Base"}')
    found = base_names(tmp_path, "served")
    assert {"served", "org/Base", str(tmp_path)} <= set(found)
    assert base_names(tmp_path / "none", None) == (str(tmp_path / "none"),)
