"""Validates the input files of batches off the store's thread, so that other clients' calls are answered meanwhile.

Files are read and parsed in small pieces on one thread, and each piece is stored in one short transaction. The files of
different owners take turns by piece; those of one owner are validated one after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from typing import Any
from weakref import WeakValueDictionary

from batches.store import FLAG, BatchStore, Line, read_line, read_lines
from baton.core.errors import Unavailable
from baton.runtime import disk
from baton.runtime.disk import DiskThread, StorageFailed
from baton.runtime.process import ChildExecutor, start_child

MAX_LINES = 50_000
MAX_ERRORS = 20
INLINE_BYTES = 64 * 1024
"""A longer line is parsed in a child process: a JSON parser holds the GIL, on a thread too (0.2 s for 4 MiB)."""
PARSE_S = 20.0
PIECE_BYTES, PIECE_LINES = 1 << 20, 1000
"""A piece ends when the bodies in it reach PIECE_BYTES or it has PIECE_LINES, empty ones included."""


class Validator:
    """Checks input files, one at a time per owner. `stored` is the thread of the store."""

    def __init__(self, store: BatchStore, stored: DiskThread, *, strict_fields: bool) -> None:
        self._store, self._stored, self._strict = store, stored, strict_fields
        self._reading = DiskThread(FLAG, "input files of batches")
        self._child = ChildExecutor(lambda: start_child(import_module, read_line.__module__))  # parses long lines
        self._closing = False
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def validate(self, batch: dict[str, Any]) -> bool:
        """Stores the lines of a batch, or fails it. Returns whether it can proceed. Starts again after a pause if its
        file cannot be read.

        Raises:
            NotFound: the input file was deleted.
            Unavailable: the child died, or did not reply within `PARSE_S`; or this process is shutting down.
        """
        turn = self._turns.setdefault(batch["owner"], asyncio.Lock())
        async with turn:
            while True:
                try:
                    return await self._validate(batch)
                except StorageFailed:
                    await asyncio.sleep(disk.PAUSE_S)

    async def _validate(self, batch: dict[str, Any]) -> bool:
        store, batch_id, errors, more = self._store, batch["id"], list[dict[str, Any]](), True
        path = await self._stored.retry(store.content, batch["owner"], batch["input_file_id"])
        await self._stored.retry(store.drop_lines, batch_id)  # of a validation that was interrupted
        results = read_lines(path, batch_id, batch["endpoint"], MAX_LINES, self._read_line)
        while more and len(errors) < MAX_ERRORS:
            piece, more = await self._reading.run(_next_piece, results)
            errors += [each for each in piece if not isinstance(each, Line)]
            lines = [] if errors else [each for each in piece if isinstance(each, Line)]
            if not await self._stored.retry(store.add_lines, batch_id, lines):
                return True  # cancelled meanwhile, which the caller handles
        if not errors and not await self._stored.retry(store.open_lines, batch_id, 0, 1):
            errors.append({"code": "empty_file", "line": None, "message": "the file has no requests", "param": None})
        if errors:
            await self._stored.retry(store.reject, batch_id, errors[:MAX_ERRORS])
        else:
            await self._stored.retry(store.begin, batch_id)
        return not errors

    def _read_line(self, text: bytes, number: int, batch_id: str, endpoint: str) -> Line | dict[str, Any]:
        """Calls `read_line` here, or in the child for a long line. Raises Unavailable, see `validate`."""
        if len(text) <= INLINE_BYTES:
            return read_line(text, number, batch_id, endpoint, self._strict)
        if self._closing:
            raise Unavailable("this process is shutting down")
        child = self._child.started()
        try:
            return child.submit(read_line, text, number, batch_id, endpoint, self._strict).result(PARSE_S)
        except (BrokenProcessPool, TimeoutError):
            self._child.close()  # the next long line starts another one
            raise Unavailable(f"line {number}: the process that parses long lines crashed or timed out") from None

    def close(self) -> None:
        """The next run restarts a validation that this interrupts."""
        self._closing = True
        self._child.close()  # the thread may wait for it
        self._reading.close(drop_pending=True)
        self._child.close()  # that thread may just have started another one


def _next_piece(
    results: Iterator[Line | dict[str, Any] | None],
) -> tuple[list[Line | dict[str, Any]], bool]:
    """Returns the requests and errors of the next lines, and whether there may be more of them."""
    piece, size = list[Line | dict[str, Any]](), 0
    for number, result in enumerate(results, 1):
        if result is not None:
            piece.append(result)
            size += len(result.body) if isinstance(result, Line) else 0
        if size >= PIECE_BYTES or number >= PIECE_LINES:
            return piece, True
    return piece, False
