"""The numbers of a benchmark. Pure: arrival times in, statistics out.

With s = request sent, t_1 .. t_k the arrivals of events that carried text, e = end of the stream, and n output tokens
by the server's own count (usage):

    TTFT = t_1 - s                  first text at the client
    TPOT = (f - t_1) / (n - 1)      mean time per token after the first; needs n > 1. f is the arrival of the last text
                                    or of the finish reason: the last tokens may decode to nothing
    ITL  = t_(i+1) - t_i            every gap, over all requests; an event may carry several tokens
    E2E  = e - s
    throughput = sum of n over requests that succeeded / (last end - first start)

A percentile p of sorted values x_0 .. x_(m-1) is linear between the two nearest ranks: at position p/100 (m - 1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Times in seconds on one monotonic clock; `error` says why it failed, and then nothing else counts.

    `counted` is False where the server gave no usage and `output_tokens` is the number of events instead.
    """

    sent: float
    arrivals: tuple[float, ...] = ()
    ended: float = 0.0
    finished: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = True
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return self.arrivals[0] - self.sent if self.arrivals else None

    @property
    def tpot_s(self) -> float | None:
        if not self.arrivals or self.output_tokens < 2:
            return None
        return (self.finished - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        return tuple(later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False))

    @property
    def e2e_s(self) -> float:
        return self.ended - self.sent


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one kind of time, in seconds. All zero without a sample."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Statistics:
    requests: int
    failed: int
    errors: dict[str, int]
    uncounted: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    ttft: Summary
    tpot: Summary
    itl: Summary
    e2e: Summary

    @property
    def requests_per_s(self) -> float:
        return (self.requests - self.failed) / self.duration_s if self.duration_s else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.duration_s if self.duration_s else 0.0


def percentile(ordered: Sequence[float], p: float) -> float:
    """Of ascending values, linear between the nearest ranks."""
    if not ordered:
        return 0.0
    position = p / 100 * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(values: Iterable[float | None]) -> Summary:
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return Summary(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    p50, p95, p99 = (percentile(ordered, p) for p in PERCENTILES)
    return Summary(len(ordered), sum(ordered) / len(ordered), p50, p95, p99, ordered[-1])


def statistics(records: Sequence[Record]) -> Statistics:
    good = [record for record in records if record.error is None]
    duration = max(r.ended for r in good) - min(r.sent for r in good) if good else 0.0
    return Statistics(
        requests=len(records),
        failed=len(records) - len(good),
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        uncounted=sum(not record.counted for record in good),
        duration_s=duration,
        prompt_tokens=sum(record.prompt_tokens for record in good),
        output_tokens=sum(record.output_tokens for record in good),
        ttft=summarize(record.ttft_s for record in good),
        tpot=summarize(record.tpot_s for record in good),
        itl=summarize(gap for record in good for gap in record.gaps_s),
        e2e=summarize(record.e2e_s for record in good),
    )
