"""Where the time of a request went, as spans that add up to the whole. Pure.

    queue          waits in the coordinator for a pair of workers
    prefill_queue  waits at the prefill worker
    prefill        its prompt is computed, until the first token arrives at the coordinator
    reserve        the first token is known, and no decode worker has accepted the KV yet
    transfer       the rest of the hand-over: most of it overlaps `prefill`, where it costs no time
    parked         the KV stays at the prefill worker: no decode worker accepted it, or the one that did failed
    decode_queue   waits at the decode worker for its first step
    decode         up to its last token
    detokenise     from the last token to the last text handed to the front

The stages are delimited on the coordinator's clock (`Choice.history`). Within PREFILL, HANDOVER and DECODE the parts
have the lengths that the workers measured, at most the stage's: clocks of two hosts are never compared.

Requests are counted by latency limits, so that goodput can be computed afterwards for any of them. They are usual
promises to users, in seconds: to the first token, and for each further one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from baton.core.errors import InvalidRequest
from baton.core.events import StageStamps
from coordinator.policy.choice import Choice, Entered, Stage
from coordinator.policy.split import Decision

TTFT_S = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
TPOT_S = (0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)


def upper_bound(limits: Sequence[float], seconds: float) -> str:
    """Returns the lowest of `limits` that is not below `seconds`, as a label; `+Inf` above all."""
    index = bisect_left(limits, seconds)
    return f"{limits[index]:g}" if index < len(limits) else "+Inf"


def counted_limit(limits: Sequence[float], seconds: float) -> float:
    """Returns the highest of `limits` that is not above `seconds`; 0.0 for 0: no limit.

    Raises:
        InvalidRequest: `seconds` is below all of them.
    """
    index = bisect_right(limits, seconds)
    if seconds and not index:
        raise InvalidRequest(f"a limit of {seconds:g} s is below {limits[0]:g} s, the lowest that is counted")
    return limits[index - 1] if index else 0.0


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
    """Seconds that a request spent in each stage as workers measured them; these overlap and are 0 if a stage did not
    happen. The `spans` add up to the total. `split` is why its prompt was last computed where it was, if that was
    decided for it."""

    first_token_s: float = 0.0
    prefill_worker: str = ""
    decode_worker: str = ""
    spans: tuple[Span, ...] = ()
    revision: str = ""
    split: Decision | None = None

    @property
    def total_s(self) -> float:
        return self.spans[-1].end_s if self.spans else 0.0

    def as_json(self) -> dict[str, Any]:
        """Returns the timeline with times in milliseconds from the admission."""
        return {
            "total_ms": _ms(self.total_s),
            "first_token_ms": _ms(self.first_token_s),
            "prefill_worker": self.prefill_worker,
            "decode_worker": self.decode_worker,
            "revision": self.revision,
            "split": None if self.split is None else self.split.as_json(),
            "spans": [
                {"name": s.name, "start_ms": _ms(s.start_s), "ms": _ms(s.end_s - s.start_s), "worker": s.worker}
                for s in self.spans
            ],
        }


def timeline(choice: Choice, now: float) -> Timeline:
    """Returns the timeline of a choice up to `now`."""
    s = choice.all_stamps()
    return Timeline(
        *(choice.queued_s + s.queue_s, s.prefill_s, s.reserve_s, s.transfer_s, s.decode_queue_s, s.decode_s),
        first_token_s=choice.first_token_at - choice.started_at if choice.first_token_at else 0.0,
        prefill_worker=choice.prefill_worker,
        decode_worker=choice.decode_worker,
        spans=spans(choice, now),
        revision=choice.revision,
        split=choice.decision,
    )


def spans(choice: Choice, now: float) -> tuple[Span, ...]:
    """Returns the spans of a choice up to `now`, contiguous from its admission; empty ones are left out."""
    began, stamps = choice.started_at, [*choice.earlier_stamps, choice.stamps]
    placed: list[Span] = []
    run = -1
    for entered, following in pairwise([*choice.history, Entered(Stage.ENDED, max(now, choice.history[-1].at))]):
        run += entered.stage is Stage.QUEUED
        start = entered.at - began
        for name, length in _parts(entered.stage, following.at - entered.at, stamps[run]):
            if length > 0:
                placed.append(Span(name, start, start + length, entered.worker))
            start += length
    return tuple(placed)


def _parts(stage: Stage, whole: float, stamps: StageStamps) -> Iterator[tuple[str, float]]:
    """Yields the spans of a stage that took `whole` seconds, with their lengths."""
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
