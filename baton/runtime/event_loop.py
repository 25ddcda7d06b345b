"""Keeps the event loop of a process free: while it is blocked all streams wait, and a lease may end. `LoopWatch`
measures how long it is blocked, and by what; `collect_when_grown` decides when full garbage collections run;
`off_loop` builds large messages on a thread. `report_violations` is for errors that no task awaits.

The loop stores the time in `_beat` every half of the limit; a thread reads it as often. If the loop is late by more
than the limit, the thread records the stack of the loop's thread and, after the loop's next beat, how long it was
blocked; it logs both, at most once every LOG_EVERY_S. Native code that holds the GIL blocks this thread too:
the stack is then that of the code after it.

Python runs a full collection whenever the long-lived objects have grown by a quarter; with 10,000 open streams that
takes 1.3 s, repeatedly while they open, and no client gets a token meanwhile. So here a full collection runs when
memory has grown: by a little while no request is in flight, otherwise by as much as was in use after the last one. A
closed connection leaves a cycle (some 2 KB) that only a full collection finds: between two of them at most about 100 MB
accumulates, or as much as is in use.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from baton.core.errors import InvariantError

log = logging.getLogger("baton.loop")
LIMIT_S = 0.05
LOG_EVERY_S = 10.0
_FRAMES = 3


def report_violations(fail: Callable[[InvariantError], None]) -> None:
    """Calls `fail`, which ends the process, for an InvariantError of a callback of the running loop, or of a task that
    nobody awaits; asyncio would only log it. Others are logged as before."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(error := context.get("exception"), InvariantError):
            fail(error)
        loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(handle)


class LoopWatch:
    """Logs when callbacks hold up an event loop for more than `limit_s`."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s, self._beat_s = limit_s, limit_s / 2
        self.stalls = 0  # how often the loop was late
        self.longest_s = 0.0
        self._beat = time.monotonic()  # time of the loop's last beat
        self._logged_at = -LOG_EVERY_S
        self._ended = threading.Event()
        self._loop_thread = threading.get_ident()

    async def run(self) -> None:
        """Runs until cancelled, in the loop that is watched."""
        self._loop_thread, self._beat = threading.get_ident(), time.monotonic()
        thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        thread.start()
        try:
            while True:
                await asyncio.sleep(self._beat_s)
                self._beat = time.monotonic()
        finally:
            self._ended.set()

    def as_json(self) -> dict[str, object]:
        return {"loop_stalls": self.stalls, "loop_longest_stall_ms": round(self.longest_s * 1000, 1)}

    def _watch(self) -> None:
        where, late_since = "", 0.0
        while not self._ended.wait(self._beat_s):
            beat = self._beat
            if where and beat != late_since:
                self._count(beat - late_since - self._beat_s, where)
                where = ""
            if not where and time.monotonic() - beat > self._limit_s + self._beat_s:
                where, late_since = describe(sys._current_frames().get(self._loop_thread)), beat

    def _count(self, held_s: float, where: str) -> None:
        self.stalls += 1
        self.longest_s = max(self.longest_s, held_s)
        if time.monotonic() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = time.monotonic()
            log.warning("the event loop was blocked for %.0f ms at %s", held_s * 1000, where)


def describe(frame: FrameType | None) -> str:
    """Returns the innermost frames of a stack on one line."""
    stack = traceback.extract_stack(frame)[-_FRAMES:] if frame is not None else []
    return " < ".join(f"{f.name} ({f.filename.rpartition('/')[2]}:{f.lineno})" for f in reversed(stack)) or "?"


POLL_S = 1.0
IDLE_BLOCKS = 50_000  # of Python's allocator, about 60 bytes each
BUSY_BLOCKS = 1_500_000
_NEVER = 1_000_000_000


async def collect_when_grown(in_flight: Callable[[], int]) -> None:
    """Runs until cancelled; Python's own full collections are disabled meanwhile."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    known = sys.getallocatedblocks()
    try:
        while True:
            await asyncio.sleep(POLL_S)
            blocks = sys.getallocatedblocks()
            known = min(known, blocks)
            if blocks - known >= (max(BUSY_BLOCKS, known) if in_flight() else IDLE_BLOCKS):
                gc.collect()
                known = sys.getallocatedblocks()
    finally:
        gc.set_threshold(young, middle, old)


async def off_loop(large: bool, build: Callable[..., Any], *args: object) -> Any:
    """Returns `build(*args)`, run on a thread if it is `large`: that is no faster, but yields to the loop within the
    switch interval (baton.runtime.process.SWITCH_INTERVAL_S)."""
    return await asyncio.to_thread(build, *args) if large else build(*args)
