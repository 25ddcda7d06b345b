"""A state machine changes by its table alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import pytest

from baton.core.errors import InvariantError
from baton.core.machine import Table, handle, ignore, to


class State(Enum):
    OPEN = "open"
    SHUT = "shut"


class Close: ...


class Knock: ...


@dataclass
class Door:
    state: State = State.OPEN
    broken: bool = False

    def close(self, event: Close, now: float) -> list[str]:
        self.state = State.SHUT
        return [f"closed at {now}"]

    def knock(self, event: Knock, now: float) -> list[str]:
        if self.broken:
            self.state = State.OPEN
        return ["noise"]


TABLE: Table = {
    (State.OPEN, Close): to(Door.close, State.SHUT),
    (State.SHUT, Close): to(ignore),
    (State.SHUT, Knock): to(Door.knock),
}


def test_events_are_handled_by_state() -> None:
    door = Door()
    assert handle(TABLE, door, Close(), 2.0) == ["closed at 2.0"]
    assert door.state is State.SHUT
    assert handle(TABLE, door, Close(), 3.0) == []
    assert handle(TABLE, door, Knock(), 4.0) == ["noise"]


def test_pair_that_is_not_in_the_table_is_a_violated_invariant() -> None:
    with pytest.raises(InvariantError, match="in state open cannot handle Knock"):
        handle(TABLE, Door(), Knock(), 0.0)


def test_state_that_is_not_in_the_table_is_a_violated_invariant() -> None:
    with pytest.raises(InvariantError, match="went from shut to open by Knock"):
        handle(TABLE, Door(State.SHUT, broken=True), Knock(), 0.0)
