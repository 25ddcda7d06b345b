"""The requests of a simulation: from a trace, scaled, or from a rate and distributions of lengths. The same for the
same seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sim.trace import MOST_TOKENS, TraceRow

JITTER_S = 60.0
_P95 = 1.6448536269514722  # standard deviations


@dataclass(frozen=True, slots=True)
class Lengths:
    """A fixed length (`low` = `high`), a uniform distribution between two, both included, or with `p95` a log-normal
    one whose median is `low`."""

    low: int
    high: int
    p95: int = 0

    def __str__(self) -> str:
        if self.p95:
            return f"p50={self.low},p95={self.p95}"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    def draw(self, source: random.Random) -> int:
        if self.p95:
            drawn = round(source.lognormvariate(math.log(self.low), math.log(self.p95 / self.low) / _P95))
            return min(max(1, drawn), MOST_TOKENS)
        return source.randint(self.low, self.high)


def parse_lengths(text: str) -> Lengths:
    """Parses `512`, `128-1024`, or `p50=300,p95=2000`, a log-normal distribution.

    Raises:
        ValueError: the text has none of these forms.
    """
    if text.startswith("p50="):
        median, comma, high = text.removeprefix("p50=").partition(",p95=")
        lengths = Lengths(int(median), int(median), int(high) if comma else 0)
        if not 1 <= lengths.low < lengths.p95:
            raise ValueError(f"{text!r}: p50 must be at least 1, and p95 above it")
    else:
        low, dash, high = text.partition("-")
        lengths = Lengths(int(low), int(high) if dash else int(low))
        if lengths.low < 0 or lengths.high < lengths.low:
            raise ValueError(f"{text!r} is neither a length nor a range")
    if max(lengths.high, lengths.p95) > MOST_TOKENS:
        raise ValueError(f"a request has at most {MOST_TOKENS} tokens")
    return lengths


def poisson(rate: float, duration_s: float, input_len: Lengths, output_len: Lengths, seed: int) -> tuple[TraceRow, ...]:
    """Returns requests that arrive at random, `rate` per second on average, for `duration_s` seconds."""
    source, rows, at_s = random.Random(f"{seed}/poisson"), list[TraceRow](), 0.0
    while (at_s := at_s + source.expovariate(rate)) < duration_s:
        rows.append(TraceRow(at_s, max(1, input_len.draw(source)), max(1, output_len.draw(source))))
    return tuple(rows)


def first_seconds(rows: Sequence[TraceRow], duration_s: float) -> tuple[TraceRow, ...]:
    """Returns the requests of the first `duration_s` seconds, with times from 0 on."""
    origin = rows[0].at_s if rows else 0.0
    kept = (TraceRow(r.at_s - origin, r.input_len, max(1, r.output_len), r.blocks) for r in rows)
    return tuple(row for row in kept if row.at_s <= duration_s)


def scaled(rows: Sequence[TraceRow], factor: float, seed: int, jitter_s: float = JITTER_S) -> tuple[TraceRow, ...]:
    """Returns a trace with `factor` times as many requests in the same time, as if so many services had the same users'
    habits: copies of the trace, each request of a copy up to `jitter_s` earlier or later than in the original, and of
    the last copy only a share. A request that would lie outside the trace's time is mirrored into it. Prefix blocks are
    shared within a copy only. A factor below 1 keeps a random share of the requests."""
    if not rows or factor == 1.0:
        return tuple(rows)
    source = random.Random(f"{seed}/scaled")
    first, last = rows[0].at_s, rows[-1].at_s
    stride = 1 + max((max(row.blocks, default=0) for row in rows), default=0)
    copies: list[TraceRow] = []
    for copy in range(math.ceil(factor)):
        share = min(1.0, factor - copy)
        shift = copy * stride
        for row in rows:
            if share < 1.0 and source.random() >= share:
                continue
            at_s = row.at_s
            if copy:
                at_s += source.uniform(-jitter_s, jitter_s)
                at_s = 2 * first - at_s if at_s < first else at_s
                at_s = max(first, 2 * last - at_s) if at_s > last else at_s
            blocks = tuple(block + shift for block in row.blocks) if shift else row.blocks
            copies.append(TraceRow(at_s, row.input_len, row.output_len, blocks))
    return tuple(sorted(copies, key=lambda row: row.at_s))


def sped_up(rows: Sequence[TraceRow], factor: float) -> tuple[TraceRow, ...]:
    """Returns the same requests in 1/`factor` of the time: with `factor` times the rate, and its bursts. Copies of the
    trace (`scaled`) have as many requests, but the bursts of one fall between those of another."""
    first = rows[0].at_s if rows else 0.0
    return tuple(TraceRow(first + (r.at_s - first) / factor, r.input_len, r.output_len, r.blocks) for r in rows)


def fitting(rows: Iterable[TraceRow], max_model_len: int) -> tuple[tuple[TraceRow, ...], int]:
    """Returns the requests whose prompt and output fit into the model's context, and how many do not."""
    kept = list(rows)
    short = tuple(row for row in kept if row.input_len + row.output_len <= max_model_len)
    return short, len(kept) - len(short)
