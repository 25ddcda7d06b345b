"""The printed timeline of a request, and a trace that Perfetto reads."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from baton.core.errors import StartupError
from launch import cluster_api
from launch.cli import baton
from launch.cluster_api import get_requests
from launch.views import chrome_trace, print_request


def row(name: str, admitted_at: float = 100.0, **more: Any) -> dict[str, Any]:
    spans = [
        {"name": "queue", "start_ms": 0.0, "ms": 10.0, "worker": ""},
        {"name": "prefill", "start_ms": 10.0, "ms": 30.0, "worker": "prefill-0"},
        {"name": "decode", "start_ms": 40.0, "ms": 60.0, "worker": "decode-0"},
    ]
    counts = {"prompt_tokens": 7, "cached_tokens": 2, "generated_tokens": 5, "attempts": 1, "first_token_ms": 40.0}
    whole = {"id": name, "choice": 0, "admitted_at": admitted_at, "outcome": "stop", "error": None, "total_ms": 100.0}
    return whole | counts | {"spans": spans} | more


def test_each_span_is_shown_with_its_share_of_the_time() -> None:
    out = io.StringIO()
    print_request([row("r", attempts=2, error="lost [bold]")], Console(file=out, width=120))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("r, choice 0: stop, dispatched 2 times; 7 prompt tokens (2 cached), 5 generated")
    assert "lost [bold]" in lines[1]
    assert [line.split()[:5] for line in lines[3:6]] == [
        ["queue", "coordinator", "0.0", "10.0", "10%"],
        ["prefill", "prefill-0", "10.0", "30.0", "30%"],
        ["decode", "decode-0", "40.0", "60.0", "60%"],
    ]
    assert lines[6].split() == ["all", "100.0", "100%"]


def test_reason_why_the_prompt_was_computed_there_is_shown() -> None:
    out = io.StringIO()
    print_request([row("r", split={"reason": "on decode: decode-0 4.0 ms [x]"})], Console(file=out, width=120))
    assert out.getvalue().splitlines()[1] == "prompt on decode: decode-0 4.0 ms [x]"


def slices(trace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (event for event in trace["traceEvents"] if event["ph"] == "X")


def test_a_track_holds_one_request_at_a_time() -> None:
    trace = chrome_trace([row("a"), row("b", 100.02), row("c", 100.2)])
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert list(names.values()) == ["coordinator", "decode-0", "prefill-0"]
    busy: dict[tuple[int, int], float] = {}
    for event in sorted(slices(trace), key=lambda e: e["ts"]):
        track = event["pid"], event["tid"]
        assert event["ts"] >= busy.get(track, 0.0)
        busy[track] = event["ts"] + event["dur"]
    assert max(tid for _, tid in busy) == 1, "a and b overlap, c finds a free track"


def test_an_arrow_leads_from_prefill_to_decode() -> None:
    events = chrome_trace([row("a"), row("b", 100.02)])["traceEvents"]
    starts = [e for e in events if e["ph"] == "s"]
    ends = [e for e in events if e["ph"] == "f"]
    assert len(starts) == len(ends) == 2 and len({e["id"] for e in starts}) == 2
    for start, end in zip(starts, ends, strict=True):
        assert start["id"] == end["id"] and start["ts"] < end["ts"] and start["pid"] != end["pid"]
        inside = [e for e in slices({"traceEvents": events}) if e["pid"] == start["pid"] and e["tid"] == start["tid"]]
        assert any(e["ts"] <= start["ts"] <= e["ts"] + e["dur"] for e in inside)


def test_unreachable_cluster_is_a_one_line_error() -> None:
    with pytest.raises(StartupError, match="no cluster at "):
        get_requests("127.0.0.1:1")


@pytest.mark.parametrize("rows", [[7], [{}], [row("r"), {"id": "x"}]])
def test_a_response_of_another_kind_is_a_one_line_error(rows: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_api, "request_json", lambda *_: (200, {"requests": rows}))
    with pytest.raises(StartupError, match=r"^127.0.0.1:1: GET /requests\?limit=1000: unexpected response$"):
        get_requests("127.0.0.1:1")


@pytest.mark.parametrize(
    ("status", "document", "line"),
    [
        (404, {"error": {"message": "no such path", "code": "not_found"}}, "127.0.0.1:1: no such path; with API keys"),
        (401, None, "127.0.0.1:1: GET /requests/r: status 401; with API keys"),
        (
            404,
            {"error": {"message": "request 'r' is not", "code": "request_not_found"}},
            "127.0.0.1:1: request 'r' is not$",
        ),
    ],
)
def test_a_missing_request_and_a_missing_path_have_messages_of_their_own(
    status: int, document: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_api, "request_json", lambda *_: (status, document))
    with pytest.raises(StartupError, match=f"^{line}"):
        get_requests("127.0.0.1:1", "r")


@pytest.mark.parametrize("url", ["", "http://", "http://a b", "http://a\0b", "http://[::1", "http://127.0.0.1:99999"])
def test_what_is_no_address_is_a_one_line_error(url: str) -> None:
    with pytest.raises(StartupError, match=r"^no cluster at .* is not an address$"):
        get_requests(url)
    for arguments in (["bench", url], ["ps", url]):
        done = CliRunner().invoke(baton, arguments)
        assert isinstance(done.exception, StartupError) and "is not an address" in done.exception.message
