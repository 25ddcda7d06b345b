"""Which rank of a worker this process is, as its agent (or torchrun) says in the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.core.errors import StartupError

STORE_VARIABLE = "BATON_STORE_FD"
"""Names the listening socket of the store where the ranks of a worker meet; its agent gives it to rank 0 alone."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """`rank` of `size` in the worker; `local_rank` of `local_size` on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Ranks:
        """A process that torchrun did not start is the only rank. Raises StartupError for impossible numbers."""
        size = _number(env, "WORLD_SIZE", 1)
        if size == 1:
            return cls()
        ranks = cls(_number(env, "RANK"), size, _number(env, "LOCAL_RANK"), _number(env, "LOCAL_WORLD_SIZE"))
        if not (0 <= ranks.rank < size and 0 <= ranks.local_rank < ranks.local_size <= size):
            raise StartupError(f"environment: {ranks} is impossible")
        return ranks

    def cores(self, available: Sequence[int]) -> tuple[int, ...]:
        """The part of this machine's cores that this rank runs on: its own, or with too few for all, one in turn."""
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
