"""One sequence and the prefix cache of its worker: what it takes from it, what it leaves there."""

from __future__ import annotations

from baton.core.blocks import Holder
from baton.core.errors import InvariantError
from baton.core.prefix_cache import PrefixCache
from baton.core.prefix_keys import KeyChain
from baton.core.sequence import Sequence


class PrefixUse:
    """Complete state: the keys of the sequence's full blocks, how many of its positions came out of the cache
    (`cached`), and how many of its blocks have been offered to it."""

    __slots__ = ("_cache", "_chain", "_offered", "_sequence", "_take", "cached")

    def __init__(self, cache: PrefixCache, sequence: Sequence, *, take: bool = True) -> None:
        """Without `take` nothing is taken out of the cache, only left there."""
        self._cache, self._sequence = cache, sequence
        self._chain = KeyChain(cache.model_digest, sequence.request.cache_salt, cache.block_size)
        self._take = take and cache.enabled
        self._offered = 0
        self.cached = 0

    def find(self) -> tuple[int, ...]:
        """Cached blocks that hold what the sequence begins with. Its last token is never among it: that is computed
        (or sent) again in any case, and so goes into a block that nobody shares."""
        if not self._take:
            return ()
        sequence = self._sequence
        return self._cache.match(self._chain.grow(sequence.tokens, sequence.num_tokens - 1))

    @property
    def num_findable(self) -> int:
        """Positions that `find` would cover now."""
        return len(self.find()) * self._cache.block_size

    def claim(self, num_blocks: int, shared: Holder, own: Holder) -> bool:
        """Gives the sequence `num_blocks` blocks: those found, held by `shared` too, and free ones for `own`. The
        positions in the former count as computed. Takes none and returns False when too few are free."""
        found, sequence = self.find(), self._sequence
        needed = num_blocks - len(found)
        if needed > self._cache.blocks.num_free_besides(found):
            return False
        self._cache.blocks.hold(found, shared)
        new = self._cache.blocks.allocate(needed, own)
        if new is None:
            raise InvariantError(f"{needed} blocks were free for {sequence.id} and are not: {self._cache.blocks!r}")
        sequence.block_ids = found + new
        self._offered = len(found)
        sequence.num_computed = self.cached = len(found) * self._cache.block_size
        return True

    def store(self) -> None:
        """Offers the blocks that have become full to the cache."""
        if not self._cache.enabled:
            return
        sequence = self._sequence
        keys = self._chain.grow(sequence.tokens, sequence.num_computed)
        self._cache.store(keys[self._offered :], sequence.block_ids[self._offered : len(keys)])
        self._offered = len(keys)
