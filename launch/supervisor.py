"""Starts, watches and restarts one member of the cluster; a member that was drained is not restarted.

Before it has ever joined, a member that exits with a startup error (code 3: bad checkpoint, port in use) ends the
cluster: a retry would fail the same way. After any other exit it is retried, three runs in all. Once it has joined, it
is always restarted, after 1, 2, 4 .. 30 s; a run that stayed joined for a minute resets the backoff.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.core.errors import StartupError
from baton.options import EXIT_STARTUP_ERROR
from launch.child import Child, ChildSpec
from launch.console import Console
from launch.failure import Failure, box, describe_exit

RETRY_S = 5.0
REPLACE = "BATON_REPLACE"
"""A worker's option: the lease of its previous run may not have ended yet."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """The delays of `RestartPolicy` in seconds, and its limit of runs."""

    first_s: float = 1.0
    longest_s: float = 30.0
    healthy_s: float = 60.0
    tries_before_joining: int = 3


class RestartPolicy:
    """Decides when a member that died is restarted. Pure. Its whole state: whether the member ever joined, since when
    the current run has been joined, and how many runs in a row have died without a healthy minute."""

    def __init__(self, backoff: Backoff | None = None) -> None:
        self.ever_joined = False
        self._backoff = backoff or Backoff()
        self._joined_at: float | None = None
        self._deaths = 0

    def joined(self, now: float) -> None:
        self.ever_joined = True
        self._joined_at = now

    def died(self, exit_code: int, now: float) -> float | None:
        """Returns the seconds to wait before the next run; None: there is none, the cluster cannot start. A code below
        0 is the signal that ended the run, as in `subprocess`."""
        if self._joined_at is not None and now - self._joined_at >= self._backoff.healthy_s:
            self._deaths = 0
        self._joined_at = None
        self._deaths += 1
        if not self.ever_joined and (
            exit_code == EXIT_STARTUP_ERROR or self._deaths >= self._backoff.tries_before_joining
        ):
            return None
        return min(self._backoff.first_s * 2.0 ** min(self._deaths - 1, 30), self._backoff.longest_s)


class MemberFailed(Exception):
    """A member could not start, so the cluster cannot either; `box` says which, where and why."""

    def __init__(self, box: list[str]) -> None:
        super().__init__("\n".join(box))
        self.box = box


class Supervised:
    """Its whole state: the current `child` or the time of the next one, whether this run has joined the current
    coordinator (`joined`) and whether it ever joined one, whether it exited with 0 after that (`left`), the policy.

    `spec` is called for every run, since ports become known only after the first.
    """

    def __init__(self, name: str, spec: Callable[[], ChildSpec], console: Console, backoff: Backoff | None) -> None:
        self.name = name
        self.joined = False
        self.left = False
        self.child: Child | None = None
        self.restart_at: float | None = None
        self._spec = spec
        self._console = console
        self._policy = RestartPolicy(backoff)
        self._started_at = 0.0
        self._joined_this_run = False

    @property
    def ever_started(self) -> bool:
        return self.child is not None or self.restart_at is not None or self.left

    def start(self, note: str = "") -> None:
        """Starts a run. Raises StartupError when the process cannot be started."""
        spec = self._spec()
        if self._started_at:
            spec = replace(spec, environment={**spec.environment, REPLACE: "true"})
        self.joined = self.left = self._joined_this_run = False
        self.restart_at = None
        self._started_at = time.monotonic()
        self.child = Child(spec)
        about = "".join(f"   {text}" for text in (spec.note, note) if text)
        self._console.stage(self.name, f"starting   pid {self.child.pid}{about}   log {spec.log}")

    def start_again(self) -> None:
        """Starts the next run. A failure to start (a full process table, a log that cannot be opened) may be transient,
        and the other members keep serving: once this member has joined, the failure is only logged and retried."""
        try:
            self.start("restart")
        except StartupError as error:
            if not self._policy.ever_joined:
                raise
            self.restart_at = time.monotonic() + RETRY_S
            self._console.stage(self.name, f"{error.message}; retrying in {RETRY_S:g} s")

    def mark_joined(self, what: str) -> None:
        now = time.monotonic()
        again, self.joined, self._joined_this_run = self._joined_this_run, True, True
        if not again:
            self._policy.joined(now)
        self._console.stage(self.name, f"{what} again" if again else f"{what}   ({now - self._started_at:.1f} s)")

    def kill(self) -> None:
        """Kills the child and all its descendants."""
        if self.child is not None:
            self.child.kill()

    def tick(self) -> None:
        """Detects that the child has ended and starts the next run when it is due.

        Raises:
            MemberFailed: the member cannot start, so the cluster cannot either.
        """
        now = time.monotonic()
        if self.child is not None:
            code = self.child.poll()
            if code is not None:
                self._died(self.child, code, now)
        elif self.restart_at is not None and now >= self.restart_at:
            self.start_again()

    def _died(self, child: Child, code: int, now: float) -> None:
        self.child, self.joined = None, False
        if code == 0 and self._joined_this_run:  # a worker exits with 0 only when it was drained
            self.left = True
            self._console.stage(self.name, "left")
            return
        error, log = child.error_line(), child.spec.log
        wait_s = self._policy.died(code, now)
        if wait_s is not None or not error:
            self._console.stage(self.name, f"died: {describe_exit(code)}; last lines of {log}:")
            self._console.quote(child.tail())
        if wait_s is None:
            reason = error or f"exited before it joined; its log is {log}"
            failure = Failure(self.name, f"{self.name}, pid {child.pid}", socket.gethostname(), code, reason)
            raise MemberFailed(child.box() or box(failure))
        self.restart_at = now + wait_s
        self._console.stage(self.name, f"restarting in {wait_s:g} s")
