"""Processes that share the cores of one host, in virtual time.

All tasks that are ready on a core get equal shares of it (processor sharing), which is what a fair scheduler does over
times longer than its slice. A task on several cores proceeds with the smallest of its shares: its threads wait for each
other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sim.loop import Loop, Timer, cancel


class _Task:
    __slots__ = ("cores", "done", "left_s", "rate")

    def __init__(self, left_s: float, cores: tuple[int, ...], done: Callable[[], object]) -> None:
        self.left_s, self.cores, self.done, self.rate = left_s, cores, done, 1.0


class Host:
    """Cores that threads share: tasks on one core divide its time."""

    def __init__(self, loop: Loop, cores: int) -> None:
        self._loop = loop
        self._tasks: list[_Task] = []
        self._load = [0] * cores  # tasks on each
        self._at = 0.0  # when the work left in each task was last updated
        self._timer: Timer | None = None  # of the next end

    def run(self, seconds: float, cores: tuple[int, ...], done: Callable[[], object]) -> None:
        """Computes for `seconds`, as they would be without other tasks, and calls `done`. Without `cores` the task is
        on the least loaded core."""
        self._advance()
        self._tasks.append(_Task(seconds, cores or (self._load.index(min(self._load)),), done))
        for core in self._tasks[-1].cores:
            self._load[core] += 1
        self._schedule()

    def _advance(self) -> None:
        passed, self._at = self._loop.now - self._at, self._loop.now
        if passed > 0.0:
            for task in self._tasks:
                task.left_s -= passed * task.rate

    def _schedule(self) -> None:
        cancel(self._timer)
        self._timer = None
        if not self._tasks:
            return
        load, soonest = self._load, float("inf")
        for task in self._tasks:
            task.rate = 1.0 / max(load[core] for core in task.cores)
            soonest = min(soonest, task.left_s / task.rate)
        self._timer = self._loop.later(soonest, self._ended)

    def _ended(self) -> None:
        self._advance()
        # Rounding may leave a task a little work: less than any that counts.
        ended = [task for task in self._tasks if task.left_s <= 1e-12]
        self._tasks = [task for task in self._tasks if task.left_s > 1e-12]
        for task in ended:
            for core in task.cores:
                self._load[core] -= 1
        self._schedule()
        for task in ended:
            task.done()


class Thread:
    """One thread of a process, such as an event loop: its jobs are done one after the other. `busy_s` is the work
    done."""

    def __init__(self, loop: Loop, host: Host | None, cores: tuple[int, ...] = ()) -> None:
        """Without a `host` the thread has a core of its own; without `cores` each job is on the least loaded one."""
        self._loop, self._host, self._cores = loop, host, cores
        self._waiting: deque[tuple[float, Callable[[], object]]] = deque()
        self._busy = False
        self.busy_s = 0.0

    def run(self, seconds: float, done: Callable[[], object]) -> None:
        if seconds <= 0.0 and not self._busy:
            done()
            return
        self._waiting.append((seconds, done))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        if not self._waiting:
            return
        seconds, done = self._waiting.popleft()
        self._busy = True
        self.busy_s += seconds
        if self._host is None:
            self._loop.later(seconds, self._ended, done)
        else:
            self._host.run(seconds, self._cores, lambda: self._ended(done))

    def _ended(self, done: Callable[[], object]) -> None:
        self._busy = False
        done()
        if not self._busy:
            self._next()
