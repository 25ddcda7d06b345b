"""Which blocks the sequences of a decode worker hold, and how: pure.

While KV arrives a sequence holds the blocks it goes into exclusively until they are full, and those that it shares
(what it begins with was cached) as everybody does. Later all its blocks are held alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.core.blocks import BlockTable, Holder
from baton.core.errors import InvariantError
from baton.core.kv_layout import KVLayout
from baton.core.prefix_cache import PrefixCache
from baton.core.sequence import State
from decode.entry import Entry


class Holdings:
    """Complete state: `blocks` and their `cache`. A sequence's own blocks are in its `block_ids`."""

    def __init__(self, layout: KVLayout, num_blocks: int, model_digest: str, prefix_cache: bool) -> None:
        self.layout = layout
        self.blocks = BlockTable(num_blocks)
        self.cache = PrefixCache(self.blocks, layout.block_size, model_digest, enabled=prefix_cache)

    def reserve(self, entry: Entry, leave: int) -> bool:
        """Gives a sequence the blocks of the KV that is to come. False when fewer than `leave` would stay free."""
        sequence = entry.sequence
        needed = self.layout.blocks_for(sequence.num_tokens)
        return entry.prefix.claim(
            needed, Holder("sequence", sequence.id), Holder("receiving", sequence.id), leave=leave
        )

    def landed(self, entry: Entry, num_tokens: int) -> None:
        """KV of the first `num_tokens` positions is there. The blocks that are full with it are written no more: they
        are held, and found by others, like any. All at the end of a long sequence would hold up its first step."""
        sequence = entry.sequence
        size, own = self.layout.block_size, self._own(entry)
        if num_tokens < sequence.num_tokens:
            num_tokens -= num_tokens % size
            own = own[: max(num_tokens - sequence.num_computed, 0) // size]
        if own:
            self.blocks.convert(own, Holder("receiving", sequence.id), Holder("sequence", sequence.id))
            sequence.num_computed = num_tokens
            entry.prefix.store()

    def extend(self, entry: Entry, count: int) -> None:
        if count > 0:
            sequence = entry.sequence
            sequence.block_ids += self.blocks.allocate(count, Holder("sequence", sequence.id)) or ()

    def take_cached(self, entry: Entry) -> None:
        """Gives a preempted sequence those of its blocks back that are cached still."""
        entry.prefix.take(Holder("sequence", entry.sequence.id))

    def num_free_without(self, entries: Sequence[Entry]) -> int:
        """Blocks that would be free if these sequences gave theirs up."""
        holders = {Holder("sequence", e.sequence.id) for e in entries}
        return self.blocks.num_free_without(holders, (b for e in entries for b in e.sequence.block_ids))

    def give_up(self, entry: Entry) -> None:
        """Takes all blocks from a sequence. What is complete in them stays cached while nobody needs the room."""
        sequence = entry.sequence
        if sequence.state is State.RECEIVING:
            own = self._own(entry)
            self.blocks.release(own, Holder("receiving", sequence.id))
            shared = sequence.block_ids[: len(sequence.block_ids) - len(own)]
        else:
            entry.prefix.store()
            shared = sequence.block_ids
        self.blocks.release(shared, Holder("sequence", sequence.id))
        sequence.block_ids, sequence.num_computed = (), 0

    def _own(self, entry: Entry) -> tuple[int, ...]:
        """The blocks of a receiving sequence that KV is to come into."""
        return entry.sequence.block_ids[entry.sequence.num_computed // self.layout.block_size :]

    def check(self, entries: Iterable[Entry]) -> None:
        """Raises InvariantError when a block is not held by exactly the sequences that have it, as they should."""
        self.blocks.check()
        self.cache.check()
        held: set[tuple[int, Holder]] = set()
        for entry in entries:
            sequence = entry.sequence
            own = self._own(entry) if sequence.state is State.RECEIVING else ()
            held |= {(b, Holder("receiving" if b in own else "sequence", sequence.id)) for b in sequence.block_ids}
            if sequence.finished or sequence.num_computed > len(sequence.block_ids) * self.layout.block_size:
                raise InvariantError(f"{sequence.id} is {sequence.state.value} with {len(sequence.block_ids)} blocks")
        self.blocks.check_held(held)
