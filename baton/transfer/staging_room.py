"""Bounds the bytes of KV that a worker packs or receives at once, separately from its KV blocks (decision 0008).

A holder of bytes never waits for a caller that waits here: a prefill worker's holder waits for room at a decode worker,
and a decode worker's holder for bytes that are packed already. So every wait ends, and none depends on KV blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.core.errors import HandoffError, StartupError
from baton.core.kv_layout import KVLayout


def check_staging(limit_bytes: int, layout: KVLayout) -> None:
    """Raises StartupError when not even one block of `layout`, over all ranks, fits."""
    if limit_bytes < layout.bytes_per_block:
        raise StartupError(
            f"staging memory of {limit_bytes} bytes is too small: one KV block needs {layout.bytes_per_block};"
            " increase --staging-mib"
        )


class StagingRoom:
    """The staging memory of one worker, over all its ranks. Raises StartupError when not even one
    block of `layout` fits."""

    def __init__(self, limit_bytes: int, layout: KVLayout) -> None:
        check_staging(limit_bytes, layout)
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self._next = asyncio.Lock()  # first come, first served: small requests must not starve a large one
        self._given_back = asyncio.Event()  # bytes were freed since the first waiting caller last checked

    @asynccontextmanager
    async def hold(self, num_bytes: int, timeout_s: float) -> AsyncIterator[None]:
        """Reserves that many bytes while the context is open. Raises HandoffError for fewer than one byte, for more
        than the limit, or when there is no room within `timeout_s`."""
        if num_bytes < 1:  # the peer sends the number: a negative one would raise the limit
            raise HandoffError(f"{num_bytes} bytes of KV cannot be staged")
        if num_bytes > self.limit_bytes:
            raise HandoffError(f"{num_bytes} bytes of KV do not fit into {self.limit_bytes} bytes of staging memory")
        try:
            async with asyncio.timeout(timeout_s), self._next:
                while self.taken_bytes + num_bytes > self.limit_bytes:
                    self._given_back.clear()
                    await self._given_back.wait()
                self.taken_bytes += num_bytes
        except TimeoutError:
            raise HandoffError(f"no room for {num_bytes} bytes in staging memory within {timeout_s:g} s") from None
        try:
            yield
        finally:
            self.taken_bytes -= num_bytes
            self._given_back.set()
