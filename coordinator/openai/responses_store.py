"""Answers of `/v1/responses` that clients may continue (`previous_response_id`) or read again, bounded in bytes.

The oldest are dropped for new ones. They are in memory, or with `--store` in a database in `--data-dir`, which outlives
the coordinator. Nobody sees those of another tenant.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson

from baton.core.errors import StartupError

_T = TypeVar("_T")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL, answer BLOB NOT NULL,
    items BLOB NOT NULL, previous BLOB NOT NULL, UNIQUE (tenant, id)
)
"""
_BYTES = "length(answer) + length(items) + length(previous)"


@dataclass(frozen=True, slots=True)
class Stored:
    """An answer as JSON, the items of its own input, and all items before these: JSON arrays."""

    answer: bytes
    items: bytes
    previous: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.answer) + len(self.items) + len(self.previous)

    def conversation(self) -> list[Any]:
        """Returns all items up to and including the answer's own."""
        output = orjson.loads(self.answer)["output"]
        return [*orjson.loads(self.previous), *orjson.loads(self.items), *output]


class MemoryResponses:
    """State: the answers by tenant and id, the oldest first, and their bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self._bytes = max_bytes, 0
        self._kept: OrderedDict[tuple[str, str], Stored] = OrderedDict()

    def put(self, tenant: str, name: str, stored: Stored) -> None:
        """Adds an answer; one that is larger than all room is dropped."""
        self._drop((tenant, name))
        self._kept[tenant, name] = stored
        self._bytes += stored.num_bytes
        while self._bytes > self.max_bytes:
            self._drop(next(iter(self._kept)))

    async def get(self, tenant: str, name: str) -> Stored | None:
        return self._kept.get((tenant, name))

    async def delete(self, tenant: str, name: str) -> bool:
        """Returns whether it was there."""
        return self._drop((tenant, name))

    def close(self) -> None: ...

    def _drop(self, key: tuple[str, str]) -> bool:
        stored = self._kept.pop(key, None)
        self._bytes -= 0 if stored is None else stored.num_bytes
        return stored is not None


class DatabaseResponses:
    """The same in SQLite, on a thread of its own, in the order of the calls."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises StartupError if the database cannot be opened."""
        self.max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, "responses")
        try:
            self._database = self._thread.submit(_open, path).result()
        except sqlite3.Error as error:
            self._thread.shutdown()
            raise StartupError(f"--store: {path}: {error}") from None

    def put(self, tenant: str, name: str, stored: Stored) -> None:
        self._thread.submit(self._put, tenant, name, stored)

    async def get(self, tenant: str, name: str) -> Stored | None:
        row = await self._run(
            lambda: self._database.execute(
                "SELECT answer, items, previous FROM responses WHERE tenant = ? AND id = ?", (tenant, name)
            ).fetchone()
        )
        return None if row is None else Stored(*row)

    async def delete(self, tenant: str, name: str) -> bool:
        """Returns whether it was there."""

        def run() -> bool:
            with self._database:
                done = self._database.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, name))
            return done.rowcount > 0

        return await self._run(run)

    def close(self) -> None:
        self._thread.submit(self._database.close)
        self._thread.shutdown()

    def _put(self, tenant: str, name: str, stored: Stored) -> None:
        with self._database as database:
            row = (tenant, name, stored.answer, stored.items, stored.previous)
            database.execute(
                "INSERT OR REPLACE INTO responses (tenant, id, answer, items, previous) VALUES (?, ?, ?, ?, ?)", row
            )
            (total,) = database.execute(f"SELECT total({_BYTES}) FROM responses").fetchone()
            while total > self.max_bytes:
                number, size = database.execute(
                    f"SELECT number, {_BYTES} FROM responses ORDER BY number LIMIT 1"
                ).fetchone()
                database.execute("DELETE FROM responses WHERE number = ?", (number,))
                total -= size

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


Responses = MemoryResponses | DatabaseResponses


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute(_SCHEMA)
    return database
