"""Files and batches on disk: rows in SQLite, file contents in a directory.

    DIR/baton.db        files, batches, and one row for each line of a batch with its answer
    DIR/files/ID        the content of a file
    DIR/baton.lock      held by the one process that uses the directory

Rows belong to an owner (the tenant of an API key), and other owners cannot see them. Every method blocks on the disk,
so all of them are called on one dedicated thread (`BatchRunner`). A transaction covers one step of a batch, so a
restarted process resumes where the last one stopped: lines with a response are not run again. `max_bytes` limits
files and database together and each owner's share of it, but responses of a batch that has begun are always stored.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from baton.core.errors import InvalidRequest, NotFound, QuotaExceeded, StartupError, Unavailable
from baton.runtime.batches_access import Owner
from baton.runtime.disk import create_private, reason_of
from baton.runtime.ignored_fields import IgnoredFields, as_header
from baton.runtime.json_body import parse_object
from baton.runtime.paths import expanded

FLAG = "--data-dir"
WINDOW_S = 24 * 3600
OUTPUT = "batch_output"
_OUTPUTS = {"output_file_id": "status = 200", "error_file_id": "status <> 200"}
MAX_UNFINISHED = 1000
MAX_UNFINISHED_OF_OWNER = 250
BUSY_S = 30.0
"""Seconds after which a client that reached the limit on unfinished batches may retry."""
MAX_LINE_BYTES = 4 << 20  # the default limit of a request body
_FINAL = "completed", "failed", "expired", "cancelled"
_UNFINISHED = f"status not in {_FINAL}"
_ADDED_COLUMNS = (
    ("lines", "ignored", "text not null default ''"),
    ("batches", "input_bytes", "integer not null default 0"),
)
"""Columns that a database of an earlier version lacks."""
_SCHEMA = f"""
create table if not exists files (
    id text primary key, owner text not null, created_at integer not null, bytes integer not null,
    filename text not null, purpose text not null);
create table if not exists batches (
    id text primary key, owner text not null, key text not null, created_at integer not null,
    endpoint text not null, input_file_id text not null, metadata text not null, status text not null,
    total integer not null default 0, completed integer not null default 0, failed integer not null default 0,
    output_file_id text, error_file_id text, errors text, stamps text not null default '{{}}',
    input_bytes integer not null default 0);
create table if not exists lines (
    batch text not null, number integer not null, custom_id text not null, body blob not null,
    status integer, request_id text, answer blob, ignored text not null default '',
    primary key (batch, number)) without rowid;
create index if not exists open_lines on lines (batch) where status is null;
create index if not exists unfinished on batches (owner, status) where {_UNFINISHED};
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch: its place in the input file, its body, and which other fields of the line were ignored,
    separated by `, `."""

    batch: str
    number: int
    custom_id: str
    body: bytes
    ignored: str = ""


ReadLine = Callable[[bytes, int, str, str], Line | dict[str, Any]]
"""`read_line` with the last argument bound."""
_LINE = frozenset({"custom_id", "method", "url", "body"})


class BatchStore:
    """Files and batches in one directory, which it locks."""

    def __init__(self, directory: str, max_bytes: int) -> None:
        """Raises StartupError if the directory cannot be used, or another process uses it."""
        self._max_bytes = max_bytes
        root = expanded(directory)
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._files = root / "files"
            self._files.mkdir(exist_ok=True, mode=0o700)
            self._lock = os.open(root / "baton.lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            create_private(root / "baton.db")  # it holds prompts and responses
            self._db = sqlite3.connect(root / "baton.db", check_same_thread=False, isolation_level=None)
            self._db.executescript("pragma journal_mode=wal; pragma synchronous=normal; pragma busy_timeout=5000;")
            self._db.executescript(_SCHEMA)
            for table, column, kind in _ADDED_COLUMNS:
                if not any(row[1] == column for row in self._db.execute(f"pragma table_info({table})")):
                    self._db.execute(f"alter table {table} add column {column} {kind}")
        except BlockingIOError:
            os.close(self._lock)
            raise StartupError(f"{FLAG} {directory}: in use by another process") from None
        except OSError as error:
            raise StartupError(f"{FLAG} {directory} cannot be used: {reason_of(error)}") from None
        except sqlite3.Error as error:
            os.close(self._lock)
            raise StartupError(f"{FLAG} {directory}: baton.db cannot be used: {reason_of(error)}") from None
        self._db.row_factory = sqlite3.Row
        for path in self._files.glob("*.part"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._db.close()
        os.close(self._lock)

    # Files.

    def new_part(self, owner: Owner, declared_bytes: int) -> Path:
        """Returns the path to which the content of a new file is to be written.

        Raises:
            QuotaExceeded: with it, all files together would exceed `max_bytes`, or the owner's its share.
        """
        self._check_room(owner, declared_bytes)
        return self._files / f"{secrets.token_hex(8)}.part"

    def _check_room(self, owner: Owner, more: int) -> None:
        """Raises QuotaExceeded. Of several tenants, each may store half of what the others leave. Free pages of the
        database are reused, so they do not count. Lines of a batch that has not ended count against its owner with the
        size of their file."""
        query = "select coalesce(sum(bytes), 0), coalesce(sum(bytes) filter (where owner = ?), 0) from files"
        held, own = self._db.execute(query, (owner.tenant,)).fetchone()
        query = f"select coalesce(sum(input_bytes), 0) from batches where owner = ? and {_UNFINISHED}"
        own += self._db.execute(query, (owner.tenant,)).fetchone()[0]
        held += self._database_bytes()
        if held + more > self._max_bytes:
            message = f"files are limited to {self._max_bytes} bytes in total: delete some"
            raise QuotaExceeded(message, code="storage_full")
        left = room(self._max_bytes, own, max(0, held - own))
        if owner.several_tenants and more > left:
            message = f"your share of the storage, half of what other tenants leave, has room for {max(0, left)} bytes"
            raise QuotaExceeded(f"{message}: delete some files", code="storage_full")

    def _database_bytes(self) -> int:
        size, count, free = (
            self._db.execute(f"pragma {name}").fetchone()[0] for name in ("page_size", "page_count", "freelist_count")
        )
        return int(size * (count - free))

    def figures(self) -> dict[str, Any]:
        """Returns the number of batches that have not ended, by status, and the bytes that are stored and allowed."""
        query = f"select status, count(*) from batches where {_UNFINISHED} group by status"
        unfinished = dict(self._db.execute(query).fetchall())
        of_files = self._db.execute("select coalesce(sum(bytes), 0) from files").fetchone()[0]
        return {
            "unfinished": unfinished,
            "stored_bytes": of_files + self._database_bytes(),
            "max_bytes": self._max_bytes,
        }

    def add_file(self, owner: Owner, part: Path, filename: str, purpose: str) -> dict[str, Any]:
        """Moves content that was written to `part` into the store; returns the file object of OpenAI's API.

        Raises:
            QuotaExceeded: the file does not fit after all.
        """
        self._check_room(owner, part.stat().st_size)  # it may not have been declared, and others were added meanwhile
        with self._transaction():  # a file without a row would occupy space unnoticed
            file_id = self._insert_file(owner.tenant, part, filename, purpose)
        return self.file(owner.tenant, file_id)

    def _insert_file(self, owner: str, part: Path, filename: str, purpose: str) -> str:
        """Adds the row of a file and moves its content, within a transaction. Returns the file's id."""
        file_id = f"file-{secrets.token_hex(12)}"
        shown = filename.encode(errors="replace").decode()  # SQLite cannot store half of a surrogate pair
        row = (file_id, owner, int(time.time()), part.stat().st_size, shown, purpose)
        self._db.execute("insert into files values (?, ?, ?, ?, ?, ?)", row)
        _sync(part)  # the row may reach the disk first, and lines whose answers are here are deleted with it
        part.rename(self._files / file_id)
        _sync(self._files)
        return file_id

    def file(self, owner: str, file_id: str) -> dict[str, Any]:
        """Raises NotFound."""
        row = self._db.execute("select * from files where id = ? and owner = ?", (file_id, owner)).fetchone()
        if row is None:
            raise NotFound("there is no such file", code="file_not_found", param="file_id")
        return _file_object(row)

    def files(self, owner: str, limit: int, after: str | None, purpose: str | None) -> list[dict[str, Any]]:
        """Returns files, the latest first; `after` is the id of the last one of the previous page."""
        query = "select * from files where owner = ? and (? is null or purpose = ?)"
        rows = self._page("files", query, [owner, purpose, purpose], owner, limit, after)
        return [_file_object(row) for row in rows]

    def content(self, owner: str, file_id: str) -> Path:
        """Raises NotFound."""
        self.file(owner, file_id)
        return self._files / file_id

    def delete_file(self, owner: str, file_id: str) -> None:
        """Raises NotFound. A batch that was made from it has its own copy of the lines."""
        self.file(owner, file_id)
        self._db.execute("delete from files where id = ?", (file_id,))
        (self._files / file_id).unlink(missing_ok=True)

    # Batches.

    def add_batch(self, owner: Owner, endpoint: str, input_file_id: str, metadata: dict[str, str]) -> dict[str, Any]:
        """Adds a batch, which counts against the quota of the owner's key.

        Raises:
            NotFound: there is no such file.
            QuotaExceeded: too many batches of this owner have not ended, or it does not fit with its lines.
            Unavailable: too many batches of all owners have not ended.
        """
        file = self.file(owner.tenant, input_file_id)
        if file["purpose"] != "batch":
            raise NotFound("the file's purpose is not 'batch'", code="file_not_found", param="input_file_id")
        self._check_unfinished(owner.tenant)
        kept = orjson.dumps(metadata).decode()
        self._check_room(owner, file["bytes"] + len(kept))
        batch_id, now = f"batch_{secrets.token_hex(12)}", int(time.time())
        self._db.execute(
            "insert into batches (id, owner, key, created_at, endpoint, input_file_id, metadata, status,"
            " input_bytes) values (?, ?, ?, ?, ?, ?, ?, 'validating', ?)",
            (batch_id, owner.tenant, owner.key, now, endpoint, input_file_id, kept, file["bytes"]),
        )
        return self.batch(owner.tenant, batch_id)

    def _check_unfinished(self, owner: str) -> None:
        """Raises QuotaExceeded or Unavailable if one more batch would be too many."""
        query = f"select count(*), coalesce(sum(owner = ?), 0) from batches where {_UNFINISHED}"
        of_all, of_owner = self._db.execute(query, (owner,)).fetchone()
        if of_owner >= MAX_UNFINISHED_OF_OWNER:
            message = f"{MAX_UNFINISHED_OF_OWNER} batches are unfinished: cancel one or wait until one ends"
            raise QuotaExceeded(message, code="too_many_batches", retry_after_s=BUSY_S)
        if of_all >= MAX_UNFINISHED:
            message = f"{MAX_UNFINISHED} batches of all clients are unfinished: wait until one ends"
            raise Unavailable(message, code="too_many_batches", retry_after_s=BUSY_S)

    def batch(self, owner: str, batch_id: str) -> dict[str, Any]:
        """Raises NotFound."""
        row = self._db.execute("select * from batches where id = ? and owner = ?", (batch_id, owner)).fetchone()
        if row is None:
            raise NotFound("there is no such batch", code="batch_not_found", param="batch_id")
        return _batch_object(row)

    def batches(self, owner: str, limit: int, after: str | None) -> list[dict[str, Any]]:
        rows = self._page("batches", "select * from batches where owner = ?", [owner], owner, limit, after)
        return [_batch_object(row) for row in rows]

    def cancel(self, owner: str, batch_id: str) -> dict[str, Any]:
        """Raises NotFound. A batch that is finalizing or has ended is unchanged."""
        if self.batch(owner, batch_id)["status"] in ("validating", "in_progress"):
            self.set_status(batch_id, "cancelling")
        return self.batch(owner, batch_id)

    # For the runner.

    def unfinished(self, limit: int = MAX_UNFINISHED) -> list[dict[str, Any]]:
        """Returns batches that have not ended, with `owner` and `key`: first those to be cancelled, then the oldest of
        each owner, then the next of each."""
        rows = self._db.execute(
            "with chosen as materialized (select rowid as row, status <> 'cancelling' as later,"
            " row_number() over (partition by owner order by rowid) as turn"
            f" from batches where {_UNFINISHED} order by later, turn, row limit ?)"
            " select batches.* from chosen join batches on batches.rowid = chosen.row order by later, turn, row",
            (limit,),
        )
        return [_batch_object(row) | {"owner": row["owner"], "key": row["key"]} for row in rows]

    def set_status(self, batch_id: str, status: str, errors: list[dict[str, Any]] | None = None) -> None:
        row = self._db.execute("select stamps from batches where id = ?", (batch_id,)).fetchone()
        stamps = orjson.loads(row["stamps"]) | {f"{status}_at": int(time.time())}
        self._db.execute(
            "update batches set status = ?, stamps = ?, errors = coalesce(?, errors) where id = ?",
            (status, orjson.dumps(stamps).decode(), orjson.dumps(errors).decode() if errors else None, batch_id),
        )

    def drop_lines(self, batch_id: str) -> None:
        self._db.execute("delete from lines where batch = ?", (batch_id,))

    def add_lines(self, batch_id: str, lines: Iterable[Line]) -> bool:
        """Stores lines of a batch that is being validated. Returns False if it was cancelled meanwhile."""
        with self._transaction():
            if not self._is_validating(batch_id):
                return False
            rows = ((line.batch, line.number, line.custom_id, line.body, line.ignored) for line in lines)
            names = "batch, number, custom_id, body, ignored"
            self._db.executemany(f"insert or replace into lines ({names}) values (?, ?, ?, ?, ?)", rows)
        return True

    def begin(self, batch_id: str) -> None:
        """Sets a batch whose lines are stored in progress, unless it was cancelled meanwhile."""
        with self._transaction():
            self._db.execute(
                "update batches set total = (select count(*) from lines where batch = ?) where id = ?",
                (batch_id, batch_id),
            )
            if self._is_validating(batch_id):
                self.set_status(batch_id, "in_progress")

    def reject(self, batch_id: str, errors: list[dict[str, Any]]) -> None:
        """Drops the lines of a batch whose input file is invalid, and fails it."""
        with self._transaction():
            self.drop_lines(batch_id)
            self.set_status(batch_id, "failed", errors)

    def _is_validating(self, batch_id: str) -> bool:
        row = self._db.execute("select status from batches where id = ?", (batch_id,)).fetchone()
        return bool(row["status"] == "validating")

    def open_lines(self, batch_id: str, after: int, limit: int) -> list[Line]:
        """Returns lines without a response after number `after`, in order."""
        rows = self._db.execute(
            "select batch, number, custom_id, body, ignored from lines"
            " where batch = ? and number > ? and status is null order by number limit ?",
            (batch_id, after, limit),
        )
        return [Line(*row) for row in rows]

    def answered(self, line: Line, status: int, request_id: str, answer: bytes, ignored: str = "") -> None:
        """Stores the response of a line, unless it has one; `ignored` are the fields of its body that were ignored."""
        named = ", ".join(filter(None, (line.ignored, ignored)))
        column = "completed" if status == 200 else "failed"
        with self._transaction():
            stored = self._db.execute(
                "update lines set status = ?, request_id = ?, answer = ?, ignored = ?"
                " where batch = ? and number = ? and status is null",
                (status, request_id, answer, named, line.batch, line.number),
            )
            if stored.rowcount:
                self._db.execute(f"update batches set {column} = {column} + 1 where id = ?", (line.batch,))

    def end(self, batch_id: str, status: str, errors: list[dict[str, Any]] | None = None) -> None:
        """Writes the responses to an output file and an error file, which of an expired batch has the lines without a
        response, too, deletes the lines, and sets the final status, all or nothing. A batch that has ended is
        unchanged."""
        batch = self._db.execute("select * from batches where id = ?", (batch_id,)).fetchone()
        if batch["status"] in _FINAL:
            return
        made = list[Path]()
        try:
            lines = _OUTPUTS | ({"error_file_id": "status is not 200"} if status == "expired" else {})
            outputs = {column: self._write_answers(batch_id, column, lines[column], made) for column in _OUTPUTS}
            with self._transaction():
                ids: dict[str, str | None] = dict.fromkeys(_OUTPUTS)
                for column, part in outputs.items():
                    if part.stat().st_size:
                        name = f"{batch_id}_{column.partition('_')[0]}.jsonl"
                        ids[column] = file_id = self._insert_file(batch["owner"], part, name, OUTPUT)
                        made.append(self._files / file_id)
                self._db.execute("delete from lines where batch = ?", (batch_id,))
                self._db.execute(
                    "update batches set output_file_id = ?, error_file_id = ? where id = ?", (*ids.values(), batch_id)
                )
                self.set_status(batch_id, status, errors)
        except BaseException:
            for path in made:  # files without a row would occupy space unnoticed
                path.unlink(missing_ok=True)
            raise
        for part in outputs.values():
            part.unlink(missing_ok=True)

    def _write_answers(self, batch_id: str, column: str, lines: str, made: list[Path]) -> Path:
        """Writes the output or error file of a batch to a path that it appends to `made`, and returns it."""
        made.append(part := self._files / f"{batch_id}_{column}.part")
        query = f"select * from lines where batch = ? and {lines} order by number"
        with part.open("wb") as file:
            for line in self._db.execute(query, (batch_id,)):
                file.write(_answer_line(line) + b"\n")
        return part

    def _page(
        self, table: str, query: str, values: list[Any], owner: str, limit: int, after: str | None
    ) -> list[sqlite3.Row]:
        if after is not None:
            known = self._db.execute(f"select rowid from {table} where id = ? and owner = ?", (after, owner)).fetchone()
            if known is None:
                raise NotFound(f"no item has the id {after[:64]!r}", param="after")
            query, values = f"{query} and rowid < ?", [*values, known[0]]
        return self._db.execute(f"{query} order by rowid desc limit ?", (*values, limit)).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("begin immediate")
        with self._db:  # commits, or rolls back
            yield


def _sync(path: Path) -> None:
    """Returns when a file, or the names in a directory, are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def read_lines(
    path: Path, batch_id: str, endpoint: str, max_lines: int, read: ReadLine
) -> Iterator[Line | dict[str, Any] | None]:
    """Yields the requests of an input file, an error object of OpenAI's API for each invalid line, and None for each
    empty one."""
    seen: set[str] = set()
    with path.open("rb") as file:
        number = 0
        while text := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(text) > MAX_LINE_BYTES:
                yield _error(number, "line_too_long", f"the line has more than {MAX_LINE_BYTES} bytes", None)
                while text and not text.endswith(b"\n"):
                    text = file.readline(MAX_LINE_BYTES)
                continue
            if not text.strip():
                yield None
                continue
            if len(seen) >= max_lines:
                yield _error(number, "too_many_lines", f"the file has more than {max_lines} requests", None)
                return
            parsed = read(text.strip(), number, batch_id, endpoint)
            if isinstance(parsed, Line) and parsed.custom_id in seen:
                parsed = _error(number, "duplicate_custom_id", "another line has this custom_id", "custom_id")
            if isinstance(parsed, Line):
                seen.add(parsed.custom_id)
            yield parsed


def read_line(text: bytes, number: int, batch_id: str, endpoint: str, strict: bool) -> Line | dict[str, Any]:
    """Returns the request of one line, or an error object; `strict` refuses unknown fields. Holds the GIL while it
    parses."""
    try:
        given = parse_object(text)
    except InvalidRequest as error:
        return _error(number, "invalid_json_line", error.message, error.param)
    ignored = IgnoredFields(strict=strict)
    for name in (name for name, value in given.items() if name not in _LINE and value is not None):
        try:
            ignored.accept("line", name, _LINE)
        except InvalidRequest as error:
            return _error(number, error.code, error.message, name[:64])
    custom_id, body = given.get("custom_id"), given.get("body")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= 512:
        message = "custom_id must be a string of 1 to 512 characters"
        return _error(number, "missing_required_parameter", message, "custom_id")
    if given.get("method") != "POST":
        return _error(number, "invalid_method", "method must be POST", "method")
    if given.get("url") != endpoint:
        return _error(number, "mismatched_endpoint", f"url must be the batch's endpoint, {endpoint}", "url")
    if not isinstance(body, dict):
        return _error(number, "missing_required_parameter", "body must be an object", "body")
    if body.get("stream"):
        return _error(number, InvalidRequest.code, "streaming is not supported in a batch", "body.stream")
    try:
        return Line(batch_id, number, custom_id, orjson.dumps(body), as_header(ignored.names))
    except TypeError:  # orjson writes less nesting than it reads, and only 64-bit integers
        return _error(number, InvalidRequest.code, "body is nested too deeply, or has too large a number", "body")


def _error(line: int, code: str, message: str, param: str | None) -> dict[str, Any]:
    return {"code": code, "line": line, "message": message, "param": param}


def _answer_line(row: sqlite3.Row) -> bytes:
    head = {"id": f"batch_req_{row['batch'][6:]}_{row['number']}", "custom_id": row["custom_id"]}
    if row["status"] is None:
        error = {"code": "batch_expired", "message": "the batch expired before this request had a response"}
        return orjson.dumps(head | {"response": None, "error": error})
    response = {"status_code": row["status"], "request_id": row["request_id"], "body": orjson.Fragment(row["answer"])}
    if row["ignored"]:
        response["ignored_fields"] = row["ignored"].split(", ")
    return orjson.dumps(head | {"response": response, "error": None})


def _file_object(row: sqlite3.Row) -> dict[str, Any]:
    shown = {name: row[name] for name in ("id", "bytes", "created_at", "filename", "purpose")}
    return shown | {"object": "file", "status": "processed", "status_details": None, "expires_at": None}


def _batch_object(row: sqlite3.Row) -> dict[str, Any]:
    stamps = orjson.loads(row["stamps"])
    names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    errors = orjson.loads(row["errors"]) if row["errors"] else None
    return {
        "id": row["id"],
        "object": "batch",
        "endpoint": row["endpoint"],
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": row["input_file_id"],
        "completion_window": "24h",
        "status": row["status"],
        "output_file_id": row["output_file_id"],
        "error_file_id": row["error_file_id"],
        "created_at": row["created_at"],
        **{f"{name}_at": stamps.get(f"{name}_at") for name in names},
        "expires_at": row["created_at"] + WINDOW_S,
        "request_counts": {name: row[name] for name in ("total", "completed", "failed")},
        "metadata": orjson.loads(row["metadata"]) or None,
    }


def room(limit: int, own: int, of_others: int) -> int:
    """Returns how many more bytes a tenant may store; `own` and `of_others` are the bytes that it and all others hold.

    It may hold half of what the others leave. So there is room for another one, however many have filled their shares.
    """
    return max(0, limit - of_others) // 2 - own
