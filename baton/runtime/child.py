"""A child process for work that may hold the GIL, crash or never end: it ends with its parent, or is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

from baton.runtime.process import die_with_parent

NICE = 10
"""Large bodies and grammars yield to the streams of other clients when CPU time is scarce."""


def start_child(prepare: Callable[..., None] | None = None, *arguments: Any, nice: int = NICE) -> Executor:
    """An executor of one process, which calls `prepare(*arguments)` first."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, initializer=_begin, initargs=(os.getpid(), nice, prepare, arguments))


class ChildExecutor:
    """A slot for a child. State: its executor, from the first work item until it is killed; the next one starts
    another."""

    def __init__(self, start: Callable[[], Executor]) -> None:
        self._start = start
        self.executor: Executor | None = None

    def started(self) -> Executor:
        executor = self.executor
        if executor is None:
            executor = self.executor = self._start()
        return executor

    def close(self) -> None:
        """Kills the child, even if it is busy."""
        executor, self.executor = self.executor, None
        if executor is not None:
            kill_child(executor)


def kill_child(executor: Executor) -> None:
    """Kills a child, even if it is busy. Callers that wait for it get BrokenProcessPool."""
    processes = list((getattr(executor, "_processes", None) or {}).values())
    executor.shutdown(wait=False)
    for process in processes:
        process.kill()


def ready() -> None:
    """An empty work item: it completes once the child has started."""


def _begin(parent: int, nice: int, prepare: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    die_with_parent(parent)
    os.nice(nice)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if prepare is not None:
        prepare(*arguments)
