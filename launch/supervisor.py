"""Supervises processes: a member of a cluster, which is restarted, and ranks, which start and end together.

A member that was drained is not restarted, unless a roll drained it. Before it has ever joined, one that exits with a
startup error (code 3: bad checkpoint, port in use) ends the cluster: a retry would fail the same way. After any other
exit it is retried, three runs in all. Once it has joined, it is always restarted: 1 s after it was killed, which says
nothing about it; after 1, 2, 4 .. 30 s when it failed by itself. A run that stayed joined for a minute resets that
backoff. While no worker of its role is ready, requests wait: it is restarted at once, or, if it fails by itself again
and again, after at most RETRY_S.

The process that supervises sleeps until a child ends, a signal arrives, or a timeout expires (`Signals`).
"""

from __future__ import annotations

import contextlib
import math
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

from baton.core.errors import StartupError
from baton.core.liveness import KILL_DELAY_S
from baton.runtime.options import EXIT_STARTUP_ERROR
from launch.child import Child, ChildSpec
from launch.console import Console
from launch.failure import Failure, box, describe_exit

RETRY_S = 5.0
TICK_S = 0.5
REPEAT_S = 0.2
KILLED = frozenset(code for number in (signal.SIGKILL, signal.SIGTERM) for code in (-number, 128 + number))
"""Exit codes of a process that was killed from outside, as its parent sees it and as an agent passes it on."""
REPLACE = "BATON_REPLACE"
"""A worker's option: the lease of its previous run may not have ended yet."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """The delays of `RestartPolicy` in seconds, and its limit of runs."""

    first_s: float = 1.0
    longest_s: float = 30.0
    healthy_s: float = 60.0
    tries_before_joining: int = 3


class Delay(NamedTuple):
    """Seconds until the next run: usually, and while no worker of its role is ready."""

    usual_s: float
    urgent_s: float


class RestartPolicy:
    """Decides when a member that died is restarted. Pure."""

    def __init__(self, backoff: Backoff | None = None) -> None:
        self.ever_joined = False
        self._backoff = backoff or Backoff()
        # Of the current run.
        self._joined_at: float | None = None
        # Runs in a row that failed by themselves, without a healthy minute.
        self._failures = 0

    def joined(self, now: float) -> None:
        self.ever_joined = True
        self._joined_at = now

    def died(self, exit_code: int, now: float) -> Delay | None:
        """Returns the delay of the next run; None: there is none, the cluster cannot start. A code below 0 is the
        signal that ended the run, as in `subprocess`."""
        if self._joined_at is not None and now - self._joined_at >= self._backoff.healthy_s:
            self._failures = 0
        self._joined_at = None
        if self.ever_joined and exit_code in KILLED:
            return Delay(self._backoff.first_s, 0.0)
        self._failures += 1
        if not self.ever_joined and (
            exit_code == EXIT_STARTUP_ERROR or self._failures >= self._backoff.tries_before_joining
        ):
            return None
        usual_s = min(self._backoff.first_s * 2.0 ** min(self._failures - 1, 30), self._backoff.longest_s)
        return Delay(usual_s, min(usual_s, RETRY_S) if self._failures > 1 else 0.0)


class MemberFailed(Exception):
    """A member could not start, so the cluster cannot either; `box` says which, where and why."""

    def __init__(self, box: list[str]) -> None:
        super().__init__("\n".join(box))
        self.box = box


class Supervised:
    """A member of the cluster, through its runs. `spec` is called for every run: ports become known with the first."""

    def __init__(self, name: str, spec: Callable[[], ChildSpec], console: Console, backoff: Backoff | None) -> None:
        self.name = name
        # Whether this run has joined the current coordinator.
        self.joined = False
        # Whether it exited with 0 after it had joined, unless it was renewed; or was retired.
        self.left = False
        # Whether it is not to run: however it ends, it is not restarted.
        self.retired = False
        # Whether this run is to be followed by another one when it leaves.
        self._renewed = False
        # The run that was requested to drain.
        self._drained: Child | None = None
        # The current run; without one, the next starts at `restart_at`, or at `urgent_at` while no worker of its role
        # is ready.
        self.child: Child | None = None
        self.restart_at: float | None = None
        self.urgent_at = 0.0
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
        self.joined = self.left = self._joined_this_run = self._renewed = False
        self.restart_at = None
        self._started_at = time.monotonic()
        self.child = Child(spec)
        about = "".join(f"   {text}" for text in (spec.note, note) if text)
        self._console.stage(self.name, f"starting   pid {self.child.pid}{about}   log {spec.log}")

    @property
    def drains(self) -> bool:
        """Whether this run was requested to drain."""
        return self.child is not None and self.child is self._drained

    def drain(self) -> None:
        """Requests the child, if there is one, to drain and to end: once, as a second signal would end it at once."""
        if self.child is not None and not self.drains:
            self._drained = self.child
            self.child.terminate()

    def retire(self) -> None:
        """Drains it, once it runs; it is not started until `return_to_work`."""
        self.retired, self.restart_at = True, None
        self.left = self.child is None
        self.drain()

    def return_to_work(self) -> None:
        """Starts it again; not while it still drains. Raises StartupError as `start_again`."""
        self.retired = False
        self.start_again()

    def start_again(self) -> None:
        """Starts the next run. A failure to start (a full process table, a log that cannot be opened) may be transient,
        and the other members keep serving: once this member has joined, the failure is only logged and retried."""
        try:
            self.start("restart" if self._started_at else "")  # the first run may begin late, as the load grows
        except StartupError as error:
            if not self._policy.ever_joined:
                raise
            self.restart_at = self.urgent_at = time.monotonic() + RETRY_S
            self._console.stage(self.name, f"{error.message}; retrying in {RETRY_S:g} s")

    def renew(self) -> None:
        """Drains the child. The next run starts once it has ended, however late that is, or now if there is none."""
        if self.child is None:
            self.restart_at = time.monotonic()
        else:
            self._renewed = True
            self.drain()

    def succeed(self, spec: ChildSpec) -> Child | None:
        """Starts a run beside the present one, and supervises it from now on; returns the present one."""
        old, child = self.child, Child(spec)
        self.child, self.joined, self._joined_this_run, self._started_at = child, False, False, time.monotonic()
        self._console.stage(self.name, f"starting   pid {child.pid}, beside pid {old.pid if old else None}")
        return old

    def restore(self, child: Child) -> None:
        """Supervises an earlier run, which still serves, again; ends the present one."""
        self.kill()
        self.child, self.joined, self._joined_this_run, self.restart_at = child, True, True, None

    def mark_joined(self, event: str) -> None:
        now = time.monotonic()
        again, self.joined, self._joined_this_run = self._joined_this_run, True, True
        if not again:
            self._policy.joined(now)
        self._console.stage(self.name, f"{event} again" if again else f"{event}   ({now - self._started_at:.1f} s)")

    def hurry(self) -> None:
        """Restarts it as soon as its policy allows while no worker of its role is ready."""
        if self.restart_at is not None:
            self.restart_at = min(self.restart_at, self.urgent_at)

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
            code = self.child.watch(now)
            if code is not None:
                self._died(self.child, code, now)
        elif self.restart_at is not None and now >= self.restart_at:
            self.start_again()

    def _died(self, child: Child, code: int, now: float) -> None:
        self.child, self.joined = None, False
        if self.retired or (code == 0 and self._joined_this_run):  # a worker exits with 0 only when it was drained
            self.left = self.retired or not self._renewed
            self._console.stage(self.name, "left")
            if not self.left:
                self.restart_at = self.urgent_at = now
            return
        log, reason = child.spec.log, child.reason
        delay = self._policy.died(code, now)
        if delay is not None or not reason:
            self._console.stage(self.name, f"died: {describe_exit(code)}; last lines of {log}:")
            self._console.quote(child.tail())
        if delay is None:
            reason = reason or f"exited before it joined; its log is {log}"
            failure = Failure(self.name, f"{self.name}, pid {child.pid}", socket.gethostname(), code, reason)
            raise MemberFailed(box(child.failure or failure))
        self.restart_at, self.urgent_at = now + delay.usual_s, now + delay.urgent_s
        self._console.stage(self.name, f"restarting within {delay.usual_s:g} s")


@dataclass(frozen=True, slots=True)
class EndedProcesses:
    """How processes that run together have ended: `children` in the order of their ends; whether a signal asked for it
    (`stopped`), and a second one killed those that still ran (`killed`)."""

    children: list[Child]
    stopped: bool
    killed: bool


def run_together(children: Sequence[Child], signals: Signals) -> EndedProcesses:
    """Runs processes until all have ended. The first signal passes SIGTERM on to them, a second one kills. One that
    outlives a failed one by KILL_DELAY_S is killed."""
    ended: list[Child] = []
    asked, killed, failed_at = 0, False, math.inf
    while len(ended) < len(children):
        signals.wait(TICK_S)
        now = time.monotonic()
        ended += [child for child in children if child.watch(now) is not None and child not in ended]
        running = [child for child in children if child not in ended]
        if signals.stops > asked:
            for child in running:
                if asked:
                    killed = True
                    child.kill(0.0, "killed at a second signal")
                else:
                    child.terminate()
            asked = signals.stops
        if any(child.returncode for child in ended):
            failed_at = min(failed_at, now)
        if now - failed_at >= KILL_DELAY_S:
            for child in running:
                child.kill(0.0, f"hung: still running {KILL_DELAY_S:g} s after another rank failed")
    return EndedProcesses(ended, bool(asked), killed)


_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """While open, SIGINT, SIGTERM and SIGHUP only increment `stops` (`last` is the latest), and SIGCHLD ends a wait.
    For the main thread only.

    SIGHUP stays ignored if it was (nohup); SIGINT does not, since a shell ignores it for commands started with `&`.
    The same signal within REPEAT_S of one that counted does not count: `timeout`, for example, signals its command and
    then the group of processes that it is in.
    """

    def __init__(self) -> None:
        self.stops = self.last = 0
        self._counted_at = -math.inf
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*_STOPPING, signal.SIGCHLD):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    def wait(self, timeout_s: float) -> None:
        """Returns after any signal, or after `timeout_s`."""
        select.select([self._reader], [], [], max(0.0, timeout_s))
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(512):
                pass

    def _received(self, number: int, frame: FrameType | None) -> None:
        repeated = number == self.last and time.monotonic() - self._counted_at < REPEAT_S
        if number in _STOPPING and not repeated:
            self.stops, self.last, self._counted_at = self.stops + 1, number, time.monotonic()
