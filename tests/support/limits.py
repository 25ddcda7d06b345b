"""How tests hold limits of time on a machine that is busy with other things."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType

HANG_S = 30.0
"""After this a test gives up on what should happen at once; it says nothing about speed."""

_DUE_S, _WORK_S = 0.01, 0.001


class Stall:
    """Measures, while a test waits for what has a limit, how much of that time the machine withheld from a thread.

    with Stall() as stall:
        wait_for_it()
    assert stall.took_s < stall.allows(0.5)

    A thread sleeps 10 ms and then works for 1 ms of processor time, again and again. How long it was runnable without
    a processor, as the kernel counts it, the product may have been too: that is added to the limit. On an idle machine
    it is a few ms, so the limit holds as it stands; where the kernel does not count, nothing is added. More than `MOST`
    times the limit is never allowed. Waiting for Python's lock does not count: the product's own slowness is no excuse.
    """

    MOST = 4.0

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="stall", daemon=True)
        self.began = self.ended = 0.0
        self.late_s = 0.0

    def __enter__(self) -> Stall:
        self.began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.ended = time.monotonic()
        self._over.set()
        self._thread.join()

    @property
    def took_s(self) -> float:
        return self.ended - self.began

    def allows(self, limit_s: float) -> float:
        """A limit of the product, and what the machine took."""
        return min(limit_s + self.late_s, limit_s * self.MOST)

    def _measure(self) -> None:
        before = _runnable_s()
        while not self._over.wait(_DUE_S):
            spent = time.thread_time()
            while time.thread_time() - spent < _WORK_S:
                pass
        self.late_s = _runnable_s() - before


def _runnable_s() -> float:
    """How long this thread has ever waited for a processor."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0
