"""KV blocks kept after use because a later request may begin with the same tokens.

A full block is stored under its key (baton.core.prefix_keys) while its sequence still runs; from then on the cache is
one of its holders, and the block is never written again. A request that begins with the same tokens holds the same
blocks. When its other holders have released a block it is idle: it counts as free and is evicted on demand, longest
idle first. The cache therefore uses only memory that is otherwise free, and has no size to configure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from baton.core.blocks import BlockTable, Holder
from baton.core.errors import InvariantError
from baton.core.events import KVCacheEvents
from baton.core.prefix_keys import HINT_BYTES, KeyChain
from baton.core.request import SequenceId
from baton.core.sequence import Sequence

CACHE = Holder("cache", SequenceId(""))
MAX_EVENTS = 4096  # hints in one message


class KeptBlocks(NamedTuple):
    """What a worker that changes its role keeps of its KV: the cached blocks, and the number of its next step, as the
    other ranks order packing and unpacking by steps."""

    cache: PrefixCache
    next_step: int


class PrefixCache:
    """With `enabled` false, sequences neither reuse nor store blocks."""

    def __init__(self, blocks: BlockTable, block_size: int, model_digest: str = "", *, enabled: bool = True) -> None:
        self.blocks, self.block_size, self.model_digest = blocks, block_size, model_digest
        self.enabled = enabled
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        # For the events: how many stored keys begin with each hint, which hints the subscriber has, which may have
        # changed since, and whether it has to drop all it has.
        self._hints: dict[bytes, int] = {}
        self._reported: set[bytes] = set()
        self._changed: dict[bytes, None] = {}
        self._cleared = False
        self.evictions = 0
        blocks.on_evict = self._forget

    def __repr__(self) -> str:
        return f"<PrefixCache {len(self)} blocks, {self.evictions} evicted>"

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: Iterable[bytes]) -> tuple[int, ...]:
        """Returns the blocks of the longest stored prefix, in order. Hold them before any allocation."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def store(self, keys: list[bytes], block_ids: tuple[int, ...]) -> None:
        """Stores blocks whose KV is complete: `block_ids[i]` holds the tokens that `keys[i]` identifies. A key that is
        stored already keeps its present block."""
        new: dict[bytes, int] = {}
        for key, block in zip(keys, block_ids, strict=True):
            if key not in self._block_of:
                new.setdefault(key, block)
        self.blocks.hold(new.values(), CACHE)
        for key, block in new.items():
            self._block_of[key] = block
            self._key_of[block] = key
            self._count(key, 1)

    def drop(self, block_ids: Iterable[int]) -> None:
        """Removes these blocks from the cache: their content may be invalid."""
        for block in block_ids:
            if block in self._key_of:
                self.blocks.release((block,), CACHE)
                self._forget(block)

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block)
        del self._block_of[key]
        self.evictions += 1
        self._count(key, -1)

    def _count(self, key: bytes, change: int) -> None:
        hint = key[:HINT_BYTES]
        self._hints[hint] = self._hints.get(hint, 0) + change
        if not self._hints[hint]:
            del self._hints[hint]
        self._changed[hint] = None

    def restart_events(self) -> None:
        """Resets the events for a new subscriber, which has no hints yet."""
        self._reported.clear()
        self._changed = dict.fromkeys(self._hints)
        self._cleared = True

    def take_events(self) -> KVCacheEvents | None:
        """Returns the hints that became or stopped being reusable since the last call, at most MAX_EVENTS: the next
        call returns the rest. None when there is nothing to report."""
        stored: list[bytes] = []
        evicted: list[bytes] = []
        while self._changed and len(stored) + len(evicted) < MAX_EVENTS:
            hint = next(iter(self._changed))
            del self._changed[hint]
            if hint in self._hints and hint not in self._reported:
                self._reported.add(hint)
                stored.append(hint)
            elif hint not in self._hints and hint in self._reported:
                self._reported.remove(hint)
                evicted.append(hint)
        cleared, self._cleared = self._cleared, False
        return KVCacheEvents(tuple(stored), tuple(evicted), cleared) if stored or evicted or cleared else None

    # What sequences reuse and store.

    def matching(self, sequence: Sequence) -> tuple[int, ...]:
        """Returns the cached blocks that hold the first tokens of a sequence. Its last token is never included: that
        token is computed (or sent) again in any case, and needs a block that is not shared."""
        if not self.enabled or not sequence.reuses_prefix:
            return ()
        return self.match(self._keys(sequence, sequence.num_tokens - 1))

    def num_matching_tokens(self, sequence: Sequence) -> int:
        """Returns how many positions `matching` covers now."""
        return len(self.matching(sequence)) * self.block_size

    def reuse(self, sequence: Sequence, shared: Holder) -> None:
        """Assigns the blocks of `matching` to the sequence, which has none, with `shared` as a further holder. Their
        positions count as computed."""
        blocks = self.matching(sequence)
        self.blocks.hold(blocks, shared)
        sequence.block_ids = blocks
        sequence.num_offered = len(blocks)
        sequence.num_computed = sequence.prefix_tokens = len(blocks) * self.block_size

    def allocate(self, sequence: Sequence, num_blocks: int, shared: Holder, own: Holder, *, leave: int = 0) -> bool:
        """Assigns `num_blocks` blocks to the sequence: those of `matching`, as `reuse` does, and free ones held by
        `own`. Assigns none and returns False if fewer than `leave` blocks would stay free."""
        cached = self.matching(sequence)
        needed = num_blocks - len(cached)
        if needed + leave > self.blocks.num_free_besides(cached):
            return False
        self.reuse(sequence, shared)
        new = self.blocks.allocate(needed, own)
        if new is None:
            raise InvariantError(f"{needed} blocks for {sequence.id} could not be allocated: {self.blocks!r}")
        sequence.block_ids += new
        return True

    def store_full_blocks(self, sequence: Sequence) -> None:
        """Stores the blocks of a sequence that have become full."""
        if not self.enabled:
            return
        # Draft tokens after the token that ended the sequence may count as computed.
        keys = self._keys(sequence, min(sequence.num_computed, sequence.num_tokens))
        self.store(keys[sequence.num_offered :], sequence.block_ids[sequence.num_offered : len(keys)])
        sequence.num_offered = len(keys)

    def _keys(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        chain = sequence.block_keys
        if chain is None:
            request = sequence.request
            chain = KeyChain(self.model_digest, request.tenant, request.cache_salt, request.adapter, self.block_size)
            sequence.block_keys = chain
        return chain.grow(sequence.tokens, num_tokens)

    def check_idle(self) -> None:
        """Checks, in constant time, the cache of a pool that no sequence uses: its blocks are the idle ones.

        Raises:
            InvariantError: their numbers differ.
        """
        if not self.blocks.num_idle == len(self._key_of) == len(self._block_of):
            stored = f"{len(self._key_of)} blocks with a key, {len(self._block_of)} keys"
            raise InvariantError(f"prefix cache: {self.blocks.num_idle} idle blocks, but {stored}")

    def check(self) -> None:
        """Checks the invariants, including those shared with the block table.

        Raises:
            InvariantError: a stored block is not held by the cache, a block that the cache holds is not stored, keys
                and blocks do not map to each other, or the hints are not those of the keys.
        """
        if self._key_of != {block: key for key, block in self._block_of.items()}:
            raise InvariantError("prefix cache: keys and blocks do not map to each other")
        if set(self.blocks.held_by(CACHE)) != set(self._key_of):
            raise InvariantError(
                f"prefix cache: holds {self.blocks.held_by(CACHE)}, but has keys for {sorted(self._key_of)}"
            )
        hints = [key[:HINT_BYTES] for key in self._block_of]
        if sum(self._hints.values()) != len(hints) or set(hints) != set(self._hints):
            raise InvariantError("prefix cache: hints do not match its keys")
