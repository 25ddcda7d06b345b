"""Runs batches: their requests go through the same front as those of clients, behind all of these.

    validating -> in_progress -> finalizing -> completed
              \\-> failed      \\-> cancelling -> cancelled, or expired after a day

MAX_RUNNING requests at once, of all batches in turn and of MAX_BATCHES at a time, whose owners take turns, too; with
the lowest priority there is: a client's request never waits in the queue behind one of them. They count against the
quota of the key that the batch was made with. A refusal for want of room or quota is tried again; any other answer is
the line's answer. A coordinator that starts goes on with the batches that had not ended, and so does one whose disk
failed.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from baton.core.errors import NotFound, Unavailable
from coordinator.api_keys import MAX_PRIORITY
from coordinator.batches.store import FLAG, BatchStore, Line, read_line, read_lines
from coordinator.child import Child, start_child
from coordinator.policy.quotas import Client

log = logging.getLogger("baton.batches")
MAX_RUNNING = 32
MAX_BATCHES = 16
MAX_LINES = 50_000
MAX_ERRORS = 20
INLINE_BYTES = 64 * 1024
"""A longer line is parsed in a child: a JSON parser holds the interpreter, on a thread too (0.2 s for 4 MiB)."""
PARSE_S = 20.0
RETRIES_S = 0.5, 30.0
"""Between two tries of a line that found no room, in seconds: doubled with each, up to the second."""
RETRIED = (408, 429, 500, 502, 503)
MAX_FAILURES = 5
"""Tries of a line that ended with an error of the cluster; refusals for want of room are tried until the batch ends."""
POLL_S = 1.0
DISK_PAUSE_S = 5.0
DISK_LIMIT_S = 120.0
"""For one transaction: of the largest file all lines are checked and written in one."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    request_id: str
    body: bytes
    retry_after_s: float = 0.0


Ask = Callable[[str, bytes, Client], Awaitable[Answer]]
"""Path, body and who asks."""


class StorageFailed(Unavailable):
    code = "storage_failed"


class BatchRunner:
    """Complete state: the store, its thread, the child that parses long lines once one has come, what wakes the loop,
    the task of each batch, and the requests that may run. `client_of` finds the client of a key by its name, None where
    there is none any more."""

    def __init__(self, store: BatchStore, ask: Ask, client_of: Callable[[str], Client | None]) -> None:
        self._store, self._ask, self._client_of = store, ask, client_of
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._child = Child(lambda: start_child())
        self._closing = False
        self._wake = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(MAX_RUNNING)

    async def on_disk(self, call: Callable[..., _T], *what: Any) -> _T:
        """Runs a method of the store on its thread. Raises StorageFailed, besides what the method does."""
        try:
            async with asyncio.timeout(DISK_LIMIT_S):
                return await asyncio.get_running_loop().run_in_executor(self._thread, call, *what)
        except TimeoutError:
            raise StorageFailed(f"{FLAG}: the disk took over {DISK_LIMIT_S:g} s", retry_after_s=DISK_PAUSE_S) from None
        except (OSError, sqlite3.Error) as error:
            log.error("%s: %s", FLAG, error)
            raise StorageFailed("files and batches cannot be read or written", retry_after_s=DISK_PAUSE_S) from None

    def wake(self) -> None:
        """There is a new batch, or one to be cancelled."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled. A disk that fails is tried again after a pause: batches go on where they were."""
        try:
            while True:
                self._wake.clear()
                self._tasks = {batch_id: task for batch_id, task in self._tasks.items() if not task.done()}
                try:
                    # Those that run are among them, and so many others: those to be cancelled are the first.
                    wanted = len(self._tasks) + MAX_BATCHES
                    self._start(await self.on_disk(self._store.unfinished, wanted))
                except StorageFailed:
                    await asyncio.sleep(DISK_PAUSE_S)
                    continue
                await self._wake.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _start(self, unfinished: list[dict[str, Any]]) -> None:
        """What is not running, up to MAX_BATCHES; what only has to be ended, always."""
        for batch in unfinished:
            room = len(self._tasks) < MAX_BATCHES or batch["status"] == "cancelling"
            if room and batch["id"] not in self._tasks:
                self._tasks[batch["id"]] = task = asyncio.create_task(self._guarded(batch))
                task.add_done_callback(lambda _: self.wake())

    def close(self) -> None:
        """Once `run` has ended. A file that is being checked is checked again by the next coordinator."""
        self._closing = True
        self._child.close()  # the thread waits for it
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._child.close()  # it may just have been starting
        self._store.close()

    async def _guarded(self, batch: dict[str, Any]) -> None:
        """What goes wrong with one batch costs that batch; a failing disk costs it time."""
        try:
            try:
                await self._run_batch(batch)
            except StorageFailed:
                raise
            except Exception as error:
                message = "its input file was deleted" if isinstance(error, NotFound) else "the batch could not be run"
                if not isinstance(error, NotFound):
                    log.exception("%s failed", batch["id"])
                await self._fail(batch["id"], "internal_error", message)
        except StorageFailed:
            await asyncio.sleep(DISK_PAUSE_S)

    async def _fail(self, batch_id: str, code: str, message: str) -> None:
        """Ends it with this error, and with the answers that it has."""
        error = {"code": code, "line": None, "message": message, "param": None}
        await self.on_disk(self._store.end, batch_id, "failed", [error])

    async def _run_batch(self, batch: dict[str, Any]) -> None:
        store, batch_id, status = self._store, batch["id"], "completed"
        client = self._client_of(batch["key"])
        if batch["status"] == "cancelling":
            status = "cancelled"
        elif client is None:
            await self._fail(batch_id, "invalid_api_key", "the API key that it was made with is not known any more")
            return
        elif batch["status"] == "validating" and not await self.on_disk(self._validate, batch):
            return
        elif batch["status"] != "finalizing":
            status = await self._answer_all(batch_id, batch, replace(client, priority=MAX_PRIORITY))
        if status == "completed":
            await self.on_disk(store.set_status, batch_id, "finalizing")
        await self.on_disk(store.end, batch_id, status)
        log.info("%s %s", batch_id, status)

    def _validate(self, batch: dict[str, Any]) -> bool:
        """On the store's thread. Whether it goes on."""
        store, batch_id, errors = self._store, batch["id"], list[dict[str, Any]]()
        path = store.content(batch["owner"], batch["input_file_id"])

        def lines() -> Any:
            for found in read_lines(path, batch_id, batch["endpoint"], MAX_LINES, self._read_line):
                if isinstance(found, Line):
                    yield found
                elif len(errors) < MAX_ERRORS:
                    errors.append(found)

        store.begin(batch_id, lines())
        if not errors and not store.open_lines(batch_id, 0, 1):
            errors.append({"code": "empty_file", "line": None, "message": "the file has no requests", "param": None})
        if errors:
            store.begin(batch_id, ())
            store.set_status(batch_id, "failed", errors)
        return not errors

    def _read_line(self, text: bytes, number: int, batch_id: str, endpoint: str) -> Line | dict[str, Any]:
        """`read_line`, on the store's thread.

        Raises:
            Unavailable: the child has died, or did not answer for `PARSE_S`; or the coordinator ends.
        """
        if len(text) <= INLINE_BYTES:
            return read_line(text, number, batch_id, endpoint)
        if self._closing:
            raise Unavailable("the coordinator ends")
        child = self._child.started()
        try:
            return child.submit(read_line, text, number, batch_id, endpoint).result(PARSE_S)
        except (BrokenProcessPool, TimeoutError):
            self._child.close()  # the next long line starts another one
            raise Unavailable(f"the process that parses long lines has died or hangs, at line {number}") from None

    async def _answer_all(self, batch_id: str, batch: dict[str, Any], client: Client) -> str:
        """Asks for every line that has no answer; how the batch ends."""
        running: set[asyncio.Task[None]] = set()
        last, more = 0, True
        try:
            while more or running:
                if time.time() > batch["expires_at"]:
                    return "expired"
                if (await self.on_disk(self._store.batch, batch["owner"], batch_id))["status"] == "cancelling":
                    return "cancelled"
                if more and len(running) < MAX_RUNNING:
                    lines = await self.on_disk(self._store.open_lines, batch_id, last, MAX_RUNNING - len(running))
                    more = bool(lines)
                    for line in lines:
                        last = line.number
                        running.add(asyncio.create_task(self._answer(line, batch["endpoint"], client)))
                if running:
                    done, running = await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                    await asyncio.gather(*done)
            return "completed"
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _answer(self, line: Line, endpoint: str, client: Client) -> None:
        pause_s, most_s = RETRIES_S
        failures = 0
        while True:
            async with self._room:
                answer = await self._ask(endpoint, line.body, client)
            failures += answer.status in (500, 502)
            if answer.status not in RETRIED or failures >= MAX_FAILURES:
                break
            await asyncio.sleep(max(pause_s, min(answer.retry_after_s, most_s)))
            pause_s = min(2 * pause_s, most_s)
        await self.on_disk(self._store.answered, line, answer.status, answer.request_id, answer.body)
