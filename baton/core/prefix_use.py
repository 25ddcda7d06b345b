"""One sequence and the prefix cache of its worker: what it takes from it, what it leaves there."""

from __future__ import annotations

from baton.core.blocks import Holder
from baton.core.errors import InvariantError
from baton.core.prefix_cache import PrefixCache
from baton.core.prefix_keys import KeyChain
from baton.core.sequence import Sequence


class PrefixUse:
    """Complete state: the keys of the sequence's full blocks, how many of its positions came out of the cache
    when it was last given blocks (`cached`), and how many of its blocks have been offered to it."""

    __slots__ = ("_cache", "_chain", "_offered", "_sequence", "_take", "cached")

    def __init__(self, cache: PrefixCache, sequence: Sequence, *, take: bool = True) -> None:
        """Without `take` nothing is taken out of the cache, only left there."""
        self._cache, self._sequence = cache, sequence
        request = sequence.request
        self._chain = KeyChain(cache.model_digest, request.tenant, request.cache_salt, cache.block_size)
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

    def take(self, shared: Holder) -> None:
        """Gives the sequence, which has no blocks, those found, held by `shared` too. Their positions count as
        computed."""
        found, sequence = self.find(), self._sequence
        self._cache.blocks.hold(found, shared)
        sequence.block_ids = found
        self._offered = len(found)
        sequence.num_computed = self.cached = len(found) * self._cache.block_size

    def claim(self, num_blocks: int, shared: Holder, own: Holder, *, leave: int = 0) -> bool:
        """Gives the sequence `num_blocks` blocks: those found, as `take` does, and free ones for `own`. Takes none and
        returns False when fewer than `leave` would stay free."""
        found, blocks, sequence = self.find(), self._cache.blocks, self._sequence
        needed = num_blocks - len(found)
        if needed + leave > blocks.num_free_besides(found):
            return False
        self.take(shared)
        new = blocks.allocate(needed, own)
        if new is None:
            raise InvariantError(f"{needed} blocks were free for {sequence.id} and are not: {blocks!r}")
        sequence.block_ids += new
        return True

    def store(self) -> None:
        """Offers the blocks that have become full to the cache."""
        if not self._cache.enabled:
            return
        sequence = self._sequence
        # Draft tokens behind the token that ended it may count as computed.
        keys = self._chain.grow(sequence.tokens, min(sequence.num_computed, sequence.num_tokens))
        self._cache.store(keys[self._offered :], sequence.block_ids[self._offered : len(keys)])
        self._offered = len(keys)
