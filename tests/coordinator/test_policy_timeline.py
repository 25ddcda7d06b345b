"""The time spans of a request: they add up to the whole, however the request ended."""

from __future__ import annotations

from itertools import pairwise

import pytest

from baton.core.events import SequenceEnded, StageStamps, StepEvents
from coordinator.policy.choice import Choice, Stage
from coordinator.policy.timeline import SPANS, Span, spans
from tests.coordinator.test_policy_requests import Drive
from tests.support.virtual_cluster import make_cluster, make_requests, policy_request, run, send_all


def check_spans(choice: Choice, found: tuple[Span, ...], now: float) -> None:
    assert found[0].start_s == 0.0 and found[-1].end_s == pytest.approx(now - choice.started_at)
    for before, after in pairwise(found):
        assert before.end_s == pytest.approx(after.start_s)
    assert all(span.end_s > span.start_s and span.name in SPANS for span in found)
    assert sum(span.end_s - span.start_s for span in found) == pytest.approx(now - choice.started_at)


def named(found: tuple[Span, ...]) -> list[tuple[str, float, str]]:
    return [(s.name, pytest.approx(s.end_s - s.start_s), s.worker) for s in found]


def test_each_stage_has_a_span_of_its_duration() -> None:
    d = Drive("p0", "d0")
    r = d.submit(max_tokens=3)
    s = r.sequence
    d.now += 1.0
    d.tokens("p0", s, 0, 5)
    d.now += 0.5
    d.handed_over("p0", s, "d0", queue_s=0.25, prefill_s=0.6, reserve_s=0.1, transfer_s=0.4)
    d.now += 2.0
    stamps = StageStamps(transfer_s=0.4, decode_queue_s=0.125, decode_s=1.8)
    d.tokens("d0", s, 1, 6, 7)
    d.events("d0", StepEvents(ended=(SequenceEnded(s, "length", stamps=stamps),)))
    assert r.stage is Stage.ENDED
    d.now += 0.25
    found = spans(r, d.now)
    check_spans(r, found, d.now)
    assert named(found) == [
        ("prefill_queue", 0.25, "p0"),
        ("prefill", 0.75, "p0"),
        ("reserve", 0.1, "p0"),
        ("transfer", 0.4, "p0"),
        ("decode_queue", 0.125, "d0"),
        ("decode", 1.875, "d0"),
        ("detokenise", 0.25, ""),
    ]


def test_running_request_has_a_span_for_its_current_stage() -> None:
    d = Drive("p0", "d0")
    r, _ = d.at(Stage.DECODE)
    d.now += 3.0
    assert named(spans(r, d.now)) == [("decode", 3.0, "d0")]


def test_each_attempt_is_split_by_its_own_measurements() -> None:
    d = Drive("p0", "d0", "d1")
    r, s = d.at(Stage.HANDOVER, max_tokens=9)
    d.handed_over("p0", s, "d0", queue_s=9.0)
    d.now += 2.0
    d.lose("d0")
    d.now += 1.0
    d.tokens("p0", r.sequence, 1, 8)
    d.handed_over("p0", r.sequence, "d1", queue_s=0.5)
    found = spans(r, d.now)
    check_spans(r, found, d.now)
    assert named(found) == [("decode", 2.0, "d0"), ("prefill_queue", 0.5, "p0"), ("prefill", 0.5, "p0")]


def test_parked_time_has_its_own_span() -> None:
    d = Drive("p0", "d0")
    r, _ = d.at(Stage.PARKED)
    d.now += 4.0
    assert named(spans(r, d.now)) == [("parked", 4.0, "p0")]


def test_spans_of_hundreds_of_requests_add_up_despite_worker_losses() -> None:
    cluster = make_cluster(3, kill_every_s=0.3)
    requests = make_requests(200, 3)
    send_all(cluster, requests, every_s=0.02)
    run(cluster, len(requests))
    seen: set[str] = set()
    for client in cluster.clients:
        r = policy_request(client)
        ended_at = r.history[-1].at
        assert r.stage is Stage.ENDED and ended_at > r.started_at
        found = spans(r, ended_at)
        check_spans(r, found, ended_at)
        seen |= {span.name for span in found}
    assert cluster.kills > 10 and seen >= {"queue", "prefill", "transfer", "decode"}, seen
