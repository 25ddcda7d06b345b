"""Full garbage collections of the coordinator run when memory has grown; by less if no request is in flight."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.runtime import event_loop


class Cycle:
    """A reference cycle, which only a garbage collection frees."""

    alive = 0

    def __init__(self) -> None:
        self.itself = self
        Cycle.alive += 1

    def __del__(self) -> None:
        Cycle.alive -= 1


@asynccontextmanager
async def collector_running(requests: int) -> AsyncIterator[None]:
    gc.collect()
    task = asyncio.create_task(event_loop.collect_when_grown(lambda: requests))
    await asyncio.sleep(0.05)  # until it has checked once
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def create_garbage(count: int) -> None:
    """Creates garbage in the oldest generation."""
    kept = [Cycle() for _ in range(count)]
    gc.collect(1)
    gc.collect(1)
    del kept


async def until_all_freed() -> None:
    async with asyncio.timeout(30):
        while Cycle.alive:
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def short_poll_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "POLL_S", 0.01)


@pytest.mark.parametrize(("requests", "limit"), [(0, "IDLE_BLOCKS"), (1, "BUSY_BLOCKS")])
async def test_a_full_collection_runs_when_memory_has_grown(
    requests: int, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop.sys, "getallocatedblocks", lambda: 1_000_000 + 10 * Cycle.alive)
    monkeypatch.setattr(event_loop, limit, 1000)
    growth = 100 if requests == 0 else 100_000  # while streams run, as much as was in use
    before = gc.get_threshold()
    async with collector_running(requests):
        create_garbage(growth // 2)
        await asyncio.sleep(0.1)
        assert Cycle.alive == growth // 2 and gc.get_threshold()[2] == event_loop._NEVER
        create_garbage(growth - growth // 2)
        await until_all_freed()
    assert gc.get_threshold() == before


async def test_growth_beyond_the_idle_limit_triggers_no_collection_while_streams_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_loop, "IDLE_BLOCKS", 0)
    async with collector_running(1):
        create_garbage(100)
        await asyncio.sleep(0.1)
        assert Cycle.alive == 100
    async with collector_running(0):
        await until_all_freed()
