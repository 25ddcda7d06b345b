"""Calls that block on a disk, on a thread of their own and with a time limit."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from baton.core.errors import Unavailable

log = logging.getLogger("baton.disk")
PAUSE_S = 5.0
LIMIT_S = 120.0
"""For one transaction: all lines of the largest file of a batch are checked and written in one."""
_T = TypeVar("_T")


class StorageFailed(Unavailable):
    code = "storage_failed"


class DiskThread:
    """Makes calls one after another. `flag` is the option that names the place, `content` what is there: both are for
    error messages."""

    def __init__(self, flag: str, content: str) -> None:
        self._flag, self._content = flag, content
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="disk")

    async def run(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Raises StorageFailed, besides what the call raises."""
        try:
            async with asyncio.timeout(LIMIT_S):
                return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)
        except TimeoutError:
            message = f"{self._flag}: the disk did not respond within {LIMIT_S:g} s"
            raise StorageFailed(message, retry_after_s=PAUSE_S) from None
        except (OSError, sqlite3.Error) as error:
            log.error("%s: %s", self._flag, error)
            raise StorageFailed(f"{self._content} cannot be read or written", retry_after_s=PAUSE_S) from None

    def post(self, call: Callable[..., object], *arguments: Any) -> None:
        """Makes a call later; a failure is logged."""
        self._thread.submit(call, *arguments).add_done_callback(self._log_failure)

    def close(self, *, drop_pending: bool) -> None:
        """Waits for the current call, and for those after it or drops them."""
        self._thread.shutdown(wait=True, cancel_futures=drop_pending)

    def _log_failure(self, future: Future[object]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            log.error("%s: %s", self._flag, error)


def create_private(path: Path) -> None:
    """Creates a database file that only its owner can read. SQLite gives its side files the same mode."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    path.chmod(0o600)
