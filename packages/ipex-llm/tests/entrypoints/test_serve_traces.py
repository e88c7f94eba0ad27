# SPDX-License-Identifier: Apache-2.0
"""Spans of requests, with OpenTelemetry's SDK; and without it."""

from __future__ import annotations

import importlib.util
import sys

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from entrypoints.test_serve import GREEDY, Server
from fake_runner import FakeRunner

from ipex_core.errors import MissingComponentError
from ipex_llm.entrypoints.openai.tracing import Tracer, check_sdk

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_spans():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import SpanKind, StatusCode

    exporter = InMemorySpanExporter()
    runner = FakeRunner()
    runner.poison = {63: float("nan")}
    server = Server(runner, traces=Tracer(exporter=exporter))

    @server
    async def _(client):
        path = "/v1/completions"
        body = {**GREEDY, "prompt": "ABC", "top_p": 0.5}
        headers = {"traceparent": PARENT, "x-request-id": "mine"}
        answer = await client.post(path, json={**body, "n": 2}, headers=headers)
        for _ in range(2):
            await client.post(path, json={**body, "stream": True})
        await client.post("/v1/responses", json={"input": "A", "max_output_tokens": 4})
        for stream in (False, True):
            failed = await client.post(path, json={**body, "prompt": chr(95), "stream": stream})
        assert "must be finite" in failed.text
        assert (await client.post(path, json={**body, "n": -1})).status_code == 400
        whole, *streams, respond, error, late = exporter.get_finished_spans()
        for span in (whole, *streams, respond, error, late):
            assert span.name == "llm_request" and span.kind == SpanKind.SERVER
            assert span.attributes["gen_ai.response.model"] == "toy"
        found = dict(whole.attributes)
        times = ("time_to_first_token", "time_in_queue", "e2e")
        first, queue, all_of_it = (found.pop(f"gen_ai.latency.{name}") for name in times)
        assert 0 <= queue <= first <= all_of_it
        assert found == {
            "gen_ai.request.id": answer.json()["id"],
            "gen_ai.request.max_tokens": 8,
            "gen_ai.request.n": 2,
            "gen_ai.request.temperature": 0,
            "gen_ai.request.top_p": 0.5,
            "gen_ai.response.model": "toy",
            "gen_ai.usage.prompt_tokens": 3,
            "gen_ai.usage.completion_tokens": 16,
            "gen_ai.usage.num_sequences": 2,
            "http.request.header.x_request_id": "mine",
        }
        assert f"{whole.context.trace_id:032x}" == PARENT.split("-")[1]
        assert f"{whole.parent.span_id:016x}" == PARENT.split("-")[2]
        assert all(span.parent is None for span in (*streams, respond))
        assert [span.attributes["gen_ai.usage.completion_tokens"] for span in streams] == [8, 8]
        assert respond.attributes["gen_ai.usage.completion_tokens"] == 4
        assert respond.attributes["gen_ai.request.id"].startswith("resp_")
        for span in (error, late):
            assert span.status.status_code is StatusCode.ERROR
            assert "must be finite" in span.status.description
            assert span.attributes["error.type"] == "ApiError"


def test_without_the_sdk(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    for work in (check_sdk, Tracer):
        with pytest.raises(MissingComponentError, match=r"pip install 'ipex-llm\[traces\]'"):
            work()


def test_a_protocol_that_there_is_not(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "smoke")
    with pytest.raises(ValueError, match=r"one of grpc, http/protobuf, got 'smoke'"):
        check_sdk()


def test_an_exporter():
    if importlib.util.find_spec("opentelemetry") is None:
        pytest.skip("OpenTelemetry is not installed")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        Tracer("http://127.0.0.1:9/v1/traces").stop()
