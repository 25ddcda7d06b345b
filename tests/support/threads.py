"""Runs calls on separate threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Runs each call on its own thread; returns the results, or the exceptions raised, in order."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as e:
            results[index] = e

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results
