"""What a replay measures, and its summary. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from sim.stats import Slo, Summary, summarize

WAITS = ("queue", "prefill_queue", "prefill", "hand_over", "decode_queue", "decode")
"""Where a request's time goes, in order: in the coordinator's queue; at its prefill worker before and during its steps;
from its first token until decode has the KV; before its first decode step; from there to its last token."""
_PER_DECADE = 200  # buckets of the histogram of gaps: 1.2 % wide
_LEAST_GAP_S = 1e-6


@dataclass(slots=True)
class Times:
    """One request, on the simulation's clock; 0.0: it has not happened. `refused` is why the coordinator did not accept
    it."""

    sent_at: float
    input_len: int
    output_len: int
    admitted_at: float = 0.0
    placed_at: float = 0.0
    started_at: float = 0.0
    prefilled_at: float = 0.0
    received_at: float = 0.0
    running_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    cached: int = 0
    refused: str = ""

    @property
    def ttft_s(self) -> float | None:
        return self.first_at - self.sent_at if self.first_at else None

    @property
    def tpot_s(self) -> float | None:
        return (self.last_at - self.first_at) / (self.output_len - 1) if self.last_at and self.output_len > 1 else None

    def waits(self) -> tuple[float, ...]:
        """Returns the seconds in each of WAITS, once the request has ended."""
        received = self.received_at or self.prefilled_at
        running = self.running_at or received
        return (
            max(0.0, self.placed_at - self.admitted_at),
            max(0.0, self.started_at - self.placed_at),
            max(0.0, self.prefilled_at - self.started_at),
            max(0.0, received - self.prefilled_at),
            max(0.0, running - received),
            max(0.0, max(self.last_at, running) - running),
        )


class Gaps:
    """The distribution of times between two tokens of a request, in logarithmic buckets."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.largest_s = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self._counts[round(math.log10(seconds if seconds > _LEAST_GAP_S else _LEAST_GAP_S) * _PER_DECADE)] += count
        if seconds > self.largest_s:
            self.largest_s = seconds

    def summary(self) -> Summary:
        """Returns the distribution; percentiles are exact to half of a bucket, 0.6 %."""
        total = self._counts.total()
        if not total:
            return Summary(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        ordered = sorted(self._counts.items())
        mean = sum(10 ** (bucket / _PER_DECADE) * count for bucket, count in ordered) / total

        def at(p: float) -> float:
            left = p / 100 * (total - 1)
            for bucket, count in ordered:
                left -= count
                if left < 0:
                    return float(10 ** (bucket / _PER_DECADE))
            return self.largest_s

        return Summary(total, mean, at(50), at(95), at(99), self.largest_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The summary of a replay. Rates count from the first request to the last token. `met_share` is the share of all
    requests, refused ones too, that met the limits. Utilisations are shares of the time in which workers of a role
    compute; `front_utilisation` is the coordinator's processor time over the duration: above 1, one coordinator does
    not suffice. `waits_s` has the mean seconds in each of WAITS; `queued_most` is the longest queue."""

    requests: int
    refused: Mapping[str, int]
    duration_s: float
    ttft: Summary
    tpot: Summary
    itl: Summary
    e2e: Summary
    requests_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float
    met_share: float
    prefill_utilisation: float
    decode_utilisation: float
    front_utilisation: float
    queued_most: int
    preemptions: int
    cached_share: float
    waits_s: Mapping[str, float]
    steps: int
    steps_at_once: int
    """Decode steps that were computed many at once (sim/scale/at_once.py)."""
    events: int
    on_decode: int
    """Requests whose prompts decode workers computed."""


@dataclass(slots=True)
class Measured:
    """What a replay counts while it runs."""

    times: list[Times] = field(default_factory=list)
    gaps: Gaps = field(default_factory=Gaps)
    prefill_busy_s: float = 0.0
    decode_busy_s: float = 0.0
    front_busy_s: float = 0.0
    queued_most: int = 0
    steps: int = 0
    steps_at_once: int = 0
    preemptions: int = 0
    on_decode: int = 0
    flips: int = 0
    rescheduled: int = 0


def summary(measured: Measured, slo: Slo, prefill_s: float, decode_s: float, events: int) -> Outcome:
    """`prefill_s` and `decode_s` are the seconds of all workers of each role."""
    times = measured.times
    done = [t for t in times if t.last_at]
    duration_s = max((t.last_at for t in done), default=0.0) - min((t.sent_at for t in times), default=0.0)
    span_s = duration_s or math.inf
    ttft_s, tpot_s = [t.ttft_s for t in done], [t.tpot_s for t in done]
    met = sum(map(slo.met, ttft_s, tpot_s))
    waits_s = [0.0] * len(WAITS)
    for t in done:
        for index, wait_s in enumerate(t.waits()):
            waits_s[index] += wait_s
    return Outcome(
        requests=len(times),
        refused=dict(Counter(t.refused for t in times if t.refused)),
        duration_s=duration_s,
        ttft=summarize(ttft_s),
        tpot=summarize(tpot_s),
        itl=measured.gaps.summary(),
        e2e=summarize(t.last_at - t.sent_at for t in done),
        requests_per_s=len(done) / span_s,
        output_tokens_per_s=sum(t.output_len for t in done) / span_s,
        goodput_per_s=met / span_s,
        met_share=met / len(times) if times else 0.0,
        prefill_utilisation=measured.prefill_busy_s / (prefill_s or math.inf),
        decode_utilisation=measured.decode_busy_s / (decode_s or math.inf),
        front_utilisation=measured.front_busy_s / span_s,
        queued_most=measured.queued_most,
        preemptions=measured.preemptions,
        cached_share=sum(t.cached for t in done) / max(sum(t.input_len for t in done), 1),
        waits_s={name: total_s / max(len(done), 1) for name, total_s in zip(WAITS, waits_s, strict=True)},
        steps=measured.steps,
        steps_at_once=measured.steps_at_once,
        events=events,
        on_decode=measured.on_decode,
    )
