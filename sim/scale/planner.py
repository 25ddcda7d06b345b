"""Which numbers of workers meet the limits at the lowest price. Pure: replays come in as a function.

A pool that is too small makes requests wait; a larger one never makes them wait longer, apart from chance. So for each
pair of worker kinds the search doubles both pools until the limits are met, finds the smallest of each pool beside an
ample other one by bisection, and walks along the border between them for the cheapest pair. At the end it checks that
one worker fewer of either role misses the limits, and continues from there if it does not. A cluster without a prefill
pool, whose decode workers compute the prompts, has one number to find.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sim.scale.costs import Calibration
from sim.scale.results import Outcome, Times
from sim.stats import Slo
from sim.trace import TraceRow

MOST_WORKERS = 1 << 14
IDLE = 0.05
"""If both pools are used less than this and the limits are still missed, more workers do not help."""


@dataclass(frozen=True, slots=True)
class Size:
    """Numbers of workers of both roles."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill} prefill + {self.decode} decode"


@dataclass(frozen=True, slots=True)
class Pair:
    """The kinds of workers of both roles, and their prices per hour."""

    prefill: Calibration
    decode: Calibration
    prefill_price: float = 1.0
    decode_price: float = 1.0

    def price(self, size: Size) -> float:
        return size.prefill * self.prefill_price + size.decode * self.decode_price


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A replay's outcome; the TTFT and TPOT that as many requests as must meet the limits have at most; and the limits
    nearest to the given ones that it meets. These are None if too many requests fail."""

    outcome: Outcome
    ttft_s: float | None
    tpot_s: float | None
    nearest: Slo | None

    def met(self, slo: Slo) -> bool:
        return self.outcome.met_share >= slo.share


Evaluate = Callable[[Pair, Size], Evaluated]


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The cheapest size of one pair of kinds. `tried` has every size that was replayed."""

    pair: Pair
    size: Size
    evaluated: Evaluated
    tried: Mapping[Size, Evaluated]

    @property
    def price(self) -> float:
        return self.pair.price(self.size)


@dataclass(frozen=True, slots=True)
class Infeasible:
    """No number of workers meets the limits: `missed` names the limits (`ttft`, `tpot`, `requests`), `size` had room to
    spare and came this near."""

    pair: Pair
    size: Size
    evaluated: Evaluated
    missed: tuple[str, ...]


def evaluate_times(outcome: Outcome, times: Sequence[Times], slo: Slo) -> Evaluated:
    """Returns an outcome with the limits that its requests would meet."""
    failed = math.inf
    ttft = sorted(failed if t.ttft_s is None else t.ttft_s for t in times)
    tpot = sorted(failed if not t.last_at else t.tpot_s or 0.0 for t in times)
    at = [_at_share(values, slo.share) for values in (ttft, tpot)]
    return Evaluated(outcome, at[0], at[1], _nearest(times, ttft, tpot, slo))


def _at_share(ordered: Sequence[float], share: float) -> float | None:
    value = ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.inf
    return value if value < math.inf else None


def _nearest(times: Sequence[Times], ttft: Sequence[float], tpot: Sequence[float], slo: Slo) -> Slo | None:
    """Raises the limits that are missed, each as little as the share allows, until both together are met."""
    share = slo.share
    for _ in range(12):
        values = _at_share(ttft, share), _at_share(tpot, share)
        if values[0] is None or values[1] is None:
            return None
        near = Slo(_raised(slo.ttft_s, values[0]), _raised(slo.tpot_s, values[1]), slo.share)
        if sum(near.met(t.ttft_s, t.tpot_s) for t in times if t.last_at) >= slo.share * len(times):
            return near
        share = 1 - (1 - share) / 2  # those that miss one limit and those that miss the other differ
    return None


def _raised(limit_s: float, value_s: float) -> float:
    """Returns a limit that the value meets: the given one, or the value rounded up to two significant digits."""
    if not limit_s or value_s <= limit_s:
        return limit_s
    unit = 10.0 ** (math.floor(math.log10(value_s)) - 1)
    return math.ceil(value_s / unit - 1e-9) * unit


def lower_bound(pair: Pair, rows: Sequence[TraceRow]) -> Size:
    """Returns the fewest workers that could do the work at all: every prompt computed once, and every token in a batch
    of the size at which it costs least."""
    duration_s = max(rows[-1].at_s - rows[0].at_s, 1.0) if rows else 1.0
    shared = any(row.blocks for row in rows)  # then much of the prompts may be cached
    prompts_s = 0.0 if shared else sum(pair.prefill.prefill.token_s * row.input_len for row in rows)
    decode, batch = pair.decode.decode, pair.decode.decode_worker.max_running or 256
    speed_up = 1 / (1 - decode.accepted)
    # On each line of the curve a token costs least at one of its ends.
    sizes = (batch, *(rows for rows, _ in decode.beyond if rows < batch))
    token_s = min(decode.plain_s(size, 0) / size for size in sizes)
    tokens_s = sum(token_s * row.output_len for row in rows) / speed_up
    return Size(max(1, math.ceil(prompts_s / duration_s)), max(1, math.ceil(tokens_s / duration_s)))


def search(
    pair: Pair, slo: Slo, rows: Sequence[TraceRow], evaluate: Evaluate, *, auto: bool = False
) -> Cheapest | Infeasible:
    """Returns the cheapest size that meets the limits, or what a cluster with room to spare comes to. `auto`: decode
    workers may compute prompts, too, so that fewer prefill workers than these need can be enough."""
    tried: dict[Size, Evaluated] = {}

    def at(size: Size) -> Evaluated:
        if size not in tried:
            tried[size] = evaluate(pair, size)
        return tried[size]

    def meets(prefill: int, decode: int) -> bool:
        return at(Size(prefill, decode)).met(slo)

    least = lower_bound(pair, rows)
    ample = least = Size(1, least.decode) if auto else least
    while not meets(ample.prefill, ample.decode):
        evaluated = at(ample)
        busy = max(evaluated.outcome.prefill_utilisation, evaluated.outcome.decode_utilisation)
        if busy < IDLE or max(ample.prefill, ample.decode) > MOST_WORKERS:
            return Infeasible(pair, ample, evaluated, missed(evaluated, slo))
        ample = Size(ample.prefill * 2, ample.decode * 2)

    fewest_decode = _least(least.decode, ample.decode, lambda n: meets(ample.prefill, n))
    fewest_prefill = _least(least.prefill, ample.prefill, lambda n: meets(n, ample.decode * 2))
    best = ample
    for prefill in range(fewest_prefill, ample.prefill + 1):
        # The most decode workers with which it is cheaper than the best so far.
        limit = math.ceil((pair.price(best) - prefill * pair.prefill_price) / pair.decode_price) - 1
        if limit < fewest_decode:
            break
        if meets(prefill, limit):
            decode = _least(fewest_decode, limit, lambda n, p=prefill: meets(p, n))  # type: ignore[misc]
            best = Size(prefill, decode)
    while smaller := [s for s in one_fewer(best) if at(s).met(slo)]:  # chance can favour a smaller cluster
        best = min(smaller, key=pair.price)
    return Cheapest(pair, best, at(best), tried)


def search_one_pool(pair: Pair, slo: Slo, rows: Sequence[TraceRow], evaluate: Evaluate) -> Cheapest | Infeasible:
    """Returns the fewest decode workers that meet the limits without a prefill worker, as `search` does."""
    tried: dict[Size, Evaluated] = {}

    def meets(decode: int) -> bool:
        size = Size(0, decode)
        if size not in tried:
            tried[size] = evaluate(pair, size)
        return tried[size].met(slo)

    least = ample = lower_bound(pair, rows).decode
    while not meets(ample):
        evaluated = tried[Size(0, ample)]
        if evaluated.outcome.decode_utilisation < IDLE or ample > MOST_WORKERS:
            return Infeasible(pair, Size(0, ample), evaluated, missed(evaluated, slo))
        ample *= 2
    decode = _least(least, ample, meets)
    while decode > 1 and meets(decode - 1):  # the bound is for a load that has no end
        decode -= 1
    size = Size(0, decode)
    return Cheapest(pair, size, tried[size], tried)


def one_fewer(size: Size) -> list[Size]:
    """Returns the sizes with one worker less of one role, as after the loss of that worker."""
    fewer = [Size(size.prefill - 1, size.decode)] if size.prefill > 1 else []
    return [*fewer, Size(size.prefill, size.decode - 1)] if size.decode > 1 else fewer


def missed(evaluated: Evaluated, slo: Slo) -> tuple[str, ...]:
    """Names what keeps a cluster from meeting the limits."""
    if evaluated.ttft_s is None or evaluated.tpot_s is None:
        return ("requests",)
    values = ("ttft", slo.ttft_s, evaluated.ttft_s), ("tpot", slo.tpot_s, evaluated.tpot_s)
    return tuple(name for name, limit, value in values if limit and value > limit) or ("ttft", "tpot")


def _least(low: int, high: int, meets: Callable[[int], bool]) -> int:
    """Returns the least number in [low, high] that meets the limits; `high` does."""
    while low < high:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle + 1
    return high


def cheapest(results: Sequence[Cheapest | Infeasible]) -> Cheapest | Infeasible:
    """Returns the cheapest plan, of equal ones that within whose limits more requests are; without one, the pair that
    comes nearest."""
    plans = [f for f in results if isinstance(f, Cheapest)]
    if plans:
        return min(plans, key=lambda f: (f.price, -f.evaluated.outcome.met_share))
    return max(results, key=lambda f: f.evaluated.outcome.met_share)


def error_of(calibration: Calibration, number: str) -> float | None:
    """Returns the measured relative error of the simulator for a number such as `ttft_p50`, if it was measured."""
    return calibration.errors.get(number)
