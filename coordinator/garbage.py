"""When all objects are searched for garbage.

Python searches all of them whenever a quarter more have come to stay; with 10,000 open streams that takes 1.3 s, again
and again while they open, and nobody gets a token meanwhile. What short-lived cycles leave is found without it. So here
everything is searched when no request is in flight, which takes milliseconds, and otherwise every half hour.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

LOOK_S = 1.0
LONGEST_S = 1800.0
_NEVER = 1_000_000


async def collect_when_idle(in_flight: Callable[[], int]) -> None:
    """Until cancelled; Python's own searches of everything are off meanwhile."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    searched_at, had_requests = time.monotonic(), False
    try:
        while True:
            await asyncio.sleep(LOOK_S)
            count = in_flight()
            had_requests = had_requests or count > 0
            if had_requests and (count == 0 or time.monotonic() - searched_at > LONGEST_S):
                gc.collect()
                searched_at, had_requests = time.monotonic(), False
    finally:
        gc.set_threshold(young, middle, old)
