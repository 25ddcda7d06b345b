"""The thread that computes a worker's steps: it receives plans, and the event loop receives the outcomes.

A worker runs hundreds of steps a second. An executor would create two futures, a condition, a waiter and a timer for
each; here a step is one queue entry, one future and one call into the loop, and the worker's periodic housekeeping
checks its time limit (`watch`).

With a launching engine a step is two queue entries: the first launches it, and the second, queued after the launch of
the next step if there is one, waits for it. So a device has its next step before the host has the previous result.
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
from baton.core.liveness import STEP_LIMIT_S
from baton.core.step import StepOutcome, StepPlan

_Out = asyncio.Future[StepOutcome]
Step = Callable[[StepPlan], StepOutcome]


class Launcher(Protocol):
    """An engine whose steps are launched, and collected in the same order, on one thread."""

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepOutcome: ...


class StepThread:
    """Computes steps, one after the other, on a thread of its own."""

    def __init__(self, step: Step, launcher: Launcher | None = None) -> None:
        """Must be created and used in a running event loop. `step`, or the `launcher` in its place, is called only on
        the thread."""
        self._step, self._launcher = step, launcher
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[tuple[Callable[[], StepOutcome | None], _Out | None] | None]
        self._work = queue.SimpleQueue()
        self._out: deque[tuple[StepPlan, _Out, float]] = deque()  # in flight, with start times; oldest first
        self._ended_at = float("-inf")  # of the last step
        self.busy_s = 0.0  # that the thread has computed or waited for its device
        threading.Thread(target=self._run, name="compute", daemon=True).start()

    def __len__(self) -> int:
        """Returns the number of steps in flight."""
        return len(self._out)

    @property
    def full(self) -> bool:
        """Whether a step must be collected before another can begin."""
        return len(self._out) >= (1 if self._launcher is None else 2)

    def begin(self, plan: StepPlan) -> None:
        """Queues a step for the thread; does not wait."""
        future: _Out = self._loop.create_future()
        self._out.append((plan, future, time.monotonic()))
        if self._launcher is None:
            self._work.put((partial(self._step, plan), future))
        else:
            self._work.put((partial(self._launcher.launch, plan), None))

    def between_steps(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Runs `work` on the thread, after the steps that have begun; the future is done when it has run."""
        done: asyncio.Future[None] = self._loop.create_future()

        def run() -> None:
            work()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(_complete, done)

        self._work.put((run, None))
        return done

    async def collect(self) -> StepOutcome:
        """Returns the outcome of the oldest step in flight.

        Raises:
            InvariantError: `watch` found that the step has not ended in STEP_LIMIT_S.
            Exception: what the step raised.
        """
        _, future, _ = self._out[0]
        if self._launcher is not None:
            self._work.put((self._launcher.collect, future))
        try:
            return await future  # completed by the thread, or by `watch`
        finally:
            self._out.popleft()
            self._ended_at = time.monotonic()

    def watch(self, now: float) -> None:
        """Fails a step that hangs. Must be called periodically."""
        if not self._out:
            return
        plan, future, began_at = self._out[0]
        if now - max(began_at, self._ended_at) <= STEP_LIMIT_S:
            return
        message = f"step {plan.step_id} of {len(plan.rows)} rows did not finish within {STEP_LIMIT_S:g} s"
        _end(future, None, InvariantError(message))

    def close(self) -> None:
        """Ends the thread after the queued work."""
        self._work.put(None)

    def _run(self) -> None:
        failed: BaseException | None = None  # the error of a launch, raised when that step is collected
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
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller is waiting
                self._loop.call_soon_threadsafe(_end, future, outcome, error)


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _end(future: _Out, outcome: StepOutcome | None, error: BaseException | None) -> None:
    if future.done():  # cancelled, or failed by `watch`
        return
    if outcome is not None:
        future.set_result(outcome)
    else:
        future.set_exception(error or InvariantError("the step returned no outcome"))
