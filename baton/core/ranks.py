"""Which rank of a worker this process is, from the environment that its agent (or torchrun) sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.core.errors import StartupError

STORE_VARIABLE = "BATON_STORE_FD"
"""Names the listening socket of the store through which the ranks meet; the agent sets it for rank 0 only."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """`rank` of `size` in the worker; `local_rank` of `local_size` on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Ranks:
        """Returns this process's rank, the only one without WORLD_SIZE. Raises StartupError for impossible numbers."""
        size = _number(env, "WORLD_SIZE", 1)
        if size == 1:
            return cls()
        ranks = cls(_number(env, "RANK"), size, _number(env, "LOCAL_RANK"), _number(env, "LOCAL_WORLD_SIZE"))
        if not (0 <= ranks.rank < size and 0 <= ranks.local_rank < ranks.local_size <= size):
            raise StartupError(f"environment: inconsistent values: {ranks}")
        return ranks

    def cores(self, available: Sequence[int]) -> tuple[int, ...]:
        """Returns this rank's share of the machine's cores; if there are fewer cores than ranks, one, in rotation."""
        if len(available) < self.local_size:
            return (available[self.local_rank % len(available)],)
        starts = [len(available) * n // self.local_size for n in (self.local_rank, self.local_rank + 1)]
        return tuple(available[slice(*starts)])

    @property
    def on_one_node(self) -> bool:
        return self.local_size == self.size

    @property
    def leads(self) -> bool:
        return self.rank == 0


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "" if default is None else str(default))
    if not text.isascii() or not text.isdigit():
        raise StartupError(f"environment: {name} must be a number, not {text!r:.60}")
    return int(text)
