"""The blocks of the sequences of a decode worker, as its scheduler allocates and releases them. Pure.

While KV arrives, a sequence holds the blocks that it is written into exclusively until they are full, and shares those
of its cached prefix. Later it holds all its blocks alike, as shared ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.blocks import Holder
from baton.core.errors import InvariantError
from baton.core.kv_layout import KVLayout
from baton.core.prefix_cache import PrefixCache
from baton.core.sequence import Sequence, State
from baton.core.window import Window


class HeldBlocks:
    def __init__(self, layout: KVLayout, cache: PrefixCache, window: Window) -> None:
        self._layout, self._cache, self._window = layout, cache, window
        self._blocks = cache.blocks

    def kv_arrived(self, sequence: Sequence, num_tokens: int) -> None:
        """Records that KV of the first `num_tokens` positions has arrived. Full blocks are not written any more: they
        become shared and are cached. Doing this only at the end of a long sequence would delay its first step."""
        if num_tokens < sequence.num_tokens:
            num_tokens -= num_tokens % self._layout.block_size
        if own := self._incoming(sequence, self._window.columns(num_tokens)):
            self._blocks.convert(own, Holder("receiving", sequence.id), sequence.holder)
            sequence.num_computed = num_tokens
            self._cache.store_full_blocks(sequence)

    def needed(self, sequence: Sequence, end: int) -> int:
        """Returns how many blocks a sequence lacks for positions [0, end); below 0 if it has more."""
        return self._layout.blocks_for(end) - len(sequence.block_ids)

    def extend(self, sequence: Sequence, count: int) -> None:
        """Allocates `count` further blocks, which are free."""
        if count > 0:
            sequence.block_ids += self._blocks.allocate(count, sequence.holder) or ()

    def extend_for_drafts(self, sequence: Sequence, count: int) -> int:
        """Allocates free blocks for `count` positions after the last token; returns how many of them have blocks."""
        groups = self._window.groups
        free = self._blocks.num_free // groups * groups
        self.extend(sequence, min(self.needed(sequence, sequence.num_tokens + count), free))
        return min(count, self._layout.positions_in(len(sequence.block_ids)) - sequence.num_tokens)

    def release(self, sequence: Sequence) -> None:
        """Releases all blocks of a sequence. Full ones stay cached until they are evicted."""
        if sequence.state is State.RECEIVING:
            own = self._incoming(sequence)
            self._blocks.release(own, Holder("receiving", sequence.id))
            held = self._cache.held(sequence)
            shared = held[: len(held) - len(own)]
        else:
            self._cache.store_full_blocks(sequence)
            shared = self._cache.held(sequence) + sequence.retired
        self._blocks.release(shared, sequence.holder)
        sequence.block_ids, sequence.num_computed = (), 0
        sequence.num_dropped, sequence.retired = 0, ()

    def _incoming(self, sequence: Sequence, columns: int | None = None) -> tuple[int, ...]:
        """Returns the blocks of a receiving sequence into which KV is still to be written, in the first `columns`."""
        first, groups = sequence.num_computed // self._layout.block_size, self._window.groups
        incoming = sequence.block_ids[first * groups : columns and columns * groups]
        return self._cache.without_null(incoming) if sequence.num_dropped else incoming

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises InvariantError if a block is not held by exactly the sequence that owns it."""
        held: set[tuple[int, Holder]] = set()
        for sequence in sequences:
            own = self._incoming(sequence) if sequence.state is State.RECEIVING else ()
            blocks = self._cache.held(sequence) + sequence.retired
            held |= {(b, Holder("receiving" if b in own else "sequence", sequence.id)) for b in blocks}
            behind = self._window.of_sliding(sequence.block_ids[: sequence.num_dropped * self._window.groups])
            if set(behind) - {self._cache.null_block}:
                raise InvariantError(f"{sequence.id} has blocks in its table that it has given back")
            if sequence.finished or sequence.num_computed > self._layout.positions_in(len(sequence.block_ids)):
                raise InvariantError(f"{sequence.id} is {sequence.state.value} with {len(sequence.block_ids)} blocks")
        self._blocks.check_held(held)
