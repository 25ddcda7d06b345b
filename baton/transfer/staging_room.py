"""Waiting for room in a worker's staging memory (`StagingQuota`), from its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import cast

from baton.core.errors import HandoffError, StartupError
from baton.core.kv_layout import KVLayout
from baton.core.staging_quota import StagingQuota


def check_staging(limit_bytes: int, layout: KVLayout) -> None:
    """Raises StartupError where not even one block of `layout`, of all ranks together, fits."""
    if limit_bytes < layout.bytes_per_block:
        raise StartupError(
            f"staging memory of {limit_bytes} bytes is too small: one KV block has {layout.bytes_per_block};"
            " give more with --staging-mib"
        )


class StagingRoom:
    """The staging memory of one worker, all its ranks together. Raises StartupError where not even one block of
    `layout` fits."""

    def __init__(self, limit_bytes: int, layout: KVLayout) -> None:
        check_staging(limit_bytes, layout)
        self.quota = StagingQuota(limit_bytes)

    @asynccontextmanager
    async def hold(self, num_bytes: int, timeout_s: float) -> AsyncIterator[None]:
        """Holds that many bytes for the block. Raises HandoffError when there was no room within `timeout_s`, or never
        will be."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self.quota.take(granted, num_bytes):
            try:
                await asyncio.wait({granted}, timeout=timeout_s)
            except asyncio.CancelledError:
                self._leave(granted, num_bytes)
                raise
            if not granted.done():
                self._leave(granted, num_bytes)
                raise HandoffError(f"no room for {num_bytes} bytes in staging memory within {timeout_s:g} s")
        try:
            yield
        finally:
            self._wake(self.quota.give(num_bytes))

    def _leave(self, granted: asyncio.Future[None], num_bytes: int) -> None:
        self._wake(self.quota.give(num_bytes) if granted.done() else self.quota.leave(granted))

    def _wake(self, granted: Iterable[object]) -> None:
        for future in granted:
            cast("asyncio.Future[None]", future).set_result(None)
