"""One tenant at ten times its load: what others notice, with the production dispatcher in virtual time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.core import virtual_counters
from sim.scale.members import ClusterShape
from sim.scale.replay import Replay
from sim.scale.workload import Lengths, poisson
from sim.stats import percentile
from sim.trace import TraceRow
from tests.support.scale import CALIBRATION

SECONDS, OTHERS, HEAVY = 60, 6, "heavy"
PROMPTS, OUTPUTS = Lengths(200, 1500), Lengths(20, 60)
_COSTS = replace(CALIBRATION, prefill_worker=replace(CALIBRATION.prefill_worker, step_tokens=512))
CLUSTER = ClusterShape(_COSTS, 1, _COSTS, 3, max_queued_requests=1 << 20, max_queued_tokens=1 << 30)
BIG_STEPS = ClusterShape(CALIBRATION, 1, CALIBRATION, 3, max_queued_requests=1 << 20, max_queued_tokens=1 << 30)
"""With steps of 2,048 tokens."""


def paced(tenant: str, seed: int, prompts: Lengths = PROMPTS, per_s: float = 1.0) -> list[TraceRow]:
    """So many requests per second, each of which is less than a seventh of what the cluster can do."""
    lengths, phase = poisson(3.0 * per_s, SECONDS, prompts, OUTPUTS, seed), random.Random(seed).random()
    return [replace(row, at_s=(n + phase) / per_s, tenant=tenant) for n, row in enumerate(lengths[:SECONDS])]


def ttft_p99_s(rows: Sequence[TraceRow], cluster: ClusterShape = CLUSTER) -> dict[bool, float]:
    """Returns the 99th percentile of the heavy tenant's (True) and of the others' (False) times to first token."""
    rows = sorted(rows, key=lambda row: row.at_s)
    replay = Replay(cluster, rows)
    assert not replay.run().refused
    times = list(zip(rows, replay.measured.times, strict=True))
    kinds = {row.tenant in (HEAVY, "") for row in rows}
    return {
        heavy: percentile(sorted(t.ttft_s or 0.0 for row, t in times if (row.tenant in (HEAVY, "")) is heavy), 99)
        for heavy in kinds
    }


def test_others_notice_little_of_a_tenant_at_ten_times_its_load() -> None:
    others = [row for number in range(OTHERS) for row in paced(f"t{number}", number + 1)]
    heavy = [replace(row, tenant=HEAVY) for row in poisson(10.0, SECONDS, PROMPTS, OUTPUTS, 99)]
    alone = ttft_p99_s(others)[False]
    both = ttft_p99_s(others + heavy)
    assert both[False] <= 1.3 * alone
    assert both[True] > 20 * alone, "more arrives than the cluster can do"
    as_one = ttft_p99_s([replace(row, tenant="") for row in others + heavy])[True]
    assert as_one > 20 * alone, "first come, first served, all wait for the heavy tenant"


def test_others_whose_requests_follow_each_other_closely_notice_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what the cluster can do comes from the others, each of which sends less than its share."""
    others = [
        replace(row, tenant=f"t{number}")
        for number in range(OTHERS)
        for row in poisson(1.0, 2 * SECONDS, PROMPTS, OUTPUTS, number + 1)
    ]
    heavy = [replace(row, tenant=HEAVY) for row in poisson(10.0, 2 * SECONDS, PROMPTS, OUTPUTS, 99)]
    alone = ttft_p99_s(others)[False]
    assert ttft_p99_s(others + heavy)[False] <= 1.1 * alone
    monkeypatch.setattr(virtual_counters, "IDLE_CREDIT", 0)
    assert ttft_p99_s(others + heavy)[False] > 1.8 * alone, "the heavy tenant has a turn between them"


def test_others_notice_little_of_a_tenant_that_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause, with more than the cluster can do: it has all of its credit, and the others have little."""
    begins, ends = 20.0, 60.0
    loads = []
    for seed in range(2):
        others = [
            replace(row, tenant=f"t{number}")
            for number in range(OTHERS)
            for row in poisson(1.0, ends, PROMPTS, OUTPUTS, 100 * seed + number + 1)
        ]
        heavy = poisson(10.0, ends - begins, PROMPTS, OUTPUTS, 999 + seed)
        loads.append((others, [replace(row, tenant=HEAVY, at_s=row.at_s + begins) for row in heavy]))

    def p99_s(*, beside: bool) -> float:
        times = list[float]()
        for others, heavy in loads:
            rows = sorted([*others, *heavy] if beside else others, key=lambda row: row.at_s)
            replay = Replay(CLUSTER, rows)
            replay.run()
            measured = zip(rows, replay.measured.times, strict=True)
            times += [t.ttft_s or 0.0 for row, t in measured if row.tenant != HEAVY and row.at_s >= begins]
        return percentile(sorted(times), 99)

    alone = p99_s(beside=False)
    assert p99_s(beside=True) <= 1.4 * alone
    monkeypatch.setattr(virtual_counters, "BURST", 1 << 30)
    assert p99_s(beside=True) > 1.6 * alone, "it uses up its credit, and they have little"


def test_others_notice_little_where_several_prompts_fit_into_a_step() -> None:
    prompts = Lengths(50, 400)
    others = [row for number in range(OTHERS) for row in paced(f"t{number}", number + 1, prompts, per_s=2.0)]
    heavy = [replace(row, tenant=HEAVY) for row in poisson(20.0, SECONDS / 2, prompts, OUTPUTS, 99)]
    assert ttft_p99_s(others + heavy)[False] <= 1.65 * ttft_p99_s(others)[False]


def test_others_do_not_wait_for_prompts_of_twenty_steps() -> None:
    """Beside a tenant whose prompts of 20 steps are more than the only prefill worker can do. What others wait for is
    the step that computes, which takes longer than one of their prompts."""
    others = [
        replace(row, tenant=f"t{number}")
        for number in range(2)
        for row in poisson(4.0, SECONDS, Lengths(50, 200), OUTPUTS, number + 1)
    ]
    long = [replace(row, tenant=HEAVY) for row in poisson(2.0, SECONDS, Lengths(10_240, 10_240), OUTPUTS, 99)]
    alone, both = ttft_p99_s(others)[False], ttft_p99_s(others + long)
    assert both[False] <= 4 * alone
    assert both[True] > 100 * alone, "more arrives than the cluster can do"


def test_others_wait_for_a_step_and_not_for_prompts_of_two_to_four() -> None:
    """These take half of the only prefill worker."""
    others = [
        replace(row, tenant=f"t{number}")
        for number in range(2)
        for row in poisson(4.0, SECONDS, Lengths(50, 200), OUTPUTS, number + 1)
    ]
    longer = [replace(row, tenant=HEAVY) for row in poisson(1.0, SECONDS, Lengths(4000, 8000), OUTPUTS, 99)]
    alone, both = ttft_p99_s(others, BIG_STEPS), ttft_p99_s(others + longer, BIG_STEPS)
    assert both[False] <= 6 * alone[False]
