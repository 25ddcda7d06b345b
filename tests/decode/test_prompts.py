"""Prompts that a decode worker computes itself, as long rows beside its streams."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from baton.core.errors import InvalidRequest, Unavailable
from baton.core.events import StageStamps, TokenEvent
from baton.core.long_rows import MAX_SCORED_TOKENS
from baton.core.request import GenerateRequest, SamplingParams, SequenceId, TokenLogprob
from baton.core.step import StepOutcome, StepPlan
from decode.scheduler import DecodeScheduler
from decode.speculation.drafts import NgramDrafts
from decode.speculation.policy import Speculation
from decode.speculation.step_cost import StepModel
from tests.support.builders import make_decode, make_outcome, make_request

A, B = SequenceId("a"), SequenceId("b")
COSTS = ((1, 0.010), (512, 0.521))  # 1 ms for each further token


def costly(budget_s: float = 0.030, step_tokens: int = 512) -> Speculation:
    return Speculation(model=StepModel(COSTS, budget_s=budget_s, step_tokens=step_tokens))


def stream(scheduler: DecodeScheduler, name: str, prompt: int = 4, max_tokens: int = 8) -> SequenceId:
    """Adds a sequence whose KV has arrived."""
    request = make_request(name, prompt, max_tokens)
    scheduler.reserve(request, 0.0)
    assert scheduler.received(request.sequence_id, 5, 0.0) is None
    return request.sequence_id


def begin(scheduler: DecodeScheduler, now: float = 0.0) -> StepPlan:
    plan = scheduler.begin_step(now)
    assert plan is not None
    scheduler.check()
    return plan


def lengths(plan: StepPlan) -> dict[str, int]:
    return {row.sequence_id.request_id: len(row.tokens) for row in plan.rows}


def test_prompt_is_computed_and_generation_begins_at_its_first_token() -> None:
    scheduler = make_decode()
    scheduler.submit(make_request("a", (1, 2, 3, 4, 5), max_tokens=2), 0.0)
    assert scheduler.backlog_tokens == 5
    plan = begin(scheduler, 1.0)
    assert [(row.tokens, row.num_sampled, row.output_index) for row in plan.rows] == [((1, 2, 3, 4, 5), 1, 0)]
    result = scheduler.finish_step(make_outcome(plan, 7), 3.0)
    assert result.tokens == (TokenEvent(A, 0, (7,)),) and scheduler.backlog_tokens == 0
    result = scheduler.finish_step(make_outcome(begin(scheduler, 3.0), 8), 7.0)
    assert result.tokens == (TokenEvent(A, 1, (8,)),)
    assert [(e.reason, e.stamps) for e in result.ended] == [("length", StageStamps(1.0, 2.0, decode_s=4.0))]
    assert (scheduler.prompt_tokens_computed, scheduler.num_sequences) == (5, 0)
    scheduler.check()


def test_resumed_attempt_continues_at_its_output_index() -> None:
    scheduler = make_decode()
    scheduler.submit(make_request("a", (1, 2, 3), output=(4, 5), attempt=2), 0.0)
    plan = begin(scheduler)
    assert (plan.rows[0].tokens, plan.rows[0].output_index) == ((1, 2, 3, 4, 5), 2)
    assert scheduler.finish_step(make_outcome(plan, 7), 0.0).tokens == (TokenEvent(SequenceId("a", 0, 2), 2, (7,)),)


def test_one_token_needs_no_further_step() -> None:
    scheduler = make_decode()
    scheduler.submit(make_request("a", max_tokens=1), 0.0)
    result = scheduler.finish_step(make_outcome(begin(scheduler)), 0.0)
    assert [e.reason for e in result.ended] == ["length"] and scheduler.num_sequences == 0


def test_streams_are_delayed_by_the_budget_of_a_step_at_most() -> None:
    speculation = costly(0.0301)
    scheduler = make_decode(64, block_size=16, speculation=speculation)
    for name in ("x", "y", "z"):
        stream(scheduler, name, max_tokens=60)
    scheduler.submit(make_request("a", 300), 0.0)
    steps = 0
    while scheduler.backlog_tokens:
        plan = begin(scheduler)
        assert {"x", "y", "z"} <= lengths(plan).keys(), "no stream misses a step"
        assert speculation.model.long.seconds(plan.num_tokens) <= 0.0301
        scheduler.finish_step(make_outcome(plan), 0.0)
        steps += 1
    assert steps == 300 // (21 - 3) + 1


def test_without_streams_a_prompt_has_whole_steps() -> None:
    scheduler = make_decode(64, block_size=16, speculation=costly(0.0301, step_tokens=128))
    scheduler.submit(make_request("a", 300), 0.0)
    sizes = []
    while scheduler.backlog_tokens:
        plan = begin(scheduler)
        sizes.append(plan.num_tokens)
        scheduler.finish_step(make_outcome(plan), 0.0)
    assert sizes == [128, 128, 44]


def test_short_prompt_does_not_wait_behind_a_long_one() -> None:
    scheduler = make_decode(64, block_size=16, speculation=costly(step_tokens=128))
    scheduler.submit(make_request("long", range(600)), 0.0)
    scheduler.finish_step(make_outcome(begin(scheduler)), 0.0)
    scheduler.submit(make_request("short", range(700, 720)), 0.0)
    assert lengths(begin(scheduler)) == {"long": 108, "short": 20}


def test_priority_decides_before_length() -> None:
    scheduler = make_decode(64, block_size=16, speculation=costly(step_tokens=128))
    scheduler.submit(make_request("low", range(20), priority=1), 0.0)
    scheduler.submit(make_request("high", range(100, 228)), 0.0)
    assert lengths(begin(scheduler)) == {"high": 128}


def test_prompt_waits_for_blocks_and_keeps_them_from_hand_overs() -> None:
    scheduler = make_decode(num_blocks=6, block_size=4)
    stream(scheduler, "x", prompt=12)
    scheduler.submit(make_request("a", (9,) * 12), 0.0)
    plan = begin(scheduler)
    assert lengths(plan) == {"x": 1}
    with pytest.raises(Unavailable, match="3 for prompts that wait") as refused:
        scheduler.reserve(make_request("b"), 0.0)
    assert refused.value.code == "no_free_blocks"
    scheduler.finish_step(make_outcome(plan), 0.0)
    scheduler.abort(SequenceId("x"))
    assert lengths(begin(scheduler)) == {"a": 12}


def test_prompt_that_could_never_fit_is_refused() -> None:
    scheduler = make_decode(num_blocks=4, block_size=4)
    with pytest.raises(Unavailable, match="needs 5 blocks") as refused:
        scheduler.submit(make_request("a", 10, max_tokens=8), 0.0)
    assert refused.value.code == "exceeds_pool"
    with pytest.raises(InvalidRequest):
        scheduler.submit(make_request("a", ()), 0.0)
    assert scheduler.num_sequences == 0


def test_cached_prefix_is_not_computed_again() -> None:
    scheduler = make_decode(32)
    scheduler.submit(make_request("a", range(100, 113), max_tokens=1), 0.0)
    scheduler.finish_step(make_outcome(begin(scheduler)), 0.0)
    scheduler.submit(make_request("b", (*range(100, 113), 50, 51)), 0.0)
    plan = begin(scheduler)
    assert [(row.start, row.tokens) for row in plan.rows] == [(12, (112, 50, 51))]
    assert scheduler.finish_step(make_outcome(plan), 0.0).tokens[0].cached_tokens == 12
    assert (scheduler.prompt_tokens_cached, scheduler.prompt_tokens_computed, scheduler.bytes_reused) == (12, 16, 0)


def test_choices_of_a_request_share_its_prompt() -> None:
    scheduler = make_decode(32, speculation=costly(step_tokens=8))
    for choice in range(3):
        scheduler.submit(make_request("a", range(100, 117), choice=choice), 0.0)
    steps = []
    while scheduler.backlog_tokens:
        plan = begin(scheduler)
        steps.append([(row.sequence_id.choice, len(row.tokens)) for row in plan.rows])
        scheduler.finish_step(make_outcome(plan), 0.0)
    assert scheduler.prompt_tokens_computed == 17 + 1 + 1, steps


def test_prompt_with_another_salt_does_not_wait() -> None:
    scheduler = make_decode(32)
    scheduler.submit(make_request("a", range(100, 117)), 0.0)
    scheduler.submit(make_request("b", range(100, 117), cache_salt="s"), 0.0)
    assert lengths(begin(scheduler)) == {"a": 17, "b": 17}


def scored(name: str, prompt: int) -> GenerateRequest:
    return replace(make_request(name, prompt), sampling=SamplingParams(temperature=0.0, prompt_logprobs=0))


def score(plan: StepPlan, token: int = 7) -> StepOutcome:
    """The outcome of a plan, in which each scored token has its own id as its log-probability."""
    per_row = tuple(tuple(TokenLogprob(t, float(t), 1) for t in row.scored) for row in plan.rows)
    return replace(make_outcome(plan, token), scored=per_row)


def test_log_probabilities_of_the_prompt_come_with_the_first_token_once() -> None:
    scheduler = make_decode(256, speculation=costly(step_tokens=512))
    scheduler.submit(scored("a", 300), 0.0)
    sizes, events = [], []
    for _ in range(3):
        plan = begin(scheduler)
        sizes.append(plan.num_tokens)
        events += scheduler.finish_step(score(plan), 0.0).tokens
    assert sizes == [MAX_SCORED_TOKENS, 300 - MAX_SCORED_TOKENS, 1]
    assert [len(event.prompt_logprobs) for event in events] == [299, 0]
    assert [p.token_id for p in events[0].prompt_logprobs] == list(range(1001, 1300))


def test_preempted_prompt_is_scored_again_and_reported_once() -> None:
    scheduler = make_decode(num_blocks=45, block_size=1, speculation=costly(0.012, step_tokens=16))
    stream(scheduler, "x", prompt=3, max_tokens=20)
    scheduler.submit(replace(scored("a", 40), max_tokens=3, priority=1), 0.0)
    events: list[TokenEvent] = []
    while scheduler.num_sequences:
        assert scheduler.preemptions or scheduler.sequences[A].computes_prompt
        events += scheduler.finish_step(score(begin(scheduler)), 0.0).tokens
    assert scheduler.preemptions == 1
    of_prompt = [event.prompt_logprobs for event in events if event.sequence == A]
    assert [len(logprobs) for logprobs in of_prompt] == [39, 0, 0]
    assert [p.token_id for p in of_prompt[0]] == list(range(1001, 1040))


@pytest.mark.parametrize(("pooling", "vector"), [("last", 10.0), ("mean", 18.0 / 10)])
def test_pooled_prompt_ends_with_its_vector(pooling: str, vector: float) -> None:
    scheduler = make_decode(speculation=costly(step_tokens=8))
    scheduler.submit(make_request("a", 10, max_tokens=1, pooling=pooling), 0.0)  # type: ignore[arg-type]
    scheduler.finish_step(make_outcome(begin(scheduler)), 0.0)
    result = scheduler.finish_step(make_outcome(begin(scheduler)), 0.0)
    assert struct.unpack("<2f", result.tokens[0].pooled)[0] == pytest.approx(vector)
    assert [e.reason for e in result.ended] == ["stop"] and scheduler.num_sequences == 0


def test_abort_frees_a_prompt_in_any_state() -> None:
    scheduler = make_decode(speculation=costly(step_tokens=8))
    scheduler.submit(make_request("a", 12), 0.0)
    assert scheduler.abort(A) and not scheduler.num_sequences
    scheduler.submit(make_request("b", 12), 0.0)
    plan = begin(scheduler)
    assert scheduler.abort(B) and scheduler.num_sequences == 1, "its row is outstanding"
    assert scheduler.finish_step(make_outcome(plan), 0.0).ended == ()
    scheduler.check()
    assert scheduler.num_sequences == 0


def test_steps_planned_ahead_continue_a_prompt_and_its_first_token() -> None:
    scheduler = make_decode(32, speculation=costly(step_tokens=8), plan_ahead=True)
    scheduler.submit(make_request("a", range(100, 112)), 0.0)
    first, second = begin(scheduler), begin(scheduler)
    assert [(row.start, len(row.tokens), row.num_sampled) for row in (*first.rows, *second.rows)] == [
        (0, 8, 0),
        (8, 4, 1),
    ]
    scheduler.finish_step(make_outcome(first), 0.0)
    third = begin(scheduler)
    assert third.token_sources == (0,)
    events = [*scheduler.finish_step(make_outcome(second, 7), 0.0).tokens]
    events += scheduler.finish_step(make_outcome(third, 8), 0.0).tokens
    assert events == [TokenEvent(A, 0, (7,)), TokenEvent(A, 1, (8,))]


def test_request_that_runs_alone_is_planned_in_steps_of_its_own() -> None:
    scheduler = make_decode(32, plan_ahead=True)
    stream(scheduler, "x")
    plan = begin(scheduler)
    scheduler.submit(replace(make_request("a", range(50, 56)), alone=True), 0.0)
    assert scheduler.begin_step(0.0) is None, "it is not planned beside the stream"
    scheduler.finish_step(make_outcome(plan), 0.0)
    assert lengths(begin(scheduler)) == {"a": 6}


def test_cost_of_a_prompt_follows_what_runs() -> None:
    scheduler = make_decode(64, block_size=16, speculation=costly(0.0301, step_tokens=128))
    assert scheduler.prompt_cost.step_tokens == 128
    for name in ("x", "y"):
        stream(scheduler, name)
    scheduler.finish_step(make_outcome(begin(scheduler)), 0.0)
    cost = scheduler.prompt_cost
    assert cost.step_tokens == 21 - 2 and cost.token_s == pytest.approx(0.001)
    assert cost.step_s == pytest.approx(0.011)


def test_stream_that_is_about_to_arrive_bounds_steps_too() -> None:
    scheduler = make_decode(64, block_size=16, speculation=costly(0.0301, step_tokens=128))
    scheduler.submit(make_request("a", 300), 0.0)
    scheduler.reserve(make_request("x"), 0.0)
    assert lengths(begin(scheduler)) == {"a": 21}


def test_prompt_is_scored_in_a_row_with_draft_tokens() -> None:
    scheduler = make_decode(32, speculation=Speculation(NgramDrafts(), fixed_length=2))
    prompt = (1, 2, 3, 4) * 4
    scheduler.submit(replace(make_request("a", prompt), sampling=SamplingParams(0.0, prompt_logprobs=0)), 0.0)
    plan = begin(scheduler)
    assert plan.rows[0].num_sampled == 3
    (event,) = scheduler.finish_step(score(plan), 0.0).tokens
    assert [p.token_id for p in event.prompt_logprobs] == list(prompt[1:])


def of_tenant(name: str, first: int, tokens: int) -> GenerateRequest:
    """The first letter of its name is its tenant."""
    return replace(make_request(name, range(first, first + tokens)), tenant=name[0])


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_tenants_take_turns_whatever_the_length_of_their_prompts(plan_ahead: bool) -> None:
    scheduler = make_decode(64, block_size=16, speculation=costly(1.0, step_tokens=128), plan_ahead=plan_ahead)
    for number in range(4):
        scheduler.submit(of_tenant(f"a{number}", 100 * number, 80), 0.0)
    first = begin(scheduler)
    assert lengths(first) == {"a0": 80, "a1": 48}
    scheduler.submit(of_tenant("b4", 500, 100), 0.0)
    if not plan_ahead:
        scheduler.finish_step(make_outcome(first), 0.0)
    prompts = {name: tokens for name, tokens in lengths(begin(scheduler)).items() if tokens > 1}
    assert prompts == {"b4": 100, "a1": 27}, "beside a0, which generates"


def test_prompt_of_many_steps_gives_way_after_each() -> None:
    scheduler = make_decode(64, block_size=16, speculation=costly(step_tokens=16))
    scheduler.submit(of_tenant("a0", 0, 300), 0.0)
    scheduler.finish_step(make_outcome(begin(scheduler)), 0.0)
    scheduler.submit(of_tenant("b1", 400, 40), 0.0)
    steps = []
    for _ in range(4):
        plan = begin(scheduler)
        steps.append("".join(lengths(plan)))
        scheduler.finish_step(make_outcome(plan), 0.0)
    assert steps == ["b1", "a0", "b1", "a0"], "both have the same share"
