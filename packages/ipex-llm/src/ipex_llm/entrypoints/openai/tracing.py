# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry traces of requests, with the names of spans and attributes that vLLM has; nothing without a URL."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from ipex_core.errors import MissingComponentError

__all__ = ["Trace", "Tracer", "check_sdk"]

#: Where the SDK looks for the protocol, and what there is.
_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}


def check_sdk() -> None:
    """Raise an error if spans cannot be made or sent.

    Raises:
        MissingComponentError: A package is not installed.
        ValueError: ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`` names an unknown protocol.
    """
    import importlib

    protocol = os.environ.get(_PROTOCOL, "grpc")
    if protocol not in _EXPORTERS:
        raise ValueError(f"{_PROTOCOL} must be one of {', '.join(_EXPORTERS)}, got {protocol!r}")
    try:
        for name in ("opentelemetry.sdk.trace", _EXPORTERS[protocol]):
            importlib.import_module(name)
    except ImportError as error:
        raise MissingComponentError(
            "otlp_traces_endpoint needs OpenTelemetry's SDK and its exporter:"
            f" pip install 'ipex-llm[traces]', got {error}"
        ) from error


class Tracer:
    """Makes a span for each request.

    Args:
        endpoint: URL that spans are sent to.
        exporter: What takes the spans instead, as they end; an OpenTelemetry ``SpanExporter``.

    Raises:
        MissingComponentError: See `check_sdk`.
        ValueError: See `check_sdk`.
    """

    def __init__(self, endpoint: str = "", exporter: Any = None) -> None:
        if exporter is None:
            check_sdk()
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME", "ipex-llm")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        if exporter is None:
            self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        else:
            self._provider.add_span_processor(SimpleSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ipex_llm")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> Trace:
        """Begin the span of a request.

        Args:
            headers: Of the request; ``traceparent`` tells the span that it belongs to.
            attributes: What is known; None is left out.
        """
        from opentelemetry.trace import SpanKind

        known = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(known),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in attributes.items() if value is not None},
        )
        return Trace(span)

    def stop(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()


def _exporter(endpoint: str) -> Any:
    import importlib

    module = importlib.import_module(_EXPORTERS[os.environ.get(_PROTOCOL, "grpc")])
    options = (
        {"insecure": True} if endpoint.startswith("http://") and "grpc" in module.__name__ else {}
    )
    return module.OTLPSpanExporter(endpoint=endpoint, **options)


class Trace:
    """The span of one request, which is to be ended once; nothing if it is None."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def end(self, job: Any, error: BaseException | None = None) -> None:
        """End the span.

        Args:
            job: The `Generation`.
            error: What ended it early.
        """
        if self._span is None:
            return
        now = time.monotonic()
        arrived = min(ticket.arrived for ticket in job.tickets)
        firsts = [ticket.first for ticket in job.tickets if ticket.first is not None]
        queued = [ticket.queued for ticket in job.tickets if ticket.queued is not None]
        found: dict[str, Any] = {
            "gen_ai.usage.prompt_tokens": job.prompt_tokens,
            "gen_ai.usage.completion_tokens": job.new_tokens,
            "gen_ai.usage.num_sequences": len(job.tickets),
            "gen_ai.latency.e2e": now - arrived,
        }
        if firsts:
            found["gen_ai.latency.time_to_first_token"] = min(firsts) - arrived
        if queued:
            found["gen_ai.latency.time_in_queue"] = min(queued)
        self._span.set_attributes(found)
        error = error or job.error
        if error is None:
            self._span.end()
        else:
            self.refuse(error)

    def refuse(self, error: BaseException) -> None:
        """End the span of a request that failed."""
        if self._span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", type(error).__name__)
        self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end()

    async def around(self, parts: AsyncGenerator[str, None], job: Any) -> AsyncIterator[str]:
        """Yield the parts of a streamed answer, and end the span with it."""
        try:
            async for part in parts:
                yield part
        except BaseException as error:
            self.end(job, error)
            raise
        finally:
            await parts.aclose()
        self.end(job)
