"""When a child that died is started again, and when the cluster gives up. Pure.

Before it has ever joined, a child that ends with a startup error (code 3: bad checkpoint, port in use) ends the
cluster: trying again would fail the same way. Any other death there is tried a few times. Once it has joined, it is
always started again, after 1, 2, 4 .. 30 s; a run that stayed healthy for a minute resets the wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.options import EXIT_STARTUP_ERROR


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds, and runs."""

    first_s: float = 1.0
    longest_s: float = 30.0
    healthy_s: float = 60.0
    tries_before_joining: int = 3


@dataclass(frozen=True, slots=True)
class StartAgain:
    at: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The cluster cannot come up: stop everything."""


class RestartPolicy:
    """The history of one child. Its whole state: `deaths` in a row, `ever_joined`, `joined_at` of the present run."""

    def __init__(self, backoff: Backoff | None = None) -> None:
        self._backoff = backoff or Backoff()
        self._deaths = 0
        self._joined_at: float | None = None
        self.ever_joined = False

    def joined(self, now: float) -> None:
        self.ever_joined = True
        self._joined_at = now

    def died(self, exit_code: int, now: float) -> StartAgain | GiveUp:
        """What to do about a death. A code below 0 is the signal that ended it, as in `subprocess`."""
        if self._joined_at is not None and now - self._joined_at >= self._backoff.healthy_s:
            self._deaths = 0
        self._joined_at = None
        self._deaths += 1
        if not self.ever_joined and (
            exit_code == EXIT_STARTUP_ERROR or self._deaths >= self._backoff.tries_before_joining
        ):
            return GiveUp()
        wait = min(self._backoff.first_s * 2 ** min(self._deaths - 1, 30), self._backoff.longest_s)
        return StartAgain(now + wait, wait)

    def __repr__(self) -> str:
        state = "joined" if self._joined_at is not None else "not joined"
        return f"<RestartPolicy {state}, {self._deaths} deaths in a row>"
