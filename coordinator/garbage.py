"""When all objects are searched for garbage.

Python searches all of them whenever a quarter more have come to stay; with 10,000 open streams that takes 1.3 s, again
and again while they open, and nobody gets a token meanwhile. So here everything is searched when memory has grown: by a
little while no request is in flight, otherwise by as much as there was after the last search. What a closed connection
leaves is a cycle that only such a search finds (some 2 KB): between two searches at most 100 MB or so of it gather, or
as much as is in use.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable

LOOK_S = 1.0
IDLE_BLOCKS = 50_000  # of Python's allocator, some 60 bytes each
BUSY_BLOCKS = 1_500_000
_NEVER = 1_000_000_000


async def search_when_grown(in_flight: Callable[[], int]) -> None:
    """Until cancelled; Python's own searches of everything are off meanwhile."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    known = sys.getallocatedblocks()
    try:
        while True:
            await asyncio.sleep(LOOK_S)
            blocks = sys.getallocatedblocks()
            known = min(known, blocks)
            if blocks - known >= (max(BUSY_BLOCKS, known) if in_flight() else IDLE_BLOCKS):
                gc.collect()
                known = sys.getallocatedblocks()
    finally:
        gc.set_threshold(young, middle, old)
