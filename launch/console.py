"""Timed lines on the terminal. A terminal that has gone away must not end the cluster."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable


class Console:
    def __init__(self) -> None:
        self._started = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def stage(self, who: str, what: str) -> None:
        """`   2.1 s  decode-0      joined`"""
        self.plain(f"{self.elapsed_s():7.1f} s  {who:<12}  {what}")

    def quote(self, lines: Iterable[str]) -> None:
        """Somebody else's words, set apart."""
        for line in lines:
            self.plain(f"             | {line}")

    def plain(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stdout, flush=True)
