"""Spans of requests for OpenTelemetry (https://opentelemetry.io/docs/specs/semconv/gen-ai), where they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fw import __version__
from fw.errors import UserError
from fw.server.logs import Record

_NAMES = {
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "first_token_seconds": "gen_ai.response.time_to_first_chunk",
    "aborted": "fw.aborted",
    "batch": "fw.batch.id",
}
"""Of what is noted of a request, by the names that spans have for it; its words are not among them."""
_PATIENCE_MS = 5000
Trace = Callable[[Record, Mapping[bytes, bytes]], Callable[[], None]]
"""Is told of a request that comes, with its headers, and gives what is to be told of its end."""


class Traces:
    """Sends a span for each request.

    Args:
        endpoint: of a collector, that takes OTLP over HTTP.

    Raises:
        UserError: what sends them is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise UserError(f"serve.traces needs {error.name}: pip install 'fw[traces]'") from None
        # Names that the environment gives (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) go before these.
        resource = Resource.create().merge(Resource({"service.version": __version__}))
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "fw"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint), export_timeout_millis=_PATIENCE_MS))
        self._tracer = self._provider.get_tracer("fw.server", __version__)

    def begin(self, record: Record, headers: Mapping[bytes, bytes]) -> Callable[[], None]:
        """A request comes, of the trace that its headers tell of; to be called when it has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carried = {name: headers[name.encode()].decode("latin-1") for name in ("traceparent", "tracestate") if name.encode() in headers}
        about = {"http.request.method": record.method, "url.path": record.path, "http.response.header.x-request-id": [record.id]}
        span = self._tracer.start_span(
            f"{record.method} {record.path}", TraceContextTextMapPropagator().extract(carried), SpanKind.SERVER, about
        )
        record.more["trace_id"] = f"{span.get_span_context().trace_id:032x}"

        def end() -> None:
            span.set_attributes({_NAMES[name]: value for name, value in record.more.items() if name in _NAMES and value is not None})
            if record.status is not None:
                span.set_attribute("http.response.status_code", record.status)
            if (record.status or 500) >= 500:
                span.set_status(Status(StatusCode.ERROR))
            span.end()

        return end

    def close(self) -> None:
        """Send what there is; takes seconds where nobody is there to take it."""
        self._provider.shutdown()


def no_traces(record: Record, headers: Mapping[bytes, bytes]) -> Callable[[], None]:
    """In the place of :meth:`Traces.begin`."""
    return lambda: None
