"""Replaces every process of a running `baton up`, one after the other, while the cluster serves: `baton roll`.

1. workers    a prefill and a decode worker in turn: SIGTERM drains it, then it starts again and joins
2. batches    ends and starts again; its jobs continue
3. coordinator, last: a second one opens the same ports and lets requests wait; the first one closes its listeners,
             finishes its requests and ends; its workers join the second one

Each process starts with the command of `baton up`, from the code that is installed then. The first failure ends the
roll: processes that were not reached keep running, and one that does not come back is supervised as always.

The command and `baton up` exchange one file of the run directory: a request, then the progress.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from baton.core.errors import StartupError
from launch.child import Child
from launch.console import Console
from launch.run_directory import ROLL, is_held, reading
from launch.supervisor import Supervised

REQUESTED, RUNNING, DONE, FAILED = "requested", "running", "done", "failed"
GRACE_S = 15.0
"""Beyond the time to drain: for a process to notice, and to end."""
POLL_S = 0.2


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
        self, cluster: Rolled, run_dir: Path, console: Console, *, start_timeout_s: float, drain_timeout_s: float
    ) -> None:
        self._cluster, self._file, self._console = cluster, run_dir / ROLL, console
        self._start_s, self._drain_s = start_timeout_s, drain_timeout_s + GRACE_S
        self._replaced: list[str] = []
        # The coordinator that hands over, until it has ended.
        self.old: Child | None = None
        self.ended = False
        self._steps = self._all()

    def tick(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self._end(DONE, "")
        except (RollFailed, StartupError) as error:
            self._end(FAILED, error.message if isinstance(error, StartupError) else str(error))

    def _end(self, state: str, error: str) -> None:
        self.ended = True
        try:
            self._write(state, error=error)
        except StartupError as problem:
            error = error or problem.message
            with contextlib.suppress(OSError):
                self._file.unlink()  # possible on a full disk; else the request would be taken again
        count = f"{len(self._replaced)} processes replaced"
        self._console.stage("roll", f"{state}   {count}" + (f"; {error}" if error else ""))

    def _all(self) -> Iterator[None]:
        groups = self._cluster.groups()
        for parts in in_turn(groups["prefill"], groups["decode"]):
            if all(part.left for part in parts):
                self._console.stage(parts[0].name, "not replaced: it was drained")
            else:
                yield from self._worker(parts)
        if (batches := self._cluster.batches) is not None:
            yield from self._batches(batches)
        if (coordinator := self._cluster.coordinator) is not None:
            yield from self._coordinator(
                coordinator, [part for roles in groups.values() for g in roles for part in g if not part.left]
            )

    def _worker(self, parts: list[Supervised]) -> Iterator[None]:
        name, before = parts[0].name, [part.child for part in parts]
        if not all(part.joined for part in parts):
            raise RollFailed(f"{name} is not running")
        self._write(RUNNING, name)
        for part in parts:
            part.leave()
        ended = self._within(self._drain_s, f"{name} has not drained")
        yield from ended(lambda: all(p.left or p.child is not c for p, c in zip(parts, before, strict=True)))
        for part in parts:
            if part.left:
                part.start_again()
        yield from self._within(self._start_s, f"{name} has not joined")(lambda: all(part.joined for part in parts))
        self._replaced.append(name)

    def _batches(self, batches: Supervised) -> Iterator[None]:
        before = batches.child
        self._write(RUNNING, batches.name)
        batches.leave()
        ended = self._within(self._drain_s, f"{batches.name} has not ended")
        yield from ended(lambda: batches.left or batches.child is not before)
        if batches.left:
            batches.start_again()
        yield from self._within(self._start_s, f"{batches.name} has not started")(lambda: batches.joined)
        self._replaced.append(batches.name)

    def _coordinator(self, coordinator: Supervised, workers: list[Supervised]) -> Iterator[None]:
        self._write(RUNNING, coordinator.name)
        self.old = old = self._cluster.succeed_coordinator()
        try:
            started = self._within(self._start_s, "the new coordinator has not started")
            yield from started(lambda: coordinator.joined or coordinator.child is None)
            if coordinator.child is None:
                raise RollFailed(f"the new coordinator ended at its start; its log is {old.spec.log}")
        except (RollFailed, StartupError):
            self._cluster.restore_coordinator(old)
            self.old = None
            raise
        old.send_signal(signal.SIGUSR1)
        ended = self._within(self._drain_s, "the old coordinator has not ended and was killed")
        try:
            yield from ended(lambda: old.watch(time.monotonic()) is not None)
        finally:
            if old.poll() is None:
                old.kill()
            self.old = None
        if old.returncode != 0:
            raise RollFailed(f"the old coordinator ended with {old.returncode}; its log is {old.spec.log}")
        for worker in workers:
            worker.joined = False  # the new one shows when it has joined there
        yield from self._within(self._start_s, "not all workers have joined the new coordinator")(
            lambda: all(worker.joined for worker in workers)
        )
        self._replaced.append(coordinator.name)

    def _within(self, seconds: float, problem: str) -> Callable[[Callable[[], bool]], Iterator[None]]:
        """Returns what waits for a condition, over ticks. Raises RollFailed after `seconds`."""

        def wait(condition: Callable[[], bool]) -> Iterator[None]:
            deadline = time.monotonic() + seconds
            while not condition():
                if time.monotonic() > deadline:
                    raise RollFailed(f"{problem} within {seconds:g} s")
                yield

        return wait

    def _write(self, state: str, now: str = "", error: str = "") -> None:
        write_roll(self._file, {"state": state, "replaced": self._replaced, "now": now, "error": error})


def write_roll(file: Path, document: dict[str, Any]) -> None:
    """Writes the file atomically. Raises StartupError."""
    partial = file.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(document))
        os.replace(partial, file)
    except OSError as error:
        raise StartupError(f"{file} cannot be written: {error.strerror or error}") from None


def roll(run_dir: Path, console: Console) -> int:
    """Requests a roll of the `baton up` that uses a run directory, and shows its progress; returns the exit code.

    Raises:
        StartupError: one is running already, or that `baton up` does not run, does not reply, or ends meanwhile.
    """
    if not is_held(run_dir):
        raise StartupError(f"no `baton up` runs in {run_dir}; name its directory with --run-dir")
    file, deadline = run_dir / ROLL, time.monotonic() + GRACE_S
    if reading(file).get("state") in (REQUESTED, RUNNING):
        raise StartupError(f"a roll is running already: {file}")
    write_roll(file, {"state": REQUESTED, "replaced": []})
    shown: tuple[str, int] = "", 0
    while True:
        document = reading(file)
        if not document or not is_held(run_dir):
            unknown = f"the roll left no result in {file}: `baton up` has ended, or cannot write there"
            raise StartupError(f"{unknown}; its output says what was replaced")
        state, replaced = document.get("state"), document.get("replaced", [])
        if (now := (str(document.get("now", "")), len(replaced))) != shown:
            for name in replaced[shown[1] :]:
                console.stage(name, "replaced")
            if now[0] and now[0] != shown[0]:
                console.stage(now[0], "replacing")
            shown = now
        if state in (DONE, FAILED):
            console.stage("roll", f"{state}   {len(replaced)} processes replaced" + _because(document))
            return int(state == FAILED)
        if state == REQUESTED and time.monotonic() > deadline:
            raise StartupError(f"no `baton up` takes requests in {run_dir}; is it running?")
        time.sleep(POLL_S)


def _because(document: dict[str, Any]) -> str:
    return f"; {document['error']}" if document.get("error") else ""
