"""The thread that computes a worker's steps: a plan goes in, its outcome comes back to the event loop.

A worker has hundreds of steps a second. An executor would make two futures, a condition, a waiter and a timer for each;
here a step is one entry of a queue, one future and one call into the loop, and its limit is looked after by somebody
who comes by anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable

from baton.core.errors import InvariantError
from baton.core.step import StepOutcome, StepPlan

STEP_LIMIT_S = 300.0  # a step that takes longer hangs: the process ends and its supervisor starts another

_Out = asyncio.Future[StepOutcome]


class StepThread:
    """Complete state: the queue to the thread, and the step that is out with its future and its beginning."""

    def __init__(self, step: Callable[[StepPlan], StepOutcome]) -> None:
        """To be made, and used, where an event loop runs; `step` is called on the thread alone."""
        self._step = step
        self._loop = asyncio.get_running_loop()
        self._plans: queue.SimpleQueue[tuple[StepPlan, _Out] | None] = queue.SimpleQueue()
        self._out: tuple[StepPlan, _Out] | None = None
        self._began_at = 0.0
        threading.Thread(target=self._run, name="compute", daemon=True).start()

    async def compute(self, plan: StepPlan) -> StepOutcome:
        """One step at a time.

        Raises:
            InvariantError: the step has not ended in STEP_LIMIT_S, as `watch` found.
            Exception: what the step raised.
        """
        self._out, self._began_at = (plan, self._loop.create_future()), time.monotonic()
        self._plans.put(self._out)
        try:
            return await self._out[1]  # ended by the thread, or by `watch`
        finally:
            self._out = None

    def watch(self, now: float) -> None:
        """To be called every now and then: gives up a step that hangs."""
        if self._out is None or now - self._began_at <= STEP_LIMIT_S:
            return
        plan, future = self._out
        what = f"step {plan.step_id} of {len(plan.rows)} rows has not ended in {STEP_LIMIT_S:g} s"
        _end(future, None, InvariantError(what))

    def close(self) -> None:
        """The thread ends behind the step that it computes."""
        self._plans.put(None)

    def _run(self) -> None:
        while (item := self._plans.get()) is not None:  # until `close`
            plan, future = item
            outcome: StepOutcome | None = None
            error: BaseException | None = None
            try:
                outcome = self._step(plan)
            except BaseException as e:
                error = e
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(_end, future, outcome, error)


def _end(future: _Out, outcome: StepOutcome | None, error: BaseException | None) -> None:
    if future.done():  # cancelled, or given up
        return
    if outcome is not None:
        future.set_result(outcome)
    else:
        future.set_exception(error or InvariantError("a step without an outcome"))
