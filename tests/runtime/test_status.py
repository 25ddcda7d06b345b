"""The error table: every error class, over HTTP and over gRPC, from one row."""

from __future__ import annotations

import subprocess
import sys

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from baton.core import errors
from baton.core.errors import BatonError
from baton.runtime import status


def subclasses(cls: type[BatonError]) -> list[type[BatonError]]:
    return [cls, *(deep for sub in cls.__subclasses__() for deep in subclasses(sub))]


CASES = [
    (errors.InvalidRequest, 400, "INVALID_ARGUMENT", "invalid_value"),
    (errors.ContextLengthExceeded, 400, "INVALID_ARGUMENT", "context_length_exceeded"),
    (errors.NotFound, 404, "NOT_FOUND", "not_found"),
    (errors.DuplicateRequest, 409, "ALREADY_EXISTS", "duplicate_request"),
    (errors.QuotaExceeded, 429, "RESOURCE_EXHAUSTED", "rate_limit_exceeded"),
    (errors.Unavailable, 503, "UNAVAILABLE", "overloaded"),
    (errors.WorkerLost, 503, "UNAVAILABLE", "worker_lost"),
    (errors.LayoutMismatch, 503, "UNAVAILABLE", "layout_mismatch"),
    (errors.StaleHandle, 503, "UNAVAILABLE", "stale_handle"),
    (errors.KVCorrupt, 500, "DATA_LOSS", "kv_corrupt"),
    (errors.DeadlineExceeded, 504, "DEADLINE_EXCEEDED", "deadline_exceeded"),
    (errors.Cancelled, 499, "CANCELLED", "cancelled"),
    (errors.JoinRefused, 500, "FAILED_PRECONDITION", "join_refused"),
    (errors.ProtocolError, 500, "INTERNAL", "protocol_error"),
]


@pytest.mark.parametrize(("cls", "http", "code", "name"), CASES)
def test_each_error_class_has_one_status_per_front(cls: type[BatonError], http: int, code: str, name: str) -> None:
    error = cls("what happened", param="field")
    assert status.http_status(error) == http
    assert status.grpc_code(error) is grpc.StatusCode[code]
    body = status.http_body(error)["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["code"] == name and body["param"] == "field"
    rich = status.grpc_status(error)
    assert rich.code == grpc.StatusCode[code].value[0]
    assert rich.message == body["message"]


def test_every_error_class_has_an_error_status() -> None:
    for cls in subclasses(BatonError):
        error = cls("x")
        assert 400 <= status.http_status(error) < 600
        assert status.grpc_code(error) is not grpc.StatusCode.OK


def test_http_retry_headers_depend_on_the_error() -> None:
    assert status.http_headers(errors.Unavailable("full", retry_after_s=2.2)) == {
        "retry-after": "3",
        "x-should-retry": "true",
    }
    assert status.http_headers(errors.QuotaExceeded("over", retry_after_s=0.01))["retry-after"] == "1"
    assert status.http_headers(errors.Unavailable("none"))["retry-after"] == "1"
    assert status.http_headers(errors.DuplicateRequest("twice")) == {"x-should-retry": "false"}
    assert status.http_headers(errors.InvariantError("bug")) == {"x-should-retry": "false"}
    assert status.http_headers(errors.InvalidRequest("bad")) == {}


def unpack(packed: AnyMessage, message: object) -> object:
    assert packed.Unpack(message)  # type: ignore[arg-type]
    return message


def test_grpc_details_name_the_field_and_the_delay() -> None:
    info, bad = status.grpc_status(errors.InvalidRequest("too hot", param="temperature")).details
    assert unpack(info, error_details_pb2.ErrorInfo()).reason == "INVALID_VALUE"  # type: ignore[attr-defined]
    violation = unpack(bad, error_details_pb2.BadRequest()).field_violations[0]  # type: ignore[attr-defined]
    assert (violation.field, violation.description) == ("temperature", "too hot")
    metadata = dict(status.grpc_trailing_metadata(errors.Unavailable("full", retry_after_s=1.5)))
    assert metadata["grpc-retry-pushback-ms"] == "1500"
    raw = metadata["grpc-status-details-bin"]
    assert isinstance(raw, bytes)
    delay = unpack(status_pb2.Status.FromString(raw).details[1], error_details_pb2.RetryInfo()).retry_delay  # type: ignore[attr-defined]
    assert (delay.seconds, delay.nanos) == (1, 500_000_000)


def test_internal_errors_and_foreign_exceptions_do_not_expose_their_text() -> None:
    for error in (errors.InvariantError("block 7 in /srv/x.py"), ValueError("/etc/passwd"), KeyError("secret")):
        body = status.http_body(error)["error"]
        assert body["code"] == "internal_error" and status.http_status(error) == 500
        assert "/" not in body["message"] and "secret" not in body["message"]
        assert status.grpc_status(error).message == body["message"]


def test_messages_are_one_short_printable_line() -> None:
    body = status.http_body(errors.InvalidRequest("a\r\nb\x1b[31m\u202e" + "x" * 5000))["error"]
    assert body["message"].startswith("a\\r\\nb\\x1b[31m\\u202exx")
    assert len(body["message"]) <= status.MAX_MESSAGE_CHARS


def test_http_responses_do_not_import_grpc() -> None:
    code = (
        "import sys; from baton.runtime import status; from baton.core.errors import Unavailable as U;"
        "status.http_body(U('x')); status.http_headers(U('x'));"
        "sys.exit('grpc' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
