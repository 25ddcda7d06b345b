"""What takes so long to put together that it is not for the event loop: many log-probabilities, long texts.

A thread is no faster, but gives way to the loop within the switch interval (baton.process.SWITCH_INTERVAL_S).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.submission import Delta

LARGE_ENTRIES = 4096
"""Some 5 ms of a processor."""


def is_large(deltas: Sequence[Delta]) -> bool:
    entries = 0
    for delta in deltas:
        entries += len(delta.token_ids) + len(delta.text) // 8  # calls are read character by character
        for scored in (delta.logprobs, delta.prompt_logprobs):
            if scored:
                entries += len(scored) * (len(scored[0].top_ids) + 1)
    return entries > LARGE_ENTRIES


async def make(large: bool, build: Callable[..., Any], *what: object) -> Any:
    """`build(*what)`: on a thread where that is `large`."""
    return await asyncio.to_thread(build, *what) if large else build(*what)
