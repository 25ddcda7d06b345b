"""The thread that computes a worker's steps: a plan goes in, its outcome comes back to the event loop.

A worker has hundreds of steps a second. An executor would make two futures, a condition, a waiter and a timer for each;
here a step is one entry of a queue, one future and one call into the loop, and its limit is looked after by somebody
who comes by anyway.

With an engine that launches, a step is two entries: one that launches it, and behind that of the next step, if there is
one, the other that waits for it. So a device has its next step before the host has the result of the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from baton.core.errors import InvariantError
from baton.core.step import StepOutcome, StepPlan

STEP_LIMIT_S = 300.0  # a step that takes longer hangs: the process ends and its supervisor starts another

_Out = asyncio.Future[StepOutcome]
Step = Callable[[StepPlan], StepOutcome]


class Launcher(Protocol):
    """An engine whose steps are launched, and collected in that order, on one thread."""

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepOutcome: ...


class StepThread:
    """Complete state: the queue to the thread, the steps that are out with their futures and beginnings, oldest first,
    when the last one ended, and `busy_s`, the seconds that the thread has computed or waited for its device."""

    def __init__(self, step: Step, launcher: Launcher | None = None) -> None:
        """To be made, and used, where an event loop runs. `step`, or the `launcher` in its place, is called on the
        thread alone."""
        self._step, self._launcher = step, launcher
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[tuple[Callable[[], StepOutcome | None], _Out | None] | None]
        self._work = queue.SimpleQueue()
        self._out: deque[tuple[StepPlan, _Out, float]] = deque()
        self._ended_at = float("-inf")
        self.busy_s = 0.0
        threading.Thread(target=self._run, name="compute", daemon=True).start()

    def __len__(self) -> int:
        """Steps that are out."""
        return len(self._out)

    @property
    def full(self) -> bool:
        """Whether no further step can be begun before one is collected."""
        return len(self._out) >= (1 if self._launcher is None else 2)

    def begin(self, plan: StepPlan) -> None:
        """Hands a step to the thread; does not wait."""
        future: _Out = self._loop.create_future()
        self._out.append((plan, future, time.monotonic()))
        if self._launcher is None:
            self._work.put((partial(self._step, plan), future))
        else:
            self._work.put((partial(self._launcher.launch, plan), None))

    async def collect(self) -> StepOutcome:
        """Of the oldest step that is out.

        Raises:
            InvariantError: the step has not ended in STEP_LIMIT_S, as `watch` found.
            Exception: what the step raised.
        """
        _, future, _ = self._out[0]
        if self._launcher is not None:
            self._work.put((self._launcher.collect, future))
        try:
            return await future  # ended by the thread, or by `watch`
        finally:
            self._out.popleft()
            self._ended_at = time.monotonic()

    def watch(self, now: float) -> None:
        """To be called every now and then: gives up a step that hangs."""
        if not self._out:
            return
        plan, future, began_at = self._out[0]
        if now - max(began_at, self._ended_at) <= STEP_LIMIT_S:
            return
        what = f"step {plan.step_id} of {len(plan.rows)} rows has not ended in {STEP_LIMIT_S:g} s"
        _end(future, None, InvariantError(what))

    def close(self) -> None:
        """The thread ends behind the step that it computes."""
        self._work.put(None)

    def _run(self) -> None:
        failed: BaseException | None = None  # in a launch: raised when that step is collected
        while (item := self._work.get()) is not None:  # until `close`
            work, future = item
            outcome, error = None, failed
            if failed is None:
                began = time.perf_counter()
                try:
                    outcome = work()
                except BaseException as e:
                    error = e
                self.busy_s += time.perf_counter() - began
            if future is None:
                failed = error
                continue
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(_end, future, outcome, error)


def _end(future: _Out, outcome: StepOutcome | None, error: BaseException | None) -> None:
    if future.done():  # cancelled, or given up
        return
    if outcome is not None:
        future.set_result(outcome)
    else:
        future.set_exception(error or InvariantError("a step without an outcome"))
