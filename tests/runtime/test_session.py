"""What a worker resumes at the welcome: what it had before its join, and what arrived between join and welcome."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection
from typing import NoReturn

import pytest

from baton.core.commands import Command, Join, TrackedSequence, Welcome
from baton.core.errors import InvariantError, ProtocolError
from baton.core.events import Load, SequenceEnded, StepEvents, TokenEvent
from baton.core.request import SequenceId
from baton.runtime.session import WorkerSession
from baton.runtime.streams import LinkLost

OLD, DROPPED, NEW, SHORT = (SequenceId(name) for name in ("old", "dropped", "new", "short"))


class Owner:
    """A worker with these sequences."""

    def __init__(self, *here: SequenceId) -> None:
        self.here = list(here)

    def join(self, run_id: str) -> Join:
        raise NotImplementedError

    def load(self) -> Load:
        raise NotImplementedError

    def welcome(self, welcome: Welcome) -> None: ...

    def command(self, command: Command) -> None: ...

    def sequence_ids(self) -> Collection[SequenceId]:
        return tuple(self.here)

    def abandon(self, reason: str, keep: Collection[SequenceId] = ()) -> None:
        self.here = [sequence for sequence in self.here if sequence in keep]


def posted(session: WorkerSession) -> list[StepEvents]:
    found = []
    while not session._outgoing.empty():
        events = session._outgoing.get_nowait()
        assert isinstance(events, StepEvents)
        found.append(events)
    return found


async def test_output_between_the_join_and_the_welcome_is_kept_and_reported() -> None:
    """A decode worker receives a sequence from the prefill worker, perhaps before its own welcome."""
    owner = Owner(OLD, DROPPED)
    session = WorkerSession("nowhere:1", owner)
    session.post(StepEvents(tokens=(TokenEvent(OLD, 0, (1, 2, 3)), TokenEvent(DROPPED, 0, (4,)))))
    known = session._known()
    owner.here.append(NEW)
    session.post(StepEvents(tokens=(TokenEvent(NEW, 0, (5,)), TokenEvent(SHORT, 0, (6,)))))
    session.post(StepEvents(ended=(SequenceEnded(SHORT, "stop"),)))

    session._begin(Welcome("run", 3.0, 1.0, b"", tracked=(TrackedSequence(OLD, 2),)), known)

    (again,) = posted(session)
    assert again.tokens == (TokenEvent(OLD, 2, (3,)), TokenEvent(NEW, 0, (5,)), TokenEvent(SHORT, 0, (6,)))
    assert again.ended == (SequenceEnded(SHORT, "stop"),)
    assert owner.here == [OLD, NEW]


async def test_a_missing_sequence_that_the_coordinator_expects_is_reported() -> None:
    session = WorkerSession("nowhere:1", Owner())
    tracked = (TrackedSequence(OLD, 0), TrackedSequence(NEW, 0, here=False))
    session._begin(Welcome("run", 3.0, 1.0, b"", tracked=tracked), session._known())
    _, lost = posted(session)
    assert [(e.sequence, e.code) for e in lost.ended] == [(OLD, "unknown_sequence")]


async def test_a_new_run_of_the_coordinator_drops_all_sequences_and_output() -> None:
    owner = Owner(OLD)
    session = WorkerSession("nowhere:1", owner)
    session.run_id = "run before"
    known = session._known()
    owner.here.append(NEW)
    session.post(StepEvents(tokens=(TokenEvent(NEW, 0, (5,)),)))
    session._begin(Welcome("run", 3.0, 1.0, b""), known)
    assert owner.here == [] and posted(session) == [StepEvents()]


async def test_a_violated_invariant_ends_the_session_and_an_unexpected_message_only_this_connection() -> None:
    session, errors = WorkerSession("nowhere:1", Owner()), [ProtocolError("unexpected"), InvariantError("a bug")]

    async def fails() -> NoReturn:
        raise errors.pop(0)

    session._one_session = fails  # type: ignore[method-assign]
    async with asyncio.timeout(30):
        with pytest.raises(InvariantError, match="a bug"):
            await session.run()
    assert not errors


async def test_a_violated_invariant_in_the_watch_for_silence_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the worker would never again notice that its coordinator is silent."""
    session = WorkerSession("nowhere:1", Owner())

    async def fails() -> None:
        raise InvariantError("a bug")

    async def waits() -> None:
        await asyncio.sleep(60.0)

    monkeypatch.setattr(session, "_watch_lease", fails)
    monkeypatch.setattr(session, "_one_session", waits)
    async with asyncio.timeout(30):
        with pytest.raises(InvariantError, match="a bug"):
            await session.run()
        await asyncio.sleep(0)  # it is not cancelled


async def test_heartbeats_of_many_workers_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats of all workers at the same moment would block the coordinator's event loop."""
    pauses: list[list[float]] = []

    class Reporting(Owner):
        def load(self) -> Load:
            return Load()

    class Stream:
        async def send(self, message: object) -> None:
            pass

    async def sleep(seconds: float) -> None:
        pauses[-1].append(seconds)
        if len(pauses[-1]) == 5:
            raise LinkLost("over")

    monkeypatch.setattr("baton.runtime.session.asyncio.sleep", sleep)
    for _ in range(64):
        pauses.append([])
        await WorkerSession("127.0.0.1:1", Reporting())._beat(Stream(), 1.0)  # type: ignore[arg-type]
    for of_one in (list(found) for found in zip(*pauses, strict=True)):
        assert 0.5 <= min(of_one) < 0.6 and 0.9 < max(of_one) <= 1.0


async def test_a_worker_without_a_coordinator_logs_a_warning_every_30_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "baton.session")
    session, tries = WorkerSession("nowhere:1", Owner()), 0

    async def fails() -> NoReturn:
        nonlocal tries
        tries += 1
        raise LinkLost("no listener")

    session._one_session, session._clock = fails, itertools.count(0.0, 5.0).__next__  # type: ignore[method-assign,assignment]
    running = asyncio.create_task(session.run())
    async with asyncio.timeout(30):
        while tries < 7:
            await asyncio.sleep(0.01)
    running.cancel()
    warnings = [record.message for record in caplog.records]
    assert 2 <= len(warnings) <= 4 < tries and all("retrying: no listener" in message for message in warnings)
    times = [int(message.split(" s,")[0].rpartition(" ")[2]) for message in warnings]
    assert times[0] < 30 and all(later - earlier >= 30 for earlier, later in itertools.pairwise(times))
