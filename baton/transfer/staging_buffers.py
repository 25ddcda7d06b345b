"""The staging memory of a worker: `StagingRoom` bounds the bytes of KV that it packs or receives at once, separately
from its KV blocks (decision 0008), and each rank's `StagingBuffers` are reused between chunks: page faults in fresh
memory cost as much time as the copy.

A holder of bytes never waits for a caller that waits for room: a prefill worker's holder waits for room at a decode
worker, and a decode worker's holder for bytes that are packed already. So every wait ends, and none depends on KV
blocks. A rank keeps at most `limit_bytes` idle: unused buffers, and the bytes by which a reused buffer exceeds its
chunk.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.core.errors import HandoffError, StartupError
from baton.core.kv_layout import KVLayout
from baton.transfer.streams import HELD, current_stream, empty_on_staging_stream


def check_staging(limit_bytes: int, layout: KVLayout) -> None:
    """Raises StartupError when not even one block of `layout`, over all ranks, fits."""
    needed = layout.bytes_per_token * layout.block_size
    if limit_bytes < needed:
        raise StartupError(
            f"staging memory of {limit_bytes} bytes is too small: one KV block needs {needed}; increase --staging-mib"
        )


class StagingRoom:
    """The staging memory of one worker, over all its ranks. Raises StartupError when not even one
    block of `layout` fits."""

    def __init__(self, limit_bytes: int, layout: KVLayout) -> None:
        check_staging(limit_bytes, layout)
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self._next = asyncio.Lock()  # first come, first served: small requests must not starve a large one
        self._given_back = asyncio.Event()  # bytes were freed since the first waiting caller last checked

    @asynccontextmanager
    async def hold(self, num_bytes: int, timeout_s: float) -> AsyncIterator[None]:
        """Reserves that many bytes while the context is open. Raises HandoffError for fewer than one byte, for more
        than the limit, or when there is no room within `timeout_s`."""
        if num_bytes < 1:  # the peer sends the number: a negative one would raise the limit
            raise HandoffError(f"{num_bytes} bytes of KV cannot be staged")
        if num_bytes > self.limit_bytes:
            raise HandoffError(f"{num_bytes} bytes of KV do not fit into {self.limit_bytes} bytes of staging memory")
        try:
            async with asyncio.timeout(timeout_s), self._next:
                while self.taken_bytes + num_bytes > self.limit_bytes:
                    self._given_back.clear()
                    await self._given_back.wait()
                self.taken_bytes += num_bytes
        except TimeoutError:
            raise HandoffError(f"no room for {num_bytes} bytes in staging memory within {timeout_s:g} s") from None
        try:
            yield
        finally:
            self.taken_bytes -= num_bytes
            self._given_back.set()


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
