"""Shares of new requests by revision: the share is met, sticky, and taken back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from baton.core.errors import InvalidRequest
from coordinator.policy.traffic import KEPT_PROMPTS, MAX_PREFIX_TOKENS, Traffic, parse_shares
from tests.coordinator.test_policy_classes import join, table
from tests.support.builders import make_facts, make_join, make_request
from tests.support.placing import Placing, make_choice

BOTH = ("", "v2")
SYSTEM = tuple(range(1, 301))
"""A system prompt, with which every request begins."""


def with_shares(*words: str) -> Traffic:
    traffic = Traffic()
    traffic.set(parse_shares(words))
    return traffic


def revision(traffic: Traffic, prompt: tuple[int, ...], session: str = "") -> str:
    place = traffic.place(make_request(prompt=prompt), session)
    (chosen,) = traffic.revisions(place, "r", BOTH)
    return chosen


@pytest.mark.parametrize("percent", [5.0, 50.0])
@pytest.mark.parametrize("how", ["session", "prompt"])
def test_a_share_of_2000_requests_goes_to_the_canary_and_every_session_stays(percent: float, how: str) -> None:
    traffic = with_shares(f"v2={percent}")

    def turn(number: int, message: tuple[int, ...]) -> str:
        return revision(traffic, SYSTEM + message, f"s{number}" if how == "session" else "")

    messages = [tuple(1000 + (number * 7 + n) % 5000 for n in range(32 + number % 20)) for number in range(2000)]
    first = [turn(number, words) for number, words in enumerate(messages)]
    assert abs(first.count("v2") / 20 - percent) <= 1.5
    assert [turn(number, words + (9,) * 100) for number, words in enumerate(messages)] == first, "their second turns"


def test_a_share_that_grows_keeps_its_sessions_and_one_that_is_taken_back_has_none() -> None:
    traffic = with_shares("v2=5")
    names = [f"s{n}" for n in range(1000)]
    before = {name for name in names if revision(traffic, (1, 2), name) == "v2"}
    traffic.set({"v2": 20.0})
    after = {name for name in names if revision(traffic, (1, 2), name) == "v2"}
    assert before < after and abs(len(after) - 200) < 50
    traffic.set({"v2": 0.0})
    assert not any(revision(traffic, (1, 2), name) == "v2" for name in names)
    traffic.set({}, clear=True)
    assert traffic.shares == {} and set(traffic.revisions(0.0, "r", BOTH)) == set(BOTH), "by room"


def test_shares_without_workers_go_to_others_but_never_to_a_share_of_0() -> None:
    traffic = with_shares("a=30", "b=70", "c=0")
    assert list(traffic.revisions(10.0, "r", ["a", "b", "c"])) == ["a"]
    assert list(traffic.revisions(10.0, "r", ["b", "c"])) == ["b"]
    assert list(traffic.revisions(10.0, "r", ["b", "c", "d"])) == ["b", "d"]
    assert list(traffic.revisions(10.0, "r", ["c"])) == []
    assert list(with_shares("a=30").revisions(99.0, "r", ["a"])) == ["a"], "no other revision is there"


def test_tenants_do_not_share_sessions_and_remembered_prompts_are_bounded() -> None:
    traffic = with_shares("v2=5")
    requests = [make_request(prompt=(1,) * 20), make_request(prompt=(1,) * 20, cache_salt="x")]
    assert traffic.place(requests[0], "s") == traffic.place(requests[1], "s")
    for number in range(KEPT_PROMPTS + 100):
        traffic.place(make_request(prompt=(*divmod(number, 1000), *range(14))), "")
    assert len(traffic._places) == KEPT_PROMPTS
    before = dict(traffic._places)
    traffic.place(make_request(prompt=MAX_PREFIX_TOKENS + 1), "")
    assert traffic._places == before, "a longer prompt is not remembered"


def test_the_share_of_workers_without_a_revision_has_a_name() -> None:
    assert parse_shares(["-=95", "v2=5%"]) == {"": 95.0, "v2": 5.0}
    for words in (["a=1.1", "b=57.2", "c=24.5", "d=17.2"], ["a=0.4", "b=64.9", "c=34.7"]):
        assert len(with_shares(*words).shares) == len(words), "100 % in all, but for the rounding of floats"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["v2"], "'v2' is not NAME=PERCENT"),
        (["v2=x"], "'v2=x' is not NAME=PERCENT"),
        (["=5"], "'=5' is not NAME=PERCENT"),
        (["v2=5", "v2=6"], "'v2' is given twice"),
        (["v2=101"], "the share of 'v2' is not 0 to 100: 101"),
        (["vü=5"], r"revision: 'v\xfc' is not 1 to 128 characters"),
        (["v2=-1"], "not 0 to 100"),
        (["v2=nan"], "not 0 to 100"),
        (["a b=5"], "revision: "),
        (["a=60", "b=60"], "the shares are 121 % in all"),
    ],
)
def test_wrong_shares_are_refused_and_change_nothing(words: list[str], message: str) -> None:
    traffic = with_shares("v1=1%")
    with pytest.raises(InvalidRequest) as caught:
        traffic.set(parse_shares(words))
    assert message in caught.value.message and dict(traffic.shares) == {"v1": 1.0}


def test_requests_are_placed_by_their_share_and_running_ones_stay_when_it_is_taken_back() -> None:
    d = Placing(table(("p0", ""), ("d0", ""), v2={"model_digest": "x"}))
    d.dispatcher.traffic.set({"v2": 40.0})
    for name in ("p1", "d1", "d2"):
        join(d.table, name, "v2", model_digest="x")

    def submit(name: str, place: float) -> None:
        choice = make_choice(name, 4, 8)
        choice.traffic_place = place
        d.submit(choice)

    submit("canary", 39.9)
    submit("stable", 40.0)
    placed = {p.name: p for p in d.place()}
    assert (placed["canary"].prefill, placed["canary"].spare) == ("p1", "d2") and placed["stable"].prefill == "p0"
    d.produced("canary", 2)
    d.dispatcher.traffic.set({"v2": 0.0})
    submit("new", 1.0)
    assert Counter(p.prefill for p in d.place()) == {"p0": 1}
    d.reschedule("canary")  # its decode worker was lost
    assert [p.prefill for p in d.place()] == ["p1"], "only that model continues its output"
    assert d.choices["canary"].generated_by == make_facts(model_digest="x")


def test_a_queue_from_before_there_were_shares_is_shared_as_well() -> None:
    d = Placing(table(("p0", ""), ("d0", ""), v2={"model_digest": "x"}))
    for name in ("p1", "d1"):
        join(d.table, name, "v2", model_digest="x")
    for number in range(100):
        d.submit(make_choice(f"queued-{number}", 4, 8))
    d.dispatcher.traffic.set({"v2": 20.0})
    workers = Counter[str]()
    while placed := d.place():
        workers.update(p.prefill for p in placed)
        for each in placed:
            d.finish(each.name)
    assert workers.total() == 100 and 10 <= workers["p1"] <= 30, workers


def test_a_request_that_a_canary_cannot_hold_goes_to_the_other_revision() -> None:
    """The share decided alone: half of the requests that the other revision serves were refused as too long."""
    d = Placing(table(("p0", ""), ("d0", ""), v2={"model_digest": "x"}))
    for name in ("p1", "d1"):
        d.table.join(replace(make_join(name, blocks=4, model_digest="x"), revision="v2"), 0.0)
    d.dispatcher.traffic.set({"v2": 100.0})
    for name, tokens in (("long", 24), ("short", 4), ("too-long", 1000)):
        choice = make_choice(name, tokens, tokens + 4)
        choice.traffic_place = 1.0
        why = d.dispatcher.unservable(choice)
        assert (why is not None) == (name == "too-long"), why
        if why is None:
            d.submit(choice)
    assert {p.name: p.prefill for p in d.place()} == {"long": "p0", "short": "p1"}
    d.dispatcher.traffic.set({"": 0.0})
    choice = make_choice("long-2", 24, 28)
    choice.traffic_place = 1.0
    assert d.dispatcher.unservable(choice) is not None, "a revision with a share of 0 gets no new request"


def test_a_share_of_0_alone_serves_nothing_and_says_so() -> None:
    d = Placing(table(("p0", "v2"), ("d0", "v2")))
    d.dispatcher.traffic.set({"v2": 0.0})
    choice = make_choice("r", 4, 8)
    d.dispatcher.enqueue(choice)
    why = d.dispatcher.unservable(choice)
    assert d.place() == [] and why is not None and "`baton traffic`" in why[0]
