"""The CUDA stream of an edge: everything that the edge's thread packs, sends, checks and stores is queued there, so
that it neither waits for the engine's steps nor delays them. On CPU all work is done when the call returns.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from baton.core.errors import HandoffError
from baton.transfer.stream_pool import EDGE_PRIORITY, stream_pool

_STAGING: dict[torch.device, Any] = {}
"""By device, the stream on which staging buffers are allocated."""
_POLL_MIN_S, _POLL_MAX_S = 0.00002, 0.001


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Queues the calling thread's work for `device` on a stream without another user, of high priority: its kernels
    are short and do not wait behind all blocks of the engine's."""
    if device.type != "cuda":
        yield
        return
    pool = stream_pool(device, EDGE_PRIORITY)
    stream = pool.take()
    try:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield
    finally:
        pool.give_back(stream.cuda_stream)


def finish(device: torch.device, timeout_s: float) -> None:
    """Waits until the device has done the work queued on the calling thread's stream. Raises HandoffError after
    `timeout_s`. It polls, since CUDA's own wait cannot be interrupted."""
    if device.type != "cuda":
        return
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    deadline, pause_s = time.monotonic() + timeout_s, _POLL_MIN_S
    while not done.query():
        if time.monotonic() > deadline:
            raise HandoffError(f"{device} did not finish the edge's work within {timeout_s:.1f} s")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _POLL_MAX_S)


def empty_on_staging_stream(num_bytes: int, device: torch.device) -> Tensor:
    """Returns an uninitialised uint8 [num_bytes]. On a GPU it never reuses the engine's memory: torch hands freed
    memory out immediately, for use on the same stream, while kernels that write it may still be queued there; and an
    edge's stream is not ordered after the engine's."""
    if device.type != "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    HELD.release()
    stream = _STAGING.get(device)
    if stream is None:
        stream = _STAGING[device] = stream_pool(device, EDGE_PRIORITY).take()
    with torch.cuda.stream(stream):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def current_stream(device: torch.device) -> Any:
    """Returns the calling thread's stream of a GPU; None for CPU, where work is done when the call returns."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class HeldBuffer:
    """Keeps objects until the device has done the work that uses them. torch's own `record_stream` does not: it ignores
    memory that was exported to another process. Any thread may call it."""

    def __init__(self) -> None:
        # Each with an event, or with None if the device has failed: then it is kept for good.
        self._objects: list[tuple[Any, object]] = []
        self._lock = threading.Lock()

    def keep(self, kept: object, stream: Any) -> None:
        """Keeps `kept` until the work that is queued on `stream` now is done."""
        event: Any = None
        with contextlib.suppress(RuntimeError):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        with self._lock:
            self._objects.append((event, kept))
        self.release()

    def release(self) -> None:
        """Releases the objects whose work is done."""
        with self._lock:
            self._objects = [entry for entry in self._objects if not _done(entry[0])]

    def __len__(self) -> int:
        return len(self._objects)


def _done(event: Any) -> bool:
    if event is not None:
        with contextlib.suppress(RuntimeError):
            return bool(event.query())
    return False


HELD = HeldBuffer()
"""What this process holds for its devices."""
