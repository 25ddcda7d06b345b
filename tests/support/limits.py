"""How tests hold limits of time on a machine that is busy with other things."""

from __future__ import annotations

import subprocess
import sys
import time
from types import TracebackType

HANG_S = 30.0
"""After this a test gives up on what should happen at once; it says nothing about speed."""

_MEASURE = """
import select, sys, time
late_s, over = 0.0, False
print(flush=True)
while not over:
    began = time.monotonic()
    over = bool(select.select([sys.stdin], [], [], 0.01)[0])
    slept = time.monotonic()
    spent = time.thread_time()
    while time.thread_time() - spent < 0.001:
        pass
    lost = max(0.0, slept - began - 0.01) + (time.monotonic() - slept) - 0.001
    late_s += lost if lost > 0.001 else 0.0
print(late_s)
"""


class Stall:
    """Measures, while a test waits for what has a limit, how much of that time the machine withheld from a process.

    with Stall() as stall:
        wait_for_it()
    assert stall.took_s < stall.allows(0.5)

    A child process sleeps 10 ms and then works for 1 ms of processor time, again and again. What that takes beyond
    11 ms, because the processors are busy or the whole machine pauses, is added to the limit; delays below 1 ms, which
    an idle machine has too, are not. More than `MOST` times the limit is never allowed. The child shares no
    interpreter with the test: the product's own slowness is no excuse.
    """

    MOST = 4.0

    def __init__(self) -> None:
        self.began = self.ended = 0.0
        self.late_s = 0.0

    def __enter__(self) -> Stall:
        command = [sys.executable, "-I", "-S", "-c", _MEASURE]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        self._child.stdout.readline()  # it measures from here
        self.began = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.ended = time.monotonic()
        printed, _ = self._child.communicate(timeout=HANG_S)  # the end of its input ends it
        self.late_s = float(printed)

    @property
    def took_s(self) -> float:
        return self.ended - self.began

    def allows(self, limit_s: float) -> float:
        """A limit of the product, and what the machine took."""
        return min(limit_s + self.late_s, limit_s * self.MOST)
