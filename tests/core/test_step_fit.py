"""What a step costs, and when a prompt should join one."""

from __future__ import annotations

import pytest

from baton.core.step_fit import StepFit


def fitted(step_s: float, token_s: float, *lengths: int) -> StepFit:
    fit = StepFit()
    for tokens in lengths:
        fit.observe(tokens, step_s + token_s * tokens)
    return fit


def test_costs_are_those_of_the_line_through_the_steps() -> None:
    assert fitted(0.005, 8e-5, 96, 512, 200, 96).costs() == pytest.approx((0.005, 8e-5))


def test_costs_follow_a_change() -> None:
    fit = fitted(0.005, 8e-5, *[96, 512] * 50)
    for tokens in [96, 512] * 200:
        fit.observe(tokens, 0.001 + 4e-5 * tokens)
    assert fit.costs() == pytest.approx((0.001, 4e-5), rel=0.05)


@pytest.mark.parametrize("lengths", [(), (96,), (96,) * 200])
def test_everything_joins_before_costs_are_known(lengths: tuple[int, ...]) -> None:
    fit = fitted(0.005, 8e-5, *lengths)
    assert fit.costs() is None
    assert fit.pays(10_000, rows=10, waiting=1)


def test_a_prompt_joins_if_the_steps_that_are_spared_take_longer_than_the_rows_wait() -> None:
    fit = fitted(0.01, 1e-4, 10, 500)
    assert fit.pays(99, rows=1, waiting=1)
    assert not fit.pays(101, rows=1, waiting=1)
    assert fit.pays(99, rows=3, waiting=3)
    assert not fit.pays(99, rows=3, waiting=2)


def test_nothing_joins_where_only_tokens_cost() -> None:
    assert not fitted(0.0, 1e-4, 96, 500).pays(1, rows=1, waiting=100)
