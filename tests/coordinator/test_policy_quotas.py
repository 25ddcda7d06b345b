"""The quotas of an API key, in virtual time."""

from __future__ import annotations

import pytest

from baton.core.errors import InvariantError, QuotaExceeded
from coordinator.policy.quotas import ANONYMOUS, Client, KeyLimits, Quotas


def client(**limits: int) -> Client:
    return Client("k", "t", limits=KeyLimits(**limits))


def refused(quotas: Quotas, who: Client, now: float, choices: int = 1) -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as caught:
        quotas.admit(who, now, choices)
    return caught.value


def test_without_limits_nothing_is_counted() -> None:
    quotas = Quotas()
    for _ in range(1000):
        quotas.admit(ANONYMOUS, 0.0)
    quotas.charge(ANONYMOUS, 10**9, 0.0)
    quotas.ended(ANONYMOUS, 0.0)


def test_concurrent_requests_are_limited() -> None:
    quotas, who = Quotas(), client(requests_at_once=2)
    quotas.admit(who, 0.0)
    quotas.admit(who, 0.0)
    assert "2 concurrent requests, counting each choice" in refused(quotas, who, 0.0).message
    quotas.ended(who, 0.0)
    quotas.admit(who, 0.0)
    quotas.admit(Client("other", limits=who.limits), 0.0)


def test_each_choice_counts_as_a_concurrent_request() -> None:
    quotas, who = Quotas(), client(requests_at_once=4)
    quotas.admit(who, 0.0, choices=3)
    assert refused(quotas, who, 0.0, choices=2)
    quotas.admit(who, 0.0)
    quotas.ended(who, 0.0, choices=3)
    quotas.ended(who, 0.0)
    quotas.admit(who, 0.0, choices=128)  # above the limit, but nothing else runs
    assert refused(quotas, who, 0.0)
    quotas.ended(who, 0.0, choices=128)
    quotas.admit(who, 0.0, choices=4)


def test_a_retry_beyond_the_concurrent_requests_is_due_when_one_is_likely_to_have_ended() -> None:
    """Ten requests at a time that last 60 s each, one of which ends every 6 s, all for a time at the limit."""
    quotas, who = Quotas(), client(requests_at_once=10)
    for _ in range(10):
        quotas.admit(who, 0.0)
    assert refused(quotas, who, 0.0).retry_after_s == 1.0  # nothing is measured yet
    for step in range(1, 20):
        quotas.ended(who, step * 6.0)
        quotas.admit(who, step * 6.0)
    assert refused(quotas, who, 114.5).retry_after_s == pytest.approx(6.0, rel=0.15)
    assert refused(quotas, who, 114.5, choices=3).retry_after_s == pytest.approx(18.0, rel=0.15)


def test_requests_per_minute_are_limited_with_a_retry_after() -> None:
    quotas, who = Quotas(), client(requests_per_minute=3)
    for _ in range(3):
        quotas.admit(who, 0.0)
        quotas.ended(who, 0.0)
    assert refused(quotas, who, 0.0).retry_after_s == 20.0
    assert refused(quotas, who, 19.7).retry_after_s == 1.0
    quotas.admit(who, 20.1)
    assert refused(quotas, who, 20.1)


@pytest.mark.parametrize("limits", [{"requests_per_minute": 43}, {"tokens_per_minute": 43}])
def test_after_the_retry_after_a_request_is_admitted(limits: dict[str, int]) -> None:
    """1.4 s were rounded to 1 s."""
    quotas, who = Quotas(), client(**limits)
    for _ in range(43):
        quotas.admit(who, 0.0)
        quotas.charge(who, 1, 0.0)
        quotas.ended(who, 0.0)
    quotas.charge(who, 1, 0.0)  # beyond the limit
    retry_after_s = refused(quotas, who, 0.0).retry_after_s
    assert retry_after_s is not None and 1.0 < retry_after_s < 2.0
    quotas.admit(who, retry_after_s + 1e-6)


def test_tokens_are_charged_at_the_end_and_an_overdraft_delays_new_requests() -> None:
    quotas, who = Quotas(), client(tokens_per_minute=600)
    quotas.admit(who, 0.0)
    quotas.charge(who, 1000, 0.0)
    quotas.ended(who, 0.0)
    error = refused(quotas, who, 0.0)
    assert error.retry_after_s == pytest.approx(40.0) and "600 tokens per minute" in error.message
    assert refused(quotas, who, 39.9)
    quotas.admit(who, 40.1)


def test_idle_key_accrues_at_most_one_minute_of_tokens() -> None:
    quotas, who = Quotas(), client(tokens_per_minute=600)
    quotas.admit(who, 0.0)
    quotas.charge(who, 1, 0.0)
    quotas.ended(who, 0.0)
    quotas.admit(who, 10_000.0)
    quotas.charge(who, 700, 10_000.0)
    quotas.ended(who, 0.0)
    assert refused(quotas, who, 10_000.0).retry_after_s == pytest.approx(10.0)


def test_refused_requests_are_not_charged() -> None:
    quotas, who = Quotas(), client(requests_at_once=1, requests_per_minute=2)
    quotas.admit(who, 0.0)
    for _ in range(50):
        refused(quotas, who, 0.0)
    quotas.ended(who, 0.0)
    quotas.admit(who, 0.0)


def test_end_without_admission_raises_invariant_error() -> None:
    quotas, who = Quotas(), client(requests_at_once=1)
    quotas.admit(who, 0.0)
    quotas.ended(who, 0.0)
    with pytest.raises(InvariantError):
        quotas.ended(who, 0.0)
