"""Decides when full garbage collections run.

Python runs a full collection whenever the long-lived objects have grown by a quarter; with 10,000 open streams that
takes 1.3 s, repeatedly while they open, and no client gets a token meanwhile. So here a full collection runs when
memory has grown: by a little while no request is in flight, otherwise by as much as was in use after the last one. A
closed connection leaves a cycle (some 2 KB) that only a full collection finds: between two of them at most about 100 MB
accumulates, or as much as is in use.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable

POLL_S = 1.0
IDLE_BLOCKS = 50_000  # of Python's allocator, about 60 bytes each
BUSY_BLOCKS = 1_500_000
_NEVER = 1_000_000_000


async def collect_when_grown(in_flight: Callable[[], int]) -> None:
    """Runs until cancelled; Python's own full collections are disabled meanwhile."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    known = sys.getallocatedblocks()
    try:
        while True:
            await asyncio.sleep(POLL_S)
            blocks = sys.getallocatedblocks()
            known = min(known, blocks)
            if blocks - known >= (max(BUSY_BLOCKS, known) if in_flight() else IDLE_BLOCKS):
                gc.collect()
                known = sys.getallocatedblocks()
    finally:
        gc.set_threshold(young, middle, old)
