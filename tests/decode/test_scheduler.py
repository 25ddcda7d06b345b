"""Which sequences a decode worker advances: the rules one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.errors import DuplicateRequest, InvariantError, Unavailable
from baton.core.events import StageStamps, TokenEvent
from baton.core.request import GenerateRequest, SamplingParams, SequenceId, TokenLogprob
from baton.core.step import GrammarFailure, StepOutcome, without_unsampled
from decode.scheduler import DecodeResult, DecodeScheduler
from tests.support.builders import EOS, make_decode, make_outcome, make_request

A = SequenceId("a")


def ready(scheduler: DecodeScheduler, request: GenerateRequest, first_token: int = 5) -> SequenceId:
    scheduler.reserve(request, 0.0)
    assert scheduler.received(request.sequence_id, first_token, 0.0) is None
    return request.sequence_id


def step(scheduler: DecodeScheduler, token: int = 7) -> DecodeResult:
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    return scheduler.finish_step(make_outcome(plan, token), 0.0)


def test_first_event_repeats_the_token_that_prefill_sampled() -> None:
    scheduler = make_decode()
    ready(scheduler, make_request("a"), first_token=5)
    assert step(scheduler, 6).tokens == (TokenEvent(A, 0, (5, 6)),)
    assert step(scheduler, 7).tokens == (TokenEvent(A, 2, (7,)),)


def test_resumed_attempt_continues_at_its_output_index() -> None:
    scheduler = make_decode()
    a = ready(scheduler, make_request("a", (1, 2, 3), output=(4, 5), attempt=2), first_token=6)
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    assert (plan.rows[0].start, plan.rows[0].tokens, plan.rows[0].output_index) == (5, (6,), 3)
    assert scheduler.finish_step(make_outcome(plan, 7), 0.0).tokens == (TokenEvent(a, 2, (6, 7)),)


def test_sequences_that_run_alone_take_turns_and_every_other_step_is_for_all_others() -> None:
    scheduler = make_decode(num_blocks=40)
    for name in ("a", "b", "x", "y"):
        ready(scheduler, replace(make_request(name, max_tokens=40), alone=name in "xy"))
    order = []
    for number in range(1, 9):
        plan = scheduler.begin_step(float(number))
        assert plan is not None
        names = "".join(row.sequence_id.request_id for row in plan.rows)
        alone = scheduler.runs_alone(plan)
        assert (alone and alone.request_id) == (names if names in "xy" else None)
        order.append(names)
        scheduler.finish_step(make_outcome(plan), float(number))
        scheduler.check()
    assert order == ["x", "ab", "y", "ab", "x", "ab", "y", "ab"]


def test_sequence_starts_with_the_blocks_of_its_prompt_and_grows() -> None:
    scheduler = make_decode(num_blocks=8, block_size=4)
    assert len(scheduler.reserve(make_request("a", prompt=5, max_tokens=8), 0.0).block_ids) == 2
    assert scheduler.blocks.counts().receiving == 2
    scheduler.received(A, 5, 0.0)
    held = []
    while scheduler.has_sequence(A):
        step(scheduler)
        held.append(8 - scheduler.blocks.num_free)
    assert held == [2, 2, 2, 3, 3, 3, 0]


def test_single_sequence_runs_to_max_tokens_in_a_pool_of_exactly_its_size() -> None:
    scheduler = make_decode(num_blocks=3, block_size=4)
    ready(scheduler, make_request("a", prompt=4, max_tokens=8))
    results = [step(scheduler) for _ in range(7)]
    assert [e.reason for r in results for e in r.ended] == ["length"]
    assert sum(len(e.tokens) for r in results for e in r.tokens) == 8
    assert scheduler.blocks.num_free == 3


def test_sequences_join_and_leave_between_steps() -> None:
    scheduler = make_decode(num_blocks=9, max_running=2)
    for name in "abc":
        ready(scheduler, make_request(name))
    assert repr(scheduler).startswith("<DecodeScheduler 0 running, 3 ready, 0 receiving | ")
    assert [e.sequence.request_id for e in step(scheduler).tokens] == ["a", "b"]
    scheduler.abort(A)
    assert [e.sequence.request_id for e in step(scheduler).tokens] == ["b", "c"]


def test_eos_token_ends_a_sequence() -> None:
    scheduler = make_decode()
    ready(scheduler, make_request("a"))
    assert [e.reason for e in step(scheduler, EOS).ended] == ["stop"]
    assert (scheduler.num_sequences, scheduler.blocks.num_free) == (0, 8)


@pytest.mark.parametrize(("token", "max_tokens", "reason"), [(EOS, 8, "stop"), (5, 1, "length")])
def test_sequence_whose_first_token_ends_it_never_runs(token: int, max_tokens: int, reason: str) -> None:
    scheduler = make_decode()
    scheduler.reserve(make_request("a", max_tokens=max_tokens), 0.0)
    ended = scheduler.received(A, token, 0.0)
    assert ended is not None and ended.reason == reason
    assert (scheduler.begin_step(0.0), scheduler.blocks.num_free) == (None, 8)


@pytest.mark.parametrize("claim", [False, True])
@pytest.mark.parametrize("phase", ["receiving", "ready", "running", "in a step"])
def test_abort_frees_all_blocks_in_any_phase(phase: str, claim: bool) -> None:
    scheduler = make_decode()
    if phase == "receiving":
        scheduler.reserve(make_request("a"), 0.0)
    else:
        ready(scheduler, make_request("a"))
    if phase == "running":
        step(scheduler)
    plan = scheduler.begin_step(0.0) if phase == "in a step" else None
    assert scheduler.abort(A, in_flight=claim)
    if phase == "receiving":
        scheduler.receive_ended(A)
    if plan is not None:
        assert scheduler.finish_step(make_outcome(plan), 0.0) == DecodeResult()
    assert (scheduler.num_sequences, scheduler.blocks.num_free, scheduler.begin_step(0.0)) == (0, 8, None)


def test_blocks_being_written_are_not_free_until_the_write_has_ended() -> None:
    scheduler = make_decode(num_blocks=4)
    scheduler.reserve(make_request("a", 12, 2), 0.0)
    scheduler.abort(A, in_flight=True)
    assert not scheduler.receiving(A)
    with pytest.raises(Unavailable):
        scheduler.reserve(make_request("b", 8), 0.0)
    scheduler.receive_ended(A)
    assert scheduler.blocks.num_free == 4


def test_second_abort_does_not_free_blocks_that_are_being_written() -> None:
    scheduler = make_decode(num_blocks=3)
    scheduler.reserve(make_request("a"), 0.0)
    scheduler.abort(A, in_flight=True)
    scheduler.abort(A)
    assert (scheduler.has_sequence(A), scheduler.blocks.num_free) == (True, 2)


def test_aborted_sequence_ends_when_its_last_chunk_arrives() -> None:
    scheduler = make_decode()
    scheduler.reserve(make_request("a"), 0.0)
    scheduler.abort(A, in_flight=True)
    ended = scheduler.received(A, 5, 0.0)
    assert ended is not None and ended.reason == "aborted"
    assert (scheduler.num_sequences, scheduler.blocks.num_free) == (0, 8)


def test_kv_that_arrives_twice_is_refused_without_effect() -> None:
    scheduler = make_decode()
    ready(scheduler, make_request("a"))
    with pytest.raises(InvariantError):
        scheduler.received(A, 9, 0.0)
    assert step(scheduler, 6).tokens == (TokenEvent(A, 0, (5, 6)),)


def test_same_attempt_is_refused_and_the_next_is_accepted() -> None:
    scheduler = make_decode()
    scheduler.reserve(make_request(), 0.0)
    with pytest.raises(DuplicateRequest, match="r/0#1"):
        scheduler.reserve(make_request(), 0.0)
    scheduler.reserve(make_request(attempt=2), 0.0)
    assert scheduler.num_waiting == 2


@pytest.mark.parametrize(
    ("prompt", "code", "message"),
    [(29, "exceeds_pool", "KV of 36 tokens needs 9 blocks; this decode worker has 8"), (17, "no_free_blocks", "5 KV")],
)
def test_refusal_distinguishes_a_full_pool_from_a_request_that_never_fits(prompt: int, code: str, message: str) -> None:
    scheduler = make_decode(num_blocks=8)
    scheduler.reserve(make_request("a", prompt=12), 0.0)
    with pytest.raises(Unavailable, match=message) as caught:
        scheduler.reserve(make_request("b", prompt), 0.0)
    assert caught.value.code == code
    assert scheduler.sequence_ids() == (A,)


def test_the_last_token_of_an_output_needs_no_kv() -> None:
    scheduler = make_decode(num_blocks=2, block_size=4)
    ready(scheduler, make_request("a", prompt=7, max_tokens=2))
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    assert [ended.reason for ended in scheduler.finish_step(make_outcome(plan), 0.0).ended] == ["length"]
    with pytest.raises(Unavailable, match="KV of 9 tokens needs 3 blocks"):
        scheduler.reserve(make_request("b", prompt=7, max_tokens=3), 0.0)


@pytest.mark.parametrize("sampled", [(), ((),), ((7, 8),), ((7,), (7,))])
def test_outcome_with_other_tokens_than_the_plan_samples_is_refused(sampled: tuple[tuple[int, ...], ...]) -> None:
    scheduler = make_decode()
    ready(scheduler, make_request("a"))
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    with pytest.raises(InvariantError):
        scheduler.finish_step(StepOutcome(plan.step_id, sampled), 0.0)
    assert scheduler.finish_step(make_outcome(plan), 0.0).tokens


def test_outcome_of_another_step_is_refused() -> None:
    with pytest.raises(InvariantError, match="outcome of step 1 while step None is outstanding"):
        make_decode().finish_step(StepOutcome(1, ()), 0.0)


def test_stage_stamps_do_not_depend_on_the_origin_of_the_clock() -> None:
    scheduler = make_decode()
    scheduler.reserve(make_request("a", max_tokens=2), -4.0)
    assert scheduler.sequences[A].decode_stamps(None) == StageStamps()
    scheduler.received(A, 5, -3.0)
    assert scheduler.sequences[A].decode_stamps(None) == StageStamps(transfer_s=1.0)
    plan = scheduler.begin_step(-1.0)
    assert plan is not None
    result = scheduler.finish_step(make_outcome(plan), 0.0)
    assert result.ended[0].stamps == StageStamps(transfer_s=1.0, decode_queue_s=2.0, decode_s=1.0)


@pytest.mark.parametrize("spoil", ["blocks", "state"])
def test_check_detects_a_lost_block_hold_and_an_impossible_state(spoil: str) -> None:
    scheduler = make_decode()
    ready(scheduler, make_request("a"))
    sequence = scheduler.sequences[A]
    {
        "blocks": lambda: setattr(sequence, "block_ids", ()),
        "state": lambda: setattr(sequence, "num_computed", 1000),
    }[spoil]()
    with pytest.raises(InvariantError):
        scheduler.check()


def test_the_first_event_repeats_token_1_with_its_log_probability() -> None:
    scheduler = make_decode()
    request = replace(make_request(), sampling=SamplingParams(logprobs=1))
    scheduler.reserve(request, 0.0)
    first, second = TokenLogprob(5, -1.0, 1, (5,), (-1.0,)), TokenLogprob(6, -2.0, 1, (6,), (-2.0,))
    scheduler.received(request.sequence_id, 5, 0.0, first)
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    outcome = replace(make_outcome(plan, 6), logprobs=((second,),))
    (event,) = scheduler.finish_step(outcome, 0.0).tokens
    assert (event.tokens, event.logprobs) == ((5, 6), (first, second))


def test_row_whose_grammar_mask_was_late_is_recomputed() -> None:
    scheduler = make_decode()
    late, other = ready(scheduler, make_request("a")), ready(scheduler, make_request("b"))
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    made = without_unsampled(plan, make_outcome(plan, 7), {late: None})
    result = scheduler.finish_step(made, 0.0)
    assert [event.sequence for event in result.tokens] == [other] and not result.ended
    again = scheduler.begin_step(0.0)
    assert again is not None and again.rows[0] == plan.rows[0]
    assert scheduler.finish_step(make_outcome(again, 8), 0.0).tokens[0].tokens == (5, 8)
    scheduler.check()


@pytest.mark.parametrize(("exceeds_limit", "code"), [(False, "grammar_failed"), (True, "grammar_limit")])
def test_grammar_failure_ends_its_sequence_with_the_reason(exceeds_limit: bool, code: str) -> None:
    scheduler = make_decode()
    failed, other = ready(scheduler, make_request("a")), ready(scheduler, make_request("b"))
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    made = without_unsampled(plan, make_outcome(plan, 7), {failed: GrammarFailure("too many items", exceeds_limit)})
    (ended,) = scheduler.finish_step(made, 0.0).ended
    assert (ended.sequence, ended.reason, ended.code) == (failed, "error", code)
    assert "too many items" in ended.message
    assert not scheduler.has_sequence(failed) and scheduler.has_sequence(other)
    scheduler.check()
