"""Which cores and how many threads each worker gets. Pure.

Two processes that both use two threads on two cores slow each other down several times over, so every worker gets its
own cores, about as many for each of its ranks. With fewer cores than ranks, workers share cores in turn, one thread per
rank. The ranks divide their worker's cores and threads among themselves. The coordinator is never pinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.cores import ranges


@dataclass(frozen=True, slots=True)
class Placement:
    """The cores that a worker may run on (none: not pinned) and its number of compute threads over all ranks (0: as
    many as it may use)."""

    cores: tuple[int, ...]
    threads: int

    def __str__(self) -> str:
        cores = f"core {self.cores[0]}" if len(self.cores) == 1 else f"cores {ranges(self.cores)}"
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}" if self.threads else "a thread per core"
        return f"{cores if self.cores else 'not pinned'}, {threads}"


def place(ranks: Sequence[int], cores: Sequence[int], threads: int = 0) -> tuple[Placement, ...]:
    """Returns one placement per worker, in order. `ranks` has the size of each; `cores` is not empty; `threads` 0 means
    as many as the worker has cores.

    Left-over cores go to the first workers. With explicit `threads` each worker gets that many cores: its own if there
    are enough, else shared in turn.
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
