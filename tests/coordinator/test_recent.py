"""What operators can query: running requests and the most recent ones, by any of their names."""

from __future__ import annotations

import time

import httpx
import pytest
from starlette.applications import Starlette

from coordinator.http.app import HttpSettings, create_app
from coordinator.policy.choice import Stage
from coordinator.policy.timeline import Span
from coordinator.recent import KEPT, RecentRequests, Record
from coordinator.submission import Delta, Timeline, Usage
from coordinator.text.model import TextModel
from tests.coordinator.test_policy_requests import Drive
from tests.support.fake_generator import FakeGenerator
from tests.support.fake_workers import bench, run_to_end, wait_for_dispatch
from tests.support.requests_kit import events

SPANS = (Span("queue", 0.0, 0.25), Span("prefill", 0.25, 1.0, "p0"))
TIMES = Timeline(first_token_s=0.5, prefill_worker="p0", decode_worker="d0", spans=SPANS)
RECORD = Record("r-1", 0, 5.0, "stop", 3, 1, 2, 1, TIMES)
TIMELINE = {
    "total_ms": 1000.0,
    "first_token_ms": 500.0,
    "prefill_worker": "p0",
    "decode_worker": "d0",
    "revision": "",
    "split": None,
    "spans": [
        {"name": "queue", "start_ms": 0.0, "ms": 250.0, "worker": ""},
        {"name": "prefill", "start_ms": 250.0, "ms": 750.0, "worker": "p0"},
    ],
}
TEXT = {"prompt": "a"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


def test_running_requests_are_listed_first_then_the_latest() -> None:
    d, recent = Drive("p0", "d0"), RecentRequests()
    done, _ = d.at(Stage.HANDOVER, name="done")
    d.now += 1.0
    recent.ended(done, "stop", d.now)
    running = d.submit("running")
    found = recent.latest([running], 10, d.now)
    assert [(r.request_id, r.outcome) for r in found] == [("running", "running"), ("done", "stop")]
    assert recent.latest([running], 1, d.now)[0].request_id == "running"
    assert found[1].admitted_at == pytest.approx(time.time() - 1.0, abs=0.5)
    assert (found[1].generated_tokens, found[1].prompt_tokens, found[1].attempts) == (1, 3, 1)


def test_number_of_kept_requests_is_bounded() -> None:
    d, recent = Drive("p0", "d0"), RecentRequests()
    r = d.submit()
    for _ in range(KEPT + 5):
        recent.ended(r, "stop", d.now)
    assert len(recent.latest([], 10**6, d.now)) == KEPT


TRACED = f"req-{'ab' * 16}-1"  # a gRPC request named after its trace
IDS = ("req-7-00ffaa11", "req-77", "cmpl-mine-00ffaa11", "two-00ffaa11-0", "two-00ffaa11-1", "a-b", TRACED)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("req-7", [0]),
        ("cmpl-req-7", [0]),
        ("chatcmpl-req-7", [0]),
        ("req-7-00ffaa11", [0]),
        ("cmpl-mine", [2]),
        ("two", [3, 4]),
        ("two-00ffaa11", [3, 4]),
        ("two-00ffaa11-1", [4]),
        ("a-b", [5]),
        ("a", []),
        (f"cmpl-req-{'ab' * 16}", [6]),
        ("req", []),
    ],
)
def test_a_request_is_found_by_each_of_its_names(asked: str, found: list[int]) -> None:
    d, recent = Drive("p0", "d0"), RecentRequests()
    for name in IDS:
        recent.ended(d.submit(name), "stop", d.now)
    assert sorted(r.request_id for r in recent.named([], asked, d.now)) == sorted(IDS[i] for i in found)


async def test_pipeline_records_how_each_request_ended() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit(max_tokens=4)
        p, d, s = await wait_for_dispatch(b)
        (row,) = b.pipeline.requests(10)
        assert row.outcome == "running" and row.timeline.spans
        run_to_end(p, d, s)
        await reader.done()
        (row,) = b.pipeline.request(s.request_id)
        assert (row.outcome, row.generated_tokens, row.timeline.prefill_worker) == ("length", 4, "p0")
        assert row.timeline.decode_worker == "d0"
        timeline = reader.deltas[-1].timeline
        assert timeline is not None and timeline.spans
        assert timeline.spans[0].start_s == 0.0 and timeline.spans[-1].name == "detokenise"


async def test_timeline_is_in_the_last_chunk_on_request(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = [Delta("a", (1,)), Delta("b", (2,), "stop", None, Usage(3, 2), TIMES)]
    wanted = {"return_timeline": True}
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        assert (await client.post(path, json=body | wanted)).json()["choices"][0]["timeline"] == TIMELINE
        chunks = events(await client.post(path, json=body | wanted | {"stream": True}))
        assert [e["choices"][0].get("timeline") for e in chunks][-1] == TIMELINE
        assert not any("timeline" in e["choices"][0] for e in chunks[:-1])
        assert "timeline" not in (await client.post(path, json=body)).json()["choices"][0]


async def test_recent_requests_are_served_over_http(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.records = [RECORD, RECORD]
    rows = (await client.get("/requests?limit=1")).json()["requests"]
    assert len(rows) == 1 and rows[0]["outcome"] == "stop" and rows[0]["spans"] == TIMELINE["spans"]
    assert (await client.get("/requests/r-1")).json()["requests"][0]["attempts"] == 1
    missing = await client.get("/requests/nobody")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "request_not_found"
    named = (await client.get("/requests/v%C3%BC%1B")).json()["error"]["message"]
    assert named.startswith(r"request 'vü\x1b' is not among"), "escaped once"
    for limit in ("0", "x", "-1", "1001", "9" * 5000, "٣"):
        answer = await client.get("/requests", params={"limit": limit})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "limit", limit


async def test_recent_requests_are_not_served_on_the_api_routes(
    generator: FakeGenerator, text_model: TextModel
) -> None:
    app: Starlette = create_app(generator, text_model, HttpSettings("tiny", routes="api"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        for path in ("/requests", "/requests/r-1"):
            assert (await client.get(path)).status_code == 404
