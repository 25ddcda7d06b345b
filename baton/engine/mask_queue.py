"""Decides which masks a process computes next. Pure.

A client is a tenant, or for requests without one the grammar. Between clients the order is start-time fair queueing
over processor time: next is the client that has used the least so far; one that was idle starts level with the latest
turn. At most `MAX_RUNNING` of the processes compute for one client at a time, and no other begins for it while one has
been computing a mask for longer than `OVERDUE_S`.

A sequence stays with the process that has its automaton, unless that process is occupied by an overdue mask.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_RUNNING = 2
BATCH = 16
"""Masks of one client that a process is given at a time."""
OVERDUE_S = 0.05
MAX_CLIENTS = 1024
"""Clients whose used time is remembered."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunningMasks(Generic[T]):
    client: str
    masks: tuple[T, ...]
    began_at: float

    def overdue(self, now: float) -> bool:
        return now - self.began_at > OVERDUE_S


class MaskQueue(Generic[T]):
    """Which masks a process computes next; `_turns` has what each busy process computes."""

    def __init__(self) -> None:
        # By client, in order of arrival: the process that has the automaton, and the mask.
        self._waiting: dict[str, deque[tuple[int | None, T]]] = {}
        self._turns: dict[int, RunningMasks[T]] = {}
        self._used_s: dict[str, float] = {}  # processor time by client
        self._level_s = 0.0  # the most that a client had used when its masks began

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, client: str, mask: T, process: int | None) -> None:
        if client not in self._waiting:
            self._waiting[client] = deque()
            if len(self._used_s) >= MAX_CLIENTS:
                self._used_s = {c: used for c, used in self._used_s.items() if used > self._level_s}
            self._used_s[client] = max(self._used_s.get(client, 0.0), self._level_s)
        self._waiting[client].append((process, mask))

    def begin(self, process: int, now: float) -> tuple[T, ...]:
        """Returns the masks that an idle process computes next. If there are any, `ended` must follow."""
        for client in sorted(self._waiting, key=self._used_s.__getitem__):
            if not self._may_begin(client, now):
                continue
            occupied = {owner for owner, turn in self._turns.items() if turn.overdue(now)}
            masks: list[T] = []
            left: deque[tuple[int | None, T]] = deque()
            for owner, mask in self._waiting[client]:
                if len(masks) < BATCH and (owner in (None, process) or owner in occupied):
                    masks.append(mask)
                else:
                    left.append((owner, mask))
            if masks:
                self._waiting[client] = left
                if not left:
                    del self._waiting[client]
                self._turns[process] = RunningMasks(client, tuple(masks), now)
                self._level_s = max(self._level_s, self._used_s[client])
                return tuple(masks)
        return ()

    def ended(self, process: int, used_s: float) -> None:
        client = self._turns.pop(process).client
        self._used_s[client] = self._used_s.get(client, self._level_s) + used_s

    def overdue(self, process: int, now: float) -> tuple[T, ...]:
        """Returns the masks that a process is computing if they are overdue."""
        turn = self._turns.get(process)
        return turn.masks if turn is not None and turn.overdue(now) else ()

    def _may_begin(self, client: str, now: float) -> bool:
        turns = [turn for turn in self._turns.values() if turn.client == client]
        return len(turns) < MAX_RUNNING and not any(turn.overdue(now) for turn in turns)
