"""A block table that only counts: each operation takes the same time for any number of blocks.

It stands for `BlockTable` where no block is shared by two sequences, so without a prefix cache. Then which blocks a
sequence has does not matter, only how many: all have id 0. Replays of both tables give the same times
(tests/sim/test_replay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sized

from baton.core.blocks import Holder, HolderKind
from baton.core.errors import InvariantError
from baton.core.request import SequenceId

_KINDS: dict[HolderKind, int] = {"receiving": 0, "sequence": 1, "send": 2}


class CountedBlocks:
    """A pool of which only the numbers of blocks are known."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = self.num_free = num_blocks
        self.on_evict: Callable[[int], None] = lambda block: None
        self._held: dict[SequenceId, list[int]] = {}  # by _KINDS, and the blocks of all three

    def __repr__(self) -> str:
        return f"<CountedBlocks {self.num_free} free of {self.num_blocks}>"

    @property
    def num_idle(self) -> int:
        return 0

    def num_free_besides(self, shared: Sized) -> int:
        if len(shared):
            raise InvariantError("blocks that are only counted cannot be cached")
        return self.num_free

    def num_free_without(self, holders: Collection[Holder], blocks: Iterable[int]) -> int:
        return self.num_free + sum(self._size(holder.sequence) for holder in holders)

    def allocate(self, count: int, holder: Holder) -> tuple[int, ...] | None:
        if count > self.num_free:
            return None
        self._add(count, holder)
        return (0,) * count

    def hold(self, blocks: Sized, holder: Holder) -> None:
        if len(blocks):
            self._add(len(blocks), holder)

    def convert(self, blocks: Sized, old: Holder, new: Holder) -> None:
        self._add(len(blocks), new)  # first: a sequence without blocks would be forgotten
        self._add(-len(blocks), old)

    def release(self, blocks: Sized, holder: Holder) -> int:
        before = self.num_free
        if len(blocks):
            self._add(-len(blocks), holder)
        return self.num_free - before

    def check_idle(self) -> None:
        if self._held or self.num_free != self.num_blocks:
            raise InvariantError(f"blocks are still held although no sequence is left: {self._held}")

    def _size(self, sequence: SequenceId) -> int:
        held = self._held.get(sequence)
        return 0 if held is None else held[3]

    def _add(self, change: int, holder: Holder) -> None:
        kind, sequence = holder
        held = self._held.get(sequence)
        if held is None:
            held = self._held[sequence] = [0, 0, 0, 0]
        index = _KINDS[kind]
        held[index] += change
        if held[index] < 0:
            raise InvariantError(f"{holder} releases more blocks than it holds")
        receiving, own, pinned, before = held
        held[3] = size = receiving + (own if own > pinned else pinned)  # both hold the same blocks
        if not size:
            del self._held[sequence]
        self.num_free += before - size
