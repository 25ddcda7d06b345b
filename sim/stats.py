"""Latency limits and distributions of times, as the benchmark, the simulator and the planner use them. Pure.

    TTFT = first token at the client - request sent
    TPOT = (last token - first token) / (n - 1), for n > 1 output tokens
    goodput = requests per second that met both limits

A percentile p of sorted values x_0 .. x_(m-1) is linear between the two nearest ranks: at position p/100 (m - 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """The limits of a request in seconds (0: none), and the `share` of the requests that must meet them."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    share: float = 0.9

    def met(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """Whether a request with these times meets the limits. `ttft_s` None: it failed, and does not; `tpot_s` None:
        it has fewer than two tokens."""
        if ttft_s is None:
            return False
        slow = self.ttft_s and ttft_s > self.ttft_s
        return not (slow or (self.tpot_s and (tpot_s or 0.0) > self.tpot_s))

    def __str__(self) -> str:
        named = (("ttft", self.ttft_s), ("tpot", self.tpot_s))
        return ",".join(f"{name}={value:g}" for name, value in named if value)


def parse_slo(text: str) -> Slo:
    """Parses `ttft=0.5,tpot=0.05`, in seconds, or in milliseconds with the suffix `ms`.

    Raises:
        ValueError: the text has another form.
    """
    given: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in ("ttft", "tpot") or name in given:
            raise ValueError(f"{name!r} is not ttft or tpot, or is repeated")
        given[name] = float(value.removesuffix("ms")) / 1e3 if value.endswith("ms") else float(value)
        if not 0 < given[name] < math.inf:
            raise ValueError(f"{part!r} is not a positive time")
    return Slo(given.get("ttft", 0.0), given.get("tpot", 0.0))


@dataclass(frozen=True, slots=True)
class Summary:
    """The distribution of one kind of time, in seconds. All fields are zero without a sample."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


def percentile(ordered: Sequence[float], p: float) -> float:
    """Returns a percentile of ascending values, linear between the nearest ranks."""
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
