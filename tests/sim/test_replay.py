"""Scale mode: times that follow from the costs, and steps computed at once that equal steps computed one by one."""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import pytest

from sim.loop import Loop
from sim.scale.host import Host, Thread
from sim.scale.members import ClusterShape
from sim.scale.replay import Replay
from sim.scale.workload import first_seconds, scaled
from sim.stats import Slo
from sim.trace import TraceRow, read_trace, trace_path
from tests.support.scale import CALIBRATION, even, shape

SLO = Slo(1.0, 0.05)
SHORT_BLOCKS = shape(blocks=90)
UNEVEN = [TraceRow(i * 0.05, 100, 600 if i % 3 == 0 else 15) for i in range(50)]
"""Outputs that are often longer than recent ones: they need more blocks than is expected."""


def test_one_request_takes_what_its_parts_cost() -> None:
    replay = Replay(shape(), [TraceRow(0.0, 1000, 11)])
    outcome = replay.run(SLO)
    costs, front, link = CALIBRATION.prefill, CALIBRATION.front, CALIBRATION.link
    ttft_s = front.request_s + costs.prompt_s(1000, 2048)
    hand_over_s = 1000 * CALIBRATION.token_bytes / link.bytes_per_s + link.latency_s
    decode_s = sum(CALIBRATION.decode.plain_s(1, 1001 + i) for i in range(10))
    assert outcome.ttft.p50 == pytest.approx(ttft_s, rel=1e-9)
    assert outcome.e2e.p50 == pytest.approx(ttft_s + hand_over_s + decode_s, rel=1e-9)
    assert outcome.tpot.p50 == pytest.approx((hand_over_s + decode_s) / 10, rel=1e-9)
    assert (outcome.itl.count, outcome.met_share, outcome.steps) == (10, 1.0, 11)
    assert outcome.steps_at_once > 0


@pytest.mark.parametrize(
    ("cluster", "rows"),
    [
        pytest.param(shape(), even(40, 0.2), id="light"),
        pytest.param(shape(2, 3), even(300, 0.02, 500, 80), id="several workers"),
        pytest.param(shape(max_running=4), even(60, 0.03), id="more than run at once"),
        pytest.param(shape(2, 2), even(50, 0.05, 6000, 30), id="prompts of several steps"),
        pytest.param(shape(), [TraceRow(i / 9, 20, 1 + i % 2) for i in range(30)], id="short outputs"),
        pytest.param(replace(shape(0, 2), split="never"), even(60, 0.05, 900, 30), id="prompts on decode"),
        pytest.param(replace(shape(0), split="never"), [TraceRow(0.0, 513, 11)], id="a prompt's last token alone"),
        pytest.param(shape(3, 9), scaled(first_seconds(read_trace(trace_path("azure-conv")), 20), 3, 1), id="trace"),
    ],
)
def test_steps_at_once_equal_steps_one_by_one(cluster: ClusterShape, rows: list[TraceRow]) -> None:
    at_once, one_by_one = Replay(cluster, rows), Replay(cluster, rows, fast=False)
    fast, slow = at_once.run(SLO), one_by_one.run(SLO)
    assert fast.events < slow.events or max(row.output_len for row in rows) < 3
    for a, b in zip(at_once.measured.times, one_by_one.measured.times, strict=True):
        assert (a.first_at, a.last_at) == pytest.approx((b.first_at, b.last_at), abs=1e-6)
    assert (fast.steps, fast.preemptions, fast.itl.count) == (slow.steps, slow.preemptions, slow.itl.count)
    assert fast.decode_utilisation == pytest.approx(slow.decode_utilisation, rel=1e-6)
    assert fast.itl.p99 == pytest.approx(slow.itl.p99, rel=0.02)


@pytest.mark.parametrize(
    ("cluster", "rows"),
    [
        pytest.param(shape(2, 3), even(300, 0.02, 500, 80), id="several workers"),
        pytest.param(shape(max_running=4), even(60, 0.03), id="more than run at once"),
        pytest.param(SHORT_BLOCKS, UNEVEN, id="few blocks"),
        pytest.param(shape(), [TraceRow(i / 9, 20, 1 + i % 2) for i in range(30)], id="short outputs"),
        pytest.param(shape(2, 2), [TraceRow(i / 5, 1024, 40, (0, i)) for i in range(30)], id="prefixes"),
    ],
)
def test_ends_without_planning_equal_planned_ones(cluster: ClusterShape, rows: list[TraceRow]) -> None:
    """Planned as in a replay that compares the costs of prompts."""
    short, planned = Replay(cluster, rows), Replay(cluster, rows)
    planned.compares_costs = True
    a, b = short.run(SLO), planned.run(SLO)
    assert a.events < b.events or max(row.output_len for row in rows) < 3
    assert (a.requests, a.steps, a.itl.count, a.preemptions) == (b.requests, b.steps, b.itl.count, b.preemptions)
    for one, other in zip(short.measured.times, planned.measured.times, strict=True):
        assert (one.first_at, one.last_at) == pytest.approx((other.first_at, other.last_at), rel=1e-9)


def test_a_request_leaves_nothing_for_the_garbage_collector() -> None:
    """A replay runs without it."""
    replay = Replay(shape(2, 3), even(200, 0.02, 500, 80))
    gc.collect()
    replay.run(SLO)
    assert gc.isenabled()
    assert gc.collect() < 20


def test_one_request_on_decode_takes_its_prompt_and_its_tokens() -> None:
    outcome = Replay(replace(shape(0), split="never"), [TraceRow(0.0, 1000, 11)]).run(SLO)
    costs = CALIBRATION.decode
    attention_s = CALIBRATION.prefill.pair_s * 1000 * 1001 / 2
    prompt_s = costs.plain_s(1, 512) + costs.plain_s(1, 1000) + costs.token_s * 998 + attention_s
    assert outcome.ttft.p50 == pytest.approx(CALIBRATION.front.request_s + prompt_s, rel=1e-9)
    assert outcome.tpot.p50 == pytest.approx(sum(costs.plain_s(1, 1001 + i) for i in range(10)) / 10, rel=1e-9)
    assert (outcome.on_decode, outcome.prefill_utilisation) == (1, 0.0)


def test_auto_moves_prompts_to_decode_while_prefill_is_busy() -> None:
    rows = even(60, 0.02, 3000, 20)
    always, auto = (Replay(replace(shape(1, 2), split=split), rows).run(SLO) for split in ("always", "auto"))
    assert 0 < auto.on_decode < 60 and always.on_decode == 0
    assert auto.ttft.p99 < always.ttft.p99


def test_short_blocks_preempt_and_queue() -> None:
    """Boosts depend on the expected cost of recomputation, which follows the steps that were computed by themselves,
    and a run reports all its steps at its end: both ways are alike, not always equal."""
    outcome, slow = Replay(SHORT_BLOCKS, UNEVEN).run(SLO), Replay(SHORT_BLOCKS, UNEVEN, fast=False).run(SLO)
    assert outcome.preemptions == pytest.approx(slow.preemptions, rel=0.1)
    assert (outcome.ttft.p50, outcome.tpot.p50) == pytest.approx((slow.ttft.p50, slow.tpot.p50), rel=0.01)
    assert outcome.preemptions > 0 and outcome.queued_most > 1
    assert outcome.waits_s["queue"] > 1.0 and outcome.met_share < 0.5


def test_a_closed_loop_keeps_its_number_of_requests() -> None:
    replay = Replay(shape(), even(40, 0.0), clients=4)
    outcome = replay.run(SLO)
    times = replay.measured.times
    assert outcome.requests == 40 and not outcome.refused
    assert max(sum(a.sent_at <= t.sent_at < a.last_at for a in times) for t in times) == 4


def test_a_full_queue_refuses() -> None:
    cluster = replace(shape(), max_queued_requests=5)
    outcome = Replay(cluster, even(100, 0.0001, 2000)).run(SLO)
    assert sum(outcome.refused.values()) > 50 and outcome.requests == 100
    assert outcome.met_share <= (100 - sum(outcome.refused.values())) / 100


def test_shared_prefixes_are_computed_once() -> None:
    rows = [TraceRow(i * 0.5, 2048, 5, (0, 1, 2, 3 + i)) for i in range(10)]
    apart = [TraceRow(i * 0.5, 2048, 5, tuple(range(4 * i, 4 * i + 4))) for i in range(10)]
    shared, alone = Replay(shape(2, 2), rows).run(SLO), Replay(shape(2, 2), apart).run(SLO)
    assert shared.cached_share > 0.6 and alone.cached_share == 0.0
    assert shared.prefill_utilisation < 0.5 * alone.prefill_utilisation


def test_speculation_accepts_with_the_measured_probability() -> None:
    decode = replace(CALIBRATION.decode, accepted=0.8, draft_s=2e-4)
    calibration = replace(CALIBRATION, decode=decode, max_model_len=2048)
    worker = replace(calibration.decode_worker, blocks=400)
    drafting = ClusterShape(
        replace(calibration, decode_worker=worker), 1, replace(calibration, decode_worker=worker), 1
    )
    plain = Replay(shape(), even(5, 1.0, 100, 100)).run(SLO)
    fast = Replay(drafting, even(5, 1.0, 100, 100)).run(SLO)
    assert fast.steps < 0.6 * plain.steps and fast.tpot.p50 < 0.7 * plain.tpot.p50


def test_on_a_shared_host_offers_delay_first_tokens_and_messages_take_time() -> None:
    """One request: a first token is later by the work of the offer; each token passes coordinator and client."""
    front = replace(CALIBRATION.front, request_s=0.0, request_cpu_s=0.0, message_cpu_s=1e-3, token_cpu_s=0.0)
    front = replace(front, client_message_cpu_s=2e-3)
    link = replace(CALIBRATION.link, offer_s=0.01, accept_s=0.02, receive_s=2e-3)
    kind = replace(CALIBRATION, front=front, link=link)
    host = ClusterShape(kind, 1, kind, 1, cores=((0,), (1,)), host_cores=3)
    times = [Replay(host, [TraceRow(0.0, 1000, length)]) for length in (1, 3)]
    alone, handed = (replay.run(SLO).ttft.p50 for replay in times)
    assert alone == pytest.approx(kind.prefill.prompt_s(1000, 2048) + 1e-3)
    assert handed == pytest.approx(alone + 0.01)
    (request,) = times[1].measured.times
    hand_over_s = link.latency_s + 1000 * kind.token_bytes / link.bytes_per_s + 2e-3
    decode_s = kind.decode.plain_s(1, 1001) + kind.decode.plain_s(1, 1002)
    assert request.last_at - request.first_at == pytest.approx(hand_over_s + decode_s, rel=1e-6)


def test_coordinator_and_client_on_the_decode_workers_core_delay_its_steps() -> None:
    front = replace(CALIBRATION.front, request_s=0.0, request_cpu_s=0.0, message_cpu_s=1e-3, token_cpu_s=0.0)
    kind = replace(CALIBRATION, front=replace(front, client_message_cpu_s=2e-3))
    apart = ClusterShape(kind, 1, kind, 1, cores=((0,), (1,)), host_cores=3, front_cores=(2,))
    ended = []
    for cluster in (apart, replace(apart, front_cores=(0,)), replace(apart, front_cores=(1,))):
        replay = Replay(cluster, [TraceRow(0.0, 1000, 21)])
        replay.run(SLO)
        ended.append(replay.measured.times[0].last_at)
    on_a_free_core, beside_prefill, beside_decode = ended
    assert beside_prefill == pytest.approx(on_a_free_core)
    assert beside_decode == pytest.approx(on_a_free_core + 19 * 3e-3)  # every message but the first and the last


def test_tasks_on_one_core_share_it() -> None:
    loop, ended = Loop(0), dict[str, float]()
    host = Host(loop, 2)
    thread = Thread(loop, host)
    host.run(1.0, (0,), lambda: ended.update(a=loop.now))
    host.run(0.5, (0,), lambda: ended.update(b=loop.now))
    host.run(1.0, (0, 1), lambda: ended.update(both=loop.now))
    thread.run(0.25, lambda: ended.update(job=loop.now))
    thread.run(0.25, lambda: ended.update(next=loop.now))
    while loop.next():
        pass
    # Three on core 0 until b ends, at 1.5 s; core 1 has the thread's jobs besides.
    assert ended["b"] == pytest.approx(1.5) and ended["a"] == pytest.approx(2.5)
    assert ended["both"] == pytest.approx(2.5)
    assert ended["job"] == pytest.approx(0.5) and ended["next"] == pytest.approx(1.0)
    assert thread.busy_s == pytest.approx(0.5)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.long if n > 2 else ()) for n in range(6)])
def test_steps_at_once_equal_steps_one_by_one_whatever_interrupts_them(seed: int) -> None:
    """So few sequences run at once that requests wait for a decode worker: each arrival then interrupts the runs, often
    while a sequence whose KV has arrived waits for the next step."""
    source = random.Random(seed)
    rows = [TraceRow(i * 0.02, source.choice((20, 300, 900)), source.choice((2, 30, 90))) for i in range(150)]
    at_once, one_by_one = (Replay(shape(2, 3, max_running=6), rows, fast=fast) for fast in (True, False))
    fast, slow = at_once.run(SLO), one_by_one.run(SLO)
    assert fast.queued_most == slow.queued_most > 5 and fast.steps == slow.steps
    for a, b in zip(at_once.measured.times, one_by_one.measured.times, strict=True):
        assert (a.first_at, a.last_at) == pytest.approx((b.first_at, b.last_at), abs=1e-6)


def test_a_run_that_is_interrupted_at_its_very_end_has_its_last_step() -> None:
    """As by an event at that time that was scheduled before it."""
    rows = [TraceRow(0.0, 300, 40)]
    plain, interrupted = Replay(shape(), rows), Replay(shape(), rows)

    def interrupt() -> None:
        (worker,) = interrupted._decode.values()
        assert worker._run is not None and worker._run.timer is not None
        interrupted.loop.now = worker._run.timer[0]
        assert worker.interrupt() and not worker.interrupt()

    interrupted.loop.at(0.2, interrupt)
    assert interrupted.run(SLO).steps == plain.run(SLO).steps
    (a,), (b,) = interrupted.measured.times, plain.measured.times
    assert a.last_at == pytest.approx(b.last_at)
