"""The bar that a benchmark measures drafting against."""

from __future__ import annotations

import pytest

from benchmarks.speculation_ideal import acceptance_rate, ideal_gain


def test_only_guesses_whose_turn_came_count_in_the_rate() -> None:
    assert acceptance_rate(3, 1) == 0.75
    assert acceptance_rate(0, 0) == 0.0


def test_the_best_number_of_guesses_is_found_by_tokens_and_time() -> None:
    """By hand: 1.5 tokens in 1.2 s, 1.75 in 1.25 s, 1.875 in 1.5 s, against one in 1 s."""
    assert ideal_gain(0.5, 1.0, {1: 1.2, 2: 1.25, 3: 1.5}) == (pytest.approx(1.4), 2)
    assert ideal_gain(1.0, 2.0, {1: 2.0, 4: 2.5, 8: 6.0}) == (pytest.approx(4.0), 4)


def test_where_no_guess_pays_the_ideal_is_none() -> None:
    assert ideal_gain(0.1, 1.0, {1: 1.2, 2: 1.4}) == (1.0, 0)
    assert ideal_gain(0.9, 1.0, {}) == (1.0, 0)


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="no probability"):
        ideal_gain(1.2, 1.0, {1: 1.0})
    with pytest.raises(ValueError, match="2 draft tokens took 0"):
        ideal_gain(0.5, 1.0, {1: 1.0, 2: 0.0})
