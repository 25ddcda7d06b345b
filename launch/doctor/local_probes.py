"""The probes of one host: starts one process for each rank, reports those that will leave no more results, ends all."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launch.child import Child, ChildSpec
from launch.doctor.tasks import Task, exited_key
from launch.failure import describe_exit

PROBE = (sys.executable, "-m", "launch.doctor.probe")


class LocalProbes:
    """Complete state: the processes by probe, since when each is stopped, and those that were reported. A probe that is
    stopped (SIGSTOP) counts as exited after `limit_s`. `directory` takes their tasks and logs; `board` is what
    `BoardClient` takes."""

    def __init__(
        self,
        tasks: Sequence[Task],
        board: tuple[str, int, str],
        directory: Path,
        limit_s: float,
        program: tuple[str, ...] = PROBE,
    ) -> None:
        self._limit_s = limit_s
        self._running: dict[str, Child] = {}
        self._stopped: dict[str, float] = {}
        self._reported: set[str] = set()
        try:
            for task in tasks:
                path, key = directory / f"{task.me.key}.json", task.me.key
                path.write_text(json.dumps({"task": task.as_json(), "board": board}))
                self._running[key] = Child(ChildSpec(key, (*program, str(path)), directory / f"{key}.log"))
        except BaseException:
            self.close()
            raise

    def report_exited(self, put: Callable[[str, str], object]) -> None:
        """Puts the reason of each that has newly exited on the board. Raises what `put` raises, and reports it again
        at the next call."""
        for key, child in self._running.items():
            if key not in self._reported and (reason := self._exited(key, child)):
                put(exited_key(key), reason)
                self._reported.add(key)

    def close(self) -> None:
        for child in self._running.values():
            child.kill()

    def _exited(self, key: str, child: Child) -> str:
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
