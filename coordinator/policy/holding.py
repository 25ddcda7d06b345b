"""How long choices wait for workers that are not here: the limit `--hold-s`. Pure.

A choice that no present worker can serve waits in the queue, or with parked KV, for one that joins or returns. It ends
after `limit_s` in which none could serve it. A new request waits as well, however long there has been none: only
readiness tells clients to send it elsewhere (`missing_role`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from baton.core.commands import Role
from baton.core.errors import Unavailable
from coordinator.policy.choice import Choice
from coordinator.policy.dispatch import Dispatcher


class Holding:
    def __init__(self, dispatcher: Dispatcher, limit_s: float) -> None:
        self._dispatcher, self.limit_s = dispatcher, limit_s
        # When prefill, and both roles, last had a ready worker, or will have one.
        self._complete_at = [-math.inf, -math.inf]
        self._expected_at = -math.inf  # no choice has waited for a missing worker before

    def expect_workers(self, at: float) -> None:
        """Lets choices wait for workers that are expected at that time, and `limit_s` from then on."""
        self._complete_at = [max(at, known) for known in self._complete_at]
        self._expected_at = max(at, self._expected_at)

    def expects_workers(self, now: float) -> bool:
        """Whether workers were expected at a time less than `limit_s` ago, or later."""
        return now - self._expected_at < self.limit_s

    def look_for_roles(self, now: float) -> None:
        for decode in (False, True):
            if self._dispatcher.missing_role(decode=decode) is None:
                self._complete_at[decode] = now

    def missing_role(self, now: float, *, decode: bool = True) -> Role | None:
        """Returns a role that has had no ready worker for `limit_s`, or ever, and where none was expected: for that
        long requests may still find one. Without `decode` only prefill is needed."""
        missing = self._dispatcher.missing_role(decode=decode)
        return None if now - self._complete_at[decode] < self.limit_s else missing

    def update(self, waiting: Iterable[Choice], now: float) -> None:
        """Updates whether any worker that is not draining can serve each choice: its time begins when none is left."""
        for choice in waiting:
            why = self._dispatcher.unservable(choice)
            if why is not None and choice.unservable is None:
                choice.unservable_since = now
            choice.unservable = why

    def error(self, choice: Choice, now: float) -> Unavailable | None:
        """Returns the error of a waiting choice whose time is over; None while it is not, and if it can be served."""
        if choice.unservable is None or now - max(choice.unservable_since, self._expected_at) < self.limit_s:
            return None
        message, code = choice.unservable
        message += f"; no other joined within {self.limit_s:g} s (--hold-s)"
        return Unavailable(message, code=code, retry_after_s=2)
