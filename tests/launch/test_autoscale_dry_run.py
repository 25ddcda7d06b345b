"""The law on a simulated cluster: production placement and schedulers in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.autoscale.law import Policy
from launch.autoscale.simulate import dry_run, reversals
from sim.scale.members import ClusterShape
from sim.scale.planner import Size
from sim.scale.workload import Lengths, poisson, scaled
from sim.stats import Slo
from sim.trace import TraceRow, read_trace, trace_path
from tests.support.scale import CALIBRATION

KIND = replace(
    CALIBRATION,
    prefill_worker=replace(CALIBRATION.prefill_worker, start_s=20.0),
    decode_worker=replace(CALIBRATION.decode_worker, start_s=20.0),
)
POLICY = Policy(Slo(1.0, 0.05, 0.95), KIND, KIND, Size(1, 1), Size(100, 100), down_s=180.0, idle_s=120.0)


def burst(rate: float, times: float, begin_s: float, length_s: float, whole_s: float) -> list[TraceRow]:
    """Random requests, `times` as many for `length_s` from `begin_s` on."""
    lengths = Lengths(800, 800, 2400), Lengths(60, 60, 150)
    base = poisson(rate, whole_s, *lengths, seed=1)
    more = poisson(rate * (times - 1), length_s, *lengths, seed=2)
    shifted = (TraceRow(row.at_s + begin_s, row.input_len, row.output_len) for row in more)
    return sorted((*base, *shifted), key=lambda row: row.at_s)


def test_a_burst_is_served_in_time_with_fewer_worker_hours_than_its_size_all_the_time() -> None:
    made = dry_run(POLICY, burst(3.0, 5.0, 400.0, 200.0, 1200.0))
    assert not made.outcome.refused
    assert made.warm_met_ttft >= 0.95 and made.warm_requests > 0.8 * made.outcome.requests
    largest = max(change.decision.size.prefill for change in made.changes)
    assert largest >= 3
    assert made.prefill_hours <= 0.7 * largest * 1200.0 / 3600.0
    sizes = [change.decision.size.prefill for change in made.changes]
    assert reversals(sizes) <= 2, sizes  # it began cold, and then followed the burst up and down
    assert made.changes[0].decision.reasons[0]


def test_from_zero_everything_is_served_and_the_end_is_zero() -> None:
    rows = [TraceRow(300.0 + i * 0.5, 500, 40) for i in range(100)] + [TraceRow(900.0, 500, 40)]
    made = dry_run(replace(POLICY, least=Size(0, 0)), [TraceRow(0.0, 10, 1), *rows])
    assert not made.outcome.refused and made.outcome.e2e.count == 102
    sizes = [change.decision.size for change in made.changes]
    assert sizes[0] == Size(1, 1) and Size(0, 0) in sizes
    assert sizes[-1] != Size(0, 0)  # the last request has only just ended
    assert made.prefill_hours * 3600 < 600.0


def test_the_same_load_gives_the_same_decisions() -> None:
    trace = scaled(read_trace(trace_path("azure-conv"))[:120], 2.0, seed=3)
    rows = [replace(row, at_s=row.at_s - trace[0].at_s) for row in trace]
    assert dry_run(POLICY, rows) == dry_run(POLICY, rows)


def test_the_law_counts_hand_overs_among_the_work_of_a_prefill_worker() -> None:
    costly = replace(KIND, link=replace(KIND.link, offer_s=0.0, send_s=KIND.prompt_s(800)))
    assert costly.prompt_s(800) == pytest.approx(2 * KIND.prompt_s(800))
    rows, largest = poisson(20.0, 40.0, Lengths(800, 800), Lengths(60, 60), seed=1), []
    for kind in (KIND, costly):
        made = dry_run(replace(POLICY, prefill=kind), rows)
        largest.append(max(change.decision.size.prefill for change in made.changes))
    assert largest[1] > largest[0]


def test_workers_start_in_the_measured_time_and_decisions_are_as_often_as_asked() -> None:
    """The law itself assumes a start of 10 s at least."""
    fast = replace(KIND, prefill_worker=replace(KIND.prefill_worker, start_s=2.0))
    rows = burst(6.0, 5.0, 120.0, 60.0, 240.0)
    made = dry_run(replace(POLICY, prefill=fast, limit=Size(100, 1)), rows, Size(1, 1), every_s=1.0)
    sizes = [Size(1, 1), *(change.decision.size for change in made.changes)]
    raised = [
        c.at_s for c, before in zip(made.changes, sizes, strict=False) if c.decision.size.prefill > before.prefill
    ]
    assert raised and any((at_s - rows[0].at_s) % 5.0 > 1e-6 for at_s in raised)
    cold = sum(any(at_s <= row.at_s <= at_s + 2.0 for at_s in raised) for row in rows)
    assert cold > 0 and made.warm_requests == len(rows) - cold


def test_on_a_core_of_its_own_a_worker_computes_no_step_while_it_hands_over() -> None:
    costly = replace(KIND, link=replace(KIND.link, send_s=KIND.prompt_s(800)))
    rows = poisson(4.0, 60.0, Lengths(800, 800), Lengths(60, 60), seed=1)
    one = replace(POLICY, prefill=costly, limit=Size(1, 1))
    apart = dry_run(one, rows, Size(1, 1))
    shared = dry_run(one, rows, ClusterShape(costly, 1, KIND, 1, ((0,), (1,)), 3, (2,)))
    assert [t.sent_at for t in shared.times] == [row.at_s for row in rows]
    assert shared.outcome.ttft.p50 > apart.outcome.ttft.p50


def test_reversals() -> None:
    assert reversals([1, 2, 3, 3, 2, 1]) == 1 and reversals([1, 2, 1, 2]) == 2 and reversals([4]) == 0
