"""What a step is expected to take."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from decode import draft_model
from decode.step_cost import StepCost

CURVE = [(1, 0.010), (8, 0.010), (64, 0.038)]


def test_between_points_along_the_line_and_beyond_them_along_the_last() -> None:
    cost = StepCost(CURVE)
    assert cost.seconds(0) == 0.0
    assert cost.seconds(4) == pytest.approx(0.010)
    assert cost.seconds(36) == pytest.approx(0.024)
    assert cost.seconds(120) == pytest.approx(0.066)


def test_noise_never_makes_a_longer_step_the_faster_one() -> None:
    assert StepCost([(1, 0.02), (2, 0.01)]).seconds(2) == pytest.approx(0.02)


def test_what_takes_less_is_believed_sooner_than_what_takes_more() -> None:
    slow_start, stalled = StepCost(CURVE), StepCost(CURVE)
    slow_start.scale = 10.0  # measured while the machine was busy
    for _ in range(5):
        slow_start.observe(1, 0.010)
    assert slow_start.seconds(1) < 0.015
    stalled.observe(1, 10.0)
    assert stalled.seconds(1) < 0.014


def test_tokens_that_fit_a_time() -> None:
    assert StepCost(CURVE).tokens_within(0.024, 512) == 36
    assert StepCost(CURVE).tokens_within(0.005, 512) == 0
    assert StepCost(CURVE).tokens_within(1.0, 100) == 100


def test_points_must_rise() -> None:
    with pytest.raises(ValueError, match="do not rise"):
        StepCost([(2, 0.1), (1, 0.2)])


def test_a_slow_draft_is_not_timed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "MEASURING_S", 0.05)
    calls: list[list[int]] = []

    def guess(plan: Any, counts: list[int]) -> None:
        calls.append(counts)
        time.sleep(0.02 * counts[0])

    layout = SimpleNamespace(block_size=16)
    draft: Any = SimpleNamespace(guesses_at_once=True, max_model_len=2048, num_blocks=512, layout=layout, guess=guess)
    ((rows, seconds),) = draft_model.measure_passes(draft)
    assert rows == 1 and seconds > 0.01 and calls == [[1], [6]]
    draft.guesses_at_once = False
    assert draft_model.measure_passes(draft) == []
