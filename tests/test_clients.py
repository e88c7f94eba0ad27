# SPDX-License-Identifier: Apache-2.0
"""Clients of other projects against `ipex llm serve`; each is skipped where it is not installed."""

from __future__ import annotations

import importlib
import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("ipex_llm")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "string", "maxLength": 4}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA},
}
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


class Live:
    """A server with a tiny model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tiny"
        code = "from ipex_llm.entrypoints.cli import app; app()"
        run = [sys.executable, "-c", code]
        subprocess.run([*run, "make-model", str(self.folder)], check=True, timeout=240)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [*run, "serve", "--model", str(self.folder), "--port", str(self.port)]
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            command, env=environment, stdout=self.log, stderr=subprocess.STDOUT
        )
        for _ in range(1200):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health"):
                    return
            except OSError:
                assert self.process.poll() is None, (folder / "log").read_text()
                time.sleep(0.2)
        raise AssertionError("the server did not start")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    if not any(map(importlib.util.find_spec, ("openai", "litellm", "lm_eval", "guidellm"))):
        pytest.skip("no client is installed")
    server = Live(tmp_path_factory.mktemp("served"))
    yield server
    server.stop()


@pytest.fixture
def client(live: Live) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=live.url, api_key="none", max_retries=0)


def test_openai_completions(client: Any) -> None:
    options = {"model": "tiny", "prompt": "One, two", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**options, logprobs=2, echo=True, n=2)
    assert whole.choices[0].text.startswith("One, two")
    assert whole.choices[0].logprobs.token_logprobs[0] is None
    assert whole.usage.completion_tokens == 16
    pieces = client.completions.create(**options, stream=True)
    text = "".join(c.text for piece in pieces for c in piece.choices)
    assert "One, two" + text == whole.choices[0].text


def test_openai_chat(client: Any) -> None:
    options = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    pieces = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    pieces = list(pieces)
    text = "".join(c.delta.content or "" for piece in pieces for c in piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage.total_tokens == whole.usage.total_tokens


def test_openai_structured_output_and_tools(client: Any) -> None:
    pytest.importorskip("llguidance")
    options = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 400}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    found = client.chat.completions.create(**options, response_format=form)
    assert json.loads(found.choices[0].message.content)["a"] in (1, 2)
    options |= {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    found = client.chat.completions.create(**options)
    (call,) = found.choices[0].message.tool_calls
    assert found.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments)["a"] in (1, 2)
    with client.chat.completions.stream(**options) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments)["a"] in (1, 2)


def test_openai_responses(client: Any) -> None:
    from openai.types.responses import Response

    options = {"model": "tiny", "input": "One", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**options)
    assert whole.usage.output_tokens <= 8
    assert Response.model_validate(whole.to_dict())  # by strict types
    with client.responses.stream(**options) as stream:
        last = [event.type for event in stream][-1]
    assert last in ("response.completed", "response.incomplete")


def test_openai_embeddings_and_errors(client: Any) -> None:
    import openai

    found = client.embeddings.create(model="tiny", input=["One", "two three"])  # asks for base64
    assert [len(entry.embedding) for entry in found.data] == [64, 64]
    assert math.fsum(x * x for x in found.data[0].embedding) == pytest.approx(1, abs=1e-3)
    with pytest.raises(openai.BadRequestError, match="dimensions must be at most 64"):
        client.embeddings.create(model="tiny", input="One", dimensions=100)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_langchain(live: Live) -> None:
    library = pytest.importorskip("langchain_openai")
    pytest.importorskip("llguidance")
    chat = library.ChatOpenAI(
        base_url=live.url, api_key="none", model="tiny", max_tokens=400, temperature=0
    )
    whole = chat.invoke("One")
    assert "".join(piece.content for piece in chat.stream("One")) == whole.content
    bound = chat.bind_tools([TOOL], tool_choice="add")
    (call,) = bound.invoke("One").tool_calls
    assert call["name"] == "add" and call["args"]["a"] in (1, 2)
    made = chat.with_structured_output({**SCHEMA, "title": "pair"}, method="json_schema")
    assert made.invoke("One")["a"] in (1, 2)
    vectors = library.OpenAIEmbeddings(
        base_url=live.url, api_key="none", model="tiny", check_embedding_ctx_length=False
    )
    assert len(vectors.embed_query("One")) == 64


@pytest.mark.filterwarnings("ignore")  # that it gives itself
def test_litellm(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    library = pytest.importorskip("litellm")
    options = {"base_url": live.url, "api_key": "none"}
    found = library.completion(
        model="hosted_vllm/tiny", messages=MESSAGES, max_tokens=8, temperature=0, **options
    )
    pieces = library.completion(
        model="hosted_vllm/tiny",
        messages=MESSAGES,
        max_tokens=8,
        temperature=0,
        stream=True,
        **options,
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == found.choices[0].message.content
    vectors = library.embedding(
        model="hosted_vllm/tiny", input=["One"], api_base=live.url, api_key="none"
    )
    assert len(vectors.data[0]["embedding"]) == 64


def test_lm_eval(live: Live, tmp_path: Path) -> None:
    """Log probabilities of a local task, over completions with echo, are the model's own."""
    library = pytest.importorskip("lm_eval")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    assert library is not None
    harness = LocalCompletionsAPI(
        base_url=f"{live.url}/completions",
        model="tiny",
        tokenizer=str(live.folder),
        num_concurrent=1,
        max_length=256,
    )
    pairs = [("One, two,", " three"), ("The capital of France", " is Paris")]
    requests = [
        Instance("loglikelihood", doc={}, arguments=pair, idx=i) for i, pair in enumerate(pairs)
    ]
    found = harness.loglikelihood(requests)
    tokenizer = transformers.AutoTokenizer.from_pretrained(live.folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(live.folder)
    for (value, greedy), (context, more) in zip(found, pairs, strict=True):
        ids = tokenizer(context + more, add_special_tokens=False, return_tensors="pt")["input_ids"]
        start = len(tokenizer.encode(context, add_special_tokens=False))
        with torch.inference_mode():
            logprobs = model(ids).logits[0].float().log_softmax(-1)
        chosen = logprobs[:-1].gather(1, ids[0, 1:, None])[start - 1 :]
        assert value == pytest.approx(float(chosen.sum()), rel=0.02)
        best = logprobs[start - 1 : -1].argmax(-1)
        assert greedy == bool((best == ids[0, start:]).all())


@pytest.mark.filterwarnings("ignore")  # of the data sets library
def test_lm_eval_task(live: Live, tmp_path: Path) -> None:
    """A task of files that lie here: choices by their log probabilities, and a text until a stop string."""
    library = pytest.importorskip("lm_eval")
    rows = [
        {"question": "One, two,", "choices": ["three", "blue"], "answer": 0},
        {"question": "The sea is", "choices": ["wide", "seven"], "answer": 1},
    ]
    data = tmp_path / "test.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choice = common | {
        "task": "local_choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    text = common | {
        "task": "local_text",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match"}],
    }
    options = {"base_url": f"{live.url}/completions", "model": "tiny"}
    options |= {"tokenizer": str(live.folder), "max_length": 256, "num_concurrent": 2}
    found = library.simple_evaluate(
        model="local-completions",
        model_args=options,
        tasks=[choice, text],
        bootstrap_iters=0,
    )
    assert {0.0, 0.5, 1.0} >= {found["results"]["local_choice"]["acc,none"]}
    answers = [sample["filtered_resps"] for sample in found["samples"]["local_text"]]
    assert len(answers) == 2 and all(isinstance(answer[0], str) for answer in answers)
    values = [v[0] for s in found["samples"]["local_choice"] for v in s["filtered_resps"]]
    assert len(values) == 4 and all(value < 0 for value in values)


def test_guidellm(live: Live, tmp_path: Path) -> None:
    pytest.importorskip("guidellm")
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={live.url[:-3]}"]
    command += ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={live.folder}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"]
    command += ["--output", f"kind=json,path={report}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == 3 and not benchmark["requests"]["errored"]
