"""Retries are bounded in an outage, and never refused for the loss of one worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import Unavailable
from coordinator.policy.choice import Choice, Stage, StartPrefill
from coordinator.policy.losses import MAX_TOKENS, TOKEN_RATIO, RetryBudget
from tests.coordinator.test_policy_requests import Drive

LOSSES = int(MAX_TOKENS)


@given(st.lists(st.one_of(st.just("completed"), st.integers(0, 3))))
def test_failures_are_permitted_for_all_their_choices_or_none_within_the_budget(steps: list[object]) -> None:
    budget, permitted, refused, completed = RetryBudget(), 0, 0, 0
    for step in steps:
        if not isinstance(step, int):
            budget.completed()
            completed += 1
            continue
        budget.failure()
        answers = [budget.permits() for _ in range(step)]
        assert len(set(answers)) <= 1
        permitted += any(answers)
        refused += step - sum(answers)
    assert permitted <= MAX_TOKENS + TOKEN_RATIO * completed + 1e-6
    assert 0.0 <= budget.tokens <= MAX_TOKENS and budget.refused == refused


def test_completed_answers_permit_further_retries() -> None:
    budget = RetryBudget()
    budget.tokens = 0.0
    for _ in range(round(1 / TOKEN_RATIO) + 1):
        budget.failure()
        assert not budget.permits()
        budget.completed()
    budget.failure()
    assert budget.permits() and budget.refused == 11


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.HANDOVER, Stage.DECODE])
def test_the_loss_of_one_worker_ends_no_request_even_without_a_budget(stage: Stage) -> None:
    d = Drive("p0", "d0")
    d.requests.losses.budget.tokens = 0.0
    running = [d.at(stage, f"r{number}", max_tokens=9)[0] for number in range(4)]
    d.lose("d0" if stage is Stage.DECODE else "p0")
    assert [r.stage for r in running] == [Stage.QUEUED] * 4 and d.requests.losses.budget.refused == 0


def outage(d: Drive, role: str, losses: int) -> int:
    """Workers of a role die as soon as they have work, again and again; returns how many prefills were started."""
    started = 0
    for _ in range(losses):
        for start in d.take(StartPrefill):
            started += 1
            sequence = start.request.sequence_id
            if role == "d0":
                d.tokens("p0", sequence, len(start.request.output), 5)
                d.handed_over("p0", sequence, "d0")
        d.lose(role)
        d.join(role)
    return started


@pytest.mark.parametrize("role", ["p0", "d0"])
def test_in_an_outage_each_request_is_tried_again_once_when_the_budget_is_used_up(role: str) -> None:
    """Unbounded without the budget: losses with several suspects in a step count for none of them."""
    d = Drive("p0", "d0")
    r = d.submit("first", 50)
    outage(d, role, 1 + LOSSES)
    assert not r.ended  # one retry without the budget, then all of this
    outage(d, role, 1)
    error = d.error(r)
    assert isinstance(error, Unavailable) and error.code == "retry_budget_exhausted"
    assert error.retry_after_s and error.retry_after_s >= 1.0
    later = [d.submit(f"later{number}", 50) for number in range(3)]  # one after the other: the worker has no more room
    assert outage(d, role, 6) == 2 * len(later) and all(r.ended for r in later)
    assert d.requests.losses.budget.refused == 4


def test_an_answer_that_goes_on_between_losses_does_not_use_the_budget() -> None:
    d = Drive("p0", "d0", max_deaths=100)
    r = d.submit(max_tokens=60)
    for _ in range(2 * LOSSES):
        sequence = d.take(StartPrefill)[0].request.sequence_id
        first = len(r.tokens)
        d.tokens("p0", sequence, first, 5)
        d.handed_over("p0", sequence, "d0")
        d.tokens("d0", sequence, first + 1, 6)
        d.lose("d0")
        r.deaths.clear()
        d.join("d0")
    assert not r.ended and d.requests.losses.budget.tokens == MAX_TOKENS


def given_back(d: Drive, r: Choice, code: str, times: int) -> None:
    for _ in range(times):
        d.ended("p0", r.sequence, code)


def test_sequences_that_a_worker_gives_up_again_and_again_use_the_budget() -> None:
    d = Drive("p0", "d0")
    r = d.submit()
    given_back(d, r, "abandoned", 1 + LOSSES)
    assert not r.ended
    given_back(d, r, "abandoned", 1)
    assert d.error(r).code == "retry_budget_exhausted"


def test_a_drain_is_no_failure() -> None:
    d = Drive("p0", "d0")
    r = d.submit()
    given_back(d, r, "draining", 3 * LOSSES)
    assert not r.ended and d.requests.losses.budget.tokens == MAX_TOKENS


def test_a_request_that_kills_its_worker_leaves_those_beside_it_unharmed() -> None:
    """The second loss, after which each suspect runs alone, is one failure of the budget for all of them."""
    d = Drive("p0", "d0")
    many = [d.submit(f"r{number}") for number in range(4)]
    for _ in range(2):
        d.lose("p0")
        d.join("p0")
    assert all(r.alone and not r.ended for r in many)
    assert d.requests.losses.budget.tokens == MAX_TOKENS - 1


def test_complete_answers_are_counted_however_they_end() -> None:
    for end in ("finish", "stop string", "the client disconnected"):
        d = Drive("p0", "d0")
        d.requests.losses.budget.tokens = 0.0
        r, s = d.at(Stage.DECODE, max_tokens=3)
        if end == "finish":
            d.tokens("d0", s, 1, 6, 7)
        d.record(d.requests.end(r, end, d.now, answered="client" not in end))
        tokens = 0.0 if "client" in end else pytest.approx(TOKEN_RATIO)
        assert r.ended and d.requests.losses.budget.tokens == tokens, end
