"""Processes of a simulated cluster: each has a name, an incarnation and a monotonic clock of its own, and may be paused
(SIGSTOP, a starved host) or end. What happens at a process while it is paused happens when it continues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sim.loop import Loop, Timer


@dataclass(frozen=True, slots=True)
class Clock:
    """A monotonic clock that was started at an arbitrary time and runs `rate` times as fast as virtual time."""

    offset_s: float = 0.0
    rate: float = 1.0

    def at(self, now: float) -> float:
        return self.offset_s + now * self.rate


class Process:
    """A process that can be paused and killed."""

    def __init__(self, loop: Loop, name: str, incarnation: int, clock: Clock) -> None:
        self.loop, self.name, self.incarnation, self.clock = loop, name, incarnation, clock
        self.alive, self.paused = True, False
        # What is to happen when it continues.
        self._postponed: list[tuple[bool, Callable[..., object], tuple[Any, ...]]] = []

    def __str__(self) -> str:
        return f"{self.name}@{self.incarnation}"

    @property
    def now(self) -> float:
        """Seconds on its own monotonic clock."""
        clock = self.clock
        return clock.offset_s + self.loop.now * clock.rate

    def later(self, after_s: float, act: Callable[..., object], *args: Any) -> Timer:
        """A timer of this process: `after_s` on its own clock."""
        return self.loop.later(after_s / self.clock.rate, self._timer, act, args)

    def soon(self, act: Callable[..., object], *args: Any) -> Timer:
        return self.loop.later(0.0, self._timer, act, args)

    def _timer(self, act: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self.paused:
            self._postponed.append((False, act, args))
        elif self.alive:
            act(*args)

    def receives(self, act: Callable[..., object], *args: Any) -> None:
        """Passes something that arrives from outside to this process."""
        if self.paused:
            self._postponed.append((True, act, args))
        elif self.alive:
            act(*args)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        """Continues. What arrived meanwhile is read in its order, interleaved with the timers that are due."""
        self.paused = False
        arrived = [entry for entry in self._postponed if entry[0]]
        due = [entry for entry in self._postponed if not entry[0]]
        self._postponed = []
        choose = self.loop.random.random
        while (arrived or due) and self.alive and not self.paused:
            queue = arrived if arrived and (not due or choose() < 0.8) else due
            _, act, args = queue.pop(0)
            act(*args)
        self._postponed = [*arrived, *due, *self._postponed]

    def die(self) -> None:
        """Ends the process as kill -9 does."""
        self.alive, self.paused = False, False
        self._postponed = []
