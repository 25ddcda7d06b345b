"""The probes that a doctor has started on its own host: which of them will say nothing more, and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from launch.child import Child
from launch.failure import describe_exit
from launch.probes import gone_key


class LocalProbes:
    """Complete state: the probes by key, since when each is stopped, and those that were told of. A probe that is
    stopped (SIGSTOP) counts as gone after `limit_s`."""

    def __init__(self, running: Mapping[str, Child], limit_s: float) -> None:
        self._running, self._limit_s = running, limit_s
        self._stopped: dict[str, float] = {}
        self._told: set[str] = set()

    def tell_gone(self, put: Callable[[str, str], object]) -> None:
        """Puts the reason of each that is newly gone on the board. Raises what `put` raises; it is told again then."""
        for key, child in self._running.items():
            if key not in self._told and (why := self._gone(key, child)):
                put(gone_key(key), why)
                self._told.add(key)

    def _gone(self, key: str, child: Child) -> str:
        code = child.poll()
        if code is not None:
            last = next((line.strip() for line in reversed(child.tail()) if line.strip()), "")
            return f"has ended ({describe_exit(code)})" + (f": {last}" if last else "; it wrote nothing")
        if not _is_stopped(child.pid):
            self._stopped.pop(key, None)
            return ""
        since = self._stopped.setdefault(key, time.monotonic())
        return f"has been stopped for {self._limit_s:g} s" if time.monotonic() - since >= self._limit_s else ""


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
