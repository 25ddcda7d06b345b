"""One member of the cluster over all its restarts: started, watched, started again, or gone for good once drained."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from baton.core.errors import StartupError
from launch.child import Child, ChildSpec
from launch.console import Console
from launch.failure import Failure, box, describe_exit
from launch.restart import Backoff, GiveUp, RestartPolicy

RETRY_S = 5.0


class MemberFailed(Exception):
    """A member could not come up, so neither can the cluster; `box` says which, where and why."""

    def __init__(self, box: list[str]) -> None:
        super().__init__("\n".join(box))
        self.box = box


class Supervised:
    """Its whole state: the present `child` or the time of the next one, whether this run has joined the present
    coordinator (`joined`) and whether it ever joined one, whether it ended well after that (`left`), the policy.

    `spec` is asked anew for every run, since ports become known only after the first.
    """

    def __init__(self, name: str, spec: Callable[[], ChildSpec], console: Console, backoff: Backoff | None) -> None:
        self.name = name
        self.joined = False
        self.left = False
        self.child: Child | None = None
        self._spec = spec
        self._console = console
        self._policy = RestartPolicy(backoff)
        self._restart_at: float | None = None
        self._started_at = 0.0
        self._joined_this_run = False

    @property
    def ever_started(self) -> bool:
        return self.child is not None or self._restart_at is not None or self.left

    @property
    def restart_at(self) -> float | None:
        return self._restart_at

    def start(self, note: str = "") -> None:
        """Raises StartupError when the process cannot even be started."""
        spec = self._spec()
        self.joined = self.left = self._joined_this_run = False
        self._restart_at = None
        self._started_at = time.monotonic()
        self.child = Child(spec)
        self._console.stage(self.name, f"starting   pid {self.child.pid}{note}   log {spec.log}")

    def start_again(self, note: str = "   again") -> None:
        """The next run. What keeps it from starting (a full process table, a log that cannot be opened) may pass, and
        the others serve meanwhile: once this member has joined, it is only said and tried again."""
        try:
            self.start(note)
        except StartupError as error:
            if not self._policy.ever_joined:
                raise
            self._restart_at = time.monotonic() + RETRY_S
            self._console.stage(self.name, f"{error.message}; trying again in {RETRY_S:g} s")

    def mark_joined(self, what: str) -> None:
        now = time.monotonic()
        again, self.joined, self._joined_this_run = self._joined_this_run, True, True
        if not again:
            self._policy.joined(now)
        self._console.stage(self.name, f"{what} again" if again else f"{what}   ({now - self._started_at:.1f} s)")

    def kill(self) -> None:
        """Leaves nothing of it running."""
        if self.child is not None:
            self.child.kill()

    def tick(self) -> None:
        """Notices a death and starts the next run when it is due.

        Raises:
            MemberFailed: it cannot come up, so neither can the cluster.
        """
        now = time.monotonic()
        if self.child is not None:
            code = self.child.poll()
            if code is not None:
                self._died(self.child, code, now)
        elif self._restart_at is not None and now >= self._restart_at:
            self.start_again()

    def _died(self, child: Child, code: int, now: float) -> None:
        child.kill(0)  # what it may have left below itself, and the reaping
        self.child, self.joined = None, False
        if code == 0 and self._joined_this_run:  # a worker exits with 0 only when it was drained
            self.left = True
            self._console.stage(self.name, "left")
            return
        error, log = child.error_line(), child.spec.log
        verdict = self._policy.died(code, now)
        if isinstance(verdict, GiveUp):
            reason = error or f"it ended before it joined; its log is {log}"
            if not error:
                self._console.stage(self.name, f"died: {describe_exit(code)}; the end of {log}:")
                self._console.quote(child.tail())
            failure = Failure(self.name, f"{self.name}, pid {child.pid}", socket.gethostname(), code, reason)
            raise MemberFailed(child.box() or box(failure))
        self._console.stage(self.name, f"died: {describe_exit(code)}; the end of {log}:")
        self._console.quote(child.tail())
        self._restart_at = verdict.at
        self._console.stage(self.name, f"starting again in {verdict.wait_s:g} s")
