"""Which cores and how many threads each worker gets. Pure.

Two processes that both use two threads on two cores slow each other several times over, so every worker gets cores of
its own, as many for each of its ranks; with fewer cores than ranks they share in turn, one thread each. The ranks share
out their worker's cores and threads themselves. The coordinator is never pinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from baton.core.errors import StartupError


@dataclass(frozen=True, slots=True)
class Placement:
    """The cores a worker may run on (none: not pinned) and its number of compute threads, all ranks together (0: as
    many as it may use)."""

    cores: tuple[int, ...]
    threads: int

    def __str__(self) -> str:
        cores = f"core {self.cores[0]}" if len(self.cores) == 1 else f"cores {ranges(self.cores)}"
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}" if self.threads else "a thread per core"
        return f"{cores if self.cores else 'not pinned'}, {threads}"


def place(ranks: Sequence[int], cores: Sequence[int], threads: int = 0) -> tuple[Placement, ...]:
    """One placement per worker, in order; `ranks` has the size of each. `cores` are one at least; `threads` 0 means as
    many as the worker has cores.

    Left-over cores go to the first workers. An explicit `threads` takes that many cores for each worker, their own if
    there are enough, else shared in turn.
    """
    share, extra = divmod(len(cores), sum(ranks) or 1)
    placements: list[Placement] = []
    start = 0
    for size in ranks:
        if threads:
            width = min(threads, len(cores))
        elif share:
            width = share * size + min(extra, size)
            extra -= min(extra, size)
        else:
            width = size
        own = {cores[(start + offset) % len(cores)] for offset in range(width)}
        placements.append(Placement(tuple(sorted(own)), threads or width))
        start += width
    return tuple(placements)


def ranges(cores: tuple[int, ...]) -> str:
    """`0-3,8`; empty without cores."""
    parts: list[str] = []
    for _, run in groupby(enumerate(cores), lambda placed: placed[1] - placed[0]):  # the same for those in a row
        in_a_row = [core for _, core in run]
        parts.append(str(in_a_row[0]) if len(in_a_row) == 1 else f"{in_a_row[0]}-{in_a_row[-1]}")
    return ",".join(parts)


def parse_cores(text: str, where: str) -> tuple[int, ...]:
    """`0-3,8` the other way round.

    Raises:
        StartupError: it is something else; `where` says whose it is.
    """
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(first + last) > 8:
            raise StartupError(f"{where} must look like 0-3,8, not {text!r:.60}")
        cores += range(int(first), int(last or first) + 1)
    if not cores or len(set(cores)) != len(cores):
        raise StartupError(f"{where}: {text!r:.60} names no core, or one twice")
    return tuple(cores)
