"""The ideal gain, against which a benchmark measures drafting."""

from __future__ import annotations

import pytest

from benchmarks.speculation import acceptance_rate, ideal_gain


def test_acceptance_rate_is_the_accepted_share_of_draft_tokens_that_were_reached() -> None:
    assert acceptance_rate(3, 1) == 0.75
    assert acceptance_rate(0, 0) == 0.0


def test_ideal_gain_is_that_of_the_draft_length_with_the_most_tokens_per_second() -> None:
    """By hand: 1.5 tokens in 1.2 s, 1.75 in 1.25 s, 1.875 in 1.5 s, against one in 1 s."""
    assert ideal_gain(0.5, 1.0, {1: 1.2, 2: 1.25, 3: 1.5}) == (pytest.approx(1.4), 2)
    assert ideal_gain(1.0, 2.0, {1: 2.0, 4: 2.5, 8: 6.0}) == (pytest.approx(4.0), 4)


def test_ideal_gain_is_1_if_no_draft_length_pays() -> None:
    assert ideal_gain(0.1, 1.0, {1: 1.2, 2: 1.4}) == (1.0, 0)
    assert ideal_gain(0.9, 1.0, {}) == (1.0, 0)


def test_ideal_gain_refuses_invalid_measurements() -> None:
    with pytest.raises(ValueError, match="no probability"):
        ideal_gain(1.2, 1.0, {1: 1.0})
    with pytest.raises(ValueError, match="2 draft tokens took 0"):
        ideal_gain(0.5, 1.0, {1: 1.0, 2: 0.0})
