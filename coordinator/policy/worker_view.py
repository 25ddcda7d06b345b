"""What routing knows of a worker: its size, what our own dispatches hold there, and which prefixes it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.core.commands import Join, Role
from baton.core.events import BlockNews

# The hints (baton.core.prefix_keys) of a request's full blocks, by block size: pools may differ in it.
Prefix = Mapping[int, tuple[bytes, ...]]


class HeldBlocks:
    """Complete state: the hints of the blocks that one worker can reuse, `limit` at most (its pool has no more).

    News travel; a block may be gone when a request comes for it. So this guides, and nothing relies on it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._hints: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._hints)

    def update(self, news: BlockNews) -> None:
        if news.cleared:
            self._hints.clear()
        self._hints.difference_update(news.evicted)
        self._hints.update(news.stored[: max(0, self._limit - len(self._hints))])

    def count(self, prefix: tuple[bytes, ...]) -> int:
        """How many blocks of a prefix, given by their hints in order, the worker holds from its beginning on."""
        for count, hint in enumerate(prefix):
            if hint not in self._hints:
                return count
        return len(prefix)


@dataclass(slots=True)
class WorkerView:
    """What routing knows of a worker. No sequence there may be longer than `max_tokens`; `reserved_blocks`,
    `running` and `backlog_tokens` count our own dispatches: blocks only until the KV has arrived, then they are in
    what the worker says of itself, `blocks_free` and `preempted`."""

    worker_id: str
    role: Role
    blocks_total: int
    block_size: int
    step_tokens: int
    max_tokens: int = 1 << 31
    ready: bool = True
    reserved_blocks: int = 0
    backlog_tokens: int = 0
    running: int = 0
    blocks_free: int | None = None
    preempted: int = 0
    held: HeldBlocks = field(init=False)

    def __post_init__(self) -> None:
        self.held = HeldBlocks(self.blocks_total)

    @classmethod
    def of(cls, join: Join) -> WorkerView:
        block_size = join.facts.layout.block_size
        step_tokens, max_tokens = max(join.step_tokens, 1), join.facts.max_model_len
        return cls(join.worker_id, join.role, join.blocks_total, block_size, step_tokens, max_tokens)

    def blocks_left(self, growth: int) -> int:
        """Blocks for one sequence more, with `growth` for those that are there; 0 while sequences there wait to come
        back."""
        if self.running == 0:
            return self.blocks_total
        if self.preempted:
            return 0
        free = self.blocks_total if self.blocks_free is None else self.blocks_free
        return free - self.reserved_blocks - growth

    def held_tokens(self, prefix: Prefix) -> int:
        return self.held.count(prefix.get(self.block_size, ())) * self.block_size

    def could_hold(self, tokens: int) -> bool:
        """Whether an idle worker has room for a sequence of that length."""
        return tokens <= min(self.max_tokens, self.blocks_total * self.block_size)
