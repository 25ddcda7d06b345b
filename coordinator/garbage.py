"""When all objects are searched for garbage, and when freed memory goes back to the system.

Python searches all of them whenever a quarter more have come to stay; with 10,000 open streams that takes 1.3 s, again
and again while they open, and nobody gets a token meanwhile. So here everything is searched when memory has grown: by a
little while no request is in flight, otherwise by as much as there was after the last search. What a closed connection
leaves is a cycle that only such a search finds (some 2 KB): between two searches at most 100 MB or so of it gather, or
as much as is in use.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections.abc import Callable

LOOK_S = 1.0
IDLE_BLOCKS = 50_000  # of Python's allocator, some 60 bytes each
BUSY_BLOCKS = 1_500_000
FREED_BYTES_KEPT = 512 << 20
GIVEN_BACK_BYTES = 64 << 20
"""Of freed memory at each look while no request is in flight, from the most that is kept down to none: 15 ms each."""
_NEVER = 1_000_000_000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_LIBC = ctypes.CDLL(None)


def keep_freed_memory() -> None:
    """To be called before there are threads: they share one heap. Other C libraries than glibc keep their own ways."""
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_M_ARENA_MAX, 1)
        _LIBC.mallopt(_M_MMAP_THRESHOLD, FREED_BYTES_KEPT)
        _LIBC.mallopt(_M_TRIM_THRESHOLD, FREED_BYTES_KEPT)


def give_back_freed_memory(kept: int) -> None:
    """All but `kept` bytes at the end of the heap."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(ctypes.c_size_t(kept))


async def search_when_grown(in_flight: Callable[[], int]) -> None:
    """Until cancelled; Python's own searches of everything are off meanwhile."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    known = sys.getallocatedblocks()
    kept = 0
    try:
        while True:
            await asyncio.sleep(LOOK_S)
            busy = in_flight() > 0
            kept = 0 if busy else (kept - GIVEN_BACK_BYTES) % FREED_BYTES_KEPT
            if not busy:
                give_back_freed_memory(kept)
            blocks = sys.getallocatedblocks()
            known = min(known, blocks)
            if blocks - known >= (max(BUSY_BLOCKS, known) if busy else IDLE_BLOCKS):
                gc.collect()
                known = sys.getallocatedblocks()
    finally:
        gc.set_threshold(young, middle, old)
