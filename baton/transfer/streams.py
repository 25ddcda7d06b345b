"""The CUDA stream of an edge: everything that the edge's thread packs, sends, checks and stores is queued there, so
that it neither waits for the engine's steps nor delays them. On CPU all work is done when the call returns.
"""

from __future__ import annotations

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
    """Queues the calling thread's work for `device` on a stream that nobody else uses, of high priority: its kernels
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
    stream = _STAGING.get(device)
    if stream is None:
        stream = _STAGING[device] = stream_pool(device, EDGE_PRIORITY).take()
    with torch.cuda.stream(stream):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def record_current_stream(buffer: Tensor) -> None:
    """Marks a buffer allocated on another stream as used by the calling thread's: its memory is not reused before that
    work is done, even when the transfer is aborted and the buffer freed."""
    if buffer.device.type == "cuda":
        buffer.record_stream(torch.cuda.current_stream(buffer.device))
