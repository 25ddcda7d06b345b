"""Where the time of a request went, as spans that add up to the whole. Pure.

    queue          waits in the coordinator for a pair of workers
    prefill_queue  waits at the prefill worker
    prefill        its prompt is computed, up to the arrival of the first token here
    reserve        the first token is there, and no decode worker has accepted the KV yet
    transfer       what is left of the hand-over: most of it happens under `prefill`, where it costs nothing
    parked         no decode worker took the KV
    decode_queue   waits at the decode worker for its first step
    decode         up to its last token
    detokenise     from there to the last text handed to the front

The borders are moments on the coordinator's clock (`Request.history`). Within PREFILL, HANDOVER and DECODE the parts
are as long as the workers measured them, at most as long as the stage: nobody compares the clocks of two hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from baton.core.events import StageStamps
from coordinator.policy.requests import Entered, Request, Stage

SPANS = (
    *("queue", "prefill_queue", "prefill", "reserve", "transfer", "parked"),
    *("decode_queue", "decode", "detokenise"),
)


class Span(NamedTuple):
    """Seconds from the request's admission."""

    name: str
    start_s: float
    end_s: float
    worker: str = ""


@dataclass(frozen=True, slots=True)
class Timeline(StageStamps):
    """Seconds a request spent in each stage as workers measured them, which overlap; 0 where a stage did not happen.
    `spans` add up to the whole."""

    first_token_s: float = 0.0
    prefill_worker: str = ""
    decode_worker: str = ""
    spans: tuple[Span, ...] = ()

    @property
    def total_s(self) -> float:
        return self.spans[-1].end_s if self.spans else 0.0

    def as_json(self) -> dict[str, Any]:
        """The spans, in milliseconds from the admission."""
        return {
            "total_ms": _ms(self.total_s),
            "first_token_ms": _ms(self.first_token_s),
            "prefill_worker": self.prefill_worker,
            "decode_worker": self.decode_worker,
            "spans": [
                {"name": s.name, "start_ms": _ms(s.start_s), "ms": _ms(s.end_s - s.start_s), "worker": s.worker}
                for s in self.spans
            ],
        }


def timeline(r: Request, now: float) -> Timeline:
    """Of the request up to `now`."""
    s = r.all_stamps()
    return Timeline(
        *(r.queued_s + s.queue_s, s.prefill_s, s.reserve_s, s.transfer_s, s.decode_queue_s, s.decode_s),
        first_token_s=r.first_token_at - r.started_at if r.first_token_at else 0.0,
        prefill_worker=r.prefill_worker,
        decode_worker=r.decode_worker,
        spans=spans(r, now),
    )


def spans(request: Request, now: float) -> tuple[Span, ...]:
    """The request up to `now`: without gap or overlap from its admission on. A span of no length is left out."""
    began, stamps = request.started_at, [*request.earlier_stamps, request.stamps]
    found: list[Span] = []
    run = -1
    for entered, following in pairwise([*request.history, Entered(Stage.ENDED, max(now, request.history[-1].at))]):
        run += entered.stage is Stage.QUEUED
        start = entered.at - began
        for name, length in _parts(entered.stage, following.at - entered.at, stamps[run]):
            if length > 0:
                found.append(Span(name, start, start + length, entered.worker))
            start += length
    return tuple(found)


def _parts(stage: Stage, whole: float, stamps: StageStamps) -> Iterator[tuple[str, float]]:
    """The spans of a stage that took `whole` seconds, with their lengths."""
    match stage:
        case Stage.QUEUED:
            yield "queue", whole
        case Stage.PREFILL:
            waited = min(stamps.queue_s, whole)
            yield from (("prefill_queue", waited), ("prefill", whole - waited))
        case Stage.HANDOVER:
            sent = min(stamps.transfer_s, whole) if stamps.transfer_s else whole
            yield from (("reserve", whole - sent), ("transfer", sent))
        case Stage.PARKED:
            yield "parked", whole
        case Stage.DECODE:
            waited = min(stamps.decode_queue_s, whole)
            yield from (("decode_queue", waited), ("decode", whole - waited))
        case Stage.ENDED:
            yield "detokenise", whole


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
