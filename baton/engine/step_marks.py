"""Where the engine's stream is, step by step, for other streams that read what a step has written."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

_KEPT = 64
"""Steps: many more than are ever computed behind each other while somebody waits for the first."""


class StepMarks:
    """Complete state: the events behind the last steps, oldest first. `record` belongs to the compute thread;
    `order_behind` may come from any other. On CPU a step is computed when anybody hears of it, and there are none."""

    def __init__(self, device: torch.device, new_event: Callable[[], Any] | None = None) -> None:
        self._events: deque[tuple[int, Any]] = deque(maxlen=_KEPT)
        self._new_event = new_event or (torch.cuda.Event if device.type == "cuda" else None)
        self._lock = threading.Lock()

    def record(self, step_id: int) -> None:
        """The step has been given to the calling thread's stream."""
        if self._new_event is not None:
            event = self._new_event()
            event.record()
            with self._lock:
                self._events.append((step_id, event))

    def order_behind(self, step_id: int) -> None:
        """What the calling thread's stream is given from now on follows that step, without waiting here."""
        with self._lock:
            found = next((event for step, event in self._events if step >= step_id), None)
        if found is not None:
            found.wait()

    def wait_last(self) -> None:
        """On the compute thread: waits for the last step. It ends with the device; a device that hangs is the step
        thread's to give up."""
        if self._events:
            self._events[-1][1].synchronize()
