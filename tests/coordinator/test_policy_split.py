"""Where prompts are computed: the decision, and what follows from it in the queue and for a request."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from baton.core.codes import ErrorCode
from baton.core.errors import ContextLengthExceeded
from baton.core.events import KVCacheEvents, Load, PromptCost, SequenceEnded, StageStamps, StepEvents
from baton.core.request import SamplingParams, SequenceId, TokenLogprob
from baton.runtime.config import CoordinatorOptions
from coordinator.policy.choice import Rescheduled, Stage, StartPrefill
from coordinator.policy.split import RATE_S, STREAM_WEIGHT, HandOverCost, PromptAt, StreamRate, decide
from coordinator.policy.timeline import timeline
from coordinator.policy.workers import WorkerTable
from tests.coordinator.test_policy_requests import Drive
from tests.support.builders import add_worker
from tests.support.placing import Placement, Placing, make_choice

FAST, SLOW = PromptCost(0.001, 512), PromptCost(0.002, 64, step_s=0.010)


def at(tokens: int, backlog: int = 0, cost: PromptCost = FAST) -> PromptAt:
    return PromptAt("d0" if cost is SLOW else "p0", tokens, backlog, cost)


def test_time_of_a_prompt_is_its_tokens_its_backlog_and_a_step_of_the_streams_per_chunk() -> None:
    assert at(100, 50).compute_s == pytest.approx(0.150)
    assert at(100, 50, SLOW).compute_s == pytest.approx(150 * 0.002 + 3 * 0.010)
    assert at(100, 50, SLOW).own_s == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("apart", "on_decode", "hand_over_s", "queued", "streams", "expected"),
    [
        pytest.param(at(20), at(20, cost=SLOW), 0.050, 0, 0, True, id="the hand-over costs more than computing here"),
        pytest.param(at(400), at(400, cost=SLOW), 0.050, 0, 0, False, id="prefill computes a long prompt faster"),
        pytest.param(at(20), at(20, cost=SLOW), 0.050, 0, 8, False, id="streams would wait for it"),
        pytest.param(at(500), at(20, cost=SLOW), 0.050, 0, 4, True, id="the rest is cached at decode"),
        pytest.param(at(20), at(500, cost=SLOW), 0.050, 0, 0, False, id="the rest is cached at prefill"),
        pytest.param(at(400, 900), at(400, cost=SLOW), 0.050, 0, 0, True, id="prefill has a backlog"),
        pytest.param(at(400), at(400, 900, SLOW), 0.050, 0, 0, False, id="decode has a backlog"),
        pytest.param(at(400), at(400, cost=SLOW), 0.050, 20, 4, True, id="a queue waits for prefill"),
    ],
)
def test_prompt_goes_where_all_wait_less(
    apart: PromptAt, on_decode: PromptAt, hand_over_s: float, queued: int, streams: int, expected: bool
) -> None:
    decision = decide(apart, on_decode, hand_over_s, queued, 2, streams, 1.0, stream_weight=0.02)
    assert decision.on_decode == expected == (decision.on_decode_s < decision.apart_s)


def test_a_stream_that_waits_counts_by_the_share_of_its_time() -> None:
    """The prompt takes 50 ms on decode, and 0.7 s apart."""
    assert decide(at(500, 200), at(500, cost=FAST), 0.0, 0, 2, 0, 1.0).on_decode, "no stream waits"
    priced = decide(at(500, 200), at(50), 0.0, 0, 2, streams=2, stream_s=0.95)
    assert priced.decode_others_s == pytest.approx(2 * 0.05 * 5), "5 per cent of the time of two streams"
    lasting = [decide(at(500, 200), at(50), 0.0, 0, 2, 2, stream_s=s).on_decode for s in (0.5, 1.0, 2.0)]
    assert lasting == [False, True, True], "the shorter a stream, the more it loses"
    weights = [decide(at(500, 200), at(50), 0.0, 0, 2, 2, 0.95, stream_weight=w).on_decode for w in (0, 1, 2)]
    assert weights == [True, True, False]
    assert decide(at(20), at(0), 0.0, 0, 2, 2, stream_s=0.0).on_decode, "all of it is cached"
    assert CoordinatorOptions().stream_weight == STREAM_WEIGHT, "as the simulator has it"


def test_streams_that_arrive_while_the_prompt_is_computed_wait_for_half_of_it() -> None:
    """An idle decode worker that receives streams all the time is not idle for long."""
    idle = decide(at(500, 200), at(400), 0.0, 0, 2, 0, stream_s=0.6)
    assert idle.on_decode and idle.decode_others_s == 0.0
    busy = decide(at(500, 200), at(400), 0.0, 0, 2, 0, stream_s=0.6, streams_per_s=10.0)
    assert busy.decode_others_s == pytest.approx(10.0 * 0.4 * 25 * 0.2), "each for 25 per cent of its time"
    assert not busy.on_decode and " 0 streams and 4.0 to come wait" in busy.reason


def test_the_rate_of_streams_follows_them_and_their_end() -> None:
    rate = StreamRate()
    for step in range(400):
        rate.observe(step % 2, step * 0.25)
    assert rate.per_s == pytest.approx(2.0, rel=0.05)
    rate.observe(0, 100.0 + RATE_S)
    assert rate.per_s == pytest.approx(2.0 / math.e, rel=0.05)


def test_an_idle_decode_worker_computes_no_prompts_while_streams_begin_all_the_time() -> None:
    p, on_decode = placing("auto", "p0", "d0"), list[bool]()
    for each in p.table.classes:
        each.hand_over_cost.observe(40, 0.05)
    for number in range(200):
        p.submit(make_choice(f"r{number}", 40, 50))
        placed = p.dispatcher.place()
        p.dispatcher.measure(placed, 100.0 + number * 0.02)
        on_decode.append(placed[0].on_decode)
        p.finish(f"r{number}")
    assert on_decode[0] and not on_decode[-1]
    p.dispatcher.measure([], 200.0)
    p.submit(make_choice("later", 40, 50))
    assert p.place() == [Placement("later", "d0")]


def test_reason_has_the_numbers() -> None:
    decision = decide(at(400, 100), at(20, 3, SLOW), 0.012, 4, 2, 5, 0.36)
    assert decision.reason == (
        "apart: d0 2056.0 ms (20 tokens after 3 at 500 tokens/s, 5 streams and 0.0 to come wait, which counts"
        " 2000.0 ms);"
        " p0 1312.0 ms (400 tokens after 100 at 1000 tokens/s, hand-over 12.0 ms, 4 queued wait 800.0 ms)"
    )


def test_cost_of_hand_overs_is_a_line_through_the_recent_ones() -> None:
    cost = HandOverCost()
    assert cost.seconds(100) == 0.0
    cost.observe(100, 0.02)
    assert cost.seconds(0) == cost.seconds(500) == pytest.approx(0.02), "one point has no slope"
    for tokens in (10, 50, 100, 400, 20, 300):
        cost.observe(tokens, 0.005 + tokens * 0.0001)
    for _ in range(100):
        cost.observe(200, 0.010 + 200 * 0.0002)
        cost.observe(20, 0.010 + 20 * 0.0002)
    assert cost.seconds(0) == pytest.approx(0.010, rel=0.05)
    assert cost.seconds(500) == pytest.approx(0.110, rel=0.05)


def placing(split: str, *workers: str, cost: PromptCost | None = FAST, **more: int) -> Placing:
    table = WorkerTable(3.0)
    for name in workers:
        worker = add_worker(table, name, blocks=64, **more)
        worker.load = Load(blocks_total=64, blocks_free=64, prompt_cost=cost)
    placed = Placing(table)
    placed.dispatcher.split = split  # type: ignore[assignment]
    return placed


def test_never_places_prompt_and_output_on_one_decode_worker() -> None:
    p = placing("never", "p0", "d0", "d1", step_tokens=16)
    for name in ("a", "b", "c"):
        p.submit(make_choice(name, 10, 20))
    assert p.place() == [Placement("a", "d0"), Placement("b", "d1"), Placement("c", "d0")]
    assert (p.worker("d0").backlog_tokens, p.worker("d0").running, p.worker("p0").backlog_tokens) == (20, 2, 0)
    p.check()


def test_decode_workers_take_prompts_up_to_the_backlog_of_a_prefill_worker() -> None:
    p = placing("never", "d0", step_tokens=8)
    for index in range(3):
        p.submit(make_choice(f"r{index}", 8, 20))
    assert p.names() == ["r0", "r1"] and p.dispatcher.role_without_room == "decode"
    assert p.names() == []
    choice = p.choices["r0"]
    choice.stage = Stage.DECODE
    p.dispatcher.hold(choice)
    assert p.names() == ["r2"], "its backlog fell"
    p.check()


def test_idle_decode_worker_takes_a_prompt_of_any_length() -> None:
    p = placing("never", "d0", step_tokens=8)
    p.submit(make_choice("long", 100, 120))
    assert p.names() == ["long"]
    assert p.dispatcher.missing_role() is None, "a backlog is no reason to refuse"


def test_auto_without_prefill_workers_is_never() -> None:
    p = placing("auto", "d0")
    p.submit(make_choice("a", 10, 20))
    assert p.place() == [Placement("a", "d0")]
    decision = p.choices["a"].decision
    assert decision is not None and decision.reason == "on decode: no prefill worker is ready"


@pytest.mark.parametrize(
    ("split", "worker", "role"),
    [("always", "d0", "prefill"), ("auto", "p0", "decode"), ("never", "p0", "decode"), ("never", "d0", None)],
)
def test_missing_role_is_the_one_that_the_request_waits_for(split: str, worker: str, role: str | None) -> None:
    p = placing(split, worker)
    p.submit(make_choice("a", 10, 20))
    assert p.dispatcher.missing_role() == role and len(p.place()) == (role is None)
    unservable = p.dispatcher.unservable(p.choices["a"])
    assert (unservable and unservable[1]) == (role and f"no_{role}_worker")


def test_decode_workers_of_an_earlier_version_compute_no_prompts() -> None:
    p = placing("auto", "p0", "d0")
    worker = p.worker("d0")
    worker.join = replace(worker.join, computes_prompts=False)
    p.submit(make_choice("a", 10, 20))
    assert p.place() == [Placement("a", "p0", "d0")]


def test_request_that_exceeds_the_decode_pool_is_refused() -> None:
    p = placing("never", "d0")
    with pytest.raises(ContextLengthExceeded) as refused:
        p.submit(make_choice("a", 10, 64 * 4 + 1))
    assert refused.value.code == ErrorCode.EXCEEDS_POOL


def test_auto_decides_by_cost_and_says_why() -> None:
    p = placing("auto", "p0", "d0")
    (home,) = p.table.classes
    home.hand_over_cost.observe(10, 0.050)
    p.submit(make_choice("first", 10, 20))
    assert p.place() == [Placement("first", "d0")], "an idle decode worker saves the hand-over"
    p.choices["first"].stage = Stage.DECODE
    p.dispatcher.hold(p.choices["first"])
    p.worker("d0").load = Load(blocks_total=64, blocks_free=40, prompt_cost=PromptCost(0.010, 16, 0.02))
    p.submit(make_choice("second", 10, 20))
    assert p.place() == [Placement("second", "p0", "d0")], "its stream would wait"
    decision = p.choices["second"].decision
    assert decision is not None and decision.reason.startswith("apart: d0 ") and "1 streams" in decision.reason
    p.check()


def test_auto_without_measured_costs_computes_apart() -> None:
    p = placing("auto", "p0", "d0", cost=None)
    p.submit(make_choice("a", 10, 20))
    assert p.place() == [Placement("a", "p0", "d0")]


def test_auto_uses_the_prefix_that_a_decode_worker_holds() -> None:
    p = placing("auto", "p0", "d0", "d1", cost=SLOW)
    hints = tuple(bytes([n]) * 8 for n in range(8))
    p.worker("d1").update_cached(KVCacheEvents(hints))
    p.submit(make_choice("agent", 36, 60, prefix={4: hints}))
    assert p.place() == [Placement("agent", "d1")]
    assert p.choices["agent"].to_compute == 4


def test_prompts_wait_for_prefill_if_that_is_cheaper_and_go_on_when_either_pool_has_room() -> None:
    p = placing("auto", "p0", "d0", step_tokens=8)
    p.worker("d0").load = Load(blocks_total=64, blocks_free=64, prompt_cost=PromptCost(1.0, 16))
    for index in range(3):
        p.submit(make_choice(f"r{index}", 8, 20))
    assert p.names() == ["r0", "r1"] and p.dispatcher.role_without_room == "prefill"
    p.worker("d0").load = Load(blocks_total=64, blocks_free=64, prompt_cost=PromptCost(0.0001, 16, 0.01))
    p.worker("d0").count(backlog=1)
    p.worker("d0").count(backlog=-1)
    assert p.place() == [Placement("r2", "d0")]


# A request.


def drive(*workers: str, split: str = "never") -> Drive:
    d = Drive(*workers)
    d.requests.dispatcher.split = split  # type: ignore[assignment]
    return d


def test_request_on_one_worker_from_prompt_to_end() -> None:
    d = drive("d0")
    r = d.submit(max_tokens=2)
    assert [(a.prefill, a.targets) for a in d.take(StartPrefill)] == [("d0", ())]
    assert (r.stage, r.workers()) == (Stage.PREFILL, {"d0"})
    d.now += 1.0
    d.tokens("d0", r.sequence, 0, 7)
    assert r.stage is Stage.DECODE
    d.now += 2.0
    d.tokens("d0", r.sequence, 1, 8)
    ended = SequenceEnded(r.sequence, "length", stamps=StageStamps(0.25, 0.75, decode_s=2.0))
    d.events("d0", StepEvents(ended=(ended,)))
    assert r.ended and r.tokens == [7, 8]
    spans = {span.name: (round(span.end_s - span.start_s, 3), span.worker) for span in timeline(r, d.now).spans}
    assert spans == {"prefill_queue": (0.25, "d0"), "prefill": (0.75, "d0"), "decode": (2.0, "d0")}
    (home,) = d.table.classes
    assert home.hand_over_cost.seconds(0) == 0.0


def test_one_token_ends_it_before_decode() -> None:
    d = drive("d0")
    r = d.submit(max_tokens=1)
    d.tokens("d0", r.sequence, 0, 7)
    assert r.ended and r.error is None


def test_first_token_makes_room_for_the_next_prompt() -> None:
    d = drive("d0")
    first = d.submit("a", prompt=(1,) * 20, max_tokens=9)
    second = d.submit("b", prompt=(1,) * 9, max_tokens=9)
    assert second.stage is Stage.QUEUED
    d.tokens("d0", first.sequence, 0, 7)
    assert second.stage is Stage.PREFILL


@pytest.mark.parametrize("tokens", [0, 3])
def test_lost_worker_reschedules_it_as_a_death(tokens: int) -> None:
    d = drive("d0", "d1")
    r = d.submit(max_tokens=9)
    for index in range(tokens):
        d.tokens("d0", r.sequence, index, 7 + index)
    d.lose("d0")
    assert [a.next_index for a in d.new if isinstance(a, Rescheduled)] == [tokens]
    *_, start = d.take(StartPrefill)
    assert (start.prefill, start.request.output) == ("d1", tuple(range(7, 7 + tokens))) and len(r.deaths) == 1


def test_prompt_logprobs_come_with_the_first_token() -> None:
    d = drive("d0")
    r = d.submit(max_tokens=1, sampling=SamplingParams(prompt_logprobs=0))
    scores = tuple(TokenLogprob(t, -1.0, 1) for t in (2, 3))
    d.tokens("d0", r.sequence, 0, 7, prompt_logprobs=scores)
    assert r.ended and r.prompt_logprobs == scores


def test_hand_overs_are_measured() -> None:
    d = drive("p0", "d0", split="always")
    r = d.submit(max_tokens=9)
    d.tokens("p0", r.sequence, 0, 7)
    d.now += 0.25
    d.handed_over("p0", r.sequence, "d0")
    (home,) = d.table.classes
    assert home.hand_over_cost.seconds(3) == pytest.approx(0.25)


def test_worker_that_is_drained_gives_its_prompt_back() -> None:
    d = drive("d0", "d1")
    r = d.submit(max_tokens=9)
    d.lose("d0", drained=True)
    assert r.stage is Stage.PREFILL and r.prefill_worker == r.decode_worker == "d1" and not r.deaths


def test_pooled_requests_prefer_prefill_and_can_do_without() -> None:
    for workers, expected in ((("p0", "d0"), "p0"), (("d0",), "d0")):
        d = drive(*workers)
        r = d.submit(max_tokens=1, pooling="last")
        assert r.prefill_worker == expected
        d.tokens(expected, r.sequence, 0, pooled=b"\0\0\0\0")
        assert r.ended and r.pooled


def test_unknown_sequence_is_started_again() -> None:
    d = drive("d0")
    r = d.submit(max_tokens=9)
    d.take(StartPrefill)
    unknown = SequenceEnded(r.sequence, "error", ErrorCode.UNKNOWN_SEQUENCE, "no such sequence")
    d.events("d0", StepEvents(ended=(unknown,)))
    assert [a.request.sequence_id for a in d.take(StartPrefill)] == [SequenceId("r", 0, r.attempt)]
