"""Measures how long the event loop of a process is blocked, and by what: all streams wait then, and a lease may end.

The loop stores the time in `_beat` every half of the limit; a thread reads it as often. If the loop is late by more
than the limit, the thread records the stack of the loop's thread and, after the loop's next beat, how long it was
blocked; it logs both, at most once every LOG_EVERY_S. Native code that holds the GIL blocks this thread too:
the stack is then that of the code after it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from types import FrameType

log = logging.getLogger("baton.loop")
LIMIT_S = 0.05
LOG_EVERY_S = 10.0
_FRAMES = 3


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
