"""The search: the plan meets the limits, and one worker less of either role misses them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from coordinator.policy.split import Split
from sim.scale.members import ClusterShape
from sim.scale.planner import (
    Cheapest,
    Evaluated,
    Infeasible,
    Pair,
    Size,
    cheapest,
    evaluate_times,
    lower_bound,
    one_fewer,
    search,
    search_one_pool,
)
from sim.scale.replay import Replay
from sim.scale.results import Outcome
from sim.scale.workload import Lengths, first_seconds, poisson
from sim.stats import Slo
from sim.trace import TraceRow, read_trace, trace_path
from tests.support.scale import CALIBRATION, even

PAIR = Pair(CALIBRATION, CALIBRATION, 3.0, 2.0)


def replayed(rows: Sequence[TraceRow], slo: Slo) -> object:
    def evaluate(pair: Pair, size: Size) -> Evaluated:
        split: Split = "always" if size.prefill else "never"
        replay = Replay(ClusterShape(pair.prefill, size.prefill, pair.decode, size.decode, split=split), rows)
        return evaluate_times(replay.run(slo), replay.measured.times, slo)

    return evaluate


def plan(rows: Sequence[TraceRow], slo: Slo, pair: Pair = PAIR) -> Cheapest | Infeasible:
    return search(pair, slo, rows, replayed(rows, slo))  # type: ignore[arg-type]


def test_no_batch_generates_more_than_the_fewest_workers_that_the_search_begins_with() -> None:
    """A token costs least in a batch of eight here, half of what it costs in the largest one."""
    decode = replace(CALIBRATION.decode, base_s=0.008, row_s=0.0, beyond=((8, 0.0021),))
    per_token = min(decode.plain_s(size, 0) / size for size in range(1, 257))
    rows = even(400, 0.01, 100, 1000)
    seconds = sum(per_token * row.output_len for row in rows) / (rows[-1].at_s - rows[0].at_s)
    pair = Pair(CALIBRATION, replace(CALIBRATION, decode=decode))
    assert lower_bound(pair, rows).decode == math.ceil(seconds)


@pytest.mark.parametrize(
    ("rows", "slo"),
    [
        pytest.param(poisson(25.0, 10.0, Lengths(500, 3000), Lengths(20, 80), 1), Slo(0.6, 0.02), id="rate"),
        pytest.param(first_seconds(read_trace(trace_path("azure-code")), 60.0), Slo(0.8, 0.05), id="azure code"),
    ],
)
def test_one_worker_below_the_plan_misses_the_limits(rows: Sequence[TraceRow], slo: Slo) -> None:
    found = plan(rows, slo)
    assert isinstance(found, Cheapest) and found.evaluated.met(slo)
    again = replayed(rows, slo)
    for size in one_fewer(found.size):
        assert not again(PAIR, size).met(slo), size  # type: ignore[operator]
    assert found.size.prefill + found.size.decode > 2
    assert found.price == found.size.prefill * 3.0 + found.size.decode * 2.0


def test_without_a_prefill_pool_one_worker_below_the_plan_misses_the_limits() -> None:
    rows, slo = poisson(25.0, 10.0, Lengths(500, 3000), Lengths(20, 80), 1), Slo(0.6, 0.05)
    plan = search_one_pool(PAIR, slo, rows, replayed(rows, slo))  # type: ignore[arg-type]
    assert isinstance(plan, Cheapest) and plan.evaluated.met(slo) and plan.price == plan.size.decode * 2.0
    assert plan.size.prefill == 0 and plan.evaluated.outcome.on_decode == len(rows)
    (fewer,) = one_fewer(plan.size)
    assert not plan.tried[fewer].met(slo) and fewer.decode > 0


def test_without_a_prefill_pool_a_short_load_needs_fewer_workers_than_an_endless_one() -> None:
    rows, slo = [TraceRow(0.01 * number, 20, 400) for number in range(60)], Slo(10.0, 0.5)
    plan = search_one_pool(PAIR, slo, rows, replayed(rows, slo))  # type: ignore[arg-type]
    assert isinstance(plan, Cheapest) and plan.size.decode < lower_bound(PAIR, rows).decode
    assert all(not plan.tried[fewer].met(slo) for fewer in one_fewer(plan.size))


def test_a_limit_that_no_cluster_meets_is_named_with_the_nearest_one() -> None:
    rows, slo = even(40, 0.1, 2000, 60), Slo(0.05, 0.02)  # computing 2000 tokens takes longer
    found = plan(rows, slo)
    assert isinstance(found, Infeasible) and found.missed == ("ttft",)
    nearest = found.evaluated.nearest
    assert nearest is not None and nearest.tpot_s == 0.02 and 0.16 < nearest.ttft_s < 0.25
    assert isinstance(plan(rows, nearest), Cheapest)
    assert cheapest([found, found]) is found


def test_requests_that_no_worker_holds_are_named() -> None:
    rows = [*even(20, 0.1), *[TraceRow(3.0 + i, 70000, 5) for i in range(20)]]
    found = plan(rows, Slo(1.0, 0.05))
    assert isinstance(found, Infeasible) and found.missed == ("requests",) and found.evaluated.nearest is None


def _stub(needed: dict[int, int]) -> object:
    """Limits are met from so many decode workers on, by the number of prefill workers."""

    def evaluate(pair: Pair, size: Size) -> Evaluated:
        least = min((d for p, d in needed.items() if p <= size.prefill), default=1 << 30)
        outcome = object.__new__(Outcome)
        met = float(size.decode >= least)
        for name, value in (("met_share", met), ("prefill_utilisation", 0.5), ("decode_utilisation", 0.5)):
            object.__setattr__(outcome, name, value)
        return Evaluated(outcome, 0.1, 0.1, None)

    return evaluate


@pytest.mark.parametrize(
    ("prices", "size"), [((1.0, 1.0), Size(4, 5)), ((1.0, 10.0), Size(7, 4)), ((10.0, 1.0), Size(3, 9))]
)
def test_the_cheapest_pair_along_the_border_is_chosen(prices: tuple[float, float], size: Size) -> None:
    pair = Pair(CALIBRATION, CALIBRATION, *prices)
    found = search(pair, Slo(1.0, 1.0), even(2, 1.0), _stub({3: 9, 4: 5, 7: 4}))  # type: ignore[arg-type]
    assert isinstance(found, Cheapest) and found.size == size
    assert len(found.tried) < 40
