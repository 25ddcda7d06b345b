"""Several asynchronous generators as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """What `sources` yield, as it comes, in the order of each. A slow reader holds back all of them, one item each.
    The first error ends all; all are closed, and their tasks gone, when this is, also where whoever closes it is
    cancelled meanwhile."""
    waiting = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=list(waiting).index):
                source = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield item
                waiting[asyncio.ensure_future(anext(source))] = source
    finally:
        await _to_its_end(_close(list(waiting), sources))


async def _close(tasks: Sequence[asyncio.Future[T]], sources: Sequence[AsyncGenerator[T, None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(source.aclose() for source in sources))


async def _to_its_end(cleanup: Coroutine[Any, Any, None]) -> None:
    """Runs it to its end; a cancellation that comes meanwhile is raised then. It must not wait for anything."""
    task, cancelled = asyncio.ensure_future(cleanup), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
