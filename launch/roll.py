"""Replaces every process of a running `baton up`, one after the other, while the cluster serves: `baton roll`.

1. workers    a prefill and a decode worker in turn: SIGTERM drains it, then it starts again and joins
2. batches    ends and starts again; its jobs continue
3. coordinator, last: a second one opens the same ports and lets requests wait; the first one closes its listeners,
             finishes its requests and ends; its workers join the second one

Each process starts with the command of `baton up`, from the code that is installed then. A process that is between two
runs, or joins a coordinator that was restarted, is waited for. The first failure ends the roll: processes that were not
reached keep running, and one that ends or comes back late is supervised as always.

The command and `baton up` exchange two files of the run directory: a request and the progress. Whoever removes the
request decides: `baton up`, which then rolls, or the command, which withdraws it. A request is valid for GRACE_S: one
whose command was killed is not taken later.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from baton.core.errors import StartupError
from launch.child import Child
from launch.console import Console
from launch.failure import describe_exit
from launch.run_directory import ROLL, ROLL_REQUEST, is_held, reading
from launch.supervisor import Supervised

RUNNING, DONE, FAILED = "running", "done", "failed"
GRACE_S = 15.0
"""Beyond the time to drain: for a process to notice, and to end. And for `baton up` to take a request."""
POLL_S = 0.2
ENDED = "the roll left no result: `baton up` has ended; its output says what was replaced"


class RollFailed(Exception):
    """The message says which process, and what it did not do."""


class Rolled(Protocol):
    """The cluster of a roll: `launch.local.LocalCluster`."""

    # Each worker's parts on this host, in the order of the topology, by role.
    def groups(self) -> dict[str, list[list[Supervised]]]: ...

    @property
    def coordinator(self) -> Supervised | None: ...

    @property
    def batches(self) -> Supervised | None: ...

    def drain_timeout_s(self, name: str) -> float:
        """Returns how long a member may take to drain."""
        ...

    def drains(self, name: str) -> bool:
        """Whether a worker drains, as its coordinator shows."""
        ...

    def succeed_coordinator(self) -> Child:
        """Starts a coordinator beside the present one, and returns that."""
        ...

    def restore_coordinator(self, child: Child) -> None: ...


def in_turn(prefill: Sequence[list[Supervised]], decode: Sequence[list[Supervised]]) -> list[list[Supervised]]:
    """Returns the workers of both roles in turn, so that new ones can soon be paired with each other."""
    return [group for pair in zip_longest(prefill, decode) for group in pair if group is not None]


class Roll:
    """A roll, from the request on. `tick` goes on until `ended`."""

    def __init__(
        self,
        cluster: Rolled,
        run_dir: Path,
        console: Console,
        *,
        start_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._file, self._console = cluster, run_dir / ROLL, console
        self._start_s, self._clock = start_timeout_s, clock
        self._replaced: list[str] = []
        self.ended = False
        self._steps = self._all()

    def tick(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self._end(DONE, "")
        except (RollFailed, StartupError) as error:
            self._end(FAILED, error.message if isinstance(error, StartupError) else str(error))

    def close(self) -> None:
        """Ends it where it is, with one coordinator: the old one, until the new one has started."""
        self._steps.close()

    def _end(self, state: str, error: str) -> None:
        self.ended = True
        try:
            self._write(state, error=error)
        except StartupError as problem:
            error = error or problem.message
            with contextlib.suppress(OSError):
                self._file.unlink()  # possible on a full disk; else it would seem to run
        count = f"{len(self._replaced)} processes replaced"
        self._console.stage("roll", f"{state}   {count}" + (f"; {error}" if error else ""))

    def _all(self) -> Generator[None, None, None]:
        groups = self._cluster.groups()
        for parts in in_turn(groups["prefill"], groups["decode"]):
            yield from self._worker(parts)
        if (batches := self._cluster.batches) is not None:
            yield from self._renew([batches])
        if (coordinator := self._cluster.coordinator) is not None:
            yield from self._coordinator(coordinator, [part for roles in groups.values() for g in roles for part in g])

    def _worker(self, parts: list[Supervised]) -> Iterator[None]:
        name = parts[0].name

        def there() -> bool:
            if all(part.left for part in parts):
                return True
            # A signal ends a worker that drains at once. One that an earlier roll requested to drain gets none.
            return all(part.joined for part in parts) and (parts[0].drains or not self._cluster.drains(name))

        if not there():  # between two runs; or the coordinator is, or was, and it has not joined again; or it drains
            self._write(RUNNING, name, "waiting until it has joined")
            yield from self._within(self._start_s, f"{name} has not joined")(there)
        if all(part.left for part in parts):
            self._console.stage(name, "not replaced: it was drained")
        else:
            yield from self._renew(parts)

    def _renew(self, members: list[Supervised]) -> Iterator[None]:
        name, before = members[0].name, [member.child for member in members]
        self._write(RUNNING, name)
        for member in members:
            member.renew()
        limit_s = self._cluster.drain_timeout_s(name) + GRACE_S
        drained = self._within(limit_s, f"{name} has not drained", "; it starts again once it has")
        yield from drained(lambda: all(m.child is not child for m, child in zip(members, before, strict=True)))
        joined = self._within(self._start_s, f"{name} has not come back")
        yield from joined(lambda: all(member.joined for member in members))
        self._replaced.append(name)

    def _coordinator(self, coordinator: Supervised, workers: list[Supervised]) -> Iterator[None]:
        name = coordinator.name
        if not coordinator.joined:
            self._write(RUNNING, name, "waiting until it has started")
            yield from self._within(self._start_s, "the coordinator has not started")(lambda: coordinator.joined)
        self._write(RUNNING, name)
        old = self._cluster.succeed_coordinator()
        started = False
        try:
            has_started = self._within(self._start_s, "the new coordinator has not started")
            yield from has_started(lambda: coordinator.joined or coordinator.child is None)
            if coordinator.child is None:
                raise RollFailed(f"the new coordinator ended at its start; its log is {old.spec.log}")
            started = True
        finally:
            if not started:
                self._cluster.restore_coordinator(old)
        old.send_signal(signal.SIGUSR1)
        limit_s = self._cluster.drain_timeout_s(name) + GRACE_S
        try:
            ended = self._within(limit_s, "the old coordinator was killed: it has not ended")
            yield from ended(lambda: old.watch(self._clock()) is not None)
        finally:
            if old.poll() is None:
                old.kill()
        if old.returncode != 0:
            how = describe_exit(old.returncode)
            raise RollFailed(f"the old coordinator ended before its requests did, {how}; its log is {old.spec.log}")
        for worker in workers:
            worker.joined = False  # the new one shows when it has joined there
        yield from self._within(self._start_s, "not all workers have joined the new coordinator")(
            lambda: all(worker.joined or worker.left for worker in workers)
        )
        self._replaced.append(name)

    def _within(self, seconds: float, problem: str, then: str = "") -> Callable[[Callable[[], bool]], Iterator[None]]:
        """Returns what waits for a condition, over ticks. Raises RollFailed after `seconds`."""

        def wait(condition: Callable[[], bool]) -> Iterator[None]:
            deadline = self._clock() + seconds
            while not condition():
                if self._clock() > deadline:
                    raise RollFailed(f"{problem} within {seconds:g} s{then}")
                yield

        return wait

    def _write(self, state: str, now: str = "", doing: str = "replacing", error: str = "") -> None:
        write_roll(self._file, {"state": state, "replaced": self._replaced, "now": now, "doing": doing, "error": error})


def write_roll(file: Path, document: dict[str, Any]) -> None:
    """Writes the file atomically. Raises StartupError."""
    partial = file.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(document))
        os.replace(partial, file)
    except OSError as error:
        raise StartupError(f"{file} cannot be written: {error.strerror or error}") from None


def take_request(run_dir: Path, console: Console) -> bool:
    """Returns whether `baton up` is to begin a roll: one was requested in time and not withdrawn. The command reads the
    progress once its request is removed: until then that of this roll has replaced that of an earlier one."""
    request, progress = run_dir / ROLL_REQUEST, run_dir / ROLL
    if not (document := reading(request)):
        return False
    taken = _in_time(document)
    try:
        if taken:
            write_roll(progress, {"state": RUNNING, "replaced": []})
    except StartupError as error:
        console.stage("roll", f"refused: {error.message}")
        taken = False
    if not taken:
        _removed(progress)
    if not _removed(request):  # withdrawn
        _removed(progress)
        return False
    return taken


def _in_time(request: dict[str, Any]) -> bool:
    until = request.get("until")
    return isinstance(until, int | float) and time.monotonic() <= until


def _removed(file: Path) -> bool:
    """Returns whether this call has removed the file."""
    with contextlib.suppress(OSError):
        file.unlink()
        return True
    return False


def roll(run_dir: Path, console: Console) -> int:
    """Requests a roll of the `baton up` that uses a run directory, and shows its progress; returns the exit code.

    Raises:
        StartupError: one is running already, or that `baton up` does not run, does not reply, or ends meanwhile.
        KeyboardInterrupt: with a line that says what goes on.
    """
    if not is_held(run_dir):
        raise StartupError(f"no `baton up` runs in {run_dir}; name its directory with --run-dir")
    request, progress = run_dir / ROLL_REQUEST, run_dir / ROLL
    seen = f"the output of `baton up` and {progress} show its progress"
    if (document := reading(progress)).get("state") == RUNNING or _in_time(reading(request)):
        raise StartupError(f"a roll is running already{_now(document)}; {seen}")
    try:
        write_roll(request, {"until": time.monotonic() + GRACE_S})
        return _follow(run_dir, console)
    except KeyboardInterrupt:
        withdrawn = _removed(request)
        console.stage("roll", "withdrawn: nothing is replaced" if withdrawn else f"goes on in `baton up`; {seen}")
        raise


def _follow(run_dir: Path, console: Console) -> int:
    request, progress = run_dir / ROLL_REQUEST, run_dir / ROLL
    deadline = time.monotonic() + GRACE_S
    while request.exists():
        if not is_held(run_dir):
            raise StartupError(ENDED)
        if time.monotonic() > deadline and _removed(request):
            reason = "it is not ready yet, hangs, or is of another version"
            raise StartupError(f"`baton up` took no request in {run_dir} within {GRACE_S:g} s; {reason}")
        time.sleep(POLL_S)
    shown: tuple[str, int] = "", 0
    while True:
        held, document = is_held(run_dir), reading(progress)
        state, replaced = document.get("state"), document.get("replaced", [])
        if (now := (_now(document), len(replaced))) != shown:
            for name in replaced[shown[1] :]:
                console.stage(name, "replaced")
            if now[0] and now[0] != shown[0]:
                console.stage(document["now"], document.get("doing", ""))
            shown = now
        if state in (DONE, FAILED):
            because = f"; {document['error']}" if document.get("error") else ""
            console.stage("roll", f"{state}   {len(replaced)} processes replaced{because}")
            return int(state == FAILED)
        if not held:
            raise StartupError(ENDED)
        if not document:
            unknown = f"the roll left no result in {progress}: `baton up` ends, or cannot write there"
            raise StartupError(f"{unknown}; its output says what was replaced")
        time.sleep(POLL_S)


def _now(document: dict[str, Any]) -> str:
    return f": {document['now']}, {document.get('doing')}" if document.get("now") else ""
