"""KV blocks kept after use because a later request may begin with the same tokens.

A full block is stored under its key (baton.core.blocks) while its sequence still runs; from then on the cache is
one of its holders, and the block is never written again. A request that begins with the same tokens holds the same
blocks. When its other holders have released a block it is idle: it counts as free and is evicted on demand, longest
idle first. The cache therefore uses only memory that is otherwise free, and has no size to configure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from baton.core.blocks import HINT_BYTES, BlockTable, Holder, KeyChain
from baton.core.errors import InvariantError
from baton.core.events import KVCacheEvents
from baton.core.request import SequenceId
from baton.core.sequence import Sequence
from baton.core.window import Window

CACHE = Holder("cache", SequenceId(""))
MAX_EVENTS = 4096  # hints in one message


class KeptBlocks(NamedTuple):
    """What a worker that changes its role keeps of its KV: the cached blocks, and the number of its next step, as the
    other ranks order packing and unpacking by steps."""

    cache: PrefixCache
    next_step: int


class PrefixCache:
    """With `enabled` false, sequences neither reuse nor store blocks. With a `window`, what is reused of a prefix is
    what its next token attends to: the null block takes the place of blocks before that."""

    def __init__(
        self,
        blocks: BlockTable,
        block_size: int,
        model_digest: str = "",
        *,
        enabled: bool = True,
        window: Window | None = None,
    ) -> None:
        self.blocks, self.block_size, self.model_digest = blocks, block_size, model_digest
        self.enabled = enabled
        self.window = window or Window(0, block_size)
        self.null_block = blocks.num_blocks
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        # For the events: how many stored keys begin with each hint, which hints the subscriber has, which may have
        # changed since, and whether it has to drop all it has.
        self._hints: dict[bytes, int] = {}
        self._reported: set[bytes] = set()
        self._changed: dict[bytes, None] = {}
        self._cleared = False
        self.evictions = 0
        self.blocks_given_back = 0
        blocks.on_evict = self._forget

    def __repr__(self) -> str:
        return f"<PrefixCache {len(self)} blocks, {self.evictions} evicted>"

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: list[bytes], first: int = 0) -> tuple[int, ...]:
        """Returns the blocks of `keys` from the one at `first` on, in order, as far as they are stored. Hold them
        before any allocation."""
        blocks: list[int] = []
        for index in range(first, len(keys)):
            block = self._block_of.get(keys[index])
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def _match_window(self, keys: list[bytes]) -> tuple[int, ...]:
        """Returns the table of the longest prefix of which the blocks within the window of its end are stored."""
        end = len(keys) if self._block_of else 0
        for index in range(end - 1, -1, -1):
            if keys[index] not in self._block_of:
                end = index
            elif index <= (first := self.window.num_behind(end * self.block_size)):
                return (self.null_block,) * first + self.match(keys[:end], first)
        return ()

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

    def drop_blocks_of(self, sequence: Sequence) -> None:
        """Removes the blocks of a sequence from the cache, also those that it has given back."""
        self.drop(sequence.held_blocks)
        if sequence.num_dropped:
            keys = self._keys(sequence, sequence.num_dropped * self.block_size)
            self.drop([block for key in keys if (block := self._block_of.get(key)) is not None])

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

    def matching(self, sequence: Sequence, start: int = 0) -> tuple[int, ...]:
        """Returns the cached blocks that hold the first tokens of a sequence; with `start` those from that position
        on, behind the null block. Its last token is never included: that token is computed (or sent) again in any
        case, and needs a block that is not shared."""
        dropped = start // self.block_size
        if not self.enabled or not sequence.reuses_prefix:
            return (self.null_block,) * dropped
        keys = self._keys(sequence, sequence.num_tokens - 1)
        if self.window.size and not start:
            return self._match_window(keys)
        return (self.null_block,) * dropped + self.match(keys, dropped)

    def num_matching_tokens(self, sequence: Sequence) -> int:
        """Returns how many positions `matching` covers now."""
        return len(self.matching(sequence)) * self.block_size

    def reuse(self, sequence: Sequence, shared: Holder, start: int = 0) -> None:
        """Assigns the blocks of `matching` to the sequence, which has none, with `shared` as a further holder. Their
        positions, and those before `start`, count as computed."""
        sequence.block_ids = blocks = self.matching(sequence, start)
        sequence.num_dropped = blocks.count(self.null_block)
        self.blocks.hold(sequence.held_blocks, shared)
        sequence.num_computed = sequence.prefix_tokens = max(start, len(blocks) * self.block_size)
        sequence.num_offered = -(-sequence.num_computed // self.block_size)

    def allocate(
        self,
        sequence: Sequence,
        num_blocks: int,
        shared: Holder,
        own: Holder,
        *,
        leave: int = 0,
        start: int = 0,
        max_blocks: int | None = None,
    ) -> bool:
        """Assigns a table of `num_blocks` blocks to the sequence: those of `matching`, as `reuse` does, and free ones
        held by `own`. With `max_blocks` the table is shorter: it has at most so many blocks that no other sequence uses
        now. Assigns none and returns False if fewer than `leave` blocks would stay free."""
        cached = self.matching(sequence, start)
        needed, free = num_blocks - len(cached), self.blocks.num_free_besides(cached)
        if max_blocks is not None:
            idle = self.blocks.num_free - free
            unshared = idle + cached.count(self.null_block) == len(cached)
            needed = min(needed, max_blocks - idle if unshared else max_blocks)
        if needed + leave > free:
            return False
        self.reuse(sequence, shared, start)
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

    def give_back(self, sequence: Sequence, holder: Holder) -> None:
        """Releases the blocks that are behind the window of its next token; those that an outstanding step has in its
        table only when it is called after that step. Full ones stay cached until they are evicted."""
        self.blocks.release(sequence.retired, holder)
        sequence.retired = ()
        dropped, behind = sequence.num_dropped, self.window.num_behind(sequence.num_computed)
        if behind <= dropped:
            return
        if not sequence.kv_suspect:
            self.store_full_blocks(sequence)
        sequence.retired = sequence.block_ids[dropped:behind]
        sequence.block_ids = (self.null_block,) * behind + sequence.block_ids[behind:]
        sequence.num_dropped = behind
        self.blocks_given_back += behind - dropped
        if sequence.step_id is None:
            self.blocks.release(sequence.retired, holder)
            sequence.retired = ()

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
