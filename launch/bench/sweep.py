"""The highest rate of an open loop at which a server keeps to its limits. Pure: rates out, verdicts in.

From `first` on the rate is doubled while the limits are kept (halved while they are not), then the step between the
highest rate that did and the lowest that did not is halved on a logarithmic scale, until it is less than PRECISION.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MOST_STEPS = 16
PRECISION = 0.1


@dataclass(slots=True)
class Search:
    """`kept` and `missed` are the rates tried so far, in requests a second."""

    first: float
    kept: list[float] = field(default_factory=list)
    missed: list[float] = field(default_factory=list)

    def next(self) -> float | None:
        """The rate to try now; None when the search is over."""
        if len(self.kept) + len(self.missed) >= MOST_STEPS:
            return None
        if not self.kept and not self.missed:
            return self.first
        if not self.missed:
            return max(self.kept) * 2
        if not self.kept:
            lowest = min(self.missed) / 2
            return lowest if lowest > self.first / 1000 else None
        low, high = max(self.kept), min(self.missed)
        return math.sqrt(low * high) if high / low > 1 + PRECISION else None

    def tried(self, rate: float, *, kept: bool) -> None:
        """A rate that was missed below one that was kept takes back what stood above it: servers are noisy."""
        if kept:
            self.kept.append(rate)
        else:
            self.missed.append(rate)
            self.kept = [each for each in self.kept if each < rate]

    @property
    def best(self) -> float:
        """The highest rate that was kept; 0.0 where none was."""
        return max(self.kept, default=0.0)
