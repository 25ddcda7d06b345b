"""The measured rate at which the queue drains."""

from __future__ import annotations

import pytest

from coordinator.policy.quotas import MAX_RETRY_S, WINDOW_S, DrainRate


def test_without_a_measurement_a_retry_is_due_in_a_second() -> None:
    rate = DrainRate()
    rate.update(1.0, 500, waits=False)  # placed at once: the queue was empty
    rate.update(2.0, 500, waits=True)
    assert rate.seconds(100) is None and rate.retry_after_s(1e9) == 1.0


def test_tokens_placed_while_choices_wait_are_the_rate() -> None:
    rate = DrainRate()
    for step in range(400):
        rate.update(step * 0.1, 50, waits=True)
    assert rate.seconds(1000) == pytest.approx(2.0, rel=0.01)  # 500 tokens per second
    assert rate.retry_after_s(5000) == pytest.approx(10.0, rel=0.01)
    rate.update(40.0, 50, waits=False)
    rate.update(49.0, 50, waits=True)  # a short pause without a queue changes nothing
    assert rate.seconds(1000) == pytest.approx(2.0, rel=0.01)


def test_a_rate_is_measured_after_some_seconds_in_which_choices_waited() -> None:
    """Workers that have just joined place one short prompt while others wait: no rate to refuse a request by."""
    rate = DrainRate()
    for step in range(20):
        rate.update(step * 0.1, 4 if step == 2 else 0, waits=True)
    assert (rate.seconds(1000) or 0.0) > 100 and not rate.measured
    for step in range(20, 100):
        rate.update(step * 0.1, 50, waits=True)
    assert rate.measured
    rate.update(10.0 + 2 * WINDOW_S, 50, waits=False)
    rate.update(10.0 + 4 * WINDOW_S, 50, waits=True)
    assert not rate.measured


def test_a_stall_is_forgotten_after_a_pause() -> None:
    """Otherwise requests would be refused for their deadlines because of workers that were lost long ago."""
    rate = DrainRate()
    for step in range(400):
        rate.update(step * 0.1, 50 if step < 100 else 0, waits=True)
    rate.update(41.0, 0, waits=False)
    rate.update(41.0 + 2 * WINDOW_S, 50, waits=False)
    rate.update(41.1 + 2 * WINDOW_S, 50, waits=True)
    assert rate.seconds(1000) is None


def test_a_queue_that_stalls_lowers_the_rate_up_to_a_limit() -> None:
    rate = DrainRate()
    for step in range(400):
        rate.update(step * 0.1, 50, waits=True)
    before = rate.seconds(1000) or 0.0
    for step in range(400, 600):
        rate.update(step * 0.1, 0, waits=True)
    assert (rate.seconds(1000) or 0.0) > 4 * before
    rate.update(60.0 + 20 * WINDOW_S, 0, waits=True)
    assert rate.retry_after_s(1000) == MAX_RETRY_S
