"""What a prefill worker computes next: the rules one by one."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import DuplicateRequest, InvalidRequest, InvariantError, Unavailable
from baton.core.events import StageStamps
from baton.core.long_rows import AGEING_TOKENS_PER_S, MAX_SCORED_TOKENS
from baton.core.request import SamplingParams, TokenLogprob
from baton.core.step import GrammarFailure, StepOutcome, without_unsampled
from prefill.scheduler import PrefillResult, PrefillScheduler, Progress
from tests.support.builders import EOS, make_outcome, make_prefill, make_request


def step(scheduler: PrefillScheduler, token: int = 7) -> PrefillResult:
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    return scheduler.finish_step(make_outcome(plan, token), 0.0)


def test_prompt_is_computed_in_chunks_under_the_budget() -> None:
    scheduler = make_prefill(step_tokens=3)
    scheduler.submit(make_request("a", 8), 0.0, hand_over=True)
    computed = [step(scheduler).progress[0] for _ in range(3)]
    a = make_request("a").sequence_id
    assert computed == [Progress(a, 3), Progress(a, 6), Progress(a, 8, first_token=7)]
    assert repr(scheduler).startswith("<PrefillScheduler 0 running, 0 waiting, 1 prefilled | <BlockTable 2 held, ")


def test_rest_of_a_step_budget_is_used_by_the_next_prompt() -> None:
    scheduler = make_prefill(step_tokens=8)
    for name in "abc":
        scheduler.submit(make_request(name, 5), 0.0, hand_over=True)
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    assert [(r.sequence_id.request_id, r.start, r.end, r.num_sampled) for r in plan.rows] == [
        ("a", 0, 5, 1),
        ("b", 0, 3, 0),
    ]


def test_resumed_attempt_computes_prompt_and_output_and_samples_the_next_index() -> None:
    scheduler = make_prefill(step_tokens=16)
    scheduler.submit(make_request("a", (1, 2, 3), output=(4, 5), attempt=2), 0.0, hand_over=True)
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    assert (plan.rows[0].tokens, plan.rows[0].output_index) == ((1, 2, 3, 4, 5), 2)
    assert scheduler.finish_step(make_outcome(plan, 6), 0.0).progress[0].output_index == 2


def test_request_waits_until_all_its_blocks_are_free() -> None:
    scheduler = make_prefill(num_blocks=3, step_tokens=16)
    a, b = make_request("a", 8), make_request("b", range(8))
    for request in (a, b):
        scheduler.submit(request, 0.0, hand_over=True)
    step(scheduler)
    assert scheduler.begin_step(0.0) is None
    scheduler.release_send(a.sequence_id)
    assert step(scheduler).progress[0].sequence_id == b.sequence_id


def test_no_request_overtakes_one_that_waits_for_blocks() -> None:
    scheduler = make_prefill(num_blocks=4, step_tokens=16)
    first, long, short = make_request("first", 8), make_request("long", range(12)), make_request("short", (9, 9, 9))
    scheduler.submit(first, 0.0, hand_over=True)
    step(scheduler)
    scheduler.submit(long, 0.0, hand_over=True)
    scheduler.submit(short, 1.0, hand_over=True)
    assert scheduler.begin_step(1.0) is None
    scheduler.release_send(first.sequence_id)
    assert [p.sequence_id for p in step(scheduler).progress] == [long.sequence_id, short.sequence_id]


def test_first_token_that_ends_the_sequence_ends_it_at_prefill() -> None:
    scheduler = make_prefill()
    scheduler.submit(make_request("a", max_tokens=1), 0.0, hand_over=False)
    scheduler.submit(make_request("b"), 0.0, hand_over=False)
    assert [e.reason for e in step(scheduler, EOS).ended] == ["stop", "stop"]
    scheduler.submit(make_request("a", max_tokens=1), 0.0, hand_over=False)
    assert [e.reason for e in step(scheduler).ended] == ["length"]
    assert scheduler.num_sequences == 0


def test_prompt_that_runs_alone_shares_no_step() -> None:
    scheduler = make_prefill(num_blocks=40, step_tokens=8)
    for name in ("a", "x", "b"):
        request = make_request(name, prompt=6 if name == "x" else 3)
        scheduler.submit(replace(request, alone=name == "x"), 0.0, hand_over=True)
    steps = []
    while (plan := scheduler.begin_step(0.0)) is not None:
        names = "".join(row.sequence_id.request_id for row in plan.rows)
        alone = scheduler.runs_alone(plan)
        steps.append((names, alone and alone.request_id))
        scheduler.finish_step(make_outcome(plan), 0.0)
    assert steps == [("ab", None), ("x", "x")]


def test_pinned_blocks_are_held_after_abort_and_end() -> None:
    scheduler = make_prefill(num_blocks=2)
    ended, aborted = make_request("ended"), make_request("aborted")
    for request in (ended, aborted):
        scheduler.submit(request, 0.0, hand_over=True)
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    scheduler.abort(aborted.sequence_id)
    scheduler.finish_step(make_outcome(plan, EOS), 0.0)
    assert scheduler.blocks.num_free == 0
    for request in (ended, aborted):
        scheduler.release_send(request.sequence_id)
    assert scheduler.blocks.num_free == 2


@pytest.mark.parametrize("phase", ["waiting", "between steps", "in a step", "prefilled"])
def test_abort_frees_all_blocks_in_any_phase(phase: str) -> None:
    scheduler = make_prefill(step_tokens=4 if phase == "prefilled" else 2)
    request = make_request()
    scheduler.submit(request, 0.0, hand_over=True)
    if phase in ("between steps", "prefilled"):
        step(scheduler)
    plan = scheduler.begin_step(0.0) if phase == "in a step" else None
    assert scheduler.abort(request.sequence_id)
    scheduler.release_send(request.sequence_id)
    if plan is not None:
        assert scheduler.blocks.num_free < scheduler.blocks.num_blocks
        assert scheduler.finish_step(make_outcome(plan), 0.0) == PrefillResult()
    scheduler.check()
    assert (scheduler.num_sequences, scheduler.blocks.num_free) == (0, 8)
    assert scheduler.num_running == scheduler.num_waiting == 0


def test_unfinished_sequence_without_hand_over_ends_alone_with_an_error() -> None:
    scheduler = make_prefill()
    scheduler.submit(make_request("alone"), 0.0, hand_over=False)
    scheduler.submit(make_request("other"), 0.0, hand_over=True)
    result = step(scheduler)
    assert [(e.sequence.request_id, e.reason, e.code) for e in result.ended] == [("alone", "error", "handoff_failed")]
    assert scheduler.sequence_ids() == (make_request("other").sequence_id,)
    scheduler.check()


def test_same_attempt_is_refused_and_the_next_is_accepted() -> None:
    scheduler = make_prefill()
    scheduler.submit(make_request(), 0.0, hand_over=True)
    with pytest.raises(DuplicateRequest, match="r/0#1"):
        scheduler.submit(make_request(), 0.0, hand_over=True)
    scheduler.submit(make_request(attempt=2), 0.0, hand_over=True)
    assert scheduler.num_waiting == 2


def test_prompt_that_can_never_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(Unavailable, match="33 tokens needs 9 KV blocks; this prefill worker has 8") as caught:
        make_prefill(num_blocks=8).submit(make_request(prompt=33), 0.0, hand_over=True)
    assert caught.value.code == "prompt_exceeds_pool"


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_prefill().submit(make_request(prompt=0), 0.0, hand_over=True)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("sampled", [(), ((),), ((7, 8),), ((7,), (7,))])
def test_outcome_with_other_tokens_than_the_plan_samples_is_refused(sampled: tuple[tuple[int, ...], ...]) -> None:
    scheduler = make_prefill()
    scheduler.submit(make_request(), 0.0, hand_over=True)
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    with pytest.raises(InvariantError):
        scheduler.finish_step(StepOutcome(plan.step_id, sampled), 0.0)
    assert scheduler.finish_step(make_outcome(plan), 0.0).progress


def test_outcome_of_another_step_is_refused() -> None:
    scheduler = make_prefill()
    with pytest.raises(InvariantError, match="outcome of step 1 while step None is outstanding"):
        scheduler.finish_step(StepOutcome(1, ()), 0.0)


def test_stage_stamps_do_not_depend_on_the_origin_of_the_clock() -> None:
    scheduler = make_prefill()
    request = make_request(max_tokens=1)
    sequence = scheduler.submit(request, -3.0, hand_over=False)
    assert sequence.prefill_stamps() == StageStamps()
    plan = scheduler.begin_step(-1.0)
    assert plan is not None
    result = scheduler.finish_step(make_outcome(plan), 0.0)
    assert result.ended[0].stamps == StageStamps(queue_s=2.0, prefill_s=1.0)


@pytest.mark.parametrize("spoil", ["pin", "hold", "queue"])
def test_check_detects_a_lost_block_hold_and_a_lost_queue_entry(spoil: str) -> None:
    scheduler = make_prefill()
    request = make_request()
    scheduler.submit(request, 0.0, hand_over=True)
    scheduler.begin_step(0.0)
    sequence = scheduler.sequences[request.sequence_id]
    {
        "pin": lambda: setattr(sequence, "send_pinned", False),
        "hold": lambda: setattr(sequence, "block_ids", ()),
        "queue": lambda: scheduler._running.clear(),
    }[spoil]()
    with pytest.raises(InvariantError):
        scheduler.check()


def test_prompt_log_probabilities_are_collected_over_chunks_and_bounded_per_step() -> None:
    scheduler = make_prefill(num_blocks=200, block_size=16, step_tokens=1000)
    request = replace(make_request(prompt=400), sampling=SamplingParams(prompt_logprobs=0))
    scheduler.submit(request, 0.0, hand_over=False)
    collected: list[TokenLogprob] = []
    while not (progress := _score(scheduler, collected)).first_token:
        pass
    assert [score.token_id for score in collected] == list(request.prompt[1:])
    assert progress.prompt_logprobs == tuple(collected)


def _score(scheduler: PrefillScheduler, collected: list[TokenLogprob]) -> Progress:
    plan = scheduler.begin_step(0.0)
    assert plan is not None and 0 < plan.num_tokens <= MAX_SCORED_TOKENS
    scored = tuple(tuple(TokenLogprob(token, -1.0, 1) for token in row.scored) for row in plan.rows)
    collected += scored[0]
    return scheduler.finish_step(replace(make_outcome(plan), scored=scored), 0.0).progress[0]


def test_next_attempt_renames_a_sequence_wherever_it_is() -> None:
    """While its last row is outstanding, and when only the send pin holds its blocks."""
    scheduler = make_prefill()
    sequence = scheduler.submit(make_request("a"), 0.0, hand_over=True)
    other = scheduler.submit(make_request("a", attempt=7), 0.0, hand_over=False)
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    for attempt in (2, 3):
        old = sequence.id
        scheduler.begin_attempt(sequence, attempt)
        assert sequence.id == sequence.request.sequence_id == old._replace(attempt=attempt)
        assert scheduler.sequences.get(old) is None and scheduler.sequences[sequence.id] is sequence
        scheduler.check()
        if attempt == 2:
            result = scheduler.finish_step(make_outcome(plan), 0.0)
            assert [p.sequence_id for p in result.progress] == [sequence.id, other.id]
    with pytest.raises(DuplicateRequest, match="attempt 3 of sequence a/0#3"):
        scheduler.begin_attempt(sequence, 3)
    scheduler.release_send(sequence.id)
    assert not scheduler.num_sequences and scheduler.blocks.num_free == scheduler.blocks.num_blocks


def test_outcome_without_the_requested_log_probabilities_is_refused() -> None:
    scheduler = make_prefill()
    scheduler.submit(replace(make_request(), sampling=SamplingParams(logprobs=0)), 0.0, hand_over=True)
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    with pytest.raises(InvariantError, match="log-probabilities"):
        scheduler.finish_step(make_outcome(plan), 0.0)
    score = TokenLogprob(7, -1.0, 1)
    progress = scheduler.finish_step(replace(make_outcome(plan), logprobs=((score,),)), 0.0).progress
    assert progress[0].first_logprob == score
    assert scheduler.sequences[make_request().sequence_id].logprobs == [score], "the hand-over sends it, too"


def prefilled(scheduler: PrefillScheduler, name: str, prompt: object, salt: str = "") -> int:
    """Computes a whole prompt; returns how many of its tokens were cached."""
    request = make_request(name, prompt, cache_salt=salt)  # type: ignore[arg-type]
    scheduler.submit(request, 0.0, hand_over=True)
    while not (done := step(scheduler).progress[-1]).first_token:
        pass
    scheduler.release_send(request.sequence_id)
    scheduler.check()
    return done.cached


def test_cached_prefix_is_not_recomputed() -> None:
    scheduler = make_prefill(num_blocks=12)
    assert prefilled(scheduler, "first", 10) == 0
    assert prefilled(scheduler, "same", 10) == 8
    assert prefilled(scheduler, "longer", 14) == 8
    assert prefilled(scheduler, "other", range(10)) == 0
    assert (scheduler.prompt_tokens_computed, scheduler.prompt_tokens_cached) == (10 + 2 + 6 + 10, 16)


@pytest.mark.parametrize(
    ("prompts", "cached", "pool"),
    [
        ([(8, ""), (8, "")], [0, 4], {}),  # the last token is always computed
        ([(9, ""), (9, "s"), (9, "t"), (9, "s")], [0, 0, 0, 8], {}),  # another salt shares nothing
        ([(9, ""), (range(10), ""), (9, "")], [0, 0, 4], {"num_blocks": 4}),  # a block that another prompt needed
        ([(9, ""), (9, "")], [0, 0], {"prefix_cache": False}),
    ],
)
def test_successive_prompts_reuse_the_expected_cached_tokens(
    prompts: list[tuple[object, str]], cached: list[int], pool: dict[str, Any]
) -> None:
    scheduler = make_prefill(**pool)
    assert [prefilled(scheduler, f"r{i}", *prompt) for i, prompt in enumerate(prompts)] == cached


def test_damaged_kv_is_not_reused() -> None:
    scheduler = make_prefill()
    request = make_request("a", 9)
    scheduler.submit(request, 0.0, hand_over=True)
    step(scheduler)
    scheduler.mark_kv_suspect(request.sequence_id)
    scheduler.abort(request.sequence_id)
    scheduler.release_send(request.sequence_id)
    assert prefilled(scheduler, "b", 9) == 0


def test_prompt_reuses_blocks_that_were_computed_while_it_waited() -> None:
    scheduler = make_prefill(step_tokens=4)
    for name in "ab":
        scheduler.submit(make_request(name, 9), 0.0, hand_over=True)
    cached = {}
    while scheduler.num_running + scheduler.num_waiting:
        cached.update({p.sequence_id.request_id: p.cached for p in step(scheduler).progress})
    assert cached == {"a": 0, "b": 8}


@pytest.mark.parametrize(("waited", "order"), [(0.0, ["short", "long"]), (301 / AGEING_TOKENS_PER_S, ["long", "long"])])
def test_short_prompt_is_scheduled_before_a_long_one_unless_the_long_one_has_aged(
    waited: float, order: list[str]
) -> None:
    scheduler = make_prefill(num_blocks=100, step_tokens=8)
    scheduler.submit(make_request("long", 300), 0.0, hand_over=True)
    step(scheduler)
    scheduler.submit(make_request("short", range(8)), waited, hand_over=True)
    assert [step(scheduler).progress[0].sequence_id.request_id for _ in order] == order


@given(
    long=st.integers(50, 400),
    every_s=st.floats(1e-4, 1e-1),
    shorts=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    step_tokens=st.integers(8, 64),
)
@settings(max_examples=60)
def test_long_prompt_is_not_starved_by_short_ones(
    long: int, every_s: float, shorts: list[int], step_tokens: int
) -> None:
    """An endless stream of short prompts, faster than they can be computed, delays a long prompt only by those that
    arrive within its own ageing time."""
    scheduler = make_prefill(num_blocks=2000, step_tokens=step_tokens)
    scheduler.submit(make_request("long", long), 0.0, hand_over=True)
    overtaking = sum(shorts[i % len(shorts)] for i in range(int(long / AGEING_TOKENS_PER_S / every_s) + 1))
    number, now = 0, 0.0
    for _ in range(-(-(long + overtaking) // step_tokens) + 1):
        while number * every_s <= now:
            prompt = (10_000 + number, *range(1, shorts[number % len(shorts)]))
            scheduler.submit(make_request(f"s{number}", prompt), number * every_s, hand_over=True)
            number += 1
        plan = scheduler.begin_step(now)
        assert plan is not None
        for p in scheduler.finish_step(make_outcome(plan), now).progress:
            if p.first_token and p.sequence_id.request_id == "long":
                return
            if p.first_token:
                scheduler.release_send(p.sequence_id)
        now += every_s
    raise AssertionError(f"{long} tokens not computed though only {overtaking} could go before them")


def test_prompt_with_requested_log_probabilities_is_computed_in_full_despite_the_cache() -> None:
    scheduler = make_prefill()
    prefilled(scheduler, "a", 9)
    request = replace(make_request("b", 9), sampling=SamplingParams(prompt_logprobs=0))
    scheduler.submit(request, 0.0, hand_over=False)
    plan = scheduler.begin_step(0.0)
    assert plan is not None and (plan.rows[0].start, len(plan.rows[0].scored)) == (0, 8)


def test_a_first_token_whose_mask_was_late_is_sampled_in_the_next_step() -> None:
    scheduler = make_prefill(step_tokens=16)
    scheduler.submit(make_request("a", 6), 0.0, hand_over=True)
    a = make_request("a").sequence_id
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    late = scheduler.finish_step(without_unsampled(plan, make_outcome(plan), {a: None}), 0.0)
    assert late == PrefillResult()
    again = scheduler.begin_step(0.0)
    assert again is not None and (again.rows[0].start, again.rows[0].end, again.rows[0].num_sampled) == (5, 6, 1)
    assert scheduler.finish_step(make_outcome(again, 7), 0.0).progress == (Progress(a, 6, first_token=7),)
    scheduler.check()


def test_grammar_that_fails_to_start_ends_its_request_with_the_reason() -> None:
    scheduler = make_prefill(step_tokens=16)
    scheduler.submit(make_request("a", 6), 0.0, hand_over=True)
    a = make_request("a").sequence_id
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    result = scheduler.finish_step(
        without_unsampled(plan, make_outcome(plan), {a: GrammarFailure("no tokenizer")}), 0.0
    )
    (ended,) = result.ended
    assert (ended.sequence, ended.code) == (a, "grammar_failed") and not result.progress
    scheduler.release_send(a)
    scheduler.check()
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks


def vectors(scheduler: PrefillScheduler) -> dict[str, list[float]]:
    """Runs all steps; returns what the requests that ended were pooled to."""
    found: dict[str, list[float]] = {}
    while (plan := scheduler.begin_step(0.0)) is not None:
        result = scheduler.finish_step(make_outcome(plan), 0.0)
        for progress in result.progress:
            if progress.pooled:
                found[progress.sequence_id.request_id] = array("f", progress.pooled).tolist()
        assert {ended.sequence.request_id for ended in result.ended} == {
            progress.sequence_id.request_id for progress in result.progress if progress.pooled
        }
        scheduler.check()
    return found


def test_pooled_prompts_share_steps_with_others_and_end_without_a_token() -> None:
    """The vector of a row is (its end, its number of tokens): the last row's, or the mean over all tokens."""
    scheduler = make_prefill(step_tokens=5)
    scheduler.submit(make_request("last", range(8), pooling="last"), 0.0, hand_over=False)
    scheduler.submit(make_request("mean", range(20, 28), pooling="mean"), 0.0, hand_over=False)
    scheduler.submit(make_request("other", range(40, 43), 1), 0.0, hand_over=False)
    plan = scheduler.begin_step(0.0)
    assert plan is not None  # the shortest comes first
    assert [(row.sequence_id.request_id, row.num_sampled, row.pooling) for row in plan.rows] == [
        ("other", 1, ""),
        ("last", 0, ""),  # only its last row
    ]
    scheduler.finish_step(make_outcome(plan), 0.0)
    # "last" has rows 0..2, 2..7, 7..8; "mean" has rows 0..4, 4..8
    assert vectors(scheduler) == {"last": [8, 1], "mean": [(4 + 8) / 8, (4 + 4) / 8]}
    assert scheduler.tokens_generated == 1 and not scheduler.sequences


def test_a_mean_reuses_no_cached_prefix_and_a_last_token_does() -> None:
    scheduler = make_prefill(step_tokens=16)
    for number, (pooling, computed) in enumerate([("last", 10), ("last", 2), ("mean", 10), ("last", 2)]):
        before = scheduler.prompt_tokens_computed
        scheduler.submit(make_request(str(number), 10, pooling=pooling), 0.0, hand_over=False)  # type: ignore[arg-type]
        assert len(vectors(scheduler)) == 1
        assert scheduler.prompt_tokens_computed - before == computed


def test_an_aborted_pooled_prompt_reports_no_vector() -> None:
    scheduler = make_prefill(step_tokens=4)
    request = make_request("a", 8, pooling="mean")
    scheduler.submit(request, 0.0, hand_over=False)
    plan = scheduler.begin_step(0.0)
    assert plan is not None and scheduler.abort(request.sequence_id)
    assert scheduler.finish_step(make_outcome(plan), 0.0) == PrefillResult()
    scheduler.check()
    assert vectors(scheduler) == {}


def test_an_outcome_without_the_vectors_of_its_rows_is_refused() -> None:
    scheduler = make_prefill(step_tokens=16)
    scheduler.submit(make_request("a", 8, pooling="last"), 0.0, hand_over=False)
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    with pytest.raises(InvariantError, match="vectors"):
        scheduler.finish_step(StepOutcome(plan.step_id, ((),)), 0.0)
