"""Calls that block on a disk, on a thread of their own and with a time limit."""

from __future__ import annotations

import asyncio
import errno
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


_DISK_FULL = "the disk is full"
_DAMAGED = "the database is damaged: restore it, or move it away"
_SQLITE_REASONS = {
    sqlite3.SQLITE_FULL: _DISK_FULL,
    sqlite3.SQLITE_BUSY: "another process holds the lock of the database",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
}


class StorageFailed(Unavailable):
    code = "storage_failed"


def reason_of(error: OSError | sqlite3.Error) -> str:
    """Returns in a few words, without paths, why a disk or database failed."""
    if isinstance(error, OSError):
        return _DISK_FULL if error.errno == errno.ENOSPC else os.strerror(error.errno or errno.EIO)
    primary = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without the extension of the code
    return _SQLITE_REASONS.get(primary, str(error))


def storage_failed(content: str, error: OSError | sqlite3.Error) -> StorageFailed:
    message = f"{content} cannot be read or written: {reason_of(error)}"
    return StorageFailed(message, retry_after_s=PAUSE_S)


class DiskThread:
    """Makes calls one after another. `flag` is the option that names the place, `content` what is there: both are for
    error messages. State: the thread, and the failure that `retry` waits for, if any."""

    def __init__(self, flag: str, content: str) -> None:
        self._flag, self._content = flag, content
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._repeating = asyncio.Lock()
        self._waits_for = ""

    async def run(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Raises StorageFailed, besides what the call raises."""
        try:
            async with asyncio.timeout(LIMIT_S):
                return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)
        except TimeoutError:
            message = f"{self._flag}: the disk did not respond within {LIMIT_S:g} s"
            raise StorageFailed(message, retry_after_s=PAUSE_S) from None
        except (OSError, sqlite3.Error) as error:
            raise self.failed(error) from None

    def failed(self, error: OSError | sqlite3.Error) -> StorageFailed:
        """Returns the error for clients. Logs it, unless `retry` already waits for the end of this failure."""
        failure = storage_failed(self._content, error)
        if failure.message != self._waits_for:
            self._log(error)
        return failure

    async def retry(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Like `run`, but while the disk fails, repeats the call every PAUSE_S until it succeeds: the arguments stay
        in memory until then. A failure is logged once. `call` must be safe to repeat, since a call that timed out may
        still complete. One call at a time is repeated, so that others find the thread free."""
        try:
            return await self.run(call, *arguments)
        except StorageFailed as failure:
            self._wait_for(failure)
        async with self._repeating:
            while True:
                if self._waits_for:
                    await asyncio.sleep(PAUSE_S)
                try:
                    result = await self.run(call, *arguments)
                except StorageFailed as failure:
                    self._wait_for(failure)
                    continue
                if self._waits_for:
                    log.warning("%s: %s can be read and written again", self._flag, self._content)
                    self._waits_for = ""
                return result

    def _wait_for(self, failure: StorageFailed) -> None:
        if not self._waits_for:
            event = "batches wait for the disk, and keep their results in memory; they try again every"
            log.warning("%s: %s %g s", self._flag, event, PAUSE_S)
        self._waits_for = failure.message

    def post(self, call: Callable[..., object], *arguments: Any) -> None:
        """Makes a call later; a failure is logged."""
        self._thread.submit(call, *arguments).add_done_callback(self._log_failure)

    def close(self, *, drop_pending: bool) -> None:
        """Waits for the current call, and for those after it or drops them."""
        self._thread.shutdown(wait=True, cancel_futures=drop_pending)

    def _log_failure(self, future: Future[object]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._log(error)

    def _log(self, error: BaseException) -> None:
        known = isinstance(error, (OSError, sqlite3.Error)) and (reason := reason_of(error)) != str(error)
        log.error("%s: %s", self._flag, f"{reason} ({error})" if known else error)


def create_private(path: Path) -> None:
    """Creates a database file that only its owner can read. SQLite gives its side files the same mode."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    path.chmod(0o600)
