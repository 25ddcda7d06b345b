"""LeaseTable against a plain model, and its rules one by one."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.core.errors import InvariantError
from baton.core.leases import LeaseTable

names, incarnations = st.sampled_from("ab"), st.integers(1, 3)


class LeaseMachine(RuleBasedStateMachine):
    """Times are quarters of a second, so that sums are exact and expiry on the instant is met often."""

    @initialize(quarters=st.integers(1, 8))
    def start(self, quarters: int) -> None:
        self.duration, self.now = quarters / 4, 0.0
        self.table = LeaseTable(self.duration)
        self.held: dict[str, tuple[int, float]] = {}
        self.newest: dict[str, int] = {}

    def alive(self, name: str, incarnation: int) -> bool:
        held = self.held.get(name)
        return held is not None and held[0] == incarnation and self.now < held[1]

    @rule(quarters=st.integers(0, 6))
    def wait(self, quarters: int) -> None:
        self.now += quarters / 4

    @rule(name=names, incarnation=incarnations)
    def grant(self, name: str, incarnation: int) -> None:
        fenced = incarnation < self.newest.get(name, 0)
        assert self.table.grant(name, incarnation, self.now) == (not fenced)
        if not fenced:
            self.newest[name] = incarnation
            self.held[name] = (incarnation, self.now + self.duration)

    @rule(name=names, incarnation=incarnations)
    def renew(self, name: str, incarnation: int) -> None:
        alive = self.alive(name, incarnation)
        assert self.table.renew(name, incarnation, self.now) == alive
        if alive:
            self.held[name] = (incarnation, self.now + self.duration)

    @rule(name=names, incarnation=incarnations)
    def drop(self, name: str, incarnation: int) -> None:
        self.table.drop(name, incarnation)
        if self.held.get(name, (0, 0.0))[0] == incarnation:
            del self.held[name]

    @rule()
    def expire(self) -> None:
        gone = {name: held for name, held in self.held.items() if held[1] <= self.now}
        assert {x.holder: (x.incarnation, x.expires_at) for x in self.table.expire(self.now)} == gone
        self.held = {name: held for name, held in self.held.items() if name not in gone}

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "table"):
            return
        assert len(self.table) == len(self.held)
        for name in "ab":
            for incarnation in (1, 2, 3):
                assert self.table.valid(name, incarnation, self.now) == self.alive(name, incarnation)


LeaseMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLeases = LeaseMachine.TestCase


@pytest.mark.parametrize("forget", ["expire", "drop"])
def test_older_incarnation_stays_fenced_when_the_newer_one_is_gone(forget: str) -> None:
    table = LeaseTable(1.0)
    assert table.grant("w", 2, now=0.0)
    table.expire(9.0) if forget == "expire" else table.drop("w", 2)
    assert not table.grant("w", 1, now=9.0)
    assert table.grant("w", 2, now=9.0)


def test_lease_ends_on_the_instant_and_is_not_revived_by_renewal() -> None:
    table = LeaseTable(1.0)
    table.grant("w", 1, now=0.0)
    assert table.valid("w", 1, now=0.999)
    assert not table.valid("w", 1, now=1.0)
    assert not table.renew("w", 1, now=1.0)


def test_drop_of_an_older_incarnation_leaves_the_newer_one() -> None:
    table = LeaseTable(1.0)
    table.grant("w", 2, now=0.0)
    table.drop("w", 1)
    assert table.valid("w", 2, now=0.5)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, math.nan])
def test_duration_that_can_never_be_held_is_refused(duration_s: float) -> None:
    with pytest.raises(InvariantError):
        LeaseTable(duration_s)
