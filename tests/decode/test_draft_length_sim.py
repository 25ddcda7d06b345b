"""What choosing how many tokens to draft is worth, in virtual time: against every fixed number, and against none."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from decode.speculation.draft_length import Acceptance, AcceptanceEstimates
from tests.support.accepted_drafts import GREEDY, WARM, bits
from tests.support.draft_sim import Prices, serve

SERVED = Prices()
ALONE = Prices(around_s=0.1e-3)  # scheduler and engine, nothing around them
DEAR = Prices(token_s=0.8e-3)  # one draft token costs as much as a third of a step
MANY = Prices(around_s=3e-3)  # 32 clients
RECORDED = {"greedy": bits(GREEDY)[:8], "warm": bits(WARM)[:8], "more-greedy": bits(GREEDY)[8:]}


def alike(rate: float, streams: int, length: int = 128, seed: int = 0) -> list[list[bool]]:
    generator = random.Random(seed)
    return [[generator.random() < rate for _ in range(length)] for _ in range(streams)]


@cache
def best_fixed(text: str, around_s: float) -> float:
    """Tokens per second with the best fixed number of draft tokens; noise and load do not count in that."""
    speeds = [serve(RECORDED[text], Prices(around_s=around_s), length=length).speed for length in range(5)]
    assert max(speeds) > speeds[0]
    return max(speeds)


@pytest.mark.parametrize(
    ("text", "prices", "wrong"),
    [
        ("greedy", SERVED, 1.0),
        ("warm", SERVED, 1.0),
        ("greedy", ALONE, 1.0),
        ("warm", ALONE, 1.0),
        ("greedy", SERVED, 4.0),
        ("warm", SERVED, 0.3),
        ("greedy", replace(SERVED, noise=0.5, one_in=20), 1.0),
        ("warm", replace(SERVED, noise=0.5, one_in=20), 1.0),
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
def test_where_guesses_pay_the_choice_is_as_good_as_the_best_fixed_number(
    text: str, prices: Prices, wrong: float
) -> None:
    """Seen afterwards. `wrong` is by how much the price of a token was mismeasured at start."""
    best = best_fixed(text, prices.around_s)
    speeds = [serve(RECORDED[text], prices, model=prices.model(wrong), seed=seed).speed for seed in (1, 2)]
    assert min(speeds) > 0.96 * best


@pytest.mark.parametrize("seed", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (8, 20))])
def test_a_run_of_wrong_guesses_is_not_the_end_of_guessing(seed: int) -> None:
    """With the noise of these seeds one client's answers once got no draft tokens for the rest of the work: what was
    believed fell a little below what pays, and a trial to find out that it is above costs more than an answer saves."""
    found = serve(RECORDED["more-greedy"], ALONE, seed=seed)
    assert found.speed > 0.98 * best_fixed("more-greedy", ALONE.around_s)


@pytest.mark.parametrize(
    ("rate", "streams", "clients", "prices"),
    [(0.05, 16, 1, SERVED), (0.3, 16, 1, DEAR), (0.5, 96, 8, SERVED), (0.6, 64, 32, MANY), (0.05, 64, 32, MANY)],
)
def test_where_no_guess_pays_a_draft_costs_hardly_more_than_none(
    rate: float, streams: int, clients: int, prices: Prices
) -> None:
    text = alike(rate, streams)
    plain = serve(text, prices, clients=clients, length=0)
    found = serve(text, prices, clients=clients)
    assert plain.draft_tokens == plain.filled == 0 and plain.tokens == found.tokens
    assert found.trials > 0, "it must go on looking"
    assert found.speed > 0.985 * plain.speed


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
def test_what_planning_guesses_takes_is_part_of_their_price(seed: int) -> None:
    """Here two draft tokens are worth their passes, but not what they add to what surrounds a step."""
    prices = Prices(around_s=0.1e-3, around_draft_tokens_s=0.3e-3, behind_s=0.016e-3)
    text = alike(0.5, 16)
    plain = serve(text, prices, length=0)
    free = replace(prices, around_draft_tokens_s=0.0)
    assert serve(text, free, length=2).speed > 1.05 * plain.speed
    assert max(serve(text, prices, length=k).speed for k in (1, 2, 3, 4)) < plain.speed
    assert serve(text, prices, seed=seed).speed > 0.96 * plain.speed


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(n, marks=pytest.mark.long) for n in range(3, 11))])
def test_a_new_worker_finds_out_what_guesses_are_worth_either_way(seed: int) -> None:
    """Plain steps are so cheap here that draft tokens, by what is believed at first, do not pay."""
    prices = Prices(0.55e-3, 0.1e-3, 0.12e-3, 0.23e-3, 0.07e-3, behind_s=0.02e-3, around_s=0.12e-3)
    prices = replace(prices, around_draft_tokens_s=0.1e-3)
    worth, not_worth = alike(0.78, 11), alike(0.5, 11)
    plain = serve(worth, prices, length=0).speed
    ideal = max(serve(worth, prices, length=k).speed for k in (2, 3, 4, 5))
    assert serve(worth, prices, seed=seed).speed - plain > 0.85 * (ideal - plain) > 0.25 * plain
    assert max(serve(not_worth, prices, length=k).speed for k in (1, 2, 3)) < 0.97 * plain
    assert serve(not_worth, prices, seed=seed).speed > 0.975 * plain


def test_while_a_stream_alone_cannot_be_guessed_for_there_is_seldom_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice costs a tenth of a short step."""
    model, asked = SERVED.model(), 0
    prices = model.of_one_row

    def counted() -> tuple[float, float, float] | None:
        nonlocal asked
        asked += 1
        return prices()

    monkeypatch.setattr(model, "of_one_row", counted)
    found = serve(alike(0.05, 8), SERVED, model=model)
    assert found.steps - found.guessing > 900 and found.trials > 1
    assert found.guessing < asked < found.steps / 4


def test_text_that_turns_easy_is_found_out() -> None:
    text = alike(0.05, 6) + alike(0.9, 48, seed=1)
    best = max(serve(text[10:], SERVED, length=length).speed for length in (4, 6, 8))
    hard, all_of_it = serve(text[:6], SERVED), serve(text, SERVED)
    assert hard.draft_tokens < hard.tokens / 10 and all_of_it.draft_tokens > all_of_it.tokens / 2
    easy_s = all_of_it.seconds - hard.seconds
    assert (all_of_it.tokens - hard.tokens) / easy_s > 0.8 * best


def test_a_sequence_goes_back_to_what_is_usual_while_nothing_is_guessed_for_it() -> None:
    estimates, one = AcceptanceEstimates(), Acceptance()
    for _ in range(30):
        estimates.observe(one, 1, 0)
    for _ in range(200):
        estimates.observe(Acceptance(), 4, 4)
    assert estimates.shared > 0.95 and estimates.rate(one) < 0.5
    for _ in range(400):
        estimates.observe(one, 0, 0)
    assert estimates.rate(one) > 0.95 * estimates.shared
    assert estimates.rate(Acceptance()) == estimates.shared


def test_only_guesses_whose_turn_came_count() -> None:
    estimates, one = AcceptanceEstimates(), Acceptance()
    estimates.observe(one, 8, 2)
    assert 2.9 < one.seen < 3.0 and one.right < 2.0
    estimates.observe(other := Acceptance(), 2, 2)
    assert other.right == other.seen and 1.9 < other.seen < 2.0
