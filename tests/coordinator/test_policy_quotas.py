"""What one API key may take, in virtual time."""

from __future__ import annotations

import pytest

from baton.core.errors import InvariantError, QuotaExceeded
from coordinator.policy.quotas import ANYBODY, Client, Limits, Quotas


def client(**limits: int) -> Client:
    return Client("k", "t", limits=Limits(**limits))


def refused(quotas: Quotas, who: Client, now: float, choices: int = 1) -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as caught:
        quotas.admit(who, now, choices)
    return caught.value


def test_without_limits_nothing_is_counted() -> None:
    quotas = Quotas()
    for _ in range(1000):
        quotas.admit(ANYBODY, 0.0)
    quotas.ended(ANYBODY, 10**9, 0.0)


def test_so_many_at_once() -> None:
    quotas, who = Quotas(), client(requests_at_once=2)
    quotas.admit(who, 0.0)
    quotas.admit(who, 0.0)
    assert "2 requests at once" in refused(quotas, who, 0.0).message
    quotas.ended(who, 0, 0.0)
    quotas.admit(who, 0.0)
    quotas.admit(Client("other", limits=who.limits), 0.0)


def test_choices_run_like_requests() -> None:
    quotas, who = Quotas(), client(requests_at_once=4)
    quotas.admit(who, 0.0, choices=3)
    assert refused(quotas, who, 0.0, choices=2)
    quotas.admit(who, 0.0)
    quotas.ended(who, 0, 0.0, choices=3)
    quotas.ended(who, 0, 0.0)
    quotas.admit(who, 0.0, choices=128)  # more than may run, and nothing else does
    assert refused(quotas, who, 0.0)
    quotas.ended(who, 0, 0.0, choices=128)
    quotas.admit(who, 0.0, choices=4)


def test_so_many_a_minute_and_the_wait_is_named() -> None:
    quotas, who = Quotas(), client(requests_per_minute=3)
    for _ in range(3):
        quotas.admit(who, 0.0)
        quotas.ended(who, 0, 0.0)
    assert refused(quotas, who, 0.0).retry_after_s == 20.0
    assert refused(quotas, who, 19.7).retry_after_s == 1.0
    quotas.admit(who, 20.1)
    assert refused(quotas, who, 20.1)


def test_tokens_are_paid_afterwards_and_made_up_for() -> None:
    quotas, who = Quotas(), client(tokens_per_minute=600)
    quotas.admit(who, 0.0)
    quotas.ended(who, 1000, 0.0)
    error = refused(quotas, who, 0.0)
    assert error.retry_after_s == 40.0 and "600 tokens a minute" in error.message
    assert refused(quotas, who, 39.9)
    quotas.admit(who, 40.1)


def test_an_idle_key_saves_up_one_minute_and_not_more() -> None:
    quotas, who = Quotas(), client(tokens_per_minute=600)
    quotas.admit(who, 0.0)
    quotas.ended(who, 1, 0.0)
    quotas.admit(who, 10_000.0)
    quotas.ended(who, 700, 10_000.0)
    assert refused(quotas, who, 10_000.0).retry_after_s == 10.0


def test_a_refusal_costs_nothing() -> None:
    quotas, who = Quotas(), client(requests_at_once=1, requests_per_minute=2)
    quotas.admit(who, 0.0)
    for _ in range(50):
        refused(quotas, who, 0.0)
    quotas.ended(who, 0, 0.0)
    quotas.admit(who, 0.0)


def test_an_end_without_a_beginning_is_a_bug() -> None:
    quotas, who = Quotas(), client(requests_at_once=1)
    quotas.admit(who, 0.0)
    quotas.ended(who, 0, 0.0)
    with pytest.raises(InvariantError):
        quotas.ended(who, 0, 0.0)
