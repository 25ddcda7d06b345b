"""Answers of `/v1/responses` that clients may continue (`previous_response_id`) or read again, bounded in bytes.

For a new one the oldest of the tenant that stores the most are dropped. Answers are in memory, or with `--store` in a
database in `--data-dir`, which outlives the coordinator. A tenant sees only its own.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from baton.core.errors import StartupError
from baton.runtime.disk import DiskThread, create_private, reason_of

FLAG = "--store"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL, answer BLOB NOT NULL,
    items BLOB NOT NULL, previous BLOB NOT NULL, UNIQUE (tenant, id)
)
"""
_BYTES = "length(answer) + length(items) + length(previous)"
_DROP_ONE = f"""
DELETE FROM responses WHERE number = (
    SELECT min(number) FROM responses WHERE tenant = (
        SELECT tenant FROM responses GROUP BY tenant ORDER BY total({_BYTES}) DESC LIMIT 1))
"""


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
    """State: each tenant's answers by id, oldest first, and their bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._stored: dict[str, dict[str, Stored]] = {}
        self._bytes: Counter[str] = Counter()

    def put(self, tenant: str, response_id: str, stored: Stored) -> None:
        """Adds an answer, unless it alone is too large."""
        if stored.num_bytes > self.max_bytes:
            return
        self._drop(tenant, response_id)
        self._stored.setdefault(tenant, {})[response_id] = stored
        self._bytes[tenant] += stored.num_bytes
        while self._bytes.total() > self.max_bytes:
            ((largest, _),) = self._bytes.most_common(1)
            self._drop(largest, next(iter(self._stored[largest])))

    async def get(self, tenant: str, response_id: str) -> Stored | None:
        return self._stored.get(tenant, {}).get(response_id)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Returns whether it was there."""
        return self._drop(tenant, response_id)

    def close(self) -> None: ...

    def _drop(self, tenant: str, response_id: str) -> bool:
        stored = self._stored.get(tenant, {}).pop(response_id, None)
        if stored is None:
            return False
        self._bytes[tenant] -= stored.num_bytes
        if not self._stored[tenant]:
            del self._stored[tenant], self._bytes[tenant]
        return True


class DatabaseResponses:
    """The same in SQLite, on a thread of its own, in the order of the calls."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises StartupError if the database cannot be opened."""
        self.max_bytes = max_bytes
        self._thread = DiskThread(FLAG, "stored responses")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            create_private(path)
            self._database = sqlite3.connect(path, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise StartupError(f"{FLAG}: {path} cannot be used: {reason_of(error)}") from None

    def put(self, tenant: str, response_id: str, stored: Stored) -> None:
        """Adds an answer, unless it alone is too large. A failure is logged: the client has its answer."""
        if stored.num_bytes <= self.max_bytes:
            self._thread.post(self._put, tenant, response_id, stored)

    async def get(self, tenant: str, response_id: str) -> Stored | None:
        """Raises StorageFailed."""
        return await self._thread.run(self._get, tenant, response_id)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Returns whether it was there. Raises StorageFailed."""
        return await self._thread.run(self._delete, tenant, response_id)

    def close(self) -> None:
        self._thread.close(drop_pending=False)
        self._database.close()

    def _get(self, tenant: str, response_id: str) -> Stored | None:
        query = "SELECT answer, items, previous FROM responses WHERE tenant = ? AND id = ?"
        row = self._database.execute(query, (tenant, response_id)).fetchone()
        return None if row is None else Stored(*row)

    def _delete(self, tenant: str, response_id: str) -> bool:
        with self._database as database:
            deleted = database.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, response_id))
        return deleted.rowcount > 0

    def _put(self, tenant: str, response_id: str, stored: Stored) -> None:
        with self._database as database:
            row = (tenant, response_id, stored.answer, stored.items, stored.previous)
            database.execute(
                "INSERT OR REPLACE INTO responses (tenant, id, answer, items, previous) VALUES (?, ?, ?, ?, ?)", row
            )
            while database.execute(f"SELECT total({_BYTES}) FROM responses").fetchone()[0] > self.max_bytes:
                database.execute(_DROP_ONE)


Responses = MemoryResponses | DatabaseResponses
