"""Runs batches: their requests go through the same front as those of clients, behind all of these.

    validating -> in_progress -> finalizing -> completed
              \\-> failed      \\-> cancelling -> cancelled, or expired after a day

MAX_RUNNING requests at once, of all batches in turn, with the lowest priority there is: a client's request never waits
in the queue behind one of them. A refusal for want of room or quota is tried again; any other answer is the
line's answer. A coordinator that starts goes on with the batches that had not ended.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.core.errors import NotFound
from coordinator.api_keys import MAX_PRIORITY
from coordinator.batches.store import BatchStore, Line, read_lines
from coordinator.policy.quotas import Client

log = logging.getLogger("baton.batches")
MAX_RUNNING = 32
MAX_BATCHES = 16
MAX_LINES = 50_000
MAX_ERRORS = 20
RETRIES_S = 0.5, 30.0
"""Between two tries of a line that found no room: doubled with each, up to the second."""
RETRIED = (408, 429, 500, 502, 503)
MAX_FAILURES = 5
"""Tries of a line that ended with an error of the cluster; refusals for want of room are tried until the batch ends."""
POLL_S = 1.0
DISK_PAUSE_S = 5.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    request_id: str
    body: bytes
    retry_after_s: float = 0.0


Ask = Callable[[str, bytes, Client], Awaitable[Answer]]
"""Path, body and who asks."""


class BatchRunner:
    """Complete state: the store, its thread, what wakes the loop, the task of each batch, and the requests that may
    run."""

    def __init__(self, store: BatchStore, ask: Ask) -> None:
        self._store, self._ask = store, ask
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._wake = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(MAX_RUNNING)

    async def on_disk(self, call: Callable[..., _T], *what: Any) -> _T:
        """Runs a method of the store on its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *what)

    def wake(self) -> None:
        """There is a new batch, or one to be cancelled."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._wake.clear()
                self._tasks = {batch_id: task for batch_id, task in self._tasks.items() if not task.done()}
                for batch in await self.on_disk(self._store.unfinished):
                    if batch["id"] not in self._tasks and len(self._tasks) < MAX_BATCHES:
                        self._tasks[batch["id"]] = task = asyncio.create_task(self._guarded(batch))
                        task.add_done_callback(lambda _: self.wake())
                await self._wake.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._store.close()

    async def _guarded(self, batch: dict[str, Any]) -> None:
        """What goes wrong with one batch costs that batch."""
        try:
            await self._run_batch(batch)
        except Exception as error:
            log.exception("%s failed", batch["id"])
            what = {"code": "internal_error", "line": None, "message": "the batch could not be run", "param": None}
            if isinstance(error, OSError | sqlite3.Error):
                what["message"] = "its files could not be read or written"
                await asyncio.sleep(
                    DISK_PAUSE_S
                )  # it may be looked at again at once, where this cannot be written either
            elif isinstance(error, NotFound):
                what["message"] = "its input file was deleted"
            await self.on_disk(self._store.set_status, batch["id"], "failed", [what])

    async def _run_batch(self, batch: dict[str, Any]) -> None:
        store, batch_id = self._store, batch["id"]
        if batch["status"] == "validating" and not await self.on_disk(self._validate, batch):
            return
        status = "completed"
        if batch["status"] != "finalizing":
            client = Client(batch["owner"], batch["owner"], max(batch["priority"], MAX_PRIORITY))
            status = await self._answer_all(batch_id, batch, client)
        if status == "completed":
            await self.on_disk(store.set_status, batch_id, "finalizing")
        await self.on_disk(store.end, batch_id, status)
        log.info("%s %s", batch_id, status)

    def _validate(self, batch: dict[str, Any]) -> bool:
        """On the store's thread. Whether it goes on."""
        store, batch_id, errors = self._store, batch["id"], list[dict[str, Any]]()
        path = store.content(batch["owner"], batch["input_file_id"])

        def lines() -> Any:
            for found in read_lines(path, batch_id, batch["endpoint"], MAX_LINES):
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

    async def _answer_all(self, batch_id: str, batch: dict[str, Any], client: Client) -> str:
        """Asks for every line that has no answer; how the batch ends."""
        running: set[asyncio.Task[None]] = set()
        last, more = 0, True
        try:
            while more or running:
                if more and len(running) < MAX_RUNNING:
                    lines = await self.on_disk(self._store.open_lines, batch_id, last, MAX_RUNNING - len(running))
                    more = bool(lines)
                    for line in lines:
                        last = line.number
                        running.add(asyncio.create_task(self._answer(line, batch["endpoint"], client)))
                if running:
                    done, running = await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                if time.time() > batch["expires_at"]:
                    return "expired"
                if (await self.on_disk(self._store.batch, batch["owner"], batch_id))["status"] == "cancelling":
                    return "cancelled"
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
