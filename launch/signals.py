"""Signals as events to wait for: the launcher sleeps until a child ends, a signal arrives, or a timeout expires."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from types import FrameType
from typing import Any

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """While open, SIGINT, SIGTERM and SIGHUP only increment `stops` (`last` is the latest), and SIGCHLD ends a wait.
    For the main thread only.

    SIGHUP stays ignored if it was (nohup); SIGINT does not, since a shell ignores it for commands started with `&`.
    """

    def __init__(self) -> None:
        self.stops = self.last = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*_STOPPING, signal.SIGCHLD):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    def wait(self, timeout_s: float) -> None:
        """Returns after any signal, or after `timeout_s`."""
        select.select([self._reader], [], [], max(0.0, timeout_s))
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(512):
                pass

    def _received(self, number: int, frame: FrameType | None) -> None:
        if number in _STOPPING:
            self.stops, self.last = self.stops + 1, number
