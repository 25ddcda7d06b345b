"""Full garbage collections of the coordinator: when idle, not while streams run."""

from __future__ import annotations

import asyncio
import gc

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


async def test_everything_is_searched_when_requests_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "LOOK_S", 0.01)
    before, requests = gc.get_threshold(), 1
    gc.collect()
    task = asyncio.create_task(garbage.collect_when_idle(lambda: requests))
    try:
        kept = [Cycle() for _ in range(10)]
        gc.collect(1)
        gc.collect(1)  # these are old now
        del kept
        await asyncio.sleep(0.1)
        assert Cycle.alive >= 10 and gc.get_threshold()[2] == garbage._NEVER  # streams run: nothing was searched
        requests = 0
        async with asyncio.timeout(10):
            while Cycle.alive:
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert gc.get_threshold() == before


async def test_a_coordinator_that_is_never_idle_searches_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "LOOK_S", 0.01)
    monkeypatch.setattr(garbage, "LONGEST_S", 0.05)
    kept = [Cycle() for _ in range(10)]
    gc.collect(1)
    gc.collect(1)  # these are old now
    del kept
    task = asyncio.create_task(garbage.collect_when_idle(lambda: 1))
    try:
        async with asyncio.timeout(10):
            while Cycle.alive:
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
