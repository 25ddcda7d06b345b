"""Calls that block the event loop are counted and named."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from baton.runtime.event_loop import LoopWatch


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
