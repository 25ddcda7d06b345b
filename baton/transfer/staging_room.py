"""How many bytes of KV a worker may have on their way at once, packed or received: a bound of its own beside the KV
blocks (decision 0026).

Who holds bytes gives them back without waiting for anybody who waits here: a sender's wait ends with the receiver's, a
receiver's with bytes that are being packed already. So a wait always ends, and never for lack of KV blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.core.errors import HandoffError, StartupError
from baton.core.kv_layout import KVLayout


def check_staging(limit_bytes: int, layout: KVLayout) -> None:
    """Raises StartupError where not even one block of `layout`, of all ranks together, fits."""
    if limit_bytes < layout.bytes_per_block:
        raise StartupError(
            f"staging memory of {limit_bytes} bytes is too small: one KV block has {layout.bytes_per_block};"
            " give more with --staging-mib"
        )


class StagingRoom:
    """The staging memory of one worker, all its ranks together. Complete state: the bytes taken, who is next, and
    whether bytes have come back since the next one looked. Raises StartupError where not even one block of `layout`
    fits."""

    def __init__(self, limit_bytes: int, layout: KVLayout) -> None:
        check_staging(limit_bytes, layout)
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self._next = asyncio.Lock()  # first come, first served: small pieces do not overtake a large one for ever
        self._given_back = asyncio.Event()

    @asynccontextmanager
    async def hold(self, num_bytes: int, timeout_s: float) -> AsyncIterator[None]:
        """Holds that many bytes for the block. Raises HandoffError when they are none, when there was no room within
        `timeout_s`, or when there never will be."""
        if num_bytes < 1:  # a peer says how many: less than none would lift the limit for others
            raise HandoffError(f"{num_bytes} bytes of KV cannot be staged")
        if num_bytes > self.limit_bytes:
            raise HandoffError(f"{num_bytes} bytes of KV do not fit into {self.limit_bytes} of staging")
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
