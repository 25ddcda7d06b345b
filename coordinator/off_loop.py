"""Builds large messages off the event loop: many log-probabilities, long texts.

A thread is no faster, but yields to the loop within the switch interval (baton.runtime.process.SWITCH_INTERVAL_S).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.submission import Delta

LARGE_ENTRIES = 4096
"""About 5 ms of CPU time."""


def is_large(deltas: Sequence[Delta]) -> bool:
    entries = 0
    for delta in deltas:
        entries += len(delta.token_ids) + len(delta.text) // 8 + len(delta.events or ()) + len(delta.pooled) // 16
        for scored in (delta.logprobs, delta.prompt_logprobs):
            if scored:
                entries += len(scored) * (len(scored[0].top_ids) + 1)
    return entries > LARGE_ENTRIES


async def make(large: bool, build: Callable[..., Any], *args: object) -> Any:
    """Returns `build(*what)`, run on a thread if it is `large`."""
    return await asyncio.to_thread(build, *args) if large else build(*args)
