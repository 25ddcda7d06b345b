"""The convention of every state machine here: a table (state, type of the input) -> transition. Pure.

    class Stage(MachineState): ...

    class Door:
        state: Stage
        def on(self, event: Event, now: float) -> list[Action]:
            return handle(TABLE, self, event, now)

    TABLE: Table = {
        (Stage.OPEN, Close): to(Door._close, Stage.SHUT),
        (Stage.SHUT, Close): to(ignore),
    }

A machine changes only in the functions of its table, each with the states that it may lead to besides the one it is
in. A pair that the table does not list is a violated invariant. So the table is the whole protocol: a change of the
protocol is a change of the table, and tests/core/test_tables.py walks all pairs of every table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from baton.core.errors import InvariantError


class MachineState(Enum):
    """The states of a machine whose table is looked up often: Enum's own hash is that of the name, in Python."""

    __hash__ = object.__hash__


class Machine(Protocol):
    @property
    def state(self) -> Any: ...


Handler = Callable[[Any, Any, float], list[Any]]
"""Handles (machine, event, now) and returns the actions for the caller to execute, in order."""


@dataclass(frozen=True, slots=True)
class Transition:
    handler: Handler
    states: frozenset[Enum]
    """That it may lead to, besides the state it starts in."""


Table = Mapping[tuple[Enum, type], Transition]


def to(handler: Handler, *states: Enum) -> Transition:
    return Transition(handler, frozenset(states))


def ignore(machine: Any, event: Any, now: float) -> list[Any]:
    """The handler of an input without effect in a state: a repeat, or one that crossed a message of ours."""
    return []


def handle(table: Table, machine: Machine, event: Any, now: float) -> list[Any]:
    """Passes an event to the function of its transition and returns its actions. `now` is in seconds of the caller's
    monotonic clock.

    Raises:
        InvariantError: the table lists no transition for this state and event, or does not list the state it led to.
    """
    before = machine.state
    transition = table.get((before, type(event)))
    if transition is None:
        raise InvariantError(f"{machine!r} in state {before.value} cannot handle {type(event).__name__}")
    actions = transition.handler(machine, event, now)
    after = machine.state
    if after is not before and after not in transition.states:
        raise InvariantError(f"{machine!r} went from {before.value} to {after.value} by {type(event).__name__}")
    return actions
