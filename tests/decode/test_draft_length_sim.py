"""What choosing the draft length gains, in virtual time: against every fixed length, and against no drafting."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from baton.core.sequence import Sequence, State
from decode.speculation.acceptance import AcceptanceEstimates
from tests.support.accepted_drafts import GREEDY, WARM, bits
from tests.support.builders import make_request
from tests.support.drafting import Prices, serve

SERVED = Prices()
ALONE = Prices(around_s=0.1e-3)  # scheduler and engine, nothing around them
DEAR = Prices(token_s=0.8e-3)  # a draft token costs a third of a step
MANY = Prices(around_s=3e-3)  # 32 clients
RECORDED = {"greedy": bits(GREEDY)[:8], "warm": bits(WARM)[:8], "more-greedy": bits(GREEDY)[8:]}


def random_text(rate: float, streams: int, length: int = 128, seed: int = 0) -> list[list[bool]]:
    generator = random.Random(seed)
    return [[generator.random() < rate for _ in range(length)] for _ in range(streams)]


@cache
def best_fixed(text: str, around_s: float) -> float:
    """Tokens per second with the best fixed draft length, without noise and load."""
    speeds = [serve(RECORDED[text], Prices(around_s=around_s), length=length).speed for length in range(5)]
    assert max(speeds) > speeds[0]
    return max(speeds)


@pytest.mark.parametrize(
    ("text", "prices", "wrong"),
    [
        ("greedy", SERVED, 1.0),
        ("warm", SERVED, 1.0),
        ("greedy", ALONE, 1.0),
        pytest.param("warm", ALONE, 1.0, marks=pytest.mark.long),
        ("greedy", SERVED, 4.0),
        ("warm", SERVED, 0.3),
        ("greedy", replace(SERVED, noise=0.5, one_in=20), 1.0),
        pytest.param("warm", replace(SERVED, noise=0.5, one_in=20), 1.0, marks=pytest.mark.long),
        ("greedy", replace(SERVED, load=lambda now: 2.5 if int(now / 0.7) % 2 else 1.0), 1.0),
    ],
    ids=[
        "greedy",
        "warm",
        "greedy-alone",
        "warm-alone",
        "dear-at-start",
        "cheap-at-start",
        "noise",
        "warm-noise",
        "load",
    ],
)
def test_chosen_draft_lengths_are_near_the_best_fixed_one_where_drafting_pays(
    text: str, prices: Prices, wrong: float
) -> None:
    """The best length is known only afterwards. `wrong`: by what factor a token's price was mismeasured at start."""
    best = best_fixed(text, prices.around_s)
    speeds = [serve(RECORDED[text], prices, model=prices.model(wrong), seed=seed).speed for seed in (1, 2)]
    assert min(speeds) > 0.96 * best


@pytest.mark.parametrize("seed", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (8, 20))])
def test_drafting_continues_after_a_run_of_rejected_draft_tokens(seed: int) -> None:
    """With the noise of these seeds one client's answers once got no draft tokens for the rest of the run: the estimate
    fell slightly below what pays, and a trial to correct it costs more than drafting saves in one answer."""
    found = serve(RECORDED["more-greedy"], ALONE, seed=seed)
    assert found.speed > 0.98 * best_fixed("more-greedy", ALONE.around_s)


@pytest.mark.parametrize(
    ("rate", "streams", "clients", "prices"),
    [(0.05, 16, 1, SERVED), (0.3, 16, 1, DEAR), (0.5, 96, 8, SERVED), (0.6, 64, 32, MANY), (0.05, 64, 32, MANY)],
)
def test_speculation_costs_little_where_drafting_does_not_pay(
    rate: float, streams: int, clients: int, prices: Prices
) -> None:
    text = random_text(rate, streams)
    plain = serve(text, prices, clients=clients, length=0)
    found = serve(text, prices, clients=clients)
    assert plain.draft_tokens == plain.filled == 0 and plain.tokens == found.tokens
    assert found.trials > 0, "it must go on looking"
    assert found.speed > 0.985 * plain.speed


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
def test_planning_overhead_is_part_of_the_cost_of_draft_tokens(seed: int) -> None:
    """Here two draft tokens pay for their passes, but not for the overhead that they add around a step."""
    prices = Prices(around_s=0.1e-3, around_draft_tokens_s=0.3e-3, behind_s=0.016e-3)
    text = random_text(0.5, 16)
    plain = serve(text, prices, length=0)
    free = replace(prices, around_draft_tokens_s=0.0)
    assert serve(text, free, length=2).speed > 1.05 * plain.speed
    assert max(serve(text, prices, length=k).speed for k in (1, 2, 3, 4)) < plain.speed
    assert serve(text, prices, seed=seed).speed > 0.96 * plain.speed


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 11))])
def test_new_worker_learns_whether_drafting_pays(seed: int) -> None:
    """Plain steps are so cheap here that, by the initial estimate, draft tokens do not pay."""
    prices = Prices(0.55e-3, 0.1e-3, 0.12e-3, 0.23e-3, 0.07e-3, behind_s=0.02e-3, around_s=0.12e-3)
    prices = replace(prices, around_draft_tokens_s=0.1e-3)
    worth, not_worth = random_text(0.78, 11), random_text(0.5, 11)
    plain = serve(worth, prices, length=0).speed
    ideal = max(serve(worth, prices, length=k).speed for k in (2, 3, 4, 5))
    assert serve(worth, prices, seed=seed).speed - plain > 0.85 * (ideal - plain) > 0.25 * plain
    assert max(serve(not_worth, prices, length=k).speed for k in (1, 2, 3)) < 0.97 * plain
    assert serve(not_worth, prices, seed=seed).speed > 0.975 * plain


def test_draft_length_is_seldom_chosen_for_one_stream_where_drafting_does_not_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Choosing a draft length costs a tenth of a short step."""
    model, asked = SERVED.model(), 0
    prices = model.of_one_row

    def counted() -> tuple[float, float, float] | None:
        nonlocal asked
        asked += 1
        return prices()

    monkeypatch.setattr(model, "of_one_row", counted)
    found = serve(random_text(0.05, 8), SERVED, model=model)
    assert found.steps - found.drafting > 900 and found.trials > 1
    assert found.drafting < asked < found.steps / 4


def test_drafting_starts_when_the_text_becomes_predictable() -> None:
    text = random_text(0.05, 6) + random_text(0.9, 48, seed=1)
    best = max(serve(text[10:], SERVED, length=length).speed for length in (4, 6, 8))
    hard, all_of_it = serve(text[:6], SERVED), serve(text, SERVED)
    assert hard.draft_tokens < hard.tokens / 10 and all_of_it.draft_tokens > all_of_it.tokens / 2
    easy_s = all_of_it.seconds - hard.seconds
    assert (all_of_it.tokens - hard.tokens) / easy_s > 0.8 * best


def sequence() -> Sequence:
    return Sequence(make_request(), State.RUNNING, 0.0)


def test_acceptance_estimate_returns_to_the_shared_rate_without_draft_tokens() -> None:
    estimates, one = AcceptanceEstimates(), sequence()
    for _ in range(30):
        estimates.observe(one, 1, 0)
    for _ in range(200):
        estimates.observe(sequence(), 4, 4)
    assert estimates.shared > 0.95 and estimates.rate(one) < 0.5
    for _ in range(400):
        estimates.observe(one, 0, 0)
    assert estimates.rate(one) > 0.95 * estimates.shared
    assert estimates.rate(sequence()) == estimates.shared


def test_draft_tokens_after_the_first_rejected_one_do_not_count() -> None:
    estimates, one = AcceptanceEstimates(), sequence()
    estimates.observe(one, 8, 2)
    assert 2.9 < one.verified_weight < 3.0 and one.accepted_weight < 2.0
    estimates.observe(other := sequence(), 2, 2)
    assert other.accepted_weight == other.verified_weight and 1.9 < other.verified_weight < 2.0
