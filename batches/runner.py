"""Runs batches: sends each line to the coordinator's public API, for the API key that created the batch.

    validating -> in_progress -> finalizing -> completed
              \\-> failed      \\-> cancelling -> cancelled, or expired after a day

At most MAX_RUNNING requests run at once, over at most MAX_BATCHES batches, whose owners take turns. The coordinator
gives them the lowest priority, so clients' requests leave the queue before them, and counts them against the quota of
the key. A line that is refused for lack of room or quota is retried, and one that fails with a cluster error is tried
up to MAX_FAILURES times; any other response is the line's result. While the coordinator is away, the disk fails, or is
full, batches wait with their results in memory and begin no further lines. After a restart the batches that have not
ended are resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

from batches.expiry import Expiry
from batches.public_api import Answer, KeyRemoved
from batches.store import FLAG, MAX_UNFINISHED, WINDOW_S, BatchStore, Line
from batches.validation import Validator
from baton.core.codes import ErrorCode
from baton.core.errors import NotFound
from baton.runtime.disk import DiskThread, StorageFailed

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


Ask = Callable[[str, bytes, str], Awaitable[Answer]]
"""Path, body and name of the API key."""


class BatchRunner:
    """Runs batches: one task each, whose requests share MAX_RUNNING places."""

    def __init__(self, store: BatchStore, ask: Ask, *, strict_fields: bool = False) -> None:
        self._store, self._ask = store, ask
        self._disk = DiskThread(FLAG, CONTENT)
        self._validator = Validator(store, self._disk, strict_fields=strict_fields)
        self._wake = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._expiry = Expiry(WINDOW_S)
        self._room = asyncio.Semaphore(MAX_RUNNING)
        self._sending: set[str] = set()  # batches that send lines
        self._draining = asyncio.Event()  # no line is sent any more
        # Since the start of the process: lines that have their response, by status, and further tries of lines.
        self._answered: Counter[int] = Counter()
        self._retries = self._running = 0

    async def on_disk(self, call: Callable[..., _T], *args: Any) -> _T:
        """Runs a method of the store on its thread. Raises StorageFailed, besides what the method raises."""
        return await self._disk.run(call, *args)

    async def figures(self) -> dict[str, Any]:
        """Returns what `/metrics` of the coordinator shows. Raises StorageFailed."""
        answered = {str(status): count for status, count in self._answered.items()}
        lines = {"running": self._running, "retries": self._retries, "answered": answered}
        return {"lines": lines, **await self.on_disk(self._store.figures)}

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
        limit = MAX_UNFINISHED  # of an earlier run: when each of them expires is noted now
        try:
            while not self._draining.is_set():
                self._wake.clear()
                self._tasks = {batch_id: task for batch_id, task in self._tasks.items() if not task.done()}
                self._start(await self._disk.retry(self._store.unfinished, limit or len(self._tasks) + MAX_BATCHES))
                limit = 0  # from now on the running batches and MAX_BATCHES others; those to be cancelled come first
                await self._wake.wait()
            await asyncio.Event().wait()  # until cancelled
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def drain(self, timeout_s: float) -> None:
        """Sends no further lines, and waits until those that run have their responses on disk."""
        self._draining.set()
        self.wake()
        if sending := [self._tasks[batch_id] for batch_id in self._sending]:
            await asyncio.wait(sending, timeout=timeout_s)

    def _start(self, unfinished: list[dict[str, Any]]) -> None:
        """Starts batches that are not running, up to MAX_BATCHES; those to be cancelled are always started."""
        for batch in unfinished:
            self._note_expiry(batch)
            room = len(self._tasks) < MAX_BATCHES or batch["status"] == "cancelling"
            if room and batch["id"] not in self._tasks:
                self._tasks[batch["id"]] = task = asyncio.create_task(self._guarded(batch))
                task.add_done_callback(lambda _: self.wake())

    def close(self) -> None:
        """Called after `run` has ended. The next run restarts a validation that this interrupts."""
        self._validator.close()
        self._disk.close(drop_pending=True)
        self._store.close()

    async def _guarded(self, batch: dict[str, Any]) -> None:
        """Runs a batch so that an error fails only this batch."""
        try:
            await self._run_batch(batch)
        except KeyRemoved:
            message = "the API key that created the batch no longer exists"
            await self._fail(batch["id"], "invalid_api_key", message)
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
        if batch["status"] == "cancelling":
            status = "cancelled"
        elif batch["status"] == "validating" and not await self._validator.validate(batch):
            self._expiry.forget(batch_id)
            return
        elif batch["status"] != "finalizing":
            status = await self._answer_all(batch_id, batch)
            if not status:
                return
        if status == "completed":
            await self._disk.retry(store.set_status, batch_id, "finalizing")
        await self._end(batch_id, status)
        log.info("%s %s", batch_id, status)

    async def _answer_all(self, batch_id: str, batch: dict[str, Any]) -> str:
        """Runs every line that has no response; returns the batch's final status, empty if it drains before that."""
        running: set[asyncio.Task[tuple[Line, Answer | None]]] = set()
        last, more, status = 0, True, ""
        self._sending.add(batch_id)
        try:
            while running or (more and not self._draining.is_set()):
                if status := await self._interruption(batch_id, batch["owner"]):
                    break
                if more and len(running) < MAX_RUNNING and not self._draining.is_set():
                    lines = await self._disk.retry(self._store.open_lines, batch_id, last, MAX_RUNNING - len(running))
                    more = bool(lines)
                    for line in lines:
                        last = line.number
                        running.add(asyncio.create_task(self._answer(line, batch["endpoint"], batch["key"])))
                if running:
                    done, running = await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                    more |= not await self._keep(done)
            await _cancel(running)
            await self._keep(running)
            return status or ("" if more else "completed")
        finally:
            self._sending.discard(batch_id)
            await _cancel(running)

    async def _interruption(self, batch_id: str, owner: str) -> str:
        """Returns the final status of a batch that has expired or is to be cancelled, empty for any other."""
        if self._expiry.has_expired(batch_id, asyncio.get_running_loop().time()):
            return "expired"
        batch = await self._disk.retry(self._store.batch, owner, batch_id)
        return "cancelled" if batch["status"] == "cancelling" else ""

    async def _keep(self, ended: Collection[asyncio.Task[tuple[Line, Answer | None]]]) -> bool:
        """Stores the responses of lines; raises the first error among them after that. Returns whether all have one."""
        complete = True
        for task in ended:
            if not task.cancelled() and task.exception() is None:
                line, answer = task.result()
                if answer is None:
                    complete = False
                    continue
                outcome = answer.status, answer.request_id, answer.body, answer.ignored
                await self._disk.retry(self._store.answered, line, *outcome)
        for task in ended:
            if not task.cancelled():
                task.result()
        return complete

    async def _answer(self, line: Line, endpoint: str, key: str) -> tuple[Line, Answer | None]:
        """Returns the response of a line, None if it drains before there is one. Raises KeyRemoved."""
        pause_s, most_s = RETRIES_S
        failures = 0
        while True:
            async with self._room:
                if self._draining.is_set():
                    return line, None
                self._running += 1
                try:
                    answer = await self._ask(endpoint, line.body, key)
                finally:
                    self._running -= 1
            failures += answer.status in (500, 502)
            if answer.status not in RETRIED or failures >= MAX_FAILURES:
                self._answered[answer.status] += 1
                return line, answer
            self._retries += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(pause_s, min(answer.retry_after_s, most_s))):
                    await self._draining.wait()
            pause_s = min(2 * pause_s, most_s)


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
