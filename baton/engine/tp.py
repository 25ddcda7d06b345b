"""The ranks that share one model's weights, as layers and the loader see them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TPGroup:
    """A tensor-parallel group of one rank: it owns every slice and has nobody to sum with."""

    rank: int = 0
    size: int = 1

    def part(self, total: int) -> slice:
        """This rank's share of `total` equal units (heads, MLP columns)."""
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over ranks of a row-parallel layer's output."""
        return partial
