"""Virtual time: a queue of events, executed in the order of their times; equal times in the order of their scheduling.

Everything random comes from one generator, and every traced event enters a hash, so one seed gives one hash, in any
process (PYTHONHASHSEED has no influence: nothing iterates over a set of strings).
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from typing import Any

Timer = list[Any]
"""[time, number, function, arguments]; the function is None once it is cancelled."""


class Trace:
    """A hash of all lines, and with `keep` the lines themselves."""

    def __init__(self, *, keep: bool = False) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.lines: list[str] | None = [] if keep else None
        self.count = 0

    def add(self, now: float, *words: object) -> None:
        line = f"{now:12.6f} {' '.join(map(str, words))}"
        self._hash.update(line.encode())
        self.count += 1
        if self.lines is not None:
            self.lines.append(line)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


class Loop:
    """Executes timers in the order of their times, in seconds. Without a `trace` nothing is traced."""

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.trace = trace
        self.executed = 0
        self._queue: list[Timer] = []
        self._number = 0

    def later(self, after_s: float, act: Callable[..., object], *args: Any) -> Timer:
        """Executes `act(*args)` after `after_s` seconds, at the earliest now."""
        return self.at(self.now + after_s if after_s > 0.0 else self.now, act, *args)

    def at(self, when: float, act: Callable[..., object], *args: Any) -> Timer:
        self._number += 1
        timer: Timer = [when, self._number, act, args]
        heapq.heappush(self._queue, timer)
        return timer

    def next(self) -> bool:
        """Executes the next event; returns False if there is none."""
        queue = self._queue
        while queue:
            when, _, act, args = heapq.heappop(queue)
            if act is not None:
                self.now = when
                self.executed += 1
                act(*args)
                return True
        return False

    def run_all(self) -> None:
        """Executes events until there is none."""
        queue, pop = self._queue, heapq.heappop
        while queue:
            when, _, act, args = pop(queue)
            if act is not None:
                self.now = when
                self.executed += 1
                act(*args)

    def run(self, until_s: float, done: Callable[[], bool] | None = None) -> None:
        """Executes events up to time `until_s`, or until `done()`, which is called after each event."""
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            self.next()
            if done is not None and done():
                return
        self.now = max(self.now, until_s)

    def happens(self, probability: float) -> bool:
        return probability > 0.0 and self.random.random() < probability

    def note(self, *words: object) -> None:
        """Adds a line to the trace."""
        if self.trace is not None:
            self.trace.add(self.now, *words)


def cancel(timer: Timer | None) -> None:
    if timer is not None:
        timer[2] = None
