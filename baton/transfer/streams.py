"""The stream of an edge on a GPU: everything that its thread packs, sends, checks and stores is queued there, so that
it waits neither for the engine's steps nor makes them wait. On CPU all of it is done when the call returns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from baton.core.errors import HandoffError

_STAGING: dict[torch.device, Any] = {}
"""By device, the stream that staging buffers are allocated on."""
_POLL_MIN_S, _POLL_MAX_S = 0.00002, 0.001


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """The calling thread's work for `device` goes to a stream of its own, of normal priority."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def finish(device: torch.device, timeout_s: float) -> None:
    """Waits until the device has done what the calling thread's stream was given. Raises HandoffError after
    `timeout_s`. It polls: CUDA's own wait cannot be given up."""
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


def empty_beside_engine(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes]. On a GPU its memory never was the engine's: torch gives freed memory away at once, for use on
    the stream that it was used on, while kernels that write it may still be queued there; and an edge's stream does not
    follow the engine's."""
    if device.type != "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    stream = _STAGING.get(device)
    if stream is None:
        stream = _STAGING[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def used_here(buffer: Tensor) -> None:
    """The calling thread's stream uses a buffer that was allocated on another one: its memory is not given to anybody
    else before that is done, also when the transfer is given up and the buffer dropped."""
    if buffer.device.type == "cuda":
        buffer.record_stream(torch.cuda.current_stream(buffer.device))
