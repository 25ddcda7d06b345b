"""What a device is given to compute, as a stream: copies that nobody waits for, and marks in between."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor

_KEPT = 64
"""Steps: many more than are ever computed behind each other while somebody waits for the first."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, its copy queued behind what is computed there: from pageable memory the host would
    wait for that first. On CPU the tensor itself."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, queued behind what is computed on the tensor's device: there once an event behind it has
    come. On CPU the tensor itself."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Mark(Protocol):
    """A place in what a device has been given to compute, as torch.cuda.Event."""

    def record(self, /) -> None: ...

    def synchronize(self) -> None:
        """Waits until the device has come there."""
        ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from here to a later mark, both of which the device has passed."""
        ...


NewMark = Callable[[], Mark]


class HostMark:
    """Of a device that has computed whatever it was given: the CPU."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostMark) -> float:
        return (end._at - self._at) * 1e3


def marks_of(device: torch.device) -> NewMark:
    if device.type != "cuda":
        return HostMark
    return lambda: cast(Mark, torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]


class StepMarks:
    """Complete state: the events behind the last steps, oldest first. `record` belongs to the compute thread;
    `order_behind` may come from any other. On CPU a step is computed when it is launched, and there are none."""

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
