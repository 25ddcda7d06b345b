"""Runs batches: their requests go through the same front as those of clients, at the lowest priority.

    validating -> in_progress -> finalizing -> completed
              \\-> failed      \\-> cancelling -> cancelled, or expired after a day

At most MAX_RUNNING requests run at once, over at most MAX_BATCHES batches, whose owners take turns. They have the
lowest priority, so clients' requests leave the queue before them. They count against the quota of the key that created
the batch. A line that is refused for lack of room or quota is retried, and one that fails with a cluster error is tried
up to MAX_FAILURES times; any other response is the line's result. While the disk fails, or is full, batches wait with
their results in memory and begin no further lines. After a restart the coordinator resumes the batches that have not
ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from baton.core.codes import ErrorCode
from baton.core.errors import NotFound
from baton.runtime.disk import DiskThread, StorageFailed
from coordinator.api_keys import MAX_PRIORITY
from coordinator.batches.store import FLAG, MAX_UNFINISHED, WINDOW_S, BatchStore, Line
from coordinator.batches.validation import Validator
from coordinator.policy.expiry import Expiry
from coordinator.policy.quotas import Client

log = logging.getLogger("baton.batches")
CONTENT = "files and batches"
MAX_RUNNING = 32
MAX_BATCHES = 16
RETRIES_S = 0.5, 30.0
"""Initial and maximum pause in seconds between two tries of a line; the pause doubles with each try."""
RETRIED = (408, 429, 500, 502, 503)
MAX_FAILURES = 5
"""Tries of a line that fail with a cluster error; refusals for lack of room are retried until the batch ends."""
POLL_S = 1.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    request_id: str
    body: bytes
    retry_after_s: float = 0.0
    ignored: str = ""
    """The names of ignored fields, as in `x-ignored-fields`."""


Ask = Callable[[str, bytes, Client], Awaitable[Answer]]
"""Path, body and client."""


class BatchRunner:
    """Complete state: the store and its thread, the validation of input files, the event that wakes the loop, the task
    of each batch, when each expires, and the semaphore of running requests. `client_of` returns the client of a key by
    its name, None if that key no longer exists."""

    def __init__(
        self, store: BatchStore, ask: Ask, client_of: Callable[[str], Client | None], *, strict_fields: bool = False
    ) -> None:
        self._store, self._ask, self._client_of = store, ask, client_of
        self._disk = DiskThread(FLAG, CONTENT)
        self._validator = Validator(store, self._disk, strict_fields=strict_fields)
        self._wake = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._expiry = Expiry(WINDOW_S)
        self._room = asyncio.Semaphore(MAX_RUNNING)

    async def on_disk(self, call: Callable[..., _T], *what: Any) -> _T:
        """Runs a method of the store on its thread. Raises StorageFailed, besides what the method raises."""
        return await self._disk.run(call, *what)

    def storage_failed(self, error: OSError) -> StorageFailed:
        """Returns the error for a client whose file could not be written."""
        return self._disk.failed(error)

    def add(self, batch: dict[str, Any]) -> None:
        """Notes when a new batch expires, and wakes the loop."""
        self._note_expiry(batch)
        self.wake()

    def wake(self) -> None:
        """Wakes the loop: there is a batch to be started or cancelled."""
        self._wake.set()

    def _note_expiry(self, batch: dict[str, Any]) -> None:
        self._expiry.add(batch["id"], batch["expires_at"], time.time(), asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Runs until cancelled."""
        most = MAX_UNFINISHED  # of an earlier run: when each of them expires is noted now
        try:
            while True:
                self._wake.clear()
                self._tasks = {batch_id: task for batch_id, task in self._tasks.items() if not task.done()}
                self._start(await self._disk.retry(self._store.unfinished, most or len(self._tasks) + MAX_BATCHES))
                most = 0  # from now on the running batches and MAX_BATCHES others; those to be cancelled come first
                await self._wake.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _start(self, unfinished: list[dict[str, Any]]) -> None:
        """Starts batches that are not running, up to MAX_BATCHES; those to be cancelled are always started."""
        for batch in unfinished:
            self._note_expiry(batch)
            room = len(self._tasks) < MAX_BATCHES or batch["status"] == "cancelling"
            if room and batch["id"] not in self._tasks:
                self._tasks[batch["id"]] = task = asyncio.create_task(self._guarded(batch))
                task.add_done_callback(lambda _: self.wake())

    def close(self) -> None:
        """Called after `run` has ended. The next coordinator restarts a validation that this interrupts."""
        self._validator.close()
        self._disk.close(drop_pending=True)
        self._store.close()

    async def _guarded(self, batch: dict[str, Any]) -> None:
        """Runs a batch so that an error fails only this batch."""
        try:
            await self._run_batch(batch)
        except Exception as error:
            message = "its input file was deleted" if isinstance(error, NotFound) else "the batch could not be run"
            if not isinstance(error, NotFound):
                log.exception("%s failed", batch["id"])
            await self._fail(batch["id"], ErrorCode.INTERNAL_ERROR, message)

    async def _fail(self, batch_id: str, code: str, message: str) -> None:
        """Ends a batch with this error, and with the responses that it has."""
        error = {"code": code, "line": None, "message": message, "param": None}
        await self._end(batch_id, "failed", [error])

    async def _end(self, batch_id: str, status: str, errors: list[dict[str, Any]] | None = None) -> None:
        await self._disk.retry(self._store.end, batch_id, status, errors)
        self._expiry.forget(batch_id)

    async def _run_batch(self, batch: dict[str, Any]) -> None:
        store, batch_id, status = self._store, batch["id"], "completed"
        client = self._client_of(batch["key"])
        if batch["status"] == "cancelling":
            status = "cancelled"
        elif client is None:
            await self._fail(batch_id, "invalid_api_key", "the API key that created the batch no longer exists")
            return
        elif batch["status"] == "validating" and not await self._validator.validate(batch):
            self._expiry.forget(batch_id)
            return
        elif batch["status"] != "finalizing":
            status = await self._answer_all(batch_id, batch, replace(client, priority=MAX_PRIORITY))
        if status == "completed":
            await self._disk.retry(store.set_status, batch_id, "finalizing")
        await self._end(batch_id, status)
        log.info("%s %s", batch_id, status)

    async def _answer_all(self, batch_id: str, batch: dict[str, Any], client: Client) -> str:
        """Runs every line that has no response; returns the batch's final status."""
        running: set[asyncio.Task[tuple[Line, Answer]]] = set()
        last, more, status = 0, True, ""
        try:
            while more or running:
                if status := await self._interruption(batch_id, batch["owner"]):
                    break
                if more and len(running) < MAX_RUNNING:
                    lines = await self._disk.retry(self._store.open_lines, batch_id, last, MAX_RUNNING - len(running))
                    more = bool(lines)
                    for line in lines:
                        last = line.number
                        running.add(asyncio.create_task(self._answer(line, batch["endpoint"], client)))
                if running:
                    done, running = await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                    await self._keep(done)
            await _cancel(running)
            await self._keep(running)
            return status or "completed"
        finally:
            await _cancel(running)

    async def _interruption(self, batch_id: str, owner: str) -> str:
        """Returns the final status of a batch that has expired or is to be cancelled, empty for any other."""
        if self._expiry.has_expired(batch_id, asyncio.get_running_loop().time()):
            return "expired"
        batch = await self._disk.retry(self._store.batch, owner, batch_id)
        return "cancelled" if batch["status"] == "cancelling" else ""

    async def _keep(self, ended: Collection[asyncio.Task[tuple[Line, Answer]]]) -> None:
        """Stores the responses of lines; raises the first error among them after that."""
        for task in ended:
            if not task.cancelled() and task.exception() is None:
                line, answer = task.result()
                what = answer.status, answer.request_id, answer.body, answer.ignored
                await self._disk.retry(self._store.answered, line, *what)
        for task in ended:
            if not task.cancelled():
                task.result()

    async def _answer(self, line: Line, endpoint: str, client: Client) -> tuple[Line, Answer]:
        pause_s, most_s = RETRIES_S
        failures = 0
        while True:
            async with self._room:
                answer = await self._ask(endpoint, line.body, client)
            failures += answer.status in (500, 502)
            if answer.status not in RETRIED or failures >= MAX_FAILURES:
                return line, answer
            await asyncio.sleep(max(pause_s, min(answer.retry_after_s, most_s)))
            pause_s = min(2 * pause_s, most_s)


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
