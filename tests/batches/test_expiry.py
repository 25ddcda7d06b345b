"""Expiry of batches: by the wall clock across runs, by the monotonic clock within one."""

from __future__ import annotations

from batches.expiry import Expiry

DAY = 86400.0


def test_the_remaining_time_is_taken_from_the_wall_clock_once() -> None:
    expiry = Expiry(DAY)
    expiry.add("a", expires_at=1000.0, wall=900.0, monotonic=5.0)
    expiry.add("a", expires_at=1000.0, wall=900.0 + DAY, monotonic=6.0)
    assert not expiry.has_expired("a", 105.0) and expiry.has_expired("a", 105.1)


def test_a_batch_that_expired_before_this_run_stays_expired() -> None:
    expiry = Expiry(DAY)
    expiry.add("a", expires_at=1000.0, wall=1001.0, monotonic=5.0)
    assert expiry.has_expired("a", 5.0)


def test_a_wall_clock_that_was_set_back_does_not_lengthen_the_window() -> None:
    expiry = Expiry(DAY)
    expiry.add("a", expires_at=10 * DAY, wall=DAY, monotonic=0.0)
    assert not expiry.has_expired("a", DAY) and expiry.has_expired("a", DAY + 1)


def test_a_forgotten_batch_may_be_added_again() -> None:
    expiry = Expiry(DAY)
    expiry.forget("a")
    for wall in (1001.0, 999.0):
        expiry.add("a", expires_at=1000.0, wall=wall, monotonic=0.0)
        assert expiry.has_expired("a", 0.0) == (wall > 1000.0)
        expiry.forget("a")
