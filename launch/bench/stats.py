"""The statistics of a benchmark. Pure: arrival times in, statistics out.

With s = request sent, t_1 .. t_k the arrivals of events that carried text, e = end of the stream, and n output tokens
by the server's own count (usage):

    TTFT = t_1 - s                  first text at the client
    TPOT = (f - t_1) / (n - 1)      mean time per token after the first; needs n > 1. f is the arrival of the last text
                                    or of the finish reason: the last tokens may decode to nothing
    ITL  = t_(i+1) - t_i            every gap, over all requests; an event may carry several tokens
    E2E  = e - s
    throughput = sum of n over requests that succeeded / (last end - first start)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from sim.stats import Slo, Summary, summarize

# Student's t at 97.5 %, by degrees of freedom (1, 2, ...); beyond the table that of the normal distribution.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean, and half of its 95 % confidence interval by Student's t; the half is 0.0 for a single value."""
    count, mean = len(values), fmean(values)
    if count < 2:
        return mean, 0.0
    return mean, (_T[count - 2] if count - 2 < len(_T) else 1.96) * stdev(values) / math.sqrt(count)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. Times are in seconds on one monotonic clock; `error` is why it failed: then its numbers are ignored.

    `cached_tokens` are those of the prompt that the server found in a prefix cache, None if it does not report them.
    `counted` is False if the server reported no usage and `output_tokens` is the number of events instead. `stages`
    holds the seconds in each stage of the server's own timeline, and `revision` is that of the workers, if it reports
    them; `token_ids` are there if the request had `return_token_ids`.
    """

    sent: float
    arrivals: tuple[float, ...] = ()
    ended: float = 0.0
    finished: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted: bool = True
    error: str | None = None
    timed_out: bool = False
    stages: Mapping[str, float] = field(default_factory=dict)
    revision: str = ""
    token_ids: tuple[int, ...] = ()

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
class RunStatistics:
    requests: int
    failed: int
    errors: dict[str, int]
    uncounted: int
    duration_s: float
    prompt_tokens: int
    cached_tokens: int | None
    """Of the prompt tokens; None if no response reports them."""
    output_tokens: int
    ttft: Summary
    tpot: Summary
    itl: Summary
    e2e: Summary
    met: int
    """Requests that met the limits, out of all; without limits, those that succeeded."""
    stages: Mapping[str, Summary]
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    goodput_per_s: float
    """Requests per second that met the limits."""
    met_share: float


def statistics(
    records: Sequence[RequestRecord], slo: Slo | None = None, duration_s: float | None = None
) -> RunStatistics:
    """Computes the statistics. `duration_s` defaults to the time from the first start to the last end of a successful
    request."""
    good = [record for record in records if record.error is None]
    if duration_s is None:
        duration_s = max(r.ended for r in good) - min(r.sent for r in good) if good else 0.0
    limits = slo or Slo()
    met = sum(record.error is None and limits.met(record.ttft_s, record.tpot_s) for record in records)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    cached = [record.cached_tokens for record in good if record.cached_tokens is not None]
    output_tokens = sum(record.output_tokens for record in good)
    span_s = duration_s or math.inf  # rates are 0 if no request succeeded
    return RunStatistics(
        requests=len(records),
        failed=len(records) - len(good),
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        uncounted=sum(not record.counted for record in good),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(cached) if cached else None,
        output_tokens=output_tokens,
        ttft=summarize(record.ttft_s for record in good),
        tpot=summarize(record.tpot_s for record in good),
        itl=summarize(gap for record in good for gap in record.gaps_s),
        e2e=summarize(record.e2e_s for record in good),
        met=met,
        stages={
            name: summarize(record.stages.get(name, 0.0) for record in good if record.stages)
            for name in dict.fromkeys(name for record in good for name in record.stages)
        },
        requests_per_s=len(good) / span_s,
        output_tokens_per_s=output_tokens / span_s,
        prompt_tokens_per_s=prompt_tokens / span_s,
        goodput_per_s=met / span_s,
        met_share=met / len(records) if records else 0.0,
    )
