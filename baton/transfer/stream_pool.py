"""Streams of a device that no two users share.

torch has 32 streams per device and priority and hands them out in turn, so the 33rd user gets the first one's. Work on
one stream runs in order: a receive posted to a peer that has stopped then blocks the work of another edge, or a sum of
tensor-parallel ranks, for as long as that peer is silent. Here each stream has one user at a time: a stream that is in
use when torch hands it out is passed over, and one whose queued work has not ended is not handed out again.

NCCL's groups take their streams from torch themselves, when they connect. Before they do, the pool advances to a place
where the next ones are free; what torch has handed out meanwhile shows when the pool takes its next stream.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

log = logging.getLogger("baton.edges")
_MOST = 256
"""More streams than any version of torch has in a pool."""
_POOLS: dict[tuple[torch.device, int], StreamPool] = {}
_POOLS_LOCK = threading.Lock()


class StreamPool:
    """torch's streams of one device and priority. `new` takes the next one; others in this process may take some, too.
    Any thread may call it."""

    def __init__(self, new: Callable[[], Any]) -> None:
        self._new = new
        self._lock = threading.Lock()
        self._streams: dict[int, Any] = {}  # by handle
        while len(self._streams) < _MOST and (stream := new()).cuda_stream not in self._streams:
            self._streams[stream.cuda_stream] = stream
        self._order = list(self._streams)  # in which torch hands them out
        self._at = 0  # place of the last one taken: it was the first one again
        self._users: Counter[int] = Counter()
        self._given_back: list[int] = []  # their work has not ended yet
        self._open: list[
            list[int]
        ] = []  # for each open block of `taken_by_torch`, what torch may have handed out in it

    def take(self) -> Any:
        """Returns a stream without another user, until `give_back`. If there is none, the one with the fewest."""
        with self._lock:
            self._collect()
            handle = self._advance(lambda handle: not self._users[handle])
            if handle is None:
                handle = min(self._order, key=self._users.__getitem__)
                log.warning("all %d streams of the device are in use: one has several users", len(self._order))
            self._users[handle] += 1
            return self._streams[handle]

    def give_back(self, *handles: int) -> None:
        """Ends a use of each stream, as soon as the work queued on it has ended."""
        with self._lock:
            self._given_back += handles

    @contextmanager
    def taken_by_torch(self) -> Iterator[list[int]]:
        """In the block torch takes one stream itself; it gets one without another user, if there is any. After the
        block the list holds its handle; if other blocks were open at the same time, perhaps theirs too."""
        handles: list[int] = []
        with self._lock:
            self._collect()
            self._next()  # shows what others have taken before the block
            self._open.append(handles)
            self._advance(lambda handle: True)
        try:
            yield handles
        finally:
            with self._lock:
                self._next()  # shows what torch has taken
                self._open = [other for other in self._open if other is not handles]
                self._advance(lambda handle: True)

    def in_use(self) -> set[int]:
        """The handles of all streams with a user."""
        with self._lock:
            self._collect()
            return {handle for handle, users in self._users.items() if users > 0}

    def _advance(self, suits: Callable[[int], bool]) -> int | None:
        """Takes streams until one suits and torch's next ones, one for each open block, are free. Returns its handle,
        or None if no stream suits."""
        suitable = None
        for _ in range(2 * len(self._order)):
            handle = self._next()
            if suits(handle):
                suitable = handle
                ahead = range(self._at + 1, self._at + 1 + len(self._open))
                if not any(self._users[self._order[place % len(self._order)]] for place in ahead):
                    break
        return suitable

    def _next(self) -> int:
        """Takes one stream. Those that it skips were handed out to others: in open blocks, or for good."""
        handle: int = self._new().cuda_stream
        place = self._order.index(handle)
        for skipped in range(1, (place - self._at) % len(self._order)):
            other = self._order[(self._at + skipped) % len(self._order)]
            for handles in self._open or [[]]:
                handles.append(other)
                self._users[other] += 1
        self._at = place
        return handle

    def _collect(self) -> None:
        left = []
        for handle in self._given_back:
            if self._streams[handle].query():
                self._users[handle] -= 1
            else:
                left.append(handle)
        self._given_back = left


def stream_pool(device: torch.device, priority: int) -> StreamPool:
    """Returns the pool of this process for a GPU; `priority` 0 is normal, -1 high. The first call must precede whatever
    else takes streams of that priority, or these are unknown to it."""
    device = torch.device(device.type, device.index or 0)
    with _POOLS_LOCK:
        pool = _POOLS.get((device, priority))
        if pool is None:
            made: Any = torch.cuda.Stream
            pool = _POOLS[device, priority] = StreamPool(lambda: made(device, priority=priority))
        return pool


NCCL_PRIORITY, EDGE_PRIORITY = 0, -1
"""Of the streams that NCCL's groups take, and of those of edges' threads."""


def know_streams(device: torch.device) -> None:
    """Must be called before a group is connected or steps are captured on the device."""
    if device.type == "cuda":
        stream_pool(device, NCCL_PRIORITY)
        stream_pool(device, EDGE_PRIORITY)
