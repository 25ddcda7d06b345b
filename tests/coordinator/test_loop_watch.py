"""Calls that block the event loop are counted and named; a violated invariant that no task awaits is reported."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from baton.core.errors import InvariantError
from baton.runtime.event_loop import LoopWatch, report_violations


def holds_the_loop(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


async def test_call_that_blocks_the_event_loop_is_logged_by_name(caplog: pytest.LogCaptureFixture) -> None:
    watch = LoopWatch()
    running = asyncio.create_task(watch.run())
    with caplog.at_level(logging.WARNING):
        await asyncio.sleep(0.1)
        before = watch.stalls  # stalls of a busy machine
        holds_the_loop(0.4)
        while watch.stalls == before:
            await asyncio.sleep(0.01)
    running.cancel()
    assert watch.longest_s >= 0.3
    assert watch.as_json()["loop_stalls"] == watch.stalls
    if not before:
        (line,) = [r.getMessage() for r in caplog.records if r.name == "baton.loop"][:1]
        assert "holds_the_loop (test_loop_watch.py:" in line


@pytest.mark.parametrize("where", ["callback", "task"])
async def test_a_violated_invariant_that_nothing_awaits_is_reported(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    reported: list[InvariantError] = []
    report_violations(reported.append)
    loop = asyncio.get_running_loop()

    def raises(error: Exception) -> None:
        raise error

    async def task(error: Exception) -> None:
        raises(error)

    for error in (ValueError("another error"), InvariantError("a counter is wrong")):
        if where == "callback":
            loop.call_soon(raises, error)
        else:
            forgotten = asyncio.ensure_future(task(error))
            del forgotten
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    loop.set_exception_handler(None)
    assert [str(error) for error in reported] == ["a counter is wrong"]
    assert len([r for r in caplog.records if r.name == "asyncio"]) == 2
