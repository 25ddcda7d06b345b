"""Merges several asynchronous generators into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yields the items of all `sources` as they arrive, in the order of each source. A slow reader blocks all sources,
    with one item each buffered. The first error ends all. When this generator closes, all sources are closed and their
    tasks have ended, even if the closing task is cancelled meanwhile."""
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
        await _run_to_completion(_close(list(waiting), sources))


async def _close(tasks: Sequence[asyncio.Future[T]], sources: Sequence[AsyncGenerator[T, None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(source.aclose() for source in sources))


async def _run_to_completion(cleanup: Coroutine[Any, Any, None]) -> None:
    """Runs `cleanup` to completion, then raises a cancellation that arrived meanwhile. `cleanup` must not block."""
    task, cancelled = asyncio.ensure_future(cleanup), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
