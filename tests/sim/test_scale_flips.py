"""Scale mode: workers that change their roles while requests run."""

from __future__ import annotations

import random

import pytest

from baton.core.commands import Role
from baton.core.errors import Unavailable
from baton.core.request import GenerateRequest
from sim.scale.members import ClusterShape
from sim.scale.replay import Replay
from sim.scale.results import Outcome
from sim.scale.workers import SimDecodeWorker
from sim.stats import Slo
from sim.trace import TRACE_BLOCK, TraceRow
from tests.support.scale import even, shape

LIMIT_S: dict[Role, float] = {"decode": 0.5, "prefill": 30.0}
FEW_BLOCKS = shape(2, 2, blocks=90)
Flips = list[tuple[float, str, Role]]
THERE_AND_BACK: Flips = [(1.0, "prefill-1", "decode"), (3.0, "decode-0", "prefill"), (5.0, "prefill-1", "prefill")]


def flipped(replay: Replay, flips: Flips, limit_s: dict[Role, float] = LIMIT_S) -> Outcome:
    for at_s, name, role in flips:
        replay.loop.at(at_s, replay.flip, name, role, limit_s[role], 0.2)
    outcome = replay.run(Slo(1.0, 0.05))
    assert replay.measured.flips == len(flips)
    assert not outcome.refused and outcome.e2e.count == outcome.requests, "a request did not end"
    return outcome


@pytest.mark.parametrize(
    ("cluster", "rows"),
    [
        pytest.param(shape(2, 2), even(60, 0.1), id="light"),
        pytest.param(shape(2, 2), even(30, 0.2, 9000, 300), id="long"),
        pytest.param(FEW_BLOCKS, even(60, 0.1, 300, 200), id="few blocks"),
    ],
)
@pytest.mark.parametrize("limit_s", [LIMIT_S, {"decode": 0.0, "prefill": 0.1}], ids=["patient", "at once"])
def test_every_request_ends_with_all_its_tokens(
    cluster: ClusterShape, rows: list[TraceRow], limit_s: dict[Role, float]
) -> None:
    replays = [Replay(cluster, rows, fast=fast) for fast in (True, False)]
    fast, slow = (flipped(replay, THERE_AND_BACK, limit_s) for replay in replays)
    assert {w.name: w.scheduler.num_sequences for w in replays[0].members.present()} == dict.fromkeys(
        ("prefill-0", "prefill-1", "decode-0", "decode-1"), 0
    )
    assert [w.name for w in replays[0].members.present()[:3]] == ["prefill-0", "decode-0", "prefill-1"]
    assert fast.itl.count == slow.itl.count == sum(row.output_len - 1 for row in rows)
    assert fast.e2e.mean == pytest.approx(slow.e2e.mean, rel=0.02)


def test_what_a_worker_has_not_done_in_time_is_done_by_others() -> None:
    rows = [TraceRow(0.0, 9000, 400) for _ in range(4)]
    for name, role, at_s in (("prefill-1", "decode", 0.3), ("decode-1", "prefill", 3.0)):
        moved, kept = Replay(shape(2, 2), rows), Replay(shape(2, 2), rows)
        slower = flipped(moved, [(at_s, name, role)], {"decode": 0.1, "prefill": 0.1})
        patient = flipped(kept, [(at_s, name, role)], {"decode": 60.0, "prefill": 60.0})
        assert moved.measured.rescheduled > 0 == kept.measured.rescheduled
        assert slower.e2e.max > patient.e2e.max, "it is computed again"
        assert slower.itl.count == 4 * 399


def test_a_flip_takes_its_time_from_the_last_sequence_on() -> None:
    replay = Replay(shape(2, 1), [TraceRow(0.0, 9000, 2), TraceRow(9.0, 300, 2)])
    replay.loop.at(0.1, replay.flip, "prefill-0", "decode", 30.0, 2.0)
    replay.run()
    done, joined = replay.measured.times[0].prefilled_at, replay.members._since["prefill-0"]
    assert done <= joined <= done + 0.2, "it was idle"
    assert replay.table.get("prefill-0").since == pytest.approx(joined + 2.0)  # type: ignore[union-attr]


def test_cached_prefixes_stay() -> None:
    known = [tuple(range(8)), tuple(range(8, 16))]
    sent = [(0.0, known[0]), (0.0, known[1]), (10.0, known[1])]
    rows = [TraceRow(at_s, 8 * TRACE_BLOCK + 40, 20, blocks) for at_s, blocks in sent]
    there_and_back: Flips = [(5.0, "prefill-1", "decode"), (7.0, "prefill-1", "prefill")]
    replay = Replay(shape(2, 2), rows)
    flipped(replay, there_and_back)
    assert [times.cached for times in replay.measured.times] == [0, 0, 8 * TRACE_BLOCK]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Decode workers whose names are in this set refuse KV."""
    names, reserve = set[str](), SimDecodeWorker.reserve

    def refuse(worker: SimDecodeWorker, request: GenerateRequest) -> int:
        if worker.name in names:
            raise Unavailable("no blocks are free")
        return reserve(worker, request)

    monkeypatch.setattr(SimDecodeWorker, "reserve", refuse)
    return names


def test_parked_kv_goes_to_a_worker_that_joins_and_from_one_that_leaves(full: set[str]) -> None:
    for name, role in (("prefill-1", "decode"), ("prefill-0", "decode")):
        full.add("decode-0")
        replay = Replay(shape(2, 1), [TraceRow(0.0, 1000, 20)])
        flipped(replay, [(2.0, name, role)])
        assert replay.measured.rescheduled == (name == "prefill-0"), "its KV was at prefill-0"
        assert replay.measured.times[0].last_at > 2.2


def test_kv_is_not_offered_to_a_worker_that_has_left(full: set[str]) -> None:
    replay = Replay(shape(1, 3), [TraceRow(0.0, 2048, 5)] * 2)  # the second waits for a step

    def leave() -> None:
        (_, second) = replay._jobs.values()
        preferred, spare = (target.worker_id for target in second.choice.targets)
        full.add(preferred)
        replay.flip(spare, "prefill", 0.0, 0.1)

    replay.loop.at(0.05, leave)
    assert replay.run().e2e.count == 2
    assert replay.measured.flips == 1


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.long if n > 5 else ()) for n in range(12)])
def test_flips_at_random_under_load(seed: int) -> None:
    """With so few blocks KV is parked, decode preempts, and workers leave for which prompts were meant."""
    source = random.Random(seed)
    rows = [TraceRow(i * 0.04, source.choice((20, 300, 900)), source.choice((2, 30, 200))) for i in range(150)]
    replay = Replay(shape(3, 3, blocks=90, max_running=6), rows)

    def change() -> None:
        ready = [worker for worker in replay.table.present() if worker.ready]
        source.shuffle(ready)
        for worker in ready:
            if sum(other.role == worker.role for other in ready) > 1:
                replay.flip(worker.worker_id, "decode" if worker.role == "prefill" else "prefill", 0.05, 0.1)
                break
        if replay.in_flight:
            replay.loop.later(source.uniform(0.05, 0.4), change)

    replay.loop.at(0.5, change)
    outcome = replay.run()
    assert replay.measured.flips > 10 < replay.measured.rescheduled
    assert outcome.itl.count == sum(row.output_len - 1 for row in rows)
    assert outcome.e2e.count == len(rows) and outcome.ttft.count == len(rows)
