"""Several generators merged into one: all items arrive, in order, and no source or task stays open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from coordinator.pipeline import merged


class Source:
    """Counts up to `count`, then raises `error` if it has one. `closed`: whether it was closed."""

    def __init__(self, name: str, count: int, error: Exception | None = None, pause_s: float = 0.0) -> None:
        self.name, self.count, self.error, self.pause_s, self.closed = name, count, error, pause_s, False

    async def run(self) -> AsyncGenerator[tuple[str, int], None]:
        try:
            for index in range(self.count):
                await asyncio.sleep(self.pause_s)
                yield self.name, index
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


async def test_all_items_are_yielded_in_order_per_source() -> None:
    sources = [Source("a", 5), Source("b", 0), Source("c", 3, pause_s=0.001)]
    found = [item async for item in merged([s.run() for s in sources])]
    for s in sources:
        assert [i for name, i in found if name == s.name] == list(range(s.count))


async def test_first_error_closes_all_sources() -> None:
    sources = [Source("a", 1000), Source("b", 2, ValueError("b")), Source("c", 1, pause_s=60)]
    with pytest.raises(ValueError, match="b"):
        _ = [item async for item in merged([s.run() for s in sources])]
    assert all(s.closed for s in sources)


async def test_closing_the_iterator_closes_all_sources_and_tasks() -> None:
    before = asyncio.all_tasks()
    sources = [Source("a", 1000), Source("b", 1, pause_s=60)]
    async with aclosing(merged([s.run() for s in sources])) as items:
        assert await anext(items) == ("a", 0)
    assert all(s.closed for s in sources) and asyncio.all_tasks() == before


@pytest.mark.parametrize("turns", range(8))
async def test_cancelled_close_still_closes_every_source(turns: int) -> None:
    """A client leaves while its answer ends: the closing is cancelled, in any turn of the event loop."""
    opened = closed = 0

    async def source() -> AsyncGenerator[int, None]:
        nonlocal opened, closed
        opened += 1
        try:
            while True:
                yield 1
        finally:
            await asyncio.sleep(0)
            closed += 1

    deltas = merged([source() for _ in range(4)])
    assert await anext(deltas) == 1

    async def close() -> None:
        await deltas.aclose()

    closing = asyncio.create_task(close())
    for _ in range(turns):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert turns == 0 or (opened, closed) == (4, 4)
