"""The stream of a device: asynchronous copies, and marks (events) between its operations."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor

_KEPT = 64
"""Steps whose events are kept: many more than are ever queued while a thread waits for the first."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Enqueues a copy of a host tensor to the device, without a wait: from pageable memory the host would wait for all
    queued work first. Returns the tensor itself for CPU."""
    return pinned(tensor, device).to(device, non_blocking=True) if device.type == "cuda" else tensor


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor in memory from which such a copy is made; the tensor itself for CPU."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_host(tensor: Tensor) -> Tensor:
    """Enqueues a copy of a device tensor to pinned memory, valid once an event recorded after it has completed. Returns
    the tensor itself on CPU."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Mark(Protocol):
    """A point in the stream of a device, like torch.cuda.Event."""

    def record(self, /) -> None: ...

    def synchronize(self) -> None:
        """Waits until the device has reached it."""
        ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this mark to a later one, both of which the device has reached."""
        ...


NewMark = Callable[[], Mark]


class HostMark:
    """A mark of the CPU, where all previous work is already computed."""

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
    """The events after the last steps. The compute thread calls `record`; any other may
    call `order_behind`. On CPU a step is computed when it is launched, and there are no events."""

    def __init__(self, device: torch.device, new_event: Callable[[], Any] | None = None) -> None:
        self._events: deque[tuple[int, Any]] = deque(maxlen=_KEPT)  # (step id, event), oldest first
        self._new_event = new_event or (torch.cuda.Event if device.type == "cuda" else None)
        self._lock = threading.Lock()

    def record(self, step_id: int) -> None:
        """Records an event after a step that was launched on the calling thread's stream."""
        if self._new_event is not None:
            event = self._new_event()
            event.record()
            with self._lock:
                self._events.append((step_id, event))

    def order_behind(self, step_id: int) -> None:
        """Makes later work on the calling thread's stream wait for that step, without blocking the host."""
        with self._lock:
            recorded = next((event for step, event in self._events if step >= step_id), None)
        if recorded is not None:
            recorded.wait()
