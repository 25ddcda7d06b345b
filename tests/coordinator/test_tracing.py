"""Trace spans of a request, as children of its client's span."""

from __future__ import annotations

import builtins
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

from baton.core.errors import StartupError
from coordinator.policy.timeline import Span, Timeline
from coordinator.recent import Record
from coordinator.tracing import Tracing
from tests.support.fake_generator import FakeGenerator
from tests.support.grpc_kit import Client
from tests.support.requests_kit import CHAT, GOOD

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SPANS = (Span("queue", 0.0, 0.25), Span("prefill", 0.25, 1.0, "p0"), Span("decode", 1.0, 3.0, "d0"))


class MemoryExporter(SpanExporter):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Any) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


def record(error: str = "") -> Record:
    timeline = Timeline(first_token_s=1.0, prefill_worker="p0", decode_worker="d0", spans=SPANS)
    return Record("r", 0, 100.0, "worker_lost" if error else "stop", 3, 1, 2, 1, timeline, error)


def exported(error: str = "", traceparent: str = "") -> dict[str, ReadableSpan]:
    kept = MemoryExporter()
    tracing = Tracing("http://127.0.0.1:1", kept)
    tracing.ended(record(error), traceparent)
    tracing.close()
    return {span.name: span for span in kept.spans}


def test_request_is_a_span_with_its_stages_as_children() -> None:
    spans = exported()
    assert set(spans) == {"generate", "queue", "prefill", "decode"}
    whole = spans["generate"]
    assert whole.attributes and whole.attributes["gen_ai.usage.output_tokens"] == 2 and whole.parent is None
    assert (whole.start_time, whole.end_time) == (100 * 10**9, 103 * 10**9)
    for part in SPANS:
        span = spans[part.name]
        assert span.parent is not None and whole.context is not None and span.parent.span_id == whole.context.span_id
        assert (span.start_time, span.end_time) == (round((100 + part.start_s) * 1e9), round((100 + part.end_s) * 1e9))
        assert (span.attributes or {}).get("baton.worker", "") == part.worker


def test_request_span_is_a_child_of_the_client_span() -> None:
    whole = exported(traceparent=PARENT)["generate"]
    assert whole.parent is not None and whole.context is not None
    assert f"{whole.context.trace_id:032x}" == PARENT.split("-")[1] and f"{whole.parent.span_id:016x}" in PARENT
    assert exported(traceparent="nonsense")["generate"].parent is None


def test_failed_request_has_a_span_with_error_status() -> None:
    whole = exported(error="it was lost")["generate"]
    assert whole.status.status_code is StatusCode.ERROR and whole.status.description == "it was lost"


async def test_http_and_grpc_fronts_pass_on_the_traceparent(
    client: httpx.AsyncClient, grpc_client: Client, generator: FakeGenerator
) -> None:
    await client.post(CHAT, json=GOOD[CHAT], headers={"traceparent": PARENT})
    await client.post(CHAT, json=GOOD[CHAT], headers={"traceparent": "x" * 5000})
    async for _ in grpc_client.stub.Generate(_generate_request(), metadata=(("traceparent", PARENT),)):
        pass
    assert [len(s.traceparent) for s in generator.submissions] == [55, 64, 55]
    assert generator.submissions[0].traceparent == PARENT == generator.submissions[2].traceparent


def _generate_request() -> Any:
    from baton.v1 import serving_pb2

    return serving_pb2.GenerateRequest(text="Hello")


def test_missing_packages_are_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any, **named: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError("No module named 'opentelemetry'")
        return real(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(StartupError, match=r"pip install 'baton-serve\[otel\]'"):
        Tracing("http://127.0.0.1:4318")


@pytest.mark.parametrize(
    "endpoint", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces", "http://c:4318/v1/traces/"]
)
def test_the_path_of_traces_may_be_part_of_the_endpoint(endpoint: str) -> None:
    tracing = Tracing(endpoint)
    (processor,) = tracing._provider._active_span_processor._span_processors
    assert processor._batch_processor._exporter._endpoint == "http://c:4318/v1/traces"
    tracing.close()
