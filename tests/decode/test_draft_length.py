"""How many tokens to draft: against every other choice, and the cost of a draft pass after the first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.core.request import SamplingParams, SequenceId
from baton.core.step import DraftRow, Row, StepOutcome, StepPlan
from decode.speculation.acceptance import FIRST, TRIAL_DRAFT_TOKENS, TRIAL_SHARE, Trials
from decode.speculation.draft_length import StepPrice, choose_length, choose_lengths, saved_per_token
from decode.speculation.step_cost import StepModel


def price(target: float = 1.0, each: float = 0.02, first: float = 0.1, later: float = 0.1, rows: int = 1) -> StepPrice:
    """Prices in seconds: a target pass and each token in it, the draft's first pass and a later one."""
    return StepPrice(
        target=lambda tokens: target + each * tokens,
        draft=lambda rows: first,
        draft_next=lambda rows: later,
        tokens=rows,
    )


def speed(lengths: Sequence[int], rates: Sequence[float], paid: StepPrice) -> float:
    """The expected tokens per second of a step."""
    gained = sum(sum(rate**depth for depth in range(length + 1)) for rate, length in zip(rates, lengths, strict=True))
    seconds = paid.target(paid.tokens + sum(lengths))
    for depth in range(max(lengths, default=0)):
        rows = sum(length > depth for length in lengths)
        seconds += (paid.draft if depth == 0 else paid.draft_next)(rows)
    return gained / seconds


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.62, 0.8, 0.95])
@pytest.mark.parametrize("later", [0.01, 0.03, 0.1, 0.3])
@pytest.mark.parametrize("first", [0.1, 0.3])
def test_single_sequence_gets_the_fastest_draft_length(rate: float, first: float, later: float) -> None:
    paid = price(first=first, later=min(later, first))
    best = max(range(9), key=lambda length: speed([length], [rate], paid))
    found = choose_lengths([rate], [8], paid)
    assert found == [best]


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.45, 0.5, 0.57, 0.62, 0.7, 0.78, 0.9, 0.95, 1.0])
@pytest.mark.parametrize("each", [0.001, 0.02, 0.1, 0.2])
@pytest.mark.parametrize("planning", [0.0, 0.12])
def test_draft_length_of_a_single_sequence_equals_that_in_a_batch_of_one(
    rate: float, each: float, planning: float
) -> None:
    for first, later, limit in itertools.product((0.05, 0.3, 0.6), (0.01, 0.05, 0.3), (0, 1, 3, 8)):
        paid = replace(price(each=each, first=first, later=later), fixed_s=0.3, any_draft_s=planning)
        found = choose_length(rate, limit, paid.plain_s, each + first + planning, each + later)
        assert [found] == choose_lengths([rate], [limit], paid)


def test_cheaper_later_passes_lead_to_longer_drafts() -> None:
    dear, cheap = (choose_lengths([0.7], [8], price(first=0.3, later=later))[0] for later in (0.3, 0.05))
    assert 0 < dear < cheap


def test_draft_lengths_follow_acceptance_rates_and_are_near_the_optimum() -> None:
    rates, paid = (0.9, 0.6, 0.2), price(rows=3, later=0.05)
    found = choose_lengths(rates, (6, 6, 6), paid)
    assert found[0] > found[1] > found[2]
    best = max(speed(lengths, rates, paid) for lengths in itertools.product(range(7), repeat=3))
    assert speed(found, rates, paid) > 0.97 * best


def test_draft_lengths_respect_limits_and_are_0_where_drafting_does_not_pay() -> None:
    assert choose_lengths([0.9, 0.9], [2, 0], price(rows=2)) == [2, 0]
    assert choose_lengths([0.9], [8], price(first=5.0)) == [0]
    assert choose_lengths([], [], price()) == []


@pytest.mark.parametrize("rate", [0.35, 0.4, 0.5])
def test_first_draft_token_is_drafted_if_only_a_longer_draft_pays(rate: float) -> None:
    paid = price(each=0.0, first=rate, later=0.01)
    best = max(range(9), key=lambda length: speed([length], [rate], paid))
    assert speed([1], [rate], paid) <= speed([0], [rate], paid) < speed([best], [rate], paid)
    assert choose_lengths([rate], [8], paid) == [best]


def test_only_sequences_with_high_acceptance_are_drafted_if_not_all_pay() -> None:
    rates = [0.2, 0.95, 0.3, 0.25, 0.9, 0.2, 0.3, 0.2]
    paid = StepPrice(lambda tokens: 1.0 + 0.05 * tokens, lambda rows: 0.05 * rows, lambda rows: 0.05 * rows, 8)
    found = choose_lengths(rates, [8] * 8, paid)
    assert [i for i, length in enumerate(found) if length] == [1, 4]


def test_draft_overhead_of_a_step_is_counted_once_for_all_sequences() -> None:
    free = price(rows=2)
    paid = replace(free, any_draft_s=1.2)
    assert choose_lengths([0.6, 0.6], [8, 8], free) != [0, 0] == choose_lengths([0.6, 0.6], [8, 8], paid)
    assert choose_lengths([0.9, 0.9], [8, 8], paid) != [0, 0]
    assert saved_per_token(0.6, 2, free) > saved_per_token(0.6, 2, paid) == 0.0
    assert paid.draft_token_s(2) == pytest.approx(free.draft_token_s(2) + 0.6)


def test_saved_time_per_token_is_the_difference_with_and_without_drafting() -> None:
    paid = price(rows=4)
    faster = max(speed([length] * 4, [0.8] * 4, paid) for length in range(9))
    assert saved_per_token(0.8, 4, paid) == pytest.approx(1 / speed([0] * 4, [0.8] * 4, paid) - 1 / faster)
    assert saved_per_token(0.05, 4, paid) == 0.0


def test_trials_stay_within_their_share_and_run_one_at_a_time() -> None:
    trials, begun, spent_s = Trials(), set[SequenceId](), 0.0
    trials.stepped(1.0)
    assert trials.begin(SequenceId("first"), 10.0) and not trials.begin(SequenceId("other"), 0.1), "one at a time"
    trials.close(SequenceId("first"))
    assert not trials.begin(SequenceId("other"), 0.1), "what a worker begins with is spent"
    for step in range(10_000):
        trials.stepped(1.0)
        if step % 5 == 0 and trials.begin(SequenceId(f"s{step}"), 4.0):
            begun.add(SequenceId(f"s{step}"))
            spent_s += 4.0
        assert trials.sequence_id is None or trials.sequence_id in begun
        if trials.sequence_id is not None and step % 3 == 0:
            trials.drafted(trials.sequence_id)
    assert len(begun) == trials.started - 1 > 1
    assert 0.9 * TRIAL_SHARE < spent_s / 10_000 <= TRIAL_SHARE


def test_new_worker_runs_trials_without_allowance_within_a_limit_of_draft_tokens() -> None:
    one = SequenceId("a")

    def tried(trials: Trials, steps: int, *, alone: bool = True) -> int:
        draft_tokens = 0
        for _ in range(steps):
            trials.stepped(1.0)
            trials.begin(one, 1e6, alone=alone)
            draft_tokens += trials.sequence_id is not None
            trials.drafted(one)
        return draft_tokens

    assert tried(Trials(), 1000) == FIRST
    assert tried(Trials(), 1000, alone=False) == TRIAL_DRAFT_TOKENS


def test_allowance_for_trials_is_limited() -> None:
    """Or a trial would follow another for minutes after hours in which drafting paid and no trial was needed."""
    trials = Trials()
    trials.stepped(1.0, 1_000_000)
    assert trials.allowance_s == pytest.approx(2000 * TRIAL_SHARE)


def test_steps_reported_together_count_like_steps_reported_one_by_one() -> None:
    each, at_once = Trials(), Trials()
    for _ in range(40):
        for _ in range(8):
            each.stepped(0.5)
        at_once.stepped(0.5, 8)
    assert at_once.allowance_s == pytest.approx(each.allowance_s) and each.allowance_s > 0.7


def test_trial_ends_with_its_sequence_or_after_a_number_of_steps() -> None:
    trials, one, other = Trials(), SequenceId("a"), SequenceId("b")
    trials.allowance_s = 10.0
    assert trials.begin(one, 1.0) and not trials.begin(other, 1.0)
    trials.close(other)
    assert trials.sequence_id == one
    trials.close(one)
    assert trials.sequence_id is None and trials.begin(other, 1.0)
    for _ in range(64):
        trials.stepped(1e-9)
    assert trials.sequence_id is None


def test_later_draft_passes_have_their_own_cost_and_both_follow_observations() -> None:
    model = StepModel(((1, 1.0),), ((1, 0.4), (8, 0.4)), ((1, 0.1), (8, 0.1)))
    row = Row(SequenceId("a"), 0, (1,), (0,), SamplingParams(), 1)
    draft = DraftRow(SequenceId("a"), 0, (1,), (0,), 5, 0)
    plan = StepPlan(1, (row,), (draft,))
    assert model.draft_s(plan) == pytest.approx(0.4 + 4 * 0.1)
    model.observe(plan, StepOutcome(1, ((1,),), 1.4, draft_s=0.4), 1.4)
    assert model.draft.scale == model.draft_next.scale == pytest.approx(0.75)
    alike = StepModel(((1, 1.0),), ((1, 0.4),))
    assert alike.draft_s(plan) == pytest.approx(5 * 0.4)
