"""A clock that does not count the time in which its process could not receive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.liveness import ListeningClock


def test_clock_keeps_time_while_it_is_advanced_regularly() -> None:
    clock = ListeningClock(10.0, 0.5)
    for tenths in range(1, 50):
        assert clock.advance(10.0 + tenths / 10) == pytest.approx(10.0 + tenths / 10)


def test_a_gap_counts_as_at_most_the_limit_whether_read_or_advanced_first() -> None:
    clock = ListeningClock(0.0, 0.5)
    assert clock.at(7.0) == 0.5  # a message that is read before the next `look`
    assert clock.advance(7.0) == 0.5
    assert clock.at(7.25) == 0.75
    assert clock.advance(7.25) == 0.75


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=50))
def test_clock_never_runs_backwards_or_faster_than_time(steps: list[tuple[float, bool]]) -> None:
    clock, now, shown = ListeningClock(0.0, 0.5), 0.0, 0.0
    for wait, looks in steps:
        now += wait
        seen = clock.advance(now) if looks else clock.at(now)
        assert shown <= seen <= shown + min(wait, 0.5) + 1e-9
        shown = seen


def test_times_that_run_backwards_do_not_set_the_clock_back() -> None:
    clock = ListeningClock(5.0, 0.5)
    assert clock.advance(4.0) == 5.0
    assert clock.advance(5.25) == 5.25
