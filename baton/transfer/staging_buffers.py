"""Staging buffers, reused between chunks: page faults in fresh memory cost as much time as the copy.

baton.transfer.staging_room bounds how much may be packed or received at once. In addition a rank keeps at most
`limit_bytes` idle here: unused buffers, and the bytes by which a reused buffer exceeds its chunk.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.transfer.streams import HELD, current_stream, empty_on_staging_stream

KEPT_SHARE = 4
MAX_KEPT = 64  # a shared buffer holds file descriptors


def kept_limit(staging_bytes: int, ranks: int) -> int:
    """Returns the bytes that each of a worker's `ranks` may keep: together a quarter of the worker's staging memory."""
    return staging_bytes // (KEPT_SHARE * ranks)


@dataclass(slots=True, eq=False)
class StagingBuffer:
    """Memory for one chunk. `view` (uint8 [bytes of the chunk]) is the beginning of `whole`; `stream` is that on which
    a device uses it, None before and on CPU."""

    whole: Tensor
    view: Tensor
    stream: Any = None

    def use(self) -> None:
        """Called by the thread that queues work on the buffer, before that work."""
        self.stream = current_stream(self.whole.device)

    @property
    def unused(self) -> int:
        return self.whole.numel() - self.view.numel()


def pinned_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Returns a uint8 [num_bytes] in pinned host memory, which a GPU copies to and from asynchronously."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=True)


class StagingBuffers:
    """Belongs to one thread. `idle_bytes` are those of kept buffers and of the unused ends of buffers in use;
    `allocated` and `reused` count buffers. `limit_bytes` 0 keeps none; `allocate` makes new ones."""

    def __init__(
        self,
        limit_bytes: int,
        device: torch.device | str = "cpu",
        allocate: Callable[[int, torch.device], Tensor] = empty_on_staging_stream,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.allocated = self.reused = self.idle_bytes = 0
        self._device, self._allocate = torch.device(device), allocate
        self._kept: list[Tensor] = []  # by size

    def take(self, num_bytes: int) -> StagingBuffer:
        """Returns the smallest kept buffer that is large enough, else a new one. Its content is undefined. The caller
        ends its use with `give_back` or `drop`."""
        at = bisect_left(self._kept, num_bytes, key=Tensor.numel)
        if at < len(self._kept):
            whole = self._kept.pop(at)
            self.idle_bytes -= num_bytes
            self.reused += 1
        else:
            whole = self._allocate(num_bytes, self._device)
            self.allocated += 1
        return StagingBuffer(whole, whole[:num_bytes])

    def give_back(self, buffer: StagingBuffer) -> None:
        """Keeps a buffer whose transfer has ended in order: nothing reads or writes it any more. If it exceeds the
        limit, smaller buffers are freed, since they serve fewer chunks; if that is not enough, it is dropped."""
        size, used = buffer.whole.numel(), buffer.view.numel()
        smaller = bisect_left(self._kept, size, key=Tensor.numel)
        over = self.idle_bytes + used - self.limit_bytes
        if over > sum(map(Tensor.numel, self._kept[:smaller])):
            self.drop(buffer)
            return
        while self.idle_bytes + used > self.limit_bytes or len(self._kept) >= MAX_KEPT:
            self.idle_bytes -= self._kept.pop(0).numel()
        self.idle_bytes += used
        insort(self._kept, buffer.whole, key=Tensor.numel)

    def drop(self, buffer: StagingBuffer) -> None:
        """Does not keep a buffer whose transfer failed or was aborted: a late byte may still be written to it. Its
        memory is free once the device has done the work already queued on it; what a job of the edge's thread queues
        later, that job keeps it for."""
        self.idle_bytes -= buffer.unused
        if buffer.stream is not None:
            HELD.keep(buffer.whole, buffer.stream)

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return (
            f"<StagingBuffers {len(self._kept)} kept, {self.idle_bytes} of {self.limit_bytes} bytes idle | "
            f"{self.allocated} allocated, {self.reused} reused>"
        )
