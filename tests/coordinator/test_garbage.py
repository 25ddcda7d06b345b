"""Full garbage collections of the coordinator: when memory has grown, and soon where no request is in flight."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from coordinator import garbage


class Cycle:
    """Garbage that only a search finds."""

    alive = 0

    def __init__(self) -> None:
        self.itself = self
        Cycle.alive += 1

    def __del__(self) -> None:
        Cycle.alive -= 1


@asynccontextmanager
async def searching(requests: int) -> AsyncIterator[None]:
    gc.collect()
    task = asyncio.create_task(garbage.search_when_grown(lambda: requests))
    await asyncio.sleep(0.05)  # it has looked once
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def leave(count: int) -> None:
    """Old garbage."""
    kept = [Cycle() for _ in range(count)]
    gc.collect(1)
    gc.collect(1)
    del kept


async def until_none_is_left() -> None:
    async with asyncio.timeout(10):
        while Cycle.alive:
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "LOOK_S", 0.01)


@pytest.mark.parametrize(("requests", "limit"), [(0, "IDLE_BLOCKS"), (1, "BUSY_BLOCKS")])
async def test_everything_is_searched_when_memory_has_grown(
    requests: int, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage.sys, "getallocatedblocks", lambda: 1_000_000 + 10 * Cycle.alive)
    monkeypatch.setattr(garbage, limit, 1000)
    growth = 100 if requests == 0 else 100_000  # while streams run, as much as there was
    before = gc.get_threshold()
    async with searching(requests):
        leave(growth // 2)
        await asyncio.sleep(0.1)
        assert Cycle.alive == growth // 2 and gc.get_threshold()[2] == garbage._NEVER
        leave(growth - growth // 2)
        await until_none_is_left()
    assert gc.get_threshold() == before


async def test_streams_are_not_held_up_for_what_an_idle_coordinator_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "IDLE_BLOCKS", 0)
    async with searching(1):
        leave(100)
        await asyncio.sleep(0.1)
        assert Cycle.alive == 100
    async with searching(0):
        await until_none_is_left()
