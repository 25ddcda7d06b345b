"""Buffers for KV on its way, kept between chunks: pages of fresh memory cost as much time as the bytes themselves.

How much may be packed or received at once is bounded in baton.transfer.staging_room. Beyond it a rank holds at
most `limit_bytes` here: buffers that nobody uses, and what a kept buffer has more than the chunk in it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.transfer.streams import empty_beside_engine

KEPT_SHARE = 4
MAX_KEPT = 64  # a shared buffer takes file descriptors


def kept_limit(staging_bytes: int, ranks: int) -> int:
    """Bytes that each of a worker's `ranks` may keep: together a quarter of what the worker may have on its way."""
    return staging_bytes // (KEPT_SHARE * ranks)


@dataclass(frozen=True, slots=True, eq=False)
class StagingBuffer:
    """Room for one chunk. `view` (uint8 [bytes of the chunk]) is the beginning of `whole`."""

    whole: Tensor
    view: Tensor

    @property
    def unused(self) -> int:
        return self.whole.numel() - self.view.numel()


def pinned_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes] in host memory that a GPU copies to and from by itself."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=True)


class StagingBuffers:
    """Complete state: the kept buffers by size, what they and the unused ends of those in use have (`idle_bytes`), and
    what was counted: `allocated`, `reused`. Belongs to one thread. `limit_bytes` 0 keeps none; `allocate` makes new
    ones."""

    def __init__(
        self,
        limit_bytes: int,
        device: torch.device | str = "cpu",
        allocate: Callable[[int, torch.device], Tensor] = empty_beside_engine,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.allocated = self.reused = self.idle_bytes = 0
        self._device, self._allocate = torch.device(device), allocate
        self._kept: list[Tensor] = []

    def take(self, num_bytes: int) -> StagingBuffer:
        """The smallest kept buffer that is large enough, else a new one. Its bytes are whatever they were. It ends with
        `give_back` or `drop`."""
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
        """Its transfer has ended in order: nobody reads or writes it any more. Where there is no room for it, smaller
        ones go, since they serve fewer chunks; else it goes itself."""
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
        """Its transfer failed or was given up: a late byte may still come, so nobody gets it again."""
        self.idle_bytes -= buffer.unused

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return (
            f"<StagingBuffers {len(self._kept)} kept, {self.idle_bytes} of {self.limit_bytes} bytes idle | "
            f"{self.allocated} allocated, {self.reused} reused>"
        )
