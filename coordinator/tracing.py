"""OpenTelemetry spans of each request, exported over OTLP: an optional extra, `pip install baton-serve[otel]`.

Each choice has a span, a child of the client's span if it sent a `traceparent`, with a child span for each part of its
timeline on every tier. The spans are created when the choice has ended, from the coordinator's own data: workers export
nothing, and tokens cost nothing. The exporter sends batches on its own thread and drops what its collector does not
accept.
"""

from __future__ import annotations

from typing import Any

from baton.core.errors import StartupError
from coordinator.options import ENDPOINT_FLAG, check_endpoint
from coordinator.recent import Record

_PATH = "/v1/traces"


class Tracing:
    def __init__(self, endpoint: str, exporter: Any = None) -> None:
        """`endpoint` is the URL of a collector's HTTP receiver, such as http://127.0.0.1:4318, with or without the path
        of traces.

        Raises:
            StartupError: `endpoint` is not a URL, or the packages of the extra are not installed.
        """
        check_endpoint(endpoint)
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            message = f"{ENDPOINT_FLAG} requires an extra: pip install 'baton-serve[otel]' ({error})"
            raise StartupError(message) from None
        self._trace, self._propagator = trace, TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "baton"}))
        exporter = exporter or OTLPSpanExporter(endpoint.rstrip("/").removesuffix(_PATH) + _PATH, timeout=5)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("baton")

    def ended(self, record: Record, traceparent: str = "") -> None:
        """Creates the spans of a choice that has ended."""
        trace, began, timeline = self._trace, record.admitted_at, record.timeline
        parent = self._propagator.extract({"traceparent": traceparent}) if traceparent else None
        attributes: dict[str, Any] = {
            "gen_ai.response.id": record.request_id,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.generated_tokens,
            "gen_ai.response.finish_reasons": (record.outcome,),
            "baton.choice": record.choice,
            "baton.cached_tokens": record.cached_tokens,
            "baton.attempts": record.attempts,
            "baton.prefill_worker": timeline.prefill_worker,
            "baton.decode_worker": timeline.decode_worker,
            **({} if timeline.split is None else {"baton.split": timeline.split.reason}),
        }
        whole = self._tracer.start_span(
            "generate", parent, kind=trace.SpanKind.SERVER, attributes=attributes, start_time=_ns(began)
        )
        if record.error:
            whole.set_status(trace.Status(trace.StatusCode.ERROR, record.error[:200]))
        below = trace.set_span_in_context(whole)
        for part in timeline.spans:
            where = {"baton.worker": part.worker} if part.worker else {}
            span = self._tracer.start_span(part.name, below, attributes=where, start_time=_ns(began + part.start_s))
            span.end(_ns(began + part.end_s))
        whole.end(_ns(began + timeline.total_s))

    def close(self) -> None:
        """Flushes the remaining spans, for a few seconds at most."""
        self._provider.shutdown()


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
